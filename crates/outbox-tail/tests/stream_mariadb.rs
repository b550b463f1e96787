//! The stream against a real MariaDB: files and offsets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod stream_support;

use anyhow::Result;
use outbox_core::Position;
use outbox_tail::group::Source as _;
use outbox_testkit::{Mariadb, MysqlOptions};
use stream_support::{Lab, bodies, numbers, read};

#[tokio::test]
async fn groups_come_in_order_and_a_file_position_is_continued() -> Result<()> {
    let server = Mariadb::start(MysqlOptions::default()).await?;
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
    let ends: Vec<_> = groups
        .iter()
        .filter(|g| !g.rows.is_empty())
        .map(|g| g.end.clone())
        .collect();
    assert!(matches!(ends[0], Position::File(_)));
    assert_eq!(ends.last(), Some(&lab.now().await?));
    *lab.layouts.stored.lock().unwrap() = groups.iter().find_map(|g| g.layouts.first()?.1.clone());
    let mut source = lab.source();
    source.open(&ends[2]).await?;
    assert_eq!(bodies(&read(&mut source, 3).await?), numbers(3..6));
    Ok(())
}
