//! `pause`, `resume`, `sweep`, `ack-gap`: orders to the leader, through the database, so that they
//! work from any machine and hold across restarts and instances.

use std::process::ExitCode;
use std::time::Duration;

use outbox_ledger::connect::Db;
use outbox_ledger::{gap, lease, pause as pauses, signal};
use tokio::time::Instant;

use super::{output, yes_or_no};
use crate::config::Config;

/// How long to wait for the leader's answer, beyond two of its lease times.
const PATIENCE: Duration = Duration::from_secs(15);

/// Stops publishing, for a table or for all; kept across restarts.
pub async fn pause(config: &Config, db: &Db, table: Option<&str>) -> anyhow::Result<ExitCode> {
    let table = table.map(|t| full_name(config, t)).transpose()?;
    let what = table.clone().unwrap_or_else(|| "every table".to_owned());
    let Some(leader) = leader(config, db).await? else {
        pauses::set(db, &config.name, table.as_deref()).await?;
        output::line(format!(
            "{what} is paused; no instance leads now, the next one will obey"
        ));
        return Ok(ExitCode::SUCCESS);
    };
    match order(config, db, "pause", &table_data(table.as_deref())).await? {
        Some(answer) => output::line(format!("{what}: {leader} {answer}")),
        None => {
            // Stored all the same: whoever leads next obeys.
            pauses::set(db, &config.name, table.as_deref()).await?;
            output::line(format!(
                "{what} is paused, but {leader} has not answered in time"
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Goes on publishing.
pub async fn resume(config: &Config, db: &Db, table: Option<&str>) -> anyhow::Result<ExitCode> {
    let table = table.map(|t| full_name(config, t)).transpose()?;
    let cleared = pauses::clear(db, &config.name, table.as_deref()).await?;
    if leader(config, db).await?.is_some() {
        order(config, db, "resume", &table_data(table.as_deref())).await?;
    }
    output::line(if cleared > 0 {
        "resumed"
    } else {
        "nothing was paused"
    });
    Ok(ExitCode::SUCCESS)
}

/// Publishes every due pending row now.
pub async fn sweep(config: &Config, db: &Db) -> anyhow::Result<ExitCode> {
    let Some(leader) = leader(config, db).await? else {
        output::line("no instance leads, so nobody can sweep now; a starting one looks by itself");
        return Ok(yes_or_no(false));
    };
    match order(config, db, "sweep", "{}").await? {
        Some(answer) => output::line(format!("{leader} {answer}")),
        None => output::line(format!("{leader} has been told and has not answered yet")),
    }
    Ok(ExitCode::SUCCESS)
}

/// Acknowledges recorded gaps.
pub async fn ack_gap(config: &Config, db: &Db) -> anyhow::Result<ExitCode> {
    let acknowledged = gap::acknowledge(db, &config.name).await?;
    output::line(format!("{acknowledged} gaps acknowledged"));
    Ok(yes_or_no(acknowledged > 0))
}

/// The instance that leads.
pub async fn leader(config: &Config, db: &Db) -> anyhow::Result<Option<String>> {
    Ok(lease::state(db, &config.name).await?.and_then(|s| s.leader))
}

/// Sends a signal and waits for its answer; `None` where none came in time.
async fn order(config: &Config, db: &Db, kind: &str, data: &str) -> anyhow::Result<Option<String>> {
    let id = signal::send(db, &config.name, kind, Some(data)).await?;
    let deadline = Instant::now() + config.lease_ttl * 2 + PATIENCE;
    loop {
        if let Some(answer) = signal::answer(db, id).await? {
            return Ok(Some(answer));
        }
        if Instant::now() > deadline {
            return Ok(None);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn table_data(table: Option<&str>) -> String {
    match table {
        Some(table) => serde_json::json!({ "table": table }).to_string(),
        None => "{}".to_owned(),
    }
}

/// `schema.table` of a configured outbox, from either form of its name.
pub fn full_name(config: &Config, table: &str) -> anyhow::Result<String> {
    let known = || config.outbox.iter().map(|t| t.full_name());
    let found = known()
        .find(|full| full == table || full.rsplit_once('.').is_some_and(|(_, t)| t == table));
    found.ok_or_else(|| {
        anyhow::anyhow!(
            "no outbox is named {table}; configured: {}",
            known().collect::<Vec<_>>().join(", ")
        )
    })
}
