//! Random scripts with seeds: whatever happens, nothing is lost, no position passes an open row
//! (the ledger's script checks it at every settlement), and order holds.

use std::collections::{BTreeSet, HashMap};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

const AGGREGATES: [&str; 4] = ["a", "b", "c", "d"];

fn seeds() -> impl Iterator<Item = u64> {
    match std::env::var("RELAY_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
    {
        Some(seed) => seed..seed + 1,
        None => 0..60,
    }
}

/// First arrivals of rows by aggregate, in order.
fn first_arrivals(world: &World) -> HashMap<String, Vec<u64>> {
    let mut seen = BTreeSet::new();
    let mut by_aggregate: HashMap<String, Vec<u64>> = HashMap::new();
    let db = world.db.lock().unwrap();
    for n in world.arrived() {
        if seen.insert(n) {
            let name = db.rows[&n].aggregate.id.to_string();
            by_aggregate.entry(name).or_default().push(n);
        }
    }
    by_aggregate
}

fn inversions(rows: &[u64]) -> u64 {
    let later = |(i, a): (usize, &u64)| rows[i + 1..].iter().filter(|b| *b < a).count();
    u64::try_from(rows.iter().enumerate().map(later).sum::<usize>()).unwrap()
}

/// Answers late and in lumps.
fn broker(world: &Arc<World>, mut rng: StdRng) -> JoinHandle<()> {
    world.broker.lock().unwrap().manual = true;
    let world = Arc::clone(world);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_millis(rng.random_range(1..40))).await;
            world.answer(rng.random_range(1..20));
        }
    })
}

/// Delivers what is left behind, in the table's order, and fails now and then.
fn poller(world: &Arc<World>, handle: &RelayHandle, mut rng: StdRng) -> JoinHandle<()> {
    let (world, handle) = (Arc::clone(world), handle.clone());
    tokio::spawn(async move {
        loop {
            let left = handle.left_behind(10, Duration::from_secs(1)).await;
            tokio::time::sleep(Duration::from_millis(rng.random_range(1..50))).await;
            for aggregate in left {
                let rows: Vec<_> = world
                    .db
                    .lock()
                    .unwrap()
                    .rows
                    .iter()
                    .filter(|(_, r)| r.aggregate == aggregate && r.status == Status::Pending)
                    .map(|(n, _)| (*n, held(*n, &aggregate.id)))
                    .take(20)
                    .collect();
                let asked: Vec<_> = rows.iter().map(|(_, r)| r.clone()).collect();
                let granted = handle.hold(&asked).await;
                let mut mine = Vec::new();
                let mut failing = rng.random_bool(0.2);
                for ((n, row), granted) in rows.into_iter().zip(granted) {
                    if granted {
                        mine.push(row);
                        if !failing {
                            world.deliver(n);
                            tokio::time::sleep(Duration::from_millis(2)).await;
                        }
                        failing |= rng.random_bool(0.05);
                    }
                }
                handle.done(&mine).await;
            }
        }
    })
}

/// Inserts rows while things go wrong.
async fn trouble(world: &World, rng: &mut StdRng, next: &mut u64, refusals: bool) {
    for _ in 0..rng.random_range(10..60) {
        match rng.random_range(0..20) {
            0 => world.cut_stream(),
            1 => {
                world.broker_down(rng.random_bool(0.5));
                tokio::time::sleep(Duration::from_millis(rng.random_range(0..20_000))).await;
                world.broker_up();
            }
            2 => {
                let mut db = world.db.lock().unwrap();
                db.settle_faults.push_back(Disposition::Backoff);
            }
            3 if *next > 1 => {
                let n = rng.random_range(1..*next);
                let mut db = world.db.lock().unwrap();
                db.locked.clear();
                db.locked.insert(n);
            }
            4 => world.noise(rng.random_bool(0.5)),
            5 => tokio::time::sleep(Duration::from_secs(rng.random_range(1..15))).await,
            _ => {
                let count = rng.random_range(1..6);
                let rows: Vec<_> = (*next..*next + count)
                    .map(|n| (n, AGGREGATES[rng.random_range(0..4)]))
                    .collect();
                *next += count;
                for (n, _) in rows.iter().filter(|_| refusals) {
                    if rng.random_bool(0.1) {
                        world.refuse(*n, returned());
                    }
                }
                world.insert(&rows);
            }
        }
        tokio::time::sleep(Duration::from_millis(rng.random_range(0..30))).await;
    }
    world.db.lock().unwrap().locked.clear();
}

fn check(world: &World, ordering: Ordering, next: u64, seed: u64) {
    let arrived: BTreeSet<u64> = world.arrived().into_iter().collect();
    assert_eq!(arrived, (1..next).collect(), "seed {seed}: all arrive");
    let wrong: u64 = first_arrivals(world)
        .values()
        .map(|rows| inversions(rows))
        .sum();
    match ordering {
        Ordering::Strict => {
            assert_eq!(wrong, 0, "seed {seed}");
            let peak = world.broker.lock().unwrap().peak.values().copied().max();
            assert!(
                peak.unwrap_or(0) <= 1,
                "seed {seed}: one unconfirmed per aggregate"
            );
        }
        Ordering::Aggregate => {
            let counted = *world.overtaken.lock().unwrap();
            assert!(
                wrong <= counted,
                "seed {seed}: {wrong} overtakings, {counted} counted"
            );
        }
        Ordering::None => {}
    }
}

async fn one_life(ordering: Ordering, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let world = World::new();
    let run = Run::start(&world, config(), ordering);
    let broker = broker(&world, StdRng::seed_from_u64(seed + 1));
    let poller = poller(&world, &run.handle, StdRng::seed_from_u64(seed + 2));
    let mut next = 1;
    trouble(&world, &mut rng, &mut next, true).await;
    run.all_sent().await;
    until("stored", || world.stored() == world.end() || next == 1).await;
    check(&world, ordering, next, seed);
    until("let go", || run.handle.status().held == vec![0]).await;
    run.stop().await.unwrap();
    poller.abort();
    broker.abort();
}

async fn many_lives(ordering: Ordering, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let world = World::new();
    let broker = broker(&world, StdRng::seed_from_u64(seed + 1));
    let mut next = 1;
    for _ in 0..5 {
        let run = Run::start(&world, config(), ordering);
        trouble(&world, &mut rng, &mut next, false).await;
        // Killed at any point: what was on its way to the broker arrives, or not.
        run.task.abort();
        let _ = run.task.await;
        world.broker.lock().unwrap().confirmed.clear();
        world.db.lock().unwrap().settle_faults.clear();
        world.broker_down(rng.random_bool(0.5));
        world.broker_up();
    }
    let run = Run::start(&world, config(), ordering);
    run.all_sent().await;
    until("stored", || world.stored() == world.end()).await;
    check(&world, ordering, next, seed);
    run.stop().await.unwrap();
    broker.abort();
}

#[tokio::test(start_paused = true)]
async fn strict_order_holds_to_the_letter_whatever_happens() {
    for seed in seeds() {
        one_life(Ordering::Strict, seed).await;
    }
}

#[tokio::test(start_paused = true)]
async fn aggregate_order_holds_up_to_counted_overtakings_whatever_happens() {
    for seed in seeds() {
        one_life(Ordering::Aggregate, seed).await;
    }
}

#[tokio::test(start_paused = true)]
async fn crash_at_any_point_loses_nothing_and_keeps_strict_order() {
    for seed in seeds() {
        many_lives(Ordering::Strict, seed).await;
    }
}
