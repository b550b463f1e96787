//! The stored state, read for all who ask at about the same time.

use std::sync::Arc;
use std::time::Duration;

use outbox_core::ports::PortResult;
use outbox_ledger::admin::StatusOverview;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::run::{Daemon, servers};

/// An answer is good for so many times what it took: counting a large backlog costs time, and
/// however many consoles are open, they may not take more than a tenth of one connection.
const WORTH: u32 = 10;
/// But never for longer.
const AT_MOST: Duration = Duration::from_secs(30);

struct Read {
    at: Instant,
    took: Duration,
    overview: Arc<StatusOverview>,
}

/// The last overview that was read.
#[derive(Default)]
pub(super) struct Overviews(Mutex<Option<Read>>);

impl Overviews {
    /// The overview; whoever asks while it is read waits for the same answer.
    pub(super) async fn get(&self, daemon: &Daemon) -> PortResult<Arc<StatusOverview>> {
        let mut last = self.0.lock().await;
        if let Some(read) = &*last
            && read.at.elapsed() < (read.took * WORTH).min(AT_MOST)
        {
            return Ok(read.overview.clone());
        }
        let began = Instant::now();
        let admin = servers::admin(&daemon.config, &daemon.db).await?;
        let overview = Arc::new(admin.overview().await?);
        let at = Instant::now();
        *last = Some(Read {
            at,
            took: at - began,
            overview: overview.clone(),
        });
        Ok(overview)
    }

    /// After a change: the next answer is a new one.
    pub(super) async fn forget(&self) {
        *self.0.lock().await = None;
    }
}
