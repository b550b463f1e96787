//! What is left behind, and who delivers it.

use super::*;

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
    {
        let db = world.db.lock().unwrap();
        assert_eq!(db.rows[&1].status, Status::Failed);
        assert_eq!(
            db.rows[&3].failure.as_ref().unwrap().class,
            FailureClass::Permanent
        );
    }
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

#[tokio::test(start_paused = true)]
async fn what_was_never_attempted_holds_its_aggregate_after_a_restart_too() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.defer(Some((1, Some("a"))), Deferral::Undecodable);
    world.only_in_the_table(1, "a");
    until("passed", || world.stored() == 1).await;
    let left = vec![Behind::Aggregate(aggregate("a"))];
    assert_eq!(world.db.lock().unwrap().behind, left);
    run.crash().await;

    let run = Run::start(&world, config(), Ordering::Aggregate);
    world.db.lock().unwrap().hold_counts_as_left(aggregate("a"));
    world.insert(&[(2, "a"), (3, "b")]);
    until("the other aggregate", || world.status(3) == Status::Sent).await;
    assert_eq!(world.handed(), vec![3]);
    world.deliver(1);
    world.deliver(2);
    until("let go", || run.handle.status().held == vec![0]).await;
    world.insert(&[(4, "a")]);
    until("the fast path again", || world.status(4) == Status::Sent).await;
    until("nothing is left behind any more", || {
        world.db.lock().unwrap().behind.is_empty()
    })
    .await;
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_held_table_is_held_after_a_restart_until_it_is_swept() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.defer(None, Deferral::Oversized);
    until("passed", || world.stored() == 1).await;
    run.crash().await;

    let run = Run::start(&world, config(), Ordering::Aggregate);
    let mut due = run.handle.sweep_due();
    due.wait_for(|d| !d.is_empty()).await.unwrap();
    world.db.lock().unwrap().hold_counts_as_left(aggregate("a"));
    world.insert(&[(1, "a")]);
    until("left", || run.handle.status().held == vec![1]).await;
    assert_eq!(world.handed(), Vec::<u64>::new());
    run.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_the_table_shows_is_not_remembered_twice() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    world.refuse(1, returned());
    world.insert(&[(1, "a"), (2, "b")]);
    until("stored", || world.stored() == 1).await;
    assert_eq!(world.db.lock().unwrap().rows[&1].retry_count, 1);
    assert!(world.db.lock().unwrap().behind.is_empty());
    run.stop().await.unwrap();
}
