//! What the outside is told.

use std::time::Duration;

use outbox_core::TableIdx;
use outbox_core::ports::BrokerState;
use tokio::time::Instant;

use super::{Relay, RelayStatus};

/// How often status and gauges are brought up to date while nothing else happens.
const TICK: Duration = Duration::from_millis(500);

impl Relay {
    /// Tells the outside what has changed.
    pub(super) fn tell(&mut self) {
        let (desk, shared) = (&mut self.desk, &self.handle.shared);
        if desk.lanes.has_news() {
            shared.news.send_modify(|n| *n += 1);
        }
        if std::mem::take(&mut desk.sweeps_changed) {
            let due = |t: TableIdx| Some((t, desk.lanes.sweep_due(t)?.clone()));
            shared
                .sweeps
                .send_replace(desk.tables().filter_map(due).collect());
        }
        if let Some(version) = self.obeying
            && desk.pause_obeyed()
        {
            shared.obeyed.send_replace(version);
            self.obeying = None;
        }
        let now = Instant::now();
        if self.tick_at <= now || self.settled_at().is_some_and(|t| t <= now) {
            self.tick(now);
        }
    }

    /// When the outside is told of a watermark that moved.
    pub(super) fn settled_at(&self) -> Option<Instant> {
        let moved = self.desk.window.mark_number() != self.mark_told;
        moved.then(|| self.told_at + self.desk.config.flush_interval)
    }

    pub(super) fn tick(&mut self, now: Instant) {
        (self.told_at, self.tick_at) = (now, now + TICK);
        let desk = &mut self.desk;
        if self.mark_told != desk.window.mark_number() {
            self.mark_told = desk.window.mark_number();
            self.handle
                .shared
                .settled
                .send_replace(desk.window.low_watermark().cloned());
        }
        let lag = match desk.last_commit {
            Some(at) if !desk.caught_up => desk.age(at),
            _ => Duration::ZERO,
        };
        let held: Vec<_> = desk.tables().map(|t| desk.lanes.held(t)).collect();
        desk.observer.lag(lag);
        desk.observer
            .in_flight(desk.window.rows(), desk.window.bytes());
        for (table, held) in desk.tables().zip(&held) {
            desk.observer.held(table, *held);
        }
        let status = RelayStatus {
            running: true,
            tailing: *self.handle.shared.tailing.borrow(),
            state: self.state(),
            read: self.desk.window.read_end().cloned(),
            settled: self.desk.window.low_watermark().cloned(),
            stored: self.desk.records.stored.clone(),
            lag,
            in_flight_rows: self.desk.window.rows(),
            in_flight_bytes: self.desk.window.bytes(),
            unsettled: self.desk.window.unsettled(),
            held,
            broker: self.desk.publisher.state(),
            paused: self.desk.paused.clone(),
        };
        self.handle.shared.status.send_replace(status);
    }

    fn state(&self) -> String {
        let broker = self.desk.publisher.state();
        let text = match () {
            () if self.desk.paused.all => "paused",
            () if broker != BrokerState::Up => return format!("broker {broker}"),
            () if self.link.is_resting() => "waiting for room in the window",
            () if !self.link.is_open() => "connecting to the binlog",
            () if self.desk.records.busy() > 0 => "waiting for locked rows",
            () if self.desk.live => "tailing",
            () => "catching up",
        };
        text.to_owned()
    }
}
