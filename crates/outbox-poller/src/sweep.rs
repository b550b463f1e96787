//! The sweep: every pending row of a table, at the speed of the publisher.
//!
//! Progress: pages in delivery order, the next one read while the broker answers for the last,
//! outcomes recorded in batches beside both. No claims: this instance leads, records compare, and
//! every write is fenced. Resumption: a sweep that ends early is begun again and finds what is
//! still pending. Cancellation: reading and publishing stop, what has an answer is recorded.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use futures_util::future::BoxFuture;
use outbox_core::message::Message;
use outbox_core::ports::{
    Cursor, Generation, HeldRow, PortResult, PublishOutcome, Recorded, RowOutcome, Scan, Ticket,
    Verdict,
};
use outbox_core::spec::{Ordering, TableSpec};
use outbox_core::{Aggregate, OutboxRow};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::{SweepConfig, SweepReport};
use crate::deliver::Outlet;
use crate::poller::{Poller, table_idx};
use crate::record::{outcome, record, verdict};

/// Rows of one page, and of one record.
const PAGE: usize = 1000;
/// Aggregates held by rows that wait; with more of them the sweep leaves the order to the passes.
const HOLDING: usize = 100_000;
/// Outcomes wait at most this long for a batch to fill.
const FLUSH: Duration = Duration::from_millis(50);
/// How long a stopped sweep waits for the broker's last answers.
const DRAIN: Duration = Duration::from_secs(5);

/// Sweeps one table.
pub(crate) async fn run(
    poller: &Poller,
    n: usize,
    config: &SweepConfig,
    stop: &CancellationToken,
) -> PortResult<SweepReport> {
    let table = table_idx(n);
    let Some(spec) = poller.tables.get(n) else {
        return Ok(SweepReport::default());
    };
    if poller.handle.paused().is(table) {
        return Ok(SweepReport::default());
    }
    let outlet = poller.outlet.lock().await;
    let mut blocked = HashSet::new();
    if let (Some(ledger), true) = (&poller.ledger, spec.ordering != Ordering::None) {
        // Rows that wait for their retry: what stands behind them is not due either.
        let holding = ledger.holding(table, HOLDING).await?;
        blocked.extend(holding.into_iter().map(|(aggregate, _)| aggregate));
    }
    let mut sweep = Sweep::new(poller, &outlet, spec, config, stop.clone(), blocked);
    sweep.drive(table).await?;
    Ok(sweep.report)
}

type Reading<'a> = BoxFuture<'a, PortResult<Vec<(Cursor, OutboxRow)>>>;
type Recording<'a> = BoxFuture<'a, PortResult<Vec<Recorded>>>;

struct Sweep<'a> {
    poller: &'a Poller,
    outlet: &'a Outlet,
    spec: &'a TableSpec,
    stop: CancellationToken,
    /// Rows to publish, by their place in the sweep.
    waiting: BTreeMap<u64, OutboxRow>,
    in_flight: HashMap<Ticket, (u64, OutboxRow)>,
    bytes: usize,
    /// Rows of a lost channel, published again once all of its answers are in.
    lost: BTreeMap<u64, OutboxRow>,
    /// Aggregates of which something waits or was refused.
    blocked: HashSet<Aggregate>,
    busy: HashSet<Aggregate>,
    outcomes: Vec<RowOutcome>,
    since: Option<Instant>,
    held: Vec<HeldRow>,
    next: u64,
    generation: Option<Generation>,
    cursor: Option<Cursor>,
    exhausted: bool,
    pace: Option<Pace>,
    report: SweepReport,
}

/// At most so many rows a second, with the allowance of a tenth of it at once.
struct Pace {
    rate: u32,
    from: Instant,
    sent: u64,
}

impl Pace {
    fn room(&self) -> usize {
        let allowed = self
            .from
            .elapsed()
            .as_secs_f64()
            .mul_add(f64::from(self.rate), f64::from(self.rate) / 10.0);
        let whole = Duration::try_from_secs_f64(allowed).map_or(u64::MAX, |d| d.as_secs());
        usize::try_from(whole.saturating_sub(self.sent)).unwrap_or(usize::MAX)
    }
}

impl<'a> Sweep<'a> {
    fn new(
        poller: &'a Poller,
        outlet: &'a Outlet,
        spec: &'a TableSpec,
        config: &SweepConfig,
        stop: CancellationToken,
        blocked: HashSet<Aggregate>,
    ) -> Self {
        Self {
            poller,
            outlet,
            spec,
            stop,
            waiting: BTreeMap::new(),
            in_flight: HashMap::new(),
            bytes: 0,
            lost: BTreeMap::new(),
            blocked,
            busy: HashSet::new(),
            outcomes: Vec::new(),
            since: None,
            held: Vec::new(),
            next: 0,
            generation: None,
            cursor: None,
            exhausted: false,
            pace: config.rate.map(|rate| Pace {
                rate,
                from: Instant::now(),
                sent: 0,
            }),
            report: SweepReport::default(),
        }
    }

    async fn drive(&mut self, table: outbox_core::TableIdx) -> PortResult<()> {
        let (poller, outlet) = (self.poller, self.outlet);
        let mut reading: Option<Reading<'a>> = None;
        let mut recording: Option<(Vec<RowOutcome>, Recording<'a>)> = None;
        let mut drain: Option<Instant> = None;
        loop {
            let stopping = self.stop.is_cancelled() || poller.handle.paused().is(table);
            if stopping {
                drain.get_or_insert_with(|| Instant::now() + DRAIN);
                self.waiting.clear();
                self.lost.clear();
                self.exhausted = true;
                reading = None;
            }
            if reading.is_none() && !self.exhausted && self.waiting.len() < PAGE {
                let scan = Scan::Pending {
                    after: self.cursor.clone(),
                };
                reading = Some(Box::pin(async move {
                    poller.store.scan(table, &scan, PAGE).await
                }));
            }
            self.submit();
            let full = self.outcomes.len() >= PAGE;
            let aged =
                self.since.is_some_and(|at| at.elapsed() >= FLUSH) || self.in_flight.is_empty();
            if recording.is_none() && !self.outcomes.is_empty() && (full || aged) {
                let batch: Vec<RowOutcome> = self
                    .outcomes
                    .drain(..self.outcomes.len().min(PAGE))
                    .collect();
                self.since = (!self.outcomes.is_empty()).then(Instant::now);
                let (rows, stop) = (batch.clone(), self.stop.clone());
                let work = async move {
                    record(&outlet.store, &outlet.observer, None, &rows, &stop).await
                };
                recording = Some((batch, Box::pin(work)));
            }
            let idle = self.waiting.is_empty() && self.lost.is_empty() && self.in_flight.is_empty();
            if self.exhausted
                && reading.is_none()
                && recording.is_none()
                && idle
                && self.outcomes.is_empty()
            {
                return Ok(());
            }
            if drain.is_some_and(|at| Instant::now() > at) && recording.is_none() {
                return Ok(());
            }
            let wants_channel = self.in_flight.is_empty()
                && self.generation.is_none()
                && !(self.waiting.is_empty() && self.lost.is_empty());
            let timer = self.since.map_or(FLUSH, |at| {
                (at + FLUSH).saturating_duration_since(Instant::now())
            });
            tokio::select! {
                biased;
                answers = outlet.publisher.outcomes(), if !self.in_flight.is_empty() => self.answers(answers),
                done = poll_recording(&mut recording), if recording.is_some() => {
                    let (batch, recorded) = done?;
                    self.recorded(&batch, &recorded).await;
                }
                page = poll_reading(&mut reading), if reading.is_some() => self.page(page?).await,
                generation = outlet.publisher.ready(), if wants_channel => self.generation = Some(generation),
                () = self.stop.cancelled(), if !stopping => {}
                () = tokio::time::sleep(timer.max(Duration::from_millis(5))) => {}
            }
        }
    }

    /// Takes a page: its rows wait for their turn, unless the tail has them or their aggregate.
    async fn page(&mut self, page: Vec<(Cursor, OutboxRow)>) {
        // Only an empty page is the end: a page of large messages ends early.
        let Some((cursor, _)) = page.last() else {
            self.exhausted = true;
            return;
        };
        self.cursor = Some(cursor.clone());
        let rows: Vec<OutboxRow> = page.into_iter().map(|(_, row)| row).collect();
        let granted = if self.poller.gate.tailing() {
            let held: Vec<HeldRow> = rows.iter().map(held).collect();
            let granted = self.poller.gate.hold(&held).await;
            self.held.extend(held);
            granted
        } else {
            vec![true; rows.len()]
        };
        let mut free = Vec::new();
        for (row, granted) in rows.into_iter().zip(granted) {
            let ordered = self.spec.ordering != Ordering::None;
            if granted && !(ordered && self.blocked.contains(&row.aggregate)) {
                self.waiting.insert(self.next, row);
                self.next += 1;
            } else {
                if ordered {
                    self.blocked.insert(row.aggregate.clone());
                }
                free.push(held(&row));
            }
        }
        self.done(free).await;
    }

    /// Hands over what fits.
    fn submit(&mut self) {
        if self.in_flight.is_empty() && !self.lost.is_empty() {
            // Every answer of the lost channel is in: again, in order.
            let mut lost = std::mem::take(&mut self.lost);
            self.waiting.append(&mut lost);
        }
        let Some(generation) = self.generation.filter(|_| self.lost.is_empty()) else {
            return;
        };
        let mut room = self.pace.as_ref().map_or(usize::MAX, Pace::room);
        let mut messages: Vec<(Ticket, Message)> = Vec::new();
        let mut later = BTreeMap::new();
        while room > 0
            && self.in_flight.len() < self.outlet.max_rows
            && (self.bytes < self.outlet.max_bytes || self.in_flight.is_empty())
            && let Some((place, row)) = self.waiting.pop_first()
        {
            if self.spec.ordering != Ordering::None && self.blocked.contains(&row.aggregate) {
                continue;
            }
            if self.spec.ordering == Ordering::Strict && self.busy.contains(&row.aggregate) {
                later.insert(place, row);
                // Bounded: a page of one aggregate is looked through once per answer.
                if later.len() >= PAGE {
                    break;
                }
                continue;
            }
            match row.message.clone() {
                Err(failure) => {
                    let retry_count = row.state.retry_count;
                    self.note(outcome(
                        &row,
                        Verdict::Failed {
                            failure,
                            retry_count,
                            message: None,
                        },
                    ));
                }
                Ok(message) => {
                    let ticket = self.outlet.ticket();
                    self.bytes += message.weight();
                    if self.spec.ordering == Ordering::Strict {
                        self.busy.insert(row.aggregate.clone());
                    }
                    self.in_flight.insert(ticket, (place, row));
                    messages.push((ticket, message));
                    room -= 1;
                }
            }
        }
        self.waiting.append(&mut later);
        if !messages.is_empty() {
            if let Some(pace) = &mut self.pace {
                pace.sent += messages.len() as u64;
            }
            self.outlet.publisher.submit(generation, messages);
        }
    }

    fn answers(&mut self, answers: Vec<(Ticket, PublishOutcome)>) {
        for (ticket, answer) in answers {
            let Some((place, row)) = self.in_flight.remove(&ticket) else {
                continue;
            };
            self.bytes = self
                .bytes
                .saturating_sub(row.message.as_ref().map_or(0, Message::weight));
            self.busy.remove(&row.aggregate);
            match verdict(self.spec, answer, row.state.retry_count) {
                None => {
                    self.generation = None;
                    self.lost.insert(place, row);
                }
                Some(verdict) => {
                    if let Verdict::Failed { .. } = verdict {
                        self.blocked.insert(row.aggregate.clone());
                    }
                    self.note(outcome(&row, verdict));
                }
            }
        }
    }

    fn note(&mut self, outcome: RowOutcome) {
        self.outcomes.push(outcome);
        self.since.get_or_insert_with(Instant::now);
    }

    async fn recorded(&mut self, batch: &[RowOutcome], recorded: &[Recorded]) {
        for recorded in recorded {
            match recorded {
                Recorded::Sent => self.report.published += 1,
                Recorded::WillRetry | Recorded::Failed => self.report.failed += 1,
                Recorded::Gone | Recorded::Busy => {}
            }
        }
        let rows = batch.iter().map(|o| HeldRow {
            key: o.key.clone(),
            aggregate: o.aggregate.clone(),
        });
        self.done(rows.collect()).await;
    }

    /// Gives rows back to the tail's order, where they were held.
    async fn done(&mut self, rows: Vec<HeldRow>) {
        if !self.held.is_empty() && !rows.is_empty() {
            self.poller.gate.done(&rows).await;
        }
    }
}

fn held(row: &OutboxRow) -> HeldRow {
    HeldRow {
        key: row.key.clone(),
        aggregate: row.aggregate.clone(),
    }
}

async fn poll_reading(reading: &mut Option<Reading<'_>>) -> PortResult<Vec<(Cursor, OutboxRow)>> {
    let Some(running) = reading else {
        return std::future::pending().await;
    };
    let done = running.await;
    *reading = None;
    done
}

async fn poll_recording(
    recording: &mut Option<(Vec<RowOutcome>, Recording<'_>)>,
) -> PortResult<(Vec<RowOutcome>, Vec<Recorded>)> {
    let Some((_, running)) = recording else {
        return std::future::pending().await;
    };
    let done = running.await;
    let batch = recording.take().map(|(batch, _)| batch).unwrap_or_default();
    Ok((batch, done?))
}
