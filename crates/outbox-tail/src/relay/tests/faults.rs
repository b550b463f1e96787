//! Broker, database and stream fail; starts and stops.

use super::*;
use crate::stream::StreamError;

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
    {
        let db = world.db.lock().unwrap();
        assert!(db.rows.values().all(|r| r.retry_count == 0));
        assert!(!db.looks.is_empty());
    }
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
async fn taken_server_id_is_not_fought_over() {
    let world = World::new();
    let run = Run::start(&world, config(), Ordering::Aggregate);
    run.live().await;
    let taken = StreamError::ServerIdTaken {
        server_id: 7,
        source: "scripted".into(),
    };
    world.db.lock().unwrap().open_fault = Some(taken);
    world.cut_stream();
    pass(25).await;
    assert_eq!(world.db.lock().unwrap().opens.len(), 1);
    assert!(!run.handle.tailing());
    until("back", || run.handle.tailing()).await;
    run.stop().await.unwrap();
}
