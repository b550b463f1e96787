//! What the publisher's tests share: messages, a publisher that runs, and an ideal caller.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)] // each test binary uses its part

pub mod link;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use lapin::options::BasicConsumeOptions;
use lapin::types::FieldTable;
use outbox_core::message::{ContentType, HeaderValue, Message};
use outbox_core::ports::{Generation, PublishOutcome, Publisher, Ticket};
use outbox_tail::rabbit::{RabbitConfig, RabbitPublisher, Urls};
use outbox_testkit::Rabbit;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// A publisher whose driver runs.
pub struct Running {
    pub publisher: Arc<RabbitPublisher>,
    pub cancel: CancellationToken,
    pub driver: JoinHandle<()>,
}

pub fn config(url: &str) -> RabbitConfig {
    RabbitConfig::new(Urls::Inline(url.to_owned().into()))
}

pub fn run(config: RabbitConfig) -> Running {
    let (publisher, driver) = RabbitPublisher::new(config);
    let cancel = CancellationToken::new();
    let driver = tokio::spawn(driver.run(cancel.clone()));
    Running {
        publisher,
        cancel,
        driver,
    }
}

impl Running {
    pub async fn stop(self) {
        self.cancel.cancel();
        within(Duration::from_secs(10), "the driver ends", self.driver)
            .await
            .unwrap();
    }

    /// The next generation under which messages can be sent.
    pub async fn ready(&self) -> Generation {
        within(Duration::from_secs(60), "ready", self.publisher.ready()).await
    }

    /// Outcomes until there is one for each of `tickets`.
    pub async fn outcomes(
        &self,
        tickets: u64,
        limit: Duration,
    ) -> BTreeMap<Ticket, PublishOutcome> {
        let mut all = BTreeMap::new();
        let collect = async {
            while u64::try_from(all.len()).unwrap() < tickets {
                for (ticket, outcome) in self.publisher.outcomes().await {
                    assert!(
                        all.insert(ticket, outcome).is_none(),
                        "two outcomes for {ticket}"
                    );
                }
            }
        };
        within(limit, "all outcomes", collect).await;
        all
    }
}

pub async fn within<F: Future>(limit: Duration, what: &str, work: F) -> F::Output {
    match tokio::time::timeout(limit, work).await {
        Ok(output) => output,
        Err(_) => panic!("not within {limit:?}: {what}"),
    }
}

pub fn message(exchange: &str, key: &str, id: u64, body: usize) -> Arc<Message> {
    let text = |name: &str, value: String| (name.to_owned(), HeaderValue::Text(value));
    Arc::new(Message {
        exchange: exchange.into(),
        templated_exchange: false,
        routing_key: key.to_owned(),
        content_type: ContentType::Binary,
        message_id: id.to_string(),
        event_type: "created".to_owned(),
        timestamp: Some(1_700_000_000),
        app_id: "outboxd".into(),
        headers: vec![
            text("outbox-id", id.to_string()),
            text("outbox-table", "shop.outbox".to_owned()),
        ],
        body: Bytes::from(vec![b'x'; body]),
    })
}

pub fn templated(mut message: Arc<Message>) -> Arc<Message> {
    Arc::make_mut(&mut message).templated_exchange = true;
    message
}

/// What the ideal caller saw.
#[derive(Debug, Default)]
pub struct Report {
    /// The last outcome of each message but `Unconfirmed`.
    pub outcomes: BTreeMap<Ticket, PublishOutcome>,
    /// How often a message had to be handed over again.
    pub repeats: u64,
    /// Longest time from the (last) hand-over to the outcome.
    pub slowest: Duration,
    pub generations: BTreeSet<Generation>,
}

impl Report {
    pub fn confirmed(&self) -> usize {
        self.outcomes
            .values()
            .filter(|o| **o == PublishOutcome::Confirmed)
            .count()
    }
}

/// Delivers as the ports demand: a bounded window, in order, unconfirmed messages again, in
/// order, under the next generation. Ticket `i` is the `i`th message.
pub async fn deliver(
    publisher: &RabbitPublisher,
    count: u64,
    window: usize,
    make: impl Fn(u64) -> Arc<Message>,
) -> Report {
    let mut report = Report::default();
    let mut out: BTreeMap<Ticket, Instant> = BTreeMap::new();
    let mut again: BTreeSet<Ticket> = BTreeSet::new();
    let mut next = 0;
    let mut generation = publisher.ready().await;
    loop {
        report.generations.insert(generation);
        let mut batch = Vec::new();
        while out.len() < window && (next < count || !again.is_empty()) {
            let ticket = again.pop_first().unwrap_or_else(|| {
                next += 1;
                next - 1
            });
            out.insert(ticket, Instant::now());
            batch.push((ticket, make(ticket)));
        }
        if !batch.is_empty() {
            publisher.submit(generation, batch);
        }
        if out.is_empty() {
            return report;
        }
        let mut lost = false;
        let mut outcomes = publisher.outcomes().await;
        if outcomes
            .iter()
            .any(|(_, o)| *o == PublishOutcome::Unconfirmed)
        {
            lost = true;
            generation = publisher.ready().await;
            // Whatever was left of the old generation has its outcome by now.
            while !out.keys().all(|t| outcomes.iter().any(|(o, _)| o == t)) {
                outcomes.extend(publisher.outcomes().await);
            }
        }
        for (ticket, outcome) in outcomes {
            let since = out
                .remove(&ticket)
                .unwrap_or_else(|| panic!("{ticket} is not out"));
            if outcome == PublishOutcome::Unconfirmed {
                assert!(lost);
                report.repeats += 1;
                again.insert(ticket);
            } else {
                report.slowest = report.slowest.max(since.elapsed());
                assert!(report.outcomes.insert(ticket, outcome).is_none());
            }
        }
    }
}

/// Takes everything that is in a queue, until nothing has come for a while, and returns the
/// message ids in order. (A quorum queue's count of messages lags behind after a restart.)
pub async fn drain(rabbit: &Rabbit, queue: &str) -> Vec<u64> {
    const QUIET: Duration = Duration::from_secs(1);
    rabbit
        .with_channel(async |channel| {
            let options = BasicConsumeOptions {
                no_ack: true,
                ..BasicConsumeOptions::default()
            };
            let mut consumer = channel
                .basic_consume(queue.into(), "".into(), options, FieldTable::default())
                .await?;
            let mut ids = Vec::new();
            while let Ok(Some(delivery)) = tokio::time::timeout(QUIET, consumer.next()).await {
                let id = delivery?.properties.message_id().clone().unwrap();
                ids.push(id.as_str().parse()?);
            }
            Ok(ids)
        })
        .await
        .unwrap()
}

/// Threads of this process with lapin's name.
pub fn lapin_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with("lapin-io-loop"))
        .count()
}
