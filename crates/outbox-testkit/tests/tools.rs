//! The proxy's faults, and writer, sink and oracle together.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::ErrorKind;
use std::time::Duration;

use anyhow::Result;
use lapin::BasicProperties;
use lapin::options::BasicPublishOptions;
use outbox_testkit::{
    Direction, Mysql, MysqlOptions, Oracle, Proxy, Rabbit, Sink, Writer, WriterOptions, wait,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};

/// An echo server; returns its port.
async fn echo() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = socket.split();
                tokio::io::copy(&mut read, &mut write).await
            });
        }
    });
    Ok(port)
}

async fn talk(socket: &mut TcpStream) -> Result<()> {
    socket.write_all(b"hello").await?;
    let mut answer = [0; 5];
    timeout(Duration::from_secs(10), socket.read_exact(&mut answer)).await??;
    assert_eq!(&answer, b"hello");
    Ok(())
}

#[tokio::test]
async fn a_proxy_passes_delays_and_swallows() -> Result<()> {
    let proxy = Proxy::start(echo().await?).await?;
    let mut socket = TcpStream::connect(("127.0.0.1", proxy.port)).await?;
    talk(&mut socket).await?;
    assert_eq!((proxy.accepted(), proxy.open()), (1, 1));

    proxy.delay(Direction::ToServer, Duration::from_millis(60));
    proxy.delay(Direction::ToClient, Duration::from_millis(60));
    let begin = Instant::now();
    talk(&mut socket).await?;
    assert!(begin.elapsed() >= Duration::from_millis(120));

    proxy.pass();
    proxy.black_hole(Direction::ToClient);
    socket.write_all(b"lost?").await?;
    let mut answer = [0; 5];
    assert!(
        timeout(Duration::from_millis(300), socket.read_exact(&mut answer))
            .await
            .is_err()
    );
    proxy.pass();
    timeout(Duration::from_secs(10), socket.read_exact(&mut answer)).await??;
    assert_eq!(&answer, b"lost?");
    Ok(())
}

#[tokio::test]
async fn a_proxy_cuts_half_closes_and_refuses() -> Result<()> {
    let proxy = Proxy::start(echo().await?).await?;
    let mut socket = TcpStream::connect(("127.0.0.1", proxy.port)).await?;
    talk(&mut socket).await?;
    proxy.cut();
    let error = timeout(Duration::from_secs(10), socket.read(&mut [0; 1]))
        .await?
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    wait::until(
        "the connection is gone",
        Duration::from_secs(10),
        async || proxy.open() == 0,
    )
    .await?;

    let mut socket = TcpStream::connect(("127.0.0.1", proxy.port)).await?;
    talk(&mut socket).await?;
    proxy.refuse();
    wait::until(
        "new connections are refused",
        Duration::from_secs(10),
        async || {
            let error = TcpStream::connect(("127.0.0.1", proxy.port)).await.err();
            error.is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused)
        },
    )
    .await?;
    talk(&mut socket).await?;

    proxy.half_close(Direction::ToClient);
    assert_eq!(
        timeout(Duration::from_secs(10), socket.read(&mut [0; 1])).await??,
        0
    );
    socket.write_all(b"still taken").await?;
    proxy.pass();
    wait::until_ok(
        "connections are taken again",
        Duration::from_secs(10),
        async || talk(&mut TcpStream::connect(("127.0.0.1", proxy.port)).await?).await,
    )
    .await
}

#[tokio::test]
async fn writer_sink_and_oracle_agree_across_restarts_of_both_servers() -> Result<()> {
    let mut mysql = Mysql::start(MysqlOptions::default()).await?;
    mysql.prepare().await?;
    mysql
        .exec(
            "CREATE TABLE outbox (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, aggregate_type VARCHAR(64), \
             aggregate_id VARCHAR(64), event_type VARCHAR(64), payload JSON)",
        )
        .await?;
    let mut rabbit = Rabbit::start().await?;
    rabbit.topology("outbox", "sink", "#").await?;
    let writer = Writer::start(
        &mysql,
        WriterOptions {
            rate: 500.0,
            ..WriterOptions::default()
        },
    )?;
    wait::until("a hundred rows", Duration::from_secs(30), async || {
        mysql
            .count("SELECT COUNT(*) FROM outbox")
            .await
            .is_ok_and(|rows| rows > 100)
    })
    .await?;
    mysql.kill9()?;
    mysql.restart().await?;
    let before = mysql.count("SELECT COUNT(*) FROM outbox").await?;
    wait::until("the writer goes on", Duration::from_secs(30), async || {
        mysql
            .count("SELECT COUNT(*) FROM outbox")
            .await
            .is_ok_and(|rows| rows > before + 50)
    })
    .await?;
    let written = writer.finish().await?;
    assert!(!written.rolled_back.is_empty());
    let rows: Vec<(String, String)> = mysql
        .query_rows("SELECT CAST(id AS CHAR), CAST(payload AS CHAR) FROM outbox ORDER BY id")
        .await?;
    let mut ids = written.ids();
    ids.sort_by_key(|id| id.parse::<u64>().unwrap());
    assert_eq!(
        ids,
        rows.iter().map(|(id, _)| id.clone()).collect::<Vec<_>>()
    );

    let sink = Sink::start(&rabbit.url(), "sink");
    let (first, second) = rows.split_at(rows.len() / 2);
    publish(&rabbit, first).await?;
    sink.wait_for_ids(first.iter().map(|(id, _)| id), Duration::from_secs(30))
        .await?;
    rabbit.kill9()?;
    rabbit.restart().await?;
    publish(&rabbit, second).await?;
    sink.wait_for_ids(written.ids(), Duration::from_secs(30))
        .await?;
    let verdict = Oracle::new([written]).judge(&sink.received(), 0)?;
    assert_eq!(verdict.delivered, rows.len());
    Ok(())
}

async fn publish(rabbit: &Rabbit, rows: &[(String, String)]) -> Result<()> {
    rabbit
        .with_channel(async |channel| {
            for (id, payload) in rows {
                let properties = BasicProperties::default()
                    .with_message_id(id.as_str().into())
                    .with_delivery_mode(2);
                let options = BasicPublishOptions::default();
                channel
                    .basic_publish(
                        "outbox".into(),
                        "OrderPaid".into(),
                        options,
                        payload.as_bytes(),
                        properties,
                    )
                    .await?;
            }
            Ok(())
        })
        .await
}
