use outbox_core::Cell;

use super::error::RowError;
use super::plan::TableDecoder;
use super::rows_event::RowsEvent;

/// One changed row; cells in the order of `wanted`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The image before an update or delete.
    pub before: Option<Vec<Cell>>,
    /// The image after an insert or update.
    pub after: Option<Vec<Cell>>,
}

impl TableDecoder {
    /// The rows of an event. TIMESTAMP columns are printed at `zone_offset`, in seconds east of
    /// UTC. A malformed event ends after the error.
    pub fn rows<'a>(
        &'a self,
        event: &'a RowsEvent,
        zone_offset: i32,
    ) -> impl Iterator<Item = Result<Row, RowError>> + 'a {
        let _ = (event, zone_offset);
        std::iter::empty()
    }
}
