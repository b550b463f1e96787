//! The ports: what the tail and the poller need of the database, of the broker and of each other.
//! Traits state what must hold; the real implementations and the fakes of outbox-testkit pass the
//! same tests.

mod gate;
mod ledger;
mod observe;
mod poll;
mod publish;

use std::error::Error as StdError;
use std::fmt;

pub use gate::{Gate, HeldRow, NoTail};
pub use ledger::{
    Behind, Layouts, Ledger, Recorded, RowOutcome, Seen, SettleReport, Settlement, Verdict,
};
pub use observe::{Deferral, NoObserver, Observer, Path};
pub use poll::{ClaimToken, Cursor, PollStore, Scan, StuckReport, TableBacklog};
pub use publish::{BrokerState, Generation, PublishOutcome, Publisher, Ticket};

/// Why a port could not do what it was asked. Decided once, where the error enters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Disposition {
    /// The server is away, busy or restarting: back off with jitter and ask again. Nothing that
    /// was asked for may be assumed done or not done.
    Backoff,
    /// Another instance leads, or an operator moved the position: this session ends at once and
    /// writes nothing more.
    Fenced,
    /// No repetition helps: missing grants, a missing table, corrupt own tables. The part stops,
    /// with a named check.
    Halt,
}

/// An error of a port. Prints the operation, not its cause; the cause is its source.
#[derive(Debug)]
pub struct PortError {
    /// What to do about it.
    pub disposition: Disposition,
    /// What was being done, such as `settle 120 rows of app.outbox`.
    pub operation: String,
    source: Box<dyn StdError + Send + Sync>,
}

/// Result of a port.
pub type PortResult<T> = Result<T, PortError>;

impl PortError {
    /// An error of `operation` with its cause.
    pub fn new(
        disposition: Disposition,
        operation: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self {
            disposition,
            operation: operation.into(),
            source: source.into(),
        }
    }
}

impl fmt::Display for PortError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.operation)
    }
}

impl StdError for PortError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&*self.source)
    }
}

/// The whole chain of causes on one line, outermost first.
#[must_use]
pub fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(e) = cause {
        text.push_str(": ");
        text.push_str(&e.to_string());
        cause = e.source();
    }
    text
}
