#![allow(clippy::unwrap_used, clippy::panic, clippy::cast_possible_truncation)]

use std::sync::Arc;

use outbox_core::RowId;
use outbox_core::layout::{Column, Generated};
use outbox_core::spec::{ColumnNames, OnSent, OnUnroutable, Ordering, TableSpec, Tracking};
use outbox_core::status::StatusValues;
use outbox_core::template::Template;

use super::*;
use crate::stream::tables::StreamTable;

const SERVER: [u8; 16] = [0xaa; 16];
const UUID: &str = "aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa";
const TABLE: TableIdx = TableIdx(0);

fn column(name: &str, data_type: &str, column_type: &str) -> Column {
    let text = data_type == "varchar";
    Column {
        name: name.into(),
        data_type: data_type.into(),
        column_type: column_type.into(),
        unsigned: false,
        charset: text.then(|| "utf8mb4".into()),
        octets: text.then_some(256),
        fraction: 0,
        members: Vec::new(),
        nullable: false,
        generated: Generated::No,
        invisible: false,
        json: false,
    }
}

fn layout() -> TableLayout {
    TableLayout {
        columns: vec![
            column("id", "bigint", "bigint"),
            column("aggregate_id", "varchar", "varchar(64)"),
            column("event_type", "varchar", "varchar(64)"),
            column("payload", "varchar", "varchar(64)"),
            column("status", "tinyint", "tinyint"),
            column("retry_count", "tinyint", "tinyint"),
        ],
        primary_key: vec!["id".into()],
        engine: "InnoDB".into(),
    }
}

fn spec(tracking: Tracking) -> Arc<TableSpec> {
    let status = (tracking == Tracking::Status).then(|| "status".to_owned());
    Arc::new(TableSpec {
        schema: "app".into(),
        table: "outbox".into(),
        tracking,
        on_sent: OnSent::Mark,
        columns: ColumnNames {
            status,
            ..ColumnNames::default()
        },
        status_values: StatusValues::default(),
        exchange: Template::parse("outbox").unwrap(),
        routing_key: Template::parse("{event_type}").unwrap(),
        ordering: Ordering::Aggregate,
        failed_blocks_aggregate: false,
        on_unroutable: OnUnroutable::Retry,
        max_body: None,
    })
}

fn at(set: &str) -> Position {
    Position::Gtid(set.parse().unwrap())
}

/// Feeds events that servers could send.
struct Script {
    assembler: Assembler,
    pos: u32,
    inner: bool,
}

impl Script {
    fn new(tracking: Tracking, max_bytes: usize) -> Self {
        let table = StreamTable {
            idx: TABLE,
            spec: spec(tracking),
            app_id: "outboxd".into(),
        };
        let tables = Tables::new("app".into(), vec![table]);
        let mut assembler = Assembler::new(tables, max_bytes, 0);
        assembler.restart(&at(&format!("{UUID}:1-10")), None, SERVER);
        let start = assembler.end().clone();
        assembler.tables.prove(0, layout(), start);
        Self {
            assembler,
            pos: 4,
            inner: false,
        }
    }

    fn status() -> Self {
        Self::new(Tracking::Status, 1 << 20)
    }

    fn feed_at(
        &mut self,
        kind: u8,
        flags: u16,
        timestamp: u32,
        data: &[u8],
    ) -> Result<Step, Fault> {
        let size = data.len() as u32 + 19;
        if !self.inner {
            self.pos += size;
        }
        self.assembler.feed(&RawEvent {
            kind,
            flags,
            timestamp,
            server_id: 7,
            size,
            log_pos: if self.inner { 0 } else { self.pos },
            data,
        })
    }

    fn try_feed(&mut self, kind: u8, data: &[u8]) -> Result<Step, Fault> {
        self.feed_at(kind, 0, 1_700_000_000, data)
    }

    fn quiet(&mut self, kind: u8, data: &[u8]) {
        match self.try_feed(kind, data) {
            Ok(Step::Quiet) => {}
            other => panic!("{other:?}"),
        }
    }

    fn gtid(&mut self, number: u64) {
        let mut data = vec![0];
        data.extend(SERVER);
        data.extend(number.to_le_bytes());
        data.push(2);
        data.extend([0; 16]);
        data.extend(&1_700_000_000_123_456u64.to_le_bytes()[..7]);
        self.quiet(kind::GTID, &data);
    }

    fn try_query(&mut self, sql: &str) -> Result<Step, Fault> {
        self.try_feed(kind::QUERY, &query(sql))
    }

    fn query(&mut self, sql: &str) {
        self.quiet(kind::QUERY, &query(sql));
    }

    fn begin(&mut self, number: u64) {
        self.gtid(number);
        self.query("BEGIN");
    }

    fn map(&mut self) {
        self.quiet(kind::TABLE_MAP, &table_map("app", "outbox"));
    }

    fn insert(&mut self, ids: &[i64]) {
        self.map();
        self.quiet(kind::WRITE_ROWS, &rows(ids.iter().map(|id| row(*id, "p"))));
    }

    fn xid(&mut self) -> Step {
        self.try_feed(kind::XID, &[0; 8]).unwrap()
    }

    fn commit(&mut self) -> Group {
        match self.xid() {
            Step::Group(group) => *group,
            other => panic!("{other:?}"),
        }
    }

    fn end(&self) -> String {
        match self.assembler.end() {
            Position::Gtid(set) => set.to_string(),
            Position::Mariadb(p) => p.to_string(),
            Position::File(p) => format!("{}:{}", p.file, p.pos),
        }
    }
}

fn query(sql: &str) -> Vec<u8> {
    let mut data = vec![0; 8];
    data.push(3);
    data.extend([0; 4]);
    data.extend(b"app\0");
    data.extend(sql.as_bytes());
    data
}

fn table_map(schema: &str, table: &str) -> Vec<u8> {
    let mut data = vec![7, 0, 0, 0, 0, 0, 1, 0];
    for name in [schema, table] {
        data.push(name.len() as u8);
        data.extend(name.as_bytes());
        data.push(0);
    }
    data.extend([6, 8, 15, 15, 15, 1, 1]); // types
    data.extend([6, 0, 1, 0, 1, 0, 1]); // VARCHARs of 256 bytes
    data.push(0); // nullable
    data.extend([1, 1, 0]); // signedness
    data.extend([2, 3, 252, 255, 0]); // default collation: utf8mb4_0900
    data
}

fn row(id: i64, payload: &str) -> Vec<u8> {
    let mut data = vec![0]; // no NULLs
    data.extend(id.to_le_bytes());
    for text in ["agg", "made", payload] {
        data.extend((text.len() as u16).to_le_bytes());
        data.extend(text.as_bytes());
    }
    data.extend([0, 0]);
    data
}

fn rows(images: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut data = vec![7, 0, 0, 0, 0, 0, 1, 0, 2, 0, 6, 0b11_1111];
    data.extend(images.flatten());
    data
}

fn updated(before: Vec<u8>, after: Vec<u8>) -> Vec<u8> {
    let mut data = vec![7, 0, 0, 0, 0, 0, 1, 0, 2, 0, 6, 0b11_1111, 0b11_1111];
    data.extend(before);
    data.extend(after);
    data
}

fn ids(group: &Group) -> Vec<i64> {
    let id = |r: &outbox_core::OutboxRow| match r.key.id {
        RowId::Int(n) => n,
        ref other => panic!("{other}"),
    };
    group.rows.iter().map(id).collect()
}

fn whys(group: &Group) -> Vec<(Deferral, bool)> {
    group
        .deferred
        .iter()
        .map(|d| (d.why, d.row.is_some()))
        .collect()
}

fn reason(fault: Result<Step, Fault>) -> String {
    match fault {
        Err(Fault::Unreadable(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn rows_count_for_nothing_until_the_terminator() {
    let mut s = Script::status();
    s.begin(11);
    s.insert(&[1, 2]);
    assert_eq!(s.end(), format!("{UUID}:1-10"));
    let group = s.commit();
    assert_eq!(ids(&group), [1, 2]);
    assert_eq!(group.committed_at, 1_700_000_000_123_456);
    assert_eq!(group.end, at(&format!("{UUID}:1-11")));
    assert_eq!(group.rows[0].message.as_ref().unwrap().body, "p");
}

#[test]
fn a_group_that_ends_in_rollback_moves_the_position_and_gives_nothing() {
    let mut s = Script::status();
    s.begin(11);
    s.insert(&[1]);
    assert!(matches!(s.try_query("ROLLBACK"), Ok(Step::Boundary)));
    assert_eq!(s.end(), format!("{UUID}:1-11"));
}

#[test]
fn statements_inside_a_group_do_not_end_it() {
    let mut s = Script::status();
    s.begin(11);
    s.insert(&[1]);
    s.query("SAVEPOINT `s`");
    s.insert(&[2]);
    s.query("CREATE TABLE `t` (`a` int) START TRANSACTION");
    assert_eq!(s.end(), format!("{UUID}:1-10"));
    assert_eq!(ids(&s.commit()), [1, 2]);
}

#[test]
fn rows_behind_a_savepoint_that_is_rolled_back_to_are_taken_back() {
    let mut s = Script::status();
    s.begin(11);
    s.insert(&[1]);
    s.query("SAVEPOINT `a`");
    s.insert(&[2]);
    s.query("SAVEPOINT `b`");
    s.insert(&[3]);
    s.map();
    s.quiet(kind::UPDATE_ROWS, &updated(row(1, "p"), row(1, "changed")));
    s.map();
    s.quiet(kind::DELETE_ROWS, &rows([row(2, "p")].into_iter()));
    s.query("ROLLBACK TO `b`");
    s.insert(&[4]);
    let group = s.commit();
    assert_eq!(ids(&group), [1, 2, 4]);
    assert_eq!(group.rows[0].message.as_ref().unwrap().body, "p");
}

#[test]
fn an_update_of_an_inserted_row_replaces_it_and_a_delete_removes_it() {
    let mut s = Script::status();
    s.begin(11);
    s.insert(&[1, 2]);
    s.map();
    s.quiet(kind::UPDATE_ROWS, &updated(row(1, "p"), row(1, "final")));
    s.map();
    s.quiet(kind::DELETE_ROWS, &rows([row(2, "p")].into_iter()));
    let group = s.commit();
    assert_eq!(ids(&group), [1]);
    assert_eq!(group.rows[0].message.as_ref().unwrap().body, "final");
}

#[test]
fn a_table_without_status_columns_publishes_what_is_inserted_and_deleted_at_once() {
    let mut s = Script::new(Tracking::None, 1 << 20);
    s.begin(11);
    s.insert(&[1]);
    s.map();
    s.quiet(kind::DELETE_ROWS, &rows([row(1, "p")].into_iter()));
    assert_eq!(ids(&s.commit()), [1]);
}

#[test]
fn writes_of_our_own_are_told_from_others() {
    let mut s = Script::status();
    s.begin(11);
    s.quiet(kind::TABLE_MAP, &table_map("app", "outboxd_position"));
    s.quiet(kind::UPDATE_ROWS, &updated(row(1, "p"), row(1, "q")));
    s.map();
    s.quiet(kind::UPDATE_ROWS, &updated(row(1, "p"), row(1, "q")));
    assert!(matches!(s.xid(), Step::Boundary));
    let since = s.assembler.take_since();
    assert!(since.moved && !since.foreign);

    s.begin(12);
    s.quiet(kind::TABLE_MAP, &table_map("app", "_outbox_gho"));
    s.quiet(kind::WRITE_ROWS, &rows([row(1, "p")].into_iter()));
    assert!(matches!(s.xid(), Step::Boundary));
    assert!(s.assembler.take_since().foreign);

    s.begin(13);
    s.quiet(kind::TABLE_MAP, &table_map("app", "outboxd_signal"));
    s.quiet(kind::WRITE_ROWS, &rows([row(1, "p")].into_iter()));
    assert!(s.commit().signal);
}

#[test]
fn rows_without_their_table_map_are_refused() {
    let mut s = Script::status();
    s.begin(11);
    s.insert(&[1]);
    s.xid();
    s.begin(12);
    let fault = s.try_feed(kind::WRITE_ROWS, &rows([row(2, "p")].into_iter()));
    assert!(reason(fault).contains("without a table map"));
    assert_eq!(s.end(), format!("{UUID}:1-11"));
}

#[test]
fn unknown_events_are_skipped_only_if_they_say_that_they_may_be() {
    let mut s = Script::status();
    s.begin(11);
    let skipped = s.feed_at(200, FLAG_IGNORABLE, 0, b"?");
    assert!(matches!(skipped, Ok(Step::Quiet)));
    assert!(reason(s.feed_at(200, 0, 0, b"?")).contains("200"));
    assert_eq!(s.end(), format!("{UUID}:1-10"));
}

#[test]
fn prepared_transactions_wait_for_their_commit() {
    let prepare = |one_phase: u8, name: u8| {
        let mut data = vec![one_phase, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
        data.push(name);
        data
    };
    let mut s = Script::status();
    s.gtid(11);
    s.query("XA START X'61',X'',1");
    s.insert(&[1]);
    s.query("XA END X'61',X'',1");
    let step = s.try_feed(kind::XA_PREPARE, &prepare(0, b'a'));
    assert!(matches!(step, Ok(Step::Boundary)));
    assert_eq!(s.end(), format!("{UUID}:1-11"));

    // Another one, without rows of ours, is known too: its commit concerns nobody.
    s.gtid(12);
    s.query("XA START X'62',X'',1");
    s.query("XA END X'62',X'',1");
    s.try_feed(kind::XA_PREPARE, &prepare(0, b'b')).unwrap();
    s.gtid(13);
    assert!(matches!(
        s.try_query("XA COMMIT X'62',X'',1"),
        Ok(Step::Boundary)
    ));

    s.gtid(14);
    let Ok(Step::Group(group)) = s.try_query("XA COMMIT X'61',X'',1") else {
        panic!("no group");
    };
    assert!(group.rows.is_empty());
    assert_eq!(whys(&group), [(Deferral::Xa, true)]);

    s.gtid(15);
    s.query("XA START X'63',X'',1");
    s.insert(&[2]);
    s.query("XA END X'63',X'',1");
    let Ok(Step::Group(group)) = s.try_feed(kind::XA_PREPARE, &prepare(1, b'c')) else {
        panic!("no group");
    };
    assert_eq!(ids(&group), [2]);

    // Prepared before we began to read.
    s.gtid(16);
    let Ok(Step::Group(group)) = s.try_query("XA COMMIT X'7a',X'',1") else {
        panic!("no group");
    };
    assert_eq!(whys(&group), [(Deferral::Xa, false)]);
    s.gtid(17);
    assert!(matches!(
        s.try_query("XA ROLLBACK X'7b',X'',1"),
        Ok(Step::Boundary)
    ));
}

#[test]
fn prepared_rows_of_a_table_without_status_columns_are_refused() {
    let mut s = Script::new(Tracking::None, 1 << 20);
    s.gtid(11);
    s.query("XA START X'61',X'',1");
    s.insert(&[1]);
    s.query("XA END X'61',X'',1");
    let data = [0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, b'a'];
    assert!(reason(s.try_feed(kind::XA_PREPARE, &data)).contains("prepared XA"));
}

fn payload(size: u64) -> Vec<u8> {
    let mut data = vec![2, 1, 0, 3, 9, 254];
    data.extend(size.to_le_bytes());
    data.extend([1, 1, 3, 0, 1, 2, 3]);
    data
}

#[test]
fn a_compressed_transaction_counts_when_all_of_it_came() {
    let inner = [
        (kind::QUERY, query("BEGIN")),
        (kind::TABLE_MAP, table_map("app", "outbox")),
        (kind::WRITE_ROWS, rows([row(1, "p")].into_iter())),
        (kind::XID, vec![0; 8]),
    ];
    let size: usize = inner.iter().map(|(_, d)| d.len() + 19).sum();
    let mut s = Script::status();
    s.gtid(11);
    s.quiet(kind::TRANSACTION_PAYLOAD, &payload(size as u64));
    s.inner = true;
    for (kind, data) in &inner[..3] {
        s.quiet(*kind, data);
    }
    assert_eq!(ids(&s.commit()), [1]);

    // Damaged: the driver gives nothing of it, and the next group follows.
    s.inner = false;
    s.gtid(12);
    s.quiet(kind::TRANSACTION_PAYLOAD, &payload(size as u64));
    assert!(reason(s.try_feed(kind::HEARTBEAT, b"")).contains("damaged"));
    assert_eq!(s.end(), format!("{UUID}:1-11"));
}

#[test]
fn a_compressed_transaction_that_is_not_as_it_says_is_refused() {
    // It claims more than comes: the driver fills up with zeros.
    let mut s = Script::status();
    s.gtid(11);
    s.quiet(kind::TRANSACTION_PAYLOAD, &payload(8 << 30));
    s.inner = true;
    s.query("BEGIN");
    assert!(reason(s.try_feed(0, b"")).contains("not known"));

    // It ends without a commit.
    let mut s = Script::status();
    s.gtid(11);
    s.quiet(
        kind::TRANSACTION_PAYLOAD,
        &payload(query("BEGIN").len() as u64 + 19),
    );
    s.inner = true;
    assert!(reason(s.try_query("BEGIN")).contains("does not end"));

    // It claims less than comes.
    let mut s = Script::status();
    s.gtid(11);
    s.quiet(kind::TRANSACTION_PAYLOAD, &payload(20));
    s.inner = true;
    assert!(reason(s.try_query("BEGIN")).contains("wrong size"));
}

#[test]
fn after_a_change_of_the_table_rows_are_decoded_once_its_layout_is_proven() {
    let mut s = Script::status();
    s.gtid(11);
    let Ok(Step::Group(group)) = s.try_query("ALTER TABLE outbox ADD c INT") else {
        panic!("no group");
    };
    assert_eq!(group.layouts, [(TABLE, None)]);
    assert_eq!(s.assembler.tables.wanted().collect::<Vec<_>>(), [0]);

    s.assembler
        .tables
        .offer(0, layout(), at(&format!("{UUID}:1-13")));
    assert!(s.assembler.proven().is_none());
    s.begin(12);
    s.insert(&[1]);
    let group = s.commit();
    assert!(group.rows.is_empty());
    assert_eq!(whys(&group), [(Deferral::Layout, false)]);

    s.begin(13);
    let Step::Group(group) = s.xid() else {
        panic!("no group");
    };
    assert_eq!(group.layouts, [(TABLE, Some(layout()))]);
    s.begin(14);
    s.insert(&[2]);
    assert_eq!(ids(&s.commit()), [2]);
}

#[test]
fn a_layout_read_at_the_very_start_is_proven_at_once() {
    let mut s = Script::status();
    s.assembler.tables.unprove(0);
    s.assembler
        .tables
        .offer(0, layout(), at(&format!("{UUID}:1-10")));
    let group = s.assembler.proven().unwrap();
    assert_eq!(group.layouts, [(TABLE, Some(layout()))]);
    assert_eq!(group.end, at(&format!("{UUID}:1-10")));
}

#[test]
fn a_transaction_over_the_limit_is_left_to_the_table() {
    let mut s = Script::new(Tracking::Status, 4_000);
    s.begin(11);
    for chunk in (1..=40).collect::<Vec<_>>().chunks(10) {
        s.insert(chunk);
    }
    let group = s.commit();
    assert!(group.rows.is_empty());
    assert_eq!(whys(&group), [(Deferral::Oversized, false)]);
    s.begin(12);
    s.insert(&[41]);
    assert_eq!(ids(&s.commit()), [41]);

    let mut s = Script::new(Tracking::None, 4_000);
    s.begin(11);
    s.map();
    let images = rows((1..=40).map(|id| row(id, "p")));
    assert!(reason(s.try_feed(kind::WRITE_ROWS, &images)).contains("max_transaction_bytes"));
}

#[test]
fn a_logged_statement_on_the_table_leaves_it_to_the_table() {
    let mut s = Script::status();
    s.begin(11);
    s.query("INSERT INTO orders VALUES (1)");
    assert!(matches!(s.xid(), Step::Boundary));
    s.begin(12);
    s.query("INSERT INTO `outbox` VALUES (1)");
    assert_eq!(whys(&s.commit()), [(Deferral::Statement, false)]);
}

#[test]
fn a_row_without_a_needed_column_is_left_to_the_table_by_its_key() {
    let mut s = Script::status();
    s.begin(11);
    s.map();
    // MINIMAL: id and event_type only.
    let mut data = vec![7, 0, 0, 0, 0, 0, 1, 0, 2, 0, 6, 0b00_0101, 0];
    data.extend(5i64.to_le_bytes());
    data.extend([4, 0]);
    data.extend(b"made");
    s.quiet(kind::WRITE_ROWS, &data);
    let group = s.commit();
    assert_eq!(group.deferred[0].row.as_ref().unwrap().0, RowId::Int(5));
    assert_eq!(group.deferred[0].why, Deferral::PartialImage);
}

#[test]
fn lost_events_leave_everything_to_the_tables() {
    let mut s = Script::status();
    let Ok(Step::Group(group)) = s.try_feed(kind::INCIDENT, &[1, 0, 0]) else {
        panic!("no group");
    };
    assert_eq!(whys(&group), [(Deferral::Undecodable, false)]);
}

#[test]
fn a_change_of_the_servers_mode_is_noticed() {
    let mut s = Script::status();
    let anonymous = [0; 25];
    assert!(matches!(
        s.try_feed(kind::ANONYMOUS_GTID, &anonymous),
        Err(Fault::ModeChanged)
    ));
}

#[test]
fn a_history_that_began_anew_is_noticed() {
    let rotate = |s: &mut Script| {
        let mut data = 4u64.to_le_bytes().to_vec();
        data.extend(b"binlog.000001");
        let event = RawEvent {
            kind: kind::ROTATE,
            flags: event::FLAG_ARTIFICIAL,
            timestamp: 0,
            server_id: 7,
            size: 0,
            log_pos: 0,
            data: &data,
        };
        s.assembler.feed(&event).unwrap();
    };
    let previous = |last: u64| {
        let mut data = 1u64.to_le_bytes().to_vec();
        data.extend(SERVER);
        for n in [1, 1, last + 1] {
            data.extend(n.to_le_bytes());
        }
        data
    };
    let taken = 1_700_000_000_000_000;
    for (began, last, reset) in [
        (1_699_999_000, 8, false),  // an old file
        (1_700_000_100, 10, false), // a new one that knows all
        (1_700_000_100, 8, true),   // a new one of another history
    ] {
        let mut s = Script::status();
        s.assembler = Assembler::new(Tables::new("app".into(), Vec::new()), 1, 0);
        s.assembler
            .restart(&at(&format!("{UUID}:1-10")), Some(taken), SERVER);
        rotate(&mut s);
        s.feed_at(kind::FORMAT_DESCRIPTION, 0, began, &[0; 90])
            .unwrap();
        let step = s.try_feed(kind::PREVIOUS_GTIDS, &previous(last));
        assert_eq!(
            matches!(step, Err(Fault::Reset(_))),
            reset,
            "{began} {last}"
        );
    }

    // The same file name, but another file.
    let mut s = Script::status();
    rotate(&mut s);
    s.feed_at(kind::FORMAT_DESCRIPTION, 0, 1_600_000_000, &[0; 90])
        .unwrap();
    s.begin(11);
    s.xid();
    s.assembler.take_since();
    s.assembler
        .restart(&at(&format!("{UUID}:1-11")), None, SERVER);
    rotate(&mut s);
    let step = s.feed_at(kind::FORMAT_DESCRIPTION, 0, 1_600_000_001, &[0; 90]);
    assert!(matches!(step, Err(Fault::Reset(_))));
}

#[test]
fn a_file_position_follows_groups_and_stops_at_four_gib() {
    let mut s = Script::status();
    let file = |pos| {
        Position::File(FilePosition {
            server: UUID.into(),
            file: "binlog.000001".into(),
            pos,
        })
    };
    s.assembler.restart(&file(4_294_960_000), None, SERVER);
    s.assembler.tables.prove(0, layout(), file(4_294_960_000));
    s.pos = 4_294_960_000;
    s.query("BEGIN");
    s.insert(&[1]);
    let group = s.commit();
    assert_eq!(group.end, file(u64::from(s.pos)));
    let last = s.pos;
    // The next one passes the limit: nothing is skipped, and nothing of it can be stored.
    s.pos = 500;
    s.query("BEGIN");
    s.insert(&[2]);
    let group = s.commit();
    assert_eq!(ids(&group), [2]);
    assert_eq!(group.end, file(u64::from(last)));
    let mut data = 4u64.to_le_bytes().to_vec();
    data.extend(b"binlog.000002");
    assert!(matches!(
        s.try_feed(kind::ROTATE, &data),
        Ok(Step::Boundary)
    ));
    assert_eq!(s.end(), "binlog.000002:4");
}

#[test]
fn an_artificial_rotate_does_not_move_the_position() {
    let mut s = Script::status();
    let start = Position::File(FilePosition {
        server: UUID.into(),
        file: "binlog.000001".into(),
        pos: 1_000,
    });
    s.assembler.restart(&start, None, SERVER);
    let mut data = 900u64.to_le_bytes().to_vec();
    data.extend(b"binlog.000001");
    let event = RawEvent {
        kind: kind::ROTATE,
        flags: event::FLAG_ARTIFICIAL,
        timestamp: 0,
        server_id: 7,
        size: 40,
        log_pos: 0,
        data: &data,
    };
    assert!(matches!(s.assembler.feed(&event), Ok(Step::Quiet)));
    assert_eq!(s.end(), "binlog.000001:1000");
}

#[test]
fn nothing_of_a_group_that_was_cut_off_survives_a_restart() {
    let mut s = Script::status();
    s.begin(11);
    s.insert(&[1]);
    let end = s.assembler.end().clone();
    s.assembler.restart(&end, None, SERVER);
    s.begin(11);
    s.insert(&[1]);
    assert_eq!(ids(&s.commit()), [1]);
    assert_eq!(s.end(), format!("{UUID}:1-11"));
}
