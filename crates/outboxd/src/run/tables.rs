//! The tables of a session: those that can be used, numbered without the others.

use std::sync::Arc;
use std::time::Duration;

use outbox_core::ports::{Deferral, Observer, Path};
use outbox_core::spec::{TableSpec, Tracking};
use outbox_core::{FailureClass, TableIdx};
use outbox_ledger::table::OutboxTable;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use super::Daemon;
use super::servers::jittered;
use super::session::SessionError;
use crate::metrics::Meters;

/// Pause before tables that cannot be used are tried again.
const BROKEN_AGAIN: Duration = Duration::from_secs(10);

/// Opens every table; what is missing is said once. A table that cannot be used is left out and
/// the others are served, but for tables without status columns: the position must not pass their
/// rows.
pub async fn open(daemon: &Daemon) -> Result<Vec<OutboxTable>, SessionError> {
    let app_id: Arc<str> = daemon.config.name.as_str().into();
    let specs = &daemon.config.outbox;
    let open = async {
        let family = daemon.db.family().await?;
        let mut session = daemon.db.session().await?;
        let opened = OutboxTable::open_all(&mut session, family, specs, &app_id).await?;
        session.finish();
        Ok(opened)
    };
    let (tables, broken) = daemon.db.run("open the outbox tables", open).await?;
    let halting = |spec: &TableSpec| tables.is_empty() || spec.tracking == Tracking::None;
    if let Some((spec, e)) = broken.iter().find(|(spec, _)| halting(spec)) {
        return Err(SessionError::Halt(anyhow::anyhow!(
            "the table {} cannot be used: {e}",
            spec.full_name()
        )));
    }
    for table in tables.iter().filter(|t| !t.absent.is_empty()) {
        info!(
            table = table.spec.full_name(),
            absent = table.absent.join(","),
            "optional columns are not there; `outboxd check` says what degrades"
        );
    }
    let broken: Vec<String> = broken
        .iter()
        .map(|(spec, e)| format!("{}: {e}", spec.full_name()))
        .collect();
    for table in &broken {
        error!(
            table,
            "cannot be used and is left out; the other tables are served"
        );
    }
    daemon.health.change(|h| h.broken_tables = broken);
    Ok(tables)
}

/// Ends once a table that was left out may be used again: the session is begun anew with it.
pub async fn watch_broken(daemon: &Daemon, stop: &CancellationToken) -> Result<(), SessionError> {
    let app_id: Arc<str> = daemon.config.name.as_str().into();
    let specs = &daemon.config.outbox;
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(jittered(BROKEN_AGAIN)) => {}
        }
        let open = async {
            let family = daemon.db.family().await?;
            let mut session = daemon.db.session().await?;
            let (_, broken) = OutboxTable::open_all(&mut session, family, specs, &app_id).await?;
            session.finish();
            Ok(broken.len())
        };
        // The database may be away; the renewal of the lease decides what that means.
        let broken = daemon.db.run("open the outbox tables", open).await;
        if broken.is_ok_and(|n| n < daemon.health.get().broken_tables.len()) {
            info!("a table that was left out can be used again");
            return Err(SessionError::Again(anyhow::anyhow!(
                "there is one table more to serve"
            )));
        }
    }
}

/// Counts for the tables of a session under their numbers in the configuration.
pub struct SessionMeters {
    meters: Arc<Meters>,
    configured: Vec<TableIdx>,
}

impl SessionMeters {
    /// For the tables of a session, in their order.
    pub fn new(daemon: &Daemon, tables: &[OutboxTable]) -> Self {
        let place = |table: &OutboxTable| {
            let name = table.spec.full_name();
            let mut specs = daemon.config.outbox.iter().zip(0..);
            let found = specs.find(|(spec, _)| spec.full_name() == name);
            found.map_or(table.idx, |(_, n)| TableIdx(n))
        };
        Self {
            meters: daemon.meters.clone(),
            configured: tables.iter().map(place).collect(),
        }
    }

    fn number(&self, table: TableIdx) -> TableIdx {
        let found = self.configured.get(usize::from(table.0));
        found.copied().unwrap_or(table)
    }
}

impl Observer for SessionMeters {
    fn published(&self, table: TableIdx, path: Path, latency: Option<Duration>) {
        self.meters.published(self.number(table), path, latency);
    }

    fn failed(&self, table: TableIdx, class: FailureClass) {
        self.meters.failed(self.number(table), class);
    }

    fn deferred(&self, table: TableIdx, why: Deferral) {
        self.meters.deferred(self.number(table), why);
    }

    fn overtaken(&self, table: TableIdx, rows: u64) {
        self.meters.overtaken(self.number(table), rows);
    }

    fn in_flight(&self, rows: usize, bytes: usize) {
        self.meters.in_flight(rows, bytes);
    }

    fn held(&self, table: TableIdx, aggregates: usize) {
        self.meters.held(self.number(table), aggregates);
    }

    fn lag(&self, lag: Duration) {
        self.meters.lag(lag);
    }

    fn flushed(&self, took: Duration, rows: usize) {
        self.meters.flushed(took, rows);
    }

    fn checkpointed(&self) {
        self.meters.checkpointed();
    }

    fn tail_connected(&self, connected: bool) {
        self.meters.tail_connected(connected);
    }
}
