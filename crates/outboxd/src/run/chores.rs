//! What a leader does beside delivering: it renews its lease, obeys pauses and signals, and looks
//! for unacknowledged gaps. Pauses and signals are read with every renewal too, so a lagging tail
//! obeys in time.

use outbox_core::TableIdx;
use outbox_core::ports::{Disposition, chain};
use outbox_ledger::lease::{Epoch, Lease};
use outbox_ledger::{gap, pause};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::session::SessionError;
use super::{Daemon, signals};
use crate::health::Part;

/// Gaps are counted up to here.
const GAPS: u32 = 1000;

/// Renews until `stop`; ends with an error once the lease is lost, or could not be renewed for
/// its whole time.
pub async fn renew(
    daemon: &Daemon,
    lease: &Lease,
    epoch: &Epoch,
    stop: &CancellationToken,
) -> Result<(), SessionError> {
    let ttl = daemon.config.lease_ttl;
    let mut ticks = tokio::time::interval(ttl / 3);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut held_until = Instant::now() + ttl;
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            _ = ticks.tick() => {}
        }
        let asked = Instant::now();
        // Never longer than the lease itself: whoever waits behind a dead connection does not lead.
        match tokio::time::timeout_at(held_until, lease.renew(epoch)).await {
            Ok(Ok(())) => {
                held_until = asked + ttl;
                daemon.health.change(|h| h.mysql = Part::good("connected"));
            }
            Ok(Err(e)) if e.disposition == Disposition::Fenced => return Err(SessionError::Fenced),
            Ok(Err(e)) => {
                debug!(error = chain(&e), "the lease was not renewed");
                daemon.health.change(|h| h.mysql = Part::bad(chain(&e)));
            }
            Err(_) => {}
        }
        if Instant::now() >= held_until {
            let text = "the lease could not be renewed in time";
            return Err(SessionError::Again(anyhow::anyhow!(text)));
        }
    }
}

/// Obeys pauses and signals, and keeps the gaps' number, every third of the lease's time and
/// whenever the stream has seen a signal.
pub async fn obey(
    daemon: &Daemon,
    epoch: &Epoch,
    stop: &CancellationToken,
) -> Result<(), SessionError> {
    let mut ticks = tokio::time::interval(daemon.config.lease_ttl / 3);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let seen = daemon
            .control
            .get()
            .and_then(|c| c.relay)
            .map(|r| r.signals());
        let signalled = async {
            let Some(mut seen) = seen else {
                return std::future::pending().await;
            };
            if seen.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            _ = ticks.tick() => {}
            () = signalled => {}
        }
        // The database may be away; the renewal decides what that means.
        if let Err(e) = signals::obey(daemon, epoch).await {
            debug!(error = chain(&e), "signals could not be read");
        }
        if let Err(e) = pauses(daemon).await {
            debug!(error = chain(&e), "pauses could not be read");
        }
        match gap::unacknowledged(&daemon.db, &daemon.config.name, GAPS).await {
            Ok(gaps) => {
                let open = gaps.len() as u64;
                daemon.health.change(|h| h.gaps = open);
                metrics::gauge!("outboxd_binlog_gaps").set(crate::metrics::float(open));
            }
            Err(e) => debug!(error = chain(&e), "gaps could not be read"),
        }
    }
}

/// Applies what the pause table says now.
pub async fn pauses(daemon: &Daemon) -> outbox_core::ports::PortResult<()> {
    let stored = pause::read(&daemon.db, &daemon.config.name).await?;
    let Some(control) = daemon.control.get() else {
        return Ok(());
    };
    let now = control.poller.paused();
    let mut obeyed = true;
    if stored.all != now.all {
        info!("publishing is {}", if stored.all { "paused" } else { "on" });
        if stored.all {
            obeyed = control.pause(None).await;
        } else {
            control.resume(None);
        }
    }
    for (spec, n) in control.tables.iter().zip(0..) {
        let table = TableIdx(n);
        let wanted = stored.tables.iter().any(|t| *t == spec.full_name());
        match (wanted, now.tables.contains(&table)) {
            (true, false) => obeyed &= control.pause(Some(table)).await,
            (false, true) => control.resume(Some(table)),
            _ => {}
        }
    }
    if !obeyed {
        warn!("paused, but what was handed to the broker before has no answer yet");
    }
    daemon.health.change(|h| h.paused = stored.all);
    metrics::gauge!("outboxd_paused").set(f64::from(u8::from(stored.all)));
    Ok(())
}
