//! The domain of outboxd, without I/O: what a row, a message and a position are, how rows in
//! flight are accounted, what a failure means, and the ports through which the other crates
//! reach the database and the broker.
//!
//! The law that everything follows from: **the table is the truth, the binlog is a hint that
//! makes it fast.** A hint may be dropped; a row may not.
//!
//! This crate knows nobody: no runtime, no driver, no clock of its own.

pub mod binder;
pub mod failure;
pub mod gtid;
pub mod layout;
pub mod message;
pub mod order;
pub mod ports;
pub mod position;
pub mod retry;
pub mod row;
pub mod spec;
pub mod status;
pub mod template;
pub mod window;

pub use failure::{Failure, FailureClass};
pub use message::Message;
pub use position::Position;
pub use row::{Aggregate, Cell, OutboxRow, RowId, RowKey, TableIdx};
pub use status::Status;
