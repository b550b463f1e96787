//! The passes.
//!
//! Progress: every pass takes what is due and what the tail left behind, heads of aggregates first;
//! a full pass is followed by the next at once, and aggregates that the tail leaves are delivered
//! as soon as it says so. Resumption: nothing is kept but claims, which expire. Cancellation: the
//! batch in hand gets its outcomes and its records, then the loop ends.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use outbox_core::ports::{
    Disposition, Gate, HeldRow, Ledger, Observer, PollStore, PortError, PortResult, Publisher,
    Scan, chain,
};
use outbox_core::spec::{Ordering, TableSpec};
use outbox_core::{Aggregate, OutboxRow, RowKey, TableIdx};
use tokio::sync::{Mutex, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::config::{PollerConfig, SweepConfig, SweepReport};
use crate::deliver::Outlet;
use crate::handle::{PollerHandle, Request};
use crate::sweep;

/// How long a pass waits for the tail to pass the coordinate that decides what it left behind.
const PASSED: Duration = Duration::from_secs(5);
/// Aggregates that the tail left which are taken up at once.
const AGGREGATES: usize = 64;
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
        let (rows, bytes) = (config.max_in_flight, config.max_in_flight_bytes);
        let poller = Self {
            outlet: Mutex::new(Outlet::new(publisher, store.clone(), observer, rows, bytes)),
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

    /// Lets sweeps know which aggregates are held by rows that wait.
    #[must_use]
    pub fn with_ledger(mut self, ledger: Arc<dyn Ledger>) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// Runs until `stop`, or until the session is over or an operator must act.
    pub async fn run(&self, stop: CancellationToken) -> PortResult<()> {
        let mut requests = self.requests.lock().await;
        let (mut due, mut errors) = (Instant::now(), 0_u32);
        while !stop.is_cancelled() {
            let worked = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(request) = requests.recv() => self.requested(request, &stop).await,
                () = tokio::time::sleep_until(due) => {
                    let full = self.pass(&stop).await;
                    due = Instant::now() + match full {
                        Ok(true) => Duration::ZERO,
                        _ if self.gate.tailing() => self.config.interval,
                        _ => self.config.degraded_interval,
                    };
                    full.map(|_| ())
                }
                left = self.gate.left_behind(AGGREGATES, self.config.interval) => {
                    self.aggregates(left, &stop).await
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
        Ok(())
    }

    /// Sweeps every table that is not paused.
    pub async fn sweep(
        &self,
        config: SweepConfig,
        stop: CancellationToken,
    ) -> PortResult<SweepReport> {
        let mut total = SweepReport::default();
        for n in 0..self.tables.len() {
            let report = self.sweep_one(n, &config, &stop).await?;
            total.published += report.published;
            total.failed += report.failed;
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
        let pause = (BACKOFF.0 * 2_u32.pow(errors.min(5))).min(BACKOFF.1);
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(pause) => {}
        }
        Ok(())
    }

    async fn requested(&self, request: Request, stop: &CancellationToken) -> PortResult<()> {
        let tables = match request.table {
            Some(table) => vec![usize::from(table.0)],
            None => (0..self.tables.len()).collect(),
        };
        let mut total = SweepReport::default();
        for n in tables {
            let report = self
                .sweep_one(
                    n,
                    &SweepConfig {
                        rate: self.config.sweep_rate,
                    },
                    stop,
                )
                .await?;
            total.published += report.published;
            total.failed += report.failed;
        }
        if total != SweepReport::default() {
            info!(published = total.published, failed = total.failed, "swept");
        }
        // Nobody may wait for the answer any more.
        let _ = request.done.send(!stop.is_cancelled());
        Ok(())
    }

    /// One pass over every table; true where a table gave a full batch and some of it was settled.
    async fn pass(&self, stop: &CancellationToken) -> PortResult<bool> {
        let mut again = false;
        for (n, spec) in self.tables.iter().enumerate() {
            let table = table_idx(n);
            if stop.is_cancelled() || self.handle.paused().is(table) {
                continue;
            }
            let mut rows = self.scan(table, &Scan::Due).await?;
            // Whatever waited behind a head that was due follows it at once.
            let heads: HashSet<Aggregate> = rows.iter().map(|r| r.aggregate.clone()).collect();
            rows.extend(self.left_behind(table).await?);
            if rows.is_empty() {
                continue;
            }
            let full = rows.len() >= self.config.batch;
            let settled = self.deliver(table, spec, rows, false, stop).await?;
            again |= full && settled > 0;
            if settled > 0 && spec.ordering != Ordering::None {
                self.aggregates(heads.into_iter().collect(), stop).await?;
            }
        }
        Ok(again)
    }

    async fn scan(&self, table: TableIdx, scan: &Scan) -> PortResult<Vec<OutboxRow>> {
        let found = self.store.scan(table, scan, self.config.batch).await?;
        Ok(found.into_iter().map(|(_, row)| row).collect())
    }

    /// Never-attempted rows that the tail has passed over, decided without clocks: the candidates,
    /// then the server's coordinate; those that are still pending when everything before it is
    /// settled are ours.
    async fn left_behind(&self, table: TableIdx) -> PortResult<Vec<OutboxRow>> {
        let scan = Scan::LeftBehind {
            min_age: self.config.pending_grace,
        };
        let candidates = self.scan(table, &scan).await?;
        if candidates.is_empty() || !self.gate.tailing() {
            return Ok(candidates);
        }
        let coordinate = self.store.coordinate().await?;
        if !self.gate.passed(&coordinate, PASSED).await {
            return Ok(Vec::new());
        }
        let before: HashSet<RowKey> = candidates.into_iter().map(|r| r.key).collect();
        let still = self.scan(table, &scan).await?;
        Ok(still
            .into_iter()
            .filter(|row| before.contains(&row.key))
            .collect())
    }

    /// Delivers what is left of some aggregates, again and again while it moves: each gets back to
    /// the tail as soon as nothing of it is left.
    async fn aggregates(
        &self,
        aggregates: Vec<Aggregate>,
        stop: &CancellationToken,
    ) -> PortResult<()> {
        let mut by_table: HashMap<TableIdx, Vec<Aggregate>> = HashMap::new();
        for aggregate in aggregates {
            by_table.entry(aggregate.table).or_default().push(aggregate);
        }
        for (table, aggregates) in by_table {
            let Some(spec) = self.tables.get(usize::from(table.0)) else {
                continue;
            };
            loop {
                if stop.is_cancelled() || self.handle.paused().is(table) {
                    break;
                }
                let rows = ready_heads(
                    self.store
                        .unsettled(table, &aggregates, self.config.batch)
                        .await?,
                );
                if rows.is_empty() || self.deliver(table, spec, rows, true, stop).await? == 0 {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Delivers candidates, each aggregate from its head; returns how many rows were settled.
    /// `whole`: the rows are all that is ready of their aggregates already.
    async fn deliver(
        &self,
        table: TableIdx,
        spec: &TableSpec,
        rows: Vec<OutboxRow>,
        whole: bool,
        stop: &CancellationToken,
    ) -> PortResult<usize> {
        let rows = if whole || spec.ordering == Ordering::None {
            rows
        } else {
            self.heads(table, rows).await?
        };
        let held: Vec<HeldRow> = rows
            .iter()
            .map(|r| HeldRow {
                key: r.key.clone(),
                aggregate: r.aggregate.clone(),
            })
            .collect();
        let granted = self.gate.hold(&held).await;
        let ordered = spec.ordering != Ordering::None;
        let rows = unbroken(rows.into_iter().zip(granted), ordered);
        let delivered = self
            .claim_and_deliver(table, spec, rows, ordered, stop)
            .await;
        self.gate.done(&held).await;
        delivered
    }

    async fn claim_and_deliver(
        &self,
        table: TableIdx,
        spec: &TableSpec,
        rows: Vec<OutboxRow>,
        ordered: bool,
        stop: &CancellationToken,
    ) -> PortResult<usize> {
        if rows.is_empty() {
            return Ok(0);
        }
        let outlet = self.outlet.lock().await;
        let keys: Vec<RowKey> = rows.iter().map(|r| r.key.clone()).collect();
        let (token, claimed) = self.store.claim(table, &keys).await?;
        let claimed: HashSet<RowKey> = claimed.into_iter().collect();
        let ours = rows.into_iter().map(|row| {
            let is_ours = claimed.contains(&row.key);
            (row, is_ours)
        });
        let ours = unbroken(ours, ordered);
        let kept: HashSet<&RowKey> = ours.iter().map(|r| &r.key).collect();
        let surplus: Vec<RowKey> = claimed
            .iter()
            .filter(|k| !kept.contains(k))
            .cloned()
            .collect();
        if !surplus.is_empty() {
            self.store.release(&token, &surplus).await?;
        }
        Ok(outlet.deliver(spec, &token, ours, stop).await?.settled)
    }

    /// The candidates with what stands before them in their aggregates, as far as all of it is
    /// ready: an aggregate whose head waits gives nothing.
    async fn heads(
        &self,
        table: TableIdx,
        candidates: Vec<OutboxRow>,
    ) -> PortResult<Vec<OutboxRow>> {
        let mut aggregates: Vec<Aggregate> = Vec::new();
        let mut seen = HashSet::new();
        for row in &candidates {
            if seen.insert(row.aggregate.clone()) {
                aggregates.push(row.aggregate.clone());
            }
        }
        let ready = ready_heads(
            self.store
                .unsettled(table, &aggregates, self.config.batch)
                .await?,
        );
        let wanted: HashSet<&RowKey> = candidates.iter().map(|r| &r.key).collect();
        let mut last: HashMap<Aggregate, usize> = HashMap::new();
        for (i, row) in ready.iter().enumerate() {
            if wanted.contains(&row.key) {
                last.insert(row.aggregate.clone(), i);
            }
        }
        Ok(ready
            .into_iter()
            .enumerate()
            .filter(|(i, row)| last.get(&row.aggregate).is_some_and(|l| i <= l))
            .map(|(_, row)| row)
            .collect())
    }
}

/// The ready prefix of each aggregate.
fn ready_heads(unsettled: Vec<(OutboxRow, bool)>) -> Vec<OutboxRow> {
    unbroken(unsettled.into_iter(), true)
}

/// Rows up to, in each aggregate, the first that is not ours.
fn unbroken(rows: impl Iterator<Item = (OutboxRow, bool)>, ordered: bool) -> Vec<OutboxRow> {
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
