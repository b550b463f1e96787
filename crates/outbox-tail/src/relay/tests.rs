#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use outbox_core::ports::*;
use outbox_core::spec::{Ordering, Tracking};
use outbox_core::{FailureClass, Status};
use tokio::task::JoinHandle;

use super::*;
use world::{Script, TABLE, World, aggregate, at, held, key, pos_of, row_of, spec};

mod faults;
mod holds;
mod random;
mod world;

fn config() -> RelayConfig {
    RelayConfig {
        max_in_flight: 64,
        ..RelayConfig::default()
    }
}

struct Run {
    world: Arc<World>,
    handle: RelayHandle,
    stop: CancellationToken,
    task: JoinHandle<Result<(), RelayError>>,
}

impl Run {
    fn start(world: &Arc<World>, config: RelayConfig, ordering: Ordering) -> Self {
        Self::of(world, config, vec![spec(ordering, Tracking::Status)])
    }

    fn of(world: &Arc<World>, config: RelayConfig, specs: Vec<Arc<TableSpec>>) -> Self {
        let (relay, handle) = Relay::new(
            config,
            specs,
            Box::new(Script::new(world)),
            Arc::clone(world) as Arc<dyn Ledger>,
            Arc::clone(world) as Arc<dyn Publisher>,
            Arc::clone(world) as Arc<dyn Observer>,
        );
        let clock = Arc::clone(world);
        let relay = relay.with_clock(move || clock.clock());
        let stop = CancellationToken::new();
        let task = tokio::spawn(relay.run(at(world.stored()), stop.clone()));
        Self {
            world: Arc::clone(world),
            handle,
            stop,
            task,
        }
    }

    async fn stop(self) -> Result<(), RelayError> {
        self.stop.cancel();
        self.task.await.unwrap()
    }

    /// Ends without a last word.
    async fn crash(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }

    /// Until the relay is open and has nothing more to read.
    async fn live(&self) {
        until("live", || self.handle.status().state == "tailing").await;
    }

    async fn all_sent(&self) {
        until("all sent", || {
            let db = self.world.db.lock().unwrap();
            db.rows.values().all(|r| r.status == Status::Sent)
        })
        .await;
    }
}

/// Waits in (paused) time until something holds.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..60_000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never: {what}");
}

async fn pass(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

fn returned() -> PublishOutcome {
    PublishOutcome::Returned("NO_ROUTE".to_owned())
}

#[tokio::test(start_paused = true)]
async fn live_rows_are_published_at_once_recorded_and_passed() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.insert(&[(1, "a"), (2, "b")]);
    world.insert(&[(3, "a")]);
    run.all_sent().await;
    assert_eq!(world.handed(), vec![1, 2, 3]);
    assert!(
        world.db.lock().unwrap().looks.is_empty(),
        "nothing is read back at the live tip"
    );
    until("stored", || world.stored() == 2).await;
    assert!(run.handle.passed(&at(2), Duration::from_secs(1)).await);
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn catch_up_is_read_back_and_only_fresh_rows_go_out() {
    let world = World::new();
    world.insert(&[(1, "a"), (2, "b"), (3, "c"), (4, "d")]);
    world.edit(1, |r| r.status = Status::Sent);
    world.edit(2, |r| r.status = Status::Abandoned);
    world.db.lock().unwrap().look_takes = Duration::from_secs(1);
    let run = Run::start(&world, config(), Ordering::Aggregate);
    until("read", || run.handle.status().read == Some(at(1))).await;
    world.edit(3, |r| r.claimed = true);
    world.db.lock().unwrap().hold_counts_as_left(aggregate("c"));
    until("stored", || world.stored() == 1).await;
    assert_eq!(world.handed(), vec![4]);
    assert!(
        world
            .deferrals
            .lock()
            .unwrap()
            .contains(&Deferral::NotFresh)
    );
    world.insert(&[(5, "c")]);
    let left = run.handle.left_behind(10, Duration::from_secs(20)).await;
    assert_eq!(left, vec![aggregate("c")]);
    pass(1).await;
    assert_eq!(
        world.handed(),
        vec![4],
        "the claimed row holds its aggregate"
    );
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn reading_back_overlaps_publishing() {
    let world = World::new();
    for n in 0..400 {
        world.insert(&[(n, &n.to_string())]);
    }
    {
        world.db.lock().unwrap().look_takes = Duration::from_millis(100);
        world.broker.lock().unwrap().manual = true;
    }
    let run = Run::start(&world, config(), Ordering::Aggregate);
    let mut looks_while_unanswered = 0;
    for _ in 0..30 {
        until("a batch at the broker", || world.outstanding() > 0).await;
        let before = world.db.lock().unwrap().looks.len();
        pass(1).await;
        looks_while_unanswered += world.db.lock().unwrap().looks.len() - before;
        world.answer(usize::MAX);
        if world.arrived().len() == 400 {
            break;
        }
    }
    run.all_sent().await;
    assert!(looks_while_unanswered > 5, "{looks_while_unanswered}");
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn row_that_is_not_visible_yet_is_waited_for_and_goes_out_before_its_successors() {
    let world = World::new();
    world.insert_as(&[(1, "a")], false);
    world.insert(&[(2, "a"), (3, "b")]);
    let run = Run::start(&world, config(), Ordering::Aggregate);
    until("the other aggregate", || world.handed() == vec![3]).await;
    pass(2).await;
    assert_eq!(world.handed(), vec![3]);
    world.edit(1, |r| r.visible = true);
    run.all_sent().await;
    assert_eq!(world.handed(), vec![3, 1, 2]);
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn row_that_stays_invisible_counts_as_deleted() {
    let world = World::new();
    world.insert_as(&[(1, "a")], false);
    world.insert(&[(2, "a")]);
    let run = Run::start(&world, config(), Ordering::Aggregate);
    until("its successor", || world.handed() == vec![2]).await;
    until("passed", || world.stored() == 2).await;
    assert_eq!(*world.deferrals.lock().unwrap(), vec![Deferral::NotVisible]);
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn pause_stops_publishing_and_is_obeyed_before_it_returns() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.broker.lock().unwrap().manual = true;
    world.insert(&[(1, "a")]);
    until("at the broker", || world.outstanding() == 1).await;
    let handle = run.handle.clone();
    let pausing = tokio::spawn(async move { handle.pause(None).await });
    pass(1).await;
    assert!(!pausing.is_finished(), "a message is still on its way");
    world.answer(1);
    assert!(pausing.await.unwrap());
    until("what was answered is recorded", || {
        world.status(1) == Status::Sent
    })
    .await;
    world.broker.lock().unwrap().manual = false;
    world.insert(&[(2, "a"), (3, "b")]);
    pass(30).await;
    assert_eq!(world.handed(), vec![1]);
    run.handle.resume(None);
    run.all_sent().await;
    assert_eq!(world.handed(), vec![1, 2, 3]);
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn table_paused_alone_does_not_keep_the_window_from_others() {
    let world = World::new();
    let mut other = (*spec(Ordering::Aggregate, Tracking::Status)).clone();
    other.table = "other".to_owned();
    let specs = vec![spec(Ordering::Aggregate, Tracking::Status), Arc::new(other)];
    let run = Run::of(&world, config(), specs);
    run.live().await;
    assert!(run.handle.pause(Some(TABLE)).await);
    for n in 1..=200 {
        world
            .db
            .lock()
            .unwrap()
            .hold_counts_as_left(aggregate(&n.to_string()));
        world.insert(&[(n, &n.to_string())]);
    }
    let mut row = row_of(1000, &aggregate("x"));
    (row.key.table, row.aggregate.table) = (TableIdx(1), TableIdx(1));
    world.raw(vec![row]);
    until("the other table's row", || world.handed() == vec![1000]).await;
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn quiet_outbox_on_a_busy_server_moves_its_position_on_a_timer_but_not_for_own_writes() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    for _ in 0..600 {
        world.noise(false);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let after_noise = world.db.lock().unwrap().checkpoints;
    assert!((5..=7).contains(&after_noise), "{after_noise} in a minute");
    assert!(world.stored() > 450);
    pass(20).await;
    let before = world.db.lock().unwrap().checkpoints;
    for _ in 0..600 {
        world.noise(true);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(world.db.lock().unwrap().checkpoints, before);
    let end = at(world.end());
    assert!(
        run.handle.passed(&end, Duration::from_secs(1)).await,
        "but all is passed"
    );
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn signals_are_told() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    let mut signals = run.handle.signals();
    world.signal();
    signals.wait_for(|n| *n == 1).await.unwrap();
    run.stop().await.unwrap();
}
