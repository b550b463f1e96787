//! A real server, its binlog, and SELECT to compare the decoder with.
#![allow(dead_code)] // each test program uses its part

pub(crate) mod types;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures_util::StreamExt;
use mysql_async::prelude::Queryable;
use mysql_async::{BinlogStreamRequest, Conn, Row as SqlRow, Value};
use outbox_core::Cell;
use outbox_core::layout::{Column, Generated, TableLayout};
use outbox_tail::decode::{Flavour, Row, RowError, RowsEvent, TableDecoder, TableMap};
use outbox_testkit::{Database, Mariadb, Mysql, MysqlOptions};

/// The zone of every session here, in which TIMESTAMP is printed.
pub(crate) const ZONE: i32 = 19_800;

/// One event: its type and its body without header and checksum.
pub(crate) type Event = (u8, Bytes);

pub(crate) struct Bench {
    pub(crate) server: Database,
    pub(crate) flavour: Flavour,
}

impl Bench {
    pub(crate) async fn start(flavour: Flavour, options: &[&str]) -> Result<Self> {
        let mut all = MysqlOptions::default();
        for option in options {
            all = all.option(*option);
        }
        let server = match flavour {
            Flavour::Mysql => Mysql::start(all).await?,
            Flavour::Mariadb => Mariadb::start(all).await?,
        };
        server.prepare().await?;
        Ok(Self { server, flavour })
    }

    /// A session that stores what it is given, zero dates included.
    pub(crate) async fn session(&self) -> Result<Conn> {
        let mut conn = self.server.conn().await?;
        for sql in [
            "SET time_zone = '+05:30'",
            "SET sql_mode = ''",
            "SET NAMES utf8mb4",
        ] {
            conn.query_drop(sql).await?;
        }
        Ok(conn)
    }

    /// Everything in a new binlog since `work` began. `work` gets a session.
    pub(crate) async fn record(
        &self,
        work: impl AsyncFnOnce(&mut Conn) -> Result<()>,
    ) -> Result<Vec<Event>> {
        let mut conn = self.session().await?;
        conn.query_drop("FLUSH BINARY LOGS").await?;
        let logs: Vec<SqlRow> = conn.query("SHOW BINARY LOGS").await?;
        let file: String = logs.last().and_then(|r| r.get(0)).context("no binlog")?;
        work(&mut conn).await?;
        if self.flavour == Flavour::Mariadb {
            conn.query_drop("SET @mariadb_slave_capability = 4").await?;
        }
        conn.query_drop("SET @master_binlog_checksum = @@global.binlog_checksum")
            .await?;
        let request = BinlogStreamRequest::new(4_000_000)
            .with_non_blocking()
            .with_filename(file.as_bytes())
            .with_pos(4);
        let mut stream = conn.get_binlog_stream(request).await?;
        let mut events = Vec::new();
        while let Some(event) = stream.next().await {
            let event = event?;
            let body = Bytes::copy_from_slice(event.data());
            events.push((event.header().event_type_raw(), body));
        }
        Ok(events)
    }

    /// What `information_schema` says.
    pub(crate) async fn layout(&self, table: &str) -> Result<TableLayout> {
        let mut conn = self.session().await?;
        let rows: Vec<SqlRow> = conn
            .exec(
                "SELECT COLUMN_NAME, DATA_TYPE, COLUMN_TYPE, CHARACTER_SET_NAME, \
                 CHARACTER_OCTET_LENGTH, DATETIME_PRECISION, IS_NULLABLE, EXTRA \
                 FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = 'app' AND TABLE_NAME = ? \
                 ORDER BY ORDINAL_POSITION",
                (table,),
            )
            .await?;
        ensure!(!rows.is_empty(), "no table {table}");
        let columns = rows.into_iter().map(|row| {
            let text = |i: usize| row.get::<Option<String>, _>(i).flatten();
            let column_type = text(2).unwrap_or_default();
            let data_type = text(1).unwrap_or_default();
            let extra = text(7).unwrap_or_default();
            let listed = matches!(data_type.as_str(), "enum" | "set");
            let members = column_type
                .split('\'')
                .skip(1)
                .step_by(2)
                .map(str::to_owned);
            Column {
                name: text(0).unwrap_or_default(),
                unsigned: !listed && column_type.contains(" unsigned"),
                members: if listed {
                    members.collect()
                } else {
                    Vec::new()
                },
                charset: text(3),
                octets: row.get::<Option<u64>, _>(4).flatten(),
                fraction: u8::try_from(row.get::<Option<u64>, _>(5).flatten().unwrap_or(0))
                    .unwrap_or(0),
                nullable: text(6).as_deref() == Some("YES"),
                generated: match extra.as_str() {
                    e if e.contains("VIRTUAL") => Generated::Virtual,
                    e if e.contains("STORED") => Generated::Stored,
                    _ => Generated::No,
                },
                invisible: extra.contains("INVISIBLE"),
                json: data_type == "json",
                data_type,
                column_type,
            }
        });
        Ok(TableLayout {
            columns: columns.collect(),
            primary_key: vec!["id".to_owned()],
            engine: "InnoDB".to_owned(),
        })
    }

    /// All cells of a table as SELECT gives them, in the order of its `id`.
    pub(crate) async fn select(&self, table: &str, layout: &TableLayout) -> Result<Vec<Vec<Cell>>> {
        let mut conn = self.session().await?;
        let names: Vec<String> = layout
            .columns
            .iter()
            .map(|c| format!("`{}`", c.name))
            .collect();
        let sql = format!("SELECT {} FROM {table} ORDER BY id", names.join(", "));
        let rows: Vec<SqlRow> = conn.query(sql).await?;
        Ok(rows
            .into_iter()
            .map(|row| {
                row.unwrap()
                    .into_iter()
                    .zip(&layout.columns)
                    .map(as_cell)
                    .collect()
            })
            .collect())
    }
}

/// What the poller's SELECT would make of a value that came as text.
fn as_cell((value, column): (Value, &Column)) -> Cell {
    let bytes = match value {
        Value::Bytes(bytes) => bytes,
        Value::NULL => return Cell::Null,
        other => panic!("not text: {other:?}"),
    };
    let number = || String::from_utf8_lossy(&bytes).into_owned();
    match column.data_type.as_str() {
        "tinyint" | "smallint" | "mediumint" | "int" | "bigint" if column.unsigned => {
            Cell::UInt(number().parse().unwrap())
        }
        "tinyint" | "smallint" | "mediumint" | "int" | "bigint" => {
            Cell::Int(number().parse().unwrap())
        }
        "year" => Cell::UInt(number().parse().unwrap()),
        "bit" => Cell::UInt(bytes.iter().fold(0, |n, b| n << 8 | u64::from(*b))),
        "binary" | "varbinary" | "tinyblob" | "blob" | "mediumblob" | "longblob" | "vector"
        | "geometry" | "point" => Cell::Binary(Bytes::from(bytes)),
        _ => Cell::Text(Bytes::from(bytes)),
    }
}

/// Decodes every row event of `table`, with its table map.
pub(crate) fn decode(
    events: &[Event],
    flavour: Flavour,
    table: &str,
    layout: &TableLayout,
    wanted: &[String],
) -> Result<Vec<Result<Row, RowError>>> {
    let mut rows = Vec::new();
    let mut decoder = None;
    for (kind, body) in events {
        if *kind == 19 {
            let map = TableMap::parse(body, flavour)?;
            ensure!(
                TableMap::peek(body)
                    == Some((map.table_id, map.schema.as_bytes(), map.table.as_bytes())),
                "peek differs"
            );
            decoder = if map.table == table {
                Some((map.table_id, TableDecoder::new(&map, layout, wanted)?))
            } else {
                None
            };
        } else if RowsEvent::kind_of(*kind).is_some()
            && let Some((id, decoder)) = &decoder
        {
            let event = RowsEvent::parse(*kind, body)?;
            ensure!(
                event.table_id == *id && RowsEvent::peek(body) == Some(*id),
                "table id"
            );
            rows.extend(decoder.rows(&event, ZONE));
        }
    }
    Ok(rows)
}

/// All columns of a layout.
pub(crate) fn all(layout: &TableLayout) -> Vec<String> {
    layout.columns.iter().map(|c| c.name.clone()).collect()
}

/// A cell in a form that can be read in a failure.
pub(crate) fn show(cell: &Cell) -> String {
    match cell {
        Cell::Text(t) => format!("text {:?}", String::from_utf8_lossy(t)),
        other => format!("{other:?}"),
    }
}

/// Compares inserted rows with SELECT, cell by cell.
pub(crate) async fn compare(bench: &Bench, events: &[Event], table: &str) -> Result<usize> {
    let layout = bench.layout(table).await?;
    let rows = decode(events, bench.flavour, table, &layout, &all(&layout))?;
    let selected = bench.select(table, &layout).await?;
    ensure!(
        rows.len() == selected.len(),
        "{} rows of {}",
        rows.len(),
        selected.len()
    );
    for (n, (row, expected)) in rows.into_iter().zip(&selected).enumerate() {
        let cells = row
            .with_context(|| format!("row {n}"))?
            .after
            .context("no image")?;
        for ((cell, expected), column) in cells.iter().zip(expected).zip(&layout.columns) {
            ensure!(
                cell == expected,
                "row {n}, {} {}: {} in the binlog, {} by SELECT",
                column.name,
                column.column_type,
                show(cell),
                show(expected)
            );
        }
    }
    Ok(selected.len())
}
