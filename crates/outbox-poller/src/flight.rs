//! Rows on their way to the broker: which may go now, what became of them, and which are to be
//! given back. No I/O: batches and sweeps drive it.
//!
//! Order: rows of one aggregate go in the order of [`Flight::push`]. In strict order, and for an
//! aggregate that was refused before, one at a time; else pipelined, and behind a refusal nothing
//! more of the aggregate goes.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use outbox_core::failure::FailureClass;
use outbox_core::message::Message;
use outbox_core::ports::{PublishOutcome, RowOutcome, Ticket, Verdict};
use outbox_core::spec::{OnUnroutable, Ordering, TableSpec};
use outbox_core::{Aggregate, Failure, OutboxRow, RowKey};

use crate::breaker::Breaker;

/// A row's place in the order of its batch or sweep.
pub(crate) type Place = u64;

/// Aggregates of which nothing more may go. Kept as hashes, since there may be as many as rows:
/// two that collide leave one to a later pass, which costs a delay and no order.
#[derive(Debug, Default)]
pub(crate) struct Blocked {
    hashes: HashSet<u64>,
    state: RandomState,
}

impl Blocked {
    pub(crate) fn insert(&mut self, aggregate: &Aggregate) {
        self.hashes.insert(self.state.hash_one(aggregate));
    }

    pub(crate) fn contains(&self, aggregate: &Aggregate) -> bool {
        !self.hashes.is_empty() && self.hashes.contains(&self.state.hash_one(aggregate))
    }

    pub(crate) fn len(&self) -> usize {
        self.hashes.len()
    }
}

/// What may be without outcome at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) rows: usize,
    /// One row larger than this goes alone.
    pub(crate) bytes: usize,
}

/// An ordered aggregate with rows loaded.
#[derive(Debug, Default)]
struct Lane {
    /// Rows at the broker.
    out: usize,
    /// Only one may be.
    single: bool,
    /// Rows behind it.
    behind: VecDeque<(Place, OutboxRow)>,
}

/// Rows of one table on their way.
pub(crate) struct Flight {
    spec: Arc<TableSpec>,
    limits: Limits,
    next: Place,
    /// May go now, in order.
    free: BTreeMap<Place, OutboxRow>,
    lanes: HashMap<Aggregate, Lane>,
    /// Rows in the lanes' `behind`.
    behind: usize,
    out: HashMap<Ticket, (Place, OutboxRow)>,
    bytes: usize,
    pub(crate) blocked: Blocked,
    /// Nobody knows, or not to be charged: to be given back.
    lost: Vec<(Place, OutboxRow)>,
    /// Verdicts to be recorded.
    pub(crate) outcomes: Vec<RowOutcome>,
    /// Confirmed though a row before them in their aggregate was refused.
    pub(crate) overtaken: u64,
    /// Nothing more goes: a channel was lost, or the caller says so.
    pub(crate) over: bool,
}

impl Flight {
    pub(crate) fn new(spec: Arc<TableSpec>, limits: Limits) -> Self {
        Self {
            spec,
            limits,
            next: 0,
            free: BTreeMap::new(),
            lanes: HashMap::new(),
            behind: 0,
            out: HashMap::new(),
            bytes: 0,
            blocked: Blocked::default(),
            lost: Vec::new(),
            outcomes: Vec::new(),
            overtaken: 0,
            over: false,
        }
    }

    pub(crate) fn is_ordered(&self) -> bool {
        self.spec.ordering != Ordering::None
    }

    /// Loads the next row in order; gives it back where its aggregate is blocked.
    pub(crate) fn push(&mut self, row: OutboxRow) -> Option<OutboxRow> {
        let place = self.next;
        if self.is_ordered() {
            if self.blocked.contains(&row.aggregate) {
                return Some(row);
            }
            let aggregate = row.aggregate.clone();
            let lane = self.lanes.entry(aggregate.clone()).or_default();
            // An aggregate that was refused before goes one row at a time until it is clean.
            lane.single |= self.spec.ordering == Ordering::Strict || row.state.retry_count > 0;
            lane.behind.push_back((place, row));
            self.behind += 1;
            self.advance(&aggregate);
        } else {
            self.free.insert(place, row);
        }
        self.next += 1;
        None
    }

    /// Frees what may go of a lane, and drops the lane once it is empty.
    fn advance(&mut self, aggregate: &Aggregate) {
        let Some(lane) = self.lanes.get_mut(aggregate) else {
            return;
        };
        while !lane.behind.is_empty() && (!lane.single || lane.out == 0) {
            let Some((place, row)) = lane.behind.pop_front() else {
                break;
            };
            lane.out += 1;
            self.behind -= 1;
            self.free.insert(place, row);
        }
        if lane.out == 0 && lane.behind.is_empty() {
            self.lanes.remove(aggregate);
        }
    }

    /// A free row has its verdict or is given back.
    fn left(&mut self, aggregate: &Aggregate) {
        if let Some(lane) = self.lanes.get_mut(aggregate) {
            lane.out = lane.out.saturating_sub(1);
        }
        self.advance(aggregate);
    }

    /// Nothing more of the aggregate goes from here; what is loaded of it is given back.
    fn block(&mut self, aggregate: &Aggregate) {
        self.blocked.insert(aggregate);
        if let Some(lane) = self.lanes.get_mut(aggregate) {
            self.behind -= lane.behind.len();
            self.lost.extend(lane.behind.drain(..));
        }
    }

    /// What may be handed over now, at most `room` rows. A row without a message fails when its
    /// turn comes.
    pub(crate) fn take(
        &mut self,
        room: usize,
        mut ticket: impl FnMut() -> Ticket,
    ) -> Vec<(Ticket, Arc<Message>)> {
        let mut messages = Vec::new();
        while messages.len() < room
            && !self.over
            && self.out.len() + self.outcomes.len() < self.limits.rows
            && (self.bytes < self.limits.bytes || self.out.is_empty())
            && let Some((place, row)) = self.free.pop_first()
        {
            if self.is_ordered() && self.blocked.contains(&row.aggregate) {
                let aggregate = row.aggregate.clone();
                self.lost.push((place, row));
                self.left(&aggregate);
                continue;
            }
            match &row.message {
                Ok(message) => {
                    let (ticket, message) = (ticket(), message.clone());
                    self.bytes += message.weight();
                    self.out.insert(ticket, (place, row));
                    messages.push((ticket, message));
                }
                Err(failure) => {
                    let failure = failure.clone();
                    self.refused(row, failure);
                }
            }
        }
        messages
    }

    /// What the broker says of one of ours; others are of an earlier flight that was cut off.
    pub(crate) fn answer(&mut self, ticket: Ticket, answer: PublishOutcome, breaker: &mut Breaker) {
        let Some((place, row)) = self.out.remove(&ticket) else {
            return;
        };
        let weight = row.message.as_ref().map_or(0, |m| m.weight());
        self.bytes = self.bytes.saturating_sub(weight);
        let aggregate = row.aggregate.clone();
        let failure = match answer {
            PublishOutcome::Confirmed => {
                breaker.confirmed();
                if self.is_ordered() && self.blocked.contains(&aggregate) {
                    self.overtaken += 1;
                }
                self.outcomes.push(outcome(row, Verdict::Sent));
                return self.left(&aggregate);
            }
            PublishOutcome::Unconfirmed => {
                self.over = true;
                self.lost.push((place, row));
                return self.left(&aggregate);
            }
            PublishOutcome::Nacked => {
                Failure::retryable("nacked", "the broker refused it with a nack")
            }
            PublishOutcome::Refused(failure) => failure,
            PublishOutcome::Returned(why) => Failure {
                class: match self.spec.on_unroutable {
                    OnUnroutable::Retry => FailureClass::Retryable,
                    OnUnroutable::Fail => FailureClass::Permanent,
                },
                code: "unroutable",
                reason: why,
            },
        };
        if breaker.refused(&failure) {
            // Not this row's fault, and not the next one's: the table waits, uncharged.
            self.over = true;
            self.lost.push((place, row));
            return self.left(&aggregate);
        }
        self.refused(row, failure);
    }

    fn refused(&mut self, row: OutboxRow, failure: Failure) {
        let aggregate = row.aggregate.clone();
        // A row that failed for good lets the next one pass, unless it is to go on blocking.
        let blocks = failure.class == FailureClass::Retryable || self.spec.failed_blocks_aggregate;
        let retry_count = row.state.retry_count;
        let verdict = Verdict::Failed {
            failure,
            retry_count,
            message: None,
        };
        self.outcomes.push(outcome(row, verdict));
        if blocks && self.is_ordered() {
            self.block(&aggregate);
        }
        self.left(&aggregate);
    }

    /// Takes back everything that is not at the broker and has no verdict, in order.
    pub(crate) fn give_back(&mut self) -> Vec<(Place, OutboxRow)> {
        let mut rows = std::mem::take(&mut self.lost);
        for (place, row) in std::mem::take(&mut self.free) {
            if let Some(lane) = self.lanes.get_mut(&row.aggregate) {
                lane.out = lane.out.saturating_sub(1);
            }
            rows.push((place, row));
        }
        for lane in self.lanes.values_mut() {
            rows.extend(lane.behind.drain(..));
        }
        self.behind = 0;
        self.lanes.retain(|_, lane| lane.out > 0);
        rows.sort_unstable_by_key(|(place, _)| *place);
        rows
    }

    /// Keys of rows at the broker.
    pub(crate) fn at_broker(&self) -> impl Iterator<Item = &RowKey> {
        self.out.values().map(|(_, row)| &row.key)
    }

    /// The aggregate of every row that is here, recorded or not.
    pub(crate) fn open(&self) -> impl Iterator<Item = &Aggregate> {
        let out = self.out.values();
        let behind = self.lanes.values().flat_map(|lane| &lane.behind);
        let rows = out.chain(behind).chain(&self.lost).map(|(_, row)| row);
        let rows = rows.chain(self.free.values()).map(|row| &row.aggregate);
        rows.chain(self.outcomes.iter().map(|o| &o.aggregate))
    }

    /// Rows at the broker.
    pub(crate) fn out(&self) -> usize {
        self.out.len()
    }

    /// Rows that wait here for their turn.
    pub(crate) fn loaded(&self) -> usize {
        self.free.len() + self.behind
    }

    /// Takes back the rows of blocked aggregates, while the flight goes on.
    pub(crate) fn skipped(&mut self) -> Vec<OutboxRow> {
        if self.over {
            return Vec::new(); // others are among them: all are given back together
        }
        self.lost.drain(..).map(|(_, row)| row).collect()
    }

    /// The first place that has no verdict yet.
    pub(crate) fn first(&self) -> Option<Place> {
        let out = self.out.values().map(|(place, _)| *place).min();
        let lost = self.lost.iter().map(|(place, _)| *place).min();
        [self.first_loaded(), out, lost].into_iter().flatten().min()
    }

    /// The first place that waits here for its turn.
    pub(crate) fn first_loaded(&self) -> Option<Place> {
        let behind = self.lanes.values().filter_map(|l| l.behind.front());
        let behind = behind.map(|(place, _)| *place).min();
        let free = self.free.keys().next().copied();
        free.into_iter().chain(behind).min()
    }

    /// The place that the next row gets.
    pub(crate) fn next_place(&self) -> Place {
        self.next
    }
}

fn outcome(row: OutboxRow, verdict: Verdict) -> RowOutcome {
    RowOutcome {
        key: row.key,
        aggregate: row.aggregate,
        verdict,
    }
}
