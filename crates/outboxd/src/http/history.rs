//! The last minutes, for the console's plots: one sample every two seconds, in memory.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::tailing;
use crate::run::Daemon;

/// Between two samples.
pub(super) const INTERVAL: Duration = Duration::from_secs(2);
/// Fifteen minutes.
const KEPT: usize = 450;

/// What happened in one interval.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Sample {
    /// Its end, milliseconds since 1970.
    pub(super) at: u64,
    /// Rows a second that the tail published.
    tail: f64,
    /// Rows a second that the poller published.
    poller: f64,
    /// Failed deliveries.
    failures: u64,
    /// Seconds that the tail is behind; `None` while none runs here.
    lag_seconds: Option<f64>,
    /// Rows in the window.
    in_flight: usize,
    /// Commit to confirm of the tail's rows, in milliseconds; `None` without any.
    p50_ms: Option<f64>,
    p95_ms: Option<f64>,
    p99_ms: Option<f64>,
}

/// The samples, oldest first.
#[derive(Default)]
pub(super) struct History(Mutex<VecDeque<Sample>>);

impl History {
    /// Samples until `stop`. It also lets the recorder drain its histograms, which would grow
    /// for as long as nobody asks for the metrics.
    pub(super) async fn run(&self, daemon: &Daemon, stop: &CancellationToken) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut before = daemon.meters.totals();
        let mut began = Instant::now();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            daemon.exposition.run_upkeep();
            let took = began.elapsed().as_secs_f64();
            if took < INTERVAL.as_secs_f64() / 2.0 {
                continue;
            }
            began = Instant::now();
            let (now, latency) = (daemon.meters.totals(), daemon.meters.take_latency());
            let rate =
                |now: u64, before: u64| crate::metrics::float(now.saturating_sub(before)) / took;
            let relay = tailing(daemon)
                .then(|| daemon.control.get().and_then(|c| c.relay))
                .flatten()
                .map(|r| r.status());
            self.push(Sample {
                at: since_1970(),
                tail: rate(now.tail, before.tail),
                poller: rate(now.poller, before.poller),
                failures: now.failures.saturating_sub(before.failures),
                lag_seconds: relay.as_ref().map(|r| r.lag.as_secs_f64()),
                in_flight: relay.map_or(0, |r| r.in_flight_rows),
                p50_ms: latency.map(|l| l.p50_ms),
                p95_ms: latency.map(|l| l.p95_ms),
                p99_ms: latency.map(|l| l.p99_ms),
            });
            before = now;
        }
    }

    fn push(&self, sample: Sample) {
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if samples.len() == KEPT {
            samples.pop_front();
        }
        samples.push_back(sample);
    }

    /// Those after a time in milliseconds.
    pub(super) fn after(&self, at: u64) -> Vec<Sample> {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let from = samples.partition_point(|s| s.at <= at);
        samples.iter().skip(from).cloned().collect()
    }
}

fn since_1970() -> u64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
