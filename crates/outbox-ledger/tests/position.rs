//! Positions, gaps, pauses and signals on a real server.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod claims_world;
mod settle_world;

use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use claims_world::*;
use outbox_core::gtid::GtidSet;
use outbox_core::ports::Ledger;
use outbox_core::position::{FilePosition, Position};
use outbox_ledger::gap::{self, NewGap};
use outbox_ledger::position::PositionStore;
use outbox_ledger::{pause, signal};
use settle_world::*;

#[tokio::test]
async fn positions_are_what_was_stored() -> Result<()> {
    let world = World::mysql().await?;
    long_sets(&world).await.context("long sets")?;
    start_beside_a_writer(&world)
        .await
        .context("start beside")?;
    files(&world).await.context("files")?;
    coordinate(&world).await.context("coordinate")?;
    sweeps(&world).await.context("sweeps")?;
    gaps(&world).await.context("gaps")?;
    pauses(&world).await.context("pauses")?;
    signals(&world).await.context("signals")?;
    by_operator(&world).await.context("by operator")
}

fn store(world: &World) -> PositionStore {
    PositionStore::new(world.db.clone(), NAME.into())
}

/// Every second transaction of a source up to `last`: a hole behind each.
fn holes(last: u32) -> GtidSet {
    let mut text = SOURCE.to_owned();
    for n in (1..=last).step_by(2) {
        write!(text, ":{n}").unwrap();
    }
    text.parse().unwrap()
}

/// Bytes of the checkpoint's own set, and of the whole one.
async fn bytes(world: &World) -> Result<(u64, u64)> {
    let sizes = "SELECT CONCAT(LENGTH(c.gtid), ' ', COALESCE(LENGTH(g.gtid_set), 0)) FROM outboxd_checkpoint c LEFT JOIN outboxd_gtid g USING (name)";
    let text = world
        .server
        .first::<String>(sizes)
        .await?
        .context("no checkpoint")?;
    let (own, whole) = text.split_once(' ').context("two sizes")?;
    Ok((own.parse()?, whole.parse()?))
}

async fn long_sets(world: &World) -> Result<()> {
    let ledger = tail(world, &[spec("outbox")]).await?;
    let mut set = holes(120_000);
    settle(&ledger, vec![], Some(Position::Gtid(set.clone()))).await?;
    let (own, whole) = bytes(world).await?;
    assert!(own == 0 && whole > 300_000, "{own}, {whole}");
    assert_eq!(stored(world).await?, Some(Position::Gtid(set.clone())));

    // What comes after it is short, flush after flush.
    for n in 0..5 {
        set.merge(&format!("{SOURCE}:200000-{}", 200_010 + n).parse()?);
        let report = settle(&ledger, vec![], Some(Position::Gtid(set.clone()))).await?;
        assert!(report.checkpointed);
        assert_eq!(bytes(world).await?, (50, whole));
        assert_eq!(stored(world).await?, Some(Position::Gtid(set.clone())));
    }
    // The next leader knows nothing of the one before it.
    let next = tail(world, &[spec("outbox")]).await?;
    set.merge(&format!("{SOURCE}:300000").parse()?);
    settle(&next, vec![], Some(Position::Gtid(set.clone()))).await?;
    assert_eq!(stored(world).await?, Some(Position::Gtid(set.clone())));
    assert_eq!(bytes(world).await?.0, 0);
    // A short one needs no other.
    settle(&next, vec![], Some(at(7))).await?;
    assert_eq!(stored(world).await?, Some(at(7)));
    Ok(())
}

/// A new start between two flushes of one writer, such as after a lost position.
async fn start_beside_a_writer(world: &World) -> Result<()> {
    let ledger = tail(world, &[spec("outbox")]).await?;
    let before = holes(4_000);
    settle(&ledger, vec![], Some(Position::Gtid(before.clone()))).await?;
    let mut here = before.clone();
    here.merge(&format!("{SOURCE}:4100:4200-4300").parse()?);
    let start = Position::Gtid(here.clone());
    store(world)
        .start_at(&world.epoch, &start, &[], true, None)
        .await?;
    assert_eq!(stored(world).await?, Some(start));
    // Behind the place of the new start as far as this source goes, but not all of it.
    let mut then = before;
    then.merge(&format!("{SOURCE}:4400").parse()?);
    settle(&ledger, vec![], Some(Position::Gtid(then.clone()))).await?;
    let is = stored(world).await? == Some(Position::Gtid(then));
    assert!(is, "the writer's position is not what was stored");
    Ok(())
}

async fn files(world: &World) -> Result<()> {
    let ledger = tail(world, &[spec("outbox")]).await?;
    let position = Position::File(FilePosition {
        server: SOURCE.into(),
        file: "binlog.1000000".into(),
        pos: u64::from(u32::MAX) + 10,
    });
    settle(&ledger, vec![], Some(position.clone())).await?;
    assert_eq!(stored(world).await?, Some(position));
    settle(&ledger, vec![], Some(at(8))).await?;
    assert_eq!(stored(world).await?, Some(at(8)));
    Ok(())
}

async fn coordinate(world: &World) -> Result<()> {
    let ledger = tail(world, &[spec("outbox")]).await?;
    let before = ledger.coordinate().await?;
    world.insert("a", "", "").await?;
    let after = ledger.coordinate().await?;
    assert_eq!(after.reaches(&before), Some(true));
    assert_eq!(before.reaches(&after), Some(false));
    Ok(())
}

async fn sweeps(world: &World) -> Result<()> {
    let ledger = tail(world, &[spec("outbox")]).await?;
    let (positions, epoch) = (store(world), &world.epoch);
    let due = async || anyhow::Ok(positions.load().await?.context("stored")?.sweep);
    positions.start_at(epoch, &at(1), &[], true, None).await?;
    assert!(due().await?);
    // Flushes do not end it.
    settle(&ledger, vec![], Some(at(2))).await?;
    assert!(due().await?);
    positions.finish_sweep(epoch).await?;
    assert!(!due().await?);
    assert_eq!(stored(world).await?, Some(at(2)));
    positions.request_sweep(epoch).await?;
    settle(&ledger, vec![], Some(at(3))).await?;
    assert!(due().await?);
    Ok(())
}

async fn gaps(world: &World) -> Result<()> {
    let new = NewGap {
        from: Some(at(3)),
        to: Some(at(9)),
        reason: "purged, 消失".to_owned() + &"x".repeat(5000),
    };
    let positions = store(world);
    positions
        .start_at(&world.epoch, &at(9), &[], true, Some(&new))
        .await?;
    positions.set_by_operator(None, false).await?;
    let gaps = gap::unacknowledged(&world.db, NAME, 10).await?;
    assert_eq!(gaps.len(), 1, "a reset forgets no gap");
    assert_eq!(gaps[0].from, Some(at(3).to_string()));
    assert_eq!(gaps[0].to, Some(at(9).to_string()));
    assert_eq!(gaps[0].reason.chars().count(), 4000);
    assert!(
        gap::unacknowledged(&world.db, "another", 10)
            .await?
            .is_empty()
    );
    assert_eq!(gap::acknowledge(&world.db, "another").await?, 0);
    assert_eq!(gap::acknowledge(&world.db, NAME).await?, 1);
    assert_eq!(gap::acknowledge(&world.db, NAME).await?, 0);
    assert!(gap::unacknowledged(&world.db, NAME, 10).await?.is_empty());
    // Nothing of a gap is stored by an epoch that is over.
    let stale = positions
        .start_at(&world.epoch, &at(9), &[], true, Some(&new))
        .await;
    stale.expect_err("the operator ended the epoch");
    assert_eq!(
        world
            .server
            .count("SELECT COUNT(*) FROM outboxd_gap")
            .await?,
        1
    );
    Ok(())
}

async fn pauses(world: &World) -> Result<()> {
    let db = &world.db;
    assert_eq!(pause::read(db, NAME).await?, pause::Paused::default());
    pause::set(db, NAME, Some("app.outbox")).await?;
    pause::set(db, NAME, Some("app.outbox")).await?;
    let paused = pause::read(db, NAME).await?;
    assert!(paused.covers("app.outbox") && !paused.covers("app.other"));
    pause::set(db, NAME, None).await?;
    assert!(pause::read(db, NAME).await?.covers("app.other"));
    assert!(!pause::read(db, "another").await?.covers("app.other"));
    assert_eq!(pause::clear(db, "another", None).await?, 0);
    assert_eq!(pause::clear(db, NAME, Some("app.outbox")).await?, 1);
    assert!(pause::read(db, NAME).await?.all);
    assert_eq!(pause::clear(db, NAME, None).await?, 1);
    assert_eq!(pause::read(db, NAME).await?, pause::Paused::default());
    Ok(())
}

async fn signals(world: &World) -> Result<()> {
    let db = &world.db;
    let first = signal::send(db, NAME, "pause", None).await?;
    // By hand: words that mean nothing, and data that are no JSON and long.
    let bad = "INSERT INTO outboxd_signal (name, type, data) VALUES ('test', 'no such thing', CONCAT('{', REPEAT('x', 100000)))";
    world.server.exec(bad).await?;
    signal::send(db, "another", "pause", None).await?;
    let last = signal::send(db, NAME, "retry", Some(r#"{"ids": [1]}"#)).await?;
    let undone = signal::undone(db, NAME, 10).await?;
    let ids: Vec<u64> = undone.iter().map(|s| s.id).collect();
    assert_eq!(ids, [first, first + 1, last]);
    assert_eq!(undone[1].data.as_ref().unwrap().len(), 65_536);
    assert_eq!(undone[2].data.as_deref(), Some(r#"{"ids": [1]}"#));
    assert_eq!(signal::undone(db, NAME, 1).await?.len(), 1);
    // A bad one is answered like the others, and is not seen again.
    signal::complete(db, first + 1, &"消".repeat(70_000)).await?;
    let answer = signal::answer(db, first + 1).await?.unwrap();
    assert_eq!(answer, "消".repeat(4000));
    assert_eq!(signal::answer(db, first).await?, None);
    signal::complete(db, first, "paused").await?;
    signal::complete(db, first, "paused twice").await?;
    assert_eq!(signal::answer(db, first).await?.as_deref(), Some("paused"));
    let undone = signal::undone(db, NAME, 10).await?;
    assert_eq!(undone.len(), 1);
    assert_eq!(undone[0].id, last);
    Ok(())
}

async fn by_operator(world: &World) -> Result<()> {
    let positions = store(world);
    let layout = "REPLACE INTO outboxd_layout (name, table_name, layout) VALUES ('test', 'app.outbox', '{}')";
    world.server.exec(layout).await?;
    let ended = positions
        .set_by_operator(Some(&Position::Gtid(holes(500))), true)
        .await?;
    let now = positions.load().await?.context("stored")?;
    assert_eq!(now.position, Some(Position::Gtid(holes(500))));
    assert_eq!((now.by_operator, now.sweep, now.epoch), (true, true, ended));
    assert!(now.age_seconds < 60);
    assert_eq!(
        world
            .server
            .count("SELECT COUNT(*) FROM outboxd_layout")
            .await?,
        0
    );
    assert_eq!(positions.set_by_operator(None, false).await?, ended + 1);
    let now = positions.load().await?.context("stored")?;
    assert_eq!(
        (now.position, now.by_operator, now.sweep),
        (None, true, false)
    );
    Ok(())
}
