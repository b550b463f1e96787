//! Order per aggregate: which row may be published now, which waits in its lane, and which is
//! left to the table.
//!
//! Every row that is passed over holds its aggregate, by its id, until that id is final: whoever
//! comes later must not overtake it. Where the row's aggregate is unknown, its whole table is
//! held until a sweep has passed the coordinate at which that happened. Rows that wait always
//! come after all rows that were left, so that what is left can be delivered first and what waits
//! goes on behind it.
//!
//! Everything here is pure; `now` is any clock that does not go back.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

use crate::ports::HeldRow;
use crate::position::Position;
use crate::row::{Aggregate, RowId, RowKey, TableIdx};
use crate::spec::{Ordering, TableSpec};
use crate::window::RowSeq;

mod hold;
mod lane;
mod poller;
#[cfg(test)]
mod tests;

use hold::{Hold, Kept, Many};
use lane::{Lane, Rest, Stage};
pub use poller::{Check, Found};

/// Bounds of what is remembered.
#[derive(Clone, Copy, Debug)]
pub struct LaneLimits {
    /// Ids in one hold; beyond, only "many".
    pub ids_per_hold: usize,
    /// Held aggregates of one table; beyond, the table is held.
    pub held_aggregates: usize,
    /// Rows that wait behind a hold, over all aggregates.
    pub waiting_rows: usize,
    /// How long rows wait behind a hold before they are left.
    pub wait: Duration,
    /// How long an id that was left may be invisible before it counts as deleted.
    pub absent: Duration,
}

impl Default for LaneLimits {
    fn default() -> Self {
        Self {
            ids_per_hold: 256,
            held_aggregates: 65_536,
            waiting_rows: 1024,
            wait: Duration::from_secs(5),
            absent: Duration::from_secs(30),
        }
    }
}

/// What to do with a row now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Hand it to the broker.
    Publish,
    /// Keep it; [`Lanes::take_woken`] names it when its turn may have come.
    Wait,
    /// Leave it to the table. It holds its aggregate from now on.
    Leave,
}

/// How the broker ended with a row, or why it never got there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Confirmed.
    Confirmed,
    /// Failed, and it is not known yet whether for good: the record decides.
    Refused,
    /// Failed for good.
    Failed,
    /// Somebody else settled it, or it is gone.
    Gone,
    /// Passed over: the table delivers it.
    Left,
}

/// The lanes of all aggregates that have rows in the tail or are held.
#[derive(Debug)]
pub struct Lanes {
    limits: LaneLimits,
    tables: Vec<Table>,
    lanes: HashMap<Aggregate, Lane>,
    /// Held aggregates by the number of their hold.
    holds: BTreeMap<u64, Aggregate>,
    next_hold: u64,
    /// Holds that were made or got a further row since they were last told.
    news: BTreeSet<u64>,
    /// Holds with ids that came back from the poller.
    due: BTreeSet<u64>,
    /// Holds of which nothing shows in the table.
    untold: BTreeSet<u64>,
    told: u64,
    checked: u64,
    waiting: usize,
    deadlines: VecDeque<(Duration, Aggregate)>,
    woken: Vec<RowSeq>,
    left: Vec<RowSeq>,
    elsewhere: (HashSet<RowKey>, VecDeque<RowKey>),
}

#[derive(Debug)]
struct Table {
    ordering: Ordering,
    failed_blocks: bool,
    /// Until a sweep has passed this, for rows from that number on.
    unknown: Option<(Position, RowSeq)>,
    /// A row was left that no hold remembers.
    untracked: bool,
    held: usize,
    overtaken: u64,
}

impl Lanes {
    /// No lanes yet.
    pub fn new<'a>(limits: LaneLimits, specs: impl IntoIterator<Item = &'a TableSpec>) -> Self {
        let table = |spec: &TableSpec| Table {
            ordering: spec.ordering,
            failed_blocks: spec.failed_blocks_aggregate,
            unknown: None,
            untracked: false,
            held: 0,
            overtaken: 0,
        };
        Self {
            limits,
            tables: specs.into_iter().map(table).collect(),
            lanes: HashMap::new(),
            holds: BTreeMap::new(),
            next_hold: 0,
            news: BTreeSet::new(),
            due: BTreeSet::new(),
            untold: BTreeSet::new(),
            told: 0,
            checked: 0,
            waiting: 0,
            deadlines: VecDeque::new(),
            woken: Vec::new(),
            left: Vec::new(),
            elsewhere: (HashSet::new(), VecDeque::new()),
        }
    }

    fn unordered(&self, table: TableIdx) -> bool {
        self.table(table)
            .is_none_or(|t| t.ordering == Ordering::None)
    }

    fn table(&self, table: TableIdx) -> Option<&Table> {
        self.tables.get(usize::from(table.0))
    }

    fn table_mut(&mut self, table: TableIdx) -> Option<&mut Table> {
        self.tables.get_mut(usize::from(table.0))
    }

    fn table_held(&self, table: TableIdx, seq: RowSeq) -> bool {
        let unknown = self.table(table).and_then(|t| t.unknown.as_ref());
        unknown.is_some_and(|(_, since)| seq >= *since)
    }

    /// A row was read. Rows enter in order, each before it is decided on.
    pub fn enter(&mut self, seq: RowSeq, id: &RowId, aggregate: &Aggregate) {
        if self.unordered(aggregate.table) {
            return;
        }
        let rest = Rest {
            seq,
            id: id.clone(),
            stage: Stage::Queued,
        };
        self.lane(aggregate).rest.push_back(rest);
    }

    fn lane(&mut self, aggregate: &Aggregate) -> &mut Lane {
        if !self.lanes.contains_key(aggregate) {
            self.lanes.insert(aggregate.clone(), Lane::default());
        }
        // Just inserted where it was missing.
        self.lanes.entry(aggregate.clone()).or_default()
    }

    /// Whether a row would not be published now, as its aggregate or table is held.
    #[must_use]
    pub fn is_held(&self, seq: RowSeq, aggregate: &Aggregate) -> bool {
        !self.unordered(aggregate.table)
            && (self.table_held(aggregate.table, seq)
                || self.lanes.get(aggregate).is_some_and(|l| l.hold.is_some()))
    }

    /// Decides on a row that entered and is in the caller's hands.
    pub fn decide(&mut self, seq: RowSeq, aggregate: &Aggregate, now: Duration) -> Decision {
        if self.unordered(aggregate.table) {
            return Decision::Publish;
        }
        let strict = self.is_strict(aggregate.table);
        let table_held = self.table_held(aggregate.table, seq);
        let room = self.waiting < self.limits.waiting_rows;
        let Some(lane) = self.lanes.get_mut(aggregate) else {
            return Decision::Publish;
        };
        let Ok(at) = lane.rest.binary_search_by_key(&seq, |r| r.seq) else {
            return Decision::Publish;
        };
        let one_at_a_time = strict || lane.slow;
        let row = &mut lane.rest[at];
        let doomed = row.stage == Stage::Doomed;
        let known = lane.hold.as_mut().and_then(|h| h.ids.get_mut(&row.id));
        if let Some(known) = known.filter(|_| at == 0) {
            // Left already, by whoever had it before it was read: nobody else is the worse for it.
            known.unread = false;
            lane.rest.pop_front();
            return Decision::Leave;
        }
        if let Some(hold) = lane.hold.as_mut().filter(|_| !table_held && !doomed) {
            if room && hold.may_wait(&row.id, now) {
                row.stage = Stage::Waiting;
                self.waiting += 1;
                if hold.wait_until.is_none() {
                    let until = now + self.limits.wait;
                    hold.wait_until = Some(until);
                    self.deadlines.push_back((until, aggregate.clone()));
                }
                return Decision::Wait;
            }
        } else if !table_held && !doomed {
            if at > 0 || (one_at_a_time && !lane.out.is_empty()) {
                row.stage = Stage::Waiting;
                self.waiting += 1;
                return Decision::Wait;
            }
            lane.hand_over();
            self.wake(aggregate);
            return Decision::Publish;
        }
        self.leave(seq, aggregate);
        Decision::Leave
    }

    fn is_strict(&self, table: TableIdx) -> bool {
        self.table(table)
            .is_some_and(|t| t.ordering == Ordering::Strict)
    }

    /// Leaves a row of the lane, and with it all of the lane that comes behind an earlier one
    /// left: rows that wait must never be older than rows that were left.
    fn leave(&mut self, seq: RowSeq, aggregate: &Aggregate) {
        let Some(row) = self.lanes.get_mut(aggregate).and_then(|l| l.take_rest(seq)) else {
            return;
        };
        self.keep(aggregate, row.id, Kept::Left, false);
        self.leave_waiting(aggregate);
    }

    /// Leaves every row of a held lane that waits, and dooms what is queued.
    fn leave_waiting(&mut self, aggregate: &Aggregate) {
        let Some(lane) = self.lanes.get_mut(aggregate) else {
            return;
        };
        if let Some(hold) = lane.hold.as_mut() {
            (hold.wait_until, hold.handover_until) = (None, Duration::ZERO);
        }
        let mut ids = Vec::new();
        lane.rest.retain_mut(|row| {
            if row.stage == Stage::Waiting {
                self.waiting -= 1;
                self.left.push(row.seq);
                ids.push(row.id.clone());
                return false;
            }
            row.stage = Stage::Doomed;
            true
        });
        for id in ids {
            self.keep(aggregate, id, Kept::Left, false);
        }
    }

    /// A row is at its end, as far as the lane is concerned.
    pub fn end(&mut self, seq: RowSeq, id: &RowId, aggregate: &Aggregate, how: Ended) {
        if self.unordered(aggregate.table) {
            return;
        }
        let mut overtaken = 0;
        if let Some(lane) = self.lanes.get_mut(aggregate) {
            if let Some(row) = lane.take_rest(seq)
                && row.stage == Stage::Waiting
            {
                self.waiting -= 1;
            }
            overtaken = lane.take_out(seq, how);
            if lane.out.is_empty()
                && let Some(hold) = lane.hold.as_ref().filter(|h| h.left_behind())
            {
                // The poller may have been turned away for the rows at the broker.
                self.news.insert(hold.number);
            }
        }
        self.count_overtaken(aggregate.table, overtaken);
        match how {
            Ended::Confirmed | Ended::Gone => {}
            Ended::Refused => self.keep(aggregate, id.clone(), Kept::Recording, false),
            Ended::Failed if !self.failed_blocks(aggregate.table) => {}
            Ended::Failed | Ended::Left => {
                self.keep(aggregate, id.clone(), Kept::Left, false);
                self.leave_waiting(aggregate);
            }
        }
        if how == Ended::Refused
            && let Some(lane) = self.lanes.get_mut(aggregate)
        {
            lane.slow = true;
            let at = lane.refused.partition_point(|r| *r < seq);
            lane.refused.insert(at, seq);
        }
        self.tidy(aggregate);
    }

    fn failed_blocks(&self, table: TableIdx) -> bool {
        self.table(table).is_some_and(|t| t.failed_blocks)
    }

    fn count_overtaken(&mut self, table: TableIdx, rows: u64) {
        if let Some(t) = self.table_mut(table) {
            t.overtaken += rows;
        }
    }

    /// Nobody knows what became of a row at the broker: the caller has it again and will ask.
    pub fn unconfirmed(&mut self, seq: RowSeq, aggregate: &Aggregate) {
        let Some(lane) = self.lanes.get_mut(aggregate) else {
            return;
        };
        let Ok(at) = lane.out.binary_search_by_key(&seq, |r| r.seq) else {
            return;
        };
        let Some(out) = lane.out.remove(at) else {
            return;
        };
        for earlier in lane.out.range_mut(..at) {
            earlier.perhaps += 1;
        }
        // It may have arrived, before rows that were refused.
        let passed = lane.refused.partition_point(|r| *r < seq);
        let at = lane.rest.partition_point(|r| r.seq < seq);
        // Rows behind it may have been left meanwhile; then it must not wait for them.
        let left = lane.hold.as_ref().is_some_and(Hold::left_behind);
        let stage = if left { Stage::Doomed } else { Stage::Queued };
        let id = out.id;
        let rest = Rest { seq, id, stage };
        lane.rest.insert(at, rest);
        let passed = u64::try_from(passed).unwrap_or(u64::MAX);
        self.count_overtaken(aggregate.table, out.overtaken + passed);
    }

    /// Holds a table whose unknown rows were passed over before `coordinate`; rows that were
    /// read earlier, those before `since`, still go ahead of them.
    pub fn hold_table(&mut self, table: TableIdx, coordinate: Position, since: RowSeq) {
        if let Some(t) = self.table_mut(table) {
            let since = t.unknown.as_ref().map_or(since, |(_, earlier)| *earlier);
            t.unknown = Some((coordinate, since));
        }
    }

    /// The coordinate that a sweep has to pass before the table is let go.
    #[must_use]
    pub fn sweep_due(&self, table: TableIdx) -> Option<&Position> {
        self.table(table)?.unknown.as_ref().map(|(at, _)| at)
    }

    /// Whether a row was left that no hold remembers, for want of room; asked once.
    pub fn take_untracked(&mut self, table: TableIdx) -> bool {
        self.table_mut(table)
            .is_some_and(|t| std::mem::take(&mut t.untracked))
    }

    /// A sweep has delivered what was pending before `coordinate`.
    pub fn sweep_passed(&mut self, table: TableIdx, coordinate: &Position) {
        let Some(t) = self.table_mut(table) else {
            return;
        };
        let until = t.unknown.as_ref().map(|(until, _)| until);
        if until.is_some_and(|u| coordinate == u || coordinate.reaches(u) == Some(true)) {
            t.unknown = None;
            let lanes: Vec<_> = self
                .lanes
                .keys()
                .filter(|a| a.table == table)
                .cloned()
                .collect();
            for aggregate in lanes {
                self.tidy(&aggregate);
            }
        }
    }

    /// Rows that may have their turn now: ask for each again. Empties the list.
    pub fn take_woken(&mut self) -> Vec<RowSeq> {
        std::mem::take(&mut self.woken)
    }

    /// Waiting rows that are left after all, already held by their ids. Empties the list.
    pub fn take_left(&mut self) -> Vec<RowSeq> {
        std::mem::take(&mut self.left)
    }

    /// Rows that overtook a refused one since the last call.
    pub fn take_overtaken(&mut self, table: TableIdx) -> u64 {
        self.table_mut(table)
            .map_or(0, |t| std::mem::take(&mut t.overtaken))
    }

    /// Held aggregates of a table.
    #[must_use]
    pub fn held(&self, table: TableIdx) -> usize {
        self.table(table).map_or(0, |t| t.held)
    }

    /// When [`Lanes::expire`] has something to do.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.front().map(|(at, _)| *at)
    }

    /// Leaves rows that have waited behind a hold for too long.
    pub fn expire(&mut self, now: Duration) {
        while let Some((at, aggregate)) = self.deadlines.pop_front_if(|(at, _)| *at <= now) {
            let hold = self.lanes.get(&aggregate).and_then(|l| l.hold.as_ref());
            if hold.is_some_and(|h| h.wait_until == Some(at)) {
                self.leave_waiting(&aggregate);
            }
        }
    }

    /// Adds an id to the aggregate's hold.
    fn keep(&mut self, aggregate: &Aggregate, id: RowId, kept: Kept, unread: bool) {
        let (ids, room) = (self.limits.ids_per_hold, self.limits.held_aggregates);
        let lane = self.lane(aggregate);
        if lane.hold.is_none() && !self.new_hold(aggregate, room) {
            return;
        }
        let Some(hold) = self.lanes.get_mut(aggregate).and_then(|l| l.hold.as_mut()) else {
            return;
        };
        let further = !hold.ids.contains_key(&id);
        hold.keep(id, kept, unread, ids);
        if kept == Kept::Left && further {
            self.news.insert(hold.number);
        }
        self.tell(aggregate);
    }

    /// A hold has changed: whether it is untold.
    fn tell(&mut self, aggregate: &Aggregate) {
        let Some(hold) = self.lanes.get(aggregate).and_then(|l| l.hold.as_ref()) else {
            return;
        };
        if hold.untold() {
            self.untold.insert(hold.number);
        } else {
            self.untold.remove(&hold.number);
        }
    }

    fn new_hold(&mut self, aggregate: &Aggregate, room: usize) -> bool {
        let number = self.next_hold;
        let Some(table) = self.table_mut(aggregate.table) else {
            return false;
        };
        if table.held >= room {
            table.untracked = true;
            return false;
        }
        table.held += 1;
        self.next_hold += 1;
        self.holds.insert(number, aggregate.clone());
        self.lane(aggregate).hold = Some(Hold::new(number));
        true
    }

    /// Lets go of an empty hold, wakes the lane's next row, and forgets an empty lane.
    fn tidy(&mut self, aggregate: &Aggregate) {
        let Some(lane) = self.lanes.get_mut(aggregate) else {
            return;
        };
        if lane.hold.as_ref().is_some_and(Hold::is_empty)
            && let Some(hold) = lane.hold.take()
        {
            lane.refused.clear();
            // All that was left is delivered: nothing needs to be left behind it any more.
            for row in lane.rest.iter_mut().filter(|r| r.stage == Stage::Doomed) {
                row.stage = Stage::Queued;
            }
            self.holds.remove(&hold.number);
            self.news.remove(&hold.number);
            self.due.remove(&hold.number);
            self.untold.remove(&hold.number);
            if let Some(t) = self.table_mut(aggregate.table) {
                t.held -= 1;
            }
        }
        self.wake(aggregate);
        let idle = |l: &Lane| l.hold.is_none() && l.out.is_empty() && l.rest.is_empty();
        if self.lanes.get(aggregate).is_some_and(idle) {
            self.lanes.remove(aggregate);
        }
    }

    /// Wakes the first row of a lane that may go on.
    fn wake(&mut self, aggregate: &Aggregate) {
        let strict = self.is_strict(aggregate.table);
        let first = self.lanes.get(aggregate).and_then(|l| l.rest.front());
        if first.is_none_or(|r| self.table_held(aggregate.table, r.seq)) {
            return;
        }
        if let Some(lane) = self.lanes.get_mut(aggregate)
            && lane.hold.is_none()
            && (lane.out.is_empty() || !(strict || lane.slow))
            && let Some(first) = lane.rest.front_mut()
            && first.stage == Stage::Waiting
        {
            first.stage = Stage::Queued;
            self.waiting -= 1;
            self.woken.push(first.seq);
        }
    }
}
