use std::collections::{HashSet, VecDeque};
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use outbox_core::ports::{Gate, HeldRow};
use outbox_core::{Aggregate, Position, RowKey};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::guard;

/// A tail that does as it is told.
#[derive(Default)]
pub struct FakeGate {
    state: Mutex<State>,
    news: Notify,
}

#[derive(Default)]
struct State {
    tailing: bool,
    behind: bool,
    busy: HashSet<Aggregate>,
    held: HashSet<RowKey>,
    left: VecDeque<Aggregate>,
}

impl FakeGate {
    /// Whether a tail streams.
    pub fn set_tailing(&self, tailing: bool) {
        guard(&self.state).tailing = tailing;
    }

    /// Whether the settled watermark stays behind every position that is asked for.
    pub fn set_behind(&self, behind: bool) {
        guard(&self.state).behind = behind;
    }

    /// Whether the tail has rows of the aggregate in flight.
    pub fn set_busy(&self, aggregate: &Aggregate, busy: bool) {
        let mut state = guard(&self.state);
        if busy {
            state.busy.insert(aggregate.clone());
        } else {
            state.busy.remove(aggregate);
        }
    }

    /// Says that rows of the aggregate were left to the table.
    pub fn leave(&self, aggregate: Aggregate) {
        guard(&self.state).left.push_back(aggregate);
        self.news.notify_one();
    }

    /// Rows that the poller holds now.
    pub fn held(&self) -> usize {
        guard(&self.state).held.len()
    }
}

#[async_trait]
impl Gate for FakeGate {
    async fn hold(&self, rows: &[HeldRow]) -> Vec<bool> {
        let mut state = guard(&self.state);
        let mut granted = Vec::with_capacity(rows.len());
        for row in rows {
            let ours = !state.busy.contains(&row.aggregate);
            if ours {
                state.held.insert(row.key.clone());
            }
            granted.push(ours);
        }
        granted
    }

    async fn done(&self, rows: &[HeldRow]) {
        let mut state = guard(&self.state);
        for row in rows {
            state.held.remove(&row.key);
        }
    }

    async fn left_behind(&self, limit: usize, timeout: Duration) -> Vec<Aggregate> {
        let until = Instant::now() + timeout;
        loop {
            let found: Vec<Aggregate> = {
                let mut state = guard(&self.state);
                let count = state.left.len().min(limit);
                state.left.drain(..count).collect()
            };
            if !found.is_empty() {
                return found;
            }
            if tokio::time::timeout_at(until, self.news.notified())
                .await
                .is_err()
            {
                return Vec::new();
            }
        }
    }

    async fn passed(&self, _: &Position, timeout: Duration) -> bool {
        let (tailing, behind) = {
            let state = guard(&self.state);
            (state.tailing, state.behind)
        };
        if tailing && behind {
            tokio::time::sleep(timeout).await;
        }
        tailing && !behind
    }

    fn tailing(&self) -> bool {
        guard(&self.state).tailing
    }
}
