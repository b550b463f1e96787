//! The replication stream: groups of the binlog as [`crate::group::StreamItem`]s.

mod error;

pub use error::{LostPosition, LostReason, StreamDisposition, StreamError};
