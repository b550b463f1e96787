//! What the end-to-end tests share: a world of its own for each of them, real servers and the real program.
//!
//! Between the program and each of its servers stands a proxy, so that any test can disturb the network.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use outbox_testkit::writer::Row;
use outbox_testkit::{
    Mariadb, Mysql, MysqlOptions, Oracle, Outboxd, OutboxdConfig, Proxy, Rabbit, Sink, Verdict,
    Written, wait,
};
use tokio::sync::{Semaphore, SemaphorePermit};

/// Long enough for anything that has to happen, on a loaded machine too.
pub const SOON: Duration = Duration::from_secs(60);
/// The window of every test's program: what a crash may publish twice.
pub const WINDOW: usize = 300;

/// More worlds at once only make each other time out.
static SLOTS: Semaphore = Semaphore::const_new(3);
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Makes two tests of each of these functions, which take a [`Setup`]: one on MySQL, one on MariaDB.
#[macro_export]
macro_rules! on_both {
    ($($name:ident),+ $(,)?) => {
        mod on_mysql {
            $(#[tokio::test]
            async fn $name() -> anyhow::Result<()> {
                super::$name($crate::Setup::new()).await
            })+
        }
        mod on_mariadb {
            $(#[tokio::test]
            async fn $name() -> anyhow::Result<()> {
                super::$name($crate::Setup::mariadb()).await
            })+
        }
    };
}

/// What a world is to be like.
#[derive(Debug, Default)]
pub struct Setup {
    mysql: MysqlOptions,
    mariadb: bool,
    own_broker: bool,
    toml: String,
    outbox: String,
    table: Option<String>,
}

impl Setup {
    /// The default: GTIDs, the shared broker, the default outbox table.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same on MariaDB.
    #[must_use]
    pub fn mariadb() -> Self {
        Self {
            mariadb: true,
            ..Self::default()
        }
    }

    /// A command line option of the database server.
    #[must_use]
    pub fn mysql(mut self, option: &str) -> Self {
        self.mysql = self.mysql.option(option);
        self
    }

    /// A broker that no other test sees.
    #[must_use]
    pub fn own_broker(mut self) -> Self {
        self.own_broker = true;
        self
    }

    /// Configuration, as TOML.
    #[must_use]
    pub fn config(mut self, toml: &str) -> Self {
        self.toml.push_str(toml);
        self.toml.push('\n');
        self
    }

    /// Keys of the `[[outbox]]`, as TOML.
    #[must_use]
    pub fn outbox(mut self, toml: &str) -> Self {
        self.outbox.push_str(toml);
        self.outbox.push('\n');
        self
    }

    /// An outbox table of the application's own: its CREATE statement. It is called `outbox`.
    #[must_use]
    pub fn table(mut self, sql: &str) -> Self {
        self.table = Some(sql.to_owned());
        self
    }

    /// Starts the servers and migrates; the program does not run yet.
    ///
    /// # Errors
    /// A server that does not start.
    pub async fn build(self) -> Result<World> {
        let slot = SLOTS.acquire().await?;
        let mysql = if self.mariadb {
            Mariadb::start(self.mysql).await?
        } else {
            Mysql::start(self.mysql).await?
        };
        mysql.prepare().await?;
        let rabbit = if self.own_broker {
            Arc::new(Rabbit::start().await?)
        } else {
            Rabbit::shared().await?
        };
        let name = format!("e2e-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        rabbit.topology(&name, &name, "#").await?;
        let to_mysql = Proxy::start(mysql.port).await?;
        let to_broker = Proxy::start(rabbit.port).await?;
        let config = OutboxdConfig::new(
            &mysql.url_through("outboxd", to_mysql.port),
            &Rabbit::url_through(to_broker.port),
        )?
        .with(&format!(
            "rabbitmq.max_in_flight = {WINDOW}\n\
             tail.checkpoint_interval = \"1s\"\n\
             poller.interval = \"1s\"\n\
             [[outbox]]\ntable = \"outbox\"\nexchange = \"{name}\"\n{}",
            self.outbox
        ))?
        .with(&self.toml)?;
        let outboxd = Outboxd::new(config.clone())?;
        match &self.table {
            Some(sql) => {
                outboxd.migrate(&mysql, &[]).await?;
                mysql.exec(sql).await?;
            }
            None => {
                outboxd.migrate(&mysql, &["--with-outbox"]).await?;
            }
        }
        let sink = Sink::start(&rabbit.url(), &name);
        Ok(World {
            outboxd,
            sink,
            to_mysql,
            to_broker,
            rabbit,
            mysql,
            name,
            config,
            _slot: slot,
        })
    }

    /// As [`Self::build`], with the program running and ready.
    ///
    /// # Errors
    /// A server or the program does not start.
    pub async fn start(self) -> Result<World> {
        let mut world = self.build().await?;
        world.run().await?;
        Ok(world)
    }
}

/// Servers, the program, and a consumer. Dropping it ends all of them (not the shared broker).
#[derive(Debug)]
pub struct World {
    /// The program.
    pub outboxd: Outboxd,
    /// Consumes the queue.
    pub sink: Sink,
    /// Between the program and MySQL.
    pub to_mysql: Proxy,
    /// Between the program and RabbitMQ.
    pub to_broker: Proxy,
    /// The broker.
    pub rabbit: Arc<Rabbit>,
    /// The database.
    pub mysql: Mysql,
    /// Exchange and queue.
    pub name: String,
    /// The program's configuration, for further instances.
    pub config: OutboxdConfig,
    _slot: SemaphorePermit<'static>,
}

impl World {
    /// Starts the program and waits until it is ready.
    ///
    /// # Errors
    /// It is not.
    pub async fn run(&mut self) -> Result<()> {
        self.outboxd.start().await?;
        self.outboxd.wait_ready().await
    }

    /// SIGKILL, and starts it again.
    ///
    /// # Errors
    /// It is not ready.
    pub async fn crash(&mut self) -> Result<()> {
        self.outboxd.kill9()?;
        self.run().await
    }

    /// The broker, if it is this world's own.
    ///
    /// # Errors
    /// It is the shared one.
    pub fn own_rabbit(&mut self) -> Result<&mut Rabbit> {
        Arc::get_mut(&mut self.rabbit).context("the broker is shared")
    }

    /// Commits these many rows, each in a transaction of its own, spread over ten aggregates.
    ///
    /// # Errors
    /// The server's.
    pub async fn insert(&self, rows: u32) -> Result<()> {
        use mysql_async::prelude::Queryable;
        let mut conn = self.mysql.conn().await?;
        for n in 0..rows {
            conn.query_drop(insert(n)).await?;
        }
        conn.disconnect().await?;
        Ok(())
    }

    /// What the table says was committed, in the order of its ids: judged as the order of commits, so the test must
    /// have written each aggregate from one session.
    ///
    /// # Errors
    /// The server's.
    pub async fn committed(&self) -> Result<Written> {
        let rows: Vec<(String, String, String)> = self
            .mysql
            .query_rows(
                "SELECT CAST(id AS CHAR), aggregate_id, CAST(payload AS CHAR) FROM outbox ORDER BY id",
            )
            .await?;
        let committed = rows
            .into_iter()
            .map(|(id, aggregate, payload)| Row {
                id,
                aggregate,
                payload,
                at: SystemTime::now(),
            })
            .collect();
        Ok(Written {
            committed,
            rolled_back: Vec::new(),
        })
    }

    /// Waits until all that was `written` has come and every row is marked as sent, then judges.
    ///
    /// # Errors
    /// The first law that was broken, and the end of the program's log.
    pub async fn judge(&self, written: Written, duplicates: usize) -> Result<Verdict> {
        let judged = async {
            self.sink.wait_for_ids(written.ids(), SOON).await?;
            self.all_sent().await?;
            Oracle::new([written]).judge(&self.sink.received(), duplicates)
        };
        judged.await.with_context(|| self.log_end())
    }

    /// [`Self::judge`] of what the table says.
    ///
    /// # Errors
    /// As [`Self::judge`].
    pub async fn judge_table(&self, duplicates: usize) -> Result<Verdict> {
        self.judge(self.committed().await?, duplicates).await
    }

    /// Waits until no row is anything but sent.
    ///
    /// # Errors
    /// How many are not.
    pub async fn all_sent(&self) -> Result<()> {
        let query = "SELECT COUNT(*) FROM outbox WHERE status <> 1";
        wait::until_ok("every row is sent", SOON, async || {
            let left = self.mysql.count(query).await?;
            ensure!(left == 0, "{left} are not");
            Ok(())
        })
        .await
    }

    /// The stored position as the program prints it.
    ///
    /// # Errors
    /// The program's.
    pub async fn position(&self) -> Result<String> {
        let shown = self.outboxd.ok(&["position", "show", "--json"]).await?;
        let shown: serde_json::Value = serde_json::from_str(&shown)?;
        Ok(shown["position"].as_str().unwrap_or_default().to_owned())
    }

    /// Waits until the program has logged `text` at least `times` since it was first started.
    ///
    /// # Errors
    /// It has not.
    pub async fn logged(&self, text: &str, times: usize) -> Result<()> {
        let what = format!("{text:?} is in the log {times} times");
        wait::until(&what, SOON, async || self.times_logged(text) >= times)
            .await
            .with_context(|| self.log_end())
    }

    /// How often the program has logged `text`.
    #[must_use]
    pub fn times_logged(&self, text: &str) -> usize {
        self.outboxd.log().matches(text).count()
    }

    /// The end of the program's log, for a failed test.
    #[must_use]
    pub fn log_end(&self) -> String {
        let log = self.outboxd.log();
        let lines: Vec<&str> = log.lines().rev().take(25).collect();
        let lines: Vec<&str> = lines.into_iter().rev().collect();
        format!("log of outboxd:\n{}", lines.join("\n"))
    }

    /// Ends the program's dump on the server and returns how many dumps there were.
    ///
    /// # Errors
    /// The server's.
    pub async fn kill_dump(&self) -> Result<usize> {
        let dumps: Vec<u64> = self
            .mysql
            .query_rows(
                "SELECT id FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'",
            )
            .await?;
        for id in &dumps {
            self.mysql.exec(format!("KILL {id}")).await?;
        }
        Ok(dumps.len())
    }

    /// Messages that came as copies.
    #[must_use]
    pub fn duplicates(&self) -> usize {
        let ids = self.sink.ids();
        ids.len() - ids.iter().collect::<HashSet<_>>().len()
    }
}

/// The statement that inserts row number `n`.
#[must_use]
pub fn insert(n: u32) -> String {
    format!(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) \
         VALUES ('order', 'o{}', 'OrderPaid', JSON_OBJECT('n', {n}))",
        n % 10
    )
}

/// The statement that inserts `rows` rows (up to a million) at once, with payloads of `bytes` more bytes.
#[must_use]
pub fn insert_many(rows: u32, bytes: u32) -> String {
    // Both families stop a recursion at a thousand. The numbers are sorted, not the rows: large ones do not fit.
    format!(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) \
         SELECT 'order', CONCAT('o', n % 10), 'OrderPaid', JSON_OBJECT('n', n, 'pad', REPEAT('x', {bytes})) \
         FROM (WITH RECURSIVE seq (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM seq WHERE i < 999) \
         SELECT 1000 * a.i + b.i + 1 AS n FROM seq AS a JOIN seq AS b \
         WHERE a.i <= {} AND 1000 * a.i + b.i < {rows} ORDER BY n LIMIT 1000000) AS numbers",
        rows.saturating_sub(1) / 1000
    )
}
