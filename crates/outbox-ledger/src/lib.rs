//! Everything that outboxd writes to MySQL: the position, statuses and retries, claims, the
//! lease, signals, its own tables.
//!
//! Every statement runs on a [`connect::Session`] of a [`connect::Db`]: READ COMMITTED, short lock
//! waits, the outbox's own time zone. Every write of a leader is fenced by its [`lease::Epoch`].

pub mod admin;
pub mod backlog;
mod behind;
pub mod cells;
pub mod claims;
pub mod connect;
pub mod demo;
pub mod error;
pub mod gap;
pub mod layouts;
pub mod lease;
mod look;
pub mod migrate;
pub mod parked;
pub mod pause;
pub mod position;
pub mod preflight;
mod record;
pub mod retention;
pub mod settle;
pub mod signal;
pub mod sql;
pub mod table;
pub mod zone;
