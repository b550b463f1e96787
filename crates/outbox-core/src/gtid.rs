//! MySQL GTID sets, tags included (`uuid:tag:1-5`), with interval arithmetic.

use std::fmt;
use std::str::FromStr;

/// A set of transactions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GtidSet {}

/// One transaction: source, tag (empty: none), number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gtid {
    /// The originating server's UUID, as its 16 bytes.
    pub source: [u8; 16],
    /// The tag, lower case, empty for none.
    pub tag: String,
    /// Transaction number, from 1.
    pub number: u64,
}

/// Text that is no GTID set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a GTID set: {0}")]
pub struct GtidError(pub String);

/// One source and tag with its intervals `[start, end)`, for the dump request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GtidSid<'a> {
    /// Server UUID.
    pub source: [u8; 16],
    /// Tag, empty for none.
    pub tag: &'a str,
    /// Half-open, ascending, disjoint.
    pub intervals: &'a [(u64, u64)],
}

impl GtidSet {
    /// Adds one transaction; false if it was there.
    pub fn add(&mut self, gtid: &Gtid) -> bool {
        let _ = gtid;
        unimplemented!()
    }
    /// Whether every transaction of `other` is in this set.
    #[must_use]
    pub fn contains_all(&self, other: &Self) -> bool {
        let _ = other;
        unimplemented!()
    }
    /// Whether it holds this transaction.
    #[must_use]
    pub fn contains(&self, gtid: &Gtid) -> bool {
        let _ = gtid;
        unimplemented!()
    }
    /// This set without `other`.
    #[must_use]
    pub fn subtract(&self, other: &Self) -> Self {
        let _ = other;
        unimplemented!()
    }
    /// Both together.
    pub fn merge(&mut self, other: &Self) {
        let _ = other;
        unimplemented!()
    }
    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        unimplemented!()
    }
    /// Number of transactions.
    #[must_use]
    pub fn len(&self) -> u64 {
        unimplemented!()
    }
    /// Sources and tags in order.
    pub fn sids(&self) -> impl Iterator<Item = GtidSid<'_>> {
        std::iter::empty()
    }
}

impl fmt::Display for GtidSet {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        unimplemented!()
    }
}

impl FromStr for GtidSet {
    type Err = GtidError;
    fn from_str(_: &str) -> Result<Self, GtidError> {
        unimplemented!()
    }
}
