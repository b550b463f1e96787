//! Threads and descriptors; alone in its process, since it counts the process's.

#![allow(clippy::unwrap_used, clippy::panic)]

mod rabbit_support;

use std::time::{Duration, Instant};

use outbox_core::ports::{BrokerState, Publisher};
use outbox_testkit::Rabbit;
use rabbit_support::link::SlowLink;
use rabbit_support::{config, lapin_threads, run, within};

const SOON: Duration = Duration::from_secs(30);

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

async fn threads_are(count: usize) {
    within(SOON, "lapin's threads end", async {
        while lapin_threads() != count {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neither_a_silent_port_nor_reconnects_leave_threads_or_descriptors_behind() {
    let rabbit = Rabbit::start().await.unwrap();
    let link = SlowLink::to(rabbit.port).await;
    link.swallow(true);
    let mut asked = config(&Rabbit::url_through(link.port));
    asked.connect_timeout = Duration::from_millis(200);
    asked.backoff_max = Duration::from_millis(200);
    let running = run(asked.clone());
    let end = Instant::now() + SOON;
    while link.accepted() < 12 {
        // The one that was given up ends while the next begins.
        assert!(
            lapin_threads() <= 2,
            "{} threads at a silent port",
            lapin_threads()
        );
        assert!(Instant::now() < end, "{} attempts", link.accepted());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let BrokerState::Down(why) = running.publisher.state() else {
        panic!("up at a silent port")
    };
    let server = format!("127.0.0.1:{}", link.port);
    assert!(
        why.contains(&server) && why.contains("login") && !why.contains("guest"),
        "{why}"
    );
    running.stop().await;
    threads_are(0).await;

    link.swallow(false);
    asked.connect_timeout = Duration::from_secs(5);
    let running = run(asked);
    let mut generation = running.ready().await;
    let mut baseline = 0;
    for i in 0..60 {
        link.cut();
        generation = within(SOON, "the next generation", async {
            loop {
                let now = running.publisher.ready().await;
                if now > generation {
                    return now;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
        if i == 10 {
            threads_are(1).await;
            baseline = descriptors();
        }
    }
    threads_are(1).await;
    within(SOON, "descriptors are given back", async {
        while descriptors() > baseline + 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    running.stop().await;
    threads_are(0).await;
}
