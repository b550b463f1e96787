//! The stuck patrol, the backlog's warning, and retention.

use std::time::Duration;

use outbox_core::Status;
use outbox_core::ports::{Disposition, PortResult, chain};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::poller::{Poller, table_idx};

/// A warning that still holds is repeated after this.
const REPEAT: Duration = Duration::from_secs(600);
/// Rows of one deletion, and the pause between two: room for the application.
const CHUNK: usize = 1000;
const BETWEEN: Duration = Duration::from_millis(100);
/// A deletion that takes longer than this meets others at work: it waits as long as ten of it.
const SLOW: Duration = Duration::from_millis(200);

impl Poller {
    /// Every `stuck_interval`: counts and resets claims that are too old, warns of backlog, and
    /// deletes sent rows that are old enough.
    pub async fn patrol(&self, stop: CancellationToken) -> PortResult<()> {
        let mut ticks = tokio::time::interval(self.config.stuck_interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut warned: Vec<Option<Instant>> = vec![None; self.tables.len()];
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                _ = ticks.tick() => {}
            }
            for (n, warned) in warned.iter_mut().enumerate() {
                match self.patrol_table(n, warned, &stop).await {
                    Err(e) if e.disposition == Disposition::Fenced => return Err(e),
                    Err(e) => warn!(error = chain(&e), "patrol"),
                    Ok(()) => {}
                }
            }
        }
    }

    async fn patrol_table(
        &self,
        n: usize,
        warned: &mut Option<Instant>,
        stop: &CancellationToken,
    ) -> PortResult<()> {
        let (table, name) = (table_idx(n), self.tables[n].full_name());
        let report = self
            .store
            .patrol(table, self.config.warn_after, self.config.reset_after)
            .await?;
        self.handle.set_stuck(n, report.stuck);
        if report.stuck > 0 {
            warn!(
                table = name,
                rows = report.stuck,
                reset = report.reset,
                "rows are in processing for long"
            );
        }
        let backlog = self.store.backlog(table).await?;
        let pending = backlog
            .by_status
            .iter()
            .find(|(s, _)| *s == Status::Pending)
            .map_or(0, |(_, n)| *n);
        if pending > self.config.backlog_warn {
            if warned.is_none_or(|at| at.elapsed() >= REPEAT) {
                *warned = Some(Instant::now());
                warn!(
                    table = name,
                    pending,
                    oldest_s = backlog.oldest_pending_seconds.unwrap_or(0),
                    "the backlog is over stuck.backlog_warn"
                );
            }
        } else if warned.take().is_some() {
            info!(
                table = name,
                pending, "the backlog is under stuck.backlog_warn again"
            );
        }
        if let Some(older_than) = self.config.sent_after {
            self.purge(n, older_than, stop).await?;
        }
        Ok(())
    }

    async fn purge(
        &self,
        n: usize,
        older_than: Duration,
        stop: &CancellationToken,
    ) -> PortResult<()> {
        let mut deleted = 0;
        while !stop.is_cancelled() {
            let begun = Instant::now();
            let rows = self.store.purge(table_idx(n), older_than, CHUNK).await?;
            if rows == 0 {
                break;
            }
            deleted += rows;
            let took = begun.elapsed();
            let pause = if took > SLOW { took * 10 } else { BETWEEN };
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
        if deleted > 0 {
            debug!(
                table = self.tables[n].full_name(),
                deleted, "sent rows deleted"
            );
        }
        Ok(())
    }
}
