//! From cells to a row with its message. The tail and the poller bind the same way, so that the
//! message does not depend on the path.

use std::sync::Arc;

use crate::layout::TableLayout;
use crate::row::{Cell, OutboxRow, TableIdx};
use crate::spec::TableSpec;

/// Binds the cells of one table. Cells come in the order of [`Binder::wanted`].
#[derive(Debug)]
pub struct Binder {
    wanted: Vec<String>,
}

/// What is not in the row itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct BindContext {
    /// Seconds since the epoch; the message's timestamp where the table has no `created_at`.
    pub commit_time: Option<i64>,
    /// Seconds east of UTC of the DATETIME columns' zone.
    pub zone_offset: i32,
}

/// A table that cannot be bound: each missing or unusable column, by role and name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.join("; "))]
pub struct LayoutError(pub Vec<String>);

/// A row that has no identity or no known status: it can be neither published nor recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BindError(pub String);

impl Binder {
    /// Checks the layout and finds the columns. Absent optional columns degrade silently here;
    /// the caller says so once.
    pub fn new(
        table: TableIdx,
        spec: Arc<TableSpec>,
        layout: &TableLayout,
        app_id: Arc<str>,
    ) -> Result<Self, LayoutError> {
        let _ = (table, spec, layout, app_id);
        unimplemented!()
    }

    /// The columns to read, in the order that [`Binder::bind`] takes their cells.
    #[must_use]
    pub fn wanted(&self) -> &[String] {
        &self.wanted
    }

    /// Binds one row.
    pub fn bind(&self, cells: &[Cell], context: BindContext) -> Result<OutboxRow, BindError> {
        let _ = (cells, context);
        unimplemented!()
    }
}

/// 16 bytes as a hyphenated UUID, others in hex.
#[must_use]
pub fn print_binary(bytes: &[u8]) -> String {
    let _ = bytes;
    unimplemented!()
}
