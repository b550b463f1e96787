//! Nothing of a payload or a password reaches the logs, at any level.

#![allow(clippy::unwrap_used, clippy::panic)]

mod rabbit_support;

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use outbox_core::ports::{PublishOutcome, Publisher};
use outbox_tail::rabbit::NOISY_TARGETS;
use outbox_testkit::Rabbit;
use rabbit_support::{config, message, run};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_noisy_targets_off_neither_bodies_nor_passwords_are_logged() {
    let sink = Sink::default();
    let writer = sink.clone();
    let noisy = NOISY_TARGETS.iter().map(|t| (*t, LevelFilter::OFF));
    let layer = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .with_writer(move || writer.clone());
    let targets = Targets::new()
        .with_default(LevelFilter::TRACE)
        .with_targets(noisy);
    tracing_subscriber::registry()
        .with(targets)
        .with(layer)
        .init();

    let rabbit = Rabbit::start().await.unwrap();
    rabbit.topology("x", "q", "good").await.unwrap();
    rabbit
        .ctl(&["add_user", "relay", "hush-hush"])
        .await
        .unwrap();
    rabbit
        .ctl(&["set_permissions", "relay", "", ".*", ".*"])
        .await
        .unwrap();
    let running = run(config(&format!(
        "amqp://relay:hush-hush@127.0.0.1:{}/%2f",
        rabbit.port
    )));
    let generation = running.ready().await;
    let mut lost = message("x", "bad", 1, 0);
    Arc::make_mut(&mut lost).body = "the-payload-itself".into();
    let mut good = lost.clone();
    Arc::make_mut(&mut good).routing_key = "good".into();
    running
        .publisher
        .submit(generation, vec![(1, lost), (2, good)]);
    let outcomes = running.outcomes(2, Duration::from_secs(10)).await;
    assert!(matches!(outcomes[&1], PublishOutcome::Returned(_)));
    running.stop().await;

    let bytes = sink.0.lock().unwrap().clone();
    let text = String::from_utf8_lossy(&bytes);
    // As text, and as a debug print of bytes.
    let printed = |secret: &str| {
        format!("{:?}", secret.as_bytes())
            .trim_matches(['[', ']'])
            .to_owned()
    };
    for secret in ["the-payload-itself", "hush-hush"] {
        let found = text
            .lines()
            .find(|l| l.contains(secret) || l.contains(&printed(secret)));
        assert!(found.is_none(), "{found:?}");
    }
    assert!(text.contains("lapin"), "nothing was listened to");
}
