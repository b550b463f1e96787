//! Row events of the outbox tables, decoded straight from the event's bytes.
//!
//! [`TableMap`] says what the event that follows holds, [`TableDecoder`] is the plan for one
//! table map against one layout, [`RowsEvent`] is the event, and [`TableDecoder::rows`] gives its
//! rows as cells that equal what SELECT gives for the same row.
//!
//! Nothing here trusts a length: every one is checked against what is left of the event, nothing
//! is allocated for a size that the input merely claims, and nothing is guessed. What cannot be
//! decoded with certainty is an error, and the row is left to the table.

mod agree;
mod cell;
mod charset;
mod decimal;
mod error;
mod float;
mod jsonb;
mod plan;
mod read;
mod row;
mod rows_event;
mod table_map;
mod temporal;

pub use error::{CellError, Malformed, PartialRow, RowError, Undecodable};
pub use jsonb::to_text as json_to_text;
pub use plan::TableDecoder;
pub use row::Row;
pub use rows_event::{RowsEvent, RowsKind};
pub use table_map::{ColumnMap, Flavour, TableMap};

#[cfg(test)]
mod tests;
