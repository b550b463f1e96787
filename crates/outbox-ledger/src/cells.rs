//! Columns read by SELECT, as the same cells that the binlog decoder makes of them.

use bytes::Bytes;
use outbox_core::layout::{Column, TableLayout};
use outbox_core::row::Cell;
use sqlx::Row;
use sqlx::mysql::MySqlRow;

use crate::error::{DbError, DbResult};
use crate::sql;

/// How one column is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Int,
    UInt,
    Text,
    Binary,
}

/// The SELECT list for some columns of a table, and how its results become cells.
#[derive(Clone, Debug)]
pub struct CellPlan {
    list: String,
    kinds: Vec<Kind>,
}

impl CellPlan {
    /// A plan for the columns in `wanted`, all of which the layout has.
    pub fn new(layout: &TableLayout, wanted: &[String]) -> DbResult<Self> {
        let mut expressions = Vec::with_capacity(wanted.len());
        let mut kinds = Vec::with_capacity(wanted.len());
        for name in wanted {
            let column = layout
                .column(name)
                .ok_or_else(|| DbError::Config(format!("the table has no column {name}")))?;
            let (expression, kind) = expression(column);
            expressions.push(expression);
            kinds.push(kind);
        }
        Ok(Self {
            list: expressions.join(", "),
            kinds,
        })
    }

    /// The SELECT list.
    #[must_use]
    pub fn list(&self) -> &str {
        &self.list
    }

    /// How many columns it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// The cells of one row, whose first columns are those of the list.
    pub fn decode(&self, row: &MySqlRow) -> DbResult<Vec<Cell>> {
        let bytes = |i| -> DbResult<Option<Bytes>> {
            let value: Option<&[u8]> = row.try_get_unchecked(i)?;
            Ok(value.map(Bytes::copy_from_slice))
        };
        self.kinds
            .iter()
            .enumerate()
            .map(|(i, kind)| {
                let cell = match kind {
                    Kind::Int => row.try_get_unchecked::<Option<i64>, _>(i)?.map(Cell::Int),
                    Kind::UInt => row.try_get_unchecked::<Option<u64>, _>(i)?.map(Cell::UInt),
                    Kind::Text => bytes(i)?.map(Cell::Text),
                    Kind::Binary => bytes(i)?.map(Cell::Binary),
                };
                Ok(cell.unwrap_or(Cell::Null))
            })
            .collect()
    }
}

fn expression(column: &Column) -> (String, Kind) {
    let name = sql::quote(&column.name);
    match column.data_type.as_str() {
        "tinyint" | "smallint" | "mediumint" | "int" | "bigint" if column.unsigned => {
            (name, Kind::UInt)
        }
        "tinyint" | "smallint" | "mediumint" | "int" | "bigint" => (name, Kind::Int),
        "year" | "bit" => (format!("CAST({name} AS UNSIGNED)"), Kind::UInt),
        "binary" | "varbinary" | "tinyblob" | "blob" | "mediumblob" | "longblob" | "vector"
        | "geometry" | "point" | "linestring" | "polygon" | "multipoint" | "multilinestring"
        | "multipolygon" | "geometrycollection" | "geomcollection" => (name, Kind::Binary),
        // The server sends these as text in the session's utf8mb4 by itself; a CAST would make
        // NULL of what is over max_allowed_packet.
        "char" | "varchar" | "tinytext" | "text" | "mediumtext" | "longtext" | "enum" | "set"
        | "json" => (name, Kind::Text),
        // The binary protocol has forms of its own for the others: decimals, floats, times.
        _ => (format!("CAST({name} AS CHAR)"), Kind::Text),
    }
}
