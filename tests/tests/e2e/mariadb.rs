//! What is MariaDB's own: GTID lists, and compressed events.

use anyhow::{Context, Result, ensure};
use outbox_e2e::{SOON, Setup, WINDOW, insert_many};
use outbox_testkit::{Mariadb, MysqlOptions, Outboxd, OutboxdConfig, wait};

#[tokio::test]
async fn a_promoted_replica_is_gone_on_with_at_the_stored_position() -> Result<()> {
    let mut world = Setup::mariadb()
        .mysql("--gtid-strict-mode=ON")
        .start()
        .await?;
    let options = ["--gtid-strict-mode=ON", "--log-slave-updates=ON"];
    let options = options
        .into_iter()
        .fold(MysqlOptions::default(), MysqlOptions::option);
    let replica = Mariadb::start(options).await?;
    replica.replica_of(&world.mysql).await?;
    world.insert(20).await?;
    world.judge_table(0).await?;
    let status = world.outboxd.terminate().await?;
    ensure!(status.code() == Some(0), "{}", world.log_end());
    // The first server has the rows, and nobody publishes them, when it dies.
    world.insert(10).await?;
    replica.caught_up_with(&world.mysql, SOON).await?;
    replica.exec("STOP SLAVE").await?;
    replica.exec("RESET SLAVE ALL").await?;
    world.mysql.kill9()?;

    let id = replica.server_id();
    world.mysql = replica;
    let config: OutboxdConfig = world
        .config
        .clone()
        .set("mysql.url", world.mysql.url("outboxd"))?;
    world.outboxd = Outboxd::new(config)?;
    world.run().await?;
    world.insert(10).await?;
    world.judge_table(0).await?;
    ensure!(world.sink.count() == 40, "{}", world.sink.count());
    let gaps = "SELECT COUNT(*) FROM outboxd_gap";
    ensure!(world.mysql.count(gaps).await? == 0, "{}", world.log_end());
    let tailed = "outboxd_published_total{table=\"app.outbox\",path=\"tail\"}";
    let tailed = world.outboxd.metric(tailed).await?;
    ensure!(tailed == 20.0, "{tailed} by the tail: {}", world.log_end());
    wait::until_ok("the position is the new server's", SOON, async || {
        let position = world.position().await?;
        ensure!(position.starts_with(&format!("gtid 0-{id}-")), "{position}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_operator_sets_the_position_by_list_and_by_file() -> Result<()> {
    let mut world = Setup::mariadb().start().await?;
    world.insert(5).await?;
    world.judge_table(0).await?;
    world.outboxd.terminate().await?;
    let position = world.position().await?;
    let (list, file) = position
        .strip_prefix("gtid ")
        .and_then(|p| p.strip_suffix(')')?.split_once(" ("))
        .context(position.clone())?;
    let (file, pos) = file.split_once(':').context(position.clone())?;
    for wrong in [
        "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5",
        "0-1",
        "0-1-99999",
    ] {
        let set = world
            .outboxd
            .cli(&["position", "set", "--gtid", wrong])
            .await?;
        ensure!(set.code == Some(1), "{wrong}: {}", set.stderr);
    }
    for set in [
        vec!["position", "set", "--gtid", list],
        vec!["position", "set", "--file", file, "--pos", pos],
    ] {
        world.outboxd.ok(&set).await?;
        world.run().await?;
        world.insert(5).await?;
        world.judge_table(WINDOW).await?;
        wait::until_ok("the position is a list again", SOON, async || {
            let position = world.position().await?;
            ensure!(position.starts_with("gtid 0-"), "{position}");
            Ok(())
        })
        .await
        .map_err(|error| error.context(world.log_end()))?;
        world.outboxd.terminate().await?;
    }
    let status = world.outboxd.status().await?;
    ensure!(
        status["gaps"].as_array().is_some_and(Vec::is_empty),
        "{status}"
    );
    Ok(())
}

#[tokio::test]
async fn compressed_events_arrive_like_any_other() -> Result<()> {
    let world = Setup::mariadb()
        .mysql("--log-bin-compress=ON")
        .mysql("--log-bin-compress-min-len=10")
        .start()
        .await?;
    world.mysql.exec(insert_many(1_500, 1_000)).await?;
    world.insert(20).await?;
    world.judge_table(0).await?;
    let tailed = "outboxd_published_total{table=\"app.outbox\",path=\"tail\"}";
    let tailed = world.outboxd.metric(tailed).await?;
    ensure!(
        tailed == 1520.0,
        "{tailed} by the tail: {}",
        world.log_end()
    );
    Ok(())
}
