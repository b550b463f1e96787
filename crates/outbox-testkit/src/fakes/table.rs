use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use outbox_core::failure::FailureClass;
use outbox_core::message::ContentType;
use outbox_core::ports::{
    ClaimToken, Disposition, PortError, PortResult, Recorded, RowOutcome, Verdict,
};
use outbox_core::retry::RetryPolicy;
use outbox_core::row::RowState;
use outbox_core::{Aggregate, Failure, Message, OutboxRow, RowId, RowKey, Status, TableIdx};
use tokio::time::Instant;

use super::guard;

mod store;

/// Outbox tables in memory, with integer keys and the clock of tokio.
pub struct FakeTable {
    state: Arc<Mutex<State>>,
    zero: Instant,
    /// Writes are fenced by it, if there is one.
    epoch: Option<u64>,
}

/// A change of a row's status.
#[derive(Clone, Debug)]
pub struct Transition {
    /// The row.
    pub key: RowKey,
    /// From.
    pub from: Status,
    /// To.
    pub to: Status,
}

struct State {
    rows: BTreeMap<RowKey, FakeRow>,
    retry: RetryPolicy,
    lock_ttl: Duration,
    failed_blocks: bool,
    latency: Duration,
    faults: VecDeque<Disposition>,
    away: bool,
    locked: HashSet<RowKey>,
    tokens: u64,
    charged: u64,
    claims: u64,
    statements: u64,
    most_recorded: usize,
    epoch: u64,
    lost_answers: usize,
    transitions: Vec<Transition>,
}

/// A row. Times count from the table's making.
#[derive(Clone, Debug)]
pub struct FakeRow {
    /// Its aggregate.
    pub aggregate: Aggregate,
    /// Status.
    pub status: Status,
    /// Retries spent.
    pub retry_count: u32,
    /// Not before.
    pub next_retry_at: Option<Duration>,
    /// Claim.
    pub locked_by: Option<String>,
    /// End of the claim.
    pub locked_until: Option<Duration>,
    /// When it was inserted.
    pub created_at: Duration,
    /// When it was last written.
    pub updated_at: Duration,
    /// Code of the last failure.
    pub last_error: Option<&'static str>,
    /// Its message, or why it has none.
    pub message: Result<Message, Failure>,
}

/// A message that is known by its id.
#[must_use]
pub fn message(id: u64, body: usize) -> Message {
    Message {
        exchange: Arc::from("outbox"),
        templated_exchange: false,
        routing_key: "key".to_owned(),
        content_type: ContentType::Json,
        message_id: id.to_string(),
        event_type: "event".to_owned(),
        timestamp: None,
        app_id: Arc::from("app"),
        headers: Vec::new(),
        body: Bytes::from(vec![b'x'; body]),
    }
}

impl FakeTable {
    /// An empty one.
    #[must_use]
    pub fn new(retry: RetryPolicy, lock_ttl: Duration) -> Self {
        Self {
            state: Arc::new(Mutex::new(State {
                rows: BTreeMap::new(),
                retry,
                lock_ttl,
                failed_blocks: false,
                latency: Duration::from_millis(1),
                faults: VecDeque::new(),
                away: false,
                locked: HashSet::new(),
                tokens: 0,
                charged: 0,
                claims: 0,
                statements: 0,
                most_recorded: 0,
                epoch: 0,
                lost_answers: 0,
                transitions: Vec::new(),
            })),
            zero: Instant::now(),
            epoch: None,
        }
    }

    /// The same tables for a new leader: from now on nobody who led before writes anything.
    #[must_use]
    pub fn session(&self) -> Self {
        let mut state = guard(&self.state);
        state.epoch += 1;
        Self {
            state: self.state.clone(),
            zero: self.zero,
            epoch: Some(state.epoch),
        }
    }

    /// The answers of the next claims and records are lost, though they are made.
    pub fn lose_answers(&self, times: usize) {
        guard(&self.state).lost_answers += times;
    }

    /// Every change of a status that a leader made, in order.
    #[must_use]
    pub fn transitions(&self) -> Vec<Transition> {
        guard(&self.state).transitions.clone()
    }

    /// `failed_blocks_aggregate`.
    pub fn set_failed_blocks(&self, blocks: bool) {
        guard(&self.state).failed_blocks = blocks;
    }

    /// Time that each statement takes.
    pub fn set_latency(&self, latency: Duration) {
        guard(&self.state).latency = latency;
    }

    /// The next statements fail so.
    pub fn fail_next(&self, times: usize, disposition: Disposition) {
        let faults = std::iter::repeat_n(disposition, times);
        guard(&self.state).faults.extend(faults);
    }

    /// The server is away, or back.
    pub fn set_away(&self, away: bool) {
        guard(&self.state).away = away;
    }

    /// Somebody keeps a row locked, or lets it go.
    pub fn set_locked(&self, table: TableIdx, id: u64, locked: bool) {
        let mut state = guard(&self.state);
        let key = key(table, id);
        if locked {
            state.locked.insert(key);
        } else {
            state.locked.remove(&key);
        }
    }

    /// Inserts a pending row.
    pub fn insert(&self, table: TableIdx, id: u64, aggregate: &str) {
        self.insert_message(table, id, aggregate, Ok(message(id, 10)));
    }

    /// Inserts a pending row with this message.
    pub fn insert_message(
        &self,
        table: TableIdx,
        id: u64,
        aggregate: &str,
        message: Result<Message, Failure>,
    ) {
        let now = self.now();
        let row = FakeRow {
            aggregate: Aggregate {
                table,
                kind: Arc::from(""),
                id: Arc::from(aggregate),
            },
            status: Status::Pending,
            retry_count: 0,
            next_retry_at: None,
            locked_by: None,
            locked_until: None,
            created_at: now,
            updated_at: now,
            last_error: None,
            message,
        };
        guard(&self.state).rows.insert(key(table, id), row);
    }

    /// Changes a row, as the application or an operator would.
    pub fn update(&self, table: TableIdx, id: u64, change: impl FnOnce(&mut FakeRow)) {
        if let Some(row) = guard(&self.state).rows.get_mut(&key(table, id)) {
            change(row);
        }
    }

    /// A row.
    #[must_use]
    pub fn row(&self, table: TableIdx, id: u64) -> Option<FakeRow> {
        guard(&self.state).rows.get(&key(table, id)).cloned()
    }

    /// All rows.
    #[must_use]
    pub fn rows(&self) -> Vec<(RowKey, FakeRow)> {
        let state = guard(&self.state);
        let rows = state.rows.iter().map(|(k, r)| (k.clone(), r.clone()));
        rows.collect()
    }

    /// Rows of that status.
    #[must_use]
    pub fn count(&self, status: Status) -> usize {
        let state = guard(&self.state);
        state.rows.values().filter(|r| r.status == status).count()
    }

    /// Retries charged so far, the last one of a row included.
    #[must_use]
    pub fn charged(&self) -> u64 {
        guard(&self.state).charged
    }

    /// Rows claimed so far.
    #[must_use]
    pub fn claims(&self) -> u64 {
        guard(&self.state).claims
    }

    /// Statements so far, those that failed included.
    #[must_use]
    pub fn statements(&self) -> u64 {
        guard(&self.state).statements
    }

    /// The largest batch of outcomes.
    #[must_use]
    pub fn most_recorded(&self) -> usize {
        guard(&self.state).most_recorded
    }

    /// The database's clock.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.zero.elapsed()
    }

    async fn statement(&self, what: &str) -> PortResult<()> {
        let latency = guard(&self.state).latency;
        tokio::time::sleep(latency).await;
        let mut state = guard(&self.state);
        state.statements += 1;
        let fault = if state.away {
            Some(Disposition::Backoff)
        } else {
            state.faults.pop_front()
        };
        match fault {
            Some(disposition) => Err(PortError::new(disposition, what, "told to fail")),
            None => Ok(()),
        }
    }
}

impl FakeTable {
    /// A statement that writes.
    async fn write(&self, what: &str) -> PortResult<()> {
        self.statement(what).await?;
        match self.epoch {
            Some(epoch) if epoch != guard(&self.state).epoch => Err(PortError::new(
                Disposition::Fenced,
                what,
                "somebody else leads",
            )),
            _ => Ok(()),
        }
    }

    fn answered<T>(state: &mut State, what: &str, answer: T) -> PortResult<T> {
        if state.lost_answers == 0 {
            return Ok(answer);
        }
        state.lost_answers -= 1;
        Err(PortError::new(
            Disposition::Backoff,
            what,
            "the answer is lost",
        ))
    }
}

fn key(table: TableIdx, id: u64) -> RowKey {
    RowKey {
        table,
        id: RowId::UInt(id),
    }
}

impl FakeRow {
    fn claimed(&self, now: Duration) -> bool {
        self.status == Status::Processing && self.locked_until.is_some_and(|at| at > now)
    }

    fn due(&self, now: Duration) -> bool {
        self.next_retry_at.is_none_or(|at| at <= now)
    }

    /// May be claimed now.
    fn ready(&self, now: Duration) -> bool {
        match self.status {
            Status::Pending => self.due(now),
            Status::Processing => !self.claimed(now),
            _ => false,
        }
    }

    /// Never attempted, and delayed: outside the order.
    #[must_use]
    pub fn delayed(&self, now: Duration) -> bool {
        self.status == Status::Pending && self.retry_count == 0 && !self.due(now)
    }

    fn read(&self, key: &RowKey) -> OutboxRow {
        let micros = |at: Option<Duration>| at.and_then(|d| i64::try_from(d.as_micros()).ok());
        OutboxRow {
            key: key.clone(),
            aggregate: self.aggregate.clone(),
            state: RowState {
                status: self.status,
                retry_count: self.retry_count,
                next_retry_at: micros(self.next_retry_at),
                locked_by: self.locked_by.clone(),
                locked_until: micros(self.locked_until),
            },
            message: self.message.clone().map(Arc::new),
        }
    }
}

impl State {
    fn unsettled(&self, row: &FakeRow, now: Duration) -> bool {
        let open = matches!(row.status, Status::Pending | Status::Processing)
            || (self.failed_blocks && row.status == Status::Failed);
        open && !row.delayed(now)
    }

    /// A row whose aggregate has an earlier one that waits.
    fn behind(&self, key: &RowKey, row: &FakeRow, now: Duration) -> bool {
        let earlier = self.rows.range(..key.clone());
        earlier
            .filter(|(k, r)| k.table == key.table && r.aggregate == row.aggregate)
            .any(|(_, r)| self.unsettled(r, now) && !r.ready(now))
    }

    fn status(&self, key: &RowKey) -> Option<Status> {
        self.rows.get(key).map(|row| row.status)
    }

    /// Notes that a row's status is another than it was.
    fn changed(&mut self, key: &RowKey, before: Option<Status>) {
        if let (Some(from), Some(to)) = (before, self.status(key))
            && from != to
        {
            let key = key.clone();
            self.transitions.push(Transition { key, from, to });
        }
    }

    fn record(
        &mut self,
        token: Option<&ClaimToken>,
        outcome: &RowOutcome,
        now: Duration,
    ) -> Recorded {
        let before = self.status(&outcome.key);
        let recorded = self.compare_and_record(token, outcome, now);
        self.changed(&outcome.key, before);
        recorded
    }

    fn compare_and_record(
        &mut self,
        token: Option<&ClaimToken>,
        outcome: &RowOutcome,
        now: Duration,
    ) -> Recorded {
        if self.locked.contains(&outcome.key) {
            return Recorded::Busy;
        }
        let retry = self.retry;
        let Some(row) = self.rows.get_mut(&outcome.key) else {
            return Recorded::Gone;
        };
        let open = matches!(
            row.status,
            Status::Pending | Status::Processing | Status::Failed
        );
        match &outcome.verdict {
            Verdict::Sent if open => {
                row.status = Status::Sent;
                (row.locked_by, row.locked_until, row.updated_at) = (None, None, now);
                Recorded::Sent
            }
            Verdict::Sent if row.status == Status::Sent => Recorded::Sent,
            Verdict::Failed {
                failure,
                retry_count,
                ..
            } => {
                let ours = match token {
                    Some(token) => row.locked_by.as_ref() == Some(&token.0),
                    None => row.status == Status::Pending || !row.claimed(now),
                };
                let open = matches!(row.status, Status::Pending | Status::Processing);
                if !(ours && open && row.retry_count == *retry_count) {
                    return Recorded::Gone;
                }
                (row.locked_by, row.locked_until, row.updated_at) = (None, None, now);
                row.last_error = Some(failure.code);
                let delay = match failure.class {
                    FailureClass::Retryable => {
                        self.charged += 1;
                        retry.next(*retry_count)
                    }
                    FailureClass::Permanent => None,
                };
                match delay {
                    Some(delay) => {
                        row.status = Status::Pending;
                        row.retry_count += 1;
                        row.next_retry_at = Some(now + delay);
                        Recorded::WillRetry
                    }
                    None => {
                        row.status = Status::Failed;
                        Recorded::Failed
                    }
                }
            }
            _ => Recorded::Gone,
        }
    }
}
