//! Steers what a leader runs; there while this instance leads.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use outbox_core::TableIdx;
use outbox_core::spec::TableSpec;
use outbox_poller::PollerHandle;
use outbox_tail::relay::RelayHandle;

/// The parts of a leader.
#[derive(Clone)]
pub struct Control {
    /// The tail, where it is enabled. A new one after a lost position.
    pub relay: Option<RelayHandle>,
    /// The poller.
    pub poller: PollerHandle,
    /// The tables, by index.
    pub tables: Arc<[Arc<TableSpec>]>,
    /// How long the tailed server keeps its binlog; `None`: for ever, or unknown.
    pub binlog_kept: Option<Duration>,
}

impl Control {
    /// Pauses a table, or all; true once nothing more of it is on its way to the broker.
    pub async fn pause(&self, table: Option<TableIdx>) -> bool {
        self.poller.pause(table);
        match &self.relay {
            Some(relay) => relay.pause(table).await,
            None => true,
        }
    }

    /// Goes on with a table, or all.
    pub fn resume(&self, table: Option<TableIdx>) {
        self.poller.resume(table);
        if let Some(relay) = &self.relay {
            relay.resume(table);
        }
    }
}

/// Holds the control while this instance leads.
#[derive(Clone, Default)]
pub struct ControlSlot(Arc<Mutex<Option<Control>>>);

impl ControlSlot {
    /// Puts it there, or takes it away.
    pub fn set(&self, control: Option<Control>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = control;
    }

    /// The control, if this instance leads.
    pub fn get(&self) -> Option<Control> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}
