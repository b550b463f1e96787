use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use outbox_core::failure::FailureClass;
use outbox_core::message::ContentType;
use outbox_core::ports::{
    ClaimToken, Cursor, Disposition, PollStore, PortError, PortResult, Recorded, RowOutcome, Scan,
    StuckReport, TableBacklog, Verdict,
};
use outbox_core::position::FilePosition;
use outbox_core::retry::RetryPolicy;
use outbox_core::row::RowState;
use outbox_core::{
    Aggregate, Failure, Message, OutboxRow, Position, RowId, RowKey, Status, TableIdx,
};
use tokio::time::Instant;

use super::guard;

/// Outbox tables in memory, with integer keys and the clock of tokio.
pub struct FakeTable {
    state: Mutex<State>,
    zero: Instant,
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
            state: Mutex::new(State {
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
            }),
            zero: Instant::now(),
        }
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
            message: self.message.clone(),
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

    fn record(
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

#[async_trait]
impl PollStore for FakeTable {
    async fn scan(
        &self,
        table: TableIdx,
        scan: &Scan,
        limit: usize,
    ) -> PortResult<Vec<(Cursor, OutboxRow)>> {
        self.statement("scan").await?;
        let (state, now) = (guard(&self.state), self.now());
        let wanted = |key: &RowKey, row: &FakeRow| match scan {
            Scan::Due => {
                row.ready(now)
                    && (row.next_retry_at.is_some() || row.status == Status::Processing)
                    && !state.behind(key, row, now)
            }
            Scan::LeftBehind { min_age } => {
                row.status == Status::Pending
                    && row.next_retry_at.is_none()
                    && row.created_at + *min_age <= now
                    && !state.behind(key, row, now)
            }
            Scan::Pending { after } => {
                row.ready(now) && after.as_ref().is_none_or(|cursor| *key > cursor.key)
            }
        };
        let rows = state.rows.iter().filter(|(k, _)| k.table == table);
        let found = rows.filter(|(k, r)| wanted(k, r)).take(limit);
        Ok(found
            .map(|(key, row)| {
                let cursor = Cursor {
                    created_at: None,
                    key: key.clone(),
                };
                (cursor, row.read(key))
            })
            .collect())
    }

    async fn unsettled(
        &self,
        table: TableIdx,
        aggregates: &[Aggregate],
        limit: usize,
    ) -> PortResult<Vec<(OutboxRow, bool)>> {
        self.statement("unsettled").await?;
        let (state, now) = (guard(&self.state), self.now());
        let mut left: HashMap<&Aggregate, usize> = aggregates.iter().map(|a| (a, limit)).collect();
        let mut found = Vec::new();
        for (key, row) in state.rows.iter().filter(|(k, _)| k.table == table) {
            if let Some(left) = left.get_mut(&row.aggregate)
                && *left > 0
                && state.unsettled(row, now)
            {
                *left -= 1;
                found.push((row.read(key), row.ready(now)));
            }
        }
        Ok(found)
    }

    async fn claim(&self, _: TableIdx, rows: &[RowKey]) -> PortResult<(ClaimToken, Vec<RowKey>)> {
        self.statement("claim").await?;
        let (mut state, now) = (guard(&self.state), self.now());
        state.tokens += 1;
        let token = ClaimToken(format!("token-{}", state.tokens));
        let until = now + state.lock_ttl;
        let mut ours = Vec::new();
        for key in rows {
            let free = !state.locked.contains(key);
            if let Some(row) = state.rows.get_mut(key).filter(|row| free && row.ready(now)) {
                row.status = Status::Processing;
                (row.locked_by, row.locked_until) = (Some(token.0.clone()), Some(until));
                row.updated_at = now;
                ours.push(key.clone());
            }
        }
        state.claims += ours.len() as u64;
        Ok((token, ours))
    }

    async fn record(
        &self,
        token: Option<&ClaimToken>,
        outcomes: &[RowOutcome],
    ) -> PortResult<Vec<Recorded>> {
        self.statement("record").await?;
        let (mut state, now) = (guard(&self.state), self.now());
        state.most_recorded = state.most_recorded.max(outcomes.len());
        let recorded = outcomes.iter().map(|o| state.record(token, o, now));
        Ok(recorded.collect())
    }

    async fn release(&self, token: &ClaimToken, rows: &[RowKey]) -> PortResult<()> {
        self.statement("release").await?;
        let mut state = guard(&self.state);
        for key in rows {
            if let Some(row) = state.rows.get_mut(key)
                && row.status == Status::Processing
                && row.locked_by.as_ref() == Some(&token.0)
            {
                row.status = Status::Pending;
                (row.locked_by, row.locked_until) = (None, None);
            }
        }
        Ok(())
    }

    async fn coordinate(&self) -> PortResult<Position> {
        self.statement("coordinate").await?;
        Ok(Position::File(FilePosition {
            server: "fake".to_owned(),
            file: "binlog.000001".to_owned(),
            pos: 4,
        }))
    }

    async fn patrol(
        &self,
        table: TableIdx,
        warn_after: Duration,
        reset_after: Duration,
    ) -> PortResult<StuckReport> {
        self.statement("patrol").await?;
        let (mut state, now) = (guard(&self.state), self.now());
        let mut report = StuckReport::default();
        let rows = state.rows.iter_mut().filter(|(k, _)| k.table == table);
        for (_, row) in rows.filter(|(_, r)| r.status == Status::Processing) {
            let age = now.saturating_sub(row.updated_at);
            if age >= reset_after {
                row.status = Status::Pending;
                (row.locked_by, row.locked_until) = (None, None);
                report.reset += 1;
            }
            report.stuck += u64::from(age >= warn_after && age < reset_after);
        }
        Ok(report)
    }

    async fn backlog(&self, table: TableIdx) -> PortResult<TableBacklog> {
        self.statement("backlog").await?;
        let (state, now) = (guard(&self.state), self.now());
        let of = |status| {
            let rows = state
                .rows
                .iter()
                .filter(|(k, r)| k.table == table && r.status == status);
            rows.map(|(_, r)| r.clone()).collect::<Vec<_>>()
        };
        let open = [
            Status::Pending,
            Status::Failed,
            Status::Processing,
            Status::Abandoned,
        ];
        let oldest = of(Status::Pending).iter().map(|r| now - r.created_at).max();
        Ok(TableBacklog {
            by_status: open.map(|s| (s, of(s).len() as u64)).to_vec(),
            oldest_pending_seconds: oldest.map(|d| d.as_secs()),
        })
    }

    async fn purge(&self, table: TableIdx, older_than: Duration, limit: usize) -> PortResult<u64> {
        self.statement("purge").await?;
        let (mut state, now) = (guard(&self.state), self.now());
        let old = state.rows.iter().filter(|(k, r)| {
            k.table == table && r.status == Status::Sent && r.updated_at + older_than <= now
        });
        let old: Vec<RowKey> = old.map(|(k, _)| k.clone()).take(limit).collect();
        for key in &old {
            state.rows.remove(key);
        }
        Ok(old.len() as u64)
    }
}
