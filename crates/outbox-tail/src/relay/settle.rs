//! Recording: what is on its way to the ledger, and what could not be had yet.

use std::sync::Arc;
use std::time::Duration;

use outbox_core::Aggregate;
use outbox_core::ports::{
    Behind, Disposition, Ledger, Path, PortError, PortResult, Recorded, RowOutcome, SettleReport,
    Settlement, Verdict,
};
use outbox_core::window::{Checkpoint, RowSeq};
use tokio::time::Instant;

use super::RelayError;
use super::desk::Desk;
use super::link::{Job, backoff};

/// Longest pause between two attempts on rows that somebody keeps locked.
const BUSY_PAUSE: Duration = Duration::from_secs(5);
/// Aggregates of one table that are remembered across a restart; a table with more is held whole.
const BEHIND: usize = 256;

/// What is known of an outcome beside what is recorded.
pub(super) struct Meta {
    seq: RowSeq,
    latency: Option<Duration>,
}

/// A settlement on its way.
pub(super) struct Batch {
    metas: Vec<Meta>,
    settlement: Settlement,
    checkpoint: Option<Checkpoint>,
    /// Rows that count as on their way.
    counted: usize,
    began: Instant,
}

/// Outcomes that are not recorded yet.
#[derive(Default)]
pub(super) struct Records {
    pending: Vec<(Meta, RowOutcome)>,
    /// Outcomes on their way to the ledger, but for those of locked rows.
    settling: usize,
    oldest: Option<Instant>,
    /// Rows that somebody keeps locked. They are presented apart, so that they hold up nobody.
    busy: Vec<(Meta, RowOutcome)>,
    busy_at: Option<Instant>,
    busy_tries: u32,
    /// Outcomes were recorded whose position could not be stored with them.
    owed: bool,
    last_checkpoint: Option<Instant>,
    pub(super) stored: Option<outbox_core::Position>,
    /// What was stored with a checkpoint as left behind it.
    pub(super) behind: Vec<Behind>,
}

impl Records {
    pub(super) fn push(&mut self, seq: RowSeq, outcome: RowOutcome, latency: Option<Duration>) {
        self.oldest.get_or_insert_with(Instant::now);
        self.pending.push((Meta { seq, latency }, outcome));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Outcomes that are not recorded, but for those of rows that somebody keeps locked.
    pub(super) fn unrecorded(&self) -> usize {
        self.pending.len() + self.settling
    }

    pub(super) fn busy(&self) -> usize {
        self.busy.len()
    }
}

impl Desk {
    /// When a flush is due if nothing else happens.
    pub(super) fn flush_at(&self) -> Option<Instant> {
        let outcomes = self.records.oldest.map(|t| t + self.config.flush_interval);
        let position =
            (self.worth_storing && self.window.checkpoint_due()).then(|| self.checkpoint_at());
        outcomes.into_iter().chain(position).min()
    }

    fn checkpoint_at(&self) -> Instant {
        let last = self.records.last_checkpoint.filter(|_| !self.records.owed);
        last.map_or_else(Instant::now, |t| t + self.config.checkpoint_interval)
    }

    pub(super) fn busy_at(&self) -> Option<Instant> {
        self.records.busy_at
    }

    /// The next settlement, if one is due (or there is anything to record, with `force`).
    pub(super) fn next_batch(&mut self, force: bool) -> Option<Batch> {
        let (now, r) = (Instant::now(), &self.records);
        let full = r.pending.len() >= self.config.flush_rows;
        let late = r
            .oldest
            .is_some_and(|t| t + self.config.flush_interval <= now);
        let with_rows = !r.pending.is_empty() && (full || late || force);
        let position = self.worth_storing
            && (force || self.checkpoint_at() <= now)
            && self.window.checkpoint_due();
        if !with_rows && !position {
            return None;
        }
        let count = self.records.pending.len().min(self.config.flush_rows);
        let (metas, outcomes): (Vec<_>, Vec<_>) = self.records.pending.drain(..count).unzip();
        self.records.oldest = (!self.records.pending.is_empty()).then_some(now);
        self.records.settling += count;
        self.window.present(metas.iter().map(|m: &Meta| m.seq));
        let checkpoint = self.window.checkpoint();
        if checkpoint.is_some() {
            self.worth_storing = false;
        }
        let behind = checkpoint.as_ref().map(|_| self.behind());
        let settlement = Settlement {
            outcomes,
            behind: behind.filter(|b| *b != self.records.behind),
            checkpoint: checkpoint.as_ref().map(|c| c.position.clone()),
            layouts: checkpoint
                .as_ref()
                .map_or_else(Vec::new, |c| c.layouts.clone()),
        };
        Some(Batch {
            metas,
            settlement,
            checkpoint,
            counted: count,
            began: now,
        })
    }

    /// What the table does not show to be left behind. Rows without status columns are parked.
    fn behind(&self) -> Vec<Behind> {
        let mut behind = self.lanes.behind(BEHIND);
        behind.retain(|b| match b {
            Behind::Aggregate(Aggregate { table, .. }) | Behind::Table(table) => {
                self.tracks(*table)
            }
        });
        behind
    }

    /// Locked rows that are to be tried again now; never with a position.
    pub(super) fn next_busy(&mut self) -> Option<Batch> {
        self.records.busy_at.take_if(|t| *t <= Instant::now())?;
        let busy = std::mem::take(&mut self.records.busy);
        let (metas, outcomes) = busy.into_iter().unzip();
        Some(Batch {
            metas,
            settlement: Settlement {
                outcomes,
                ..Settlement::default()
            },
            checkpoint: None,
            counted: 0,
            began: Instant::now(),
        })
    }

    /// A settlement came back.
    pub(super) fn recorded(&mut self, batch: Batch, report: &SettleReport) {
        let rows = batch.metas.len();
        self.records.settling = self.records.settling.saturating_sub(batch.counted);
        let batch_had_position = batch.checkpoint.is_some();
        // What was recorded apart may have been all that the mark waited for.
        let apart = rows > 0 && !batch_had_position;
        // An answer that is too short says nothing about the rest.
        let answers = report
            .rows
            .iter()
            .copied()
            .chain(std::iter::repeat(Recorded::Busy));
        let before = self.records.busy.len();
        for ((meta, outcome), how) in batch
            .metas
            .into_iter()
            .zip(batch.settlement.outcomes)
            .zip(answers)
        {
            self.record(meta, outcome, how);
        }
        if self.records.busy.len() > before {
            let pause = backoff(self.records.busy_tries + 1).min(BUSY_PAUSE);
            self.records.busy_tries += 1;
            self.records
                .busy_at
                .get_or_insert_with(|| Instant::now() + pause);
        } else if self.records.busy.is_empty() {
            self.records.busy_tries = 0;
        }
        if rows > 0 {
            self.observer.flushed(batch.began.elapsed(), rows);
        }
        if let Some(checkpoint) = batch.checkpoint.filter(|_| report.checkpointed) {
            self.window.stored(&checkpoint);
            self.records.stored = Some(checkpoint.position);
            if let Some(behind) = batch.settlement.behind {
                self.records.behind = behind;
            }
            self.records.last_checkpoint = Some(Instant::now());
            self.records.owed = false;
            // Rows that are open may yet be settled without an outcome.
            self.worth_storing |= !self.keys.is_empty();
            self.observer.checkpointed();
        } else {
            self.records.owed |= apart || batch_had_position;
            self.worth_storing |= apart || batch_had_position;
        }
        self.follow_lanes();
    }

    fn record(&mut self, meta: Meta, outcome: RowOutcome, how: Recorded) {
        let table = outcome.key.table;
        if how == Recorded::Busy {
            self.window.withdraw([meta.seq]);
            self.window.set_aside(meta.seq);
            self.records.busy.push((meta, outcome));
            return;
        }
        self.settled(meta.seq, &outcome.key);
        match &outcome.verdict {
            Verdict::Sent => self.observer.published(table, Path::Tail, meta.latency),
            Verdict::Failed { failure, .. } => {
                if matches!(how, Recorded::WillRetry | Recorded::Failed) {
                    self.observer.failed(table, failure.class);
                }
                self.lanes
                    .recorded(&outcome.key.id, &outcome.aggregate, how);
            }
            Verdict::Parked { .. } => {}
        }
    }
}

/// Settles until the ledger has answered; only an unavailable one is asked again.
pub(super) fn settle(
    ledger: Arc<dyn Ledger>,
    batch: Batch,
) -> Job<(Batch, PortResult<SettleReport>)> {
    Box::pin(async move {
        let mut attempt = 0;
        loop {
            match ledger.settle(&batch.settlement).await {
                Err(e) if e.disposition == Disposition::Backoff => {
                    tracing::warn!(error = %outbox_core::ports::chain(&e), "settling again");
                    tokio::time::sleep(backoff(attempt)).await;
                    attempt += 1;
                }
                answer => return (batch, answer),
            }
        }
    })
}

/// What a port's error means to the relay; `None`: back off.
pub(super) fn fatal(error: PortError) -> Option<RelayError> {
    match error.disposition {
        Disposition::Backoff => None,
        Disposition::Fenced => Some(RelayError::Fenced(Box::new(error))),
        Disposition::Halt => Some(RelayError::Ledger(error)),
    }
}
