//! Memory and processor time, at full speed and at rest.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lapin::options::QueuePurgeOptions;
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use outbox_testkit::{Outboxd, wait};
use tokio::time::sleep;

use crate::args::{Args, Mode};
use crate::cases::Case;
use crate::report::{Report, Unit};
use crate::usage;
use crate::world::{EVENT, NAME, World};

const CASE: Case = Case::Json500;
/// Rows that wait at least and at most while the soak runs: the program is never short of work, and what waits is
/// never old.
const BACKLOG: (u64, u64) = (10_000, 20_000);
/// Rows in one transaction: a commit of its own for each would leave the program waiting for the writer.
const CHUNK: u32 = 1000;
const SAMPLE: Duration = Duration::from_millis(250);
const DONE: Duration = Duration::from_secs(60);

/// One round of full speed, then rest.
///
/// # Errors
/// A server's or the program's.
pub async fn round(world: &World, args: &Args, report: &mut Report) -> Result<()> {
    world.table(CASE, Mode::Mark).await?;
    world.queue(CASE.queue_type()).await?;
    let mut program = world.program(&report.unique("soak"), "")?;
    program.start().await?;
    program.wait_ready().await?;
    let pids = (program.pid()?, usage::descendant("mysqld")?);
    let mut conn = world.mysql.conn().await?;
    work(world, args, &program, pids, &mut conn, report)
        .await
        .with_context(|| program.log())?;
    let sent = async || {
        let done = published(&program).await;
        let all = written(world).await;
        done.is_ok_and(|n| n >= all)
    };
    wait::until("every row is sent", DONE, sent)
        .await
        .with_context(|| program.log())?;
    rest(args, pids, &mut conn, report).await?;
    conn.disconnect().await?;
    program.terminate().await?;
    Ok(())
}

async fn work(
    world: &World,
    args: &Args,
    program: &Outboxd,
    (outboxd, mysqld): (u32, u32),
    conn: &mut Conn,
    report: &mut Report,
) -> Result<()> {
    let part = format!(
        "soak: {} at full speed, {}",
        humantime::format_duration(args.soak),
        CASE.title()
    );
    let began = Instant::now();
    let before = (usage::cpu(outboxd)?, usage::cpu(mysqld)?);
    let start = usage::resident(outboxd)?;
    let (mut most, mut half) = (start, None);
    let (mut written, mut done, mut sampled) = (0_u64, 0_u64, began);
    while began.elapsed() < args.soak {
        if written - done < BACKLOG.1 {
            insert(conn, CHUNK).await?;
            written += u64::from(CHUNK);
        }
        if written - done >= BACKLOG.0 || sampled.elapsed() > SAMPLE {
            done = whole(published(program).await?);
        }
        if written - done >= BACKLOG.1 {
            sleep(Duration::from_millis(20)).await;
        }
        if sampled.elapsed() > SAMPLE {
            sampled = Instant::now();
            let now = usage::resident(outboxd)?;
            most = most.max(now);
            if began.elapsed() > args.soak / 2 {
                half.get_or_insert(now);
            }
            empty(world).await?;
        }
    }
    let took = began.elapsed().as_secs_f64();
    let rows = published(program).await?;
    let end = usage::resident(outboxd)?;
    report.add(&part, "rows delivered and marked", Unit::Rate, rows / took);
    for (name, bytes) in [
        ("resident memory at the start", start),
        (
            "resident memory after half of the time",
            half.unwrap_or(end),
        ),
        ("resident memory at the end", end),
        ("resident memory at most", most),
    ] {
        report.add(&part, name, Unit::Mebibytes, mebibytes(bytes));
    }
    let million = 1e6 / rows;
    report.add(
        &part,
        "processor time of outboxd per million rows",
        Unit::Seconds,
        (usage::cpu(outboxd)? - before.0) * million,
    );
    report.add(
        &part,
        "processor time of mysqld per million rows, writing them included",
        Unit::Seconds,
        (usage::cpu(mysqld)? - before.1) * million,
    );
    Ok(())
}

/// Nothing happens: what does the program do?
async fn rest(
    args: &Args,
    (outboxd, _): (u32, u32),
    conn: &mut Conn,
    report: &mut Report,
) -> Result<()> {
    let part = format!("idle: {}", humantime::format_duration(args.idle));
    let (began, statements, cpu) = (Instant::now(), questions(conn).await?, usage::cpu(outboxd)?);
    sleep(args.idle).await;
    // One of them is our own question.
    let asked = questions(conn).await?.saturating_sub(statements + 1);
    let took = began.elapsed().as_secs_f64();
    report.add(
        &part,
        "statements",
        Unit::PerSecond,
        f64::from(u32::try_from(asked)?) / took,
    );
    report.add(
        &part,
        "processor time of outboxd, ms a second",
        Unit::Millis,
        (usage::cpu(outboxd)? - cpu) * 1000.0 / took,
    );
    report.add(
        &part,
        "resident memory",
        Unit::Mebibytes,
        mebibytes(usage::resident(outboxd)?),
    );
    Ok(())
}

async fn insert(conn: &mut Conn, rows: u32) -> Result<()> {
    let values: Vec<String> = (0..rows)
        .map(|n| {
            format!(
                "('order', '{}', '{EVENT}', '{}')",
                Case::aggregate(n),
                CASE.body(n)
            )
        })
        .collect();
    let insert = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES";
    Ok(conn
        .query_drop(format!("{insert} {}", values.join(",")))
        .await?)
}

/// Nobody consumes: the queue is emptied, so that it stays the same over the time.
async fn empty(world: &World) -> Result<()> {
    world
        .rabbit
        .with_channel(async |channel| {
            channel
                .queue_purge(NAME.into(), QueuePurgeOptions::default())
                .await?;
            Ok(())
        })
        .await
}

async fn published(program: &Outboxd) -> Result<f64> {
    program.metric("outboxd_published_total{").await
}

async fn written(world: &World) -> f64 {
    let count = world.mysql.count("SELECT COUNT(*) FROM outbox").await;
    count
        .ok()
        .and_then(|n| u32::try_from(n).ok())
        .map_or(f64::INFINITY, f64::from)
}

async fn questions(conn: &mut Conn) -> Result<u64> {
    let row: Option<(String, u64)> = conn
        .query_first("SHOW GLOBAL STATUS LIKE 'Questions'")
        .await?;
    Ok(row.context("no such status")?.1)
}

#[allow(clippy::cast_precision_loss)] // far below 2^52
fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a counter
fn whole(value: f64) -> u64 {
    value as u64
}
