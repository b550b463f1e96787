//! A broker that dies, stops answering, or blocks.

#![allow(clippy::unwrap_used, clippy::panic)]

mod rabbit_support;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use outbox_core::ports::{BrokerState, PublishOutcome, Publisher};
use outbox_testkit::Rabbit;
use rabbit_support::{config, deliver, drain, message, run, within};

const LONG: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_when_the_broker_is_killed_five_times_under_load() {
    const WINDOW: usize = 500;
    const COUNT: u64 = 60_000;
    let mut rabbit = Rabbit::start().await.unwrap();
    rabbit.topology("x", "q", "#").await.unwrap();
    // A quorum queue that was made a moment ago does not survive a kill, whatever was confirmed.
    rabbit.stop().await.unwrap();
    rabbit.restart().await.unwrap();
    let running = run(config(&rabbit.url()));
    let publisher = running.publisher.clone();
    let work = tokio::spawn(async move {
        deliver(&publisher, COUNT, WINDOW, |i| message("x", "k", i, 200)).await
    });
    for _ in 0..5 {
        let up = running.ready().await;
        within(LONG, "traffic", async {
            while running.publisher.snapshot().unconfirmed == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        })
        .await;
        assert!(!work.is_finished(), "too few messages for five kills");
        rabbit.kill9().unwrap();
        within(LONG, "the loss is seen", async {
            while running.publisher.snapshot().generation == up {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        rabbit.restart().await.unwrap();
    }
    let report = within(LONG, "delivery", work).await.unwrap();
    let other = report
        .outcomes
        .values()
        .find(|o| **o != PublishOutcome::Confirmed);
    assert_eq!(
        report.confirmed(),
        usize::try_from(COUNT).unwrap(),
        "{other:?}"
    );
    let got = drain(&rabbit, "q").await;
    let distinct: BTreeSet<u64> = got.iter().copied().collect();
    assert_eq!(distinct.len(), usize::try_from(COUNT).unwrap());
    assert!(
        got.len() - distinct.len() <= 5 * WINDOW,
        "{} duplicates",
        got.len() - distinct.len()
    );
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_no_longer_answers_is_left_within_two_heartbeats() {
    let mut rabbit = Rabbit::start().await.unwrap();
    rabbit.topology("x", "q", "#").await.unwrap();
    let mut asked = config(&rabbit.url());
    asked.heartbeat = Duration::from_secs(1);
    asked.connect_timeout = Duration::from_millis(500);
    let running = run(asked);
    let generation = running.ready().await;
    rabbit.pause().unwrap();
    let began = Instant::now();
    running
        .publisher
        .submit(generation, vec![(0, message("x", "k", 0, 10))]);
    let outcomes = running.outcomes(1, Duration::from_secs(10)).await;
    // Two heartbeats, half a second until it is looked at, and the polite close.
    let limit = Duration::from_millis(2500) + Duration::from_secs(2);
    assert!(began.elapsed() < limit, "{:?}", began.elapsed());
    assert_eq!(outcomes[&0], PublishOutcome::Unconfirmed);
    rabbit.resume().unwrap();
    let report = within(
        LONG,
        "delivery",
        deliver(&running.publisher, 10, 5, |i| message("x", "k", i, 10)),
    )
    .await;
    assert_eq!(report.confirmed(), 10);
    running.stop().await;
}

/// Memory and disk alarms look the same from here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blocking_broker_is_waited_for_on_the_same_connection_and_can_be_left() {
    const WINDOW: usize = 1000;
    let rabbit = Rabbit::start().await.unwrap();
    rabbit.topology("x", "q", "#").await.unwrap();
    let mut asked = config(&rabbit.url());
    asked.confirm_timeout = Duration::from_secs(2);
    let running = run(asked);
    running.ready().await;
    let alarm = async |limit: &str| rabbit.ctl(&["set_disk_free_limit", limit]).await.unwrap();
    let blocked = async || {
        within(LONG, "blocked", async {
            while !matches!(running.publisher.state(), BrokerState::Blocked(_)) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    };

    alarm("900000GB").await;
    let publisher = running.publisher.clone();
    let work = tokio::spawn(async move {
        deliver(&publisher, 20_000, WINDOW, |i| message("x", "k", i, 200)).await
    });
    blocked().await;
    let held = running.publisher.snapshot();
    assert!(
        held.unconfirmed <= WINDOW && held.unconfirmed > 0,
        "{held:?}"
    );
    let nobody = tokio::time::timeout(Duration::from_secs(5), running.publisher.ready()).await;
    assert!(nobody.is_err(), "ready while blocked");
    // Longer than the confirm timeout by far: the clock stands still.
    assert_eq!(running.publisher.snapshot(), held);
    alarm("50MB").await;
    let report = within(LONG, "delivery", work).await.unwrap();
    assert_eq!((report.confirmed(), report.repeats), (20_000, 0));

    let generation = running.ready().await;
    alarm("900000GB").await;
    let batch = (0..500).map(|i| (i, message("x", "k", i, 200))).collect();
    running.publisher.submit(generation, batch);
    blocked().await;
    let began = Instant::now();
    running.cancel.cancel();
    let outcomes = running.outcomes(500, Duration::from_secs(10)).await;
    assert!(outcomes.values().all(|o| *o == PublishOutcome::Unconfirmed));
    within(Duration::from_secs(5), "the driver ends", running.driver)
        .await
        .unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(4),
        "{:?}",
        began.elapsed()
    );
}
