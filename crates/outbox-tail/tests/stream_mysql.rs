//! The stream against a real MySQL: what a group is, and what it gives.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod stream_support;

use anyhow::Result;
use outbox_core::RowId;
use outbox_core::ports::Deferral;
use outbox_core::spec::Tracking;
use outbox_tail::group::{Group, Source as _, StreamItem};
use outbox_testkit::{Mysql, MysqlOptions};
use stream_support::{Lab, bodies, numbers, read, read_to, read_until};
use tokio::sync::OnceCell;

/// One server for all tests here: each has a database of its own.
async fn server() -> Result<&'static Mysql> {
    static SERVER: OnceCell<Mysql> = OnceCell::const_new();
    let start = || Mysql::start(MysqlOptions::default().option("--default-storage-engine=InnoDB"));
    SERVER.get_or_try_init(start).await
}

fn whys(groups: &[Group]) -> Vec<(Deferral, Option<RowId>)> {
    let why = |d: &outbox_tail::group::Deferred| (d.why, d.row.as_ref().map(|r| r.0.clone()));
    groups.iter().flat_map(|g| &g.deferred).map(why).collect()
}

#[tokio::test]
async fn every_insert_comes_once_in_commit_order_and_again_behind_an_earlier_position() -> Result<()>
{
    let lab = Lab::new(server().await?, "t_order").await?;
    let mut source = lab.open().await?;
    lab.insert(0..20).await?;
    let groups = read(&mut source, 20).await?;
    assert_eq!(bodies(&groups), numbers(0..20));
    let row = &groups.iter().flat_map(|g| &g.rows).next().unwrap();
    assert_eq!(row.key.id, RowId::UInt(1));
    assert_eq!(&*row.aggregate.kind, "order");
    assert_eq!(row.message.as_ref().unwrap().event_type, "made");
    let ends: Vec<_> = groups
        .iter()
        .filter(|g| !g.rows.is_empty())
        .map(|g| &g.end)
        .collect();
    source.open(ends[9]).await?;
    assert_eq!(bodies(&read(&mut source, 10).await?), numbers(10..20));
    // And in a new process.
    let mut source = lab.source();
    *lab.layouts.stored.lock().unwrap() = groups.iter().find_map(|g| g.layouts.first()?.1.clone());
    assert!(lab.layouts.stored.lock().unwrap().is_some());
    source.open(ends[14]).await?;
    assert_eq!(bodies(&read(&mut source, 5).await?), numbers(15..20));
    source.close().await;
    Ok(())
}

#[tokio::test]
async fn savepoints_and_tables_made_from_selects_do_not_cut_a_group() -> Result<()> {
    let lab = Lab::new(server().await?, "t_savepoint").await?;
    let mut source = lab.open().await?;
    lab.run(&[
        "BEGIN",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 0}')",
        "SAVEPOINT s",
        "INSERT INTO outbox (payload) VALUES ('{\"gone\": 1}')",
        "ROLLBACK TO s",
        "SAVEPOINT s2",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 1}')",
        "COMMIT",
        "CREATE TABLE copy AS SELECT * FROM outbox",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 2}')",
    ])
    .await?;
    let groups = read(&mut source, 3).await?;
    assert_eq!(bodies(&groups), numbers(0..3));
    Ok(())
}

#[tokio::test]
async fn rows_that_were_rolled_back_behind_a_savepoint_are_not_published() -> Result<()> {
    let lab = Lab::new(server().await?, "t_myisam").await?;
    let mut source = lab.open().await?;
    lab.run(&[
        "CREATE TABLE mine (id INT) ENGINE=MyISAM",
        "SET SESSION gtid_next = 'AUTOMATIC'",
        "BEGIN",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 0}')",
        "SAVEPOINT s",
        "INSERT INTO outbox (payload) VALUES ('{\"gone\": 1}')",
        "ROLLBACK TO s",
        "COMMIT",
        "BEGIN",
        "INSERT INTO outbox (payload) VALUES ('{\"gone\": 2}')",
        "ROLLBACK",
    ])
    .await?;
    let end = lab.now().await?;
    assert_eq!(bodies(&read_to(&mut source, &end).await?), numbers(0..1));
    Ok(())
}

#[tokio::test]
async fn compressed_transactions_give_the_same_bytes() -> Result<()> {
    let lab = Lab::new(server().await?, "t_compressed").await?;
    let mut source = lab.open().await?;
    let fill = "INSERT INTO outbox (payload) WITH RECURSIVE s (n) AS (SELECT 0 UNION ALL \
                SELECT n + 1 FROM s WHERE n < 4999) SELECT JSON_OBJECT('n', n, 't', REPEAT('é', 50)) FROM s";
    for on in ["ON", "OFF"] {
        lab.run(&[
            &format!("SET SESSION binlog_transaction_compression = {on}"),
            "SET SESSION cte_max_recursion_depth = 100000",
            fill,
        ])
        .await?;
    }
    let groups = read(&mut source, 10_000).await?;
    let bodies = bodies(&groups);
    assert_eq!(bodies.len(), 10_000);
    assert_eq!(bodies[..5_000], bodies[5_000..]);
    let whole = groups
        .iter()
        .filter(|g| !g.rows.is_empty())
        .map(|g| g.rows.len());
    assert_eq!(whole.collect::<Vec<_>>(), [5_000, 5_000]);
    Ok(())
}

#[tokio::test]
async fn one_statement_of_many_rows_comes_whole_again_after_a_restart() -> Result<()> {
    let lab = Lab::new(server().await?, "t_bulk").await?;
    let before = lab.now().await?;
    let mut source = lab.open().await?;
    lab.run(&[
        "SET SESSION cte_max_recursion_depth = 100000",
        "INSERT INTO outbox (payload) WITH RECURSIVE s (n) AS (SELECT 0 UNION ALL \
         SELECT n + 1 FROM s WHERE n < 19999) SELECT JSON_OBJECT('n', n) FROM s",
    ])
    .await?;
    let first = read(&mut source, 20_000).await?;
    assert_eq!(bodies(&first), numbers(0..20_000));
    // Not confirmed when the process ended: it begins where it began.
    source.open(&before).await?;
    *lab.layouts.stored.lock().unwrap() = None;
    assert_eq!(bodies(&read(&mut source, 20_000).await?).len(), 20_000);
    Ok(())
}

#[tokio::test]
async fn xa_rows_are_published_only_after_their_commit() -> Result<()> {
    let lab = Lab::new(server().await?, "t_xa").await?;
    let mut source = lab.open().await?;
    lab.run(&[
        "XA START 'one'",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 0}')",
        "XA END 'one'",
        "XA COMMIT 'one' ONE PHASE",
    ])
    .await?;
    assert_eq!(bodies(&read(&mut source, 1).await?), numbers(0..1));
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
        assert!(groups.is_empty(), "{groups:#?}");
        lab.run(&[&format!("XA {end} '{name}'")]).await?;
        let ended = lab.now().await?;
        let groups = read_to(&mut source, &ended).await?;
        if end == "COMMIT" {
            assert_eq!(whys(&groups), [(Deferral::Xa, Some(RowId::UInt(2)))]);
        } else {
            assert!(groups.is_empty(), "{groups:#?}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn tagged_gtids_and_sets_of_several_servers_with_holes_are_continued() -> Result<()> {
    let lab = Lab::new(server().await?, "t_gtids").await?;
    let other = "bbbbbbbb-bbbb-bbbb-bbbb-bbbbbbbbbbbb";
    let mut source = lab.open().await?;
    lab.run(&[
        &format!("SET GTID_NEXT = '{other}:1000'"),
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 0}')",
        &format!("SET GTID_NEXT = '{other}:7'"),
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 1}')",
        "SET GTID_NEXT = 'AUTOMATIC:orders'",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 2}')",
        "SET GTID_NEXT = 'AUTOMATIC'",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 3}')",
        "SET GTID_NEXT = 'AUTOMATIC:orders'",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 4}')",
    ])
    .await?;
    let groups = read(&mut source, 5).await?;
    assert_eq!(bodies(&groups), numbers(0..5));
    let after = &groups
        .iter()
        .find(|g| bodies(std::slice::from_ref(g)) == numbers(2..3))
        .unwrap()
        .end;
    assert!(after.to_string().contains("orders"), "{after}");
    source.open(after).await?;
    let groups = read(&mut source, 2).await?;
    assert_eq!(bodies(&groups), numbers(3..5));
    // Nothing of the server's own set is missing from ours.
    let now = lab.now().await?;
    read_to(&mut source, &now).await?;
    Ok(())
}

#[tokio::test]
async fn overrides_of_a_session_leave_rows_to_the_table() -> Result<()> {
    let lab = Lab::new(server().await?, "t_session").await?;
    let mut source = lab.open().await?;
    lab.run(&[
        "SET SESSION binlog_row_image = MINIMAL",
        "INSERT INTO outbox (id, payload) VALUES (77, '{\"n\": 0}')",
    ])
    .await?;
    let groups = read_until(&mut source, |g| !whys(g).is_empty()).await?;
    assert_eq!(
        whys(&groups),
        [(Deferral::PartialImage, Some(RowId::UInt(77)))]
    );
    lab.run(&[
        "SET SESSION binlog_format = STATEMENT",
        "INSERT INTO noise (d) VALUES ('x')",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 1}')",
    ])
    .await?;
    let groups = read_until(&mut source, |g| !whys(g).is_empty()).await?;
    assert_eq!(whys(&groups), [(Deferral::Statement, None)]);
    Ok(())
}

#[tokio::test]
async fn rows_are_bound_as_the_transaction_leaves_them() -> Result<()> {
    let lab = Lab::new(server().await?, "t_updates").await?;
    let mut source = lab.open().await?;
    lab.run(&[
        "BEGIN",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 9}'), ('{\"n\": 1}'), ('{\"gone\": 2}')",
        "UPDATE outbox SET payload = '{\"n\": 0}' WHERE id = 1",
        "DELETE FROM outbox WHERE id = 3",
        "COMMIT",
        "UPDATE outbox SET status = 1",
        "DELETE FROM outbox",
        "INSERT INTO outboxd_position VALUES (1, 1)",
        "INSERT INTO outboxd_signal VALUES (1)",
    ])
    .await?;
    let groups = read_until(&mut source, |g| g.last().is_some_and(|g| g.signal)).await?;
    assert_eq!(bodies(&groups), numbers(0..2));
    Ok(())
}

#[tokio::test]
async fn a_table_without_status_columns_gives_what_is_deleted_at_once() -> Result<()> {
    let mut lab = Lab::new(server().await?, "t_none").await?;
    lab.tracking = Tracking::None;
    lab.run(&[
        "SET sql_log_bin = 0",
        "ALTER TABLE outbox DROP status, DROP retry_count",
    ])
    .await?;
    let mut source = lab.open().await?;
    lab.run(&[
        "BEGIN",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 0}')",
        "DELETE FROM outbox",
        "COMMIT",
    ])
    .await?;
    assert_eq!(bodies(&read(&mut source, 1).await?), numbers(0..1));
    Ok(())
}

#[tokio::test]
async fn a_changed_table_is_followed() -> Result<()> {
    let lab = Lab::new(server().await?, "t_ddl").await?;
    let mut source = lab.open().await?;
    lab.insert(0..1).await?;
    assert_eq!(bodies(&read(&mut source, 1).await?), numbers(0..1));
    lab.run(&[
        "ALTER TABLE outbox ADD COLUMN tenant VARCHAR(64) NOT NULL DEFAULT 'x' AFTER aggregate_type, \
         ALGORITHM=INSTANT",
    ])
    .await?;
    let groups = read_until(&mut source, |g| {
        g.iter().any(|g| g.layouts.iter().any(|(_, l)| l.is_some()))
    })
    .await?;
    let layouts: Vec<_> = groups.iter().flat_map(|g| &g.layouts).collect();
    assert!(layouts.iter().any(|(_, l)| l.is_none()));
    let layout = layouts.last().unwrap().1.clone().unwrap();
    assert_eq!(layout.columns[2].name, "tenant");
    lab.insert(1..3).await?;
    let groups = read(&mut source, 2).await?;
    assert_eq!(bodies(&groups), numbers(1..3));
    assert_eq!(&*groups[0].rows[0].aggregate.id, "1");
    Ok(())
}

#[tokio::test]
async fn rows_of_a_change_that_was_missed_are_never_mapped_by_guess() -> Result<()> {
    let lab = Lab::new(server().await?, "t_swap").await?;
    let mut source = lab.open().await?;
    let before = lab.now().await?;
    source.close().await;
    // Two columns of one type change places while nobody reads.
    lab.insert(0..1).await?;
    lab.run(&[
        "ALTER TABLE outbox MODIFY event_type VARCHAR(64) NOT NULL DEFAULT 'made' AFTER aggregate_type",
    ])
    .await?;
    lab.insert(1..2).await?;
    let mut source = lab.source();
    source.open(&before).await?;
    let now = lab.now().await?;
    let groups = read_to(&mut source, &now).await?;
    assert!(bodies(&groups).is_empty());
    assert_eq!(whys(&groups)[0].0, Deferral::Layout);
    lab.insert(2..3).await?;
    let groups = read(&mut source, 1).await?;
    let row = groups.iter().flat_map(|g| &g.rows).next().unwrap();
    assert_eq!((&*row.aggregate.kind, &*row.aggregate.id), ("order", "1"));
    Ok(())
}

#[tokio::test]
async fn a_table_that_is_swapped_for_its_copy_is_followed_and_the_copy_is_not_published()
-> Result<()> {
    let lab = Lab::new(server().await?, "t_ghost").await?;
    let mut source = lab.open().await?;
    lab.insert(0..2).await?;
    lab.run(&[
        "CREATE TABLE _outbox_gho LIKE outbox",
        "ALTER TABLE _outbox_gho ADD c INT",
        "INSERT INTO _outbox_gho SELECT outbox.*, NULL FROM outbox",
        "RENAME TABLE outbox TO _outbox_del, _outbox_gho TO outbox",
    ])
    .await?;
    let groups = read_until(&mut source, |g| {
        let last = g.last().and_then(|g| g.layouts.last());
        last.is_some_and(|(_, l)| l.as_ref().is_some_and(|l| l.column("c").is_some()))
    })
    .await?;
    assert_eq!(bodies(&groups), numbers(0..2));
    lab.insert(2..3).await?;
    assert_eq!(bodies(&read(&mut source, 1).await?), numbers(2..3));
    Ok(())
}

#[tokio::test]
async fn a_quiet_outbox_on_a_busy_server_makes_progress() -> Result<()> {
    let lab = Lab::new(server().await?, "t_noise").await?;
    let mut source = lab.open().await?;
    lab.run(&["INSERT INTO noise (d) VALUES ('x')"]).await?;
    let end = lab.now().await?;
    let groups = read_to(&mut source, &end).await?;
    assert!(bodies(&groups).is_empty() && whys(&groups).is_empty());
    Ok(())
}

#[tokio::test]
async fn writes_of_our_own_alone_are_marked_as_such() -> Result<()> {
    // A server of its own: the neighbours' writes would not be ours.
    let server = Mysql::start(MysqlOptions::default()).await?;
    let lab = Lab::new(&server, "t_own").await?;
    let mut source = lab.open().await?;
    lab.run(&["INSERT INTO outboxd_position VALUES (1, 1)"])
        .await?;
    let item = loop {
        match source.next().await? {
            StreamItem::Idle => {}
            StreamItem::Group(g) if g.rows.is_empty() && g.deferred.is_empty() => {}
            item => break item,
        }
    };
    assert!(
        matches!(item, StreamItem::Progress { own_only: true, .. }),
        "{item:?}"
    );
    Ok(())
}

#[tokio::test]
async fn an_oversized_transaction_is_left_to_the_table_and_the_stream_goes_on() -> Result<()> {
    let mut lab = Lab::new(server().await?, "t_large").await?;
    lab.config.max_transaction_bytes = 100_000;
    let mut source = lab.open().await?;
    lab.run(&[
        "INSERT INTO outbox (payload) WITH RECURSIVE s (n) AS (SELECT 0 UNION ALL \
         SELECT n + 1 FROM s WHERE n < 900) SELECT JSON_OBJECT('n', n, 't', REPEAT('x', 500)) FROM s",
    ])
    .await?;
    let groups = read_until(&mut source, |g| !whys(g).is_empty()).await?;
    assert_eq!(whys(&groups), [(Deferral::Oversized, None)]);
    lab.insert(0..1).await?;
    assert_eq!(bodies(&read(&mut source, 1).await?), numbers(0..1));
    Ok(())
}

#[tokio::test]
async fn rows_around_a_missed_change_are_decoded_by_their_names() -> Result<()> {
    let server = MysqlOptions::default().option("--binlog-row-metadata=FULL");
    let server = Mysql::start(server).await?;
    let lab = Lab::new(&server, "t_names").await?;
    let before = lab.now().await?;
    lab.insert(0..1).await?;
    lab.run(&["ALTER TABLE outbox MODIFY event_type VARCHAR(64) NOT NULL DEFAULT 'made' FIRST"])
        .await?;
    lab.insert(1..2).await?;
    let mut source = lab.source();
    source.open(&before).await?;
    let groups = read(&mut source, 2).await?;
    assert_eq!(bodies(&groups), numbers(0..2));
    for row in groups.iter().flat_map(|g| &g.rows) {
        assert_eq!(&*row.aggregate.kind, "order");
        assert_eq!(row.message.as_ref().unwrap().event_type, "made");
    }
    Ok(())
}

#[tokio::test]
async fn without_status_columns_a_first_start_under_load_misses_nothing() -> Result<()> {
    let mut lab = Lab::new(server().await?, "t_first").await?;
    lab.tracking = Tracking::None;
    lab.run(&["ALTER TABLE outbox DROP status, DROP retry_count"])
        .await?;
    let after = lab.now().await?;
    // Written between the position and the reading of the layout.
    lab.insert(0..5).await?;
    let mut source = lab.source();
    source.open(&after).await?;
    lab.insert(5..6).await?;
    assert_eq!(bodies(&read(&mut source, 6).await?), numbers(0..6));

    // A change in between cannot be decoded by guess, and nothing is passed over.
    lab.run(&["ALTER TABLE outbox MODIFY event_type VARCHAR(64) NOT NULL DEFAULT 'made' FIRST"])
        .await?;
    let mut source = lab.source();
    source.open(&after).await?;
    let error = stream_support::fail(&mut source).await?;
    assert_eq!(
        error.disposition(),
        outbox_tail::stream::StreamDisposition::Undecodable,
        "{error:?}"
    );
    Ok(())
}
