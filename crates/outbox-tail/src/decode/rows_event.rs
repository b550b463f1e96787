use std::io::Read as _;

use bytes::Bytes;

use super::error::Malformed;
use super::read::{Reader, share};

/// What a row event does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsKind {
    /// Inserts.
    Write,
    /// Updates.
    Update,
    /// Updates of which the image after the change may hold differences of JSON documents.
    PartialUpdate,
    /// Deletes.
    Delete,
}

/// A row event, its rows not decoded yet.
#[derive(Clone, Debug)]
pub struct RowsEvent {
    /// The table map's number.
    pub table_id: u64,
    /// Event flags; bit 0 ends the statement.
    pub flags: u16,
    /// What it does.
    pub kind: RowsKind,
    /// Columns of the table.
    pub(super) columns: usize,
    /// Which columns the (first) image holds.
    pub(super) first: Bytes,
    /// Which columns the image after an update holds.
    pub(super) second: Bytes,
    /// The rows.
    pub(super) rows: Bytes,
}

const WHAT: &str = "row event";

/// Rows of a compressed event, decompressed, are at most this large. MariaDB packs events up to
/// `binlog_row_event_max_size` or a single row, which `max_allowed_packet` bounds.
const MAX_DECOMPRESSED: usize = 1 << 30;

impl RowsEvent {
    /// The table id of a row event's body, for skipping it undecoded.
    #[must_use]
    pub fn peek(data: &[u8]) -> Option<u64> {
        Reader::new(data, WHAT).uint(6).ok()
    }

    /// What events of this type do; `None` is no row event.
    #[must_use]
    pub const fn kind_of(event_type: u8) -> Option<RowsKind> {
        match event_type {
            23 | 30 | 166 => Some(RowsKind::Write),
            24 | 31 | 167 => Some(RowsKind::Update),
            25 | 32 | 168 => Some(RowsKind::Delete),
            39 => Some(RowsKind::PartialUpdate),
            _ => None,
        }
    }

    /// Parses an event's body: the bytes behind the 19-byte header, without the checksum.
    pub fn parse(event_type: u8, data: &Bytes) -> Result<Self, Malformed> {
        let kind = Self::kind_of(event_type).ok_or(Malformed::new("row event type"))?;
        let mut r = Reader::new(data, WHAT);
        let table_id = r.uint(6)?;
        let flags = u16::from_le_bytes([r.u8()?, r.u8()?]);
        if matches!(event_type, 30..=32 | 39) {
            let extra = r.len(2)?; // counts its own two bytes
            r.take(extra.checked_sub(2).ok_or(r.malformed())?)?;
        }
        let columns = r.lenenc_len()?;
        let first = share(data, r.take(columns.div_ceil(8))?);
        let second = match kind {
            RowsKind::Update | RowsKind::PartialUpdate => share(data, r.take(columns.div_ceil(8))?),
            RowsKind::Write | RowsKind::Delete => Bytes::new(),
        };
        let rows = if event_type >= 166 {
            decompress(r.rest())?
        } else {
            share(data, r.rest())
        };
        Ok(Self {
            table_id,
            flags,
            kind,
            columns,
            first,
            second,
            rows,
        })
    }
}

/// MariaDB's compressed block: a byte with the algorithm (0 is zlib) in bits 4 to 6 and the
/// length of the length in bits 0 to 2, the decompressed length, big-endian, and the data.
fn decompress(block: &[u8]) -> Result<Bytes, Malformed> {
    const WHAT: &str = "compressed rows";
    let mut r = Reader::new(block, WHAT);
    let header = r.u8()?;
    let width = usize::from(header & 0x07);
    if header & 0xf0 != 0x80 || !(1..=4).contains(&width) {
        return Err(r.malformed());
    }
    let len = usize::try_from(super::read::uint_be(r.take(width)?)).map_err(|_| r.malformed())?;
    // zlib cannot shrink by more than about 1 in 1032, so a larger claim is false.
    if len > MAX_DECOMPRESSED || len / 1040 > r.rest().len() {
        return Err(r.malformed());
    }
    let mut rows = Vec::with_capacity(len);
    let limit = u64::try_from(len).unwrap_or(u64::MAX).saturating_add(1);
    flate2::read::ZlibDecoder::new(r.rest())
        .take(limit)
        .read_to_end(&mut rows)
        .map_err(|_| Malformed::new(WHAT))?;
    if rows.len() != len {
        return Err(Malformed::new(WHAT));
    }
    Ok(Bytes::from(rows))
}
