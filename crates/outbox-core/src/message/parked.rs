//! A message as it is kept in our own tables: a JSON envelope for everything but the body.

use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ContentType, HeaderValue, MAX_SHORT_STRING, Message};

/// An envelope that was not written by [`Message::envelope`], or not by a version that this one
/// understands.
#[derive(Debug, thiserror::Error)]
pub enum EnvelopeError {
    /// Not the fields of an envelope.
    #[error("a parked message cannot be read")]
    Malformed(#[source] serde_json::Error),
    /// A short string over its limit.
    #[error("{0} of a parked message is longer than an AMQP short string")]
    TooLong(&'static str),
}

/// Unknown fields are ignored, so that a newer version may add some while an older one runs.
#[derive(Serialize, Deserialize)]
struct Envelope {
    exchange: String,
    templated_exchange: bool,
    routing_key: String,
    content_type: ContentType,
    message_id: String,
    event_type: String,
    timestamp: Option<u64>,
    app_id: String,
    headers: Vec<(String, HeaderValue)>,
}

impl Message {
    /// Everything but the body. Floats keep every bit of a finite number.
    #[must_use]
    pub fn envelope(&self) -> Value {
        serde_json::json!({
            "exchange": &*self.exchange,
            "templated_exchange": self.templated_exchange,
            "routing_key": self.routing_key,
            "content_type": self.content_type,
            "message_id": self.message_id,
            "event_type": self.event_type,
            "timestamp": self.timestamp,
            "app_id": &*self.app_id,
            "headers": self.headers,
        })
    }

    /// The message of an envelope and its body.
    pub fn from_envelope(envelope: Value, body: Bytes) -> Result<Self, EnvelopeError> {
        let e: Envelope = serde_json::from_value(envelope).map_err(EnvelopeError::Malformed)?;
        for (what, text) in [
            ("exchange", &e.exchange),
            ("routing_key", &e.routing_key),
            ("message_id", &e.message_id),
            ("event_type", &e.event_type),
            ("app_id", &e.app_id),
        ] {
            if text.len() > MAX_SHORT_STRING {
                return Err(EnvelopeError::TooLong(what));
            }
        }
        if !e.headers.iter().all(|(name, value)| names_fit(name, value)) {
            return Err(EnvelopeError::TooLong("a header name"));
        }
        Ok(Self {
            exchange: Arc::from(e.exchange),
            templated_exchange: e.templated_exchange,
            routing_key: e.routing_key,
            content_type: e.content_type,
            message_id: e.message_id,
            event_type: e.event_type,
            timestamp: e.timestamp,
            app_id: Arc::from(e.app_id),
            headers: e.headers,
            body,
        })
    }
}

fn names_fit(name: &str, value: &HeaderValue) -> bool {
    name.len() <= MAX_SHORT_STRING
        && match value {
            HeaderValue::List(items) => items.iter().all(|item| names_fit("", item)),
            HeaderValue::Table(members) => members.iter().all(|(n, v)| names_fit(n, v)),
            _ => true,
        }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn header() -> impl Strategy<Value = HeaderValue> {
        let leaf = prop_oneof![
            Just(HeaderValue::Null),
            any::<bool>().prop_map(HeaderValue::Bool),
            any::<i64>().prop_map(HeaderValue::Int),
            proptest::num::f64::NORMAL.prop_map(HeaderValue::Float),
            any::<String>().prop_map(HeaderValue::Text),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(HeaderValue::List),
                proptest::collection::vec((".{0,8}", inner), 0..4).prop_map(HeaderValue::Table),
            ]
        })
    }

    fn message() -> impl Strategy<Value = Message> {
        (
            (".{0,40}", any::<bool>(), ".{0,40}", ".{0,40}", ".{0,40}"),
            any::<Option<u64>>(),
            proptest::collection::vec((".{0,20}", header()), 0..5),
            proptest::collection::vec(any::<u8>(), 0..64),
            prop_oneof![
                Just(ContentType::Json),
                Just(ContentType::Text),
                Just(ContentType::Binary)
            ],
        )
            .prop_map(
                |((exchange, templated, key, id, kind), timestamp, headers, body, content)| {
                    Message {
                        exchange: exchange.into(),
                        templated_exchange: templated,
                        routing_key: key,
                        content_type: content,
                        message_id: id,
                        event_type: kind,
                        timestamp,
                        app_id: "app".into(),
                        headers,
                        body: body.into(),
                    }
                },
            )
    }

    proptest! {
        #[test]
        fn a_parked_message_comes_back_as_it_was(message in message()) {
            // Through text, as the database keeps it.
            let text = message.envelope().to_string();
            let envelope = serde_json::from_str(&text).unwrap();
            let back = Message::from_envelope(envelope, message.body.clone()).unwrap();
            prop_assert_eq!(back, message);
        }
    }

    #[test]
    fn an_envelope_of_something_else_is_an_error() {
        for text in ["null", "[]", "{}", "{\"exchange\":1}"] {
            let envelope = serde_json::from_str(text).unwrap();
            assert!(matches!(
                Message::from_envelope(envelope, Bytes::new()),
                Err(EnvelopeError::Malformed(_))
            ));
        }
    }

    #[test]
    fn a_short_string_that_is_too_long_is_an_error() {
        let mut envelope = serde_json::json!({
            "exchange": "", "templated_exchange": false, "routing_key": "k".repeat(256),
            "content_type": "Json", "message_id": "1", "event_type": "e", "timestamp": null,
            "app_id": "a", "headers": [],
        });
        let refused = Message::from_envelope(envelope.clone(), Bytes::new());
        assert!(matches!(
            refused,
            Err(EnvelopeError::TooLong("routing_key"))
        ));
        envelope["routing_key"] = "k".into();
        envelope["headers"] = serde_json::json!([["h".repeat(256), "Null"]]);
        let refused = Message::from_envelope(envelope, Bytes::new());
        assert!(matches!(
            refused,
            Err(EnvelopeError::TooLong("a header name"))
        ));
    }
}
