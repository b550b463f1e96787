//! A link that is cut, swallows, or is slow.

#![allow(clippy::unwrap_used, clippy::panic)]

mod rabbit_support;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use outbox_core::ports::{PublishOutcome, Publisher};
use outbox_testkit::Rabbit;
use rabbit_support::link::SlowLink;
use rabbit_support::{config, deliver, drain, message, run, within};

const LONG: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_when_the_connection_is_cut_every_two_seconds() {
    const WINDOW: usize = 300;
    const CUTS: usize = 10;
    let rabbit = Rabbit::shared().await.unwrap();
    rabbit.topology("cut", "cut", "good").await.unwrap();
    let link = SlowLink::to(rabbit.port).await;
    // Round trips of 20 ms, so that a window is always on its way.
    link.delay(Duration::from_millis(20));
    let running = run(config(&Rabbit::url_through(link.port)));
    let publisher = running.publisher.clone();
    let key = |i: u64| if i % 11 == 4 { "bad" } else { "good" };
    let mut work = std::pin::pin!(async {
        // As many as it takes: traffic lasts as long as the cuts.
        let (mut outcomes, mut generations) = (BTreeMap::new(), BTreeSet::new());
        while generations.len() <= CUTS {
            let from = u64::try_from(outcomes.len()).unwrap();
            let make = |i: u64| message("cut", key(from + i), from + i, 50);
            let report = deliver(&publisher, 2000, WINDOW, make).await;
            outcomes.extend(report.outcomes.into_iter().map(|(t, o)| (from + t, o)));
            generations.extend(report.generations);
        }
        outcomes
    });
    let mut pace = tokio::time::interval(Duration::from_secs(2));
    pace.tick().await;
    let outcomes = within(LONG, "delivery", async {
        loop {
            tokio::select! {
                outcomes = &mut work => return outcomes,
                _ = pace.tick() => link.cut(),
            }
        }
    })
    .await;
    for (ticket, outcome) in &outcomes {
        let good = key(*ticket) == "good";
        assert_eq!(
            *outcome == PublishOutcome::Confirmed,
            good,
            "{ticket}: {outcome:?}"
        );
    }
    let got = drain(&rabbit, "cut").await;
    let distinct: BTreeSet<u64> = got.iter().copied().collect();
    let good = outcomes.keys().filter(|i| key(**i) == "good").count();
    assert_eq!(distinct.len(), good);
    assert!(got.len() - distinct.len() <= (CUTS + 1) * WINDOW);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_swallows_everything_is_left_and_used_again_when_it_carries() {
    let rabbit = Rabbit::shared().await.unwrap();
    rabbit.topology("hole", "hole", "#").await.unwrap();
    let link = SlowLink::to(rabbit.port).await;
    let mut asked = config(&Rabbit::url_through(link.port));
    asked.heartbeat = Duration::from_secs(1);
    asked.connect_timeout = Duration::from_secs(1);
    asked.close_timeout = Duration::from_millis(500);
    let running = run(asked);
    let generation = running.ready().await;
    link.swallow(true);
    let began = Instant::now();
    running.publisher.submit(
        generation,
        (0..50).map(|i| (i, message("hole", "k", i, 10))).collect(),
    );
    let outcomes = running.outcomes(50, LONG).await;
    assert!(
        began.elapsed() < Duration::from_millis(3500),
        "{:?}",
        began.elapsed()
    );
    assert!(outcomes.values().all(|o| *o == PublishOutcome::Unconfirmed));
    let nobody = tokio::time::timeout(Duration::from_secs(3), running.publisher.ready()).await;
    assert!(nobody.is_err(), "ready over a dead link");
    link.swallow(false);
    let report = within(
        LONG,
        "delivery",
        deliver(&running.publisher, 50, 50, |i| message("hole", "k", i, 10)),
    )
    .await;
    assert_eq!(report.confirmed(), 50);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_confirms_cost_one_probe_each_time_and_never_pile_up_channels() {
    const CYCLES: u64 = 20;
    let rabbit = Rabbit::start().await.unwrap();
    rabbit.topology("late", "late", "#").await.unwrap();
    let link = SlowLink::to(rabbit.port).await;
    let mut asked = config(&Rabbit::url_through(link.port));
    asked.confirm_timeout = Duration::from_millis(150);
    asked.close_timeout = Duration::from_millis(100);
    asked.backoff_max = Duration::from_millis(100);
    let running = run(asked);
    for cycle in 0..CYCLES {
        let generation = running.ready().await;
        link.delay(Duration::from_millis(1500));
        let batch = (0..20)
            .map(|i| (cycle * 20 + i, message("late", "k", cycle * 20 + i, 10)))
            .collect();
        running.publisher.submit(generation, batch);
        let outcomes = running.outcomes(20, LONG).await;
        assert!(
            outcomes.values().all(|o| *o == PublishOutcome::Unconfirmed),
            "{outcomes:?}"
        );
        link.delay(Duration::ZERO);
        if cycle % 5 == 0 {
            let open = rabbit
                .ctl(&["list_channels", "--quiet", "--no-table-headers", "pid"])
                .await
                .unwrap();
            assert!(open.lines().count() <= 2, "{open}");
        }
    }
    // The first window, then a single probe for each cycle.
    let expected: Vec<u64> = (0..20).chain((1..CYCLES).map(|c| c * 20)).collect();
    assert_eq!(drain(&rabbit, "late").await, expected);
    let report = within(
        LONG,
        "delivery",
        deliver(&running.publisher, 500, 100, |i| {
            message("late", "k", i, 10)
        }),
    )
    .await;
    assert_eq!((report.confirmed(), report.repeats), (500, 0));
    running.stop().await;
}
