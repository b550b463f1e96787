//! Claims at volume: nobody gets what another has, and the cost follows the rows returned.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod claims_world;

use std::collections::HashSet;
use std::time::Duration;

use anyhow::Result;
use claims_world::*;
use outbox_core::ports::{Cursor, PollStore, Scan};
use outbox_core::row::RowKey;
use outbox_testkit::{Mysql, MysqlOptions};

#[tokio::test]
async fn two_claimers_never_get_the_same_row() -> Result<()> {
    let world = World::mysql().await?;
    let store = world.store(&[spec("outbox")]).await?;
    fill(&world, 5000, "0").await?;
    let keys: Vec<RowKey> = (1..=5000).map(key).collect();
    let claimer = |from: usize| {
        let (store, keys) = (&store, &keys);
        async move {
            let mut ours = Vec::new();
            // Both start from different ends, and meet in the middle.
            let mut chunks: Vec<&[RowKey]> = keys.chunks(100).collect();
            if from == 1 {
                chunks.reverse();
            }
            for chunk in chunks {
                ours.extend(store.claim(T0, chunk).await?.1);
            }
            anyhow::Ok(ours)
        }
    };
    let (one, two) = tokio::try_join!(claimer(0), claimer(1))?;
    assert!(!one.is_empty() && !two.is_empty());
    let both: HashSet<_> = one.iter().chain(&two).collect();
    assert_eq!(both.len(), one.len() + two.len(), "a row was claimed twice");
    assert_eq!(both.len(), 5000, "a row was claimed by nobody");
    Ok(())
}

/// `rows` rows of `status`, in fifty aggregates.
async fn fill(world: &World, rows: u64, status: &str) -> Result<()> {
    let mut conn = world.open().await?;
    let first = format!(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status) \
         VALUES ('order', 'a0', 'Paid', '{{}}', {status})"
    );
    let start = world
        .server
        .count("SELECT COALESCE(MAX(id), 0) FROM outbox")
        .await?;
    say(&mut conn, first).await?;
    let mut have = 1;
    while have < rows {
        let more = have.min(rows - have).min(50_000);
        say(&mut conn, format!(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, status) \
             SELECT @n := @n + 1, 'order', CONCAT('a', @n % 50), 'Paid', '{{}}', {status} \
             FROM (SELECT @n := {}) x, outbox ORDER BY outbox.id LIMIT {more}",
            start + have
        ))
        .await?;
        have += more;
    }
    say(
        &mut conn,
        format!("ALTER TABLE outbox AUTO_INCREMENT = {}", start + rows + 1),
    )
    .await?;
    Ok(())
}

/// Rows that the server touched for `work`, on the one connection of the pool.
async fn touched<T>(world: &World, work: impl Future<Output = T>) -> Result<(T, i64)> {
    let count = async || {
        let sum = "SELECT CAST(SUM(VARIABLE_VALUE) AS SIGNED) FROM \
                   performance_schema.session_status WHERE VARIABLE_NAME LIKE 'Handler_read%'";
        let mut session = world.db.session().await?;
        let n: i64 = sqlx::query_scalar(sum).fetch_one(&mut *session).await?;
        session.finish();
        anyhow::Ok(n)
    };
    // What the question itself touches is found by asking twice.
    let (first, before) = (count().await?, count().await?);
    let done = work.await;
    let after = count().await?;
    Ok((done, (after - before) - (before - first)))
}

#[tokio::test]
async fn the_cost_follows_the_rows_returned_at_a_million_sent_rows() -> Result<()> {
    let options = [
        "--innodb-flush-log-at-trx-commit=0",
        "--sync-binlog=0",
        "--skip-log-bin",
    ]
    .into_iter()
    .fold(MysqlOptions::without_gtid(), MysqlOptions::option);
    let mut world = World::on(Mysql::start(options).await?).await?;
    world.db = one_connection(&world.server);
    fill(&world, 600_000, "1").await?;
    fill(&world, 100_000, "0").await?;
    fill(&world, 400_000, "1").await?;
    let server = &world.server;
    server.exec("UPDATE outbox SET status = 0, retry_count = 1, next_retry_at = NOW(6) - INTERVAL 1 SECOND WHERE id IN (5, 500005, 650005)").await?;
    server.exec("UPDATE outbox SET status = 3, locked_by = 'x', locked_until = NOW(6) - INTERVAL 1 SECOND WHERE id IN (6, 500006)").await?;
    // The server counts by itself, but some seconds later.
    server.exec("ANALYZE TABLE outbox").await?;
    let store = world.store(&[spec("outbox")]).await?;
    store.scan(T0, &Scan::Due, 1).await?; // reads the indexes

    let (rows, cost) = touched(&world, store.scan(T0, &Scan::Due, 100)).await?;
    assert_eq!(rows?.len(), 5);
    assert!(cost < 200, "due: {cost}");
    let (rows, cost) = touched(&world, store.scan(T0, &LEFT_BEHIND, 100)).await?;
    assert_eq!(rows?.len(), 100);
    assert!(cost < 2000, "left behind: {cost}");
    let after = Some(Cursor {
        created_at: None,
        key: key(650_000),
    });
    let (rows, cost) = touched(&world, store.scan(T0, &Scan::Pending { after }, 100)).await?;
    assert_eq!(ids(rows?.iter().map(|(_, r)| r))[0], "650001");
    assert!(cost < 1000, "sweep: {cost}");
    let aggregates = [aggregate("order", "a7"), aggregate("order", "nobody")];
    let (rows, cost) = touched(&world, store.unsettled(T0, &aggregates, 10)).await?;
    assert_eq!(rows?.len(), 10);
    assert!(cost < 200, "unsettled: {cost}");
    let keys: Vec<RowKey> = (650_100..650_200).map(key).collect();
    let (claimed, cost) = touched(&world, store.claim(T0, &keys)).await?;
    assert_eq!(claimed?.1.len(), 100);
    assert!(cost < 1000, "claim: {cost}");
    let (purged, cost) =
        touched(&world, store.purge(T0, Duration::from_secs(86_400), 1000)).await?;
    assert_eq!(purged?, 0);
    assert!(cost < 100, "purge: {cost}");
    let (report, cost) = touched(
        &world,
        store.patrol(T0, Duration::ZERO, Duration::from_secs(60)),
    )
    .await?;
    assert_eq!(report?.reset, 0);
    assert!(cost < 1000, "patrol: {cost}");
    Ok(())
}
