//! The stream when things go wrong: servers that die, forget, or refuse.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod stream_support;

use std::time::{Duration, Instant};

use anyhow::Result;
use mysql_async::prelude::Queryable as _;
use outbox_core::Position;
use outbox_tail::group::{Source as _, StreamItem};
use outbox_tail::stream::{LostReason, SslMode, StreamDisposition, StreamError, UrlSource, probe};
use outbox_testkit::{Mysql, MysqlOptions};
use stream_support::{Lab, bodies, fail, numbers, read, read_to};

async fn kill_dumps(lab: &Lab<'_>) -> Result<usize> {
    let mut conn = lab.conn().await?;
    let ids: Vec<u64> = conn
        .query(
            "SELECT PROCESSLIST_ID FROM performance_schema.threads \
             WHERE PROCESSLIST_COMMAND LIKE 'Binlog Dump%'",
        )
        .await?;
    for id in &ids {
        conn.query_drop(format!("KILL {id}")).await?;
    }
    conn.disconnect().await?;
    Ok(ids.len())
}

fn lost(error: &StreamError) -> Option<(LostReason, bool)> {
    match error {
        StreamError::LostPosition(l) => Some((l.reason, l.certain)),
        _ => None,
    }
}

#[tokio::test]
async fn a_killed_dump_is_continued_behind_the_last_group() -> Result<()> {
    let server = Mysql::start(MysqlOptions::default()).await?;
    let lab = Lab::new(&server, "t").await?;
    let mut source = lab.open().await?;
    lab.insert(0..1).await?;
    let end = read(&mut source, 1).await?.pop().unwrap().end;
    // A large group, of which a part is on its way when the dump dies.
    lab.run(&[
        "SET SESSION cte_max_recursion_depth = 100000",
        "INSERT INTO outbox (payload) WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL \
         SELECT n + 1 FROM s WHERE n < 19999) SELECT JSON_OBJECT('n', n) FROM s",
    ])
    .await?;
    assert_eq!(kill_dumps(&lab).await?, 1);
    let mut end = end;
    let mut rows = Vec::new();
    loop {
        match source.next().await {
            Ok(StreamItem::Group(g)) => {
                end = g.end.clone();
                rows.push(g);
            }
            Ok(_) => {}
            Err(e) => {
                assert_eq!(e.disposition(), StreamDisposition::Backoff, "{e}");
                break;
            }
        }
    }
    source.open(&end).await?;
    lab.insert(20_000..20_001).await?;
    let more = 20_000 - bodies(&rows).len();
    rows.extend(read(&mut source, more).await?);
    assert_eq!(bodies(&rows), numbers(1..20_001));
    Ok(())
}

#[tokio::test]
async fn an_idle_server_is_heard_of_and_a_silent_one_noticed() -> Result<()> {
    let mut server = Mysql::start(MysqlOptions::default()).await?;
    let lab = {
        let mut lab = Lab::new(&server, "t").await?;
        lab.config.heartbeat = Duration::from_millis(300);
        lab.source()
    };
    let mut source = lab;
    let after = {
        let lab = Lab::new(&server, "u").await?;
        lab.now().await?
    };
    source.open(&after).await?;
    let mut idle = 0;
    while idle < 12 {
        match source.next().await? {
            StreamItem::Idle => idle += 1,
            StreamItem::Group(g) => assert!(g.rows.is_empty()),
            StreamItem::Progress { .. } => {}
        }
    }
    server.pause()?;
    let paused = Instant::now();
    let error = fail(&mut source).await?;
    assert!(matches!(error, StreamError::Silent(_)), "{error:?}");
    assert!(paused.elapsed() < Duration::from_millis(300 * 4));
    server.resume()?;
    source.open(&after).await?;
    server.stop().await?;
    let error = fail(&mut source).await?;
    assert_eq!(error.disposition(), StreamDisposition::Backoff, "{error:?}");
    let error = source.open(&after).await.unwrap_err();
    assert_eq!(error.disposition(), StreamDisposition::Backoff, "{error:?}");
    Ok(())
}

#[tokio::test]
async fn purged_and_reset_histories_are_noticed_on_open() -> Result<()> {
    let server = Mysql::start(MysqlOptions::default()).await?;
    let mut lab = Lab::new(&server, "t").await?;
    let stored = lab.now().await?;
    lab.insert(0..3).await?;
    lab.run(&["FLUSH BINARY LOGS"]).await?;
    let mut conn = lab.conn().await?;
    let logs: Vec<mysql_async::Row> = conn.query("SHOW BINARY LOGS").await?;
    let newest: String = logs.last().unwrap().get(0).unwrap();
    conn.query_drop(format!("PURGE BINARY LOGS TO '{newest}'"))
        .await?;
    let mut source = lab.source();
    let error = source.open(&stored).await.unwrap_err();
    assert_eq!(lost(&error), Some((LostReason::Purged, true)), "{error}");
    // Where it says that the server is now, the stream goes on.
    let StreamError::LostPosition(gap) = error else {
        panic!("{error}");
    };
    source.open(&gap.to).await?;
    lab.insert(3..4).await?;
    let groups = read(&mut source, 1).await?;
    assert_eq!(bodies(&groups), numbers(3..4));
    let end = groups.last().unwrap().end.clone();
    source.close().await;

    // Files tell their age in seconds.
    let taken = groups.last().unwrap().committed_at / 1_000_000;
    outbox_testkit::wait::until("the next second", Duration::from_secs(5), async || {
        let now = server.first::<i64>("SELECT UNIX_TIMESTAMP()").await;
        now.is_ok_and(|now| now.is_some_and(|now| now > taken))
    })
    .await?;
    // The new history outgrows the stored set: its files are too young for it.
    conn.query_drop("RESET BINARY LOGS AND GTIDS").await?;
    lab.insert(4..60).await?;
    assert_eq!(lab.now().await?.reaches(&end), Some(true));
    source.open(&end).await?;
    let error = fail(&mut source).await?;
    assert_eq!(lost(&error), Some((LostReason::Reset, false)), "{error}");
    // A new process can tell only from the time that the position was stored at.
    lab.config.position_stored_at = Some(taken * 1_000_000);
    let mut source = lab.source();
    source.open(&end).await?;
    let error = fail(&mut source).await?;
    assert_eq!(lost(&error), Some((LostReason::Reset, false)), "{error}");

    conn.query_drop("RESET BINARY LOGS AND GTIDS").await?;
    let error = source.open(&end).await.unwrap_err();
    assert_eq!(
        lost(&error),
        Some((LostReason::NotContained, false)),
        "{error}"
    );
    Ok(())
}

#[tokio::test]
async fn a_reset_while_reading_is_noticed() -> Result<()> {
    let server = Mysql::start(MysqlOptions::default()).await?;
    let lab = Lab::new(&server, "t").await?;
    let mut source = lab.open().await?;
    lab.insert(0..3).await?;
    let groups = read(&mut source, 3).await?;
    let end = groups.last().unwrap().end.clone();
    lab.run(&["FLUSH BINARY LOGS"]).await?;
    lab.run(&["RESET BINARY LOGS AND GTIDS"]).await?;
    lab.insert(3..6).await?;
    let error = match tokio::time::timeout(Duration::from_secs(8), fail(&mut source)).await {
        Ok(error) => error?,
        Err(_) => panic!("the reset was not noticed"),
    };
    let error = match error.disposition() {
        StreamDisposition::LostPosition => error,
        _ => source.open(&end).await.unwrap_err(),
    };
    assert_eq!(
        error.disposition(),
        StreamDisposition::LostPosition,
        "{error:?}"
    );
    Ok(())
}

#[tokio::test]
async fn file_positions_are_bound_to_their_server_and_continued_there() -> Result<()> {
    let server = Mysql::start(MysqlOptions::without_gtid().option("--gtid-mode=OFF")).await?;
    let lab = Lab::new(&server, "t").await?;
    let mut source = lab.open().await?;
    lab.insert(0..5).await?;
    let groups = read(&mut source, 5).await?;
    let ends: Vec<_> = groups
        .iter()
        .filter(|g| !g.rows.is_empty())
        .map(|g| g.end.clone())
        .collect();
    assert_eq!(ends.last(), Some(&lab.now().await?));
    source.open(&ends[1]).await?;
    let now = lab.now().await?;
    let again = read_to(&mut source, &now).await?;
    assert_eq!(
        again
            .iter()
            .map(|g| g.rows.len() + g.deferred.len())
            .sum::<usize>(),
        3
    );
    lab.run(&["FLUSH BINARY LOGS"]).await?;
    lab.insert(5..6).await?;
    assert_eq!(bodies(&read(&mut source, 1).await?), numbers(5..6));

    let Position::File(mut wrong) = ends[1].clone() else {
        panic!("{ends:?}");
    };
    wrong.pos += 7;
    let error = match source.open(&Position::File(wrong.clone())).await {
        Ok(()) => fail(&mut source).await?,
        Err(e) => e,
    };
    assert_eq!(
        lost(&error),
        Some((LostReason::InvalidOffset, false)),
        "{error:?}"
    );
    wrong.server = "somebody".to_owned();
    let error = source.open(&Position::File(wrong)).await.unwrap_err();
    assert_eq!(
        lost(&error),
        Some((LostReason::ForeignServer, false)),
        "{error}"
    );
    Ok(())
}

#[tokio::test]
async fn the_same_server_id_twice_is_named() -> Result<()> {
    let server = Mysql::start(MysqlOptions::default()).await?;
    let lab = Lab::new(&server, "t").await?;
    let mut first = lab.open().await?;
    let mut second = lab.open().await?;
    let reading = tokio::spawn(async move {
        loop {
            if let Err(e) = second.next().await {
                return e;
            }
        }
    });
    let error = fail(&mut first).await?;
    assert!(
        matches!(error, StreamError::ServerIdTaken { .. }),
        "{error:?}"
    );
    assert_eq!(error.disposition(), StreamDisposition::Backoff);
    reading.abort();
    Ok(())
}

#[tokio::test]
async fn missing_grants_and_settings_are_named() -> Result<()> {
    let server = Mysql::start(MysqlOptions::default()).await?;
    let mut lab = Lab::new(&server, "t").await?;
    let after = lab.now().await?;
    lab.run(&["CREATE USER poor@'%' IDENTIFIED BY 'secret'"])
        .await?;
    lab.config.url = UrlSource::Inline(server.url("poor").into());
    let error = lab.source().open(&after).await.unwrap_err();
    assert!(
        matches!(
            error,
            StreamError::Halt {
                check: "grants",
                ..
            }
        ),
        "{error:?}"
    );
    // A wrong password may be a rotation under way.
    let wrong = server.url("outboxd").replace("secret", "wrong");
    lab.config.url = UrlSource::Inline(wrong.into());
    let error = lab.source().open(&after).await.unwrap_err();
    assert_eq!(error.disposition(), StreamDisposition::Backoff);
    assert!(!format!("{error:?}").contains("wrong:"), "{error:?}");
    Ok(())
}

#[tokio::test]
async fn every_ssl_mode_connects_as_it_says_and_secrets_are_read_anew() -> Result<()> {
    let server = Mysql::start(MysqlOptions::default()).await?;
    let mut lab = Lab::new(&server, "t").await?;
    let folder = tempfile::tempdir()?;
    let url = folder.path().join("url");
    lab.config.url = UrlSource::File(url.clone());
    let ca = server.data().join("ca.pem");
    std::fs::write(&url, server.url("outboxd") + "?ssl-mode=REQUIRED\n")?;
    for (mode, ca, works) in [
        (SslMode::Disabled, None, true),
        (SslMode::Preferred, None, true),
        (SslMode::Required, None, true),
        (SslMode::VerifyCa, Some(ca.clone()), true),
        (SslMode::VerifyCa, None, false),
        (SslMode::VerifyIdentity, Some(ca.clone()), false),
    ] {
        lab.config.tls.mode = mode;
        lab.config.tls.ca = ca;
        let result = probe(&lab.config).await;
        assert_eq!(result.is_ok(), works, "{mode:?}: {result:?}");
    }
    // A certificate of ours, for an account that wants one.
    lab.config.tls.mode = SslMode::VerifyCa;
    lab.config.tls.ca = Some(ca);
    lab.run(&["ALTER USER outboxd REQUIRE X509"]).await?;
    assert!(probe(&lab.config).await.is_err());
    lab.config.tls.cert = Some(server.data().join("client-cert.pem"));
    lab.config.tls.key = Some(server.data().join("client-key.pem"));
    probe(&lab.config).await?;
    // The password is rotated.
    lab.run(&["ALTER USER outboxd IDENTIFIED BY 'next'"])
        .await?;
    assert!(probe(&lab.config).await.is_err());
    std::fs::write(&url, server.url("outboxd").replace("secret", "next"))?;
    probe(&lab.config).await?;
    Ok(())
}
