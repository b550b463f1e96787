//! The rows of one aggregate that the tail has.

use std::collections::VecDeque;

use super::Ended;
use super::hold::Hold;
use crate::row::RowId;
use crate::window::RowSeq;

#[derive(Debug, Default)]
pub(super) struct Lane {
    /// At the broker, in order.
    pub(super) out: VecDeque<Out>,
    /// Not yet handed over, in order.
    pub(super) rest: VecDeque<Rest>,
    /// One at a time until a row was confirmed.
    pub(super) slow: bool,
    /// Refused rows of the present hold, in order.
    pub(super) refused: Vec<RowSeq>,
    pub(super) hold: Option<Hold>,
}

#[derive(Debug)]
pub(super) struct Out {
    pub(super) seq: RowSeq,
    pub(super) id: RowId,
    /// Later rows that were confirmed before it.
    pub(super) overtaken: u64,
    /// Later rows whose answer was lost before it had one: they may have arrived.
    pub(super) perhaps: u64,
}

#[derive(Debug)]
pub(super) struct Rest {
    pub(super) seq: RowSeq,
    pub(super) id: RowId,
    pub(super) stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The caller has it and will ask.
    Queued,
    /// Waits to be woken.
    Waiting,
    /// As queued, but an earlier decision for its lane says that it is left.
    Doomed,
}

impl Lane {
    pub(super) fn hand_over(&mut self) {
        if let Some(row) = self.rest.pop_front() {
            let out = Out {
                seq: row.seq,
                id: row.id,
                overtaken: 0,
                perhaps: 0,
            };
            let at = self.out.partition_point(|o| o.seq < out.seq);
            self.out.insert(at, out);
        }
    }

    pub(super) fn take_rest(&mut self, seq: RowSeq) -> Option<Rest> {
        let at = self.rest.binary_search_by_key(&seq, |r| r.seq).ok()?;
        self.rest.remove(at)
    }

    /// Removes a row that was at the broker; returns how many overtakings came to light.
    pub(super) fn take_out(&mut self, seq: RowSeq, how: Ended) -> u64 {
        let Ok(at) = self.out.binary_search_by_key(&seq, |o| o.seq) else {
            return 0;
        };
        let own = self.out.remove(at).map_or(0, |o| o.overtaken + o.perhaps);
        if how != Ended::Confirmed {
            return if how == Ended::Refused { own } else { 0 };
        }
        for earlier in self.out.range_mut(..at) {
            earlier.overtaken += 1;
        }
        if self.out.is_empty() && self.hold.is_none() {
            self.slow = false;
        }
        let passed =
            self.refused.partition_point(|r| *r < seq) + self.rest.partition_point(|r| r.seq < seq);
        u64::try_from(passed).unwrap_or(u64::MAX)
    }
}
