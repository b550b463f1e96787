//! Latency at a steady rate: the program, an application that publishes itself, and a polling loop.
//!
//! Rows are due at a fixed schedule that no answer holds up: many sessions share it, so one that waits delays nobody
//! else, and a row that is committed late was still due at its time. Both are reported: from the commit, and from when
//! the row was due, which leaves nothing out if the sessions cannot keep up.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::StreamExt;
use futures_util::future::try_join_all;
use hdrhistogram::Histogram;
use lapin::options::{BasicConsumeOptions, ConfirmSelectOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection};
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use outbox_testkit::wait;
use tokio::task::JoinHandle;
use tokio::time::{interval, sleep_until};

use crate::args::{Args, Mode};
use crate::cases::Case;
use crate::raw::{confirmed, properties, publish_one};
use crate::report::{Report, Unit};
use crate::usage;
use crate::world::{EVENT, NAME, World};

const CASE: Case = Case::Json500;
/// Sessions that share the schedule: more than wait at once at any of the rates.
const SESSIONS: usize = 32;
/// How long the last rows are waited for.
const LAST: Duration = Duration::from_secs(10);
/// The polling loop's.
const POLL: (Duration, u32) = (Duration::from_secs(1), 100);

/// Who publishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Outboxd,
    Application,
    Polling,
}

/// A row that was committed.
#[derive(Debug, Clone, Copy)]
struct Sent {
    id: u64,
    due: Instant,
    committed: Instant,
}

/// One round: every rate, by each of the three.
///
/// # Errors
/// A server's or the program's.
pub async fn round(world: &World, args: &Args, report: &mut Report) -> Result<()> {
    for rate in &args.rates {
        for by in [By::Outboxd, By::Application, By::Polling] {
            one(world, args, *rate, by, report).await?;
        }
    }
    Ok(())
}

async fn one(world: &World, args: &Args, rate: u32, by: By, report: &mut Report) -> Result<()> {
    world.table(CASE, Mode::Mark).await?;
    world.queue(CASE.queue_type()).await?;
    let mut program = world.program(&report.unique("live"), "")?;
    let mut polling = None;
    match by {
        By::Outboxd => {
            program.start().await?;
            program.wait_ready().await?;
        }
        By::Application => {}
        By::Polling => {
            polling = Some(Aborts(tokio::spawn(poll(
                world.mysql.conn().await?,
                world.channel().await?,
            ))))
        }
    }
    let sink = Sink::start(world).await?;
    let rows = u32::try_from(u64::from(rate) * args.live.as_secs())?;
    let before = match by {
        By::Outboxd => usage::cpu(program.pid()?)?,
        _ => 0.0,
    };
    let sent = write(world, rate, rows, by == By::Application).await?;
    if by != By::Polling {
        let all = async || sink.count() >= sent.len();
        wait::until("every row is received", LAST, all)
            .await
            .with_context(|| program.log())?;
    }
    let word = match by {
        By::Outboxd => "outboxd",
        By::Application => "the application publishes after its commit",
        By::Polling => "polling loop, 100 rows every second",
    };
    let part = format!("live: {rate} rows/s, {word}");
    if by == By::Outboxd {
        let cpu = usage::cpu(program.pid()?)? - before;
        report.add(
            &part,
            "processor time of outboxd",
            Unit::Ratio,
            cpu / args.live.as_secs_f64(),
        );
        program.terminate().await?;
    }
    drop(polling);
    judge(&part, &sent, sink.end().await?, report)
}

/// Ends a task with its handle.
struct Aborts(JoinHandle<Result<()>>);

impl Drop for Aborts {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Commits `rows` rows at `rate`; with `publish` publishes each after its commit and waits for the confirm.
async fn write(world: &World, rate: u32, rows: u32, publish: bool) -> Result<Vec<Sent>> {
    let (connection, channel) = world.channel().await?;
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    let next = Arc::new(AtomicU32::new(0));
    let mut sessions = Vec::new();
    let mut conns = Vec::new();
    for _ in 0..SESSIONS {
        conns.push(world.mysql.conn().await?);
    }
    let start = Instant::now() + Duration::from_millis(200);
    for conn in conns {
        let channel = publish.then(|| channel.clone());
        let schedule = Schedule {
            next: Arc::clone(&next),
            start,
            rate,
            rows,
        };
        sessions.push(tokio::spawn(session(conn, schedule, channel)));
    }
    let all = try_join_all(sessions).await?;
    let mut sent = Vec::new();
    for part in all {
        sent.extend(part?);
    }
    connection.close(200, "done".into()).await?;
    Ok(sent)
}

struct Schedule {
    next: Arc<AtomicU32>,
    start: Instant,
    rate: u32,
    rows: u32,
}

async fn session(
    mut conn: Conn,
    schedule: Schedule,
    channel: Option<Channel>,
) -> Result<Vec<Sent>> {
    let insert = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES (?, ?, ?, ?)";
    let insert = conn.prep(insert).await?;
    let mut sent = Vec::new();
    loop {
        let n = schedule.next.fetch_add(1, Ordering::Relaxed);
        if n >= schedule.rows {
            break;
        }
        let due = schedule.start + Duration::from_secs(1) * n / schedule.rate;
        sleep_until(due.into()).await;
        let (body, aggregate) = (CASE.body(n), Case::aggregate(n));
        conn.exec_drop(&insert, ("order", &aggregate, EVENT, &body))
            .await?;
        let committed = Instant::now();
        let id = conn.last_insert_id().context("no id")?;
        sent.push(Sent { id, due, committed });
        if let Some(channel) = &channel {
            let confirm =
                publish_one(channel, body.as_bytes(), properties(CASE, id, &aggregate)).await?;
            confirmed(confirm).await?;
        }
    }
    conn.disconnect().await?;
    Ok(sent)
}

/// What many applications do without outboxd.
async fn poll(mut conn: Conn, (_connection, channel): (Connection, Channel)) -> Result<()> {
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    let mut every = interval(POLL.0);
    loop {
        every.tick().await;
        let select = format!(
            "SELECT id, aggregate_id, CAST(payload AS CHAR) FROM outbox WHERE status = 0 ORDER BY id LIMIT {}",
            POLL.1
        );
        let rows: Vec<(u64, String, String)> = conn.query(select).await?;
        let mut confirms = Vec::new();
        for (id, aggregate, body) in &rows {
            confirms.push(
                publish_one(&channel, body.as_bytes(), properties(CASE, *id, aggregate)).await?,
            );
        }
        for confirm in confirms {
            confirmed(confirm).await?;
        }
        let ids: Vec<String> = rows.iter().map(|(id, ..)| id.to_string()).collect();
        if !ids.is_empty() {
            conn.query_drop(format!(
                "UPDATE outbox SET status = 1 WHERE id IN ({})",
                ids.join(",")
            ))
            .await?;
        }
    }
}

/// Consumes the queue, without acknowledging, and remembers when each message came first.
struct Sink {
    count: Arc<AtomicU32>,
    connection: Connection,
    task: JoinHandle<Result<HashMap<u64, Instant>>>,
}

impl Sink {
    async fn start(world: &World) -> Result<Self> {
        let (connection, channel) = world.channel().await?;
        let options = BasicConsumeOptions {
            no_ack: true,
            ..Default::default()
        };
        let mut consumer = channel
            .basic_consume(NAME.into(), "".into(), options, FieldTable::default())
            .await?;
        let count = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&count);
        let task = tokio::spawn(async move {
            let mut came = HashMap::new();
            while let Some(Ok(delivery)) = consumer.next().await {
                let now = Instant::now();
                let id = delivery
                    .properties
                    .message_id()
                    .as_ref()
                    .context("no message_id")?;
                came.entry(id.as_str().parse()?).or_insert_with(|| {
                    counter.fetch_add(1, Ordering::Relaxed);
                    now
                });
            }
            Ok(came)
        });
        Ok(Self {
            count,
            connection,
            task,
        })
    }

    fn count(&self) -> usize {
        self.count
            .load(Ordering::Relaxed)
            .try_into()
            .unwrap_or(usize::MAX)
    }

    async fn end(self) -> Result<HashMap<u64, Instant>> {
        self.connection.close(200, "done".into()).await?;
        self.task.await?
    }
}

fn judge(
    part: &str,
    sent: &[Sent],
    came: HashMap<u64, Instant>,
    report: &mut Report,
) -> Result<()> {
    let end = Instant::now();
    let mut commit = Histogram::<u64>::new_with_bounds(1, 3_600_000_000, 3)?;
    let mut due = commit.clone();
    let mut missing = 0;
    for row in sent {
        // A row that has not come has waited at least until now.
        let at = came.get(&row.id).copied().unwrap_or_else(|| {
            missing += 1;
            end
        });
        // The message may come before COMMIT's answer does.
        commit.saturating_record(micros(at.saturating_duration_since(row.committed)));
        due.saturating_record(micros(at.saturating_duration_since(row.due)));
    }
    for (histogram, from) in [(&commit, "commit"), (&due, "due")] {
        for (quantile, name) in [(0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"), (1.0, "max")] {
            let micros = u32::try_from(histogram.value_at_quantile(quantile)).unwrap_or(u32::MAX);
            let name = format!("{from} to receipt, {name}");
            report.add(part, &name, Unit::Millis, f64::from(micros) / 1000.0);
        }
    }
    report.add(
        part,
        "rows that had not come at the end",
        Unit::Count,
        f64::from(missing),
    );
    Ok(())
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1)
}
