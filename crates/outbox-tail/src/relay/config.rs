use std::time::Duration;

use outbox_core::TableIdx;
use outbox_core::ports::{Deferral, PortError};

use crate::stream::{LostPosition, StreamError};

/// How the relay works; defaults are those of the configuration page.
#[derive(Clone, Copy, Debug)]
pub struct RelayConfig {
    /// Longest time that an outcome waits for its flush.
    pub flush_interval: Duration,
    /// Outcomes that make a flush at once, and the most that one flush records.
    pub flush_rows: usize,
    /// Least time between two positions that are stored without outcomes.
    pub checkpoint_interval: Duration,
    /// A row that was committed longer ago is read back before it is published.
    pub verify_after: Duration,
    /// Rows in the window.
    pub max_in_flight: usize,
    /// Bytes in the window.
    pub max_in_flight_bytes: usize,
    /// How long a stop waits for the broker's answers and the last flush.
    pub drain_deadline: Duration,
    /// How long the window may be full before the dump is closed on purpose.
    pub full_for: Duration,
    /// How long a row that is not visible is looked for before it counts as deleted.
    pub absent_for: Duration,
    /// How often the rows that hold aggregates are looked up.
    pub hold_check_interval: Duration,
    /// How long new rows wait behind rows that the poller is delivering.
    pub handover_wait: Duration,
}

impl Default for RelayConfig {
    fn default() -> Self {
        Self {
            flush_interval: Duration::from_millis(50),
            flush_rows: 1000,
            checkpoint_interval: Duration::from_secs(10),
            verify_after: Duration::from_secs(10),
            max_in_flight: 4096,
            max_in_flight_bytes: 64 << 20,
            drain_deadline: Duration::from_secs(10),
            full_for: Duration::from_secs(10),
            absent_for: Duration::from_secs(10),
            hold_check_interval: Duration::from_secs(5),
            handover_wait: Duration::from_secs(5),
        }
    }
}

/// Why a relay ended without having been stopped. Prints itself, not its cause.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// Another instance leads, or an operator moved the position: nothing more was written.
    #[error("the session is over")]
    Fenced(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The server no longer has what follows the position. What was read before is settled, as
    /// far as the drain's deadline allowed.
    #[error("the position is lost: {0}")]
    LostPosition(Box<LostPosition>),
    /// A group cannot be read. What was read before it is settled, as far as the drain's deadline
    /// allowed; the position stands before it.
    #[error("a group of the binlog cannot be read")]
    Undecodable(#[source] StreamError),
    /// The stream needs an operator first.
    #[error("the binlog cannot be tailed")]
    Stream(#[source] StreamError),
    /// The ledger needs an operator first.
    #[error("the ledger cannot be written")]
    Ledger(#[source] PortError),
    /// The stream passed over rows of a table without status columns, which has no other way to
    /// deliver them. The position stands before them.
    #[error("rows of table {} cannot be left to it ({}): it has no status columns", .table.0, .why.name())]
    NothingToLeaveTo {
        /// The table.
        table: TableIdx,
        /// Why they were passed over.
        why: Deferral,
    },
}

impl RelayError {
    /// Whether only the reading is over, while what was read can still be delivered.
    pub(super) fn is_of_the_stream(&self) -> bool {
        match self {
            Self::Fenced(_) | Self::Ledger(_) => false,
            Self::LostPosition(_)
            | Self::Undecodable(_)
            | Self::Stream(_)
            | Self::NothingToLeaveTo { .. } => true,
        }
    }
}
