//! The tail's loop: from the stream through the window to the broker and back into the ledger.
//!
//! **Progress.** Rows of a committed group enter the window and, in order, the lanes of their
//! aggregates. At the live tip they are handed to the broker at once; what was committed a while
//! ago, or lies before the coordinate that the server had at open, is read back first, in batches
//! that overlap the publishing of the batch before. The broker's answers become outcomes, and
//! outcomes are recorded in one transaction with the low watermark: the end of the last group
//! behind which nothing is unsettled. A row that cannot be published now is left to its table and
//! holds its aggregate, which is progress too.
//!
//! **Resumption.** A new process starts behind the stored watermark and reads everything behind
//! it again; the rows among it that were recorded are recognised when they are read back. Within
//! one process a lost stream is opened again behind the last group that was read completely, and
//! the window is kept. A lost channel to the broker costs nobody an attempt: what has no answer
//! goes out again, in order, and is read back first if that took long. Rows with a confirm whose
//! record is pending never go out again.
//!
//! **Cancellation.** A stop ends the reading and the publishing at once; then a separate drain
//! takes the broker's answers, records them, and stores the position a last time, to a deadline.
//! What is still open then will be read again. A relay that is dropped loses nothing either:
//! nothing is stored that is not settled.

mod config;
mod desk;
mod drain;
mod handle;
mod link;
mod look;
mod read;
mod report;
mod settle;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use outbox_core::Position;
use outbox_core::ports::{
    Behind, Generation, Ledger, Observer, PortError, PortResult, PublishOutcome, Publisher,
    SettleReport, Ticket,
};
use outbox_core::spec::{OnUnroutable, Ordering, TableSpec};
use outbox_core::{Failure, TableIdx};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

pub use config::{RelayConfig, RelayError};
pub use handle::{Paused, RelayHandle, RelayStatus};

use crate::group::Source;
use desk::Desk;
use handle::Command;
use link::{Job, Link, LinkEvent, backoff, done};
use look::{Checked, Looked};
use settle::{Batch, fatal, settle};

/// Microseconds since the epoch, UTC.
type Clock = Arc<dyn Fn() -> i64 + Send + Sync>;

/// Held rows loaded at the start; a table that has more is held as a whole.
const HOLDING: usize = 10_000;
/// One session of tailing. Made with its handle, run once.
pub struct Relay {
    desk: Desk,
    link: Link,
    ledger: Arc<dyn Ledger>,
    handle: RelayHandle,
    commands: mpsc::Receiver<Command>,
    pauses: watch::Receiver<Paused>,
    settling: Option<Job<(Batch, PortResult<SettleReport>)>>,
    settling_busy: Option<Job<(Batch, PortResult<SettleReport>)>>,
    looking: Option<Job<Looked>>,
    look_after: Option<Instant>,
    look_failures: u32,
    checking: Option<Job<Checked>>,
    check_at: Instant,
    check_failures: u32,
    full_since: Option<Instant>,
    tick_at: Instant,
    told_at: Instant,
    mark_told: u64,
    obeying: Option<u64>,
    /// Why nothing more can be read, and until when what was read may take to be delivered.
    ending: Option<(RelayError, Instant)>,
}

/// What the loop wakes up for.
enum Event {
    Stop,
    Command(Command),
    Pause,
    Settled(Batch, PortResult<SettleReport>),
    Outcomes(Vec<(Ticket, PublishOutcome)>),
    Looked(Looked),
    Ready(Generation),
    Checked(Checked),
    Time,
    Link(LinkEvent),
}

/// How the loop goes on after an event.
enum Next {
    On,
    Stop,
}

impl Relay {
    /// A relay for `tables`, in the order of their [`TableIdx`].
    #[must_use]
    pub fn new(
        config: RelayConfig,
        tables: Vec<Arc<TableSpec>>,
        source: Box<dyn Source>,
        ledger: Arc<dyn Ledger>,
        publisher: Arc<dyn Publisher>,
        observer: Arc<dyn Observer>,
    ) -> (Self, RelayHandle) {
        let (handle, commands) = RelayHandle::new(Paused::default());
        let desk = Desk::new(config, tables, publisher, observer, Arc::new(wall_clock));
        let now = Instant::now();
        let relay = Self {
            desk,
            link: Link::new(source),
            ledger,
            pauses: handle.shared.paused.subscribe(),
            handle: handle.clone(),
            commands,
            settling: None,
            settling_busy: None,
            looking: None,
            look_after: None,
            look_failures: 0,
            checking: None,
            check_at: now,
            check_failures: 0,
            full_since: None,
            tick_at: now,
            told_at: now,
            mark_told: 0,
            obeying: None,
            ending: None,
        };
        (relay, handle)
    }

    /// Takes the wall clock from `clock` (microseconds since the epoch) instead of the system.
    #[must_use]
    pub fn with_clock(mut self, clock: impl Fn() -> i64 + Send + Sync + 'static) -> Self {
        self.desk.clock = Arc::new(clock);
        self
    }

    /// Tails from `start` until it is stopped, or until something happens that it cannot mend.
    ///
    /// # Errors
    /// See [`RelayError`]. Whatever is unavailable is waited for in here.
    pub async fn run(mut self, start: Position, stop: CancellationToken) -> Result<(), RelayError> {
        let early = self.handle.shared.start();
        let result = self.session(start, early, &stop).await;
        self.desk.observer.tail_connected(false);
        self.handle.shared.over();
        result
    }

    async fn session(
        &mut self,
        start: Position,
        early: Vec<outbox_core::ports::HeldRow>,
        stop: &CancellationToken,
    ) -> Result<(), RelayError> {
        self.desk.records.stored = Some(start.clone());
        self.desk.window = Desk::window(self.desk.config, Some(start.clone()));
        self.handle.shared.settled.send_replace(Some(start));
        tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            loaded = self.load_holds() => loaded?,
        }
        let now = self.desk.now();
        self.desk.lanes.poller_asks(&early, |_| false, now);
        self.desk
            .set_paused(self.pauses.borrow_and_update().clone());
        let ended = self.tail(stop).await;
        match &ended {
            // Nothing may be written any more.
            Err(RelayError::Fenced(_) | RelayError::Ledger(_)) => {}
            _ => self.drain().await?,
        }
        ended
    }

    /// Rows that hold their aggregates by the table's account.
    async fn load_holds(&mut self) -> Result<(), RelayError> {
        let ordered = |t: &TableIdx| {
            let spec = self.desk.specs.get(usize::from(t.0));
            spec.is_some_and(|s| s.ordering != Ordering::None)
        };
        let tables: Vec<_> = self.desk.tables().filter(ordered).collect();
        for table in tables {
            let ledger = Arc::clone(&self.ledger);
            let rows = patiently(|| ledger.holding(table, HOLDING)).await?;
            if rows.len() >= HOLDING {
                let coordinate = patiently(|| ledger.coordinate()).await?;
                self.desk.lanes.hold_table(table, coordinate, 0);
                self.desk.sweeps_changed = true;
            }
            for (aggregate, id) in rows {
                self.desk.lanes.hold_attempted(&aggregate, id);
            }
        }
        self.load_behind().await
    }

    /// Rows that were left behind the start and never attempted.
    async fn load_behind(&mut self) -> Result<(), RelayError> {
        let ledger = Arc::clone(&self.ledger);
        let behind = patiently(|| ledger.behind()).await?;
        for left in &behind {
            match left {
                Behind::Aggregate(aggregate) => self.desk.lanes.hold_many(aggregate),
                Behind::Table(table) => {
                    let coordinate = patiently(|| ledger.coordinate()).await?;
                    self.desk.lanes.hold_table(*table, coordinate, 0);
                    self.desk.sweeps_changed = true;
                }
            }
        }
        self.desk.records.behind = behind;
        Ok(())
    }

    async fn tail(&mut self, stop: &CancellationToken) -> Result<(), RelayError> {
        loop {
            self.turn();
            let over = |(_, until): &mut (RelayError, Instant)| *until <= Instant::now();
            if self.desk.window.unsettled() == 0 {
                self.ending.take().map_or(Ok(()), |(error, _)| Err(error))?;
            } else if let Some((error, _)) = self.ending.take_if(over) {
                return Err(error);
            }
            let event = self.next_event(stop).await;
            match self.act(event) {
                Ok(Next::On) => {}
                Ok(Next::Stop) => return Ok(()),
                // What was read before it is delivered first.
                Err(error) if error.is_of_the_stream() => {
                    self.link.close(None);
                    let until = Instant::now() + self.desk.config.drain_deadline;
                    self.ending.get_or_insert((error, until));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Everything that can be done without waiting.
    fn turn(&mut self) {
        self.desk.pump();
        if self.settling.is_none() {
            let batch = self.desk.next_batch(false);
            self.settling = batch.map(|b| settle(Arc::clone(&self.ledger), b));
        }
        if self.settling_busy.is_none() {
            let batch = self.desk.next_busy();
            self.settling_busy = batch.map(|b| settle(Arc::clone(&self.ledger), b));
        }
        let now = Instant::now();
        // While nothing can be published a look would be stale before it is of use.
        let may_look = !self.desk.needs_ready() && self.look_after.is_none_or(|t| t <= now);
        if self.looking.is_none() && may_look {
            self.looking = self.desk.next_look(&self.ledger);
        }
        let periodic = self.check_at <= now;
        let due = periodic || (self.desk.lanes.check_due() && self.check_failures == 0);
        if self.checking.is_none() && due {
            self.checking = self.desk.next_check(&self.ledger, periodic);
            if periodic {
                self.check_at = now + self.desk.config.hold_check_interval;
            }
        }
        self.mind_the_window(now);
        self.tell();
    }

    /// A window that is full for long: the server would drop a dump that is not read.
    fn mind_the_window(&mut self, now: Instant) {
        if !self.desk.window.full() {
            self.full_since = None;
        } else if self.full_since.is_none() {
            self.full_since = Some(now);
        }
        let overdue = self
            .full_since
            .is_some_and(|t| t + self.desk.config.full_for <= now);
        if overdue && self.link.is_open() {
            tracing::info!("the window is full for long, closing the dump until there is room");
            self.link.close(None);
        }
        if self.ending.is_some() {
            return;
        }
        if self.link.is_resting() && self.desk.window.half_empty() {
            self.link.reopen();
        }
        if self.link.reopen_at().is_some_and(|t| t <= now)
            && let Some(end) = self.desk.window.read_end().cloned()
        {
            self.link.open(end);
        }
    }

    /// Waits for the next event. Biased, in this order:
    ///
    /// 1. the stop, and what operators and the poller want: rare, and never starved;
    /// 2. records that came back: they free the window;
    /// 3. the broker's answers, before anything that adds to what it has;
    /// 4. rows read back, and the broker being ready: they feed the broker;
    /// 5. holds that were looked up, and timers;
    /// 6. the stream last: only what is behind it makes room for more.
    async fn next_event(&mut self, stop: &CancellationToken) -> Event {
        let wake = self.wake_at();
        let needs_ready = self.desk.needs_ready();
        let may_read = !self.desk.window.full() && self.ending.is_none();
        let publisher = Arc::clone(&self.desk.publisher);
        tokio::select! {
            biased;
            () = stop.cancelled() => Event::Stop,
            Some(command) = self.commands.recv() => Event::Command(command),
            Ok(()) = self.pauses.changed() => Event::Pause,
            (batch, answer) = done(&mut self.settling) => Event::Settled(batch, answer),
            (batch, answer) = done(&mut self.settling_busy) => Event::Settled(batch, answer),
            outcomes = publisher.outcomes() => Event::Outcomes(outcomes),
            looked = done(&mut self.looking) => Event::Looked(looked),
            generation = publisher.ready(), if needs_ready => Event::Ready(generation),
            checked = done(&mut self.checking) => Event::Checked(checked),
            () = sleep_until(wake) => Event::Time,
            event = self.link.event(may_read) => Event::Link(event),
        }
    }

    /// When there is something to do though nothing happens.
    fn wake_at(&self) -> Instant {
        let desk = &self.desk;
        let flush = desk.flush_at().filter(|_| self.settling.is_none());
        let busy = desk.busy_at().filter(|_| self.settling_busy.is_none());
        let may_look = self.looking.is_none() && !desk.needs_ready();
        let look = match desk.to_look.is_empty() {
            false => self.look_after,
            true => desk
                .absent
                .first()
                .map(|(at, _)| self.look_after.map_or(*at, |l| l.max(*at))),
        };
        let check = (self.checking.is_none() && desk.lanes.any_held()).then_some(self.check_at);
        let full = self
            .full_since
            .filter(|_| self.link.is_open() && self.ending.is_none());
        let deadline = desk.lanes.next_deadline().map(|d| desk.instant(d));
        let times = [
            flush,
            busy,
            look.filter(|_| may_look),
            check,
            full.map(|t| t + desk.config.full_for),
            deadline,
            self.link.reopen_at().filter(|_| self.ending.is_none()),
            self.settled_at(),
            self.ending.as_ref().map(|(_, until)| *until),
        ];
        times.into_iter().flatten().fold(self.tick_at, Instant::min)
    }

    fn act(&mut self, event: Event) -> Result<Next, RelayError> {
        match event {
            Event::Stop => return Ok(Next::Stop),
            Event::Command(command) => self.command(command),
            Event::Pause => {
                let paused = self.pauses.borrow_and_update().clone();
                self.obeying = Some(paused.version);
                self.desk.set_paused(paused);
            }
            Event::Settled(batch, answer) => self.settled(batch, answer)?,
            Event::Outcomes(outcomes) => self.outcomes(outcomes),
            Event::Looked(looked) => {
                let result = self.desk.looked(looked);
                self.look_after = again(result, &mut self.look_failures)?;
            }
            Event::Ready(generation) => self.desk.ready(generation),
            Event::Checked(checked) => {
                let result = self.desk.checked(checked);
                if let Some(at) = again(result, &mut self.check_failures)? {
                    self.check_at = at;
                }
            }
            Event::Time => {
                let now = self.desk.now();
                self.desk.lanes.expire(now);
            }
            Event::Link(event) => self.linked(event)?,
        }
        Ok(Next::On)
    }

    fn command(&mut self, command: Command) {
        let now = self.desk.now();
        let desk = &mut self.desk;
        match command {
            Command::Hold(rows, reply) => {
                let keys = &desk.keys;
                let answer = desk
                    .lanes
                    .poller_asks(&rows, |key| keys.contains_key(key), now);
                // An asker that is gone finds its rows looked up like all others.
                let _ = reply.send(answer);
            }
            Command::Done(rows) => desk.lanes.poller_done(&rows, now),
            Command::LeftBehind { limit, all, reply } => {
                let _ = reply.send(desk.lanes.left_behind(limit, all));
            }
            Command::SweepPassed(table, coordinate) => {
                desk.lanes.sweep_passed(table, &coordinate);
                desk.sweeps_changed = true;
            }
        }
    }

    fn settled(
        &mut self,
        batch: Batch,
        answer: PortResult<SettleReport>,
    ) -> Result<(), RelayError> {
        match answer {
            Ok(report) => {
                self.desk.recorded(batch, &report);
                Ok(())
            }
            // An unavailable ledger was waited for by the job.
            Err(e) => fatal(e).map_or(Ok(()), Err),
        }
    }

    fn outcomes(&mut self, outcomes: Vec<(Ticket, PublishOutcome)>) {
        for (ticket, outcome) in outcomes {
            let Some(seq) = self.desk.answered(ticket) else {
                continue;
            };
            match outcome {
                PublishOutcome::Confirmed => self.desk.confirmed(seq),
                PublishOutcome::Returned(text) => {
                    let failure = self.unroutable(seq, text);
                    self.desk.failed(seq, failure);
                }
                PublishOutcome::Nacked => {
                    let failure = Failure::retryable("nacked", "the broker refused the message");
                    self.desk.failed(seq, failure);
                }
                PublishOutcome::Refused(failure) => self.desk.failed(seq, failure),
                PublishOutcome::Unconfirmed => self.desk.unconfirmed(seq),
            }
        }
        self.desk.mind_the_broker();
    }

    fn unroutable(&self, seq: u64, text: String) -> Failure {
        let table = self
            .desk
            .rows
            .get(&seq)
            .map_or(TableIdx(0), |row| row.key.table);
        let spec = self.desk.specs.get(usize::from(table.0));
        match spec.map(|s| s.on_unroutable) {
            Some(OnUnroutable::Fail) => Failure::permanent("unroutable", text),
            _ => Failure::retryable("unroutable", text),
        }
    }
}

/// Asks a port until it is there.
async fn patiently<T, F>(mut ask: impl FnMut() -> F) -> Result<T, RelayError>
where
    F: Future<Output = PortResult<T>>,
{
    let mut attempt = 0;
    loop {
        match ask().await {
            Ok(answer) => return Ok(answer),
            Err(error) => {
                warn_or(error)?;
                tokio::time::sleep(backoff(attempt)).await;
                attempt += 1;
            }
        }
    }
}

/// When to ask again after a port was unavailable; `None` where it was not.
fn again(result: PortResult<()>, failures: &mut u32) -> Result<Option<Instant>, RelayError> {
    let Err(error) = result else {
        *failures = 0;
        return Ok(None);
    };
    warn_or(error)?;
    *failures += 1;
    Ok(Some(Instant::now() + backoff(*failures)))
}

fn warn_or(error: PortError) -> Result<(), RelayError> {
    let text = outbox_core::ports::chain(&error);
    fatal(error).map_or(Ok(()), Err)?;
    tracing::warn!(error = %text, "the database is unavailable");
    Ok(())
}

fn wall_clock() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}
