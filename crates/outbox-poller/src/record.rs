//! Recording what is known. A confirm that is held is never published again in this process: where
//! its record cannot be made (the database is away, somebody keeps the row locked), the record
//! alone is kept and repeated, and its row is published by nobody meanwhile.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use outbox_core::ports::{
    ClaimToken, Disposition, Gate, HeldRow, Observer, Path, PollStore, PortError, PortResult,
    Recorded, RowOutcome, Verdict, chain,
};
use outbox_core::{Aggregate, OutboxRow, RowKey, TableIdx};
use tokio::time::Instant;
use tracing::debug;

/// Rows of one record.
pub(crate) const BATCH: usize = 1000;
/// Rows that somebody keeps locked are presented again after this: each time may wait for the lock.
const LOCKED_AGAIN: Duration = Duration::from_secs(5);

/// What a kept record means for the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeptAs {
    /// It is delivered.
    Sent,
    /// It was refused.
    Failed,
}

/// What was recorded.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Rows confirmed and recorded.
    pub(crate) published: usize,
    /// Rows whose failure was recorded.
    pub(crate) failed: usize,
    /// Rows that nobody needs to record any more.
    pub(crate) gone: usize,
}

impl Tally {
    pub(crate) fn settled(&self) -> usize {
        self.published + self.failed + self.gone
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.published += other.published;
        self.failed += other.failed;
        self.gone += other.gone;
    }
}

/// One attempt to record, made.
pub(crate) struct Attempt {
    token: Option<ClaimToken>,
    outcomes: Vec<RowOutcome>,
    answer: PortResult<Vec<Recorded>>,
}

/// Makes one attempt.
pub(crate) async fn attempt(
    store: Arc<dyn PollStore>,
    token: Option<ClaimToken>,
    outcomes: Vec<RowOutcome>,
) -> Attempt {
    let answer = store.record(token.as_ref(), &outcomes).await;
    Attempt {
        token,
        outcomes,
        answer,
    }
}

/// Records, and what could not be recorded yet.
pub(crate) struct Recorder {
    pub(crate) store: Arc<dyn PollStore>,
    observer: Arc<dyn Observer>,
    gate: Arc<dyn Gate>,
    kept: HashMap<RowKey, (Option<ClaimToken>, RowOutcome)>,
    /// The database was away at the last attempt: nothing is published before it answers.
    away: Option<PortError>,
    /// When rows that were locked are presented again.
    again: Instant,
}

impl Recorder {
    pub(crate) fn new(
        store: Arc<dyn PollStore>,
        observer: Arc<dyn Observer>,
        gate: Arc<dyn Gate>,
    ) -> Self {
        Self {
            store,
            observer,
            gate,
            kept: HashMap::new(),
            away: None,
            again: Instant::now(),
        }
    }

    pub(crate) fn kept(&self, row: &RowKey) -> Option<KeptAs> {
        let (_, outcome) = self.kept.get(row)?;
        Some(match outcome.verdict {
            Verdict::Sent => KeptAs::Sent,
            Verdict::Failed { .. } | Verdict::Parked { .. } => KeptAs::Failed,
        })
    }

    /// Aggregates of the rows whose record is not made, one for each row.
    pub(crate) fn aggregates(&self) -> impl Iterator<Item = &Aggregate> {
        self.kept.values().map(|(_, outcome)| &outcome.aggregate)
    }

    /// Rows whose record is not made.
    pub(crate) fn backlog(&self) -> usize {
        self.kept.len()
    }

    /// Whether the last attempt found the database away.
    pub(crate) fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// What to record again now.
    pub(crate) fn due(&mut self) -> Option<(Option<ClaimToken>, Vec<RowOutcome>)> {
        if self.kept.is_empty() || (self.away.is_none() && self.again > Instant::now()) {
            return None;
        }
        let token = self.kept.values().next()?.0.clone();
        let mut batch: Vec<RowKey> = self
            .kept
            .iter()
            .filter(|(_, (t, _))| *t == token)
            .map(|(key, _)| key.clone())
            .collect();
        batch.sort_unstable();
        batch.truncate(BATCH);
        let outcomes = batch.iter().filter_map(|key| self.kept.remove(key));
        Some((token, outcomes.map(|(_, outcome)| outcome).collect()))
    }

    /// Records, or keeps the record for later.
    pub(crate) async fn record(
        &mut self,
        token: Option<&ClaimToken>,
        outcomes: Vec<RowOutcome>,
    ) -> PortResult<Tally> {
        let mut tally = Tally::default();
        let mut outcomes = outcomes.into_iter().peekable();
        while outcomes.peek().is_some() {
            let batch = outcomes.by_ref().take(BATCH).collect();
            let made = attempt(self.store.clone(), token.cloned(), batch).await;
            tally.add(&self.made(made).await?);
        }
        Ok(tally)
    }

    /// Makes the records that were kept, once each. An error means that the database is away and
    /// that nothing may be published.
    pub(crate) async fn again(&mut self) -> PortResult<Tally> {
        let mut tally = Tally::default();
        let all = self.kept.len();
        for _ in 0..=all {
            let Some((token, outcomes)) = self.due() else {
                break;
            };
            let made = attempt(self.store.clone(), token, outcomes).await;
            let recorded = self.made(made).await?;
            tally.add(&recorded);
            if let Some(e) = &self.away {
                return Err(PortError::new(e.disposition, e.operation.clone(), chain(e)));
            }
        }
        Ok(tally)
    }

    /// Takes in what an attempt brought: settled rows leave the tail's holds, others are kept.
    pub(crate) async fn made(&mut self, made: Attempt) -> PortResult<Tally> {
        let Attempt {
            token,
            outcomes,
            answer,
        } = made;
        let answers = match answer {
            Ok(answers) => {
                self.away = None;
                answers
            }
            Err(e) if e.disposition == Disposition::Backoff => {
                debug!(
                    rows = outcomes.len(),
                    error = chain(&e),
                    "outcomes are kept until the database is back"
                );
                self.away = Some(e);
                vec![Recorded::Busy; outcomes.len()]
            }
            Err(e) => return Err(e),
        };
        let (mut tally, mut done) = (Tally::default(), Vec::new());
        for (outcome, answer) in outcomes.into_iter().zip(answers) {
            match answer {
                Recorded::Busy => {
                    self.again = Instant::now() + LOCKED_AGAIN;
                    self.kept
                        .insert(outcome.key.clone(), (token.clone(), outcome));
                    continue;
                }
                Recorded::Sent => tally.published += 1,
                Recorded::WillRetry | Recorded::Failed => tally.failed += 1,
                Recorded::Gone => tally.gone += 1,
            }
            self.observe(&outcome, answer);
            done.push(HeldRow {
                key: outcome.key,
                aggregate: outcome.aggregate,
            });
        }
        if !done.is_empty() {
            self.gate.done(&done).await;
        }
        Ok(tally)
    }

    fn observe(&self, outcome: &RowOutcome, recorded: Recorded) {
        let table: TableIdx = outcome.key.table;
        match (&outcome.verdict, recorded) {
            (Verdict::Sent, Recorded::Sent) => self.observer.published(table, Path::Poller, None),
            (Verdict::Failed { failure, .. }, Recorded::WillRetry | Recorded::Failed) => {
                self.observer.failed(table, failure.class);
            }
            _ => {}
        }
    }

    pub(crate) fn overtaken(&self, table: TableIdx, rows: u64) {
        if rows > 0 {
            self.observer.overtaken(table, rows);
        }
    }

    /// Rows that go back unpublished.
    pub(crate) async fn done(&self, rows: &[HeldRow]) {
        if !rows.is_empty() {
            self.gate.done(rows).await;
        }
    }
}

pub(crate) fn held(row: &OutboxRow) -> HeldRow {
    HeldRow {
        key: row.key.clone(),
        aggregate: row.aggregate.clone(),
    }
}
