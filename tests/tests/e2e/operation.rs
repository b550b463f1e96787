//! What an operator does and relies on: the end, take-over, commands, documents.

use std::time::Duration;

use anyhow::{Result, ensure};
use outbox_e2e::{SOON, Setup, WINDOW};
use outbox_testkit::{Outboxd, Writer, WriterOptions, wait};

#[tokio::test]
async fn sigterm_drains_and_ends_with_zero_and_nothing_comes_twice() -> Result<()> {
    let mut world = Setup::new().start().await?;
    let writer = Writer::start(&world.mysql, WriterOptions::default())?;
    world.sink.wait_for_count(200, SOON).await?;
    let status = world.outboxd.terminate().await?;
    ensure!(status.code() == Some(0), "{status}: {}", world.log_end());
    world.run().await?;
    let written = writer.finish_after(Duration::from_secs(1)).await?;
    world.judge(written, 0).await?;
    Ok(())
}

#[tokio::test]
async fn a_standby_takes_over_when_the_leader_is_killed() -> Result<()> {
    let mut world = Setup::new().start().await?;
    let mut standby = Outboxd::new(world.config.clone())?;
    standby.start().await?;
    standby.wait_ready().await?;
    ensure!(standby.metric("outboxd_leader").await? == 0.0);
    let writer = Writer::start(&world.mysql, WriterOptions::default())?;
    world.sink.wait_for_count(200, SOON).await?;
    world.outboxd.kill9()?;
    wait::until("the standby leads", Duration::from_secs(20), async || {
        matches!(standby.metric("outboxd_leader").await, Ok(1.0))
    })
    .await?;
    let came = world.sink.count();
    world.sink.wait_for_count(came + 200, SOON).await?;
    world.judge(writer.finish().await?, WINDOW).await?;
    Ok(())
}

#[tokio::test]
async fn a_failed_row_is_retried_and_an_abandoned_one_is_never_published() -> Result<()> {
    let world = Setup::new()
        .outbox("on_unroutable = \"fail\"\nmax_body = \"4KiB\"")
        .start()
        .await?;
    let insert = |id: u32| {
        format!(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) \
             VALUES ({id}, 'order', 'big{id}', 'OrderPaid', JSON_OBJECT('pad', REPEAT('x', 8000)))"
        )
    };
    for id in 1..=2 {
        world.mysql.exec(insert(id)).await?;
    }
    let failed = "SELECT COUNT(*) FROM outbox WHERE status = 2 AND last_error <> ''";
    wait::until("both rows failed", SOON, async || {
        matches!(world.mysql.count(failed).await, Ok(2))
    })
    .await?;
    let listed = world
        .outboxd
        .ok(&["list", "--status", "failed", "--json"])
        .await?;
    let listed: serde_json::Value = serde_json::from_str(&listed)?;
    ensure!(
        listed.as_array().is_some_and(|rows| rows.len() == 2),
        "{listed}"
    );

    // The cause is mended for both; one is given up all the same.
    world
        .mysql
        .exec("UPDATE outbox SET payload = JSON_OBJECT('small', id)")
        .await?;
    world.outboxd.ok(&["abandon", "2"]).await?;
    let out = world.outboxd.ok(&["retry", "--all-failed"]).await?;
    ensure!(out.contains('1'), "one row was retried: {out}");
    world.sink.wait_for_ids(["1"], SOON).await?;
    let nothing = world.outboxd.cli(&["retry", "2"]).await?;
    ensure!(nothing.code == Some(1), "{nothing:?}");
    wait::until("row 1 is sent", SOON, async || {
        matches!(
            world
                .mysql
                .count("SELECT COUNT(*) FROM outbox WHERE (id, status) IN ((1, 1), (2, 4))")
                .await,
            Ok(2)
        )
    })
    .await?;
    // A later row of another aggregate shows that the poller has been past the abandoned one.
    world.mysql.exec("INSERT INTO outbox (id, aggregate_id, event_type, payload) VALUES (3, 'c', 'OrderPaid', '{}')").await?;
    world.outboxd.ok(&["sweep"]).await?;
    world.sink.wait_for_ids(["3"], SOON).await?;
    ensure!(world.sink.ids() == ["1", "3"], "{:?}", world.sink.ids());
    Ok(())
}
