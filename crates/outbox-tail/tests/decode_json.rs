//! JSON text from the binlog equals what the server prints, byte for byte.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod decode_support;

use std::fmt::Write as _;

use anyhow::{Result, ensure};
use decode_support::{Bench, decode};
use mysql_async::prelude::Queryable;
use outbox_core::Cell;
use outbox_tail::decode::Flavour;
use rand::prelude::*;

const DOCUMENTS: usize = 10_000;

fn number(rng: &mut StdRng, out: &mut String) {
    let _ = match rng.random_range(0..9) {
        0 => write!(out, "{}", rng.random::<i64>()),
        1 => write!(out, "{}", rng.random::<u64>()),
        2 => write!(out, "{}", rng.random_range(-70_000..70_000)),
        3 => write!(
            out,
            "{}",
            [
                -32_769_i64,
                -32_768,
                32_767,
                32_768,
                65_535,
                65_536,
                2_147_483_648
            ]
            .choose(rng)
            .unwrap()
        ),
        4 => {
            let value = f64::from_bits(rng.random());
            write!(out, "{:e}", if value.is_finite() { value } else { 0.5 })
        }
        5 => write!(out, "{:.1}", f64::from(rng.random_range(-5..5))),
        6 => write!(out, "-0.0"),
        7 => write!(
            out,
            "{}e{}",
            rng.random_range(1..999),
            rng.random_range(-30..30)
        ),
        _ => write!(
            out,
            "{}.{}",
            rng.random_range(-999..999),
            rng.random_range(1..99_999)
        ),
    };
}

fn string(rng: &mut StdRng, out: &mut String, key: bool) {
    out.push('"');
    let len = match rng.random_range(0..60) {
        0 if !key => rng.random_range(100..400),
        1 if !key => rng.random_range(15_000..20_000),
        _ => rng.random_range(0..12),
    };
    for _ in 0..len {
        match rng.random_range(0..12) {
            0 => out.push('é'),
            1 => out.push('中'),
            2 => out.push('😀'),
            3 => out.push_str("\\\""),
            4 => out.push_str("\\\\"),
            5 => {
                let _ = write!(out, "\\u{:04x}", rng.random_range(0..0x80));
            }
            6 => out.push('\u{7f}'),
            7 => out.push('/'),
            _ => out.push(char::from(rng.random_range(b'a'..=b'z'))),
        }
    }
    out.push('"');
}

fn value(rng: &mut StdRng, out: &mut String, depth: u32) {
    match rng.random_range(0..if depth == 0 { 6 } else { 10 }) {
        0 => out.push_str("null"),
        1 => out.push_str("true"),
        2 => out.push_str("false"),
        3 => string(rng, out, false),
        4 | 5 => number(rng, out),
        6 | 7 => {
            out.push('[');
            for i in 0..rng.random_range(0..6) {
                out.push_str(if i > 0 { "," } else { "" });
                value(rng, out, depth - 1);
            }
            out.push(']');
        }
        _ => {
            out.push('{');
            for i in 0..rng.random_range(0..6) {
                out.push_str(if i > 0 { "," } else { "" });
                string(rng, out, true);
                out.push(':');
                value(rng, out, depth - 1);
            }
            out.push('}');
        }
    }
}

/// Values of SQL types that JSON text cannot express.
const OPAQUE: &[&str] = &[
    "CAST(105.10 AS DECIMAL(10,2))",
    "CAST(-0.000000000000000000000000000001 AS DECIMAL(65,30))",
    "CAST(99999999999999999999999999999999999 AS DECIMAL(65,0))",
    "CAST('2024-02-29' AS DATE)",
    "CAST('-838:59:58.999999' AS TIME(6))",
    "CAST('12:00:00' AS TIME)",
    "CAST('2024-02-29 12:13:14.000015' AS DATETIME(6))",
    "TIMESTAMP'0000-00-00 00:00:00'",
    "x'00ff'",
    "b'01010101'",
    "REPEAT(x'fe', 57)",
    "REPEAT(x'fe', 58)",
    "REPEAT(x'fe', 1000)",
    "ST_GeomFromText('POINT(1 2)')",
    "CAST('c' AS CHAR(3) CHARACTER SET latin1)",
    "CAST(x'4142' AS BINARY(5))",
    "NULL",
    "1.5e0",
    "3e100",
    "-0e0",
    "1e-7",
    "TRUE",
    "CAST(CAST('2024-02-29' AS DATE) AS JSON)",
    "JSON_ARRAY(UNIX_TIMESTAMP('2024-02-29 00:00:00.125'))",
];

#[tokio::test]
async fn ten_thousand_documents_print_as_the_server_prints_them() -> Result<()> {
    let bench = Bench::start(Flavour::Mysql, &["--max-allowed-packet=64M"]).await?;
    let mut rng = StdRng::seed_from_u64(13);
    let events = bench
        .record(async |conn| {
            conn.query_drop(
                "CREATE TABLE j (id INT AUTO_INCREMENT PRIMARY KEY, payload JSON, big JSON, \
                 ts TIMESTAMP(3) NULL, d DOUBLE, e ENUM('x','é'), y YEAR) CHARACTER SET utf8mb4",
            )
            .await?;
            let mut rows = 0;
            while rows < DOCUMENTS {
                let mut documents = Vec::new();
                while documents.len() < 200 {
                    let mut text = String::new();
                    value(&mut rng, &mut text, 5);
                    documents.push(format!("(CONVERT(x'{}' USING utf8mb4))", hex(&text)));
                }
                rows += documents.len();
                conn.query_drop(format!(
                    "INSERT INTO j (payload) VALUES {}",
                    documents.join(",")
                ))
                .await?;
            }
            for (i, sql) in OPAQUE.iter().enumerate() {
                conn.query_drop(format!(
                    "INSERT INTO j (payload) VALUES (JSON_ARRAY({sql})), \
                     (JSON_OBJECT('bb', {i}, 'a', {sql}, '', NULL))"
                ))
                .await?;
            }
            // Large format: more than 64 KiB, many members; columns' own types; deepest nesting.
            for sql in [
                "SELECT JSON_OBJECT('k', REPEAT('x', 70000), 'n', 5, 'i', -70000, 'u', 70000, \
                 'l', TRUE, 'a', JSON_ARRAY(1, 2, 3000000000, -1, 1.5, NULL, 'é'))",
                "SELECT JSON_ARRAYAGG(seq) FROM (SELECT id * 40000 AS seq FROM j LIMIT 9000) q",
                "SELECT JSON_OBJECTAGG(id, payload) FROM (SELECT * FROM j LIMIT 3000) q",
                "SELECT CONCAT(REPEAT('[', 100), REPEAT(']', 100))",
                "SELECT JSON_OBJECT('ts', ts, 'd', d, 'e', e, 'y', y) FROM (SELECT \
                 TIMESTAMP'2024-01-01 00:00:00.125' ts, 1e15 d, 'é' e, 2024 y) q",
            ] {
                conn.query_drop(format!("INSERT INTO j (payload) {sql}"))
                    .await?;
            }
            conn.query_drop(
                "INSERT INTO j (ts, d, e, y) VALUES ('2024-01-01 00:00:00.125', 1e16, 'é', 2024)",
            )
            .await?;
            conn.query_drop(
                "INSERT INTO j (payload) SELECT JSON_OBJECT('ts', ts, 'd', d, 'e', e, 'y', y) \
                 FROM j WHERE y IS NOT NULL",
            )
            .await?;
            Ok(())
        })
        .await?;
    let layout = bench.layout("j").await?;
    let wanted = ["id".to_owned(), "payload".to_owned()];
    let rows = decode(&events, Flavour::Mysql, "j", &layout, &wanted)?;
    let mut conn = bench.session().await?;
    let printed: Vec<(i64, Option<Vec<u8>>)> = conn
        .query("SELECT id, CAST(payload AS CHAR) FROM j ORDER BY id")
        .await?;
    ensure!(
        rows.len() == printed.len() && rows.len() > DOCUMENTS,
        "{} rows",
        rows.len()
    );
    for (row, (id, text)) in rows.into_iter().zip(printed) {
        let expected = text.map_or(Cell::Null, |t| Cell::Text(t.into()));
        let cells = row?.after.unwrap();
        ensure!(cells[0] == Cell::Int(id), "id {id}");
        ensure!(
            cells[1] == expected,
            "document {id}: {} from the binlog, {} from the server",
            decode_support::show(&cells[1]),
            decode_support::show(&expected)
        );
    }
    Ok(())
}

fn hex(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, b| {
        let _ = write!(out, "{b:02x}");
        out
    })
}
