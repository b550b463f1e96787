#![allow(clippy::unwrap_used)]
use outbox_core::gtid::mariadb::GtidList;

use super::*;

const A: &str = "aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa";
const B: &str = "bbbbbbbb-bbbb-bbbb-bbbb-bbbbbbbbbbbb";

fn facts(gtid_mode: &str, executed: &str, purged: &str) -> ServerFacts {
    let executed: GtidSet = executed.parse().unwrap();
    ServerFacts {
        version: "9.7.0".into(),
        family: Family::Mysql,
        server: A.into(),
        server_id: 7,
        gtid_mode: gtid_mode.into(),
        binlog_format: "ROW".into(),
        row_image: "FULL".into(),
        row_metadata: "MINIMAL".into(),
        log_bin: true,
        log_replica_updates: true,
        read_only: false,
        expire_logs_seconds: None,
        fold_names: false,
        is_replica: false,
        is_filtered: false,
        purged: purged.parse().unwrap(),
        binlogs: vec![
            ("binlog.000005".into(), 1_000),
            ("binlog.000006".into(), 500),
        ],
        mariadb: None,
        coordinate: Position::Gtid(executed.clone()),
        executed,
    }
}

fn reason(resume: &Resume) -> Option<(LostReason, bool)> {
    match resume {
        Resume::Lost {
            reason, certain, ..
        } => Some((*reason, *certain)),
        _ => None,
    }
}

#[test]
fn a_set_is_continued_only_where_all_that_follows_is_there() {
    let table = [
        (
            format!("{A}:1-10"),
            format!("{A}:1-20"),
            String::new(),
            None,
        ),
        (
            format!("{A}:1-10"),
            format!("{A}:1-20"),
            format!("{A}:1-10"),
            None,
        ),
        (
            format!("{A}:1-10"),
            format!("{A}:1-20"),
            format!("{A}:1-11"),
            Some((LostReason::Purged, true)),
        ),
        // Holes and other sources are looked at one by one.
        (
            format!("{A}:1-4:6-10,{B}:1"),
            format!("{A}:1-20,{B}:1"),
            format!("{A}:1-5"),
            Some((LostReason::Purged, true)),
        ),
        (
            format!("{A}:1-10"),
            format!("{A}:1-3"),
            String::new(),
            Some((LostReason::NotContained, false)),
        ),
        (
            format!("{A}:1-10"),
            String::new(),
            String::new(),
            Some((LostReason::NotContained, false)),
        ),
        (
            format!("{A}:orders:1-2"),
            format!("{A}:1-10:orders:1"),
            String::new(),
            Some((LostReason::NotContained, false)),
        ),
    ];
    for (ours, executed, purged, expected) in table {
        let position = Position::Gtid(ours.parse().unwrap());
        let resume = check_resume(&position, &facts("ON", &executed, &purged));
        assert_eq!(
            reason(&resume),
            expected,
            "{ours} on {executed} purged {purged}"
        );
    }
}

#[test]
fn a_replica_that_lags_is_waited_for() {
    let position = Position::Gtid(format!("{B}:1-10").parse().unwrap());
    let mut server = facts("ON", &format!("{B}:1-5"), "");
    server.is_replica = true;
    let missing: GtidSet = format!("{B}:6-10").parse().unwrap();
    assert_eq!(
        check_resume(&position, &server),
        Resume::Behind(missing.to_string())
    );
    // Its own transactions no source will bring back.
    let position = Position::Gtid(format!("{A}:1-10").parse().unwrap());
    let resume = check_resume(&position, &server);
    assert_eq!(reason(&resume), Some((LostReason::NotContained, false)));
}

#[test]
fn a_set_means_nothing_to_a_server_without_gtids() {
    let position = Position::Gtid(format!("{A}:1").parse().unwrap());
    let resume = check_resume(&position, &facts("OFF", "", ""));
    assert_eq!(reason(&resume), Some((LostReason::ModeChanged, false)));
}

#[test]
fn a_file_is_continued_only_on_its_server_and_within_its_size() {
    for (server, file, pos, expected) in [
        (A, "binlog.000005", 900, None),
        (A, "binlog.000006", 500, None),
        (A, "binlog.000006", 501, Some((LostReason::Reset, false))),
        (A, "binlog.000004", 4, Some((LostReason::Purged, true))),
        (A, "binlog.000007", 4, Some((LostReason::Reset, false))),
        (A, "other.000005", 4, Some((LostReason::Reset, false))),
        (
            A,
            "binlog.000005",
            3,
            Some((LostReason::InvalidOffset, false)),
        ),
        (
            B,
            "binlog.000005",
            900,
            Some((LostReason::ForeignServer, false)),
        ),
    ] {
        let position = Position::File(FilePosition {
            server: server.into(),
            file: file.into(),
            pos,
        });
        let resume = check_resume(&position, &facts("OFF", "", ""));
        assert_eq!(reason(&resume), expected, "{file}:{pos} on {server}");
    }
}

#[test]
fn an_offset_beyond_four_gib_needs_gtids() {
    let position = Position::File(FilePosition {
        server: A.into(),
        file: "binlog.000005".into(),
        pos: (1 << 32) + 10,
    });
    assert_eq!(
        check_resume(&position, &facts("OFF", "", "")),
        Resume::NeedsGtid
    );
}

#[test]
fn settings_that_forbid_tailing_are_named() {
    let check = |change: fn(&mut ServerFacts)| {
        let mut facts = facts("ON", "", "");
        change(&mut facts);
        match check_settings(&facts) {
            Err(StreamError::Halt { check, .. }) => Some(check),
            _ => None,
        }
    };
    assert_eq!(check(|_| {}), None);
    assert_eq!(check(|f| f.log_bin = false), Some("log_bin"));
    assert_eq!(
        check(|f| f.binlog_format = "MIXED".into()),
        Some("binlog_format")
    );
    let replica = |f: &mut ServerFacts| {
        f.is_replica = true;
        f.log_replica_updates = false;
    };
    assert_eq!(check(replica), Some("log_replica_updates"));
}

fn mariadb(state: &str, purged: &str) -> ServerFacts {
    let gtids = state.split(',').filter(|g| !g.is_empty());
    let state: Vec<_> = gtids.map(|g| g.parse().unwrap()).collect();
    ServerFacts {
        family: Family::Mariadb,
        mariadb: Some(MariadbGtids {
            position: state.iter().copied().collect(),
            state,
            replicated: "5-9-40".parse().unwrap(),
            purged: Some(purged.parse().unwrap()),
        }),
        ..facts("", "", "")
    }
}

#[test]
fn a_list_is_continued_only_where_all_that_follows_is_there() {
    // The server's id is 7.
    for (list, state, purged, wanted) in [
        ("0-7-10", "0-7-20", "", None),
        ("0-7-20", "0-7-20", "", None),
        ("0-7-10", "0-7-20", "0-7-10", None),
        ("", "0-7-20", "", None),
        // Written by the server that was followed, and logged here before this one's own.
        ("0-9-10", "0-9-12,0-7-20", "0-9-10", None),
        // Copied, not logged.
        ("5-9-40", "0-7-20", "", None),
        (
            "0-7-9",
            "0-7-20",
            "0-7-10",
            Some((LostReason::Purged, true)),
        ),
        ("", "0-7-20", "0-7-10", Some((LostReason::Purged, true))),
        (
            "0-7-20",
            "0-7-20,3-7-9",
            "3-7-5",
            Some((LostReason::Purged, true)),
        ),
        (
            "0-7-21",
            "0-7-20",
            "",
            Some((LostReason::NotContained, false)),
        ),
        (
            "0-9-15",
            "0-9-12,0-7-20",
            "",
            Some((LostReason::NotContained, false)),
        ),
        (
            "3-7-1",
            "0-7-20",
            "",
            Some((LostReason::NotContained, false)),
        ),
    ] {
        let position = Position::Mariadb(list.parse::<GtidList>().unwrap().into());
        let resume = check_resume(&position, &mariadb(state, purged));
        assert_eq!(reason(&resume), wanted, "{list} on {state}: {resume:?}");
    }
    let position = Position::Mariadb(GtidList::default().into());
    let resume = check_resume(&position, &facts("ON", "", ""));
    assert_eq!(reason(&resume), Some((LostReason::ModeChanged, false)));
}

#[test]
fn a_mariadb_replica_is_waited_for_if_it_can_catch_up() {
    let resume = |list: &str, state| {
        let mut server = mariadb(state, "");
        server.is_replica = true;
        check_resume(
            &Position::Mariadb(list.parse::<GtidList>().unwrap().into()),
            &server,
        )
    };
    assert_eq!(resume("0-9-15", "0-9-12"), Resume::Behind("0-9-15".into()));
    // The domain went on without it, or it was the server's own.
    for (list, state) in [("0-9-15", "0-9-12,0-8-16"), ("0-7-15", "0-7-12")] {
        let lost = reason(&resume(list, state));
        assert_eq!(lost, Some((LostReason::NotContained, false)), "{list}");
    }
}
