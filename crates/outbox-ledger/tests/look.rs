//! Rows read back, and recorded, whatever their tables look like; on a server eight hours east.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod claims_world;
mod settle_world;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use claims_world::*;
use outbox_core::failure::Failure;
use outbox_core::message::{ContentType, Message};
use outbox_core::ports::{Ledger, Recorded, RowOutcome, Seen, Verdict};
use outbox_core::row::{Aggregate, RowId, RowKey};
use outbox_core::spec::{OnSent, TableSpec, Tracking};
use outbox_core::status::Status;
use outbox_ledger::settle::TailLedger;
use outbox_ledger::zone;
use outbox_testkit::{Mysql, MysqlOptions};
use settle_world::*;

#[tokio::test]
async fn rows_are_read_and_recorded_in_every_kind_of_table() -> Result<()> {
    let east = MysqlOptions::default().option("--default-time-zone=+08:00");
    let world = World::on(Mysql::start(east).await?).await?;
    seen(&world).await.context("seen")?;
    age(&world).await.context("age")?;
    seeds(&world).await.context("seeds")?;
    keys(&world).await.context("keys")?;
    aggregates(&world).await.context("aggregates")?;
    nulls(&world).await.context("nulls")?;
    reasons(&world).await.context("reasons")?;
    untracked(&world).await.context("untracked")
}

fn state(status: Status, retry_count: u32, delayed: bool, claimed: bool) -> Seen {
    Seen::Row {
        status,
        retry_count,
        delayed,
        claimed,
    }
}

async fn seen(world: &World) -> Result<()> {
    fresh(world, 2100).await?;
    for change in [
        "DELETE FROM outbox WHERE id = 1",
        "UPDATE outbox SET status = 4 WHERE id = 2",
        "UPDATE outbox SET status = 3, locked_until = NOW(6) + INTERVAL 1 MINUTE WHERE id = 3",
        "UPDATE outbox SET locked_until = NOW(6) + INTERVAL 1 MINUTE WHERE id = 4",
        "UPDATE outbox SET locked_until = NOW(6) - INTERVAL 1 MINUTE WHERE id = 5",
        "UPDATE outbox SET next_retry_at = NOW(6) + INTERVAL 1 MINUTE WHERE id = 6",
        "UPDATE outbox SET next_retry_at = NOW(6) - INTERVAL 1 MINUTE, retry_count = 2 WHERE id = 7",
        "UPDATE outbox SET status = 77 WHERE id = 8",
        "UPDATE outbox SET status = 1 WHERE id = 9",
    ] {
        world.server.exec(change).await?;
    }
    let ledger = tail(world, &[spec("outbox")]).await?;
    // In an order of its own, with one asked for twice.
    let ids: Vec<u64> = (1..=2100).rev().chain([2]).collect();
    let keys: Vec<RowId> = ids.iter().map(|id| RowId::UInt(*id)).collect();
    let seen = ledger.look(T0, &keys).await?;
    assert_eq!(seen.len(), keys.len());
    for (id, seen) in ids.iter().zip(seen) {
        let expected = match id {
            1 => Seen::Absent,
            2 => state(Status::Abandoned, 0, false, false),
            3 => state(Status::Processing, 0, false, true),
            4 => state(Status::Pending, 0, false, true),
            6 => state(Status::Pending, 0, true, false),
            7 => state(Status::Pending, 2, false, false),
            // Unknown to us, and nobody's to publish.
            8 => state(Status::Abandoned, 0, false, false),
            9 => state(Status::Sent, 0, false, false),
            _ => state(Status::Pending, 0, false, false),
        };
        assert_eq!(seen, expected, "row {id}");
        assert_eq!(seen.is_fresh(), *id == 5 || *id > 9, "row {id}");
    }
    assert!(ledger.look(T0, &[]).await?.is_empty());
    // What holds its aggregate: claimed, processing, or attempted.
    let holding = ledger.holding(T0, 100).await?;
    assert_eq!(names(&holding), ["a3:3", "a4:4", "a7:7"]);
    assert_eq!(ledger.holding(T0, 2).await?.len(), 2);
    let asked: Vec<Aggregate> = (1..=300)
        .map(|n| aggregate("order", &format!("a{n}")))
        .chain([aggregate("invoice", "a301")])
        .collect();
    let left = ledger.remaining(T0, &asked, 1000).await?;
    let expected: Vec<String> = (1..=300)
        .filter(|n| ![1, 2, 6, 8, 9].contains(n))
        .map(|n| format!("a{n}:{n}"))
        .collect();
    assert_eq!(names(&left), expected);
    Ok(())
}

fn names(rows: &[(Aggregate, RowId)]) -> Vec<String> {
    let name = |(aggregate, id): &(Aggregate, RowId)| format!("{}:{id}", aggregate.id);
    rows.iter().map(name).collect()
}

async fn age(world: &World) -> Result<()> {
    assert_eq!(zone::offset(&world.db).await?, 8 * 3600);
    fresh(world, 1).await?;
    let later = "UPDATE outbox SET next_retry_at = NOW(6) + INTERVAL 90 SECOND";
    world.server.exec(later).await?;
    let ledger = tail(world, &[spec("outbox")]).await?;
    let row = ledger.read(T0, &[RowId::UInt(1)]).await?.remove(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let created = row.message.unwrap().timestamp.unwrap();
    assert!(created.abs_diff(now) < 60, "created {created}, it is {now}");
    let due = u64::try_from(row.state.next_retry_at.unwrap())? / 1_000_000;
    assert!(
        (now + 30..=now + 91).contains(&due),
        "due {due}, it is {now}"
    );
    // A due time that we write is in the same zone as the one that we read.
    world
        .server
        .exec("UPDATE outbox SET next_retry_at = NULL")
        .await?;
    settle(&ledger, vec![refused(1, 0)], None).await?;
    let soon = "SELECT COUNT(*) FROM outbox WHERE next_retry_at BETWEEN NOW(6) AND NOW(6) + INTERVAL 30 SECOND";
    assert_eq!(world.server.count(soon).await?, 1);
    Ok(())
}

/// One outcome for a row that was read.
async fn outcome_of(ledger: &TailLedger, id: RowId, verdict: Verdict) -> Result<RowOutcome> {
    let row = ledger.read(T0, std::slice::from_ref(&id)).await?;
    let row = row.first().with_context(|| format!("row {id}"))?;
    assert_eq!(row.key.id, id);
    Ok(outcome(row, verdict))
}

/// The life of three rows in a table of those names: sent, refused once, undeliverable.
async fn three(world: &World, spec: &TableSpec) -> Result<TailLedger> {
    let ledger = tail(world, std::slice::from_ref(spec)).await?;
    let nack = failed(Failure::retryable("nack", "refused"), 0);
    let bad = failed(Failure::permanent("bad", "no good"), 0);
    let mut outcomes = Vec::new();
    for (id, verdict) in [(1, Verdict::Sent), (2, nack), (3, bad)] {
        outcomes.push(outcome_of(&ledger, RowId::Int(id), verdict).await?);
    }
    let report = settle(&ledger, outcomes, Some(at(1))).await?;
    use Recorded::{Failed, Sent, WillRetry};
    assert_eq!(report.rows, [Sent, WillRetry, Failed]);
    assert!(report.checkpointed);
    let ids: Vec<RowId> = (1..=3).map(RowId::Int).collect();
    let delayed = spec.table != "outbox";
    assert_eq!(
        ledger.look(T0, &ids).await?,
        [
            state(Status::Sent, 0, false, false),
            state(Status::Pending, 1, delayed, false),
            state(Status::Failed, 0, false, false),
        ]
    );
    assert_eq!(names(&ledger.holding(T0, 10).await?), ["7:2"]);
    Ok(ledger)
}

/// The two tables that people have.
async fn seeds(world: &World) -> Result<()> {
    let server = &world.server;
    server.exec(SEED_ONE).await?;
    server
        .exec("INSERT INTO ss_bill_outbox (bill_id, event_type, payload) VALUES (7, 'x', '{}'), (7, 'x', '{}'), (7, 'x', '{}')")
        .await?;
    three(world, &seed_one()).await?;
    let words = "SELECT GROUP_CONCAT(status ORDER BY id) FROM ss_bill_outbox";
    let words = server.first::<String>(words).await?;
    assert_eq!(words.as_deref(), Some("SENT,PENDING,FAILED"));

    // No columns for claims, due times and errors.
    server.exec("RENAME TABLE outbox TO default_outbox").await?;
    server.exec(SEED_TWO).await?;
    server
        .exec("INSERT INTO outbox (aggregate_id, event_type, payload, updated_at) VALUES (7, 'x', '{}', '2020-01-01'), (7, 'x', '{}', '2020-01-01'), (7, 'x', '{}', '2020-01-01')")
        .await?;
    three(world, &spec("outbox")).await?;
    // The due time of a retry counts from there.
    let now = "SELECT COUNT(*) FROM outbox WHERE updated_at > NOW() - INTERVAL 1 MINUTE AND updated_at <= NOW()";
    assert_eq!(server.count(now).await?, 3);
    server.exec("DROP TABLE outbox").await?;
    server.exec("RENAME TABLE default_outbox TO outbox").await?;
    Ok(())
}

/// Keys of every type are found by their index: a row of somebody else's is in nobody's way.
async fn keys(world: &World) -> Result<()> {
    let binary = |hex: &str| {
        let bytes: Vec<u8> = (0..hex.len() / 2)
            .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap())
            .collect();
        RowId::Binary(bytes.into())
    };
    let text = |s: &str| RowId::Text(s.into());
    let uuid = "3e11fa47-71ca-11e1-9e33-c80aa9429562";
    let (one, zeros) = (
        "01902ca4f5e07d3b8a1122334455667f",
        "01902ca4f5e07d3b8a11223344550000",
    );
    let cases = [
        ("INT", vec![RowId::Int(-3), RowId::Int(5)], ["-3", "5", "6"]),
        (
            "BIGINT UNSIGNED",
            vec![RowId::UInt(1), RowId::UInt(u64::MAX)],
            ["1", "18446744073709551615", "6"],
        ),
        (
            "BINARY(16)",
            vec![binary(zeros), binary(one)],
            [&format!("X'{zeros}'"), &format!("X'{one}'"), "X'00'"],
        ),
        (
            "VARBINARY(300)",
            vec![binary("ff00"), binary("ff")],
            ["X'ff00'", "X'ff'", "X'00'"],
        ),
        (
            "CHAR(36)",
            vec![text(uuid), text("short")],
            [&format!("'{uuid}'"), "'short'", "'z'"],
        ),
        (
            "CHAR(36) CHARACTER SET ascii",
            vec![text(uuid), text("b")],
            [&format!("'{uuid}'"), "'b'", "'z'"],
        ),
        (
            "VARCHAR(64) CHARACTER SET latin1",
            vec![text("é"), text("b")],
            ["'é'", "'b'", "'z'"],
        ),
        (
            "VARCHAR(64) CHARACTER SET gbk",
            vec![text("单据"), text("b")],
            ["'单据'", "'b'", "'z'"],
        ),
        (
            "VARCHAR(64) COLLATE utf8mb4_bin",
            vec![text("é "), text("É")],
            ["'é '", "'É'", "'z'"],
        ),
    ];
    for (n, (kind, ids, [a, b, other])) in cases.into_iter().enumerate() {
        let name = format!("keyed{n}");
        one_key_type(world, &name, kind, &ids, [a, b, other])
            .await
            .context(kind)?;
    }
    Ok(())
}

async fn one_key_type(
    world: &World,
    name: &str,
    kind: &str,
    ids: &[RowId],
    literals: [&str; 3],
) -> Result<()> {
    let server = &world.server;
    server
        .exec(format!("CREATE TABLE {name} LIKE outbox"))
        .await?;
    server
        .exec(format!("ALTER TABLE {name} MODIFY id {kind} NOT NULL"))
        .await?;
    for literal in literals {
        server
            .exec(format!("INSERT INTO {name} (id, aggregate_id, event_type, payload) VALUES ({literal}, 'a', 'x', '{{}}')"))
            .await?;
    }
    let [a, b, other] = literals;
    let ledger = tail(world, &[spec(name)]).await?;
    let fresh = state(Status::Pending, 0, false, false);
    assert_eq!(ledger.look(T0, ids).await?, [fresh, fresh]);
    let mut read = ids_of(&ledger, ids).await?;
    read.sort();
    let mut wanted = ids.to_vec();
    wanted.sort();
    assert_eq!(read, wanted);
    let mut app = world.open().await?;
    say(&mut app, "BEGIN").await?;
    say(
        &mut app,
        format!("SELECT * FROM {name} WHERE id = {other} FOR UPDATE"),
    )
    .await?;
    let one = |id: &RowId, verdict| RowOutcome {
        key: RowKey {
            table: T0,
            id: id.clone(),
        },
        aggregate: aggregate("", "a"),
        verdict,
    };
    let outcomes = vec![
        one(&ids[0], Verdict::Sent),
        one(&ids[1], failed(Failure::retryable("nack", "refused"), 0)),
    ];
    let report = settle(&ledger, outcomes, None).await?;
    assert_eq!(report.rows, [Recorded::Sent, Recorded::WillRetry]);
    let written = format!(
        "SELECT COUNT(*) FROM {name} WHERE (id = {a} AND status = 1) OR (id = {b} AND status = 0 AND retry_count = 1)"
    );
    assert_eq!(server.count(written).await?, 2);
    assert_eq!(
        ledger.holding(T0, 9).await?,
        [(aggregate("", "a"), ids[1].clone())]
    );
    if matches!(ids[0], RowId::Text(_)) {
        return say(&mut app, "ROLLBACK").await;
    }
    // Only this one is in somebody's hands. It takes a lock wait to find out: not for every type.
    say(
        &mut app,
        format!("SELECT * FROM {name} WHERE id = {a} FOR UPDATE"),
    )
    .await?;
    let both = vec![one(&ids[0], Verdict::Sent), one(&ids[1], Verdict::Sent)];
    let report = settle(&ledger, both, None).await?;
    assert_eq!(report.rows, [Recorded::Busy, Recorded::Sent]);
    say(&mut app, "ROLLBACK").await
}

async fn ids_of(ledger: &TailLedger, ids: &[RowId]) -> Result<Vec<RowId>> {
    let rows = ledger.read(T0, ids).await?;
    Ok(rows.into_iter().map(|r| r.key.id).collect())
}

/// Aggregates whose ids are no text are called as in the messages of their rows.
async fn aggregates(world: &World) -> Result<()> {
    let cases = [
        (
            "BINARY(16)",
            "X'01902ca4f5e07d3b8a11223344550000'",
            "01902ca4-f5e0-7d3b-8a11-223344550000",
        ),
        (
            "BIGINT UNSIGNED",
            "18446744073709551615",
            "18446744073709551615",
        ),
        ("VARCHAR(64) CHARACTER SET gbk", "'单据'", "单据"),
        ("VARCHAR(64) NULL", "NULL", ""),
        ("INT NULL", "NULL", ""),
    ];
    for (n, (kind, literal, printed)) in cases.into_iter().enumerate() {
        let name = format!("grouped{n}");
        let null = if kind.ends_with("NULL") {
            ""
        } else {
            " NOT NULL"
        };
        for statement in [
            format!("CREATE TABLE {name} LIKE outbox"),
            format!("ALTER TABLE {name} MODIFY aggregate_id {kind}{null}"),
            format!(
                "INSERT INTO {name} (aggregate_id, event_type, payload) VALUES ({literal}, 'x', '{{}}'), ({literal}, 'x', '{{}}')"
            ),
        ] {
            world.server.exec(statement).await?;
        }
        let ledger = tail(world, &[spec(&name)]).await?;
        let row = ledger.read(T0, &[RowId::UInt(1)]).await?.remove(0);
        assert_eq!(&*row.aggregate.id, printed, "{kind}");
        let nack = failed(Failure::retryable("nack", "refused"), 0);
        settle(&ledger, vec![outcome(&row, nack)], None).await?;
        let ours = row.aggregate.clone();
        assert_eq!(
            ledger.holding(T0, 9).await?,
            [(ours.clone(), RowId::UInt(1))],
            "{kind}"
        );
        let unknown = aggregate("order", "no such thing");
        let left = ledger.remaining(T0, &[unknown, ours.clone()], 9).await?;
        assert_eq!(
            left,
            [(ours.clone(), RowId::UInt(1)), (ours, RowId::UInt(2))],
            "{kind}"
        );
    }
    Ok(())
}

/// A row without status or count stops none of the others.
async fn nulls(world: &World) -> Result<()> {
    for statement in [
        "CREATE TABLE loose LIKE outbox",
        "ALTER TABLE loose MODIFY status TINYINT NULL, MODIFY retry_count INT NULL",
        "INSERT INTO loose (aggregate_id, event_type, payload, status, retry_count) VALUES ('a', 'x', '{}', NULL, 0), ('b', 'x', '{}', 0, NULL), ('c', 'x', '{}', 0, -1), ('d', 'x', '{}', 0, 0)",
    ] {
        world.server.exec(statement).await?;
    }
    let ledger = tail(world, &[spec("loose")]).await?;
    let ids: Vec<RowId> = (1..=4).map(RowId::UInt).collect();
    let fresh = state(Status::Pending, 0, false, false);
    let nobodys = state(Status::Abandoned, 0, false, false);
    assert_eq!(ledger.look(T0, &ids).await?, [nobodys, fresh, fresh, fresh]);
    let outcomes = vec![sent(1), refused(2, 0), refused(3, 0), sent(4)];
    let report = settle(&ledger, outcomes.clone(), None).await?;
    use Recorded::{Gone, Sent, WillRetry};
    assert_eq!(report.rows, [Gone, WillRetry, WillRetry, Sent]);
    assert_eq!(settle(&ledger, outcomes, None).await?.rows, report.rows);
    let counts = "SELECT COUNT(*) FROM loose WHERE id IN (2, 3) AND retry_count = 1";
    assert_eq!(world.server.count(counts).await?, 2);
    Ok(())
}

/// A reason is cut to what its column takes.
async fn reasons(world: &World) -> Result<()> {
    world.server.exec("CREATE TABLE words LIKE outbox").await?;
    for (kind, stored) in [
        ("VARCHAR(20)", "nack: 拒绝拒绝拒绝拒绝拒绝拒绝拒绝"),
        ("VARCHAR(20) CHARACTER SET gbk", "nack: ??????????????"),
        ("VARCHAR(20) CHARACTER SET utf16", "nack: ??????????????"),
        ("VARCHAR(20) CHARACTER SET latin1", "nack: ??????????????"),
        ("VARBINARY(20)", "nack: ??????????????"),
    ] {
        for statement in [
            "TRUNCATE TABLE words".to_owned(),
            format!("ALTER TABLE words MODIFY last_error {kind} NULL"),
            "INSERT INTO words (aggregate_id, event_type, payload) VALUES ('a', 'x', '{}')"
                .to_owned(),
        ] {
            world.server.exec(statement).await?;
        }
        let ledger = tail(world, &[spec("words")]).await?;
        let long = failed(Failure::retryable("nack", "拒绝".repeat(2000)), 0);
        let report = settle(&ledger, vec![verdict(1, long)], None).await?;
        assert_eq!(report.rows, [Recorded::WillRetry], "{kind}");
        let read = "SELECT CONVERT(last_error USING utf8mb4) FROM words";
        assert_eq!(
            world.server.first::<String>(read).await?.as_deref(),
            Some(stored),
            "{kind}"
        );
    }
    Ok(())
}

fn message(id: u64) -> Arc<Message> {
    Arc::new(Message {
        exchange: "outbox".into(),
        templated_exchange: false,
        routing_key: "x".into(),
        content_type: ContentType::Json,
        message_id: id.to_string(),
        event_type: "x".into(),
        timestamp: Some(1),
        app_id: NAME.into(),
        headers: Vec::new(),
        body: vec![b'x'; 2000].into(),
    })
}

/// Without status columns what failed is parked whole, by the settle that passes it.
async fn untracked(world: &World) -> Result<()> {
    for statement in [
        "CREATE TABLE bare (id BIGINT UNSIGNED PRIMARY KEY, aggregate_type VARCHAR(64), aggregate_id VARCHAR(64), event_type VARCHAR(64), payload JSON)",
        "INSERT INTO bare VALUES (1, 'order', 'a1', 'x', '{}'), (2, 'order', 'a2', 'x', '{}'), (3, 'order', 'a3', 'x', '{}'), (4, 'order', 'a4', 'x', '{}'), (6, 'order', 'a6', 'x', '{}')",
    ] {
        world.server.exec(statement).await?;
    }
    let mut spec = spec("bare");
    spec.tracking = Tracking::None;
    spec.on_sent = OnSent::Delete;
    let ledger = tail(world, &[spec]).await?;
    let mut app = world.open().await?;
    say(&mut app, "BEGIN").await?;
    say(&mut app, "SELECT * FROM bare WHERE id = 2 FOR UPDATE").await?;
    let refused = |id| {
        let failure = Failure::retryable("nack", "refused");
        let message = Some(message(id));
        verdict(
            id,
            Verdict::Failed {
                failure,
                retry_count: 0,
                message,
            },
        )
    };
    let bad = failed(Failure::permanent("null_column", "payload is NULL"), 0);
    let behind = Verdict::Parked {
        message: Ok(message(6)),
    };
    let outcomes = vec![
        sent(1),
        sent(2),
        refused(3),
        verdict(4, bad),
        sent(5),
        verdict(6, behind),
    ];
    use Recorded::{Busy, Failed, Sent, WillRetry};
    let report = settle(&ledger, outcomes.clone(), Some(at(90))).await?;
    assert_eq!(
        report.rows,
        [Sent, Busy, WillRetry, Failed, Sent, WillRetry]
    );
    assert!(!report.checkpointed);
    say(&mut app, "ROLLBACK").await?;
    let report = settle(&ledger, outcomes, Some(at(90))).await?;
    assert_eq!(
        report.rows,
        [Sent, Sent, WillRetry, Failed, Sent, WillRetry]
    );
    assert_eq!(stored(world).await?, Some(at(90)));
    let left = world
        .server
        .query_rows::<u64>("SELECT id FROM bare ORDER BY id")
        .await?;
    assert_eq!(left, [3, 4, 6]);
    let parked = world
        .server
        .query_rows::<(String, i64, i64, Option<u64>, Option<String>)>(
            "SELECT row_id, status, retry_count, LENGTH(body), last_error FROM outboxd_parked ORDER BY seq",
        )
        .await?;
    assert_eq!(
        parked,
        [
            ("3".into(), 0, 1, Some(2000), Some("nack: refused".into())),
            (
                "4".into(),
                2,
                0,
                None,
                Some("null_column: payload is NULL".into())
            ),
            ("6".into(), 0, 0, Some(2000), None),
        ]
    );
    let ids: Vec<RowId> = [1, 3, 4, 6].map(RowId::UInt).to_vec();
    assert_eq!(
        ledger.look(T0, &ids).await?,
        [
            Seen::Absent,
            state(Status::Pending, 1, true, false),
            state(Status::Failed, 0, false, false),
            state(Status::Pending, 0, false, false),
        ]
    );
    assert_eq!(names(&ledger.holding(T0, 9).await?), ["a3:3", "a6:6"]);
    Ok(())
}
