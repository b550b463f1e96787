//! What the servers allow: publishing, recording and reading back, each alone and with nothing between.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::{Result, ensure};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, PublisherConfirm};
use mysql_async::prelude::Queryable;
use outbox_testkit::Rabbit;

use crate::cases::Case;
use crate::world::{EVENT, NAME, WINDOW, World};

/// Rows in one statement, as in the program.
const BATCH: u64 = 1000;

/// Rows a second at which a thing was done.
pub fn rate(rows: u32, since: Instant) -> f64 {
    f64::from(rows) / since.elapsed().as_secs_f64()
}

/// Publishes `rows` messages as the program would, and returns messages a second, first call to last confirm.
///
/// # Errors
/// The broker's; a message that was not confirmed.
pub async fn publish(world: &World, case: Case, rows: u32) -> Result<f64> {
    world.queue(case.queue_type()).await?;
    let (connection, channel) = world.channel().await?;
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    let bodies: Vec<String> = (0..rows.min(1000)).map(|n| case.body(n)).collect();
    let mut window: VecDeque<PublisherConfirm> = VecDeque::with_capacity(WINDOW);
    let began = Instant::now();
    for (n, body) in (0..rows).zip(bodies.iter().cycle()) {
        if window.len() == WINDOW
            && let Some(oldest) = window.pop_front()
        {
            confirmed(oldest).await?;
        }
        let properties = properties(case, u64::from(n), &Case::aggregate(n));
        window.push_back(publish_one(&channel, body.as_bytes(), properties).await?);
    }
    for confirm in window {
        confirmed(confirm).await?;
    }
    let speed = rate(rows, began);
    connection.close(200, "done".into()).await?;
    let there = depth(&world.rabbit).await?;
    ensure!(there == rows, "{there} of {rows} messages are in the queue");
    Ok(speed)
}

/// Publishes one message, persistent and mandatory; returns its confirm.
///
/// # Errors
/// The broker's.
pub async fn publish_one(
    channel: &Channel,
    body: &[u8],
    properties: BasicProperties,
) -> Result<PublisherConfirm> {
    let options = BasicPublishOptions {
        mandatory: true,
        immediate: false,
    };
    Ok(channel
        .basic_publish(NAME.into(), EVENT.into(), options, body, properties)
        .await?)
}

/// Waits for a confirm.
///
/// # Errors
/// The message was refused or returned.
pub async fn confirmed(confirm: PublisherConfirm) -> Result<()> {
    let answer = confirm.await?;
    ensure!(
        matches!(answer, Confirmation::Ack(None)),
        "a message was not taken: {answer:?}"
    );
    Ok(())
}

/// The properties that the program gives to the message of row `id`.
pub fn properties(case: Case, id: u64, aggregate: &str) -> BasicProperties {
    let mut headers = FieldTable::default();
    for (name, value) in [
        ("outbox-id", id.to_string()),
        ("outbox-table", "app.outbox".into()),
        ("aggregate-type", "order".into()),
        ("aggregate-id", aggregate.to_owned()),
    ] {
        headers.insert(name.into(), AMQPValue::LongString(value.into()));
    }
    BasicProperties::default()
        .with_content_type(case.content_type().into())
        .with_delivery_mode(2)
        .with_message_id(id.to_string().into())
        .with_type(EVENT.into())
        .with_app_id(NAME.into())
        .with_timestamp(1_700_000_000)
        .with_headers(headers)
}

/// How many messages are in the queue.
///
/// # Errors
/// The broker's.
pub async fn depth(rabbit: &Rabbit) -> Result<u32> {
    rabbit.depth(NAME).await
}

/// What is done to rows in bulk.
#[derive(Debug, Clone, Copy)]
pub enum Bulk {
    /// Marked as sent, MINIMAL or FULL row images.
    Mark {
        /// MINIMAL row images.
        minimal: bool,
    },
    /// Deleted, MINIMAL row images.
    Delete,
    /// Their state read.
    Read,
}

/// Does it to every row of `outbox`, in transactions of 1,000, and returns rows a second.
///
/// # Errors
/// The server's; a row that was not there.
pub async fn bulk(world: &World, what: Bulk) -> Result<f64> {
    let mut conn = world.mysql.conn().await?;
    let ids: Vec<u64> = conn.query("SELECT id FROM outbox ORDER BY id").await?;
    let image = match what {
        Bulk::Mark { minimal: false } => "FULL",
        _ => "MINIMAL",
    };
    conn.query_drop(format!(
        "SET SESSION binlog_row_image = '{image}', transaction_isolation = 'READ-COMMITTED'"
    ))
    .await?;
    let began = Instant::now();
    for ids in ids.chunks(usize::try_from(BATCH)?) {
        let list: Vec<String> = ids.iter().map(u64::to_string).collect();
        let list = list.join(",");
        let done = match what {
            Bulk::Mark { .. } => {
                let sql = format!(
                    "UPDATE outbox SET status = 1, locked_by = NULL, locked_until = NULL, updated_at = NOW(6) \
                     WHERE id IN ({list}) AND status IN (0, 2, 3)"
                );
                conn.query_drop(sql).await?;
                conn.affected_rows()
            }
            Bulk::Delete => {
                let sql =
                    format!("DELETE FROM outbox WHERE id IN ({list}) AND status IN (0, 2, 3)");
                conn.query_drop(sql).await?;
                conn.affected_rows()
            }
            Bulk::Read => {
                let sql = format!(
                    "SELECT id, status, retry_count, COALESCE(next_retry_at > NOW(6), 0), \
                     COALESCE(locked_until > NOW(6), 0) FROM outbox WHERE id IN ({list})"
                );
                let rows: Vec<(u64, i32, u32, i32, i32)> = conn.query(sql).await?;
                u64::try_from(rows.len())?
            }
        };
        ensure!(
            done == u64::try_from(ids.len())?,
            "{done} of {} rows: {what:?}",
            ids.len()
        );
    }
    let speed = rate(u32::try_from(ids.len())?, began);
    conn.disconnect().await?;
    Ok(speed)
}
