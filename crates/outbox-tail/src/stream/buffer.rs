//! The group that is being read: rows and deferrals, kept until its terminator says what they
//! are worth.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use outbox_core::gtid::Gtid;
use outbox_core::gtid::mariadb::DomainGtid;
use outbox_core::layout::TableLayout;
use outbox_core::ports::Deferral;
use outbox_core::{Aggregate, OutboxRow, RowId, RowKey, TableIdx};

use crate::group::Deferred;

/// Rows of one group that are deferred one by one; beyond it, the table as a whole is.
const MAX_DEFERRED: usize = 10_000;

/// A transaction in the making.
#[derive(Debug, Default)]
pub(crate) struct Open {
    /// `None` where the server gives no GTID.
    pub(crate) gtid: Option<Gtid>,
    /// The same on MariaDB.
    pub(crate) domain_gtid: Option<DomainGtid>,
    /// Commit time, microseconds since the epoch.
    pub(crate) committed_at: i64,
    /// The commit time is that of the commit, not of the statement.
    pub(crate) exact: bool,
    /// It has a terminator of its own; otherwise its first statement ends it.
    pub(crate) explicit: bool,
    /// Rows by order of insertion; `None` where one was taken back.
    rows: Vec<Option<OutboxRow>>,
    /// Where each row is; made when it is first needed.
    index: Option<HashMap<RowKey, usize>>,
    /// Tables of which rows were buffered.
    held: BTreeSet<TableIdx>,
    bytes: usize,
    deferred: Vec<Deferred>,
    /// Tables of which unknown rows are deferred.
    whole: BTreeMap<TableIdx, Deferral>,
    savepoints: Vec<Savepoint>,
    /// What rows were before they were replaced, for as long as there is a savepoint.
    undo: Vec<(usize, Option<OutboxRow>)>,
    pub(crate) layouts: Vec<(TableIdx, Option<TableLayout>)>,
    pub(crate) signal: bool,
    /// Something of ours was written.
    pub(crate) own: bool,
    /// Something else was written.
    pub(crate) foreign: bool,
}

#[derive(Debug)]
struct Savepoint {
    name: Vec<u8>,
    rows: usize,
    undo: usize,
    deferred: usize,
}

impl Open {
    pub(crate) fn new(gtid: Option<Gtid>, committed_at: i64, explicit: bool) -> Self {
        Self {
            gtid,
            committed_at,
            explicit,
            ..Self::default()
        }
    }

    /// Whether rows of this table were buffered.
    pub(crate) fn holds(&self, table: TableIdx) -> bool {
        self.held.contains(&table)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Rows of this table are left to the table as a whole; nothing more needs to be decoded.
    pub(crate) fn is_whole(&self, table: TableIdx) -> bool {
        self.whole.contains_key(&table)
    }

    pub(crate) fn insert(&mut self, row: OutboxRow) {
        self.bytes = self.bytes.saturating_add(row.weight());
        if let Some(index) = &mut self.index {
            index.insert(row.key.clone(), self.rows.len());
        }
        self.held.insert(row.key.table);
        self.rows.push(Some(row));
    }

    /// Where this row is, if it was inserted in this group and is still there.
    pub(crate) fn find(&mut self, key: &RowKey) -> Option<usize> {
        let rows = &self.rows;
        let index = self.index.get_or_insert_with(|| {
            let known =
                |(i, r): (usize, &Option<OutboxRow>)| r.as_ref().map(|r| (r.key.clone(), i));
            rows.iter().enumerate().filter_map(known).collect()
        });
        index.get(key).copied().filter(|i| rows[*i].is_some())
    }

    /// Replaces a row, or takes it back.
    pub(crate) fn replace(&mut self, place: usize, row: Option<OutboxRow>) {
        let weight = |r: &Option<OutboxRow>| r.as_ref().map_or(0, OutboxRow::weight);
        if let (Some(index), Some(row)) = (&mut self.index, &row) {
            index.insert(row.key.clone(), place);
        }
        self.bytes = self.bytes.saturating_add(weight(&row));
        let old = std::mem::replace(&mut self.rows[place], row);
        if self.savepoints.is_empty() {
            self.bytes = self.bytes.saturating_sub(weight(&old));
        } else {
            self.undo.push((place, old));
        }
    }

    /// Leaves one row to the table.
    pub(crate) fn defer_row(
        &mut self,
        table: TableIdx,
        row: Option<(RowId, Option<Aggregate>)>,
        why: Deferral,
    ) {
        if row.is_none() || self.deferred.len() >= MAX_DEFERRED {
            self.defer_table(table, why);
        } else {
            self.deferred.push(Deferred { table, row, why });
        }
    }

    /// Leaves unknown rows of a table to it. What is known of the others stays.
    pub(crate) fn defer_table(&mut self, table: TableIdx, why: Deferral) {
        self.whole.entry(table).or_insert(why);
    }

    /// Leaves all rows of a table to it, those included that are buffered.
    pub(crate) fn give_up(&mut self, table: TableIdx, why: Deferral) {
        self.defer_table(table, why);
        for row in self
            .rows
            .iter_mut()
            .chain(self.undo.iter_mut().map(|(_, r)| r))
        {
            if row.as_ref().is_some_and(|r| r.key.table == table) {
                *row = None;
            }
        }
    }

    /// Leaves all rows of this group to their tables, and forgets them.
    pub(crate) fn oversized(&mut self) {
        let tables: Vec<_> = self.rows.iter().flatten().map(|r| r.key.table).collect();
        for table in tables {
            self.whole.insert(table, Deferral::Oversized);
        }
        // Savepoints need no care any more: rows that are rolled back are not in the table.
        self.rows = Vec::new();
        self.undo = Vec::new();
        self.savepoints.clear();
        self.index = None;
        self.bytes = 0;
    }

    pub(crate) fn savepoint(&mut self, name: Vec<u8>) {
        // A savepoint of the same name replaces the earlier one.
        self.savepoints.retain(|s| s.name != name);
        self.savepoints.push(Savepoint {
            name,
            rows: self.rows.len(),
            undo: self.undo.len(),
            deferred: self.deferred.len(),
        });
    }

    /// Takes back what came after the savepoint. An unknown one was set before anything that
    /// concerns us was written: then everything came after it.
    pub(crate) fn rollback_to(&mut self, name: &[u8]) {
        let found = self.savepoints.iter().rposition(|s| s.name == name);
        let (rows, undo, deferred) = found.map_or((0, 0, 0), |i| {
            let s = &self.savepoints[i];
            (s.rows, s.undo, s.deferred)
        });
        self.savepoints.truncate(found.map_or(0, |i| i + 1));
        while self.undo.len() > undo
            && let Some((place, old)) = self.undo.pop()
        {
            self.rows[place] = old;
        }
        self.rows.truncate(rows);
        self.deferred.truncate(deferred);
        self.index = None;
        let kept = self.rows.iter().chain(self.undo.iter().map(|(_, r)| r));
        self.bytes = kept.flatten().map(OutboxRow::weight).sum();
    }

    /// The rows that are left, and everything that is left to tables.
    pub(crate) fn finish(self) -> (Vec<OutboxRow>, Vec<Deferred>) {
        let rows = self.rows.into_iter().flatten().collect();
        let mut deferred = self.deferred;
        deferred.extend(self.whole.into_iter().map(|(table, why)| Deferred {
            table,
            row: None,
            why,
        }));
        (rows, deferred)
    }
}
