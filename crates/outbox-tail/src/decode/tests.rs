//! Handmade events.
#![allow(clippy::unwrap_used, clippy::panic)]

use bytes::Bytes;
use outbox_core::Cell;
use outbox_core::layout::{Column, Generated, TableLayout};

use super::*;

/// One column.
struct Spec {
    code: u8,
    meta: &'static [u8],
    declared: &'static str,
    charset: Option<&'static str>,
    octets: Option<u64>,
}

const fn spec(code: u8, meta: &'static [u8], declared: &'static str) -> Spec {
    Spec {
        code,
        meta,
        declared,
        charset: None,
        octets: None,
    }
}

const fn string(code: u8, meta: &'static [u8], declared: &'static str, octets: u64) -> Spec {
    Spec {
        code,
        meta,
        declared,
        charset: Some("utf8mb4"),
        octets: Some(octets),
    }
}

fn column(i: usize, spec: &Spec) -> Column {
    let data_type = spec.declared.split(['(', ' ']).next().unwrap().to_owned();
    let members = if matches!(data_type.as_str(), "enum" | "set") {
        spec.declared
            .split('\'')
            .skip(1)
            .step_by(2)
            .map(str::to_owned)
            .collect()
    } else {
        Vec::new()
    };
    let temporal = matches!(data_type.as_str(), "time" | "datetime" | "timestamp");
    let fraction = spec.declared.split(['(', ')']).nth(1).filter(|_| temporal);
    Column {
        name: format!("c{i}"),
        data_type,
        column_type: spec.declared.to_owned(),
        unsigned: spec.declared.contains(" unsigned"),
        charset: spec.charset.map(str::to_owned),
        octets: spec.octets,
        fraction: fraction.map_or(0, |f| f.parse().unwrap()),
        members,
        nullable: true,
        generated: Generated::No,
        invisible: false,
        json: false,
    }
}

fn layout(specs: &[Spec]) -> TableLayout {
    TableLayout {
        columns: specs
            .iter()
            .enumerate()
            .map(|(i, s)| column(i, s))
            .collect(),
        primary_key: vec![],
        engine: "InnoDB".to_owned(),
    }
}

fn map_body(specs: &[Spec], optional: &[u8]) -> Bytes {
    let count = u8::try_from(specs.len()).unwrap();
    let metadata: Vec<u8> = specs.iter().flat_map(|s| s.meta).copied().collect();
    let mut body = vec![7, 0, 0, 0, 0, 0, 1, 0, 1, b'd', 0, 1, b't', 0, count];
    body.extend(specs.iter().map(|s| s.code));
    body.push(u8::try_from(metadata.len()).unwrap());
    body.extend(metadata);
    body.extend(vec![0xff; specs.len().div_ceil(8)]);
    body.extend(optional);
    Bytes::from(body)
}

/// A version 2 write event of all columns, its rows as given.
fn write_body(columns: usize, rows: &[u8]) -> Bytes {
    let mut body = vec![
        7,
        0,
        0,
        0,
        0,
        0,
        1,
        0,
        5,
        0,
        9,
        9,
        9,
        u8::try_from(columns).unwrap(),
    ];
    body.extend(vec![0xff; columns.div_ceil(8)]);
    body.extend(rows);
    Bytes::from(body)
}

fn decoder(specs: &[Spec], flavour: Flavour) -> TableDecoder {
    let map = TableMap::parse(&map_body(specs, &[]), flavour).unwrap();
    let wanted: Vec<String> = (0..specs.len()).map(|i| format!("c{i}")).collect();
    TableDecoder::new(&map, &layout(specs), &wanted).unwrap()
}

/// The only cell of a row of one column.
fn cell(spec: Spec, flavour: Flavour, bytes: &[u8]) -> Result<Cell, RowError> {
    let decoder = decoder(&[spec], flavour);
    let event = RowsEvent::parse(30, &write_body(1, &[&[0], bytes].concat())).unwrap();
    let mut rows = decoder.rows(&event, 3_600);
    let row = rows.next().unwrap()?;
    assert!(rows.next().is_none());
    Ok(row.after.unwrap().remove(0))
}

fn text(s: &str) -> Cell {
    Cell::Text(Bytes::from(s.to_owned()))
}

#[test]
fn each_type_of_mysql_becomes_its_cell() {
    let binary = |b: &'static [u8]| Cell::Binary(Bytes::from_static(b));
    for (spec, bytes, expected) in [
        (spec(1, &[], "tinyint"), &[0xff][..], Cell::Int(-1)),
        (spec(1, &[], "tinyint unsigned"), &[0xff], Cell::UInt(255)),
        (spec(2, &[], "smallint"), &[0, 0x80], Cell::Int(-32_768)),
        (
            spec(9, &[], "mediumint"),
            &[0xff, 0xff, 0xff],
            Cell::Int(-1),
        ),
        (
            spec(9, &[], "mediumint unsigned"),
            &[0xff, 0xff, 0xff],
            Cell::UInt(0xff_ffff),
        ),
        (spec(3, &[], "int"), &[1, 0, 0, 0], Cell::Int(1)),
        (
            spec(8, &[], "bigint unsigned"),
            &[0xff; 8],
            Cell::UInt(u64::MAX),
        ),
        (
            spec(4, &[4], "float"),
            &[0xcd, 0xcc, 0xcc, 0x3d],
            text("0.1"),
        ),
        (
            spec(5, &[8], "double"),
            &[0, 0, 0, 0, 0, 0, 0, 0x40],
            text("2"),
        ),
        (
            spec(5, &[8], "double(6,2) zerofill"),
            &[0, 0, 0, 0, 0, 0, 0, 0x40],
            text("002.00"),
        ),
        (
            spec(246, &[4, 2], "decimal(4,2)"),
            &[0x81, 50],
            text("1.50"),
        ),
        (
            spec(246, &[4, 2], "decimal(4,2) unsigned zerofill"),
            &[0x81, 50],
            text("01.50"),
        ),
        (spec(13, &[], "year"), &[0], Cell::UInt(0)),
        (spec(13, &[], "year"), &[124], Cell::UInt(2024)),
        (
            spec(16, &[4, 1], "bit(12)"),
            &[0x0a, 0xbc],
            Cell::UInt(0xabc),
        ),
        (
            spec(10, &[], "date"),
            &[0x5d, 0xd0, 0x0f],
            text("2024-02-29"),
        ),
        (spec(11, &[], "time"), &[0x40, 0xe2, 0x01], text("12:34:56")),
        (
            spec(19, &[2], "time(2)"),
            &[0x80, 0x10, 0x83, 5],
            text("01:02:03.05"),
        ),
        (
            spec(7, &[], "timestamp"),
            &[1, 0, 0, 0],
            text("1970-01-01 01:00:01"),
        ),
        (
            spec(17, &[0], "timestamp"),
            &[0, 0, 0, 1],
            text("1970-01-01 01:00:01"),
        ),
        (
            spec(18, &[0], "datetime"),
            &[0x99, 0xb2, 0xba, 0xc3, 0x0e],
            text("2024-02-29 12:12:14"),
        ),
        (
            string(254, &[0xfe, 20], "char(5)", 20),
            b"\x03a  ",
            text("a"),
        ),
        (
            string(254, &[0xee, 0x90], "char(100)", 400),
            b"\x01\x00a",
            text("a"),
        ),
        (
            string(15, &[40, 0], "varchar(10)", 40),
            b"\x03a  ",
            text("a  "),
        ),
        (
            string(15, &[0x90, 1], "varchar(100)", 400),
            b"\x02\x00\xc3\xa9",
            text("é"),
        ),
        (string(252, &[2], "text", 65_535), b"\x01\x00x", text("x")),
        (
            Spec {
                octets: Some(4),
                ..spec(254, &[0xfe, 4], "binary(4)")
            },
            b"\x01\xff",
            binary(&[0xff, 0, 0, 0]),
        ),
        (
            Spec {
                octets: Some(9),
                ..spec(15, &[9, 0], "varbinary(9)")
            },
            b"\x01\xff",
            binary(&[0xff]),
        ),
        (
            spec(252, &[3], "mediumblob"),
            b"\x01\0\0\xff",
            binary(&[0xff]),
        ),
        (spec(255, &[4], "point"), b"\x01\0\0\0\xff", binary(&[0xff])),
        (
            spec(242, &[4], "vector(1)"),
            b"\x04\0\0\0\0\0\x80\x3f",
            binary(&[0, 0, 0x80, 0x3f]),
        ),
        (spec(245, &[4], "json"), b"\x02\0\0\0\x04\x01", text("true")),
        (spec(254, &[247, 1], "enum('a','b')"), &[2], text("b")),
        (spec(254, &[247, 1], "enum('a','b')"), &[0], text("")),
        (
            spec(254, &[248, 1], "set('a','b','c')"),
            &[0b101],
            text("a,c"),
        ),
        (spec(254, &[248, 1], "set('a','b','c')"), &[0], text("")),
    ] {
        let declared = spec.declared;
        assert_eq!(
            cell(spec, Flavour::Mysql, bytes),
            Ok(expected),
            "{declared}"
        );
    }
}

#[test]
fn types_that_only_mariadb_has_print_as_it_prints_them() {
    for (spec, bytes, expected) in [
        (spec(254, &[254, 4], "inet4"), &b"\x01\x0a"[..], "10.0.0.0"),
        (spec(254, &[254, 16], "inet6"), b"\x00", "::"),
        (
            spec(254, &[254, 16], "inet6"),
            b"\x10\0\0\0\0\0\0\0\0\0\0\xff\xff\x01\x02\x03\x04",
            "::ffff:1.2.3.4",
        ),
        (
            spec(254, &[254, 16], "uuid"),
            b"\x0f\x01\x02\x03\x04\x05\x06\x17\x08\x89\x0a\x0b\x0c\x0d\x0e\x0f",
            "01020304-0506-1708-890a-0b0c0d0e0f00",
        ),
    ] {
        assert_eq!(cell(spec, Flavour::Mariadb, bytes), Ok(text(expected)));
    }
}

#[test]
fn an_invalid_cell_leaves_the_rows_behind_it_readable() {
    let specs = [spec(254, &[247, 1], "enum('a','b')"), spec(3, &[], "int")];
    let decoder = decoder(&specs, Flavour::Mysql);
    let rows = [&[0][..], &[9], &[1, 0, 0, 0], &[0b10], &[1]].concat();
    let event = RowsEvent::parse(30, &write_body(2, &rows)).unwrap();
    let rows: Vec<_> = decoder.rows(&event, 0).collect();
    let Err(RowError::Undecodable(row)) = &rows[0] else {
        panic!("{rows:?}")
    };
    assert_eq!(
        (row.column, row.why),
        (0, CellError::Invalid("ENUM member"))
    );
    assert_eq!(row.after, Some(vec![None, Some(Cell::Int(1))]));
    assert_eq!(
        rows[1].as_ref().unwrap().after,
        Some(vec![text("a"), Cell::Null])
    );
    assert_eq!(rows.len(), 2);
}

#[test]
fn a_row_that_is_cut_off_ends_the_event() {
    let decoder = decoder(&[spec(3, &[], "int")], Flavour::Mysql);
    let event = RowsEvent::parse(30, &write_body(1, &[0, 1, 0, 0, 0, 0, 1])).unwrap();
    let rows: Vec<_> = decoder.rows(&event, 0).collect();
    assert_eq!(rows.len(), 2);
    assert!(rows[0].is_ok() && matches!(rows[1], Err(RowError::Malformed(_))));
}

#[test]
fn an_image_without_columns_is_not_read_for_ever() {
    let decoder = decoder(&[spec(3, &[], "int")], Flavour::Mysql);
    let mut body = write_body(1, &[0, 0]).to_vec();
    body[14] = 0;
    let event = RowsEvent::parse(30, &Bytes::from(body)).unwrap();
    let rows: Vec<_> = decoder.rows(&event, 0).take(9).collect();
    assert_eq!(rows.len(), 1);
}

#[test]
fn an_event_with_another_number_of_columns_is_refused() {
    let decoder = decoder(&[spec(3, &[], "int")], Flavour::Mysql);
    let event = RowsEvent::parse(30, &write_body(2, &[0, 1, 0, 0, 0, 1, 0, 0, 0])).unwrap();
    let rows: Vec<_> = decoder.rows(&event, 0).collect();
    assert!(matches!(rows[..], [Err(RowError::Malformed(_))]));
}

#[test]
fn version_one_events_have_no_extra_data() {
    let body = [
        7, 0, 0, 0, 0, 0, 1, 0, 1, 0xff, 0xff, 0, 1, 0, 0, 0, 0, 2, 0, 0, 0,
    ];
    let event = RowsEvent::parse(24, &Bytes::copy_from_slice(&body)).unwrap();
    assert_eq!(
        (event.table_id, event.flags, event.kind),
        (7, 1, RowsKind::Update)
    );
    let decoder = decoder(&[spec(3, &[], "int")], Flavour::Mysql);
    let row = decoder.rows(&event, 0).next().unwrap().unwrap();
    assert_eq!(
        row,
        Row {
            before: Some(vec![Cell::Int(1)]),
            after: Some(vec![Cell::Int(2)])
        }
    );
}

#[test]
fn values_share_the_memory_of_their_event() {
    let decoder = decoder(&[string(252, &[2], "text", 65_535)], Flavour::Mysql);
    let body = write_body(1, b"\0\x05\0hello");
    let event = RowsEvent::parse(30, &body).unwrap();
    let row = decoder.rows(&event, 0).next().unwrap().unwrap();
    let Some([Cell::Text(text)]) = row.after.as_deref() else {
        panic!("{row:?}")
    };
    assert!(body.as_ptr_range().contains(&text.as_ptr()));
}

#[test]
fn optional_metadata_names_columns_and_tells_their_signs_and_character_sets() {
    let specs = [
        spec(8, &[], "bigint unsigned"),
        string(15, &[40, 0], "varchar(10)", 40),
        spec(254, &[247, 1], "enum('x')"),
        string(252, &[2], "text", 65_535),
    ];
    let optional = [
        &[1, 1, 0x80][..],          // the first numeric one is unsigned
        &[2, 5, 8, 1, 252, 255, 0], // latin1, but the second text 255
        &[4, 10, 2, b'i', b'd', 1, b'v', 1, b'e', 2, b't', b'x'], // names
        &[6, 3, 1, 1, 0xe9],        // the ENUM's member, in latin1
        &[8, 1, 0],                 // primary key
        &[10, 1, 8],                // the ENUM's collation
        &[12, 1, 0b1011_0000],      // visible
        &[99, 2, 1, 2],             // not known
    ]
    .concat();
    let body = map_body(&specs, &optional);
    let map = TableMap::parse(&body, Flavour::Mysql).unwrap();
    assert_eq!(TableMap::peek(&body), Some((7, &b"d"[..], &b"t"[..])));
    assert_eq!(map.primary_key, Some(vec![0]));
    let names: Vec<_> = map
        .columns
        .iter()
        .map(|c| c.name.as_deref().unwrap())
        .collect();
    assert_eq!(names, ["id", "v", "e", "tx"]);
    let collations: Vec<_> = map.columns.iter().map(|c| c.collation).collect();
    assert_eq!(collations, [None, Some(8), Some(8), Some(255)]);
    assert_eq!(map.columns[0].unsigned, Some(true));
    assert_eq!(map.columns[1].visible, Some(false));

    // Names make the layout unnecessary, for the member's name too.
    let empty = TableLayout {
        columns: vec![],
        primary_key: vec![],
        engine: String::new(),
    };
    let wanted = ["E".to_owned(), "id".to_owned()];
    let decoder = TableDecoder::new(&map, &empty, &wanted).unwrap();
    let rows = b"\x00\x05\0\0\0\0\0\0\0\x01a\x01\x00\x00";
    let event = RowsEvent::parse(30, &write_body(4, rows)).unwrap();
    let row = decoder.rows(&event, 0).next().unwrap().unwrap();
    assert_eq!(row.after, Some(vec![text("é"), Cell::UInt(5)]));
    let error = TableDecoder::new(&map, &empty, &["nope".to_owned()]).unwrap_err();
    assert_eq!(error, Undecodable::Absent("nope".to_owned()));
}

#[test]
fn every_prefix_of_an_event_is_refused_or_whole() {
    let specs = [spec(3, &[], "int"), string(15, &[40, 0], "varchar(10)", 40)];
    let map = map_body(&specs, &[4, 6, 2, b'i', b'd', 2, b'v', b'v']);
    let least = map.len() - 8;
    for len in 0..map.len() {
        let parsed = TableMap::parse(&map.slice(..len), Flavour::Mysql);
        assert_eq!(parsed.is_ok(), len == least, "{len}");
    }
}

#[test]
fn compressed_rows_that_lie_are_refused() {
    let head = [7, 0, 0, 0, 0, 0, 1, 0, 1, 0xff];
    for block in [
        &[][..],
        &[0x80],
        &[0x90, 5],                               // another algorithm
        &[0x85, 0, 0, 0, 0, 5],                   // a length of five bytes
        &[0x84, 0xff, 0xff, 0xff, 0xff, 1, 2, 3], // 4 GiB from three bytes
        &[0x81, 5, 1, 2, 3],                      // not zlib
        &[0x81, 9, 0x78, 0x9c, 3, 0, 0, 0, 0, 1], // nothing, where nine bytes are claimed
    ] {
        let body = Bytes::from([&head[..], block].concat());
        assert!(RowsEvent::parse(166, &body).is_err(), "{block:x?}");
    }
}

#[test]
fn unknown_event_types_are_not_row_events() {
    assert_eq!(RowsEvent::kind_of(19), None);
    assert_eq!(RowsEvent::kind_of(39), Some(RowsKind::PartialUpdate));
    assert!(RowsEvent::parse(19, &write_body(1, &[])).is_err());
}
