//! The metrics of the contract, each with its unit, and where they come from.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use metrics::{
    Counter, Gauge, Histogram, counter, describe_counter, describe_gauge, describe_histogram,
    gauge, histogram,
};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use outbox_core::ports::{Deferral, Observer, Path};
use outbox_core::status::Status;
use outbox_core::{FailureClass, TableIdx};

/// Upper bounds in seconds: a tail's milliseconds up to a poller's minutes.
const LATENCY: [f64; 16] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
];
const FLUSH: [f64; 10] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0];

/// Every deferral there is, so that each series exists before anything happened.
const DEFERRALS: [Deferral; 10] = [
    Deferral::Undecodable,
    Deferral::PartialImage,
    Deferral::Layout,
    Deferral::Oversized,
    Deferral::Xa,
    Deferral::Statement,
    Deferral::Held,
    Deferral::Delayed,
    Deferral::NotFresh,
    Deferral::NotVisible,
];

/// Installs the recorder; the handle renders the exposition.
pub fn install() -> Result<PrometheusHandle, BuildError> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(
            Matcher::Full("outboxd_commit_to_confirm_seconds".into()),
            &LATENCY,
        )?
        .set_buckets_for_metric(Matcher::Full("outboxd_flush_seconds".into()), &FLUSH)?
        .install_recorder()?;
    describe();
    Ok(handle)
}

fn describe() {
    describe_counter!(
        "outboxd_published_total",
        "Rows confirmed by the broker and recorded, by the path that published them."
    );
    describe_counter!(
        "outboxd_failures_total",
        "Failed deliveries of single rows, by class."
    );
    describe_counter!(
        "outboxd_deferred_total",
        "Rows (or groups) that the tail left to the table, by reason."
    );
    describe_counter!(
        "outboxd_overtaken_total",
        "Rows that overtook a refused row of their aggregate."
    );
    describe_histogram!(
        "outboxd_commit_to_confirm_seconds",
        "From the commit to the broker's confirm, live rows of the tail."
    );
    describe_histogram!(
        "outboxd_flush_seconds",
        "Duration of one write-back transaction."
    );
    describe_gauge!(
        "outboxd_tail_lag_seconds",
        "Age of the last group that was read; 0 at the live end."
    );
    describe_gauge!(
        "outboxd_tail_connected",
        "1 while the replication stream is open."
    );
    describe_gauge!("outboxd_broker_connected", "1 while connected to RabbitMQ.");
    describe_gauge!(
        "outboxd_broker_blocked",
        "1 while RabbitMQ blocks publishers (memory or disk alarm)."
    );
    describe_gauge!("outboxd_leader", "1 on the instance that leads.");
    describe_gauge!(
        "outboxd_paused",
        "1 while publishing is paused for every table."
    );
    describe_gauge!("outboxd_in_flight_rows", "Rows in the window.");
    describe_gauge!("outboxd_in_flight_bytes", "Bytes in the window.");
    describe_gauge!(
        "outboxd_backlog_rows",
        "Rows by status; sent rows are not counted."
    );
    describe_gauge!(
        "outboxd_oldest_pending_seconds",
        "Age of the oldest pending row that is due."
    );
    describe_gauge!(
        "outboxd_stuck_rows",
        "Rows in processing for longer than stuck.warn_after."
    );
    describe_gauge!(
        "outboxd_held_aggregates",
        "Aggregates that the tail leaves to the table for now."
    );
    describe_gauge!(
        "outboxd_checkpoint_age_seconds",
        "Time since the position was last stored."
    );
    describe_gauge!(
        "outboxd_binlog_gaps",
        "Recorded gaps that nobody has acknowledged."
    );
    describe_gauge!(
        "outboxd_binlog_retention_left_seconds",
        "How long the server keeps the binlog behind the stored position."
    );
    describe_gauge!("outboxd_build_info", "1, with the version as a label.");
    gauge!("outboxd_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    for name in [
        "outboxd_tail_lag_seconds",
        "outboxd_tail_connected",
        "outboxd_broker_connected",
        "outboxd_broker_blocked",
        "outboxd_leader",
        "outboxd_paused",
        "outboxd_in_flight_rows",
        "outboxd_in_flight_bytes",
        "outboxd_checkpoint_age_seconds",
        "outboxd_binlog_gaps",
    ] {
        gauge!(name).set(0.0);
    }
}

/// Gauges that only a leader sets.
const LEADERS: [&str; 6] = [
    "outboxd_broker_connected",
    "outboxd_broker_blocked",
    "outboxd_leader",
    "outboxd_paused",
    "outboxd_checkpoint_age_seconds",
    "outboxd_binlog_gaps",
];

/// The counted gauges of a table, all zero.
fn backlog(table: &str) {
    let t = || table.to_owned();
    for status in Status::ALL.into_iter().filter(|s| *s != Status::Sent) {
        gauge!("outboxd_backlog_rows", "table" => t(), "status" => status.name()).set(0.0);
    }
    gauge!("outboxd_oldest_pending_seconds", "table" => t()).set(0.0);
    gauge!("outboxd_stuck_rows", "table" => t()).set(0.0);
}

/// Microseconds, two significant digits; what is longer than an hour counts as an hour.
fn window() -> Option<hdrhistogram::Histogram<u64>> {
    hdrhistogram::Histogram::new_with_max(3_600_000_000, 2).ok()
}

/// Series of one table, resolved once.
struct TableSeries {
    name: String,
    tail: Counter,
    poller: Counter,
    retryable: Counter,
    permanent: Counter,
    overtaken: Counter,
    held: Gauge,
    deferred: [Counter; DEFERRALS.len()],
}

/// Counts into the recorder.
pub struct Meters {
    tables: Vec<TableSeries>,
    latency: Histogram,
    flush: Histogram,
    rows: Gauge,
    bytes: Gauge,
    lag: Gauge,
    connected: Gauge,
    checkpoint: Mutex<Option<Instant>>,
    /// The last lag, and when it was told.
    told: Mutex<Option<(Duration, Instant)>>,
    /// Microseconds from commit to confirm since they were last taken.
    window: Mutex<Option<hdrhistogram::Histogram<u64>>>,
    totals: [AtomicU64; 3],
}

/// How many rows since the process began.
#[derive(Clone, Copy, Debug)]
pub struct Totals {
    /// Published by the tail.
    pub tail: u64,
    /// Published by the poller.
    pub poller: u64,
    /// Failed deliveries.
    pub failures: u64,
}

/// Percentiles of commit to confirm, in milliseconds.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Latency {
    pub p50_ms: f64,
    pub p95_ms: f64,
    pub p99_ms: f64,
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Meters {
    /// Creates every series for these tables (`schema.table`).
    pub fn new(tables: &[String]) -> Self {
        let series = |table: &String| {
            let t = || table.clone();
            backlog(table);
            let held = gauge!("outboxd_held_aggregates", "table" => t());
            held.set(0.0);
            let made = |c: Counter| {
                c.absolute(0);
                c
            };
            TableSeries {
                name: t(),
                tail: made(counter!("outboxd_published_total", "table" => t(), "path" => "tail")),
                poller: made(
                    counter!("outboxd_published_total", "table" => t(), "path" => "poller"),
                ),
                retryable: made(
                    counter!("outboxd_failures_total", "table" => t(), "class" => "retryable"),
                ),
                permanent: made(
                    counter!("outboxd_failures_total", "table" => t(), "class" => "permanent"),
                ),
                overtaken: made(counter!("outboxd_overtaken_total", "table" => t())),
                held,
                deferred: DEFERRALS.map(|d| {
                    made(counter!("outboxd_deferred_total", "table" => t(), "reason" => d.name()))
                }),
            }
        };
        Self {
            tables: tables.iter().map(series).collect(),
            latency: histogram!("outboxd_commit_to_confirm_seconds"),
            flush: histogram!("outboxd_flush_seconds"),
            rows: gauge!("outboxd_in_flight_rows"),
            bytes: gauge!("outboxd_in_flight_bytes"),
            lag: gauge!("outboxd_tail_lag_seconds"),
            connected: gauge!("outboxd_tail_connected"),
            checkpoint: Mutex::new(None),
            told: Mutex::new(None),
            window: Mutex::new(window()),
            totals: Default::default(),
        }
    }

    fn with(&self, table: TableIdx, f: impl FnOnce(&TableSeries)) {
        if let Some(series) = self.tables.get(usize::from(table.0)) {
            f(series);
        }
    }

    /// Seconds since the position was stored by this process.
    pub fn checkpoint_age(&self) -> Option<Duration> {
        lock(&self.checkpoint).map(|at| at.elapsed())
    }

    /// How many rows so far.
    pub fn totals(&self) -> Totals {
        let [tail, poller, failures] = self.totals.each_ref().map(|n| n.load(Relaxed));
        Totals {
            tail,
            poller,
            failures,
        }
    }

    /// Percentiles since the last call; `None` where nothing was confirmed.
    pub fn take_latency(&self) -> Option<Latency> {
        let mut window = lock(&self.window);
        let window = window.as_mut().filter(|w| !w.is_empty())?;
        let ms = |q| float(window.value_at_quantile(q)) / 1000.0;
        let latency = Latency {
            p50_ms: ms(0.5),
            p95_ms: ms(0.95),
            p99_ms: ms(0.99),
        };
        window.reset();
        Some(latency)
    }

    /// Brings up to date what changes by the passing of time alone; called for every exposition.
    /// `running`: a relay runs here. Without one the tail falls behind unseen.
    pub fn refresh(&self, running: bool) {
        if let Some(age) = self.checkpoint_age() {
            gauge!("outboxd_checkpoint_age_seconds").set(age.as_secs_f64());
        }
        if !running {
            self.connected.set(0.0);
            if let Some((lag, at)) = *lock(&self.told) {
                self.lag.set((lag + at.elapsed()).as_secs_f64());
            }
        }
    }

    /// This instance no longer leads: what only a leader knows must not stand still.
    pub fn lead_ended(&self) {
        *lock(&self.checkpoint) = None;
        *lock(&self.told) = None;
        for gauge in [&self.rows, &self.bytes, &self.lag, &self.connected] {
            gauge.set(0.0);
        }
        for name in LEADERS {
            gauge!(name).set(0.0);
        }
        for table in &self.tables {
            table.held.set(0.0);
            backlog(&table.name);
        }
    }
}

/// A gauge takes floats; counts of rows are far below where they lose precision.
pub fn float(n: u64) -> f64 {
    u32::try_from(n).map_or(f64::from(u32::MAX), f64::from)
}

fn float_usize(n: usize) -> f64 {
    float(u64::try_from(n).unwrap_or(u64::MAX))
}

impl Observer for Meters {
    fn published(&self, table: TableIdx, path: Path, latency: Option<Duration>) {
        self.with(table, |t| match path {
            Path::Tail => t.tail.increment(1),
            Path::Poller => t.poller.increment(1),
        });
        let [tail, poller, _] = &self.totals;
        match path {
            Path::Tail => tail.fetch_add(1, Relaxed),
            Path::Poller => poller.fetch_add(1, Relaxed),
        };
        if let Some(latency) = latency {
            self.latency.record(latency.as_secs_f64());
            let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
            if let Some(window) = &mut *lock(&self.window) {
                window.saturating_record(micros);
            }
        }
    }

    fn failed(&self, table: TableIdx, class: FailureClass) {
        self.with(table, |t| match class {
            FailureClass::Retryable => t.retryable.increment(1),
            FailureClass::Permanent => t.permanent.increment(1),
        });
        self.totals[2].fetch_add(1, Relaxed);
    }

    fn deferred(&self, table: TableIdx, why: Deferral) {
        let at = DEFERRALS.iter().position(|d| *d == why);
        self.with(table, |t| {
            if let Some(c) = at.and_then(|at| t.deferred.get(at)) {
                c.increment(1);
            }
        });
    }

    fn overtaken(&self, table: TableIdx, rows: u64) {
        self.with(table, |t| t.overtaken.increment(rows));
    }

    fn in_flight(&self, rows: usize, bytes: usize) {
        self.rows.set(float_usize(rows));
        self.bytes.set(float_usize(bytes));
    }

    fn held(&self, table: TableIdx, aggregates: usize) {
        self.with(table, |t| t.held.set(float_usize(aggregates)));
    }

    fn lag(&self, lag: Duration) {
        self.lag.set(lag.as_secs_f64());
        *lock(&self.told) = Some((lag, Instant::now()));
    }

    fn flushed(&self, took: Duration, _rows: usize) {
        self.flush.record(took.as_secs_f64());
    }

    fn checkpointed(&self) {
        *lock(&self.checkpoint) = Some(Instant::now());
    }

    fn tail_connected(&self, connected: bool) {
        self.connected.set(f64::from(u8::from(connected)));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_series_of_the_contract_is_there_before_anything_happened() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let text = metrics::with_local_recorder(&recorder, || {
            describe();
            let meters = Meters::new(&["app.outbox".to_owned()]);
            meters.published(TableIdx(0), Path::Tail, Some(Duration::from_millis(3)));
            meters.flushed(Duration::from_millis(1), 1);
            recorder.handle().render()
        });
        for name in [
            "outboxd_published_total{table=\"app.outbox\",path=\"tail\"} 1",
            "outboxd_published_total{table=\"app.outbox\",path=\"poller\"} 0",
            "outboxd_failures_total{table=\"app.outbox\",class=\"permanent\"} 0",
            "outboxd_deferred_total{table=\"app.outbox\",reason=\"held\"} 0",
            "outboxd_backlog_rows{table=\"app.outbox\",status=\"abandoned\"} 0",
            "outboxd_leader 0",
            "outboxd_build_info{version=",
        ] {
            assert!(text.contains(name), "{name} is not in\n{text}");
        }
    }
}
