//! One column: how many bytes its values take, and how they become cells.

use std::net::{Ipv4Addr, Ipv6Addr};

use bytes::Bytes;
use outbox_core::Cell;

use super::charset::Charset;
use super::error::{CellError, Malformed};
use super::read::{Reader, bit, share, uint_be, uint_le};
use super::table_map::{ColumnMap, code};
use super::{decimal, float, jsonb, temporal};

/// Bytes of a column's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Size {
    /// Always as many.
    Fixed(usize),
    /// As many as a length of so many bytes in front says.
    Prefixed(usize),
}

impl Size {
    /// `None`: the type is not known, so that nothing behind it can be read.
    pub(super) fn of(column: &ColumnMap) -> Option<Self> {
        use code::*;
        let meta = usize::from(column.meta);
        let [low, high] = column.meta.to_le_bytes();
        let fraction = temporal::fraction_bytes(column.meta);
        Some(match column.code {
            TINY | YEAR => Self::Fixed(1),
            SHORT => Self::Fixed(2),
            INT24 | DATE | TIME => Self::Fixed(3),
            LONG | TIMESTAMP => Self::Fixed(4),
            LONGLONG | DATETIME => Self::Fixed(8),
            FLOAT if meta == 4 => Self::Fixed(4),
            DOUBLE if meta == 8 => Self::Fixed(8),
            NEWDECIMAL => Self::Fixed(decimal::size(high, low)?),
            TIMESTAMP2 if meta <= 6 => Self::Fixed(4 + fraction),
            DATETIME2 if meta <= 6 => Self::Fixed(5 + fraction),
            TIME2 if meta <= 6 => Self::Fixed(3 + fraction),
            BIT if low < 8 && high <= 8 => Self::Fixed(usize::from(high) + usize::from(low > 0)),
            ENUM if matches!(meta, 1 | 2) => Self::Fixed(meta),
            SET if matches!(meta, 1..=4 | 8) => Self::Fixed(meta),
            STRING | VARCHAR | VARCHAR_COMPRESSED | VAR_STRING => {
                Self::Prefixed(if meta > 255 { 2 } else { 1 })
            }
            BLOB | BLOB_COMPRESSED | JSON | GEOMETRY | VECTOR if matches!(meta, 1..=4) => {
                Self::Prefixed(meta)
            }
            _ => return None,
        })
    }

    pub(super) fn take<'a>(self, r: &mut Reader<'a>) -> Result<&'a [u8], Malformed> {
        let len = match self {
            Self::Fixed(len) => len,
            Self::Prefixed(width) => r.len(width)?,
        };
        r.take(len)
    }
}

/// How a value becomes a cell.
#[derive(Clone, Debug)]
pub(super) enum Print {
    Int,
    UInt,
    Year,
    Bit,
    Decimal {
        precision: u8,
        scale: u8,
        zerofill: usize,
    },
    Float {
        decimals: Option<usize>,
        zerofill: usize,
    },
    Text(Charset),
    /// CHAR: without trailing spaces.
    Char(Charset),
    /// VARBINARY, BLOB, GEOMETRY, VECTOR.
    Binary,
    /// BINARY: padded to this many bytes.
    Padded(usize),
    Json,
    /// Names of the members, in UTF-8.
    Enum(Vec<Bytes>),
    Set(Vec<Bytes>),
    Date,
    OldTime,
    OldDatetime,
    OldTimestamp,
    Time(u16),
    Datetime(u16),
    Timestamp(u16),
    Uuid,
    Inet4,
    Inet6,
}

impl Print {
    /// The cell of `raw`, which is a part of `all`. TIMESTAMP is printed in `zone`, in seconds
    /// east of UTC.
    pub(super) fn cell(&self, all: &Bytes, raw: &[u8], zone: i32) -> Result<Cell, CellError> {
        let text = |text: Option<String>, what| {
            text.map(|t| Cell::Text(Bytes::from(t)))
                .ok_or(CellError::Invalid(what))
        };
        match self {
            Self::Int => Ok(Cell::Int(signed(raw))),
            Self::UInt => Ok(Cell::UInt(uint_le(raw))),
            Self::Bit => Ok(Cell::UInt(uint_be(raw))),
            Self::Year => Ok(Cell::UInt(match uint_le(raw) {
                0 => 0,
                year => 1900 + year,
            })),
            Self::Decimal {
                precision,
                scale,
                zerofill,
            } => text(
                decimal::print(raw, *precision, *scale, *zerofill).ok(),
                "decimal",
            ),
            Self::Float { decimals, zerofill } => text(
                print_float(raw, *decimals).map(|t| format!("{t:0>zerofill$}")),
                "float",
            ),
            Self::Text(charset) => charset
                .decode(share(all, raw))
                .map(Cell::Text)
                .ok_or(CellError::Invalid("string in its character set")),
            Self::Char(charset) => {
                let decoded = charset
                    .decode(share(all, raw))
                    .ok_or(CellError::Invalid("string in its character set"))?;
                let kept = decoded
                    .iter()
                    .rposition(|b| *b != b' ')
                    .map_or(0, |i| i + 1);
                Ok(Cell::Text(decoded.slice(..kept)))
            }
            Self::Binary => Ok(Cell::Binary(share(all, raw))),
            Self::Padded(len) => padded(all, raw, *len)
                .map(Cell::Binary)
                .ok_or(CellError::Invalid("BINARY")),
            Self::Json => jsonb::to_text(raw)
                .map(Cell::Text)
                .map_err(|_| CellError::Invalid("JSON document")),
            Self::Enum(members) => member(members, uint_le(raw))
                .map(Cell::Text)
                .ok_or(CellError::Invalid("ENUM member")),
            Self::Set(members) => set(members, raw)
                .map(Cell::Text)
                .ok_or(CellError::Invalid("SET member")),
            Self::Date => text(temporal::date(raw), "DATE"),
            Self::OldTime => text(temporal::old_time(raw), "TIME"),
            Self::OldDatetime => text(temporal::old_datetime(raw), "DATETIME"),
            Self::OldTimestamp => {
                text(temporal::timestamp(uint_le(raw), &[], 0, zone), "TIMESTAMP")
            }
            Self::Time(digits) => text(temporal::time(raw, *digits), "TIME"),
            Self::Datetime(digits) => text(temporal::datetime(raw, *digits), "DATETIME"),
            Self::Timestamp(digits) => {
                let (seconds, fraction) = raw.split_at_checked(4).unwrap_or_default();
                text(
                    temporal::timestamp(uint_be(seconds), fraction, *digits, zone),
                    "TIMESTAMP",
                )
            }
            Self::Uuid => text(address(raw).map(uuid), "UUID"),
            Self::Inet4 => text(
                address(raw).map(|a: [u8; 4]| Ipv4Addr::from(a).to_string()),
                "INET4",
            ),
            Self::Inet6 => text(address(raw).map(inet6), "INET6"),
        }
    }
}

fn signed(raw: &[u8]) -> i64 {
    let unused = 64 - 8 * raw.len().clamp(1, 8);
    (uint_le(raw) << unused).cast_signed() >> unused
}

fn print_float(raw: &[u8], decimals: Option<usize>) -> Option<String> {
    if let Ok(bytes) = <[u8; 4]>::try_from(raw) {
        let value = f32::from_le_bytes(bytes);
        return Some(match decimals {
            Some(decimals) => float::print_fixed(f64::from(value), decimals),
            None => float::print_float(value),
        });
    }
    let value = f64::from_le_bytes(raw.try_into().ok()?);
    Some(match decimals {
        Some(decimals) => float::print_fixed(value, decimals),
        None => float::print_double(value),
    })
}

/// The server strips trailing zeros of BINARY in row events.
fn padded(all: &Bytes, raw: &[u8], len: usize) -> Option<Bytes> {
    if raw.len() == len {
        return Some(share(all, raw));
    }
    if raw.len() > len {
        return None;
    }
    let mut bytes = raw.to_vec();
    bytes.resize(len, 0);
    Some(Bytes::from(bytes))
}

/// The bytes of a UUID or address, whose trailing zeros are stripped too.
fn address<const N: usize>(raw: &[u8]) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    bytes.get_mut(..raw.len())?.copy_from_slice(raw);
    Some(bytes)
}

fn uuid(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32];
    parts
        .map(|range| hex.get(range).unwrap_or_default())
        .join("-")
}

/// As MariaDB prints it: the first of the longest runs of zero groups becomes `::`, even if it is
/// a single group, and addresses that hold an IPv4 address end in one.
fn inet6(bytes: [u8; 16]) -> String {
    let groups = Ipv6Addr::from(bytes).segments();
    let mut gap = 0..0;
    let mut start = 0;
    for (i, group) in groups.iter().enumerate() {
        if *group != 0 {
            start = i + 1;
        } else if i + 1 - start > gap.len() {
            gap = start..i + 1;
        }
    }
    let hex = |groups: &[u16]| {
        let groups: Vec<String> = groups.iter().map(|g| format!("{g:x}")).collect();
        groups.join(":")
    };
    let [.., a, b, c, d] = bytes;
    let tail = Ipv4Addr::new(a, b, c, d);
    match (gap.start, gap.end) {
        (0, 6) => format!("::{tail}"),
        (0, 5) if groups[5] == 0xffff => format!("::ffff:{tail}"),
        (_, 0) => hex(&groups),
        (start, end) => format!("{}::{}", hex(&groups[..start]), hex(&groups[end..])),
    }
}

/// The member of that number; 0 is the empty string that stands for an invalid value.
fn member(members: &[Bytes], number: u64) -> Option<Bytes> {
    match usize::try_from(number).ok()?.checked_sub(1) {
        None => Some(Bytes::new()),
        Some(place) => members.get(place).cloned(),
    }
}

fn set(members: &[Bytes], raw: &[u8]) -> Option<Bytes> {
    let mut out = Vec::new();
    for place in 0..raw.len() * 8 {
        if bit(raw, place) {
            if !out.is_empty() {
                out.push(b',');
            }
            out.extend_from_slice(members.get(place)?);
        }
    }
    Some(Bytes::from(out))
}
