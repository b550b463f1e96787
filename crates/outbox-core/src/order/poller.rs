//! The other side of holds: the poller takes, returns and finishes what was left to the table.

use super::{Aggregate, Duration, HashSet, HeldRow, Kept, Lanes, Many, RowId, RowKey, TableIdx};
use crate::ports::{Behind, Recorded};

/// Rows that the poller had and the tail has not read yet, remembered so that the tail looks at
/// them before it publishes them again.
const ELSEWHERE: usize = 16_384;

/// What to look up about one held aggregate.
#[derive(Clone, Debug)]
pub struct Check {
    /// The aggregate.
    pub aggregate: Aggregate,
    /// Ids that were left behind.
    pub ids: Vec<RowId>,
    /// More than the ids: everything that remains of the aggregate is to be read again.
    pub many: bool,
}

/// How a held row was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nobody will publish it any more.
    Final,
    /// Still to be delivered.
    Open,
    /// Not visible.
    Absent,
}

impl Lanes {
    /// Holds an aggregate of which the table keeps rows that are not all known.
    pub fn hold_many(&mut self, aggregate: &Aggregate) {
        if self.unordered(aggregate.table) {
            return;
        }
        let room = self.limits.held_aggregates;
        if (self.lane(aggregate).hold.is_some() || self.new_hold(aggregate, room))
            && let Some(hold) = self.lanes.get_mut(aggregate).and_then(|l| l.hold.as_mut())
        {
            hold.many = Many::Yes;
            self.news.insert(hold.number);
        }
        self.tell(aggregate);
    }

    /// Holds an aggregate of which a row was attempted before the start.
    pub fn hold_attempted(&mut self, aggregate: &Aggregate, id: RowId) {
        self.hold_many(aggregate);
        if self.unordered(aggregate.table) {
            return;
        }
        self.keep(aggregate, id.clone(), Kept::Left, true);
        self.attempted(aggregate, &id);
    }

    fn attempted(&mut self, aggregate: &Aggregate, id: &RowId) {
        let hold = self.lanes.get_mut(aggregate).and_then(|l| l.hold.as_mut());
        if let Some(kept) = hold.and_then(|h| h.ids.get_mut(id)) {
            kept.attempted = true;
        }
        self.tell(aggregate);
    }

    /// Holds an aggregate for a row that the stream passed over.
    pub fn hold_row(&mut self, aggregate: &Aggregate, id: RowId) {
        if !self.unordered(aggregate.table) {
            self.keep(aggregate, id, Kept::Left, false);
            self.leave_waiting(aggregate);
        }
    }

    /// What a restart has to be told, as the table does not show it: held aggregates of which no
    /// row was attempted, and tables that are held. A table with more than `limit` of them is
    /// named as a whole. In order.
    #[must_use]
    pub fn behind(&self, limit: usize) -> Vec<Behind> {
        let mut behind = Vec::new();
        for (table, n) in self.tables.iter().zip(0..) {
            let of_table = |a: &&Aggregate| a.table == TableIdx(n);
            let untold = self.untold.iter().filter_map(|n| self.holds.get(n));
            let untold: Vec<_> = untold.filter(of_table).take(limit + 1).collect();
            if table.unknown.is_some() || table.untracked || untold.len() > limit {
                behind.push(Behind::Table(TableIdx(n)));
            } else {
                behind.extend(untold.into_iter().cloned().map(Behind::Aggregate));
            }
        }
        behind.sort_unstable();
        behind
    }

    /// The ledger recorded the verdict on a refused row.
    pub fn recorded(&mut self, id: &RowId, aggregate: &Aggregate, how: Recorded) {
        let stays = match how {
            Recorded::Busy => return,
            Recorded::WillRetry => true,
            Recorded::Failed => self.failed_blocks(aggregate.table),
            Recorded::Sent | Recorded::Gone => false,
        };
        let hold = self.lanes.get_mut(aggregate).and_then(|l| l.hold.as_mut());
        let Some(hold) = hold else {
            return;
        };
        let number = hold.number;
        if stays {
            if let Some(kept) = hold.ids.get_mut(id) {
                kept.kept = Kept::Left;
            }
            self.attempted(aggregate, id);
            self.news.insert(number);
            self.leave_waiting(aggregate);
        } else {
            hold.ids.remove(id);
            self.tell(aggregate);
            self.tidy(aggregate);
        }
    }

    /// The poller asks for rows, in the order in which it would publish them. `in_tail` says
    /// whether the tail itself has a row unsettled. Answers whether each is the poller's.
    pub fn poller_asks(
        &mut self,
        rows: &[HeldRow],
        in_tail: impl Fn(&RowKey) -> bool,
        now: Duration,
    ) -> Vec<bool> {
        let mut refused: HashSet<&Aggregate> = HashSet::new();
        let mut answer = Vec::with_capacity(rows.len());
        for row in rows {
            let granted = if self.unordered(row.aggregate.table) {
                !in_tail(&row.key)
            } else if refused.contains(&row.aggregate) || in_tail(&row.key) {
                // What comes behind a row of the tail's must not be published before it.
                refused.insert(&row.aggregate);
                false
            } else {
                let granted = self.grant(row, now);
                if !granted {
                    refused.insert(&row.aggregate);
                }
                granted
            };
            answer.push(granted);
        }
        answer
    }

    fn grant(&mut self, row: &HeldRow, now: Duration) -> bool {
        let lane = self.lane(&row.aggregate);
        let doomed = lane.rest.iter().any(|r| r.stage == super::Stage::Doomed);
        let (busy, known) = (
            !lane.out.is_empty() || doomed,
            lane.hold
                .as_ref()
                .is_some_and(|h| h.ids.contains_key(&row.key.id)),
        );
        // A row that the tail does not have is one that was left behind, whoever did it: it holds
        // its aggregate from now on, so that its turn comes once the broker has answered for the
        // rows on their way.
        let kept = if busy { Kept::Left } else { Kept::Poller };
        self.keep(&row.aggregate, row.key.id.clone(), kept, !known);
        let until = now + self.limits.wait;
        if let Some(hold) = self
            .lanes
            .get_mut(&row.aggregate)
            .and_then(|l| l.hold.as_mut())
        {
            hold.handover_until = until;
        }
        // Rows that wait already (one at a time) wait behind the hold now, for a bounded time.
        self.start_waiting(&row.aggregate, until);
        self.tidy(&row.aggregate);
        !busy
    }

    fn start_waiting(&mut self, aggregate: &Aggregate, until: Duration) {
        if let Some(lane) = self.lanes.get_mut(aggregate)
            && !lane.rest.is_empty()
            && let Some(hold) = lane.hold.as_mut()
            && hold.wait_until.is_none()
        {
            hold.wait_until = Some(until);
            self.deadlines.push_back((until, aggregate.clone()));
        }
    }

    /// The poller is done with rows, one way or the other: they are to be looked up.
    pub fn poller_done(&mut self, rows: &[HeldRow], now: Duration) {
        let until = now + self.limits.wait;
        for row in rows {
            let hold = self
                .lanes
                .get_mut(&row.aggregate)
                .and_then(|l| l.hold.as_mut());
            if let Some(hold) = hold
                && let Some(kept) = hold.ids.get_mut(&row.key.id)
                && kept.kept == Kept::Poller
            {
                kept.kept = Kept::Returned;
                hold.handover_until = until;
                self.due.insert(hold.number);
            }
        }
    }

    /// Held aggregates whose rows are the table's to deliver, at most `limit`: first those with
    /// news, then, if `all`, others in turn.
    pub fn left_behind(&mut self, limit: usize, all: bool) -> Vec<Aggregate> {
        let mut found = Vec::new();
        while found.len() < limit
            && let Some(number) = self.news.pop_first()
        {
            found.extend(self.holds.get(&number).cloned());
        }
        if all && found.len() < limit {
            let seen: HashSet<_> = found.iter().cloned().collect();
            let others = turn(&self.holds, &mut self.told, limit - found.len());
            found.extend(others.into_iter().filter(|a| !seen.contains(a)));
        }
        let left = |a: &Aggregate| {
            let hold = self.lanes.get(a).and_then(|l| l.hold.as_ref());
            hold.is_some_and(super::Hold::left_behind)
        };
        found.retain(left);
        found
    }

    /// Whether [`Lanes::left_behind`] has news.
    #[must_use]
    pub fn has_news(&self) -> bool {
        !self.news.is_empty()
    }

    /// Whether rows came back from the poller and are to be looked up at once.
    #[must_use]
    pub fn check_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// What to look up next, at most `limit` aggregates: those that came back from the poller,
    /// then, if `all`, others in turn.
    pub fn checks(&mut self, limit: usize, all: bool) -> Vec<Check> {
        let mut numbers = Vec::new();
        while numbers.len() < limit
            && let Some(number) = self.due.pop_first()
        {
            numbers.extend(self.holds.get(&number).cloned());
        }
        if all && numbers.len() < limit {
            let others = turn(&self.holds, &mut self.checked, limit - numbers.len());
            let seen: HashSet<_> = numbers.iter().cloned().collect();
            numbers.extend(others.into_iter().filter(|a| !seen.contains(a)));
        }
        numbers.into_iter().filter_map(|a| self.check(a)).collect()
    }

    fn check(&mut self, aggregate: Aggregate) -> Option<Check> {
        let hold = self.lanes.get_mut(&aggregate)?.hold.as_mut()?;
        let many = hold.many != Many::No;
        if many {
            hold.many = Many::Reading;
        }
        let kept = hold.ids.iter().filter(|(_, k)| k.kept != Kept::Recording);
        let ids: Vec<_> = kept.map(|(id, _)| id.clone()).collect();
        (many || !ids.is_empty()).then_some(Check {
            aggregate,
            ids,
            many,
        })
    }

    /// A held id was looked up.
    pub fn found(&mut self, aggregate: &Aggregate, id: &RowId, found: Found, now: Duration) {
        let absent = self.limits.absent;
        let hold = self.lanes.get_mut(aggregate).and_then(|l| l.hold.as_mut());
        let Some(kept) = hold.and_then(|h| h.ids.get_mut(id)) else {
            return;
        };
        let over = match found {
            Found::Final => true,
            Found::Open => {
                kept.absent_since = None;
                if kept.kept == Kept::Returned {
                    // The head did not get through: what waits behind it is left.
                    kept.kept = Kept::Left;
                    self.leave_waiting(aggregate);
                }
                return;
            }
            Found::Absent => now.saturating_sub(*kept.absent_since.get_or_insert(now)) >= absent,
        };
        if over {
            self.resolve(aggregate, id);
        }
    }

    fn resolve(&mut self, aggregate: &Aggregate, id: &RowId) {
        let hold = self.lanes.get_mut(aggregate).and_then(|l| l.hold.as_mut());
        let Some(kept) = hold.and_then(|h| h.ids.remove(id)) else {
            return;
        };
        if kept.unread {
            self.remember(RowKey {
                table: aggregate.table,
                id: id.clone(),
            });
        }
        self.tell(aggregate);
        self.tidy(aggregate);
    }

    fn remember(&mut self, key: RowKey) {
        let (set, queue) = &mut self.elsewhere;
        if set.insert(key.clone()) {
            queue.push_back(key);
            if queue.len() > ELSEWHERE
                && let Some(oldest) = queue.pop_front()
            {
                set.remove(&oldest);
            }
        }
    }

    /// Whether somebody else had the row before the tail read it: look before publishing.
    #[must_use]
    pub fn was_elsewhere(&self, key: &RowKey) -> bool {
        self.elsewhere.0.contains(key)
    }

    /// What remains of an aggregate whose hold said "many" was read again: `ids` without those
    /// that the tail itself has, or `None` where the answer was cut off.
    pub fn remaining(&mut self, aggregate: &Aggregate, ids: Option<Vec<RowId>>) {
        let limit = self.limits.ids_per_hold;
        let hold = self.lanes.get_mut(aggregate).and_then(|l| l.hold.as_mut());
        let Some(hold) = hold.filter(|h| h.many == Many::Reading) else {
            return;
        };
        hold.many = if ids.is_some() { Many::No } else { Many::Yes };
        for id in ids.into_iter().flatten() {
            if !hold.ids.contains_key(&id) {
                hold.keep(id, Kept::Left, true, limit);
            }
        }
        self.tell(aggregate);
        self.tidy(aggregate);
    }

    /// A look-up could not be done; the holds it was for are looked up again.
    pub fn check_failed(&mut self, checks: &[Check]) {
        for check in checks {
            let hold = self
                .lanes
                .get_mut(&check.aggregate)
                .and_then(|l| l.hold.as_mut());
            if let Some(hold) = hold {
                if hold.many == Many::Reading {
                    hold.many = Many::Yes;
                }
                self.due.insert(hold.number);
            }
        }
    }

    /// Whether any aggregate is held.
    #[must_use]
    pub fn any_held(&self) -> bool {
        !self.holds.is_empty()
    }
}

/// The next `limit` holds after the cursor, around.
fn turn(
    holds: &std::collections::BTreeMap<u64, Aggregate>,
    cursor: &mut u64,
    limit: usize,
) -> Vec<Aggregate> {
    let around = holds
        .range(*cursor..)
        .chain(holds.range(..*cursor))
        .take(limit);
    let found: Vec<_> = around.map(|(n, a)| (*n, a.clone())).collect();
    if let Some((last, _)) = found.last() {
        *cursor = last + 1;
    }
    found.into_iter().map(|(_, a)| a).collect()
}
