//! MariaDB's GTIDs: what its events say of them (`mysql_cdc` reads those), what a server knows of
//! them, and how a file position becomes a list.

use std::io::Cursor;

use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use mysql_cdc::events::event_header::EventHeader;
use mysql_cdc::providers::mariadb::events::gtid_event::GtidEvent;
use mysql_cdc::providers::mariadb::events::gtid_list_event::GtidListEvent;
use mysql_cdc::providers::mariadb::gtid::gtid::Gtid;
use outbox_core::Position;
use outbox_core::gtid::mariadb::{DomainGtid, GtidList, MariadbPosition};
use outbox_core::position::FilePosition;

use super::connect::{StreamConfig, within};
use super::error::{LostPosition, LostReason, StreamError};
use super::event::RawEvent;
use super::facts::{Resume, ServerFacts, lost};

/// The group is one statement without a terminator of its own.
const STANDALONE: u8 = 1;
/// Of the count of a list: the high bits are flags.
const COUNT_BITS: u32 = 0x0fff_ffff;
/// Domain, server and sequence in a list.
const ENTRY_BYTES: usize = 16;

/// The head of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupHead {
    pub(crate) gtid: DomainGtid,
    pub(crate) standalone: bool,
}

fn plain(gtid: &Gtid) -> DomainGtid {
    DomainGtid {
        domain: gtid.domain_id,
        server: gtid.server_id,
        sequence: gtid.sequence,
    }
}

/// The body of GTID (162). The server's id is the event header's.
pub(crate) fn gtid(event: &RawEvent<'_>) -> Option<GroupHead> {
    let header = EventHeader {
        timestamp: event.timestamp,
        event_type: event.kind,
        server_id: event.server_id,
        event_length: event.size,
        next_event_position: event.log_pos,
        event_flags: event.flags,
    };
    let head = GtidEvent::parse(&mut Cursor::new(event.data), &header).ok()?;
    Some(GroupHead {
        gtid: plain(&head.gtid),
        standalone: head.flags & STANDALONE != 0,
    })
}

/// The body of GTID_LIST (163): for each domain and server the last transaction before this file.
pub(crate) fn gtid_list(data: &[u8]) -> Option<Vec<DomainGtid>> {
    let (count, entries) = data.split_first_chunk::<4>()?;
    let count = u32::from_le_bytes(*count) & COUNT_BITS;
    // An empty list is padded.
    let length = usize::try_from(count).ok()?.checked_mul(ENTRY_BYTES)?;
    let entries = entries.get(..length)?;
    // The library takes the flags for a part of the count.
    let body = [&count.to_le_bytes(), entries].concat();
    let list = GtidListEvent::parse(&mut Cursor::new(&body[..])).ok()?;
    Some(list.gtid_list.gtids.iter().map(plain).collect())
}

/// What a MariaDB server says of its GTIDs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MariadbGtids {
    /// `@@gtid_binlog_pos`: the last transaction of each domain in the binlog.
    pub position: GtidList,
    /// `@@gtid_binlog_state`: the last one of each domain and server.
    pub state: Vec<DomainGtid>,
    /// `@@gtid_slave_pos`: the last ones that were replicated, logged here or not.
    pub replicated: GtidList,
    /// What was logged before the oldest binlog that is left; `None` if it cannot be told.
    pub purged: Option<GtidList>,
}

impl MariadbGtids {
    /// Whether the server has had this transaction.
    #[must_use]
    pub fn contains(&self, gtid: DomainGtid) -> bool {
        let logged = self.state.iter().any(|g| {
            (g.domain, g.server) == (gtid.domain, gtid.server) && g.sequence >= gtid.sequence
        });
        // A copy of a server begins with a binlog that does not know what was before.
        logged || self.replicated.get(gtid.domain) == Some(gtid)
    }

    /// Whether the server may yet get it from its source.
    fn may_get(&self, gtid: DomainGtid) -> bool {
        let mut passed = self.state.iter().filter(|g| g.domain == gtid.domain);
        !passed.any(|g| g.sequence >= gtid.sequence)
    }
}

/// Whether a list can be continued on the server.
pub(super) fn check_list(list: &GtidList, facts: &ServerFacts) -> Resume {
    let Some(known) = &facts.mariadb else {
        let detail = "the position is a list of MariaDB's GTIDs, but the server is none";
        return lost(LostReason::ModeChanged, false, detail);
    };
    let missing: GtidList = list.iter().filter(|g| !known.contains(*g)).collect();
    if !missing.is_empty() {
        // What a replica lacks of other servers' transactions it may yet get.
        let coming = |g: DomainGtid| g.server != facts.server_id && known.may_get(g);
        if facts.is_replica && missing.iter().all(coming) {
            return Resume::Behind(missing.to_string());
        }
        let detail = format!("the server does not know {missing}");
        return lost(LostReason::NotContained, false, detail);
    }
    let purged = known.purged.as_ref().filter(|p| !list.reaches(p));
    if let Some(purged) = purged {
        let detail = format!("purged before it was read: what came up to {purged}");
        return lost(LostReason::Purged, true, detail);
    }
    Resume::Continue
}

fn other(error: impl std::error::Error + Send + Sync + 'static) -> mysql_async::Error {
    mysql_async::Error::Other(Box::new(error))
}

/// Asks for what the server knows; its binlogs have been listed.
pub(super) async fn read(
    conn: &mut Conn,
    first_binlog: Option<&str>,
) -> Result<MariadbGtids, mysql_async::Error> {
    let query = "SELECT @@GLOBAL.gtid_binlog_pos, @@GLOBAL.gtid_binlog_state, \
                 @@GLOBAL.gtid_slave_pos";
    let row: Option<(String, String, String)> = conn.query_first(query).await?;
    let (position, state, replicated) = row.unwrap_or_default();
    let entries = state.split(',').map(str::trim).filter(|g| !g.is_empty());
    let state: Result<Vec<DomainGtid>, _> = entries.map(str::parse).collect();
    let purged = match first_binlog {
        Some(file) => at_offset(conn, file, 4).await?,
        None => None,
    };
    Ok(MariadbGtids {
        position: position.parse().map_err(other)?,
        state: state.map_err(other)?,
        replicated: replicated.parse().map_err(other)?,
        purged,
    })
}

/// The list at an offset of a file; `None` where no event begins.
async fn at_offset(
    conn: &mut Conn,
    file: &str,
    pos: u64,
) -> Result<Option<GtidList>, mysql_async::Error> {
    let text: Option<Option<String>> = conn
        .exec_first("SELECT BINLOG_GTID_POS(?, ?)", (file, pos))
        .await?;
    let text = text.flatten();
    text.map(|t| t.parse().map_err(other)).transpose()
}

/// So many files are looked into, newest first: opening has to be quick.
const MAX_FILES: usize = 200;

/// The file that a dump behind this list begins with, and what was logged before it. Since 11.4
/// the server jumps over the event in it that says so.
pub(super) async fn first_file(
    conn: &mut Conn,
    after: &Position,
    facts: &ServerFacts,
) -> Result<Option<(String, GtidList)>, mysql_async::Error> {
    let Position::Mariadb(after) = after else {
        return Ok(None);
    };
    for (file, _) in facts.binlogs.iter().rev().take(MAX_FILES) {
        if let Some(before) = at_offset(conn, file, 4).await?
            && after.list.reaches(&before)
        {
            return Ok(Some((file.clone(), before)));
        }
    }
    Ok(None)
}

/// The list at a file position that lies between two groups; `None` if it does not.
async fn list_at(
    conn: &mut Conn,
    at: &FilePosition,
) -> Result<Option<MariadbPosition>, mysql_async::Error> {
    // Inside a group the list would count it as read.
    let query = format!(
        "SHOW BINLOG EVENTS IN '{}' FROM {} LIMIT 1",
        at.file.replace('\\', "\\\\").replace('\'', "''"),
        at.pos
    );
    let next: Option<mysql_async::Row> = match conn.query_first(query).await {
        Ok(row) => row,
        Err(mysql_async::Error::Server(e)) if e.code == NO_EVENT => return Ok(None),
        Err(e) => return Err(e),
    };
    let kind: Option<String> = next.and_then(|row| row.get("Event_type"));
    let between = [
        "Format_desc",
        "Start_encryption",
        "Gtid_list",
        "Binlog_checkpoint",
        "Gtid",
        "Rotate",
        "Stop",
    ];
    if kind.is_some_and(|k| !between.contains(&k.as_str())) {
        return Ok(None);
    }
    let list = at_offset(conn, &at.file, at.pos).await?;
    Ok(list.map(|list| MariadbPosition {
        list,
        near: Some((at.file.clone(), at.pos)),
    }))
}

/// "Error when executing command SHOW BINLOG EVENTS: Wrong offset or I/O error".
const NO_EVENT: u16 = 1220;

/// The position to go on from. A file position becomes the list at it, which holds after a
/// failover too.
pub(super) async fn by_list(
    conn: &mut Conn,
    config: &StreamConfig,
    after: &Position,
    facts: &ServerFacts,
) -> Result<Position, StreamError> {
    let Position::File(file) = after else {
        return Ok(after.clone());
    };
    if facts.mariadb.is_none() {
        return Ok(after.clone());
    }
    let operation = "finding the GTIDs of a file position";
    match within(config.connect_timeout, operation, list_at(conn, file)).await? {
        Some(list) => Ok(Position::Mariadb(list)),
        None => Err(StreamError::LostPosition(Box::new(LostPosition {
            from: after.clone(),
            to: facts.coordinate.clone(),
            reason: LostReason::InvalidOffset,
            certain: false,
            detail: "no group begins at the stored offset".to_owned(),
        }))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::stream::event::kind;

    fn event(kind: u8, data: &[u8]) -> RawEvent<'_> {
        RawEvent {
            kind,
            flags: 0,
            timestamp: 1_700_000_000,
            server_id: 7,
            size: 42,
            log_pos: 381,
            data,
        }
    }

    #[test]
    fn the_head_of_a_group_is_read() {
        let mut data = 8u64.to_le_bytes().to_vec();
        data.extend(3u32.to_le_bytes());
        data.push(0b1001);
        data.extend([0; 6]);
        let head = gtid(&event(kind::MARIADB_GTID, &data)).unwrap();
        assert_eq!(head.gtid.to_string(), "3-7-8");
        assert!(head.standalone);
        data[12] = 0b1000;
        assert!(!gtid(&event(kind::MARIADB_GTID, &data)).unwrap().standalone);
        assert_eq!(gtid(&event(kind::MARIADB_GTID, &data[..12])), None);
    }

    #[test]
    fn a_list_is_read_whatever_its_flags_and_never_beyond_its_bytes() {
        let mut data = (2u32 | 1 << 29).to_le_bytes().to_vec();
        for (domain, server, sequence) in [(0u32, 7u32, 6u64), (0, 8, 9)] {
            data.extend(domain.to_le_bytes());
            data.extend(server.to_le_bytes());
            data.extend(sequence.to_le_bytes());
        }
        let list = gtid_list(&data).unwrap();
        let list: Vec<String> = list.iter().map(ToString::to_string).collect();
        assert_eq!(list, ["0-7-6", "0-8-9"]);
        assert_eq!(gtid_list(&data[..35]), None);
        assert_eq!(gtid_list(&[0xff, 0xff, 0xff, 0x0f]), None);
        assert_eq!(gtid_list(&[0, 0, 0, 0, 0, 0]), Some(Vec::new()));
        assert_eq!(gtid_list(&[0, 0]), None);
    }
}
