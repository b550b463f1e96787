//! Recording what is known. A confirm that is held is never published again: its record alone is
//! repeated, for as long as the database is away.

use std::sync::Arc;
use std::time::Duration;

use outbox_core::failure::FailureClass;
use outbox_core::ports::{
    ClaimToken, Disposition, Observer, Path, PollStore, PortResult, PublishOutcome, Recorded,
    RowOutcome, Verdict, chain,
};
use outbox_core::spec::{OnUnroutable, TableSpec};
use outbox_core::{Failure, OutboxRow};
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// Pauses between attempts to record, doubling from the first to the second.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// How long a stop waits for a record that cannot be made: the row is then published again by the
/// next leader.
const LAST_ATTEMPTS: Duration = Duration::from_secs(5);

/// What an outcome means for its row; `None`: nobody knows, the row is to be published again.
pub(crate) fn verdict(
    spec: &TableSpec,
    outcome: PublishOutcome,
    retry_count: u32,
) -> Option<Verdict> {
    let failure = match outcome {
        PublishOutcome::Confirmed => return Some(Verdict::Sent),
        PublishOutcome::Unconfirmed => return None,
        PublishOutcome::Nacked => Failure::retryable("nacked", "the broker refused it with a nack"),
        PublishOutcome::Refused(failure) => failure,
        PublishOutcome::Returned(why) => Failure {
            class: match spec.on_unroutable {
                OnUnroutable::Retry => FailureClass::Retryable,
                OnUnroutable::Fail => FailureClass::Permanent,
            },
            code: "unroutable",
            reason: why,
        },
    };
    Some(Verdict::Failed {
        failure,
        retry_count,
        message: None,
    })
}

/// The record of a row.
pub(crate) fn outcome(row: &OutboxRow, verdict: Verdict) -> RowOutcome {
    RowOutcome {
        key: row.key.clone(),
        aggregate: row.aggregate.clone(),
        verdict,
    }
}

/// Records until it is done: backs off while the database is away, and presents rows that
/// somebody keeps locked again. Returns what was recorded, parallel to `outcomes`; rows that are
/// still locked when `stop` has been asked for stay [`Recorded::Busy`].
pub(crate) async fn record(
    store: &Arc<dyn PollStore>,
    observer: &Arc<dyn Observer>,
    token: Option<&ClaimToken>,
    outcomes: &[RowOutcome],
    stop: &CancellationToken,
) -> PortResult<Vec<Recorded>> {
    let mut recorded = vec![Recorded::Busy; outcomes.len()];
    let mut pause = BACKOFF.0;
    loop {
        let open: Vec<usize> = (0..outcomes.len())
            .filter(|i| recorded[*i] == Recorded::Busy)
            .collect();
        if open.is_empty() {
            break;
        }
        let present: Vec<RowOutcome> = open.iter().map(|i| outcomes[*i].clone()).collect();
        match store.record(token, &present).await {
            Ok(answers) => {
                for (i, answer) in open.into_iter().zip(answers) {
                    recorded[i] = answer;
                }
            }
            Err(e) if e.disposition == Disposition::Backoff => {
                warn!(
                    rows = present.len(),
                    error = chain(&e),
                    "outcomes are not recorded yet"
                );
                if stop.is_cancelled() && pause >= BACKOFF.1 {
                    return Err(e);
                }
            }
            Err(e) => return Err(e),
        }
        if !recorded.contains(&Recorded::Busy) {
            break;
        }
        if stop.is_cancelled() && pause > LAST_ATTEMPTS / 2 {
            break;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(BACKOFF.1);
    }
    for (outcome, recorded) in outcomes.iter().zip(&recorded) {
        observe(observer, outcome, *recorded);
    }
    Ok(recorded)
}

fn observe(observer: &Arc<dyn Observer>, outcome: &RowOutcome, recorded: Recorded) {
    match (&outcome.verdict, recorded) {
        (_, Recorded::Sent) => observer.published(outcome.key.table, Path::Poller, None),
        (Verdict::Failed { failure, .. }, Recorded::WillRetry | Recorded::Failed) => {
            observer.failed(outcome.key.table, failure.class);
        }
        _ => {}
    }
}
