//! The runner drives the real program from migration to exit.

use std::time::Duration;

use anyhow::Result;
use outbox_testkit::{
    Mysql, MysqlOptions, Oracle, Outboxd, OutboxdConfig, Rabbit, Sink, Writer, WriterOptions, wait,
};

#[tokio::test]
async fn the_program_delivers_what_a_writer_commits_and_ends_with_zero() -> Result<()> {
    let mysql = Mysql::start(MysqlOptions::default()).await?;
    mysql.prepare().await?;
    let rabbit = Rabbit::start().await?;
    rabbit.topology("outbox", "sink", "#").await?;
    let mut outboxd = Outboxd::new(OutboxdConfig::new(&mysql.url("outboxd"), &rabbit.url())?)?;
    outboxd.migrate(&mysql, &["--with-outbox"]).await?;
    outboxd.start().await?;
    outboxd.wait_ready().await?;

    let sink = Sink::start(&rabbit.url(), "sink");
    let writer = Writer::start(&mysql, WriterOptions::default())?;
    sink.wait_for_count(300, Duration::from_secs(60)).await?;
    let written = writer.finish().await?;
    sink.wait_for_ids(written.ids(), Duration::from_secs(60))
        .await?;
    let verdict = Oracle::new([written]).judge(&sink.received(), 0)?;
    wait::until("every row is marked", Duration::from_secs(20), async || {
        matches!(
            mysql
                .count("SELECT COUNT(*) FROM outbox WHERE status <> 1")
                .await,
            Ok(0)
        )
    })
    .await?;
    let delivered = u32::try_from(verdict.delivered)?;
    assert!(outboxd.metric("outboxd_published_total{").await? >= f64::from(delivered));
    assert_eq!(outboxd.terminate().await?.code(), Some(0));
    Ok(())
}
