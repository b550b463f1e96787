//! The publisher's task: connects, runs a session, deals with its loss, connects again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use outbox_core::ports::{PublishOutcome, chain};
use rand::RngExt as _;
use tokio_util::sync::CancellationToken;

use super::checks::{Checks, too_large};
use super::classify::Loss;
use super::in_flight::Item;
use super::link::Link;
use super::quarantine::try_alone;
use super::session::{End, Session, Templated};
use super::{RabbitConfig, Shared};

/// Does the publisher's work; one task, spawned by the program's supervisor.
#[derive(Debug)]
pub struct Driver {
    config: RabbitConfig,
    shared: Arc<Shared>,
    checks: Checks,
    backoff: Backoff,
    /// The next session starts with a single message.
    probe: bool,
}

/// However the driver ends, nobody waits for it any more.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.lose("the publisher has stopped");
    }
}

impl Driver {
    pub(super) fn new(config: RabbitConfig, shared: Arc<Shared>) -> Self {
        let backoff = Backoff::new(config.backoff_min, config.backoff_max);
        Self {
            config,
            shared,
            checks: Checks::default(),
            backoff,
            probe: false,
        }
    }

    /// Connects and publishes until `cancel`; then closes the connection within
    /// `close_timeout`, which leaves what had no outcome `Unconfirmed`.
    ///
    /// Cancel safe in that dropping it cuts the connection and ends the generation, but the
    /// messages in flight then never get an outcome.
    pub async fn run(mut self, cancel: CancellationToken) {
        let _ended = Ended(Arc::clone(&self.shared));
        while !cancel.is_cancelled() {
            let opened = tokio::select! {
                () = cancel.cancelled() => break,
                opened = Box::pin(Link::open(&self.config)) => opened,
            };
            match opened {
                Ok(link) => Box::pin(self.use_link(link, &cancel)).await,
                Err(error) => {
                    let error = chain(&error);
                    tracing::warn!(error, "cannot connect to the broker");
                    self.shared.down(&error);
                }
            }
            let delay = self.backoff.next();
            tokio::select! {
                () = cancel.cancelled() => break,
                () = tokio::time::sleep(delay) => {}
            }
        }
    }

    async fn use_link(&mut self, link: Link, cancel: &CancellationToken) {
        let server = link.server.clone();
        tracing::info!(server, "connected to the broker");
        let since = Instant::now();
        self.shared.open();
        let probe = self.probe;
        let shared = Arc::clone(&self.shared);
        let mut session = Session::new(&shared, &self.config, &mut self.checks, link, probe);
        let end = session.run(cancel).await;
        let answered = session.answered;
        let lost = match end {
            End::Cancelled => None,
            End::Lost(loss) => {
                let templated = match &loss {
                    Loss::Exchange { name, .. } => session.in_flight_to(name),
                    _ => None,
                };
                Some((loss, templated))
            }
        };
        let (link, mut items, queued) = session.end();
        shared.lose(lost.as_ref().map_or("closing", |(loss, _)| loss.text()));
        if answered || since.elapsed() > self.config.backoff_max * 2 {
            self.backoff.reset();
            self.probe = false;
        }
        // The old connection goes first: the broker may allow one, and what it still holds of
        // the old should come before the new.
        link.close(self.config.close_timeout).await;
        if let Some((loss, templated)) = lost {
            tracing::warn!(server, reason = loss.text(), "lost the broker's channel");
            items = self.learn(&loss, templated, items, cancel).await;
        }
        let rest = items.iter().map(|item| item.ticket).chain(queued);
        shared.decide(rest.map(|ticket| (ticket, PublishOutcome::Unconfirmed)));
    }

    /// Draws the consequences of a loss, and returns what is left without outcome.
    async fn learn(
        &mut self,
        loss: &Loss,
        templated: Option<Templated>,
        mut items: Vec<Item>,
        cancel: &CancellationToken,
    ) -> Vec<Item> {
        let now = Instant::now();
        match loss {
            Loss::Link(_) => {}
            Loss::Timeout(_) => self.probe = true,
            Loss::Exchange {
                name,
                missing,
                text,
            } => match templated {
                // Asked for again before the next message to it, and found missing then.
                Some(Templated(true)) if *missing => self.checks.forget(name),
                Some(Templated(true)) => self.checks.refused(name, text, now),
                Some(Templated(false)) | None => {
                    self.backoff.grow();
                    self.probe = true;
                    self.shared.down(&format!("exchange {name:?}: {text}"));
                }
            },
            Loss::Topic {
                exchange,
                routing_key,
                text,
            } => self.checks.topic_refused(exchange, routing_key, text, now),
            Loss::TooLarge { max, .. } => {
                self.checks.limit(*max, now);
                let (guilty, rest): (Vec<_>, Vec<_>) =
                    items.into_iter().partition(|i| i.message.body.len() > *max);
                self.shared.decide(guilty.into_iter().map(|item| {
                    let failure = too_large(&item.message, *max);
                    (item.ticket, PublishOutcome::Refused(failure))
                }));
                items = rest;
            }
            Loss::Suspect(text) => {
                let why = format!("finding the message that the broker refuses: {text}");
                self.shared.down(&why);
                let mut decided = Vec::new();
                let trial = try_alone(&self.config, &items, |ticket, outcome| {
                    decided.push((ticket, outcome));
                });
                tokio::select! {
                    () = cancel.cancelled() => {}
                    () = Box::pin(trial) => {}
                }
                // Tried from the front, in order.
                items.drain(..decided.len());
                self.shared.decide(decided);
            }
        }
        items
    }
}

/// Delays between attempts: doubling, bounded, each drawn from its upper half.
#[derive(Debug)]
struct Backoff {
    min: Duration,
    max: Duration,
    next: Duration,
    /// Not to be reset this time.
    grown: bool,
}

impl Backoff {
    fn new(min: Duration, max: Duration) -> Self {
        Self {
            min,
            max: max.max(min),
            next: min,
            grown: false,
        }
    }

    fn reset(&mut self) {
        if !std::mem::take(&mut self.grown) {
            self.next = self.min;
        }
    }

    /// The last attempt did harm: the next waits longer although it was answered.
    fn grow(&mut self) {
        self.next = (self.next * 2).min(self.max);
        self.grown = true;
    }

    fn next(&mut self) -> Duration {
        let delay = self.next;
        self.next = (self.next * 2).min(self.max);
        delay.mul_f64(rand::rng().random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_within_bounds_and_start_over() {
        let (min, max) = (Duration::from_millis(100), Duration::from_millis(350));
        let mut backoff = Backoff::new(min, max);
        for base in [100, 200, 350, 350] {
            let delay = backoff.next();
            let base = Duration::from_millis(base);
            assert!(delay >= base / 2 && delay <= base);
        }
        backoff.reset();
        assert!(backoff.next() <= min);
    }
}
