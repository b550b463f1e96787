//! Signals by SQL: rows of `outboxd_signal`. Each is carried out once and gets its result; a bad
//! one gets an error as its result and stops nothing.

use outbox_core::TableIdx;
use outbox_core::ports::PortResult;
use outbox_ledger::lease::Epoch;
use outbox_ledger::{pause, signal};
use serde_json::Value;
use tracing::info;

use super::{Control, Daemon, chores, servers};

/// Signals taken in one look.
const AT_ONCE: u32 = 100;
/// Characters of a message that the `log` signal writes.
const LOGGED: usize = 500;

/// Carries out what is undone.
pub async fn obey(daemon: &Daemon, _epoch: &Epoch) -> PortResult<()> {
    for s in signal::undone(&daemon.db, &daemon.config.name, AT_ONCE).await? {
        let result = match carry_out(daemon, &s).await {
            Ok(done) => done,
            Err(e) => format!("error: {e:#}"),
        };
        info!(
            signal = s.id,
            kind = s.kind.escape_debug().to_string(),
            result,
            "signal"
        );
        signal::complete(&daemon.db, s.id, &result).await?;
    }
    Ok(())
}

async fn carry_out(daemon: &Daemon, s: &signal::Signal) -> anyhow::Result<String> {
    let data: Value = match s.data.as_deref().map(str::trim).filter(|d| !d.is_empty()) {
        None => Value::Null,
        Some(text) => {
            serde_json::from_str(text).map_err(|e| anyhow::anyhow!("data is not JSON: {e}"))?
        }
    };
    let control = daemon.control.get();
    let text = |key: &str| data.get(key).and_then(Value::as_str);
    let table = match text("table") {
        Some(name) => Some(crate::cli::full_name(&daemon.config, name)?),
        None => None,
    };
    let (name, db) = (&daemon.config.name, &daemon.db);
    match s.kind.as_str() {
        "pause" => {
            pause::set(db, name, table.as_deref()).await?;
            chores::pauses(daemon).await?;
            Ok("paused".to_owned())
        }
        "resume" => {
            pause::clear(db, name, table.as_deref()).await?;
            chores::pauses(daemon).await?;
            Ok("resumed".to_owned())
        }
        "sweep" => sweep(control, table.as_deref()),
        "retry" | "abandon" => change(daemon, &s.kind, &data, table.as_deref()).await,
        "log" => {
            if let Some(level) = text("level") {
                daemon.level.set(level)?;
                return Ok(format!("log level {level}"));
            }
            let message: String = text("message")
                .unwrap_or_default()
                .chars()
                .take(LOGGED)
                .collect();
            info!(message = %message.escape_debug(), "log signal");
            Ok("logged".to_owned())
        }
        _ => anyhow::bail!("unknown type; known: pause, resume, sweep, retry, abandon, log"),
    }
}

/// Asked for, not waited for: a sweep may take long, and other signals wait behind this one.
fn sweep(control: Option<Control>, table: Option<&str>) -> anyhow::Result<String> {
    let control = control
        .ok_or_else(|| anyhow::anyhow!("this instance is just starting; it sweeps by itself"))?;
    let number = |name: &str| {
        let mut tables = control.tables.iter().zip(0..);
        let found = tables.find(|(t, _)| t.full_name() == name);
        found
            .map(|(_, n)| TableIdx(n))
            .ok_or_else(|| unusable(name))
    };
    control.poller.request_sweep(table.map(number).transpose()?);
    Ok("sweeps now".to_owned())
}

async fn change(
    daemon: &Daemon,
    kind: &str,
    data: &Value,
    table: Option<&str>,
) -> anyhow::Result<String> {
    let ids: Vec<String> = match (data.get("id"), data.get("ids")) {
        (Some(id), None) => vec![plain(id)],
        (None, Some(Value::Array(ids))) => ids.iter().map(plain).collect(),
        _ => anyhow::bail!(
            "data names no rows; write {{\"ids\": [1, 2]}}, and \"table\" where several are configured"
        ),
    };
    let admin = servers::admin(&daemon.config, &daemon.db).await?;
    let number = |name| admin.find(name).ok_or_else(|| unusable(name));
    let table = table.map(number).transpose()?;
    let changed = match kind {
        "retry" => admin.retry(table, &ids).await?,
        _ => admin.abandon(table, &ids).await?,
    };
    Ok(format!("{changed} rows"))
}

fn plain(id: &Value) -> String {
    id.as_str().map_or_else(|| id.to_string(), str::to_owned)
}

fn unusable(table: &str) -> anyhow::Error {
    anyhow::anyhow!("{table} cannot be used now; `outboxd status` says why")
}
