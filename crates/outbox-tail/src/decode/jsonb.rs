use bytes::Bytes;

use super::error::Malformed;

/// MySQL's binary JSON as the text that the server prints.
pub fn to_text(_data: &[u8]) -> Result<Bytes, Malformed> {
    Err(Malformed::new("JSON document"))
}
