//! What a broker refuses: logins, exchanges, sizes, headers. Only the guilty row pays.

#![allow(clippy::unwrap_used, clippy::panic)]

mod rabbit_support;

use std::sync::Arc;
use std::time::Duration;

use lapin::ExchangeKind;
use lapin::options::{ExchangeDeclareOptions, ExchangeDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use outbox_core::failure::FailureClass;
use outbox_core::message::HeaderValue;
use outbox_core::ports::{BrokerState, PublishOutcome, Publisher};
use outbox_tail::rabbit::{ExchangeType, RabbitPublisher};
use outbox_testkit::Rabbit;
use rabbit_support::{config, deliver, drain, message, run, templated, within};

const SOON: Duration = Duration::from_secs(20);

async fn state(
    publisher: &RabbitPublisher,
    what: &str,
    is: impl Fn(&BrokerState) -> bool,
) -> String {
    within(SOON, what, async {
        loop {
            let state = publisher.state();
            if is(&state) {
                return state.to_string();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}

fn down(text: &'static str) -> impl Fn(&BrokerState) -> bool {
    move |s| matches!(s, BrokerState::Down(why) if why.contains(text))
}

fn refused(outcome: &PublishOutcome, code: &str) -> bool {
    matches!(outcome, PublishOutcome::Refused(f)
        if f.class == FailureClass::Permanent && f.code == code)
}

/// Channels and connections that the node has closed on an error since it started.
fn closed_in_anger(rabbit: &Rabbit) -> usize {
    let log = rabbit.log();
    log.matches("operation basic.publish caused a channel exception")
        .count()
        + log.matches("Error on AMQP connection").count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_or_vhost_is_told_without_the_password_and_mended_by_the_url_file() {
    let rabbit = Rabbit::shared().await.unwrap();
    let port = rabbit.port;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("url");
    std::fs::write(&file, format!("amqp://guest:s3cret@127.0.0.1:{port}/%2f\n")).unwrap();
    let mut config = config("");
    config.urls = outbox_tail::rabbit::Urls::File(file.clone());
    let running = run(config);
    let text = state(&running.publisher, "login refused", down("ACCESS_REFUSED")).await;
    assert!(
        text.contains(&format!("127.0.0.1:{port}")) && !text.contains("s3cret"),
        "{text}"
    );
    std::fs::write(
        &file,
        format!("amqp://guest:guest@127.0.0.1:{port}/nowhere"),
    )
    .unwrap();
    let text = state(&running.publisher, "vhost missing", down("nowhere")).await;
    assert!(!text.contains("guest:guest"), "{text}");
    // The first of two is a closed port: the next in turn is taken.
    let closed = outbox_testkit::root::free_port().unwrap();
    let good = format!(
        "amqp://guest:guest@127.0.0.1:{closed}/%2f, {}",
        rabbit.url()
    );
    std::fs::write(&file, good).unwrap();
    running.ready().await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_url_that_is_none_is_told_by_its_place_and_not_shown() {
    let running = run(config("amqp://u:pw1@127.0.0.1:1/%2f,http://u:pw2@h/"));
    let text = state(&running.publisher, "bad url", down("url 2 of rabbitmq.url")).await;
    assert!(!text.contains("pw2"), "{text}");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_static_exchange_is_down_until_it_is_there_and_can_be_declared() {
    let rabbit = Rabbit::shared().await.unwrap();
    let mut asked = config(&rabbit.url());
    asked.exchanges = vec![String::new(), "later".into()];
    let running = run(asked.clone());
    state(
        &running.publisher,
        "missing",
        down("exchange \"later\" is missing"),
    )
    .await;
    // Another instance may create it.
    asked.declare = Some(ExchangeType::Topic);
    let other = run(asked);
    other.ready().await;
    running.ready().await;
    other.stop().await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_static_exchange_that_is_deleted_costs_no_row_and_is_waited_for() {
    let rabbit = Rabbit::shared().await.unwrap();
    rabbit.topology("goes", "goes", "#").await.unwrap();
    let mut asked = config(&rabbit.url());
    asked.exchanges = vec!["goes".into()];
    let running = run(asked);
    let generation = running.ready().await;
    rabbit
        .with_channel(async |c| {
            Ok(
                c.exchange_delete("goes".into(), ExchangeDeleteOptions::default())
                    .await?,
            )
        })
        .await
        .unwrap();
    let batch = (0..100).map(|i| (i, message("goes", "k", i, 10))).collect();
    running.publisher.submit(generation, batch);
    let outcomes = running.outcomes(100, SOON).await;
    assert!(
        outcomes.values().all(|o| *o == PublishOutcome::Unconfirmed),
        "{outcomes:?}"
    );
    state(
        &running.publisher,
        "missing",
        down("exchange \"goes\" is missing"),
    )
    .await;
    rabbit.topology("goes", "goes", "#").await.unwrap();
    let report = within(
        SOON,
        "delivery",
        deliver(&running.publisher, 100, 50, |i| message("goes", "k", i, 10)),
    );
    assert_eq!(report.await.confirmed(), 100);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_for_missing_or_internal_templated_exchanges_fail_alone() {
    let rabbit = Rabbit::start().await.unwrap();
    rabbit.topology("x", "q", "#").await.unwrap();
    rabbit
        .with_channel(async |c| {
            let options = ExchangeDeclareOptions {
                internal: true,
                ..ExchangeDeclareOptions::default()
            };
            Ok(c.exchange_declare(
                "inner".into(),
                ExchangeKind::Topic,
                options,
                FieldTable::default(),
            )
            .await?)
        })
        .await
        .unwrap();
    let running = run(config(&rabbit.url()));
    let exchange = |i: u64| match i {
        100 | 500 | 900 => "none",
        300 | 700 => "inner",
        _ => "x",
    };
    let work = deliver(&running.publisher, 1000, 200, |i| {
        templated(message(exchange(i), "k", i, 10))
    });
    let report = within(SOON, "delivery", work).await;
    for (ticket, outcome) in &report.outcomes {
        match exchange(*ticket) {
            "x" => assert_eq!(*outcome, PublishOutcome::Confirmed, "{ticket}"),
            "none" => assert!(
                refused(outcome, "exchange_missing"),
                "{ticket}: {outcome:?}"
            ),
            _ => assert!(
                refused(outcome, "exchange_refused"),
                "{ticket}: {outcome:?}"
            ),
        }
    }
    // The internal exchange cannot be found out beforehand: it costs one channel, once.
    assert_eq!(closed_in_anger(&rabbit), 1, "{}", rabbit.log());
    assert!(report.repeats <= 200, "{}", report.repeats);
    let mut got = drain(&rabbit, "q").await;
    got.sort_unstable();
    got.dedup();
    assert_eq!(got.len(), 995);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_permission_is_down_without_charging_rows_and_ends_when_it_is_back() {
    let rabbit = Rabbit::start().await.unwrap();
    rabbit.topology("x", "q", "#").await.unwrap();
    rabbit.ctl(&["add_user", "relay", "pw"]).await.unwrap();
    let grant = ["set_permissions", "relay", "", "x", "x"];
    rabbit.ctl(&grant).await.unwrap();
    let mut asked = config(&format!("amqp://relay:pw@127.0.0.1:{}/%2f", rabbit.port));
    asked.exchanges = vec!["x".into()];
    let running = run(asked);
    running.ready().await;
    rabbit
        .ctl(&["set_permissions", "relay", "", "none", "x"])
        .await
        .unwrap();
    let publisher = running.publisher.clone();
    let work =
        tokio::spawn(
            async move { deliver(&publisher, 500, 100, |i| message("x", "k", i, 10)).await },
        );
    state(&running.publisher, "refused", down("refused for user")).await;
    let opened = running.publisher.snapshot().reconnects;
    tokio::time::sleep(Duration::from_secs(6)).await;
    let reopened = running.publisher.snapshot().reconnects - opened;
    assert!(reopened <= 10, "{reopened} reconnects in 6 s");
    rabbit.ctl(&grant).await.unwrap();
    let report = within(SOON, "delivery", work).await.unwrap();
    assert_eq!(report.confirmed(), 500);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_over_the_brokers_limit_fails_alone_and_the_next_is_refused_beforehand() {
    let rabbit = Rabbit::start_with("max_message_size = 100000\n")
        .await
        .unwrap();
    rabbit.topology("x", "q", "#").await.unwrap();
    let running = run(config(&rabbit.url()));
    let size = |i: u64| if i % 400 == 150 { 200_000 } else { 50 };
    let work = deliver(&running.publisher, 1000, 200, |i| {
        message("x", "k", i, size(i))
    });
    let report = within(SOON, "delivery", work).await;
    for (ticket, outcome) in &report.outcomes {
        if size(*ticket) == 50 {
            assert_eq!(*outcome, PublishOutcome::Confirmed);
        } else {
            assert!(refused(outcome, "body_too_large"), "{outcome:?}");
        }
    }
    assert_eq!(closed_in_anger(&rabbit), 1, "{}", rabbit.log());
    running.stop().await;
}

/// The broker closes the channel for a CC header that is no array of strings, and does not say
/// whose it was.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_offends_the_broker_is_found_among_its_neighbours() {
    let rabbit = Rabbit::start().await.unwrap();
    rabbit.topology("x", "q", "#").await.unwrap();
    let running = run(config(&rabbit.url()));
    let make = |i: u64| {
        let mut m = message("x", "k", i, 10);
        if i == 77 || i == 250 {
            Arc::make_mut(&mut m)
                .headers
                .push(("CC".into(), HeaderValue::Text("not a list".into())));
        }
        m
    };
    let report = within(
        SOON,
        "delivery",
        deliver(&running.publisher, 400, 100, make),
    )
    .await;
    for (ticket, outcome) in &report.outcomes {
        if *ticket == 77 || *ticket == 250 {
            assert!(
                refused(outcome, "refused_by_broker"),
                "{ticket}: {outcome:?}"
            );
        } else {
            assert_eq!(*outcome, PublishOutcome::Confirmed, "{ticket}");
        }
    }
    // For each: the channel, and the trial alone.
    assert_eq!(closed_in_anger(&rabbit), 4, "{}", rabbit.log());
    let mut seen = std::collections::BTreeSet::new();
    let first_copies: Vec<u64> = drain(&rabbit, "q")
        .await
        .into_iter()
        .filter(|i| seen.insert(*i))
        .collect();
    assert_eq!(first_copies.len(), 398);
    assert!(first_copies.is_sorted(), "order of first delivery");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_over_the_frame_size_fail_alone_without_touching_the_channel() {
    let rabbit = Rabbit::shared().await.unwrap();
    rabbit.topology("frames", "frames", "#").await.unwrap();
    let running = run(config(&rabbit.url()));
    let generation = running.ready().await;
    let big = |bytes: usize, id| {
        let mut m = message("frames", "k", id, 10);
        Arc::make_mut(&mut m)
            .headers
            .push(("h".into(), HeaderValue::Text("x".repeat(bytes))));
        m
    };
    let batch = vec![
        (1, big(130_000, 1)),
        (2, big(131_072, 2)),
        (3, message("frames", "k", 3, 300_000)),
    ];
    running.publisher.submit(generation, batch);
    let outcomes = running.outcomes(3, SOON).await;
    assert_eq!(outcomes[&1], PublishOutcome::Confirmed);
    assert!(
        refused(&outcomes[&2], "headers_too_large"),
        "{:?}",
        outcomes[&2]
    );
    assert_eq!(outcomes[&3], PublishOutcome::Confirmed);
    assert_eq!(running.publisher.snapshot().reconnects, 0);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_without_a_binding_are_returned_until_it_is_back_or_an_alternate_takes_them() {
    let rabbit = Rabbit::shared().await.unwrap();
    rabbit.topology("unbound", "unbound", "k").await.unwrap();
    let running = run(config(&rabbit.url()));
    let one = async |id: u64| {
        let generation = running.ready().await;
        running
            .publisher
            .submit(generation, vec![(id, message("unbound", "k", id, 10))]);
        running.outcomes(1, SOON).await.remove(&id).unwrap()
    };
    assert_eq!(one(1).await, PublishOutcome::Confirmed);
    let publisher = running.publisher.clone();
    let unbind = rabbit.with_channel(async |c| {
        let (queue, exchange) = ("unbound".into(), "unbound".into());
        Ok(
            c.queue_unbind(queue, exchange, "k".into(), FieldTable::default())
                .await?,
        )
    });
    // Under load: the deletion falls between two messages of one stream.
    let load = deliver(&publisher, 3000, 300, |i| {
        message("unbound", "k", 100 + i, 10)
    });
    let (report, unbound) = tokio::join!(load, unbind);
    unbound.unwrap();
    let returned = report
        .outcomes
        .values()
        .filter(|o| matches!(o, PublishOutcome::Returned(_)))
        .count();
    assert_eq!(report.confirmed() + returned, 3000);
    let depth = usize::try_from(rabbit.depth("unbound").await.unwrap()).unwrap();
    assert_eq!(depth, 1 + report.confirmed());
    assert!(matches!(one(2).await, PublishOutcome::Returned(_)));
    rabbit
        .with_channel(async |c| {
            let mut with = FieldTable::default();
            with.insert(
                "alternate-exchange".into(),
                AMQPValue::LongString("spare".into()),
            );
            let options = ExchangeDeclareOptions {
                durable: true,
                ..ExchangeDeclareOptions::default()
            };
            c.exchange_declare(
                "spare".into(),
                ExchangeKind::Fanout,
                options,
                FieldTable::default(),
            )
            .await?;
            outbox_testkit::rabbit::declare_queue(c, "spare").await?;
            outbox_testkit::rabbit::bind(c, "spare", "spare", "").await?;
            c.exchange_delete("unbound".into(), ExchangeDeleteOptions::default())
                .await?;
            Ok(
                c.exchange_declare("unbound".into(), ExchangeKind::Topic, options, with)
                    .await?,
            )
        })
        .await
        .unwrap();
    assert_eq!(one(3).await, PublishOutcome::Confirmed);
    assert_eq!(drain(&rabbit, "spare").await, [3]);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_templated_exchange_that_is_deleted_under_load_fails_its_own_rows_only() {
    let rabbit = Rabbit::start().await.unwrap();
    rabbit.topology("x", "q", "#").await.unwrap();
    rabbit.topology("brief", "brief", "#").await.unwrap();
    let running = run(config(&rabbit.url()));
    let exchange = |i: u64| if i % 50 == 7 { "brief" } else { "x" };
    let make = |i: u64| templated(message(exchange(i), "k", i, 10));
    let publisher = running.publisher.clone();
    let first = deliver(&publisher, 200, 100, make).await;
    assert_eq!(first.confirmed(), 200);
    rabbit
        .with_channel(async |c| {
            Ok(
                c.exchange_delete("brief".into(), ExchangeDeleteOptions::default())
                    .await?,
            )
        })
        .await
        .unwrap();
    let report = within(SOON, "delivery", deliver(&publisher, 2000, 100, make)).await;
    for (ticket, outcome) in &report.outcomes {
        if exchange(*ticket) == "x" {
            assert_eq!(*outcome, PublishOutcome::Confirmed, "{ticket}");
        } else {
            assert!(
                refused(outcome, "exchange_missing"),
                "{ticket}: {outcome:?}"
            );
        }
    }
    assert_eq!(closed_in_anger(&rabbit), 1, "{}", rabbit.log());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_routing_key_that_topic_permissions_forbid_fails_its_own_rows_only() {
    let rabbit = Rabbit::start().await.unwrap();
    rabbit.topology("x", "q", "#").await.unwrap();
    rabbit.ctl(&["add_user", "relay", "pw"]).await.unwrap();
    rabbit
        .ctl(&["set_permissions", "relay", "", "x", "x"])
        .await
        .unwrap();
    rabbit
        .ctl(&["set_topic_permissions", "relay", "x", "^open", ".*"])
        .await
        .unwrap();
    let running = run(config(&format!(
        "amqp://relay:pw@127.0.0.1:{}/%2f",
        rabbit.port
    )));
    let key = |i: u64| {
        if i == 30 || i == 160 {
            "closed.a"
        } else {
            "open.a"
        }
    };
    let work = deliver(&running.publisher, 300, 100, |i| {
        message("x", key(i), i, 10)
    });
    let report = within(SOON, "delivery", work).await;
    for (ticket, outcome) in &report.outcomes {
        if key(*ticket) == "open.a" {
            assert_eq!(*outcome, PublishOutcome::Confirmed, "{ticket}");
        } else {
            assert!(refused(outcome, "topic_refused"), "{ticket}: {outcome:?}");
        }
    }
    assert_eq!(closed_in_anger(&rabbit), 1, "{}", rabbit.log());
    running.stop().await;
}
