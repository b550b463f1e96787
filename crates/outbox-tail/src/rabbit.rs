//! The RabbitMQ publisher: persistent, mandatory, confirmed, pipelined.
//!
//! How progress is made: [`Driver::run`] holds one connection with one channel in confirm mode,
//! hands submitted messages to it in order, and settles them from their confirms (`confirms`).
//!
//! How it resumes: any error retires connection and channel together. What has no outcome yet
//! becomes `Unconfirmed`, the generation moves on, and a fresh connection is opened after a
//! jittered backoff; lapin's own recovery is never used. Messages that the broker punishes with
//! the connection are tried one at a time over a connection of their own (`quarantine`), so
//! that only the guilty one is charged.
//!
//! What cancellation does: messages without outcome become `Unconfirmed`, the connection is
//! closed politely within a deadline, then cut.

mod checks;
mod classify;
mod confirms;
mod convert;
mod driver;
mod in_flight;
mod link;
mod quarantine;
mod session;
mod tls;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use outbox_core::message::Message;
use outbox_core::ports::{BrokerState, Generation, PublishOutcome, Publisher, Ticket};
use secrecy::SecretString;
use tokio::sync::{Notify, watch};

pub use driver::Driver;
pub use link::LinkError;
pub use tls::TlsError;

/// Tracing targets that must be off at every level: lapin prints returned messages with their
/// bodies at `warn`, whole frames (bodies, and the login) at `trace`, and the URL with its
/// password at `trace`.
pub const NOISY_TARGETS: &[&str] = &[
    "lapin::returned_messages",
    "lapin::channels",
    "lapin::frames",
    "lapin::io_loop",
    "lapin::internal_rpc",
    "amq_protocol_tcp",
];

/// Where the URLs come from. Secret.
#[derive(Clone, Debug)]
pub enum Urls {
    /// One or more, comma-separated, tried in turn.
    Inline(SecretString),
    /// The same in a file, read again on every connect.
    File(PathBuf),
}

/// PEM files for `amqps`, read again on every connect.
#[derive(Clone, Debug, Default)]
pub struct TlsFiles {
    /// Certificate authorities, a bundle of one or more; the system's where there is none.
    pub ca: Option<PathBuf>,
    /// The client's certificate, with its chain.
    pub cert: Option<PathBuf>,
    /// The client's key.
    pub key: Option<PathBuf>,
}

/// Type of the exchanges that are declared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names are those of AMQP
pub enum ExchangeType {
    Topic,
    Direct,
    Fanout,
    Headers,
}

/// How the publisher connects.
#[derive(Clone, Debug)]
pub struct RabbitConfig {
    /// The brokers.
    pub urls: Urls,
    /// TLS.
    pub tls: TlsFiles,
    /// Shown by the broker beside the connection.
    pub connection_name: String,
    /// Declares `exchanges`, durable, with this type; `None` only checks that they are there.
    pub declare: Option<ExchangeType>,
    /// Exchanges whose name does not depend on rows; `""` is skipped.
    pub exchanges: Vec<String>,
    /// A confirm that takes longer retires the channel; does not run while the broker blocks.
    pub confirm_timeout: Duration,
    /// Deadline of each single step of connecting: TCP and TLS, login, channel, declaration.
    pub connect_timeout: Duration,
    /// Proposed heartbeat, whole seconds; a URL's own `heartbeat` wins. A link that is silent
    /// for twice as long is dead.
    pub heartbeat: Duration,
    /// Delay before the second attempt to connect; doubles from there, with jitter.
    pub backoff_min: Duration,
    /// Longest delay between attempts.
    pub backoff_max: Duration,
    /// Deadline of the polite close of a connection, after which its socket is cut.
    pub close_timeout: Duration,
}

impl RabbitConfig {
    /// The defaults, for these URLs.
    #[must_use]
    pub fn new(urls: Urls) -> Self {
        Self {
            urls,
            tls: TlsFiles::default(),
            connection_name: "outboxd".to_owned(),
            declare: None,
            exchanges: Vec::new(),
            confirm_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(5),
            heartbeat: Duration::from_secs(10),
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            close_timeout: Duration::from_secs(2),
        }
    }
}

/// What metrics need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The connection.
    pub state: BrokerState,
    /// The generation that is, or will be, published under.
    pub generation: Generation,
    /// Messages handed over and without outcome.
    pub unconfirmed: usize,
    /// Connections opened after the first one.
    pub reconnects: u64,
}

/// The caller's side. Needs its [`Driver`] to run.
#[derive(Debug)]
pub struct RabbitPublisher {
    shared: Arc<Shared>,
}

impl RabbitPublisher {
    /// A publisher and the driver that does its work.
    #[must_use]
    pub fn new(config: RabbitConfig) -> (Arc<Self>, Driver) {
        let shared = Arc::new(Shared::default());
        let publisher = Self {
            shared: Arc::clone(&shared),
        };
        (Arc::new(publisher), Driver::new(config, shared))
    }

    /// State and counts now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let inner = self.shared.lock();
        Snapshot {
            state: inner.state.clone(),
            generation: Generation(inner.generation),
            unconfirmed: inner.unconfirmed,
            reconnects: inner.opened.saturating_sub(1),
        }
    }
}

#[async_trait]
impl Publisher for RabbitPublisher {
    async fn ready(&self) -> Generation {
        let mut ready = self.shared.ready.subscribe();
        match ready.wait_for(Option::is_some).await.map(|g| *g) {
            Ok(Some(generation)) => generation,
            // The sender lives in `self`, and `wait_for` returns only what was asked for.
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }

    fn submit(&self, generation: Generation, messages: Vec<(Ticket, Arc<Message>)>) {
        let mut inner = self.shared.lock();
        inner.unconfirmed += messages.len();
        if inner.open && inner.generation == generation.0 {
            inner.inbox.extend(messages);
            drop(inner);
            self.shared.submitted.notify_one();
        } else {
            let over = messages
                .into_iter()
                .map(|(ticket, _)| (ticket, PublishOutcome::Unconfirmed));
            inner.decide(over);
            drop(inner);
            self.shared.decided.notify_one();
        }
    }

    async fn outcomes(&self) -> Vec<(Ticket, PublishOutcome)> {
        loop {
            let decided = std::mem::take(&mut self.shared.lock().outcomes);
            if !decided.is_empty() {
                return decided;
            }
            // `notify_one` leaves a permit where nobody waits: what is decided between the look
            // and this wait is not missed.
            self.shared.decided.notified().await;
        }
    }

    fn state(&self) -> BrokerState {
        self.shared.lock().state.clone()
    }
}

/// What publisher and driver share.
#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    /// The generation to submit under, while messages can be sent.
    ready: watch::Sender<Option<Generation>>,
    submitted: Notify,
    decided: Notify,
}

#[derive(Debug)]
struct Inner {
    generation: u64,
    /// Whether submissions under `generation` are taken.
    open: bool,
    inbox: VecDeque<(Ticket, Arc<Message>)>,
    outcomes: Vec<(Ticket, PublishOutcome)>,
    state: BrokerState,
    unconfirmed: usize,
    opened: u64,
}

impl Inner {
    fn decide(&mut self, outcomes: impl IntoIterator<Item = (Ticket, PublishOutcome)>) {
        let before = self.outcomes.len();
        self.outcomes.extend(outcomes);
        self.unconfirmed -= self.outcomes.len() - before;
    }
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            inner: Mutex::new(Inner {
                generation: 1,
                open: false,
                inbox: VecDeque::new(),
                outcomes: Vec::new(),
                state: BrokerState::Down("not connected yet".to_owned()),
                unconfirmed: 0,
                opened: 0,
            }),
            ready: watch::Sender::new(None),
            submitted: Notify::new(),
            decided: Notify::new(),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while it is held; the data would still be whole.
        self.inner.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A fresh channel is there: submissions are taken from now on.
    fn open(&self) {
        let mut inner = self.lock();
        inner.open = true;
        inner.opened += 1;
        inner.state = BrokerState::Up;
        self.ready.send_replace(Some(Generation(inner.generation)));
    }

    /// The broker blocks (`Some`: its reason) or has stopped to.
    fn block(&self, reason: Option<&str>) {
        let mut inner = self.lock();
        if let Some(reason) = reason {
            inner.state = BrokerState::Blocked(reason.to_owned());
            self.ready.send_replace(None);
        } else {
            inner.state = BrokerState::Up;
            self.ready.send_replace(Some(Generation(inner.generation)));
        }
    }

    /// The channel is gone: its generation is over, and what was still queued is unconfirmed.
    fn lose(&self, why: &str) {
        let mut inner = self.lock();
        inner.generation += 1;
        inner.open = false;
        inner.state = BrokerState::Down(why.to_owned());
        self.ready.send_replace(None);
        let queued = std::mem::take(&mut inner.inbox);
        inner.decide(
            queued
                .into_iter()
                .map(|(t, _)| (t, PublishOutcome::Unconfirmed)),
        );
        drop(inner);
        self.decided.notify_one();
    }

    fn down(&self, why: &str) {
        self.lock().state = BrokerState::Down(why.to_owned());
    }

    fn decide(&self, outcomes: impl IntoIterator<Item = (Ticket, PublishOutcome)>) {
        self.lock().decide(outcomes);
        self.decided.notify_one();
    }

    fn take(&self, most: usize) -> Vec<(Ticket, Arc<Message>)> {
        let mut inner = self.lock();
        let count = most.min(inner.inbox.len());
        inner.inbox.drain(..count).collect()
    }
}
