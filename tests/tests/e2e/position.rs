//! The stored position: it moves when it may, never past an unsettled row, and losing it loses no row.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mysql_async::prelude::Queryable;
use outbox_e2e::{SOON, Setup, WINDOW, World, insert, insert_many, on_both};
use outbox_testkit::{Direction, Writer, WriterOptions, wait};

on_both!(
    a_lost_position_is_recorded_as_a_gap_and_every_row_is_swept,
    a_crash_in_the_middle_of_one_big_transaction_loses_nothing_of_it,
    killed_dumps_lose_nothing_around_savepoints_and_create_select,
    a_first_start_under_load_that_crashes_at_once_delivers_every_row,
);

/// The stored GTID set as the server understands it.
async fn stored_set(world: &World) -> Result<String> {
    let printed = world.position().await?;
    let set = printed.strip_prefix("gtid ").context(printed.clone())?;
    Ok(set.to_owned())
}

/// Begins a new binlog and returns its name.
async fn new_log(world: &World) -> Result<String> {
    world.mysql.exec("FLUSH BINARY LOGS").await?;
    let logs: Vec<mysql_async::Row> = world.mysql.query_rows("SHOW BINARY LOGS").await?;
    logs.last().and_then(|row| row.get(0)).context("no binlog")
}

/// Removes every binlog before this one. MariaDB keeps a file until its engines have no more need of it.
async fn purge_to(world: &World, log: &str) -> Result<()> {
    wait::until("the older binlogs are gone", SOON, async || {
        let purged = world
            .mysql
            .exec(format!("PURGE BINARY LOGS TO '{log}'"))
            .await;
        let logs = world
            .mysql
            .query_rows::<mysql_async::Row>("SHOW BINARY LOGS")
            .await;
        purged.is_ok() && logs.is_ok_and(|logs| logs.len() == 1)
    })
    .await
}

async fn executed(world: &World) -> Result<String> {
    let set = world
        .mysql
        .first("SELECT REPLACE(@@gtid_executed, '\n', '')")
        .await?;
    set.context("no set")
}

#[tokio::test]
async fn a_quiet_outbox_on_a_busy_server_keeps_its_position_from_being_purged() -> Result<()> {
    let mut world = Setup::new().start().await?;
    world
        .mysql
        .exec("CREATE TABLE noise (id INT AUTO_INCREMENT PRIMARY KEY, n INT)")
        .await?;
    world.insert(5).await?;
    world.all_sent().await?;
    let mut newest = String::new();
    // Three times in a row the position has to catch up with what the server had executed before.
    for _ in 0..3 {
        for _ in 0..20 {
            world.mysql.exec("INSERT INTO noise (n) VALUES (1)").await?;
        }
        newest = new_log(&world).await?;
        let executed = executed(&world).await?;
        wait::until_ok(
            "the position moves without outbox rows",
            Duration::from_secs(20),
            async || {
                let stored = stored_set(&world).await?;
                let there = world
                    .mysql
                    .count(format!("SELECT GTID_SUBSET('{executed}', '{stored}')"))
                    .await?;
                ensure!(there == 1, "stored {stored} of {executed}");
                anyhow::Ok(())
            },
        )
        .await?;
    }
    world.outboxd.kill9()?;
    world
        .mysql
        .exec(format!("PURGE BINARY LOGS TO '{newest}'"))
        .await?;
    world.run().await?;
    world.insert(5).await?;
    world.judge_table(WINDOW).await?;
    ensure!(
        world
            .mysql
            .count("SELECT COUNT(*) FROM outboxd_gap")
            .await?
            == 0
    );
    Ok(())
}

async fn a_lost_position_is_recorded_as_a_gap_and_every_row_is_swept(setup: Setup) -> Result<()> {
    let mut world = setup.start().await?;
    world.insert(5).await?;
    world.all_sent().await?;
    let status = world.outboxd.terminate().await?;
    ensure!(status.code() == Some(0), "{}", world.log_end());
    world.insert(50).await?;
    world.mysql.exec("FLUSH BINARY LOGS").await?;
    world.insert(50).await?;
    let newest = new_log(&world).await?;
    purge_to(&world, &newest).await?;
    world.outboxd.start().await?;
    world.judge_table(0).await?;
    // It works, and says that it is not well until somebody has looked.
    let status = world.outboxd.status().await?;
    ensure!(
        status["gaps"]
            .as_array()
            .is_some_and(|gaps| gaps.len() == 1),
        "{status}"
    );
    wait::until("the gap is in the metrics", SOON, async || {
        matches!(world.outboxd.metric("outboxd_binlog_gaps").await, Ok(1.0))
    })
    .await?;
    let ready = world.outboxd.get("/readyz").await?;
    ensure!(ready.status == 503, "{}", ready.body);
    world.outboxd.ok(&["ack-gap"]).await?;
    world.outboxd.wait_ready().await?;
    // The tail is at work again.
    let before = world
        .outboxd
        .metric("outboxd_published_total{table=\"app.outbox\",path=\"tail\"}")
        .await?;
    world.insert(5).await?;
    world.judge_table(0).await?;
    let after = world
        .outboxd
        .metric("outboxd_published_total{table=\"app.outbox\",path=\"tail\"}")
        .await?;
    ensure!(after >= before + 5.0, "{before} {after}");
    Ok(())
}

async fn a_crash_in_the_middle_of_one_big_transaction_loses_nothing_of_it(
    setup: Setup,
) -> Result<()> {
    let mut world = setup.start().await?;
    world.mysql.exec(insert_many(4000, 2000)).await?;
    world.sink.wait_for_count(500, SOON).await?;
    // No further message arrives: the crash meets it in the middle, after the stream was lost too.
    world.to_broker.black_hole(Direction::ToServer);
    world.kill_dump().await?;
    world.outboxd.kill9()?;
    let came = world.sink.count();
    ensure!(came < 4000, "the crash comes too late to prove anything");
    world.to_broker.pass();
    world.run().await?;
    world.judge_table(4000).await?;
    Ok(())
}

async fn killed_dumps_lose_nothing_around_savepoints_and_create_select(setup: Setup) -> Result<()> {
    let mut world = setup.start().await?;
    world.to_broker.black_hole(Direction::ToServer);
    let mut conn = world.mysql.conn().await?;
    conn.query_drop("BEGIN").await?;
    conn.query_drop(insert(0)).await?;
    conn.query_drop("SAVEPOINT s").await?;
    for n in 1..200 {
        conn.query_drop(insert(n)).await?;
    }
    conn.query_drop("COMMIT").await?;
    wait::until("the first transaction is in the window", SOON, async || {
        matches!(
            world.outboxd.metric("outboxd_in_flight_rows").await,
            Ok(200.0)
        )
    })
    .await?;
    ensure!(world.kill_dump().await? == 1, "{}", world.log_end());
    world.logged("the stream is lost", 1).await?;
    world.logged("tailing", 2).await?;
    conn.query_drop("CREATE TABLE copied AS SELECT id, payload FROM outbox")
        .await?;
    conn.query_drop("BEGIN").await?;
    for n in 200..250 {
        conn.query_drop(insert(n)).await?;
    }
    conn.query_drop("ROLLBACK TO s").await.unwrap_err();
    conn.query_drop("COMMIT").await?;
    // Behind a lost stream it goes on where it was, and keeps what it had.
    wait::until("the second is there too", SOON, async || {
        matches!(
            world.outboxd.metric("outboxd_in_flight_rows").await,
            Ok(250.0)
        )
    })
    .await?;
    world.kill_dump().await?;
    world.outboxd.kill9()?;
    ensure!(world.sink.count() == 0);
    world.to_broker.pass();
    world.run().await?;
    // What the proxy had swallowed of the dead program arrives too: one copy of each at most.
    world.judge_table(250).await?;
    Ok(())
}

#[tokio::test]
async fn a_set_with_several_servers_and_holes_is_stored_whole() -> Result<()> {
    let mut world = Setup::new().start().await?;
    let mut conn = world.mysql.conn().await?;
    let other = "aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa";
    for gtid in [
        format!("{other}:1000"),
        format!("{other}:7"),
        "bbbbbbbb-bbbb-bbbb-bbbb-bbbbbbbbbbbb:5".to_owned(),
    ] {
        conn.query_drop(format!("SET GTID_NEXT = '{gtid}'")).await?;
        conn.query_drop("BEGIN").await?;
        conn.query_drop(insert(1)).await?;
        conn.query_drop("COMMIT").await?;
    }
    conn.query_drop("SET GTID_NEXT = 'AUTOMATIC'").await?;
    world.insert(20).await?;
    world.judge_table(0).await?;
    for clean in [true, false] {
        // What was settled is stored with it, so neither end makes copies of rows that are marked as sent.
        if clean {
            let status = world.outboxd.terminate().await?;
            ensure!(status.code() == Some(0), "{status}");
            world.run().await?;
        } else {
            world.crash().await?;
        }
        world.insert(3).await?;
        world.judge_table(0).await?;
    }
    let stored = stored_set(&world).await?;
    ensure!(stored.contains(&format!("{other}:7:1000")), "{stored}");
    ensure!(
        stored.contains("bbbbbbbb-bbbb-bbbb-bbbb-bbbbbbbbbbbb:5"),
        "{stored}"
    );
    Ok(())
}

async fn a_first_start_under_load_that_crashes_at_once_delivers_every_row(
    setup: Setup,
) -> Result<()> {
    let mut world = setup.build().await?;
    let options = WriterOptions {
        rate: 200.0,
        ..WriterOptions::default()
    };
    let writer = Writer::start(&world.mysql, options)?;
    let rows = "SELECT COUNT(*) FROM outbox";
    wait::until("there is a backlog", SOON, async || {
        matches!(world.mysql.count(rows).await, Ok(200..))
    })
    .await?;
    world.outboxd.start().await?;
    wait::until("it has taken its first position", SOON, async || {
        matches!(
            world
                .mysql
                .count("SELECT COUNT(*) FROM outboxd_checkpoint")
                .await,
            Ok(1)
        )
    })
    .await?;
    world.crash().await?;
    let written = writer.finish_after(Duration::from_secs(1)).await?;
    world.judge(written, WINDOW).await?;
    Ok(())
}

#[tokio::test]
async fn the_position_never_passes_a_row_whose_confirm_hangs() -> Result<()> {
    let mut world = Setup::new().own_broker().start().await?;
    let mut conn = world.mysql.conn().await?;
    let source = "cccccccc-cccc-cccc-cccc-cccccccccccc";
    // Each row in a transaction of a known name.
    let mut committed = 0;
    let mut commit = async |rows: u32| -> Result<()> {
        for _ in 0..rows {
            committed += 1;
            conn.query_drop(format!("SET GTID_NEXT = '{source}:{committed}'"))
                .await?;
            conn.query_drop("BEGIN").await?;
            conn.query_drop(insert(committed)).await?;
            conn.query_drop("COMMIT").await?;
        }
        Ok(())
    };
    commit(50).await?;
    world.all_sent().await?;
    world.rabbit.ctl(&["set_disk_free_limit", "1000GB"]).await?;
    commit(200).await?;
    wait::until("the broker blocks", SOON, async || {
        matches!(
            world.outboxd.metric("outboxd_broker_blocked").await,
            Ok(1.0)
        )
    })
    .await?;
    // The lease is renewed meanwhile: two renewals, so two chances to store too much.
    let renewals = "SELECT lease_until FROM outboxd_lease";
    for _ in 0..2 {
        let before: Option<String> = world
            .mysql
            .first(format!("SELECT CAST(({renewals}) AS CHAR)"))
            .await?;
        wait::until("the lease is renewed", SOON, async || {
            world
                .mysql
                .first::<String>(format!("SELECT CAST(({renewals}) AS CHAR)"))
                .await
                .is_ok_and(|now| now != before)
        })
        .await?;
    }
    world.outboxd.kill9()?;
    let stored = stored_set(&world).await?;
    let (_, ours) = stored
        .split_once(&format!("{source}:1-"))
        .context(stored.clone())?;
    let settled: u64 = ours
        .split(|c: char| !c.is_ascii_digit())
        .next()
        .unwrap_or_default()
        .parse()?;
    let marked = world
        .mysql
        .count("SELECT COUNT(*) FROM outbox WHERE status = 1")
        .await?;
    let came = u64::try_from(world.sink.count())?;
    ensure!((50..250).contains(&settled), "{stored}");
    ensure!(
        settled == marked,
        "stored up to {settled}, {marked} rows are marked"
    );
    ensure!(
        settled <= came,
        "stored up to {settled}, {came} messages came"
    );
    world.rabbit.ctl(&["set_disk_free_limit", "1MB"]).await?;
    world.run().await?;
    world.judge_table(WINDOW).await?;
    Ok(())
}

#[tokio::test]
async fn an_idle_program_writes_little_and_its_own_writes_cause_none() -> Result<()> {
    let world = Setup::new().start().await?;
    world.insert(20).await?;
    world.judge_table(0).await?;
    let gtids = async || -> Result<u64> {
        Ok(executed(&world)
            .await?
            .parse::<outbox_core::gtid::GtidSet>()?
            .len())
    };
    // What the rows caused is written by then; this is about what goes on without them.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let before = gtids().await?;
    let time = Duration::from_secs(12);
    tokio::time::sleep(time).await;
    let written = gtids().await? - before;
    // A lease of 5 s is renewed every 1.7 s; nothing else is to be said.
    ensure!(
        written <= 12,
        "{written} transactions in {time:?} of idleness"
    );
    Ok(())
}

#[tokio::test]
async fn a_position_by_file_on_a_server_with_gtids_goes_on_and_keeps_the_poller_going() -> Result<()>
{
    let mut world = Setup::new()
        .config("poller.pending_grace = \"1s\"")
        .start()
        .await?;
    world.insert(5).await?;
    world.all_sent().await?;
    world.outboxd.terminate().await?;
    let file = new_log(&world).await?;
    let wrong = ["position", "set", "--file", &file, "--pos", "150"];
    let refused = world.outboxd.cli(&wrong).await?;
    ensure!(refused.code == Some(1), "{refused:?}");
    let start = ["position", "set", "--file", &file, "--pos", "4"];
    world.outboxd.ok(&start).await?;
    world.run().await?;
    world.insert(5).await?;
    world.all_sent().await?;
    ensure!(
        world.position().await?.contains(&file),
        "{}",
        world.position().await?
    );
    // The tail never sees this one, and the poller takes it once the position has come to where the server is.
    let mut conn = world.mysql.conn().await?;
    conn.query_drop("SET SESSION sql_log_bin = 0").await?;
    conn.query_drop(insert(7)).await?;
    conn.disconnect().await?;
    world.judge_table(0).await?;
    Ok(())
}
