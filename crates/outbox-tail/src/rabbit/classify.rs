//! What an AMQP error means, decided by its reply code and the broker's words, once.

use lapin::ErrorKind;
use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};

/// Why a channel was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    /// Nothing about the messages: link, broker, operator.
    Link(String),
    /// No confirm in time.
    Timeout(String),
    /// 404 or 403 on an exchange.
    Exchange {
        name: String,
        missing: bool,
        text: String,
    },
    /// 403 on one routing key of a topic exchange.
    Topic {
        exchange: String,
        routing_key: String,
        text: String,
    },
    /// A body over the broker's limit, in bytes.
    TooLarge { max: usize, text: String },
    /// Some message in flight offends the broker; it does not say which.
    Suspect(String),
}

impl Loss {
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Link(text)
            | Self::Timeout(text)
            | Self::Suspect(text)
            | Self::Exchange { text, .. }
            | Self::Topic { text, .. }
            | Self::TooLarge { text, .. } => text,
        }
    }
}

/// lapin reports the loss of a channel to each waiter, to some of them only by the state that
/// they find the channel in. Whether this error tells more than that.
pub(super) fn telling(error: &lapin::Error) -> bool {
    error.is_amqp_error()
}

pub(super) fn loss(error: &lapin::Error) -> Loss {
    let ErrorKind::ProtocolError(amqp) = error.kind() else {
        return Loss::Link(error.to_string());
    };
    let text = amqp.get_message().to_string();
    let unknown = || Loss::Link(text.clone());
    match amqp.kind() {
        AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND) => quoted_after(&text, "no exchange ")
            .map_or_else(unknown, |name| Loss::Exchange {
                name,
                missing: true,
                text: text.clone(),
            }),
        AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) => refused(&text),
        AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED) => size_limit(&text).map_or_else(
            || Loss::Suspect(text.clone()),
            |max| Loss::TooLarge {
                max,
                text: text.clone(),
            },
        ),
        AMQPErrorKind::Hard(
            AMQPHardError::FRAMEERROR
            | AMQPHardError::SYNTAXERROR
            | AMQPHardError::COMMANDINVALID
            | AMQPHardError::UNEXPECTEDFRAME
            | AMQPHardError::NOTIMPLEMENTED,
        ) => Loss::Suspect(text),
        _ => unknown(),
    }
}

fn refused(text: &str) -> Loss {
    let own = text.to_owned();
    if let Some(routing_key) = quoted_after(text, "access to topic ")
        && let Some(exchange) = quoted_after(text, "exchange ")
    {
        return Loss::Topic {
            exchange,
            routing_key,
            text: own,
        };
    }
    match quoted_after(text, "exchange ") {
        Some(name) => Loss::Exchange {
            name,
            missing: false,
            text: own,
        },
        None => Loss::Link(own),
    }
}

/// The quoted word behind the first `marker` that is followed by a quote. The names are the
/// broker's own print of what we sent; one with a quote in it is cut at the quote and matches
/// nothing, which costs a reconnect and charges nobody.
fn quoted_after(text: &str, marker: &str) -> Option<String> {
    let at = text.find(&format!("{marker}'"))? + marker.len() + 1;
    let rest = &text[at..];
    rest.find('\'').map(|end| rest[..end].to_owned())
}

/// `… message size 17000000 is larger than configured max size 16777216`.
fn size_limit(text: &str) -> Option<usize> {
    if !text.contains("message size") {
        return None;
    }
    let at = text.find("max size ")? + "max size ".len();
    let digits: String = text[at..]
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use lapin::protocol::AMQPError;

    fn soft(kind: AMQPSoftError, text: &str) -> Loss {
        loss(&ErrorKind::ProtocolError(AMQPError::new(kind.into(), text.into())).into())
    }

    #[test]
    fn the_exchange_is_read_from_the_brokers_words() {
        let text = "NOT_FOUND - no exchange 'orders.eu' in vhost '/'";
        let Loss::Exchange { name, missing, .. } = soft(AMQPSoftError::NOTFOUND, text) else {
            unreachable!()
        };
        assert_eq!((name.as_str(), missing), ("orders.eu", true));
        for text in [
            "ACCESS_REFUSED - write access to exchange 'x' in vhost '/' refused for user 'u'",
            "ACCESS_REFUSED - cannot publish to internal exchange 'x' in vhost '/'",
        ] {
            let Loss::Exchange { name, missing, .. } = soft(AMQPSoftError::ACCESSREFUSED, text)
            else {
                unreachable!()
            };
            assert_eq!((name.as_str(), missing), ("x", false));
        }
    }

    #[test]
    fn a_refused_topic_names_exchange_and_key() {
        let text = "ACCESS_REFUSED - write access to topic 'a.b' in exchange 'x' in vhost '/' \
                    refused for user 'u'";
        assert!(matches!(
            soft(AMQPSoftError::ACCESSREFUSED, text),
            Loss::Topic { exchange, routing_key, .. } if exchange == "x" && routing_key == "a.b"
        ));
    }

    #[test]
    fn a_size_limit_is_read_and_any_other_precondition_makes_suspects() {
        let text = "PRECONDITION_FAILED - message size 17000000 is larger than configured max \
                    size 16777216";
        assert!(matches!(
            soft(AMQPSoftError::PRECONDITIONFAILED, text),
            Loss::TooLarge {
                max: 16_777_216,
                ..
            }
        ));
        assert!(matches!(
            soft(
                AMQPSoftError::PRECONDITIONFAILED,
                "PRECONDITION_FAILED - invalid header"
            ),
            Loss::Suspect(_)
        ));
    }

    #[test]
    fn a_frame_error_makes_suspects_and_a_closing_broker_does_not() {
        let hard = |kind: AMQPHardError| {
            loss(&ErrorKind::ProtocolError(AMQPError::new(kind.into(), "x".into())).into())
        };
        assert!(matches!(hard(AMQPHardError::FRAMEERROR), Loss::Suspect(_)));
        assert!(matches!(
            hard(AMQPHardError::CONNECTIONFORCED),
            Loss::Link(_)
        ));
    }
}
