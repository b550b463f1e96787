//! What an operator does and relies on: the end, take-over, commands, documents.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Result, ensure};
use outbox_e2e::{SOON, Setup, WINDOW, on_both};
use outbox_testkit::{Outboxd, Writer, WriterOptions, wait};

on_both!(
    sigterm_drains_and_ends_with_zero_and_nothing_comes_twice,
    a_standby_takes_over_when_the_leader_is_killed,
);

async fn sigterm_drains_and_ends_with_zero_and_nothing_comes_twice(setup: Setup) -> Result<()> {
    let mut world = setup.start().await?;
    let writer = Writer::start(&world.mysql, WriterOptions::default())?;
    world.sink.wait_for_count(200, SOON).await?;
    let status = world.outboxd.terminate().await?;
    ensure!(status.code() == Some(0), "{status}: {}", world.log_end());
    world.run().await?;
    let written = writer.finish_after(Duration::from_secs(1)).await?;
    world.judge(written, 0).await?;
    Ok(())
}

async fn a_standby_takes_over_when_the_leader_is_killed(setup: Setup) -> Result<()> {
    let mut world = setup.start().await?;
    let mut standby = Outboxd::new(world.config.clone())?;
    standby.start().await?;
    standby.wait_ready().await?;
    ensure!(standby.metric("outboxd_leader").await? == 0.0);
    let writer = Writer::start(&world.mysql, WriterOptions::default())?;
    world.sink.wait_for_count(200, SOON).await?;
    world.outboxd.kill9()?;
    wait::until("the standby leads", Duration::from_secs(20), async || {
        matches!(standby.metric("outboxd_leader").await, Ok(1.0))
    })
    .await?;
    let came = world.sink.count();
    world.sink.wait_for_count(came + 200, SOON).await?;
    world.judge(writer.finish().await?, WINDOW).await?;
    Ok(())
}

#[tokio::test]
async fn a_failed_row_is_retried_and_an_abandoned_one_is_never_published() -> Result<()> {
    let world = Setup::new()
        .outbox("on_unroutable = \"fail\"\nmax_body = \"4KiB\"")
        .start()
        .await?;
    let insert = |id: u32| {
        format!(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) \
             VALUES ({id}, 'order', 'big{id}', 'OrderPaid', JSON_OBJECT('pad', REPEAT('x', 8000)))"
        )
    };
    for id in 1..=2 {
        world.mysql.exec(insert(id)).await?;
    }
    let failed = "SELECT COUNT(*) FROM outbox WHERE status = 2 AND last_error <> ''";
    wait::until("both rows failed", SOON, async || {
        matches!(world.mysql.count(failed).await, Ok(2))
    })
    .await?;
    let listed = world
        .outboxd
        .ok(&["list", "--status", "failed", "--json"])
        .await?;
    let listed: serde_json::Value = serde_json::from_str(&listed)?;
    ensure!(
        listed.as_array().is_some_and(|rows| rows.len() == 2),
        "{listed}"
    );

    // The cause is mended for both; one is given up all the same.
    world
        .mysql
        .exec("UPDATE outbox SET payload = JSON_OBJECT('small', id)")
        .await?;
    world.outboxd.ok(&["abandon", "2"]).await?;
    let out = world.outboxd.ok(&["retry", "--all-failed"]).await?;
    ensure!(out.contains('1'), "one row was retried: {out}");
    world.sink.wait_for_ids(["1"], SOON).await?;
    let nothing = world.outboxd.cli(&["retry", "2"]).await?;
    ensure!(nothing.code == Some(1), "{nothing:?}");
    wait::until("row 1 is sent", SOON, async || {
        matches!(
            world
                .mysql
                .count("SELECT COUNT(*) FROM outbox WHERE (id, status) IN ((1, 1), (2, 4))")
                .await,
            Ok(2)
        )
    })
    .await?;
    // A later row of another aggregate shows that the poller has been past the abandoned one.
    world.mysql.exec("INSERT INTO outbox (id, aggregate_id, event_type, payload) VALUES (3, 'c', 'OrderPaid', '{}')").await?;
    world.outboxd.ok(&["sweep"]).await?;
    world.sink.wait_for_ids(["3"], SOON).await?;
    ensure!(world.sink.ids() == ["1", "3"], "{:?}", world.sink.ids());
    Ok(())
}

/// README and everything under docs, as one text.
fn documents() -> Result<String> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut text = std::fs::read_to_string(root.join("README.md"))?;
    let mut folders = vec![root.join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "md") {
                text.push_str(&std::fs::read_to_string(path)?);
            }
        }
    }
    Ok(text)
}

/// Every place in `text` that begins with `start`, as far as `part` says.
fn mentions(text: &str, start: &str, part: fn(char) -> bool) -> BTreeSet<String> {
    text.match_indices(start)
        .map(|(at, _)| {
            let rest = &text[at + start.len()..];
            let end = rest.find(|c| !part(c)).unwrap_or(rest.len());
            rest[..end].to_owned()
        })
        .filter(|rest| !rest.is_empty())
        .collect()
}

#[tokio::test]
async fn every_metric_table_and_command_that_the_documents_name_is_there() -> Result<()> {
    let world = Setup::new().start().await?;
    let documents = documents()?;
    // A metric that is set every few seconds may not have been set yet.
    let names = mentions(&documents, "outboxd_", |c| {
        c.is_ascii_lowercase() || c == '_'
    });
    ensure!(names.len() > 10, "{names:?}");
    let mut missing = Vec::new();
    let all_there = wait::until("every name is there", Duration::from_secs(25), async || {
        let metrics = world.outboxd.get("/metrics").await.map(|page| page.body);
        let tables: Vec<String> = world
            .mysql
            .query_rows(
                "SELECT table_name FROM information_schema.tables WHERE table_schema = 'app'",
            )
            .await
            .unwrap_or_default();
        let metrics = metrics.unwrap_or_default();
        missing = names
            .iter()
            .map(|name| format!("outboxd_{name}"))
            .filter(|name| !metrics.contains(name.as_str()) && !tables.contains(name))
            .collect();
        missing.is_empty()
    })
    .await;
    ensure!(all_there.is_ok(), "neither metrics nor tables: {missing:?}");

    let help = world.outboxd.ok(&["--help"]).await?;
    let inline = mentions(&documents, "`outboxd ", |c| c != '`' && c != '\n');
    // What stands between fences is code; elsewhere a line may begin with the name by chance.
    let code: String = documents.split("```").skip(1).step_by(2).collect();
    let lines = mentions(&code, "\noutboxd ", |c| c != '#' && c != '\n');
    let commands: BTreeSet<String> = inline.into_iter().chain(lines).collect();
    ensure!(commands.len() > 10, "{commands:?}");
    for command in commands {
        let mut words = command.split_whitespace();
        let name = words.next().unwrap_or_default();
        if name.starts_with("--") {
            ensure!(help.contains(name), "{command}");
            continue;
        }
        ensure!(help.contains(&format!("\n  {name}")), "outboxd {command}");
        let mut path = vec![name];
        if name == "position" {
            path.extend(
                words
                    .next()
                    .into_iter()
                    .flat_map(|word| word.split('|').take(1)),
            );
        }
        path.push("--help");
        let help = world.outboxd.ok(&path).await?;
        for flag in words.filter(|word| word.starts_with("--")) {
            ensure!(
                help.contains(flag),
                "outboxd {command}: no {flag} in\n{help}"
            );
        }
    }
    Ok(())
}
