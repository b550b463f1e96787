//! Event kinds, and the few event bodies that the stream itself needs. Everything is read from
//! slices with checked bounds: nothing is allocated on the word of a length field.

use std::borrow::Cow;
use std::io::Read as _;

use outbox_core::gtid::{Gtid, GtidSet};

pub(crate) mod kind {
    pub(crate) const QUERY: u8 = 2;
    pub(crate) const STOP: u8 = 3;
    pub(crate) const ROTATE: u8 = 4;
    pub(crate) const INTVAR: u8 = 5;
    pub(crate) const APPEND_BLOCK: u8 = 9;
    pub(crate) const DELETE_FILE: u8 = 11;
    pub(crate) const RAND: u8 = 13;
    pub(crate) const USER_VAR: u8 = 14;
    pub(crate) const FORMAT_DESCRIPTION: u8 = 15;
    pub(crate) const XID: u8 = 16;
    pub(crate) const BEGIN_LOAD_QUERY: u8 = 17;
    pub(crate) const EXECUTE_LOAD_QUERY: u8 = 18;
    pub(crate) const TABLE_MAP: u8 = 19;
    pub(crate) const WRITE_ROWS_V1: u8 = 23;
    pub(crate) const UPDATE_ROWS_V1: u8 = 24;
    pub(crate) const DELETE_ROWS_V1: u8 = 25;
    pub(crate) const INCIDENT: u8 = 26;
    pub(crate) const HEARTBEAT: u8 = 27;
    pub(crate) const IGNORABLE: u8 = 28;
    pub(crate) const ROWS_QUERY: u8 = 29;
    pub(crate) const WRITE_ROWS: u8 = 30;
    pub(crate) const UPDATE_ROWS: u8 = 31;
    pub(crate) const DELETE_ROWS: u8 = 32;
    pub(crate) const GTID: u8 = 33;
    pub(crate) const ANONYMOUS_GTID: u8 = 34;
    pub(crate) const PREVIOUS_GTIDS: u8 = 35;
    pub(crate) const TRANSACTION_CONTEXT: u8 = 36;
    pub(crate) const VIEW_CHANGE: u8 = 37;
    pub(crate) const XA_PREPARE: u8 = 38;
    pub(crate) const PARTIAL_UPDATE_ROWS: u8 = 39;
    pub(crate) const TRANSACTION_PAYLOAD: u8 = 40;
    pub(crate) const HEARTBEAT_V2: u8 = 41;
    pub(crate) const GTID_TAGGED: u8 = 42;
    // MariaDB's own.
    pub(crate) const MARIADB_ANNOTATE_ROWS: u8 = 160;
    pub(crate) const MARIADB_BINLOG_CHECKPOINT: u8 = 161;
    pub(crate) const MARIADB_GTID: u8 = 162;
    pub(crate) const MARIADB_GTID_LIST: u8 = 163;
    pub(crate) const MARIADB_START_ENCRYPTION: u8 = 164;
    pub(crate) const MARIADB_QUERY_COMPRESSED: u8 = 165;
    pub(crate) const MARIADB_WRITE_ROWS_COMPRESSED_V1: u8 = 166;
    pub(crate) const MARIADB_UPDATE_ROWS_COMPRESSED_V1: u8 = 167;
    pub(crate) const MARIADB_DELETE_ROWS_COMPRESSED_V1: u8 = 168;
    pub(crate) const MARIADB_WRITE_ROWS_COMPRESSED: u8 = 169;
    pub(crate) const MARIADB_UPDATE_ROWS_COMPRESSED: u8 = 170;
    pub(crate) const MARIADB_DELETE_ROWS_COMPRESSED: u8 = 171;
}

/// The event is made up for this connection; its position means nothing.
pub(crate) const FLAG_ARTIFICIAL: u16 = 0x20;
/// A reader that does not know the type may skip the event.
pub(crate) const FLAG_IGNORABLE: u16 = 0x80;
/// Bytes of the common header.
pub(crate) const HEADER_LEN: usize = 19;

/// Largest statement that is decompressed to look for table names in it.
const MAX_STATEMENT: u64 = 64 << 20;

/// One event: its header's fields, and its body without header and checksum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawEvent<'a> {
    pub(crate) kind: u8,
    pub(crate) flags: u16,
    /// Seconds since the epoch.
    pub(crate) timestamp: u32,
    /// Of the server that wrote it first.
    pub(crate) server_id: u32,
    /// Bytes of the whole event in the file.
    pub(crate) size: u32,
    /// Low 32 bits of the offset behind the event; 0 where it has none.
    pub(crate) log_pos: u32,
    pub(crate) data: &'a [u8],
}

/// What kind of change a rows event holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Insert,
    Update,
    Delete,
}

impl RawEvent<'_> {
    pub(crate) fn is_artificial(&self) -> bool {
        self.log_pos == 0 || self.flags & FLAG_ARTIFICIAL != 0
    }

    /// The change, for rows events.
    pub(crate) fn change(&self) -> Option<Change> {
        Some(match self.kind {
            kind::WRITE_ROWS
            | kind::WRITE_ROWS_V1
            | kind::MARIADB_WRITE_ROWS_COMPRESSED
            | kind::MARIADB_WRITE_ROWS_COMPRESSED_V1 => Change::Insert,
            kind::UPDATE_ROWS
            | kind::UPDATE_ROWS_V1
            | kind::PARTIAL_UPDATE_ROWS
            | kind::MARIADB_UPDATE_ROWS_COMPRESSED
            | kind::MARIADB_UPDATE_ROWS_COMPRESSED_V1 => Change::Update,
            kind::DELETE_ROWS
            | kind::DELETE_ROWS_V1
            | kind::MARIADB_DELETE_ROWS_COMPRESSED
            | kind::MARIADB_DELETE_ROWS_COMPRESSED_V1 => Change::Delete,
            _ => return None,
        })
    }

    /// The table id that table maps and rows events begin with.
    pub(crate) fn table_id(&self) -> Option<u64> {
        let b = self.data.get(..6)?;
        Some(u64::from_le_bytes([
            b[0], b[1], b[2], b[3], b[4], b[5], 0, 0,
        ]))
    }
}

/// Reads little-endian fields off the front of a slice.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.bytes(1).map(|b| b[0])
    }

    pub(crate) fn uint(&mut self, n: usize) -> Option<u64> {
        let bytes = self.bytes(n)?;
        Some(bytes.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)))
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    /// A length-encoded integer of the client protocol.
    fn lenenc(&mut self) -> Option<u64> {
        match self.u8()? {
            n @ 0..=250 => Some(u64::from(n)),
            252 => self.uint(2),
            253 => self.uint(3),
            254 => self.uint(8),
            _ => None,
        }
    }

    /// An unsigned integer of the server's serialization library: the low bits of the first byte
    /// count the bytes that follow.
    fn varlen(&mut self) -> Option<u64> {
        let first = self.u8()?;
        let more = usize::try_from(first.trailing_ones()).ok()?;
        if more >= 8 {
            return self.uint(8);
        }
        let low = u64::from(first)
            .checked_shr(u32::try_from(more + 1).ok()?)
            .unwrap_or(0);
        let high = self.uint(more)?;
        Some(low | high << (7 - more))
    }

    /// A signed one: the sign lies in the lowest bit.
    fn varlen_signed(&mut self) -> Option<i64> {
        let raw = self.varlen()?;
        let half = i64::try_from(raw >> 1).ok()?;
        Some(if raw & 1 == 1 { -half - 1 } else { half })
    }
}

/// A MySQL GTID event. The number is 0 for an anonymous one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GtidHead {
    pub(crate) gtid: Gtid,
    /// Commit on the server that we read, microseconds since the epoch.
    pub(crate) committed_at: Option<i64>,
}

/// The body of GTID and ANONYMOUS_GTID.
pub(crate) fn gtid(data: &[u8]) -> Option<GtidHead> {
    let mut f = Fields(data);
    f.u8()?;
    let source = f.array()?;
    let number = f.uint(8)?;
    let committed_at = (|| {
        // Logical clock, type 2; then the commit time, whose highest bit says that the time on
        // the originating server follows.
        (f.u8()? == 2).then_some(())?;
        f.bytes(16)?;
        i64::try_from(f.uint(7)? & !(1 << 55)).ok()
    })();
    Some(GtidHead {
        gtid: Gtid {
            source,
            tag: String::new(),
            number,
        },
        committed_at: committed_at.filter(|t| *t > 0),
    })
}

/// The body of GTID_TAGGED: fields by number, ascending; only the first ones are needed.
pub(crate) fn gtid_tagged(data: &[u8]) -> Option<GtidHead> {
    let mut f = Fields(data);
    f.varlen()?; // version of the serialization
    f.varlen()?; // size
    f.varlen()?; // last field that may not be ignored
    let mut head = GtidHead {
        gtid: Gtid {
            source: [0; 16],
            tag: String::new(),
            number: 0,
        },
        committed_at: None,
    };
    while !f.0.is_empty() {
        match f.varlen()? {
            0 => {
                f.varlen()?;
            }
            1 => {
                for b in &mut head.gtid.source {
                    *b = u8::try_from(f.varlen()?).ok()?;
                }
            }
            2 => head.gtid.number = u64::try_from(f.varlen_signed()?).ok()?,
            3 => {
                let n = usize::try_from(f.varlen()?).ok()?;
                head.gtid.tag = std::str::from_utf8(f.bytes(n)?).ok()?.to_owned();
            }
            4 | 5 => {
                f.varlen_signed()?;
            }
            6 => {
                head.committed_at = i64::try_from(f.varlen()?).ok();
                break;
            }
            _ => break,
        }
    }
    (head.gtid.number > 0).then_some(head)
}

/// The body of PREVIOUS_GTIDS: what was executed before this file began.
pub(crate) fn previous_gtids(data: &[u8]) -> Option<GtidSet> {
    let mut f = Fields(data);
    let head = f.uint(8)?;
    // The highest byte names the format: 1 has tags, and the count then lies between two copies
    // of that byte.
    let tagged = head >> 56 == 1;
    let sids = if tagged { head << 8 >> 16 } else { head };
    let mut set = GtidSet::default();
    for _ in 0..sids {
        let source: [u8; 16] = f.array()?;
        let tag = if tagged {
            let n = usize::try_from(f.varlen()?).ok()?;
            std::str::from_utf8(f.bytes(n)?).ok()?.to_owned()
        } else {
            String::new()
        };
        for _ in 0..f.uint(8)? {
            let (start, end) = (f.uint(8)?, f.uint(8)?);
            let uuid = outbox_core::binder::print_binary(&source);
            let colon = if tag.is_empty() { "" } else { ":" };
            let last = end.checked_sub(1).filter(|last| *last >= start)?;
            set.merge(&format!("{uuid}{colon}{tag}:{start}-{last}").parse().ok()?);
        }
    }
    Some(set)
}

/// A statement with its default database.
#[derive(Debug)]
pub(crate) struct Statement<'a> {
    pub(crate) db: &'a [u8],
    pub(crate) sql: Cow<'a, [u8]>,
}

/// The body of QUERY, EXECUTE_LOAD_QUERY and MariaDB's QUERY_COMPRESSED.
pub(crate) fn statement<'a>(event: &RawEvent<'a>) -> Option<Statement<'a>> {
    let mut f = Fields(event.data);
    f.bytes(8)?; // thread, seconds it ran
    let db_len = usize::from(f.u8()?);
    f.bytes(2)?; // error
    let vars = usize::try_from(f.uint(2)?).ok()?;
    if event.kind == kind::EXECUTE_LOAD_QUERY {
        f.bytes(13)?;
    }
    f.bytes(vars)?;
    let db = f.bytes(db_len)?;
    f.u8()?;
    let sql = if event.kind == kind::MARIADB_QUERY_COMPRESSED {
        Cow::Owned(inflate(f.0)?)
    } else {
        Cow::Borrowed(f.0)
    };
    Some(Statement { db, sql })
}

/// MariaDB's compressed text: a byte with algorithm and width, the length, a zlib stream.
fn inflate(data: &[u8]) -> Option<Vec<u8>> {
    let mut f = Fields(data);
    let head = f.u8()?;
    let length = f
        .bytes(usize::from(head & 7))?
        .iter()
        .fold(0, |n, b| n << 8 | u64::from(*b));
    if head & 0x70 != 0 || length > MAX_STATEMENT {
        return None;
    }
    let mut text = Vec::new();
    flate2::read::ZlibDecoder::new(f.0)
        .take(MAX_STATEMENT)
        .read_to_end(&mut text)
        .ok()?;
    (u64::try_from(text.len()) == Ok(length)).then_some(text)
}

/// The body of ROTATE: offset and name of the next file.
pub(crate) fn rotate<'a>(event: &RawEvent<'a>) -> Option<(u64, Cow<'a, str>)> {
    let mut f = Fields(event.data);
    let pos = f.uint(8)?;
    Some((
        pos,
        String::from_utf8_lossy(trim_file(f.0, event.is_artificial())),
    ))
}

/// MariaDB's artificial rotate carries a checksum that the reader does not yet know of: four
/// bytes behind the name. A name ends in digits; what follows them there is not the name's.
fn trim_file(name: &[u8], artificial: bool) -> &[u8] {
    if !artificial {
        return name;
    }
    let Some(dot) = name.iter().rposition(|b| *b == b'.') else {
        return name;
    };
    let digits = name[dot + 1..]
        .iter()
        .take_while(|b| b.is_ascii_digit())
        .count();
    // A checksum whose first bytes happen to be digits cannot be told from the name by that
    // rule alone; six digits is what every server writes until a million files.
    let rest = name.len() - dot - 1 - digits;
    match rest {
        0 if digits >= 10 => &name[..name.len() - 4],
        0 => name,
        1..=4 => &name[..name.len() - 4],
        _ => &name[..=dot + digits],
    }
}

/// An XA identifier, as written in statements: compared byte by byte.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Xid {
    pub(crate) format: u32,
    pub(crate) gtrid: Vec<u8>,
    pub(crate) bqual: Vec<u8>,
}

/// The body of XA_PREPARE: whether it is the one-phase commit, and the identifier.
pub(crate) fn xa_prepare(data: &[u8]) -> Option<(bool, Xid)> {
    let mut f = Fields(data);
    let one_phase = f.u8()? != 0;
    let format = u32::try_from(f.uint(4)?).ok()?;
    let gtrid = usize::try_from(f.uint(4)?).ok()?;
    let bqual = usize::try_from(f.uint(4)?).ok()?;
    Some((
        one_phase,
        Xid {
            format,
            gtrid: f.bytes(gtrid)?.to_vec(),
            bqual: f.bytes(bqual)?.to_vec(),
        },
    ))
}

/// What the header of TRANSACTION_PAYLOAD says: the bytes that the payload holds once
/// decompressed.
pub(crate) fn payload_size(data: &[u8]) -> Option<u64> {
    let mut f = Fields(data);
    let (mut stored, mut algorithm, mut full) = (None, None, None);
    loop {
        let field = f.lenenc()?;
        if field == 0 {
            break;
        }
        let length = usize::try_from(f.lenenc()?).ok()?;
        let mut value = Fields(f.bytes(length)?);
        match field {
            1 => stored = value.lenenc(),
            2 => algorithm = value.lenenc(),
            3 => full = value.lenenc(),
            _ => {}
        }
    }
    if stored? != u64::try_from(f.0.len()).ok()? {
        return None;
    }
    match algorithm? {
        0 => full,
        255 => stored,
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn numbers_of_the_serialization_library_are_read() {
        for (bytes, value) in [
            (&[0u8][..], 0),
            (&[0b0000_0010], 1),
            (&[0b1111_1110], 127),
            (&[0b0000_0001, 0b10], 128),
            (&[0xff, 1, 0, 0, 0, 0, 0, 0, 0x80], 0x8000_0000_0000_0001),
        ] {
            assert_eq!(Fields(bytes).varlen(), Some(value), "{bytes:?}");
        }
        assert_eq!(Fields(&[0x01]).varlen(), None);
    }

    #[test]
    fn stray_checksum_bytes_are_cut_off_a_file_name() {
        assert_eq!(
            trim_file(b"mysql-bin.000042\x01\x02\x03\x04", true),
            b"mysql-bin.000042"
        );
        assert_eq!(
            trim_file(b"mysql-bin.0000427\x02\x03\x04", true),
            b"mysql-bin.000042"
        );
        assert_eq!(
            trim_file(b"mysql-bin.0000421234", true),
            b"mysql-bin.000042"
        );
        assert_eq!(trim_file(b"binlog.000042", true), b"binlog.000042");
        assert_eq!(trim_file(b"binlog.1000042", true), b"binlog.1000042");
    }

    #[test]
    fn previous_gtids_are_read_with_and_without_tags() {
        let mut plain = 1u64.to_le_bytes().to_vec();
        plain.extend([0x11; 16]);
        plain.extend(1u64.to_le_bytes());
        plain.extend(1u64.to_le_bytes());
        plain.extend(6u64.to_le_bytes());
        let set = previous_gtids(&plain).unwrap();
        assert_eq!(set.to_string(), "11111111-1111-1111-1111-111111111111:1-5");

        let mut tagged = vec![1, 1, 0, 0, 0, 0, 0, 1];
        tagged.extend([0x11; 16]);
        tagged.push(3 << 1);
        tagged.extend(b"abc");
        tagged.extend(1u64.to_le_bytes());
        tagged.extend(2u64.to_le_bytes());
        tagged.extend(4u64.to_le_bytes());
        let set = previous_gtids(&tagged).unwrap();
        assert_eq!(
            set.to_string(),
            "11111111-1111-1111-1111-111111111111:abc:2-3"
        );
        assert!(previous_gtids(&tagged[..30]).is_none());
        // A count that nothing backs costs nothing.
        assert!(previous_gtids(&u64::from(u32::MAX).to_le_bytes()).is_none());
    }

    #[test]
    fn a_payload_header_must_match_its_payload() {
        let header = [2, 1, 0, 3, 1, 100, 1, 1, 4, 0, 9, 9, 9, 9];
        assert_eq!(payload_size(&header), Some(100));
        assert_eq!(payload_size(&header[..13]), None);
        assert_eq!(payload_size(&[2, 1, 7, 3, 1, 100, 1, 1, 0, 0]), None);
    }
}
