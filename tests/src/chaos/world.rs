//! The servers, two instances of the program behind proxies of their own, writers and consumers.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use outbox_testkit::{
    Mysql, MysqlOptions, Outboxd, OutboxdConfig, Proxy, Rabbit, Sink, Writer, WriterOptions, wait,
};

/// Long enough for anything that has to happen, on a loaded machine too.
pub(crate) const SOON: Duration = Duration::from_secs(90);
/// `lease.ttl` of both instances.
pub(crate) const LEASE: Duration = Duration::from_secs(5);
/// `tail.verify_after` of both instances.
pub(crate) const VERIFY_AFTER: Duration = Duration::from_secs(2);
/// `rabbitmq.max_in_flight` of both instances: what one fault may publish twice.
pub(crate) const WINDOW: usize = 300;
const INSTANCES: usize = 2;

/// An outbox table, with an exchange and a queue of the same name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outbox {
    /// Table, exchange and queue.
    pub(crate) name: &'static str,
    /// Its `ordering`.
    pub(crate) ordering: &'static str,
    /// Its writer's share of the rows.
    pub(crate) share: f64,
    /// Before the numbers of its aggregates.
    pub(crate) prefix: &'static str,
}

/// Both tables share one stream and one window.
pub(crate) const OUTBOXES: [Outbox; 2] = [
    Outbox {
        name: "outbox",
        ordering: "aggregate",
        share: 0.6,
        prefix: "a",
    },
    Outbox {
        name: "strict_outbox",
        ordering: "strict",
        share: 0.4,
        prefix: "s",
    },
];

/// One instance of the program.
#[derive(Debug)]
pub(crate) struct Node {
    /// The program.
    pub(crate) outboxd: Outboxd,
    /// Between it and MySQL.
    pub(crate) to_mysql: Proxy,
    /// Between it and RabbitMQ.
    pub(crate) to_broker: Proxy,
    /// Overtakings that it counted in its earlier lives.
    counted: f64,
}

impl Node {
    async fn new(mysql: &Mysql, rabbit: &Rabbit) -> Result<Self> {
        let to_mysql = Proxy::start(mysql.port).await?;
        let to_broker = Proxy::start(rabbit.port).await?;
        let mysql_url = mysql.url_through("outboxd", to_mysql.port);
        let broker_url = Rabbit::url_through(to_broker.port);
        let mut toml = format!(
            "name = \"chaos\"\n\
             mysql.heartbeat = \"1s\"\n\
             rabbitmq = {{ max_in_flight = {WINDOW}, confirm_timeout = \"10s\" }}\n\
             retry = {{ base = \"1s\", factor = 1.0, cap = \"1s\", max_retries = 1000 }}\n\
             poller = {{ interval = \"1s\", pending_grace = \"2s\", lock_ttl = \"10s\" }}\n\
             tail = {{ checkpoint_interval = \"1s\", verify_after = \"{}s\" }}\n\
             lease.ttl = \"{}s\"\n",
            VERIFY_AFTER.as_secs(),
            LEASE.as_secs()
        );
        for outbox in OUTBOXES {
            let Outbox { name, ordering, .. } = outbox;
            toml.push_str(&format!(
                "[[outbox]]\ntable = \"{name}\"\nexchange = \"{name}\"\nordering = \"{ordering}\"\n"
            ));
        }
        let config = OutboxdConfig::new(&mysql_url, &broker_url)?.with(&toml)?;
        Ok(Self {
            outboxd: Outboxd::new(config)?,
            to_mysql,
            to_broker,
            counted: 0.0,
        })
    }

    /// SIGKILL; what it has counted is read before.
    pub(crate) async fn kill9(&mut self) -> Result<()> {
        self.counted += self.overtaken_in_this_life().await;
        self.outboxd.kill9()
    }

    /// SIGTERM; what it has counted is read before.
    pub(crate) async fn terminate(&mut self) -> Result<()> {
        self.counted += self.overtaken_in_this_life().await;
        let status = self.outboxd.terminate().await?;
        ensure!(status.code() == Some(0), "SIGTERM ended with {status}");
        Ok(())
    }

    async fn overtaken_in_this_life(&self) -> f64 {
        let metric = "outboxd_overtaken_total{table=\"app.outbox\"}";
        self.outboxd.metric(metric).await.unwrap_or_default()
    }

    /// Overtakings in the first table that it has counted in all its lives.
    pub(crate) async fn overtaken(&self) -> f64 {
        self.counted + self.overtaken_in_this_life().await
    }

    async fn leads(&self) -> bool {
        matches!(self.outboxd.metric("outboxd_leader").await, Ok(1.0))
    }
}

/// All that runs.
#[derive(Debug)]
pub(crate) struct World {
    /// The database.
    pub(crate) mysql: Mysql,
    /// The broker.
    pub(crate) rabbit: Rabbit,
    /// The instances.
    pub(crate) nodes: Vec<Node>,
    /// The consumers of [`OUTBOXES`].
    pub(crate) sinks: Vec<Sink>,
}

impl World {
    /// Starts servers, instances and consumers.
    pub(crate) async fn start() -> Result<Self> {
        let (mysql, rabbit) =
            tokio::try_join!(Mysql::start(MysqlOptions::default()), Rabbit::start())?;
        mysql.prepare().await?;
        let mut nodes = Vec::new();
        for _ in 0..INSTANCES {
            nodes.push(Node::new(&mysql, &rabbit).await?);
        }
        let migrate = nodes[0].outboxd.migrate(&mysql, &["--with-outbox"]);
        migrate.await?;
        let [first, second] = OUTBOXES.map(|outbox| outbox.name);
        mysql
            .exec(format!("CREATE TABLE {second} LIKE {first}"))
            .await?;
        let mut sinks = Vec::new();
        for Outbox { name, .. } in OUTBOXES {
            rabbit.topology(name, name, "#").await?;
            sinks.push(Sink::start(&rabbit.url(), name));
        }
        for node in &mut nodes {
            node.outboxd.start().await?;
            node.outboxd.wait_ready().await?;
        }
        Ok(Self {
            mysql,
            rabbit,
            nodes,
            sinks,
        })
    }

    /// One writer for each of [`OUTBOXES`]; together about `rate` rows a second.
    pub(crate) fn writers(&self, rate: f64, aggregates: u32, seed: u64) -> Result<Vec<Writer>> {
        OUTBOXES
            .iter()
            .zip(seed..)
            .map(|(outbox, seed)| {
                let options = WriterOptions {
                    rate: rate * outbox.share,
                    aggregates: aggregates / 2,
                    prefix: outbox.prefix.to_owned(),
                    event: "OrderPaid".to_owned(),
                    table: outbox.name.to_owned(),
                    seed,
                };
                Writer::start(&self.mysql, options)
            })
            .collect()
    }

    /// The index of the instance that leads.
    ///
    /// # Errors
    /// None does.
    pub(crate) async fn leader(&self) -> Result<usize> {
        wait::until_ok("an instance leads", SOON, async || {
            for (i, node) in self.nodes.iter().enumerate() {
                if node.leads().await {
                    return Ok(i);
                }
            }
            Err("none says so")
        })
        .await
    }

    /// Messages that have come, copies included.
    pub(crate) fn received(&self) -> usize {
        self.sinks.iter().map(Sink::count).sum()
    }

    /// How many of them are copies.
    pub(crate) fn copies(&self) -> usize {
        self.sinks
            .iter()
            .map(|sink| {
                let ids = sink.ids();
                ids.len() - ids.iter().collect::<HashSet<_>>().len()
            })
            .sum()
    }

    /// Waits until messages of both tables come.
    pub(crate) async fn flows(&self) -> Result<()> {
        let before: Vec<usize> = self.sinks.iter().map(Sink::count).collect();
        wait::until("messages of both tables come", SOON, async || {
            self.sinks
                .iter()
                .zip(&before)
                .all(|(sink, before)| sink.count() >= before + 10)
        })
        .await
        .with_context(|| self.logs())
    }

    /// Neither instance has ended by itself or panicked.
    pub(crate) fn alive(&mut self) -> Result<()> {
        for node in &mut self.nodes {
            if let Some(status) = node.outboxd.ended()? {
                bail!("an instance ended by itself ({status})\n{}", self.logs());
            }
            let log = node.outboxd.log();
            ensure!(!log.contains("panicked at"), "a panic\n{}", self.logs());
        }
        Ok(())
    }

    /// The ends of the logs.
    pub(crate) fn logs(&self) -> String {
        let mut text = String::new();
        for (i, node) in self.nodes.iter().enumerate() {
            let log = node.outboxd.log();
            let lines: Vec<&str> = log.lines().collect();
            let from = lines.len().saturating_sub(30);
            text.push_str(&format!("instance {i}:\n{}\n", lines[from..].join("\n")));
        }
        text
    }
}
