use std::sync::Arc;

use async_trait::async_trait;

use super::PortResult;
use crate::failure::Failure;
use crate::layout::TableLayout;
use crate::message::Message;
use crate::position::Position;
use crate::row::{Aggregate, OutboxRow, RowId, RowKey, TableIdx};
use crate::status::Status;

/// What is to be recorded for one row.
#[derive(Clone, Debug)]
pub struct RowOutcome {
    /// The row.
    pub key: RowKey,
    /// Its aggregate (for holds, and for rows that are parked).
    pub aggregate: Aggregate,
    /// The verdict.
    pub verdict: Verdict,
}

/// The verdict on one row.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// A confirm is held: pending, processing or failed becomes sent (or the row is deleted).
    Sent,
    /// The row failed; where its class and `retry_count` allow, it goes back to pending with a
    /// due time.
    Failed {
        /// Why.
        failure: Failure,
        /// `retry_count` as it was read: the compare-and-set sets n + 1 where it is n.
        retry_count: u32,
        /// The message, kept only for tables without status columns, which park it.
        message: Option<Arc<Message>>,
    },
    /// Tables without status columns only: the row was passed over because its aggregate is
    /// held, and is parked behind it, uncharged.
    Parked {
        /// The message to publish later, or why none could be built.
        message: Result<Arc<Message>, Failure>,
    },
}

/// What was recorded for one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// Sent (marked or deleted), or nothing to do for it.
    Sent,
    /// Back to pending, due later: it holds its aggregate.
    WillRetry,
    /// Failed for good.
    Failed,
    /// No row matched: deleted, or already sent or abandoned by someone. Settled all the same.
    Gone,
    /// Somebody keeps the row locked: present it again. Not settled.
    Busy,
}

/// One flush: statuses and the position, in one transaction.
#[derive(Clone, Debug, Default)]
pub struct Settlement {
    /// Rows, in any order.
    pub outcomes: Vec<RowOutcome>,
    /// The window's low watermark after these outcomes, if it moved.
    pub checkpoint: Option<Position>,
    /// Layouts that hold from that checkpoint on (`None`: unknown), stored with it, never
    /// without it, so that a restart at the checkpoint decodes with the layout of its time.
    pub layouts: Vec<(TableIdx, Option<TableLayout>)>,
    /// What is left behind that checkpoint without a trace in the table, where that has changed
    /// since it was stored last; stored with the checkpoint, never without it.
    pub behind: Option<Vec<Behind>>,
}

/// Rows that were passed over and never attempted: nothing in their table tells them from rows
/// that are yet to be read, so that a restart has to be told whom they hold.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Behind {
    /// Rows of this aggregate.
    Aggregate(Aggregate),
    /// Rows of this table whose aggregates are unknown, or too many to name.
    Table(TableIdx),
}

/// What a flush recorded, parallel to `outcomes`.
///
/// When any row is [`Recorded::Busy`], the checkpoint of the same settlement was **not** stored:
/// it would pass an unsettled row.
#[derive(Clone, Debug, Default)]
pub struct SettleReport {
    /// One for each outcome, in its order.
    pub rows: Vec<Recorded>,
    /// Whether the checkpoint was stored.
    pub checkpointed: bool,
}

/// A row as the table has it now, judged by the database's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Not (or not yet) visible.
    Absent,
    /// There.
    Row {
        /// Its status.
        status: Status,
        /// Retries spent.
        retry_count: u32,
        /// `next_retry_at` lies in the future.
        delayed: bool,
        /// A claim that has not expired is on it.
        claimed: bool,
    },
}

impl Seen {
    /// Whether the tail may publish the row: pending, never attempted, not delayed, not claimed.
    #[must_use]
    pub fn is_fresh(self) -> bool {
        matches!(
            self,
            Self::Row {
                status: Status::Pending,
                retry_count: 0,
                delayed: false,
                claimed: false
            }
        )
    }

    /// Whether nobody will ever publish the row again without an operator.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(
            self,
            Self::Row {
                status: Status::Sent | Status::Failed | Status::Abandoned,
                ..
            }
        )
    }
}

/// The tail's side of the database. Every write is fenced by the session's epoch.
#[async_trait]
pub trait Ledger: Send + Sync {
    /// Records outcomes and position atomically. Repeating it after a lost answer is harmless.
    /// Deadlocks and lock waits are retried inside; a row that stays locked comes back `Busy`.
    async fn settle(&self, settlement: &Settlement) -> PortResult<SettleReport>;

    /// Reads rows back by primary key, parallel to `ids`.
    async fn look(&self, table: TableIdx, ids: &[RowId]) -> PortResult<Vec<Seen>>;

    /// Rows that hold their aggregate by the table's account: attempted and pending, processing,
    /// and failed ones where `failed_blocks_aggregate`; for tables without status columns, what
    /// is parked. In order; at most `limit` (the caller treats a full answer as "more").
    async fn holding(&self, table: TableIdx, limit: usize) -> PortResult<Vec<(Aggregate, RowId)>>;

    /// What the last checkpoint said is left behind it; nothing where there is no checkpoint. What
    /// was stored for tables that are no longer configured is passed over.
    async fn behind(&self) -> PortResult<Vec<Behind>>;

    /// What is left of these aggregates: their rows that are neither final nor (unless
    /// `failed_blocks_aggregate`) failed, never-attempted ones included, but for never-attempted
    /// rows that are delayed, which are outside the order; for tables without status columns,
    /// what is parked. At most `limit` in all (the caller treats a full answer as "more").
    async fn remaining(
        &self,
        table: TableIdx,
        aggregates: &[Aggregate],
        limit: usize,
    ) -> PortResult<Vec<(Aggregate, RowId)>>;

    /// Reads whole rows by primary key, for those that the stream could not deliver itself.
    async fn read(&self, table: TableIdx, ids: &[RowId]) -> PortResult<Vec<OutboxRow>>;

    /// The coordinate that the server has now: everything committed before this call lies
    /// before it.
    async fn coordinate(&self) -> PortResult<Position>;
}

/// Table layouts, for the stream.
#[async_trait]
pub trait Layouts: Send + Sync {
    /// The layout now, with a coordinate read **after** it: a change of the table that lies
    /// before the coordinate may or may not be in it, one behind it is not.
    async fn current(&self, table: TableIdx) -> PortResult<(TableLayout, Position)>;

    /// The layout stored with the checkpoint, if one is known to hold there.
    async fn stored(&self, table: TableIdx) -> PortResult<Option<TableLayout>>;
}
