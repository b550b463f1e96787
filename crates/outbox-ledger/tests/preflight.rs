//! Checks against real servers: what is wrong is named.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod claims_world;

use std::sync::Arc;

use anyhow::Result;
use claims_world::*;
use outbox_core::spec::{TableSpec, Tracking};
use outbox_core::status::{StatusValue, StatusValues};
use outbox_ledger::connect::Db;
use outbox_ledger::preflight::{Check, Level, check};
use outbox_testkit::{Mariadb, Mysql, MysqlOptions};

async fn checks(db: &Db, specs: &[TableSpec]) -> Result<Vec<Check>> {
    let specs: Vec<Arc<TableSpec>> = specs.iter().cloned().map(Arc::new).collect();
    Ok(check(db, NAME, &specs).await?)
}

fn at(checks: &[Check], level: Level) -> Vec<&str> {
    let found = checks.iter().filter(|c| c.level == level);
    found.map(|c| c.name.as_str()).collect()
}

/// The one check of this name that did not go well.
fn bad<'a>(checks: &'a [Check], name: &str) -> &'a Check {
    let mut found = checks
        .iter()
        .filter(|c| c.name == name && c.level != Level::Ok);
    let check = found
        .next()
        .unwrap_or_else(|| panic!("no {name} in {checks:#?}"));
    assert!(check.fix.is_some(), "{check:?} has no fix");
    check
}

#[tokio::test]
async fn a_server_that_is_set_up_as_documented_passes() -> Result<()> {
    let options = MysqlOptions::default().option("--binlog-row-metadata=FULL");
    let world = World::on(Mysql::start(options).await?).await?;
    let found = checks(&world.db, &[spec("outbox")]).await?;
    assert!(at(&found, Level::Fail).is_empty(), "{found:#?}");
    // The optional grant is the only thing to say.
    assert_eq!(
        at(&found, Level::Warn),
        ["SESSION_VARIABLES_ADMIN"],
        "{found:#?}"
    );
    world
        .server
        .exec("GRANT SESSION_VARIABLES_ADMIN ON *.* TO 'outboxd'@'%'")
        .await?;
    let db = db_of(&world.server, "outboxd");
    let found = checks(&db, &[spec("outbox")]).await?;
    assert_eq!(at(&found, Level::Warn), [""; 0], "{found:#?}");
    Ok(())
}

#[tokio::test]
async fn mariadb_as_installed_passes() -> Result<()> {
    let world = World::mariadb().await?;
    let found = checks(&world.db, &[spec("outbox")]).await?;
    assert!(at(&found, Level::Fail).is_empty(), "{found:#?}");
    bad(&found, "binlog_row_metadata");
    bad(&found, "gtid_strict_mode");
    world
        .server
        .exec("REVOKE REPLICATION SLAVE ON *.* FROM 'outboxd'@'%'")
        .await?;
    let db = db_of(&world.server, "outboxd");
    let found = checks(&db, &[spec("outbox")]).await?;
    assert_eq!(at(&found, Level::Fail), ["REPLICATION SLAVE"], "{found:#?}");
    world.server.exec("CREATE ROLE tailing; ").await?;
    world
        .server
        .exec("GRANT REPLICATION SLAVE ON *.* TO tailing")
        .await?;
    world.server.exec("GRANT tailing TO 'outboxd'@'%'").await?;
    world
        .server
        .exec("SET DEFAULT ROLE tailing FOR 'outboxd'@'%'")
        .await?;
    let db = db_of(&world.server, "outboxd");
    let found = checks(&db, &[spec("outbox")]).await?;
    assert!(at(&found, Level::Fail).is_empty(), "{found:#?}");
    Ok(())
}

#[tokio::test]
async fn mariadb_as_it_should_be_has_nothing_to_say() -> Result<()> {
    let world = World::mariadb().await?;
    for sql in [
        "SET GLOBAL binlog_row_metadata = 'FULL'",
        "SET GLOBAL gtid_strict_mode = ON",
        "GRANT BINLOG ADMIN ON *.* TO 'outboxd'@'%'",
    ] {
        world.server.exec(sql).await?;
    }
    let db = db_of(&world.server, "outboxd");
    let found = checks(&db, &[spec("outbox")]).await?;
    assert_eq!(at(&found, Level::Fail), [""; 0], "{found:#?}");
    assert_eq!(at(&found, Level::Warn), [""; 0], "{found:#?}");
    Ok(())
}

#[tokio::test]
async fn a_server_that_is_set_up_wrongly_is_told_so() -> Result<()> {
    let options = [
        "--gtid-mode=OFF",
        "--enforce-gtid-consistency=OFF",
        "--binlog-format=STATEMENT",
        "--binlog-row-image=MINIMAL",
        "--binlog-expire-logs-seconds=3600",
        "--binlog-ignore-db=app",
    ]
    .into_iter()
    .fold(MysqlOptions::without_gtid(), MysqlOptions::option);
    let server = Mysql::start(options).await?;
    server.prepare().await?;
    server
        .exec("REVOKE REPLICATION SLAVE, REPLICATION CLIENT ON *.* FROM 'outboxd'@'%'")
        .await?;
    let db = db_of(&server, "outboxd");
    let found = checks(&db, &[spec("outbox")]).await?;
    let failed = at(&found, Level::Fail);
    assert_eq!(
        failed,
        [
            "binlog_format",
            "binlog_row_image",
            "REPLICATION CLIENT",
            "REPLICATION SLAVE",
            "outboxd tables",
            "app.outbox: table"
        ],
        "{found:#?}"
    );
    for warned in [
        "gtid_mode",
        "binlog_row_metadata",
        "binlog_expire_logs_seconds",
    ] {
        assert_eq!(bad(&found, warned).level, Level::Warn);
    }
    // With the right to look, the filter is seen too; rights by a role count.
    server.exec("CREATE ROLE tailing").await?;
    server
        .exec("GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO tailing")
        .await?;
    server.exec("GRANT tailing TO 'outboxd'@'%'").await?;
    server
        .exec("SET DEFAULT ROLE tailing TO 'outboxd'@'%'")
        .await?;
    server.exec("SET GLOBAL super_read_only = ON").await?;
    let db = db_of(&server, "outboxd");
    let found = checks(&db, &[spec("outbox")]).await?;
    bad(&found, "binlog filter");
    bad(&found, "read_only");
    assert!(
        !at(&found, Level::Fail).contains(&"REPLICATION SLAVE"),
        "{found:#?}"
    );
    Ok(())
}

#[tokio::test]
async fn a_replica_must_log_what_it_replicates() -> Result<()> {
    let source = Mysql::start(MysqlOptions::default()).await?;
    let options = MysqlOptions::default().option("--log-replica-updates=OFF");
    let world = World::on(Mysql::start(options).await?).await?;
    world.server.replica_of(&source).await?;
    let found = checks(&world.db, &[spec("outbox")]).await?;
    assert_eq!(bad(&found, "log_replica_updates").level, Level::Fail);
    Ok(())
}

#[tokio::test]
async fn what_is_wrong_with_a_table_is_named() -> Result<()> {
    let world = World::mysql().await?;
    let server = &world.server;
    server.exec("DROP TABLE outbox").await?;
    server
        .exec(
            "CREATE TABLE outbox (id BIGINT PRIMARY KEY, aggregate_id VARCHAR(64), \
             event_type VARCHAR(64), payload JSON, status ENUM('NEW', 'SENT') NOT NULL, \
             retry_count VARCHAR(9) NOT NULL, next_retry_at DATETIME NOT NULL, \
             locked_by VARCHAR(16), locked_until BIGINT, created_at DATETIME, \
             note VARCHAR(9) CHARACTER SET swe7, CONSTRAINT few CHECK (retry_count < 3)) ENGINE = MyISAM",
        )
        .await?;
    server
        .exec("CREATE TRIGGER t BEFORE UPDATE ON outbox FOR EACH ROW SET @x = 1")
        .await?;
    server
        .exec("GRANT TRIGGER ON app.* TO 'outboxd'@'%'")
        .await?;
    server.exec("INSERT INTO outbox VALUES (1, 'a', 'e', '{}', 'NEW', '0', NOW(), NULL, NULL, NOW() + INTERVAL 8 HOUR, NULL)").await?;
    let mut odd = spec("outbox");
    odd.columns.event_type = "note".into();
    let words = ["PENDING", "SENT", "FAILED", "PROCESSING", "ABANDONED"];
    odd.status_values = StatusValues::new(words.map(|w| StatusValue::Text(w.into()))).unwrap();
    let db = db_of(server, "outboxd");
    let found = checks(&db, &[odd.clone()]).await?;
    for name in [
        "engine",
        "status",
        "retry_count",
        "next_retry_at",
        "locked_by",
        "locked_until",
        "event_type",
    ] {
        assert_eq!(
            bad(&found, &format!("app.outbox: {name}")).level,
            Level::Fail,
            "{name}"
        );
    }
    for name in [
        "last_error",
        "updated_at",
        "trigger",
        "constraint",
        "index",
        "time zone",
    ] {
        assert_eq!(
            bad(&found, &format!("app.outbox: {name}")).level,
            Level::Warn,
            "{name}"
        );
    }
    let status = &bad(&found, "app.outbox: status").what;
    assert!(
        status.contains("pending = \"PENDING\"") && !status.contains("sent ="),
        "{status}"
    );
    // The index that is proposed is taken, and then there is nothing left to propose.
    for _ in 0..2 {
        for check in checks(&db, &[odd.clone()]).await? {
            if check.name == "app.outbox: index" && check.level == Level::Warn {
                server
                    .exec(
                        check
                            .fix
                            .unwrap()
                            .replace(", LOCK = NONE", "")
                            .replace("ALGORITHM = INPLACE", "ALGORITHM = COPY"),
                    )
                    .await?;
            }
        }
    }
    let found = checks(&db, &[odd.clone()]).await?;
    assert!(
        !at(&found, Level::Warn).contains(&"app.outbox: index"),
        "{found:#?}"
    );
    let unknown = bad(&found, "app.outbox: status values");
    assert!(unknown.what.contains("NEW"), "{unknown:?}");
    // No key, no column, no table.
    server.exec("ALTER TABLE outbox DROP PRIMARY KEY").await?;
    bad(&checks(&db, &[odd.clone()]).await?, "app.outbox: columns");
    odd.columns.payload = "nothing".into();
    let found = checks(&db, &[odd, spec("nowhere")]).await?;
    assert!(bad(&found, "app.outbox: columns").what.contains("nothing"));
    bad(&found, "app.nowhere: table");
    bad(&found, "shared exchange");
    Ok(())
}

#[tokio::test]
async fn rights_are_those_that_work() -> Result<()> {
    let world = World::mysql().await?;
    let server = &world.server;
    server
        .exec("CREATE USER 'few'@'%' IDENTIFIED BY 'secret'")
        .await?;
    server
        .exec("GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO 'few'@'%'")
        .await?;
    server.exec("GRANT SELECT ON app.* TO 'few'@'%'").await?;
    let found = checks(&db_of(server, "few"), &[spec("outbox")]).await?;
    assert_eq!(
        at(&found, Level::Fail),
        ["outboxd tables", "app.outbox: rights"],
        "{found:#?}"
    );
    assert!(bad(&found, "app.outbox: rights").what.contains("UPDATE"));
    // The state columns alone are enough.
    server.exec("GRANT UPDATE (status, retry_count, next_retry_at, locked_by, locked_until, last_error, updated_at) ON app.outbox TO 'few'@'%'").await?;
    let found = checks(&db_of(server, "few"), &[spec("outbox")]).await?;
    assert_eq!(
        bad(&found, "app.outbox: rights").level,
        Level::Warn,
        "no purge: {found:#?}"
    );
    let rows = server.count("SELECT COUNT(*) FROM outboxd_lease").await?;
    assert_eq!(rows, 1, "trying rights wrote nothing");
    Ok(())
}

#[tokio::test]
async fn the_tables_of_the_seed_documents_pass_with_what_they_lack_said() -> Result<()> {
    for server in [
        Mysql::start(MysqlOptions::default()).await?,
        Mariadb::start(MysqlOptions::default()).await?,
    ] {
        let world = World::on(server).await?;
        world.server.exec("DROP TABLE outbox").await?;
        world.server.exec(SEED_TWO).await?;
        world.server.exec(SEED_ONE).await?;
        let found = checks(&world.db, &[spec("outbox"), seed_one()]).await?;
        assert!(at(&found, Level::Fail).is_empty(), "{found:#?}");
        for name in ["next_retry_at", "locked_by", "last_error", "index"] {
            bad(&found, &format!("app.outbox: {name}"));
        }
        for name in ["last_error", "updated_at", "index"] {
            bad(&found, &format!("app.ss_bill_outbox: {name}"));
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_table_without_status_columns_needs_none() -> Result<()> {
    let world = World::mysql().await?;
    world
        .server
        .exec("CREATE TABLE events (id BINARY(16) PRIMARY KEY, aggregatetype VARCHAR(255) NOT NULL, aggregateid VARCHAR(255) NOT NULL, type VARCHAR(255) NOT NULL, payload JSON)")
        .await?;
    let mut events = spec("events");
    events.tracking = Tracking::None;
    events.columns.aggregate_type = Some("aggregatetype".into());
    events.columns.aggregate_id = "aggregateid".into();
    events.columns.event_type = "type".into();
    events.columns.created_at = None;
    let found = checks(&world.db, &[events]).await?;
    let about: Vec<_> = found
        .iter()
        .filter(|c| c.name.starts_with("app.events") && c.level != Level::Ok)
        .collect();
    assert!(about.is_empty(), "{about:#?}");
    Ok(())
}
