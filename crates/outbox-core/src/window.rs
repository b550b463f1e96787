//! The rows in flight, and the position that may be stored.
//!
//! Groups stand in the order in which they were read. Only a position behind which nothing is
//! unsettled is ever stored: the low watermark, the end of the last group of which it and every
//! earlier one are settled. Settled groups melt into their predecessor at once, so memory follows
//! the unsettled rows, however long one of them stays open.

use std::collections::{BTreeMap, HashMap};

use crate::layout::TableLayout;
use crate::position::Position;
use crate::row::TableIdx;

#[cfg(test)]
mod tests;

/// Names a row within one window; grows with every row, in the order of reading.
pub type RowSeq = u64;

/// Layout changes in order; `None` is "unknown from here on".
pub type LayoutChanges = Vec<(TableIdx, Option<TableLayout>)>;

/// Bounds of a window. One row is always admitted, whatever its weight.
#[derive(Clone, Copy, Debug)]
pub struct WindowLimits {
    /// Rows.
    pub rows: usize,
    /// Bytes, as [`crate::OutboxRow::weight`] counts them.
    pub bytes: usize,
}

/// A position that may be stored, with what is to be stored beside it.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The position.
    pub position: Position,
    /// Layouts that hold from there on, the last one of each table.
    pub layouts: LayoutChanges,
    through: u64,
}

/// Accounts for groups and rows. Every operation costs O(log n) for each row or group it names.
#[derive(Debug)]
pub struct Window {
    limits: WindowLimits,
    /// Groups with unsettled rows, by their number, each with the settled ones behind it.
    groups: BTreeMap<u64, Slot>,
    rows: HashMap<RowSeq, Row>,
    next_row: RowSeq,
    next_group: u64,
    /// End of the settled prefix.
    mark: Option<Position>,
    mark_group: u64,
    /// Number of the last group whose end was stored.
    stored_group: u64,
    /// Layout changes of the settled prefix that are not stored yet.
    layouts: Vec<(u64, TableIdx, Option<TableLayout>)>,
    used: Used,
    /// Rows set aside: unsettled, but not counted against the limits.
    aside: usize,
}

#[derive(Debug)]
struct Slot {
    end: Position,
    /// The last group that melted into this one (itself at first).
    last: u64,
    unsettled: usize,
    /// Unsettled rows whose settlement is on its way.
    presented: usize,
    layouts: Vec<(u64, TableIdx, Option<TableLayout>)>,
}

#[derive(Debug)]
struct Row {
    group: u64,
    weight: usize,
    presented: bool,
    aside: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Used {
    rows: usize,
    bytes: usize,
}

impl Window {
    /// An empty window behind `start`, which counts as stored.
    #[must_use]
    pub fn new(limits: WindowLimits, start: Option<Position>) -> Self {
        Self {
            limits,
            groups: BTreeMap::new(),
            rows: HashMap::new(),
            next_row: 0,
            next_group: 1,
            mark: start,
            mark_group: 0,
            stored_group: 0,
            layouts: Vec::new(),
            used: Used::default(),
            aside: 0,
        }
    }

    /// Adds a group with its unsettled rows, by weight; returns the number of its first row, the
    /// others follow. A group may overshoot the limits: admission is asked before, with
    /// [`Window::full`].
    pub fn push(
        &mut self,
        weights: impl IntoIterator<Item = usize>,
        layouts: LayoutChanges,
        end: Position,
    ) -> RowSeq {
        let (first, group) = (self.next_row, self.next_group);
        self.next_group += 1;
        for weight in weights {
            let row = Row {
                group,
                weight,
                presented: false,
                aside: false,
            };
            self.rows.insert(self.next_row, row);
            self.next_row += 1;
            self.used.rows += 1;
            self.used.bytes += weight;
        }
        let mut slot = Slot {
            end,
            last: group,
            unsettled: usize::try_from(self.next_row - first).unwrap_or(usize::MAX),
            presented: 0,
            layouts: Vec::new(),
        };
        slot.layouts
            .extend(layouts.into_iter().map(|(t, l)| (group, t, l)));
        if slot.unsettled == 0 {
            self.melt(group, slot);
        } else {
            self.groups.insert(group, slot);
        }
        first
    }

    /// Everything up to `end` was read, and none of it is ours.
    pub fn progress(&mut self, end: Position) {
        self.push([], Vec::new(), end);
    }

    /// Whether no further group is to be read now.
    #[must_use]
    pub fn full(&self) -> bool {
        self.used.rows >= self.limits.rows || self.used.bytes >= self.limits.bytes
    }

    /// Whether at most half of the limits is used.
    #[must_use]
    pub fn half_empty(&self) -> bool {
        self.used.rows <= self.limits.rows / 2 && self.used.bytes <= self.limits.bytes / 2
    }

    /// Rows counted against the limits.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.used.rows
    }

    /// Bytes counted against the limits.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.used.bytes
    }

    /// All unsettled rows, those set aside included.
    #[must_use]
    pub fn unsettled(&self) -> usize {
        self.rows.len()
    }

    /// Settles a row; false if it was settled before.
    pub fn settle(&mut self, seq: RowSeq) -> bool {
        let Some(row) = self.rows.remove(&seq) else {
            return false;
        };
        if row.aside {
            self.aside -= 1;
        } else {
            self.used.rows -= 1;
            self.used.bytes -= row.weight;
        }
        let Some(slot) = self.groups.get_mut(&row.group) else {
            return false;
        };
        slot.unsettled -= 1;
        slot.presented -= usize::from(row.presented);
        if slot.unsettled == 0
            && let Some(slot) = self.groups.remove(&row.group)
        {
            self.melt(row.group, slot);
        }
        true
    }

    /// Takes a row off the limits while it stays unsettled (its record is locked by somebody, or
    /// it is not visible yet). False where as many rows as the window has are aside already:
    /// then it keeps its place, so that the whole stays bounded.
    pub fn set_aside(&mut self, seq: RowSeq) -> bool {
        match self.rows.get_mut(&seq) {
            Some(row) if !row.aside && self.aside < self.limits.rows => {
                row.aside = true;
                self.aside += 1;
                self.used.rows -= 1;
                self.used.bytes -= row.weight;
                true
            }
            Some(row) => row.aside,
            None => false,
        }
    }

    /// Counts a row that was set aside against the limits again.
    pub fn bring_back(&mut self, seq: RowSeq) {
        if let Some(row) = self.rows.get_mut(&seq)
            && row.aside
        {
            row.aside = false;
            self.aside -= 1;
            self.used.rows += 1;
            self.used.bytes += row.weight;
        }
    }

    /// Says that the settlement of these rows is about to be recorded. What
    /// [`Window::checkpoint`] gives from now on presumes that it succeeds.
    pub fn present(&mut self, rows: impl IntoIterator<Item = RowSeq>) {
        self.set_presented(rows, true);
    }

    /// Takes [`Window::present`] back: these rows were not recorded.
    pub fn withdraw(&mut self, rows: impl IntoIterator<Item = RowSeq>) {
        self.set_presented(rows, false);
    }

    fn set_presented(&mut self, rows: impl IntoIterator<Item = RowSeq>, to: bool) {
        for seq in rows {
            if let Some(row) = self.rows.get_mut(&seq)
                && row.presented != to
                && let Some(slot) = self.groups.get_mut(&row.group)
            {
                row.presented = to;
                if to {
                    slot.presented += 1;
                } else {
                    slot.presented -= 1;
                }
            }
        }
    }

    /// The low watermark.
    #[must_use]
    pub fn low_watermark(&self) -> Option<&Position> {
        self.mark.as_ref()
    }

    /// The end of the last group that was read: where a reconnect of the same process goes on.
    #[must_use]
    pub fn read_end(&self) -> Option<&Position> {
        let last = self.groups.values().next_back().map(|slot| &slot.end);
        last.or(self.mark.as_ref())
    }

    /// The number that the next row will get.
    #[must_use]
    pub fn next_row(&self) -> RowSeq {
        self.next_row
    }

    /// A number that grows whenever the low watermark moves.
    #[must_use]
    pub fn mark_number(&self) -> u64 {
        self.mark_group
    }

    /// Whether the low watermark has moved since a position was stored.
    #[must_use]
    pub fn checkpoint_due(&self) -> bool {
        self.mark_group > self.stored_group
    }

    /// What may be stored together with the presented rows, if it is more than what was stored.
    #[must_use]
    pub fn checkpoint(&self) -> Option<Checkpoint> {
        let (mut position, mut through) = (self.mark.as_ref(), self.mark_group);
        let mut layouts: Vec<_> = self.layouts.iter().collect();
        for slot in self.groups.values() {
            if slot.unsettled != slot.presented {
                break;
            }
            (position, through) = (Some(&slot.end), slot.last);
            layouts.extend(&slot.layouts);
        }
        if through <= self.stored_group {
            return None;
        }
        Some(Checkpoint {
            position: position?.clone(),
            layouts: last_of_each(layouts),
            through,
        })
    }

    /// The checkpoint is stored, and the rows presented with it are settled.
    pub fn stored(&mut self, checkpoint: &Checkpoint) {
        self.stored_group = self.stored_group.max(checkpoint.through);
        let through = checkpoint.through;
        self.layouts.retain(|(group, ..)| *group > through);
    }

    /// Appends a settled group to its predecessor, or to the settled prefix.
    fn melt(&mut self, group: u64, slot: Slot) {
        let before = self.groups.range_mut(..group).next_back();
        let layouts = match before {
            Some((_, before)) => {
                (before.end, before.last) = (slot.end, slot.last);
                &mut before.layouts
            }
            None => {
                (self.mark, self.mark_group) = (Some(slot.end), slot.last);
                &mut self.layouts
            }
        };
        for change in slot.layouts {
            layouts.retain(|(_, table, _)| *table != change.1);
            layouts.push(change);
        }
    }
}

fn last_of_each(changes: Vec<&(u64, TableIdx, Option<TableLayout>)>) -> LayoutChanges {
    let mut last: LayoutChanges = Vec::new();
    for (_, table, layout) in changes {
        last.retain(|(t, _)| t != table);
        last.push((*table, layout.clone()));
    }
    last
}
