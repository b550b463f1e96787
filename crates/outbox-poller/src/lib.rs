//! The fallback poller: whatever the tail did not settle, this delivers, in order, from the table.
//!
//! * [`Poller::run`] looks for rows that are due or left behind, claims and delivers them;
//! * [`Poller::sweep`] delivers everything that is pending, at the publisher's speed;
//! * [`Poller::patrol`] takes away claims that are too old, warns of backlog, and deletes old sent
//!   rows.
//!
//! It reaches the database and the broker through the ports of outbox-core only. Before it
//! publishes anything it asks the tail ([`outbox_core::ports::Gate`]), which alone decides about
//! the order of an aggregate.

mod breaker;
mod config;
mod deliver;
mod flight;
mod handle;
mod patrol;
mod poller;
mod record;
mod sweep;

pub use config::{PollerConfig, SweepConfig, SweepReport};
pub use handle::{Paused, PollerHandle};
pub use poller::Poller;
