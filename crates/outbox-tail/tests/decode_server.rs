//! The row decoder against real servers: what it reads from the binlog equals what SELECT gives.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

mod decode_support;

use anyhow::{Result, ensure};
use decode_support::{Bench, all, compare, decode};
use mysql_async::prelude::Queryable;
use outbox_core::Cell;
use outbox_tail::decode::{CellError, Flavour, RowError, TableDecoder, TableMap, Undecodable};
use rand::prelude::*;

type Generate = fn(&mut StdRng) -> String;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn binary(rng: &mut StdRng, max: usize) -> String {
    let len = rng.random_range(0..=max);
    // Many zeros: trailing ones are what gets lost.
    let bytes: Vec<u8> = (0..len)
        .map(|_| {
            if rng.random_bool(0.4) {
                0
            } else {
                rng.random()
            }
        })
        .collect();
    format!("x'{}'", hex(&bytes))
}

fn text(rng: &mut StdRng, alphabet: &str, max: usize) -> String {
    let chars: Vec<char> = alphabet.chars().collect();
    let text: String = (0..rng.random_range(0..=max))
        .map(|_| *chars.choose(rng).unwrap())
        .collect();
    format!("_utf8mb4 x'{}'", hex(text.as_bytes()))
}

fn time(rng: &mut StdRng) -> String {
    let sign = if rng.random() { "-" } else { "" };
    let (h, m, s) = (
        rng.random_range(0..838),
        rng.random_range(0..60),
        rng.random_range(0..60),
    );
    format!("'{sign}{h}:{m}:{s}.{:06}'", rng.random_range(0..1_000_000))
}

fn datetime(rng: &mut StdRng) -> String {
    if rng.random_bool(0.1) {
        return "'0000-00-00 00:00:00'".to_owned();
    }
    let (y, mo, d) = (
        rng.random_range(1..9999),
        rng.random_range(1..13),
        rng.random_range(1..29),
    );
    let (h, m, s) = (
        rng.random_range(0..24),
        rng.random_range(0..60),
        rng.random_range(0..60),
    );
    format!(
        "'{y:04}-{mo}-{d} {h}:{m}:{s}.{:06}'",
        rng.random_range(0..1_000_000)
    )
}

fn timestamp(rng: &mut StdRng) -> String {
    if rng.random_bool(0.1) {
        return "'0000-00-00 00:00:00'".to_owned();
    }
    let (y, mo, d) = (
        rng.random_range(1971..2037),
        rng.random_range(1..13),
        rng.random_range(1..29),
    );
    format!(
        "'{y}-{mo}-{d} {}:1:2.{:06}'",
        rng.random_range(0..24),
        rng.random_range(0..1_000_000)
    )
}

fn double(rng: &mut StdRng) -> String {
    let value: f64 = match rng.random_range(0..5) {
        0 => f64::from_bits(rng.random()),
        1 => rng.random_range(-1e3..1e3),
        2 => rng.random_range(-1000_i32..1000).into(),
        3 => 10_f64.powi(rng.random_range(-20..25)) * f64::from(rng.random_range(1..2000)),
        _ => *[0.0, -0.0, 0.1, 1e15, 1e14, 123_456_789_012_345_680.0]
            .choose(rng)
            .unwrap(),
    };
    if value.is_finite() {
        format!("{value:e}")
    } else {
        "1e0".to_owned()
    }
}

fn float(rng: &mut StdRng) -> String {
    let value: f32 = match rng.random_range(0..3) {
        0 => f32::from_bits(rng.random()),
        1 => rng.random_range(-1e3..1e3),
        _ => 10_f32.powi(rng.random_range(-20..25)) * f32::from(rng.random_range(1_i16..2000)),
    };
    if value.is_finite() {
        format!("{value:e}")
    } else {
        "-0e0".to_owned()
    }
}

fn decimal(rng: &mut StdRng, whole: usize, fraction: usize) -> String {
    let mut digits = |n: usize| -> String {
        (0..rng.random_range(0..=n))
            .map(|_| char::from(b'0' + rng.random_range(0..10)))
            .collect()
    };
    format!("'-0{}.{}0'", digits(whole), digits(fraction))
        .replace("'-", if rng.random() { "'" } else { "'-" })
}

/// Types that both servers have.
const TYPES: &[(&str, Generate)] = &[
    ("TINYINT", |r| r.random::<i8>().to_string()),
    ("TINYINT UNSIGNED", |r| r.random::<u8>().to_string()),
    ("SMALLINT", |r| r.random::<i16>().to_string()),
    ("SMALLINT UNSIGNED", |r| r.random::<u16>().to_string()),
    ("MEDIUMINT", |r| {
        r.random_range(-8_388_608..8_388_608).to_string()
    }),
    ("MEDIUMINT UNSIGNED", |r| {
        r.random_range(0..16_777_216).to_string()
    }),
    ("INT", |r| r.random::<i32>().to_string()),
    ("INT UNSIGNED ZEROFILL", |r| r.random::<u32>().to_string()),
    ("BIGINT", |r| r.random::<i64>().to_string()),
    ("BIGINT UNSIGNED", |r| r.random::<u64>().to_string()),
    ("BOOLEAN", |r| r.random_range(0..2).to_string()),
    ("YEAR", |r| {
        [0, 1901, 2155, 2024].choose(r).unwrap().to_string()
    }),
    ("BIT(1)", |r| r.random_range(0..2).to_string()),
    ("BIT(13)", |r| r.random_range(0..8192).to_string()),
    ("BIT(64)", |r| r.random::<u64>().to_string()),
    ("DECIMAL(10,2)", |r| decimal(r, 8, 2)),
    ("DECIMAL(65,30)", |r| decimal(r, 35, 30)),
    ("DECIMAL(5,5)", |r| decimal(r, 0, 5)),
    ("DECIMAL(18,0)", |r| decimal(r, 18, 0)),
    ("DECIMAL(12,3) UNSIGNED ZEROFILL", |r| decimal(r, 9, 3)),
    ("FLOAT", float),
    ("FLOAT UNSIGNED", |r| r.random_range(0..9999).to_string()),
    ("FLOAT(10,3)", float),
    ("FLOAT ZEROFILL", |r| {
        format!("{:e}", r.random_range(0.0..1e10_f32))
    }),
    ("DOUBLE", double),
    ("DOUBLE(20,4)", double),
    ("DOUBLE(12,2) ZEROFILL", double),
    ("DATE", datetime),
    ("TIME", time),
    ("TIME(1)", time),
    ("TIME(3)", time),
    ("TIME(6)", time),
    ("DATETIME", datetime),
    ("DATETIME(2)", datetime),
    ("DATETIME(5)", datetime),
    ("DATETIME(6)", datetime),
    ("TIMESTAMP NULL", timestamp),
    ("TIMESTAMP(3) NULL", timestamp),
    ("TIMESTAMP(6) NULL", timestamp),
    ("CHAR(5)", |r| text(r, "aé 😀 ", 5)),
    ("CHAR(100)", |r| text(r, "aé 😀 ", 100)),
    ("CHAR(7) CHARACTER SET latin1", |r| text(r, "aé €", 7)),
    ("CHAR(7) CHARACTER SET ucs2", |r| text(r, "aé中 ", 7)),
    ("VARCHAR(10)", |r| text(r, "aé 😀", 10)),
    ("VARCHAR(300) CHARACTER SET utf8mb3", |r| {
        text(r, "aé中", 300)
    }),
    ("VARCHAR(50) CHARACTER SET latin1", |r| text(r, "aéÿ€", 50)),
    ("VARCHAR(50) CHARACTER SET gbk", |r| text(r, "a中文", 50)),
    ("VARCHAR(50) CHARACTER SET utf16", |r| text(r, "a中😀", 50)),
    ("VARCHAR(50) CHARACTER SET utf32", |r| text(r, "a中😀", 50)),
    ("VARCHAR(50) CHARACTER SET sjis", |r| {
        text(r, "aｱ〜\\中", 50)
    }),
    ("VARCHAR(20) CHARACTER SET ascii", |r| text(r, "ab~", 20)),
    ("TINYTEXT", |r| text(r, "a\u{0}é", 50)),
    ("TEXT", |r| text(r, "a\n中", 500)),
    ("MEDIUMTEXT CHARACTER SET cp1251", |r| text(r, "aПр", 500)),
    ("LONGTEXT", |r| text(r, "a😀", 500)),
    ("BINARY(16)", |r| binary(r, 16)),
    ("BINARY(1)", |r| binary(r, 1)),
    ("BINARY(255)", |r| binary(r, 255)),
    ("VARBINARY(300)", |r| binary(r, 300)),
    ("TINYBLOB", |r| binary(r, 200)),
    ("BLOB", |r| binary(r, 500)),
    ("MEDIUMBLOB", |r| binary(r, 500)),
    ("LONGBLOB", |r| binary(r, 500)),
    ("ENUM('a','b b','é','')", |r| {
        r.random_range(0..5).to_string()
    }),
    ("ENUM('a','é') CHARACTER SET latin1", |r| {
        r.random_range(0..3).to_string()
    }),
    ("SET('x','y','é')", |r| r.random_range(0..8).to_string()),
    ("POINT", |r| {
        format!("ST_GeomFromText('POINT({} 2.5)')", r.random_range(0..99))
    }),
];

const MYSQL_TYPES: &[(&str, Generate)] = &[
    ("JSON", |r| {
        format!("JSON_OBJECT('k', {}, 'é', _utf8mb4'中')", double(r))
    }),
    ("VECTOR(3)", |r| {
        format!("TO_VECTOR('[1,{},-2.5]')", r.random_range(0..9))
    }),
    ("VARCHAR(50) CHARACTER SET gb18030", |r| {
        text(r, "a中😀", 50)
    }),
];

const MARIADB_TYPES: &[(&str, Generate)] = &[
    ("JSON", |r| {
        format!("JSON_OBJECT('k', {}, 'é', '中')", double(r))
    }),
    ("UUID", |r| format!("'{}'", uuid(r))),
    ("INET4", |r| {
        format!(
            "'{}.0.{}.{}'",
            r.random::<u8>(),
            r.random::<u8>(),
            r.random_range(0..2)
        )
    }),
    ("INET6", |r| format!("'{}'", inet6(r))),
];

fn uuid(rng: &mut StdRng) -> String {
    let mut b: [u8; 16] = rng.random();
    if rng.random() {
        b[6] = rng.random_range(0..9) << 4;
        b[8] = *[0x80, 0x81, 0xbf, 0x00, 0xff].choose(rng).unwrap();
    }
    if rng.random() {
        b[15] = 0;
    }
    let h = hex(&b);
    format!(
        "{}-{}-{}-{}-{}",
        &h[..8],
        &h[8..12],
        &h[12..16],
        &h[16..20],
        &h[20..]
    )
}

fn inet6(rng: &mut StdRng) -> String {
    let mut groups: [u16; 8] = rng.random();
    for group in &mut groups {
        if rng.random_bool(0.6) {
            *group = 0;
        }
    }
    if rng.random_bool(0.2) {
        groups[..6].fill(0);
        groups[5] = *[0, 0xffff, 1].choose(rng).unwrap();
    }
    groups.map(|g| format!("{g:x}")).join(":")
}

fn types(flavour: Flavour) -> Vec<(&'static str, Generate)> {
    let own = match flavour {
        Flavour::Mysql => MYSQL_TYPES,
        Flavour::Mariadb => MARIADB_TYPES,
    };
    TYPES.iter().chain(own).copied().collect()
}

/// A table of all types, filled with random values and NULLs, in events of many rows.
async fn every_type(bench: &Bench, metadata: &str, seed: u64) -> Result<usize> {
    let types = types(bench.flavour);
    let table = format!("t_{}", metadata.to_lowercase());
    let columns: Vec<String> = types
        .iter()
        .enumerate()
        .map(|(i, (sql, _))| format!("c{i} {sql}"))
        .collect();
    bench
        .server
        .exec(format!("SET GLOBAL binlog_row_metadata = {metadata}"))
        .await?;
    let mut rng = StdRng::seed_from_u64(seed);
    let events = bench
        .record(async |conn| {
            conn.query_drop(format!(
                "CREATE TABLE {table} (id INT PRIMARY KEY, v INT AS (id + 1) VIRTUAL, \
                 s INT AS (id * 2) STORED, {}) CHARACTER SET utf8mb4",
                columns.join(", ")
            ))
            .await?;
            for batch in 0..8 {
                let rows: Vec<String> = (0..50)
                    .map(|i| {
                        let mut values = vec![(batch * 50 + i).to_string()];
                        values.push("DEFAULT".to_owned());
                        values.push("DEFAULT".to_owned());
                        for (_, generate) in &types {
                            let null = rng.random_bool(0.1);
                            let value = generate(&mut rng);
                            values.push(if null { "NULL".to_owned() } else { value });
                        }
                        format!("({})", values.join(", "))
                    })
                    .collect();
                conn.query_drop(format!("INSERT INTO {table} VALUES {}", rows.join(", ")))
                    .await?;
            }
            Ok(())
        })
        .await?;
    compare(bench, &events, &table).await
}

#[tokio::test]
async fn every_type_of_mysql_decodes_to_what_select_gives() -> Result<()> {
    let bench = Bench::start(Flavour::Mysql, &[]).await?;
    for (seed, metadata) in ["FULL", "MINIMAL"].into_iter().enumerate() {
        assert_eq!(
            every_type(&bench, metadata, u64::try_from(seed)?).await?,
            400
        );
    }
    Ok(())
}

#[tokio::test]
async fn every_type_of_mariadb_decodes_to_what_select_gives() -> Result<()> {
    let bench = Bench::start(Flavour::Mariadb, &[]).await?;
    for (seed, metadata) in ["FULL", "MINIMAL", "NO_LOG"].into_iter().enumerate() {
        assert_eq!(
            every_type(&bench, metadata, u64::try_from(seed)?).await?,
            400
        );
    }
    bench
        .server
        .exec("SET GLOBAL log_bin_compress = ON")
        .await?;
    bench
        .server
        .exec("SET GLOBAL binlog_row_metadata = FULL")
        .await?;
    bench.server.exec("DROP TABLE app.t_full").await?;
    assert_eq!(every_type(&bench, "FULL", 7).await?, 400);
    Ok(())
}

#[tokio::test]
async fn mariadb_compressed_events_are_decompressed() -> Result<()> {
    let bench = Bench::start(Flavour::Mariadb, &["--log-bin-compress=ON"]).await?;
    let events = bench
        .record(async |conn| {
            conn.query_drop("CREATE TABLE c (id INT PRIMARY KEY, t TEXT) CHARACTER SET utf8mb4")
                .await?;
            conn.query_drop("INSERT INTO c VALUES (1, REPEAT('é', 10000)), (2, 'x')")
                .await?;
            conn.query_drop("UPDATE c SET t = REPEAT('b', 9000) WHERE id = 1")
                .await?;
            conn.query_drop("DELETE FROM c WHERE id = 1").await?;
            Ok(())
        })
        .await?;
    let kinds: Vec<u8> = events.iter().map(|e| e.0).filter(|k| *k >= 166).collect();
    ensure!(kinds == [166, 167, 168], "types {kinds:?}");
    let layout = bench.layout("c").await?;
    let rows = decode(&events, Flavour::Mariadb, "c", &layout, &all(&layout))?;
    let rows: Vec<_> = rows.into_iter().collect::<Result<_, _>>()?;
    assert_eq!(rows.len(), 4);
    let text = |s: String| Cell::Text(s.into_bytes().into());
    assert_eq!(rows[0].after.as_ref().unwrap()[1], text("é".repeat(10_000)));
    assert_eq!(
        rows[2].before.as_ref().unwrap()[1],
        text("é".repeat(10_000))
    );
    assert_eq!(rows[2].after.as_ref().unwrap()[1], text("b".repeat(9_000)));
    assert_eq!(rows[3].before.as_ref().unwrap()[1], text("b".repeat(9_000)));
    Ok(())
}

#[tokio::test]
async fn a_minimal_image_is_a_partial_row_that_still_has_its_key() -> Result<()> {
    let bench = Bench::start(Flavour::Mysql, &[]).await?;
    let events = bench
        .record(async |conn| {
            conn.query_drop(
                "CREATE TABLE m (a INT DEFAULT 5, id INT PRIMARY KEY, b VARCHAR(9) DEFAULT 'd')",
            )
            .await?;
            conn.query_drop("SET binlog_row_image = MINIMAL").await?;
            conn.query_drop("INSERT INTO m (id, b) VALUES (7, 'x'), (8, NULL)")
                .await?;
            conn.query_drop("UPDATE m SET a = 6 WHERE id = 7").await?;
            conn.query_drop("DELETE FROM m WHERE id = 8").await?;
            Ok(())
        })
        .await?;
    let layout = bench.layout("m").await?;
    let rows = decode(&events, Flavour::Mysql, "m", &layout, &all(&layout))?;
    assert_eq!(rows.len(), 4);
    let partial = |i: usize| match &rows[i] {
        Err(RowError::PartialImage(row)) => {
            assert_eq!(row.why, CellError::Absent);
            row
        }
        other => panic!("{other:?}"),
    };
    let b = Some(Cell::Text("x".into()));
    assert_eq!(partial(0).after, Some(vec![None, Some(Cell::Int(7)), b]));
    assert_eq!(partial(0).column, 0);
    assert_eq!(
        partial(1).after,
        Some(vec![None, Some(Cell::Int(8)), Some(Cell::Null)])
    );
    assert_eq!(
        partial(2).before,
        Some(vec![None, Some(Cell::Int(7)), None])
    );
    assert_eq!(partial(2).after, Some(vec![Some(Cell::Int(6)), None, None]));
    assert_eq!(
        partial(3).before,
        Some(vec![None, Some(Cell::Int(8)), None])
    );
    // Where only the key is wanted, nothing is missing.
    let keys = decode(
        &events,
        Flavour::Mysql,
        "m",
        &layout,
        &["id".into(), "ID".into()],
    )?;
    let key = keys[3].as_ref().unwrap();
    assert_eq!(key.before, Some(vec![Cell::Int(8), Cell::Int(8)]));
    Ok(())
}

#[tokio::test]
async fn differences_of_json_documents_are_recognised_and_stepped_over() -> Result<()> {
    for image in ["FULL", "NOBLOB", "MINIMAL"] {
        let bench = Bench::start(Flavour::Mysql, &["--binlog-row-metadata=FULL"]).await?;
        let events = bench
            .record(async |conn| {
                conn.query_drop(
                    "CREATE TABLE p (id INT PRIMARY KEY, j JSON, k JSON, l JSON, n INT)",
                )
                .await?;
                let doc = r#"{"a": "0123456789012345678901234567890123456789", "b": [1, 2]}"#;
                conn.query_drop(format!(
                    "INSERT INTO p VALUES (1, '{doc}', '{doc}', '{doc}', 1)"
                ))
                .await?;
                conn.query_drop(format!("SET binlog_row_image = {image}"))
                    .await?;
                conn.query_drop("SET binlog_row_value_options = PARTIAL_JSON")
                    .await?;
                conn.query_drop(
                    "UPDATE p SET k = JSON_SET(k, '$.a', 'x'), l = '[1, 2]', n = 2 WHERE id = 1",
                )
                .await?;
                Ok(())
            })
            .await?;
        ensure!(
            events.iter().any(|e| e.0 == 39),
            "no partial update was logged"
        );
        let layout = bench.layout("p").await?;
        let rows = decode(&events, Flavour::Mysql, "p", &layout, &all(&layout))?;
        let Err(RowError::PartialImage(row)) = &rows[1] else {
            panic!("{image}: {:?}", rows[1])
        };
        let (before, after) = (row.before.as_ref().unwrap(), row.after.as_ref().unwrap());
        assert_eq!(before[0], Some(Cell::Int(1)), "{image}");
        assert_eq!(after[2], None, "{image}");
        assert_eq!(after[3], Some(Cell::Text("[1, 2]".into())), "{image}");
        assert_eq!(after[4], Some(Cell::Int(2)), "{image}");
        let wanted = ["l".to_owned(), "n".to_owned()];
        let rows = decode(&events, Flavour::Mysql, "p", &layout, &wanted)?;
        match (&rows[1], image) {
            (Ok(row), "FULL" | "NOBLOB") => {
                assert_eq!(row.after.as_ref().unwrap()[1], Cell::Int(2))
            }
            (Err(RowError::PartialImage(row)), "MINIMAL") => {
                assert_eq!(row.after.as_ref().unwrap()[1], Some(Cell::Int(2)));
            }
            other => panic!("{other:?}"),
        }
    }
    Ok(())
}

#[tokio::test]
async fn columns_are_matched_by_name_and_never_by_a_guess() -> Result<()> {
    let bench = Bench::start(Flavour::Mysql, &["--binlog-row-metadata=FULL"]).await?;
    let create = "CREATE TABLE d (id INT PRIMARY KEY, routing_key VARCHAR(20), \
                  aggregate_id VARCHAR(20), n INT)";
    let insert = "INSERT INTO d VALUES (1, 'route', 'agg', 3)";
    let wanted = ["aggregate_id".to_owned(), "ROUTING_KEY".to_owned()];
    let full = bench
        .record(async |conn| {
            conn.query_drop(create).await?;
            Ok(conn.query_drop(insert).await?)
        })
        .await?;
    let before = bench.layout("d").await?;
    // Columns swapped, one dropped, one added since the event.
    bench
        .server
        .exec("ALTER TABLE d MODIFY routing_key VARCHAR(20) AFTER aggregate_id")
        .await?;
    bench
        .server
        .exec("ALTER TABLE d DROP COLUMN n, ADD COLUMN x INT AFTER id")
        .await?;
    let now = bench.layout("d").await?;
    for layout in [&before, &now] {
        let rows = decode(&full, Flavour::Mysql, "d", layout, &wanted)?;
        let cells = rows[0].as_ref().unwrap().after.as_ref().unwrap();
        assert_eq!(
            cells[..],
            [Cell::Text("agg".into()), Cell::Text("route".into())]
        );
    }
    let map = |events: &[decode_support::Event]| {
        let body = &events.iter().find(|e| e.0 == 19).unwrap().1;
        TableMap::parse(body, Flavour::Mysql).unwrap()
    };
    let absent = TableDecoder::new(&map(&full), &now, &["x".to_owned()]);
    assert_eq!(absent.unwrap_err(), Undecodable::Absent("x".to_owned()));

    // Without names every column has to agree.
    bench
        .server
        .exec("SET GLOBAL binlog_row_metadata = MINIMAL")
        .await?;
    bench.server.exec("DROP TABLE d").await?;
    let minimal = bench
        .record(async |conn| {
            conn.query_drop(create).await?;
            Ok(conn.query_drop(insert).await?)
        })
        .await?;
    for (alter, agrees) in [
        ("ADD COLUMN y INT", false),
        ("DROP COLUMN y", true),
        ("MODIFY n INT UNSIGNED", false),
        ("MODIFY n BIGINT", false),
        ("MODIFY n INT NOT NULL", false),
        ("MODIFY n INT", true),
        (
            "MODIFY aggregate_id VARCHAR(20) CHARACTER SET latin1",
            false,
        ),
        ("MODIFY aggregate_id VARCHAR(21)", false),
        ("MODIFY aggregate_id VARCHAR(20)", true),
        ("ADD COLUMN z INT AS (id) VIRTUAL", false),
    ] {
        bench.server.exec(format!("ALTER TABLE d {alter}")).await?;
        let layout = bench.layout("d").await?;
        match TableDecoder::new(&map(&minimal), &layout, &wanted) {
            Ok(_) => assert!(agrees, "{alter}"),
            Err(Undecodable::Layout(_)) => assert!(!agrees, "{alter}"),
            Err(other) => panic!("{alter}: {other}"),
        }
    }
    Ok(())
}

#[tokio::test]
async fn numbers_in_floating_point_print_as_the_server_prints_them() -> Result<()> {
    let bench = Bench::start(Flavour::Mysql, &[]).await?;
    let mut rng = StdRng::seed_from_u64(99);
    let events = bench
        .record(async |conn| {
            conn.query_drop(
                "CREATE TABLE f (id INT PRIMARY KEY, d DOUBLE, f FLOAT, e DOUBLE(30,4), \
                 g FLOAT(20,3), h DOUBLE(20,0))",
            )
            .await?;
            for batch in 0..20 {
                let rows: Vec<String> = (0..1000)
                    .map(|i| {
                        // Quarters where two shortest forms are equally near, and any bits.
                        let quarter = rng.random_range(1_u64 << 50..1 << 52) as f64 * 0.5;
                        let any = double(&mut rng);
                        let (d, e) = if rng.random() {
                            (any, quarter)
                        } else {
                            (format!("{quarter:e}"), 0.125)
                        };
                        let f = float(&mut rng);
                        format!("({}, {d}, {f}, {e:e}, {f}, {d})", batch * 1000 + i)
                    })
                    .collect();
                conn.query_drop(format!("INSERT INTO f VALUES {}", rows.join(", ")))
                    .await?;
            }
            Ok(())
        })
        .await?;
    assert_eq!(compare(&bench, &events, "f").await?, 20_000);
    Ok(())
}

/// Records what the fuzzer mutates: `cargo test -p outbox-tail --test decode_server corpus --
/// --ignored`.
#[tokio::test]
#[ignore = "writes the fuzzer's corpus into the source tree"]
async fn corpus_of_the_fuzzer() -> Result<()> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus");
    for (flavour, metadata, options) in [
        (Flavour::Mysql, "FULL", &[][..]),
        (Flavour::Mysql, "MINIMAL", &[]),
        (Flavour::Mariadb, "FULL", &[]),
        (Flavour::Mariadb, "NO_LOG", &["--log-bin-compress=ON"]),
    ] {
        let metadata_option = format!("--binlog-row-metadata={metadata}");
        let options: Vec<&str> = options.iter().copied().chain([&*metadata_option]).collect();
        let bench = Bench::start(flavour, &options).await?;
        let types = types(flavour);
        let columns: Vec<String> = types
            .iter()
            .enumerate()
            .map(|(i, (sql, _))| format!("c{i} {sql}"))
            .collect();
        let mut rng = StdRng::seed_from_u64(5);
        let events = bench
            .record(async |conn| {
                conn.query_drop(format!(
                    "CREATE TABLE t (id INT PRIMARY KEY, {}) CHARACTER SET utf8mb4",
                    columns.join(", ")
                ))
                .await?;
                let rows: Vec<String> = (0..3)
                    .map(|id| {
                        let values: Vec<String> =
                            types.iter().map(|(_, generate)| generate(&mut rng)).collect();
                        format!("({id}, {})", values.join(", "))
                    })
                    .collect();
                conn.query_drop(format!("INSERT INTO t VALUES {}", rows.join(", "))).await?;
                if flavour == Flavour::Mysql {
                    conn.query_drop("SET binlog_row_value_options = PARTIAL_JSON").await?;
                    conn.query_drop("UPDATE t SET c67 = JSON_SET(c67, '$.k', 1) WHERE id = 1")
                        .await?;
                }
                conn.query_drop("UPDATE t SET c0 = 1 WHERE id = 1").await?;
                conn.query_drop("DELETE FROM t WHERE id = 2").await?;
                if flavour == Flavour::Mysql {
                    // The documents alone, as they are stored.
                    conn.query_drop("CREATE TABLE j (id INT PRIMARY KEY, j JSON)").await?;
                    for (id, sql) in [
                        r#"'{"a": [1, -2, 70000, 3.5, true, null], "b": {"c": "x\\n"}}'"#,
                        "JSON_ARRAY(CAST(1.50 AS DECIMAL(9,2)), NOW(6), CURTIME(3), CURDATE(), x'00ff')",
                        "CAST('[[[[[[[[[[[[1]]]]]]]]]]]]' AS JSON)",
                        "CAST('\"text\"' AS JSON)",
                    ]
                    .iter()
                    .enumerate()
                    {
                        conn.query_drop(format!("INSERT INTO j VALUES ({id}, {sql})")).await?;
                    }
                }
                Ok(())
            })
            .await?;
        let layout = bench.layout("t").await?;
        let (mut recorded, mut json, mut table) = (Vec::new(), Vec::new(), String::new());
        if flavour == Flavour::Mysql {
            // [-16, 1.0] in the format of documents over 64 KiB, which need not be that large.
            json.push("03020000001a00000007f0ffffff0b12000000000000000000f03f".to_owned());
        }
        for (kind, body) in &events {
            if *kind == 19 {
                table = TableMap::parse(body, flavour)?.table;
            }
            match table.as_str() {
                "t" if matches!(kind, 19 | 23..=25 | 30..=32 | 39 | 166..=168) => {
                    recorded.push((*kind, hex(body)));
                }
                // Behind the head of the event, the null bitmap, the key and the length.
                "j" if *kind == 30 => json.push(hex(&body[12 + 1 + 4 + 4..])),
                _ => {}
            }
        }
        let text = serde_json::json!({
            "mariadb": flavour == Flavour::Mariadb,
            "layout": layout,
            "events": recorded,
            "json": json,
        });
        let name = format!("{flavour:?}-{metadata}.json").to_lowercase();
        std::fs::write(format!("{folder}/{name}"), text.to_string())?;
    }
    Ok(())
}
