//! Beginnings of files: whether the history is still the one that the position was taken in.

use outbox_core::Position;
use outbox_core::gtid::mariadb::DomainGtid;

use super::{Assembler, Fault, Step, micros, unreadable};
use crate::stream::event::{self, RawEvent};
use crate::stream::mariadb;

impl Assembler {
    pub(super) fn file_begins(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        let began = (self.place.file.clone(), event.timestamp);
        let before = self.began.replace(began.clone());
        if !std::mem::take(&mut self.unchecked) {
            return Ok(Step::Quiet);
        }
        let file = &self.place.file;
        if before.is_some_and(|b| b.0 == began.0 && b.1 != began.1) {
            return Err(Fault::Reset(format!("{file} is not the file that it was")));
        }
        let later = self.taken_at.is_some_and(|t| micros(event) > t);
        if later && matches!(self.end, Position::File(_)) {
            let reason = format!("{file} was begun after the position in it was taken");
            return Err(Fault::Reset(reason));
        }
        self.suspicious = later;
        match &self.first_file {
            Some((first, before)) if later && *first == *file => {
                let before: Vec<DomainGtid> = before.iter().collect();
                self.must_know_ours(&before)
            }
            _ => Ok(Step::Quiet),
        }
    }

    /// A file that began after the position was taken has to know all that this server itself
    /// had committed until then; if it does not, the server's history began anew.
    pub(super) fn previous_gtids(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
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

    /// The same on MariaDB.
    pub(super) fn gtid_list(&mut self, event: &RawEvent<'_>) -> Result<Step, Fault> {
        if !std::mem::take(&mut self.suspicious) {
            return Ok(Step::Quiet);
        }
        match mariadb::gtid_list(event.data) {
            Some(before) => self.must_know_ours(&before),
            None => unreadable("malformed GTID_LIST event"),
        }
    }

    fn must_know_ours(&self, before: &[DomainGtid]) -> Result<Step, Fault> {
        let Position::Mariadb(ours) = &self.end else {
            return Ok(Step::Quiet);
        };
        // Within a domain the sequence goes on from server to server.
        let known = |gtid: DomainGtid| {
            let mut passed = before.iter().filter(|b| b.domain == gtid.domain);
            passed.any(|b| b.sequence >= gtid.sequence)
        };
        let mut own = ours.list.iter().filter(|g| g.server == self.server_id);
        match own.find(|g| !known(*g)) {
            None => Ok(Step::Quiet),
            Some(missing) => Err(Fault::Reset(format!(
                "{} was begun after the position was taken, but does not know {missing}",
                self.place.file
            ))),
        }
    }
}
