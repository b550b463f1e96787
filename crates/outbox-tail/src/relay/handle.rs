//! The outside's view of a relay.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use outbox_core::ports::{BrokerState, Gate, HeldRow};
use outbox_core::{Aggregate, Position, TableIdx};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout, timeout_at};

/// Rows that may be held before the relay runs; the poller asks for at most a few batches.
const EARLY: usize = 16_384;
/// Requests under way; a sender waits for room.
const COMMANDS: usize = 64;
/// How long [`RelayHandle::pause`] waits for a relay that is busy.
const OBEY: Duration = Duration::from_secs(10);

pub(super) enum Command {
    Hold(Vec<HeldRow>, oneshot::Sender<Vec<bool>>),
    Done(Vec<HeldRow>),
    LeftBehind {
        limit: usize,
        all: bool,
        reply: oneshot::Sender<Vec<Aggregate>>,
    },
    SweepPassed(TableIdx, Position),
}

/// Which tables are paused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paused {
    /// All of them.
    pub all: bool,
    /// These.
    pub tables: BTreeSet<TableIdx>,
    pub(super) version: u64,
}

impl Paused {
    /// Whether a table is paused.
    #[must_use]
    pub fn is(&self, table: TableIdx) -> bool {
        self.all || self.tables.contains(&table)
    }
}

/// A relay at a glance; taken a few times a second.
#[derive(Clone, Debug)]
pub struct RelayStatus {
    /// Between start and end of [`super::Relay::run`].
    pub running: bool,
    /// The binlog is being read, or was closed on purpose for want of room.
    pub tailing: bool,
    /// What it is doing, in words.
    pub state: String,
    /// End of the last group read.
    pub read: Option<Position>,
    /// The low watermark.
    pub settled: Option<Position>,
    /// The position stored last.
    pub stored: Option<Position>,
    /// How far behind the server the last group read was, by the server's commit time.
    pub lag: Duration,
    /// Rows in the window.
    pub in_flight_rows: usize,
    /// Bytes in the window.
    pub in_flight_bytes: usize,
    /// Rows that are not settled, those whose record is locked by somebody included.
    pub unsettled: usize,
    /// Held aggregates by table.
    pub held: Vec<usize>,
    /// The broker.
    pub broker: BrokerState,
    /// What is paused.
    pub paused: Paused,
}

impl Default for RelayStatus {
    fn default() -> Self {
        Self {
            running: false,
            tailing: false,
            state: "not started".to_owned(),
            read: None,
            settled: None,
            stored: None,
            lag: Duration::ZERO,
            in_flight_rows: 0,
            in_flight_bytes: 0,
            unsettled: 0,
            held: Vec::new(),
            broker: BrokerState::Down("not started".to_owned()),
            paused: Paused::default(),
        }
    }
}

/// Who answers the poller.
enum Phase {
    /// Nobody yet: everything is the poller's, and remembered for the start.
    Before(Vec<HeldRow>),
    Running,
    Over,
}

pub(super) struct Shared {
    phase: Mutex<Phase>,
    pub(super) paused: watch::Sender<Paused>,
    pub(super) obeyed: watch::Sender<u64>,
    pub(super) status: watch::Sender<RelayStatus>,
    pub(super) settled: watch::Sender<Option<Position>>,
    pub(super) tailing: watch::Sender<bool>,
    pub(super) signals: watch::Sender<u64>,
    pub(super) news: watch::Sender<u64>,
    pub(super) sweeps: watch::Sender<Vec<(TableIdx, Position)>>,
}

impl Shared {
    fn phase(&self) -> MutexGuard<'_, Phase> {
        // Nothing in here can panic half-way.
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The relay answers from now on; gives what was held before.
    pub(super) fn start(&self) -> Vec<HeldRow> {
        match std::mem::replace(&mut *self.phase(), Phase::Running) {
            Phase::Before(rows) => rows,
            Phase::Running | Phase::Over => Vec::new(),
        }
    }

    pub(super) fn over(&self) {
        *self.phase() = Phase::Over;
        self.tailing.send_replace(false);
        self.status.send_modify(|s| {
            (s.running, s.tailing) = (false, false);
            "ended".clone_into(&mut s.state);
        });
    }

    fn running(&self) -> bool {
        matches!(*self.phase(), Phase::Running)
    }
}

/// Steers and watches a relay; cheap to clone. Lives before, while and after it runs.
#[derive(Clone)]
pub struct RelayHandle {
    pub(super) shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
}

impl RelayHandle {
    pub(super) fn new(start: Paused) -> (Self, mpsc::Receiver<Command>) {
        let (commands, receiver) = mpsc::channel(COMMANDS);
        let shared = Shared {
            phase: Mutex::new(Phase::Before(Vec::new())),
            paused: watch::Sender::new(start),
            obeyed: watch::Sender::new(0),
            status: watch::Sender::new(RelayStatus::default()),
            settled: watch::Sender::new(None),
            tailing: watch::Sender::new(false),
            signals: watch::Sender::new(0),
            news: watch::Sender::new(0),
            sweeps: watch::Sender::new(Vec::new()),
        };
        let handle = Self {
            shared: Arc::new(shared),
            commands,
        };
        (handle, receiver)
    }

    /// Stops publishing for a table, or for all. Reading goes on to the window's limit, answers
    /// and records are still taken. Returns once nothing more of it is on its way to the broker:
    /// true; or false where that took longer than a few seconds (a broker that is blocked). Where
    /// no relay runs it is obeyed by the one that starts.
    pub async fn pause(&self, table: Option<TableIdx>) -> bool {
        let mut version = 0;
        self.shared.paused.send_modify(|p| {
            match table {
                Some(table) => _ = p.tables.insert(table),
                None => p.all = true,
            }
            p.version += 1;
            version = p.version;
        });
        if !self.shared.running() {
            return true;
        }
        let mut obeyed = self.shared.obeyed.subscribe();
        let obeyed = obeyed.wait_for(|v| *v >= version);
        timeout(OBEY, obeyed).await.is_ok_and(|r| r.is_ok())
    }

    /// Goes on publishing for a table, or for all.
    pub fn resume(&self, table: Option<TableIdx>) {
        self.shared.paused.send_modify(|p| {
            match table {
                Some(table) => _ = p.tables.remove(&table),
                None => {
                    p.all = false;
                    p.tables.clear();
                }
            }
            p.version += 1;
        });
    }

    /// The relay at a glance.
    #[must_use]
    pub fn status(&self) -> RelayStatus {
        self.shared.status.borrow().clone()
    }

    /// Watches the status.
    #[must_use]
    pub fn watch_status(&self) -> watch::Receiver<RelayStatus> {
        self.shared.status.subscribe()
    }

    /// The settled low watermark, a few times a second.
    #[must_use]
    pub fn settled(&self) -> watch::Receiver<Option<Position>> {
        self.shared.settled.subscribe()
    }

    /// Counts groups that wrote to `outboxd_signal`.
    #[must_use]
    pub fn signals(&self) -> watch::Receiver<u64> {
        self.shared.signals.subscribe()
    }

    /// Tables that are held until a sweep has delivered what was pending before a coordinate.
    #[must_use]
    pub fn sweep_due(&self) -> watch::Receiver<Vec<(TableIdx, Position)>> {
        self.shared.sweeps.subscribe()
    }

    /// A sweep of the table that began behind `coordinate` is complete.
    pub async fn sweep_passed(&self, table: TableIdx, coordinate: Position) {
        // Where the relay has ended there is nothing to let go of.
        let _ = self
            .commands
            .send(Command::SweepPassed(table, coordinate))
            .await;
    }

    async fn ask_left(&self, limit: usize, all: bool) -> Vec<Aggregate> {
        let (reply, answer) = oneshot::channel();
        let command = Command::LeftBehind { limit, all, reply };
        match self.commands.send(command).await {
            Ok(()) => answer.await.unwrap_or_default(),
            Err(_) => Vec::new(),
        }
    }
}

#[async_trait]
impl Gate for RelayHandle {
    async fn hold(&self, rows: &[HeldRow]) -> Vec<bool> {
        match &mut *self.shared.phase() {
            Phase::Before(early) => {
                let room = EARLY.saturating_sub(early.len());
                let granted = rows.len().min(room);
                early.extend_from_slice(&rows[..granted]);
                return (0..rows.len()).map(|i| i < granted).collect();
            }
            Phase::Over => return vec![true; rows.len()],
            Phase::Running => {}
        }
        let (reply, answer) = oneshot::channel();
        if self
            .commands
            .send(Command::Hold(rows.to_vec(), reply))
            .await
            .is_err()
        {
            return vec![true; rows.len()];
        }
        // A relay that ends meanwhile may still have them at the broker.
        answer.await.unwrap_or_else(|_| vec![false; rows.len()])
    }

    async fn done(&self, rows: &[HeldRow]) {
        if let Phase::Before(early) = &mut *self.shared.phase() {
            early.retain(|row| !rows.contains(row));
            return;
        }
        let _ = self.commands.send(Command::Done(rows.to_vec())).await;
    }

    async fn left_behind(&self, limit: usize, wait: Duration) -> Vec<Aggregate> {
        let until = Instant::now() + wait;
        let mut news = self.shared.news.subscribe();
        if !self.shared.running() {
            tokio::time::sleep_until(until).await;
            return Vec::new();
        }
        loop {
            news.borrow_and_update();
            let found = self.ask_left(limit, false).await;
            if !found.is_empty() {
                return found;
            }
            if !matches!(timeout_at(until, news.changed()).await, Ok(Ok(()))) {
                return self.ask_left(limit, true).await;
            }
        }
    }

    async fn passed(&self, position: &Position, wait: Duration) -> bool {
        let mut settled = self.shared.settled.subscribe();
        let mut tailing = self.shared.tailing.subscribe();
        let reached =
            settled.wait_for(|p| p.as_ref().and_then(|p| p.reaches(position)) == Some(true));
        tokio::select! {
            biased;
            reached = timeout(wait, reached) => matches!(reached, Ok(Ok(_))),
            _ = tailing.wait_for(|t| !t) => false,
        }
    }

    fn tailing(&self) -> bool {
        *self.shared.tailing.borrow()
    }
}
