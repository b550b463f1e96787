//! Claims on tables of other shapes: UUIDs, and those of the seed documents.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod claims_world;

use std::time::Duration;

use anyhow::Result;
use claims_world::*;
use outbox_core::ports::{PollStore, Recorded, Scan, Verdict};
use outbox_ledger::claims::PollLedger;
use outbox_testkit::{Mysql, MysqlOptions, wait};

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
