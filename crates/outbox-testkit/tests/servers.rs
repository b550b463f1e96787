//! The servers start, answer, survive a kill, and leave nothing behind.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::Duration;

use anyhow::Result;
use outbox_testkit::{Mariadb, Mysql, MysqlOptions, Rabbit};

#[tokio::test]
async fn mysql_keeps_committed_rows_across_a_kill() -> Result<()> {
    let mut mysql = Mysql::start(MysqlOptions::default()).await?;
    mysql.prepare().await?;
    mysql.exec("CREATE TABLE t (id INT PRIMARY KEY)").await?;
    mysql.exec("INSERT INTO t VALUES (1), (2)").await?;
    mysql.kill9()?;
    assert!(mysql.conn().await.is_err());
    mysql.restart().await?;
    assert_eq!(mysql.count("SELECT COUNT(*) FROM t").await?, 2);
    assert_eq!(
        mysql.first::<String>("SELECT @@gtid_mode").await?.unwrap(),
        "ON"
    );
    let data = mysql.data();
    drop(mysql);
    assert!(!data.exists());
    Ok(())
}

#[tokio::test]
async fn a_replica_follows_its_source() -> Result<()> {
    let source = Mysql::start(MysqlOptions::default()).await?;
    let replica = Mysql::start(MysqlOptions::default()).await?;
    source.prepare().await?;
    replica.replica_of(&source).await?;
    source.exec("CREATE TABLE t (id INT PRIMARY KEY)").await?;
    source.exec("INSERT INTO t VALUES (7)").await?;
    replica
        .caught_up_with(&source, Duration::from_secs(30))
        .await?;
    assert_eq!(replica.count("SELECT id FROM t").await?, 7);
    Ok(())
}

#[tokio::test]
async fn mariadb_has_the_same_face() -> Result<()> {
    let mut mariadb = Mariadb::start(MysqlOptions::default()).await?;
    mariadb.prepare().await?;
    mariadb.exec("CREATE TABLE t (id INT PRIMARY KEY)").await?;
    mariadb.stop().await?;
    mariadb.restart().await?;
    assert_eq!(mariadb.count("SELECT COUNT(*) FROM t").await?, 0);
    Ok(())
}

#[tokio::test]
async fn rabbit_keeps_its_topology_across_a_kill() -> Result<()> {
    let mut rabbit = Rabbit::start().await?;
    rabbit.topology("outbox", "sink", "#").await?;
    rabbit.kill9()?;
    assert!(rabbit.connect().await.is_err());
    rabbit.restart().await?;
    assert_eq!(rabbit.depth("sink").await?, 0);
    assert!(
        rabbit
            .ctl(&["list_queues", "name", "type"])
            .await?
            .contains("quorum")
    );
    rabbit.stop().await?;
    Ok(())
}
