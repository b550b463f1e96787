//! Fakes of the ports, in memory and on tokio's clock, so that a paused clock makes days of retries
//! run in moments. They keep the promises that the ports' documentation makes, and fail as told.

mod broker;
mod gate;
mod table;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use broker::{FakeBroker, Submission};
pub use gate::FakeGate;
pub use table::{FakeRow, FakeTable, Transition, message};

/// Tests that panic while they hold a lock have failed already.
fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
