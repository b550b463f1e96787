//! `tail`: prints decoded outbox inserts as JSON lines. Publishes and writes nothing: a way to try
//! outboxd without a broker.

use std::process::ExitCode;
use std::sync::Arc;

use outbox_core::message::{ContentType, HeaderValue};
use outbox_core::ports::NoObserver;
use outbox_core::{OutboxRow, TableIdx};
use outbox_ledger::connect::Db;
use outbox_ledger::layouts::TableLayouts;
use outbox_ledger::zone;
use outbox_tail::group::{Source as _, StreamItem};
use outbox_tail::stream::{self, BinlogSource, StreamTable};
use serde_json::{Value, json};

use super::output;
use crate::config::Config;
use crate::run::servers;

/// Another identity than the daemon's: two dumps with one server_id end each other.
const OTHER_SERVER_ID: u32 = 0x2000_0000;

/// Prints until interrupted.
pub async fn run(config: &Config, db: &Db) -> anyhow::Result<ExitCode> {
    let specs = config.outbox.clone();
    let name: Arc<str> = config.name.as_str().into();
    let mut stream = servers::stream(config, db.schema(), zone::offset(db).await?);
    stream.server_id = servers::server_id(config) ^ OTHER_SERVER_ID ^ std::process::id();
    let facts = stream::probe(&stream).await?;
    let tables = specs.iter().zip(0..).map(|(spec, n)| StreamTable {
        idx: TableIdx(n),
        spec: spec.clone(),
        app_id: name.clone(),
    });
    let layouts = Arc::new(TableLayouts::new(db.clone(), name.clone(), specs.clone()));
    let mut source = BinlogSource::new(stream, tables.collect(), layouts, Arc::new(NoObserver));
    source.open(&facts.coordinate).await?;
    loop {
        let item = tokio::select! {
            item = source.next() => item?,
            interrupted = tokio::signal::ctrl_c() => {
                interrupted?;
                source.close().await;
                return Ok(ExitCode::SUCCESS);
            }
        };
        if let StreamItem::Group(group) = item {
            for row in &group.rows {
                let table = specs
                    .get(usize::from(row.key.table.0))
                    .map(|t| t.full_name())
                    .unwrap_or_default();
                output::line(line(&table, row));
            }
            for left in &group.deferred {
                let table = specs
                    .get(usize::from(left.table.0))
                    .map(|t| t.full_name())
                    .unwrap_or_default();
                let id = left.row.as_ref().map(|(id, _)| id.to_string());
                output::line(
                    json!({ "table": table, "id": id, "left_to_the_table": left.why.name() }),
                );
            }
        }
    }
}

fn line(table: &str, row: &OutboxRow) -> Value {
    let base = json!({
        "table": table,
        "id": row.key.id.to_string(),
        "status": row.state.status.name(),
        "aggregate_type": &*row.aggregate.kind,
        "aggregate_id": &*row.aggregate.id,
    });
    let more = match &row.message {
        Err(failure) => json!({ "error": failure.to_string() }),
        Ok(m) => json!({
            "exchange": &*m.exchange,
            "routing_key": m.routing_key,
            "message_id": m.message_id,
            "event_type": m.event_type,
            "headers": m.headers.iter().map(|(k, v)| (k.clone(), header(v))).collect::<serde_json::Map<_, _>>(),
            "payload": body(m.content_type, &m.body),
        }),
    };
    let (Value::Object(mut base), Value::Object(more)) = (base, more) else {
        return Value::Null;
    };
    base.extend(more);
    Value::Object(base)
}

/// JSON as it is, text as a string, anything else in hex.
fn body(kind: ContentType, body: &[u8]) -> Value {
    match (kind, std::str::from_utf8(body)) {
        (ContentType::Json, Ok(text)) => {
            serde_json::from_str(text).unwrap_or_else(|_| Value::from(text))
        }
        (ContentType::Text, Ok(text)) => Value::from(text),
        _ => Value::from(body.iter().map(|b| format!("{b:02x}")).collect::<String>()),
    }
}

fn header(value: &HeaderValue) -> Value {
    match value {
        HeaderValue::Null => Value::Null,
        HeaderValue::Bool(b) => Value::from(*b),
        HeaderValue::Int(n) => Value::from(*n),
        HeaderValue::Float(x) => Value::from(*x),
        HeaderValue::Text(s) => Value::from(s.as_str()),
        HeaderValue::List(l) => l.iter().map(header).collect(),
        HeaderValue::Table(t) => {
            Value::Object(t.iter().map(|(k, v)| (k.clone(), header(v))).collect())
        }
    }
}
