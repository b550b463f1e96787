//! `[[outbox]]`.

use outbox_core::spec::{ColumnNames, OnSent, OnUnroutable, Ordering, TableSpec, Tracking};
use outbox_core::status::{Status, StatusValue, StatusValues};
use outbox_core::template::Template;
use toml::{Table, Value};

use super::reader::Reader;

/// Reads every entry; an entry with a mistake is left out, the mistake is collected.
pub fn read(root: &mut Reader<'_>, tables: Vec<Table>, schema: &str) -> Vec<TableSpec> {
    let mut specs: Vec<TableSpec> = Vec::new();
    for (n, table) in tables.into_iter().enumerate() {
        let mut r = root.below(&format!("outbox.{n}"), table);
        let spec = one(&mut r, schema);
        if let Some(spec) = &spec
            && specs
                .iter()
                .any(|s| s.full_name().eq_ignore_ascii_case(&spec.full_name()))
        {
            r.mistake(
                "table",
                format_args!("{} is configured twice", spec.full_name()),
            );
        }
        r.finish();
        specs.extend(spec);
    }
    specs
}

fn one(r: &mut Reader<'_>, schema: &str) -> Option<TableSpec> {
    let named = r.required_text("table", "the outbox table, \"table\" or \"schema.table\"");
    let parts: Vec<&str> = named.split('.').collect();
    let (schema, table) = match parts.as_slice() {
        [table] => (schema.to_owned(), (*table).to_owned()),
        [schema, table] => ((*schema).to_owned(), (*table).to_owned()),
        _ => {
            r.mistake(
                "table",
                format_args!("\"{named}\" is not allowed: \"table\" or \"schema.table\""),
            );
            return None;
        }
    };
    if r.is_set("table") && (table.is_empty() || schema.len() > 64 || table.len() > 64) {
        r.mistake("table", "a table name has 1 to 64 characters");
    }
    let tracking = [("status", Tracking::Status), ("none", Tracking::None)];
    let help = "\"none\": no status columns, the binlog is the truth";
    let tracking = r.choice("tracking", Tracking::Status, &tracking, help);
    let on_sent = [("mark", OnSent::Mark), ("delete", OnSent::Delete)];
    let on_sent = r.choice(
        "on_sent",
        OnSent::Mark,
        &on_sent,
        "what happens to a confirmed row",
    );
    let columns = {
        let table = r.section("columns");
        columns(r.below("columns", table), tracking)
    };
    let status_values = {
        let table = r.section("status_values");
        status_values(r.below("status_values", table))
    };
    let exchange = template(r, "exchange", "outbox", "exchange, a template: {column}");
    let routing_key = template(
        r,
        "routing_key",
        "{event_type}",
        "routing key, a template: {column}",
    );
    let modes = [
        ("aggregate", Ordering::Aggregate),
        ("strict", Ordering::Strict),
        ("none", Ordering::None),
    ];
    let help = "order per aggregate: pipelined, one unconfirmed at a time, or none";
    let ordering = r.choice("ordering", Ordering::Aggregate, &modes, help);
    let help = "whether a failed row keeps holding its aggregate";
    let failed_blocks_aggregate = r.flag("failed_blocks_aggregate", false, help);
    let unroutable = [("retry", OnUnroutable::Retry), ("fail", OnUnroutable::Fail)];
    let help = "what a message that no queue takes does to its row";
    let on_unroutable = r.choice("on_unroutable", OnUnroutable::Retry, &unroutable, help);
    let help = "larger payloads fail at once; unset: the broker's own limit";
    let max_body = r.optional_size("max_body", 1..=4 << 30, help);
    Some(TableSpec {
        schema,
        table,
        tracking,
        on_sent,
        columns,
        status_values: status_values?,
        exchange: exchange?,
        routing_key: routing_key?,
        ordering,
        failed_blocks_aggregate,
        on_unroutable,
        max_body,
    })
}

fn template(
    r: &mut Reader<'_>,
    key: &'static str,
    default: &str,
    help: &'static str,
) -> Option<Template> {
    let text = r.text(key, default, help);
    Template::parse(&text)
        .map_err(|e| r.mistake(key, format_args!("\"{text}\" is not allowed: {e}")))
        .ok()
}

fn columns(mut r: Reader<'_>, tracking: Tracking) -> ColumnNames {
    let d = ColumnNames::default();
    let needed = |r: &mut Reader<'_>, key: &'static str, default: &str, help: &'static str| {
        let name = r.text(key, default, help);
        if name.is_empty() {
            r.mistake(key, "this column cannot be absent");
        }
        name
    };
    let id = needed(&mut r, "id", &d.id, "primary key");
    let message_id = needed(
        &mut r,
        "message_id",
        &id,
        "message_id; default: the primary key",
    );
    let aggregate_id = needed(
        &mut r,
        "aggregate_id",
        &d.aggregate_id,
        "order is kept per aggregate",
    );
    let event_type = needed(&mut r, "event_type", &d.event_type, "type of the message");
    let payload = needed(&mut r, "payload", &d.payload, "body of the message");
    let optional = |r: &mut Reader<'_>, key, default: Option<String>, help| {
        let name = r.text(key, &default.unwrap_or_default(), help);
        (!name.is_empty()).then_some(name)
    };
    let mut c = ColumnNames {
        id,
        message_id,
        aggregate_id,
        event_type,
        payload,
        aggregate_type: optional(
            &mut r,
            "aggregate_type",
            d.aggregate_type,
            "kind of the aggregate; \"\": not there",
        ),
        headers: optional(
            &mut r,
            "headers",
            d.headers,
            "JSON object of further headers; \"\": not there",
        ),
        status: optional(&mut r, "status", d.status, "status of the row"),
        retry_count: optional(&mut r, "retry_count", d.retry_count, "retries spent"),
        next_retry_at: optional(
            &mut r,
            "next_retry_at",
            d.next_retry_at,
            "not to be published before; \"\": not there",
        ),
        locked_by: optional(
            &mut r,
            "locked_by",
            d.locked_by,
            "holder of a claim; \"\": not there",
        ),
        locked_until: optional(
            &mut r,
            "locked_until",
            d.locked_until,
            "end of a claim; \"\": not there",
        ),
        last_error: optional(
            &mut r,
            "last_error",
            d.last_error,
            "why the row failed; \"\": not there",
        ),
        created_at: optional(
            &mut r,
            "created_at",
            d.created_at,
            "time of the row; \"\": not there",
        ),
        updated_at: optional(
            &mut r,
            "updated_at",
            d.updated_at,
            "time of its last change; \"\": not there",
        ),
    };
    if tracking == Tracking::Status {
        for (key, name) in [("status", &c.status), ("retry_count", &c.retry_count)] {
            if name.is_none() {
                r.mistake(
                    key,
                    "this column cannot be absent where tracking = \"status\"",
                );
            }
        }
    } else {
        c.status = None;
        c.retry_count = None;
        c.next_retry_at = None;
        c.locked_by = None;
        c.locked_until = None;
        c.last_error = None;
        c.updated_at = None;
    }
    r.finish();
    c
}

fn status_values(mut r: Reader<'_>) -> Option<StatusValues> {
    let mut values = Vec::new();
    let keys = ["pending", "sent", "failed", "processing", "abandoned"];
    for (key, n) in keys.into_iter().zip(0..) {
        let raw = r.raw(
            key,
            Value::Integer(n),
            "how this status is stored: a number or a text",
        );
        match raw {
            Value::Integer(n) => values.push(StatusValue::Number(n)),
            // From the environment everything is text.
            Value::String(s) => {
                values.push(s.parse().map_or(StatusValue::Text(s), StatusValue::Number))
            }
            _ => r.mistake(key, "a number or a text is allowed"),
        }
    }
    debug_assert!(keys.iter().zip(Status::ALL).all(|(k, s)| *k == s.name()));
    let values = <[StatusValue; 5]>::try_from(values)
        .ok()
        .and_then(StatusValues::new);
    if values.is_none() {
        r.mistake(
            "pending",
            "the five values must be distinct, and all numbers or all texts",
        );
    }
    r.finish();
    values
}
