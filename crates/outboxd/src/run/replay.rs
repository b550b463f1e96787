//! `replay`: publishes sent rows again, with the same `message_id` and a header that says so.
//! Changes no row; a row that cannot be published is an error, not a status.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use outbox_core::TableIdx;
use outbox_core::message::HeaderValue;
use outbox_core::ports::{PublishOutcome, Publisher as _};
use outbox_ledger::admin::{Admin, ReplayRange};
use outbox_tail::rabbit::RabbitPublisher;
use tokio_util::sync::CancellationToken;

use super::servers;
use crate::config::Config;

/// The header that marks a copy made on purpose.
const HEADER: &str = "outboxd-replay";
/// Rows of one page; each page is confirmed before the next is read.
const PAGE: usize = 500;
/// How long the broker may be away.
const PATIENCE: Duration = Duration::from_secs(30);

/// Publishes the range; returns how many rows were confirmed.
pub async fn run(
    config: &Config,
    admin: &Admin,
    table: TableIdx,
    range: &ReplayRange,
    mut progress: impl FnMut(u64),
) -> anyhow::Result<u64> {
    let (publisher, driver) = RabbitPublisher::new(servers::broker(config, "replay"));
    let stop = CancellationToken::new();
    let driver = tokio::spawn(driver.run(stop.clone()));
    let done = pages(config, admin, table, range, &publisher, &mut progress).await;
    stop.cancel();
    driver.await?;
    done
}

async fn pages(
    config: &Config,
    admin: &Admin,
    table: TableIdx,
    range: &ReplayRange,
    publisher: &RabbitPublisher,
    progress: &mut impl FnMut(u64),
) -> anyhow::Result<u64> {
    let (mut after, mut published, mut ticket) = (None, 0, 0);
    loop {
        let page = admin
            .replay_page(table, range, after.as_ref(), PAGE)
            .await?;
        let mut waiting = HashMap::new();
        let mut messages = Vec::new();
        for row in page.rows {
            let mut message = match row.message {
                Ok(message) => message,
                Err(failure) => bail!(
                    "row {}: {failure}; {published} rows were published again",
                    row.key.id
                ),
            };
            Arc::make_mut(&mut message)
                .headers
                .push((HEADER.to_owned(), HeaderValue::Bool(true)));
            ticket += 1;
            waiting.insert(ticket, row.key.id.clone());
            messages.push((ticket, message));
        }
        let begun = tokio::time::Instant::now();
        if !messages.is_empty() {
            let Ok(generation) = tokio::time::timeout(PATIENCE, publisher.ready()).await else {
                bail!(
                    "RabbitMQ is {}; {published} rows were published again",
                    publisher.state()
                );
            };
            publisher.submit(generation, messages);
        }
        while !waiting.is_empty() {
            for (ticket, outcome) in publisher.outcomes().await {
                let Some(id) = waiting.remove(&ticket) else {
                    continue;
                };
                match outcome {
                    PublishOutcome::Confirmed => published += 1,
                    other => bail!("row {id}: {other:?}; {published} rows were published again"),
                }
            }
            progress(published);
        }
        after = page.next;
        if after.is_none() {
            return Ok(published);
        }
        if let Some(rate) = config.poller.sweep_rate {
            let page = Duration::from_secs_f64(f64::from(u32::try_from(PAGE)?) / f64::from(rate));
            tokio::time::sleep(page.saturating_sub(begun.elapsed())).await;
        }
    }
}
