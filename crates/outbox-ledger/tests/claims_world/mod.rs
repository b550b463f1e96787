//! A server with our tables, and stores on it.
#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use outbox_core::failure::Failure;
use outbox_core::ports::{ClaimToken, PollStore, RowOutcome, Scan, Verdict};
use outbox_core::retry::RetryPolicy;
use outbox_core::row::{Aggregate, OutboxRow, RowId, RowKey, TableIdx};
use outbox_core::spec::{ColumnNames, OnSent, OnUnroutable, Ordering, TableSpec, Tracking};
use outbox_core::status::{StatusValue, StatusValues};
use outbox_core::template::Template;
use outbox_ledger::claims::PollLedger;
use outbox_ledger::connect::{Db, DbConfig, Session, UrlSource};
use outbox_ledger::lease::{Epoch, Lease};
use outbox_ledger::migrate;
use outbox_ledger::table::OutboxTable;
use outbox_testkit::{Database, Mariadb, Mysql, MysqlOptions};

pub const T0: TableIdx = TableIdx(0);
pub const TTL: Duration = Duration::from_secs(60);
pub const NAME: &str = "test";

pub const SEED_TWO: &str = "CREATE TABLE outbox ( id BIGINT NOT NULL AUTO_INCREMENT, aggregate_id VARCHAR(64) NOT NULL COMMENT 'x', event_type VARCHAR(128) NOT NULL,
 payload JSON NOT NULL, status TINYINT NOT NULL DEFAULT 0, retry_count INT NOT NULL DEFAULT 0, created_at DATETIME NOT NULL DEFAULT CURRENT_TIMESTAMP,
 updated_at DATETIME NOT NULL DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP, PRIMARY KEY (id), INDEX idx_status_created (status, created_at)) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4";
pub const SEED_ONE: &str = "CREATE TABLE ss_bill_outbox (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, bill_id VARCHAR(64) NOT NULL, event_type VARCHAR(64) NOT NULL, payload JSON NOT NULL,
 status VARCHAR(16) NOT NULL DEFAULT 'PENDING', retry_count INT NOT NULL DEFAULT 0, next_retry_at DATETIME NULL, locked_by VARCHAR(64) NULL, locked_until DATETIME NULL,
 created_at DATETIME NOT NULL DEFAULT CURRENT_TIMESTAMP, KEY k (status, next_retry_at)) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4";

pub struct World {
    pub server: Database,
    pub db: Db,
    pub epoch: Epoch,
}

pub fn db_of(server: &Database, user: &str) -> Db {
    let url = UrlSource::Value(server.url(user).into());
    Db::new(DbConfig {
        // A test that holds a session open must not lose it.
        lease_ttl: Duration::from_secs(60),
        ..DbConfig::new(url)
    })
    .unwrap()
}

/// A pool of one: its session's counters are those of everything that is done.
pub fn one_connection(server: &Database) -> Db {
    let url = UrlSource::Value(server.url("outboxd").into());
    Db::new(DbConfig {
        lease_ttl: Duration::from_secs(60),
        max_connections: 1,
        ..DbConfig::new(url)
    })
    .unwrap()
}

impl World {
    pub async fn mysql() -> Result<Self> {
        Self::on(Mysql::start(MysqlOptions::default()).await?).await
    }

    pub async fn mariadb() -> Result<Self> {
        Self::on(Mariadb::start(MysqlOptions::default()).await?).await
    }

    pub async fn on(server: Database) -> Result<Self> {
        server.prepare().await?;
        let migrator = db_of(&server, "migrator");
        migrate::run(&migrator, true).await?;
        migrator.close().await;
        let db = db_of(&server, "outboxd");
        let lease = Lease::new(db.clone(), NAME.into(), "here", Duration::from_secs(300));
        let epoch = lease.acquire().await?.expect("nobody else leads");
        Ok(Self { server, db, epoch })
    }

    pub async fn tables(&self, specs: &[TableSpec]) -> Result<Arc<Vec<OutboxTable>>> {
        let family = self.db.family().await?;
        let mut session = self.db.session().await?;
        let mut tables = Vec::new();
        for (i, spec) in specs.iter().enumerate() {
            let idx = TableIdx(u16::try_from(i)?);
            tables.push(OutboxTable::open(&mut session, family, idx, spec, NAME.into()).await?);
        }
        session.finish();
        Ok(Arc::new(tables))
    }

    pub async fn store(&self, specs: &[TableSpec]) -> Result<PollLedger> {
        Ok(PollLedger::new(
            self.db.clone(),
            self.epoch.clone(),
            self.tables(specs).await?,
            RetryPolicy::default(),
            TTL,
        ))
    }

    /// A connection of the application's.
    pub async fn open(&self) -> Result<Session> {
        Ok(db_of(&self.server, "migrator").session().await?)
    }

    pub async fn insert(&self, aggregate: &str, more: &str, values: &str) -> Result<()> {
        let sql = format!(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload{more}) \
             VALUES ('order', '{aggregate}', 'Paid', '{{}}'{values})"
        );
        self.server.exec(sql).await?;
        Ok(())
    }
}

/// One statement, by the text protocol.
pub async fn say(conn: &mut Session, statement: impl Into<String>) -> Result<()> {
    sqlx::raw_sql(sqlx::AssertSqlSafe(statement.into()))
        .execute(&mut **conn)
        .await?;
    Ok(())
}

pub fn spec(table: &str) -> TableSpec {
    TableSpec {
        schema: "app".into(),
        table: table.into(),
        tracking: Tracking::Status,
        on_sent: OnSent::Mark,
        columns: ColumnNames::default(),
        status_values: StatusValues::default(),
        exchange: Template::parse("outbox").unwrap(),
        routing_key: Template::parse("{event_type}").unwrap(),
        ordering: Ordering::Aggregate,
        failed_blocks_aggregate: false,
        on_unroutable: OnUnroutable::Retry,
        max_body: None,
    }
}

pub fn seed_one() -> TableSpec {
    let mut spec = spec("ss_bill_outbox");
    spec.columns.aggregate_id = "bill_id".into();
    let words = ["PENDING", "SENT", "FAILED", "PROCESSING", "ABANDONED"];
    spec.status_values = StatusValues::new(words.map(|w| StatusValue::Text(w.into()))).unwrap();
    spec
}

pub fn key(id: u64) -> RowKey {
    RowKey {
        table: T0,
        id: RowId::UInt(id),
    }
}

pub fn aggregate(kind: &str, id: &str) -> Aggregate {
    Aggregate {
        table: T0,
        kind: kind.into(),
        id: id.into(),
    }
}

pub fn outcome(row: &OutboxRow, verdict: Verdict) -> RowOutcome {
    RowOutcome {
        key: row.key.clone(),
        aggregate: row.aggregate.clone(),
        verdict,
    }
}

pub fn nacked(row: &OutboxRow) -> RowOutcome {
    let verdict = Verdict::Failed {
        failure: Failure::retryable("nack", "refused"),
        retry_count: row.state.retry_count,
        message: None,
    };
    outcome(row, verdict)
}

pub fn ids<'a>(rows: impl IntoIterator<Item = &'a OutboxRow>) -> Vec<String> {
    rows.into_iter().map(|r| r.key.id.to_string()).collect()
}

/// The ids that a scan finds.
pub async fn found(store: &PollLedger, scan: &Scan) -> Result<Vec<String>> {
    let rows = store.scan(T0, scan, 100).await?;
    Ok(ids(rows.iter().map(|(_, row)| row)))
}

pub const LEFT_BEHIND: Scan = Scan::LeftBehind {
    min_age: Duration::ZERO,
};

pub async fn claim_all(store: &PollLedger, scan: &Scan) -> Result<(ClaimToken, Vec<OutboxRow>)> {
    let rows = store.scan(T0, scan, 100).await?;
    let keys: Vec<RowKey> = rows.iter().map(|(_, r)| r.key.clone()).collect();
    let (token, ours) = store.claim(T0, &keys).await?;
    let rows = rows.into_iter().map(|(_, r)| r);
    Ok((token, rows.filter(|r| ours.contains(&r.key)).collect()))
}
