//! From events to groups. Pure: no clock, no socket, so that every order of events can be tried.
//!
//! **Progress.** Events are fed one by one; rows are kept in the open group and count for nothing
//! until its terminator. Only a terminator moves the end position, and only past the whole group:
//! a GTID is pending from its event to the terminator.
//!
//! **Resumption.** Everything that is not at the end of a group is dropped by
//! [`Assembler::restart`]; the next dump begins behind the last complete group.
//!
//! **Faults.** What cannot be read with certainty is either left to its table or is a [`Fault`],
//! after which the end position stands where it stood.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use bytes::Bytes;
use outbox_core::binder::BindContext;
use outbox_core::gtid::GtidSet;
use outbox_core::layout::TableLayout;
use outbox_core::ports::Deferral;
use outbox_core::position::FilePosition;
use outbox_core::{Position, RowKey, TableIdx};

use super::buffer::Open;
use super::event::{self, Change, FLAG_IGNORABLE, HEADER_LEN, RawEvent, Xid, kind};
use super::place::Place;
use super::sql::{self, Sql, Token};
use super::tables::{Plan, Tables, Target};
use crate::decode::{Flavour, RowError, RowsEvent};
use crate::group::{Deferred, Group};

/// Prepared XA transactions that are remembered, and rows of one that are named.
const MAX_PREPARED: usize = 10_000;
const MAX_PREPARED_ROWS: usize = 1_000;
/// The table id of the empty rows event that only ends a statement.
const DUMMY_TABLE: u64 = 0xff_ffff;
/// A file that began this long after the position was taken was certainly not there then; less
/// may be the resolution of the times that are compared.
const RESET_SLACK: i64 = 2_000_000;

/// What an event led to.
#[derive(Debug)]
pub(crate) enum Step {
    /// Nothing to tell.
    Quiet,
    /// A group ended that does not concern us: the end position moved.
    Boundary,
    /// A group that concerns us.
    Group(Box<Group>),
    /// The server is alive and has nothing more.
    Heartbeat,
}

/// Why an event cannot be taken. The end position did not move.
#[derive(Debug)]
pub(crate) enum Fault {
    /// It cannot be read.
    Unreadable(String),
    /// The history is not the one that the position was taken in.
    Reset(String),
    /// The server's mode changed under us.
    ModeChanged,
}

fn unreadable<T>(reason: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Unreadable(reason.into()))
}

/// What was read since the last item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Since {
    /// The end position moved.
    pub(crate) moved: bool,
    /// By something else than writes of our own.
    pub(crate) foreign: bool,
    /// Commit time of the last group.
    pub(crate) committed_at: i64,
}

/// The state machine.
#[derive(Debug)]
pub(crate) struct Assembler {
    pub(crate) tables: Tables,
    max_bytes: usize,
    zone_offset: i32,
    end: Position,
    started: bool,
    place: Place,
    open: Option<Open>,
    /// Bytes of a compressed transaction that have still to come.
    payload_left: Option<u64>,
    prepared: HashMap<Xid, Vec<Deferred>>,
    since: Since,
    /// When the position was taken at the latest, by the server's clock, microseconds.
    taken_at: Option<i64>,
    /// The next file's header is the first of this dump: compare it.
    unchecked: bool,
    /// The first file began after the position was taken: compare what it knows.
    suspicious: bool,
    /// The current file and when it began, in seconds.
    began: Option<(String, u32)>,
    /// `@@server_uuid`, whose own transactions a reset takes away.
    server: [u8; 16],
}

impl Assembler {
    pub(crate) fn new(tables: Tables, max_bytes: usize, zone_offset: i32) -> Self {
        Self {
            tables,
            max_bytes,
            zone_offset,
            end: Position::Gtid(GtidSet::default()),
            started: false,
            place: Place::default(),
            open: None,
            payload_left: None,
            prepared: HashMap::new(),
            since: Since::default(),
            taken_at: None,
            unchecked: false,
            suspicious: false,
            began: None,
            server: [0; 16],
        }
    }

    /// Begins (again) behind `after`. `taken_at` is when that position was taken, if known.
    pub(crate) fn restart(&mut self, after: &Position, taken_at: Option<i64>, server: [u8; 16]) {
        self.tables.end_of_group();
        self.place = match after {
            Position::File(p) => Place::at(&p.file, p.pos),
            Position::Gtid(_) => Place::default(),
        };
        if self.knows(after) {
            self.tables.back_to(after);
        } else {
            self.tables.forget();
            self.prepared.clear();
            self.taken_at = None;
            self.began = None;
        }
        self.end = after.clone();
        self.started = true;
        self.open = None;
        self.payload_left = None;
        self.since = Since::default();
        self.taken_at = self.taken_at.or(taken_at);
        self.suspicious = false;
        self.unchecked = true;
        self.server = server;
    }

    /// Whether everything behind `after` was read before, and in the same history, so that what
    /// is known of the tables can be kept.
    pub(crate) fn knows(&self, after: &Position) -> bool {
        self.started && self.end.reaches(after) == Some(true)
    }

    /// The history that was read is not the one that goes on.
    pub(crate) fn forget(&mut self) {
        self.started = false;
    }

    /// The end of the last complete group.
    pub(crate) fn end(&self) -> &Position {
        &self.end
    }

    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    /// Takes what was read since the last item.
    pub(crate) fn take_since(&mut self) -> Since {
        let since = self.since;
        self.since.moved = false;
        self.since.foreign = false;
        since
    }

    pub(crate) fn since(&self) -> Since {
        self.since
    }

    /// Layouts that are proven at the end of the last group, to be reported.
    pub(crate) fn proven(&mut self) -> Option<Group> {
        let layouts = self.tables.reached(&self.end);
        (!layouts.is_empty()).then(|| self.group(Vec::new(), Vec::new(), layouts, false))
    }

    fn group(
        &self,
        rows: Vec<outbox_core::OutboxRow>,
        deferred: Vec<Deferred>,
        layouts: Vec<(TableIdx, Option<TableLayout>)>,
        signal: bool,
    ) -> Group {
        Group {
            rows,
            deferred,
            layouts,
            signal,
            end: self.end.clone(),
            committed_at: self.since.committed_at,
        }
    }

    /// Whether the event that comes next lies inside a compressed transaction, where events have
    /// no checksum.
    pub(crate) fn in_payload(&self) -> bool {
        self.payload_left.is_some()
    }

    /// Takes one event.
    pub(crate) fn feed(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        if self.payload_left.is_some() {
            return self.feed_inner(event);
        }
        if !event.is_artificial() && !matches!(event.kind, kind::HEARTBEAT | kind::HEARTBEAT_V2) {
            self.place.advance(event.log_pos, event.size);
        }
        match event.kind {
            kind::FORMAT_DESCRIPTION => self.file_begins(event),
            kind::PREVIOUS_GTIDS => self.previous_gtids(event),
            kind::ROTATE => self.rotate(event),
            kind::HEARTBEAT | kind::HEARTBEAT_V2 => Ok(Step::Heartbeat),
            kind::GTID | kind::GTID_TAGGED | kind::ANONYMOUS_GTID => self.gtid(event),
            kind::MARIADB_GTID => self.mariadb_gtid(event),
            kind::INCIDENT => self.incident(event),
            kind::TRANSACTION_PAYLOAD => {
                let Some(size) = event::payload_size(event.data) else {
                    return unreadable("the header of a compressed transaction is malformed");
                };
                if size == 0 {
                    return unreadable("a compressed transaction is empty");
                }
                if self.open.is_none() {
                    return unreadable("a compressed transaction without a GTID event");
                }
                self.payload_left = Some(size);
                Ok(Step::Quiet)
            }
            kind::STOP
            | kind::MARIADB_BINLOG_CHECKPOINT
            | kind::MARIADB_GTID_LIST
            | kind::MARIADB_START_ENCRYPTION => Ok(Step::Quiet),
            _ => self.part(event),
        }
    }

    /// An event of a compressed transaction: the whole of it, with its terminator as its last
    /// event, has to come before anything else does. A payload that fails to decompress comes as
    /// nothing at all.
    fn feed_inner(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        let left = self.payload_left.unwrap_or_default();
        let size = u64::from(event.size);
        let outer = matches!(
            event.kind,
            kind::FORMAT_DESCRIPTION
                | kind::PREVIOUS_GTIDS
                | kind::ROTATE
                | kind::STOP
                | kind::HEARTBEAT
                | kind::HEARTBEAT_V2
                | kind::GTID
                | kind::GTID_TAGGED
                | kind::ANONYMOUS_GTID
                | kind::INCIDENT
                | kind::TRANSACTION_PAYLOAD
        );
        if outer {
            return unreadable("a compressed transaction is damaged: it ends too early");
        }
        if usize::try_from(size).is_ok_and(|s| s < HEADER_LEN) || size > left {
            return unreadable("a compressed transaction is damaged: an event has a wrong size");
        }
        self.payload_left = (left > size).then_some(left - size);
        let step = self.part(event)?;
        if self.payload_left.is_none() && self.open.is_some() {
            return unreadable("a compressed transaction does not end with a commit");
        }
        if self.payload_left.is_some() && self.open.is_none() {
            return unreadable("a compressed transaction goes on behind its commit");
        }
        Ok(step)
    }

    /// An event of a group.
    fn part(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        if let Some(change) = event.change() {
            return self.rows(event, change).map(|()| Step::Quiet);
        }
        match event.kind {
            kind::TABLE_MAP => {
                self.group_must_be_open()?;
                match self.tables.map(event.data) {
                    Some(()) => Ok(Step::Quiet),
                    None => unreadable("malformed table map"),
                }
            }
            kind::QUERY | kind::EXECUTE_LOAD_QUERY | kind::MARIADB_QUERY_COMPRESSED => {
                self.statement(event)
            }
            kind::XID => {
                self.group_must_be_open()?;
                self.commit(event)
            }
            kind::XA_PREPARE => self.xa_prepare(event),
            kind::INTVAR
            | kind::RAND
            | kind::USER_VAR
            | kind::APPEND_BLOCK
            | kind::DELETE_FILE
            | kind::BEGIN_LOAD_QUERY
            | kind::IGNORABLE
            | kind::ROWS_QUERY
            | kind::TRANSACTION_CONTEXT
            | kind::VIEW_CHANGE
            | kind::MARIADB_ANNOTATE_ROWS => Ok(Step::Quiet),
            _ if event.flags & FLAG_IGNORABLE != 0 => Ok(Step::Quiet),
            unknown => unreadable(format!("event type {unknown} is not known")),
        }
    }

    fn group_must_be_open(&self) -> Result<(), Fault> {
        match self.open {
            Some(_) => Ok(()),
            None => unreadable("an event of a transaction outside of any"),
        }
    }

    fn file_begins(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        let began = (self.place.file.clone(), event.timestamp);
        let before = self.began.replace(began.clone());
        if !std::mem::take(&mut self.unchecked) {
            return Ok(Step::Quiet);
        }
        let file = &self.place.file;
        if before.is_some_and(|b| b.0 == began.0 && b.1 != began.1) {
            return Err(Fault::Reset(format!("{file} is not the file that it was")));
        }
        let later = self
            .taken_at
            .is_some_and(|t| micros(event) > t + RESET_SLACK);
        if later && matches!(self.end, Position::File(_)) {
            let reason = format!("{file} was begun after the position in it was taken");
            return Err(Fault::Reset(reason));
        }
        self.suspicious = later;
        Ok(Step::Quiet)
    }

    /// A file that began after the position was taken has to know all that this server itself
    /// had committed until then; if it does not, the server's history began anew.
    fn previous_gtids(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        if !std::mem::take(&mut self.suspicious) {
            return Ok(Step::Quiet);
        }
        let Position::Gtid(ours) = &self.end else {
            return Ok(Step::Quiet);
        };
        let Some(previous) = event::previous_gtids(event.data) else {
            return unreadable("malformed PREVIOUS_GTIDS event");
        };
        let missing = ours.subtract(&previous);
        if missing.sids().any(|sid| sid.source == self.server) {
            return Err(Fault::Reset(format!(
                "{} was begun after the position was taken, but does not know {missing}",
                self.place.file
            )));
        }
        Ok(Step::Quiet)
    }

    fn rotate(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        let Some((_, file)) = event::rotate(event) else {
            return unreadable("malformed ROTATE event");
        };
        // The offset of an artificial one only echoes the request, and may lie inside a group.
        if !self.place.rotate(&file) {
            return Ok(Step::Quiet);
        }
        if self.open.is_some() {
            return unreadable("a transaction goes on in the next file");
        }
        if let Position::File(end) = &mut self.end {
            end.file.clone_from(&self.place.file);
            end.pos = self.place.pos;
            self.since.moved = true;
            // The file behind may be purged any time: this is worth storing.
            self.since.foreign = true;
            return Ok(Step::Boundary);
        }
        Ok(Step::Quiet)
    }

    fn gtid(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        let head = if event.kind == kind::GTID_TAGGED {
            event::gtid_tagged(event.data)
        } else {
            event::gtid(event.data)
        };
        let Some(head) = head else {
            return unreadable("malformed GTID event");
        };
        if event.kind == kind::ANONYMOUS_GTID && matches!(self.end, Position::Gtid(_)) {
            return Err(Fault::ModeChanged);
        }
        let gtid = (event.kind != kind::ANONYMOUS_GTID).then_some(head.gtid);
        self.begin(Open::new(
            gtid,
            head.committed_at.unwrap_or(micros(event)),
            false,
        ))
    }

    fn mariadb_gtid(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        let Some(standalone) = event::mariadb_gtid(event.data) else {
            return unreadable("malformed GTID event");
        };
        self.begin(Open::new(None, micros(event), !standalone))
    }

    fn begin(&mut self, open: Open) -> Result<Step, Fault> {
        if self.open.is_some() {
            return unreadable("a transaction begins inside another");
        }
        self.open = Some(open);
        Ok(Step::Quiet)
    }

    /// The server lost events: any outbox row may be among them.
    fn incident(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        self.ensure_open(event);
        for table in 0..self.tables.len() {
            self.defer_table(
                table,
                Deferral::Undecodable,
                "the server reports lost events",
            )?;
        }
        self.commit(event)
    }

    fn ensure_open(&mut self, event: &RawEvent<'_>) -> &mut Open {
        self.open
            .get_or_insert_with(|| Open::new(None, micros(event), false))
    }

    fn statement(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
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

    fn defer_table(&mut self, table: usize, why: Deferral, reason: &str) -> Result<(), Fault> {
        self.must_be_deferrable(table, reason)?;
        let idx = self.tables.idx(table);
        if let Some(open) = &mut self.open {
            open.defer_table(idx, why);
        }
        Ok(())
    }

    /// A change that may be of any row of this group: the table has what became of them all.
    fn give_up(&mut self, table: usize, why: Deferral, reason: &str) -> Result<(), Fault> {
        self.must_be_deferrable(table, reason)?;
        let idx = self.tables.idx(table);
        if let Some(open) = &mut self.open {
            open.give_up(idx, why);
        }
        Ok(())
    }

    /// Without status columns the binlog is all there is: nothing may be left to the table.
    fn must_be_deferrable(&self, table: usize, reason: &str) -> Result<(), Fault> {
        if self.tables.deferrable(table) {
            return Ok(());
        }
        let name = self.tables.spec(table).full_name();
        unreadable(format!("{name} has no status columns, and {reason}"))
    }

    fn xa_prepare(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
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

    fn commit(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        let mut open = self.take_open(event);
        let mut layouts = std::mem::take(&mut open.layouts);
        layouts.extend(self.tables.reached(&self.end));
        let signal = open.signal;
        let (rows, deferred) = open.finish();
        if rows.is_empty() && deferred.is_empty() && layouts.is_empty() && !signal {
            return Ok(Step::Boundary);
        }
        Ok(Step::Group(Box::new(
            self.group(rows, deferred, layouts, signal),
        )))
    }

    /// Ends the open group: the end position moves behind it.
    fn take_open(&mut self, event: &RawEvent<'_>) -> Open {
        self.ensure_open(event);
        let open = self.open.take().unwrap_or_default();
        match &mut self.end {
            Position::Gtid(set) => {
                if let Some(gtid) = &open.gtid {
                    set.add(gtid);
                }
            }
            Position::File(end) => advance_file(end, &self.place),
        }
        self.tables.end_of_group();
        if open.gtid.is_some() {
            self.taken_at = self.taken_at.max(Some(open.committed_at));
        }
        self.since.moved = true;
        self.since.foreign |= open.foreign || !open.own;
        self.since.committed_at = open.committed_at;
        open
    }

    fn rows(&mut self, event: &RawEvent<'_>, change: Change) -> Result<(), Fault> {
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

    fn keep(&mut self, table: usize, row: outbox_core::OutboxRow) -> Result<(), Fault> {
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
        row: Option<(outbox_core::RowId, Option<outbox_core::Aggregate>)>,
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

    /// Settings of the server that this dump is from.
    pub(crate) fn served_by(&mut self, flavour: Flavour, fold: bool) {
        self.tables.flavour = flavour;
        self.tables.rule.fold = fold;
    }
}

fn micros(event: &RawEvent<'_>) -> i64 {
    i64::from(event.timestamp) * 1_000_000
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

fn advance_file(end: &mut FilePosition, place: &Place) {
    // Beyond 4 GiB no dump can begin: the position stays where one can, and the next file takes
    // it up again. Re-reading is the price of a restart until then.
    if place.storable() {
        end.file.clone_from(&place.file);
        end.pos = place.pos;
    }
}
