use std::time::Duration;

use async_trait::async_trait;

use crate::position::Position;
use crate::row::{Aggregate, RowKey};

/// A row that keeps its aggregate on the poller's side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldRow {
    /// The row.
    pub key: RowKey,
    /// Its aggregate.
    pub aggregate: Aggregate,
}

/// How the poller keeps out of the tail's way. The tail's task alone owns the order of
/// aggregates; the poller asks it before it publishes anything.
#[async_trait]
pub trait Gate: Send + Sync {
    /// Holds the aggregates of these rows in the tail: from now on it leaves their new rows to
    /// the table (or keeps them waiting). Returns, for each row, whether it is the poller's now:
    /// false while the tail itself has that row, or another of its aggregate, in flight.
    async fn hold(&self, rows: &[HeldRow]) -> Vec<bool>;

    /// These rows are settled (or were given back): they no longer hold their aggregate on the
    /// poller's account. The tail releases an aggregate once nothing of it is left behind.
    async fn done(&self, rows: &[HeldRow]);

    /// Waits until an aggregate was newly held or a held one got a further row, at most
    /// `timeout`; returns the held aggregates that have rows left behind, at most `limit`.
    async fn left_behind(&self, limit: usize, timeout: Duration) -> Vec<Aggregate>;

    /// Waits until the settled watermark has reached `position`; false at the timeout, or where
    /// the tail is not running.
    async fn passed(&self, position: &Position, timeout: Duration) -> bool;

    /// Whether a tail is streaming. While it is not, the poller polls every
    /// `degraded_interval` and does not wait for watermarks.
    fn tailing(&self) -> bool;
}

/// The gate where no tail runs: everything is the poller's.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoTail;

#[async_trait]
impl Gate for NoTail {
    async fn hold(&self, rows: &[HeldRow]) -> Vec<bool> {
        vec![true; rows.len()]
    }

    async fn done(&self, _rows: &[HeldRow]) {}

    async fn left_behind(&self, _limit: usize, _timeout: Duration) -> Vec<Aggregate> {
        // Nothing is ever left behind by a tail that does not run; the caller's own timer wakes.
        std::future::pending().await
    }

    async fn passed(&self, _position: &Position, _timeout: Duration) -> bool {
        false
    }

    fn tailing(&self) -> bool {
        false
    }
}
