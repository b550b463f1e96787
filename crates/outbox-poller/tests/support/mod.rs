//! A poller on fakes.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used
)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use outbox_core::failure::FailureClass;
use outbox_core::ports::{Deferral, Observer, Path, PortResult};
use outbox_core::retry::RetryPolicy;
use outbox_core::spec::{ColumnNames, OnSent, OnUnroutable, Ordering, TableSpec, Tracking};
use outbox_core::status::StatusValues;
use outbox_core::template::Template;
use outbox_core::{Aggregate, Status, TableIdx};
use outbox_poller::{Poller, PollerConfig, PollerHandle};
use outbox_testkit::fakes::{FakeBroker, FakeGate, FakeTable};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub const TABLE: TableIdx = TableIdx(0);
pub const OTHER: TableIdx = TableIdx(1);

pub fn spec(table: &str, ordering: Ordering) -> TableSpec {
    TableSpec {
        schema: "app".into(),
        table: table.into(),
        tracking: Tracking::Status,
        on_sent: OnSent::Mark,
        columns: ColumnNames::default(),
        status_values: StatusValues::default(),
        exchange: Template::parse("outbox").unwrap(),
        routing_key: Template::parse("key").unwrap(),
        ordering,
        failed_blocks_aggregate: false,
        on_unroutable: OnUnroutable::Retry,
        max_body: None,
    }
}

pub fn aggregate(id: &str) -> Aggregate {
    Aggregate {
        table: TABLE,
        kind: Arc::from(""),
        id: Arc::from(id),
    }
}

/// Counts what the poller tells.
#[derive(Default)]
pub struct Counts {
    pub published: Mutex<u64>,
    pub overtaken: Mutex<u64>,
}

impl Observer for Counts {
    fn published(&self, _: TableIdx, path: Path, _: Option<Duration>) {
        assert_eq!(path, Path::Poller);
        *self.published.lock().unwrap() += 1;
    }
    fn failed(&self, _: TableIdx, _: FailureClass) {}
    fn deferred(&self, _: TableIdx, _: Deferral) {}
    fn overtaken(&self, _: TableIdx, rows: u64) {
        *self.overtaken.lock().unwrap() += rows;
    }
    fn in_flight(&self, _: usize, _: usize) {}
    fn held(&self, _: TableIdx, _: usize) {}
    fn lag(&self, _: Duration) {}
    fn flushed(&self, _: Duration, _: usize) {}
    fn checkpointed(&self) {}
    fn tail_connected(&self, _: bool) {}
}

pub struct World {
    pub table: Arc<FakeTable>,
    pub broker: Arc<FakeBroker>,
    pub gate: Arc<FakeGate>,
    pub counts: Arc<Counts>,
    pub poller: Arc<Poller>,
    pub handle: PollerHandle,
    pub stop: CancellationToken,
}

impl World {
    pub fn new(ordering: Ordering) -> Self {
        Self::with(PollerConfig::default(), vec![spec("outbox", ordering)])
    }

    pub fn with(config: PollerConfig, specs: Vec<TableSpec>) -> Self {
        let table = FakeTable::new(RetryPolicy::default(), Duration::from_secs(60));
        let table = Arc::new(table);
        table.set_failed_blocks(specs[0].failed_blocks_aggregate);
        let (broker, gate) = (
            Arc::new(FakeBroker::default()),
            Arc::new(FakeGate::default()),
        );
        let counts = Arc::new(Counts::default());
        let specs = specs.into_iter().map(Arc::new).collect();
        let (poller, handle) = Poller::new(
            config,
            specs,
            table.clone(),
            broker.clone(),
            gate.clone(),
            counts.clone(),
        );
        Self {
            table,
            broker,
            gate,
            counts,
            poller: Arc::new(poller),
            handle,
            stop: CancellationToken::new(),
        }
    }

    pub fn run(&self) -> JoinHandle<PortResult<()>> {
        let (poller, stop) = (self.poller.clone(), self.stop.clone());
        tokio::spawn(async move { poller.run(stop).await })
    }

    /// Ends a run and checks that it ended well, with nothing held.
    pub async fn end(&self, run: JoinHandle<PortResult<()>>) {
        self.stop.cancel();
        let ended = tokio::time::timeout(Duration::from_secs(30), run).await;
        ended.expect("the poller ends").unwrap().unwrap();
    }

    /// Waits for something to hold, on the paused clock.
    pub async fn until(&self, within: Duration, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let deadline = tokio::time::Instant::now() + within;
        while !holds(self) {
            if tokio::time::Instant::now() > deadline {
                let rows: Vec<_> = self
                    .table
                    .rows()
                    .into_iter()
                    .filter(|(_, r)| r.status != Status::Sent)
                    .map(|(k, r)| (k.id.to_string(), r.status, r.retry_count, r.last_error))
                    .take(20)
                    .collect();
                panic!("not within {within:?}: {what}; {rows:?}");
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn all_sent(&self, within: Duration) {
        self.until(within, "every row is sent", |w| {
            w.table.rows().iter().all(|(_, r)| r.status == Status::Sent)
        })
        .await;
    }

    pub fn insert(&self, ids: std::ops::RangeInclusive<u64>, aggregates: u64) {
        for id in ids {
            self.table
                .insert(TABLE, id, &format!("a{}", id % aggregates));
        }
    }

    pub fn status(&self, id: u64) -> Status {
        self.table.row(TABLE, id).unwrap().status
    }

    pub fn published(&self) -> Vec<u64> {
        let confirmed = self.broker.confirmed();
        confirmed.iter().map(|id| id.parse().unwrap()).collect()
    }

    pub fn submitted(&self) -> Vec<u64> {
        let submitted = self.broker.submitted();
        submitted.iter().map(|s| s.id.parse().unwrap()).collect()
    }
}
