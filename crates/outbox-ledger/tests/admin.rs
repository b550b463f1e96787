//! What operators do with rows, on real servers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod claims_world;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use claims_world::*;
use outbox_core::Position;
use outbox_core::retry::RetryPolicy;
use outbox_core::row::TableIdx;
use outbox_core::spec::TableSpec;
use outbox_core::status::Status;
use outbox_ledger::admin::{Admin, Filter, ReplayRange};
use outbox_ledger::gap::NewGap;
use outbox_ledger::pause;
use outbox_ledger::position::{PositionStore, coordinate};

const T1: TableIdx = TableIdx(1);

async fn admin(world: &World, specs: &[TableSpec]) -> Result<Admin> {
    let specs: Vec<Arc<TableSpec>> = specs.iter().cloned().map(Arc::new).collect();
    Ok(Admin::open(
        world.db.clone(),
        NAME.into(),
        &specs,
        RetryPolicy::default(),
    )
    .await?)
}

fn with_status(status: Status) -> Filter {
    Filter {
        status: Some(status),
        ..Filter::default()
    }
}

fn strings(ids: &[u64]) -> Vec<String> {
    ids.iter().map(ToString::to_string).collect()
}

async fn administered(world: World) -> Result<()> {
    let server = &world.server;
    server.exec(SEED_ONE).await?;
    let admin = admin(&world, &[spec("outbox"), seed_one()]).await?;
    assert_eq!(admin.find("ss_bill_outbox"), Some(T1));
    assert_eq!(admin.find("app.outbox"), Some(T0));
    assert_eq!(admin.find("nothing"), None);
    for status in [0, 1, 2, 3, 4, 2, 2] {
        world
            .insert(
                "a",
                ", status, retry_count, last_error",
                &format!(", {status}, 5, 'no queue'"),
            )
            .await?;
    }
    world.insert("b", ", headers", ", '{\"n\": 1}'").await?;
    for status in ["PENDING", "FAILED"] {
        server.exec(format!("INSERT INTO ss_bill_outbox (id, bill_id, event_type, payload, status) VALUES ({}, 'B', 'T', '{{\"x\": 1}}', '{status}')", if status == "FAILED" { 102 } else { 1 })).await?;
    }

    // Lists: newest first, by status, by aggregate, page by page.
    let listed = admin.list(&with_status(Status::Failed), None, 10).await?;
    let seen: Vec<_> = listed
        .iter()
        .map(|r| (r.table.as_str(), r.id.as_str()))
        .collect();
    assert_eq!(
        seen,
        [
            ("app.outbox", "7"),
            ("app.outbox", "6"),
            ("app.outbox", "3"),
            ("app.ss_bill_outbox", "102")
        ]
    );
    assert_eq!(listed[0].status, "failed");
    assert_eq!(listed[0].last_error.as_deref(), Some("no queue"));
    assert_eq!(listed[3].aggregate_id, "B");
    let of_a = Filter {
        table: Some(T0),
        aggregate_id: Some("a".into()),
        aggregate_type: Some("order".into()),
        ..Filter::default()
    };
    let mut pages = Vec::new();
    let mut after: Option<String> = None;
    loop {
        let page = admin.list(&of_a, after.as_deref(), 3).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.id.clone());
        pages.extend(page.into_iter().map(|r| r.id));
    }
    assert_eq!(pages, strings(&[7, 6, 5, 4, 3, 2, 1]));
    assert!(
        admin.list(&Filter::default(), Some("3"), 3).await.is_err(),
        "which table's row 3?"
    );

    // Shown whole, payload and all; an id that two tables have needs its table.
    let shown = admin.show(Some(T0), "8").await?.unwrap();
    assert_eq!(shown.columns["headers"], "{\"n\": 1}");
    assert_eq!(shown.columns["payload"], "{}");
    let json = serde_json::to_value(&shown)?;
    assert_eq!(
        (json["status"].as_str(), json["aggregate_id"].as_str()),
        (Some("pending"), Some("b"))
    );
    let error = admin.show(None, "1").await.unwrap_err();
    let error = outbox_core::ports::chain(&error);
    assert!(
        error.contains("app.outbox") && error.contains("app.ss_bill_outbox"),
        "{error}"
    );
    assert!(admin.show(None, "102").await?.is_some());
    assert!(admin.show(None, "no key").await?.is_none());

    // Retry: failed rows only, all retries before them, due now.
    assert_eq!(
        admin
            .retry(Some(T0), &strings(&[1, 2, 3, 4, 5, 99]))
            .await?,
        1
    );
    let due = "SELECT COUNT(*) FROM outbox WHERE id = 3 AND status = 0 AND retry_count = 0 AND next_retry_at <= NOW(6)";
    assert_eq!(server.count(due).await?, 1);
    assert_eq!(admin.retry(Some(T0), &["nonsense".into()]).await?, 0);
    assert_eq!(admin.retry_all_failed(None).await?, 3);
    assert_eq!(
        server
            .count("SELECT COUNT(*) FROM ss_bill_outbox WHERE status = 'PENDING'")
            .await?,
        2
    );

    // Abandon: pending and failed only, and final.
    assert_eq!(admin.abandon(Some(T0), &strings(&[1, 2, 4, 5])).await?, 1);
    assert_eq!(admin.abandon_aggregate(None, None, "a").await?, 3);
    assert_eq!(
        admin.abandon_aggregate(None, Some("invoice"), "b").await?,
        0
    );
    assert_eq!(admin.abandon_aggregate(None, Some("order"), "b").await?, 1);
    assert_eq!(admin.retry(Some(T0), &strings(&[1])).await?, 0);
    let counts = admin.backlog().await?;
    assert_eq!(
        (
            counts[0].pending,
            counts[0].processing,
            counts[0].failed,
            counts[0].abandoned
        ),
        (0, 1, 0, 6)
    );
    assert_eq!((counts[1].pending, counts[1].failed), (2, 0));
    Ok(())
}

#[tokio::test]
async fn rows_are_listed_shown_retried_and_abandoned_on_mysql() -> Result<()> {
    administered(World::mysql().await?).await
}

#[tokio::test]
async fn rows_are_listed_shown_retried_and_abandoned_on_mariadb() -> Result<()> {
    administered(World::mariadb().await?).await
}

async fn replayed(admin: &Admin, range: &ReplayRange, limit: usize) -> Result<Vec<String>> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let page = admin.replay_page(T0, range, after.as_ref(), limit).await?;
        all.extend(ids(&page.rows));
        after = page.next;
        if after.is_none() {
            return Ok(all);
        }
    }
}

#[tokio::test]
async fn sent_rows_are_replayed_by_key_or_by_time_in_pages() -> Result<()> {
    let options = outbox_testkit::MysqlOptions::default().option("--default-time-zone=+08:00");
    let world = World::on(outbox_testkit::Mysql::start(options).await?).await?;
    // 2026-01-01 08:00 in the server's zone is midnight in UTC.
    for i in 0..20 {
        let status = if i % 5 == 0 { 2 } else { 1 };
        world
            .insert(
                "a",
                ", status, created_at",
                &format!(", {status}, '2026-01-01 08:00' + INTERVAL {i} MINUTE"),
            )
            .await?;
    }
    let admin = admin(&world, &[spec("outbox")]).await?;
    let range = ReplayRange::Ids {
        from: "4".into(),
        to: "12".into(),
    };
    let expected = strings(&[4, 5, 7, 8, 9, 10, 12]);
    for limit in [1, 3, 100] {
        assert_eq!(replayed(&admin, &range, limit).await?, expected);
    }
    let midnight = 1_767_225_600_000_000;
    let minutes = |n: i64| midnight + n * 60_000_000;
    let range = ReplayRange::Created {
        since: minutes(2),
        until: Some(minutes(6)),
    };
    for limit in [2, 100] {
        assert_eq!(replayed(&admin, &range, limit).await?, strings(&[3, 4, 5]));
    }
    let range = ReplayRange::Created {
        since: minutes(18),
        until: None,
    };
    assert_eq!(replayed(&admin, &range, 100).await?, strings(&[19, 20]));
    let nonsense = ReplayRange::Ids {
        from: "x".into(),
        to: "y".into(),
    };
    assert!(admin.replay_page(T0, &nonsense, None, 1).await.is_err());
    // The same by creation where keys say nothing.
    world
        .server
        .exec("ALTER TABLE outbox MODIFY id VARCHAR(20) NOT NULL")
        .await?;
    let admin = self::admin(&world, &[spec("outbox")]).await?;
    let range = ReplayRange::Created {
        since: minutes(7),
        until: Some(minutes(11)),
    };
    for limit in [1, 100] {
        assert_eq!(replayed(&admin, &range, limit).await?, strings(&[8, 9, 10]));
    }
    Ok(())
}

#[tokio::test]
async fn a_purge_deletes_what_was_sent_long_ago_and_nothing_else() -> Result<()> {
    let world = World::mysql().await?;
    let server = &world.server;
    for status in 0..5 {
        for age in ["1 DAY", "9 DAY"] {
            world
                .insert(
                    "a",
                    ", status, created_at, updated_at",
                    &format!(", {status}, NOW(6) - INTERVAL 10 DAY, NOW(6) - INTERVAL {age}"),
                )
                .await?;
        }
    }
    for _ in 0..9 {
        server.exec("INSERT INTO outbox (aggregate_id, event_type, payload, status, created_at, updated_at) SELECT aggregate_id, event_type, payload, status, created_at, updated_at FROM outbox").await?;
    }
    let week = Duration::from_secs(7 * 86_400);
    // By the index on updated_at, and without it by walking over the keys.
    for walked in [false, true] {
        if walked {
            server.exec("INSERT INTO outbox (aggregate_id, event_type, payload, status, created_at, updated_at) SELECT 'w', 'T', '{}', 1, NOW(6) - INTERVAL 10 DAY, NOW(6) - INTERVAL 9 DAY FROM outbox LIMIT 3000").await?;
            server
                .exec("ALTER TABLE outbox DROP INDEX outbox_settled")
                .await?;
        }
        let mut told = 0;
        let deleted = admin(&world, &[spec("outbox")])
            .await?
            .purge(None, week, |n| told = n)
            .await?;
        assert_eq!(deleted, if walked { 3000 } else { 512 });
        assert_eq!(told, deleted);
        let left = server.count("SELECT COUNT(*) FROM outbox").await?;
        assert_eq!(left, 9 * 512);
    }
    assert_eq!(
        server
            .count("SELECT COUNT(*) FROM outbox WHERE status = 1")
            .await?,
        512
    );
    Ok(())
}

#[tokio::test]
async fn the_overview_tells_how_it_stands() -> Result<()> {
    let world = World::mysql().await?;
    let admin = admin(&world, &[spec("outbox")]).await?;
    let fresh = admin.overview().await?;
    assert_eq!((fresh.leader.as_deref(), fresh.epoch), (Some("here"), 1));
    assert_eq!(fresh.position, None);
    assert!(!fresh.paused && fresh.gaps.is_empty());
    let at = coordinate(&world.db, None).await?;
    let gap = NewGap {
        from: None,
        to: Some(at.clone()),
        reason: "purged".into(),
    };
    let positions = PositionStore::new(world.db.clone(), NAME.into());
    positions
        .start_at(&world.epoch, &at, &[], true, Some(&gap))
        .await?;
    pause::set(&world.db, NAME, None).await?;
    pause::set(&world.db, NAME, Some("app.outbox")).await?;
    world.insert("a", "", "").await?;
    world.insert("a", ", status", ", 2").await?;
    world
        .server
        .exec("UPDATE outbox SET created_at = NOW(6) - INTERVAL 100 SECOND WHERE id = 1")
        .await?;
    let now = admin.overview().await?;
    assert_eq!(now.position, Some(at.to_string()));
    assert!(matches!(at, Position::Gtid(_)));
    assert!(now.lag.transactions.unwrap() >= 3, "{:?}", now.lag);
    assert!(now.paused && now.sweep_due);
    assert_eq!(now.paused_tables, ["app.outbox"]);
    assert_eq!(now.gaps.len(), 1);
    assert_eq!((now.backlog[0].pending, now.backlog[0].failed), (1, 1));
    assert!((100..160).contains(&now.oldest_pending_seconds.unwrap()));
    let json = serde_json::to_value(&now)?;
    for key in [
        "leader",
        "position",
        "lag",
        "backlog",
        "oldest_pending_seconds",
        "gaps",
        "paused",
    ] {
        assert!(json.get(key).is_some(), "{key}");
    }
    Ok(())
}
