//! The relay's state and everything that changes it without waiting: rows are taken in, handed
//! over, judged and settled here; the loop only waits and calls.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use outbox_core::order::{Decision, Ended, LaneLimits, Lanes};
use outbox_core::ports::{
    BrokerState, Deferral, Generation, Observer, Publisher, RowOutcome, Ticket, Verdict,
};
use outbox_core::spec::{TableSpec, Tracking};
use outbox_core::window::{RowSeq, Window, WindowLimits};
use outbox_core::{
    Aggregate, Failure, FailureClass, Message, OutboxRow, Position, RowKey, Status, TableIdx,
};
use tokio::time::Instant;

use super::handle::Paused;
use super::settle::Records;
use super::{Clock, RelayConfig, RelayError};
use crate::group::{Deferred, Group};

/// Tickets are unique within the process, so that answers for an earlier relay on the same
/// publisher are never taken for ours.
static TICKETS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);

fn ticket() -> Ticket {
    TICKETS.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// A row without a verdict.
pub(super) struct Row {
    pub(super) key: RowKey,
    pub(super) aggregate: Aggregate,
    pub(super) retry_count: u32,
    pub(super) message: Arc<Message>,
    pub(super) committed_at: i64,
    /// How old it was when it was read, by the server's commit time.
    pub(super) age: Duration,
    pub(super) read_at: Instant,
    /// Read before the coordinate that the server had at open, or known to the poller.
    pub(super) suspect: bool,
    pub(super) verified_at: Option<Instant>,
    /// Not visible since then, and how often it was looked for.
    pub(super) absent: Option<(Instant, u32)>,
}

pub(super) struct Desk {
    pub(super) config: RelayConfig,
    pub(super) specs: Vec<Arc<TableSpec>>,
    pub(super) observer: Arc<dyn Observer>,
    pub(super) publisher: Arc<dyn Publisher>,
    pub(super) clock: Clock,
    epoch: Instant,
    pub(super) window: Window,
    pub(super) lanes: Lanes,
    pub(super) rows: HashMap<RowSeq, Row>,
    /// Every unsettled row that the tail has, by its key.
    pub(super) keys: HashMap<RowKey, RowSeq>,
    /// To be handed over, in order.
    pub(super) queue: BTreeSet<RowSeq>,
    /// To be read back first, in order.
    pub(super) to_look: BTreeSet<RowSeq>,
    /// Not visible, by when they are looked for again.
    pub(super) absent: BTreeSet<(Instant, RowSeq)>,
    /// Of paused tables.
    resting: BTreeSet<RowSeq>,
    pub(super) out: HashMap<Ticket, RowSeq>,
    /// Bytes of what is at the broker.
    out_bytes: usize,
    pub(super) records: Records,
    pub(super) paused: Paused,
    /// What to submit under; `None`: ask the publisher first.
    pub(super) generation: Option<Generation>,
    /// An answer was lost: nothing is published before every other answer is in, and then one
    /// row first, to see whether answers come again.
    lost: bool,
    probing: bool,
    /// Groups from here on are live: the coordinate at open is reached.
    pub(super) live: bool,
    /// The server's clock is ahead of ours by so many microseconds (never positive).
    skew: i64,
    pub(super) last_commit: Option<i64>,
    pub(super) caught_up: bool,
    /// Something but our own writes was passed since the position was stored.
    pub(super) worth_storing: bool,
    pub(super) signals: u64,
    pub(super) sweeps_changed: bool,
}

impl Desk {
    pub(super) fn new(
        config: RelayConfig,
        specs: Vec<Arc<TableSpec>>,
        publisher: Arc<dyn Publisher>,
        observer: Arc<dyn Observer>,
        clock: Clock,
    ) -> Self {
        let limits = LaneLimits {
            waiting_rows: config.max_in_flight / 4,
            wait: config.handover_wait,
            ..LaneLimits::default()
        };
        Self {
            config,
            lanes: Lanes::new(limits, specs.iter().map(|s| &**s)),
            specs,
            observer,
            publisher,
            clock,
            epoch: Instant::now(),
            window: Self::window(config, None),
            rows: HashMap::new(),
            keys: HashMap::new(),
            queue: BTreeSet::new(),
            to_look: BTreeSet::new(),
            absent: BTreeSet::new(),
            resting: BTreeSet::new(),
            out: HashMap::new(),
            out_bytes: 0,
            records: Records::default(),
            paused: Paused::default(),
            generation: None,
            lost: false,
            probing: false,
            live: false,
            skew: 0,
            last_commit: None,
            caught_up: false,
            worth_storing: false,
            signals: 0,
            sweeps_changed: false,
        }
    }

    pub(super) fn window(config: RelayConfig, start: Option<Position>) -> Window {
        let limits = WindowLimits {
            rows: config.max_in_flight,
            bytes: config.max_in_flight_bytes,
        };
        Window::new(limits, start)
    }

    /// Time as the lanes count it.
    pub(super) fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    pub(super) fn instant(&self, at: Duration) -> Instant {
        self.epoch + at
    }

    pub(super) fn tables(&self) -> impl Iterator<Item = TableIdx> + use<> {
        let count = u16::try_from(self.specs.len()).unwrap_or(u16::MAX);
        (0..count).map(TableIdx)
    }

    pub(super) fn tracks(&self, table: TableIdx) -> bool {
        let spec = self.specs.get(usize::from(table.0));
        spec.is_some_and(|s| s.tracking == Tracking::Status)
    }

    /// How long ago something was committed, by the server's clock. Where that clock is ahead of
    /// ours, the least difference seen so far counts as none.
    pub(super) fn age(&mut self, committed_at: i64) -> Duration {
        let age = (self.clock)().saturating_sub(committed_at);
        self.skew = self.skew.min(age);
        Duration::from_micros(u64::try_from(age.saturating_sub(self.skew)).unwrap_or(0))
    }

    /// Takes a group in. Its rows are decided on by the next [`Desk::pump`].
    pub(super) fn take_group(&mut self, group: Group) -> Result<(), RelayError> {
        for deferred in &group.deferred {
            if !self.tracks(deferred.table) && deferred.why != Deferral::Delayed {
                return Err(RelayError::NothingToLeaveTo {
                    table: deferred.table,
                    why: deferred.why,
                });
            }
        }
        for deferred in group.deferred {
            self.pass_over(deferred, &group.end);
        }
        let age = self.age(group.committed_at);
        (self.last_commit, self.caught_up) = (Some(group.committed_at), false);
        self.signals += u64::from(group.signal);
        self.worth_storing = true;
        let weights: Vec<_> = group.rows.iter().map(OutboxRow::weight).collect();
        let first = self.window.push(weights, group.layouts, group.end);
        for (seq, row) in (first..).zip(group.rows) {
            self.take_row(seq, row, group.committed_at, age);
        }
        Ok(())
    }

    fn pass_over(&mut self, deferred: Deferred, end: &Position) {
        self.observer.deferred(deferred.table, deferred.why);
        if deferred.why == Deferral::Delayed {
            return;
        }
        match deferred.row {
            Some((id, Some(aggregate))) => self.lanes.hold_row(&aggregate, id),
            _ => self.hold_table(deferred.table, end.clone()),
        }
    }

    fn hold_table(&mut self, table: TableIdx, coordinate: Position) {
        let next = self.window.next_row();
        self.lanes.hold_table(table, coordinate, next);
        self.sweeps_changed = true;
    }

    fn take_row(&mut self, seq: RowSeq, row: OutboxRow, committed_at: i64, age: Duration) {
        let table = row.key.table;
        let tracks = self.tracks(table);
        if tracks && row.state.status != Status::Pending {
            self.window.settle(seq);
            return;
        }
        if tracks
            && row
                .state
                .next_retry_at
                .is_some_and(|due| due > committed_at)
        {
            self.observer.deferred(table, Deferral::Delayed);
            self.window.settle(seq);
            return;
        }
        self.keys.insert(row.key.clone(), seq);
        let message = match row.message {
            Ok(message) => message,
            Err(failure) => {
                self.lanes.enter(seq, &row.key.id, &row.aggregate);
                self.lanes
                    .end(seq, &row.key.id, &row.aggregate, Ended::Failed);
                let outcome = RowOutcome {
                    key: row.key,
                    aggregate: row.aggregate,
                    verdict: Verdict::Failed {
                        failure,
                        retry_count: row.state.retry_count,
                        message: None,
                    },
                };
                self.records.push(seq, outcome, None);
                return;
            }
        };
        self.lanes.enter(seq, &row.key.id, &row.aggregate);
        let row = Row {
            suspect: !self.live || self.lanes.was_elsewhere(&row.key),
            key: row.key,
            aggregate: row.aggregate,
            retry_count: row.state.retry_count,
            message,
            committed_at,
            age,
            read_at: Instant::now(),
            verified_at: None,
            absent: None,
        };
        self.rows.insert(seq, row);
        self.queue.insert(seq);
    }

    /// Whether a row has to be read back before it may be handed over now.
    fn needs_look(&self, row: &Row) -> bool {
        if !self.tracks(row.key.table) {
            return false;
        }
        match row.verified_at {
            Some(at) => at.elapsed() > self.config.verify_after,
            None => row.suspect || row.age + row.read_at.elapsed() > self.config.verify_after,
        }
    }

    /// Whether the publisher has to be asked before anything can be handed over.
    pub(super) fn needs_ready(&self) -> bool {
        self.generation.is_none()
    }

    pub(super) fn ready(&mut self, generation: Generation) {
        self.generation = Some(generation);
    }

    /// Asks again before the next hand-over where the broker has told us to stop.
    pub(super) fn mind_the_broker(&mut self) {
        if self.generation.is_some() && self.publisher.state() != BrokerState::Up {
            self.generation = None;
        }
    }

    fn may_publish(&mut self) -> bool {
        if self.lost && self.generation.is_some() && self.out.is_empty() {
            self.lost = false;
        }
        self.generation.is_some() && !self.lost && (!self.probing || self.out.is_empty())
    }

    /// Whether one more row may go to the broker. The window takes in whole groups, however
    /// large; what a crash may publish twice is bounded here: rows at the broker and those whose
    /// outcome is not recorded.
    fn has_room(&self, batch: usize) -> bool {
        let rows = self.out.len() + self.records.unrecorded();
        rows < self.config.max_in_flight
            && (batch + self.out.len() == 0 || self.out_bytes < self.config.max_in_flight_bytes)
    }

    /// The broker has answered for a message; the row, if it is one of ours.
    pub(super) fn answered(&mut self, ticket: Ticket) -> Option<RowSeq> {
        let seq = self.out.remove(&ticket)?;
        let weight = self.rows.get(&seq).map_or(0, |row| row.message.weight());
        self.out_bytes = self.out_bytes.saturating_sub(weight);
        Some(seq)
    }

    /// Hands over what can be handed over, in order, in one batch.
    pub(super) fn pump(&mut self) {
        self.follow_lanes();
        let mut batch = Vec::new();
        if self.may_publish() {
            let now = self.now();
            while self.has_room(batch.len())
                && let Some(seq) = self.queue.pop_first()
            {
                self.hand_over(seq, now, &mut batch);
                if self.probing && !batch.is_empty() {
                    break;
                }
            }
        }
        if let (Some(generation), false) = (self.generation, batch.is_empty()) {
            self.publisher.submit(generation, batch);
        }
        for table in self.tables() {
            let rows = self.lanes.take_overtaken(table);
            if rows > 0 {
                self.observer.overtaken(table, rows);
            }
        }
    }

    fn hand_over(&mut self, seq: RowSeq, now: Duration, batch: &mut Vec<(Ticket, Arc<Message>)>) {
        let Some(row) = self.rows.get(&seq) else {
            return;
        };
        let table = row.key.table;
        if self.paused.is(table) {
            // A table that is paused alone must not keep the window from the others.
            let crowded = self.window.rows() > self.config.max_in_flight / 2;
            if crowded && !self.paused.all && self.tracks(table) {
                self.leave(seq, Deferral::Held);
            } else {
                self.resting.insert(seq);
            }
            return;
        }
        if !self.lanes.is_held(seq, &row.aggregate) && self.needs_look(row) {
            self.to_look.insert(seq);
            return;
        }
        match self.lanes.decide(seq, &row.aggregate, now) {
            Decision::Publish => {
                let ticket = ticket();
                batch.push((ticket, row.message.clone()));
                self.out_bytes += row.message.weight();
                self.out.insert(ticket, seq);
            }
            Decision::Wait => {}
            Decision::Leave => self.left(seq, Deferral::Held),
        }
        self.follow_lanes();
    }

    /// Does what the lanes decided on their own.
    pub(super) fn follow_lanes(&mut self) {
        for seq in self.lanes.take_left() {
            self.left(seq, Deferral::Held);
        }
        self.queue.extend(self.lanes.take_woken());
    }

    /// Leaves a row to the table: it holds its aggregate.
    pub(super) fn leave(&mut self, seq: RowSeq, why: Deferral) {
        if let Some(row) = self.rows.get(&seq) {
            self.lanes
                .end(seq, &row.key.id, &row.aggregate, Ended::Left);
            self.left(seq, why);
        }
    }

    /// A row is left, and the lanes know it.
    fn left(&mut self, seq: RowSeq, why: Deferral) {
        let Some(row) = self.rows.remove(&seq) else {
            return;
        };
        let table = row.key.table;
        self.observer.deferred(table, why);
        if self.tracks(table) {
            self.settled(seq, &row.key);
        } else {
            let verdict = Verdict::Parked {
                message: Ok(row.message),
            };
            let outcome = RowOutcome {
                key: row.key,
                aggregate: row.aggregate,
                verdict,
            };
            self.records.push(seq, outcome, None);
        }
        if self.lanes.take_untracked(table)
            && let Some(end) = self.window.read_end().cloned()
        {
            self.hold_table(table, end);
        }
    }

    /// Settles a row without an outcome to record: somebody else did, or it is gone.
    pub(super) fn drop_row(&mut self, seq: RowSeq, how: Ended) {
        if let Some(row) = self.rows.remove(&seq) {
            self.lanes.end(seq, &row.key.id, &row.aggregate, how);
            self.settled(seq, &row.key);
        }
    }

    pub(super) fn settled(&mut self, seq: RowSeq, key: &RowKey) {
        self.window.settle(seq);
        if self.keys.get(key) == Some(&seq) {
            self.keys.remove(key);
        }
    }

    /// A confirm is held: the row is never published again, whatever becomes of its record.
    pub(super) fn confirmed(&mut self, seq: RowSeq) {
        self.probing = false;
        let Some(row) = self.rows.remove(&seq) else {
            return;
        };
        let latency =
            (!row.suspect && row.verified_at.is_none()).then(|| self.age(row.committed_at));
        self.lanes
            .end(seq, &row.key.id, &row.aggregate, Ended::Confirmed);
        let outcome = RowOutcome {
            key: row.key,
            aggregate: row.aggregate,
            verdict: Verdict::Sent,
        };
        self.records.push(seq, outcome, latency);
    }

    pub(super) fn failed(&mut self, seq: RowSeq, failure: Failure) {
        self.probing = false;
        let Some(row) = self.rows.remove(&seq) else {
            return;
        };
        let how = match failure.class {
            FailureClass::Permanent => Ended::Failed,
            FailureClass::Retryable => Ended::Refused,
        };
        self.lanes.end(seq, &row.key.id, &row.aggregate, how);
        let parks = !self.tracks(row.key.table);
        let outcome = RowOutcome {
            key: row.key,
            aggregate: row.aggregate,
            verdict: Verdict::Failed {
                failure,
                retry_count: row.retry_count,
                message: parks.then_some(row.message),
            },
        };
        self.records.push(seq, outcome, None);
    }

    /// Nobody knows what became of a row: it goes out again, in order and uncharged.
    pub(super) fn unconfirmed(&mut self, seq: RowSeq) {
        if let Some(row) = self.rows.get(&seq) {
            self.lanes.unconfirmed(seq, &row.aggregate);
            self.queue.insert(seq);
        }
        (self.lost, self.probing, self.generation) = (true, true, None);
    }

    pub(super) fn set_paused(&mut self, paused: Paused) {
        self.paused = paused;
        self.queue.append(&mut self.resting);
    }

    /// Whether nothing of a paused table is at the broker.
    pub(super) fn pause_obeyed(&self) -> bool {
        let mut out = self.out.values().filter_map(|seq| self.rows.get(seq));
        !out.any(|row| self.paused.is(row.key.table))
    }
}
