//! A consumer that notes all that comes, across restarts of the broker.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{Result, bail};
use futures_util::StreamExt;
use lapin::BasicProperties;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::{AMQPValue, FieldTable};
use tokio::task::JoinHandle;

use crate::{rabbit, wait};

/// A message as it came.
#[derive(Debug, Clone)]
pub struct Received {
    /// `message_id`, or "".
    pub id: String,
    /// All properties.
    pub properties: BasicProperties,
    /// The exchange it came through.
    pub exchange: String,
    /// The routing key.
    pub routing_key: String,
    /// The body.
    pub body: Vec<u8>,
    /// The broker delivers it again: not a second publish.
    pub redelivered: bool,
    /// When it came.
    pub at: SystemTime,
}

impl Received {
    fn new(delivery: &mut Delivery) -> Self {
        Self {
            id: delivery
                .properties
                .message_id()
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
            properties: delivery.properties.clone(),
            exchange: delivery.exchange.to_string(),
            routing_key: delivery.routing_key.to_string(),
            body: std::mem::take(&mut delivery.data),
            redelivered: delivery.redelivered,
            at: SystemTime::now(),
        }
    }

    /// A header's value.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&AMQPValue> {
        self.properties.headers().as_ref()?.inner().get(name)
    }

    /// A header's value where it is a string.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<String> {
        match self.header(name)? {
            AMQPValue::LongString(value) => Some(value.to_string()),
            AMQPValue::ShortString(value) => Some(value.to_string()),
            _ => None,
        }
    }
}

/// Consumes a queue until dropped.
#[derive(Debug)]
pub struct Sink {
    got: Arc<Mutex<Vec<Received>>>,
    task: JoinHandle<()>,
}

impl Sink {
    /// Consumes `queue`, which has to exist (or to come), from the broker at `url`.
    #[must_use]
    pub fn start(url: &str, queue: &str) -> Self {
        let got = Arc::new(Mutex::new(Vec::new()));
        let (url, queue, into) = (url.to_owned(), queue.to_owned(), Arc::clone(&got));
        let task = tokio::spawn(async move {
            loop {
                if let Err(error) = consume(&url, &queue, &into).await {
                    tracing::debug!(%error, "the sink lost its broker");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        Self { got, task }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Received>> {
        self.got.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that has come, in order.
    #[must_use]
    pub fn received(&self) -> Vec<Received> {
        self.lock().clone()
    }

    /// The ids of all that has come, in order, copies included.
    #[must_use]
    pub fn ids(&self) -> Vec<String> {
        self.lock()
            .iter()
            .map(|message| message.id.clone())
            .collect()
    }

    /// How many messages have come.
    #[must_use]
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// Waits until each of these ids has come.
    ///
    /// # Errors
    /// How many are missing after `timeout`, and some of them.
    pub async fn wait_for_ids<I, S>(&self, ids: I, timeout: Duration) -> Result<()>
    where
        I: IntoIterator<Item = S>,
        S: Into<String>,
    {
        let mut missing: HashSet<String> = ids.into_iter().map(Into::into).collect();
        let mut seen = 0;
        let waited = wait::until("every message is there", timeout, async || {
            let got = self.lock();
            for message in &got[seen..] {
                missing.remove(&message.id);
            }
            seen = got.len();
            missing.is_empty()
        })
        .await;
        if waited.is_err() {
            let some: Vec<_> = missing.iter().take(5).collect();
            bail!(
                "{} messages did not come within {timeout:?}, such as {some:?}; {seen} came",
                missing.len()
            );
        }
        Ok(())
    }

    /// Waits until this many messages have come, copies included.
    ///
    /// # Errors
    /// How many came within `timeout`.
    pub async fn wait_for_count(&self, count: usize, timeout: Duration) -> Result<()> {
        let waited = wait::until("enough messages", timeout, async || self.count() >= count).await;
        if waited.is_err() {
            bail!(
                "{} messages of {count} came within {timeout:?}",
                self.count()
            );
        }
        Ok(())
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn consume(url: &str, queue: &str, into: &Mutex<Vec<Received>>) -> Result<()> {
    let connection = rabbit::connect(url).await?;
    let channel = connection.create_channel().await?;
    channel.basic_qos(1000, BasicQosOptions::default()).await?;
    let mut messages = channel
        .basic_consume(
            queue.into(),
            "".into(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await?;
    while let Some(message) = messages.next().await {
        let mut message = message?;
        let received = Received::new(&mut message);
        into.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(received);
        message.ack(BasicAckOptions::default()).await?;
    }
    Ok(())
}
