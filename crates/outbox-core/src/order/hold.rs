//! What keeps an aggregate away from the fast path: the rows of it that were passed over.

use std::collections::HashMap;
use std::time::Duration;

use crate::row::RowId;

/// Why an id is in a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// The tail's own verdict on it is being recorded; nothing is left to the table yet.
    Recording,
    /// Left to the table.
    Left,
    /// The poller has it now.
    Poller,
    /// The poller had it and says that it is done; how it ended is to be looked up.
    Returned,
}

#[derive(Debug)]
pub(super) struct KeptId {
    pub(super) kept: Kept,
    /// Never read from the binlog so far: the tail may meet it later.
    pub(super) unread: bool,
    /// The table shows that it was attempted, so that it holds after a restart too.
    pub(super) attempted: bool,
    /// Since when it has not been visible.
    pub(super) absent_since: Option<Duration>,
}

/// Whether ids are missing from a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Many {
    No,
    Yes,
    /// Being read again; ids that do not fit meanwhile make it `Yes` again.
    Reading,
}

#[derive(Debug)]
pub(super) struct Hold {
    pub(super) number: u64,
    pub(super) ids: HashMap<RowId, KeptId>,
    pub(super) many: Many,
    /// Until then new rows wait, as the poller is delivering those before them.
    pub(super) handover_until: Duration,
    /// When the rows that wait are left after all.
    pub(super) wait_until: Option<Duration>,
}

impl Hold {
    pub(super) fn new(number: u64) -> Self {
        Self {
            number,
            ids: HashMap::new(),
            many: Many::No,
            handover_until: Duration::ZERO,
            wait_until: None,
        }
    }

    /// Adds an id, or only "many" where there is no room.
    pub(super) fn keep(&mut self, id: RowId, kept: Kept, unread: bool, limit: usize) {
        if let Some(known) = self.ids.get_mut(&id) {
            // What the poller has stays its own.
            known.unread &= unread;
            if known.kept != Kept::Poller || kept != Kept::Left {
                known.kept = kept;
            }
        } else if self.ids.len() < limit {
            let id_kept = KeptId {
                kept,
                unread,
                attempted: false,
                absent_since: None,
            };
            self.ids.insert(id, id_kept);
        } else {
            self.many = Many::Yes;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty() && self.many == Many::No
    }

    /// Whether rows of it are the table's to deliver.
    pub(super) fn left_behind(&self) -> bool {
        self.many != Many::No || self.ids.values().any(|k| k.kept != Kept::Recording)
    }

    /// Whether what is left is nowhere but in here: no row of it shows in the table that it holds.
    pub(super) fn untold(&self) -> bool {
        self.left_behind() && !self.ids.values().any(|k| k.attempted)
    }

    /// Whether a row that arrives now may wait instead of being left.
    pub(super) fn may_wait(&self, id: &RowId, now: Duration) -> bool {
        self.many == Many::No
            && !self.ids.contains_key(id)
            && (now < self.handover_until || !self.left_behind())
    }
}
