//! What is wrong, in words, each with its entry of the runbook.

use outbox_ledger::admin::StatusOverview;
use serde::Serialize;

use crate::health::{Health, Role};
use crate::run::Daemon;

/// Due rows that wait longer than this are worth a word.
const OLD_SECONDS: u64 = 300;

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Trouble {
    /// A fixed name, for programs.
    code: &'static str,
    /// `error`: rows do not flow as promised. `warning`: a person should look.
    severity: &'static str,
    /// In words, without secrets.
    text: String,
    /// Where the runbook says what to do, relative to the console.
    runbook: String,
}

/// Each code with its severity and its heading in `docs/operations.md`, as an anchor.
const KNOWN: [(&str, &str, &str); 15] = [
    ("starting", "warning", "starting"),
    ("halted", "error", "halted"),
    ("mysql", "error", "mysql-is-away"),
    ("rabbitmq", "error", "rabbitmq-is-away"),
    ("rabbitmq_blocked", "error", "rabbitmq-is-blocked"),
    ("tail", "error", "the-tail-does-not-run"),
    ("broken_table", "error", "a-table-cannot-be-used"),
    ("gap", "error", "the-binlog-position-is-lost"),
    ("paused", "warning", "publishing-is-paused"),
    ("no_leader", "error", "nobody-leads"),
    ("failed_rows", "warning", "rows-have-failed"),
    ("stuck_rows", "warning", "rows-are-stuck"),
    ("old_rows", "warning", "rows-wait-too-long"),
    ("sweep", "warning", "a-sweep-is-due"),
    ("stored_state", "error", "mysql-is-away"),
];

fn trouble(code: &'static str, text: impl Into<String>) -> Trouble {
    let known = KNOWN.iter().find(|(known, ..)| *known == code);
    let (_, severity, anchor) = *known.unwrap_or(&KNOWN[0]);
    Trouble {
        code,
        severity,
        text: text.into(),
        runbook: format!("runbook#{anchor}"),
    }
}

/// What this instance knows by itself, and what the stored state shows, where it was read.
pub(super) fn all(daemon: &Daemon, overview: Option<&StatusOverview>) -> Vec<Trouble> {
    let mut troubles = own(&daemon.health.get(), overview);
    if let Some(overview) = overview {
        troubles.extend(stored(overview));
    }
    if let Some(control) = daemon.control.get() {
        let stuck: u64 = control.poller.stuck().into_iter().sum();
        if stuck > 0 {
            troubles.push(trouble(
                "stuck_rows",
                format!("{stuck} rows have been in processing for longer than stuck.warn_after"),
            ));
        }
    }
    troubles
}

fn own(h: &Health, overview: Option<&StatusOverview>) -> Vec<Trouble> {
    let mut troubles = Vec::new();
    let mut say = |code, text: String| troubles.push(trouble(code, text));
    match h.role {
        Role::Halted => say(
            "halted",
            format!(
                "halted, an operator must act: {} {}",
                h.tail.detail, h.mysql.detail
            )
            .trim()
            .to_owned(),
        ),
        Role::Starting => say(
            "starting",
            "not yet ready: no role has been taken".to_owned(),
        ),
        Role::Standby | Role::Leader | Role::Stopping => {}
    }
    if !h.mysql.ok && h.role != Role::Halted && !h.mysql.detail.is_empty() {
        say("mysql", format!("MySQL: {}", h.mysql.detail));
    }
    if h.role == Role::Leader {
        if !h.rabbitmq.ok {
            let blocked = h.rabbitmq.detail.starts_with("blocked");
            let code = if blocked {
                "rabbitmq_blocked"
            } else {
                "rabbitmq"
            };
            say(code, format!("RabbitMQ: {}", h.rabbitmq.detail));
        }
        // The tail waits for the broker: that is one trouble, not two.
        if !h.tail.ok && !h.tail.detail.starts_with("broker ") {
            say("tail", format!("tail: {}", h.tail.detail));
        }
    }
    for table in &h.broken_tables {
        say("broken_table", format!("a table is left out: {table}"));
    }
    let gaps = overview.map_or(h.gaps, |o| o.gaps.len() as u64);
    if gaps > 0 {
        let text = format!("{gaps} gaps in the binlog are not acknowledged (`outboxd ack-gap`)");
        say("gap", text);
    }
    if overview.map_or(h.paused, |o| o.paused) {
        say(
            "paused",
            "publishing is paused (`outboxd resume`)".to_owned(),
        );
    }
    troubles
}

fn stored(o: &StatusOverview) -> Vec<Trouble> {
    let mut troubles = Vec::new();
    if o.leader.is_none() {
        troubles.push(trouble(
            "no_leader",
            "no instance leads: nothing is published",
        ));
    }
    if !o.paused_tables.is_empty() {
        let tables = o.paused_tables.join(", ");
        troubles.push(trouble("paused", format!("paused: {tables}")));
    }
    if o.sweep_due {
        let text = "rows from before the stored position are still to be swept";
        troubles.push(trouble("sweep", text));
    }
    for t in o.backlog.iter().filter(|t| t.failed > 0) {
        let text = format!("{} failed rows in {} wait for a person", t.failed, t.table);
        troubles.push(trouble("failed_rows", text));
    }
    let paused = |table: &String| o.paused || o.paused_tables.contains(table);
    for t in o.backlog.iter().filter(|t| !paused(&t.table)) {
        let age = t.oldest_pending_seconds.unwrap_or(0);
        if age > OLD_SECONDS {
            let text = format!("the oldest due row of {} waits for {age} s", t.table);
            troubles.push(trouble("old_rows", text));
        }
    }
    troubles
}

/// The stored state could not be read.
pub(super) fn unread(why: &str) -> Trouble {
    trouble(
        "stored_state",
        format!("the stored state cannot be read: {why}"),
    )
}

/// The words alone.
pub(super) fn words(troubles: &[Trouble]) -> Vec<&str> {
    troubles.iter().map(|t| t.text.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::page::anchors;
    use super::*;
    use crate::health::Part;

    #[test]
    fn every_trouble_has_its_entry_in_the_runbook() {
        let anchors = anchors();
        for (code, _, anchor) in KNOWN {
            assert!(anchors.iter().any(|a| a == anchor), "{code}: #{anchor}");
        }
    }

    #[test]
    fn each_part_that_is_down_is_named_once() {
        let codes = |h: &Health| own(h, None).iter().map(|t| t.code).collect::<Vec<_>>();
        let up = Health {
            role: Role::Leader,
            mysql: Part::good("connected"),
            rabbitmq: Part::good("up"),
            tail: Part::good("tailing"),
            ..Health::default()
        };
        assert!(codes(&up).is_empty());
        let blocked = Health {
            rabbitmq: Part::bad("blocked: low on memory"),
            tail: Part::bad("broker blocked: low on memory"),
            gaps: 2,
            paused: true,
            ..up.clone()
        };
        assert_eq!(codes(&blocked), ["rabbitmq_blocked", "gap", "paused"]);
        let away = Health {
            rabbitmq: Part::bad("down: refused"),
            tail: Part::bad("the position is not there"),
            mysql: Part::bad("gone"),
            ..up
        };
        assert_eq!(codes(&away), ["mysql", "rabbitmq", "tail"]);
        assert_eq!(codes(&Health::default()), ["starting"]);
    }
}
