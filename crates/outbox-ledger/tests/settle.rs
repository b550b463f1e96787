//! The tail's write-back on a real server: one transaction, compared first, fenced.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod claims_world;
mod settle_world;

use std::time::Duration;

use anyhow::{Context as _, Result};
use claims_world::*;
use outbox_core::ports::{Disposition, Recorded};
use outbox_core::spec::OnSent;
use outbox_ledger::lease::Lease;
use outbox_ledger::position::PositionStore;
use outbox_ledger::settle::TailLedger;
use outbox_testkit::wait::{until, until_ok};
use outbox_testkit::{Direction, Proxy};
use settle_world::*;

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn outcomes_and_position_are_settled_on_a_real_server() -> Result<()> {
    let mut world = World::mysql().await?;
    one_transaction(&world).await.context("one transaction")?;
    compared_first(&world).await.context("compared first")?;
    locked_rows(&world).await.context("locked rows")?;
    deadlock(&world).await.context("deadlock")?;
    lost_answer(&world).await.context("lost answer")?;
    deleted_when_sent(&world).await.context("deleted")?;
    killed_session(&world).await.context("killed session")?;
    stale_epoch(&world).await.context("stale epoch")?;
    restarted_server(&mut world).await.context("restart")
}

async fn one_transaction(world: &World) -> Result<()> {
    fresh(world, 6).await?;
    let server = &world.server;
    server
        .exec("UPDATE outbox SET status = 3, locked_by = 'poller', locked_until = NOW(6) + INTERVAL 1 HOUR WHERE id = 2")
        .await?;
    server
        .exec("UPDATE outbox SET status = CASE id WHEN 3 THEN 2 WHEN 4 THEN 4 ELSE 1 END WHERE id IN (3, 4, 6)")
        .await?;
    server.exec("DELETE FROM outbox WHERE id = 5").await?;
    let ledger = tail(world, &[spec("outbox")]).await?;
    let outcomes: Vec<_> = (1..=6).map(sent).collect();

    // Somebody keeps the checkpoint row: no status is written without it.
    let first = settle(&ledger, vec![], Some(at(9))).await?;
    assert!(first.checkpointed);
    let mut theirs = world.open().await?;
    say(&mut theirs, "BEGIN").await?;
    say(&mut theirs, "SELECT * FROM outboxd_checkpoint FOR UPDATE").await?;
    let error = settle(&ledger, outcomes.clone(), Some(at(10)))
        .await
        .expect_err("the position cannot be stored");
    assert_eq!(error.disposition, Disposition::Backoff);
    assert_eq!(statuses(world).await?, "1:0 2:3 3:2 4:4 6:1");
    assert_eq!(stored(world).await?, Some(at(9)));
    say(&mut theirs, "ROLLBACK").await?;

    let report = settle(&ledger, outcomes.clone(), Some(at(10))).await?;
    use Recorded::{Gone, Sent};
    assert_eq!(report.rows, [Sent, Sent, Sent, Gone, Gone, Sent]);
    assert!(report.checkpointed);
    assert_eq!(statuses(world).await?, "1:1 2:1 3:1 4:4 6:1");
    let claims =
        "SELECT COUNT(*) FROM outbox WHERE locked_by IS NOT NULL OR locked_until IS NOT NULL";
    assert_eq!(server.count(claims).await?, 0);
    assert_eq!(stored(world).await?, Some(at(10)));
    let again = settle(&ledger, outcomes, Some(at(10))).await?;
    assert_eq!(again.rows, report.rows);
    Ok(())
}

async fn compared_first(world: &World) -> Result<()> {
    fresh(world, 8).await?;
    let server = &world.server;
    for change in [
        "UPDATE outbox SET retry_count = 2 WHERE id = 2",
        "UPDATE outbox SET status = 3, locked_by = 'x', locked_until = NOW(6) + INTERVAL 1 HOUR WHERE id = 3",
        // As a relay of the application's own claims.
        "UPDATE outbox SET locked_by = 'x', locked_until = NOW(6) + INTERVAL 1 HOUR WHERE id = 4",
        "UPDATE outbox SET status = 4 WHERE id = 5",
        "UPDATE outbox SET retry_count = 5 WHERE id = 7",
        "UPDATE outbox SET locked_by = 'x', locked_until = NOW(6) - INTERVAL 1 HOUR WHERE id = 8",
    ] {
        server.exec(change).await?;
    }
    let ledger = tail(world, &[spec("outbox")]).await?;
    let mut outcomes: Vec<_> = (1..=5).map(|id| refused(id, 0)).collect();
    outcomes.extend([undeliverable(6), refused(7, 5), refused(8, 0)]);
    let report = settle(&ledger, outcomes.clone(), None).await?;
    use Recorded::{Failed, Gone, WillRetry};
    let expected = [WillRetry, Gone, Gone, Gone, Gone, Failed, Failed, WillRetry];
    assert_eq!(report.rows, expected);
    // The answer to a commit may be lost: nothing is charged twice.
    let again = settle(&ledger, outcomes, None).await?;
    assert_eq!(again.rows, expected);
    let rows = server
        .query_rows::<(u64, i64, i64, Option<String>, Option<String>, Option<i64>)>(
            "SELECT id, status, retry_count, locked_by, last_error, \
             CEIL(TIMESTAMPDIFF(MICROSECOND, NOW(6), next_retry_at) / 1000000) FROM outbox ORDER BY id",
        )
        .await?;
    let x = || Some("x".to_owned());
    let nack = || Some("nack: refused".to_owned());
    let plain: Vec<_> = rows
        .iter()
        .map(|r| (r.0, r.1, r.2, r.3.clone(), r.4.clone()))
        .collect();
    assert_eq!(
        plain,
        [
            (1, 0, 1, None, nack()),
            (2, 0, 2, None, None),
            (3, 3, 0, x(), None),
            (4, 0, 0, x(), None),
            (5, 4, 0, None, None),
            (
                6,
                2,
                0,
                None,
                Some("null_column: payload is NULL".to_owned())
            ),
            (7, 2, 5, None, nack()),
            (8, 0, 1, None, nack()),
        ]
    );
    for row in &rows {
        let due = matches!(row.0, 1 | 8);
        assert_eq!(row.5.is_some_and(|s| (1..=30).contains(&s)), due, "{row:?}");
    }
    Ok(())
}

async fn locked_rows(world: &World) -> Result<()> {
    fresh(world, 1000).await?;
    world.server.exec("DELETE FROM outbox WHERE id = 1").await?;
    let ledger = tail(world, &[spec("outbox")]).await?;
    let before = stored(world).await?;
    let mut app = world.open().await?;
    say(&mut app, "BEGIN").await?;
    say(
        &mut app,
        "UPDATE outbox SET payload = '{}' WHERE id IN (500, 600)",
    )
    .await?;
    say(
        &mut app,
        "INSERT INTO outbox (id, aggregate_id, event_type, payload) VALUES (2000, 'a', 'Paid', '{}')",
    )
    .await?;
    let mut outcomes: Vec<_> = (1..=1000).filter(|id| *id != 600).map(sent).collect();
    outcomes.extend([refused(600, 0), sent(2000)]);
    let report = settle(&ledger, outcomes, Some(at(20))).await?;
    assert!(!report.checkpointed);
    let busy: Vec<usize> = (0..report.rows.len())
        .filter(|i| report.rows[*i] == Recorded::Busy)
        .collect();
    // Those of 500, 600 and of the insert that is not committed.
    assert_eq!(busy, [499, 999, 1000]);
    assert_eq!(report.rows[0], Recorded::Gone);
    let done = "SELECT COUNT(*) FROM outbox WHERE status = 1";
    assert_eq!(world.server.count(done).await?, 997);
    assert_eq!(stored(world).await?, before);
    say(&mut app, "ROLLBACK").await?;

    let rest = vec![sent(500), refused(600, 0), sent(2000)];
    let report = settle(&ledger, rest, Some(at(20))).await?;
    use Recorded::{Gone, Sent, WillRetry};
    assert_eq!(report.rows, [Sent, WillRetry, Gone]);
    assert_eq!(stored(world).await?, Some(at(20)));
    Ok(())
}

async fn deadlock(world: &World) -> Result<()> {
    fresh(world, 60).await?;
    let ledger = tail(world, &[spec("outbox")]).await?;
    let deadlocks =
        "SELECT COUNT FROM information_schema.INNODB_METRICS WHERE NAME = 'lock_deadlocks'";
    let before = world.server.count(deadlocks).await?;
    let mut app = world.open().await?;
    say(&mut app, "BEGIN").await?;
    // Heavier than the settle, which is therefore the one to be rolled back.
    say(
        &mut app,
        "UPDATE outbox SET event_type = 'x' WHERE id BETWEEN 2 AND 60",
    )
    .await?;
    let settling = settle(&ledger, vec![sent(1), sent(2)], Some(at(30)));
    let theirs = async {
        until("the settle waits", LONG, async || waiting(world).await).await?;
        say(&mut app, "UPDATE outbox SET event_type = 'x' WHERE id = 1").await?;
        say(&mut app, "COMMIT").await
    };
    let (report, theirs) = tokio::join!(settling, theirs);
    theirs?;
    assert_eq!(report?.rows, [Recorded::Sent, Recorded::Sent]);
    assert!(world.server.count(deadlocks).await? > before);
    assert_eq!(stored(world).await?, Some(at(30)));
    Ok(())
}

async fn lost_answer(world: &World) -> Result<()> {
    fresh(world, 2).await?;
    let proxy = Proxy::start(world.server.port).await?;
    let db = db_at(&world.server.url_through("outboxd", proxy.port));
    let tables = world.tables(&[spec("outbox")]).await?;
    let ledger = TailLedger::new(db, world.epoch.clone(), tables, Default::default());
    settle(&ledger, vec![], Some(at(39))).await?;
    // The server's answers are on their way for a while: long enough to see what was committed
    // before the client hears of it.
    proxy.delay(Direction::ToClient, Duration::from_millis(400));
    let outcomes = vec![sent(1), refused(2, 0)];
    let settling = settle(&ledger, outcomes.clone(), Some(at(40)));
    let cut = async {
        let done = async || statuses(world).await.is_ok_and(|s| s == "1:1 2:0");
        until("the settle is committed", LONG, done).await?;
        proxy.cut();
        proxy.pass();
        anyhow::Ok(())
    };
    let (lost, cut) = tokio::join!(settling, cut);
    cut?;
    let lost = lost.expect_err("the answer is lost");
    assert_eq!(lost.disposition, Disposition::Backoff);
    // Other connections of the pool may be dead too: the caller repeats until one answers.
    let report = until_ok("the settle is repeated", LONG, async || {
        settle(&ledger, outcomes.clone(), Some(at(40))).await
    })
    .await?;
    assert_eq!(report.rows, [Recorded::Sent, Recorded::WillRetry]);
    let count = "SELECT retry_count FROM outbox WHERE id = 2";
    assert_eq!(world.server.count(count).await?, 1);
    assert_eq!(stored(world).await?, Some(at(40)));
    Ok(())
}

async fn deleted_when_sent(world: &World) -> Result<()> {
    fresh(world, 4).await?;
    let abandoned = "UPDATE outbox SET status = 4 WHERE id = 3";
    world.server.exec(abandoned).await?;
    let mut spec = spec("outbox");
    spec.on_sent = OnSent::Delete;
    let ledger = tail(world, &[spec]).await?;
    let mut app = world.open().await?;
    say(&mut app, "BEGIN").await?;
    say(&mut app, "SELECT * FROM outbox WHERE id = 2 FOR UPDATE").await?;
    let outcomes: Vec<_> = (1..=4).map(sent).collect();
    use Recorded::{Busy, Gone, Sent};
    let report = settle(&ledger, outcomes.clone(), Some(at(50))).await?;
    assert_eq!(report.rows, [Sent, Busy, Gone, Sent]);
    assert!(!report.checkpointed);
    say(&mut app, "ROLLBACK").await?;
    let report = settle(&ledger, outcomes, Some(at(50))).await?;
    assert_eq!(report.rows, [Sent, Sent, Gone, Sent]);
    assert_eq!(statuses(world).await?, "3:4");
    assert!(report.checkpointed);
    Ok(())
}

async fn killed_session(world: &World) -> Result<()> {
    fresh(world, 2).await?;
    let ledger = tail(world, &[spec("outbox")]).await?;
    let mut app = world.open().await?;
    say(&mut app, "BEGIN").await?;
    say(&mut app, "SELECT * FROM outbox WHERE id = 2 FOR UPDATE").await?;
    let settling = settle(&ledger, vec![sent(1), sent(2)], Some(at(60)));
    let killing = async {
        until("the settle waits", LONG, async || waiting(world).await).await?;
        let them = "SELECT t.PROCESSLIST_ID FROM performance_schema.data_lock_waits w JOIN performance_schema.threads t ON t.THREAD_ID = w.REQUESTING_THREAD_ID";
        let id = world.server.count(them).await?;
        world.server.exec(format!("KILL {id}")).await
    };
    let (report, killed) = tokio::join!(settling, killing);
    killed?;
    assert_eq!(
        report.expect_err("killed").disposition,
        Disposition::Backoff
    );
    say(&mut app, "ROLLBACK").await?;
    assert_eq!(statuses(world).await?, "1:0 2:0");
    let report = settle(&ledger, vec![sent(1), sent(2)], Some(at(60))).await?;
    assert_eq!(report.rows, [Recorded::Sent, Recorded::Sent]);
    Ok(())
}

async fn stale_epoch(world: &World) -> Result<()> {
    fresh(world, 2).await?;
    let ledger = tail(world, &[spec("outbox")]).await?;
    let before = stored(world).await?;
    let lease = Lease::new(world.db.clone(), NAME.into(), "here", LONG);
    let next = lease.acquire().await?.expect("the same instance");
    assert_eq!(next.number, world.epoch.number + 1);
    let stale = |error: outbox_core::ports::PortError| {
        assert_eq!(error.disposition, Disposition::Fenced, "{error:?}");
    };
    let outcomes = vec![sent(1), refused(2, 0)];
    stale(
        settle(&ledger, outcomes.clone(), Some(at(70)))
            .await
            .expect_err("stale"),
    );
    let positions = PositionStore::new(world.db.clone(), NAME.into());
    let old = &world.epoch;
    stale(
        positions
            .start_at(old, &at(71), &[], true, None)
            .await
            .expect_err("stale"),
    );
    stale(positions.request_sweep(old).await.expect_err("stale"));
    stale(old.verify(&world.db).await.expect_err("stale"));
    assert_eq!(statuses(world).await?, "1:0 2:0");
    assert_eq!(stored(world).await?, before);
    let tables = world.tables(&[spec("outbox")]).await?;
    let ledger = TailLedger::new(world.db.clone(), next, tables, Default::default());
    assert!(settle(&ledger, outcomes, Some(at(70))).await?.checkpointed);
    Ok(())
}

async fn restarted_server(world: &mut World) -> Result<()> {
    fresh(world, 2).await?;
    let lease = Lease::new(world.db.clone(), NAME.into(), "here", LONG);
    world.epoch = lease.acquire().await?.expect("the same instance");
    let ledger = tail(world, &[spec("outbox")]).await?;
    settle(&ledger, vec![sent(1)], Some(at(80))).await?;
    world.server.kill9()?;
    let error = settle(&ledger, vec![sent(2)], Some(at(81)))
        .await
        .expect_err("nobody answers");
    assert_eq!(error.disposition, Disposition::Backoff);
    world.server.restart().await?;
    assert_eq!(stored(world).await?, Some(at(80)));
    let report = until_ok("the settle is repeated", LONG, async || {
        settle(&ledger, vec![sent(2)], Some(at(81))).await
    })
    .await?;
    assert_eq!(report.rows, [Recorded::Sent]);
    assert_eq!(statuses(world).await?, "1:1 2:1");
    Ok(())
}
