//! Character sets against real servers: every sequence that they store converts to what SELECT
//! gives, or is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod decode_support;

use anyhow::{Context, Result, ensure};
use decode_support::{Bench, decode, show};
use mysql_async::prelude::Queryable;
use outbox_core::Cell;
use outbox_tail::decode::{Flavour, RowError, TableDecoder, TableMap, Undecodable};

/// Character sets and the most sequences that are refused though the server prints a character.
const SINGLE: &[&str] = &[
    "latin1", "latin2", "latin5", "latin7", "cp1250", "cp1251", "cp1256", "cp1257", "cp850",
    "cp852", "cp866", "dec8", "hp8", "greek", "hebrew", "koi8r", "koi8u", "tis620", "geostd8",
    "keybcs2", "macce", "macroman", "ascii",
];

const MULTI: &[(&str, usize)] = &[
    ("gbk", 0),
    ("gb2312", 0),
    ("gb18030", 19),
    ("big5", 270),
    ("sjis", 0),
    ("cp932", 0),
    ("ujis", 2_000),
    ("eucjpms", 2_000),
    ("euckr", 0),
];

/// Inserts every sequence that is well-formed in the character set, one a row, and compares.
async fn sequences(bench: &Bench, charset: &str, source: &str, refused: usize) -> Result<()> {
    let flavour = bench.flavour;
    let events = bench
        .record(async |conn| {
            conn.query_drop(format!(
                "CREATE OR REPLACE VIEW source AS SELECT CONVERT(b USING {charset}) t FROM {source}"
            ))
            .await?;
            conn.query_drop("DROP TABLE IF EXISTS c").await?;
            conn.query_drop(format!(
                "CREATE TABLE c (id INT AUTO_INCREMENT PRIMARY KEY, \
                 t VARCHAR(8) CHARACTER SET {charset})"
            ))
            .await?;
            conn.query_drop("INSERT INTO c (t) SELECT t FROM source WHERE t IS NOT NULL")
                .await?;
            Ok(())
        })
        .await?;
    let layout = bench.layout("c").await?;
    let rows = decode(&events, flavour, "c", &layout, &["t".to_owned()])?;
    let selected = bench.select("c", &layout).await?;
    ensure!(
        rows.len() == selected.len() && rows.len() > 90,
        "{charset}: {} rows",
        rows.len()
    );
    let (mut same, mut not_converted) = (0, 0);
    for (row, selected) in rows.into_iter().zip(&selected) {
        match row {
            Ok(row) => {
                let cells = row.after.context("no image")?;
                ensure!(
                    cells[0] == selected[1],
                    "{charset}, row {}: {} in the binlog, {} by SELECT",
                    show(&selected[0]),
                    show(&cells[0]),
                    show(&selected[1])
                );
                same += 1;
            }
            Err(RowError::Undecodable(_)) => {
                let Cell::Text(text) = &selected[1] else {
                    panic!("no text")
                };
                // The server prints `?` where there is no such character.
                if !text.contains(&b'?') {
                    not_converted += 1;
                }
            }
            Err(other) => return Err(other.into()),
        }
    }
    ensure!(
        not_converted <= refused,
        "{charset}: {not_converted} refused without need"
    );
    ensure!(same > 90, "{charset}: only {same} converted");
    Ok(())
}

async fn prepare(bench: &Bench) -> Result<()> {
    let mut conn = bench.session().await?;
    conn.query_drop("CREATE TABLE n (i INT PRIMARY KEY)")
        .await?;
    let numbers: Vec<String> = (0..256).map(|i| format!("({i})")).collect();
    conn.query_drop(format!("INSERT INTO n VALUES {}", numbers.join(",")))
        .await?;
    let byte = |name: &str| format!("LPAD(HEX({name}.i), 2, '0')");
    for (table, bytes, from) in [
        ("one", byte("x"), "n x"),
        (
            "two",
            format!("CONCAT({}, {})", byte("x"), byte("y")),
            "n x, n y WHERE x.i > 127 AND y.i >= 48",
        ),
        (
            "three",
            format!("CONCAT('8F', {}, {})", byte("x"), byte("y")),
            "n x, n y WHERE x.i > 160 AND y.i > 160",
        ),
        (
            "four",
            format!(
                "CONCAT('8', {}, '3', {}, {}, '35')",
                "x.i",
                "y.i",
                byte("z")
            ),
            "n x, n y, n z WHERE x.i BETWEEN 1 AND 4 AND y.i < 10 AND z.i > 128",
        ),
    ] {
        conn.query_drop(format!(
            "CREATE TABLE {table} AS SELECT UNHEX({bytes}) b FROM {from}"
        ))
        .await?;
    }
    Ok(())
}

#[tokio::test]
async fn every_sequence_of_mysql_converts_as_select_does() -> Result<()> {
    let bench = Bench::start(Flavour::Mysql, &[]).await?;
    prepare(&bench).await?;
    for charset in SINGLE {
        sequences(&bench, charset, "one", 0).await?;
    }
    for (charset, refused) in MULTI {
        sequences(&bench, charset, "two", *refused).await?;
    }
    for charset in ["ujis", "eucjpms"] {
        sequences(&bench, charset, "three", 2_000).await?;
    }
    sequences(&bench, "gb18030", "four", 0).await
}

#[tokio::test]
async fn every_sequence_of_mariadb_converts_as_select_does() -> Result<()> {
    let bench = Bench::start(Flavour::Mariadb, &["--binlog-row-metadata=FULL"]).await?;
    prepare(&bench).await?;
    for charset in SINGLE {
        sequences(&bench, charset, "one", 0).await?;
    }
    for (charset, refused) in MULTI.iter().filter(|(c, _)| *c != "gb18030") {
        sequences(&bench, charset, "two", *refused).await?;
    }
    Ok(())
}

/// Every collation of a server, by a column of each in tables of its own.
async fn collations(flavour: Flavour) -> Result<usize> {
    let bench = Bench::start(flavour, &["--binlog-row-metadata=FULL"]).await?;
    let mut conn = bench.session().await?;
    let known: Vec<(String, String)> = match flavour {
        Flavour::Mysql => {
            conn.query(
                "SELECT COLLATION_NAME, CHARACTER_SET_NAME FROM information_schema.COLLATIONS \
                 WHERE CHARACTER_SET_NAME NOT IN ('binary', 'swe7', 'armscii8')",
            )
            .await?
        }
        Flavour::Mariadb => {
            conn.query(
                "SELECT FULL_COLLATION_NAME, CHARACTER_SET_NAME \
                 FROM information_schema.COLLATION_CHARACTER_SET_APPLICABILITY \
                 WHERE CHARACTER_SET_NAME NOT IN ('binary', 'swe7', 'armscii8')",
            )
            .await?
        }
    };
    for (n, chunk) in known.chunks(400).enumerate() {
        let events = bench
            .record(async |conn| {
                let columns: Vec<String> = chunk
                    .iter()
                    .enumerate()
                    .map(|(i, (collation, charset))| {
                        format!("c{i} TINYTEXT CHARACTER SET {charset} COLLATE {collation}")
                    })
                    .collect();
                conn.query_drop(format!(
                    "CREATE TABLE k{n} (id INT, {}) ENGINE = MyISAM",
                    columns.join(", ")
                ))
                .await?;
                conn.query_drop(format!(
                    "INSERT INTO k{n} (id, c0, c1) VALUES (1, 'a', '~')"
                ))
                .await?;
                Ok(())
            })
            .await?;
        let table = format!("k{n}");
        let body = &events.iter().find(|e| e.0 == 19).context("no table map")?.1;
        let map = TableMap::parse(body, flavour)?;
        // The layout is as good as none: only the event's collation can tell.
        let layout = bench.layout(&table).await?;
        let mut blank = layout.clone();
        blank.columns.iter_mut().for_each(|c| c.charset = None);
        for (i, (collation, _)) in chunk.iter().enumerate() {
            let wanted = [format!("c{i}")];
            TableDecoder::new(&map, &blank, &wanted).with_context(|| collation.clone())?;
        }
        decode_support::compare(&bench, &events, &table).await?;
    }
    Ok(known.len())
}

#[tokio::test]
async fn every_collation_is_known_by_its_number() -> Result<()> {
    ensure!(collations(Flavour::Mysql).await? > 250, "few collations");
    ensure!(collations(Flavour::Mariadb).await? > 500, "few collations");
    Ok(())
}

#[tokio::test]
async fn a_character_set_that_cannot_be_converted_names_its_column() -> Result<()> {
    let bench = Bench::start(Flavour::Mysql, &[]).await?;
    let events = bench
        .record(async |conn| {
            conn.query_drop(
                "CREATE TABLE s (id INT PRIMARY KEY, t VARCHAR(5) CHARACTER SET swe7, n INT)",
            )
            .await?;
            Ok(conn.query_drop("INSERT INTO s VALUES (1, 'a', 2)").await?)
        })
        .await?;
    let layout = bench.layout("s").await?;
    let body = &events.iter().find(|e| e.0 == 19).context("no table map")?.1;
    let map = TableMap::parse(body, Flavour::Mysql)?;
    let error = TableDecoder::new(&map, &layout, &["t".to_owned()]).unwrap_err();
    let expected = Undecodable::Charset {
        column: "t".into(),
        charset: "swe7".into(),
    };
    assert_eq!(error, expected);
    // Where the column is not wanted it is only stepped over.
    let rows = decode(&events, Flavour::Mysql, "s", &layout, &["n".to_owned()])?;
    assert_eq!(rows[0].as_ref().unwrap().after, Some(vec![Cell::Int(2)]));
    Ok(())
}
