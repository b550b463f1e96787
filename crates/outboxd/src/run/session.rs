//! What a leader does, from taking the lease to giving it back.
//!
//! Progress: position, sweep of what was pending before it, then the tail and the poller side by
//! side. Resumption: everything begins from what is stored, so a session that ends for whatever
//! reason is followed by one that repeats at most what was in flight. Cancellation: the tail
//! drains, the last checkpoint is written, then the tasks end.

use std::sync::Arc;
use std::time::Duration;

use outbox_core::layout::TableLayout;
use outbox_core::ports::{Disposition, Layouts as _, PortError, Publisher as _};
use outbox_core::spec::{TableSpec, Tracking};
use outbox_core::{Position, TableIdx};
use outbox_ledger::gap::NewGap;
use outbox_ledger::layouts::TableLayouts;
use outbox_ledger::lease::{Epoch, Lease};
use outbox_ledger::position::PositionStore;
use outbox_ledger::zone;
use outbox_poller::{Poller, PollerConfig, PollerHandle, SweepConfig};
use outbox_tail::rabbit::RabbitPublisher;
use outbox_tail::relay::{Relay, RelayConfig, RelayError, RelayHandle};
use outbox_tail::stream::{self, BinlogSource, LostPosition, StreamConfig, StreamTable};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::gate::{FencedSource, SwitchGate};
use super::servers::{self, jittered};
use super::{Control, Daemon, chores, tables};
use crate::health::Part;
use crate::supervise::Crew;

/// How long the parts of a session may take to end: the tail's drain and its last checkpoint.
const DRAIN: Duration = Duration::from_secs(15);
/// Pause before a tail that cannot run is tried again; the poller delivers meanwhile.
const TAIL_AGAIN: Duration = Duration::from_secs(5);

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// Another epoch has begun.
    #[error("the session is over")]
    Fenced,
    /// It may go better next time.
    #[error("{0:#}")]
    Again(anyhow::Error),
    /// An operator must act first.
    #[error("{0:#}")]
    Halt(anyhow::Error),
}

impl From<PortError> for SessionError {
    fn from(e: PortError) -> Self {
        match e.disposition {
            Disposition::Fenced => Self::Fenced,
            Disposition::Backoff => Self::Again(e.into()),
            Disposition::Halt => Self::Halt(e.into()),
        }
    }
}

/// Leads until stopped, fenced, or unable to go on.
pub async fn lead(
    daemon: &Arc<Daemon>,
    lease: &Lease,
    epoch: &Epoch,
    stop: &CancellationToken,
) -> Result<(), SessionError> {
    metrics::gauge!("outboxd_leader").set(1.0);
    let session = stop.child_token();
    let mut crew = Crew::new(session.clone());
    {
        let (daemon, lease, epoch, stop) = (
            daemon.clone(),
            lease.clone(),
            epoch.clone(),
            session.clone(),
        );
        crew.vital("lease", async move {
            Ok(chores::renew(&daemon, &lease, &epoch, &stop).await?)
        });
    }
    {
        let (daemon, epoch, stop) = (daemon.clone(), epoch.clone(), session.clone());
        crew.vital("signals", async move {
            Ok(chores::obey(&daemon, &epoch, &stop).await?)
        });
    }
    {
        let (daemon, epoch, stop) = (daemon.clone(), epoch.clone(), session.clone());
        crew.vital("delivery", async move {
            Ok(deliver(&daemon, &epoch, &stop).await?)
        });
    }
    let ended = crew.join(DRAIN + Duration::from_secs(5)).await;
    daemon.control.set(None);
    metrics::gauge!("outboxd_leader").set(0.0);
    daemon.meters.lead_ended();
    ended.map_err(|e| match e.downcast::<SessionError>() {
        Ok(e) => e,
        Err(e) => SessionError::Again(e),
    })
}

/// The parts that deliver, once everything is resolved.
struct Delivery {
    tables: Vec<Arc<TableSpec>>,
    positions: PositionStore,
    poller: Arc<Poller>,
    poller_handle: PollerHandle,
    gate: Arc<SwitchGate>,
    tail_publisher: Arc<RabbitPublisher>,
    ledger: Arc<dyn outbox_core::ports::Ledger>,
    layouts: Arc<TableLayouts>,
    stream: StreamConfig,
    binlog_kept: Option<Duration>,
    meters: Arc<tables::SessionMeters>,
}

async fn deliver(
    daemon: &Arc<Daemon>,
    epoch: &Epoch,
    stop: &CancellationToken,
) -> Result<(), SessionError> {
    let config = &daemon.config;
    let tables = Arc::new(tables::open(daemon).await?);
    let specs: Vec<Arc<TableSpec>> = tables.iter().map(|t| t.spec.clone()).collect();
    let name: Arc<str> = config.name.as_str().into();
    let zone_offset = zone::offset(&daemon.db).await?;
    let meters = Arc::new(tables::SessionMeters::new(daemon, &tables));
    let mut crew = Crew::new(stop.child_token());
    let parts = crew.token();
    // The publishers outlive those who publish: a drain still takes the broker's answers.
    let publishers = CancellationToken::new();
    let publishing = Arc::new(publishers.clone().drop_guard());
    let (tail_publisher, driver) = RabbitPublisher::new(servers::broker(config, "tail"));
    crew.vital("tail publisher", run_driver(driver, publishers.clone()));
    let (poll_publisher, driver) = RabbitPublisher::new(servers::broker(config, "poller"));
    crew.vital("poller publisher", run_driver(driver, publishers));
    let ledger = outbox_ledger::settle::TailLedger::new(
        daemon.db.clone(),
        epoch.clone(),
        tables.clone(),
        config.retry,
    );
    let store = outbox_ledger::claims::PollLedger::new(
        daemon.db.clone(),
        epoch.clone(),
        tables.clone(),
        config.retry,
        config.poller.lock_ttl,
    );
    let gate = Arc::new(SwitchGate::default());
    let (poller, poller_handle) = Poller::new(
        poller_config(daemon),
        specs.clone(),
        Arc::new(store),
        poll_publisher.clone(),
        gate.clone(),
        meters.clone(),
    );
    let ledger: Arc<dyn outbox_core::ports::Ledger> = Arc::new(ledger);
    let poller = poller.with_ledger(ledger.clone());
    let stream_config = servers::stream(config, daemon.db.schema(), zone_offset);
    // For a metric only: a server that does not answer now is the tail's matter.
    let facts = stream::probe(&stream_config).await.ok();
    let kept = facts.and_then(|f| f.expire_logs_seconds).filter(|s| *s > 0);
    let delivery = Arc::new(Delivery {
        meters,
        binlog_kept: kept.map(Duration::from_secs),
        tables: specs,
        positions: PositionStore::new(daemon.db.clone(), name.clone()),
        poller: Arc::new(poller),
        poller_handle,
        gate,
        tail_publisher: tail_publisher.clone(),
        ledger,
        layouts: Arc::new(TableLayouts::new(
            daemon.db.clone(),
            name,
            tables.iter().map(|t| t.spec.clone()).collect(),
        )),
        stream: stream_config,
    });
    daemon.control.set(Some(delivery.control(None)));
    // Before anything is published.
    chores::pauses(daemon).await?;
    {
        let (daemon, stop) = (daemon.clone(), parts.clone());
        crew.vital("broker state", async move {
            watch_brokers(&daemon, [tail_publisher, poll_publisher], &stop).await;
            Ok(())
        });
    }
    if !daemon.health.get().broken_tables.is_empty() {
        let (daemon, stop) = (daemon.clone(), parts.clone());
        crew.vital("broken tables", async move {
            Ok(tables::watch_broken(&daemon, &stop).await?)
        });
    }
    if config.poller.enabled {
        let (poller, stop) = (delivery.poller.clone(), parts.clone());
        let patrol = delivery.poller.clone();
        let patrol_stop = parts.clone();
        crew.vital("patrol", async move {
            Ok(patrol
                .patrol(patrol_stop)
                .await
                .map_err(SessionError::from)?)
        });
        if !config.tail.enabled {
            daemon
                .health
                .change(|h| h.tail = Part::good("off by configuration"));
            let publishing = publishing.clone();
            crew.vital("poller", async move {
                let _publishing = publishing;
                Ok(poller.run(stop).await.map_err(SessionError::from)?)
            });
        }
    }
    if config.tail.enabled {
        let (daemon, epoch, delivery, stop) = (
            daemon.clone(),
            epoch.clone(),
            delivery.clone(),
            parts.clone(),
        );
        let publishing = publishing.clone();
        crew.vital("tail", async move {
            let _publishing = publishing;
            Ok(tail(&daemon, &epoch, &delivery, &stop).await?)
        });
    }
    drop(publishing);
    crew.join(DRAIN)
        .await
        .map_err(|e| match e.downcast::<SessionError>() {
            Ok(e) => e,
            Err(e) => SessionError::Again(e),
        })
}

async fn run_driver(
    driver: outbox_tail::rabbit::Driver,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    driver.run(stop).await;
    Ok(())
}

impl Delivery {
    fn control(&self, relay: Option<RelayHandle>) -> Control {
        Control {
            relay,
            poller: self.poller_handle.clone(),
            tables: self.tables.clone().into(),
            binlog_kept: self.binlog_kept,
        }
    }

    /// The coordinate that the server has now, with the layouts that hold there: those that were
    /// the same before and after it was read.
    async fn coordinate(
        &self,
        daemon: &Daemon,
    ) -> Result<(Position, Vec<(String, TableLayout)>), TailEnd> {
        let before = self.layouts_now().await?;
        let facts = stream::probe(&self.stream)
            .await
            .map_err(|e| TailEnd::Cannot(anyhow::Error::new(e)))?;
        let after = self.layouts_now().await?;
        // A replica may not have come to the layout that the primary has.
        let known = daemon.config.mysql.replica_url.is_none();
        let same = before
            .into_iter()
            .zip(after)
            .filter(|(b, a)| known && b == a);
        Ok((facts.coordinate, same.map(|(layout, _)| layout).collect()))
    }

    async fn layouts_now(&self) -> Result<Vec<(String, TableLayout)>, TailEnd> {
        let mut layouts = Vec::new();
        for (spec, n) in self.tables.iter().zip(0..) {
            let (layout, _) = self.layouts.current(TableIdx(n)).await?;
            layouts.push((spec.full_name(), layout));
        }
        Ok(layouts)
    }

    fn tracks_all(&self) -> bool {
        self.tables.iter().all(|t| t.tracking == Tracking::Status)
    }
}

/// Sweeps, then tails; begins again after a lost position, and tries again while the tail cannot
/// run, with the poller delivering meanwhile.
async fn tail(
    daemon: &Arc<Daemon>,
    epoch: &Epoch,
    delivery: &Arc<Delivery>,
    stop: &CancellationToken,
) -> Result<(), SessionError> {
    let mut poller = None;
    while !stop.is_cancelled() {
        match once(daemon, epoch, delivery, &mut poller, stop).await {
            Ok(()) => break,
            Err(TailEnd::Session(e)) => return Err(e),
            Err(TailEnd::Lost(lost)) => lost_position(daemon, epoch, delivery, *lost).await?,
            Err(TailEnd::Cannot(e)) => {
                error!(
                    error = format!("{e:#}"),
                    "cannot tail the binlog; the poller delivers meanwhile"
                );
                daemon
                    .health
                    .change(|h| h.tail = Part::bad(format!("{e:#}")));
                start_poller(daemon, delivery, &mut poller, stop);
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = tokio::time::sleep(jittered(TAIL_AGAIN)) => {}
                }
            }
        }
    }
    // The poller's own end, so that its last records are made before the session ends.
    if let Some(task) = poller {
        match task.await {
            Ok(result) => result?,
            Err(e) => {
                return Err(SessionError::Again(anyhow::anyhow!(
                    "the poller panicked: {e}"
                )));
            }
        }
    }
    Ok(())
}

/// Why one run of the tail ended.
enum TailEnd {
    Session(SessionError),
    Lost(Box<LostPosition>),
    Cannot(anyhow::Error),
}

impl<E: Into<SessionError>> From<E> for TailEnd {
    fn from(e: E) -> Self {
        Self::Session(e.into())
    }
}

type PollerTask = tokio::task::JoinHandle<Result<(), SessionError>>;

/// The poller runs once the first sweep is over, or cannot be made; it is watched by the tail's
/// task, which ends with it.
fn start_poller(
    daemon: &Daemon,
    delivery: &Arc<Delivery>,
    task: &mut Option<PollerTask>,
    stop: &CancellationToken,
) {
    if task.is_none() && daemon.config.poller.enabled {
        let (poller, stop) = (delivery.poller.clone(), stop.clone());
        *task = Some(tokio::spawn(async move {
            poller.run(stop).await.map_err(SessionError::from)
        }));
    }
}

async fn once(
    daemon: &Arc<Daemon>,
    epoch: &Epoch,
    delivery: &Arc<Delivery>,
    poller: &mut Option<PollerTask>,
    stop: &CancellationToken,
) -> Result<(), TailEnd> {
    let (start, age) = position(daemon, epoch, delivery, stop).await?;
    let Some(start) = start else { return Ok(()) };
    let mut config = delivery.stream.clone();
    config.position_stored_at = age.and_then(|age| {
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .ok()?;
        i64::try_from(now.saturating_sub(age).as_micros()).ok()
    });
    let app_id: Arc<str> = daemon.config.name.as_str().into();
    let tables = delivery
        .tables
        .iter()
        .enumerate()
        .map(|(n, spec)| StreamTable {
            idx: TableIdx(u16::try_from(n).unwrap_or(u16::MAX)),
            spec: spec.clone(),
            app_id: app_id.clone(),
        });
    let source = BinlogSource::new(
        config,
        tables.collect(),
        delivery.layouts.clone(),
        delivery.meters.clone(),
    );
    let source = FencedSource {
        inner: source,
        epoch: epoch.clone(),
        db: daemon.db.clone(),
    };
    let (relay, handle) = Relay::new(
        relay_config(daemon),
        delivery.tables.clone(),
        Box::new(source),
        delivery.ledger.clone(),
        delivery.tail_publisher.clone(),
        delivery.meters.clone(),
    );
    daemon
        .control
        .set(Some(delivery.control(Some(handle.clone()))));
    delivery.gate.set(Some(handle.clone()));
    // Behind the gate: before it the whole backlog would be the poller's.
    start_poller(daemon, delivery, poller, stop);
    chores::pauses(daemon).await?;
    let watching = watch_relay(daemon, &delivery.poller_handle, &handle);
    let ended = tokio::select! {
        ended = relay.run(start, stop.clone()) => ended,
        () = watching => Ok(()),
        failed = poller_failed(poller) => return Err(failed.into()),
    };
    delivery.gate.set(None);
    daemon.control.set(Some(delivery.control(None)));
    match ended {
        Ok(()) => Ok(()),
        Err(RelayError::Fenced(_)) => Err(SessionError::Fenced.into()),
        Err(RelayError::LostPosition(lost)) => Err(TailEnd::Lost(lost)),
        Err(RelayError::Ledger(e)) => Err(e.into()),
        Err(e) => Err(TailEnd::Cannot(anyhow::Error::new(e))),
    }
}

/// Ends when the poller ends before it was asked to.
async fn poller_failed(task: &mut Option<PollerTask>) -> SessionError {
    let Some(running) = task else {
        return std::future::pending().await;
    };
    let ended = running.await;
    *task = None;
    match ended {
        Ok(Err(e)) => e,
        Ok(Ok(())) => std::future::pending().await,
        Err(e) => SessionError::Again(anyhow::anyhow!("the poller panicked: {e}")),
    }
}

/// The position to start from, with its age, after the sweep that is due before it. `None` when
/// stopped meanwhile.
async fn position(
    daemon: &Daemon,
    epoch: &Epoch,
    delivery: &Delivery,
    stop: &CancellationToken,
) -> Result<(Option<Position>, Option<Duration>), TailEnd> {
    let stored = delivery.positions.load().await?;
    let (position, sweep, age) = match stored {
        Some(stored) if stored.position.is_some() => (
            stored.position,
            stored.sweep,
            Some(Duration::from_secs(stored.age_seconds)),
        ),
        // First start, or after `position reset`.
        _ => {
            let (coordinate, layouts) = delivery.coordinate(daemon).await?;
            info!(position = %coordinate, "starting from where the server is now, after a sweep");
            delivery
                .positions
                .start_at(epoch, &coordinate, &layouts, true, None)
                .await?;
            (Some(coordinate), true, None)
        }
    };
    if sweep {
        daemon
            .health
            .change(|h| h.tail = Part::bad("sweeping what was pending before the start"));
        let config = SweepConfig {
            rate: daemon.config.poller.sweep_rate,
        };
        let report = delivery.poller.sweep(config, stop.clone()).await?;
        if stop.is_cancelled() {
            return Ok((None, None));
        }
        info!(
            published = report.published,
            failed = report.failed,
            "swept"
        );
        delivery.positions.finish_sweep(epoch).await?;
    }
    Ok((position, age))
}

/// Records the gap and where to go on, at once; the sweep follows.
async fn lost_position(
    daemon: &Daemon,
    epoch: &Epoch,
    delivery: &Delivery,
    lost: LostPosition,
) -> Result<(), SessionError> {
    let text = lost.to_string();
    let gap = NewGap {
        from: Some(lost.from),
        to: Some(lost.to.clone()),
        reason: text.clone(),
    };
    if delivery.tracks_all() {
        warn!(
            reason = text,
            "the position is lost: sweeping the tables and going on from where the server is now; readiness waits for `outboxd ack-gap`"
        );
        delivery
            .positions
            .start_at(epoch, &lost.to, &[], true, Some(&gap))
            .await?;
        daemon.health.change(|h| h.gaps += 1);
        return Ok(());
    }
    // For tables without status columns the binlog was the only source.
    Err(SessionError::Halt(anyhow::anyhow!(
        "the position is lost ({text}), and a table without status columns cannot be swept: rows may be lost; `outboxd position reset` goes on from where the server is now"
    )))
}

/// Keeps the health and the poller's sweeps in step with the relay.
async fn watch_relay(daemon: &Daemon, poller: &PollerHandle, handle: &RelayHandle) {
    let (mut status, mut sweeps) = (handle.watch_status(), handle.sweep_due());
    loop {
        let part = {
            let s = status.borrow_and_update();
            Part {
                ok: s.tailing,
                detail: s.state.clone(),
            }
        };
        daemon.health.change(|h| h.tail = part);
        let due = sweeps.borrow_and_update().clone();
        for (table, coordinate) in due {
            if poller.sweep_table(table).await {
                handle.sweep_passed(table, coordinate).await;
            }
        }
        tokio::select! {
            changed = status.changed() => if changed.is_err() { std::future::pending::<()>().await },
            changed = sweeps.changed() => if changed.is_err() { std::future::pending::<()>().await },
        }
    }
}

/// Keeps the broker's state in health and metrics.
async fn watch_brokers(
    daemon: &Daemon,
    publishers: [Arc<RabbitPublisher>; 2],
    stop: &CancellationToken,
) {
    use outbox_core::ports::BrokerState;
    let mut ticks = tokio::time::interval(Duration::from_millis(200));
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let states = publishers.each_ref().map(|p| p.state());
        let worst = states
            .iter()
            .find(|s| !matches!(s, BrokerState::Up))
            .unwrap_or(&states[0]);
        let flag = |on: bool| f64::from(u8::from(on));
        metrics::gauge!("outboxd_broker_connected")
            .set(flag(!matches!(worst, BrokerState::Down(_))));
        metrics::gauge!("outboxd_broker_blocked")
            .set(flag(matches!(worst, BrokerState::Blocked(_))));
        let part = Part {
            ok: matches!(worst, BrokerState::Up),
            detail: worst.to_string(),
        };
        if daemon.health.get().rabbitmq != part {
            info!(state = part.detail, "rabbitmq");
            daemon.health.change(|h| h.rabbitmq = part);
        }
    }
}

fn relay_config(daemon: &Daemon) -> RelayConfig {
    let c = &daemon.config;
    RelayConfig {
        flush_interval: c.tail.flush_interval,
        flush_rows: c.tail.flush_rows,
        checkpoint_interval: c.tail.checkpoint_interval,
        verify_after: c.tail.verify_after,
        max_in_flight: c.rabbitmq.max_in_flight,
        max_in_flight_bytes: c.rabbitmq.max_in_flight_bytes,
        ..RelayConfig::default()
    }
}

fn poller_config(daemon: &Daemon) -> PollerConfig {
    let c = &daemon.config;
    PollerConfig {
        interval: c.poller.interval,
        degraded_interval: c.poller.degraded_interval,
        batch: c.poller.batch,
        pending_grace: c.poller.pending_grace,
        max_in_flight: c.rabbitmq.max_in_flight,
        max_in_flight_bytes: c.rabbitmq.max_in_flight_bytes,
        sweep_rate: c.poller.sweep_rate,
        stuck_interval: c.stuck.interval,
        warn_after: c.stuck.warn_after,
        reset_after: c.stuck.reset_after,
        backlog_warn: c.stuck.backlog_warn,
        sent_after: c.sent_after,
    }
}
