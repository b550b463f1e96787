//! An application that writes outbox rows in transactions, and remembers what it committed.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use crate::Database;

/// What a writer does.
#[derive(Debug, Clone)]
pub struct WriterOptions {
    /// Rows a second, about.
    pub rate: f64,
    /// How many aggregates it spreads its rows over.
    pub aggregates: u32,
    /// Before the number in an aggregate's id: two writers must not share an aggregate, or its order is unknown.
    pub prefix: String,
    /// Its `event_type`.
    pub event: String,
    /// The outbox table: `aggregate_type`, `aggregate_id`, `event_type`, `payload`, an AUTO_INCREMENT `id`.
    pub table: String,
    /// Decides sizes, aggregates and roll-backs.
    pub seed: u64,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self {
            rate: 300.0,
            aggregates: 40,
            prefix: "a".into(),
            event: "OrderPaid".into(),
            table: "outbox".into(),
            seed: 1,
        }
    }
}

/// A row that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Its id, as its message's `message_id`.
    pub id: String,
    /// Its `aggregate_id`.
    pub aggregate: String,
    /// Its payload, exactly as the server prints it.
    pub payload: String,
    /// When COMMIT had returned.
    pub at: SystemTime,
}

/// What a writer did.
#[derive(Debug, Clone, Default)]
pub struct Written {
    /// The rows it committed, in order.
    pub committed: Vec<Row>,
    /// The ids of rows that were rolled back.
    pub rolled_back: Vec<String>,
}

impl Written {
    /// The ids of all that was committed.
    #[must_use]
    pub fn ids(&self) -> Vec<String> {
        self.committed.iter().map(|row| row.id.clone()).collect()
    }
}

/// A running writer; one transaction in ten is rolled back. Survives restarts of its server.
#[derive(Debug)]
pub struct Writer {
    stop: watch::Sender<bool>,
    task: JoinHandle<Result<Written>>,
}

impl Writer {
    /// Starts writing to `database` as root.
    ///
    /// # Errors
    /// The server's URL does not parse.
    pub fn start(database: &Database, options: WriterOptions) -> Result<Self> {
        let url = format!(
            "mysql://root@127.0.0.1:{}/app?prefer_socket=false",
            database.port
        );
        let (stop, stopped) = watch::channel(false);
        let work = Work {
            opts: Opts::from_url(&url)?,
            random: StdRng::seed_from_u64(options.seed),
            options,
            sequence: 0,
            written: Written::default(),
        };
        let task = tokio::spawn(work.run(stopped));
        Ok(Self { stop, task })
    }

    /// Ends it, and returns what it wrote. A commit whose answer was lost is looked up in the table.
    ///
    /// # Errors
    /// The server does not come back.
    pub async fn finish(self) -> Result<Written> {
        self.stop.send_replace(true);
        self.task.await?
    }

    /// Lets it write for this long, then as [`Self::finish`].
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub async fn finish_after(self, time: Duration) -> Result<Written> {
        sleep(time).await;
        self.finish().await
    }
}

struct Work {
    opts: Opts,
    options: WriterOptions,
    random: StdRng,
    sequence: u64,
    written: Written,
}

impl Work {
    async fn run(mut self, stopped: watch::Receiver<bool>) -> Result<Written> {
        let mut conn = None;
        let mut next = Instant::now();
        while !*stopped.borrow() {
            let Some(open) = &mut conn else {
                conn = Conn::new(self.opts.clone()).await.ok();
                if conn.is_none() {
                    sleep(Duration::from_millis(100)).await;
                }
                continue;
            };
            let size = [1_u32, 1, 1, 2, 5][self.random.random_range(0..5)];
            let mut rows = Vec::new();
            let outcome = self.transaction(open, size, &mut rows).await;
            match outcome {
                Ok(true) => self.written.committed.extend(rows),
                Ok(false) => self
                    .written
                    .rolled_back
                    .extend(rows.into_iter().map(|row| row.id)),
                Err(error) => {
                    tracing::debug!(%error, "the writer lost its server");
                    conn = None;
                    self.resolve(rows).await?;
                }
            }
            // Falling behind is not made up for: a burst after an outage is another test.
            next = (next + Duration::from_secs_f64(f64::from(size) / self.options.rate))
                .max(Instant::now());
            sleep_until(next).await;
        }
        Ok(self.written)
    }

    /// One transaction; true if it was committed. `rows` holds what it wrote, also when it fails half-way.
    async fn transaction(
        &mut self,
        conn: &mut Conn,
        size: u32,
        rows: &mut Vec<Row>,
    ) -> Result<bool> {
        let insert = format!(
            "INSERT INTO {} (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', ?, ?, ?)",
            self.options.table
        );
        conn.query_drop("START TRANSACTION").await?;
        for _ in 0..size {
            self.sequence += 1;
            let number = self.random.random_range(0..self.options.aggregates);
            let aggregate = format!("{}{number}", self.options.prefix);
            // Keys by length, a space after each colon and comma: as MySQL and MariaDB both print it.
            let payload = format!(
                r#"{{"seq": {}, "aggregate": "{aggregate}"}}"#,
                self.sequence
            );
            conn.exec_drop(&insert, (&aggregate, &self.options.event, &payload))
                .await?;
            let id = conn
                .last_insert_id()
                .context("the outbox table has no AUTO_INCREMENT id")?;
            rows.push(Row {
                id: id.to_string(),
                aggregate,
                payload,
                at: SystemTime::now(),
            });
        }
        if self.random.random_ratio(1, 10) {
            conn.query_drop("ROLLBACK").await?;
            return Ok(false);
        }
        conn.query_drop("COMMIT").await?;
        let at = SystemTime::now();
        rows.iter_mut().for_each(|row| row.at = at);
        Ok(true)
    }

    /// After a lost answer the table decides. Ids of a server that crashed may be used again, so payloads are
    /// compared too.
    async fn resolve(&mut self, rows: Vec<Row>) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let ids: Vec<&str> = rows.iter().map(|row| row.id.as_str()).collect();
        let query = format!(
            "SELECT CAST(id AS CHAR), CAST(payload AS CHAR) FROM {} WHERE id IN ({})",
            self.options.table,
            ids.join(", ")
        );
        let end = Instant::now() + Duration::from_secs(120);
        let found: Vec<(String, String)> = loop {
            match self.ask(&query).await {
                Ok(found) => break found,
                Err(error) if Instant::now() > end => {
                    return Err(error).context("the writer's server is not back");
                }
                Err(_) => sleep(Duration::from_millis(100)).await,
            }
        };
        for row in rows {
            if found
                .iter()
                .any(|(id, payload)| *id == row.id && *payload == row.payload)
            {
                self.written.committed.push(row);
            } else {
                self.written.rolled_back.push(row.id);
            }
        }
        Ok(())
    }

    async fn ask(&self, query: &str) -> mysql_async::Result<Vec<(String, String)>> {
        Conn::new(self.opts.clone()).await?.query(query).await
    }
}
