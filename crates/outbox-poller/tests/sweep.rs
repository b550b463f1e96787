//! The sweep: everything that is pending, fast, in order, and nothing twice.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::time::Duration;

use outbox_core::ports::{Disposition, PublishOutcome};
use outbox_core::spec::Ordering;
use outbox_core::{Failure, Status};
use outbox_poller::{PollerConfig, SweepConfig, SweepReport};
use outbox_testkit::fakes::message;
use support::{TABLE, World, aggregate, spec};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

async fn sweep(world: &World) -> SweepReport {
    let swept = world
        .poller
        .sweep(SweepConfig::default(), world.stop.clone());
    let swept = tokio::time::timeout(10 * MINUTE, swept).await;
    swept.expect("the sweep ends").unwrap()
}

fn complete(published: u64, failed: u64) -> SweepReport {
    SweepReport {
        published,
        failed,
        complete: true,
    }
}

fn in_order(published: &[u64], aggregates: u64) {
    for a in 0..aggregates {
        let of = published.iter().filter(|id| *id % aggregates == a);
        assert!(of.is_sorted(), "aggregate {a}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_sweep_delivers_every_page_in_order_without_claims() {
    for ordering in [Ordering::Aggregate, Ordering::Strict, Ordering::None] {
        let world = World::new(ordering);
        world.insert(1..=5500, 50);
        assert_eq!(sweep(&world).await, complete(5500, 0));
        assert_eq!(world.table.claims(), 0);
        assert_eq!(world.submitted().len(), 5500);
        in_order(&world.published(), 50);
        assert_eq!(world.table.count(Status::Sent), 5500);
        assert_eq!(world.gate.held(), 0);
        assert!(world.table.most_recorded() > 100, "records are batched");
    }
}

#[tokio::test(start_paused = true)]
async fn reading_publishing_and_recording_go_on_side_by_side() {
    let world = World::new(Ordering::Aggregate);
    world.table.set_latency(Duration::from_millis(50));
    world.broker.set_latency(Duration::from_millis(50));
    world.insert(1..=10_000, 500);
    let begun = tokio::time::Instant::now();
    sweep(&world).await;
    // One after the other, ten pages would take two statements for a page, a record and the
    // broker's answer each: two seconds.
    assert!(
        begun.elapsed() < Duration::from_millis(1600),
        "{:?}",
        begun.elapsed()
    );
    assert!(world.broker.most_at_once() <= 4096);
}

#[tokio::test(start_paused = true)]
async fn behind_a_refused_row_the_aggregate_is_left_to_the_passes() {
    let world = World::new(Ordering::Strict);
    world.broker.answer(|m| match m.message_id.as_str() {
        "7" => PublishOutcome::Nacked,
        _ => PublishOutcome::Confirmed,
    });
    world.insert(1..=3000, 10);
    assert_eq!(sweep(&world).await, complete(2700, 1));
    assert!(!world.published().iter().any(|id| id % 10 == 7));
    assert_eq!(world.table.charged(), 1);
    world.broker.answer(|_| PublishOutcome::Confirmed);
    let run = world.run();
    world.all_sent(2 * MINUTE).await;
    in_order(&world.published(), 10);
    world.end(run).await;
    assert_eq!(world.gate.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn rows_behind_one_that_waits_for_its_retry_are_not_swept() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=100, 10);
    world.table.update(TABLE, 13, |row| {
        row.retry_count = 2;
        row.next_retry_at = Some(5 * MINUTE);
    });
    // Row 3, before it, goes; what stands behind it does not.
    assert_eq!(sweep(&world).await, complete(91, 0));
    let left: Vec<u64> = (1..=100)
        .filter(|id| world.status(*id) == Status::Pending)
        .collect();
    assert_eq!(left, [13, 23, 33, 43, 53, 63, 73, 83, 93]);
}

#[tokio::test(start_paused = true)]
async fn a_lost_channel_is_made_good_in_order_and_uncharged() {
    let world = World::new(Ordering::Strict);
    world.broker.set_latency(Duration::from_millis(20));
    world.insert(1..=3000, 40);
    let broker = world.broker.clone();
    let cuts = tokio::spawn(async move {
        for _ in 0..8 {
            tokio::time::sleep(Duration::from_millis(130)).await;
            broker.drop_channel();
        }
    });
    assert_eq!(sweep(&world).await, complete(3000, 0));
    cuts.await.unwrap();
    in_order(&world.published(), 40);
    assert_eq!(
        world.published().len(),
        3000,
        "what was confirmed is not published again"
    );
    assert!(world.submitted().len() <= 3000 + 8 * 40);
    assert_eq!(world.table.charged(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_is_abandoned_in_an_outage_is_not_published_after_it() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=2000, 100);
    let broker = world.broker.clone();
    let mut first = true;
    world.broker.watch(move |m| {
        // Once: the row is published again when the broker is back.
        if m.message_id == "1200" && std::mem::take(&mut first) {
            let broker = broker.clone();
            tokio::spawn(async move { broker.set_down(true) });
        }
    });
    let (poller, stop) = (world.poller.clone(), world.stop.clone());
    let sweep = tokio::spawn(async move { poller.sweep(SweepConfig::default(), stop).await });
    tokio::time::sleep(MINUTE).await;
    let asked = world.table.statements();
    tokio::time::sleep(60 * MINUTE).await;
    assert_eq!(
        world.table.statements(),
        asked,
        "an outage of the broker costs the database nothing"
    );
    let before = world.submitted().len();
    for id in 1500..=2000 {
        world.table.update(TABLE, id, |row| {
            if row.status == Status::Pending {
                row.status = Status::Abandoned;
            }
        });
    }
    let abandoned = world.table.count(Status::Abandoned);
    assert!(abandoned > 0);
    world.broker.set_down(false);
    let report = sweep.await.unwrap().unwrap();
    assert!(report.complete);
    assert_eq!(world.table.count(Status::Sent) + abandoned, 2000);
    for id in &world.submitted()[before..] {
        assert_ne!(world.status(*id), Status::Abandoned, "row {id}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_database_that_goes_away_delays_a_sweep_and_repeats_nothing() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=4000, 100);
    let table = world.table.clone();
    let outages = tokio::spawn(async move {
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_millis(9)).await;
            table.set_away(true);
            tokio::time::sleep(20 * SECOND).await;
            table.set_away(false);
        }
    });
    assert_eq!(sweep(&world).await, complete(4000, 0));
    outages.await.unwrap();
    assert_eq!(world.submitted().len(), 4000);
    in_order(&world.published(), 100);
}

#[tokio::test(start_paused = true)]
async fn rows_that_somebody_keeps_locked_hold_up_neither_the_sweep_nor_a_second_copy() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=2000, 100);
    for id in 500..=550 {
        world.table.set_locked(TABLE, id, true);
    }
    let report = sweep(&world).await;
    assert_eq!((report.published, report.complete), (1949, true));
    let run = world.run();
    tokio::time::sleep(5 * MINUTE).await;
    for id in 500..=550 {
        world.table.set_locked(TABLE, id, false);
    }
    world.all_sent(10 * SECOND).await;
    world.end(run).await;
    assert_eq!(world.submitted().len(), 2000);
}

#[tokio::test(start_paused = true)]
async fn a_rate_is_kept() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=500, 100);
    let begun = tokio::time::Instant::now();
    let config = SweepConfig { rate: Some(50) };
    let stop = world.stop.clone();
    world.poller.sweep(config, stop).await.unwrap();
    let took = begun.elapsed().as_secs_f64();
    assert!((9.5..12.0).contains(&took), "{took} s");
    let submitted = world.broker.submitted();
    for second in submitted.windows(60) {
        assert!(second[59].at - second[0].at > Duration::from_millis(900));
    }
}

#[tokio::test(start_paused = true)]
async fn a_sweep_asked_for_while_the_tail_streams_leaves_the_tails_rows_alone() {
    let world = World::new(Ordering::Aggregate);
    world.gate.set_tailing(true);
    world.gate.set_busy(&aggregate("a3"), true);
    world.insert(1..=100, 10);
    let run = world.run();
    assert!(world.handle.sweep_table(TABLE).await);
    assert_eq!(world.table.count(Status::Sent), 90);
    assert!(!world.submitted().iter().any(|id| id % 10 == 3));
    world.gate.set_busy(&aggregate("a3"), false);
    world.handle.request_sweep(None);
    world.all_sent(10 * SECOND).await;
    world.end(run).await;
    assert_eq!(world.gate.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_stopped_sweep_says_that_it_is_not_complete_and_records_what_it_knows() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=5000, 100);
    world.broker.set_latency(100 * MINUTE);
    let (poller, stop) = (world.poller.clone(), world.stop.clone());
    let sweep = tokio::spawn(async move { poller.sweep(SweepConfig::default(), stop).await });
    world
        .until(5 * SECOND, "rows are out", |w| !w.submitted().is_empty())
        .await;
    world.stop.cancel();
    let report = tokio::time::timeout(10 * SECOND, sweep)
        .await
        .expect("it ends");
    assert!(!report.unwrap().unwrap().complete);
}

#[tokio::test(start_paused = true)]
async fn a_pause_ends_a_sweep_before_its_end() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=5000, 100);
    let handle = world.handle.clone();
    world.broker.watch(move |m| {
        if m.message_id == "1500" {
            handle.pause(None);
        }
    });
    let report = sweep(&world).await;
    assert!(!report.complete);
    assert_eq!(world.table.count(Status::Sent) as u64, report.published);
    assert_eq!(world.submitted().len() as u64, report.published);
    assert!(report.published < 5000);
    assert_eq!(world.gate.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn refusals_that_are_the_brokers_end_the_sweep_and_spare_the_rows() {
    let world = World::new(Ordering::Aggregate);
    world.broker.set_latency(Duration::from_millis(1));
    world
        .broker
        .answer(|_| PublishOutcome::Refused(Failure::permanent("exchange_refused", "told to")));
    world.insert(1..=5000, 5000);
    let report = sweep(&world).await;
    assert_eq!(
        (report.published, report.failed, report.complete),
        (0, 50, false)
    );
    assert_eq!(world.table.count(Status::Pending), 4950);
}

#[tokio::test(start_paused = true)]
async fn large_rows_keep_the_window_small() {
    let config = PollerConfig {
        max_in_flight_bytes: 10_000,
        ..PollerConfig::default()
    };
    let world = World::with(config, vec![spec("outbox", Ordering::None)]);
    for id in 1..=200 {
        let message = Ok(message(id, 3000));
        world.table.insert_message(TABLE, id, "a", message);
    }
    assert_eq!(sweep(&world).await, complete(200, 0));
    assert!(world.broker.most_at_once() <= 4);
}

#[tokio::test(start_paused = true)]
async fn the_end_of_the_session_ends_a_sweep() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=100, 10);
    world.table.fail_next(1, Disposition::Fenced);
    let ended = world
        .poller
        .sweep(SweepConfig::default(), world.stop.clone())
        .await;
    assert_eq!(ended.unwrap_err().disposition, Disposition::Fenced);
}

#[tokio::test(start_paused = true)]
async fn the_patrol_takes_old_claims_away_and_retention_deletes_old_sent_rows_only() {
    let config = PollerConfig {
        sent_after: Some(60 * MINUTE),
        ..PollerConfig::default()
    };
    let world = World::with(config, vec![spec("outbox", Ordering::Aggregate)]);
    world.insert(1..=5000, 10);
    for id in 1..=5000 {
        world
            .table
            .update(TABLE, id, |row| row.status = Status::Sent);
    }
    world
        .table
        .update(TABLE, 1, |row| row.status = Status::Failed);
    world.table.update(TABLE, 2, |row| {
        row.status = Status::Processing;
        row.locked_until = Some(Duration::from_secs(86_400));
    });
    let (poller, stop) = (world.poller.clone(), world.stop.clone());
    let patrol = tokio::spawn(async move { poller.patrol(stop).await });
    tokio::time::sleep(10 * MINUTE).await;
    assert_eq!(world.handle.stuck(), [1]);
    assert_eq!(world.table.rows().len(), 5000);
    tokio::time::sleep(25 * MINUTE).await;
    assert_eq!(
        (world.handle.stuck(), world.status(2)),
        (vec![0], Status::Pending)
    );
    tokio::time::sleep(30 * MINUTE).await;
    let left: Vec<Status> = world.table.rows().iter().map(|(_, r)| r.status).collect();
    assert_eq!(left, [Status::Failed, Status::Pending]);
    world.stop.cancel();
    patrol.await.unwrap().unwrap();
}
