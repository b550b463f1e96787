//! `demo`: writes sample orders, some rolled back, and with `--watch` receives them and prints
//! each with its latency from the commit.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use futures_util::StreamExt as _;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use outbox_ledger::connect::Db;
use outbox_ledger::demo;
use secrecy::ExposeSecret as _;
use tokio::sync::mpsc;

use super::output;
use crate::config::{Config, UrlSource};

/// One order in so many is rolled back.
const ROLLED_BACK: u32 = 5;
/// How long the last messages may take to arrive.
const PATIENCE: Duration = Duration::from_secs(30);

/// A message that arrived.
struct Arrival {
    id: String,
    body: String,
    at: SystemTime,
}

/// Runs the demo; false where a committed order did not arrive or a rolled-back one did.
pub async fn run(
    config: &Config,
    db: &Db,
    rate: u32,
    count: u32,
    watch: Option<&str>,
) -> anyhow::Result<bool> {
    let table = config.outbox.first().context("no outbox is configured")?;
    demo::prepare(db).await?;
    let mut arrivals = match watch {
        Some(queue) => Some(consume(config, queue).await?),
        None => None,
    };
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / rate);
    let (mut committed, mut seen) = (HashMap::new(), HashMap::new());
    let mut rolled_back = HashSet::new();
    for n in 1..=count {
        ticks.tick().await;
        let order = demo::order(
            db,
            (&table.schema, &table.table),
            n,
            !n.is_multiple_of(ROLLED_BACK),
        )
        .await?;
        if order.committed {
            committed.insert(order.outbox_id.clone(), order.ended);
        } else {
            output::line(format!("row {:>6}  rolled back", order.outbox_id));
            rolled_back.insert(order.outbox_id);
        }
        if let Some(arrivals) = &mut arrivals {
            while let Ok(a) = arrivals.try_recv() {
                print(&a, &committed);
                seen.insert(a.id, a.at);
            }
        }
    }
    let Some(mut arrivals) = arrivals else {
        output::line(format!(
            "{} orders committed, {} rolled back",
            committed.len(),
            rolled_back.len()
        ));
        return Ok(true);
    };
    let all = async {
        while !committed.keys().all(|id| seen.contains_key(id)) {
            let Some(a) = arrivals.recv().await else {
                break;
            };
            print(&a, &committed);
            seen.insert(a.id, a.at);
        }
    };
    let arrived = tokio::time::timeout(PATIENCE, all).await.is_ok();
    let ghosts = rolled_back
        .iter()
        .filter(|id| seen.contains_key(*id))
        .count();
    let mut latencies: Vec<Duration> = committed
        .iter()
        .filter_map(|(id, at)| Some(seen.get(id)?.duration_since(*at).unwrap_or_default()))
        .collect();
    latencies.sort_unstable();
    let percentile = |p: usize| {
        latencies
            .get(latencies.len() * p / 100)
            .copied()
            .unwrap_or_default()
    };
    output::line(format!(
        "{} of {} committed orders arrived, commit to receive p50 {:.1?} p99 {:.1?}; {ghosts} of {} rolled-back ones arrived",
        latencies.len(),
        committed.len(),
        percentile(50),
        percentile(99),
        rolled_back.len(),
    ));
    Ok(arrived && ghosts == 0)
}

fn print(a: &Arrival, committed: &HashMap<String, SystemTime>) {
    // A message can overtake the answer to its own commit.
    let latency = committed
        .get(&a.id)
        .map(|at| a.at.duration_since(*at).unwrap_or_default());
    let latency = latency.map_or_else(
        || "before the commit was answered".to_owned(),
        |l| format!("{l:.1?}"),
    );
    output::line(format!(
        "row {:>6}  {latency:>10}  {}",
        a.id,
        output::printable(&a.body)
    ));
}

/// Declares the queue, binds it to the first outbox's exchange, and consumes it.
async fn consume(config: &Config, queue: &str) -> anyhow::Result<mpsc::Receiver<Arrival>> {
    let exchange = config.outbox.first().and_then(|t| t.exchange.as_static());
    let exchange = exchange
        .context("--watch needs an outbox with a static exchange")?
        .to_owned();
    let url = match &config.rabbitmq.url {
        UrlSource::Inline(url) => url.expose_secret().to_owned(),
        UrlSource::File(path) => std::fs::read_to_string(path)?.trim().to_owned(),
    };
    let first = url.split(',').next().unwrap_or_default().trim().to_owned();
    let connection = lapin::Connection::connect(&first, lapin::ConnectionProperties::default())
        .await
        .context("cannot connect to RabbitMQ")?;
    let channel = connection.create_channel().await?;
    let kind = lapin::ExchangeKind::Topic;
    let durable = lapin::options::ExchangeDeclareOptions {
        durable: true,
        ..Default::default()
    };
    channel
        .exchange_declare(
            exchange.as_str().into(),
            kind,
            durable,
            FieldTable::default(),
        )
        .await
        .context("cannot declare the exchange")?;
    let options = QueueDeclareOptions {
        durable: true,
        ..Default::default()
    };
    channel
        .queue_declare(queue.into(), options, FieldTable::default())
        .await?;
    channel
        .queue_bind(
            queue.into(),
            exchange.into(),
            "#".into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await?;
    let tag = "outboxd-demo".into();
    let mut consumer = channel
        .basic_consume(
            queue.into(),
            tag,
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await?;
    let (tx, rx) = mpsc::channel(1024);
    tokio::spawn(async move {
        // Keeps the connection open for as long as it consumes.
        let _connection = connection;
        while let Some(Ok(delivery)) = consumer.next().await {
            let at = SystemTime::now();
            let id = delivery
                .properties
                .message_id()
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default();
            let body = String::from_utf8_lossy(&delivery.data).into_owned();
            if delivery.ack(BasicAckOptions::default()).await.is_err()
                || tx.send(Arrival { id, body, at }).await.is_err()
            {
                break;
            }
        }
    });
    Ok(rx)
}
