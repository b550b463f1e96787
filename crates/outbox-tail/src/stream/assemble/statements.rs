//! Statements in the binlog: parts of transactions, changes of tables, XA.

use outbox_core::TableIdx;
use outbox_core::ports::Deferral;

use super::{Assembler, Fault, Step, unreadable};
use crate::group::Deferred;
use crate::stream::event::{self, RawEvent, Xid};
use crate::stream::sql::{self, Sql, Token};

/// Prepared XA transactions that are remembered, and rows of one that are named.
const MAX_PREPARED: usize = 10_000;
const MAX_PREPARED_ROWS: usize = 1_000;

impl Assembler {
    pub(super) fn statement(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        let Some(statement) = event::statement(event) else {
            return unreadable("malformed QUERY event");
        };
        let explicit = self.ensure_open(event).explicit;
        match sql::classify(&statement.sql) {
            Sql::Begin | Sql::XaStart => {
                self.ensure_open(event).explicit = true;
                return Ok(Step::Quiet);
            }
            Sql::Commit => return self.commit(event),
            Sql::Rollback => return self.rollback(event),
            Sql::Savepoint(name) => {
                self.ensure_open(event).savepoint(name);
                return Ok(Step::Quiet);
            }
            Sql::RollbackTo(name) => {
                self.ensure_open(event).rollback_to(&name);
                return Ok(Step::Quiet);
            }
            Sql::XaPart => return Ok(Step::Quiet),
            Sql::XaCommit(xid) => return self.xa_commit(event, xid),
            Sql::XaRollback(xid) => {
                if let Some(xid) = xid {
                    self.prepared.remove(&xid);
                }
                return self.commit(event);
            }
            Sql::Ddl(tokens) => self.definition(event, statement.db, &tokens),
            Sql::Insert(tokens) => self.logged_statement(statement.db, &tokens)?,
            Sql::Other => {}
        }
        self.ensure_open(event).foreign = true;
        if explicit {
            Ok(Step::Quiet)
        } else {
            self.commit(event)
        }
    }

    fn definition(&mut self, event: &RawEvent<'_>, db: &[u8], tokens: &[Token<'_>]) {
        for table in 0..self.tables.len() {
            if self.concerns(table, db, tokens) {
                self.tables.unprove(table);
                let idx = self.tables.idx(table);
                self.ensure_open(event).layouts.push((idx, None));
            }
        }
    }

    /// A statement in place of rows. What it did is not to be told from it; the table has it.
    fn logged_statement(&mut self, db: &[u8], tokens: &[Token<'_>]) -> Result<(), Fault> {
        for table in 0..self.tables.len() {
            if self.concerns(table, db, tokens) {
                self.defer_table(
                    table,
                    Deferral::Statement,
                    "a statement was logged, no rows",
                )?;
            }
        }
        Ok(())
    }

    fn concerns(&self, table: usize, db: &[u8], tokens: &[Token<'_>]) -> bool {
        let spec = self.tables.spec(table);
        sql::mentions(tokens, db, &spec.schema, &spec.table, self.tables.rule)
    }

    pub(super) fn xa_prepare(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        let Some((one_phase, xid)) = event::xa_prepare(event.data) else {
            return unreadable("malformed XA_PREPARE event");
        };
        self.group_must_be_open()?;
        if one_phase {
            return self.commit(event);
        }
        let open = self.take_open(event);
        let (rows, mut deferred) = open.finish();
        for row in rows {
            let place = (0..self.tables.len()).find(|t| self.tables.idx(*t) == row.key.table);
            if let Some(table) = place {
                self.must_be_deferrable(table, "its rows are in a prepared XA transaction")?;
            }
            deferred.push(Deferred {
                table: row.key.table,
                row: Some((row.key.id, Some(row.aggregate))),
                why: Deferral::Xa,
            });
        }
        if deferred.len() > MAX_PREPARED_ROWS {
            deferred = whole_tables(&deferred);
        }
        if self.prepared.len() < MAX_PREPARED {
            self.prepared.insert(xid, deferred);
        }
        Ok(Step::Boundary)
    }

    fn xa_commit(&mut self, event: &RawEvent<'_>, xid: Option<Xid>) -> Result<Step, Fault> {
        self.ensure_open(event).foreign = true;
        if let Some(known) = xid.and_then(|x| self.prepared.remove(&x)) {
            let open = self.ensure_open(event);
            for d in known {
                open.defer_row(d.table, d.row, Deferral::Xa);
            }
            return self.commit(event);
        }
        // Prepared before we began to read: its rows may be of any table. One without status
        // columns was stopped at when the transaction was prepared.
        for table in 0..self.tables.len() {
            if self.tables.deferrable(table) {
                self.defer_table(table, Deferral::Xa, "")?;
            }
        }
        self.commit(event)
    }

    fn rollback(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        let layouts = self.take_open(event).layouts;
        if layouts.is_empty() {
            return Ok(Step::Boundary);
        }
        Ok(Step::Group(Box::new(self.group(
            Vec::new(),
            Vec::new(),
            layouts,
            false,
        ))))
    }
}

fn whole_tables(deferred: &[Deferred]) -> Vec<Deferred> {
    let mut tables: Vec<TableIdx> = deferred.iter().map(|d| d.table).collect();
    tables.sort_unstable();
    tables.dedup();
    let whole = |table| Deferred {
        table,
        row: None,
        why: Deferral::Xa,
    };
    tables.into_iter().map(whole).collect()
}
