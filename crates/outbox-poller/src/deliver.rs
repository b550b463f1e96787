//! Delivering one batch: claimed, published in order, each answer awaited, recorded under the
//! claim's token, and what was not published given back uncharged.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use outbox_core::ports::{
    ClaimToken, Disposition, Gate, Generation, HeldRow, Observer, PollStore, PortResult, Publisher,
    RowOutcome, Ticket, chain,
};
use outbox_core::spec::{Ordering, TableSpec};
use outbox_core::{OutboxRow, RowKey, TableIdx};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::breaker::Breaker;
use crate::flight::{Flight, Limits};
use crate::handle::PollerHandle;
use crate::poller::unbroken;
use crate::record::{KeptAs, Recorder, Tally, held};

/// How long a pass waits for a broker that is away. Nothing is claimed before it is there.
const BROKER_PATIENCE: Duration = Duration::from_secs(2);
/// What was read or claimed longer ago is not published any more: it may have been abandoned, or
/// its claim may have ended. It is read again.
pub(crate) const FRESH: Duration = Duration::from_secs(10);
/// How long a stop waits for the broker's last answers. Rows without one stay claimed: the broker
/// may have them, and the claim ends by itself.
pub(crate) const DRAIN: Duration = Duration::from_secs(5);

/// The publishing side, used by one batch or sweep at a time.
pub(crate) struct Outlet {
    pub(crate) publisher: Arc<dyn Publisher>,
    pub(crate) gate: Arc<dyn Gate>,
    pub(crate) recorder: Recorder,
    pub(crate) limits: Limits,
    breakers: Vec<Breaker>,
    handle: PollerHandle,
    tickets: Ticket,
}

/// The ports that an outlet uses.
pub(crate) struct Ports {
    pub(crate) publisher: Arc<dyn Publisher>,
    pub(crate) store: Arc<dyn PollStore>,
    pub(crate) gate: Arc<dyn Gate>,
    pub(crate) observer: Arc<dyn Observer>,
}

impl Outlet {
    pub(crate) fn new(
        ports: Ports,
        limits: Limits,
        breakers: Vec<Breaker>,
        handle: PollerHandle,
    ) -> Self {
        Self {
            publisher: ports.publisher,
            gate: ports.gate.clone(),
            recorder: Recorder::new(ports.store, ports.observer, ports.gate),
            limits,
            breakers,
            handle,
            tickets: 0,
        }
    }

    pub(crate) fn breaker(&mut self, table: TableIdx) -> Option<&mut Breaker> {
        self.breakers.get_mut(usize::from(table.0))
    }

    /// Hands over what the flight lets go.
    pub(crate) fn submit(&mut self, flight: &mut Flight, generation: Generation, room: usize) {
        let next = || {
            self.tickets += 1;
            self.tickets
        };
        let messages = flight.take(room, next);
        if !messages.is_empty() {
            self.publisher.submit(generation, messages);
        }
    }

    /// Takes the broker's answers in.
    pub(crate) fn answers(
        &mut self,
        table: TableIdx,
        flight: &mut Flight,
        answers: Vec<(Ticket, outbox_core::ports::PublishOutcome)>,
    ) {
        if let Some(breaker) = self.breakers.get_mut(usize::from(table.0)) {
            for (ticket, answer) in answers {
                flight.answer(ticket, answer, breaker);
            }
        }
        self.recorder
            .overtaken(table, std::mem::take(&mut flight.overtaken));
    }

    pub(crate) fn paused(&self, table: TableIdx) -> bool {
        self.handle.paused().is(table)
    }

    /// Waits a while for the broker; `None` where it is not there, or nothing may be published.
    async fn ready(&mut self, stop: &CancellationToken) -> PortResult<Option<Generation>> {
        self.recorder.again().await?;
        if self.recorder.backlog() >= self.limits.rows {
            return Ok(None);
        }
        let ready = tokio::time::timeout(BROKER_PATIENCE, self.publisher.ready());
        let ready = tokio::select! {
            () = stop.cancelled() => return Ok(None),
            ready = ready => ready,
        };
        if ready.is_err() {
            debug!(broker = %self.publisher.state(), "the poller waits for the broker");
        }
        Ok(ready.ok())
    }

    /// Delivers rows of one table as far as the tail and their claims allow, each aggregate from
    /// its first row on.
    pub(crate) async fn deliver(
        &mut self,
        table: TableIdx,
        spec: &Arc<TableSpec>,
        rows: Vec<OutboxRow>,
        stop: &CancellationToken,
    ) -> PortResult<Tally> {
        let ordered = spec.ordering != Ordering::None;
        if rows.is_empty() {
            return Ok(Tally::default());
        }
        let Some(generation) = self.ready(stop).await? else {
            return Ok(Tally::default());
        };
        let mut rows = self.without_kept(rows, ordered);
        let room = match self.breaker(table) {
            Some(breaker) if !rows.is_empty() => breaker.room(Instant::now()),
            _ => 0,
        };
        rows.truncate(room);
        if rows.is_empty() || self.paused(table) {
            return Ok(Tally::default());
        }
        let asked: Vec<HeldRow> = rows.iter().map(held).collect();
        let granted = self.gate.hold(&asked).await;
        let rows = unbroken(rows.into_iter().zip(granted), ordered);
        let mut flight = Flight::new(spec.clone(), self.limits);
        let delivered = self
            .claim_and_publish(table, &mut flight, rows, generation, stop)
            .await;
        // Rows whose record is still to be made keep their hold, and so do those that the broker
        // may have.
        let at_broker: HashSet<&RowKey> = flight.at_broker().collect();
        let done: Vec<HeldRow> = asked
            .into_iter()
            .filter(|h| self.recorder.kept(&h.key).is_none() && !at_broker.contains(&h.key))
            .collect();
        self.recorder.done(&done).await;
        delivered
    }

    /// Rows whose record is not made yet are published by nobody. A refused one goes on holding
    /// its aggregate.
    fn without_kept(&self, rows: Vec<OutboxRow>, ordered: bool) -> Vec<OutboxRow> {
        let rows = rows.into_iter().filter_map(|row| {
            let kept = self.recorder.kept(&row.key);
            (kept != Some(KeptAs::Sent)).then_some((row, kept.is_none()))
        });
        unbroken(rows, ordered)
    }

    async fn claim_and_publish(
        &mut self,
        table: TableIdx,
        flight: &mut Flight,
        rows: Vec<OutboxRow>,
        generation: Generation,
        stop: &CancellationToken,
    ) -> PortResult<Tally> {
        if rows.is_empty() {
            return Ok(Tally::default());
        }
        let since = Instant::now();
        let keys: Vec<RowKey> = rows.iter().map(|r| r.key.clone()).collect();
        let (token, claimed) = self.recorder.store.claim(table, &keys).await?;
        let claimed: HashSet<RowKey> = claimed.into_iter().collect();
        let mut surplus = claimed.clone();
        let ours = rows.into_iter().map(|row| {
            let is_ours = claimed.contains(&row.key);
            (row, is_ours)
        });
        for row in unbroken(ours, flight.is_ordered()) {
            surplus.remove(&row.key);
            // A fresh flight blocks nothing.
            drop(flight.push(row));
        }
        let mut back: Vec<RowKey> = surplus.into_iter().collect();
        let tally = self
            .publish(table, flight, &token, generation, since, stop)
            .await?;
        back.extend(flight.give_back().into_iter().map(|(_, row)| row.key));
        self.release(&token, back).await?;
        Ok(tally)
    }

    async fn publish(
        &mut self,
        table: TableIdx,
        flight: &mut Flight,
        token: &ClaimToken,
        generation: Generation,
        since: Instant,
        stop: &CancellationToken,
    ) -> PortResult<Tally> {
        let mut drain = None;
        loop {
            if stop.is_cancelled() {
                drain.get_or_insert_with(|| Instant::now() + DRAIN);
            }
            flight.over |= drain.is_some() || self.paused(table) || since.elapsed() > FRESH;
            self.submit(flight, generation, usize::MAX);
            if flight.out() == 0 {
                break;
            }
            let publisher = self.publisher.clone();
            let drained = async {
                match drain {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => stop.cancelled().await,
                }
            };
            tokio::select! {
                biased;
                answers = publisher.outcomes() => self.answers(table, flight, answers),
                () = drained => if drain.is_some() { break },
            }
        }
        let outcomes: Vec<RowOutcome> = std::mem::take(&mut flight.outcomes);
        self.recorder.record(Some(token), outcomes).await
    }

    /// Gives claims back. One that cannot be given back ends by itself.
    async fn release(&self, token: &ClaimToken, rows: Vec<RowKey>) -> PortResult<()> {
        if rows.is_empty() {
            return Ok(());
        }
        match self.recorder.store.release(token, &rows).await {
            Err(e) if e.disposition == Disposition::Backoff => {
                debug!(
                    rows = rows.len(),
                    error = chain(&e),
                    "claims are left to end"
                );
                Ok(())
            }
            done => done,
        }
    }
}
