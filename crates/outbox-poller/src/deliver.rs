//! Delivering one batch of claimed rows: published in order, each answer awaited, recorded under
//! the claim's token, and what was not published given back uncharged.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use outbox_core::message::Message;
use outbox_core::ports::{
    ClaimToken, Generation, Observer, PollStore, PortResult, PublishOutcome, Publisher, RowOutcome,
    Ticket, Verdict,
};
use outbox_core::spec::{Ordering as Order, TableSpec};
use outbox_core::{Aggregate, OutboxRow, RowKey};
use tokio_util::sync::CancellationToken;

use crate::record::{outcome, record, verdict};

/// How long a batch waits for a broker that is away before its claims are given back.
const BROKER_PATIENCE: Duration = Duration::from_secs(2);

/// The publishing side, used by one batch or sweep at a time.
pub(crate) struct Outlet {
    pub(crate) publisher: Arc<dyn Publisher>,
    pub(crate) store: Arc<dyn PollStore>,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) max_rows: usize,
    pub(crate) max_bytes: usize,
    next: AtomicU64,
}

/// What became of a batch.
#[derive(Debug, Default)]
pub(crate) struct Delivered {
    /// Rows that were recorded, sent or failed.
    pub(crate) settled: usize,
}

impl Outlet {
    pub(crate) fn new(
        publisher: Arc<dyn Publisher>,
        store: Arc<dyn PollStore>,
        observer: Arc<dyn Observer>,
        max_rows: usize,
        max_bytes: usize,
    ) -> Self {
        Self {
            publisher,
            store,
            observer,
            max_rows,
            max_bytes,
            next: AtomicU64::new(1),
        }
    }

    pub(crate) fn ticket(&self) -> Ticket {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Delivers claimed rows, in their order.
    pub(crate) async fn deliver(
        &self,
        spec: &TableSpec,
        token: &ClaimToken,
        rows: Vec<OutboxRow>,
        stop: &CancellationToken,
    ) -> PortResult<Delivered> {
        let ready = tokio::time::timeout(BROKER_PATIENCE, self.publisher.ready()).await;
        let mut batch = Batch::new(rows, spec.ordering);
        if let Ok(generation) = ready {
            self.publish(spec, generation, &mut batch).await;
        }
        let recorded = record(
            &self.store,
            &self.observer,
            Some(token),
            &batch.outcomes,
            stop,
        )
        .await?;
        let rest: Vec<RowKey> = batch.rest().collect();
        if !rest.is_empty() {
            self.store.release(token, &rest).await?;
        }
        Ok(Delivered {
            settled: recorded.len(),
        })
    }

    async fn publish(&self, spec: &TableSpec, generation: Generation, batch: &mut Batch) {
        loop {
            let mut messages = Vec::new();
            while batch.in_flight.len() < self.max_rows
                && (batch.bytes < self.max_bytes || batch.in_flight.is_empty())
                && let Some((row, message)) = batch.next()
            {
                let ticket = self.ticket();
                batch.bytes += message.weight();
                batch.in_flight.insert(ticket, row);
                messages.push((ticket, message));
            }
            if !messages.is_empty() {
                self.publisher.submit(generation, messages);
            }
            if batch.in_flight.is_empty() {
                return;
            }
            for (ticket, answer) in self.publisher.outcomes().await {
                batch.answer(spec, ticket, answer);
            }
        }
    }
}

/// Rows of a batch on their way.
struct Batch {
    waiting: VecDeque<OutboxRow>,
    in_flight: HashMap<Ticket, OutboxRow>,
    bytes: usize,
    outcomes: Vec<RowOutcome>,
    unconfirmed: Vec<RowKey>,
    /// Aggregates of which a row was refused: what comes after is given back.
    refused: HashSet<Aggregate>,
    busy: HashSet<Aggregate>,
    order: Order,
    /// A loss of the channel ends the batch: what is left is given back.
    over: bool,
}

impl Batch {
    fn new(rows: Vec<OutboxRow>, order: Order) -> Self {
        Self {
            waiting: rows.into(),
            in_flight: HashMap::new(),
            bytes: 0,
            outcomes: Vec::new(),
            unconfirmed: Vec::new(),
            refused: HashSet::new(),
            busy: HashSet::new(),
            order,
            over: false,
        }
    }

    /// The next row that may be published now. A row without a message fails on its way.
    fn next(&mut self) -> Option<(OutboxRow, Message)> {
        while !self.over {
            let at = self.waiting.iter().position(|row| {
                let held = self.order != Order::None && self.refused.contains(&row.aggregate);
                !held && (self.order != Order::Strict || !self.busy.contains(&row.aggregate))
            })?;
            let row = self.waiting.remove(at)?;
            match row.message.clone() {
                Ok(message) => {
                    self.busy.insert(row.aggregate.clone());
                    return Some((row, message));
                }
                Err(failure) => {
                    let retry_count = row.state.retry_count;
                    self.outcomes.push(outcome(
                        &row,
                        Verdict::Failed {
                            failure,
                            retry_count,
                            message: None,
                        },
                    ));
                }
            }
        }
        None
    }

    fn answer(&mut self, spec: &TableSpec, ticket: Ticket, answer: PublishOutcome) {
        // A ticket of an earlier batch cannot come: each waits for all of its own.
        let Some(row) = self.in_flight.remove(&ticket) else {
            return;
        };
        self.bytes = self
            .bytes
            .saturating_sub(row.message.as_ref().map_or(0, Message::weight));
        self.busy.remove(&row.aggregate);
        match verdict(spec, answer, row.state.retry_count) {
            None => {
                self.over = true;
                self.unconfirmed.push(row.key);
            }
            Some(verdict) => {
                if let Verdict::Failed { .. } = verdict {
                    self.refused.insert(row.aggregate.clone());
                }
                self.outcomes.push(outcome(&row, verdict));
            }
        }
    }

    /// Rows that were not published, or of which nobody knows.
    fn rest(&mut self) -> impl Iterator<Item = RowKey> {
        let waiting = std::mem::take(&mut self.waiting).into_iter().map(|r| r.key);
        std::mem::take(&mut self.unconfirmed)
            .into_iter()
            .chain(waiting)
    }
}
