//! The ledger against a model of lapin: the same queue of returns, the same completion order, and
//! completions that happen between any two looks.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use proptest::prelude::*;

use super::{Confirms, Slot, Verdict};

/// lapin and the broker behind it.
#[derive(Default)]
struct Model {
    unroutable: BTreeSet<usize>,
    published: usize,
    routed_up_to: usize,
    pending: BTreeSet<usize>,
    returns: VecDeque<usize>,
    /// Completed: acked, and the return that hangs on it.
    done: BTreeMap<usize, (bool, Option<usize>)>,
    /// To be looked at: the waker has run, for a completion, or because the publish call
    /// returned, or because everything is looked at now and then.
    woken: Vec<usize>,
    /// To be completed next, one by one: the rest of a `multiple`.
    completing: VecDeque<(usize, bool)>,
}

impl Model {
    fn publish(&mut self, unroutable: bool) -> usize {
        let tag = self.published;
        self.published += 1;
        self.pending.insert(tag);
        if unroutable {
            self.unroutable.insert(tag);
        }
        tag
    }

    /// The broker routes the next message: a return reaches lapin's queue.
    fn route(&mut self) {
        if self.routed_up_to < self.published {
            if self.unroutable.contains(&self.routed_up_to) {
                self.returns.push_back(self.routed_up_to);
            }
            self.routed_up_to += 1;
        }
    }

    /// The broker acks or nacks: one tag, or all up to one, in an order of its own.
    fn answer(&mut self, pick: usize, multiple: bool, ack: bool, order: u64) {
        if !self.completing.is_empty() {
            return;
        }
        let able: Vec<usize> = self.pending.range(..self.routed_up_to).copied().collect();
        if able.is_empty() {
            return;
        }
        let last = pick % able.len();
        let mut tags = if multiple {
            able[..=last].to_vec()
        } else {
            vec![able[last]]
        };
        tags.sort_by_key(|t| (*t as u64 + 1).wrapping_mul(order | 1).rotate_left(17));
        self.completing = tags.into_iter().map(|t| (t, ack)).collect();
    }

    fn tick(&mut self, tick: &Tick) {
        match *tick {
            Tick::Route => self.route(),
            Tick::Answer(pick, multiple, ack, order) => self.answer(pick, multiple, ack, order),
            Tick::Complete => self.complete_one(),
        }
    }

    fn complete_one(&mut self) {
        if let Some((tag, ack)) = self.completing.pop_front() {
            self.pending.remove(&tag);
            let returned = self.returns.pop_front();
            self.done.insert(tag, (ack, returned));
            self.woken.push(tag);
        }
    }
}

/// What lapin and the broker do by themselves.
#[derive(Clone, Debug)]
enum Tick {
    Route,
    Answer(usize, bool, bool, u64),
    Complete,
}

#[derive(Clone, Debug)]
enum Step {
    Publish(bool),
    Tick(Tick),
    /// Wakers run for other reasons than a completion.
    Wake,
    /// A pass over the woken, and what happens between its looks.
    Pass(Vec<Vec<Tick>>),
}

fn tick() -> impl Strategy<Value = Tick> {
    prop_oneof![
        3 => Just(Tick::Route),
        2 => (any::<usize>(), any::<bool>(), prop::bool::weighted(0.9), any::<u64>())
            .prop_map(|(a, b, c, d)| Tick::Answer(a, b, c, d)),
        4 => Just(Tick::Complete),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any::<bool>().prop_map(Step::Publish),
        6 => tick().prop_map(Step::Tick),
        2 => Just(Step::Wake),
        3 => prop::collection::vec(prop::collection::vec(tick(), 0..6), 0..5).prop_map(Step::Pass),
    ]
}

/// Ledger, model, and the messages by slot.
struct Bench {
    ledger: Confirms,
    model: Model,
    slots: BTreeMap<usize, Slot>,
    by_slot: BTreeMap<Slot, usize>,
    seen: BTreeSet<usize>,
    nacked: BTreeSet<usize>,
    settled: BTreeMap<usize, Verdict>,
    /// Maps tags to keys; messages of one key count as returned together.
    keys: u64,
}

impl Bench {
    fn new(keys: u64) -> Self {
        Self {
            ledger: Confirms::default(),
            model: Model::default(),
            slots: BTreeMap::new(),
            by_slot: BTreeMap::new(),
            seen: BTreeSet::new(),
            nacked: BTreeSet::new(),
            settled: BTreeMap::new(),
            keys,
        }
    }

    fn key(&self, tag: usize) -> u64 {
        tag as u64 % self.keys
    }

    fn publish(&mut self, unroutable: bool) {
        let slot = self.ledger.submit(self.key(self.model.published));
        let tag = self.model.publish(unroutable);
        assert!(self.by_slot.insert(slot, tag).is_none(), "slot in use");
        self.slots.insert(tag, slot);
    }

    fn pass(&mut self, between: &[Vec<Tick>]) {
        let woken = std::mem::take(&mut self.model.woken);
        self.ledger.begin_pass();
        for (i, tag) in woken.into_iter().enumerate() {
            if let Some(&(acked, returned)) = self.model.done.get(&tag)
                && self.seen.insert(tag)
            {
                if !acked {
                    self.nacked.insert(tag);
                }
                let returned = returned.map(|r| (self.key(r), "NO_ROUTE".to_owned()));
                self.ledger
                    .seen(self.slots[&tag], acked, returned, Instant::now());
            }
            for tick in between.get(i).into_iter().flatten() {
                self.model.tick(tick);
            }
        }
        let mut out = Vec::new();
        self.ledger.end_pass(&mut out);
        for (slot, verdict) in out {
            let tag = self.by_slot.remove(&slot).unwrap();
            self.check(tag, &verdict);
            assert!(self.settled.insert(tag, verdict).is_none());
        }
    }

    fn check(&self, tag: usize, verdict: &Verdict) {
        let unroutable = self.model.unroutable.contains(&tag);
        match verdict {
            Verdict::Returned(_) if self.keys == u64::MAX => {
                assert!(unroutable, "{tag} was routed and counts as returned");
            }
            Verdict::Returned(_) => {}
            Verdict::Confirmed => {
                assert!(!unroutable, "{tag} was returned and counts as confirmed");
                assert!(!self.nacked.contains(&tag));
            }
            Verdict::Nacked => assert!(!unroutable && self.nacked.contains(&tag)),
        }
    }

    fn run(&mut self, steps: Vec<Step>) {
        for step in steps {
            match step {
                Step::Publish(unroutable) => self.publish(unroutable),
                Step::Tick(tick) => self.model.tick(&tick),
                Step::Wake => {
                    let waiting = self.model.pending.iter().copied();
                    self.model.woken.extend(waiting);
                }
                Step::Pass(between) => self.pass(&between),
            }
        }
    }

    fn answer_everything(&mut self) {
        while !self.model.pending.is_empty() {
            self.model.route();
            self.model.answer(usize::MAX, true, true, 7);
            self.model.complete_one();
        }
    }

    /// Passes as a driver runs them; they must end.
    fn passes(&mut self) {
        let mut most = 16;
        while !self.model.woken.is_empty() || self.ledger.wants_pass() {
            self.pass(&[]);
            most -= 1;
            assert!(most > 0, "passes never end");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_settled_wrongly_and_all_is_settled_once_all_is_answered(
        steps in prop::collection::vec(step(), 0..120),
    ) {
        let mut bench = Bench::new(u64::MAX);
        bench.run(steps);
        bench.answer_everything();
        bench.passes();
        prop_assert_eq!(bench.settled.len(), bench.model.published);
        for tag in &bench.model.unroutable {
            prop_assert!(matches!(bench.settled[tag], Verdict::Returned(_)));
        }
        prop_assert!(bench.ledger.by_key.is_empty());
    }

    #[test]
    fn messages_with_one_key_are_never_confirmed_in_place_of_each_other(
        steps in prop::collection::vec(step(), 0..120), keys in 1..6_u64,
    ) {
        let mut bench = Bench::new(keys);
        bench.run(steps);
        bench.answer_everything();
        bench.passes();
        prop_assert_eq!(bench.settled.len(), bench.model.published);
        prop_assert!(bench.ledger.by_key.is_empty());
    }

    /// After any history, routed messages that are published and answered one at a time free
    /// whatever is held, although one old message is never answered.
    #[test]
    fn a_trickle_of_traffic_frees_what_is_held_beside_a_stuck_message(
        steps in prop::collection::vec(step(), 0..80),
    ) {
        let mut bench = Bench::new(u64::MAX);
        bench.run(steps);
        let stuck = bench.model.published;
        bench.publish(false);
        while bench.model.pending.iter().any(|t| *t != stuck) || !bench.model.completing.is_empty() {
            bench.model.route();
            bench.model.complete_one();
            let pending: Vec<usize> = bench.model.pending.iter().copied().filter(|t| *t < stuck).collect();
            if !pending.is_empty() {
                bench.model.answer(pending.len() - 1, true, true, 3);
            }
        }
        bench.model.route();
        bench.passes();
        for _ in 0..3 {
            let tag = bench.model.published;
            bench.publish(false);
            bench.model.route();
            bench.model.completing.push_back((tag, true));
            bench.model.complete_one();
            bench.passes();
        }
        prop_assert_eq!(bench.settled.len(), bench.model.published - 1);
    }
}

#[test]
fn a_return_found_on_a_later_look_is_charged_to_its_own_message() {
    let mut ledger = Confirms::default();
    let (a, b) = (ledger.submit(1), ledger.submit(2));
    let _stuck = ledger.submit(3);
    let mut out = Vec::new();
    ledger.begin_pass();
    ledger.seen(b, true, None, Instant::now());
    ledger.end_pass(&mut out);
    assert!(out.is_empty() && ledger.wants_pass());
    ledger.begin_pass();
    ledger.seen(a, true, Some((2, "NO_ROUTE".into())), Instant::now());
    ledger.end_pass(&mut out);
    assert_eq!(out, [(b, Verdict::Returned("NO_ROUTE".into()))]);
    assert!(ledger.held_since().is_some(), "a may still be returned");
}

/// The confirm without a return was seen after the one that is held, and completed before it: it
/// says nothing about what was queued in between.
#[test]
fn a_plain_confirm_of_the_next_pass_does_not_free_a_held_one() {
    let mut bench = Bench::new(u64::MAX);
    bench.publish(false);
    bench.publish(true);
    bench.publish(true);
    let one = |tag| Tick::Answer(tag, false, true, 0);
    bench.model.woken = vec![0, 2];
    let mut between = vec![
        Tick::Route,
        one(0),
        Tick::Complete,
        Tick::Route,
        Tick::Route,
    ];
    between.extend([one(1), Tick::Complete]);
    bench.pass(&[between]);
    assert!(bench.seen.contains(&2) && !bench.seen.contains(&0));
    bench.passes();
    bench.passes();
    assert!(!bench.settled.contains_key(&2), "{:?}", bench.settled);
    bench.answer_everything();
    bench.passes();
    assert!(matches!(bench.settled[&2], Verdict::Returned(_)));
}
