//! The faults, each of which is lifted before the next begins.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lapin::types::FieldTable;
use mysql_async::prelude::Queryable;
use outbox_testkit::{Direction, Proxy, rabbit, wait};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::sleep;

use crate::world::{LEASE, OUTBOXES, SOON, VERIFY_AFTER, World};

/// What can go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// SIGKILL of the leader; started again a little later.
    LeaderKilled,
    /// The same with the other instance.
    StandbyKilled,
    /// SIGSTOP of the leader until its lease has long expired.
    LeaderFrozen,
    /// SIGKILL of the broker.
    BrokerKilled,
    /// An operator closes every connection.
    ConnectionsClosed,
    /// The queues' bindings are removed.
    BindingsRemoved,
    /// The broker's disk alarm.
    DiskAlarm,
    /// SIGKILL of the database.
    DatabaseKilled,
    /// KILL of the dump.
    DumpKilled,
    /// All connections of both instances are reset.
    NetworkCut,
    /// The leader and one of its servers do not hear each other, in one direction.
    BlackHole,
    /// Every byte of the leader is late.
    NetworkDelayed,
    /// The application keeps the newest rows locked.
    RowsLocked,
    /// The application gives rows up: some in a backlog, some that are not due yet.
    RowsAbandoned,
    /// `outboxd pause`, `outboxd resume`.
    Paused,
    /// Nobody runs while the unread binlog is purged.
    PositionPurged,
}

/// Every one, with what a reader is told about it.
pub(crate) const FAULTS: [(Fault, &str); 16] = [
    (Fault::LeaderKilled, "leader: SIGKILL, restarted"),
    (Fault::StandbyKilled, "standby: SIGKILL, restarted"),
    (
        Fault::LeaderFrozen,
        "leader: SIGSTOP past its lease, SIGCONT",
    ),
    (Fault::BrokerKilled, "RabbitMQ: SIGKILL, restarted"),
    (
        Fault::ConnectionsClosed,
        "RabbitMQ: connections closed by an operator",
    ),
    (
        Fault::BindingsRemoved,
        "RabbitMQ: bindings removed, restored",
    ),
    (Fault::DiskAlarm, "RabbitMQ: disk alarm on, off"),
    (Fault::DatabaseKilled, "MySQL: SIGKILL, restarted"),
    (Fault::DumpKilled, "MySQL: dump killed"),
    (Fault::NetworkCut, "network: connections reset"),
    (
        Fault::BlackHole,
        "network: leader cut off in one direction, connections open",
    ),
    (Fault::NetworkDelayed, "network: leader's bytes late"),
    (Fault::RowsLocked, "application: newest rows locked"),
    (Fault::RowsAbandoned, "application: rows abandoned"),
    (Fault::Paused, "operator: pause, resume"),
    (
        Fault::PositionPurged,
        "operator: all stopped, unread binlog purged",
    ),
];

/// Rows of the first table that the application gave up before they can have been published: they must never come.
#[derive(Debug, Default)]
pub(crate) struct Abandoned {
    /// From a backlog that waited for the broker.
    pub(crate) pending: Vec<String>,
    /// Before they were due.
    pub(crate) delayed: Vec<String>,
}

/// Brings a fault about and lifts it.
pub(crate) async fn inject(
    fault: Fault,
    world: &mut World,
    random: &mut StdRng,
    abandoned: &mut Abandoned,
) -> Result<()> {
    match fault {
        Fault::LeaderKilled | Fault::StandbyKilled => {
            let leader = world.leader().await?;
            let victim = if fault == Fault::LeaderKilled {
                leader
            } else {
                1 - leader
            };
            world.nodes[victim].kill9().await?;
            sleep(millis(random, 100..8000)).await;
            world.nodes[victim].outboxd.start().await
        }
        Fault::LeaderFrozen => {
            let leader = world.leader().await?;
            world.nodes[leader].outboxd.freeze()?;
            sleep(LEASE + millis(random, 1000..6000)).await;
            world.nodes[leader].outboxd.thaw()
        }
        Fault::BrokerKilled => {
            world.rabbit.kill9()?;
            sleep(millis(random, 0..4000)).await;
            world.rabbit.restart().await
        }
        Fault::ConnectionsClosed => {
            let close = ["close_all_connections", "closed for a test"];
            world.rabbit.ctl(&close).await.map(drop)
        }
        Fault::BindingsRemoved => bindings_removed(world, millis(random, 500..5000)).await,
        Fault::DiskAlarm => {
            world.rabbit.ctl(&["set_disk_free_limit", "1000GB"]).await?;
            sleep(millis(random, 1000..8000)).await;
            let off = world.rabbit.ctl(&["set_disk_free_limit", "1MB"]).await;
            off.map(drop)
        }
        Fault::DatabaseKilled => {
            world.mysql.kill9()?;
            sleep(millis(random, 0..4000)).await;
            world.mysql.restart().await
        }
        Fault::DumpKilled => dump_killed(world).await,
        Fault::NetworkCut => {
            for node in &world.nodes {
                node.to_broker.cut();
                node.to_mysql.cut();
            }
            Ok(())
        }
        Fault::BlackHole | Fault::NetworkDelayed => network(fault, world, random).await,
        Fault::RowsLocked => rows_locked(world, millis(random, 1000..8000)).await,
        Fault::RowsAbandoned => rows_abandoned(world, abandoned).await,
        Fault::Paused => {
            world.nodes[0].outboxd.ok(&["pause"]).await?;
            sleep(millis(random, 500..4000)).await;
            world.nodes[1].outboxd.ok(&["resume"]).await.map(drop)
        }
        Fault::PositionPurged => position_purged(world, random).await,
    }
}

fn millis(random: &mut StdRng, range: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(random.random_range(range))
}

async fn bindings_removed(world: &World, time: Duration) -> Result<()> {
    let unbind = world.rabbit.with_channel(async |channel| {
        for outbox in OUTBOXES {
            let name = outbox.name;
            channel
                .queue_unbind(name.into(), name.into(), "#".into(), FieldTable::default())
                .await?;
        }
        Ok(())
    });
    unbind.await?;
    sleep(time).await;
    let bind = world.rabbit.with_channel(async |channel| {
        for outbox in OUTBOXES {
            rabbit::bind(channel, outbox.name, outbox.name, "#").await?;
        }
        Ok(())
    });
    bind.await
}

async fn dump_killed(world: &World) -> Result<()> {
    // After an earlier fault there may be no dump for a while.
    wait::until_ok("a dump is killed", SOON, async || {
        let dumps: Vec<u64> = world
            .mysql
            .query_rows(
                "SELECT id FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'",
            )
            .await?;
        ensure!(!dumps.is_empty(), "no dump");
        for id in dumps {
            world.mysql.exec(format!("KILL {id}")).await?;
        }
        Ok(())
    })
    .await
}

async fn network(fault: Fault, world: &World, random: &mut StdRng) -> Result<()> {
    let leader = &world.nodes[world.leader().await?];
    let proxies: [&Proxy; 2] = [&leader.to_mysql, &leader.to_broker];
    let ways = [Direction::ToServer, Direction::ToClient];
    let time = if fault == Fault::BlackHole {
        proxies[random.random_range(0..2)].black_hole(ways[random.random_range(0..2)]);
        millis(random, 2000..15_000)
    } else {
        let late = millis(random, 50..400);
        for (proxy, way) in proxies.iter().flat_map(|p| ways.map(|way| (p, way))) {
            proxy.delay(way, late);
        }
        millis(random, 2000..8000)
    };
    sleep(time).await;
    for proxy in proxies {
        proxy.pass();
    }
    Ok(())
}

async fn rows_locked(world: &World, time: Duration) -> Result<()> {
    let mut conn = world.mysql.conn().await?;
    // Without gap locks: the application's own inserts go on.
    conn.query_drop("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        .await?;
    conn.query_drop("START TRANSACTION").await?;
    for outbox in OUTBOXES {
        let name = outbox.name;
        let newest: Option<u64> = conn
            .query_first(format!("SELECT MAX(id) FROM {name}"))
            .await?;
        let from = newest.unwrap_or_default().saturating_sub(30);
        let lock = format!("SELECT id FROM {name} WHERE id > {from} ORDER BY id FOR UPDATE");
        let _: Vec<u64> = conn.query(lock).await?;
    }
    sleep(time).await;
    conn.query_drop("COMMIT").await?;
    conn.disconnect().await?;
    Ok(())
}

async fn rows_abandoned(world: &World, abandoned: &mut Abandoned) -> Result<()> {
    let mut conn = world.mysql.conn().await?;
    for _ in 0..5 {
        let insert = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, next_retry_at) \
                      VALUES ('order', UUID(), 'OrderPaid', '{}', NOW(6) + INTERVAL 15 SECOND)";
        conn.query_drop(insert).await?;
        let id = conn.last_insert_id().context("no id")?;
        abandoned.delayed.push(id.to_string());
    }
    for node in &world.nodes {
        node.to_broker.refuse();
        node.to_broker.cut();
    }
    // What is committed from now on cannot be on its way, and is read back before it is published once it is older
    // than VERIFY_AFTER.
    let from = "SELECT MAX(id) FROM outbox";
    let from = world.mysql.count(from).await?;
    let waiting = format!("FROM outbox WHERE id > {from} AND status = 0 AND next_retry_at IS NULL");
    let old = VERIFY_AFTER.as_secs() + 1;
    let old = format!("{waiting} AND created_at < NOW(6) - INTERVAL {old} SECOND");
    wait::until("a backlog grows", SOON, async || {
        let rows = world.mysql.count(format!("SELECT COUNT(*) {old}")).await;
        matches!(rows, Ok(20..))
    })
    .await?;
    let pending: Vec<u64> = conn
        .query(format!("SELECT id {old} ORDER BY id LIMIT 10"))
        .await?;
    let pending: Vec<String> = pending.iter().map(u64::to_string).collect();
    let delayed = abandoned.delayed.iter().rev().take(5);
    for id in pending.iter().chain(delayed) {
        let abandon = format!("UPDATE outbox SET status = 4 WHERE id = {id} AND status = 0");
        conn.query_drop(abandon).await?;
        ensure!(
            conn.affected_rows() == 1,
            "row {id} is pending no more, though no broker is there"
        );
    }
    abandoned.pending.extend(pending);
    for node in &world.nodes {
        node.to_broker.pass();
    }
    conn.disconnect().await?;
    Ok(())
}

async fn position_purged(world: &mut World, random: &mut StdRng) -> Result<()> {
    for node in &mut world.nodes {
        if random.random() {
            node.kill9().await?;
        } else {
            node.terminate().await?;
        }
    }
    let rows = "SELECT COUNT(*) FROM outbox WHERE status <> 1";
    wait::until("rows are written meanwhile", SOON, async || {
        matches!(world.mysql.count(rows).await, Ok(20..))
    })
    .await?;
    world.mysql.exec("FLUSH BINARY LOGS").await?;
    // A server that has not seen yet that its reader is gone keeps the reader's log.
    wait::until_ok("the old logs are purged", SOON, async || {
        let logs: Vec<mysql_async::Row> = world.mysql.query_rows("SHOW BINARY LOGS").await?;
        let newest: String = logs.last().and_then(|r| r.get(0)).context("no binlog")?;
        if logs.len() > 1 {
            let purge = format!("PURGE BINARY LOGS TO '{newest}'");
            world.mysql.exec(purge).await?;
        }
        let left: Vec<mysql_async::Row> = world.mysql.query_rows("SHOW BINARY LOGS").await?;
        ensure!(left.len() == 1, "{} logs are left", left.len());
        Ok(())
    })
    .await?;
    for node in &mut world.nodes {
        node.outboxd.start().await?;
    }
    // Nobody is ready before somebody has looked.
    let ack = wait::until_ok("the gap is acknowledged", SOON, async || {
        world.nodes[0].outboxd.ok(&["ack-gap"]).await
    });
    ack.await.map(drop)
}
