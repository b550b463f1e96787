//! Several tables, one of which cannot be used.

use anyhow::{Result, ensure};
use outbox_e2e::{SOON, Setup};
use outbox_testkit::wait;

#[tokio::test]
async fn a_table_that_is_gone_stops_none_but_itself_and_is_served_again_once_it_is_back()
-> Result<()> {
    let second = "[[outbox]]\ntable = \"outbox2\"\nexchange = \"\"\nrouting_key = \"nowhere\"";
    let create = "CREATE TABLE outbox2 LIKE outbox";
    let mut world = Setup::new().outbox(second).build().await?;
    world.mysql.exec(create).await?;
    world.run().await?;
    world.insert(10).await?;
    world.all_sent().await?;
    world.mysql.exec("DROP TABLE outbox2").await?;
    wait::until_ok("it leads without the table", SOON, async || {
        let status = world.outboxd.status().await?;
        let broken = status["broken"][0]["table"].as_str().unwrap_or_default();
        ensure!(broken.ends_with(".outbox2"), "{status}");
        ensure!(status["leader"].is_string(), "{status}");
        let ready = world.outboxd.get("/readyz").await?;
        ensure!(ready.status == 503, "{ready:?}");
        ensure!(ready.body.contains("outbox2"), "{ready:?}");
        Ok(())
    })
    .await?;
    world.insert(10).await?;
    world.judge_table(0).await?;
    world.outboxd.ok(&["list", "--table", "outbox"]).await?;

    world.mysql.exec(create).await?;
    world.outboxd.wait_ready().await?;
    let insert = "INSERT INTO outbox2 (aggregate_type, aggregate_id, event_type, payload) \
                  VALUES ('order', '1', 'OrderPaid', '{}')";
    world.mysql.exec(insert).await?;
    // The default exchange knows no queue of that name: the row is seen by its first refusal.
    wait::until_ok("the row of the second table is tried", SOON, async || {
        let tried = "SELECT COUNT(*) FROM outbox2 WHERE retry_count > 0";
        ensure!(world.mysql.count(tried).await? == 1, "not yet");
        Ok(())
    })
    .await
}
