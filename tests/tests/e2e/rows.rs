//! Rows and their statuses while the application or the broker is in the way.

use std::time::Duration;

use anyhow::{Result, ensure};
use mysql_async::prelude::Queryable;
use outbox_e2e::{SOON, Setup, on_both};
use outbox_testkit::wait;

on_both!(rows_that_the_application_locks_are_recorded_once_released_and_never_sent_twice,);

async fn rows_that_the_application_locks_are_recorded_once_released_and_never_sent_twice(
    setup: Setup,
) -> Result<()> {
    let world = setup.start().await?;
    let mut conn = world.mysql.conn().await?;
    world.mysql.exec("INSERT INTO outbox (id, aggregate_id, event_type, payload) VALUES (1000, 'far', 'OrderPaid', '{}')").await?;
    world.all_sent().await?;
    // The rows are locked before anybody can record them: by the transaction's successor on the same keys.
    world.outboxd.ok(&["pause"]).await?;
    world.insert(50).await?;
    conn.query_drop("BEGIN").await?;
    let locked: Vec<u64> = conn
        .query(
            // By the key: a scan of another index and a sort would lock all of them.
            "SELECT id FROM outbox FORCE INDEX (PRIMARY) WHERE status = 0 AND id > 1000 \
             ORDER BY id LIMIT 20 FOR UPDATE",
        )
        .await?;
    ensure!(locked.len() == 20);
    world.outboxd.ok(&["resume"]).await?;
    world.sink.wait_for_count(51, SOON).await?;
    wait::until("the others are recorded meanwhile", SOON, async || {
        matches!(
            world
                .mysql
                .count("SELECT COUNT(*) FROM outbox WHERE status = 1")
                .await,
            Ok(31)
        )
    })
    .await
    .map_err(|e| e.context(world.log_end()))?;
    // Several lock wait timeouts of 2 s, polls and lease renewals pass.
    tokio::time::sleep(Duration::from_secs(8)).await;
    ensure!(world.duplicates() == 0, "{} copies", world.duplicates());
    conn.query_drop("COMMIT").await?;
    world.judge_table(0).await?;
    Ok(())
}

#[tokio::test]
async fn an_outage_of_the_broker_spends_no_retries_and_fails_no_row() -> Result<()> {
    let world = Setup::new()
        .config("retry = { base = \"1s\", max_retries = 1 }\npoller.pending_grace = \"1s\"")
        .start()
        .await?;
    world.to_broker.refuse();
    world.to_broker.cut();
    wait::until("the broker is away", SOON, async || {
        matches!(
            world.outboxd.metric("outboxd_broker_connected").await,
            Ok(0.0)
        )
    })
    .await?;
    for _ in 0..4 {
        world.mysql.exec(outbox_e2e::insert_many(500, 0)).await?;
    }
    world.insert(100).await?;
    // Longer than grace, retries and several attempts to connect.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let charged = "SELECT COUNT(*) FROM outbox WHERE retry_count > 0 OR status = 2";
    ensure!(world.mysql.count(charged).await? == 0);
    let ready = world.outboxd.get("/readyz").await?;
    ensure!(ready.status == 503, "{}", ready.body);
    world.to_broker.pass();
    world.judge_table(0).await?;
    ensure!(world.mysql.count(charged).await? == 0);
    Ok(())
}
