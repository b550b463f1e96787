//! What the link to the source brings.

use futures_util::FutureExt;

use super::link::LinkEvent;
use super::{Relay, RelayError};
use crate::group::StreamItem;
use crate::stream::{StreamDisposition, StreamError};

/// Items that are taken at once where the stream has them ready: one batch for the publisher.
const ITEMS: usize = 256;
impl Relay {
    pub(super) fn linked(&mut self, event: LinkEvent) -> Result<(), RelayError> {
        match event {
            LinkEvent::Opened => {
                self.desk.live = self.link.coordinate_at_open().is_none();
                self.mind_the_tip();
                self.desk.observer.tail_connected(true);
                self.handle.shared.tailing.send_replace(true);
                tracing::info!("tailing");
            }
            LinkEvent::Closed => {}
            LinkEvent::Failed(error) => self.link_failed(error)?,
            LinkEvent::Item(item) => {
                self.take(item)?;
                self.desk.mind_the_broker();
                for _ in 1..ITEMS {
                    if self.desk.window.full() || !self.link.is_open() {
                        break;
                    }
                    match self.link.event(true).now_or_never() {
                        Some(LinkEvent::Item(item)) => self.take(item)?,
                        Some(LinkEvent::Failed(error)) => self.link_failed(error)?,
                        Some(LinkEvent::Opened | LinkEvent::Closed) | None => break,
                    }
                }
            }
        }
        Ok(())
    }

    fn link_failed(&mut self, error: StreamError) -> Result<(), RelayError> {
        self.desk.observer.tail_connected(false);
        self.handle.shared.tailing.send_replace(false);
        match (error.disposition(), error) {
            (_, e @ StreamError::ServerIdTaken { .. }) => {
                tracing::error!(error = %outbox_core::ports::chain(&e), "the stream was taken over");
                self.link.yield_place();
                Ok(())
            }
            (StreamDisposition::Backoff, e) => {
                tracing::warn!(error = %outbox_core::ports::chain(&e), "the stream is lost");
                self.link.retry();
                Ok(())
            }
            (StreamDisposition::Fenced, e) => Err(RelayError::Fenced(Box::new(e))),
            (_, StreamError::LostPosition(lost)) => Err(RelayError::LostPosition(lost)),
            (StreamDisposition::Undecodable, e) => Err(RelayError::Undecodable(e)),
            (StreamDisposition::Halt | StreamDisposition::LostPosition, e) => {
                Err(RelayError::Stream(e))
            }
        }
    }

    fn take(&mut self, item: StreamItem) -> Result<(), RelayError> {
        let desk = &mut self.desk;
        match item {
            StreamItem::Group(group) => {
                let signals = desk.signals;
                desk.take_group(group)?;
                if desk.signals != signals {
                    self.handle.shared.signals.send_replace(desk.signals);
                }
            }
            StreamItem::Progress {
                end,
                committed_at,
                own_only,
            } => {
                desk.age(committed_at);
                (desk.last_commit, desk.caught_up) = (Some(committed_at), false);
                desk.worth_storing |= !own_only;
                desk.window.progress(end);
            }
            StreamItem::Idle => (desk.live, desk.caught_up) = (true, true),
        }
        self.mind_the_tip();
        Ok(())
    }

    /// Everything read before the coordinate at open is catch-up.
    fn mind_the_tip(&mut self) {
        let desk = &mut self.desk;
        if !desk.live
            && let (Some(open), Some(end)) =
                (self.link.coordinate_at_open(), desk.window.read_end())
        {
            desk.live = end.reaches(open) == Some(true);
        }
    }
}
