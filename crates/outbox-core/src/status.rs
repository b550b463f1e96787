//! The status of a row and its representation in the table.

use std::fmt;

/// States of a row. See `docs/architecture.md` for the transitions and who may make them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Status {
    /// To be published.
    Pending,
    /// Confirmed by the broker; final.
    Sent,
    /// Failed for good until an operator retries it.
    Failed,
    /// Claimed by a poller.
    Processing,
    /// Given up by the application or an operator; final, never published.
    Abandoned,
}

impl Status {
    /// All of them, in the order of their default numbers.
    pub const ALL: [Self; 5] = [
        Self::Pending,
        Self::Sent,
        Self::Failed,
        Self::Processing,
        Self::Abandoned,
    ];

    /// The name used in configuration, metrics and the API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Sent => "sent",
            Self::Failed => "failed",
            Self::Processing => "processing",
            Self::Abandoned => "abandoned",
        }
    }

    /// The status of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.name() == name)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How one status is stored: a number or a string.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum StatusValue {
    /// An integer column.
    Number(i64),
    /// A string or enum column.
    Text(String),
}

/// `status_values` of a table; the five values are distinct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusValues([StatusValue; 5]);

impl Default for StatusValues {
    fn default() -> Self {
        Self([0, 1, 2, 3, 4].map(StatusValue::Number))
    }
}

impl StatusValues {
    /// Values in the order of [`Status::ALL`]; `None` unless all are distinct and of one kind.
    #[must_use]
    pub fn new(values: [StatusValue; 5]) -> Option<Self> {
        let numbers = values
            .iter()
            .filter(|v| matches!(v, StatusValue::Number(_)))
            .count();
        let distinct = values
            .iter()
            .enumerate()
            .all(|(i, v)| !values[..i].contains(v));
        (distinct && (numbers == 0 || numbers == values.len())).then_some(Self(values))
    }

    /// How `status` is stored.
    #[must_use]
    pub fn value(&self, status: Status) -> &StatusValue {
        &self.0[status as usize]
    }

    /// The status that is stored as this number.
    #[must_use]
    pub fn from_number(&self, n: i64) -> Option<Status> {
        Status::ALL
            .into_iter()
            .find(|s| *self.value(*s) == StatusValue::Number(n))
    }

    /// The status that is stored as this text. Compared without regard to ASCII case, as MySQL's
    /// default collations do; a numeric text matches a number.
    #[must_use]
    pub fn from_text(&self, text: &str) -> Option<Status> {
        Status::ALL.into_iter().find(|s| match self.value(*s) {
            StatusValue::Text(t) => t.eq_ignore_ascii_case(text),
            StatusValue::Number(n) => text.parse() == Ok(*n),
        })
    }
}
