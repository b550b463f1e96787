//! `status`: from the database alone, so that it works without a running daemon.

use std::process::ExitCode;

use outbox_ledger::admin::StatusOverview;
use outbox_ledger::connect::Db;

use super::output;
use crate::config::Config;
use crate::run::servers;

/// Prints the status.
pub async fn run(config: &Config, db: &Db, as_json: bool) -> anyhow::Result<ExitCode> {
    let status = servers::admin(config, db).await?.overview().await?;
    if as_json {
        output::json(&status)?;
    } else {
        print(&status);
    }
    Ok(ExitCode::SUCCESS)
}

fn print(s: &StatusOverview) {
    let none = || "none".to_owned();
    let list = |items: &[String]| {
        if items.is_empty() {
            none()
        } else {
            items.join(", ")
        }
    };
    let fact = |name: &str, value: String| vec![name.to_owned(), value];
    let mut facts = vec![
        fact("name", s.name.clone()),
        fact("leader", s.leader.clone().unwrap_or_else(none)),
        fact("standbys", list(&s.standbys)),
        fact("position", s.position.clone().unwrap_or_else(none)),
    ];
    if let Some(age) = s.position_age_seconds {
        facts.push(fact("stored", format!("{age} s ago")));
    }
    if let Some(n) = s.lag.transactions {
        facts.push(fact(
            "behind",
            format!("{n} transactions (our own write-backs included)"),
        ));
    } else if let Some(n) = s.lag.bytes {
        facts.push(fact(
            "behind",
            format!("{n} bytes of binlog (our own write-backs included)"),
        ));
    }
    let paused = if s.paused {
        "everything".to_owned()
    } else {
        list(&s.paused_tables)
    };
    facts.push(fact("paused", paused));
    output::table(&["", ""], facts);
    let rows = s.backlog.iter().map(|t| {
        let oldest = t
            .oldest_pending_seconds
            .map_or_else(|| "-".to_owned(), |s| format!("{s} s"));
        let counts = [t.pending, t.processing, t.failed, t.abandoned].map(|n| n.to_string());
        [t.table.clone()]
            .into_iter()
            .chain(counts)
            .chain([oldest])
            .collect()
    });
    output::table(
        &[
            "table",
            "pending",
            "processing",
            "failed",
            "abandoned",
            "oldest pending",
        ],
        rows,
    );
    if !s.broken.is_empty() {
        output::line("\ntables that cannot be used and are left out:");
        let rows = s
            .broken
            .iter()
            .map(|b| vec![b.table.clone(), b.error.clone()]);
        output::table(&["table", "reason"], rows);
    }
    if !s.gaps.is_empty() {
        output::line("\ngaps that are not acknowledged (`outboxd ack-gap`):");
        let rows = s.gaps.iter().map(|g| {
            let place = |p: &Option<String>| p.clone().unwrap_or_else(none);
            vec![
                g.found_at.clone(),
                place(&g.from),
                place(&g.to),
                g.reason.clone(),
            ]
        });
        output::table(&["found (UTC)", "from", "to", "reason"], rows);
    }
}
