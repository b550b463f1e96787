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
        let same = |a: &StatusValue, b: &StatusValue| match (a, b) {
            // As a column with a default collation compares them.
            (StatusValue::Text(a), StatusValue::Text(b)) => a.eq_ignore_ascii_case(b),
            _ => a == b,
        };
        let distinct = values
            .iter()
            .enumerate()
            .all(|(i, v)| !values[..i].iter().any(|w| same(v, w)));
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn value() -> impl Strategy<Value = StatusValue> {
        prop_oneof![
            (-3_i64..5).prop_map(StatusValue::Number),
            "[a-d]".prop_map(StatusValue::Text),
        ]
    }

    proptest! {
        #[test]
        fn five_values_are_taken_only_if_each_means_one_status(
            values in [value(), value(), value(), value(), value()],
        ) {
            let numbers = values.iter().all(|v| matches!(v, StatusValue::Number(_)));
            let texts = values.iter().all(|v| matches!(v, StatusValue::Text(_)));
            let distinct = values.iter().collect::<std::collections::HashSet<_>>().len() == 5;
            let taken = StatusValues::new(values);
            prop_assert_eq!(taken.is_some(), distinct && (numbers || texts));
            for status in Status::ALL {
                let Some(values) = &taken else { break };
                let back = match values.value(status) {
                    StatusValue::Number(n) => {
                        prop_assert_eq!(values.from_text(&n.to_string()), Some(status));
                        values.from_number(*n)
                    }
                    StatusValue::Text(t) => values.from_text(t),
                };
                prop_assert_eq!(back, Some(status));
            }
        }
    }

    #[test]
    fn texts_that_a_collation_holds_equal_are_one_value() {
        let texts = ["new", "NEW", "c", "d", "e"].map(|t| StatusValue::Text(t.into()));
        assert_eq!(StatusValues::new(texts), None);
    }

    #[test]
    fn names_come_back() {
        for status in Status::ALL {
            assert_eq!(Status::from_name(status.name()), Some(status));
        }
        assert_eq!(Status::from_name("done"), None);
    }
}
