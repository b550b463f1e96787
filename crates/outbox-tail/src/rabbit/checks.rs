//! What is known about exchanges and sizes before a message is handed over: that one bad row
//! does not close the channel on its neighbours.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use outbox_core::failure::Failure;
use outbox_core::message::Message;

/// How long an exchange that is there counts as there. If it goes, the channel is closed once
/// and the answer is forgotten.
const GOOD_FOR: Duration = Duration::from_secs(60);
/// How long a missing exchange counts as missing: an operator who creates it waits no longer.
const MISSING_FOR: Duration = Duration::from_secs(5);
/// How long a refusal holds that only a closed channel tells: what a retry costs the neighbours.
const REFUSED_FOR: Duration = Duration::from_secs(60);
/// How long the broker's limit on bodies is believed.
const LIMIT_FOR: Duration = Duration::from_secs(300);
/// Names kept at most; they come from row data.
const MOST: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Checks {
    exchanges: HashMap<String, (Result<(), Failure>, Instant)>,
    topics: HashMap<(String, String), (Failure, Instant)>,
    limit: Option<(usize, Instant)>,
}

/// What is known about one message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Known {
    Good,
    Refused(Failure),
    /// Its exchange has to be asked for first.
    Unknown,
}

impl Checks {
    pub(super) fn known(&self, message: &Message, now: Instant) -> Known {
        if let Some((max, until)) = self.limit
            && now < until
            && message.body.len() > max
        {
            return Known::Refused(too_large(message, max));
        }
        if !self.topics.is_empty() {
            let pair = (message.exchange.to_string(), message.routing_key.clone());
            if let Some((failure, until)) = self.topics.get(&pair)
                && now < *until
            {
                return Known::Refused(failure.clone());
            }
        }
        if !message.templated_exchange || message.exchange.is_empty() {
            return Known::Good;
        }
        match self.exchanges.get(&*message.exchange) {
            Some((answer, until)) if now < *until => match answer {
                Ok(()) => Known::Good,
                Err(failure) => Known::Refused(failure.clone()),
            },
            _ => Known::Unknown,
        }
    }

    pub(super) fn present(&mut self, exchange: &str, now: Instant) {
        self.learn(exchange, Ok(()), now + GOOD_FOR);
    }

    pub(super) fn missing(&mut self, exchange: &str, text: &str, now: Instant) {
        let failure = Failure::permanent("exchange_missing", text);
        self.learn(exchange, Err(failure), now + MISSING_FOR);
    }

    pub(super) fn refused(&mut self, exchange: &str, text: &str, now: Instant) {
        let failure = Failure::permanent("exchange_refused", text);
        self.learn(exchange, Err(failure), now + REFUSED_FOR);
    }

    pub(super) fn topic_refused(&mut self, exchange: &str, key: &str, text: &str, now: Instant) {
        if self.topics.len() >= MOST {
            self.topics.clear();
        }
        let failure = Failure::permanent("topic_refused", text);
        let pair = (exchange.to_owned(), key.to_owned());
        self.topics.insert(pair, (failure, now + REFUSED_FOR));
    }

    pub(super) fn forget(&mut self, exchange: &str) {
        self.exchanges.remove(exchange);
    }

    pub(super) fn limit(&mut self, max: usize, now: Instant) {
        self.limit = Some((max, now + LIMIT_FOR));
    }

    fn learn(&mut self, exchange: &str, answer: Result<(), Failure>, until: Instant) {
        if self.exchanges.len() >= MOST && !self.exchanges.contains_key(exchange) {
            self.exchanges.clear();
        }
        self.exchanges.insert(exchange.to_owned(), (answer, until));
    }
}

pub(super) fn too_large(message: &Message, max: usize) -> Failure {
    let bytes = message.body.len();
    Failure::permanent(
        "body_too_large",
        format!("the body has {bytes} bytes, the broker takes {max}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use outbox_core::message::ContentType;

    fn message(exchange: &str, templated: bool) -> Message {
        Message {
            exchange: exchange.into(),
            templated_exchange: templated,
            routing_key: "k".into(),
            content_type: ContentType::Json,
            message_id: "m".into(),
            event_type: "t".into(),
            timestamp: None,
            app_id: "outboxd".into(),
            headers: Vec::new(),
            body: Bytes::from_static(b"12345"),
        }
    }

    #[test]
    fn only_templated_exchanges_are_asked_for_and_the_default_one_never() {
        let now = Instant::now();
        let checks = Checks::default();
        assert_eq!(checks.known(&message("x", false), now), Known::Good);
        assert_eq!(checks.known(&message("", true), now), Known::Good);
        assert_eq!(checks.known(&message("x", true), now), Known::Unknown);
    }

    #[test]
    fn answers_expire() {
        let now = Instant::now();
        let mut checks = Checks::default();
        checks.present("there", now);
        checks.missing("gone", "no exchange", now);
        assert_eq!(checks.known(&message("there", true), now), Known::Good);
        assert!(matches!(
            checks.known(&message("gone", true), now),
            Known::Refused(f) if f.code == "exchange_missing"
        ));
        assert_eq!(
            checks.known(&message("gone", true), now + MISSING_FOR),
            Known::Unknown
        );
        assert_eq!(
            checks.known(&message("there", true), now + GOOD_FOR),
            Known::Unknown
        );
    }

    #[test]
    fn a_limit_and_a_refused_topic_hold_for_static_exchanges_too() {
        let now = Instant::now();
        let mut checks = Checks::default();
        checks.topic_refused("x", "k", "refused", now);
        assert!(matches!(
            checks.known(&message("x", false), now),
            Known::Refused(_)
        ));
        assert_eq!(checks.known(&message("y", false), now), Known::Good);
        checks.limit(4, now);
        assert!(matches!(
            checks.known(&message("y", false), now),
            Known::Refused(f) if f.code == "body_too_large"
        ));
    }

    #[test]
    fn names_from_rows_do_not_grow_without_bound() {
        let now = Instant::now();
        let mut checks = Checks::default();
        for i in 0..=MOST {
            checks.missing(&i.to_string(), "no", now);
            checks.topic_refused("x", &i.to_string(), "no", now);
        }
        assert!(checks.exchanges.len() <= MOST && checks.topics.len() <= MOST);
    }
}
