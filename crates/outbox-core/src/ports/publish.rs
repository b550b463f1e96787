use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use crate::failure::Failure;
use crate::message::Message;

/// Names one handed-over message; chosen by the caller, unique within the publisher's life.
pub type Ticket = u64;

/// Counts the channels that a publisher has used. A caller submits under the generation that it
/// has last seen, so that it cannot send a later row over a fresh channel before it has learnt
/// that an earlier one was lost with the old channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub u64);

/// What became of one message. Every ticket gets exactly one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublishOutcome {
    /// Acknowledged by the broker, and not returned.
    Confirmed,
    /// Routed to no queue; the broker's reply text.
    Returned(String),
    /// Refused by a nack.
    Nacked,
    /// The broker, or the check before it, refuses this very message for ever.
    Refused(Failure),
    /// Nobody knows: channel or connection lost, timed out, or handed over under a generation
    /// that was over. To be published again, in order, uncharged.
    Unconfirmed,
}

/// The connection as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BrokerState {
    /// Publishing.
    Up,
    /// Connected, but the broker has told us to stop (memory or disk alarm).
    Blocked(String),
    /// Not connected, or unable to publish to a configured exchange; why, without secrets.
    Down(String),
}

impl fmt::Display for BrokerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Up => f.write_str("up"),
            Self::Blocked(why) => write!(f, "blocked: {why}"),
            Self::Down(why) => write!(f, "down: {why}"),
        }
    }
}

/// Persistent, mandatory, confirmed, pipelined publishing in submission order.
#[async_trait]
pub trait Publisher: Send + Sync {
    /// Waits until messages can be sent and returns the generation to submit under. After a
    /// loss it returns only once every ticket of older generations has its outcome queued.
    /// Cancel safe.
    async fn ready(&self) -> Generation;

    /// Hands messages over, in order. Never waits: the caller bounds what is without outcome.
    /// Under a generation that is over, every message becomes `Unconfirmed`.
    fn submit(&self, generation: Generation, messages: Vec<(Ticket, Arc<Message>)>);

    /// Waits for outcomes and takes all that are there, in the order in which they were
    /// decided. Cancel safe: nothing is lost when the future is dropped.
    async fn outcomes(&self) -> Vec<(Ticket, PublishOutcome)>;

    /// The state now.
    fn state(&self) -> BrokerState;
}
