//! Passes over the table: what is due and what was left behind, in order, uncharged by outages.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::time::Duration;

use outbox_core::ports::{Disposition, PublishOutcome};
use outbox_core::spec::Ordering;
use outbox_core::{Failure, Status};
use outbox_poller::PollerConfig;
use support::{OTHER, TABLE, World, aggregate, spec};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn refuse(code: &'static str) -> PublishOutcome {
    PublishOutcome::Refused(Failure::permanent(code, "told to"))
}

#[tokio::test(start_paused = true)]
async fn a_backlog_goes_out_once_and_in_order() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=1000, 7);
    let run = world.run();
    world.all_sent(MINUTE).await;
    world.end(run).await;
    let mut published = world.published();
    for a in 0..7 {
        assert!(published.iter().filter(|id| *id % 7 == a).is_sorted());
    }
    published.sort_unstable();
    assert!(published.iter().copied().eq(1..=1000));
    assert_eq!(*world.counts.published.lock().unwrap(), 1000);
    assert_eq!(world.gate.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn while_the_tail_streams_young_rows_are_its_own() {
    let world = World::new(Ordering::Aggregate);
    world.gate.set_tailing(true);
    world.insert(1..=3, 1);
    let run = world.run();
    tokio::time::sleep(29 * SECOND).await;
    assert!(world.submitted().is_empty());
    world.all_sent(10 * SECOND).await;
    world.end(run).await;
}

#[tokio::test(start_paused = true)]
async fn rows_that_the_tail_has_yet_to_pass_are_its_own_whatever_their_age() {
    let world = World::new(Ordering::Aggregate);
    world.gate.set_tailing(true);
    world.gate.set_behind(true);
    world.insert(1..=3, 1);
    let run = world.run();
    tokio::time::sleep(10 * MINUTE).await;
    assert!(world.submitted().is_empty());
    world.gate.set_behind(false);
    world.all_sent(10 * SECOND).await;
    world.end(run).await;
}

#[tokio::test(start_paused = true)]
async fn what_the_tail_has_in_flight_is_not_taken() {
    let world = World::new(Ordering::Aggregate);
    world.gate.set_busy(&aggregate("a1"), true);
    world.insert(1..=6, 2);
    let run = world.run();
    world
        .until(10 * SECOND, "the free aggregate is sent", |w| {
            w.table.count(Status::Sent) == 3
        })
        .await;
    assert_eq!(world.submitted(), [2, 4, 6]);
    world.gate.set_busy(&aggregate("a1"), false);
    world.all_sent(10 * SECOND).await;
    world.end(run).await;
    assert_eq!(world.gate.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn aggregates_that_the_tail_leaves_are_delivered_at_once() {
    let world = World::new(Ordering::Aggregate);
    world.gate.set_tailing(true);
    let run = world.run();
    tokio::time::sleep(SECOND).await;
    world.insert(1..=300, 1);
    world.gate.leave(aggregate("a0"));
    world.all_sent(3 * SECOND).await;
    world.end(run).await;
    assert!(world.published().is_sorted());
}

#[tokio::test(start_paused = true)]
async fn news_is_heard_though_passes_come_between() {
    let config = PollerConfig {
        interval: Duration::from_millis(100),
        pending_grace: 100 * MINUTE,
        ..PollerConfig::default()
    };
    let world = World::with(config, vec![spec("outbox", Ordering::Strict)]);
    world.gate.set_tailing(true);
    let run = world.run();
    for id in 1..=50 {
        world.table.insert(TABLE, id, "a");
        world.gate.leave(aggregate("a"));
        tokio::time::sleep(Duration::from_millis(33)).await;
    }
    world.all_sent(3 * SECOND).await;
    world.end(run).await;
}

#[tokio::test(start_paused = true)]
async fn a_refused_head_holds_its_aggregate_and_nobody_else() {
    let world = World::new(Ordering::Strict);
    let mut first = true;
    world.broker.answer(move |m| {
        let refused = m.message_id == "2" && std::mem::take(&mut first);
        if refused {
            PublishOutcome::Nacked
        } else {
            PublishOutcome::Confirmed
        }
    });
    world.insert(1..=10, 2);
    let run = world.run();
    world
        .until(5 * SECOND, "the other aggregate is sent", |w| {
            w.table.count(Status::Sent) == 5
        })
        .await;
    assert_eq!(world.published(), [1, 3, 5, 7, 9]);
    let head = world.table.row(TABLE, 2).unwrap();
    assert_eq!((head.status, head.retry_count), (Status::Pending, 1));
    world.all_sent(40 * SECOND).await;
    assert_eq!(world.published()[5..], [2, 4, 6, 8, 10]);
    world.end(run).await;
}

#[tokio::test(start_paused = true)]
async fn in_strict_order_one_row_of_an_aggregate_is_under_way() {
    let world = World::new(Ordering::Strict);
    world.insert(1..=40, 4);
    let run = world.run();
    world.all_sent(MINUTE).await;
    assert!(world.broker.most_at_once() <= 4);
    world.end(run).await;

    let pipelined = World::new(Ordering::Aggregate);
    pipelined.insert(1..=40, 4);
    let run = pipelined.run();
    pipelined.all_sent(MINUTE).await;
    assert!(pipelined.broker.most_at_once() > 4);
    pipelined.end(run).await;
}

#[tokio::test(start_paused = true)]
async fn rows_in_flight_behind_a_refused_one_are_counted_as_overtaking() {
    let world = World::new(Ordering::Aggregate);
    let mut first = true;
    world.broker.answer(move |m| {
        let refused = m.message_id == "1" && std::mem::take(&mut first);
        if refused {
            PublishOutcome::Nacked
        } else {
            PublishOutcome::Confirmed
        }
    });
    world.insert(1..=4, 1);
    let run = world.run();
    world.all_sent(MINUTE).await;
    world.end(run).await;
    assert_eq!(*world.counts.overtaken.lock().unwrap(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_row_that_is_refused_for_ever_fails_after_its_retries() {
    let world = World::new(Ordering::Aggregate);
    world
        .broker
        .answer(|_| PublishOutcome::Returned("NO_ROUTE".into()));
    world.insert(1..=1, 1);
    let run = world.run();
    world
        .until(20 * MINUTE, "the row fails", |w| {
            w.status(1) == Status::Failed
        })
        .await;
    world.end(run).await;
    let row = world.table.row(TABLE, 1).unwrap();
    assert_eq!((row.retry_count, row.last_error), (5, Some("unroutable")));
    // 0, 30, 90, 210, 450 and 930 seconds, each within one interval.
    let submitted = world.broker.submitted();
    let gaps = submitted.windows(2).map(|w| (w[1].at - w[0].at).as_secs());
    for (gap, expected) in gaps.zip([30, 60, 120, 240, 480]) {
        assert!((expected..expected + 6).contains(&gap), "{gap}");
    }
    assert_eq!(submitted.len(), 6);
}

#[tokio::test(start_paused = true)]
async fn bad_rows_at_the_head_do_not_starve_good_ones() {
    let config = PollerConfig {
        batch: 50,
        ..PollerConfig::default()
    };
    let world = World::with(config, vec![spec("outbox", Ordering::Aggregate)]);
    for id in 1..=70 {
        let bad = Err(Failure::permanent("string_too_long", "routing_key"));
        world
            .table
            .insert_message(TABLE, id, &format!("b{id}"), bad);
    }
    for id in 71..=1070 {
        world.table.insert(TABLE, id, &format!("g{id}"));
    }
    let run = world.run();
    world
        .until(10 * SECOND, "the good rows are sent", |w| {
            w.table.count(Status::Sent) == 1000
        })
        .await;
    assert_eq!(world.table.count(Status::Failed), 70);
    world.end(run).await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_row_lets_the_next_pass_unless_it_blocks() {
    for blocks in [false, true] {
        let mut spec = spec("outbox", Ordering::Aggregate);
        spec.failed_blocks_aggregate = blocks;
        let world = World::with(PollerConfig::default(), vec![spec]);
        let bad = Err(Failure::permanent("null_column", "payload is NULL"));
        world.table.insert_message(TABLE, 1, "a", bad);
        world.table.insert(TABLE, 2, "a");
        let run = world.run();
        tokio::time::sleep(MINUTE).await;
        assert_eq!(world.status(1), Status::Failed);
        let next = if blocks {
            Status::Pending
        } else {
            Status::Sent
        };
        assert_eq!(world.status(2), next);
        world
            .table
            .update(TABLE, 1, |row| row.status = Status::Abandoned);
        world
            .until(10 * SECOND, "the next is sent", |w| {
                w.status(2) == Status::Sent
            })
            .await;
        world.end(run).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_of_any_length_costs_no_retry_and_claims_nothing() {
    let world = World::new(Ordering::Aggregate);
    let run = world.run();
    world.broker.set_latency(Duration::from_millis(500));
    world.insert(1..=200, 20);
    tokio::time::sleep(Duration::from_millis(1700)).await;
    world.broker.set_down(true);
    tokio::time::sleep(10 * SECOND).await;
    let claims = world.table.claims();
    tokio::time::sleep(120 * MINUTE).await;
    assert_eq!(world.table.claims(), claims);
    assert_eq!(world.table.count(Status::Processing), 0);
    world.broker.set_down(false);
    world.all_sent(MINUTE).await;
    world.end(run).await;
    assert_eq!(world.table.charged(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_waited_for_a_blocked_broker_is_looked_at_again() {
    let world = World::new(Ordering::Strict);
    world.broker.set_latency(5 * SECOND);
    world.insert(1..=10, 1);
    let run = world.run();
    world
        .until(2 * SECOND, "the first is out", |w| w.submitted() == [1])
        .await;
    world.broker.set_blocked(true);
    tokio::time::sleep(10 * MINUTE).await;
    assert_eq!(world.submitted(), [1]);
    // The claims ended long ago: the application gives up what was claimed then.
    world.table.update(TABLE, 2, |row| {
        (row.status, row.locked_by) = (Status::Abandoned, None);
    });
    world.broker.set_blocked(false);
    world
        .until(5 * MINUTE, "all others are sent", |w| {
            w.table.count(Status::Sent) == 9
        })
        .await;
    world.end(run).await;
    assert!(!world.submitted().contains(&2));
    assert_eq!(world.table.charged(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_confirmed_row_that_cannot_be_recorded_is_not_published_again() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=20, 20);
    // Taken by the claim, and kept locked from before its record until long after the claim ends.
    let table = world.table.clone();
    world.broker.watch(move |m| {
        if m.message_id == "5" {
            table.set_locked(TABLE, 5, true);
        }
    });
    let run = world.run();
    tokio::time::sleep(3 * MINUTE).await;
    assert_eq!(world.table.count(Status::Sent), 19);
    world.insert(21..=40, 20);
    tokio::time::sleep(10 * SECOND).await;
    assert_eq!(
        world.table.count(Status::Sent),
        39,
        "what stands behind a confirmed row passes"
    );
    world.table.set_locked(TABLE, 5, false);
    world.all_sent(10 * SECOND).await;
    world.end(run).await;
    assert_eq!(world.submitted().len(), 40);
    assert_eq!(world.gate.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn while_the_database_is_away_confirms_are_kept_and_nothing_more_goes_out() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=100, 10);
    let table = world.table.clone();
    world.broker.watch(move |_| table.set_away(true));
    let run = world.run();
    tokio::time::sleep(5 * MINUTE).await;
    let submitted = world.submitted().len();
    assert!(submitted > 0 && submitted <= 100);
    world.broker.watch(|_| ());
    world.table.set_away(false);
    world.all_sent(MINUTE).await;
    world.end(run).await;
    assert_eq!(world.submitted().len(), 100, "nothing went out twice");
}

#[tokio::test(start_paused = true)]
async fn a_pause_stops_claims_and_publishing_for_its_table_alone() {
    let specs = vec![spec("a", Ordering::Aggregate), spec("b", Ordering::None)];
    let world = World::with(PollerConfig::default(), specs);
    world.handle.pause(Some(TABLE));
    world.insert(1..=10, 3);
    world.table.insert(OTHER, 100, "x");
    let run = world.run();
    tokio::time::sleep(MINUTE).await;
    assert_eq!(world.submitted(), [100]);
    assert_eq!(world.table.claims(), 1);
    assert!(
        !world.handle.sweep_table(TABLE).await,
        "a paused table is not swept"
    );
    world.handle.pause(None);
    world.handle.resume(Some(TABLE));
    tokio::time::sleep(MINUTE).await;
    assert_eq!(world.submitted(), [100]);
    world.handle.resume(None);
    world.all_sent(10 * SECOND).await;
    world.end(run).await;
}

#[tokio::test(start_paused = true)]
async fn delayed_rows_go_out_when_they_are_due_and_hold_nobody_before() {
    let world = World::new(Ordering::Strict);
    world.insert(1..=2, 1);
    world
        .table
        .update(TABLE, 1, |row| row.next_retry_at = Some(10 * MINUTE));
    let run = world.run();
    world
        .until(5 * SECOND, "the second is sent", |w| {
            w.status(2) == Status::Sent
        })
        .await;
    tokio::time::sleep(9 * MINUTE).await;
    assert_eq!(world.status(1), Status::Pending);
    world.all_sent(2 * MINUTE).await;
    world.end(run).await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_has_ended_is_taken_over_and_the_late_holder_changes_nothing() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=1, 1);
    world.table.update(TABLE, 1, |row| {
        row.status = Status::Processing;
        row.locked_by = Some("somebody".into());
        row.locked_until = Some(20 * SECOND);
    });
    let run = world.run();
    tokio::time::sleep(19 * SECOND).await;
    assert!(world.submitted().is_empty());
    world.all_sent(10 * SECOND).await;
    world.end(run).await;
}

#[tokio::test(start_paused = true)]
async fn when_the_broker_refuses_row_after_row_the_table_waits() {
    let world = World::new(Ordering::None);
    world.broker.answer(|_| refuse("exchange_missing"));
    world.insert(1..=1000, 1000);
    let run = world.run();
    tokio::time::sleep(10 * MINUTE).await;
    assert_eq!(world.table.count(Status::Failed), 50);
    assert_eq!(world.table.count(Status::Pending), 950);
    let asked = world.submitted().len();
    assert!(
        (150..350).contains(&asked),
        "one probe each interval, and {asked} in all"
    );
    world.broker.answer(|_| PublishOutcome::Confirmed);
    world
        .until(30 * SECOND, "the rest is sent", |w| {
            w.table.count(Status::Sent) == 950
        })
        .await;
    world.end(run).await;
}

#[tokio::test(start_paused = true)]
async fn reasons_that_lie_in_the_rows_open_no_breaker() {
    let world = World::new(Ordering::None);
    world.broker.answer(|_| refuse("body_too_large"));
    world.insert(1..=1000, 1000);
    let run = world.run();
    world
        .until(MINUTE, "all fail", |w| {
            w.table.count(Status::Failed) == 1000
        })
        .await;
    world.end(run).await;
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_bounded_in_rows_and_bytes() {
    let mut config = PollerConfig::default();
    (config.max_in_flight, config.max_in_flight_bytes) = (10, 1000);
    let world = World::with(config, vec![spec("outbox", Ordering::None)]);
    for id in 1..=50 {
        let message = outbox_testkit::fakes::message(id, 400);
        world.table.insert_message(TABLE, id, "a", Ok(message));
    }
    let huge = outbox_testkit::fakes::message(51, 5000);
    world.table.insert_message(TABLE, 51, "a", Ok(huge));
    let run = world.run();
    world.all_sent(MINUTE).await;
    assert!(world.broker.most_at_once() <= 3);
    world.end(run).await;
}

#[tokio::test(start_paused = true)]
async fn errors_of_the_database_are_waited_out_and_those_that_end_a_session_end_the_run() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=10, 3);
    world.table.fail_next(7, Disposition::Backoff);
    let run = world.run();
    world.all_sent(MINUTE).await;
    world.table.fail_next(1, Disposition::Fenced);
    let ended = tokio::time::timeout(MINUTE, run)
        .await
        .expect("it ends")
        .unwrap();
    assert_eq!(ended.unwrap_err().disposition, Disposition::Fenced);
}

#[tokio::test(start_paused = true)]
async fn a_stop_ends_in_time_though_the_broker_says_nothing() {
    let world = World::new(Ordering::Aggregate);
    world.insert(1..=10, 3);
    world.broker.set_latency(1000 * MINUTE);
    let run = world.run();
    world
        .until(5 * SECOND, "rows are out", |w| !w.submitted().is_empty())
        .await;
    let begun = tokio::time::Instant::now();
    world.end(run).await;
    assert!(begun.elapsed() < 12 * SECOND);
    // The broker may have them: nobody takes them before their claims end.
    assert!(world.table.count(Status::Processing) > 0);
}
