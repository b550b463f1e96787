//! When the poller does what: intervals, no tail at all, a crash in mid-sweep, old claims, retention,
//! and what opens the breaker.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::sync::Arc;
use std::time::Duration;

use outbox_core::ports::{NoTail, PublishOutcome};
use outbox_core::spec::Ordering;
use outbox_core::{Failure, Status};
use outbox_poller::{Poller, PollerConfig, SweepConfig};
use support::{TABLE, World, spec};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// Rows inserted at odd moments: the longest that one of them waits.
async fn longest_wait(world: &World) -> Duration {
    let mut longest = Duration::ZERO;
    for id in 1..=40 {
        tokio::time::sleep(Duration::from_millis(1270)).await;
        let begun = tokio::time::Instant::now();
        world.table.insert(TABLE, id, "a");
        // Due already, so that no age is waited for.
        world
            .table
            .update(TABLE, id, |row| row.next_retry_at = Some(Duration::ZERO));
        world.all_sent(10 * SECOND).await;
        longest = longest.max(begun.elapsed());
    }
    longest
}

#[tokio::test(start_paused = true)]
async fn without_a_streaming_tail_the_table_is_polled_oftener() {
    for (tailing, least, most) in [(true, 3 * SECOND, 5 * SECOND), (false, SECOND / 2, SECOND)] {
        let world = World::new(Ordering::Aggregate);
        world.gate.set_tailing(tailing);
        let run = world.run();
        let longest = longest_wait(&world).await;
        world.end(run).await;
        let slack = Duration::from_millis(100);
        assert!((least..most + slack).contains(&longest), "{longest:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn where_no_tail_runs_everything_is_delivered_in_order() {
    let world = World::new(Ordering::Strict);
    let (poller, _handle) = Poller::new(
        PollerConfig::default(),
        vec![Arc::new(spec("outbox", Ordering::Strict))],
        world.table.clone(),
        world.broker.clone(),
        Arc::new(NoTail),
        world.counts.clone(),
    );
    let stop = world.stop.clone();
    let run = tokio::spawn(async move { poller.run(stop).await });
    for first in [1, 301, 601] {
        world.insert(first..=first + 299, 7);
        world.all_sent(20 * SECOND).await;
    }
    world.end(run).await;
    let published = world.published();
    assert_eq!(published.len(), 900);
    for a in 0..7 {
        assert!(published.iter().filter(|id| *id % 7 == a).is_sorted());
    }
}

#[tokio::test(start_paused = true)]
async fn a_sweep_that_died_is_begun_again_and_repeats_only_what_was_not_recorded() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=5000, 100);
    let (poller, stop) = (world.poller.clone(), world.stop.clone());
    let died = tokio::spawn(async move { poller.sweep(SweepConfig::default(), stop).await });
    world
        .until(MINUTE, "the sweep is half-way", |w| {
            w.table.count(Status::Sent) >= 1500
        })
        .await;
    died.abort();
    assert!(died.await.unwrap_err().is_cancelled());
    let recorded = world.table.count(Status::Sent);
    assert!(recorded < 5000, "it died in the midst of it");
    world.broker.drop_channel();

    let before = world.submitted().len();
    let next = World::new(Ordering::Aggregate);
    let (poller, _handle) = Poller::new(
        PollerConfig::default(),
        vec![Arc::new(spec("outbox", Ordering::Aggregate))],
        Arc::new(world.table.session()),
        next.broker.clone(),
        next.gate.clone(),
        next.counts.clone(),
    );
    let swept = poller.sweep(SweepConfig::default(), next.stop.clone());
    let report = swept.await.unwrap();
    assert!(report.complete);
    assert_eq!(next.submitted().len(), 5000 - recorded);
    assert_eq!(world.table.count(Status::Sent), 5000);
    assert!(before + next.submitted().len() <= 5000 + 4096 + 1000);
}

#[tokio::test(start_paused = true)]
async fn old_claims_are_counted_from_five_minutes_on_and_taken_away_after_thirty() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=2, 2);
    world.table.update(TABLE, 1, |row| {
        (row.status, row.retry_count) = (Status::Processing, 2);
        row.locked_by = Some("somebody".into());
        row.locked_until = Some(Duration::from_secs(86_400));
    });
    let (poller, stop) = (world.poller.clone(), world.stop.clone());
    let patrol = tokio::spawn(async move { poller.patrol(stop).await });
    let mut seen = Vec::new();
    for _ in 0..33 {
        tokio::time::sleep(MINUTE).await;
        seen.push((world.handle.stuck()[0], world.status(1)));
    }
    assert!(seen[..4].iter().all(|s| *s == (0, Status::Processing)));
    assert!(seen[6..29].iter().all(|s| *s == (1, Status::Processing)));
    assert!(seen[31..].iter().all(|s| *s == (0, Status::Pending)));
    let row = world.table.row(TABLE, 1).unwrap();
    assert_eq!((row.retry_count, row.locked_by), (2, None), "uncharged");
    assert_eq!(world.status(2), Status::Pending);
    world.stop.cancel();
    patrol.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn retention_deletes_what_was_sent_long_ago_and_nothing_else() {
    let config = PollerConfig {
        sent_after: Some(60 * MINUTE),
        reset_after: 100_000 * MINUTE,
        ..PollerConfig::default()
    };
    let world = World::with(config, vec![spec("outbox", Ordering::Aggregate)]);
    world.insert(1..=50, 5);
    for id in 1..=50 {
        let status = Status::ALL[usize::try_from(id).unwrap() % 5];
        world.table.update(TABLE, id, |row| row.status = status);
    }
    let (poller, stop) = (world.poller.clone(), world.stop.clone());
    let patrol = tokio::spawn(async move { poller.patrol(stop).await });
    tokio::time::sleep(59 * MINUTE).await;
    assert_eq!(world.table.rows().len(), 50, "not before its time");
    tokio::time::sleep(7 * 24 * 60 * MINUTE).await;
    for status in Status::ALL {
        let left = if status == Status::Sent { 0 } else { 10 };
        assert_eq!(world.table.count(status), left, "{status}");
    }
    world.stop.cancel();
    patrol.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_confirm_between_refusals_keeps_the_breaker_shut() {
    let world = World::new(Ordering::None);
    world.broker.answer(|message| {
        let id: u64 = message.message_id.parse().unwrap();
        if id.is_multiple_of(40) {
            PublishOutcome::Confirmed
        } else {
            PublishOutcome::Refused(Failure::permanent("exchange_missing", "told to"))
        }
    });
    world.insert(1..=400, 400);
    let run = world.run();
    world
        .until(MINUTE, "every row has its end", |w| {
            w.table.count(Status::Failed) + w.table.count(Status::Sent) == 400
        })
        .await;
    world.end(run).await;
    assert_eq!(world.table.count(Status::Sent), 10);
    assert_eq!(world.submitted().len(), 400);
}
