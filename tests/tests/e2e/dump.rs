//! The replication stream: dead links are found, idle ones left alone, back-pressure is planned.

use std::time::Duration;

use anyhow::{Result, ensure};
use outbox_e2e::{SOON, Setup, WINDOW, insert_many, on_both};
use outbox_testkit::{Direction, wait};

on_both!(a_silent_link_is_given_up_within_three_heartbeats_and_an_idle_one_is_kept,);

async fn a_silent_link_is_given_up_within_three_heartbeats_and_an_idle_one_is_kept(
    setup: Setup,
) -> Result<()> {
    let world = setup
        .config("mysql.heartbeat = \"1s\"\nlease.ttl = \"30s\"")
        .start()
        .await?;
    world.insert(5).await?;
    world.judge_table(0).await?;
    // Ten heartbeats without an event: nothing is to happen, so only time can show it.
    let dumps = "SELECT GROUP_CONCAT(id) FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'";
    let dump = world.mysql.first::<Option<String>>(dumps).await?;
    tokio::time::sleep(Duration::from_secs(10)).await;
    ensure!(
        world.mysql.first::<Option<String>>(dumps).await? == dump,
        "{}",
        world.log_end()
    );
    ensure!(
        world.times_logged("the stream is lost") == 0,
        "{}",
        world.log_end()
    );

    world.to_mysql.black_hole(Direction::ToClient);
    let since = tokio::time::Instant::now();
    world.logged("the stream is lost", 1).await?;
    let took = since.elapsed();
    // Three periods, and what a loaded machine needs.
    ensure!(took < Duration::from_secs(8), "noticed after {took:?}");
    world.mysql.exec(insert_many(20, 0)).await?;
    world.to_mysql.pass();
    world.judge_table(WINDOW).await?;

    let lost = world.times_logged("the stream is lost");
    world.logged("tailing", 2).await?;
    wait::until(
        "the old dump is gone and the new one is killed",
        SOON,
        async || {
            matches!(world.kill_dump().await, Ok(1..))
                && world.times_logged("the stream is lost") > lost
        },
    )
    .await?;
    world.insert(20).await?;
    world.judge_table(WINDOW).await?;
    Ok(())
}

#[tokio::test]
async fn a_blocked_broker_and_much_data_make_one_planned_pause_of_the_dump() -> Result<()> {
    let world = Setup::new()
        .own_broker()
        .mysql("--net-write-timeout=5")
        .config("rabbitmq.max_in_flight_bytes = \"2MiB\"")
        .outbox("max_body = \"1MiB\"")
        .start()
        .await?;
    world.rabbit.ctl(&["set_disk_free_limit", "1000GB"]).await?;
    for _ in 0..8 {
        world.mysql.exec(insert_many(40, 100_000)).await?;
    }
    world
        .logged("closing the dump until there is room", 1)
        .await?;
    // Longer than the server would wait for a reader.
    tokio::time::sleep(Duration::from_secs(7)).await;
    ensure!(world.outboxd.get("/livez").await?.status == 200);
    ensure!(world.outboxd.metric("outboxd_broker_blocked").await? == 1.0);
    ensure!(
        world.times_logged("closing the dump") == 1,
        "{}",
        world.log_end()
    );
    world.rabbit.ctl(&["set_disk_free_limit", "1MB"]).await?;
    world.judge_table(0).await?;
    ensure!(
        world.times_logged("the stream is lost") == 0,
        "{}",
        world.log_end()
    );
    ensure!(
        world.times_logged("closing the dump") == 1,
        "{}",
        world.log_end()
    );
    Ok(())
}
