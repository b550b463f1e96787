#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use outbox_core::ports::*;
use outbox_core::spec::{Ordering, Tracking};
use outbox_core::{FailureClass, Status};
use tokio::task::JoinHandle;

use super::*;
use world::{Script, TABLE, World, aggregate, at, held, key, pos_of, row_of, spec};

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
async fn outage_costs_no_attempt_and_what_comes_after_it_is_read_back() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.broker.lock().unwrap().manual = true;
    world.insert(&[(1, "a"), (2, "a"), (3, "b")]);
    until("at the broker", || world.outstanding() == 3).await;
    world.answer(1);
    until("the first is recorded", || world.status(1) == Status::Sent).await;
    world.broker_down(false);
    world.insert(&[(4, "a")]);
    pass(3600).await;
    world.edit(3, |r| r.status = Status::Abandoned);
    world.broker.lock().unwrap().manual = false;
    world.broker_up();
    until("recorded", || world.stored() == 2).await;
    assert_eq!(
        world.handed(),
        vec![1, 2, 3, 2, 4],
        "in order, and not the abandoned one"
    );
    let db = world.db.lock().unwrap();
    assert!(db.rows.values().all(|r| r.retry_count == 0));
    assert!(!db.looks.is_empty());
    drop(db);
    assert_eq!(
        world.broker.lock().unwrap().batches[1],
        1,
        "one row first, to probe"
    );
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn short_loss_of_the_channel_republishes_in_order_without_a_look() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Strict);
    run.live().await;
    world.broker.lock().unwrap().manual = true;
    world.insert(&[(1, "a"), (2, "b"), (3, "a")]);
    until("at the broker", || world.outstanding() == 2).await;
    world.broker_down(true);
    world.broker.lock().unwrap().manual = false;
    world.broker_up();
    run.all_sent().await;
    assert_eq!(world.handed(), vec![1, 2, 1, 2, 3]);
    assert!(world.db.lock().unwrap().looks.is_empty());
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn locked_row_holds_the_position_but_not_the_window_and_is_not_published_again() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.db.lock().unwrap().locked.insert(1);
    for n in 1..=500 {
        world.insert(&[(n, "a")]);
    }
    until("all others are sent", || {
        (2..=500).all(|n| world.status(n) == Status::Sent)
    })
    .await;
    pass(120).await;
    assert_eq!(world.stored(), 0);
    world.db.lock().unwrap().locked.clear();
    until("stored", || world.stored() == 500).await;
    assert_eq!(world.handed().len(), 500);
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn blocked_broker_gets_nothing_more_and_has_no_confirm_clock() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.broker.lock().unwrap().manual = true;
    world.insert(&[(1, "a")]);
    until("at the broker", || world.outstanding() == 1).await;
    world.broker.lock().unwrap().blocked = true;
    for n in 2..=200 {
        world.insert(&[(n, "b")]);
    }
    pass(600).await;
    assert_eq!(world.handed(), vec![1]);
    assert!(run.handle.status().state.starts_with("broker blocked"));
    assert!(
        run.handle.status().in_flight_rows <= 65,
        "reading stops at the window's limit"
    );
    world.broker.lock().unwrap().manual = false;
    world.broker_up();
    world.answer(1);
    run.all_sent().await;
    assert_eq!(world.handed().len(), 200, "nothing went out twice");
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn window_that_is_full_for_long_closes_the_dump_and_opens_it_again_where_it_was() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.broker.lock().unwrap().manual = true;
    for n in 1..=200 {
        world.insert(&[(n, &n.to_string())]);
    }
    until("closed", || !world.db.lock().unwrap().open).await;
    assert!(run.handle.tailing(), "closed on purpose");
    pass(60).await;
    assert_eq!(world.db.lock().unwrap().opens, vec![0]);
    world.broker.lock().unwrap().manual = false;
    world.answer(usize::MAX);
    run.all_sent().await;
    assert_eq!(world.db.lock().unwrap().opens, vec![0, 64]);
    assert_eq!(world.handed(), (1..=200).collect::<Vec<_>>());
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn lost_stream_goes_on_behind_the_last_group_and_keeps_the_window() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.broker.lock().unwrap().manual = true;
    world.insert(&[(1, "a")]);
    world.insert(&[(2, "a")]);
    until("at the broker", || world.outstanding() == 2).await;
    world.cut_stream();
    until("opened again", || world.db.lock().unwrap().opens.len() == 2).await;
    assert_eq!(world.db.lock().unwrap().opens, vec![0, 2]);
    assert_eq!(world.stored(), 0);
    world.broker.lock().unwrap().manual = false;
    world.answer(2);
    world.insert(&[(3, "a")]);
    run.all_sent().await;
    assert_eq!(world.handed(), vec![1, 2, 3]);
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
async fn refused_row_holds_its_aggregate_until_the_poller_has_delivered_what_was_left() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.refuse(1, returned());
    world.insert(&[(1, "a")]);
    until("attempted", || {
        world.db.lock().unwrap().rows[&1].retry_count == 1
    })
    .await;
    world.insert(&[(2, "a"), (3, "b")]);
    until("the other aggregate", || world.status(3) == Status::Sent).await;
    let left = run.handle.left_behind(10, Duration::from_secs(5)).await;
    assert_eq!(left, vec![aggregate("a")]);
    let rows = [held(1, "a"), held(2, "a")];
    assert_eq!(run.handle.hold(&rows).await, vec![true, true]);
    world.insert(&[(4, "a")]);
    until("read", || {
        run.handle.status().read.as_ref().map(pos_of) == Some(3)
    })
    .await;
    assert_eq!(
        run.handle.hold(&[held(4, "a")]).await,
        vec![false],
        "it waits in the lane"
    );
    world.deliver(1);
    world.deliver(2);
    run.handle.done(&rows).await;
    until("the fast path again", || world.status(4) == Status::Sent).await;
    assert_eq!(world.arrived(), vec![3, 1, 2, 4]);
    until("let go", || run.handle.status().held == vec![0]).await;
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn abandoned_head_lets_its_aggregate_go_without_the_poller() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.refuse(1, PublishOutcome::Nacked);
    world.insert(&[(1, "a")]);
    until("attempted", || {
        world.db.lock().unwrap().rows[&1].retry_count == 1
    })
    .await;
    until("held", || run.handle.status().held == vec![1]).await;
    world.edit(1, |r| r.status = Status::Abandoned);
    until("let go", || run.handle.status().held == vec![0]).await;
    world.insert(&[(2, "a")]);
    until("published", || world.status(2) == Status::Sent).await;
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn failure_for_good_stops_holding_and_the_lane_goes_on() {
    let world = World::new();
    world.db.lock().unwrap().no_retries = true;
    let run = Run::start(&world, config(), Ordering::Strict);
    run.live().await;
    world.refuse(1, PublishOutcome::Nacked);
    let failure = Failure::permanent("too_large", "too large");
    world.refuse(3, PublishOutcome::Refused(failure));
    world.insert(&[(1, "a"), (2, "a"), (3, "a"), (4, "a")]);
    until("passed", || world.stored() == 1).await;
    assert_eq!(world.arrived(), vec![2, 4]);
    let db = world.db.lock().unwrap();
    assert_eq!(db.rows[&1].status, Status::Failed);
    assert_eq!(
        db.rows[&3].failure.as_ref().unwrap().class,
        FailureClass::Permanent
    );
    drop(db);
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn row_without_a_message_fails_at_once_and_disturbs_nobody() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.insert(&[(1, "a")]);
    run.all_sent().await;
    world.edit(1, |r| r.status = Status::Pending);
    let mut bad = row_of(1, &aggregate("a"));
    bad.message = Err(Failure::permanent("null_in_template", "{x} is NULL"));
    let mut sent = row_of(2, &aggregate("a"));
    sent.state.status = Status::Sent;
    let mut delayed = row_of(3, &aggregate("a"));
    delayed.state.next_retry_at = Some(i64::MAX);
    world.raw(vec![bad, sent, delayed, row_of(4, &aggregate("a"))]);
    until("the good one", || world.handed() == vec![1, 4]).await;
    until("stored", || world.stored() == 2).await;
    assert_eq!(world.status(1), Status::Failed);
    assert_eq!(*world.deferrals.lock().unwrap(), vec![Deferral::Delayed]);
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn unknown_rows_hold_their_table_until_a_sweep_has_passed() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    let mut due = run.handle.sweep_due();
    world.defer(None, Deferral::Oversized);
    due.wait_for(|d| *d == vec![(TABLE, at(1))]).await.unwrap();
    world.db.lock().unwrap().hold_counts_as_left(aggregate("a"));
    world.insert(&[(1, "a")]);
    until("left", || {
        world.deferrals.lock().unwrap().contains(&Deferral::Held)
    })
    .await;
    until("held", || run.handle.status().held == vec![1]).await;
    world.deliver(1);
    run.handle.sweep_passed(TABLE, at(1)).await;
    due.wait_for(Vec::is_empty).await.unwrap();
    until("let go", || run.handle.status().held == vec![0]).await;
    world.insert(&[(2, "a")]);
    until("published", || world.status(2) == Status::Sent).await;
    assert_eq!(world.handed(), vec![2]);
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn holds_are_loaded_at_the_start() {
    let world = World::new();
    world.insert(&[(1, "a"), (2, "a")]);
    world.edit(1, |r| r.retry_count = 2);
    {
        let mut db = world.db.lock().unwrap();
        db.stored = 1;
        db.hold_counts_as_left(aggregate("a"));
    }
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.insert(&[(3, "a"), (4, "b")]);
    until("the other aggregate", || world.status(4) == Status::Sent).await;
    assert_eq!(world.handed(), vec![4]);
    for n in 1..=3 {
        world.deliver(n);
    }
    until("let go", || run.handle.status().held == vec![0]).await;
    world.insert(&[(5, "a")]);
    until("published", || world.status(5) == Status::Sent).await;
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn poller_that_asked_before_the_start_keeps_what_it_was_given() {
    let world = World::new();
    world.insert(&[(1, "a"), (2, "a")]);
    let (relay, handle) = Relay::new(
        config(),
        vec![spec(Ordering::Aggregate, Tracking::Status)],
        Box::new(Script::new(&world)),
        Arc::clone(&world) as Arc<dyn Ledger>,
        Arc::clone(&world) as Arc<dyn Publisher>,
        Arc::clone(&world) as Arc<dyn Observer>,
    );
    assert!(!handle.tailing());
    world.db.lock().unwrap().hold_counts_as_left(aggregate("a"));
    assert_eq!(handle.hold(&[held(1, "a")]).await, vec![true]);
    let stop = CancellationToken::new();
    let task = tokio::spawn(relay.run(at(0), stop.clone()));
    until("read", || handle.status().read == Some(at(1))).await;
    assert!(world.handed().is_empty());
    world.deliver(1);
    handle.done(&[held(1, "a")]).await;
    until("its successor", || world.status(2) == Status::Sent).await;
    assert_eq!(world.handed(), vec![2]);
    stop.cancel();
    task.await.unwrap().unwrap();
    assert_eq!(
        handle.hold(&[held(9, "a")]).await,
        vec![true],
        "no tail runs any more"
    );
}

#[tokio::test(start_paused = true)]
async fn table_without_status_parks_what_cannot_be_published_and_never_looks() {
    let world = World::new();
    world.insert(&[(1, "a"), (2, "a"), (3, "b")]);
    world.refuse(1, returned());
    let run = Run::of(
        &world,
        config(),
        vec![spec(Ordering::Strict, Tracking::None)],
    );
    until("stored", || world.stored() == 1).await;
    assert_eq!(world.handed(), vec![1, 3]);
    world.insert(&[(4, "a")]);
    until("parked behind it", || world.stored() == 2).await;
    assert!(world.db.lock().unwrap().looks.is_empty());
    until("held", || run.handle.status().held == vec![1]).await;
    for n in [1, 2, 4] {
        world.db.lock().unwrap().rows.remove(&n);
    }
    until("let go", || run.handle.status().held == vec![0]).await;
    world.insert(&[(5, "a")]);
    until("published", || world.status(5) == Status::Sent).await;
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn table_without_status_stops_before_rows_that_it_would_have_to_leave() {
    let world = World::new();
    let run = Run::of(
        &world,
        config(),
        vec![spec(Ordering::Aggregate, Tracking::None)],
    );
    world.insert(&[(1, "a")]);
    world.defer(Some((2, Some("a"))), Deferral::Undecodable);
    let error = run.task.await.unwrap().unwrap_err();
    assert!(matches!(
        error,
        RelayError::NothingToLeaveTo {
            why: Deferral::Undecodable,
            ..
        }
    ));
    assert_eq!(
        world.stored(),
        1,
        "what came before is recorded, and the position stands there"
    );
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
async fn stop_drains_what_is_at_the_broker_and_stores_the_position_a_last_time() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Strict);
    run.live().await;
    world.broker.lock().unwrap().manual = true;
    world.insert(&[(1, "a"), (2, "a")]);
    until("at the broker", || world.outstanding() == 1).await;
    run.stop.cancel();
    pass(1).await;
    world.answer(1);
    run.task.await.unwrap().unwrap();
    assert_eq!(world.status(1), Status::Sent);
    assert_eq!(
        world.handed(),
        vec![1],
        "nothing new goes out while draining"
    );
    assert!(!world.db.lock().unwrap().open);
}

#[tokio::test(start_paused = true)]
async fn stop_while_the_broker_is_blocked_ends_at_the_deadline() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.broker.lock().unwrap().manual = true;
    world.insert(&[(1, "a")]);
    until("at the broker", || world.outstanding() == 1).await;
    let began = tokio::time::Instant::now();
    run.stop().await.unwrap();
    let took = began.elapsed();
    assert!(
        took <= config().drain_deadline + Duration::from_secs(2),
        "{took:?}"
    );
    assert_eq!(world.stored(), 0);
}

#[tokio::test(start_paused = true)]
async fn unavailable_ledger_is_asked_again_and_a_fenced_one_ends_the_session() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    {
        let mut db = world.db.lock().unwrap();
        db.settle_faults
            .extend([Disposition::Backoff, Disposition::Backoff]);
    }
    world.insert(&[(1, "a")]);
    run.all_sent().await;
    assert_eq!(world.handed(), vec![1]);
    world
        .db
        .lock()
        .unwrap()
        .settle_faults
        .push_back(Disposition::Fenced);
    world.insert(&[(2, "a")]);
    let error = run.task.await.unwrap().unwrap_err();
    assert!(matches!(error, RelayError::Fenced(_)));
    assert_eq!(world.status(2), Status::Pending);
    assert!(!run.handle.tailing());
}

#[tokio::test(start_paused = true)]
async fn lost_position_ends_the_session_after_what_is_in_flight_is_recorded() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.broker.lock().unwrap().manual = true;
    world.insert(&[(1, "a")]);
    until("at the broker", || world.outstanding() == 1).await;
    let lost = crate::stream::LostPosition {
        from: at(1),
        to: at(9),
        reason: crate::stream::LostReason::Purged,
        certain: true,
        detail: "purged".to_owned(),
    };
    world.db.lock().unwrap().open_fault = Some(StreamError::LostPosition(Box::new(lost)));
    world.cut_stream();
    pass(2).await;
    world.answer(1);
    let error = run.task.await.unwrap().unwrap_err();
    assert!(matches!(error, RelayError::LostPosition(lost) if lost.to == at(9)));
    assert_eq!((world.status(1), world.stored()), (Status::Sent, 1));
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

#[tokio::test(start_paused = true)]
async fn rows_of_the_tails_own_are_not_the_pollers() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::None);
    run.live().await;
    world.broker.lock().unwrap().manual = true;
    world.insert(&[(1, "a")]);
    until("at the broker", || world.outstanding() == 1).await;
    assert_eq!(
        run.handle.hold(&[held(1, "a"), held(7, "a")]).await,
        vec![false, true]
    );
    assert_eq!(key(1), held(1, "a").key);
    world.answer(1);
    run.stop().await.unwrap();
}
