use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use outbox_core::Message;
use outbox_core::ports::{BrokerState, Generation, PublishOutcome, Publisher, Ticket};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::guard;

type Answer = Box<dyn FnMut(&Message) -> PublishOutcome + Send>;
type Watch = Box<dyn FnMut(&Message) + Send>;

/// A broker that answers as told, in order of submission.
pub struct FakeBroker {
    state: Mutex<State>,
    changed: Notify,
}

/// A message that reached the broker.
#[derive(Clone, Debug)]
pub struct Submission {
    /// `message_id`.
    pub id: String,
    /// When.
    pub at: Instant,
}

struct State {
    generation: u64,
    down: bool,
    blocked: bool,
    latency: Duration,
    answer: Answer,
    watch: Watch,
    arrival: Watch,
    waiting: VecDeque<(Instant, Ticket, Arc<Message>)>,
    ready: Vec<(Ticket, PublishOutcome)>,
    submitted: Vec<Submission>,
    confirmed: Vec<String>,
    most: usize,
}

impl Default for FakeBroker {
    fn default() -> Self {
        let state = State {
            generation: 1,
            down: false,
            blocked: false,
            latency: Duration::from_millis(2),
            answer: Box::new(|_| PublishOutcome::Confirmed),
            watch: Box::new(|_| ()),
            arrival: Box::new(|_| ()),
            waiting: VecDeque::new(),
            ready: Vec::new(),
            submitted: Vec::new(),
            confirmed: Vec::new(),
            most: 0,
        };
        Self {
            state: Mutex::new(state),
            changed: Notify::new(),
        }
    }
}

impl FakeBroker {
    /// How messages are answered from now on.
    pub fn answer(&self, answer: impl FnMut(&Message) -> PublishOutcome + Send + 'static) {
        guard(&self.state).answer = Box::new(answer);
    }

    /// Looks at every message as it reaches the broker.
    pub fn watch(&self, watch: impl FnMut(&Message) + Send + 'static) {
        guard(&self.state).watch = Box::new(watch);
    }

    /// Looks at every message that it takes, whether its confirm gets through or not.
    pub fn on_arrival(&self, arrival: impl FnMut(&Message) + Send + 'static) {
        guard(&self.state).arrival = Box::new(arrival);
    }

    /// Time from submission to answer.
    pub fn set_latency(&self, latency: Duration) {
        guard(&self.state).latency = latency;
    }

    /// Goes away: the channel is lost, and everything without answer is unconfirmed. Or comes back.
    pub fn set_down(&self, down: bool) {
        let mut state = guard(&self.state);
        if down && !state.down {
            state.lose();
        }
        state.down = down;
        drop(state);
        self.changed.notify_waiters();
    }

    /// Decides on the first messages without answer, and loses the answers with the channel.
    pub fn drop_answers(&self, first: usize) {
        let mut state = guard(&self.state);
        for n in 0..first.min(state.waiting.len()) {
            let message = state.waiting[n].2.clone();
            if (state.answer)(&message) == PublishOutcome::Confirmed {
                (state.arrival)(&message);
            }
        }
        state.lose();
        drop(state);
        self.changed.notify_waiters();
    }

    /// The channel alone is lost.
    pub fn drop_channel(&self) {
        guard(&self.state).lose();
        self.changed.notify_waiters();
    }

    /// Stops answering, or goes on.
    pub fn set_blocked(&self, blocked: bool) {
        guard(&self.state).blocked = blocked;
        self.changed.notify_waiters();
    }

    /// Everything that reached it, in order.
    pub fn submitted(&self) -> Vec<Submission> {
        guard(&self.state).submitted.clone()
    }

    /// Ids of the messages that it confirmed, in order.
    pub fn confirmed(&self) -> Vec<String> {
        guard(&self.state).confirmed.clone()
    }

    /// The most messages that were without answer at once.
    pub fn most_at_once(&self) -> usize {
        guard(&self.state).most
    }
}

impl State {
    fn lose(&mut self) {
        self.generation += 1;
        let lost = self.waiting.drain(..);
        let lost = lost.map(|(_, ticket, _)| (ticket, PublishOutcome::Unconfirmed));
        self.ready.extend(lost);
    }

    /// Decides what is due; returns when the next answer is.
    fn decide(&mut self, now: Instant) -> Option<Instant> {
        while !self.blocked {
            let (at, _, _) = self.waiting.front()?;
            if *at > now {
                return Some(*at);
            }
            let (_, ticket, message) = self.waiting.pop_front()?;
            let outcome = (self.answer)(&message);
            if outcome == PublishOutcome::Confirmed {
                (self.arrival)(&message);
                self.confirmed.push(message.message_id.clone());
            }
            self.ready.push((ticket, outcome));
        }
        None
    }
}

#[async_trait]
impl Publisher for FakeBroker {
    async fn ready(&self) -> Generation {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            {
                let state = guard(&self.state);
                if !state.down && !state.blocked {
                    return Generation(state.generation);
                }
            }
            changed.await;
        }
    }

    fn submit(&self, generation: Generation, messages: Vec<(Ticket, Arc<Message>)>) {
        let mut state = guard(&self.state);
        let now = Instant::now();
        for (ticket, message) in messages {
            if state.down || generation.0 != state.generation {
                state.ready.push((ticket, PublishOutcome::Unconfirmed));
                continue;
            }
            (state.watch)(&message);
            state.submitted.push(Submission {
                id: message.message_id.clone(),
                at: now,
            });
            let at = now + state.latency;
            state.waiting.push_back((at, ticket, message));
        }
        state.most = state.most.max(state.waiting.len());
        drop(state);
        self.changed.notify_waiters();
    }

    async fn outcomes(&self) -> Vec<(Ticket, PublishOutcome)> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let next = {
                let mut state = guard(&self.state);
                let next = state.decide(Instant::now());
                if !state.ready.is_empty() {
                    return std::mem::take(&mut state.ready);
                }
                next
            };
            match next {
                Some(at) => tokio::select! {
                    () = changed => {}
                    () = sleep_until(at) => {}
                },
                None => changed.await,
            }
        }
    }

    fn state(&self) -> BrokerState {
        let state = guard(&self.state);
        match (state.down, state.blocked) {
            (true, _) => BrokerState::Down("told to".to_owned()),
            (_, true) => BrokerState::Blocked("told to".to_owned()),
            _ => BrokerState::Up,
        }
    }
}
