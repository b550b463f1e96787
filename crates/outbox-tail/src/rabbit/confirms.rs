//! Who was confirmed: a pure state machine over what lapin's confirms show.
//!
//! The broker sends a return before the ack of the same message, but lapin (4.12) keeps returns
//! in a queue and attaches the front one to whichever confirm it completes next, and it completes
//! the confirms of a `multiple` ack in the order of a hash map. So an ack without a return does
//! not prove that its message was routed: its return may hang on any other confirm. What holds:
//!
//! 1. A return enters the queue before its own confirm completes. So when a confirm completes
//!    without a return, the queue was empty, and its own return (if any) was taken by a confirm
//!    that completed earlier.
//! 2. When a confirm carries the return of another message, its own may still be queued. Once a
//!    confirm that completed later carries none, the queue was empty in between.
//! 3. Once every confirm has completed the queue is empty: since it was last empty, each return
//!    in it was followed by the completion of its own confirm, which took one.
//!
//! Confirms are looked at in **passes**. A pass looks at every outstanding confirm that had
//! completed before the pass began (publish calls that have not returned included); all that
//! completed before a confirm that was seen in pass `n` is therefore seen by the end of pass
//! `n + 1`. Hence the rules, at the end of pass `p`:
//!
//! * a confirm without a return, seen in pass `q`, settles when `q < p`;
//! * a confirm with another's return, seen in pass `q`, settles when one without a return was
//!   seen in a pass `z` with `q + 2 <= z < p` (one seen in `q + 1` may have completed before it);
//! * when nothing is outstanding everything settles;
//! * what has been returned settles as soon as its own confirm was seen.
//!
//! Whoever drives this runs passes while [`Confirms::wants_pass`], and may hold back new
//! messages while [`Confirms::held_since`] grows old, so that nothing is outstanding for once: a
//! stream of nothing but unroutable messages could otherwise keep the queue from ever being
//! seen empty.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::VecDeque;
use std::time::Instant;

/// Place of a message in the ledger; free for reuse once its verdict was given.
pub(super) type Slot = usize;

/// Identifies a message in a return: a hash of its table and id. Two messages with one key are
/// both taken as returned.
pub(super) type Key = u64;

/// What became of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Confirmed,
    Nacked,
    Returned(String),
}

#[derive(Debug)]
struct Entry {
    key: Key,
    /// The next entry with the same key.
    twin: Option<Slot>,
    acked: Option<bool>,
    returned: Option<String>,
}

/// A confirm that carried another message's return.
#[derive(Debug)]
struct Foreign {
    slot: Slot,
    pass: u64,
    since: Instant,
}

#[derive(Debug, Default)]
pub(super) struct Confirms {
    entries: Vec<Option<Entry>>,
    free: Vec<Slot>,
    by_key: HashMap<Key, Slot>,
    outstanding: usize,
    pass: u64,
    /// The latest pass but this one in which a confirm without a return was seen.
    plain: u64,
    plain_now: bool,
    /// Seen in this pass.
    fresh: Vec<Slot>,
    /// Seen in the pass before.
    ripe: Vec<Slot>,
    foreign: VecDeque<Foreign>,
}

impl Confirms {
    /// A message is about to be handed to lapin.
    pub(super) fn submit(&mut self, key: Key) -> Slot {
        let slot = self.free.pop().unwrap_or(self.entries.len());
        let entry = Entry {
            key,
            twin: self.by_key.insert(key, slot),
            acked: None,
            returned: None,
        };
        if slot == self.entries.len() {
            self.entries.push(Some(entry));
        } else {
            self.entries[slot] = Some(entry);
        }
        self.outstanding += 1;
        slot
    }

    pub(super) fn begin_pass(&mut self) {
        self.pass += 1;
    }

    /// The confirm of `slot` has completed, carrying this return.
    pub(super) fn seen(
        &mut self,
        slot: Slot,
        acked: bool,
        returned: Option<(Key, String)>,
        now: Instant,
    ) {
        let Some(entry) = self.entries.get_mut(slot).and_then(Option::as_mut) else {
            return;
        };
        if entry.acked.replace(acked).is_some() {
            return;
        }
        let own = returned.as_ref().is_none_or(|(key, _)| *key == entry.key);
        self.outstanding -= 1;
        if own {
            self.fresh.push(slot);
        } else {
            self.foreign.push_back(Foreign {
                slot,
                pass: self.pass,
                since: now,
            });
        }
        match returned {
            None => self.plain_now = true,
            Some((key, reason)) => self.mark(key, &reason),
        }
    }

    /// All messages with that key count as returned. None may be left: the second return of two
    /// messages with one key comes after both have settled.
    fn mark(&mut self, key: Key, reason: &str) {
        let mut next = self.by_key.get(&key).copied();
        while let Some(entry) = next.and_then(|slot| self.entries[slot].as_mut()) {
            entry.returned = Some(reason.to_owned());
            next = entry.twin;
        }
    }

    /// Everything that had completed when the pass began was shown. Verdicts go to `out`.
    pub(super) fn end_pass(&mut self, out: &mut Vec<(Slot, Verdict)>) {
        let quiet = self.outstanding == 0;
        for slot in std::mem::take(&mut self.ripe) {
            self.settle(slot, out);
        }
        for slot in std::mem::take(&mut self.fresh) {
            if quiet || self.is_returned(slot) {
                self.settle(slot, out);
            } else {
                self.ripe.push(slot);
            }
        }
        let mut held = std::mem::take(&mut self.foreign);
        held.retain(|f| {
            let free = quiet || self.is_returned(f.slot) || f.pass + 2 <= self.plain;
            if free {
                self.settle(f.slot, out);
            }
            !free
        });
        self.foreign = held;
        if std::mem::take(&mut self.plain_now) {
            self.plain = self.pass;
        }
    }

    fn is_returned(&self, slot: Slot) -> bool {
        self.entries[slot]
            .as_ref()
            .is_some_and(|e| e.returned.is_some())
    }

    fn settle(&mut self, slot: Slot, out: &mut Vec<(Slot, Verdict)>) {
        let Some(entry) = self.entries[slot].take() else {
            return;
        };
        self.unlink(slot, &entry);
        self.free.push(slot);
        let verdict = match (entry.returned, entry.acked) {
            (Some(reason), _) => Verdict::Returned(reason),
            (None, Some(true)) => Verdict::Confirmed,
            (None, _) => Verdict::Nacked,
        };
        out.push((slot, verdict));
    }

    fn unlink(&mut self, slot: Slot, entry: &Entry) {
        let Some(first) = self.by_key.get(&entry.key).copied() else {
            return;
        };
        if first == slot {
            match entry.twin {
                Some(twin) => self.by_key.insert(entry.key, twin),
                None => self.by_key.remove(&entry.key),
            };
            return;
        }
        let mut at = first;
        while let Some(other) = self.entries[at].as_mut() {
            match other.twin {
                Some(twin) if twin == slot => {
                    other.twin = entry.twin;
                    return;
                }
                Some(twin) => at = twin,
                None => return,
            }
        }
    }

    /// Whether another pass, even one that sees nothing, brings something nearer to settling.
    pub(super) fn wants_pass(&self) -> bool {
        !self.ripe.is_empty()
            || self
                .foreign
                .back()
                .is_some_and(|last| last.pass == self.pass)
            || self
                .foreign
                .front()
                .is_some_and(|first| self.plain == self.pass && first.pass + 2 <= self.plain)
    }

    /// Since when the oldest confirm is held that no pass alone can free.
    pub(super) fn held_since(&self) -> Option<Instant> {
        self.foreign.front().map(|f| f.since)
    }
}
