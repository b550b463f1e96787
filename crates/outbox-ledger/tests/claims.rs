//! Scans, claims and their outcomes, on real servers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod claims_world;

use std::collections::HashSet;
use std::time::Duration;

use anyhow::Result;
use claims_world::*;
use outbox_core::ports::{ClaimToken, Cursor, PollStore, Recorded, Scan, Verdict};
use outbox_core::row::{OutboxRow, RowKey};
use outbox_core::spec::Ordering;
use outbox_ledger::claims::PollLedger;
use outbox_testkit::{Mysql, MysqlOptions, wait};

const LEFT_BEHIND: Scan = Scan::LeftBehind {
    min_age: Duration::ZERO,
};

async fn claim_all(store: &PollLedger, scan: &Scan) -> Result<(ClaimToken, Vec<OutboxRow>)> {
    let rows = store.scan(T0, scan, 100).await?;
    let keys: Vec<RowKey> = rows.iter().map(|(_, r)| r.key.clone()).collect();
    let (token, ours) = store.claim(T0, &keys).await?;
    let rows = rows.into_iter().map(|(_, r)| r);
    Ok((token, rows.filter(|r| ours.contains(&r.key)).collect()))
}

/// The whole life of rows in the default table.
async fn lives(world: &World) -> Result<()> {
    let server = &world.server;
    let store = world.store(&[spec("outbox")]).await?;
    world.insert("a", "", "").await?;
    world.insert("a", "", "").await?;
    world
        .insert("b", ", next_retry_at", ", NOW(6) + INTERVAL 1 HOUR")
        .await?;
    world
        .insert("c", ", next_retry_at", ", NOW(6) - INTERVAL 1 SECOND")
        .await?;
    world
        .insert(
            "d",
            ", status, locked_by, locked_until",
            ", 3, 'dead', NOW(6) - INTERVAL 1 SECOND",
        )
        .await?;
    world
        .insert(
            "e",
            ", status, locked_by, locked_until",
            ", 3, 'alive', NOW(6) + INTERVAL 1 HOUR",
        )
        .await?;
    world.insert("f", ", status", ", 3").await?;
    world
        .insert(
            "g",
            ", locked_by, locked_until",
            ", 'their relay', NOW(6) + INTERVAL 1 HOUR",
        )
        .await?;
    world.insert("h", ", status", ", 4").await?;
    assert_eq!(found(&store, &LEFT_BEHIND).await?, ["1", "2"]);
    assert_eq!(found(&store, &Scan::Due).await?, ["4", "5"]);
    let pending = Scan::Pending { after: None };
    assert_eq!(found(&store, &pending).await?, ["1", "2", "4", "5"]);
    let old = Scan::LeftBehind {
        min_age: Duration::from_secs(60),
    };
    assert!(found(&store, &old).await?.is_empty());

    // Claimed rows are nobody else's, and are not found again.
    let (token, rows) = claim_all(&store, &pending).await?;
    assert_eq!(ids(&rows), ["1", "2", "4", "5"]);
    assert!(found(&store, &pending).await?.is_empty());
    let keys: Vec<RowKey> = rows.iter().map(|r| r.key.clone()).collect();
    assert!(store.claim(T0, &keys).await?.1.is_empty());
    let held = server.count("SELECT COUNT(*) FROM outbox WHERE status = 3 AND LENGTH(locked_by) <= 64 AND locked_until BETWEEN NOW(6) + INTERVAL 50 SECOND AND NOW(6) + INTERVAL 60 SECOND").await?;
    assert_eq!(held, 4);

    // Sent, refused, given back; and one whose claim somebody else has by now.
    server
        .exec("UPDATE outbox SET locked_by = 'another' WHERE id = 4")
        .await?;
    let outcomes = [
        outcome(&rows[0], Verdict::Sent),
        nacked(&rows[1]),
        nacked(&rows[2]),
    ];
    let recorded = store.record(Some(&token), &outcomes).await?;
    assert_eq!(
        recorded,
        [Recorded::Sent, Recorded::WillRetry, Recorded::Gone]
    );
    // The answer to a commit may be lost: the same again has the same result.
    let again = store.record(Some(&token), &outcomes).await?;
    assert_eq!(again, recorded);
    store.release(&token, &keys).await?;
    let states: Vec<(u64, i64, i64, Option<String>, Option<String>)> = server
        .query_rows("SELECT id, status, retry_count, locked_by, last_error FROM outbox WHERE id IN (1, 2, 4, 5) ORDER BY id")
        .await?;
    assert_eq!(
        states,
        [
            (1, 1, 0, None, None),
            (2, 0, 1, None, Some("nack: refused".into())),
            (4, 3, 0, Some("another".into()), None),
            (5, 0, 0, None, None),
        ]
    );
    // The row that was given back is what the dead instance left: pending, never attempted.
    assert_eq!(found(&store, &LEFT_BEHIND).await?, ["5"]);
    // A confirm is a confirm, whoever has claimed the row.
    let recorded = store
        .record(Some(&token), &[outcome(&rows[2], Verdict::Sent)])
        .await?;
    assert_eq!(recorded, [Recorded::Sent]);

    // The patrol goes by the database's clock.
    let (warn, reset) = (Duration::from_secs(300), Duration::from_secs(1800));
    server
        .exec("UPDATE outbox SET updated_at = NOW(6) - INTERVAL 6 MINUTE WHERE id = 6")
        .await?;
    server
        .exec("UPDATE outbox SET updated_at = NOW(6) - INTERVAL 31 MINUTE WHERE id = 7")
        .await?;
    let report = store.patrol(T0, warn, reset).await?;
    assert_eq!((report.stuck, report.reset), (2, 1));
    assert_eq!(found(&store, &LEFT_BEHIND).await?, ["5", "7"]);

    let backlog = store.backlog(T0).await?;
    let counts: Vec<u64> = backlog.by_status.iter().map(|(_, n)| *n).collect();
    // pending 2, 3, 5, 7, 8; failed; processing 6; abandoned 9
    assert_eq!(counts, [5, 0, 1, 1], "{backlog:?}");
    assert!(backlog.oldest_pending_seconds.is_some());

    // Only what was sent long enough ago goes.
    server
        .exec("UPDATE outbox SET updated_at = NOW(6) - INTERVAL 8 DAY WHERE id IN (1, 9)")
        .await?;
    let week = Duration::from_secs(7 * 86_400);
    assert_eq!(store.purge(T0, week, 1000).await?, 1);
    assert_eq!(store.purge(T0, week, 1000).await?, 0);
    assert_eq!(
        server
            .count("SELECT COUNT(*) FROM outbox WHERE id = 1")
            .await?,
        0
    );
    Ok(())
}

#[tokio::test]
async fn rows_live_by_the_rules_on_mysql() -> Result<()> {
    lives(&World::mysql().await?).await
}

#[tokio::test]
async fn rows_live_by_the_rules_on_mariadb() -> Result<()> {
    lives(&World::mariadb().await?).await
}

#[tokio::test]
async fn two_claimers_never_get_the_same_row() -> Result<()> {
    let world = World::mysql().await?;
    let store = world.store(&[spec("outbox")]).await?;
    fill(&world, 5000, "0").await?;
    let keys: Vec<RowKey> = (1..=5000).map(key).collect();
    let claimer = |from: usize| {
        let (store, keys) = (&store, &keys);
        async move {
            let mut ours = Vec::new();
            // Both start from different ends, and meet in the middle.
            let mut chunks: Vec<&[RowKey]> = keys.chunks(100).collect();
            if from == 1 {
                chunks.reverse();
            }
            for chunk in chunks {
                ours.extend(store.claim(T0, chunk).await?.1);
            }
            anyhow::Ok(ours)
        }
    };
    let (one, two) = tokio::try_join!(claimer(0), claimer(1))?;
    assert!(!one.is_empty() && !two.is_empty());
    let both: HashSet<_> = one.iter().chain(&two).collect();
    assert_eq!(both.len(), one.len() + two.len(), "a row was claimed twice");
    assert_eq!(both.len(), 5000, "a row was claimed by nobody");
    Ok(())
}

/// `rows` rows of `status`, in fifty aggregates.
async fn fill(world: &World, rows: u64, status: &str) -> Result<()> {
    let mut conn = world.open().await?;
    let first = format!(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, status) \
         VALUES ('order', 'a0', 'Paid', '{{}}', {status})"
    );
    let start = world
        .server
        .count("SELECT COALESCE(MAX(id), 0) FROM outbox")
        .await?;
    say(&mut conn, first).await?;
    let mut have = 1;
    while have < rows {
        let more = have.min(rows - have).min(50_000);
        say(&mut conn, format!(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, status) \
             SELECT @n := @n + 1, 'order', CONCAT('a', @n % 50), 'Paid', '{{}}', {status} \
             FROM (SELECT @n := {}) x, outbox ORDER BY outbox.id LIMIT {more}",
            start + have
        ))
        .await?;
        have += more;
    }
    say(
        &mut conn,
        format!("ALTER TABLE outbox AUTO_INCREMENT = {}", start + rows + 1),
    )
    .await?;
    Ok(())
}

#[tokio::test]
async fn a_claim_ends_by_the_databases_clock_and_its_late_write_changes_nothing() -> Result<()> {
    let world = World::mysql().await?;
    let store = world.store(&[spec("outbox")]).await?;
    world.insert("a", "", "").await?;
    let (late, rows) = claim_all(&store, &LEFT_BEHIND).await?;
    world
        .server
        .exec("UPDATE outbox SET locked_until = NOW(6) - INTERVAL 1 MICROSECOND")
        .await?;
    let (token, again) = claim_all(&store, &Scan::Due).await?;
    assert_eq!(
        (ids(&rows), ids(&again)),
        (vec!["1".into()], vec!["1".to_owned()])
    );
    let recorded = store.record(Some(&late), &[nacked(&rows[0])]).await?;
    assert_eq!(recorded, [Recorded::Gone]);
    store.release(&late, &[key(1)]).await?;
    let held = "SELECT COUNT(*) FROM outbox WHERE status = 3 AND retry_count = 0";
    assert_eq!(
        world.server.count(held).await?,
        1,
        "the new claim was touched"
    );
    let recorded = store.record(Some(&token), &[nacked(&again[0])]).await?;
    assert_eq!(recorded, [Recorded::WillRetry]);
    Ok(())
}

#[tokio::test]
async fn a_stale_epoch_writes_nothing() -> Result<()> {
    let world = World::mysql().await?;
    let store = world.store(&[spec("outbox")]).await?;
    world.insert("a", "", "").await?;
    world
        .server
        .exec("UPDATE outboxd_fence SET epoch = epoch + 1")
        .await?;
    let error = store.claim(T0, &[key(1)]).await.unwrap_err();
    assert_eq!(error.disposition, outbox_core::ports::Disposition::Fenced);
    let row = &store.scan(T0, &LEFT_BEHIND, 1).await?[0].1;
    assert!(
        store
            .record(None, &[outcome(row, Verdict::Sent)])
            .await
            .is_err()
    );
    assert!(store.purge(T0, Duration::ZERO, 10).await.is_err());
    assert_eq!(
        world
            .server
            .count("SELECT COUNT(*) FROM outbox WHERE status = 0")
            .await?,
        1
    );
    Ok(())
}

#[tokio::test]
async fn retries_are_spent_and_then_the_row_fails() -> Result<()> {
    let world = World::mysql().await?;
    let store = world.store(&[spec("outbox")]).await?;
    world.insert("a", "", "").await?;
    let mut delays = Vec::new();
    let mut scan = LEFT_BEHIND;
    for expected in [30, 60, 120, 240, 480] {
        let (token, rows) = claim_all(&store, &scan).await?;
        let recorded = store.record(Some(&token), &[nacked(&rows[0])]).await?;
        assert_eq!(recorded, [Recorded::WillRetry]);
        let delay = world
            .server
            .count("SELECT CAST(ROUND(TIMESTAMPDIFF(MICROSECOND, updated_at, next_retry_at) / 1000000) AS UNSIGNED) FROM outbox")
            .await?;
        delays.push(delay);
        assert_eq!(delay, expected);
        assert!(found(&store, &Scan::Due).await?.is_empty(), "not due yet");
        world
            .server
            .exec("UPDATE outbox SET next_retry_at = NOW(6)")
            .await?;
        scan = Scan::Due;
    }
    // The last retry is spent, and still gets its publish.
    let (token, rows) = claim_all(&store, &scan).await?;
    assert_eq!(rows[0].state.retry_count, 5);
    let recorded = store.record(Some(&token), &[nacked(&rows[0])]).await?;
    assert_eq!(recorded, [Recorded::Failed]);
    let failed =
        "SELECT COUNT(*) FROM outbox WHERE status = 2 AND retry_count = 5 AND locked_by IS NULL";
    assert_eq!(world.server.count(failed).await?, 1);
    Ok(())
}

#[tokio::test]
async fn rows_behind_a_waiting_one_do_not_fill_the_pages() -> Result<()> {
    let world = World::mysql().await?;
    let mut ordered = spec("outbox");
    let store = world.store(&[ordered.clone()]).await?;
    world
        .insert(
            "a",
            ", retry_count, next_retry_at",
            ", 1, NOW(6) + INTERVAL 1 HOUR",
        )
        .await?;
    for _ in 0..3 {
        world.insert("a", "", "").await?;
    }
    world
        .insert(
            "a",
            ", retry_count, next_retry_at",
            ", 1, NOW(6) - INTERVAL 1 HOUR",
        )
        .await?;
    world
        .insert("b", ", next_retry_at", ", NOW(6) + INTERVAL 1 HOUR")
        .await?;
    world.insert("b", "", "").await?;
    // b's first row was never attempted: a delayed row is outside the order.
    assert_eq!(found(&store, &LEFT_BEHIND).await?, ["7"]);
    assert!(found(&store, &Scan::Due).await?.is_empty());
    let aggregates = [
        aggregate("order", "a"),
        aggregate("order", "b"),
        aggregate("order", "c"),
    ];
    let rows = store.unsettled(T0, &aggregates, 3).await?;
    let seen: Vec<(String, bool)> = rows
        .iter()
        .map(|(row, ready)| (row.key.id.to_string(), *ready))
        .collect();
    let expected = [("1", false), ("2", true), ("3", true), ("7", true)];
    assert_eq!(seen, expected.map(|(id, ready)| (id.to_owned(), ready)));
    ordered.ordering = Ordering::None;
    let store = world.store(&[ordered]).await?;
    assert_eq!(found(&store, &LEFT_BEHIND).await?, ["2", "3", "4", "7"]);
    assert_eq!(found(&store, &Scan::Due).await?, ["5"]);
    Ok(())
}

#[tokio::test]
async fn a_row_that_commits_late_is_found_though_its_id_is_low() -> Result<()> {
    let world = World::mysql().await?;
    let store = world.store(&[spec("outbox")]).await?;
    let mut slow = world.open().await?;
    say(&mut slow, "BEGIN").await?;
    say(
        &mut slow,
        "INSERT INTO outbox (aggregate_id, event_type, payload) VALUES ('x', 'T', '{}')",
    )
    .await?;
    for _ in 0..5 {
        world.insert("a", "", "").await?;
    }
    // An insert that is still open blocks neither scans nor claims.
    let started = std::time::Instant::now();
    let (token, rows) = claim_all(&store, &LEFT_BEHIND).await?;
    assert_eq!(ids(&rows), ["2", "3", "4", "5", "6"]);
    let sent: Vec<_> = rows.iter().map(|r| outcome(r, Verdict::Sent)).collect();
    assert_eq!(
        store.record(Some(&token), &sent).await?,
        [Recorded::Sent; 5]
    );
    assert!(
        store.claim(T0, &[key(1)]).await?.1.is_empty(),
        "not visible yet"
    );
    assert!(
        started.elapsed() < Duration::from_secs(2),
        "something waited for the open insert"
    );
    say(&mut slow, "COMMIT").await?;
    assert_eq!(found(&store, &LEFT_BEHIND).await?, ["1"]);
    Ok(())
}

#[tokio::test]
async fn a_row_that_the_application_keeps_locked_does_not_stop_the_others() -> Result<()> {
    let world = World::mysql().await?;
    let store = world.store(&[spec("outbox")]).await?;
    for i in 0..3 {
        world.insert(&format!("a{i}"), "", "").await?;
    }
    let rows: Vec<OutboxRow> = store
        .scan(T0, &LEFT_BEHIND, 10)
        .await?
        .into_iter()
        .map(|(_, r)| r)
        .collect();
    let mut app = world.open().await?;
    say(&mut app, "BEGIN").await?;
    say(&mut app, "SELECT * FROM outbox WHERE id = 2 FOR UPDATE").await?;
    let (token, ours) = store.claim(T0, &[key(1), key(2), key(3)]).await?;
    assert_eq!(ours, [key(1), key(3)]);
    store.release(&token, &ours).await?;
    let sent: Vec<_> = rows.iter().map(|r| outcome(r, Verdict::Sent)).collect();
    let recorded = store.record(None, &sent).await?;
    assert_eq!(recorded, [Recorded::Sent, Recorded::Busy, Recorded::Sent]);
    say(&mut app, "ROLLBACK").await?;
    assert_eq!(store.record(None, &sent[1..2]).await?, [Recorded::Sent]);
    Ok(())
}

/// Pages of a sweep, each `limit` long.
async fn sweep(store: &PollLedger, limit: usize) -> Result<Vec<String>> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let page = store.scan(T0, &Scan::Pending { after }, limit).await?;
        let Some((last, _)) = page.last() else {
            return Ok(all);
        };
        after = Some(last.clone());
        all.extend(ids(page.iter().map(|(_, row)| row)));
    }
}

#[tokio::test]
async fn a_sweep_in_pages_sees_every_due_row_once_in_order() -> Result<()> {
    let world = World::mysql().await?;
    let store = world.store(&[spec("outbox")]).await?;
    for i in 1..=40 {
        let (more, values) = match i % 4 {
            0 => (
                ", next_retry_at, retry_count",
                ", NOW(6) - INTERVAL RAND() SECOND, 1",
            ),
            1 => (", status, locked_until", ", 3, NOW(6) - INTERVAL 1 SECOND"),
            2 => (", status", ", 1"),
            _ => ("", ""),
        };
        world.insert("a", more, values).await?;
    }
    let expected: Vec<String> = (1..=40)
        .filter(|i| i % 4 != 2)
        .map(|i| i.to_string())
        .collect();
    for limit in [1, 7, 100] {
        assert_eq!(sweep(&store, limit).await?, expected);
    }
    Ok(())
}

async fn uuids(world: &World, kind: &str, id: &str) -> Result<()> {
    world.server.exec("DROP TABLE outbox").await?;
    world
        .server
        .exec(format!(
            "CREATE TABLE outbox (id {kind} PRIMARY KEY, aggregate_type VARCHAR(64) NOT NULL, \
             aggregate_id VARCHAR(64) NOT NULL, event_type VARCHAR(64) NOT NULL, payload JSON, \
             status TINYINT NOT NULL DEFAULT 0, retry_count INT NOT NULL DEFAULT 0, \
             created_at DATETIME(3) NOT NULL, KEY (status, created_at))"
        ))
        .await?;
    // The ids run against the order of creation, and some moments are shared.
    let mut expected = Vec::new();
    for i in 0..30 {
        let uuid = format!(
            "00000000-0000-0000-0000-{:012x}",
            1000 - (i / 3) * 10 + i % 3
        );
        let value = id.replace('?', &format!("'{uuid}'"));
        let at = i / 3;
        world
            .insert(
                "a",
                ", id, created_at",
                &format!(", {value}, '2026-01-01' + INTERVAL {at} SECOND"),
            )
            .await?;
        expected.push(uuid);
    }
    let store = world.store(&[spec("outbox")]).await?;
    for limit in [1, 4, 100] {
        assert_eq!(sweep(&store, limit).await?, expected);
    }
    let (token, rows) = claim_all(&store, &Scan::Pending { after: None }).await?;
    assert_eq!(rows.len(), 30);
    let sent: Vec<_> = rows.iter().map(|r| outcome(r, Verdict::Sent)).collect();
    assert_eq!(
        store.record(Some(&token), &sent).await?,
        [Recorded::Sent; 30]
    );
    // No updated_at, no index on it: the purge walks by key, and takes created_at for the age.
    let mut purged = 0;
    wait::until("all are purged", Duration::from_secs(20), async || {
        purged += store.purge(T0, Duration::from_secs(3600), 7).await.unwrap();
        purged >= 30
    })
    .await?;
    assert_eq!(world.server.count("SELECT COUNT(*) FROM outbox").await?, 0);
    Ok(())
}

#[tokio::test]
async fn rows_with_uuids_go_in_the_order_of_their_creation() -> Result<()> {
    let world = World::mysql().await?;
    uuids(&world, "BINARY(16)", "UUID_TO_BIN(?)").await?;
    uuids(&world, "CHAR(36)", "?").await?;
    let world = World::mariadb().await?;
    uuids(&world, "UUID", "?").await
}

#[tokio::test]
async fn the_tables_of_the_seed_documents_work_as_printed() -> Result<()> {
    // In a zone of its own: DATETIME columns hold the server's local time.
    let options = MysqlOptions::default().option("--default-time-zone=+08:00");
    let world = World::on(Mysql::start(options).await?).await?;
    world.server.exec("DROP TABLE outbox").await?;
    world.server.exec(SEED_TWO).await?;
    world.server.exec(SEED_ONE).await?;

    let store = world.store(&[seed_one()]).await?;
    for (aggregate, status, until) in [
        ("B0", "PENDING", "NULL"),
        ("B1", "PROCESSING", "NOW() - INTERVAL 1 MINUTE"),
        ("B2", "PROCESSING", "NOW() + INTERVAL 1 MINUTE"),
        ("B3", "ABANDONED", "NULL"),
        ("B4", "PENDING", "NOW() + INTERVAL 1 MINUTE"),
    ] {
        world.server.exec(format!(
            "INSERT INTO ss_bill_outbox (bill_id, event_type, payload, status, locked_until) VALUES ('{aggregate}', 'Approved', '{{}}', '{status}', {until})"
        )).await?;
    }
    assert_eq!(found(&store, &LEFT_BEHIND).await?, ["1"]);
    assert_eq!(found(&store, &Scan::Due).await?, ["2"]);
    let (token, rows) = claim_all(&store, &Scan::Pending { after: None }).await?;
    assert_eq!(ids(&rows), ["1", "2"]);
    assert_eq!(rows[0].message.as_ref().unwrap().event_type, "Approved");
    let recorded = store
        .record(
            Some(&token),
            &[outcome(&rows[0], Verdict::Sent), nacked(&rows[1])],
        )
        .await?;
    assert_eq!(recorded, [Recorded::Sent, Recorded::WillRetry]);
    let due = "SELECT COUNT(*) FROM ss_bill_outbox WHERE id = 2 AND next_retry_at BETWEEN NOW() + INTERVAL 25 SECOND AND NOW() + INTERVAL 31 SECOND";
    assert_eq!(world.server.count(due).await?, 1, "the server's zone");
    let report = store.patrol(T0, Duration::ZERO, Duration::ZERO).await?;
    assert_eq!(
        (report.stuck, report.reset),
        (0, 0),
        "a claim that lasts is not stuck"
    );
    let rows = store
        .unsettled(T0, &[aggregate("", "B1"), aggregate("", "B4")], 5)
        .await?;
    let seen: Vec<_> = rows
        .iter()
        .map(|(r, ready)| (r.key.id.to_string(), *ready))
        .collect();
    assert_eq!(seen, [("2".to_owned(), false), ("5".to_owned(), false)]);

    // No lock columns, no due time: the lease protects, and updated_at says when.
    let store = world.store(&[spec("outbox")]).await?;
    for aggregate in ["7", "8"] {
        world.server.exec(format!("INSERT INTO outbox (aggregate_id, event_type, payload) VALUES ('{aggregate}', 'StockDeducted', '{{}}')")).await?;
    }
    let (token, rows) = claim_all(&store, &LEFT_BEHIND).await?;
    assert_eq!(ids(&rows), ["1", "2"]);
    assert_eq!(
        world
            .server
            .count("SELECT COUNT(*) FROM outbox WHERE status = 0")
            .await?,
        2
    );
    let recorded = store
        .record(
            Some(&token),
            &[outcome(&rows[0], Verdict::Sent), nacked(&rows[1])],
        )
        .await?;
    assert_eq!(recorded, [Recorded::Sent, Recorded::WillRetry]);
    assert!(found(&store, &Scan::Due).await?.is_empty());
    world
        .server
        .exec("UPDATE outbox SET updated_at = NOW() - INTERVAL 28 SECOND WHERE id = 2")
        .await?;
    assert!(found(&store, &Scan::Due).await?.is_empty());
    world
        .server
        .exec("UPDATE outbox SET updated_at = NOW() - INTERVAL 31 SECOND WHERE id = 2")
        .await?;
    assert_eq!(found(&store, &Scan::Due).await?, ["2"]);
    let rows = store
        .unsettled(T0, &[aggregate("", "8"), aggregate("", "7")], 5)
        .await?;
    assert_eq!(rows.len(), 1);
    assert!(rows[0].1, "ready");
    let old = Scan::LeftBehind {
        min_age: Duration::from_secs(3600),
    };
    world
        .server
        .exec("INSERT INTO outbox (aggregate_id, event_type, payload) VALUES ('9', 'T', '{}')")
        .await?;
    assert!(
        found(&store, &old).await?.is_empty(),
        "eight hours of zone are no age"
    );
    assert_eq!(found(&store, &LEFT_BEHIND).await?, ["3"]);
    let backlog = store.backlog(T0).await?;
    assert!(
        backlog.oldest_pending_seconds.unwrap() < 3600,
        "{backlog:?}"
    );
    Ok(())
}

#[tokio::test]
async fn an_index_that_is_dropped_or_renamed_is_no_longer_named() -> Result<()> {
    let world = World::mysql().await?;
    let store = world.store(&[spec("outbox")]).await?;
    world.insert("a", "", "").await?;
    assert_eq!(found(&store, &LEFT_BEHIND).await?, ["1"]);
    world
        .server
        .exec("ALTER TABLE outbox RENAME INDEX outbox_due TO other, DROP INDEX outbox_aggregate")
        .await?;
    assert_eq!(found(&store, &LEFT_BEHIND).await?, ["1"]);
    let rows = store.unsettled(T0, &[aggregate("order", "a")], 5).await?;
    assert_eq!(rows.len(), 1);
    Ok(())
}

/// Rows that the server touched for `work`, on the one connection of the pool.
async fn touched<T>(world: &World, work: impl Future<Output = T>) -> Result<(T, i64)> {
    let count = async || {
        let sum = "SELECT CAST(SUM(VARIABLE_VALUE) AS SIGNED) FROM \
                   performance_schema.session_status WHERE VARIABLE_NAME LIKE 'Handler_read%'";
        let mut session = world.db.session().await?;
        let n: i64 = sqlx::query_scalar(sum).fetch_one(&mut *session).await?;
        session.finish();
        anyhow::Ok(n)
    };
    // What the question itself touches is found by asking twice.
    let (first, before) = (count().await?, count().await?);
    let done = work.await;
    let after = count().await?;
    Ok((done, (after - before) - (before - first)))
}

#[tokio::test]
async fn the_cost_follows_the_rows_returned_at_a_million_sent_rows() -> Result<()> {
    let options = [
        "--innodb-flush-log-at-trx-commit=0",
        "--sync-binlog=0",
        "--skip-log-bin",
    ]
    .into_iter()
    .fold(MysqlOptions::without_gtid(), MysqlOptions::option);
    let mut world = World::on(Mysql::start(options).await?).await?;
    world.db = one_connection(&world.server);
    fill(&world, 600_000, "1").await?;
    fill(&world, 100_000, "0").await?;
    fill(&world, 400_000, "1").await?;
    let server = &world.server;
    server.exec("UPDATE outbox SET status = 0, retry_count = 1, next_retry_at = NOW(6) - INTERVAL 1 SECOND WHERE id IN (5, 500005, 650005)").await?;
    server.exec("UPDATE outbox SET status = 3, locked_by = 'x', locked_until = NOW(6) - INTERVAL 1 SECOND WHERE id IN (6, 500006)").await?;
    let store = world.store(&[spec("outbox")]).await?;
    store.scan(T0, &Scan::Due, 1).await?; // reads the indexes

    let (rows, cost) = touched(&world, store.scan(T0, &Scan::Due, 100)).await?;
    assert_eq!(rows?.len(), 5);
    assert!(cost < 200, "due: {cost}");
    let (rows, cost) = touched(&world, store.scan(T0, &LEFT_BEHIND, 100)).await?;
    assert_eq!(rows?.len(), 100);
    assert!(cost < 2000, "left behind: {cost}");
    let after = Some(Cursor {
        created_at: None,
        key: key(650_000),
    });
    let (rows, cost) = touched(&world, store.scan(T0, &Scan::Pending { after }, 100)).await?;
    assert_eq!(ids(rows?.iter().map(|(_, r)| r))[0], "650001");
    assert!(cost < 1000, "sweep: {cost}");
    let aggregates = [aggregate("order", "a7"), aggregate("order", "nobody")];
    let (rows, cost) = touched(&world, store.unsettled(T0, &aggregates, 10)).await?;
    assert_eq!(rows?.len(), 10);
    assert!(cost < 200, "unsettled: {cost}");
    let keys: Vec<RowKey> = (650_100..650_200).map(key).collect();
    let (claimed, cost) = touched(&world, store.claim(T0, &keys)).await?;
    assert_eq!(claimed?.1.len(), 100);
    assert!(cost < 1000, "claim: {cost}");
    let (purged, cost) =
        touched(&world, store.purge(T0, Duration::from_secs(86_400), 1000)).await?;
    assert_eq!(purged?, 0);
    assert!(cost < 100, "purge: {cost}");
    let (report, cost) = touched(
        &world,
        store.patrol(T0, Duration::ZERO, Duration::from_secs(60)),
    )
    .await?;
    assert_eq!(report?.reset, 0);
    assert!(cost < 1000, "patrol: {cost}");
    Ok(())
}
