//! Rows of tables without status columns, parked by the tail's settle and delivered by the
//! poller.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod claims_world;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use claims_world::*;
use outbox_core::failure::Failure;
use outbox_core::message::{ContentType, HeaderValue, Message};
use outbox_core::ports::{
    Ledger, PollStore, Recorded, RowOutcome, Scan, Seen, Settlement, Verdict,
};
use outbox_core::retry::RetryPolicy;
use outbox_core::row::{RowId, RowKey};
use outbox_core::spec::{TableSpec, Tracking};
use outbox_core::status::Status;
use outbox_ledger::admin::{Admin, Filter};
use outbox_ledger::claims::PollLedger;
use outbox_ledger::settle::TailLedger;

async fn world(server: World) -> Result<(World, TailLedger, PollLedger, Admin)> {
    server
        .server
        .exec("CREATE TABLE events (id BINARY(16) PRIMARY KEY, aggregate_type VARCHAR(255), aggregate_id VARCHAR(255), event_type VARCHAR(255), payload JSON)")
        .await?;
    let events = events();
    let tables = server.tables(std::slice::from_ref(&events)).await?;
    let retry = RetryPolicy::default();
    let tail = TailLedger::new(
        server.db.clone(),
        server.epoch.clone(),
        tables.clone(),
        retry,
    );
    let store = server.store(&[events]).await?;
    let admin = Admin::new(server.db.clone(), NAME.into(), tables, retry);
    Ok((server, tail, store, admin))
}

fn events() -> TableSpec {
    let mut events = spec("events");
    events.tracking = Tracking::None;
    events.columns.created_at = None;
    events
}

fn uuid(n: u8) -> String {
    format!("{n:02x}000000-0000-0000-0000-000000000000")
}

fn message(n: u8) -> Message {
    Message {
        exchange: "outbox".into(),
        templated_exchange: false,
        routing_key: format!("key-{n}"),
        content_type: ContentType::Json,
        message_id: uuid(n),
        event_type: "Paid".into(),
        timestamp: Some(1_700_000_000),
        app_id: NAME.into(),
        headers: vec![
            ("pi".into(), HeaderValue::Float(3.25)),
            ("é".into(), HeaderValue::Null),
        ],
        body: vec![b'{', n, 0xff, b'}'].into(),
    }
}

fn row(n: u8, aggregate_id: &str, verdict: Verdict) -> RowOutcome {
    let mut id = [0; 16];
    id[0] = n;
    RowOutcome {
        key: RowKey {
            table: T0,
            id: RowId::Binary(Arc::from(id)),
        },
        aggregate: aggregate("order", aggregate_id),
        verdict,
    }
}

fn refused(n: u8) -> Verdict {
    Verdict::Failed {
        failure: Failure::retryable("unroutable", "no queue"),
        retry_count: 0,
        message: Some(Arc::new(message(n))),
    }
}

fn behind(n: u8) -> Verdict {
    Verdict::Parked {
        message: Ok(Arc::new(message(n))),
    }
}

async fn lives(server: World) -> Result<()> {
    let (world, tail, store, admin) = world(server).await?;
    let sql = |text: &'static str| world.server.exec(text);
    let permanent = Verdict::Failed {
        failure: Failure::permanent("null_column", "event_type is NULL"),
        retry_count: 0,
        message: None,
    };
    let settlement = Settlement {
        outcomes: vec![
            row(9, "a", refused(9)),
            row(3, "a", behind(3)),
            row(1, "a", behind(1)),
            row(5, "b", permanent),
            row(7, "c", behind(7)),
        ],
        ..Settlement::default()
    };
    let recorded = tail.settle(&settlement).await?.rows;
    use Recorded::{Failed, WillRetry};
    assert_eq!(
        recorded,
        [WillRetry, WillRetry, WillRetry, Failed, WillRetry]
    );
    // The answer may have been lost: the same again changes nothing.
    assert_eq!(tail.settle(&settlement).await?.rows, recorded);
    assert_eq!(
        world
            .server
            .count("SELECT COUNT(*) FROM outboxd_parked")
            .await?,
        5
    );

    // The head waits for its time, and a waits behind it; c does not.
    assert_eq!(found(&store, &Scan::Due).await?, [uuid(7)]);
    let left = Scan::LeftBehind {
        min_age: Duration::ZERO,
    };
    assert!(found(&store, &left).await?.is_empty());
    let holding: Vec<String> = tail
        .holding(T0, 10)
        .await?
        .iter()
        .map(|(_, id)| id.to_string())
        .collect();
    assert_eq!(
        holding,
        [uuid(9), uuid(3), uuid(1), uuid(7)],
        "in the order of parking"
    );
    let asked = [aggregate("order", "a"), aggregate("order", "b")];
    let rows = store.unsettled(T0, &asked, 2).await?;
    let seen: Vec<_> = rows
        .iter()
        .map(|(r, ready)| (r.key.id.to_string(), *ready))
        .collect();
    assert_eq!(seen, [(uuid(9), false), (uuid(3), true)]);
    assert_eq!(
        **rows[1].0.message.as_ref().unwrap(),
        message(3),
        "whole, to the bit"
    );

    // Claimed, delivered, gone; refused again, counted.
    sql("UPDATE outboxd_parked SET next_retry_at = UTC_TIMESTAMP(6) WHERE next_retry_at IS NOT NULL").await?;
    let due = store.scan(T0, &Scan::Due, 10).await?;
    assert_eq!(ids(due.iter().map(|(_, r)| r)), [uuid(9), uuid(7)]);
    let keys: Vec<RowKey> = due.iter().map(|(_, r)| r.key.clone()).collect();
    let (token, ours) = store.claim(T0, &keys).await?;
    assert_eq!(ours.len(), 2);
    assert!(store.claim(T0, &keys).await?.1.is_empty());
    let (nine, seven) = (&due[0].1, &due[1].1);
    let outcomes = [nacked(nine), outcome(seven, Verdict::Sent)];
    let recorded = store.record(Some(&token), &outcomes).await?;
    assert_eq!(recorded, [Recorded::WillRetry, Recorded::Sent]);
    let again = store.record(Some(&token), &outcomes).await?;
    assert_eq!(again, [Recorded::WillRetry, Recorded::Gone]);
    let look = tail
        .look(T0, &[nine.key.id.clone(), seven.key.id.clone()])
        .await?;
    let waits = Seen::Row {
        status: Status::Pending,
        retry_count: 2,
        delayed: true,
        claimed: false,
    };
    assert_eq!(look, [waits, Seen::Absent]);

    // A sweep in pages, though sent rows leave under it.
    sql("UPDATE outboxd_parked SET next_retry_at = NULL").await?;
    let first = store.scan(T0, &Scan::Pending { after: None }, 1).await?;
    assert_eq!(ids(first.iter().map(|(_, r)| r)), [uuid(9)]);
    store
        .record(None, &[outcome(&first[0].1, Verdict::Sent)])
        .await?;
    let after = Some(first[0].0.clone());
    let rest = store.scan(T0, &Scan::Pending { after }, 10).await?;
    assert_eq!(ids(rest.iter().map(|(_, r)| r)), [uuid(3), uuid(1)]);

    // Operators see them as rows of the table.
    let failed = Filter {
        status: Some(Status::Failed),
        ..Filter::default()
    };
    let listed = admin.list(&failed, None, 10).await?;
    assert_eq!(listed.len(), 1);
    assert_eq!(
        (listed[0].id.as_str(), listed[0].parked),
        (uuid(5).as_str(), true)
    );
    assert_eq!(
        listed[0].last_error.as_deref(),
        Some("null_column: event_type is NULL")
    );
    let newest = admin.list(&Filter::default(), None, 2).await?;
    let page = admin
        .list(&Filter::default(), Some(&newest[1].id), 2)
        .await?;
    let both: Vec<_> = newest.iter().chain(&page).map(|r| r.id.clone()).collect();
    assert_eq!(both, [uuid(5), uuid(1), uuid(3)]);
    let shown = admin.show(None, &uuid(3)).await?.unwrap();
    assert_eq!(shown.row.event_type.as_deref(), Some("Paid"));
    assert_eq!(shown.columns["envelope"]["routing_key"], "key-3");
    assert_eq!(admin.retry(None, &[uuid(5), uuid(3)]).await?, 1);
    assert_eq!(admin.abandon_aggregate(None, Some("order"), "a").await?, 2);
    assert_eq!(
        admin.abandon(None, &[uuid(3)]).await?,
        0,
        "abandoned is final"
    );
    assert_eq!(admin.retry_all_failed(None).await?, 0);
    assert_eq!(found(&store, &Scan::Due).await?, [uuid(5)]);
    let backlog = &admin.backlog().await?[0];
    assert_eq!(
        (
            backlog.pending,
            backlog.failed,
            backlog.abandoned,
            backlog.parked
        ),
        (1, 0, 2, true)
    );
    // Its message could never be built, and its turn ends it.
    let (_, five) = &store.scan(T0, &Scan::Due, 1).await?[0];
    assert!(
        five.message
            .as_ref()
            .unwrap_err()
            .reason
            .contains("event_type is NULL")
    );

    // A late confirm does not undo an abandon; a stuck claim comes back.
    let three = row(3, "a", Verdict::Sent);
    assert_eq!(
        store.record(Some(&token), &[three]).await?,
        [Recorded::Gone]
    );
    let (token, _) = store.claim(T0, std::slice::from_ref(&five.key)).await?;
    sql("UPDATE outboxd_parked SET updated_at = UTC_TIMESTAMP(6) - INTERVAL 1 HOUR WHERE status = 3").await?;
    let report = store
        .patrol(T0, Duration::from_secs(60), Duration::from_secs(60))
        .await?;
    assert_eq!((report.stuck, report.reset), (1, 1));
    assert_eq!(
        store.record(Some(&token), &[nacked(five)]).await?,
        [Recorded::Gone]
    );
    Ok(())
}

#[tokio::test]
async fn a_parked_row_lives_like_a_row_of_a_table_on_mysql() -> Result<()> {
    lives(World::mysql().await?).await
}

#[tokio::test]
async fn a_parked_row_lives_like_a_row_of_a_table_on_mariadb() -> Result<()> {
    lives(World::mariadb().await?).await
}

#[tokio::test]
async fn many_large_rows_are_parked_in_pieces_and_found_by_index() -> Result<()> {
    let (world, tail, store, _) = world(World::mysql().await?).await?;
    let outcomes = (0..=255_u8)
        .map(|n| {
            let mut large = message(n);
            large.body = vec![n; 300_000].into();
            let verdict = Verdict::Parked {
                message: Ok(Arc::new(large)),
            };
            row(n, &format!("a{}", n % 8), verdict)
        })
        .collect();
    tail.settle(&Settlement {
        outcomes,
        ..Settlement::default()
    })
    .await?;
    assert_eq!(
        world
            .server
            .count("SELECT COUNT(*) FROM outboxd_parked WHERE LENGTH(body) = 300000")
            .await?,
        256
    );
    // One for each aggregate: the others wait behind it.
    assert_eq!(store.scan(T0, &Scan::Due, 100).await?.len(), 8);
    let remaining = tail.remaining(T0, &[aggregate("order", "a3")], 100).await?;
    assert_eq!(remaining.len(), 32);
    Ok(())
}
