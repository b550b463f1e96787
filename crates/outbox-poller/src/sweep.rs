//! The sweep: every pending row of a table, at the speed of the publisher.
//!
//! Progress: pages in delivery order, the next one read while the broker answers for the last,
//! outcomes recorded in batches beside both. No claims: this instance leads, records compare, and
//! every write is fenced. Resumption: after the loss of a channel, and where rows waited for too
//! long, reading begins again before the first row without a verdict, so that what was abandoned
//! meanwhile is not published. Cancellation: reading and publishing stop, what has an answer is
//! recorded.

mod page;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use outbox_core::ports::{ClaimToken, Generation, PortResult, Publisher, RowOutcome};
use outbox_core::spec::{Ordering, TableSpec};
use outbox_core::{Aggregate, OutboxRow, TableIdx};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use self::page::{Page, Pages, Reader, Standing, Suspects};
use crate::config::{SweepConfig, SweepReport};
use crate::deliver::{DRAIN, FRESH, Outlet};
use crate::flight::{Blocked, Flight};
use crate::poller::{Poller, pause, table_idx};
use crate::record::{Attempt, BATCH, KeptAs, attempt, held};

/// Rows of one page.
const PAGE: usize = 1000;
/// Aggregates that are known beforehand to be held.
const HOLDING: usize = 10_000;
/// Aggregates of which a row was refused; with more of them the sweep leaves the rest to passes.
const REFUSED: usize = 1_000_000;
/// Outcomes wait at most this long for a batch to fill.
const FLUSH: Duration = Duration::from_millis(30);

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
    let mut outlet = poller.outlet.lock().await;
    if outlet.paused(table) {
        return Ok(SweepReport::default());
    }
    outlet.recorder.again().await?;
    let suspects = suspects(poller, table, spec).await?;
    let page = config
        .rate
        .and_then(|rate| usize::try_from(rate).ok())
        .map_or(PAGE, |rate| rate.clamp(1, PAGE));
    let reader = Reader {
        store: poller.store.clone(),
        gate: poller.gate.clone(),
        table,
        suspects: Arc::new(suspects),
        limit: page,
    };
    let mut sweep = Sweep {
        flight: Flight::new(spec.clone(), outlet.limits),
        outlet: &mut outlet,
        table,
        stop,
        reader,
        pages: Pages::default(),
        reading: None,
        recording: None,
        since: None,
        generation: None,
        wants_channel: false,
        under_record: Vec::new(),
        closed: Blocked::default(),
        exhausted: false,
        ending: None,
        errors: 0,
        wait_until: None,
        pace: config.rate.map(Pace::new),
        report: SweepReport::default(),
    };
    sweep.drive().await?;
    Ok(sweep.report)
}

/// Whose heads are to be looked at. Before the tail runs nobody else makes rows wait, and those
/// that wait already are known at once; else any row may stand behind one that is not due.
async fn suspects(poller: &Poller, table: TableIdx, spec: &TableSpec) -> PortResult<Suspects> {
    if spec.ordering == Ordering::None {
        return Ok(Suspects::Nobody);
    }
    let Some(ledger) = poller.ledger.as_ref().filter(|_| !poller.gate.tailing()) else {
        return Ok(Suspects::Everybody);
    };
    let holding = ledger.holding(table, HOLDING).await?;
    if holding.len() >= HOLDING {
        return Ok(Suspects::Everybody);
    }
    Ok(Suspects::These(
        holding
            .into_iter()
            .map(|(aggregate, _)| aggregate)
            .collect(),
    ))
}

/// Why a sweep ends early, and since when.
#[derive(Clone, Copy)]
struct Ending {
    /// Answers are waited for until then; without it for as long as they take.
    until: Option<Instant>,
}

struct Sweep<'a> {
    flight: Flight,
    outlet: &'a mut Outlet,
    table: TableIdx,
    stop: &'a CancellationToken,
    reader: Reader,
    pages: Pages,
    reading: Option<BoxFuture<'static, PortResult<Page>>>,
    recording: Option<BoxFuture<'static, Attempt>>,
    /// When the oldest outcome that is not being recorded came.
    since: Option<Instant>,
    generation: Option<Generation>,
    /// Rows were given back for want of a channel: nothing is read again before there is one.
    wants_channel: bool,
    /// Aggregates of the outcomes that are being recorded.
    under_record: Vec<Aggregate>,
    /// Aggregates with a row that waits: what was loaded before it goes, and nothing after it.
    closed: Blocked,
    /// The last page was read.
    exhausted: bool,
    ending: Option<Ending>,
    /// Attempts in a row that found the database away, and the end of the pause after the last.
    errors: u32,
    wait_until: Option<Instant>,
    pace: Option<Pace>,
    report: SweepReport,
}

/// At most so many rows a second, with the allowance of a tenth of a second's at once.
struct Pace {
    rate: f64,
    /// Rows that may go now.
    room: f64,
    at: Instant,
}

impl Pace {
    fn new(rate: u32) -> Self {
        Self {
            rate: f64::from(rate.max(1)),
            room: 0.0,
            at: Instant::now(),
        }
    }

    /// Rows that may go, out of at most `want`.
    fn room(&mut self, want: usize) -> usize {
        let now = Instant::now();
        let earned = now.duration_since(self.at).as_secs_f64() * self.rate;
        self.at = now;
        self.room = (self.room + earned).min((self.rate / 10.0).max(1.0));
        let mut room = 0;
        while room < want && self.room >= 1.0 {
            self.room -= 1.0;
            room += 1;
        }
        room
    }
}

impl Sweep<'_> {
    async fn drive(&mut self) -> PortResult<()> {
        loop {
            self.check();
            self.turn_back().await;
            self.read();
            self.publish();
            self.free_skipped().await;
            self.record();
            if self.is_done() {
                self.report.complete = self.ending.is_none();
                return Ok(());
            }
            self.step().await?;
        }
    }

    /// Whether to go on.
    fn check(&mut self) {
        let now = Instant::now();
        if self.ending.is_none() {
            let broken = self.outlet.breaker(self.table).is_some_and(|b| b.is_open());
            if self.stop.is_cancelled() {
                self.ending = Some(Ending {
                    until: Some(now + DRAIN),
                });
            } else if broken
                || self.outlet.paused(self.table)
                || self.flight.blocked.len() + self.closed.len() >= REFUSED
            {
                info!(
                    table = self.table.0,
                    "the sweep ends early; passes deliver the rest"
                );
                self.ending = Some(Ending { until: None });
            }
        } else if let Some(ending) = &mut self.ending
            && self.stop.is_cancelled()
        {
            ending.until.get_or_insert(now + DRAIN);
        }
        let waits = self.flight.first_loaded();
        let stale = waits.is_some_and(|place| self.pages.age(place) > FRESH);
        self.flight.over |= self.ending.is_some() || stale;
    }

    /// Once a flight is over and everything about it is known and recorded: gives its rows back
    /// and reads them again.
    async fn turn_back(&mut self) {
        // A page that is being read may be held in the tail by now: it is awaited.
        let open = self.flight.out() > 0
            || !self.flight.outcomes.is_empty()
            || self.recording.is_some()
            || self.reading.is_some();
        if !self.flight.over || open {
            return;
        }
        let back = self.flight.give_back();
        if let Some((first, _)) = back.first() {
            self.pages.turn_back(*first);
            self.exhausted = false;
            // However long the broker is away, its rows are read once more and no oftener.
            self.wants_channel = true;
        }
        let rows: Vec<OutboxRow> = back.into_iter().map(|(_, row)| row).collect();
        self.done(&rows).await;
        self.exhausted |= self.ending.is_some();
        self.generation = None;
        self.flight.over = false;
    }

    fn read(&mut self) {
        let room = self.flight.loaded() < self.reader.limit
            && self.outlet.recorder.backlog() < self.outlet.limits.rows
            && !(self.wants_channel && self.generation.is_none());
        if room && !self.flight.over && !self.exhausted && self.reading.is_none() {
            self.pages.forget_before(self.flight.first());
            let reader = self.reader.clone();
            let after = self.pages.cursor.clone();
            let open = self.open();
            self.reading = Some(Box::pin(reader.read(after, open)));
        }
    }

    /// How many rows of each suspect the table may show as unsettled though they are this sweep's.
    fn open(&self) -> HashMap<Aggregate, usize> {
        let mut open = HashMap::new();
        let aggregates = self.flight.open().chain(&self.under_record);
        for aggregate in aggregates.chain(self.outlet.recorder.aggregates()) {
            if self.reader.suspects.contains(aggregate) {
                *open.entry(aggregate.clone()).or_default() += 1;
            }
        }
        open
    }

    fn publish(&mut self) {
        let Some(generation) = self.generation else {
            return;
        };
        if self.outlet.recorder.is_away() {
            return; // what cannot be recorded is not to pile up
        }
        let loaded = self.flight.loaded();
        let room = self.pace.as_mut().map_or(usize::MAX, |p| p.room(loaded));
        if room > 0 {
            self.outlet.submit(&mut self.flight, generation, room);
        }
    }

    /// Rows behind a refused one stay in the table.
    async fn free_skipped(&mut self) {
        let skipped = self.flight.skipped();
        self.done(&skipped).await;
    }

    fn record(&mut self) {
        if !self.flight.outcomes.is_empty() {
            self.since.get_or_insert_with(Instant::now);
        }
        let waits = self.wait_until.is_some_and(|at| at > Instant::now());
        if self.recording.is_some() || waits {
            return;
        }
        if let Some((token, kept)) = self.outlet.recorder.due() {
            self.begin_record(token, kept);
            return;
        }
        let count = self.flight.outcomes.len();
        let aged = self.since.is_some_and(|at| at.elapsed() >= FLUSH);
        if count >= BATCH || (count > 0 && (aged || self.flight.out() == 0)) {
            let batch: Vec<RowOutcome> = self.flight.outcomes.drain(..count.min(BATCH)).collect();
            self.since = (count > BATCH).then(Instant::now);
            self.begin_record(None, batch);
        }
    }

    fn begin_record(&mut self, token: Option<ClaimToken>, outcomes: Vec<RowOutcome>) {
        let store = self.outlet.recorder.store.clone();
        self.under_record = outcomes.iter().map(|o| o.aggregate.clone()).collect();
        self.recording = Some(Box::pin(attempt(store, token, outcomes)));
    }

    fn is_done(&self) -> bool {
        let settled = self.exhausted
            && self.reading.is_none()
            && self.recording.is_none()
            && !self.flight.over
            && self.flight.loaded() == 0
            && self.flight.out() == 0
            && self.flight.outcomes.is_empty()
            && !self.outlet.recorder.is_away();
        let late = self.ending.and_then(|e| e.until);
        settled || late.is_some_and(|at| Instant::now() >= at)
    }

    /// Waits for whatever comes next.
    async fn step(&mut self) -> PortResult<()> {
        let publisher: Arc<dyn Publisher> = self.outlet.publisher.clone();
        let idle = self.flight.out() == 0 && !self.flight.over;
        let wants_channel = self.generation.is_none()
            && idle
            && (self.flight.loaded() > 0 || (self.wants_channel && !self.exhausted));
        let tick = tokio::time::sleep(self.tick());
        let stopping = self.stop.is_cancelled();
        tokio::select! {
            biased;
            answers = publisher.outcomes(), if self.flight.out() > 0 => {
                self.outlet.answers(self.table, &mut self.flight, answers);
            }
            made = wait(&mut self.recording), if self.recording.is_some() => {
                self.recording = None;
                self.recorded(made).await?;
            }
            page = wait(&mut self.reading), if self.reading.is_some() => {
                self.reading = None;
                self.page(page?).await;
            }
            generation = publisher.ready(), if wants_channel => {
                (self.generation, self.wants_channel) = (Some(generation), false);
            }
            () = self.stop.cancelled(), if !stopping => {}
            () = tick => {}
        }
        Ok(())
    }

    /// When something may be due that nobody tells us: a flush, the pace, a pause, a row that
    /// waited for too long.
    fn tick(&self) -> Duration {
        if self.pace.is_some() && self.flight.loaded() > 0 {
            return Duration::from_millis(10);
        }
        match self.since {
            Some(_) if self.recording.is_none() => FLUSH,
            _ => Duration::from_millis(100),
        }
    }

    async fn recorded(&mut self, made: Attempt) -> PortResult<()> {
        self.under_record.clear();
        let tally = self.outlet.recorder.made(made).await?;
        self.report.published += tally.published as u64;
        self.report.failed += tally.failed as u64;
        if self.outlet.recorder.is_away() {
            self.wait_until = Some(Instant::now() + pause(self.errors));
            self.errors = self.errors.saturating_add(1);
        } else {
            (self.errors, self.wait_until) = (0, None);
        }
        Ok(())
    }

    /// Takes a page: its rows wait for their turn, unless the tail has them or their aggregate, or
    /// stand behind a row that is not due.
    async fn page(&mut self, page: Page) {
        if self.flight.over {
            // It is read again with the rest.
            let rows: Vec<OutboxRow> = page.rows.into_iter().map(|(row, _)| row).collect();
            return self.done(&rows).await;
        }
        // A page of large messages ends early: only an empty one is the end.
        if page.rows.is_empty() {
            self.exhausted = true;
            return;
        }
        self.pages.begin(&page, self.flight.next_place());
        let recorder = &self.outlet.recorder;
        let clear =
            page.clear(|key| self.pages.contains(key) || recorder.kept(key) == Some(KeptAs::Sent));
        let mut back = Vec::new();
        for (row, granted) in page.rows {
            let kept = self.outlet.recorder.kept(&row.key);
            if kept == Some(KeptAs::Sent) {
                continue;
            }
            let place = clear.of(&row);
            if kept.is_some() || !granted || place == Standing::Behind {
                if self.flight.is_ordered() {
                    self.closed.insert(&row.aggregate);
                }
                back.push(row);
            } else if place == Standing::Gone || self.closed.contains(&row.aggregate) {
                back.push(row);
            } else {
                back.extend(self.flight.push(row));
            }
        }
        debug!(table = self.table.0, left = back.len(), "a page was read");
        self.done(&back).await;
    }

    /// Gives rows back to the tail's order.
    async fn done(&mut self, rows: &[OutboxRow]) {
        let rows: Vec<_> = rows
            .iter()
            .filter(|row| self.outlet.recorder.kept(&row.key).is_none())
            .map(held)
            .collect();
        self.outlet.recorder.done(&rows).await;
    }
}

/// The result of work that is under way. The caller takes the work away then.
async fn wait<T>(work: &mut Option<BoxFuture<'static, T>>) -> T {
    match work {
        Some(work) => work.await,
        None => std::future::pending().await,
    }
}
