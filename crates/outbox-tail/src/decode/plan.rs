use outbox_core::layout::TableLayout;

use super::error::Undecodable;
use super::table_map::TableMap;

/// How to decode the rows of one table map.
#[derive(Clone, Debug)]
pub struct TableDecoder {}

impl TableDecoder {
    /// Finds the wanted columns: by the event's own names, or else by their place, once every
    /// column of the event is proven to agree with the layout.
    pub fn new(
        map: &TableMap,
        layout: &TableLayout,
        wanted: &[String],
    ) -> Result<Self, Undecodable> {
        let _ = (map, layout, wanted);
        Ok(Self {})
    }
}
