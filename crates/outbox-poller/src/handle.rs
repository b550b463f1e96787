use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use outbox_core::TableIdx;
use tokio::sync::{mpsc, oneshot, watch};

/// Sweeps that may wait to be carried out.
const REQUESTS: usize = 64;

/// Which tables are paused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paused {
    /// All of them.
    pub all: bool,
    /// These.
    pub tables: BTreeSet<TableIdx>,
}

impl Paused {
    /// Whether a table is paused.
    #[must_use]
    pub fn is(&self, table: TableIdx) -> bool {
        self.all || self.tables.contains(&table)
    }
}

/// A sweep that was asked for.
pub(crate) struct Request {
    /// One table, or all.
    pub(crate) table: Option<TableIdx>,
    /// Told whether it was done.
    pub(crate) done: oneshot::Sender<bool>,
}

/// Steers and watches a poller; cheap to clone.
#[derive(Clone)]
pub struct PollerHandle {
    paused: Arc<watch::Sender<Paused>>,
    requests: mpsc::Sender<Request>,
    stuck: Arc<Mutex<Vec<u64>>>,
}

impl PollerHandle {
    pub(crate) fn new(tables: usize) -> (Self, mpsc::Receiver<Request>) {
        let (requests, receiver) = mpsc::channel(REQUESTS);
        let handle = Self {
            paused: Arc::default(),
            requests,
            stuck: Arc::new(Mutex::new(vec![0; tables])),
        };
        (handle, receiver)
    }

    /// Stops claiming and publishing for a table, or for all. What is in flight gets its outcome.
    pub fn pause(&self, table: Option<TableIdx>) {
        self.paused.send_modify(|p| match table {
            Some(table) => {
                p.tables.insert(table);
            }
            None => p.all = true,
        });
    }

    /// Goes on.
    pub fn resume(&self, table: Option<TableIdx>) {
        self.paused.send_modify(|p| match table {
            Some(table) => {
                p.tables.remove(&table);
            }
            None => p.all = false,
        });
    }

    /// What is paused.
    #[must_use]
    pub fn paused(&self) -> Paused {
        self.paused.borrow().clone()
    }

    /// Asks for a sweep of a table, or of all, without waiting for it. One that finds many others
    /// waiting is dropped: they sweep the same rows.
    pub fn request_sweep(&self, table: Option<TableIdx>) {
        let (done, _) = oneshot::channel();
        let _ = self.requests.try_send(Request { table, done });
    }

    /// Sweeps a table and returns true once all that was pending when it began is settled or
    /// waits for its retry; false where it could not be done.
    pub async fn sweep_table(&self, table: TableIdx) -> bool {
        let (done, answer) = oneshot::channel();
        let sent = self
            .requests
            .send(Request {
                table: Some(table),
                done,
            })
            .await;
        sent.is_ok() && answer.await.unwrap_or(false)
    }

    /// Rows in processing for too long, by table, at the last patrol.
    #[must_use]
    pub fn stuck(&self) -> Vec<u64> {
        self.guard().clone()
    }

    pub(crate) fn set_stuck(&self, table: usize, rows: u64) {
        if let Some(slot) = self.guard().get_mut(table) {
            *slot = rows;
        }
    }

    fn guard(&self) -> MutexGuard<'_, Vec<u64>> {
        // Nothing in here can panic half-way.
        self.stuck.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
