use bytes::Bytes;
use outbox_core::layout::{Column, TableLayout};

use super::agree::{agrees, declared_numbers};
use super::cell::{Print, Size};
use super::charset::{self, Charset};
use super::error::Undecodable;
use super::table_map::{ColumnMap, Flavour, TableMap, code};

/// How to decode the rows of one table map.
#[derive(Clone, Debug)]
pub struct TableDecoder {
    /// Columns of the event, in their order.
    pub(super) columns: Vec<ColumnPlan>,
    /// Wanted cells that another wanted cell is a copy of: (from, to).
    pub(super) copies: Vec<(usize, usize)>,
    /// Number of wanted cells.
    pub(super) wanted: usize,
}

/// One column of the event.
#[derive(Clone, Debug)]
pub(super) struct ColumnPlan {
    pub(super) size: Size,
    /// JSON columns have a bit in partial updates.
    pub(super) json: bool,
    /// Place among the wanted cells, and how to print it.
    pub(super) wanted: Option<(usize, Print)>,
}

impl TableDecoder {
    /// Finds the wanted columns: by the event's own names, or else by their place, once every
    /// column of the event is proven to agree with the layout.
    ///
    /// Both servers log every column of the layout, VIRTUAL and INVISIBLE ones included, and no
    /// hidden ones (of functional indexes), so that places can be compared one to one.
    pub fn new(
        map: &TableMap,
        layout: &TableLayout,
        wanted: &[String],
    ) -> Result<Self, Undecodable> {
        let named = !map.columns.is_empty() && map.columns.iter().all(|c| c.name.is_some());
        if !named {
            prove(map, layout)?;
        }
        let mut columns = Vec::with_capacity(map.columns.len());
        for (i, column) in map.columns.iter().enumerate() {
            let name = name(map, layout, i);
            let size = Size::of(column).ok_or_else(|| Undecodable::Type {
                column: name.to_owned(),
                code: column.code,
            })?;
            columns.push(ColumnPlan {
                size,
                json: column.code == code::JSON,
                wanted: None,
            });
        }
        let mut copies = Vec::new();
        for (to, want) in wanted.iter().enumerate() {
            let place = (0..columns.len())
                .find(|i| name(map, layout, *i).eq_ignore_ascii_case(want))
                .ok_or_else(|| Undecodable::Absent(want.clone()))?;
            match &columns[place].wanted {
                Some((from, _)) => copies.push((*from, to)),
                None => {
                    let column = &map.columns[place];
                    // The layout tells what the event does not: zero fill, decimals, members.
                    let declared = layout
                        .column(want)
                        .filter(|c| agrees(column, c, map.flavour));
                    let print = print(column, declared, map.flavour, want)?;
                    columns[place].wanted = Some((to, print));
                }
            }
        }
        Ok(Self {
            columns,
            copies,
            wanted: wanted.len(),
        })
    }
}

/// The event's name of a column, or the layout's where that is proven to be the same.
fn name<'a>(map: &'a TableMap, layout: &'a TableLayout, place: usize) -> &'a str {
    match &map.columns[place].name {
        Some(name) => name,
        None => layout.columns.get(place).map_or("", |c| &c.name),
    }
}

/// Every column of an event without names has to be what the layout says at its place.
fn prove(map: &TableMap, layout: &TableLayout) -> Result<(), Undecodable> {
    if map.columns.len() != layout.columns.len() {
        return Err(Undecodable::Layout(format!(
            "{} columns in the event, {} in the table",
            map.columns.len(),
            layout.columns.len()
        )));
    }
    for (column, declared) in map.columns.iter().zip(&layout.columns) {
        if !agrees(column, declared, map.flavour) {
            return Err(Undecodable::Layout(format!(
                "column {} is {} in the table and of type {}, metadata {}, in the event",
                declared.name, declared.column_type, column.code, column.meta
            )));
        }
    }
    if let Some(places) = &map.primary_key {
        let key = places.iter().map(|p| layout.columns[*p].name.as_str());
        if !key.eq(layout.primary_key.iter().map(String::as_str)) {
            return Err(Undecodable::Layout("the primary key differs".to_owned()));
        }
    }
    Ok(())
}

fn print(
    column: &ColumnMap,
    declared: Option<&Column>,
    flavour: Flavour,
    name: &str,
) -> Result<Print, Undecodable> {
    use code::*;
    let unknown = || Undecodable::Type {
        column: name.to_owned(),
        code: column.code,
    };
    // Without signedness in the event only the layout can tell.
    let unsigned = || {
        column
            .unsigned
            .or(declared.map(|c| c.unsigned))
            .ok_or_else(|| {
                Undecodable::Layout(format!("whether column {name} is unsigned is not known"))
            })
    };
    let zerofill = |width: usize| {
        let zerofill = declared.is_some_and(|c| c.column_type.contains("zerofill"));
        if zerofill { width } else { 0 }
    };
    let numbers = declared
        .map(|c| declared_numbers(&c.column_type))
        .unwrap_or_default();
    let [scale, precision] = column.meta.to_le_bytes();
    Ok(match column.code {
        TINY | SHORT | INT24 | LONG | LONGLONG if unsigned()? => Print::UInt,
        TINY | SHORT | INT24 | LONG | LONGLONG => Print::Int,
        YEAR => Print::Year,
        BIT => Print::Bit,
        NEWDECIMAL => Print::Decimal {
            precision,
            scale,
            // ZEROFILL counts no sign, but it counts the point.
            zerofill: zerofill(usize::from(precision - scale)),
        },
        FLOAT | DOUBLE => {
            let declared = declared.ok_or_else(|| {
                Undecodable::Layout(format!("the decimals of column {name} are not known"))
            })?;
            let (width, decimals) = match numbers[..] {
                [width, decimals] if declared.column_type.contains(',') => (width, Some(decimals)),
                _ => (if column.code == FLOAT { 12 } else { 22 }, None),
            };
            Print::Float {
                decimals,
                zerofill: zerofill(width),
            }
        }
        STRING | VARCHAR | VAR_STRING | BLOB => text(column, declared, flavour, name)?,
        JSON => Print::Json,
        GEOMETRY | VECTOR => Print::Binary,
        ENUM => Print::Enum(members(column, declared, name)?),
        SET => Print::Set(members(column, declared, name)?),
        DATE => Print::Date,
        TIME => Print::OldTime,
        DATETIME => Print::OldDatetime,
        TIMESTAMP => Print::OldTimestamp,
        TIME2 => Print::Time(column.meta),
        DATETIME2 => Print::Datetime(column.meta),
        TIMESTAMP2 => Print::Timestamp(column.meta),
        _ => return Err(unknown()),
    })
}

/// Strings of every kind, binary ones included.
fn text(
    column: &ColumnMap,
    declared: Option<&Column>,
    flavour: Flavour,
    name: &str,
) -> Result<Print, Undecodable> {
    let fixed = column.code == code::STRING;
    if flavour == Flavour::Mariadb && fixed {
        // UUID and addresses look like BINARY in the event.
        match declared.map(|c| c.data_type.as_str()) {
            Some("uuid") => return Ok(Print::Uuid),
            Some("inet4") => return Ok(Print::Inet4),
            Some("inet6") => return Ok(Print::Inet6),
            Some(_) => {}
            None if column.collation == Some(63) => {
                return Err(Undecodable::Layout(format!(
                    "the type of column {name} is not known"
                )));
            }
            None => {}
        }
    }
    let charset = match (column.collation, declared) {
        (Some(id), _) => charset::of_collation(id).ok_or_else(|| Undecodable::Charset {
            column: name.to_owned(),
            charset: format!("of collation {id}"),
        })?,
        (None, Some(declared)) => declared.charset.as_deref().unwrap_or("binary"),
        (None, None) => {
            return Err(Undecodable::Layout(format!(
                "the character set of column {name} is not known"
            )));
        }
    };
    Ok(match charset {
        "binary" if fixed => Print::Padded(usize::from(column.meta)),
        "binary" => Print::Binary,
        other if fixed => Print::Char(convertible(other, name)?),
        other => Print::Text(convertible(other, name)?),
    })
}

fn convertible(charset: &str, column: &str) -> Result<Charset, Undecodable> {
    Charset::by_name(charset).ok_or_else(|| Undecodable::Charset {
        column: column.to_owned(),
        charset: charset.to_owned(),
    })
}

/// Names of ENUM and SET members: the event's own, or the layout's.
fn members(
    column: &ColumnMap,
    declared: Option<&Column>,
    name: &str,
) -> Result<Vec<Bytes>, Undecodable> {
    if let (Some(members), Some(id)) = (&column.members, column.collation) {
        let unknown = || Undecodable::Charset {
            column: name.to_owned(),
            charset: format!("of collation {id}"),
        };
        let charset = charset::of_collation(id).ok_or_else(unknown)?;
        if charset == "binary" {
            return Ok(members.clone());
        }
        let charset = convertible(charset, name)?;
        return members
            .iter()
            .map(|m| charset.decode(m.clone()).ok_or_else(unknown))
            .collect();
    }
    let declared = declared.ok_or_else(|| {
        Undecodable::Layout(format!("the members of column {name} are not known"))
    })?;
    Ok(declared
        .members
        .iter()
        .map(|m| Bytes::from(m.clone().into_bytes()))
        .collect())
}
