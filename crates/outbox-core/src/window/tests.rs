#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::*;
use crate::position::FilePosition;

fn at(pos: u64) -> Position {
    Position::File(FilePosition {
        server: "s".to_owned(),
        file: "b.000001".to_owned(),
        pos,
    })
}

fn window() -> Window {
    let limits = WindowLimits {
        rows: 8,
        bytes: 800,
    };
    Window::new(limits, Some(at(0)))
}

fn layout(name: &str) -> Option<TableLayout> {
    Some(TableLayout {
        columns: Vec::new(),
        primary_key: vec![name.to_owned()],
        engine: "InnoDB".to_owned(),
    })
}

#[test]
fn mark_waits_for_the_oldest_row_and_then_jumps_over_all_that_is_settled() {
    let mut w = window();
    let a = w.push([10], Vec::new(), at(1));
    let b = w.push([10, 10], Vec::new(), at(2));
    w.progress(at(3));
    w.settle(b);
    w.settle(b + 1);
    assert_eq!(w.low_watermark(), Some(&at(0)));
    assert!(w.checkpoint().is_none());
    w.settle(a);
    assert_eq!(w.low_watermark(), Some(&at(3)));
    let checkpoint = w.checkpoint().unwrap();
    assert_eq!(checkpoint.position, at(3));
    w.stored(&checkpoint);
    assert!(w.checkpoint().is_none());
}

#[test]
fn presented_rows_count_for_the_checkpoint_until_they_are_withdrawn() {
    let mut w = window();
    let a = w.push([10, 10], Vec::new(), at(1));
    w.present([a]);
    assert!(w.checkpoint().is_none());
    w.present([a + 1, a + 1]);
    assert_eq!(w.checkpoint().unwrap().position, at(1));
    assert_eq!(w.low_watermark(), Some(&at(0)));
    w.withdraw([a + 1]);
    assert!(w.checkpoint().is_none());
}

#[test]
fn layouts_are_handed_out_with_the_checkpoint_that_passes_them_and_only_then_forgotten() {
    let mut w = window();
    let a = w.push([10], vec![(TableIdx(0), layout("one"))], at(1));
    w.push([], vec![(TableIdx(0), layout("two"))], at(2));
    assert!(w.checkpoint().is_none());
    w.present([a]);
    let first = w.checkpoint().unwrap();
    assert_eq!(first.layouts, vec![(TableIdx(0), layout("two"))]);
    w.push([], vec![(TableIdx(1), None)], at(3));
    w.settle(a);
    w.stored(&first);
    let second = w.checkpoint().unwrap();
    assert_eq!(second.position, at(3));
    assert_eq!(second.layouts, vec![(TableIdx(1), None)]);
}

#[test]
fn rows_set_aside_hold_the_mark_but_not_the_window_and_are_bounded() {
    let mut w = window();
    let first = w.push(std::iter::repeat_n(10, 8), Vec::new(), at(1));
    assert!(w.full());
    for seq in first..first + 8 {
        assert!(w.set_aside(seq));
    }
    assert_eq!((w.rows(), w.bytes(), w.unsettled()), (0, 0, 8));
    let more = w.push([10], Vec::new(), at(2));
    assert!(!w.set_aside(more), "as many as the window has are aside");
    w.settle(more);
    assert_eq!(w.low_watermark(), Some(&at(0)));
    w.bring_back(first);
    assert_eq!(w.rows(), 1);
    for seq in first..first + 8 {
        assert!(w.settle(seq));
    }
    assert_eq!(w.low_watermark(), Some(&at(2)));
    assert_eq!((w.rows(), w.bytes()), (0, 0));
}

#[test]
fn one_row_heavier_than_the_window_is_still_admitted() {
    let mut w = window();
    assert!(!w.full());
    let heavy = w.push([10_000], Vec::new(), at(1));
    assert!(w.full());
    w.settle(heavy);
    assert!(!w.full());
}

/// The plain model: all groups for ever, each with its open rows.
#[derive(Default)]
struct Model {
    groups: Vec<(Vec<RowSeq>, u64)>,
    presented: Vec<RowSeq>,
}

impl Model {
    fn mark(&self, presuming: &[RowSeq]) -> u64 {
        self.groups
            .iter()
            .take_while(|(rows, _)| rows.iter().all(|r| presuming.contains(r)))
            .map(|(_, end)| *end)
            .last()
            .unwrap_or(0)
    }

    fn open(&self) -> Vec<RowSeq> {
        self.groups.iter().flat_map(|(r, _)| r.clone()).collect()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Push(usize),
    Settle(usize),
    Present(usize),
    Withdraw(usize),
    Aside(usize),
    Store,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0_usize..4).prop_map(Step::Push),
        (0_usize..64).prop_map(Step::Settle),
        (0_usize..64).prop_map(Step::Present),
        (0_usize..64).prop_map(Step::Withdraw),
        (0_usize..64).prop_map(Step::Aside),
        Just(Step::Store),
    ]
}

proptest! {
    #[test]
    fn window_agrees_with_the_plain_model(steps in prop::collection::vec(step(), 1..120)) {
        let (mut w, mut m, mut end) = (window(), Model::default(), 0);
        let mut stored = 0;
        for step in steps {
            let open = m.open();
            let pick = |i: usize| (!open.is_empty()).then(|| open[i % open.len()]);
            match step {
                Step::Push(n) => {
                    end += 1;
                    let first = w.push(std::iter::repeat_n(7, n), Vec::new(), at(end));
                    m.groups.push(((first..first + n as u64).collect(), end));
                }
                Step::Settle(i) => if let Some(seq) = pick(i) {
                    prop_assert!(w.settle(seq));
                    prop_assert!(!w.settle(seq));
                    for (rows, _) in &mut m.groups { rows.retain(|r| *r != seq); }
                    m.presented.retain(|r| *r != seq);
                },
                Step::Present(i) => if let Some(seq) = pick(i) {
                    w.present([seq]);
                    m.presented.push(seq);
                },
                Step::Withdraw(i) => if let Some(seq) = pick(i) {
                    w.withdraw([seq]);
                    m.presented.retain(|r| *r != seq);
                },
                Step::Aside(i) => if let Some(seq) = pick(i) { w.set_aside(seq); },
                Step::Store => {
                    let mark = m.mark(&[]);
                    if m.mark(&m.presented) == mark && let Some(c) = w.checkpoint() {
                        prop_assert!(mark > stored);
                        w.stored(&c);
                        stored = mark;
                    }
                }
            }
            let mark = m.mark(&[]);
            prop_assert_eq!(w.low_watermark(), Some(&at(mark)));
            let presumed = m.mark(&m.presented);
            prop_assert_eq!(
                w.checkpoint().map(|c| c.position),
                (presumed > stored).then(|| at(presumed))
            );
            prop_assert_eq!(w.unsettled(), m.open().len());
            prop_assert!(w.groups.len() <= w.unsettled());
        }
    }
}
