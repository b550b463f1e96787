//! A server with an outbox table, and a stream that reads it.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use async_trait::async_trait;
use mysql_async::prelude::Queryable as _;
use mysql_async::{Conn, Row};
use outbox_core::layout::{Column, Generated, TableLayout};
use outbox_core::ports::{Disposition, Layouts, NoObserver, PortError, PortResult};
use outbox_core::spec::{ColumnNames, OnSent, OnUnroutable, Ordering, TableSpec, Tracking};
use outbox_core::status::StatusValues;
use outbox_core::template::Template;
use outbox_core::{OutboxRow, Position, TableIdx};
use outbox_tail::group::{Group, Source as _, StreamItem};
use outbox_tail::stream::{BinlogSource, StreamConfig, StreamError, StreamTable, UrlSource, probe};
use outbox_testkit::Database;

pub const TABLE: TableIdx = TableIdx(0);
pub const LIMIT: Duration = Duration::from_secs(15);

/// An outbox table in a database of its own.
pub struct Lab<'a> {
    pub db: &'a Database,
    pub schema: String,
    pub config: StreamConfig,
    pub tracking: Tracking,
    pub layouts: Arc<ServerLayouts>,
}

/// Layouts as the server has them.
pub struct ServerLayouts {
    config: StreamConfig,
    schema: String,
    pub stored: Mutex<Option<TableLayout>>,
}

impl<'a> Lab<'a> {
    pub async fn new(db: &'a Database, schema: &str) -> Result<Lab<'a>> {
        db.prepare().await?;
        let mut conn = db.root_conn().await?;
        for sql in [
            format!("CREATE DATABASE {schema}"),
            format!(
                "CREATE TABLE {schema}.outbox (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, \
                 aggregate_type VARCHAR(64) NOT NULL DEFAULT 'order', \
                 aggregate_id VARCHAR(64) NOT NULL DEFAULT '1', \
                 event_type VARCHAR(128) NOT NULL DEFAULT 'made', payload JSON NOT NULL, \
                 status TINYINT NOT NULL DEFAULT 0, retry_count INT NOT NULL DEFAULT 0) \
                 ENGINE=InnoDB DEFAULT CHARSET=utf8mb4"
            ),
            format!("CREATE TABLE {schema}.outboxd_signal (id INT AUTO_INCREMENT PRIMARY KEY)"),
            format!("CREATE TABLE {schema}.outboxd_position (id INT PRIMARY KEY, n INT)"),
            format!("CREATE TABLE {schema}.noise (id INT AUTO_INCREMENT PRIMARY KEY, d LONGTEXT)"),
        ] {
            conn.query_drop(&sql).await.context(sql)?;
        }
        conn.disconnect().await?;
        let mut config = StreamConfig::new(
            UrlSource::Inline(db.url("outboxd").into()),
            rand::random_range(1_000_000..4_000_000_000),
            schema,
        );
        config.heartbeat = Duration::from_secs(1);
        let layouts = Arc::new(ServerLayouts {
            config: config.clone(),
            schema: schema.to_owned(),
            stored: Mutex::new(None),
        });
        Ok(Lab {
            db,
            schema: schema.to_owned(),
            config,
            tracking: Tracking::Status,
            layouts,
        })
    }

    /// The same lab on a replica of its server.
    pub fn at(db: &'a Database, schema: &str, other: &Self) -> Lab<'a> {
        let mut config = other.config.clone();
        config.url = UrlSource::Inline(db.url("outboxd").into());
        Lab {
            db,
            schema: schema.to_owned(),
            tracking: other.tracking,
            layouts: Arc::new(ServerLayouts {
                config: config.clone(),
                schema: schema.to_owned(),
                stored: Mutex::new(None),
            }),
            config,
        }
    }

    pub async fn conn(&self) -> Result<Conn> {
        let mut conn = self.db.root_conn().await?;
        conn.query_drop(format!("USE {}", self.schema)).await?;
        Ok(conn)
    }

    /// Runs statements on one connection.
    pub async fn run(&self, statements: &[&str]) -> Result<()> {
        let mut conn = self.conn().await?;
        for sql in statements {
            conn.query_drop(*sql)
                .await
                .with_context(|| (*sql).to_owned())?;
        }
        conn.disconnect().await?;
        Ok(())
    }

    /// Inserts one row per payload, each in a transaction of its own.
    pub async fn insert(&self, payloads: std::ops::Range<u32>) -> Result<()> {
        let mut conn = self.conn().await?;
        for n in payloads {
            let sql = format!("INSERT INTO outbox (payload) VALUES ('{{\"n\": {n}}}')");
            conn.query_drop(sql).await?;
        }
        conn.disconnect().await?;
        Ok(())
    }

    pub async fn now(&self) -> Result<Position> {
        Ok(probe(&self.config).await?.coordinate)
    }

    pub fn source(&self) -> BinlogSource {
        let status = self.tracking == Tracking::Status;
        let spec = TableSpec {
            schema: self.schema.clone(),
            table: "outbox".into(),
            tracking: self.tracking,
            on_sent: OnSent::Mark,
            columns: ColumnNames {
                status: status.then(|| "status".into()),
                ..ColumnNames::default()
            },
            status_values: StatusValues::default(),
            exchange: Template::parse("outbox").unwrap(),
            routing_key: Template::parse("{event_type}").unwrap(),
            ordering: Ordering::Aggregate,
            failed_blocks_aggregate: false,
            on_unroutable: OnUnroutable::Retry,
            max_body: None,
        };
        let table = StreamTable {
            idx: TABLE,
            spec: Arc::new(spec),
            app_id: "outboxd".into(),
        };
        let layouts = Arc::clone(&self.layouts) as Arc<dyn Layouts>;
        BinlogSource::new(
            self.config.clone(),
            vec![table],
            layouts,
            Arc::new(NoObserver),
        )
    }

    /// A stream that is open behind the server's coordinate of now.
    pub async fn open(&self) -> Result<BinlogSource> {
        let after = self.now().await?;
        let mut source = self.source();
        source.open(&after).await?;
        Ok(source)
    }
}

/// Reads until `rows` rows came; what came on the way.
pub async fn read(source: &mut BinlogSource, rows: usize) -> Result<Vec<Group>> {
    read_until(source, |groups| {
        groups.iter().map(|g| g.rows.len()).sum::<usize>() >= rows
    })
    .await
}

/// Reads groups until there are enough of them.
pub async fn read_until(
    source: &mut BinlogSource,
    enough: impl Fn(&[Group]) -> bool,
) -> Result<Vec<Group>> {
    let mut groups = Vec::new();
    let read = async {
        while !enough(&groups) {
            if let StreamItem::Group(group) = source.next().await? {
                groups.push(group);
            }
        }
        Ok::<_, StreamError>(())
    };
    match tokio::time::timeout(LIMIT, read).await {
        Ok(result) => result?,
        Err(_) => bail!("not within {LIMIT:?}: enough groups; there are {groups:?}"),
    }
    Ok(groups)
}

/// Reads until the end has reached `position`; whatever groups came.
pub async fn read_to(source: &mut BinlogSource, position: &Position) -> Result<Vec<Group>> {
    let mut groups = Vec::new();
    let read = async {
        loop {
            let end = match source.next().await? {
                StreamItem::Group(group) => {
                    let end = group.end.clone();
                    groups.push(group);
                    end
                }
                StreamItem::Progress { end, .. } => end,
                StreamItem::Idle => continue,
            };
            if end.reaches(position) == Some(true) {
                return Ok::<_, StreamError>(());
            }
        }
    };
    match tokio::time::timeout(LIMIT, read).await {
        Ok(result) => result?,
        Err(_) => bail!("not within {LIMIT:?}: the end at {position}; groups {groups:?}"),
    }
    Ok(groups)
}

/// Reads until the stream fails.
pub async fn fail(source: &mut BinlogSource) -> Result<StreamError> {
    let read = async {
        loop {
            if let Err(error) = source.next().await {
                return error;
            }
        }
    };
    tokio::time::timeout(LIMIT, read)
        .await
        .context("the stream does not fail")
}

pub fn bodies(groups: &[Group]) -> Vec<String> {
    let body = |r: &OutboxRow| {
        String::from_utf8(r.message.as_ref().expect("a message").body.to_vec()).unwrap()
    };
    groups.iter().flat_map(|g| &g.rows).map(body).collect()
}

pub fn numbers(range: std::ops::Range<u32>) -> Vec<String> {
    range.map(|n| format!("{{\"n\": {n}}}")).collect()
}

#[async_trait]
impl Layouts for ServerLayouts {
    async fn current(&self, _: TableIdx) -> PortResult<(TableLayout, Position)> {
        let error = |e: anyhow::Error| {
            PortError::new(
                Disposition::Backoff,
                "read the layout",
                e.into_boxed_dyn_error(),
            )
        };
        let layout = self.read().await.map_err(error)?;
        let facts = probe(&self.config).await.map_err(|e| error(e.into()))?;
        Ok((layout, facts.coordinate))
    }

    async fn stored(&self, _: TableIdx) -> PortResult<Option<TableLayout>> {
        Ok(self.stored.lock().unwrap().clone())
    }
}

impl ServerLayouts {
    async fn read(&self) -> Result<TableLayout> {
        let UrlSource::Inline(url) = &self.config.url else {
            bail!("no URL");
        };
        use secrecy::ExposeSecret as _;
        let url = url.expose_secret().replace("outboxd:secret", "root");
        let opts = mysql_async::Opts::from_url(&url)?;
        let opts = mysql_async::OptsBuilder::from_opts(opts).prefer_socket(false);
        let mut conn = Conn::new(opts).await?;
        let rows: Vec<Row> = conn
            .query(format!(
                "SELECT COLUMN_NAME, DATA_TYPE, COLUMN_TYPE, CHARACTER_SET_NAME, \
                 CHARACTER_OCTET_LENGTH, IS_NULLABLE FROM information_schema.COLUMNS \
                 WHERE TABLE_SCHEMA = '{}' AND TABLE_NAME = 'outbox' ORDER BY ORDINAL_POSITION",
                self.schema
            ))
            .await?;
        conn.disconnect().await?;
        let columns = rows
            .into_iter()
            .map(|row| {
                let (name, data_type, column_type, charset, octets, nullable): (
                    String,
                    String,
                    String,
                    Option<String>,
                    Option<u64>,
                    String,
                ) = mysql_async::from_row(row);
                Column {
                    json: data_type == "json" || name == "payload",
                    unsigned: column_type.contains("unsigned"),
                    name,
                    data_type,
                    column_type,
                    charset,
                    octets,
                    fraction: 0,
                    members: Vec::new(),
                    nullable: nullable == "YES",
                    generated: Generated::No,
                    invisible: false,
                }
            })
            .collect();
        Ok(TableLayout {
            columns,
            primary_key: vec!["id".into()],
            engine: "InnoDB".into(),
        })
    }
}
