use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use outbox_core::Position;
use outbox_core::ports::{Disposition, PortError};

/// What to do about a [`StreamError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamDisposition {
    /// The server is away, busy or restarting: back off with jitter and open again behind the
    /// last completely read group.
    Backoff,
    /// The session is over (another instance leads).
    Fenced,
    /// The server no longer has (all of) what follows the position: record a gap, sweep the
    /// table, go on from where the server is now.
    LostPosition,
    /// No repetition helps: an operator must act first. The position did not move.
    Halt,
    /// A group cannot be read. The position did not move; `position skip` is the way past it.
    Undecodable,
}

/// Why the stream stopped. Prints itself, not its cause; never payload bytes, never a secret.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The server could not be reached, refused the connection for now, or went away.
    #[error("{operation}")]
    Unavailable {
        /// What was being done.
        operation: &'static str,
        /// Why it failed.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    /// A step took too long.
    #[error("{operation} took longer than {limit:?}")]
    Timeout {
        /// What was being done.
        operation: &'static str,
        /// How long it had.
        limit: Duration,
    },
    /// Not even a heartbeat for three of its periods: the link is dead.
    #[error("nothing heard from the server for {0:?}")]
    Silent(Duration),
    /// The server ended the stream: it shuts down, or the dump was killed.
    #[error("the server ended the binlog stream")]
    Ended,
    /// The next item was asked for while no dump is open.
    #[error("the binlog stream is not open")]
    NotOpen,
    /// The server is behind the position (a replica that lags): wait, nothing is lost.
    #[error("the server has not yet caught up with the stored position; missing: {missing}")]
    Behind {
        /// What the server does not have yet.
        missing: String,
    },
    /// Another client dumps with the same `server_id`; the server keeps only one of them.
    #[error("another client of this server uses server_id {server_id}; set mysql.server_id")]
    ServerIdTaken {
        /// The clashing id.
        server_id: u32,
        /// The server's message.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The position cannot be continued on this server.
    #[error("the position is lost: {0}")]
    LostPosition(Box<LostPosition>),
    /// Settings or grants forbid tailing.
    #[error("{check}: {advice}")]
    Halt {
        /// Name of the failed check, stable.
        check: &'static str,
        /// What an operator has to do.
        advice: String,
        /// The server's own words, where it said something.
        #[source]
        source: Option<Box<dyn StdError + Send + Sync>>,
    },
    /// The group that starts behind `after` cannot be read with certainty.
    #[error("the group behind {after} cannot be decoded, near {near}: {reason}")]
    Undecodable {
        /// The last position that is known to be good.
        after: String,
        /// File and offset of the offending event, as far as known.
        near: String,
        /// What is wrong with it.
        reason: String,
        /// The lower error, if there is one.
        #[source]
        source: Option<Box<dyn StdError + Send + Sync>>,
    },
    /// The table layouts could not be read.
    #[error("reading the layout of an outbox table")]
    Layouts(#[source] PortError),
}

/// A position that cannot be continued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostPosition {
    /// The position that was asked for.
    pub from: Position,
    /// Where the server is now; streaming can go on from here.
    pub to: Position,
    /// Why.
    pub reason: LostReason,
    /// Whether transactions are known to be missing from the stream; `false`: it cannot be told.
    pub certain: bool,
    /// What is known, such as the missing part of the set.
    pub detail: String,
}

/// Why a position is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LostReason {
    /// The binlog that follows the position was purged.
    Purged,
    /// A file position of another server.
    ForeignServer,
    /// The server does not know all of the stored set: it was reset, restored, or diverged.
    NotContained,
    /// The server's binlogs were reset since the position was taken.
    Reset,
    /// The kind of position (GTID or file) does not fit the server's mode any more.
    ModeChanged,
    /// The offset is not the start of an event.
    InvalidOffset,
}

impl LostReason {
    /// A stable name for gap records and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Purged => "purged",
            Self::ForeignServer => "foreign_server",
            Self::NotContained => "not_contained",
            Self::Reset => "reset",
            Self::ModeChanged => "mode_changed",
            Self::InvalidOffset => "invalid_offset",
        }
    }
}

impl fmt::Display for LostPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} (from {}, server now at {})",
            self.reason.name(),
            self.detail,
            self.from,
            self.to
        )
    }
}

impl StreamError {
    /// What to do about it.
    #[must_use]
    pub fn disposition(&self) -> StreamDisposition {
        match self {
            Self::Unavailable { .. }
            | Self::Timeout { .. }
            | Self::Silent(_)
            | Self::Ended
            | Self::NotOpen
            | Self::Behind { .. }
            | Self::ServerIdTaken { .. } => StreamDisposition::Backoff,
            Self::LostPosition(_) => StreamDisposition::LostPosition,
            Self::Halt { .. } => StreamDisposition::Halt,
            Self::Undecodable { .. } => StreamDisposition::Undecodable,
            Self::Layouts(e) => match e.disposition {
                Disposition::Backoff => StreamDisposition::Backoff,
                Disposition::Fenced => StreamDisposition::Fenced,
                Disposition::Halt => StreamDisposition::Halt,
            },
        }
    }

    pub(crate) fn halt(check: &'static str, advice: impl Into<String>) -> Self {
        Self::Halt {
            check,
            advice: advice.into(),
            source: None,
        }
    }
}
