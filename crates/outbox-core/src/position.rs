//! Positions in a binlog. Only the window's low watermark is ever stored.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::gtid::GtidSet;
use crate::gtid::mariadb::MariadbPosition;

/// A place between two groups of a binlog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Position {
    /// Everything in the set has been handled; the server finds the rest itself.
    Gtid(GtidSet),
    /// The last transaction of each of MariaDB's domains.
    Mariadb(MariadbPosition),
    /// A byte offset, which means something only on the server that wrote the file.
    File(FilePosition),
}

/// File and offset, with the server that they belong to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FilePosition {
    /// `@@server_uuid`; on MariaDB, which has none, what is derived in its place.
    pub server: String,
    /// Binlog file name.
    pub file: String,
    /// Byte offset of the next event.
    pub pos: u64,
}

impl FilePosition {
    /// Ordering within one server: by the file's number, then offset. `None` for another server
    /// or another base name, whose order is unknown.
    #[must_use]
    pub fn compare(&self, other: &Self) -> Option<std::cmp::Ordering> {
        let split = |f: &str| {
            let (base, n) = f.rsplit_once('.')?;
            Some((base.to_owned(), n.parse::<u64>().ok()?))
        };
        let ((a, n), (b, m)) = (split(&self.file)?, split(&other.file)?);
        (self.server == other.server && a == b).then(|| (n, self.pos).cmp(&(m, other.pos)))
    }
}

impl Position {
    /// Whether everything before `other` lies before this position too; `None` where the two
    /// cannot be compared (other server, other kind).
    #[must_use]
    pub fn reaches(&self, other: &Self) -> Option<bool> {
        match (self, other) {
            (Self::Gtid(a), Self::Gtid(b)) => Some(a.contains_all(b)),
            (Self::Mariadb(a), Self::Mariadb(b)) => Some(a.list.reaches(&b.list)),
            (Self::File(a), Self::File(b)) => a.compare(b).map(std::cmp::Ordering::is_ge),
            _ => None,
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gtid(set) => write!(f, "gtid {set}"),
            Self::Mariadb(p) => p.fmt(f),
            Self::File(p) => write!(f, "{}:{}", p.file, p.pos),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use proptest::prelude::*;

    use super::*;

    fn at(server: &str, file: &str, pos: u64) -> FilePosition {
        FilePosition {
            server: server.into(),
            file: file.into(),
            pos,
        }
    }

    proptest! {
        #[test]
        fn files_are_ordered_by_number_then_offset(
            (n, m) in (0_u64..2_000_000, 0_u64..2_000_000),
            (a, b) in (any::<u64>(), any::<u64>()),
        ) {
            // Six digits at least, and more once there are more: text would misorder them.
            let left = at("s", &format!("binlog.{n:06}"), a);
            let right = at("s", &format!("binlog.{m:06}"), b);
            prop_assert_eq!(left.compare(&right), Some((n, a).cmp(&(m, b))));
            prop_assert_eq!(left.compare(&left), Some(Ordering::Equal));
        }
    }

    #[test]
    fn what_cannot_be_compared_is_not() {
        let here = at("s", "binlog.000001", 4);
        for other in [
            at("t", "binlog.000001", 4),
            at("s", "mysql-bin.000001", 4),
            at("s", "binlog", 4),
            at("s", "binlog.x", 4),
        ] {
            assert_eq!(here.compare(&other), None);
        }
    }
}
