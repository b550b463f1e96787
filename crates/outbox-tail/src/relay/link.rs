//! The link to the source: open, closed on purpose, or waiting to be opened again. A source is
//! never opened or closed by a future that may be dropped, so it is lent to a job and comes back.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use outbox_core::Position;
use tokio::time::Instant;

use crate::group::{Source, StreamItem};
use crate::stream::StreamError;

/// A stream that lived so long was a good one.
const STEADY: Duration = Duration::from_secs(30);
/// Least pause after another client dumped with our server_id.
const YIELD: Duration = Duration::from_secs(30);

/// A future that is kept until it is done.
pub(super) type Job<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The result of a job; waits for ever where there is none. Cancel safe: the job stays.
pub(super) async fn done<T>(job: &mut Option<Job<T>>) -> T {
    match job {
        Some(running) => {
            let result = running.await;
            *job = None;
            result
        }
        None => std::future::pending().await,
    }
}

/// Exponential from 100 ms to 30 s, half of it random, so that instances do not return in step.
pub(super) fn backoff(attempt: u32) -> Duration {
    let full = Duration::from_millis(100).saturating_mul(1 << attempt.min(9));
    let full = full.min(Duration::from_secs(30));
    full.mul_f64(rand::random_range(0.5..1.0))
}

enum State {
    Shut(Box<dyn Source>),
    Opening(Job<(Box<dyn Source>, Result<(), StreamError>)>),
    Open(Box<dyn Source>),
    Closing(Job<Box<dyn Source>>),
    /// While the source changes hands.
    Between,
}

pub(super) struct Link {
    state: State,
    attempts: u32,
    opened: Option<Instant>,
    /// When a shut source is opened again; `None`: not before it is asked for.
    reopen_at: Option<Instant>,
}

pub(super) enum LinkEvent {
    Opened,
    Closed,
    Item(StreamItem),
    Failed(StreamError),
}

impl Link {
    pub(super) fn new(source: Box<dyn Source>) -> Self {
        Self {
            state: State::Shut(source),
            attempts: 0,
            opened: None,
            reopen_at: Some(Instant::now()),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, State::Open(_))
    }

    /// Neither open nor about to be.
    pub(super) fn is_shut(&self) -> bool {
        matches!(self.state, State::Shut(_) | State::Between)
    }

    /// Shut on purpose, and not about to be opened.
    pub(super) fn is_resting(&self) -> bool {
        matches!(self.state, State::Shut(_) | State::Closing(_)) && self.reopen_at.is_none()
    }

    pub(super) fn reopen_at(&self) -> Option<Instant> {
        match self.state {
            State::Shut(_) => self.reopen_at,
            _ => None,
        }
    }

    pub(super) fn coordinate_at_open(&self) -> Option<&Position> {
        match &self.state {
            State::Open(source) => source.coordinate_at_open(),
            _ => None,
        }
    }

    /// Opens a shut source behind `after`.
    pub(super) fn open(&mut self, after: Position) {
        self.state = match std::mem::replace(&mut self.state, State::Between) {
            State::Shut(mut source) => State::Opening(Box::pin(async move {
                let result = source.open(&after).await;
                (source, result)
            })),
            other => other,
        };
    }

    /// Closes an open source; it is opened again at `reopen_at`, or when asked for.
    pub(super) fn close(&mut self, reopen_at: Option<Instant>) {
        self.reopen_at = reopen_at;
        self.state = match std::mem::replace(&mut self.state, State::Between) {
            State::Open(mut source) => State::Closing(Box::pin(async move {
                source.close().await;
                source
            })),
            other => other,
        };
    }

    /// Closes after a failure, to open again after a backoff.
    pub(super) fn retry(&mut self) {
        // A stream that is lost again and again soon after it was opened is no success.
        if self.opened.take().is_some_and(|t| t.elapsed() > STEADY) {
            self.attempts = 0;
        }
        let wait = backoff(self.attempts);
        self.attempts = self.attempts.saturating_add(1);
        self.close(Some(Instant::now() + wait));
    }

    /// Closes after another client took our place; coming back soon would only take it back.
    pub(super) fn yield_place(&mut self) {
        self.close(Some(
            Instant::now() + YIELD.mul_f64(rand::random_range(1.0..2.0)),
        ));
    }

    pub(super) fn reopen(&mut self) {
        self.reopen_at = Some(Instant::now());
    }

    /// The next event; items only where `may_read`. Cancel safe.
    pub(super) async fn event(&mut self, may_read: bool) -> LinkEvent {
        match &mut self.state {
            State::Open(source) if may_read => match source.next().await {
                Ok(item) => LinkEvent::Item(item),
                Err(e) => LinkEvent::Failed(e),
            },
            State::Opening(job) => {
                let (source, result) = job.await;
                match result {
                    Ok(()) => {
                        self.state = State::Open(source);
                        self.opened = Some(Instant::now());
                        LinkEvent::Opened
                    }
                    Err(e) => {
                        // Whatever of it is open is closed by the caller's `retry`.
                        self.state = State::Open(source);
                        LinkEvent::Failed(e)
                    }
                }
            }
            State::Closing(job) => {
                let source = job.await;
                self.state = State::Shut(source);
                LinkEvent::Closed
            }
            State::Open(_) | State::Shut(_) | State::Between => std::future::pending().await,
        }
    }
}
