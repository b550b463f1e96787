//! The loop's other mode: nothing is read and nothing is published any more.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::link::done;
use super::settle::settle;
use super::{Relay, RelayError};

/// How long the goodbye to the server may take when the relay ends.
const CLOSE: Duration = Duration::from_secs(1);

impl Relay {
    /// Takes what the broker still answers, records it, and stores the position, to a deadline.
    pub(super) async fn drain(&mut self) -> Result<(), RelayError> {
        let deadline = Instant::now() + self.desk.config.drain_deadline;
        self.handle.shared.tailing.send_replace(false);
        self.link.close(None);
        loop {
            if self.settling.is_none() {
                let batch = self.desk.next_batch(true);
                self.settling = batch.map(|b| settle(Arc::clone(&self.ledger), b));
            }
            let waiting = !self.desk.out.is_empty() || !self.desk.records.is_empty();
            let recording = self.settling.is_some() || self.settling_busy.is_some();
            if !waiting && !recording {
                break;
            }
            let publisher = Arc::clone(&self.desk.publisher);
            tokio::select! {
                biased;
                (batch, answer) = done(&mut self.settling) => self.settled(batch, answer)?,
                (batch, answer) = done(&mut self.settling_busy) => self.settled(batch, answer)?,
                outcomes = publisher.outcomes() => self.outcomes(outcomes),
                Some(command) = self.commands.recv() => drop(command),
                _ = self.link.event(false) => self.link.close(None),
                () = sleep_until(deadline) => {
                    tracing::warn!(
                        unanswered = self.desk.out.len(),
                        unsettled = self.desk.window.unsettled(),
                        "the drain is cut short; what is open will be read again"
                    );
                    break;
                }
            }
        }
        self.tick(Instant::now());
        // A server that does not say goodbye is not waited for.
        let closing = async {
            while !self.link.is_shut() {
                self.link.event(false).await;
                self.link.close(None);
            }
        };
        let _ = tokio::time::timeout(CLOSE, closing).await;
        Ok(())
    }
}
