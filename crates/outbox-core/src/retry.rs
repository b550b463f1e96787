//! The retry schedule of rows: 30, 60, 120, 240, 480 s by default, without jitter.

use std::time::Duration;

/// `[retry]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryPolicy {
    /// Delay before the first retry.
    pub base: Duration,
    /// Growth from one to the next, at least 1.
    pub factor: f64,
    /// Longest delay.
    pub cap: Duration,
    /// Retries before the row is failed.
    pub max_retries: u32,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            base: Duration::from_secs(30),
            factor: 2.0,
            cap: Duration::from_secs(480),
            max_retries: 5,
        }
    }
}

impl RetryPolicy {
    /// The delay before the next retry of a row that has spent `retry_count`, or `None` when its
    /// retries are spent and it fails.
    #[must_use]
    pub fn next(&self, retry_count: u32) -> Option<Duration> {
        if retry_count >= self.max_retries {
            return None;
        }
        let exponent = i32::try_from(retry_count).unwrap_or(i32::MAX);
        let seconds = self.base.as_secs_f64() * self.factor.powi(exponent);
        let cap = self.cap.as_secs_f64();
        Some(if seconds.is_finite() && seconds < cap {
            Duration::from_secs_f64(seconds)
        } else {
            self.cap
        })
    }
}
