//! What rows look like in the binlog must not show in what is published.

use std::collections::HashSet;

use anyhow::{Context, Result, ensure};
use lapin::types::AMQPValue;
use mysql_async::prelude::Queryable;
use outbox_e2e::{SOON, Setup, WINDOW, World, insert, insert_many, on_both};
use outbox_testkit::{Received, wait};

on_both!(
    rows_behind_a_rollback_to_a_savepoint_are_never_published,
    binary_ids_keep_their_trailing_zeros_without_status_columns,
);

/// What a consumer sees of a message, but for what differs between any two rows.
fn seen(message: &Received) -> String {
    let headers = message.properties.headers().as_ref().map(|table| {
        let mut all: Vec<(String, AMQPValue)> = table
            .inner()
            .iter()
            .filter(|(name, _)| name.as_str() != "outbox-id")
            .map(|(name, value)| (name.to_string(), value.clone()))
            .collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    });
    format!(
        "body {:?}\nkey {:?}\ntype {:?}, {:?}\nheaders {headers:?}",
        String::from_utf8_lossy(&message.body),
        message.routing_key,
        message.properties.kind(),
        message.properties.content_type(),
    )
}

/// Writes `rows` rows by `sql` before the first start, so that the poller reads them by SELECT, and again for the
/// tail, and compares pair by pair.
async fn both_paths(world: &mut World, rows: usize, sql: &str) -> Result<Vec<Received>> {
    world.mysql.exec(sql).await?;
    world.run().await?;
    world.sink.wait_for_count(rows, SOON).await?;
    world.mysql.exec(sql).await?;
    world.sink.wait_for_count(2 * rows, SOON).await?;
    world.all_sent().await?;
    for path in ["poller", "tail"] {
        let published = world
            .outboxd
            .metric(&format!(
                "outboxd_published_total{{table=\"app.outbox\",path=\"{path}\"}}"
            ))
            .await?;
        ensure!(
            published == f64::from(u32::try_from(rows)?),
            "{path}: {published}"
        );
    }
    let mut messages = world.sink.received();
    messages.sort_by_key(|m| m.id.parse::<u64>().unwrap_or_default());
    for (polled, tailed) in messages.iter().zip(&messages[rows..]) {
        ensure!(
            seen(polled) == seen(tailed),
            "poller: {}\ntail: {}",
            seen(polled),
            seen(tailed)
        );
    }
    Ok(messages)
}

#[tokio::test]
async fn compressed_transactions_arrive_like_any_other() -> Result<()> {
    let world = Setup::new().start().await?;
    let mut conn = world.mysql.conn().await?;
    let mut bodies = Vec::new();
    for (on, sizes) in [("OFF", [1, 100, 3000]), ("ON", [1, 100, 3000])] {
        let before = world.sink.count();
        conn.query_drop(format!("SET SESSION binlog_transaction_compression = {on}"))
            .await?;
        for rows in sizes {
            conn.query_drop(insert_many(rows, 50)).await?;
        }
        world.judge_table(0).await?;
        let mut new: Vec<Vec<u8>> = world.sink.received()[before..]
            .iter()
            .map(|m| m.body.clone())
            .collect();
        new.sort();
        bodies.push(new);
    }
    ensure!(bodies[0].len() == 3101 && bodies[0] == bodies[1]);
    // It was compressed, and it was the tail that read it.
    let stages = "SELECT SUM(TRANSACTION_COUNTER) FROM performance_schema.binary_log_transaction_compression_stats \
                  WHERE LOG_TYPE = 'BINARY' AND COMPRESSION_TYPE = 'ZSTD'";
    ensure!(
        world
            .mysql
            .first::<Option<u64>>(stages)
            .await?
            .flatten()
            .unwrap_or_default()
            >= 3
    );
    let tailed = world
        .outboxd
        .metric("outboxd_published_total{table=\"app.outbox\",path=\"tail\"}")
        .await?;
    ensure!(tailed == 6202.0, "{tailed}");
    Ok(())
}

async fn rows_behind_a_rollback_to_a_savepoint_are_never_published(setup: Setup) -> Result<()> {
    let world = setup.start().await?;
    let mut conn = world.mysql.conn().await?;
    for round in 0..3 {
        let n = 10 * round;
        conn.query_drop("BEGIN").await?;
        conn.query_drop(insert(n)).await?;
        conn.query_drop("SAVEPOINT s").await?;
        conn.query_drop(insert(n + 1)).await?;
        conn.query_drop("ROLLBACK TO s").await?;
        conn.query_drop(insert(n + 2)).await?;
        conn.query_drop(if round == 1 { "ROLLBACK" } else { "COMMIT" })
            .await?;
    }
    world.judge_table(0).await?;
    ensure!(world.sink.count() == 4, "{:?}", world.sink.ids());
    Ok(())
}

#[tokio::test]
async fn rollbacks_mixed_with_a_table_without_transactions_publish_no_ghost() -> Result<()> {
    let world = Setup::new()
        .mysql("--gtid-mode=OFF_PERMISSIVE")
        .mysql("--enforce-gtid-consistency=OFF")
        .start()
        .await?;
    let mut conn = world.mysql.conn().await?;
    conn.query_drop(
        "CREATE TABLE final_at_once (id INT AUTO_INCREMENT PRIMARY KEY) ENGINE = MyISAM",
    )
    .await?;
    for end in ["COMMIT", "ROLLBACK", "COMMIT"] {
        conn.query_drop("BEGIN").await?;
        conn.query_drop(insert(1)).await?;
        conn.query_drop("INSERT INTO final_at_once VALUES ()")
            .await?;
        conn.query_drop("SAVEPOINT s").await?;
        conn.query_drop(insert(2)).await?;
        conn.query_drop("INSERT INTO final_at_once VALUES ()")
            .await?;
        conn.query_drop("ROLLBACK TO s").await?;
        conn.query_drop(end).await?;
    }
    conn.query_drop(insert(9)).await?;
    world.judge_table(0).await?;
    ensure!(world.sink.count() == 3, "{:?}", world.sink.ids());
    Ok(())
}

async fn binary_ids_keep_their_trailing_zeros_without_status_columns(setup: Setup) -> Result<()> {
    let world = setup
        .table(
            "CREATE TABLE outbox (id BINARY(16) PRIMARY KEY, aggregate_id VARCHAR(64) NOT NULL, \
             event_type VARCHAR(64) NOT NULL, payload BLOB NOT NULL)",
        )
        .outbox("tracking = \"none\"")
        .start()
        .await?;
    let ids = [
        "11111111-1111-1111-1111-111111111100",
        "22222222-2222-2222-2222-222222220000",
        "00000000-0000-0000-0000-000000000000",
        "00000000-0000-0000-0000-000000000001",
        "33333333-0000-0000-0000-000000000000",
    ];
    let mut conn = world.mysql.conn().await?;
    for id in ids {
        let hex = id.replace('-', "");
        conn.query_drop("BEGIN").await?;
        conn.query_drop(format!(
            "INSERT INTO outbox VALUES (0x{hex}, 'a', 'OrderPaid', 0x00FF00)"
        ))
        .await?;
        conn.query_drop("DELETE FROM outbox").await?;
        conn.query_drop("COMMIT").await?;
    }
    world
        .sink
        .wait_for_ids(ids, SOON)
        .await
        .with_context(|| world.log_end())?;
    ensure!(world.sink.ids() == ids, "{:?}", world.sink.ids());
    for message in world.sink.received() {
        ensure!(
            message.text("outbox-id").as_deref() == Some(message.id.as_str()),
            "{message:?}"
        );
        ensure!(message.body == [0x00, 0xFF, 0x00], "{message:?}");
    }
    Ok(())
}

#[tokio::test]
async fn text_of_any_character_set_is_the_same_on_both_paths() -> Result<()> {
    let mut world = Setup::new()
        .table(
            "CREATE TABLE outbox (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, \
             aggregate_type VARCHAR(64) CHARACTER SET gbk NOT NULL, \
             aggregate_id VARCHAR(64) CHARACTER SET latin1 NOT NULL, \
             event_type VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_as_cs NOT NULL, \
             payload TEXT CHARACTER SET utf8mb4 NOT NULL, \
             note VARCHAR(64) CHARACTER SET latin1 NOT NULL, \
             status TINYINT NOT NULL DEFAULT 0, retry_count INT NOT NULL DEFAULT 0, \
             next_retry_at DATETIME(6) NULL, KEY (status), KEY (aggregate_type, aggregate_id)) DEFAULT CHARSET = utf8mb4",
        )
        .outbox("routing_key = \"{event_type}.{note}\"")
        .build()
        .await?;
    // The statement is ASCII: what the connection's character set is does not matter.
    let sql = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, note) VALUES \
         (_gbk 0xB6A9B5A5, _latin1 0xE980, _utf8mb4 0xF09F9880, _utf8mb4 0xE282ACF09F9880C3A9, _latin1 0x80), \
         (_gbk 0x61, _latin1 0x81, _utf8mb4 0x78, _utf8mb4 '', _latin1 0x7A)";
    let messages = both_paths(&mut world, 2, sql).await?;
    let first = &messages[0];
    ensure!(first.body == "€😀é".as_bytes(), "{}", seen(first));
    ensure!(first.routing_key == "😀.€", "{}", seen(first));
    ensure!(
        first.text("aggregate-id").as_deref() == Some("é€"),
        "{}",
        seen(first)
    );
    ensure!(
        first.text("aggregate-type").as_deref() == Some("订单"),
        "{}",
        seen(first)
    );
    Ok(())
}

#[tokio::test]
async fn json_is_the_servers_own_text_on_both_paths() -> Result<()> {
    let mut world = Setup::new().build().await?;
    let json = "JSON_OBJECT('bb', 1, 'a', CAST(105.10 AS DECIMAL(10,2)), 'd', 1.0, 'e', 1e0, 'f', 1e100, \
         't', CAST(TIMESTAMP '2026-01-31 08:00:00.123456' AS JSON), 'day', CAST(DATE '2026-01-31' AS JSON), \
         'time', CAST(TIME '-12:00:01.5' AS JSON), 'n', NULL, 'big', 18446744073709551615, 'neg', -9223372036854775808, \
         'text', CONCAT('\"', CHAR(9), CHAR(0), '/', _utf8mb4 0xF09F9880), 'blob', CAST(0x00FF AS BINARY), 'yes', TRUE, \
         'list', JSON_ARRAY(1, JSON_ARRAY(), JSON_OBJECT()))";
    let sql = format!(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers) VALUES \
         ('order', 'j', 'OrderPaid', {json}, \
          JSON_OBJECT('bb', 1, 'a', CAST(105.10 AS DECIMAL(10,2)), 'd', 1.0, 'big', 18446744073709551615, 'n', NULL, \
          'traceparent', '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01', 'list', JSON_ARRAY(1, 'x')))"
    );
    let messages = both_paths(&mut world, 1, &sql).await?;
    world.judge_table(0).await?;
    let body = String::from_utf8(messages[0].body.clone())?;
    ensure!(body.contains("\"a\": 105.10, \"d\": 1.0"), "{body}");
    Ok(())
}

#[tokio::test]
async fn statements_of_many_rows_survive_crashes_at_any_point() -> Result<()> {
    let mut world = Setup::new()
        .config("mysql.heartbeat = \"1s\"")
        .start()
        .await?;
    // Many rows in one event, then rows that need many events.
    let statements = [
        insert_many(3000, 10),
        insert_many(20, 400_000),
        insert_many(1500, 500),
    ];
    let mut crashes = 0;
    for sql in &statements {
        let before = world.sink.count();
        world.mysql.exec(sql).await?;
        let rows = world.mysql.count("SELECT COUNT(*) FROM outbox").await?;
        let some = [before + 1, before + 7];
        for enough in some {
            wait::until("a few more came", SOON, async || {
                world.sink.count() >= enough
            })
            .await
            .with_context(|| format!("{enough} {} {}", world.sink.count(), world.log_end()))?;
            world.crash().await?;
            crashes += 1;
        }
        wait::until("the statement is through", SOON, async || {
            u64::try_from(world.sink.ids().iter().collect::<HashSet<_>>().len())
                .is_ok_and(|n| n >= rows)
        })
        .await
        .with_context(|| world.log_end())?;
    }
    world.judge_table(crashes * WINDOW).await?;
    Ok(())
}
