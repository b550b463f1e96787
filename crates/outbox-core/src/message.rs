//! The message of one row, as contract: see `docs/guide.md`, "What consumers receive".

mod parked;

use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

pub use parked::EnvelopeError;

/// Longest AMQP short string (routing key, exchange, message id, type, header name), in bytes.
pub const MAX_SHORT_STRING: usize = 255;

/// A header value: the JSON kinds of the `headers` column.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum HeaderValue {
    /// JSON null.
    Null,
    /// JSON true or false.
    Bool(bool),
    /// A JSON integer that fits.
    Int(i64),
    /// Any other JSON number but an unsigned one beyond `i64`, which is `Text`.
    Float(f64),
    /// A JSON string.
    Text(String),
    /// A JSON array.
    List(Vec<HeaderValue>),
    /// A JSON object, in its order.
    Table(Vec<(String, HeaderValue)>),
}

/// Where the body comes from, which decides the content type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ContentType {
    /// JSON columns, and text that the table declares JSON-valid.
    Json,
    /// Text columns.
    Text,
    /// Binary columns.
    Binary,
}

impl ContentType {
    /// The MIME type.
    #[must_use]
    pub const fn mime(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Text => "text/plain",
            Self::Binary => "application/octet-stream",
        }
    }
}

/// A message ready to be published: always persistent and mandatory. All short strings are
/// within [`MAX_SHORT_STRING`] by construction (the binder refuses the row otherwise).
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Rendered from the exchange template.
    pub exchange: Arc<str>,
    /// Whether the exchange's name comes from row data.
    pub templated_exchange: bool,
    /// Rendered from the routing key template.
    pub routing_key: String,
    /// Content type of the body.
    pub content_type: ContentType,
    /// `message_id`, the same for every copy of the row.
    pub message_id: String,
    /// `type`.
    pub event_type: String,
    /// Seconds since the epoch.
    pub timestamp: Option<u64>,
    /// The configured `name`.
    pub app_id: Arc<str>,
    /// `outbox-id`, `outbox-table`, `aggregate-type`, `aggregate-id`, then the row's own.
    pub headers: Vec<(String, HeaderValue)>,
    /// The payload column's bytes.
    pub body: Bytes,
}

impl Message {
    /// Bytes in memory, roughly.
    #[must_use]
    pub fn weight(&self) -> usize {
        self.body.len()
            + self.routing_key.len()
            + self.message_id.len()
            + self.event_type.len()
            + self
                .headers
                .iter()
                .map(|(k, v)| k.len() + v.weight())
                .sum::<usize>()
    }
}

impl HeaderValue {
    fn weight(&self) -> usize {
        match self {
            Self::Text(s) => 24 + s.len(),
            Self::List(l) => 24 + l.iter().map(Self::weight).sum::<usize>(),
            Self::Table(t) => 24 + t.iter().map(|(k, v)| k.len() + v.weight()).sum::<usize>(),
            _ => 24,
        }
    }
}
