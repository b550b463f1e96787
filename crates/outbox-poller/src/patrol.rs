//! The stuck patrol, the backlog's warning, and retention.

use std::time::Duration;

use futures_util::future::BoxFuture;
use outbox_core::Status;
use outbox_core::ports::{Disposition, PortResult, chain};
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::poller::{Poller, table_idx};

/// A warning that still holds is repeated after this.
const REPEAT: Duration = Duration::from_secs(600);
/// Time between two looks for sent rows that are old enough.
const RETENTION: Duration = Duration::from_secs(60);
/// Rows of one deletion, and the pause between two: room for the application.
const CHUNK: usize = 1000;
const BETWEEN: Duration = Duration::from_millis(100);
/// A deletion that takes longer than this meets others at work: it waits as long as ten of it.
const SLOW: Duration = Duration::from_millis(200);

/// When something was last said.
#[derive(Clone, Copy, Debug, Default)]
struct Said {
    since: Option<Instant>,
}

impl Said {
    /// Whether to say it now: when it begins to hold, and every [`REPEAT`] while it does.
    fn is_news(&mut self, holds: bool) -> bool {
        let news = holds && self.since.is_none_or(|at| at.elapsed() >= REPEAT);
        if news {
            self.since = Some(Instant::now());
        } else if !holds {
            self.since = None;
        }
        news
    }
}

impl Poller {
    /// Every `stuck_interval`: counts and resets claims that are too old, and warns of backlog.
    /// Beside it, and whatever the load, deletes sent rows that are old enough.
    pub async fn patrol(&self, stop: CancellationToken) -> PortResult<()> {
        // Boxed: joined bare, their borrows keep the compiler from seeing that this can be sent.
        let watch: BoxFuture<'_, PortResult<()>> = Box::pin(self.watch(&stop));
        let retain: BoxFuture<'_, PortResult<()>> = Box::pin(self.retain(&stop));
        tokio::try_join!(watch, retain).map(|_| ())
    }

    async fn watch(&self, stop: &CancellationToken) -> PortResult<()> {
        let mut said: Vec<(Said, Said)> = vec![Default::default(); self.tables.len()];
        let mut ticks = ticks(self.config.stuck_interval);
        while tick(&mut ticks, stop).await {
            for (n, said) in said.iter_mut().enumerate() {
                self.heed(n, "patrol", self.patrol_table(n, said).await)?;
            }
        }
        Ok(())
    }

    async fn retain(&self, stop: &CancellationToken) -> PortResult<()> {
        let Some(older_than) = self.config.sent_after else {
            return Ok(());
        };
        let mut ticks = ticks(RETENTION);
        while tick(&mut ticks, stop).await {
            for n in 0..self.tables.len() {
                self.heed(n, "retention", self.purge(n, older_than, stop).await)?;
            }
        }
        Ok(())
    }

    /// What fails is tried again the next time, but for the end of the session.
    fn heed(&self, n: usize, what: &str, done: PortResult<()>) -> PortResult<()> {
        match done {
            Err(e) if e.disposition != Disposition::Fenced => {
                let table = self.tables[n].full_name();
                warn!(table, error = chain(&e), "{what}");
                Ok(())
            }
            done => done,
        }
    }

    async fn patrol_table(&self, n: usize, said: &mut (Said, Said)) -> PortResult<()> {
        let (table, name) = (table_idx(n), self.tables[n].full_name());
        let config = &self.config;
        let report = self
            .store
            .patrol(table, config.warn_after, config.reset_after)
            .await?;
        self.handle.set_stuck(n, report.stuck);
        if said.0.is_news(report.stuck > 0 || report.reset > 0) {
            warn!(
                table = name,
                rows = report.stuck,
                reset = report.reset,
                "rows are in processing for long"
            );
        } else if report.reset > 0 {
            info!(table = name, reset = report.reset, "claims were taken away");
        }
        let backlog = self.store.backlog(table).await?;
        let pending = backlog
            .by_status
            .iter()
            .find(|(s, _)| *s == Status::Pending)
            .map_or(0, |(_, n)| *n);
        let over = pending > config.backlog_warn;
        let was = said.1.since.is_some();
        if said.1.is_news(over) {
            warn!(
                table = name,
                pending,
                oldest_s = backlog.oldest_pending_seconds.unwrap_or(0),
                "the backlog is over stuck.backlog_warn"
            );
        } else if was && !over {
            info!(
                table = name,
                pending, "the backlog is under stuck.backlog_warn again"
            );
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

fn ticks(period: Duration) -> Interval {
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Waits for the next tick; false once stopped.
async fn tick(ticks: &mut Interval, stop: &CancellationToken) -> bool {
    tokio::select! {
        biased;
        () = stop.cancelled() => false,
        _ = ticks.tick() => true,
    }
}
