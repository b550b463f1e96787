//! Scans, claims and their outcomes, on real servers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod claims_world;

use std::time::Duration;

use anyhow::Result;
use claims_world::*;
use outbox_core::ports::{PollStore, Recorded, Scan, Verdict};
use outbox_core::row::{OutboxRow, RowKey};
use outbox_core::spec::Ordering;

/// id, status, retry_count, locked_by, last_error
type State = (u64, i64, i64, Option<String>, Option<String>);

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
    let states = server
        .query_rows::<State>(
            "SELECT id, status, retry_count, locked_by, last_error FROM outbox WHERE id IN (1, 2, 4, 5) ORDER BY id")
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
