//! Whether a column of an event is what the layout says.

use outbox_core::layout::Column;

use super::charset;
use super::table_map::{ColumnMap, Flavour, code};

/// Whether everything that the event says of a column agrees with the layout.
pub(super) fn agrees(column: &ColumnMap, declared: &Column, flavour: Flavour) -> bool {
    type_agrees(column, declared, flavour)
        && column.unsigned.is_none_or(|unsigned| {
            // YEAR is unsigned in the event and not declared so.
            column.code == code::YEAR || unsigned == declared.unsigned || is_float(column)
        })
        && column.nullable == declared.nullable
        && charset_agrees(column, declared)
        && members_agree(column, declared)
        && column
            .visible
            .is_none_or(|visible| visible != declared.invisible)
}

const fn is_float(column: &ColumnMap) -> bool {
    // `Column::unsigned` tells of integers and decimals only.
    matches!(column.code, code::FLOAT | code::DOUBLE)
}

fn charset_agrees(column: &ColumnMap, declared: &Column) -> bool {
    let Some(id) = column.collation else {
        return true;
    };
    match (charset::of_collation(id), declared.charset.as_deref()) {
        (Some("utf8mb3"), Some("utf8")) => true,
        (Some("binary"), None) => true,
        (Some(logged), Some(declared)) => logged == declared,
        _ => false,
    }
}

fn members_agree(column: &ColumnMap, declared: &Column) -> bool {
    column
        .members
        .as_ref()
        .is_none_or(|members| members.len() == declared.members.len())
}

fn type_agrees(column: &ColumnMap, declared: &Column, flavour: Flavour) -> bool {
    use code::*;
    let numbers = declared_numbers(&declared.column_type);
    let number = |place: usize, default: usize| numbers.get(place).copied().unwrap_or(default);
    let is = |code: u8, meta: usize| column.code == code && usize::from(column.meta) == meta;
    let octets = declared.octets.and_then(|n| usize::try_from(n).ok());
    let sized = |code: u8| octets.is_some_and(|n| is(code, n));
    let temporal = |new: u8, old: u8| {
        // The old formats of MariaDB have no size of their own where they have a fraction.
        is(new, usize::from(declared.fraction)) || declared.fraction == 0 && is(old, 0)
    };
    match declared.data_type.as_str() {
        "tinyint" => is(TINY, 0),
        "smallint" => is(SHORT, 0),
        "mediumint" => is(INT24, 0),
        "int" => is(LONG, 0),
        "bigint" => is(LONGLONG, 0),
        "float" => is(FLOAT, 4),
        "double" => is(DOUBLE, 8),
        "decimal" => is(NEWDECIMAL, (number(0, 10) << 8) | number(1, 0)),
        "year" => is(YEAR, 0),
        "date" => is(DATE, 0),
        "time" => temporal(TIME2, TIME),
        "datetime" => temporal(DATETIME2, DATETIME),
        "timestamp" => temporal(TIMESTAMP2, TIMESTAMP),
        "bit" => is(BIT, ((number(0, 1) / 8) << 8) | (number(0, 1) % 8)),
        "char" | "binary" => sized(STRING),
        "varchar" | "varbinary" => sized(VARCHAR),
        "tinytext" | "tinyblob" => is(BLOB, 1),
        "text" | "blob" => is(BLOB, 2),
        "mediumtext" | "mediumblob" => is(BLOB, 3),
        "longtext" | "longblob" => is(BLOB, 4),
        "json" => is(JSON, 4),
        "enum" => is(ENUM, if declared.members.len() < 256 { 1 } else { 2 }),
        "set" => {
            let bytes = declared.members.len().div_ceil(8);
            is(SET, if bytes > 4 { 8 } else { bytes })
        }
        "vector" if flavour == Flavour::Mysql => is(VECTOR, 4),
        "vector" => column.code == VARCHAR && column.collation.is_none_or(|id| id == 63),
        "geometry" | "point" | "linestring" | "polygon" | "multipoint" | "multilinestring"
        | "multipolygon" | "geomcollection" | "geometrycollection" => is(GEOMETRY, 4),
        "uuid" | "inet6" => is(STRING, 16),
        "inet4" => is(STRING, 4),
        _ => false,
    }
}

/// The numbers in the parentheses of `decimal(10,2) unsigned`.
pub(super) fn declared_numbers(column_type: &str) -> Vec<usize> {
    let inner = column_type
        .split_once('(')
        .and_then(|(_, rest)| rest.split_once(')'));
    inner.map_or_else(Vec::new, |(inner, _)| {
        inner
            .split(',')
            .map_while(|n| n.trim().parse().ok())
            .collect()
    })
}
