//! The row decoder against real servers: what it reads from the binlog equals what SELECT gives.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod decode_support;

use anyhow::Result;
use decode_support::types::{double, float, hex, types};
use decode_support::{Bench, compare};
use mysql_async::prelude::Queryable;
use outbox_tail::decode::{Flavour, TableMap};
use rand::prelude::*;

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

/// Records what the fuzzer mutates: `cargo test -p outbox-tail --test decode_types corpus --
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
