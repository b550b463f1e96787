//! The poller alone, and beside the tail.

use std::time::Duration;

use anyhow::{Result, ensure};
use outbox_e2e::{SOON, Setup, WINDOW, insert};
use outbox_testkit::{Writer, WriterOptions, wait};

#[tokio::test]
async fn turning_tail_and_poller_on_and_off_under_load_loses_nothing() -> Result<()> {
    let mut world = Setup::new()
        // What a killed poller has claimed is free once its claims have run out.
        .config("poller.pending_grace = \"1s\"\npoller.lock_ttl = \"10s\"")
        .start()
        .await?;
    let writer = Writer::start(&world.mysql, WriterOptions::default())?;
    let modes = [
        (false, true),
        (true, false),
        (true, true),
        (false, true),
        (true, true),
    ];
    for (n, (tail, poller)) in modes.into_iter().enumerate() {
        let came = world.sink.count();
        world.sink.wait_for_count(came + 200, SOON).await?;
        if n % 2 == 0 {
            world.outboxd.kill9()?;
        } else {
            let status = world.outboxd.terminate().await?;
            ensure!(status.code() == Some(0), "{status}: {}", world.log_end());
        }
        world
            .outboxd
            .env("OUTBOXD__TAIL__ENABLED", &tail.to_string());
        world
            .outboxd
            .env("OUTBOXD__POLLER__ENABLED", &poller.to_string());
        world.run().await?;
        let path = if tail { "tail" } else { "poller" };
        let metric = format!("outboxd_published_total{{table=\"app.outbox\",path=\"{path}\"}}");
        wait::until(
            "rows take the path that is on",
            SOON,
            async || matches!(world.outboxd.metric(&metric).await, Ok(rows) if rows > 100.0),
        )
        .await
        .map_err(|error| error.context(world.log_end()))?;
    }
    let written = writer.finish().await?;
    world.judge(written, modes.len() * WINDOW).await?;
    Ok(())
}

#[tokio::test]
async fn a_first_start_on_a_large_table_of_sent_rows_publishes_none_of_them() -> Result<()> {
    let mut world = Setup::new()
        .config("tail.enabled = false\npoller.pending_grace = \"1s\"\npoller.interval = \"200ms\"")
        .build()
        .await?;
    for _ in 0..4 {
        let rows = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status) \
            SELECT /*+ SET_VAR(cte_max_recursion_depth = 100000) */ 'order', CONCAT('o', n % 1000), 'OrderPaid', \
            JSON_OBJECT('n', n), 1 FROM (WITH RECURSIVE seq (n) AS \
            (SELECT 1 UNION ALL SELECT n + 1 FROM seq WHERE n < 50000) SELECT n FROM seq) AS numbers";
        world.mysql.exec(rows).await?;
    }
    world.run().await?;
    // Dozens of polls.
    tokio::time::sleep(Duration::from_secs(8)).await;
    ensure!(world.sink.count() == 0, "{} came", world.sink.count());
    ensure!(world.outboxd.metric("outboxd_published_total{").await? == 0.0);
    let since = tokio::time::Instant::now();
    for n in 0..20 {
        world.mysql.exec(insert(n)).await?;
    }
    world.sink.wait_for_count(20, SOON).await?;
    let took = since.elapsed();
    ensure!(took < Duration::from_secs(10), "new rows took {took:?}");
    world.all_sent().await?;
    ensure!(world.sink.count() == 20, "{} came", world.sink.count());
    Ok(())
}
