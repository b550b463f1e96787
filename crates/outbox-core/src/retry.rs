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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_default_schedule_is_the_documented_one() {
        let policy = RetryPolicy::default();
        let seconds: Vec<_> = (0..7)
            .map(|n| policy.next(n).map(|d| d.as_secs()))
            .collect();
        let documented = [30, 60, 120, 240, 480].map(Some);
        assert_eq!(seconds[..5], documented);
        assert_eq!(seconds[5..], [None, None]);
    }

    proptest! {
        #[test]
        fn delays_never_shrink_and_never_pass_the_cap(
            base in 0_u64..10_000,
            factor in 1.0_f64..1e6,
            cap in 0_u64..100_000,
            max_retries in 0_u32..200,
            count in any::<u32>(),
        ) {
            let (base, cap) = (Duration::from_millis(base), Duration::from_millis(cap));
            let policy = RetryPolicy { base, factor, cap, max_retries };
            prop_assert_eq!(policy.next(count).is_some(), count < max_retries);
            let delays: Vec<_> = (0..max_retries).map(|n| policy.next(n).unwrap()).collect();
            prop_assert!(delays.is_sorted());
            prop_assert!(delays.iter().all(|d| *d <= cap));
            prop_assert_eq!(delays.first().copied(), (max_retries > 0).then(|| base.min(cap)));
        }
    }
}
