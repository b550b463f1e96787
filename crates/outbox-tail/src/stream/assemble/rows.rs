//! Rows events of the open group.

use bytes::Bytes;
use outbox_core::binder::BindContext;
use outbox_core::ports::Deferral;
use outbox_core::{Aggregate, OutboxRow, RowId, RowKey, TableIdx};

use super::{Assembler, Fault, unreadable};
use crate::decode::{RowError, RowsEvent};
use crate::stream::event::{Change, RawEvent};
use crate::stream::tables::{Plan, Target};

/// The table id of the empty rows event that only ends a statement.
const DUMMY_TABLE: u64 = 0xff_ffff;

impl Assembler {
    pub(super) fn rows(&mut self, event: &RawEvent<'_>, change: Change) -> Result<(), Fault> {
        let Some(id) = event.table_id() else {
            return unreadable("malformed rows event");
        };
        if id == DUMMY_TABLE {
            return Ok(());
        }
        self.group_must_be_open()?;
        let Some(target) = self.tables.target(id) else {
            return unreadable(format!(
                "a rows event without a table map for table id {id}"
            ));
        };
        let Some(open) = &mut self.open else {
            return Ok(());
        };
        match target {
            Target::Other => open.foreign = true,
            Target::Own => open.own = true,
            Target::Signal => {
                // Only inserts are signals; what we fill in afterwards is an echo.
                open.signal |= change == Change::Insert;
                open.own |= change != Change::Insert;
                open.foreign |= change == Change::Insert;
            }
            Target::Outbox(table, plan) if change == Change::Insert => {
                open.foreign = true;
                return self.inserted(event, table, &plan);
            }
            Target::Outbox(table, plan) => {
                open.own = true;
                if open.holds(self.tables.idx(table)) {
                    return self.changed(event, change, table, &plan);
                }
            }
        }
        Ok(())
    }

    fn inserted(&mut self, event: &RawEvent<'_>, table: usize, plan: &Plan) -> Result<(), Fault> {
        let idx = self.tables.idx(table);
        if self.open.as_ref().is_some_and(|o| o.is_whole(idx)) {
            return Ok(());
        }
        let decoding = match plan {
            Ok(decoding) => decoding,
            Err((why, reason)) => return self.defer_table(table, *why, reason),
        };
        let rows = match RowsEvent::parse(event.kind, &Bytes::copy_from_slice(event.data)) {
            Ok(rows) => rows,
            Err(e) => return self.defer_table(table, Deferral::Undecodable, &e.to_string()),
        };
        let context = self.context();
        for row in decoding.rows(&rows, self.zone_offset) {
            match row {
                Ok(row) => {
                    let cells = row.after.unwrap_or_default();
                    match decoding.bind(&cells, context) {
                        Ok(row) => self.keep(table, row)?,
                        Err(e) => {
                            self.must_be_deferrable(table, &e.to_string())?;
                            let cells: Vec<_> = cells.into_iter().map(Some).collect();
                            let known = decoding.binder.identify(&cells);
                            self.defer_row(idx, known, Deferral::Undecodable);
                        }
                    }
                }
                Err(error) => {
                    self.must_be_deferrable(table, &error.to_string())?;
                    let (known, why) = match &error {
                        RowError::PartialImage(p) => (&p.after, Deferral::PartialImage),
                        RowError::Undecodable(p) => (&p.after, Deferral::Undecodable),
                        RowError::Malformed(_) => (&None, Deferral::Undecodable),
                    };
                    let known = known
                        .as_ref()
                        .and_then(|cells| decoding.binder.identify(cells));
                    self.defer_row(idx, known, why);
                }
            }
            if self.open.as_ref().is_some_and(|o| o.is_whole(idx)) {
                return Ok(());
            }
        }
        Ok(())
    }

    fn context(&self) -> BindContext {
        BindContext {
            commit_time: self
                .open
                .as_ref()
                .map(|o| o.committed_at.div_euclid(1_000_000)),
            zone_offset: self.zone_offset,
        }
    }

    fn keep(&mut self, table: usize, row: OutboxRow) -> Result<(), Fault> {
        let Some(open) = &mut self.open else {
            return Ok(());
        };
        open.insert(row);
        self.bounded(table)
    }

    fn bounded(&mut self, table: usize) -> Result<(), Fault> {
        if self
            .open
            .as_ref()
            .is_none_or(|o| o.bytes() <= self.max_bytes)
        {
            return Ok(());
        }
        self.must_be_deferrable(table, "a transaction is over tail.max_transaction_bytes")?;
        for other in 0..self.tables.len() {
            let idx = self.tables.idx(other);
            if self.open.as_ref().is_some_and(|o| o.holds(idx)) {
                self.must_be_deferrable(other, "a transaction is over tail.max_transaction_bytes")?;
            }
        }
        if let Some(open) = &mut self.open {
            open.oversized();
        }
        Ok(())
    }

    fn defer_row(
        &mut self,
        table: TableIdx,
        row: Option<(RowId, Option<Aggregate>)>,
        why: Deferral,
    ) {
        if let Some(open) = &mut self.open {
            open.defer_row(table, row, why);
        }
    }

    /// Updates and deletes of rows that this group itself inserted.
    fn changed(
        &mut self,
        event: &RawEvent<'_>,
        change: Change,
        table: usize,
        plan: &Plan,
    ) -> Result<(), Fault> {
        let idx = self.tables.idx(table);
        if change == Change::Delete && !self.tables.deferrable(table) {
            // Insert and delete at once is how tables without status columns are kept empty.
            return Ok(());
        }
        let decoding = match plan {
            Ok(decoding) => decoding,
            Err((why, reason)) => return self.give_up(table, *why, reason),
        };
        let rows = match RowsEvent::parse(event.kind, &Bytes::copy_from_slice(event.data)) {
            Ok(rows) => rows,
            Err(e) => return self.give_up(table, Deferral::Undecodable, &e.to_string()),
        };
        let context = self.context();
        for row in decoding.rows(&rows, self.zone_offset) {
            let (before, after, why) = match row {
                Ok(row) => {
                    let some = |cells: Vec<_>| cells.into_iter().map(Some).collect::<Vec<_>>();
                    (row.before.map(some), row.after, Deferral::Undecodable)
                }
                Err(RowError::PartialImage(p)) => (p.before, None, Deferral::PartialImage),
                Err(RowError::Undecodable(p)) => (p.before, None, Deferral::Undecodable),
                Err(RowError::Malformed(e)) => {
                    return self.give_up(table, Deferral::Undecodable, &e.to_string());
                }
            };
            let known = before.and_then(|cells| decoding.binder.identify(&cells));
            let Some(open) = &mut self.open else {
                return Ok(());
            };
            let Some((id, aggregate)) = known else {
                return self.give_up(table, why, "a change of it cannot be read");
            };
            let key = RowKey { table: idx, id };
            let Some(place) = open.find(&key) else {
                continue;
            };
            if change == Change::Delete {
                open.replace(place, None);
                continue;
            }
            match after.and_then(|cells| decoding.bind(&cells, context).ok()) {
                Some(row) => {
                    open.replace(place, Some(row));
                    self.bounded(table)?;
                }
                None => {
                    self.must_be_deferrable(table, "a change of a row cannot be read")?;
                    if let Some(open) = &mut self.open {
                        open.replace(place, None);
                        open.defer_row(idx, Some((key.id, aggregate)), why);
                    }
                }
            }
        }
        Ok(())
    }
}
