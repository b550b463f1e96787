use std::fmt;

use outbox_core::Cell;

/// Bytes that do not hold what they claim to hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed {what}")]
pub struct Malformed {
    /// The part that could not be read.
    pub what: &'static str,
}

impl Malformed {
    pub(super) const fn new(what: &'static str) -> Self {
        Self { what }
    }
}

/// Why no row of this table map can be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Undecodable {
    /// The event and the layout do not describe the same columns, and the event has no names.
    #[error("the event does not agree with the table's layout: {0}")]
    Layout(String),
    /// A needed column is not in the event at all.
    #[error("column {0} is not in the event")]
    Absent(String),
    /// A needed column's character set cannot be converted.
    #[error("column {column}: character set {charset} cannot be converted")]
    Charset {
        /// The column.
        column: String,
        /// The character set or, where it is unknown, the collation's number.
        charset: String,
    },
    /// A needed column's type is not known.
    #[error("column {column}: type {code} is not known")]
    Type {
        /// The column.
        column: String,
        /// The type's code in the table map.
        code: u8,
    },
}

/// Why one cell has no value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CellError {
    /// The row image does not hold the column (`binlog_row_image` other than FULL).
    #[error("not in the row image")]
    Absent,
    /// The image holds only the difference of a JSON document (`binlog_row_value_options`).
    #[error("only a difference of the document is in the row image")]
    PartialJson,
    /// The value is not valid for its type or its character set.
    #[error("not a valid {0}")]
    Invalid(&'static str),
}

/// A row of which some wanted cells have no value. The others are known: mostly the key is.
#[derive(Clone, PartialEq, Eq)]
pub struct PartialRow {
    /// Place in `wanted` of the first cell without a value.
    pub column: usize,
    /// What is wrong with that one.
    pub why: CellError,
    /// The image before the change, in the order of `wanted`.
    pub before: Option<Vec<Option<Cell>>>,
    /// The image after the change, in the order of `wanted`.
    pub after: Option<Vec<Option<Cell>>>,
}

// Errors get logged, cells must not be.
impl fmt::Debug for PartialRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PartialRow")
            .field("column", &self.column)
            .field("why", &self.why)
            .finish_non_exhaustive()
    }
}

/// Why a row could not be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// The row image lacks wanted columns, or has only a difference of them. The rows behind it
    /// can still be read.
    #[error("wanted column number {}: {}", .0.column + 1, .0.why)]
    PartialImage(Box<PartialRow>),
    /// A wanted cell is not valid. The rows behind it can still be read.
    #[error("wanted column number {}: {}", .0.column + 1, .0.why)]
    Undecodable(Box<PartialRow>),
    /// The event cannot be read any further: it and the rows behind it are unknown.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}
