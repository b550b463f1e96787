use std::time::Duration;

/// `[poller]`, `[stuck]`, `[retention]`, and the window.
#[derive(Clone, Debug)]
pub struct PollerConfig {
    /// Time between two passes.
    pub interval: Duration,
    /// Time between two passes while the tail cannot run.
    pub degraded_interval: Duration,
    /// Rows of one pass over one table; a full one is followed by the next at once.
    pub batch: usize,
    /// A never-attempted row is the tail's for at least so long.
    pub pending_grace: Duration,
    /// Rows without outcome at most.
    pub max_in_flight: usize,
    /// Bytes of them at most; one row larger than this goes alone.
    pub max_in_flight_bytes: usize,
    /// Rows a second of a sweep that is asked for; `None`: as fast as it goes.
    pub sweep_rate: Option<u32>,
    /// Time between two patrols.
    pub stuck_interval: Duration,
    /// A claim this old is counted as stuck.
    pub warn_after: Duration,
    /// A claim this old is taken away.
    pub reset_after: Duration,
    /// More pending rows are warned of.
    pub backlog_warn: u64,
    /// Sent rows older than this are deleted.
    pub sent_after: Option<Duration>,
}

impl Default for PollerConfig {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(5),
            degraded_interval: Duration::from_secs(1),
            batch: 100,
            pending_grace: Duration::from_secs(30),
            max_in_flight: 4096,
            max_in_flight_bytes: 64 << 20,
            sweep_rate: None,
            stuck_interval: Duration::from_secs(60),
            warn_after: Duration::from_secs(300),
            reset_after: Duration::from_secs(1800),
            backlog_warn: 1000,
            sent_after: None,
        }
    }
}

/// How a sweep goes.
#[derive(Clone, Debug, Default)]
pub struct SweepConfig {
    /// Rows a second at most; `None`: as fast as it goes.
    pub rate: Option<u32>,
}

/// What a sweep did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Rows confirmed and recorded.
    pub published: u64,
    /// Rows whose failure was recorded.
    pub failed: u64,
    /// Everything that was pending when it began was looked at. Not where it was stopped, where
    /// the table is paused, or where the broker refuses row after row: what is left then is
    /// delivered by the passes.
    pub complete: bool,
}
