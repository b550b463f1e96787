use std::time::Duration;

use async_trait::async_trait;

use super::PortResult;
use super::ledger::{Recorded, RowOutcome};
use crate::position::Position;
use crate::row::{Aggregate, OutboxRow, RowKey, TableIdx};
use crate::status::Status;

/// Which rows to look for.
#[derive(Clone, Debug, PartialEq)]
pub enum Scan {
    /// Attempted or delayed pending rows that are due, and rows whose claim has expired; for
    /// tables without status columns, parked rows that are due.
    Due,
    /// Pending, never attempted, not delayed, unclaimed, older than `min_age` by the database's
    /// clock.
    LeftBehind {
        /// The least age.
        min_age: Duration,
    },
    /// Every due pending row (and expired claim) after the cursor, in delivery order: the sweep.
    Pending {
        /// Where the previous page ended.
        after: Option<Cursor>,
    },
}

/// Where a page ended: the delivery order's key of its last row. Integer ids sort by id, others
/// by `created_at` and id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// `created_at` as the server prints it, where it is part of the order.
    pub created_at: Option<String>,
    /// The last row.
    pub key: RowKey,
}

/// Proof of a claim; presented by every write-back of the claimed rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ClaimToken(pub String);

/// Counts for one table, by the database.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableBacklog {
    /// Rows by status; `Sent` is not counted (it may be the whole table).
    pub by_status: Vec<(Status, u64)>,
    /// Age of the oldest due pending row in seconds.
    pub oldest_pending_seconds: Option<u64>,
}

/// What a patrol found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StuckReport {
    /// Rows in processing for longer than the warning threshold.
    pub stuck: u64,
    /// Rows put back to pending.
    pub reset: u64,
}

/// The poller's side of the database. Runs in the leader only; every write is fenced by the
/// epoch as well as by the claim.
#[async_trait]
pub trait PollStore: Send + Sync {
    /// Candidates in delivery order, at most `limit`; fewer where messages are large, so that only
    /// an empty page is the end. `Due` and `LeftBehind` leave out rows whose aggregate's first
    /// row still waits, where an index makes that cheap. Its cost follows the rows it returns.
    async fn scan(
        &self,
        table: TableIdx,
        scan: &Scan,
        limit: usize,
    ) -> PortResult<Vec<(Cursor, OutboxRow)>>;

    /// For each aggregate: its rows that are neither final nor (unless `failed_blocks_aggregate`)
    /// failed, in delivery order, at most `limit` for each, but for never-attempted rows that are
    /// delayed, which are outside the order. `ready` is true where a row may be claimed now by
    /// the database's clock.
    async fn unsettled(
        &self,
        table: TableIdx,
        aggregates: &[Aggregate],
        limit: usize,
    ) -> PortResult<Vec<(OutboxRow, bool)>>;

    /// Claims rows by primary key, with a conditional update: pending and due, or an expired
    /// claim. Returns the rows that are ours now.
    async fn claim(
        &self,
        table: TableIdx,
        rows: &[RowKey],
    ) -> PortResult<(ClaimToken, Vec<RowKey>)>;

    /// Records outcomes of claimed rows; a row whose claim is lost is `Gone` unless a confirm is
    /// held. With no token (the sweep) rows are compared against pending instead.
    async fn record(
        &self,
        token: Option<&ClaimToken>,
        outcomes: &[RowOutcome],
    ) -> PortResult<Vec<Recorded>>;

    /// Gives claims back, uncharged.
    async fn release(&self, token: &ClaimToken, rows: &[RowKey]) -> PortResult<()>;

    /// The coordinate that the server has now.
    async fn coordinate(&self) -> PortResult<Position>;

    /// The patrol: counts rows in processing for longer than `warn_after` and puts those longer
    /// than `reset_after` back to pending, by the database's clock, whatever their claim says.
    async fn patrol(
        &self,
        table: TableIdx,
        warn_after: Duration,
        reset_after: Duration,
    ) -> PortResult<StuckReport>;

    /// Backlog counts.
    async fn backlog(&self, table: TableIdx) -> PortResult<TableBacklog>;

    /// Deletes at most `limit` sent rows that were sent longer than `older_than` ago, and
    /// returns how many; never others.
    async fn purge(&self, table: TableIdx, older_than: Duration, limit: usize) -> PortResult<u64>;
}
