//! A backlog that was committed while the program was stopped, and how fast it is delivered.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lapin::Channel;
use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use outbox_testkit::{Outboxd, wait};
use tokio::time::sleep;

use crate::args::{Args, Mode};
use crate::cases::Case;
use crate::raw::{self, Bulk};
use crate::report::{Report, Unit};
use crate::usage;
use crate::world::{NAME, World};

/// How often the queue is looked at: far less than a drain takes, far more than the broker notices.
const LOOK: Duration = Duration::from_millis(10);
/// Rows that the program delivers before it is stopped.
const FIRST: u32 = 100;
/// How long a drain may stand still.
const STALLED: Duration = Duration::from_secs(60);

/// The raw speeds of one case in one round.
#[derive(Debug, Clone, Copy)]
struct Limits {
    publish: f64,
    mark: f64,
    mark_full: f64,
    delete: f64,
    read: f64,
}

impl Limits {
    /// What a drain cannot exceed if its steps take turns on the machine, without and with reading back.
    fn of(&self, mode: Mode) -> (f64, f64) {
        let record = match mode {
            Mode::Mark => self.mark,
            Mode::MarkFull => self.mark_full,
            Mode::Delete => self.delete,
            // Nothing is recorded, and nothing can be read back.
            Mode::None => return (self.publish, self.publish),
        };
        let both = 1.0 / self.publish + 1.0 / record;
        (1.0 / both, 1.0 / (both + 1.0 / self.read))
    }
}

/// One round: each case's parts, then its drains.
///
/// # Errors
/// A server's or the program's.
pub async fn round(world: &World, args: &Args, report: &mut Report) -> Result<()> {
    for (i, case) in args.cases.iter().enumerate() {
        let rows = case.rows(args.rows);
        let modes = if i == 0 {
            args.modes.as_slice()
        } else {
            &[Mode::Mark]
        };
        let limits = limits(world, *case, rows, report).await?;
        for mode in modes {
            one(world, *case, *mode, rows, limits, report).await?;
        }
    }
    Ok(())
}

async fn limits(world: &World, case: Case, rows: u32, report: &mut Report) -> Result<Limits> {
    let part = format!("parts: {}", case.title());
    world.table(case, Mode::Mark).await?;
    world.fill(case, rows).await?;
    world.settle_down().await?;
    let before = usage::cpu(std::process::id())?;
    let publish = raw::publish(world, case, rows).await?;
    let cpu = (usage::cpu(std::process::id())? - before) / f64::from(rows) * 1e6;
    report.add(&part, "P: publish, confirmed", Unit::Rate, publish);
    let name = "P: processor time of the publisher per million messages";
    report.add(&part, name, Unit::Seconds, cpu);
    let read = raw::bulk(world, Bulk::Read).await?;
    report.add(&part, "V: read back by 1,000", Unit::Rate, read);
    let mark = raw::bulk(world, Bulk::Mark { minimal: true }).await?;
    report.add(&part, "M: mark by 1,000, MINIMAL images", Unit::Rate, mark);
    let unmark = "UPDATE outbox SET status = 0";
    world.mysql.exec(unmark).await?;
    world.settle_down().await?;
    let mark_full = raw::bulk(world, Bulk::Mark { minimal: false }).await?;
    report.add(
        &part,
        "M: mark by 1,000, FULL images",
        Unit::Rate,
        mark_full,
    );
    world.mysql.exec(unmark).await?;
    world.settle_down().await?;
    let delete = raw::bulk(world, Bulk::Delete).await?;
    report.add(&part, "D: delete by 1,000", Unit::Rate, delete);
    Ok(Limits {
        publish,
        mark,
        mark_full,
        delete,
        read,
    })
}

fn outbox(mode: Mode) -> (&'static str, &'static str) {
    match mode {
        Mode::Mark => ("mark", ""),
        Mode::MarkFull => ("mark, FULL images", ""),
        Mode::Delete => ("delete", "on_sent = \"delete\""),
        Mode::None => ("tracking = none", "tracking = \"none\""),
    }
}

async fn one(
    world: &World,
    case: Case,
    mode: Mode,
    rows: u32,
    limits: Limits,
    report: &mut Report,
) -> Result<()> {
    let (word, toml) = outbox(mode);
    let part = format!("drain: {}, {word}", case.title());
    world.table(case, mode).await?;
    world.queue(case.queue_type()).await?;
    let mut program = world.program(&report.unique("drain"), toml)?;
    // It has run before: position and layout of the table are stored, and the backlog is written behind them.
    program.start().await?;
    program.wait_ready().await?;
    world.fill(case, FIRST).await?;
    let sent = async || raw::depth(&world.rabbit).await.is_ok_and(|n| n == FIRST);
    wait::until("the first rows are sent", STALLED, sent).await?;
    recorded(world, mode).await?;
    program.terminate().await?;
    world.queue(case.queue_type()).await?;
    world.fill(case, rows).await?;
    world.settle_down().await?;

    let (connection, channel) = world.channel().await?;
    let started = Instant::now();
    program.start().await?;
    let run = watch(&channel, rows).await.with_context(|| program.log())?;
    let pid = program.pid()?;
    recorded(world, mode).await.with_context(|| program.log())?;
    let settled = run.first.elapsed();
    counted(&program, rows).await?;
    let cpu = usage::cpu(pid)?;
    let tail = path(&program, "tail").await?;
    let poller = path(&program, "poller").await?;
    let left = program.metric("outboxd_deferred_total{").await?;
    program.terminate().await?;
    connection.close(200, "done".into()).await?;

    let speed = f64::from(rows) / run.took.as_secs_f64();
    let (published, read) = limits.of(mode);
    report.add(
        &part,
        "first to last message at the broker",
        Unit::Rate,
        speed,
    );
    report.add(
        &part,
        "first message to last row recorded",
        Unit::Rate,
        f64::from(rows) / settled.as_secs_f64(),
    );
    report.add(
        &part,
        "of the limit without reading back",
        Unit::Ratio,
        speed / published,
    );
    report.add(&part, "of the limit", Unit::Ratio, speed / read);
    report.add(
        &part,
        "start to first message",
        Unit::Seconds,
        (run.first - started).as_secs_f64(),
    );
    report.add(
        &part,
        "processor time of outboxd per million rows",
        Unit::Seconds,
        cpu / f64::from(rows) * 1e6,
    );
    report.add(&part, "rows by the tail", Unit::Count, tail);
    report.add(&part, "rows left by the tail", Unit::Count, left);
    report.add(&part, "rows by the poller", Unit::Count, poller);
    Ok(())
}

struct Run {
    first: Instant,
    took: Duration,
}

/// Waits for the first and the last message of `rows` at the broker.
async fn watch(channel: &Channel, rows: u32) -> Result<Run> {
    let (mut first, mut before, mut moved) = (None, 0, Instant::now());
    loop {
        let options = QueueDeclareOptions {
            passive: true,
            ..Default::default()
        };
        let queue = channel
            .queue_declare(NAME.into(), options, FieldTable::default())
            .await?;
        let (now, there) = (Instant::now(), queue.message_count());
        if there > before {
            first.get_or_insert(now);
            (before, moved) = (there, now);
        }
        if let Some(first) = first
            && there >= rows
        {
            ensure!(there == rows, "{there} messages for {rows} rows");
            return Ok(Run {
                first,
                took: now - first,
            });
        }
        ensure!(
            moved.elapsed() < STALLED,
            "{there} of {rows} messages, and no more"
        );
        sleep(LOOK).await;
    }
}

/// Rows published by one of the two paths.
async fn path(program: &Outboxd, path: &str) -> Result<f64> {
    let series = format!("outboxd_published_total{{table=\"app.outbox\",path=\"{path}\"}}");
    program.metric(&series).await
}

/// Waits until the program has counted every row, which it does as it learns of its record.
async fn counted(program: &Outboxd, rows: u32) -> Result<()> {
    wait::until("every row is counted", STALLED, async || {
        let all = program.metric("outboxd_published_total{").await;
        all.is_ok_and(|n| n >= f64::from(rows))
    })
    .await
}

async fn recorded(world: &World, mode: Mode) -> Result<()> {
    let left = match mode {
        Mode::Mark | Mode::MarkFull => "SELECT EXISTS (SELECT 1 FROM outbox WHERE status = 0)",
        Mode::Delete => "SELECT EXISTS (SELECT 1 FROM outbox)",
        Mode::None => return Ok(()),
    };
    wait::until("every row is recorded", STALLED, async || {
        world.mysql.count(left).await.is_ok_and(|n| n == 0)
    })
    .await
}
