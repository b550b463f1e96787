//! Our own tables on a real server: made, made again, repaired, and left alone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod claims_world;

use anyhow::{Context as _, Result};
use claims_world::*;
use outbox_core::ports::{Disposition, chain};
use outbox_ledger::connect::Db;
use outbox_ledger::migrate;
use outbox_testkit::{Database, Mysql, MysqlOptions};

#[tokio::test]
async fn our_tables_are_made_and_repaired() -> Result<()> {
    let server = Mysql::start(MysqlOptions::default()).await?;
    server.prepare().await?;
    let migrator = db_of(&server, "migrator");
    neighbours(&server, &migrator).await.context("neighbours")?;
    cut_off(&server, &migrator).await.context("cut off")?;
    at_once(&server).await.context("at once")?;
    newer(&server, &migrator).await.context("newer")?;
    without_the_right(&server)
        .await
        .context("without the right")
}

async fn tables(server: &Database) -> Result<Vec<String>> {
    let ours = "SELECT CAST(TABLE_NAME AS CHAR) FROM information_schema.TABLES WHERE TABLE_SCHEMA = 'app' AND TABLE_NAME LIKE 'outboxd%' ORDER BY 1";
    server.query_rows(ours).await
}

/// In the schema of an application that migrates with the same library, and is in trouble itself.
async fn neighbours(server: &Database, migrator: &Db) -> Result<()> {
    for statement in [
        "CREATE TABLE _sqlx_migrations (version BIGINT PRIMARY KEY, description TEXT NOT NULL, installed_on TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP, success BOOLEAN NOT NULL, checksum BLOB NOT NULL, execution_time BIGINT NOT NULL)",
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) VALUES (1, 'theirs', TRUE, '', 1), (2, 'theirs', FALSE, '', -1)",
        "CREATE TABLE outbox (id BIGINT PRIMARY KEY)",
    ] {
        server.exec(statement).await?;
    }
    let theirs = "SELECT GROUP_CONCAT(version, success, installed_on ORDER BY version) FROM _sqlx_migrations";
    let before = server.first::<String>(theirs).await?;
    let nothing = migrate::version(migrator).await?;
    assert!(!nothing.is_current() && nothing.dirty.is_none());
    assert!(tables(server).await?.is_empty(), "asking makes nothing");

    let applied = migrate::run(migrator, true).await?;
    assert_eq!(applied, nothing.missing);
    let made = tables(server).await?;
    assert_eq!(made.len(), applied.len() + 1, "{made:?}");
    // With the daemon's own account.
    let daemon = db_of(server, "outboxd");
    assert!(migrate::version(&daemon).await?.is_current());
    assert!(migrate::run(migrator, true).await?.is_empty());
    assert!(migrate::version(&daemon).await?.is_current());
    assert_eq!(server.first::<String>(theirs).await?, before);
    // A table that is called like the default one is somebody's.
    assert_eq!(server.count("SELECT COUNT(*) FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = 'app' AND TABLE_NAME = 'outbox'").await?, 1);
    Ok(())
}

/// What a process leaves that is killed in the middle of a migration: before its statement was
/// carried out, and after.
async fn cut_off(server: &Database, migrator: &Db) -> Result<()> {
    for done in [false, true] {
        if !done {
            server.exec("DROP TABLE outboxd_behind").await?;
        }
        let begun =
            "UPDATE outboxd_migrations SET success = FALSE, execution_time = -1 WHERE version = 11";
        assert_eq!(server.exec(begun).await?, 1);
        let version = migrate::version(migrator).await?;
        assert_eq!(version.dirty, Some(11));
        assert!(!version.is_current());
        assert_eq!(migrate::run(migrator, false).await?, [11]);
        assert!(migrate::version(migrator).await?.is_current());
        assert!(tables(server).await?.contains(&"outboxd_behind".to_owned()));
    }
    Ok(())
}

/// Several that migrate at the same time, as when a deployment starts.
async fn at_once(server: &Database) -> Result<()> {
    for table in tables(server).await? {
        server.exec(format!("DROP TABLE {table}")).await?;
    }
    let dbs: Vec<Db> = (0..4).map(|_| db_of(server, "migrator")).collect();
    let runs = dbs.iter().map(|db| migrate::run(db, false));
    for run in futures_util::future::join_all(runs).await {
        run?;
    }
    assert!(migrate::version(&dbs[0]).await?.is_current());
    let dirty = "SELECT COUNT(*) FROM outboxd_migrations WHERE success = FALSE";
    assert_eq!(server.count(dirty).await?, 0);
    Ok(())
}

/// During an upgrade the old version runs beside the new one.
async fn newer(server: &Database, migrator: &Db) -> Result<()> {
    server
        .exec("INSERT INTO outboxd_migrations (version, description, success, checksum, execution_time) VALUES (9000, 'later', TRUE, '', 1)")
        .await?;
    assert!(migrate::version(migrator).await?.is_current());
    assert!(migrate::run(migrator, false).await?.is_empty());
    // In the middle of it.
    let begun = "UPDATE outboxd_migrations SET success = FALSE WHERE version = 9000";
    server.exec(begun).await?;
    assert!(migrate::version(migrator).await?.is_current());
    let error = migrate::run(migrator, false)
        .await
        .expect_err("not ours to finish");
    assert_eq!(error.disposition, Disposition::Halt);
    assert!(
        chain(&error).contains("migration 9000"),
        "{}",
        chain(&error)
    );
    let there = "SELECT COUNT(*) FROM outboxd_migrations WHERE version = 9000";
    assert_eq!(server.count(there).await?, 1);
    server
        .exec("DELETE FROM outboxd_migrations WHERE version = 9000")
        .await?;
    Ok(())
}

async fn without_the_right(server: &Database) -> Result<()> {
    server
        .exec("DELETE FROM outboxd_migrations WHERE version = 11")
        .await?;
    server.exec("DROP TABLE outboxd_behind").await?;
    let daemon = db_of(server, "outboxd");
    let error = migrate::run(&daemon, false).await.expect_err("no CREATE");
    assert_eq!(error.disposition, Disposition::Halt);
    assert_eq!(migrate::version(&daemon).await?.missing, [11]);
    Ok(())
}
