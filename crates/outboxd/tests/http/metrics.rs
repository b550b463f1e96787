//! Every metric of the list is true while the program runs: each is brought to a value and read.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use outbox_testkit::{Outboxd, Rabbit, wait};

use crate::world::{SOON, World};

/// Waits until the sum of these series satisfies the condition.
async fn until(outboxd: &Outboxd, series: &str, holds: impl Fn(f64) -> bool) -> Result<()> {
    let mut last = f64::NAN;
    let waited = wait::until(series, SOON, async || {
        last = outboxd.metric(series).await.unwrap_or(f64::NAN);
        holds(last)
    })
    .await;
    waited.with_context(|| format!("{series} is {last}\n{}", outboxd.log()))
}

const CONFIG: &str = "stuck.interval = \"1s\"\nstuck.warn_after = \"1s\"\nstuck.reset_after = \"1h\"\n\
     retry.base = \"1h\"\nretry.cap = \"1h\"\nlease.ttl = \"3s\"";

#[tokio::test]
async fn every_metric_follows_what_happens() -> Result<()> {
    let rabbit = Arc::new(Rabbit::start().await?);
    let mut world = World::start_on(rabbit, CONFIG).await?;
    let o = &world.outboxd;
    let is = |wanted: f64| move |n: f64| (n - wanted).abs() < f64::EPSILON;
    for (series, value) in [
        ("outboxd_leader", 1.0),
        ("outboxd_tail_connected", 1.0),
        ("outboxd_broker_connected", 1.0),
        ("outboxd_broker_blocked", 0.0),
        ("outboxd_build_info", 1.0),
    ] {
        until(o, series, is(value)).await?;
    }
    // By the tail: counters, both histograms, an empty window, no lag.
    for id in 1..=20 {
        world.insert(id, 0, "OrderPaid", "{}").await?;
    }
    until(
        o,
        "outboxd_published_total{table=\"app.outbox\",path=\"tail\"}",
        is(20.0),
    )
    .await?;
    until(o, "outboxd_commit_to_confirm_seconds_count", is(20.0)).await?;
    until(o, "outboxd_flush_seconds_count", |n| n >= 1.0).await?;
    until(o, "outboxd_in_flight_rows", is(0.0)).await?;
    until(o, "outboxd_in_flight_bytes", is(0.0)).await?;
    until(o, "outboxd_tail_lag_seconds", |n| n < 1.0).await?;
    let mean = o.metric("outboxd_commit_to_confirm_seconds_sum").await? / 20.0;
    ensure!(
        (0.0..30.0).contains(&mean),
        "{mean} s from commit to confirm"
    );
    until(o, "outboxd_checkpoint_age_seconds", |n| n > 0.0 && n < 60.0).await?;
    until(o, "outboxd_binlog_retention_left_seconds", |n| n > 80_000.0).await?;

    // Delayed: left to the table; due later, so pending and not old.
    world.mysql.exec("INSERT INTO outbox (id, aggregate_id, event_type, payload, next_retry_at) VALUES (30, 'later', 'OrderPaid', '{}', NOW(6) + INTERVAL 1 HOUR)").await?;
    until(
        o,
        "outboxd_deferred_total{table=\"app.outbox\",reason=\"delayed\"}",
        is(1.0),
    )
    .await?;
    until(
        o,
        "outboxd_backlog_rows{table=\"app.outbox\",status=\"pending\"}",
        is(1.0),
    )
    .await?;
    // Unroutable: a retryable failure, and its aggregate is held.
    world
        .rabbit
        .with_channel(async |channel| {
            let options = lapin::options::QueueDeleteOptions::default();
            channel
                .queue_delete(world.name.as_str().into(), options)
                .await?;
            Ok(())
        })
        .await?;
    world.mysql.exec("INSERT INTO outbox (id, aggregate_id, event_type, payload) VALUES (40, 'held', 'OrderPaid', '{}')").await?;
    until(
        o,
        "outboxd_failures_total{table=\"app.outbox\",class=\"retryable\"}",
        is(1.0),
    )
    .await?;
    until(o, "outboxd_held_aggregates{table=\"app.outbox\"}", is(1.0)).await?;
    // Never publishable: the routing key is over 255 bytes with the template's own words.
    world.rabbit.topology(&world.name, &world.name, "#").await?;
    // Claimed by somebody who is gone, and older than warn_after; and rows that are due and old.
    world.mysql.exec("INSERT INTO outbox (id, aggregate_id, event_type, payload, status, locked_by, locked_until, updated_at) VALUES (50, 'stuck', 'OrderPaid', '{}', 3, 'gone', NOW(6) + INTERVAL 1 HOUR, NOW(6) - INTERVAL 10 MINUTE)").await?;
    until(o, "outboxd_stuck_rows{table=\"app.outbox\"}", is(1.0)).await?;
    until(
        o,
        "outboxd_backlog_rows{table=\"app.outbox\",status=\"processing\"}",
        is(1.0),
    )
    .await?;

    world.order("/api/pause", "").await?;
    until(o, "outboxd_paused", is(1.0)).await?;
    world.mysql.exec("INSERT INTO outbox (id, aggregate_id, event_type, payload, created_at) VALUES (60, 'old', 'OrderPaid', '{}', NOW(6) - INTERVAL 100 SECOND)").await?;
    until(
        o,
        "outboxd_oldest_pending_seconds{table=\"app.outbox\"}",
        |n| n >= 100.0,
    )
    .await?;
    world.order("/api/resume", "").await?;
    until(o, "outboxd_paused", is(0.0)).await?;
    world.status_of(60, 1).await?;

    // By the poller: made due again by an operator.
    world.insert(70, 2, "OrderPaid", "{}").await?;
    until(
        o,
        "outboxd_backlog_rows{table=\"app.outbox\",status=\"failed\"}",
        is(1.0),
    )
    .await?;
    world.order("/api/rows/outbox/70/retry", "").await?;
    until(
        o,
        "outboxd_published_total{table=\"app.outbox\",path=\"poller\"}",
        |n| n >= 1.0,
    )
    .await?;

    // A memory alarm, and the end of it.
    world
        .rabbit
        .ctl(&["set_vm_memory_high_watermark", "0.000001"])
        .await?;
    for id in 80..90 {
        world.insert(id, 0, "OrderPaid", "{}").await?;
    }
    until(o, "outboxd_broker_blocked", is(1.0)).await?;
    ensure!(
        o.metric("outboxd_broker_connected").await? > 0.5,
        "a blocked broker is connected"
    );
    let live = world.read("/api/live").await?;
    ensure!(live["troubles"][0]["code"] == "rabbitmq_blocked", "{live}");
    until(o, "outboxd_in_flight_rows", |n| n >= 1.0).await?;
    until(o, "outboxd_in_flight_bytes", |n| n >= 1.0).await?;
    world
        .rabbit
        .ctl(&["set_vm_memory_high_watermark", "0.6"])
        .await?;
    until(o, "outboxd_broker_blocked", is(0.0)).await?;

    world.mysql.exec(format!("INSERT INTO outboxd_gap (name, reason, found_at) VALUES ('{}', 'purged', UTC_TIMESTAMP(6))", world.name)).await?;
    until(o, "outboxd_binlog_gaps", is(1.0)).await?;

    // Who no longer leads tells nothing of a leader's matters.
    let mut standby = Outboxd::new(world.config.clone())?;
    standby.start().await?;
    standby.wait_ready().await?;
    world.outboxd.freeze()?;
    until(&standby, "outboxd_leader", is(1.0)).await?;
    world.outboxd.thaw()?;
    for series in [
        "outboxd_leader",
        "outboxd_tail_connected",
        "outboxd_broker_connected",
        "outboxd_binlog_gaps",
        "outboxd_held_aggregates{",
        "outboxd_backlog_rows{",
        "outboxd_stuck_rows{",
    ] {
        until(&world.outboxd, series, is(0.0)).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_broker_that_is_away_shows_at_once_and_the_samples_go_on() -> Result<()> {
    let mut rabbit = Rabbit::start().await?;
    rabbit.topology("away", "away", "#").await?;
    let rabbit_url = rabbit.url();
    let world = World::start(&format!(
        "rabbitmq.url = \"{rabbit_url}\"\n[[outbox]]\ntable = \"outbox\"\nexchange = \"away\""
    ))
    .await?;
    rabbit.kill9()?;
    until(&world.outboxd, "outboxd_broker_connected", |n| n < 0.5).await?;
    wait::until(
        "the trouble is named",
        Duration::from_secs(10),
        async || {
            let live = world.read("/api/live").await.unwrap_or_default();
            live["troubles"][0]["code"] == "rabbitmq"
        },
    )
    .await?;
    let first = world.read("/api/live").await?;
    let newest = first["samples"]
        .as_array()
        .and_then(|s| s.last())
        .map_or(0, |s| s["at"].as_u64().unwrap_or(0));
    let further = format!("/api/live?after={newest}");
    wait::until("another sample", SOON, async || {
        let live = world.read(&further).await.unwrap_or_default();
        live["samples"]
            .as_array()
            .is_some_and(|s| s.iter().all(|s| s["at"].as_u64() > Some(newest)) && !s.is_empty())
    })
    .await
}
