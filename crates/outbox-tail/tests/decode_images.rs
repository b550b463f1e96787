//! Row images on real servers: whole ones, parts of them, compressed ones, and how columns are
//! matched.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod decode_support;

use anyhow::{Result, ensure};
use decode_support::{Bench, all, decode};
use mysql_async::prelude::Queryable;
use outbox_core::Cell;
use outbox_tail::decode::{CellError, Flavour, RowError, TableDecoder, TableMap, Undecodable};

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
