//! Positions in a binlog. Only the window's low watermark is ever stored.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::gtid::GtidSet;

/// A place between two groups of a binlog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Position {
    /// Everything in the set has been handled; the server finds the rest itself.
    Gtid(GtidSet),
    /// A byte offset, which means something only on the server that wrote the file.
    File(FilePosition),
}

/// File and offset, with the server that they belong to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FilePosition {
    /// `@@server_uuid`; on MariaDB, which has none, what the ledger derives in its place.
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

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gtid(set) => write!(f, "gtid {set}"),
            Self::File(p) => write!(f, "{}:{}", p.file, p.pos),
        }
    }
}
