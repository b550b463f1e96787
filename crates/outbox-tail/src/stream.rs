//! The replication stream: groups of the binlog as [`crate::group::StreamItem`]s.
//!
//! **Progress.** [`BinlogSource`] reads events, checks their sums and feeds them to the
//! assembler, which knows what a group is. Items come out at the ends of groups only.
//!
//! **Resumption.** [`Source::open`] continues behind any end of a group. It first makes sure that
//! this server can: same history, nothing purged in between. Layouts that were proven at the end
//! of the last group are kept if that is where it continues.
//!
//! **Cancellation.** [`Source::next`] loses nothing when it is dropped: an event that was read is
//! fed before anything is waited for again.

mod assemble;
mod buffer;
mod connect;
mod error;
mod event;
mod facts;
mod mariadb;
mod place;
mod scan;
mod source;
mod sql;
mod tables;
mod tip;

pub use connect::{SslMode, StreamConfig, StreamTls, UrlSource, probe};
pub use error::{LostPosition, LostReason, StreamDisposition, StreamError};
pub use facts::{Family, Resume, ServerFacts, check_resume};
pub use mariadb::MariadbGtids;
pub use source::BinlogSource;
pub use tables::StreamTable;

#[cfg(doc)]
use crate::group::Source;
