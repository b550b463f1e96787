use std::time::Duration;

use crate::failure::FailureClass;
use crate::row::TableIdx;

/// Which path delivered a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// The binlog.
    Tail,
    /// The table.
    Poller,
}

/// Why the tail left a row to the table. Closed: these are label values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Deferral {
    /// The binlog did not say enough to decode it with certainty.
    Undecodable,
    /// A row image without a needed column.
    PartialImage,
    /// The layout could not be proven.
    Layout,
    /// The transaction was over `max_transaction_bytes`.
    Oversized,
    /// A prepared XA transaction.
    Xa,
    /// A statement in the binlog instead of rows.
    Statement,
    /// Its aggregate is held.
    Held,
    /// `next_retry_at` lies in the future.
    Delayed,
    /// Read back, and not fresh: claimed, attempted, sent, abandoned.
    NotFresh,
    /// Read back, and not visible.
    NotVisible,
}

impl Deferral {
    /// Label of metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Undecodable => "undecodable",
            Self::PartialImage => "partial_image",
            Self::Layout => "layout",
            Self::Oversized => "oversized",
            Self::Xa => "xa",
            Self::Statement => "statement",
            Self::Held => "held",
            Self::Delayed => "delayed",
            Self::NotFresh => "not_fresh",
            Self::NotVisible => "not_visible",
        }
    }
}

/// What is counted, told as it happens. Cheap, never waits.
pub trait Observer: Send + Sync {
    /// A confirm is recorded. `latency` is commit to confirm by the server's and our clock
    /// (a second's resolution where the server gives no better), live rows of the tail only.
    fn published(&self, table: TableIdx, path: Path, latency: Option<Duration>);
    /// A row failed once.
    fn failed(&self, table: TableIdx, class: FailureClass);
    /// The tail left a row to the table.
    fn deferred(&self, table: TableIdx, why: Deferral);
    /// A row overtook a refused one of its aggregate.
    fn overtaken(&self, table: TableIdx, rows: u64);
    /// Rows and bytes in the window.
    fn in_flight(&self, rows: usize, bytes: usize);
    /// Aggregates held, by table.
    fn held(&self, table: TableIdx, aggregates: usize);
    /// Seconds that the tail is behind: database's now minus commit time of the last group read.
    fn lag(&self, lag: Duration);
    /// A flush took this long.
    fn flushed(&self, took: Duration, rows: usize);
    /// The position was stored.
    fn checkpointed(&self);
    /// The replication stream is (not) connected.
    fn tail_connected(&self, connected: bool);
}

/// Counts nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn published(&self, _: TableIdx, _: Path, _: Option<Duration>) {}
    fn failed(&self, _: TableIdx, _: FailureClass) {}
    fn deferred(&self, _: TableIdx, _: Deferral) {}
    fn overtaken(&self, _: TableIdx, _: u64) {}
    fn in_flight(&self, _: usize, _: usize) {}
    fn held(&self, _: TableIdx, _: usize) {}
    fn lag(&self, _: Duration) {}
    fn flushed(&self, _: Duration, _: usize) {}
    fn checkpointed(&self) {}
    fn tail_connected(&self, _: bool) {}
}
