//! A random world around the lanes: a broker that answers as it likes, and a poller that works
//! through what was left. Checked: everything is delivered, and in order.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    /// Reads a row of that aggregate.
    Read(u8),
    /// The broker answers for one of the rows that it has.
    Answer(usize, Answer),
    /// The record of a refused row comes back.
    Record(usize, bool),
    /// The poller asks for everything left of one aggregate.
    Ask(u8),
    /// The poller delivers (or not) what it was granted, and is done.
    Done(bool),
    /// Held rows are looked up.
    Look,
    Wait(u8),
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    Confirm,
    Refuse,
    Fail,
    Lose,
}

fn step() -> impl Strategy<Value = Step> {
    let answer = prop_oneof![
        6 => Just(Answer::Confirm),
        1 => Just(Answer::Refuse),
        1 => Just(Answer::Fail),
        1 => Just(Answer::Lose),
    ];
    prop_oneof![
        5 => (0_u8..3).prop_map(Step::Read),
        5 => (0_usize..8, answer).prop_map(|(i, a)| Step::Answer(i, a)),
        2 => (0_usize..8, any::<bool>()).prop_map(|(i, w)| Step::Record(i, w)),
        2 => (0_u8..3).prop_map(Step::Ask),
        2 => prop::bool::weighted(0.8).prop_map(Step::Done),
        2 => Just(Step::Look),
        1 => (0_u8..4).prop_map(Step::Wait),
    ]
}

struct World {
    lanes: Lanes,
    ordering: Ordering,
    next: u64,
    now: Duration,
    names: HashMap<u64, String>,
    queue: BTreeSet<u64>,
    waiting: BTreeSet<u64>,
    out: Vec<u64>,
    recording: Vec<u64>,
    /// Pending in the table and not the tail's.
    left: BTreeSet<u64>,
    granted: Vec<HeldRow>,
    failed: BTreeSet<u64>,
    /// When each row was last handed over, by the tail or by the poller.
    handed: HashMap<u64, u64>,
    handings: u64,
    /// Rows that arrived, by when they were handed over: channels keep the order.
    delivered: BTreeMap<u64, u64>,
    overtaken: u64,
}

impl World {
    fn new(ordering: Ordering) -> Self {
        Self {
            lanes: lanes(ordering),
            ordering,
            next: 1,
            now: T0,
            names: HashMap::new(),
            queue: BTreeSet::new(),
            waiting: BTreeSet::new(),
            out: Vec::new(),
            recording: Vec::new(),
            left: BTreeSet::new(),
            granted: Vec::new(),
            failed: BTreeSet::new(),
            handed: HashMap::new(),
            handings: 0,
            delivered: BTreeMap::new(),
            overtaken: 0,
        }
    }

    fn of(&self, n: u64) -> Aggregate {
        aggregate(&self.names[&n])
    }

    fn hand(&mut self, n: u64) {
        self.handings += 1;
        self.handed.insert(n, self.handings);
    }

    fn deliver(&mut self, n: u64) {
        assert!(!self.delivered.values().any(|d| *d == n), "delivered twice");
        self.delivered.insert(self.handed[&n], n);
    }

    /// What a caller does after every event.
    fn pump(&mut self) {
        loop {
            for n in self.lanes.take_left() {
                assert!(self.waiting.remove(&n));
                self.left.insert(n);
            }
            for n in self.lanes.take_woken() {
                assert!(self.waiting.remove(&n));
                self.queue.insert(n);
            }
            let Some(n) = self.queue.pop_first() else {
                break;
            };
            match self.lanes.decide(n, &self.of(n), self.now) {
                Decision::Publish => {
                    let same = self.out.iter().any(|o| self.names[o] == self.names[&n]);
                    assert!(
                        !(same && self.ordering == Ordering::Strict),
                        "two unconfirmed"
                    );
                    self.out.push(n);
                    self.hand(n);
                }
                Decision::Wait => assert!(self.waiting.insert(n)),
                Decision::Leave => assert!(self.left.insert(n)),
            }
        }
        self.overtaken += self.lanes.take_overtaken(TableIdx(0));
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Read(name) => {
                let n = self.next;
                self.next += 1;
                self.names.insert(n, name.to_string());
                self.lanes.enter(n, &id(n), &self.of(n));
                self.queue.insert(n);
            }
            Step::Answer(i, answer) if !self.out.is_empty() => {
                let n = self.out.remove(i % self.out.len());
                self.answer(n, *answer);
            }
            Step::Record(i, retry) if !self.recording.is_empty() => {
                let n = self.recording.remove(i % self.recording.len());
                self.record(n, *retry);
            }
            Step::Ask(name) if self.granted.is_empty() => self.ask(&name.to_string()),
            Step::Done(well) => self.done(*well),
            Step::Look => self.look(true),
            Step::Wait(seconds) => {
                self.now += Duration::from_secs(u64::from(*seconds));
                self.lanes.expire(self.now);
            }
            _ => {}
        }
        self.pump();
    }

    fn answer(&mut self, n: u64, answer: Answer) {
        let a = self.of(n);
        match answer {
            Answer::Confirm => {
                self.deliver(n);
                self.lanes.end(n, &id(n), &a, Ended::Confirmed);
            }
            Answer::Refuse => {
                self.recording.push(n);
                self.lanes.end(n, &id(n), &a, Ended::Refused);
            }
            Answer::Fail => {
                self.failed.insert(n);
                self.lanes.end(n, &id(n), &a, Ended::Failed);
            }
            Answer::Lose => {
                // The channel is gone: whatever else it had is unknown too, as the caller learns
                // before it publishes again.
                for n in std::mem::take(&mut self.out).into_iter().chain([n]) {
                    self.lanes.unconfirmed(n, &self.of(n));
                    self.queue.insert(n);
                }
            }
        }
    }

    fn record(&mut self, n: u64, retry: bool) {
        let how = if retry {
            self.left.insert(n);
            Recorded::WillRetry
        } else {
            self.failed.insert(n);
            Recorded::Failed
        };
        self.lanes.recorded(&id(n), &self.of(n), how);
    }

    fn ask(&mut self, name: &str) {
        // The table shows everything that is pending, the tail's own rows as well.
        let mine: BTreeSet<u64> = self
            .queue
            .iter()
            .chain(&self.waiting)
            .chain(&self.out)
            .chain(&self.recording)
            .copied()
            .collect();
        let pending: Vec<_> = self
            .left
            .union(&mine)
            .copied()
            .filter(|n| self.names[n] == name)
            .map(|n| held(n, name))
            .collect();
        let in_tail = |k: &RowKey| matches!(k.id, RowId::UInt(n) if mine.contains(&n));
        let answer = self.lanes.poller_asks(&pending, in_tail, self.now);
        self.granted = pending
            .into_iter()
            .zip(answer)
            .filter(|(_, y)| *y)
            .map(|(r, _)| r)
            .collect();
    }

    fn done(&mut self, well: bool) {
        let rows = std::mem::take(&mut self.granted);
        for row in rows.iter().filter(|_| well) {
            let RowId::UInt(n) = row.key.id else {
                panic!("ids are numbers")
            };
            self.hand(n);
            self.deliver(n);
            self.left.remove(&n);
        }
        self.lanes.poller_done(&rows, self.now);
        self.look(false);
    }

    fn look(&mut self, all: bool) {
        for check in self.lanes.checks(100, all) {
            for id in &check.ids {
                let open = matches!(id, RowId::UInt(n) if self.left.contains(n));
                let found = if open { Found::Open } else { Found::Final };
                self.lanes.found(&check.aggregate, id, found, self.now);
            }
        }
    }

    /// Everything goes well from now on.
    fn finish(&mut self) {
        for _ in 0..1000 {
            while let Some(n) = self.out.first().copied() {
                self.out.remove(0);
                self.answer(n, Answer::Confirm);
                self.pump();
            }
            while let Some(n) = self.recording.pop() {
                self.record(n, false);
                self.pump();
            }
            for name in ["0", "1", "2"] {
                self.step(&Step::Done(true));
                self.ask(name);
                self.step(&Step::Done(true));
            }
            self.step(&Step::Look);
            if self.left.is_empty() && self.waiting.is_empty() && self.out.is_empty() {
                break;
            }
        }
    }

    /// Pairs delivered in the wrong order.
    fn inversions(&self) -> u64 {
        let mut count = 0;
        for (when, a) in &self.delivered {
            let later = self.delivered.range(when + 1..).map(|(_, b)| b);
            let wrong = later
                .filter(|b| *b < a && self.names[b] == self.names[a])
                .count();
            count += u64::try_from(wrong).unwrap();
        }
        count
    }
}

fn run(ordering: Ordering, steps: &[Step]) {
    let mut world = World::new(ordering);
    for step in steps {
        world.step(step);
    }
    world.finish();
    let read: BTreeSet<u64> = (1..world.next).collect();
    let ended: BTreeSet<u64> = world
        .delivered
        .values()
        .chain(&world.failed)
        .copied()
        .collect();
    assert_eq!(read, ended, "every row is delivered or failed");
    assert!(
        world.lanes.lanes.is_empty(),
        "nothing is remembered of what is over"
    );
    assert_eq!(world.lanes.waiting, 0);
    assert_eq!(world.lanes.held(TableIdx(0)), 0);
    if ordering == Ordering::Strict {
        assert_eq!(world.inversions(), 0);
    }
    assert!(
        world.inversions() <= world.overtaken,
        "every overtaking is counted"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(1000), ..ProptestConfig::default() })]

    #[test]
    fn strict_order_holds_to_the_letter(steps in prop::collection::vec(step(), 1..80)) {
        run(Ordering::Strict, &steps);
    }

    #[test]
    fn aggregate_order_holds_up_to_counted_overtakings(
        steps in prop::collection::vec(step(), 1..80)
    ) {
        run(Ordering::Aggregate, &steps);
    }
}
