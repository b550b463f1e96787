//! The stream against a real MariaDB: positions are its GTIDs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod stream_support;

use std::time::Duration;

use anyhow::Result;
use outbox_core::Position;
use outbox_core::gtid::mariadb::MariadbPosition;
use outbox_core::ports::Deferral;
use outbox_core::position::FilePosition;
use outbox_tail::group::{Group, Source as _};
use outbox_tail::stream::{BinlogSource, LostReason, StreamError, probe};
use outbox_testkit::{Database, Mariadb, MysqlOptions, wait};
use stream_support::{Lab, bodies, fail, numbers, read, read_to};

const SOON: Duration = Duration::from_secs(60);

fn list(position: &Position) -> &MariadbPosition {
    match position {
        Position::Mariadb(list) => list,
        other => panic!("{other}"),
    }
}

fn at(text: &str) -> Position {
    Position::Mariadb(MariadbPosition::from(
        text.parse::<outbox_core::gtid::mariadb::GtidList>()
            .unwrap(),
    ))
}

/// The ends of the groups with rows.
fn ends(groups: &[Group]) -> Vec<Position> {
    let with_rows = groups.iter().filter(|g| !g.rows.is_empty());
    with_rows.map(|g| g.end.clone()).collect()
}

/// Layouts as they were proven, so that rows behind an earlier position are decoded too.
fn keep_layout(lab: &Lab<'_>, groups: &[Group]) {
    let proven = groups.iter().find_map(|g| g.layouts.first()?.1.clone());
    *lab.layouts.stored.lock().unwrap() = proven;
}

fn lost(error: &StreamError) -> Option<(LostReason, bool)> {
    match error {
        StreamError::LostPosition(lost) => Some((lost.reason, lost.certain)),
        _ => None,
    }
}

/// Why the position cannot be continued, be it found out on opening or by the server.
async fn cannot(source: &mut BinlogSource, after: &Position) -> Result<StreamError> {
    match source.open(after).await {
        Ok(()) => fail(source).await,
        Err(e) => Ok(e),
    }
}

async fn server(options: &[&str]) -> Result<Database> {
    let all = options.iter();
    let options = all.fold(MysqlOptions::default(), |all, o| all.option(*o));
    Mariadb::start(options).await
}

#[tokio::test]
async fn groups_come_in_order_and_are_continued_behind_any_of_them() -> Result<()> {
    let server = server(&[]).await?;
    let lab = Lab::new(&server, "t").await?;
    let mut source = lab.open().await?;
    lab.insert(0..3).await?;
    lab.run(&[
        "BEGIN",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 3}')",
        "SAVEPOINT s",
        "INSERT INTO outbox (payload) VALUES ('{\"gone\": 1}')",
        "ROLLBACK TO s",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 4}')",
        "COMMIT",
        "FLUSH BINARY LOGS",
        "CREATE TABLE x (id INT)",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 5}')",
    ])
    .await?;
    let groups = read(&mut source, 6).await?;
    assert_eq!(bodies(&groups), numbers(0..6));
    let ends = ends(&groups);
    assert_eq!(ends.last(), Some(&lab.now().await?));
    let near = list(&ends[4]).near.clone().unwrap();
    assert_eq!(near.0, "binlog.000002");
    keep_layout(&lab, &groups);
    for (end, left) in [(2, 3..6), (3, 5..6)] {
        let mut source = lab.source();
        source.open(&ends[end]).await?;
        let rows = left.len();
        assert_eq!(bodies(&read(&mut source, rows).await?), numbers(left));
    }
    // The same stream again, as after a cut.
    source.open(&ends[3]).await?;
    assert_eq!(bodies(&read(&mut source, 1).await?), numbers(5..6));
    Ok(())
}

#[tokio::test]
async fn a_file_position_is_continued_by_the_list_that_belongs_to_it() -> Result<()> {
    let server = server(&[]).await?;
    let lab = Lab::new(&server, "t").await?;
    let mut source = lab.open().await?;
    lab.insert(0..4).await?;
    lab.run(&["FLUSH BINARY LOGS"]).await?;
    lab.insert(4..5).await?;
    let groups = read(&mut source, 5).await?;
    keep_layout(&lab, &groups);
    let ends = ends(&groups);
    let identity = probe(&lab.config).await?.server;
    let file = |end: usize, more: u64| {
        let (file, pos) = list(&ends[end]).near.clone().unwrap();
        Position::File(FilePosition {
            server: identity.clone(),
            file,
            pos: pos + more,
        })
    };
    for (end, left) in [(1, 2..5), (3, 4..5)] {
        let mut source = lab.source();
        source.open(&file(end, 0)).await?;
        let rows = left.len();
        let groups = read(&mut source, rows).await?;
        assert_eq!(bodies(&groups), numbers(left));
        assert_eq!(groups.last().map(|g| &g.end), ends.last());
    }
    // 42 bytes of the GTID event further an event begins too, but inside a group.
    for more in [7, 42] {
        let error = lab.source().open(&file(1, more)).await.unwrap_err();
        let reason = lost(&error);
        assert_eq!(reason, Some((LostReason::InvalidOffset, false)), "{error}");
    }
    Ok(())
}

#[tokio::test]
async fn domains_go_on_each_for_itself() -> Result<()> {
    let server = server(&[]).await?;
    let lab = Lab::new(&server, "t").await?;
    let mut source = lab.open().await?;
    lab.run(&[
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 0}')",
        "SET gtid_domain_id = 9",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 1}')",
        "SET gtid_domain_id = 0",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 2}')",
        "SET gtid_domain_id = 9",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 3}')",
    ])
    .await?;
    let groups = read(&mut source, 4).await?;
    assert_eq!(bodies(&groups), numbers(0..4));
    keep_layout(&lab, &groups);
    let ends = ends(&groups);
    let ids: Vec<u32> = list(&ends[3]).list.iter().map(|g| g.domain).collect();
    assert_eq!(ids, [0, 9]);
    for (end, left) in [(0, 1..4), (1, 2..4), (2, 3..4)] {
        let mut source = lab.source();
        source.open(&ends[end]).await?;
        let rows = left.len();
        assert_eq!(bodies(&read(&mut source, rows).await?), numbers(left));
    }
    Ok(())
}

#[tokio::test]
async fn xa_rows_are_left_to_the_table_until_their_commit() -> Result<()> {
    let server = server(&[]).await?;
    let lab = Lab::new(&server, "t").await?;
    let mut source = lab.open().await?;
    for (name, end) in [("kept", "COMMIT"), ("dropped", "ROLLBACK")] {
        lab.run(&[
            &format!("XA START '{name}'"),
            "INSERT INTO outbox (payload) VALUES ('{\"n\": 1}')",
            &format!("XA END '{name}'"),
            &format!("XA PREPARE '{name}'"),
        ])
        .await?;
        let prepared = lab.now().await?;
        let groups = read_to(&mut source, &prepared).await?;
        assert!(
            groups
                .iter()
                .all(|g| g.rows.is_empty() && g.deferred.is_empty()),
            "{groups:#?}"
        );
        lab.run(&[&format!("XA {end} '{name}'")]).await?;
        let ended = lab.now().await?;
        let groups = read_to(&mut source, &ended).await?;
        let whys: Vec<Deferral> = groups
            .iter()
            .flat_map(|g| &g.deferred)
            .map(|d| d.why)
            .collect();
        let wanted: &[Deferral] = if end == "COMMIT" {
            &[Deferral::Xa]
        } else {
            &[]
        };
        assert_eq!(whys, wanted, "{groups:#?}");
    }
    Ok(())
}

#[tokio::test]
async fn compressed_events_give_the_same_bytes() -> Result<()> {
    let server = server(&[
        "--log-bin-compress=ON",
        "--log-bin-compress-min-len=10",
        "--binlog-annotate-row-events=ON",
    ])
    .await?;
    let lab = Lab::new(&server, "t").await?;
    let mut source = lab.open().await?;
    let payload = |n: u32| format!("{{\"n\": {n}, \"pad\": \"{}\"}}", "é".repeat(5_000));
    let many = format!("('{}'), ('{}')", payload(1), payload(2));
    lab.run(&[
        &format!("INSERT INTO outbox (payload) VALUES ('{}')", payload(0)),
        &format!("INSERT INTO outbox (payload) VALUES {many}"),
        // The statement itself is compressed; the row behind it has the new layout.
        "ALTER TABLE outbox ADD COLUMN a_rather_long_name_for_a_column VARCHAR(10) DEFAULT 'aaaaaaaaaa'",
    ])
    .await?;
    let groups = read(&mut source, 3).await?;
    assert_eq!(bodies(&groups), (0..3).map(payload).collect::<Vec<_>>());
    let altered = lab.now().await?;
    let groups = read_to(&mut source, &altered).await?;
    assert!(
        groups
            .iter()
            .any(|g| g.layouts.iter().any(|(_, l)| l.is_none())),
        "{groups:#?}"
    );
    lab.insert(3..4).await?;
    let end = lab.now().await?;
    let groups = read_to(&mut source, &end).await?;
    let rows: usize = groups.iter().map(|g| g.rows.len() + g.deferred.len()).sum();
    assert_eq!(rows, 1, "{groups:#?}");
    Ok(())
}

#[tokio::test]
async fn purged_reset_and_diverged_histories_are_noticed() -> Result<()> {
    let server = server(&[]).await?;
    let lab = Lab::new(&server, "t").await?;
    lab.insert(0..1).await?;
    let old = lab.now().await?;
    lab.insert(1..2).await?;
    lab.run(&["FLUSH BINARY LOGS"]).await?;
    // The server keeps a file until its engines have no more need of it.
    wait::until("the first file is gone", SOON, async || {
        let purge = lab.run(&["PURGE BINARY LOGS TO 'binlog.000002'"]).await;
        let files = server
            .query_rows::<mysql_async::Row>("SHOW BINARY LOGS")
            .await;
        purge.is_ok() && files.is_ok_and(|files| files.len() == 1)
    })
    .await?;
    let error = cannot(&mut lab.source(), &old).await?;
    assert_eq!(lost(&error), Some((LostReason::Purged, true)), "{error}");
    let error = cannot(&mut lab.source(), &at("")).await?;
    assert_eq!(lost(&error), Some((LostReason::Purged, true)), "{error}");

    // Sequences may have holes; a transaction in one was never this server's.
    let id = server.server_id();
    lab.run(&[
        "SET gtid_seq_no = 1000",
        "INSERT INTO noise (d) VALUES ('')",
    ])
    .await?;
    lab.insert(2..3).await?;
    let error = cannot(&mut lab.source(), &at(&format!("0-{id}-500"))).await?;
    assert_eq!(
        lost(&error),
        Some((LostReason::NotContained, false)),
        "{error}"
    );
    let error = cannot(&mut lab.source(), &at(&format!("0-{id}-5000"))).await?;
    assert_eq!(
        lost(&error),
        Some((LostReason::NotContained, false)),
        "{error}"
    );
    let set = "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5".parse()?;
    let error = cannot(&mut lab.source(), &Position::Gtid(set)).await?;
    assert_eq!(
        lost(&error),
        Some((LostReason::ModeChanged, false)),
        "{error}"
    );

    // A new history that has the number again is not the old one.
    let before = lab.now().await?;
    let mut lab = lab;
    let now: i64 = server.first("SELECT UNIX_TIMESTAMP()").await?.unwrap();
    lab.config.position_stored_at = Some(now * 1_000_000);
    lab.run(&["DO SLEEP(1.1)", "RESET MASTER"]).await?;
    let error = cannot(&mut lab.source(), &before).await?;
    assert_eq!(
        lost(&error),
        Some((LostReason::NotContained, false)),
        "{error}"
    );
    let sequence = list(&before).list.get(0).unwrap().sequence;
    lab.run(&[
        &format!("SET gtid_seq_no = {sequence}"),
        "INSERT INTO noise (d) VALUES ('')",
    ])
    .await?;
    lab.insert(4..6).await?;
    let error = cannot(&mut lab.source(), &before).await?;
    assert_eq!(lost(&error), Some((LostReason::Reset, false)), "{error}");
    Ok(())
}

#[tokio::test]
async fn a_promoted_replica_goes_on_where_the_primary_was_left() -> Result<()> {
    let primary = server(&["--gtid-strict-mode=ON"]).await?;
    let replica = server(&["--gtid-strict-mode=ON", "--log-slave-updates=ON"]).await?;
    replica.replica_of(&primary).await?;
    let lab = Lab::new(&primary, "t").await?;
    let mut source = lab.open().await?;
    lab.insert(0..3).await?;
    let groups = read(&mut source, 3).await?;
    replica.caught_up_with(&primary, SOON).await?;
    replica.exec("STOP SLAVE IO_THREAD").await?;
    lab.insert(3..4).await?;
    let ahead = ends(&read(&mut source, 1).await?).remove(0);

    let there = Lab::at(&replica, "t", &lab);
    keep_layout(&there, &groups);
    let error = there.source().open(&ahead).await.unwrap_err();
    assert!(matches!(error, StreamError::Behind { .. }), "{error:?}");
    // Stopped, it could be a promoted one as well; with a privilege more it is seen that it is not.
    replica.exec("STOP SLAVE").await?;
    let error = there.source().open(&ahead).await.unwrap_err();
    let reason = lost(&error);
    assert_eq!(reason, Some((LostReason::NotContained, false)), "{error}");
    there
        .run(&[
            "SET sql_log_bin = 0",
            "GRANT REPLICA MONITOR ON *.* TO outboxd@'%'",
        ])
        .await?;
    let error = there.source().open(&ahead).await.unwrap_err();
    assert!(matches!(error, StreamError::Behind { .. }), "{error:?}");
    replica.exec("START SLAVE").await?;
    replica.caught_up_with(&primary, SOON).await?;

    // Promoted: it goes on with the same domain under an id of its own.
    replica.exec("STOP SLAVE").await?;
    replica.exec("RESET SLAVE ALL").await?;
    drop(source);
    there.insert(4..6).await?;
    let mut source = there.source();
    source.open(&ends(&groups)[1]).await?;
    let groups = read(&mut source, 4).await?;
    assert_eq!(bodies(&groups), numbers(2..6));
    let last = list(&ends(&groups)[3]).list.get(0).unwrap();
    assert_eq!(last.server, replica.server_id());
    let mut source = there.source();
    source.open(&ahead).await?;
    assert_eq!(bodies(&read(&mut source, 2).await?), numbers(4..6));

    // What the old primary committed alone is not on the new one.
    lab.insert(9..10).await?;
    let alone = lab.now().await?;
    let error = cannot(&mut there.source(), &alone).await?;
    assert_eq!(
        lost(&error),
        Some((LostReason::NotContained, false)),
        "{error}"
    );
    Ok(())
}
