//! How it stands: for `status`, the console and the API. Works without a running daemon.

use std::sync::Arc;

use outbox_core::Position;
use outbox_core::ports::{PortResult, TableBacklog};
use outbox_core::status::Status;
use serde::Serialize;

use super::{Admin, BrokenTable, One};
use crate::{backlog, gap, lease, pause, position};

/// Gaps that are shown at most; more than one is unusual enough.
const GAPS: u32 = 100;

/// Everything at one glance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StatusOverview {
    /// The configured `name`.
    pub name: String,
    /// Instance that leads; `None`: nobody.
    pub leader: Option<String>,
    /// Epoch; 0 before the first leader.
    pub epoch: u64,
    /// Milliseconds until the lease ends; negative once it has.
    pub lease_remaining_ms: Option<i64>,
    /// Instances that stand by.
    pub standbys: Vec<String>,
    /// The stored position, as printed; `None` before the first start.
    pub position: Option<String>,
    /// Seconds since it was stored.
    pub position_age_seconds: Option<u64>,
    /// Rows from before the position are still to be swept.
    pub sweep_due: bool,
    /// How far the stored position is behind the server.
    pub lag: Lag,
    /// By table.
    pub backlog: Vec<TableStatus>,
    /// Configured tables that cannot be used, and why.
    pub broken: Vec<BrokenTable>,
    /// Age of the oldest row that is due, over all tables.
    pub oldest_pending_seconds: Option<u64>,
    /// Gaps that nobody has acknowledged.
    pub gaps: Vec<GapView>,
    /// Everything is paused.
    pub paused: bool,
    /// Single tables that are paused.
    pub paused_tables: Vec<String>,
}

/// How far the stored position is behind the server's coordinate. It counts all transactions of
/// the server, and is stored seldom while there is nothing to publish: a daemon that is up to
/// date shows a few. The daemon's own lag is in its metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Lag {
    /// Transactions, where positions are GTIDs.
    pub transactions: Option<u64>,
    /// Bytes, where both positions are in one file.
    pub bytes: Option<u64>,
}

/// One table's backlog. Sent rows are not counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TableStatus {
    /// `schema.table`.
    pub table: String,
    /// Counts of `outboxd_parked`: the table itself has no status columns.
    pub parked: bool,
    /// To be published, delayed rows and retries included.
    pub pending: u64,
    /// Claimed.
    pub processing: u64,
    /// Failed.
    pub failed: u64,
    /// Abandoned.
    pub abandoned: u64,
    /// Age of the oldest row that is due.
    pub oldest_pending_seconds: Option<u64>,
}

/// A recorded gap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GapView {
    /// Its number.
    pub id: u64,
    /// The position that was lost.
    pub from: Option<String>,
    /// Where reading went on.
    pub to: Option<String>,
    /// What happened.
    pub reason: String,
    /// When it was found, UTC.
    pub found_at: String,
}

impl Admin {
    /// The backlog of every table.
    pub async fn backlog(&self) -> PortResult<Vec<TableStatus>> {
        let work = async {
            let mut session = self.db.session().await?;
            let mut tables = Vec::new();
            for table in self.these(None) {
                let (counts, parked) = match self.one(&mut session, table).await? {
                    One::Table(terms) => (backlog::count(&mut session, &terms).await?, false),
                    One::Parked(parked) => (parked.backlog(&mut session).await?, true),
                };
                let name = self.outbox(table)?.spec.full_name();
                tables.push(TableStatus::new(name, parked, &counts));
            }
            session.finish();
            Ok(tables)
        };
        self.db.run("count the backlog", work).await
    }

    /// Everything at one glance.
    pub async fn overview(&self) -> PortResult<StatusOverview> {
        let (db, name) = (&self.db, &self.name);
        let lease = lease::state(db, name).await?;
        let stored = position::PositionStore::new(db.clone(), Arc::clone(name))
            .load()
            .await?;
        let now = position::coordinate(db, Some(name)).await?;
        let paused = pause::read(db, name).await?;
        let gaps = gap::unacknowledged(db, name, GAPS).await?;
        let backlog = self.backlog().await?;
        let at = stored.as_ref().and_then(|s| s.position.as_ref());
        Ok(StatusOverview {
            name: name.to_string(),
            leader: lease.as_ref().and_then(|l| l.leader.clone()),
            epoch: lease.as_ref().map_or(0, |l| l.epoch),
            lease_remaining_ms: lease.as_ref().map(|l| l.remaining_micros / 1000),
            standbys: lease.map_or_else(Vec::new, |l| l.standbys),
            position: at.map(ToString::to_string),
            position_age_seconds: stored.as_ref().map(|s| s.age_seconds),
            sweep_due: stored.as_ref().is_some_and(|s| s.sweep),
            lag: at.map_or_else(Lag::default, |at| Lag::between(at, &now)),
            oldest_pending_seconds: backlog
                .iter()
                .filter_map(|t| t.oldest_pending_seconds)
                .max(),
            backlog,
            broken: self.broken.clone(),
            gaps: gaps
                .into_iter()
                .map(|g| GapView {
                    id: g.id,
                    from: g.from,
                    to: g.to,
                    reason: g.reason,
                    found_at: g.found_at,
                })
                .collect(),
            paused: paused.all,
            paused_tables: paused.tables,
        })
    }
}

impl Lag {
    fn between(at: &Position, now: &Position) -> Self {
        match (at, now) {
            (Position::Gtid(at), Position::Gtid(now)) => Self {
                transactions: Some(now.subtract(at).len()),
                bytes: None,
            },
            (Position::Mariadb(at), Position::Mariadb(now)) => Self {
                transactions: Some(at.list.behind(&now.list)),
                bytes: None,
            },
            (Position::File(at), Position::File(now))
                if at.server == now.server && at.file == now.file =>
            {
                Self {
                    transactions: None,
                    bytes: Some(now.pos.saturating_sub(at.pos)),
                }
            }
            _ => Self::default(),
        }
    }
}

impl TableStatus {
    fn new(table: String, parked: bool, counts: &TableBacklog) -> Self {
        let count = |status| {
            let found = counts.by_status.iter().find(|(s, _)| *s == status);
            found.map_or(0, |(_, n)| *n)
        };
        Self {
            table,
            parked,
            pending: count(Status::Pending),
            processing: count(Status::Processing),
            failed: count(Status::Failed),
            abandoned: count(Status::Abandoned),
            oldest_pending_seconds: counts.oldest_pending_seconds,
        }
    }
}
