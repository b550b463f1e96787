//! The `headers` column: a JSON object whose members become AMQP headers.

use serde_json::{Number, Value};

use crate::failure::Failure;
use crate::message::{HeaderValue, MAX_SHORT_STRING};
use crate::row::Cell;

pub(super) const ID: &str = "outbox-id";
pub(super) const TABLE: &str = "outbox-table";
pub(super) const AGGREGATE_TYPE: &str = "aggregate-type";
pub(super) const AGGREGATE_ID: &str = "aggregate-id";
/// Marks a replayed row.
const REPLAY: &str = "outboxd-replay";

/// Appends the members of `cell` in their order.
pub(super) fn append(
    column: &str,
    cell: &Cell,
    headers: &mut Vec<(String, HeaderValue)>,
) -> Result<(), Failure> {
    let bytes = match cell {
        Cell::Null => return Ok(()),
        Cell::Text(t) | Cell::Binary(t) if t.trim_ascii().is_empty() => return Ok(()),
        Cell::Text(t) | Cell::Binary(t) => t,
        Cell::Int(_) | Cell::UInt(_) => return Err(refuse(column, "is not a JSON object")),
    };
    // The parser's own message is kept out: it may quote the data.
    let value = serde_json::from_slice(bytes).map_err(|_| refuse(column, "is not JSON"))?;
    let members = match value {
        Value::Null => return Ok(()),
        Value::Object(members) => members,
        _ => return Err(refuse(column, "is not a JSON object")),
    };
    headers.reserve(members.len());
    for (name, value) in members {
        if matches!(&*name, ID | TABLE | AGGREGATE_TYPE | AGGREGATE_ID | REPLAY) {
            return Err(refuse(
                column,
                &format!("sets {name}, which is outboxd's own"),
            ));
        }
        if matches!(&*name, "CC" | "BCC") && !value.is_array() {
            return Err(refuse(
                column,
                &format!("has a {name} that is not an array"),
            ));
        }
        headers.push((checked(column, name)?, convert(column, value)?));
    }
    Ok(())
}

fn convert(column: &str, value: Value) -> Result<HeaderValue, Failure> {
    Ok(match value {
        Value::Null => HeaderValue::Null,
        Value::Bool(b) => HeaderValue::Bool(b),
        Value::Number(n) => number(&n),
        Value::String(s) => HeaderValue::Text(s),
        Value::Array(items) => HeaderValue::List(
            items
                .into_iter()
                .map(|item| convert(column, item))
                .collect::<Result<_, _>>()?,
        ),
        Value::Object(members) => HeaderValue::Table(
            members
                .into_iter()
                .map(|(name, value)| Ok((checked(column, name)?, convert(column, value)?)))
                .collect::<Result<_, _>>()?,
        ),
    })
}

/// Unsigned beyond `i64` stays exact as text, and so does what no `f64` can hold.
pub(crate) fn number(n: &Number) -> HeaderValue {
    if let Some(i) = n.as_i64() {
        return HeaderValue::Int(i);
    }
    match n.as_f64() {
        Some(f) if f.is_finite() && !n.is_u64() => HeaderValue::Float(f),
        _ => HeaderValue::Text(n.to_string()),
    }
}

fn checked(column: &str, name: String) -> Result<String, Failure> {
    if name.len() > MAX_SHORT_STRING {
        let why = format!("has a name of more than {MAX_SHORT_STRING} bytes");
        return Err(refuse(column, &why));
    }
    Ok(name)
}

fn refuse(column: &str, why: &str) -> Failure {
    Failure::permanent("bad_headers", format!("{column} {why}"))
}
