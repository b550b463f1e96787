//! Servers and a program of a test's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use outbox_testkit::http::{Response, request};
use outbox_testkit::{Mysql, MysqlOptions, Outboxd, OutboxdConfig, Rabbit, wait};
use serde_json::Value;
use tokio::sync::{Semaphore, SemaphorePermit};

pub const SOON: Duration = Duration::from_secs(60);
pub const TOKEN: &str = "open-sesame-1";
/// What a client of the API sends with an order.
pub const BEARER: (&str, &str) = ("authorization", "Bearer open-sesame-1");

/// More servers at once only make each other time out.
static SLOTS: Semaphore = Semaphore::const_new(2);
static NUMBER: AtomicU32 = AtomicU32::new(0);

pub struct World {
    pub outboxd: Outboxd,
    pub mysql: Mysql,
    pub rabbit: Arc<Rabbit>,
    /// Exchange and queue.
    pub name: String,
    pub config: OutboxdConfig,
    _slot: SemaphorePermit<'static>,
}

impl World {
    /// The program ready, with a token, on the shared broker; `toml` is laid over.
    pub async fn start(toml: &str) -> Result<Self> {
        Self::start_on(Rabbit::shared().await?, toml).await
    }

    pub async fn start_on(rabbit: Arc<Rabbit>, toml: &str) -> Result<Self> {
        let slot = SLOTS.acquire().await?;
        let mysql = Mysql::start(MysqlOptions::default()).await?;
        mysql.prepare().await?;
        let name = format!("http-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        rabbit.topology(&name, &name, "#").await?;
        let config = OutboxdConfig::new(&mysql.url("outboxd"), &rabbit.url())?
            .with(&format!(
                "name = \"{name}\"\nhttp.token = \"{TOKEN}\"\ntail.checkpoint_interval = \"1s\"\n\
                 poller.interval = \"1s\"\n[[outbox]]\ntable = \"outbox\"\nexchange = \"{name}\""
            ))?
            .with(toml)?;
        let mut outboxd = Outboxd::new(config.clone())?;
        outboxd.migrate(&mysql, &["--with-outbox"]).await?;
        outboxd.start().await?;
        outboxd.wait_ready().await?;
        Ok(Self {
            outboxd,
            mysql,
            rabbit,
            name,
            config,
            _slot: slot,
        })
    }

    /// One row, by id, with its status as it is inserted: a failed one is nobody's until it is retried.
    pub async fn insert(&self, id: u32, status: u8, event: &str, payload: &str) -> Result<()> {
        let sql = format!(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, status, last_error) \
             VALUES ({id}, 'order', 'o-{}', '{event}', '{payload}', {status}, IF({status} = 2, 'no route', NULL))",
            id % 3
        );
        self.mysql.exec(sql).await.map(drop)
    }

    /// Waits until the row has this status in the table.
    pub async fn status_of(&self, id: u32, status: u8) -> Result<()> {
        let sql = format!("SELECT COUNT(*) FROM outbox WHERE id = {id} AND status = {status}");
        wait::until(&format!("row {id} has status {status}"), SOON, async || {
            matches!(self.mysql.count(&sql).await, Ok(1))
        })
        .await
        .with_context(|| self.outboxd.log())
    }

    /// An order with the token; it has to be obeyed.
    pub async fn order(&self, path: &str, body: &str) -> Result<Value> {
        let answer = self.outboxd.post(path, &[BEARER], body).await?;
        ensure!(answer.status == 200, "{path}: {answer:?}");
        answer.json()
    }

    pub async fn read(&self, path: &str) -> Result<Value> {
        let answer = self.outboxd.get(path).await?;
        ensure!(answer.status == 200, "{path}: {answer:?}");
        answer.json()
    }

    pub async fn raw(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Result<Response> {
        request(self.outboxd.http_port, method, path, headers, body).await
    }
}
