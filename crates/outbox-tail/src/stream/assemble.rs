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

mod history;
mod rows;
mod statements;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use outbox_core::gtid::GtidSet;
use outbox_core::gtid::mariadb::GtidList;
use outbox_core::layout::TableLayout;
use outbox_core::ports::Deferral;
use outbox_core::position::FilePosition;
use outbox_core::{Position, TableIdx};

use super::buffer::Open;
use super::event::{self, FLAG_IGNORABLE, HEADER_LEN, RawEvent, Xid, kind};
use super::facts::{Family, ServerFacts};
use super::mariadb;
use super::place::Place;
use super::tables::Tables;
use crate::decode::Flavour;
use crate::group::{Deferred, Group};

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
    /// The file that this dump begins with, and what was logged before it, where that is known.
    pub(crate) first_file: Option<(String, GtidList)>,
    /// `server_id`, which MariaDB's GTIDs name, and what files are bound to.
    server_id: u32,
    server_name: String,
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
            first_file: None,
            server_id: 0,
            server_name: String::new(),
            server: [0; 16],
        }
    }

    /// Begins (again) behind `after`. `taken_at` is when that position was taken, if known.
    pub(crate) fn restart(&mut self, after: &Position, taken_at: Option<i64>, server: [u8; 16]) {
        self.tables.end_of_group();
        self.place = match after {
            Position::File(p) => Place::at(&p.file, p.pos),
            Position::Gtid(_) | Position::Mariadb(_) => Place::default(),
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
            kind::MARIADB_GTID_LIST => self.gtid_list(event),
            kind::STOP | kind::MARIADB_BINLOG_CHECKPOINT | kind::MARIADB_START_ENCRYPTION => {
                Ok(Step::Quiet)
            }
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
        let mut open = Open::new(gtid, head.committed_at.unwrap_or(micros(event)), false);
        open.exact = head.committed_at.is_some();
        self.begin(open)
    }

    fn mariadb_gtid(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        let Some(head) = mariadb::gtid(event) else {
            return unreadable("malformed GTID event");
        };
        let mut open = Open::new(None, micros(event), !head.standalone);
        open.domain_gtid = Some(head.gtid);
        self.begin(open)
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
            Position::Mariadb(end) => {
                if let Some(gtid) = open.domain_gtid {
                    end.list.set(gtid);
                }
                end.near = Some((self.place.file.clone(), self.place.pos));
            }
            Position::File(end) => advance_file(end, &self.place),
        }
        self.tables.end_of_group();
        if open.exact {
            self.taken_at = self.taken_at.max(Some(open.committed_at));
        } else if let Some((_, began)) = &self.began {
            // The time of a statement may be long before its commit; the file's beginning is not
            // behind it.
            self.taken_at = self.taken_at.max(Some(i64::from(*began) * 1_000_000));
        }
        self.since.moved = true;
        self.since.foreign |= open.foreign || !open.own;
        self.since.committed_at = open.committed_at;
        open
    }

    /// Settings of the server that this dump is from.
    pub(crate) fn served_by(&mut self, facts: &ServerFacts) {
        self.tables.flavour = match facts.family {
            Family::Mysql => Flavour::Mysql,
            Family::Mariadb => Flavour::Mariadb,
        };
        self.tables.rule.fold = facts.fold_names;
        self.server_id = facts.server_id;
        if self.server_name != facts.server {
            // Its files only share their names with those of the last one.
            self.began = None;
            self.server_name.clone_from(&facts.server);
        }
    }
}

fn micros(event: &RawEvent<'_>) -> i64 {
    i64::from(event.timestamp) * 1_000_000
}

fn advance_file(end: &mut FilePosition, place: &Place) {
    // Beyond 4 GiB no dump can begin: the position stays where one can, and the next file takes
    // it up again. Re-reading is the price of a restart until then.
    if place.storable() {
        end.file.clone_from(&place.file);
        end.pos = place.pos;
    }
}
