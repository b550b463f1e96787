//! The lease on a real server: one leader, by the database's clock.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod claims_world;
mod settle_world;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use claims_world::*;
use outbox_core::ports::Disposition;
use outbox_ledger::connect::{Db, DbConfig, UrlSource};
use outbox_ledger::lease::{self, Lease};
use outbox_ledger::position::PositionStore;
use outbox_testkit::wait::until_ok;
use settle_world::*;

const LONG: Duration = Duration::from_secs(60);

fn claim(world: &World, instance: &str, ttl: Duration) -> Lease {
    Lease::new(world.db.clone(), NAME.into(), instance, ttl)
}

#[tokio::test]
async fn one_instance_leads_by_the_servers_clock() -> Result<()> {
    let world = World::mysql().await?;
    first_takers(&world).await.context("first takers")?;
    succession(&world).await.context("succession")?;
    expiry(&world).await.context("expiry")?;
    operator(&world).await.context("operator")?;
    stopped_leader(&world).await.context("stopped leader")
}

/// However many ask at once for a lease that nobody ever had.
async fn first_takers(world: &World) -> Result<()> {
    for round in 0..40 {
        world.server.exec("DELETE FROM outboxd_lease").await?;
        world.server.exec("DELETE FROM outboxd_fence").await?;
        let leases: Vec<Lease> = (0..6)
            .map(|i| claim(world, &format!("instance {i}"), LONG))
            .collect();
        let takers = leases.iter().map(Lease::acquire);
        let taken = futures_util::future::join_all(takers).await;
        let leads: Vec<_> = taken.iter().flatten().flatten().collect();
        assert_eq!(leads.len(), 1, "round {round}: {taken:?}");
        assert_eq!(leads[0].number, 1);
    }
    Ok(())
}

async fn succession(world: &World) -> Result<()> {
    world.server.exec("DELETE FROM outboxd_instance").await?;
    let first = claim(world, "a", LONG);
    world.server.exec("DELETE FROM outboxd_lease").await?;
    let one = first.acquire().await?.expect("free");
    let other = claim(world, "b", LONG);
    assert_eq!(other.acquire().await?, None);
    first.renew(&one).await?;
    let state = lease::state(&world.db, NAME).await?.expect("taken");
    assert_eq!((state.leader.as_deref(), state.epoch), (Some("a"), 1));
    assert_eq!(state.standbys, ["b"]);
    assert!(
        (59_000_000..=60_000_000).contains(&state.remaining_micros),
        "{state:?}"
    );

    // The same instance, started again, at once; its predecessor is over.
    let again = claim(world, "a", LONG);
    let two = again.acquire().await?.expect("its own");
    assert_eq!(two.number, 2);
    let error = first.renew(&one).await.expect_err("taken");
    assert_eq!(error.disposition, Disposition::Fenced);
    // What it gives back is not its own any more.
    first.release(&one).await?;
    again.renew(&two).await?;
    assert_eq!(other.acquire().await?, None);
    again.release(&two).await?;
    let state = lease::state(&world.db, NAME).await?.expect("taken");
    assert_eq!((state.leader, state.last_instance), (None, "a".to_owned()));
    assert_eq!(other.acquire().await?.expect("given back").number, 3);
    let error = two.verify(&world.db).await.expect_err("over");
    assert_eq!(error.disposition, Disposition::Fenced);
    Ok(())
}

async fn expiry(world: &World) -> Result<()> {
    world.server.exec("DELETE FROM outboxd_lease").await?;
    let short = claim(world, "a", Duration::from_secs(2));
    let one = short.acquire().await?.expect("free");
    let end = "SELECT CAST(lease_until AS CHAR) FROM outboxd_lease";
    let end = world.server.first::<String>(end).await?.expect("a lease");
    let other = claim(world, "b", LONG);
    let two = until_ok("the lease expires", LONG, async || {
        other.acquire().await?.context("still led")
    })
    .await?;
    assert_eq!(two.number, 2);
    let after = format!("SELECT COUNT(*) FROM outboxd_lease WHERE acquired_at >= '{end}'");
    assert_eq!(world.server.count(after).await?, 1, "taken before {end}");
    let error = short.renew(&one).await.expect_err("taken");
    assert_eq!(error.disposition, Disposition::Fenced);

    // One that ran out and that nobody took is still its owner's.
    let expired = "UPDATE outboxd_lease SET lease_until = UTC_TIMESTAMP(6) - INTERVAL 1 HOUR";
    world.server.exec(expired).await?;
    assert_eq!(
        lease::state(&world.db, NAME).await?.expect("taken").leader,
        None
    );
    other.renew(&two).await?;
    let state = lease::state(&world.db, NAME).await?.expect("taken");
    assert_eq!(state.leader.as_deref(), Some("b"));
    Ok(())
}

/// A position that is set by hand ends the epoch, not the lease.
async fn operator(world: &World) -> Result<()> {
    world.server.exec("DELETE FROM outboxd_lease").await?;
    let lease = claim(world, "a", LONG);
    let epoch = lease.acquire().await?.expect("free");
    let positions = PositionStore::new(world.db.clone(), NAME.into());
    assert_eq!(positions.set_by_operator(Some(&at(5)), true).await?, 2);
    let error = lease.renew(&epoch).await.expect_err("ended");
    assert_eq!(error.disposition, Disposition::Fenced);
    assert_eq!(claim(world, "b", LONG).acquire().await?, None);
    assert_eq!(lease.acquire().await?.expect("its own").number, 3);
    Ok(())
}

/// A leader that is stopped in the middle of a settle keeps its locks for as long as its lease,
/// and changes nothing when it wakes up.
async fn stopped_leader(world: &World) -> Result<()> {
    fresh(world, 1).await?;
    world.server.exec("DELETE FROM outboxd_lease").await?;
    let ttl = Duration::from_secs(3);
    let url = UrlSource::Value(world.server.url("outboxd").into());
    let db = Db::new(DbConfig {
        lease_ttl: ttl,
        ..DbConfig::new(url)
    })?;
    let stopped = Lease::new(db.clone(), NAME.into(), "a", ttl);
    let epoch = stopped.acquire().await?.expect("free");
    let mut session = db.session().await?;
    say(&mut session, "BEGIN").await?;
    epoch.fence(&mut session).await?;
    say(&mut session, "UPDATE outbox SET status = 1").await?;
    let since = Instant::now();
    let other = claim(world, "b", LONG);
    let next = until_ok("the other takes over", LONG, async || {
        other.acquire().await?.context("still led")
    })
    .await?;
    let took = since.elapsed();
    assert!(
        took >= ttl,
        "taken over after {took:?}, from under a transaction"
    );
    assert_eq!(next.number, 2);
    // It wakes up: its transaction is gone, and so is its right to begin another.
    say(&mut session, "COMMIT")
        .await
        .expect_err("the session is dead");
    assert_eq!(statuses(world).await?, "1:0");
    let error = stopped.renew(&epoch).await.expect_err("taken");
    assert_eq!(error.disposition, Disposition::Fenced);
    Ok(())
}
