//! What stands between the parts of a leader: the poller's gate to the tail that runs just now, and
//! the epoch before every dump.

use std::time::Duration;

use outbox_core::ports::{Gate, HeldRow, NoTail};
use outbox_core::{Aggregate, Position};
use outbox_ledger::connect::Db;
use outbox_ledger::lease::Epoch;
use outbox_tail::group::{Source, StreamItem};
use outbox_tail::relay::RelayHandle;
use outbox_tail::stream::{self, BinlogSource};
use tokio::time::Instant;

/// How long a tail that was just begun counts as tailing before it is. A poller that took the
/// backlog meanwhile would hold its aggregates, and the tail would leave them to it from then on,
/// though it delivers many times as fast.
const OPENING: Duration = Duration::from_secs(10);

/// The tail's gate while there is one.
#[derive(Default)]
pub struct SwitchGate(tokio::sync::watch::Sender<Option<Tail>>);

#[derive(Clone)]
struct Tail {
    relay: RelayHandle,
    since: Instant,
}

impl SwitchGate {
    /// The tail that runs from now on, if any.
    pub fn set(&self, relay: Option<RelayHandle>) {
        let since = Instant::now();
        self.0
            .send_replace(relay.map(|relay| Tail { relay, since }));
    }

    fn get(&self) -> Option<RelayHandle> {
        self.0.borrow().as_ref().map(|tail| tail.relay.clone())
    }
}

#[async_trait::async_trait]
impl Gate for SwitchGate {
    async fn hold(&self, rows: &[HeldRow]) -> Vec<bool> {
        match self.get() {
            Some(relay) => relay.hold(rows).await,
            None => NoTail.hold(rows).await,
        }
    }

    async fn done(&self, rows: &[HeldRow]) {
        if let Some(relay) = self.get() {
            relay.done(rows).await;
        }
    }

    async fn left_behind(&self, limit: usize, timeout: Duration) -> Vec<Aggregate> {
        let mut changed = self.0.subscribe();
        let tail = changed.borrow_and_update().clone();
        let relay = tail.map(|tail| tail.relay);
        tokio::select! {
            found = async {
                match &relay {
                    Some(relay) => relay.left_behind(limit, timeout).await,
                    None => NoTail.left_behind(limit, timeout).await,
                }
            } => found,
            // A new relay: ask again.
            _ = changed.changed() => Vec::new(),
        }
    }

    async fn passed(&self, position: &Position, timeout: Duration) -> bool {
        match self.get() {
            Some(relay) => relay.passed(position, timeout).await,
            None => false,
        }
    }

    fn tailing(&self) -> bool {
        let tail = self.0.borrow();
        tail.as_ref()
            .is_some_and(|t| t.relay.tailing() || t.since.elapsed() < OPENING)
    }
}

/// Verifies the epoch before every dump: a zombie opens none.
pub struct FencedSource {
    /// The stream.
    pub inner: BinlogSource,
    /// The leader's.
    pub epoch: Epoch,
    /// Where the epoch is looked up.
    pub db: Db,
}

#[async_trait::async_trait]
impl Source for FencedSource {
    async fn open(&mut self, after: &Position) -> Result<(), stream::StreamError> {
        self.epoch
            .verify(&self.db)
            .await
            .map_err(stream::StreamError::Layouts)?;
        self.inner.open(after).await
    }

    async fn next(&mut self) -> Result<StreamItem, stream::StreamError> {
        self.inner.next().await
    }

    async fn close(&mut self) {
        self.inner.close().await;
    }

    fn coordinate_at_open(&self) -> Option<&Position> {
        self.inner.coordinate_at_open()
    }
}
