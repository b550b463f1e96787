//! A database with its binlog, and a broker, as scripts.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use outbox_core::message::ContentType;
use outbox_core::ports::*;
use outbox_core::position::FilePosition;
use outbox_core::row::RowState;
use outbox_core::spec::*;
use outbox_core::status::StatusValues;
use outbox_core::template::Template;
use outbox_core::*;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::group::{Deferred, Group, Source, StreamItem};
use crate::stream::StreamError;

pub(super) const TABLE: TableIdx = TableIdx(0);

pub(super) fn spec(ordering: Ordering, tracking: Tracking) -> Arc<TableSpec> {
    Arc::new(TableSpec {
        schema: "app".to_owned(),
        table: "outbox".to_owned(),
        tracking,
        on_sent: OnSent::Mark,
        columns: ColumnNames::default(),
        status_values: StatusValues::default(),
        exchange: Template::parse("outbox").unwrap(),
        routing_key: Template::parse("key").unwrap(),
        ordering,
        failed_blocks_aggregate: false,
        on_unroutable: OnUnroutable::Retry,
        max_body: None,
    })
}

pub(super) fn at(pos: usize) -> Position {
    Position::File(FilePosition {
        server: "s".to_owned(),
        file: "b.000001".to_owned(),
        pos: u64::try_from(pos).unwrap(),
    })
}

pub(super) fn pos_of(position: &Position) -> usize {
    match position {
        Position::File(f) => usize::try_from(f.pos).unwrap(),
        Position::Gtid(_) | Position::Mariadb(_) => panic!("scripts use file positions"),
    }
}

pub(super) fn aggregate(name: &str) -> Aggregate {
    Aggregate {
        table: TABLE,
        kind: Arc::from("order"),
        id: Arc::from(name),
    }
}

pub(super) fn key(n: u64) -> RowKey {
    RowKey {
        table: TABLE,
        id: RowId::UInt(n),
    }
}

pub(super) fn held(n: u64, name: &str) -> HeldRow {
    HeldRow {
        key: key(n),
        aggregate: aggregate(name),
    }
}

fn number(id: &RowId) -> u64 {
    match id {
        RowId::UInt(n) => *n,
        _ => panic!("scripts use unsigned ids"),
    }
}

#[derive(Clone, Debug)]
pub(super) struct DbRow {
    pub(super) aggregate: Aggregate,
    pub(super) status: Status,
    pub(super) retry_count: u32,
    pub(super) claimed: bool,
    pub(super) visible: bool,
    pub(super) failure: Option<Failure>,
    parked: bool,
}

impl DbRow {
    fn new(aggregate: Aggregate, visible: bool) -> Self {
        Self {
            aggregate,
            status: Status::Pending,
            retry_count: 0,
            claimed: false,
            visible,
            failure: None,
            parked: false,
        }
    }
}

/// What the binlog holds.
#[derive(Clone)]
enum Entry {
    Rows(Vec<(u64, Aggregate)>, i64),
    Deferred(Vec<Deferred>, i64),
    Noise {
        own_only: bool,
    },
    Signal,
    /// Rows as given.
    Raw(Vec<OutboxRow>, i64),
}

#[derive(Default)]
pub(super) struct Db {
    binlog: Vec<Entry>,
    pub(super) rows: BTreeMap<u64, DbRow>,
    pub(super) stored: usize,
    /// Stored with the position.
    pub(super) behind: Vec<Behind>,
    /// Settlements with a position, and all of them.
    pub(super) checkpoints: usize,
    pub(super) settlements: usize,
    pub(super) looks: Vec<Vec<u64>>,
    /// Rows that somebody keeps locked.
    pub(super) locked: HashSet<u64>,
    /// Errors of the next settlements.
    pub(super) settle_faults: VecDeque<Disposition>,
    /// Aggregates of which a row was ever left for later.
    ever_held: HashSet<Aggregate>,
    /// Every stream that is open now ends when this changes.
    cut: u64,
    pub(super) opens: Vec<usize>,
    pub(super) open: bool,
    pub(super) open_fault: Option<StreamError>,
    pub(super) look_takes: Duration,
    /// Retryable failures are final.
    pub(super) no_retries: bool,
}

#[derive(Default)]
pub(super) struct Broker {
    generation: u64,
    outstanding: Vec<(Ticket, u64)>,
    answers: VecDeque<(Ticket, PublishOutcome)>,
    /// Rows in the order in which they were handed over, again and again.
    pub(super) handed: Vec<u64>,
    pub(super) batches: Vec<usize>,
    /// Rows that arrived, in the order of handing over.
    pub(super) arrived: Vec<u64>,
    pub(super) confirmed: HashSet<u64>,
    /// Answers wait for [`World::answer`].
    pub(super) manual: bool,
    down: bool,
    pub(super) blocked: bool,
    /// What the next publish of a row gets instead of a confirm.
    pub(super) verdicts: HashMap<u64, VecDeque<PublishOutcome>>,
    /// At most so many are unconfirmed of one aggregate at any time, as seen.
    pub(super) peak: HashMap<Aggregate, usize>,
}

#[derive(Default)]
pub(super) struct World {
    pub(super) db: Mutex<Db>,
    pub(super) broker: Mutex<Broker>,
    changed: Notify,
    answered: Notify,
    pub(super) overtaken: Mutex<u64>,
    pub(super) deferrals: Mutex<Vec<Deferral>>,
    began: Mutex<Option<Instant>>,
}

impl World {
    pub(super) fn new() -> Arc<Self> {
        let world = Self::default();
        *world.began.lock().unwrap() = Some(Instant::now());
        Arc::new(world)
    }

    /// The clock of server and relay: paused as tokio's is.
    pub(super) fn clock(&self) -> i64 {
        let since = self.began.lock().unwrap().unwrap().elapsed();
        1_700_000_000_000_000 + i64::try_from(since.as_micros()).unwrap()
    }

    /// One transaction with these rows, committed now.
    pub(super) fn insert(&self, rows: &[(u64, &str)]) {
        self.insert_as(rows, true);
    }

    pub(super) fn insert_as(&self, rows: &[(u64, &str)], visible: bool) {
        let now = self.clock();
        let mut db = self.db.lock().unwrap();
        let rows: Vec<_> = rows.iter().map(|(n, a)| (*n, aggregate(a))).collect();
        for (n, aggregate) in &rows {
            db.rows.insert(*n, DbRow::new(aggregate.clone(), visible));
        }
        db.binlog.push(Entry::Rows(rows, now));
        drop(db);
        self.changed.notify_waiters();
    }

    /// A row that the binlog does not have as such.
    pub(super) fn only_in_the_table(&self, n: u64, name: &str) {
        let row = DbRow::new(aggregate(name), true);
        self.db.lock().unwrap().rows.insert(n, row);
    }

    pub(super) fn raw(&self, rows: Vec<OutboxRow>) {
        let now = self.clock();
        self.push(Entry::Raw(rows, now));
    }

    pub(super) fn defer(&self, row: Option<(u64, Option<&str>)>, why: Deferral) {
        let row = row.map(|(n, a)| (RowId::UInt(n), a.map(aggregate)));
        let deferred = Deferred {
            table: TABLE,
            row,
            why,
        };
        let now = self.clock();
        self.push(Entry::Deferred(vec![deferred], now));
    }

    pub(super) fn noise(&self, own_only: bool) {
        self.push(Entry::Noise { own_only });
    }

    pub(super) fn signal(&self) {
        self.push(Entry::Signal);
    }

    fn push(&self, entry: Entry) {
        self.db.lock().unwrap().binlog.push(entry);
        self.changed.notify_waiters();
    }

    pub(super) fn edit(&self, n: u64, change: impl FnOnce(&mut DbRow)) {
        change(self.db.lock().unwrap().rows.get_mut(&n).unwrap());
    }

    pub(super) fn status(&self, n: u64) -> Status {
        self.db.lock().unwrap().rows[&n].status
    }

    pub(super) fn stored(&self) -> usize {
        self.db.lock().unwrap().stored
    }

    pub(super) fn end(&self) -> usize {
        self.db.lock().unwrap().binlog.len()
    }

    pub(super) fn cut_stream(&self) {
        self.db.lock().unwrap().cut += 1;
        self.changed.notify_waiters();
    }

    /// Answers the first `count` messages without an answer.
    pub(super) fn answer(&self, count: usize) {
        let mut broker = self.broker.lock().unwrap();
        let count = count.min(broker.outstanding.len());
        broker.answer_first(count);
        drop(broker);
        self.answered.notify_waiters();
    }

    pub(super) fn outstanding(&self) -> usize {
        self.broker.lock().unwrap().outstanding.len()
    }

    /// The connection is lost; `delivered` says whether what was on its way arrived.
    pub(super) fn broker_down(&self, delivered: bool) {
        let mut broker = self.broker.lock().unwrap();
        broker.down = true;
        broker.generation += 1;
        for (ticket, n) in std::mem::take(&mut broker.outstanding) {
            if delivered {
                broker.arrived.push(n);
            }
            broker
                .answers
                .push_back((ticket, PublishOutcome::Unconfirmed));
        }
        drop(broker);
        self.answered.notify_waiters();
    }

    pub(super) fn broker_up(&self) {
        let mut broker = self.broker.lock().unwrap();
        (broker.down, broker.blocked) = (false, false);
        drop(broker);
        self.answered.notify_waiters();
    }

    pub(super) fn handed(&self) -> Vec<u64> {
        self.broker.lock().unwrap().handed.clone()
    }

    pub(super) fn arrived(&self) -> Vec<u64> {
        self.broker.lock().unwrap().arrived.clone()
    }

    /// A poller delivers a row.
    pub(super) fn deliver(&self, n: u64) {
        self.broker.lock().unwrap().arrived.push(n);
        self.edit(n, |row| row.status = Status::Sent);
    }

    pub(super) fn refuse(&self, n: u64, outcome: PublishOutcome) {
        let mut broker = self.broker.lock().unwrap();
        broker.verdicts.entry(n).or_default().push_back(outcome);
    }
}

impl Broker {
    fn answer_first(&mut self, count: usize) {
        for (ticket, n) in self.outstanding.drain(..count).collect::<Vec<_>>() {
            let verdict = self.verdicts.get_mut(&n).and_then(VecDeque::pop_front);
            let outcome = verdict.unwrap_or(PublishOutcome::Confirmed);
            if outcome == PublishOutcome::Confirmed {
                self.arrived.push(n);
                self.confirmed.insert(n);
            }
            self.answers.push_back((ticket, outcome));
        }
    }
}

pub(super) fn row_of(n: u64, aggregate: &Aggregate) -> OutboxRow {
    OutboxRow {
        key: key(n),
        aggregate: aggregate.clone(),
        state: RowState {
            status: Status::Pending,
            retry_count: 0,
            next_retry_at: None,
            locked_by: None,
            locked_until: None,
        },
        message: Ok(Arc::new(Message {
            exchange: Arc::from("outbox"),
            templated_exchange: false,
            routing_key: "key".to_owned(),
            content_type: ContentType::Json,
            message_id: n.to_string(),
            event_type: "event".to_owned(),
            timestamp: None,
            app_id: Arc::from("outboxd"),
            headers: vec![(
                "aggregate-id".to_owned(),
                outbox_core::message::HeaderValue::Text(aggregate.id.to_string()),
            )],
            body: Bytes::from_static(b"{}"),
        })),
    }
}

pub(super) struct Script {
    pub(super) world: Arc<World>,
    next: Option<usize>,
    cut: u64,
    coordinate: Option<Position>,
    idle: bool,
}

impl Script {
    pub(super) fn new(world: &Arc<World>) -> Self {
        Self {
            world: Arc::clone(world),
            next: None,
            cut: 0,
            coordinate: None,
            idle: false,
        }
    }

    fn item(entry: &Entry, end: usize, now: i64) -> StreamItem {
        let mut group = Group {
            rows: Vec::new(),
            deferred: Vec::new(),
            layouts: Vec::new(),
            signal: false,
            end: at(end),
            committed_at: now,
        };
        match entry {
            Entry::Rows(rows, when) => {
                group.rows = rows.iter().map(|(n, a)| row_of(*n, a)).collect();
                group.committed_at = *when;
            }
            Entry::Raw(rows, when) => (group.rows, group.committed_at) = (rows.clone(), *when),
            Entry::Deferred(rows, when) => {
                (group.deferred, group.committed_at) = (rows.clone(), *when);
            }
            Entry::Signal => group.signal = true,
            Entry::Noise { own_only } => {
                return StreamItem::Progress {
                    end: at(end),
                    committed_at: now,
                    own_only: *own_only,
                };
            }
        }
        StreamItem::Group(group)
    }
}

#[async_trait]
impl Source for Script {
    async fn open(&mut self, after: &Position) -> Result<(), StreamError> {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let mut db = self.world.db.lock().unwrap();
        if let Some(fault) = db.open_fault.take() {
            return Err(fault);
        }
        db.opens.push(pos_of(after));
        db.open = true;
        self.coordinate = Some(at(db.binlog.len()));
        (self.next, self.cut, self.idle) = (Some(pos_of(after)), db.cut, false);
        Ok(())
    }

    async fn next(&mut self) -> Result<StreamItem, StreamError> {
        let Some(next) = self.next else {
            return Err(StreamError::NotOpen);
        };
        let world = Arc::clone(&self.world);
        loop {
            let changed = world.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            {
                let now = world.clock();
                let db = world.db.lock().unwrap();
                if db.cut != self.cut {
                    return Err(StreamError::Ended);
                }
                if let Some(entry) = db.binlog.get(next) {
                    (self.next, self.idle) = (Some(next + 1), false);
                    return Ok(Self::item(entry, next + 1, now));
                }
            }
            if !self.idle {
                self.idle = true;
                return Ok(StreamItem::Idle);
            }
            changed.await;
        }
    }

    async fn close(&mut self) {
        self.next = None;
        self.world.db.lock().unwrap().open = false;
    }

    fn coordinate_at_open(&self) -> Option<&Position> {
        self.coordinate.as_ref()
    }
}

#[async_trait]
impl Ledger for World {
    async fn settle(&self, settlement: &Settlement) -> PortResult<SettleReport> {
        tokio::time::sleep(Duration::from_millis(3)).await;
        let mut db = self.db.lock().unwrap();
        if let Some(disposition) = db.settle_faults.pop_front() {
            return Err(PortError::new(disposition, "settle", "scripted"));
        }
        db.settlements += 1;
        let mut report = SettleReport::default();
        for outcome in &settlement.outcomes {
            report.rows.push(db.record(outcome));
        }
        let busy = report.rows.contains(&Recorded::Busy);
        if let Some(position) = settlement.checkpoint.as_ref().filter(|_| !busy) {
            db.store(pos_of(position));
            if let Some(behind) = &settlement.behind {
                db.behind.clone_from(behind);
            }
            report.checkpointed = true;
        }
        Ok(report)
    }

    async fn look(&self, _: TableIdx, ids: &[RowId]) -> PortResult<Vec<Seen>> {
        let takes = self.db.lock().unwrap().look_takes;
        tokio::time::sleep(takes).await;
        let mut db = self.db.lock().unwrap();
        let ids: Vec<u64> = ids.iter().map(number).collect();
        let seen = ids.iter().map(|n| match db.rows.get(n) {
            Some(row) if row.visible => Seen::Row {
                status: row.status,
                retry_count: row.retry_count,
                delayed: false,
                claimed: row.claimed,
            },
            _ => Seen::Absent,
        });
        let seen = seen.collect();
        db.looks.push(ids);
        Ok(seen)
    }

    async fn holding(&self, _: TableIdx, limit: usize) -> PortResult<Vec<(Aggregate, RowId)>> {
        let db = self.db.lock().unwrap();
        let holds = db.rows.iter().filter(|(_, r)| {
            r.parked || r.claimed || (r.status == Status::Pending && r.retry_count > 0)
        });
        Ok(holds
            .take(limit)
            .map(|(n, r)| (r.aggregate.clone(), RowId::UInt(*n)))
            .collect())
    }

    async fn behind(&self) -> PortResult<Vec<Behind>> {
        Ok(self.db.lock().unwrap().behind.clone())
    }

    async fn remaining(
        &self,
        _: TableIdx,
        aggregates: &[Aggregate],
        limit: usize,
    ) -> PortResult<Vec<(Aggregate, RowId)>> {
        let db = self.db.lock().unwrap();
        let tracked = !db.rows.values().any(|r| r.parked);
        let left = db.rows.iter().filter(|(_, r)| {
            aggregates.contains(&r.aggregate)
                && (r.parked || (tracked && r.visible && r.status == Status::Pending))
        });
        Ok(left
            .take(limit)
            .map(|(n, r)| (r.aggregate.clone(), RowId::UInt(*n)))
            .collect())
    }

    async fn read(&self, _: TableIdx, _: &[RowId]) -> PortResult<Vec<OutboxRow>> {
        Ok(Vec::new())
    }

    async fn coordinate(&self) -> PortResult<Position> {
        Ok(at(self.end()))
    }
}

impl Db {
    fn record(&mut self, outcome: &RowOutcome) -> Recorded {
        let n = number(&outcome.key.id);
        if self.locked.contains(&n) {
            return Recorded::Busy;
        }
        let retries = !self.no_retries;
        let Some(row) = self.rows.get_mut(&n) else {
            return Recorded::Gone;
        };
        match &outcome.verdict {
            Verdict::Sent => {
                row.status = Status::Sent;
                row.parked = false;
                Recorded::Sent
            }
            Verdict::Parked { .. } => {
                row.parked = true;
                Recorded::WillRetry
            }
            Verdict::Failed {
                failure,
                retry_count,
                message,
            } => {
                assert_eq!(row.retry_count, *retry_count, "compare and set");
                row.failure = Some(failure.clone());
                if failure.class == FailureClass::Retryable && retries {
                    row.retry_count += 1;
                    row.parked = message.is_some();
                    let aggregate = row.aggregate.clone();
                    self.ever_held.insert(aggregate);
                    return Recorded::WillRetry;
                }
                row.status = Status::Failed;
                Recorded::Failed
            }
        }
    }

    /// No position passes a row that is neither settled nor left behind a hold.
    fn store(&mut self, pos: usize) {
        assert!(pos >= self.stored, "a position went back");
        for entry in &self.binlog[..pos] {
            let Entry::Rows(rows, _) = entry else {
                continue;
            };
            for (n, aggregate) in rows {
                let Some(row) = self.rows.get(n) else {
                    continue;
                };
                let settled = row.status != Status::Pending || row.parked || !row.visible;
                let left = row.claimed || self.ever_held.contains(aggregate);
                assert!(settled || left, "position {pos} passes row {n}");
            }
        }
        self.stored = pos;
        self.checkpoints += 1;
    }

    pub(super) fn hold_counts_as_left(&mut self, aggregate: Aggregate) {
        self.ever_held.insert(aggregate);
    }
}

#[async_trait]
impl Publisher for World {
    async fn ready(&self) -> Generation {
        loop {
            let answered = self.answered.notified();
            tokio::pin!(answered);
            answered.as_mut().enable();
            {
                let broker = self.broker.lock().unwrap();
                if !broker.down && !broker.blocked {
                    return Generation(broker.generation);
                }
            }
            answered.await;
        }
    }

    fn submit(&self, generation: Generation, messages: Vec<(Ticket, Arc<Message>)>) {
        let mut broker = self.broker.lock().unwrap();
        broker.batches.push(messages.len());
        for (ticket, message) in messages {
            let n: u64 = message.message_id.parse().unwrap();
            if broker.down || generation.0 != broker.generation {
                broker
                    .answers
                    .push_back((ticket, PublishOutcome::Unconfirmed));
                continue;
            }
            assert!(
                !broker.confirmed.contains(&n),
                "row {n} went out again after its confirm"
            );
            broker.handed.push(n);
            broker.outstanding.push((ticket, n));
        }
        let db = self.db.lock().unwrap();
        let mut by_aggregate: HashMap<Aggregate, usize> = HashMap::new();
        for (_, n) in &broker.outstanding {
            if let Some(row) = db.rows.get(n) {
                *by_aggregate.entry(row.aggregate.clone()).or_default() += 1;
            }
        }
        drop(db);
        for (aggregate, now) in by_aggregate {
            let peak = broker.peak.entry(aggregate).or_default();
            *peak = now.max(*peak);
        }
        if !broker.manual && !broker.blocked {
            let count = broker.outstanding.len();
            broker.answer_first(count);
        }
        drop(broker);
        self.answered.notify_waiters();
    }

    async fn outcomes(&self) -> Vec<(Ticket, PublishOutcome)> {
        loop {
            let answered = self.answered.notified();
            tokio::pin!(answered);
            answered.as_mut().enable();
            {
                let mut broker = self.broker.lock().unwrap();
                if !broker.answers.is_empty() {
                    return broker.answers.drain(..).collect();
                }
            }
            answered.await;
        }
    }

    fn state(&self) -> BrokerState {
        let broker = self.broker.lock().unwrap();
        match (broker.down, broker.blocked) {
            (true, _) => BrokerState::Down("scripted".to_owned()),
            (_, true) => BrokerState::Blocked("scripted".to_owned()),
            _ => BrokerState::Up,
        }
    }
}

impl Observer for World {
    fn published(&self, _: TableIdx, _: Path, _: Option<Duration>) {}
    fn failed(&self, _: TableIdx, _: FailureClass) {}
    fn deferred(&self, _: TableIdx, why: Deferral) {
        self.deferrals.lock().unwrap().push(why);
    }
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
