#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use super::*;
use crate::ports::Recorded;
use crate::position::FilePosition;
use crate::spec::{ColumnNames, OnSent, OnUnroutable, Tracking};
use crate::status::StatusValues;
use crate::template::Template;

mod world;

fn spec(ordering: Ordering) -> TableSpec {
    TableSpec {
        schema: "app".to_owned(),
        table: "outbox".to_owned(),
        tracking: Tracking::Status,
        on_sent: OnSent::Mark,
        columns: ColumnNames::default(),
        status_values: StatusValues::default(),
        exchange: Template::parse("outbox").unwrap(),
        routing_key: Template::parse("key").unwrap(),
        ordering,
        failed_blocks_aggregate: false,
        on_unroutable: OnUnroutable::Retry,
        max_body: None,
    }
}

fn lanes(ordering: Ordering) -> Lanes {
    Lanes::new(LaneLimits::default(), [&spec(ordering)])
}

fn aggregate(name: &str) -> Aggregate {
    Aggregate {
        table: TableIdx(0),
        kind: Arc::from("order"),
        id: Arc::from(name),
    }
}

fn id(n: u64) -> RowId {
    RowId::UInt(n)
}

fn held(n: u64, name: &str) -> HeldRow {
    HeldRow {
        key: RowKey {
            table: TableIdx(0),
            id: id(n),
        },
        aggregate: aggregate(name),
    }
}

fn at(pos: u64) -> Position {
    Position::File(FilePosition {
        server: "s".to_owned(),
        file: "b.000001".to_owned(),
        pos,
    })
}

const T0: Duration = Duration::from_secs(1);

/// Reads a row and decides on it; its id is its number.
fn read(l: &mut Lanes, n: u64, name: &str) -> Decision {
    l.enter(n, &id(n), &aggregate(name));
    l.decide(n, &aggregate(name), T0)
}

#[test]
fn aggregate_mode_pipelines_until_a_refusal_then_probes_with_one_row() {
    let (mut l, a) = (lanes(Ordering::Aggregate), aggregate("a"));
    assert_eq!(read(&mut l, 1, "a"), Decision::Publish);
    assert_eq!(read(&mut l, 2, "a"), Decision::Publish);
    l.end(1, &id(1), &a, Ended::Refused);
    assert_eq!(
        read(&mut l, 3, "a"),
        Decision::Wait,
        "until the record says what follows"
    );
    assert_eq!(read(&mut l, 4, "a"), Decision::Wait);
    l.end(2, &id(2), &a, Ended::Confirmed);
    assert_eq!(l.take_overtaken(TableIdx(0)), 1);
    l.recorded(&id(1), &a, Recorded::Failed);
    assert_eq!(l.take_woken(), vec![3]);
    assert_eq!(l.decide(3, &a, T0), Decision::Publish);
    assert!(l.take_woken().is_empty(), "one at a time");
    assert_eq!(read(&mut l, 5, "a"), Decision::Wait);
    l.end(3, &id(3), &a, Ended::Confirmed);
    assert_eq!(l.take_woken(), vec![4]);
    assert_eq!(l.decide(4, &a, T0), Decision::Publish);
    assert_eq!(l.take_woken(), vec![5], "clean again, and pipelined");
}

#[test]
fn strict_mode_has_one_unconfirmed_row_per_aggregate_and_many_aggregates_at_once() {
    let (mut l, a) = (lanes(Ordering::Strict), aggregate("a"));
    assert_eq!(read(&mut l, 1, "a"), Decision::Publish);
    assert_eq!(read(&mut l, 2, "a"), Decision::Wait);
    assert_eq!(read(&mut l, 3, "b"), Decision::Publish);
    l.end(1, &id(1), &a, Ended::Confirmed);
    assert_eq!(l.take_woken(), vec![2]);
    assert_eq!(l.decide(2, &a, T0), Decision::Publish);
}

#[test]
fn unordered_tables_publish_whatever_happened_before() {
    let (mut l, a) = (lanes(Ordering::None), aggregate("a"));
    assert_eq!(read(&mut l, 1, "a"), Decision::Publish);
    l.end(1, &id(1), &a, Ended::Refused);
    l.recorded(&id(1), &a, Recorded::WillRetry);
    assert_eq!(read(&mut l, 2, "a"), Decision::Publish);
    assert_eq!(l.held(TableIdx(0)), 0);
    let rows = [held(2, "a"), held(9, "a")];
    let mine = |k: &RowKey| k.id == id(2);
    assert_eq!(l.poller_asks(&rows, mine, T0), vec![false, true]);
}

#[test]
fn row_that_will_be_retried_holds_its_aggregate_and_everything_behind_is_left() {
    let (mut l, a) = (lanes(Ordering::Aggregate), aggregate("a"));
    read(&mut l, 1, "a");
    l.end(1, &id(1), &a, Ended::Refused);
    assert_eq!(read(&mut l, 2, "a"), Decision::Wait);
    l.recorded(&id(1), &a, Recorded::WillRetry);
    assert_eq!(l.take_left(), vec![2]);
    assert_eq!(read(&mut l, 3, "a"), Decision::Leave);
    assert_eq!(read(&mut l, 4, "b"), Decision::Publish);
    assert_eq!(l.left_behind(10, false), vec![a.clone()]);
    assert!(l.left_behind(10, false).is_empty(), "told once");
    assert_eq!(l.left_behind(10, true), vec![a.clone()]);
    for n in 1..=3 {
        assert!(l.is_held(RowSeq::MAX, &a));
        l.found(&a, &id(n), Found::Final, T0);
    }
    assert!(!l.is_held(RowSeq::MAX, &a));
    assert_eq!(read(&mut l, 5, "a"), Decision::Publish);
}

#[test]
fn aggregate_under_steady_traffic_gets_back_to_the_fast_path() {
    let (mut l, a) = (lanes(Ordering::Aggregate), aggregate("a"));
    read(&mut l, 1, "a");
    l.end(1, &id(1), &a, Ended::Refused);
    l.recorded(&id(1), &a, Recorded::WillRetry);
    assert_eq!(read(&mut l, 2, "a"), Decision::Leave);
    let rows = [held(1, "a"), held(2, "a")];
    assert_eq!(l.poller_asks(&rows, |_| false, T0), vec![true, true]);
    assert_eq!(read(&mut l, 3, "a"), Decision::Wait);
    l.poller_done(&rows, T0);
    assert!(l.check_due());
    let checks = l.checks(10, false);
    assert_eq!(checks.len(), 1);
    assert_eq!(read(&mut l, 4, "a"), Decision::Wait);
    for id in &checks[0].ids {
        l.found(&a, id, Found::Final, T0);
    }
    assert_eq!(l.take_woken(), vec![3]);
    assert_eq!(l.decide(3, &a, T0), Decision::Publish);
}

#[test]
fn rows_that_wait_for_the_poller_are_left_when_its_head_fails_again() {
    let (mut l, a) = (lanes(Ordering::Aggregate), aggregate("a"));
    l.hold_row(&a, id(1));
    let rows = [held(1, "a")];
    assert_eq!(l.poller_asks(&rows, |_| false, T0), vec![true]);
    assert_eq!(read(&mut l, 2, "a"), Decision::Wait);
    l.poller_done(&rows, T0);
    l.found(&a, &id(1), Found::Open, T0);
    assert_eq!(l.take_left(), vec![2]);
    assert_eq!(read(&mut l, 3, "a"), Decision::Leave);
}

#[test]
fn rows_wait_behind_a_hold_for_a_bounded_time_only() {
    let (mut l, a) = (lanes(Ordering::Aggregate), aggregate("a"));
    l.hold_row(&a, id(1));
    l.poller_asks(&[held(1, "a")], |_| false, T0);
    assert_eq!(read(&mut l, 2, "a"), Decision::Wait);
    let deadline = l.next_deadline().unwrap();
    l.expire(deadline.saturating_sub(Duration::from_millis(1)));
    assert!(l.take_left().is_empty());
    l.expire(deadline);
    assert_eq!(l.take_left(), vec![2]);
}

#[test]
fn poller_waits_for_what_is_at_the_broker_and_then_has_its_turn() {
    let (mut l, a) = (lanes(Ordering::Aggregate), aggregate("a"));
    read(&mut l, 5, "a");
    assert_eq!(l.poller_asks(&[held(1, "a")], |_| false, T0), vec![false]);
    assert_eq!(
        read(&mut l, 6, "a"),
        Decision::Wait,
        "the row left behind has its turn first"
    );
    l.left_behind(10, false);
    l.end(5, &id(5), &a, Ended::Confirmed);
    assert_eq!(
        l.left_behind(10, false),
        vec![a.clone()],
        "told again when it may ask again"
    );
    let mine = |k: &RowKey| k.id == id(6);
    let rows = [held(1, "a"), held(6, "a"), held(7, "a")];
    assert_eq!(l.poller_asks(&rows, mine, T0), vec![true, false, false]);
}

#[test]
fn unknown_rows_hold_the_table_until_a_sweep_has_passed_but_not_rows_read_before() {
    let mut l = lanes(Ordering::Strict);
    let a = aggregate("a");
    read(&mut l, 1, "a");
    assert_eq!(read(&mut l, 2, "a"), Decision::Wait);
    l.hold_table(TableIdx(0), at(10), 3);
    l.hold_table(TableIdx(0), at(20), 9);
    l.end(1, &id(1), &a, Ended::Confirmed);
    assert_eq!(l.take_woken(), vec![2]);
    assert_eq!(l.decide(2, &a, T0), Decision::Publish);
    assert_eq!(read(&mut l, 3, "b"), Decision::Leave);
    l.sweep_passed(TableIdx(0), &at(15));
    assert_eq!(read(&mut l, 4, "c"), Decision::Leave);
    l.sweep_passed(TableIdx(0), &at(20));
    assert_eq!(read(&mut l, 5, "d"), Decision::Publish);
    assert_eq!(
        read(&mut l, 6, "b"),
        Decision::Leave,
        "its own row is still left behind"
    );
}

#[test]
fn hold_beyond_its_limit_is_read_again_and_forgets_nothing_meanwhile() {
    let limits = LaneLimits {
        ids_per_hold: 2,
        ..LaneLimits::default()
    };
    let mut l = Lanes::new(limits, [&spec(Ordering::Aggregate)]);
    let a = aggregate("a");
    for n in 1..=3 {
        l.hold_row(&a, id(n));
    }
    let check = l.checks(10, true).remove(0);
    assert!(check.many);
    l.found(&a, &id(1), Found::Final, T0);
    l.found(&a, &id(2), Found::Final, T0);
    l.hold_row(&a, id(4));
    l.remaining(&a, Some(vec![id(3)]));
    let check = l.checks(10, true).remove(0);
    assert!(!check.many);
    let mut ids = check.ids;
    ids.sort();
    assert_eq!(ids, vec![id(3), id(4)]);
    l.remaining(&a, Some(Vec::new()));
    assert!(
        l.is_held(RowSeq::MAX, &a),
        "an answer that nobody asked for changes nothing"
    );
}

#[test]
fn too_many_held_aggregates_are_reported_so_that_the_table_can_be_held() {
    let limits = LaneLimits {
        held_aggregates: 1,
        ..LaneLimits::default()
    };
    let mut l = Lanes::new(limits, [&spec(Ordering::Aggregate)]);
    l.hold_row(&aggregate("a"), id(1));
    assert!(!l.take_untracked(TableIdx(0)));
    l.hold_row(&aggregate("b"), id(2));
    assert!(l.take_untracked(TableIdx(0)));
    assert!(!l.take_untracked(TableIdx(0)));
    assert_eq!(l.held(TableIdx(0)), 1);
}

#[test]
fn failed_row_stops_holding_unless_told_otherwise() {
    for blocks in [false, true] {
        let mut spec = spec(Ordering::Aggregate);
        spec.failed_blocks_aggregate = blocks;
        let (mut l, a) = (Lanes::new(LaneLimits::default(), [&spec]), aggregate("a"));
        read(&mut l, 1, "a");
        l.end(1, &id(1), &a, Ended::Failed);
        assert_eq!(l.is_held(RowSeq::MAX, &a), blocks);
        read(&mut l, 2, "b");
        l.end(2, &id(2), &aggregate("b"), Ended::Refused);
        l.recorded(&id(2), &aggregate("b"), Recorded::Failed);
        assert_eq!(l.is_held(RowSeq::MAX, &aggregate("b")), blocks);
    }
}

#[test]
fn row_that_the_poller_had_before_it_was_read_is_known_to_need_a_look() {
    let (mut l, a) = (lanes(Ordering::Aggregate), aggregate("a"));
    let rows = [held(7, "a")];
    l.poller_asks(&rows, |_| false, T0);
    l.poller_done(&rows, T0);
    l.found(&a, &id(7), Found::Final, T0);
    assert!(!l.is_held(RowSeq::MAX, &a));
    assert!(l.was_elsewhere(&rows[0].key));
    assert!(!l.was_elsewhere(&held(8, "a").key));
}

#[test]
fn invisible_row_counts_as_deleted_after_a_while() {
    let (mut l, a) = (lanes(Ordering::Aggregate), aggregate("a"));
    l.hold_row(&a, id(1));
    l.found(&a, &id(1), Found::Absent, T0);
    l.found(&a, &id(1), Found::Absent, T0 + Duration::from_secs(29));
    assert!(l.is_held(RowSeq::MAX, &a));
    l.found(&a, &id(1), Found::Absent, T0 + Duration::from_secs(30));
    assert!(!l.is_held(RowSeq::MAX, &a));
}

#[test]
fn unconfirmed_row_goes_before_everything_behind_it() {
    let (mut l, a) = (lanes(Ordering::Aggregate), aggregate("a"));
    for n in 1..=2 {
        assert_eq!(read(&mut l, n, "a"), Decision::Publish);
    }
    l.unconfirmed(1, &a);
    l.end(2, &id(2), &a, Ended::Confirmed);
    assert_eq!(l.take_overtaken(TableIdx(0)), 1);
    assert_eq!(read(&mut l, 3, "a"), Decision::Wait);
    assert_eq!(l.decide(1, &a, T0), Decision::Publish);
    assert_eq!(l.take_woken(), vec![3]);
}
