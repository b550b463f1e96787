//! Gauges that are read from the database now and then: backlog, ages, and how much longer the
//! server keeps the binlog behind the stored position.

use std::sync::Arc;
use std::time::Duration;

use outbox_core::Status;
use outbox_core::ports::{PortResult, chain};
use outbox_ledger::admin::TableStatus;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::{Daemon, servers};
use crate::metrics::float;

/// How often. The counts cost as much as there is unsent.
const INTERVAL: Duration = Duration::from_secs(10);

/// Runs until `stop`; only the leader counts.
pub async fn run(daemon: Arc<Daemon>, stop: CancellationToken) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            _ = ticks.tick() => {}
        }
        if let Some(age) = daemon.meters.checkpoint_age() {
            metrics::gauge!("outboxd_checkpoint_age_seconds").set(age.as_secs_f64());
        }
        let Some(control) = daemon.control.get() else {
            continue;
        };
        if let (Some(kept), Some(relay)) = (control.binlog_kept, &control.relay) {
            let behind = relay.status().lag + daemon.meters.checkpoint_age().unwrap_or_default();
            metrics::gauge!("outboxd_binlog_retention_left_seconds")
                .set(kept.saturating_sub(behind).as_secs_f64());
        }
        for (spec, stuck) in control.tables.iter().zip(control.poller.stuck()) {
            metrics::gauge!("outboxd_stuck_rows", "table" => spec.full_name()).set(float(stuck));
        }
        match backlog(&daemon).await {
            Ok(tables) => tables.iter().for_each(show),
            Err(e) => debug!(error = chain(&e), "the backlog could not be counted"),
        }
    }
}

async fn backlog(daemon: &Daemon) -> PortResult<Vec<TableStatus>> {
    servers::admin(&daemon.config, &daemon.db)
        .await?
        .backlog()
        .await
}

fn show(table: &TableStatus) {
    let counts = [
        (Status::Pending, table.pending),
        (Status::Processing, table.processing),
        (Status::Failed, table.failed),
        (Status::Abandoned, table.abandoned),
    ];
    for (status, rows) in counts {
        metrics::gauge!("outboxd_backlog_rows", "table" => table.table.clone(), "status" => status.name())
            .set(float(rows));
    }
    metrics::gauge!("outboxd_oldest_pending_seconds", "table" => table.table.clone())
        .set(float(table.oldest_pending_seconds.unwrap_or(0)));
}
