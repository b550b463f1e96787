//! What a transaction on other tables costs. Alone in its process, whose memory is measured.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod stream_support;

use anyhow::{Context as _, Result};
use outbox_testkit::{Mysql, MysqlOptions};
use stream_support::{Lab, bodies, numbers, read};

/// Highest resident memory of this process so far, in kB.
fn peak() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:"))
        .context("VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

#[tokio::test]
async fn a_large_transaction_on_other_tables_costs_no_memory() -> Result<()> {
    let server = Mysql::start(MysqlOptions::default()).await?;
    let lab = Lab::new(&server, "t").await?;
    let mut source = lab.open().await?;
    lab.insert(0..1).await?;
    read(&mut source, 1).await?;
    let before = peak()?;
    // 150 MB in one group, one outbox row at its end.
    lab.run(&[
        "SET SESSION cte_max_recursion_depth = 1000000",
        "BEGIN",
        "INSERT INTO noise (d) WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL \
         SELECT n + 1 FROM s WHERE n < 150000) SELECT REPEAT('x', 1000) FROM s",
        "INSERT INTO outbox (payload) VALUES ('{\"n\": 1}')",
        "COMMIT",
    ])
    .await?;
    assert_eq!(bodies(&read(&mut source, 1).await?), numbers(1..2));
    let grown = peak()? - before;
    assert!(grown < 20_000, "grown by {grown} kB");
    Ok(())
}
