use bytes::Bytes;

use super::error::Malformed;
use super::read::Reader;

/// Which server wrote the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// MySQL.
    Mysql,
    /// MariaDB.
    Mariadb,
}

/// A TABLE_MAP event: what the row events with its id hold.
#[derive(Clone, Debug)]
pub struct TableMap {
    /// The number that row events refer to.
    pub table_id: u64,
    /// Database.
    pub schema: String,
    /// Table.
    pub table: String,
    /// Which server wrote it.
    pub flavour: Flavour,
    /// Columns in their order.
    pub columns: Vec<ColumnMap>,
    /// Places of the primary key's columns, where the event has them.
    pub primary_key: Option<Vec<usize>>,
}

/// One column of a table map. What is `None` is not in the event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ColumnMap {
    /// Type code, with the real type of ENUM and SET.
    pub code: u8,
    /// Type metadata; its meaning depends on the type.
    pub meta: u16,
    /// NULL allowed.
    pub nullable: bool,
    /// Numeric columns only.
    pub unsigned: Option<bool>,
    /// Collation of text, ENUM and SET columns; 63 is binary.
    pub collation: Option<u16>,
    /// Name, with `binlog_row_metadata = FULL`.
    pub name: Option<String>,
    /// Members of ENUM and SET, in the column's character set, with FULL metadata.
    pub members: Option<Vec<Bytes>>,
    /// Not INVISIBLE.
    pub visible: Option<bool>,
}

/// Type codes of the table map.
pub(super) mod code {
    pub(in super::super) const TINY: u8 = 1;
    pub(in super::super) const SHORT: u8 = 2;
    pub(in super::super) const LONG: u8 = 3;
    pub(in super::super) const FLOAT: u8 = 4;
    pub(in super::super) const DOUBLE: u8 = 5;
    pub(in super::super) const TIMESTAMP: u8 = 7;
    pub(in super::super) const LONGLONG: u8 = 8;
    pub(in super::super) const INT24: u8 = 9;
    pub(in super::super) const DATE: u8 = 10;
    pub(in super::super) const TIME: u8 = 11;
    pub(in super::super) const DATETIME: u8 = 12;
    pub(in super::super) const YEAR: u8 = 13;
    pub(in super::super) const VARCHAR: u8 = 15;
    pub(in super::super) const BIT: u8 = 16;
    pub(in super::super) const TIMESTAMP2: u8 = 17;
    pub(in super::super) const DATETIME2: u8 = 18;
    pub(in super::super) const TIME2: u8 = 19;
    pub(in super::super) const BLOB_COMPRESSED: u8 = 140;
    pub(in super::super) const VARCHAR_COMPRESSED: u8 = 141;
    pub(in super::super) const VECTOR: u8 = 242;
    pub(in super::super) const JSON: u8 = 245;
    pub(in super::super) const NEWDECIMAL: u8 = 246;
    pub(in super::super) const ENUM: u8 = 247;
    pub(in super::super) const SET: u8 = 248;
    pub(in super::super) const BLOB: u8 = 252;
    pub(in super::super) const VAR_STRING: u8 = 253;
    pub(in super::super) const STRING: u8 = 254;
    pub(in super::super) const GEOMETRY: u8 = 255;
}

const WHAT: &str = "table map";

impl TableMap {
    /// Parses an event's body: the bytes behind the 19-byte header, without the checksum.
    pub fn parse(data: &Bytes, flavour: Flavour) -> Result<Self, Malformed> {
        let mut r = Reader::new(data, WHAT);
        let table_id = r.uint(6)?;
        r.take(2)?; // flags
        let schema = name(&mut r)?;
        let table = name(&mut r)?;
        let count = r.lenenc_len()?;
        let codes = r.take(count)?;
        let metadata = r.lenenc_bytes()?;
        let nulls = r.take(count.div_ceil(8))?;
        let mut columns = columns(codes, metadata, nulls)?;
        let primary_key = optional(&mut r, data, flavour, &mut columns)?;
        Ok(Self {
            table_id,
            schema,
            table,
            flavour,
            columns,
            primary_key,
        })
    }

    /// Table id, schema and table of an event's body, as cheaply as can be.
    #[must_use]
    pub fn peek(data: &[u8]) -> Option<(u64, &[u8], &[u8])> {
        let mut r = Reader::new(data, WHAT);
        let table_id = r.uint(6).ok()?;
        r.take(2).ok()?;
        let schema = r.lenenc_bytes().ok()?;
        r.take(1).ok()?;
        let table = r.lenenc_bytes().ok()?;
        Some((table_id, schema, table))
    }
}

fn name(r: &mut Reader<'_>) -> Result<String, Malformed> {
    let bytes = r.lenenc_bytes()?;
    r.take(1)?; // a terminating zero
    text(bytes)
}

fn text(bytes: &[u8]) -> Result<String, Malformed> {
    String::from_utf8(bytes.to_vec()).map_err(|_| Malformed::new(WHAT))
}

fn columns(codes: &[u8], metadata: &[u8], nulls: &[u8]) -> Result<Vec<ColumnMap>, Malformed> {
    let mut r = Reader::new(metadata, WHAT);
    let mut columns = Vec::with_capacity(codes.len());
    for (i, &code) in codes.iter().enumerate() {
        let (code, meta) = type_and_meta(code, &mut r)?;
        columns.push(ColumnMap {
            code,
            meta,
            nullable: super::read::bit(nulls, i),
            ..ColumnMap::default()
        });
    }
    Ok(columns)
}

fn type_and_meta(code: u8, r: &mut Reader<'_>) -> Result<(u8, u16), Malformed> {
    use code::*;
    let mut two = || -> Result<[u8; 2], Malformed> {
        let bytes = r.take(2)?;
        Ok([bytes[0], bytes[1]])
    };
    Ok(match code {
        FLOAT | DOUBLE | TIMESTAMP2 | DATETIME2 | TIME2 | JSON | GEOMETRY | BLOB
        | BLOB_COMPRESSED | VECTOR => (code, u16::from(r.u8()?)),
        VARCHAR | VARCHAR_COMPRESSED | VAR_STRING | BIT => (code, u16::from_le_bytes(two()?)),
        NEWDECIMAL => (code, u16::from_be_bytes(two()?)),
        STRING => {
            // The real type, and a length of up to 10 bits: the upper two are hidden, inverted,
            // in the type's byte.
            let [kind, low] = two()?;
            if matches!(kind, ENUM | SET) {
                (kind, u16::from(low))
            } else {
                let high = u16::from(!kind & 0x30) << 4;
                (STRING, high | u16::from(low))
            }
        }
        _ => (code, 0),
    })
}

/// Optional metadata: fields of type, length, value. Unknown ones are skipped.
fn optional(
    r: &mut Reader<'_>,
    data: &Bytes,
    flavour: Flavour,
    columns: &mut [ColumnMap],
) -> Result<Option<Vec<usize>>, Malformed> {
    let mut primary_key = None;
    while !r.is_empty() {
        let kind = r.u8()?;
        let mut field = Reader::new(r.lenenc_bytes()?, WHAT);
        match kind {
            1 => signedness(field.rest(), columns)?,
            2 => default_charset(&mut field, columns, |c| is_text(c, flavour))?,
            3 => column_charsets(&mut field, columns, |c| is_text(c, flavour))?,
            4 => names(&mut field, columns)?,
            5 => members(&mut field, data, columns, code::SET)?,
            6 => members(&mut field, data, columns, code::ENUM)?,
            8 | 9 => primary_key = Some(key(&mut field, columns.len(), kind == 9)?),
            10 => default_charset(&mut field, columns, is_member)?,
            11 => column_charsets(&mut field, columns, is_member)?,
            12 => {
                for (i, column) in columns.iter_mut().enumerate() {
                    column.visible = Some(high_bit(field.rest(), i)?);
                }
            }
            _ => {}
        }
    }
    Ok(primary_key)
}

/// Columns that the lists of character sets count. Each server counts one binary type more.
fn is_text(column: &ColumnMap, flavour: Flavour) -> bool {
    use code::*;
    match column.code {
        STRING | VAR_STRING | VARCHAR | BLOB | BLOB_COMPRESSED | VARCHAR_COMPRESSED => true,
        VECTOR => flavour == Flavour::Mysql,
        GEOMETRY => flavour == Flavour::Mariadb,
        _ => false,
    }
}

const fn is_member(column: &ColumnMap) -> bool {
    matches!(column.code, code::ENUM | code::SET)
}

const fn is_numeric(column: &ColumnMap) -> bool {
    use code::*;
    matches!(
        column.code,
        TINY | SHORT | INT24 | LONG | LONGLONG | NEWDECIMAL | FLOAT | DOUBLE | YEAR
    )
}

/// Bit `n` of a bitmap whose bits are numbered from the highest of each byte.
fn high_bit(map: &[u8], n: usize) -> Result<bool, Malformed> {
    let byte = map.get(n / 8).ok_or(Malformed::new(WHAT))?;
    Ok(byte & (0x80 >> (n % 8)) != 0)
}

fn signedness(map: &[u8], columns: &mut [ColumnMap]) -> Result<(), Malformed> {
    for (i, column) in columns.iter_mut().filter(|c| is_numeric(c)).enumerate() {
        column.unsigned = Some(high_bit(map, i)?);
    }
    Ok(())
}

fn collation(r: &mut Reader<'_>) -> Result<u16, Malformed> {
    u16::try_from(r.lenenc()?).map_err(|_| r.malformed())
}

fn default_charset(
    r: &mut Reader<'_>,
    columns: &mut [ColumnMap],
    of: impl Fn(&ColumnMap) -> bool,
) -> Result<(), Malformed> {
    let default = collation(r)?;
    for column in columns.iter_mut().filter(|c| of(c)) {
        column.collation = Some(default);
    }
    // Exceptions: the place among columns of this kind, ascending, and the collation.
    let mut columns = columns.iter_mut().filter(|c| of(c)).enumerate();
    while !r.is_empty() {
        let place = r.lenenc_len()?;
        let other = collation(r)?;
        let (_, column) = columns.find(|(i, _)| *i == place).ok_or(r.malformed())?;
        column.collation = Some(other);
    }
    Ok(())
}

fn column_charsets(
    r: &mut Reader<'_>,
    columns: &mut [ColumnMap],
    of: impl Fn(&ColumnMap) -> bool,
) -> Result<(), Malformed> {
    for column in columns.iter_mut().filter(|c| of(c)) {
        column.collation = Some(collation(r)?);
    }
    Ok(())
}

fn names(r: &mut Reader<'_>, columns: &mut [ColumnMap]) -> Result<(), Malformed> {
    for column in columns {
        column.name = Some(text(r.lenenc_bytes()?)?);
    }
    Ok(())
}

fn members(
    r: &mut Reader<'_>,
    data: &Bytes,
    columns: &mut [ColumnMap],
    code: u8,
) -> Result<(), Malformed> {
    for column in columns.iter_mut().filter(|c| c.code == code) {
        let count = r.lenenc_len()?;
        // Each member takes at least its length byte.
        if count > r.rest().len() {
            return Err(r.malformed());
        }
        let mut list = Vec::with_capacity(count);
        for _ in 0..count {
            list.push(super::read::share(data, r.lenenc_bytes()?));
        }
        column.members = Some(list);
    }
    Ok(())
}

fn key(r: &mut Reader<'_>, columns: usize, prefixed: bool) -> Result<Vec<usize>, Malformed> {
    let mut places = Vec::new();
    while !r.is_empty() {
        let place = r.lenenc_len()?;
        if prefixed {
            r.lenenc()?; // length of the indexed prefix
        }
        if place >= columns {
            return Err(r.malformed());
        }
        places.push(place);
    }
    Ok(places)
}
