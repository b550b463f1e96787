//! The passes.
//!
//! Progress: every pass takes what is due and what the tail left behind, heads of aggregates first;
//! a full pass is followed by the next at once, and aggregates that the tail leaves are delivered
//! as soon as it says so. Resumption: nothing is kept but claims, which expire. Cancellation: the
//! batch in hand gets its outcomes and its records, then the loop ends.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use outbox_core::ports::{
    Disposition, Gate, Ledger, Observer, PollStore, PortError, PortResult, Publisher, Scan, chain,
};
use outbox_core::spec::{Ordering, TableSpec};
use outbox_core::{Aggregate, OutboxRow, RowKey, TableIdx};
use tokio::sync::{Mutex, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::breaker::Breaker;
use crate::config::{PollerConfig, SweepConfig, SweepReport};
use crate::deliver::{DRAIN, Outlet, Ports};
use crate::flight::Limits;
use crate::handle::{PollerHandle, Request};
use crate::sweep;

/// How long a pass waits for the tail to pass the coordinate that decides what it left behind.
const PASSED: Duration = Duration::from_secs(2);
/// Aggregates that the tail left which are taken up at once.
const AGGREGATES: usize = 64;
/// Times that aggregates are looked at again while they move.
const ROUNDS: usize = 32;
/// Pause after news that brought nothing to do.
const IDLE: Duration = Duration::from_millis(50);
/// Pauses after errors, doubling from the first to the second.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// The fallback poller of one leader.
pub struct Poller {
    pub(crate) config: PollerConfig,
    pub(crate) tables: Vec<Arc<TableSpec>>,
    pub(crate) store: Arc<dyn PollStore>,
    pub(crate) gate: Arc<dyn Gate>,
    pub(crate) ledger: Option<Arc<dyn Ledger>>,
    /// One batch or sweep at a time.
    pub(crate) outlet: Mutex<Outlet>,
    pub(crate) handle: PollerHandle,
    requests: Mutex<mpsc::Receiver<Request>>,
}

impl Poller {
    /// A poller for `tables`, in the order of their [`TableIdx`]. The publisher is its own.
    #[must_use]
    pub fn new(
        config: PollerConfig,
        tables: Vec<Arc<TableSpec>>,
        store: Arc<dyn PollStore>,
        publisher: Arc<dyn Publisher>,
        gate: Arc<dyn Gate>,
        observer: Arc<dyn Observer>,
    ) -> (Self, PollerHandle) {
        let (handle, requests) = PollerHandle::new(tables.len());
        let limits = Limits {
            rows: config.max_in_flight.max(1),
            bytes: config.max_in_flight_bytes,
        };
        let breakers = tables
            .iter()
            .map(|spec| Breaker::new(spec.full_name(), config.interval))
            .collect();
        let ports = Ports {
            publisher,
            store: store.clone(),
            gate: gate.clone(),
            observer,
        };
        let poller = Self {
            outlet: Mutex::new(Outlet::new(ports, limits, breakers, handle.clone())),
            requests: Mutex::new(requests),
            ledger: None,
            handle: handle.clone(),
            config,
            tables,
            store,
            gate,
        };
        (poller, handle)
    }

    /// Lets sweeps know beforehand which aggregates are held by rows that wait; without it they
    /// look at the head of every aggregate.
    #[must_use]
    pub fn with_ledger(mut self, ledger: Arc<dyn Ledger>) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// Runs until `stop`, or until the session is over or an operator must act.
    pub async fn run(&self, stop: CancellationToken) -> PortResult<()> {
        let mut requests = self.requests.lock().await;
        let (mut due, mut errors) = (Instant::now(), 0_u32);
        // Kept over the turns of the loop: what it has to tell must not be lost with it.
        let mut left = self.gate.left_behind(AGGREGATES, self.config.interval);
        while !stop.is_cancelled() {
            let worked = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(request) = requests.recv() => self.requested(request, &stop).await,
                () = tokio::time::sleep_until(due) => {
                    let again = self.pass(&stop).await;
                    due = Instant::now() + match again {
                        Ok(true) => Duration::ZERO,
                        _ if self.gate.tailing() => self.config.interval,
                        _ => self.config.degraded_interval,
                    };
                    again.map(|_| ())
                }
                aggregates = &mut left => {
                    let worked = self.aggregates(aggregates, &stop).await;
                    if !matches!(worked, Ok(1..)) {
                        // News of what is not ready yet may come at any rate.
                        tokio::time::sleep(IDLE).await;
                    }
                    left = self.gate.left_behind(AGGREGATES, self.config.interval);
                    worked.map(|_| ())
                }
            };
            match worked {
                Ok(()) => errors = 0,
                Err(e) => {
                    self.or_back_off(e, errors, &stop).await?;
                    errors = errors.saturating_add(1);
                }
            }
        }
        // A record that was kept is made now if it can be: the next leader would publish again.
        let mut outlet = self.outlet.lock().await;
        let last = tokio::time::timeout(DRAIN, outlet.recorder.again()).await;
        if outlet.recorder.backlog() > 0 {
            warn!(
                rows = outlet.recorder.backlog(),
                "outcomes could not be recorded: confirmed rows among them will be published again"
            );
        }
        match last {
            Ok(Err(e)) if e.disposition != Disposition::Backoff => Err(e),
            _ => Ok(()),
        }
    }

    /// Sweeps every table that is not paused.
    pub async fn sweep(
        &self,
        config: SweepConfig,
        stop: CancellationToken,
    ) -> PortResult<SweepReport> {
        self.sweep_tables(0..self.tables.len(), &config, &stop)
            .await
    }

    async fn sweep_tables(
        &self,
        tables: Range<usize>,
        config: &SweepConfig,
        stop: &CancellationToken,
    ) -> PortResult<SweepReport> {
        let mut total = SweepReport {
            complete: true,
            ..SweepReport::default()
        };
        for n in tables {
            let report = self.sweep_one(n, config, stop).await?;
            total.published += report.published;
            total.failed += report.failed;
            total.complete &= report.complete;
        }
        Ok(total)
    }

    async fn sweep_one(
        &self,
        n: usize,
        config: &SweepConfig,
        stop: &CancellationToken,
    ) -> PortResult<SweepReport> {
        let mut errors = 0;
        loop {
            match sweep::run(self, n, config, stop).await {
                Ok(report) => return Ok(report),
                Err(e) => {
                    self.or_back_off(e, errors, stop).await?;
                    if stop.is_cancelled() {
                        return Ok(SweepReport::default());
                    }
                    errors = errors.saturating_add(1);
                }
            }
        }
    }

    /// Waits before the next attempt, or gives the error back where none helps.
    async fn or_back_off(
        &self,
        e: PortError,
        errors: u32,
        stop: &CancellationToken,
    ) -> PortResult<()> {
        if e.disposition != Disposition::Backoff {
            return Err(e);
        }
        if errors == 0 {
            warn!(error = chain(&e), "the poller waits for the database");
        } else {
            debug!(error = chain(&e), "the poller waits for the database");
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(pause(errors)) => {}
        }
        Ok(())
    }

    async fn requested(&self, request: Request, stop: &CancellationToken) -> PortResult<()> {
        let tables = match request.table {
            Some(table) => usize::from(table.0)..usize::from(table.0) + 1,
            None => 0..self.tables.len(),
        };
        let config = SweepConfig {
            rate: self.config.sweep_rate,
        };
        let total = self.sweep_tables(tables, &config, stop).await?;
        if total.published + total.failed > 0 {
            info!(published = total.published, failed = total.failed, "swept");
        }
        // Nobody may wait for the answer any more.
        let _ = request.done.send(total.complete);
        Ok(())
    }

    /// One pass over every table: first what is due, then what the tail left behind, which may
    /// have to be waited for. True where a full batch moved: the next pass follows at once.
    async fn pass(&self, stop: &CancellationToken) -> PortResult<bool> {
        // Whether there is anything to deliver or not: until then the tail holds their aggregates.
        self.outlet.lock().await.recorder.again().await?;
        let (mut again, mut failed) = (false, None);
        for left_behind in [false, true] {
            for (n, spec) in self.tables.iter().enumerate() {
                let table = table_idx(n);
                if stop.is_cancelled() || self.handle.paused().is(table) {
                    continue;
                }
                match self.pass_one(table, spec, left_behind, stop).await {
                    Ok(moved) => again |= moved,
                    // One table's trouble is not the others'.
                    Err(e) if e.disposition == Disposition::Backoff => {
                        failed.get_or_insert(e);
                    }
                    Err(e) => return Err(e),
                }
            }
        }
        failed.map_or(Ok(again), Err)
    }

    async fn pass_one(
        &self,
        table: TableIdx,
        spec: &Arc<TableSpec>,
        left_behind: bool,
        stop: &CancellationToken,
    ) -> PortResult<bool> {
        let rows = if left_behind {
            self.left_behind(table, stop).await?
        } else {
            self.scan(table, &Scan::Due).await?
        };
        if rows.is_empty() {
            return Ok(false);
        }
        let full = rows.len() >= self.config.batch;
        if spec.ordering == Ordering::None {
            let mut outlet = self.outlet.lock().await;
            let tally = outlet.deliver(table, spec, rows, stop).await?;
            return Ok(full && tally.settled() > 0);
        }
        let aggregates = distinct(&rows);
        let moved = self.drain(table, spec, &aggregates, stop).await?;
        Ok(full && moved > 0)
    }

    async fn scan(&self, table: TableIdx, scan: &Scan) -> PortResult<Vec<OutboxRow>> {
        let found = self.store.scan(table, scan, self.config.batch).await?;
        Ok(found.into_iter().map(|(_, row)| row).collect())
    }

    /// Never-attempted rows that the tail has passed over, decided without clocks: the candidates,
    /// then the server's coordinate; those that are still pending when everything before it is
    /// settled are ours. While nothing tails there is nothing to wait for.
    async fn left_behind(
        &self,
        table: TableIdx,
        stop: &CancellationToken,
    ) -> PortResult<Vec<OutboxRow>> {
        let tailing = self.gate.tailing();
        let scan = Scan::LeftBehind {
            min_age: if tailing {
                self.config.pending_grace
            } else {
                Duration::ZERO
            },
        };
        let candidates = self.scan(table, &scan).await?;
        if candidates.is_empty() || !tailing {
            return Ok(candidates);
        }
        let coordinate = self.store.coordinate().await?;
        let passed = tokio::select! {
            () = stop.cancelled() => false,
            passed = self.gate.passed(&coordinate, PASSED) => passed,
        };
        if !passed {
            return Ok(Vec::new());
        }
        let before: HashSet<RowKey> = candidates.into_iter().map(|r| r.key).collect();
        let still = self.scan(table, &scan).await?;
        Ok(still
            .into_iter()
            .filter(|row| before.contains(&row.key))
            .collect())
    }

    /// Delivers what is left of some aggregates; returns how many rows were settled.
    async fn aggregates(
        &self,
        aggregates: Vec<Aggregate>,
        stop: &CancellationToken,
    ) -> PortResult<usize> {
        let mut by_table: HashMap<TableIdx, Vec<Aggregate>> = HashMap::new();
        for aggregate in aggregates {
            by_table.entry(aggregate.table).or_default().push(aggregate);
        }
        let mut settled = 0;
        for (table, aggregates) in by_table {
            if let Some(spec) = self.tables.get(usize::from(table.0)) {
                settled += self.drain(table, spec, &aggregates, stop).await?;
            }
        }
        Ok(settled)
    }

    /// Delivers the rows of some aggregates, each from its head as far as all is ready, again and
    /// again while that moves: an aggregate under steady traffic gets back to the tail as soon as
    /// nothing of it is left. Bounded, so that others get their turn.
    async fn drain(
        &self,
        table: TableIdx,
        spec: &Arc<TableSpec>,
        aggregates: &[Aggregate],
        stop: &CancellationToken,
    ) -> PortResult<usize> {
        let mut total = 0;
        for _ in 0..ROUNDS {
            if stop.is_cancelled() || self.handle.paused().is(table) {
                break;
            }
            // Nothing of the table moves between this look and the delivery.
            let mut outlet = self.outlet.lock().await;
            // About one batch in all, whatever the rows weigh.
            let each = (self.config.batch / aggregates.len().max(1)).max(1);
            let unsettled = self.store.unsettled(table, aggregates, each).await?;
            let rows = unbroken(unsettled.into_iter(), true);
            let settled = outlet.deliver(table, spec, rows, stop).await?.settled();
            total += settled;
            if settled == 0 {
                break;
            }
        }
        Ok(total)
    }
}

/// The pause after so many errors in a row.
pub(crate) fn pause(errors: u32) -> Duration {
    (BACKOFF.0 * 2_u32.pow(errors.min(5))).min(BACKOFF.1)
}

pub(crate) fn distinct<'a>(rows: impl IntoIterator<Item = &'a OutboxRow>) -> Vec<Aggregate> {
    let mut seen = HashSet::new();
    let aggregates = rows.into_iter().map(|row| &row.aggregate);
    aggregates.filter(|a| seen.insert(*a)).cloned().collect()
}

/// Rows up to, in each aggregate, the first that is not ours.
pub(crate) fn unbroken(
    rows: impl Iterator<Item = (OutboxRow, bool)>,
    ordered: bool,
) -> Vec<OutboxRow> {
    let mut broken: HashSet<Aggregate> = HashSet::new();
    rows.filter_map(|(row, ours)| {
        if ordered && broken.contains(&row.aggregate) {
            return None;
        }
        if !ours {
            broken.insert(row.aggregate);
            return None;
        }
        Some(row)
    })
    .collect()
}

pub(crate) fn table_idx(n: usize) -> TableIdx {
    TableIdx(u16::try_from(n).unwrap_or(u16::MAX))
}
