//! What can go wrong with the database, classified once, by MySQL's error number.

use std::io;
use std::time::Duration;

use outbox_core::ports::{Disposition, PortError};

/// The cause of a [`PortError`] of this crate.
#[derive(Debug, thiserror::Error)]
pub enum DbError {
    /// The server refused a statement.
    #[error("mysql error {number}: {message}")]
    Server {
        /// MySQL's error number.
        number: u16,
        /// The server's words.
        message: String,
    },
    /// The connection could not be opened or was lost.
    #[error("connection lost")]
    Io(#[source] io::Error),
    /// TLS could not be agreed on.
    #[error("no TLS session")]
    Tls(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// No answer in time; nothing may be assumed done or not done.
    #[error("no answer within {} s", .0.as_secs())]
    Timeout(Duration),
    /// Every connection of the pool was taken for too long.
    #[error("no free connection")]
    Busy,
    /// Another instance leads, or an operator moved the position.
    #[error("epoch {held} is over")]
    Fenced {
        /// The epoch that this session holds.
        held: u64,
    },
    /// Our own tables say what they cannot say.
    #[error("{0}")]
    Corrupt(String),
    /// A setting that cannot work.
    #[error("{0}")]
    Config(String),
    /// Anything else that the driver reports.
    #[error("database driver")]
    Driver(#[source] sqlx::Error),
}

/// Result of one step inside an operation.
pub type DbResult<T> = Result<T, DbError>;

/// Row lock wait timeout: only the statement was rolled back (but see
/// `innodb_rollback_on_timeout`).
pub const LOCK_WAIT_TIMEOUT: u16 = 1205;
/// Deadlock: the whole transaction was rolled back.
pub const DEADLOCK: u16 = 1213;
/// MySQL's answer to `NOWAIT` on a locked row; MariaDB answers with [`LOCK_WAIT_TIMEOUT`].
pub const LOCK_NOWAIT: u16 = 3572;

/// Refusals that no repetition changes: privileges, missing objects, wrong statements, values
/// that a column cannot hold. Everything else may pass: a server that is full, read-only,
/// restarting or short of connections recovers, and an unknown error is taken for one of those.
const HALTING: &[u16] = &[
    1044, // database access denied
    1048, // column cannot be null
    1049, // unknown database
    1051, // unknown table
    1054, // unknown column
    1062, // duplicate entry
    1064, // syntax
    1109, // unknown table in a list
    1142, // table privilege
    1143, // column privilege
    1144, 1146, // no such table
    1176, // no such index
    1193, // unknown variable
    1227, // administrative privilege
    1264, // out of range
    1265, // data truncated
    1298, // unknown time zone
    1364, // no default value
    1366, // incorrect value
    1370, // routine privilege
    1406, // data too long
    1452, // foreign key
    1665, // binlog_format forbids it at READ COMMITTED
    3819, // check constraint
    4025, // check constraint (MariaDB)
];

impl DbError {
    /// MySQL's error number, for a refusal by the server.
    #[must_use]
    pub fn number(&self) -> Option<u16> {
        match self {
            Self::Server { number, .. } => Some(*number),
            _ => None,
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn disposition(&self) -> Disposition {
        match self {
            Self::Server { number, .. } if HALTING.contains(number) => Disposition::Halt,
            Self::Corrupt(_) | Self::Config(_) => Disposition::Halt,
            Self::Fenced { .. } => Disposition::Fenced,
            Self::Driver(e) => match e {
                sqlx::Error::PoolClosed
                | sqlx::Error::WorkerCrashed
                | sqlx::Error::BeginFailed
                | sqlx::Error::Protocol(_) => Disposition::Backoff,
                _ => Disposition::Halt,
            },
            Self::Server { .. } | Self::Io(_) | Self::Tls(_) | Self::Timeout(_) | Self::Busy => {
                Disposition::Backoff
            }
        }
    }

    /// The error of an operation that failed because of this.
    pub fn during(self, operation: impl Into<String>) -> PortError {
        PortError::new(self.disposition(), operation, self)
    }
}

impl From<sqlx::Error> for DbError {
    fn from(error: sqlx::Error) -> Self {
        match error {
            sqlx::Error::Database(e) => {
                match e.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
                    Some(e) => Self::Server {
                        number: e.number(),
                        message: e.message().to_owned(),
                    },
                    None => Self::Driver(sqlx::Error::Database(e)),
                }
            }
            sqlx::Error::Io(e) => Self::Io(e),
            sqlx::Error::Tls(e) => Self::Tls(e),
            sqlx::Error::PoolTimedOut => Self::Busy,
            other => Self::Driver(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(number: u16) -> Disposition {
        DbError::Server {
            number,
            message: String::new(),
        }
        .disposition()
    }

    #[test]
    fn a_missing_grant_or_table_halts_and_a_busy_server_does_not() {
        for number in [1142, 1146, 1054, 1227] {
            assert_eq!(server(number), Disposition::Halt, "{number}");
        }
        // Password being rotated, read-only during a failover, too many connections, shutdown,
        // disk full, lock wait, deadlock, and one that nobody knows.
        for number in [1045, 1290, 1040, 1053, 1114, 1205, 1213, 59_999] {
            assert_eq!(server(number), Disposition::Backoff, "{number}");
        }
        assert_eq!(
            DbError::Fenced { held: 1 }.disposition(),
            Disposition::Fenced
        );
    }

    #[test]
    fn an_error_prints_each_cause_once() {
        let error = DbError::Io(io::Error::other("reset")).during("settle 3 rows");
        assert_eq!(
            outbox_core::ports::chain(&error),
            "settle 3 rows: connection lost: reset"
        );
    }
}
