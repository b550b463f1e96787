#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::failure::FailureClass;
use crate::layout::Generated;
use crate::spec::{ColumnNames, OnSent, OnUnroutable, Ordering};
use crate::status::{StatusValue, StatusValues};

fn spec() -> TableSpec {
    TableSpec {
        schema: "app".into(),
        table: "outbox".into(),
        tracking: Tracking::Status,
        on_sent: OnSent::Mark,
        columns: ColumnNames::default(),
        status_values: StatusValues::default(),
        exchange: Template::parse("events").unwrap(),
        routing_key: Template::parse("{event_type}").unwrap(),
        ordering: Ordering::Aggregate,
        failed_blocks_aggregate: false,
        on_unroutable: OnUnroutable::Retry,
        max_body: None,
    }
}

fn column(name: &str, data_type: &str) -> Column {
    Column {
        name: name.into(),
        data_type: data_type.into(),
        column_type: data_type.into(),
        unsigned: false,
        charset: None,
        octets: None,
        fraction: 0,
        members: Vec::new(),
        nullable: true,
        generated: Generated::No,
        invisible: false,
        json: data_type == "json",
    }
}

const FULL: [(&str, &str); 15] = [
    ("id", "bigint"),
    ("aggregate_type", "varchar"),
    ("aggregate_id", "varchar"),
    ("event_type", "varchar"),
    ("payload", "json"),
    ("headers", "json"),
    ("status", "tinyint"),
    ("retry_count", "int"),
    ("next_retry_at", "datetime"),
    ("locked_by", "varchar"),
    ("locked_until", "datetime"),
    ("last_error", "varchar"),
    ("created_at", "datetime"),
    ("updated_at", "datetime"),
    ("region", "varchar"),
];

fn layout(columns: &[(&str, &str)]) -> TableLayout {
    TableLayout {
        columns: columns.iter().map(|(n, t)| column(n, t)).collect(),
        primary_key: vec!["id".into()],
        engine: "InnoDB".into(),
    }
}

fn binder(spec: TableSpec, layout: &TableLayout) -> Result<Binder, LayoutError> {
    Binder::new(TableIdx(0), Arc::new(spec), layout, Arc::from("app"))
}

fn txt(text: &str) -> Cell {
    Cell::Text(Bytes::copy_from_slice(text.as_bytes()))
}

/// A good row with some columns replaced.
fn bind(binder: &Binder, replace: &[(&str, Cell)]) -> Result<OutboxRow, BindError> {
    let good = |name: &str| match name {
        "id" => Cell::Int(7),
        "aggregate_type" => txt("order"),
        "aggregate_id" => txt("o-1"),
        "event_type" => txt("order.paid"),
        "payload" => txt(r#"{"a": 1}"#),
        "status" | "retry_count" => Cell::Int(0),
        "created_at" => txt("1970-01-02 00:00:00.5"),
        "region" => txt("eu"),
        _ => Cell::Null,
    };
    let cells: Vec<Cell> = binder
        .wanted()
        .iter()
        .map(|name| {
            let replaced = replace.iter().find(|(n, _)| n == name);
            replaced.map_or_else(|| good(name), |(_, cell)| cell.clone())
        })
        .collect();
    binder.bind(&cells, BindContext::default())
}

fn failure(binder: &Binder, column: &str, cell: Cell) -> Failure {
    let row = bind(binder, &[(column, cell)]).unwrap();
    // Whatever is wrong with the message, the row can be recorded and holds its aggregate.
    assert_eq!(row.key.id.to_string(), "7");
    let failure = row.message.unwrap_err();
    assert_eq!(failure.class, FailureClass::Permanent);
    failure
}

fn text_header(value: &str) -> HeaderValue {
    HeaderValue::Text(value.into())
}

#[test]
fn a_row_becomes_the_message_of_the_contract() {
    let binder = binder(spec(), &layout(&FULL)).unwrap();
    let traced = txt(r#"{"traceparent": "00-ab-cd-01", "n": 1}"#);
    let row = bind(&binder, &[("headers", traced)]).unwrap();
    assert_eq!(row.key.id, RowId::Int(7));
    assert_eq!((&*row.aggregate.kind, &*row.aggregate.id), ("order", "o-1"));
    assert_eq!(
        (row.state.status, row.state.retry_count),
        (Status::Pending, 0)
    );
    let message = row.message.unwrap();
    let expected = Message {
        exchange: "events".into(),
        templated_exchange: false,
        routing_key: "order.paid".into(),
        content_type: ContentType::Json,
        message_id: "7".into(),
        event_type: "order.paid".into(),
        timestamp: Some(86_400),
        app_id: "app".into(),
        headers: vec![
            ("outbox-id".into(), text_header("7")),
            ("outbox-table".into(), text_header("app.outbox")),
            ("aggregate-type".into(), text_header("order")),
            ("aggregate-id".into(), text_header("o-1")),
            ("traceparent".into(), text_header("00-ab-cd-01")),
            ("n".into(), HeaderValue::Int(1)),
        ],
        body: Bytes::from_static(br#"{"a": 1}"#),
    };
    assert_eq!(*message, expected);
}

#[test]
fn the_smallest_table_binds_with_what_it_has() {
    // No aggregate_type, no headers, no claims, no due time, no times.
    let small = layout(&[
        ("id", "bigint"),
        ("aggregate_id", "bigint"),
        ("event_type", "varchar"),
        ("payload", "text"),
        ("status", "tinyint"),
        ("retry_count", "int"),
    ]);
    let binder = binder(spec(), &small).unwrap();
    assert_eq!(binder.wanted().len(), 6);
    let mut cells = [
        Cell::UInt(u64::MAX),
        Cell::Int(-3),
        txt("e"),
        txt("hello"),
        Cell::Int(1),
        Cell::UInt(2),
    ];
    let context = BindContext {
        commit_time: Some(99),
        zone_offset: 3600,
    };
    let row = binder.bind(&cells, context).unwrap();
    assert_eq!((&*row.aggregate.kind, &*row.aggregate.id), ("", "-3"));
    assert_eq!((row.state.status, row.state.retry_count), (Status::Sent, 2));
    let message = row.message.unwrap();
    assert_eq!(message.message_id, u64::MAX.to_string());
    assert_eq!(message.timestamp, Some(99));
    assert_eq!(message.content_type, ContentType::Text);
    assert_eq!(
        message.headers[2],
        ("aggregate-type".into(), text_header(""))
    );
    cells[0] = Cell::Null;
    assert!(binder.bind(&cells, context).is_err());
    assert!(binder.bind(&cells[1..], context).is_err());
}

#[test]
fn a_table_without_status_columns_binds_as_pending() {
    let mut spec = spec();
    spec.tracking = Tracking::None;
    let binder = binder(spec, &layout(&FULL)).unwrap();
    // They are there under these names, but are not ours.
    for name in ["status", "retry_count", "next_retry_at", "locked_by"] {
        assert!(!binder.wanted().iter().any(|w| w == name));
    }
    assert_eq!(bind(&binder, &[]).unwrap().state.status, Status::Pending);
}

#[test]
fn a_column_configured_as_not_there_is_not_read_though_it_exists() {
    let mut spec = spec();
    spec.columns.headers = None;
    spec.columns.created_at = Some(String::new());
    let binder = binder(spec, &layout(&FULL)).unwrap();
    assert!(
        !binder
            .wanted()
            .iter()
            .any(|w| w == "headers" || w == "created_at")
    );
    let row = bind(&binder, &[]).unwrap();
    assert_eq!(row.message.unwrap().timestamp, None);
}

#[test]
fn a_layout_that_cannot_serve_is_told_whole() {
    let mut spec = spec();
    spec.columns.payload = "body".into();
    spec.columns.retry_count = None;
    spec.routing_key = Template::parse("{event_type}.{country}").unwrap();
    let mut layout = layout(&FULL);
    layout.columns[0].data_type = "decimal".into();
    layout.columns[0].column_type = "decimal(20,0)".into();
    layout.primary_key.push("created_at".into());
    let errors = binder(spec, &layout).unwrap_err().0.join("\n");
    for part in [
        "body",
        "retry_count",
        "country",
        "decimal(20,0)",
        "(id, created_at)",
    ] {
        assert!(errors.contains(part), "{part} in {errors}");
    }
}

#[test]
fn templates_take_columns_of_the_table_and_else_roles() {
    let mut spec = spec();
    spec.columns.event_type = "kind".into();
    spec.exchange = Template::parse("ev.{REGION}").unwrap();
    spec.routing_key = Template::parse("{event_type}.{id}").unwrap();
    let mut layout = layout(&FULL);
    layout.columns[3].name = "Kind".into();
    let binder = binder(spec, &layout).unwrap();
    assert!(binder.wanted().contains(&"Kind".to_owned()));
    let message = bind(&binder, &[("Kind", txt("paid"))])
        .unwrap()
        .message
        .unwrap();
    assert_eq!(
        (&*message.exchange, &*message.routing_key),
        ("ev.eu", "paid.7")
    );
    assert!(message.templated_exchange);
    let null = failure(&binder, "region", Cell::Null);
    assert_eq!(null.code, "null_in_template");
    assert!(null.reason.contains("exchange needs region"), "{null}");
}

#[test]
fn what_amqp_cannot_carry_fails_its_row_and_names_the_column() {
    let mut spec = spec();
    spec.max_body = Some(10);
    let binder = binder(spec, &layout(&FULL)).unwrap();
    let long = || txt(&"x".repeat(256));
    for (column, cell, code, part) in [
        ("event_type", long(), "string_too_long", "256 bytes"),
        ("event_type", Cell::Null, "null_in_template", "event_type"),
        ("payload", Cell::Null, "null_column", "payload is NULL"),
        (
            "payload",
            txt("12345678901"),
            "body_too_large",
            "max_body = 10",
        ),
        ("headers", txt("{"), "bad_headers", "headers is not JSON"),
        ("headers", txt("[1]"), "bad_headers", "not a JSON object"),
        ("headers", Cell::Int(1), "bad_headers", "not a JSON object"),
        ("headers", txt(r#"{"CC": "a"}"#), "bad_headers", "CC"),
        ("headers", txt(r#"{"BCC": {}}"#), "bad_headers", "BCC"),
        (
            "headers",
            txt(r#"{"outbox-id": 1}"#),
            "bad_headers",
            "outbox-id",
        ),
        (
            "headers",
            txt(r#"{"aggregate-id": 1}"#),
            "bad_headers",
            "aggregate-id",
        ),
        (
            "headers",
            txt(&format!("{{\"{}\": 1}}", "h".repeat(256))),
            "bad_headers",
            "255",
        ),
        (
            "headers",
            txt(&format!("{{\"a\": [{{\"{}\": 1}}]}}", "h".repeat(256))),
            "bad_headers",
            "255",
        ),
        (
            "headers",
            txt(&"[".repeat(100_000)),
            "bad_headers",
            "not JSON",
        ),
    ] {
        let failure = failure(&binder, column, cell);
        assert_eq!(failure.code, code, "{column}: {failure}");
        assert!(failure.reason.contains(part), "{failure}");
    }
    let exact = bind(&binder, &[("payload", txt("1234567890"))]).unwrap();
    assert_eq!(exact.message.unwrap().body.len(), 10);
}

#[test]
fn headers_keep_their_kinds_and_order() {
    let binder = binder(spec(), &layout(&FULL)).unwrap();
    let json = r#"{"z": null, "b": true, "i": -5, "max": 9223372036854775807,
        "u": 18446744073709551615, "f": 1.5, "e": 1e2, "huge": 1e999, "CC": ["q"], "t": {"y": 1, "x": "s"}}"#;
    let row = bind(&binder, &[("headers", txt(json))]).unwrap();
    let headers = row.message.unwrap().headers[4..].to_vec();
    let expected = [
        ("z", HeaderValue::Null),
        ("b", HeaderValue::Bool(true)),
        ("i", HeaderValue::Int(-5)),
        ("max", HeaderValue::Int(i64::MAX)),
        ("u", text_header("18446744073709551615")),
        ("f", HeaderValue::Float(1.5)),
        ("e", HeaderValue::Float(100.0)),
        ("huge", text_header("1e+999")),
        ("CC", HeaderValue::List(vec![text_header("q")])),
        (
            "t",
            HeaderValue::Table(vec![
                ("y".into(), HeaderValue::Int(1)),
                ("x".into(), text_header("s")),
            ]),
        ),
    ];
    assert_eq!(headers, expected.map(|(n, v)| (n.to_owned(), v)));
    for none in [Cell::Null, txt("null"), txt(" "), txt("{}")] {
        let row = bind(&binder, &[("headers", none)]).unwrap();
        assert_eq!(row.message.unwrap().headers.len(), 4);
    }
}

#[test]
fn the_payloads_kind_decides_the_content_type() {
    let mut layout = layout(&FULL);
    let json = binder(spec(), &layout).unwrap();
    layout.columns[4].json = false;
    let plain = binder(spec(), &layout).unwrap();
    for (binder, cell, mime, body) in [
        (&json, txt("1"), "application/json", "1"),
        (&plain, txt("1"), "text/plain", "1"),
        (&plain, Cell::Int(-1), "text/plain", "-1"),
        (
            &plain,
            Cell::Binary(Bytes::from_static(b"\x01")),
            "application/octet-stream",
            "\u{1}",
        ),
    ] {
        let row = bind(binder, &[("payload", cell)]).unwrap();
        let message = row.message.unwrap();
        assert_eq!(
            (message.content_type.mime(), &*message.body),
            (mime, body.as_bytes())
        );
    }
}

#[test]
fn a_status_outside_the_configured_values_binds_no_row() {
    let binder = binder(spec(), &layout(&FULL)).unwrap();
    for (cell, shown) in [
        (Cell::Int(9), "9"),
        (txt("new"), "new"),
        (Cell::Null, "NULL"),
    ] {
        let error = bind(&binder, &[("status", cell)]).unwrap_err();
        assert!(
            error.0.contains(shown) && error.0.contains("status of row 7"),
            "{error}"
        );
    }
    assert_eq!(
        bind(&binder, &[("status", txt("2"))]).unwrap().state.status,
        Status::Failed
    );
}

#[test]
fn statuses_may_be_strings() {
    let mut spec = spec();
    let values = ["PENDING", "SENT", "FAILED", "PROCESSING", "ABANDONED"];
    let values = values.map(|v| StatusValue::Text(v.into()));
    spec.status_values = StatusValues::new(values).unwrap();
    let binder = binder(spec, &layout(&FULL)).unwrap();
    let row = bind(&binder, &[("status", txt("Processing"))]).unwrap();
    assert_eq!(row.state.status, Status::Processing);
}

#[test]
fn binary_keys_print_as_uuids_in_the_message() {
    let bytes = Bytes::from((0..16).collect::<Vec<u8>>());
    let binder = binder(spec(), &layout(&FULL)).unwrap();
    let row = bind(&binder, &[("id", Cell::Binary(bytes.clone()))]).unwrap();
    let uuid = "00010203-0405-0607-0809-0a0b0c0d0e0f";
    assert_eq!(row.key.id, RowId::Binary(Arc::from(&*bytes)));
    let message = row.message.unwrap();
    assert_eq!(message.message_id, uuid);
    assert_eq!(message.headers[0].1, text_header(uuid));
    assert_eq!(print_binary(&[0xab, 0x01]), "ab01");
}

#[test]
fn times_are_read_in_the_columns_zone_and_impossible_ones_are_none() {
    let at = |text: &str, zone| time::micros(&txt(text), zone);
    assert_eq!(at("1970-01-01 08:00:00", 8 * 3600), Some(0));
    assert_eq!(
        at("2026-02-28 23:59:59.000001", 0),
        Some(1_772_323_199_000_001)
    );
    assert_eq!(at("2024-02-29", 0), Some(1_709_164_800_000_000));
    assert_eq!(at("1969-12-31 23:59:59.5", 0), Some(-500_000));
    for none in [
        "0000-00-00 00:00:00",
        "2026-00-01 00:00:00",
        "2026-02-29 00:00:00",
        "2026-13-01",
        "x",
        "",
        "12:00:00",
        "2026-01-01 25:00:00",
        "2026-01-01 00:00",
        "2026-01-01 00:00:00.1234567",
    ] {
        assert_eq!(at(none, 0), None, "{none}");
    }
    let binder = binder(spec(), &layout(&FULL)).unwrap();
    let zero = || txt("0000-00-00 00:00:00");
    let row = bind(
        &binder,
        &[("created_at", zero()), ("next_retry_at", zero())],
    )
    .unwrap();
    assert_eq!(
        (row.state.next_retry_at, row.message.unwrap().timestamp),
        (None, None)
    );
}

proptest! {
    #[test]
    fn whatever_the_cells_hold_binding_never_panics(
        cells in proptest::collection::vec(
            prop_oneof![
                Just(Cell::Null),
                any::<i64>().prop_map(Cell::Int),
                any::<u64>().prop_map(Cell::UInt),
                proptest::collection::vec(any::<u8>(), 0..300).prop_map(|b| Cell::Text(b.into())),
                "[0-9: .-]{0,30}".prop_map(|s| txt(&s)),
                proptest::collection::vec(any::<u8>(), 0..20).prop_map(|b| Cell::Binary(b.into())),
            ],
            13,
        ),
    ) {
        let binder = binder(spec(), &layout(&FULL)).unwrap();
        prop_assert_eq!(binder.wanted().len(), 12);
        if let Ok(row) = binder.bind(&cells[..12], BindContext::default())
            && let Ok(message) = row.message
        {
            for text in [&message.routing_key, &message.message_id, &message.event_type] {
                prop_assert!(text.len() <= MAX_SHORT_STRING);
            }
        }
    }
}
