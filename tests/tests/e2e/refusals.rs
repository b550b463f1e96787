//! The broker refuses rows: bad ones fail alone, good ones go on, and what is not the row's fault costs it nothing.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::{Result, ensure};
use lapin::options::{QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use outbox_e2e::{SOON, Setup, World, insert_many};
use outbox_testkit::{Oracle, Rabbit, Sink, Writer, WriterOptions, rabbit, wait};

/// The default outbox's columns that matter here, with room for a routing key that AMQP has none for.
const WIDE: &str = "CREATE TABLE outbox (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, \
    aggregate_type VARCHAR(400) NOT NULL DEFAULT '', aggregate_id VARCHAR(64) NOT NULL, \
    event_type VARCHAR(400) NOT NULL, payload JSON NOT NULL, headers JSON NULL, \
    status TINYINT NOT NULL DEFAULT 0, retry_count INT NOT NULL DEFAULT 0, next_retry_at DATETIME(6) NULL, \
    locked_by VARCHAR(64) NULL, locked_until DATETIME(6) NULL, last_error VARCHAR(1024) NULL, \
    created_at DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), \
    updated_at DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6), \
    KEY due (status, next_retry_at, id), KEY aggregate (aggregate_type, aggregate_id, status, id))";

/// Retries come soon and never run out.
const RETRY: &str = "retry = { base = \"1s\", factor = 1.0, cap = \"1s\", max_retries = 500 }";

/// `rows` rows of aggregates of their own, with these values of `aggregate_type` and `event_type`.
fn insert_for(rows: u32, aggregate_type: &str, event_type: &str) -> String {
    format!(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) \
         SELECT /*+ SET_VAR(cte_max_recursion_depth = 100000) */ '{aggregate_type}', CONCAT('o', n), '{event_type}', \
         JSON_OBJECT('n', n) FROM (WITH RECURSIVE seq (n) AS \
         (SELECT 1 UNION ALL SELECT n + 1 FROM seq WHERE n < {rows}) SELECT n FROM seq) AS numbers ORDER BY n"
    )
}

fn distinct(sink: &Sink) -> usize {
    sink.ids().iter().collect::<HashSet<_>>().len()
}

async fn counts(world: &World, what: &str, filter: &str, count: u64) -> Result<()> {
    let query = format!("SELECT COUNT(*) FROM outbox WHERE {filter}");
    wait::until_ok(what, SOON, async || {
        let now = world.mysql.count(&query).await?;
        ensure!(now == count, "{now} rows have {filter}, not {count}");
        anyhow::Ok(())
    })
    .await
    .map_err(|error| error.context(world.log_end()))
}

#[tokio::test]
async fn rows_that_can_never_be_sent_fail_alone_and_delay_nobody() -> Result<()> {
    let world = Setup::new().table(WIDE).start().await?;
    let lines = world.outboxd.log().lines().count();
    let mut first = world.mysql.conn().await?;
    {
        use mysql_async::prelude::Queryable;
        first.query_drop("BEGIN").await?;
        for n in 0..10 {
            first
                .query_drop(format!(
                    "INSERT INTO outbox (aggregate_id, event_type, payload, headers) \
                     VALUES ('bad{n}', 'OrderPaid', '{{}}', '{{\"CC\": \"not an array\"}}')"
                ))
                .await?;
        }
        first
            .query_drop(insert_for(60, "order", &"k".repeat(300)))
            .await?;
        first
            .query_drop(insert_for(1000, "good", "OrderPaid"))
            .await?;
        first.query_drop("COMMIT").await?;
    }
    let since = tokio::time::Instant::now();
    counts(&world, "good rows are sent", "status = 1", 1000).await?;
    let took = since.elapsed();
    ensure!(took < Duration::from_secs(10), "they took {took:?}");
    counts(
        &world,
        "bad rows failed",
        "status = 2 AND retry_count = 0 AND last_error <> ''",
        70,
    )
    .await?;
    world.sink.wait_for_count(1000, SOON).await?;
    ensure!(world.duplicates() == 0, "{} came twice", world.duplicates());
    let lines = world.outboxd.log().lines().count() - lines;
    ensure!(lines < 150, "{lines} log lines\n{}", world.log_end());
    Ok(())
}

#[tokio::test]
async fn rows_for_a_missing_exchange_fail_and_their_neighbours_are_sent() -> Result<()> {
    let world = Setup::new()
        .config("[[outbox]]\ntable = \"outbox\"\nexchange = \"{aggregate_type}\"")
        .start()
        .await?;
    let connections = world.to_broker.accepted();
    let good = insert_for(250, &world.name, "OrderPaid");
    for n in 0..4 {
        world.mysql.exec(&good).await?;
        if n < 3 {
            let missing = format!("{}-missing-{n}", world.name);
            world
                .mysql
                .exec(insert_for(1, &missing, "OrderPaid"))
                .await?;
        }
    }
    counts(&world, "good rows are sent", "status = 1", 1000).await?;
    counts(
        &world,
        "the others failed",
        "status = 2 AND last_error LIKE '%no exchange%'",
        3,
    )
    .await?;
    world.sink.wait_for_count(1000, SOON).await?;
    ensure!(world.duplicates() == 0, "{} came twice", world.duplicates());
    let connections = world.to_broker.accepted() - connections;
    ensure!(connections <= 3, "{connections} new connections");
    Ok(())
}

#[tokio::test]
async fn a_permission_withdrawn_from_one_exchange_does_not_touch_the_other() -> Result<()> {
    let world = Setup::new()
        .own_broker()
        .config("[[outbox]]\ntable = \"outbox\"\nexchange = \"{aggregate_type}\"")
        .start()
        .await?;
    let refused = format!("{}-refused", world.name);
    world.rabbit.topology(&refused, &refused, "#").await?;
    let other = Sink::start(&world.rabbit.url(), &refused);
    for exchange in [&world.name, &refused] {
        world.mysql.exec(insert_for(50, exchange, "Before")).await?;
    }
    counts(&world, "all are sent", "status = 1", 100).await?;

    let but_one = format!("^(?!{refused}$).*");
    let permissions = ["set_permissions", "guest", ".*", &but_one, ".*"];
    world.rabbit.ctl(&permissions).await?;
    // A channel remembers what it was once allowed to.
    world
        .rabbit
        .ctl(&["close_all_connections", "permissions"])
        .await?;
    for _ in 0..10 {
        world
            .mysql
            .exec(insert_for(100, &world.name, "During"))
            .await?;
        world.mysql.exec(insert_for(2, &refused, "During")).await?;
    }
    counts(
        &world,
        "those of the other exchange are sent",
        "status = 1",
        1100,
    )
    .await?;
    counts(
        &world,
        "the refused ones failed",
        "status = 2 AND last_error LIKE '%refused%'",
        20,
    )
    .await?;
    ensure!(distinct(&other) == 50, "a refused row came");

    world
        .rabbit
        .ctl(&["set_permissions", "guest", ".*", ".*", ".*"])
        .await?;
    // What was learnt about an exchange is believed for a minute.
    wait::until_ok("a retry succeeds", 2 * SOON, async || {
        world.outboxd.cli(&["retry", "--all-failed"]).await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let left = world
            .mysql
            .count("SELECT COUNT(*) FROM outbox WHERE status <> 1")
            .await?;
        ensure!(left == 0, "{left} are not sent");
        anyhow::Ok(())
    })
    .await
    .map_err(|error| error.context(world.log_end()))?;
    // Closed connections make copies, but only of what was on its way.
    wait::until("all have come", SOON, async || {
        distinct(&world.sink) == 1050 && distinct(&other) == 70
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn a_body_over_the_brokers_limit_fails_its_row_alone() -> Result<()> {
    let world = Setup::new().start().await?;
    let small = insert_many(100, 0);
    world.mysql.exec(&small).await?;
    // RabbitMQ takes 16 MiB.
    world.mysql.exec(insert_many(1, 17_000_000)).await?;
    world.mysql.exec(&small).await?;
    counts(&world, "the others are sent", "status = 1", 200).await?;
    counts(
        &world,
        "the large one failed",
        "status = 2 AND retry_count = 0",
        1,
    )
    .await?;
    let why: Option<String> = world
        .mysql
        .first("SELECT last_error FROM outbox WHERE status = 2")
        .await?;
    ensure!(
        why.as_ref().is_some_and(|why| why.contains("16777216")),
        "{why:?}"
    );
    // Its neighbours in the closed channel may have arrived before.
    ensure!(world.duplicates() <= 200, "{}", world.duplicates());
    Ok(())
}

#[tokio::test]
async fn rows_that_a_full_queue_refuses_stay_until_there_is_room() -> Result<()> {
    let world = Setup::new()
        .config(RETRY)
        .config("[[outbox]]\ntable = \"outbox\"\nexchange = \"\"\nordering = \"strict\"")
        .start()
        .await?;
    let full = format!("{}-full", world.name);
    let declare = world.rabbit.with_channel(async |channel| {
        let mut arguments = FieldTable::default();
        arguments.insert("x-max-length".into(), AMQPValue::LongInt(10));
        arguments.insert(
            "x-overflow".into(),
            AMQPValue::LongString("reject-publish".into()),
        );
        let options = QueueDeclareOptions {
            durable: true,
            ..QueueDeclareOptions::default()
        };
        channel
            .queue_declare(full.as_str().into(), options, arguments)
            .await?;
        Ok(())
    });
    declare.await?;
    world.mysql.exec(insert_for(100, "order", &full)).await?;
    let refused = "status <> 1 AND retry_count > 0 AND last_error <> ''";
    let query = format!("SELECT COUNT(*) FROM outbox WHERE {refused}");
    wait::until(
        "every row was offered",
        SOON,
        async || matches!(world.mysql.count(&query).await, Ok(refused) if refused >= 85),
    )
    .await
    .map_err(|error| error.context(world.log_end()))?;
    // What is marked as sent is in the queue, and nothing else is.
    let sent = "SELECT COUNT(*) FROM outbox WHERE status = 1";
    wait::until_ok("rows and queue agree", SOON, async || {
        let (sent, depth) = (
            world.mysql.count(sent).await?,
            world.rabbit.depth(&full).await?,
        );
        ensure!(
            sent == u64::from(depth),
            "{sent} are sent, {depth} are in the queue"
        );
        anyhow::Ok(())
    })
    .await?;
    let sink = Sink::start(&world.rabbit.url(), &full);
    world
        .all_sent()
        .await
        .map_err(|error| error.context(world.log_end()))?;
    let written = world.committed().await?;
    sink.wait_for_ids(written.ids(), SOON).await?;
    Oracle::new([written]).judge(&sink.received(), 0)?;
    Ok(())
}

#[tokio::test]
async fn a_queue_that_vanished_with_its_binding_makes_rows_unroutable_and_none_sent() -> Result<()>
{
    let world = Setup::new()
        .config(RETRY)
        .config("[[outbox]]\ntable = \"outbox\"\nexchange = \"{aggregate_type}\"")
        .start()
        .await?;
    let name = format!("{}-gone", world.name);
    // Bound to a queue that is not durable and dies with its connection; the exchange stays.
    let owner = world.rabbit.connect().await?;
    let channel = owner.create_channel().await?;
    rabbit::declare_exchange(&channel, &name).await?;
    let options = QueueDeclareOptions {
        exclusive: true,
        ..QueueDeclareOptions::default()
    };
    let short = name.as_str();
    channel
        .queue_declare(short.into(), options, FieldTable::default())
        .await?;
    let bound = QueueBindOptions::default();
    channel
        .queue_bind(
            short.into(),
            short.into(),
            "#".into(),
            bound,
            FieldTable::default(),
        )
        .await?;
    world.mysql.exec(insert_for(10, &name, "OrderPaid")).await?;
    counts(&world, "routed rows are sent", "status = 1", 10).await?;
    owner.close(200, "the node goes".into()).await?;
    wait::until("the queue is gone", SOON, async || {
        world.rabbit.depth(&name).await.is_err()
    })
    .await?;

    world.mysql.exec(insert_for(50, &name, "OrderPaid")).await?;
    counts(
        &world,
        "the others are refused",
        "status = 0 AND retry_count > 0",
        50,
    )
    .await?;
    counts(&world, "none of them is sent", "status = 1", 10).await?;
    world.rabbit.topology(&name, &name, "#").await?;
    let sink = Sink::start(&world.rabbit.url(), &name);
    world.all_sent().await?;
    sink.wait_for_count(50, SOON).await?;
    ensure!(sink.count() == 50, "{} came", sink.count());
    Ok(())
}

#[tokio::test]
async fn a_new_password_in_the_file_is_enough_and_rows_wait_for_it() -> Result<()> {
    let mut world = Setup::new().own_broker().build().await?;
    for args in [
        &["add_user", "app", "first"][..],
        &["set_permissions", "app", ".*", ".*", ".*"],
    ] {
        world.rabbit.ctl(args).await?;
    }
    // The configuration that the world made names the URL itself.
    let path = world.outboxd.config_path();
    let secret = path.with_file_name("broker.url");
    let plain = Rabbit::url_through(world.to_broker.port);
    let url = |password: &str| plain.replace("guest:guest", &format!("app:{password}"));
    std::fs::write(&secret, url("first"))?;
    let named = format!("url = \"{plain}\"");
    let config = std::fs::read_to_string(&path)?;
    ensure!(config.contains(&named), "{config}");
    let in_file = format!("url_file = \"{}\"", secret.display());
    std::fs::write(&path, config.replace(&named, &in_file))?;
    world.run().await?;
    world.insert(20).await?;
    world.all_sent().await?;

    world
        .rabbit
        .ctl(&["change_password", "app", "second"])
        .await?;
    world
        .rabbit
        .ctl(&["close_all_connections", "password"])
        .await?;
    wait::until("the broker is away", SOON, async || {
        matches!(
            world.outboxd.metric("outboxd_broker_connected").await,
            Ok(0.0)
        )
    })
    .await?;
    world.insert(50).await?;
    let charged = "SELECT COUNT(*) FROM outbox WHERE retry_count > 0 OR status = 2";
    // Several attempts with the old password.
    let attempts = world.to_broker.accepted();
    wait::until("it tries again", SOON, async || {
        world.to_broker.accepted() > attempts + 1
    })
    .await?;
    ensure!(world.mysql.count(charged).await? == 0);
    ensure!(world.sink.count() == 20);
    std::fs::write(&secret, url("second"))?;
    world.judge_table(0).await?;
    let log = world.outboxd.log();
    ensure!(
        !log.contains("first") && !log.contains("second"),
        "a password is in the log"
    );
    Ok(())
}

#[tokio::test]
async fn a_broker_that_comes_back_empty_costs_no_row_a_retry() -> Result<()> {
    let world = Setup::new()
        .own_broker()
        .config("retry = { base = \"1s\", max_retries = 1 }")
        .start()
        .await?;
    let options = WriterOptions {
        rate: 100.0,
        ..WriterOptions::default()
    };
    let mut written = Writer::start(&world.mysql, options.clone())?
        .finish_after(Duration::from_secs(2))
        .await?;
    // All of it is consumed: what a reset takes away would be the broker's loss.
    world.judge(written.clone(), 0).await?;
    for command in ["stop_app", "reset", "start_app"] {
        world.rabbit.ctl(&[command]).await?;
    }
    let options = WriterOptions {
        prefix: "b".into(),
        seed: 2,
        ..options
    };
    let later = Writer::start(&world.mysql, options)?
        .finish_after(Duration::from_secs(4))
        .await?;
    let charged = "SELECT COUNT(*) FROM outbox WHERE retry_count > 0 OR status = 2";
    ensure!(
        world.mysql.count(charged).await? == 0,
        "{}",
        world.log_end()
    );
    world.rabbit.topology(&world.name, &world.name, "#").await?;
    written.committed.extend(later.committed);
    world.judge(written, 0).await?;
    ensure!(world.mysql.count(charged).await? == 0);
    Ok(())
}
