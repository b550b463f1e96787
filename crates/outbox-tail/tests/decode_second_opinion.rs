//! A second opinion: mysql_cdc decodes the same events, for the types that it can decode.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod decode_support;

use std::collections::HashMap;
use std::io::Cursor;

use anyhow::{Context, Result, ensure};
use decode_support::{Bench, all, decode, show};
use mysql_async::prelude::Queryable;
use mysql_cdc::events::row_events::mysql_value::MySqlValue;
use mysql_cdc::events::row_events::write_rows_event::WriteRowsEvent;
use mysql_cdc::events::table_map_event::TableMapEvent;
use outbox_core::Cell;
use outbox_tail::decode::Flavour;
use rand::prelude::*;

const COLUMNS: &str = "id INT PRIMARY KEY, ti TINYINT UNSIGNED, si SMALLINT UNSIGNED, \
    mi MEDIUMINT UNSIGNED, bi BIGINT UNSIGNED, dc DECIMAL(30,10), db DOUBLE, yr YEAR, dt DATE, \
    tm TIME(3), dtm DATETIME(3), ts TIMESTAMP, bt BIT(13), en ENUM('a','b','c'), \
    st SET('x','y','z'), vc VARCHAR(300), bl BLOB";

/// Both ways of saying the same, as text.
fn agrees(cell: &Cell, other: Option<&MySqlValue>) -> bool {
    let text = match cell {
        Cell::Null => return other.is_none(),
        Cell::Int(n) => n.to_string(),
        Cell::UInt(n) => n.to_string(),
        Cell::Text(t) => String::from_utf8_lossy(t).into_owned(),
        Cell::Binary(b) => format!("{:?}", &b[..]),
    };
    let Some(other) = other else { return false };
    let other = match other {
        MySqlValue::TinyInt(n) => n.to_string(),
        MySqlValue::SmallInt(n) => n.to_string(),
        MySqlValue::MediumInt(n) | MySqlValue::Int(n) => n.to_string(),
        MySqlValue::BigInt(n) => n.to_string(),
        MySqlValue::Year(n) => n.to_string(),
        MySqlValue::Decimal(d) | MySqlValue::String(d) => d.clone(),
        MySqlValue::Double(d) => return text.parse() == Ok(*d),
        MySqlValue::Date(d) => format!("{:04}-{:02}-{:02}", d.year, d.month, d.day),
        MySqlValue::Time(t) => {
            format!(
                "{:02}:{:02}:{:02}.{:03}",
                t.hour, t.minute, t.second, t.millis
            )
        }
        MySqlValue::DateTime(d) => format!(
            "{:04}-{:02}-{:02} {:02}:{:02}:{:02}.{:03}",
            d.year, d.month, d.day, d.hour, d.minute, d.second, d.millis
        ),
        // Milliseconds; the rows are written at one second of 2001-09-09, printed at +05:30.
        MySqlValue::Timestamp(ms) => format!("2001-09-09 07:16:{:02}", ms / 1000 - 999_999_960),
        // Its list starts with the highest bit.
        MySqlValue::Bit(bits) => bits
            .iter()
            .fold(0_u64, |n, b| (n << 1) | u64::from(*b))
            .to_string(),
        MySqlValue::Enum(n) => ["", "a", "b", "c"][usize::try_from(*n).unwrap()].to_owned(),
        MySqlValue::Set(n) => {
            let names = ["x", "y", "z"].into_iter().enumerate();
            let names: Vec<&str> = names
                .filter(|(i, _)| (n >> i) & 1 == 1)
                .map(|(_, s)| s)
                .collect();
            names.join(",")
        }
        MySqlValue::Blob(b) => format!("{b:?}"),
        MySqlValue::Float(_) => return false,
    };
    text == other
}

async fn second_opinion(flavour: Flavour) -> Result<usize> {
    let bench = Bench::start(flavour, &[]).await?;
    let mut rng = StdRng::seed_from_u64(21);
    let events = bench
        .record(async |conn| {
            conn.query_drop(format!("CREATE TABLE o ({COLUMNS}) CHARACTER SET utf8mb4"))
                .await?;
            let rows: Vec<String> = (0..500)
                .map(|id| {
                    let r = &mut rng;
                    let values = [
                        r.random::<u8>().to_string(),
                        r.random::<u16>().to_string(),
                        r.random_range(0..1 << 24).to_string(),
                        r.random::<u64>().to_string(),
                        format!(
                            "{}.{:010}",
                            r.random_range(1_i64..1 << 60),
                            r.random_range(0..1 << 30)
                        ),
                        format!("{:e}", r.random_range(-1e9..1e9_f64)),
                        r.random_range(1901..2156).to_string(),
                        format!(
                            "'{:04}-{}-{}'",
                            r.random_range(1..9999),
                            r.random_range(1..13),
                            r.random_range(1..29)
                        ),
                        format!(
                            "'{}:59:58.{:03}'",
                            r.random_range(0..838),
                            r.random_range(0..1000)
                        ),
                        format!(
                            "'{:04}-02-28 23:59:{}.{:03}'",
                            r.random_range(1..9999),
                            r.random_range(0..60),
                            r.random_range(0..1000)
                        ),
                        format!("'2001-09-09 07:16:{:02}'", r.random_range(0..60)),
                        r.random_range(0..8192).to_string(),
                        r.random_range(1..4).to_string(),
                        r.random_range(0..8).to_string(),
                        format!("'{}'", "é中".repeat(r.random_range(0..100))),
                        format!("x'{:032x}'", r.random::<u128>()),
                    ];
                    let values = values.map(|v| {
                        if r.random_bool(0.1) {
                            "NULL".to_owned()
                        } else {
                            v
                        }
                    });
                    format!("({id}, {})", values.join(", "))
                })
                .collect();
            Ok(conn
                .query_drop(format!("INSERT INTO o VALUES {}", rows.join(", ")))
                .await?)
        })
        .await?;
    let layout = bench.layout("o").await?;
    let rows = decode(&events, flavour, "o", &layout, &all(&layout))?;
    let (mut maps, mut others) = (HashMap::new(), Vec::new());
    for (kind, body) in &events {
        let mut cursor = Cursor::new(&body[..]);
        match kind {
            19 => {
                let map =
                    TableMapEvent::parse(&mut cursor).map_err(|e| anyhow::anyhow!("{e:?}"))?;
                maps.insert(map.table_id, map);
            }
            23 | 30 => {
                let version = if *kind == 30 { 2 } else { 1 };
                let event = WriteRowsEvent::parse(&mut cursor, &maps, version)
                    .map_err(|e| anyhow::anyhow!("{e:?}"))?;
                others.extend(event.rows);
            }
            _ => {}
        }
    }
    ensure!(
        rows.len() == others.len(),
        "{} rows, {} there",
        rows.len(),
        others.len()
    );
    for (row, other) in rows.iter().zip(&others) {
        let cells = row.as_ref().unwrap().after.as_ref().context("no image")?;
        for ((cell, other), column) in cells.iter().zip(&other.cells).zip(&layout.columns) {
            let same = agrees(cell, other.as_ref());
            ensure!(
                same,
                "{}: {} here, {other:?} there",
                column.column_type,
                show(cell)
            );
        }
    }
    Ok(rows.len())
}

#[tokio::test]
async fn another_decoder_reads_the_same_from_mysql() -> Result<()> {
    assert_eq!(second_opinion(Flavour::Mysql).await?, 500);
    Ok(())
}

#[tokio::test]
async fn another_decoder_reads_the_same_from_mariadb() -> Result<()> {
    assert_eq!(second_opinion(Flavour::Mariadb).await?, 500);
    Ok(())
}
