//! Order per aggregate, to the letter, and ids that commit late.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lapin::types::FieldTable;
use mysql_async::prelude::Queryable;
use outbox_e2e::{SOON, Setup, WINDOW, World, insert_many};
use outbox_testkit::{Outboxd, rabbit, wait};

#[tokio::test]
async fn a_low_id_that_commits_late_is_found_by_polling_alone() -> Result<()> {
    let world = Setup::new()
        .config("tail.enabled = false\npoller.pending_grace = \"1s\"\npoller.interval = \"500ms\"")
        .start()
        .await?;
    let mut late = world.mysql.conn().await?;
    late.query_drop("BEGIN").await?;
    late.query_drop(
        "INSERT INTO outbox (aggregate_id, event_type, payload) VALUES ('late', 'OrderPaid', '{\"late\": true}')",
    )
    .await?;
    let id = late.last_insert_id().context("no id")?.to_string();
    let held = tokio::time::Instant::now() + Duration::from_secs(30);
    world.mysql.exec(insert_many(500, 0)).await?;
    world.all_sent().await?;
    // Many polls pass while the low id is not there.
    tokio::time::sleep_until(held).await;
    ensure!(world.sink.count() == 500);
    late.query_drop("COMMIT").await?;
    world.sink.wait_for_ids([id], SOON).await?;
    world.judge_table(0).await?;
    Ok(())
}

/// The one of both that leads.
async fn leader<'a>(world: &'a mut World, other: &'a mut Outboxd) -> Result<&'a mut Outboxd> {
    let mut first = false;
    wait::until("one leads", SOON, async || {
        first = matches!(world.outboxd.metric("outboxd_leader").await, Ok(1.0));
        first || matches!(other.metric("outboxd_leader").await, Ok(1.0))
    })
    .await?;
    Ok(if first { &mut world.outboxd } else { other })
}

async fn bound(world: &World, yes: bool) -> Result<()> {
    let name = world.name.as_str();
    let change = world.rabbit.with_channel(async |channel| {
        if yes {
            return rabbit::bind(channel, name, name, "#").await;
        }
        channel
            .queue_unbind(name.into(), name.into(), "#".into(), FieldTable::default())
            .await?;
        Ok(())
    });
    change.await
}

#[tokio::test]
async fn strict_order_survives_refusals_and_crashes_to_the_letter() -> Result<()> {
    let mut world = Setup::new()
        .config("retry = { base = \"1s\", factor = 1.0, cap = \"1s\", max_retries = 500 }")
        // A claim of one that was killed holds its row, and with it the aggregate, until it expires.
        .config("poller.lock_ttl = \"3s\"")
        .outbox("ordering = \"strict\"")
        .start()
        .await?;
    let mut other = Outboxd::new(world.config.clone())?;
    other.start().await?;
    other.wait_ready().await?;
    let rounds = 5;
    for round in 0..rounds {
        let came = world.sink.count();
        for _ in 0..10 {
            world.mysql.exec(insert_many(100, 0)).await?;
        }
        let part = rand::random_range(50..400);
        world.sink.wait_for_count(came + part, SOON).await?;
        bound(&world, false).await?;
        let refused = "SELECT COUNT(*) FROM outbox WHERE status <> 1 AND retry_count > 0";
        wait::until("rows are refused", SOON, async || {
            matches!(world.mysql.count(refused).await, Ok(1..))
        })
        .await
        .with_context(|| world.log_end())?;
        // Killed while rows are held, or only after they may go on.
        let early = round % 2 == 0;
        if !early {
            bound(&world, true).await?;
        }
        let victim = leader(&mut world, &mut other).await?;
        victim.kill9()?;
        victim.start().await?;
        if early {
            bound(&world, true).await?;
        }
    }
    ensure!(world.mysql.count("SELECT COUNT(*) FROM outbox").await? == 5000);
    world
        .judge_table(rounds * WINDOW)
        .await
        .with_context(|| other.log())?;
    Ok(())
}
