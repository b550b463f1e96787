//! From our message to AMQP properties.

use std::hash::{DefaultHasher, Hash, Hasher};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldArray, FieldTable, ShortString};
use outbox_core::failure::Failure;
use outbox_core::message::{HeaderValue, Message};

use super::confirms::Key;

/// Type, channel, length and end octet of a frame.
const FRAME_OVERHEAD: usize = 8;
/// Class, weight and body size of a content header.
const CONTENT_HEADER_OVERHEAD: usize = 12;

const ID: &str = "outbox-id";
const TABLE: &str = "outbox-table";

/// A message in AMQP's terms.
pub(super) struct Converted {
    pub(super) exchange: ShortString,
    pub(super) routing_key: ShortString,
    pub(super) properties: BasicProperties,
}

/// Converts what is not the body. A message whose strings or headers AMQP cannot carry is
/// refused for ever: lapin would panic on the one, and stop writing for good on the other.
pub(super) fn convert(message: &Message, frame_max: usize) -> Result<Converted, Failure> {
    let mut properties = BasicProperties::default()
        .with_content_type(short("content type", message.content_type.mime())?)
        .with_delivery_mode(2)
        .with_message_id(short("message_id", &message.message_id)?)
        .with_type(short("event_type", &message.event_type)?)
        .with_app_id(short("name", &message.app_id)?);
    if let Some(seconds) = message.timestamp {
        properties = properties.with_timestamp(seconds);
    }
    let headers = table(&message.headers)?;
    let size = FRAME_OVERHEAD + CONTENT_HEADER_OVERHEAD + properties_size(message, &headers);
    if size > frame_max {
        return Err(Failure::permanent(
            "headers_too_large",
            format!("properties and headers take {size} bytes, a frame holds {frame_max}"),
        ));
    }
    Ok(Converted {
        exchange: short("exchange", &message.exchange)?,
        routing_key: short("routing key", &message.routing_key)?,
        properties: properties.with_headers(headers),
    })
}

/// Bytes that lapin writes for the properties of `convert`, flags included.
fn properties_size(message: &Message, headers: &FieldTable) -> usize {
    let strings = [
        message.content_type.mime(),
        &message.message_id,
        &message.event_type,
        &message.app_id,
    ];
    let timestamp = if message.timestamp.is_some() { 8 } else { 0 };
    let strings = strings.iter().map(|s| 1 + s.len()).sum::<usize>();
    2 + strings + 1 + timestamp + table_size(headers)
}

/// What identifies the message in a return.
pub(super) fn key_of(message: &Message) -> Key {
    let text = |name: &str| {
        message.headers.iter().find_map(|(k, v)| match v {
            HeaderValue::Text(t) if k == name => Some(t.as_bytes()),
            _ => None,
        })
    };
    key(text(TABLE), text(ID))
}

/// The same from a returned message.
pub(super) fn key_of_return(properties: &BasicProperties) -> Key {
    let text = |name: &str| {
        let value = properties.headers().as_ref()?.inner().get(name)?;
        match value {
            AMQPValue::LongString(t) => Some(t.as_bytes()),
            _ => None,
        }
    };
    key(text(TABLE), text(ID))
}

fn key(table: Option<&[u8]>, id: Option<&[u8]>) -> Key {
    let mut hasher = DefaultHasher::new();
    (table, id).hash(&mut hasher);
    hasher.finish()
}

fn short(what: &str, text: &str) -> Result<ShortString, Failure> {
    ShortString::try_new(text).map_err(|_| {
        let bytes = text.len();
        let reason = format!("{what} has {bytes} bytes, AMQP allows 255");
        Failure::permanent("string_too_long", reason)
    })
}

fn table(members: &[(String, HeaderValue)]) -> Result<FieldTable, Failure> {
    let mut table = FieldTable::default();
    for (name, value) in members {
        table.insert(short("a header's name", name)?, value_of(value)?);
    }
    Ok(table)
}

fn value_of(value: &HeaderValue) -> Result<AMQPValue, Failure> {
    Ok(match value {
        HeaderValue::Null => AMQPValue::Void,
        HeaderValue::Bool(b) => AMQPValue::Boolean(*b),
        HeaderValue::Int(n) => AMQPValue::LongLongInt(*n),
        HeaderValue::Float(f) => AMQPValue::Double(*f),
        HeaderValue::Text(t) => AMQPValue::LongString(t.as_str().into()),
        HeaderValue::List(l) => {
            let values = l.iter().map(value_of).collect::<Result<Vec<_>, _>>()?;
            AMQPValue::FieldArray(FieldArray::from(values))
        }
        HeaderValue::Table(t) => AMQPValue::FieldTable(table(t)?),
    })
}

fn table_size(table: &FieldTable) -> usize {
    let member =
        |(name, value): (&ShortString, &AMQPValue)| 1 + name.as_str().len() + value_size(value);
    4 + table.inner().iter().map(member).sum::<usize>()
}

/// Bytes of a value with its type octet; only of the types that [`value_of`] makes.
fn value_size(value: &AMQPValue) -> usize {
    1 + match value {
        AMQPValue::Void => 0,
        AMQPValue::Boolean(_) => 1,
        AMQPValue::LongString(t) => 4 + t.len(),
        AMQPValue::FieldArray(a) => 4 + a.as_slice().iter().map(value_size).sum::<usize>(),
        AMQPValue::FieldTable(t) => table_size(t),
        _ => 8,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use bytes::Bytes;
    use outbox_core::message::ContentType;

    fn message(headers: Vec<(String, HeaderValue)>) -> Message {
        Message {
            exchange: "x".into(),
            templated_exchange: false,
            routing_key: "r".into(),
            content_type: ContentType::Json,
            message_id: "m".into(),
            event_type: "t".into(),
            timestamp: Some(1),
            app_id: "outboxd".into(),
            headers,
            body: Bytes::new(),
        }
    }

    fn text(name: &str, value: &str) -> (String, HeaderValue) {
        (name.into(), HeaderValue::Text(value.into()))
    }

    #[test]
    fn a_return_has_the_key_of_its_message_and_other_ids_and_tables_have_others() {
        let key = |table: &str, id: &str| {
            let message = message(vec![text(ID, id), text(TABLE, table)]);
            let converted = convert(&message, 4096).unwrap();
            assert_eq!(key_of(&message), key_of_return(&converted.properties));
            key_of(&message)
        };
        assert_ne!(key("s.a", "1"), key("s.a", "2"));
        assert_ne!(key("s.a", "1"), key("s.b", "1"));
        assert_ne!(key("s.a1", "1"), key("s.a", "11"));
    }

    #[test]
    fn every_kind_of_header_keeps_its_kind() {
        let headers = vec![
            ("n".into(), HeaderValue::Null),
            ("b".into(), HeaderValue::Bool(true)),
            ("i".into(), HeaderValue::Int(-3)),
            ("f".into(), HeaderValue::Float(1.5)),
            (
                "l".into(),
                HeaderValue::List(vec![HeaderValue::Text("a".into())]),
            ),
            ("t".into(), HeaderValue::Table(vec![text("k", "v")])),
        ];
        let converted = convert(&message(headers), 4096).unwrap();
        let table = converted.properties.headers().clone().unwrap();
        let get = |name: &str| table.inner().get(name).unwrap().clone();
        assert_eq!(get("n"), AMQPValue::Void);
        assert_eq!(get("b"), AMQPValue::Boolean(true));
        assert_eq!(get("i"), AMQPValue::LongLongInt(-3));
        assert_eq!(get("f"), AMQPValue::Double(1.5));
        assert!(matches!(get("l"), AMQPValue::FieldArray(a) if a.as_slice().len() == 1));
        assert!(matches!(get("t"), AMQPValue::FieldTable(t) if t.contains_key("k")));
    }

    #[test]
    fn the_computed_size_is_what_lapin_writes() {
        use lapin::protocol::basic::gen_properties;
        let list = HeaderValue::List(vec![HeaderValue::Int(1), HeaderValue::Bool(false)]);
        let headers = vec![
            text(ID, "7"),
            ("n".into(), HeaderValue::Null),
            ("f".into(), HeaderValue::Float(0.5)),
            ("l".into(), list),
            ("t".into(), HeaderValue::Table(vec![text("k", "v")])),
        ];
        let mut message = message(headers);
        for timestamp in [None, Some(1)] {
            message.timestamp = timestamp;
            let properties = convert(&message, 4096).unwrap().properties;
            let written = gen_properties(&properties)(Vec::<u8>::new().into()).unwrap();
            let headers = properties.headers().clone().unwrap();
            assert_eq!(written.write.len(), properties_size(&message, &headers));
        }
    }

    #[test]
    fn too_long_strings_and_too_large_headers_are_refused_for_ever() {
        let long = "x".repeat(256);
        let headers = vec![(long.clone(), HeaderValue::Null)];
        assert_eq!(
            convert(&message(headers), 4096).err().unwrap().code,
            "string_too_long"
        );
        let mut m = message(Vec::new());
        m.routing_key = long;
        assert_eq!(convert(&m, 4096).err().unwrap().code, "string_too_long");
        let headers = vec![text("h", &"x".repeat(5000))];
        assert_eq!(
            convert(&message(headers), 4096).err().unwrap().code,
            "headers_too_large"
        );
    }
}
