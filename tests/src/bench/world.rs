//! The servers, the tables, and a backlog.

use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::future::try_join_all;
use lapin::options::{QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use outbox_testkit::{Mysql, MysqlOptions, Outboxd, OutboxdConfig, Rabbit, rabbit};

use crate::args::{Args, Mode};
use crate::cases::Case;

/// The program's window, and that of raw publishing.
pub const WINDOW: usize = 4096;
/// Exchange and queue of everything.
pub const NAME: &str = "bench";
/// What every row is of.
pub const EVENT: &str = "OrderPaid";
/// Sessions that write a backlog.
const WRITERS: u32 = 8;

/// Both servers, all run long.
#[derive(Debug)]
pub struct World {
    /// The database.
    pub mysql: Mysql,
    /// The broker.
    pub rabbit: Rabbit,
    per_transaction: u32,
}

impl World {
    /// Starts the servers.
    ///
    /// # Errors
    /// A server that does not start.
    pub async fn start(args: &Args) -> Result<Self> {
        // A buffer pool and a redo log for the rows of a run; what makes a commit durable stays as it is by default.
        let options = MysqlOptions::default()
            .option("--innodb-buffer-pool-size=1G")
            .option("--innodb-redo-log-capacity=2G")
            .option("--binlog-expire-logs-seconds=0");
        let mysql = Mysql::start(options).await?;
        mysql.prepare().await?;
        let rabbit = Rabbit::start().await?;
        rabbit.topology(NAME, NAME, "#").await?;
        Ok(Self {
            mysql,
            rabbit,
            per_transaction: args.per_transaction.max(1),
        })
    }

    /// The program, configured for a table, under a name of its own: it has no position yet.
    ///
    /// # Errors
    /// A configuration that cannot be written.
    pub fn program(&self, name: &str, outbox: &str) -> Result<Outboxd> {
        let config = OutboxdConfig::new(&self.mysql.url("outboxd"), &self.rabbit.url())?
            .set("name", name)?
            .set("lease.ttl", "15s")?
            .with(&format!(
                "rabbitmq.max_in_flight = {WINDOW}\n\
                 [[outbox]]\ntable = \"outbox\"\nexchange = \"{NAME}\"\n{outbox}"
            ))?;
        Outboxd::new(config)
    }

    /// A new, empty `outbox`, with the program's own tables beside it.
    ///
    /// # Errors
    /// The server's.
    pub async fn table(&self, case: Case, mode: Mode) -> Result<()> {
        self.mysql.exec("DROP TABLE IF EXISTS outbox").await?;
        let program = self.program("bench-migrate", "")?;
        program.migrate(&self.mysql, &["--with-outbox"]).await?;
        if case.column() != "JSON" {
            let column = case.column();
            self.mysql
                .exec(format!(
                    "ALTER TABLE outbox MODIFY payload {column} NOT NULL"
                ))
                .await?;
        }
        if mode == Mode::None {
            self.mysql
                .exec(
                    "ALTER TABLE outbox DROP COLUMN status, DROP COLUMN retry_count, DROP COLUMN next_retry_at, \
                     DROP COLUMN locked_by, DROP COLUMN locked_until, DROP COLUMN last_error, \
                     DROP COLUMN updated_at, DROP KEY outbox_due, DROP KEY outbox_aggregate, DROP KEY outbox_settled",
                )
                .await?;
        }
        let minimal = match mode {
            Mode::MarkFull => "REVOKE SESSION_VARIABLES_ADMIN ON *.* FROM 'outboxd'@'%'",
            _ => "GRANT SESSION_VARIABLES_ADMIN ON *.* TO 'outboxd'@'%'",
        };
        self.mysql.exec(minimal).await?;
        Ok(())
    }

    /// A new, empty queue of that type.
    ///
    /// # Errors
    /// The broker's.
    pub async fn queue(&self, kind: &str) -> Result<()> {
        self.rabbit
            .with_channel(async |channel| {
                channel
                    .queue_delete(NAME.into(), QueueDeleteOptions::default())
                    .await?;
                let options = QueueDeclareOptions {
                    durable: true,
                    ..Default::default()
                };
                let mut arguments = FieldTable::default();
                arguments.insert("x-queue-type".into(), AMQPValue::LongString(kind.into()));
                channel
                    .queue_declare(NAME.into(), options, arguments)
                    .await?;
                let bind = QueueBindOptions::default();
                channel
                    .queue_bind(
                        NAME.into(),
                        NAME.into(),
                        "#".into(),
                        bind,
                        FieldTable::default(),
                    )
                    .await?;
                Ok(())
            })
            .await
    }

    /// A channel that stays open, on a connection of its own.
    ///
    /// # Errors
    /// The broker's.
    pub async fn channel(&self) -> Result<(lapin::Connection, lapin::Channel)> {
        let connection = rabbit::connect(&self.rabbit.url()).await?;
        let channel = connection.create_channel().await?;
        Ok((connection, channel))
    }

    /// Commits `rows` rows; quickly, with commits that are not durable while it lasts.
    ///
    /// # Errors
    /// The server's.
    pub async fn fill(&self, case: Case, rows: u32) -> Result<()> {
        self.durable(false).await?;
        let each = rows.div_ceil(WRITERS);
        let writers = (0..WRITERS).map(|writer| {
            let (from, to) = (writer * each, ((writer + 1) * each).min(rows));
            async move {
                write(
                    self.mysql.conn().await?,
                    case,
                    from,
                    to,
                    self.per_transaction,
                )
                .await
            }
        });
        try_join_all(writers).await?;
        self.durable(true).await
    }

    async fn durable(&self, yes: bool) -> Result<()> {
        let (sync, flush) = if yes { (1, 1) } else { (0, 2) };
        self.mysql
            .exec(format!("SET GLOBAL sync_binlog = {sync}"))
            .await?;
        let flush = format!("SET GLOBAL innodb_flush_log_at_trx_commit = {flush}");
        self.mysql.exec(flush).await?;
        Ok(())
    }

    /// Waits until the server has written back most of what the backlog made dirty, so that every measurement starts
    /// from the same.
    ///
    /// # Errors
    /// It has not within two minutes.
    pub async fn settle_down(&self) -> Result<()> {
        self.mysql
            .exec("SET GLOBAL innodb_max_dirty_pages_pct = 0")
            .await?;
        let query = "SELECT CAST(VARIABLE_VALUE AS UNSIGNED) FROM performance_schema.global_status \
                     WHERE VARIABLE_NAME = 'Innodb_buffer_pool_pages_dirty'";
        let clean = outbox_testkit::wait::until(
            "few pages are dirty",
            Duration::from_secs(120),
            async || self.mysql.count(query).await.is_ok_and(|pages| pages < 200),
        );
        clean.await?;
        self.mysql
            .exec("SET GLOBAL innodb_max_dirty_pages_pct = 90")
            .await?;
        Ok(())
    }
}

async fn write(mut conn: Conn, case: Case, from: u32, to: u32, each: u32) -> Result<()> {
    let mut n = from;
    while n < to {
        let end = (n + each).min(to);
        let values: Vec<String> = (n..end)
            .map(|n| {
                format!(
                    "('order', '{}', '{EVENT}', '{}')",
                    Case::aggregate(n),
                    case.body(n)
                )
            })
            .collect();
        let insert =
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES";
        conn.query_drop(format!("{insert} {}", values.join(",")))
            .await
            .context("writing the backlog")?;
        n = end;
    }
    conn.disconnect().await?;
    Ok(())
}
