//! What can go wrong with one row, and what it means. Classified once, where it enters.

use std::fmt;

/// What a failure does to its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureClass {
    /// Back to pending with a backoff, spending one retry: nack, unroutable, anything unknown.
    Retryable,
    /// Failed at once: the row itself can never be published as it is.
    Permanent,
}

impl FailureClass {
    /// Label of metrics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Retryable => "retryable",
            Self::Permanent => "permanent",
        }
    }
}

/// Why a row was not delivered, in words for `last_error`: never a payload, never a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What it does to the row.
    pub class: FailureClass,
    /// A short stable code for metrics and the breaker, such as `unroutable`.
    pub code: &'static str,
    /// What a person needs to know, at most [`Failure::MAX_REASON`] characters when stored.
    pub reason: String,
}

impl Failure {
    /// Characters of `reason` that `last_error` holds.
    pub const MAX_REASON: usize = 1024;

    /// A permanent failure.
    pub fn permanent(code: &'static str, reason: impl Into<String>) -> Self {
        Self {
            class: FailureClass::Permanent,
            code,
            reason: reason.into(),
        }
    }

    /// A retryable failure.
    pub fn retryable(code: &'static str, reason: impl Into<String>) -> Self {
        Self {
            class: FailureClass::Retryable,
            code,
            reason: reason.into(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.reason)
    }
}
