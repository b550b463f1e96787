//! One connection in use: hands messages over, settles confirms, watches for trouble.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lapin::message::BasicReturnMessage;
use lapin::options::BasicPublishOptions;
use lapin::{Channel, Confirmation, Event};
use outbox_core::message::Message;
use outbox_core::ports::{PublishOutcome, Ticket};
use tokio_util::sync::CancellationToken;

use super::checks::{Checks, Known};
use super::classify::{Loss, loss, telling};
use super::confirms::{Confirms, Key, Slot, Verdict};
use super::convert::{Converted, convert, key_of, key_of_return};
use super::in_flight::{InFlight, Item, PublishCall};
use super::link::{Link, declare_one};
use super::{ExchangeType, RabbitConfig, Shared};

/// Messages handed over between two looks at the confirms.
const CHUNK: usize = 256;
/// How often everything is looked at without a cause: confirms whose wake-up was lost, a
/// connection that closed without an event, the confirm clock.
const TICK: Duration = Duration::from_millis(100);
/// A confirm held for longer than this pauses new messages for as long, again and again, so that
/// nothing is outstanding for once.
const HOLD: Duration = Duration::from_millis(200);
/// How long the broker's reason for a loss is waited for where it is not there yet.
const REASON_WAIT: Duration = Duration::from_millis(200);

/// How a session ended.
pub(super) enum End {
    Cancelled,
    Lost(Loss),
}

type Check = Pin<Box<dyn Future<Output = (String, Option<lapin::Error>)> + Send>>;

pub(super) struct Session<'a> {
    shared: &'a Shared,
    config: &'a RabbitConfig,
    checks: &'a mut Checks,
    pub(super) link: Link,
    in_flight: InFlight,
    confirms: Confirms,
    clock: Clock,
    /// Taken from the inbox, not handed over yet.
    queue: VecDeque<(Ticket, Arc<Message>)>,
    /// Only one message may be out until something was answered.
    probing: bool,
    blocked: bool,
    check: Option<Check>,
    settled: Vec<(Slot, Verdict)>,
    decided: Vec<(Ticket, PublishOutcome)>,
    /// Whether the broker answered anything.
    pub(super) answered: bool,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        config: &'a RabbitConfig,
        checks: &'a mut Checks,
        link: Link,
        probing: bool,
    ) -> Self {
        Self {
            shared,
            config,
            checks,
            link,
            in_flight: InFlight::default(),
            confirms: Confirms::default(),
            clock: Clock::new(),
            queue: VecDeque::new(),
            probing,
            blocked: false,
            check: None,
            settled: Vec::new(),
            decided: Vec::new(),
            answered: false,
        }
    }

    /// Runs until the channel is lost or `cancel`. Not cancel safe.
    pub(super) async fn run(&mut self, cancel: &CancellationToken) -> End {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let turn = self.turn();
            self.publish_decided();
            let mut trouble = turn.err();
            if trouble.is_none() {
                let woken = self.in_flight.woken();
                trouble = tokio::select! {
                    biased;
                    () = cancel.cancelled() => return End::Cancelled,
                    event = self.link.events.next() => self.on_event(event),
                    answer = async {
                        match self.check.as_mut() {
                            Some(check) => check.await,
                            None => std::future::pending().await,
                        }
                    } => self.on_check(answer),
                    () = woken => None,
                    () = self.shared.submitted.notified() => None,
                    _ = tick.tick() => self.on_tick(),
                };
            }
            if let Some(trouble) = trouble {
                return End::Lost(self.reason(trouble).await);
            }
        }
    }

    /// Everything that can be done now. Ends with nothing woken, and nothing in the inbox that
    /// may be handed over.
    fn turn(&mut self) -> Result<(), Trouble> {
        loop {
            self.passes()?;
            if !self.hand_over()? {
                return Ok(());
            }
        }
    }

    fn passes(&mut self) -> Result<(), Trouble> {
        loop {
            let woken = self.in_flight.take_woken();
            if woken.is_empty() && !self.confirms.wants_pass() {
                return Ok(());
            }
            let now = Instant::now();
            self.confirms.begin_pass();
            let mut trouble: Option<Trouble> = None;
            for slot in woken {
                match self.in_flight.poll(slot) {
                    Poll::Pending => {}
                    Poll::Ready(Ok(Confirmation::Ack(returned))) => {
                        self.confirms.seen(slot, true, returned.map(describe), now);
                    }
                    Poll::Ready(Ok(Confirmation::Nack(returned))) => {
                        self.confirms.seen(slot, false, returned.map(describe), now);
                    }
                    Poll::Ready(Ok(Confirmation::NotRequested)) => {
                        let text = "the channel is not in confirm mode".to_owned();
                        trouble.get_or_insert(Trouble::Known(Loss::Link(text)));
                    }
                    Poll::Ready(Err(error)) => match &trouble {
                        Some(Trouble::Error(e)) if !telling(e) && telling(&error) => {
                            trouble = Some(Trouble::Error(error));
                        }
                        Some(_) => {}
                        None => trouble = Some(Trouble::Error(error)),
                    },
                }
            }
            if let Some(trouble) = trouble {
                // The pass is not ended: with the channel gone, what is held stays undecided.
                return Err(trouble);
            }
            self.confirms.end_pass(&mut self.settled);
            for (slot, verdict) in self.settled.drain(..) {
                let Some(item) = self.in_flight.remove(slot) else {
                    continue;
                };
                self.answered = true;
                self.probing = false;
                let outcome = match verdict {
                    Verdict::Confirmed => PublishOutcome::Confirmed,
                    Verdict::Nacked => PublishOutcome::Nacked,
                    Verdict::Returned(reason) => PublishOutcome::Returned(reason),
                };
                self.decided.push((item.ticket, outcome));
            }
        }
    }

    /// How many messages may be handed over now.
    fn room(&self) -> usize {
        let held = self.confirms.held_since();
        let paused = held
            .is_some_and(|since| (since.elapsed().as_millis() / HOLD.as_millis().max(1)) % 2 == 1);
        if self.blocked || self.check.is_some() || paused {
            0
        } else if self.probing {
            1_usize.saturating_sub(self.in_flight.len())
        } else {
            CHUNK
        }
    }

    /// Hands over the next messages; whether there may be more.
    fn hand_over(&mut self) -> Result<bool, Trouble> {
        let room = self.room();
        if self.queue.len() < room {
            let more = self.shared.take(room - self.queue.len());
            self.queue.extend(more);
        }
        let mut handed = 0;
        while handed < room
            && let Some((ticket, message)) = self.queue.pop_front()
        {
            handed += 1;
            match self.checks.known(&message, Instant::now()) {
                Known::Good => {}
                Known::Refused(failure) => {
                    self.decided
                        .push((ticket, PublishOutcome::Refused(failure)));
                    continue;
                }
                Known::Unknown => {
                    self.ask(&message.exchange);
                    self.queue.push_front((ticket, message));
                    return Ok(false);
                }
            }
            match convert(&message, self.link.frame_max) {
                Err(failure) => self
                    .decided
                    .push((ticket, PublishOutcome::Refused(failure))),
                Ok(converted) => {
                    let call = publish(&self.link.channel, converted, &message);
                    let slot = self.confirms.submit(key_of(&message));
                    let item = Item { ticket, message };
                    let started = self.in_flight.start(slot, item, call, self.clock.now());
                    started.map_err(Trouble::Error)?;
                }
            }
        }
        Ok(handed > 0)
    }

    /// Asks whether a templated exchange is there, on a channel of its own.
    fn ask(&mut self, exchange: &str) {
        let (connection, name) = (Arc::clone(&self.link.connection), exchange.to_owned());
        let deadline = self.config.connect_timeout;
        self.check = Some(Box::pin(async move {
            let asked = declare_one(&connection, &name, ExchangeType::Topic, true);
            let answer = tokio::time::timeout(deadline, asked).await;
            let error = match answer {
                Ok(answer) => answer.err(),
                Err(_) => Some(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
            };
            (name, error)
        }));
    }

    fn on_check(&mut self, (exchange, error): (String, Option<lapin::Error>)) -> Option<Trouble> {
        self.check = None;
        let now = Instant::now();
        let Some(error) = error else {
            self.checks.present(&exchange, now);
            return None;
        };
        if !error.is_amqp_soft_error() {
            return Some(Trouble::Error(error));
        }
        match loss(&error) {
            Loss::Exchange {
                missing: true,
                text,
                ..
            } => self.checks.missing(&exchange, &text, now),
            // Such as a name that AMQP does not allow.
            other => self.checks.refused(&exchange, other.text(), now),
        }
        None
    }

    fn on_event(&mut self, event: Option<Event>) -> Option<Trouble> {
        match event {
            Some(Event::ConnectionBlocked(reason)) => self.set_blocked(Some(&reason)),
            Some(Event::ConnectionUnblocked) => self.set_blocked(None),
            // A soft error is that of some channel, perhaps one that only asked for an exchange.
            Some(Event::Error(error)) => {
                let ours = !error.is_amqp_soft_error() || !self.link.channel.status().connected();
                return ours.then_some(Trouble::Error(error));
            }
            None => {
                let text = "the connection has ended".to_owned();
                return Some(Trouble::Known(Loss::Link(text)));
            }
            Some(_) => {}
        }
        None
    }

    fn set_blocked(&mut self, reason: Option<&str>) {
        if self.blocked == reason.is_some() {
            return;
        }
        self.blocked = reason.is_some();
        self.clock.run(reason.is_none());
        self.shared.block(reason);
        match reason {
            Some(reason) => tracing::warn!(server = %self.link.server, reason, "broker blocks"),
            None => tracing::info!(server = %self.link.server, "broker no longer blocks"),
        }
    }

    fn on_tick(&mut self) -> Option<Trouble> {
        self.in_flight.wake_all();
        let blocked = self.link.connection.status().blocked();
        self.set_blocked(blocked.then_some("no reason given"));
        if !self.link.alive() {
            let text = "the connection was closed".to_owned();
            return Some(Trouble::Unknown(text));
        }
        let waited = self.clock.now().saturating_sub(self.in_flight.oldest()?);
        (waited > self.config.confirm_timeout).then(|| {
            let text = format!("no confirm within {:?}", self.config.confirm_timeout);
            Trouble::Known(Loss::Timeout(text))
        })
    }

    /// The loss behind a symptom. The broker's own words may come a moment later, as an event.
    async fn reason(&mut self, trouble: Trouble) -> Loss {
        let fallback = match trouble {
            Trouble::Known(loss) => return loss,
            // After an I/O error nothing more is read.
            Trouble::Error(error) if telling(&error) || error.is_io_error() => return loss(&error),
            Trouble::Error(error) => error.to_string(),
            Trouble::Unknown(text) => text,
        };
        let told = async {
            while let Some(event) = self.link.events.next().await {
                if let Event::Error(error) = event
                    && telling(&error)
                {
                    return Some(loss(&error));
                }
            }
            None
        };
        let told = tokio::time::timeout(REASON_WAIT, told).await;
        told.ok().flatten().unwrap_or(Loss::Link(fallback))
    }

    fn publish_decided(&mut self) {
        if !self.decided.is_empty() {
            self.shared.decide(self.decided.drain(..));
        }
    }

    /// Whether a message in flight goes to that exchange, and one of them by configuration.
    pub(super) fn in_flight_to(&self, exchange: &str) -> Option<Templated> {
        let mut found = None;
        for message in self
            .in_flight
            .messages()
            .filter(|m| &*m.exchange == exchange)
        {
            if !message.templated_exchange {
                return Some(Templated(false));
            }
            found = Some(Templated(true));
        }
        found
    }

    /// Ends the session: the connection, what was handed over without outcome in its order, and
    /// what was not handed over.
    pub(super) fn end(mut self) -> (Link, Vec<Item>, Vec<Ticket>) {
        self.publish_decided();
        let queued = self.queue.drain(..).map(|(ticket, _)| ticket).collect();
        (self.link, self.in_flight.take_all(), queued)
    }
}

/// Whether an exchange's name comes from row data alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Templated(pub(super) bool);

/// The first sign of a loss.
enum Trouble {
    Known(Loss),
    Error(lapin::Error),
    Unknown(String),
}

pub(super) fn publish(
    channel: &Arc<Channel>,
    converted: Converted,
    message: &Message,
) -> PublishCall {
    let (channel, body) = (Arc::clone(channel), message.body.clone());
    Box::pin(async move {
        let options = BasicPublishOptions {
            mandatory: true,
            immediate: false,
        };
        let Converted {
            exchange,
            routing_key,
            properties,
        } = converted;
        channel
            .basic_publish(exchange, routing_key, options, &body, properties)
            .await
    })
}

/// A return in our terms: whose it is, and the broker's words.
pub(super) fn describe(returned: BasicReturnMessage) -> (Key, String) {
    let reason = format!(
        "{} (exchange {:?}, routing key {:?})",
        returned.reply_text,
        returned.exchange.as_str(),
        returned.routing_key.as_str()
    );
    (key_of_return(&returned.properties), reason)
}

/// Time that stands still while the broker blocks.
struct Clock {
    before: Duration,
    running_since: Option<Instant>,
}

impl Clock {
    fn new() -> Self {
        Self {
            before: Duration::ZERO,
            running_since: Some(Instant::now()),
        }
    }

    fn now(&self) -> Duration {
        self.before + self.running_since.map_or(Duration::ZERO, |s| s.elapsed())
    }

    fn run(&mut self, run: bool) {
        self.before = self.now();
        self.running_since = run.then(Instant::now);
    }
}
