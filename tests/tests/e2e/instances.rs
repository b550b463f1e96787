//! Several instances: who was replaced changes nothing any more, and two never publish side by side for long.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use outbox_e2e::{SOON, Setup, WINDOW, World};
use outbox_testkit::{Outboxd, Writer, WriterOptions, wait};

async fn leads(outboxd: &Outboxd, what: &str) -> Result<()> {
    wait::until(what, SOON, async || {
        matches!(outboxd.metric("outboxd_leader").await, Ok(1.0))
    })
    .await
    .with_context(|| outboxd.log())
}

/// A second instance, as an account of its own.
async fn second(world: &World) -> Result<Outboxd> {
    for sql in [
        "CREATE USER 'second'@'%' IDENTIFIED BY 'secret'",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON app.* TO 'second'@'%'",
        "GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO 'second'@'%'",
    ] {
        world.mysql.exec(sql).await?;
    }
    let config = world.config.clone();
    let mut second = Outboxd::new(config.set("mysql.url", world.mysql.url("second"))?)?;
    second.start().await?;
    second.wait_ready().await?;
    Ok(second)
}

#[tokio::test]
async fn a_leader_that_was_stopped_past_its_lease_changes_no_row_and_opens_no_dump() -> Result<()> {
    let mut world = Setup::new().start().await?;
    // Who changed which row, written by the server itself.
    for sql in [
        "CREATE TABLE audit (n BIGINT AUTO_INCREMENT PRIMARY KEY, id BIGINT, account VARCHAR(64))",
        "CREATE TRIGGER audited AFTER UPDATE ON outbox FOR EACH ROW \
         INSERT INTO audit (id, account) VALUES (NEW.id, SUBSTRING_INDEX(USER(), '@', 1))",
    ] {
        world.mysql.exec(sql).await?;
    }
    let second = second(&world).await?;
    let writer = Writer::start(&world.mysql, WriterOptions::default())?;
    world.sink.wait_for_count(200, SOON).await?;
    let changed = async |account: &str| {
        let query = format!("SELECT COUNT(*) FROM audit WHERE account = '{account}'");
        world.mysql.count(query).await
    };
    ensure!(changed("outboxd").await? > 0 && changed("second").await? == 0);

    world.outboxd.freeze()?;
    leads(&second, "the second takes over").await?;
    let came = world.sink.count();
    world.sink.wait_for_count(came + 200, SOON).await?;
    let (before, tailed) = (changed("outboxd").await?, world.times_logged("tailing"));
    world.outboxd.thaw()?;
    wait::until("the first has noticed", SOON, async || {
        matches!(world.outboxd.metric("outboxd_leader").await, Ok(0.0))
    })
    .await?;
    let came = world.sink.count();
    world.sink.wait_for_count(came + 1000, SOON).await?;
    ensure!(second.metric("outboxd_leader").await? == 1.0);
    let changes = changed("outboxd").await? - before;
    ensure!(
        changes == 0,
        "{changes} rows were changed by the one that was replaced"
    );
    ensure!(changed("second").await? > 1000);
    ensure!(
        world.times_logged("tailing") == tailed,
        "{}",
        world.log_end()
    );
    let dumps = "SELECT COUNT(*) FROM information_schema.processlist \
                 WHERE command LIKE 'Binlog Dump%' AND user = 'outboxd'";
    ensure!(
        world.mysql.count(dumps).await? == 0,
        "the old dump is still there"
    );
    world.judge(writer.finish().await?, WINDOW).await?;
    Ok(())
}

/// Samples both counters until `enough` samples are taken; returns in how many both had grown since the last.
async fn both_publish(first: &Outboxd, second: &Outboxd, enough: usize) -> usize {
    let metric = "outboxd_published_total{";
    let (mut last, mut both) = ([f64::MAX; 2], 0);
    for _ in 0..enough {
        let (a, b) = tokio::join!(first.metric(metric), second.metric(metric));
        // An instance that does not answer has not been seen to publish.
        let now = [a.unwrap_or(last[0]), b.unwrap_or(last[1])];
        both += usize::from(now[0] > last[0] && now[1] > last[1]);
        last = now;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    both
}

#[tokio::test]
async fn two_instances_do_not_publish_side_by_side_when_their_database_is_shaken() -> Result<()> {
    let mut world = Setup::new().start().await?;
    let second = second(&world).await?;
    let writer = Writer::start(&world.mysql, WriterOptions::default())?;
    world.sink.wait_for_count(100, SOON).await?;
    let mut both = 0;
    // Every session of the leader is killed, the lease's among them.
    for _ in 0..2 {
        let sessions: Vec<u64> = world
            .mysql
            .query_rows("SELECT id FROM information_schema.processlist WHERE user = 'outboxd'")
            .await?;
        ensure!(!sessions.is_empty());
        for id in sessions {
            // It may have ended by itself.
            let _ = world.mysql.exec(format!("KILL {id}")).await;
        }
        both += both_publish(&world.outboxd, &second, 40).await;
    }
    world.mysql.kill9()?;
    world.mysql.restart().await?;
    both += both_publish(&world.outboxd, &second, 60).await;
    // The leader hears nothing of its database for longer than its lease.
    world
        .to_mysql
        .black_hole(outbox_testkit::Direction::ToClient);
    both += both_publish(&world.outboxd, &second, 100).await;
    world.to_mysql.pass();
    both += both_publish(&world.outboxd, &second, 40).await;
    ensure!(
        both <= 5,
        "in {both} tenths of a second both have published"
    );
    let leaders = [&world.outboxd, &second];
    let mut leading = 0.0;
    for outboxd in leaders {
        leading += outboxd.metric("outboxd_leader").await?;
    }
    ensure!(leading == 1.0, "{leading} lead");
    world.judge(writer.finish().await?, 4 * WINDOW).await?;
    Ok(())
}
