//! What the stream gives to the relay.

use async_trait::async_trait;
use outbox_core::layout::TableLayout;
use outbox_core::ports::Deferral;
use outbox_core::{Aggregate, OutboxRow, Position, RowId, TableIdx};

use crate::stream::StreamError;

/// One thing that was read.
#[derive(Debug)]
pub enum StreamItem {
    /// A committed group that concerns us.
    Group(Group),
    /// Everything up to here was read and held nothing of ours. Given at most a few times a
    /// second on a busy server, never from inside a group.
    Progress {
        /// End of the last group that was read.
        end: Position,
        /// Its commit time, microseconds since the epoch by the server's clock.
        committed_at: i64,
        /// Whether the groups since the last item were only writes to our own tables; such
        /// progress by itself is no reason to store a position.
        own_only: bool,
    },
    /// A heartbeat at the end of the binlog: the server has nothing more for us now.
    Idle,
}

/// One committed group (transaction) with outbox rows, deferrals, signals or layout changes.
#[derive(Debug)]
pub struct Group {
    /// Inserted rows in their order, with the group's own later updates applied.
    pub rows: Vec<OutboxRow>,
    /// What the table has to deliver instead.
    pub deferred: Vec<Deferred>,
    /// Layout changes in this group; they hold from its end on. `None`: not proven.
    pub layouts: Vec<(TableIdx, Option<TableLayout>)>,
    /// `outboxd_signal` was inserted into.
    pub signal: bool,
    /// The position behind the group.
    pub end: Position,
    /// Commit time, microseconds since the epoch by the server's clock (a second's resolution
    /// where the server gives no better).
    pub committed_at: i64,
}

/// Rows that the stream leaves to the table.
#[derive(Clone, Debug)]
pub struct Deferred {
    /// The table.
    pub table: TableIdx,
    /// The row, where its key is known; `None` stands for any number of unknown rows.
    pub row: Option<(RowId, Option<Aggregate>)>,
    /// Why.
    pub why: Deferral,
}

/// Where groups come from: the server, or a script in tests.
#[async_trait]
pub trait Source: Send {
    /// Opens (again) behind `after`. The stream verifies first that this server can serve it.
    async fn open(&mut self, after: &Position) -> Result<(), StreamError>;
    /// The next item. Cancel safe. An end of the stream is an error.
    async fn next(&mut self) -> Result<StreamItem, StreamError>;
    /// Closes the dump on purpose, if one is open.
    async fn close(&mut self);
    /// The coordinate that the server had when it was opened: everything read before it is
    /// catch-up and is verified before it is published.
    fn coordinate_at_open(&self) -> Option<&Position>;
}
