//! The broker crashes, loses a binding, or blocks.

use std::time::Duration;

use anyhow::{Result, ensure};
use lapin::types::FieldTable;
use outbox_e2e::{SOON, Setup, WINDOW};
use outbox_testkit::{Writer, WriterOptions, rabbit, wait};

#[tokio::test]
async fn a_broker_that_is_killed_again_and_again_loses_nothing() -> Result<()> {
    let mut world = Setup::new().own_broker().start().await?;
    let writer = Writer::start(&world.mysql, WriterOptions::default())?;
    let crashes = 2;
    for _ in 0..crashes {
        let came = world.sink.count();
        world.sink.wait_for_count(came + 200, SOON).await?;
        let broker = world.own_rabbit()?;
        broker.kill9()?;
        broker.restart().await?;
    }
    let came = world.sink.count();
    world.sink.wait_for_count(came + 200, SOON).await?;
    let written = writer.finish().await?;
    world.judge(written, crashes * WINDOW).await?;
    let charged = "SELECT COUNT(*) FROM outbox WHERE retry_count > 0";
    ensure!(world.mysql.count(charged).await? == 0);
    Ok(())
}

#[tokio::test]
async fn rows_whose_binding_is_gone_are_retried_until_it_is_back() -> Result<()> {
    let world = Setup::new()
        .config("retry = { base = \"1s\", factor = 1.0, cap = \"1s\", max_retries = 50 }")
        .start()
        .await?;
    let writer = Writer::start(
        &world.mysql,
        WriterOptions {
            rate: 100.0,
            ..WriterOptions::default()
        },
    )?;
    world.sink.wait_for_count(50, SOON).await?;
    let name = world.name.as_str();
    world
        .rabbit
        .with_channel(async |channel| {
            channel
                .queue_unbind(name.into(), name.into(), "#".into(), FieldTable::default())
                .await?;
            Ok(())
        })
        .await?;
    let returned =
        "SELECT COUNT(*) FROM outbox WHERE status <> 1 AND retry_count > 0 AND last_error <> ''";
    wait::until("rows are refused and stay", SOON, async || {
        matches!(world.mysql.count(returned).await, Ok(10..))
    })
    .await?;
    // What is marked as sent has come: nothing vanished in the exchange.
    let sent = world
        .mysql
        .count("SELECT COUNT(*) FROM outbox WHERE status = 1")
        .await?;
    world
        .sink
        .wait_for_count(usize::try_from(sent)?, SOON)
        .await?;
    world
        .rabbit
        .with_channel(async |channel| rabbit::bind(channel, name, name, "#").await)
        .await?;
    let written = writer.finish_after(Duration::from_secs(1)).await?;
    world.judge(written, 0).await?;
    Ok(())
}

#[tokio::test]
async fn sigterm_while_the_broker_blocks_ends_within_the_deadline_and_loses_nothing() -> Result<()>
{
    let mut world = Setup::new().own_broker().start().await?;
    world.insert(20).await?;
    world.all_sent().await?;
    world.rabbit.ctl(&["set_disk_free_limit", "1000GB"]).await?;
    world.insert(2 * u32::try_from(WINDOW)?).await?;
    wait::until("the broker blocks", SOON, async || {
        matches!(
            world.outboxd.metric("outboxd_broker_blocked").await,
            Ok(1.0)
        )
    })
    .await?;
    ensure!(world.outboxd.get("/livez").await?.status == 200);
    let since = tokio::time::Instant::now();
    let status = world.outboxd.terminate().await?;
    ensure!(
        since.elapsed() < Duration::from_secs(25),
        "took {:?}",
        since.elapsed()
    );
    ensure!(status.code() == Some(0), "{status}: {}", world.log_end());
    world.rabbit.ctl(&["set_disk_free_limit", "1MB"]).await?;
    world.run().await?;
    world.judge_table(WINDOW).await?;
    Ok(())
}
