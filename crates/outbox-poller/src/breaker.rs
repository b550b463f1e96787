//! When the broker refuses row after row for a reason that is its own (an exchange that was taken
//! away, a permission that was withdrawn), the rows are not to pay for it: the table waits, and one
//! row now and then asks whether it is over.

use std::time::Duration;

use outbox_core::Failure;
use outbox_core::failure::FailureClass;
use tokio::time::Instant;
use tracing::{info, warn};

/// Refusals in a row, of one table and with one reason, that open the breaker.
pub(crate) const OPENS_AT: u32 = 50;
/// Reasons that lie with the broker, not with the row.
const BROKER_SIDE: [&str; 3] = ["exchange_missing", "exchange_refused", "topic_refused"];

/// The breaker of one table.
#[derive(Debug)]
pub(crate) struct Breaker {
    table: String,
    interval: Duration,
    code: &'static str,
    count: u32,
    /// Open, with the time of the next probe.
    probe: Option<Instant>,
}

impl Breaker {
    pub(crate) fn new(table: String, interval: Duration) -> Self {
        Self {
            table,
            interval,
            code: "",
            count: 0,
            probe: None,
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.probe.is_some()
    }

    /// Rows that may be published now: all, one (a probe), or none.
    pub(crate) fn room(&mut self, now: Instant) -> usize {
        match self.probe {
            None => usize::MAX,
            Some(at) if at > now => 0,
            Some(_) => {
                self.probe = Some(now + self.interval);
                1
            }
        }
    }

    pub(crate) fn confirmed(&mut self) {
        if self.probe.take().is_some() {
            info!(
                table = self.table,
                "the broker takes messages of this table again"
            );
        }
        self.count = 0;
    }

    /// Counts a refusal; true where the row is not to be charged.
    pub(crate) fn refused(&mut self, failure: &Failure) -> bool {
        let counts =
            failure.class == FailureClass::Permanent && BROKER_SIDE.contains(&failure.code);
        if !counts {
            self.count = 0;
            return false;
        }
        if self.is_open() {
            return true;
        }
        if self.code != failure.code {
            (self.code, self.count) = (failure.code, 0);
        }
        self.count += 1;
        if self.count <= OPENS_AT {
            return false;
        }
        self.probe = Some(Instant::now() + self.interval);
        warn!(
            table = self.table,
            reason = %failure,
            refused = OPENS_AT,
            "the broker refuses row after row of this table: it waits, and one row asks now and then"
        );
        true
    }
}
