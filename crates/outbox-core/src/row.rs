//! Rows of outbox tables, however they were read: by the binlog or by SELECT.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::failure::Failure;
use crate::message::Message;
use crate::status::Status;

/// Which of the configured `[[outbox]]` tables, by its place in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TableIdx(pub u16);

/// One column value. The binlog decoder and SELECT produce the same cells for the same row, so
/// that the message does not depend on the path that read it.
///
/// Everything but integers and binary strings is text in UTF-8, exactly as the server prints it
/// (JSON, decimals, floats, dates, enum and set by name, bit as an unsigned integer).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    /// SQL NULL.
    Null,
    /// A signed integer column.
    Int(i64),
    /// An unsigned integer, YEAR or BIT column.
    UInt(u64),
    /// Text in UTF-8, as the server prints it.
    Text(Bytes),
    /// BINARY (padded to its declared length), VARBINARY, BLOB, GEOMETRY, VECTOR.
    Binary(Bytes),
}

/// The primary key value of a row.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RowId {
    /// Signed integer key.
    Int(i64),
    /// Unsigned integer key.
    UInt(u64),
    /// String key (also MariaDB's UUID type, as printed).
    Text(Arc<str>),
    /// Binary key, padded; 16 bytes print as a hyphenated UUID.
    Binary(Arc<[u8]>),
}

impl fmt::Display for RowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(n) => n.fmt(f),
            Self::UInt(n) => n.fmt(f),
            Self::Text(s) => f.write_str(s),
            Self::Binary(b) => f.write_str(&crate::binder::print_binary(b)),
        }
    }
}

/// A row of any table, by its primary key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowKey {
    /// The table.
    pub table: TableIdx,
    /// The primary key value.
    pub id: RowId,
}

/// The unit of order: rows of one aggregate are delivered in commit order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Aggregate {
    /// The table; aggregates of different tables are different.
    pub table: TableIdx,
    /// `aggregate_type`, empty where the table has none.
    pub kind: Arc<str>,
    /// `aggregate_id`.
    pub id: Arc<str>,
}

/// The state columns of a row at the moment it was read. Times are microseconds since the epoch
/// in UTC, converted from the server's zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowState {
    /// The status column; `Pending` where the table tracks none.
    pub status: Status,
    /// Retries already spent.
    pub retry_count: u32,
    /// Not to be published before.
    pub next_retry_at: Option<i64>,
    /// Holder of a claim.
    pub locked_by: Option<String>,
    /// End of the claim.
    pub locked_until: Option<i64>,
}

/// A row with everything that is needed to deliver it and to record the outcome.
#[derive(Clone, Debug)]
pub struct OutboxRow {
    /// Identity.
    pub key: RowKey,
    /// Order.
    pub aggregate: Aggregate,
    /// State columns as read.
    pub state: RowState,
    /// The message to publish, or why none can be built from this row (always permanent).
    pub message: Result<Arc<Message>, Failure>,
}

impl OutboxRow {
    /// Bytes that this row keeps in memory, roughly: what windows are bounded by.
    #[must_use]
    pub fn weight(&self) -> usize {
        256 + self.message.as_ref().map_or(0, |m| m.weight())
    }
}
