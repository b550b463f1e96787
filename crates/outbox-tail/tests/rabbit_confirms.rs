//! Confirms and returns on a real broker.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod rabbit_support;

use std::time::{Duration, Instant};

use outbox_core::ports::{PublishOutcome, Publisher};
use outbox_testkit::Rabbit;
use rabbit_support::{config, deliver, drain, message, run, within};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_unroutable_message_in_seven_is_never_settled_wrongly() {
    const COUNT: u64 = 300_000;
    let rabbit = Rabbit::start().await.unwrap();
    rabbit.topology("x", "q", "good").await.unwrap();
    let running = run(config(&rabbit.url()));
    let key = |i: u64| if i % 7 == 3 { "bad" } else { "good" };
    let began = Instant::now();
    let work = deliver(&running.publisher, COUNT, 2000, |i| {
        message("x", key(i), i, 100)
    });
    let report = within(Duration::from_secs(200), "300,000 outcomes", work).await;
    let took = began.elapsed();
    println!("{COUNT} in {took:?}, slowest outcome {:?}", report.slowest);
    assert_eq!(report.repeats, 0);
    for (ticket, outcome) in &report.outcomes {
        match outcome {
            PublishOutcome::Confirmed => assert_eq!(key(*ticket), "good", "{ticket}"),
            PublishOutcome::Returned(why) => {
                assert_eq!(key(*ticket), "bad", "{ticket}");
                assert!(why.contains("NO_ROUTE"), "{why}");
            }
            other => panic!("{ticket}: {other:?}"),
        }
    }
    let routed = (0..COUNT).filter(|i| key(*i) == "good").count();
    let depth = rabbit.depth("q").await.unwrap();
    assert_eq!(usize::try_from(depth).unwrap(), routed);
    assert!(took < Duration::from_secs(100), "{took:?}");
    running.stop().await;
}

/// Bursts with returns mixed in, then silence: whatever was held is settled at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_outcome_is_there_within_a_second_when_traffic_stops() {
    let rabbit = Rabbit::shared().await.unwrap();
    rabbit.topology("stops", "stops", "good").await.unwrap();
    let running = run(config(&rabbit.url()));
    let generation = running.ready().await;
    let mut id = 0;
    for (round, size) in [1_u64, 2, 7, 50, 500, 2000]
        .into_iter()
        .cycle()
        .take(60)
        .enumerate()
    {
        // From all routed to none routed.
        let bad = u64::try_from(round).unwrap() / 6;
        let batch = (id..id + size)
            .map(|i| {
                let key = if i.wrapping_mul(2_654_435_761) % 9 < bad {
                    "bad"
                } else {
                    "good"
                };
                (i, message("stops", key, i, 20))
            })
            .collect();
        id += size;
        running.publisher.submit(generation, batch);
        running.outcomes(size, Duration::from_secs(1)).await;
    }
    assert_eq!(running.publisher.snapshot().unconfirmed, 0);
    running.stop().await;
}

/// A slow stream, and then nothing but unroutable messages without a pause: no outcome waits for
/// traffic that does not come, nor for traffic to end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_outcome_is_there_within_a_second_when_traffic_trickles() {
    let rabbit = Rabbit::shared().await.unwrap();
    rabbit.topology("trickle", "trickle", "good").await.unwrap();
    let running = run(config(&rabbit.url()));
    let generation = running.ready().await;
    for (gap, bad_in_ten, base) in [(5, 3, 0), (1, 9, 10_000), (0, 10, 20_000)] {
        let mut pause = tokio::time::interval(Duration::from_millis(gap.max(1)));
        let mut sent = std::collections::BTreeMap::new();
        let mut slowest = Duration::ZERO;
        let end = Instant::now() + Duration::from_secs(5);
        let mut id = base;
        while Instant::now() < end || !sent.is_empty() {
            tokio::select! {
                // Traffic without a pause, but no queue in front of a machine that is too slow for it.
                _ = pause.tick(), if Instant::now() < end && sent.len() < 200 => {
                    // Without a gap, ten at once, the first of them routed now and then.
                    for _ in 0..if gap == 0 { 10 } else { 1 } {
                        let bad = id % 10 < bad_in_ten && id % 97 != 0;
                        let key = if bad { "bad" } else { "good" };
                        running.publisher.submit(generation, vec![(id, message("trickle", key, id, 20))]);
                        sent.insert(id, Instant::now());
                        id += 1;
                    }
                }
                outcomes = running.publisher.outcomes() => {
                    for (ticket, outcome) in outcomes {
                        let bad = ticket % 10 < bad_in_ten && ticket % 97 != 0;
                        assert_eq!(outcome == PublishOutcome::Confirmed, !bad, "{ticket}: {outcome:?}");
                        slowest = slowest.max(sent.remove(&ticket).unwrap().elapsed());
                    }
                }
                () = tokio::time::sleep(Duration::from_secs(2)) => panic!("{} wait for ever", sent.len()),
            }
        }
        println!("gap {gap} ms, {bad_in_ten} in 10 unroutable: slowest {slowest:?}");
        assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_arrive_in_the_order_of_submission() {
    let rabbit = Rabbit::shared().await.unwrap();
    rabbit.topology("order", "order", "#").await.unwrap();
    let running = run(config(&rabbit.url()));
    let report = deliver(&running.publisher, 5000, 700, |i| {
        message("order", "k", i, 50)
    })
    .await;
    assert_eq!(report.confirmed(), 5000);
    assert_eq!(drain(&rabbit, "order").await, (0..5000).collect::<Vec<_>>());
    running.stop().await;
}

/// A submitter that has not seen the loss cannot overtake: what it submits under the old
/// generation comes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_under_an_old_generation_come_back_unconfirmed() {
    let rabbit = Rabbit::start().await.unwrap();
    rabbit.topology("x", "q", "#").await.unwrap();
    let running = run(config(&rabbit.url()));
    let old = running.ready().await;
    rabbit
        .ctl(&["close_all_connections", "test"])
        .await
        .unwrap();
    let new = within(Duration::from_secs(20), "a new generation", async {
        loop {
            let now = running.publisher.ready().await;
            if now > old {
                return now;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    running
        .publisher
        .submit(old, vec![(1, message("x", "k", 1, 10))]);
    running
        .publisher
        .submit(new, vec![(2, message("x", "k", 2, 10))]);
    let outcomes = running.outcomes(2, Duration::from_secs(5)).await;
    assert_eq!(outcomes[&1], PublishOutcome::Unconfirmed);
    assert_eq!(outcomes[&2], PublishOutcome::Confirmed);
    assert_eq!(drain(&rabbit, "q").await, [2]);
    running.stop().await;
}
