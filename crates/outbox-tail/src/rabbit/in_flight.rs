//! What has been handed to lapin: publish calls and confirms, polled without a task for each.
//!
//! Every message has a waker of its own that puts its slot on one list; a pass takes the list
//! and polls what is on it. lapin completes all confirms of a channel on one thread, and each
//! completion runs the waker before the next confirm completes. So once a completed confirm was
//! seen, everything that completed before it is on the list, or was on one already: taking the
//! list is a pass in the sense of [`super::confirms`], at a cost that follows what has happened
//! instead of what is outstanding.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use lapin::{Confirmation, PublisherConfirm};
use outbox_core::message::Message;
use outbox_core::ports::Ticket;

use super::confirms::Slot;

/// A publish call. Polled once when it is made, which fixes its place in the channel's order and
/// registers its confirm; never cancelled while the channel is in use.
pub(super) type PublishCall =
    Pin<Box<dyn Future<Output = lapin::Result<PublisherConfirm>> + Send + 'static>>;

/// A message without outcome.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) ticket: Ticket,
    pub(super) message: Arc<Message>,
}

enum Stage {
    Publishing(PublishCall),
    Confirming(PublisherConfirm),
    Answered,
}

struct Flight {
    item: Item,
    stage: Stage,
    serial: u64,
    sent_at: Duration,
}

#[derive(Default)]
struct Woken {
    slots: Mutex<Vec<Slot>>,
    task: AtomicWaker,
}

struct SlotWaker {
    slot: Slot,
    queued: AtomicBool,
    woken: Arc<Woken>,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.queued.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut slots = self.woken.slots.lock().unwrap_or_else(|e| e.into_inner());
        slots.push(self.slot);
        if slots.len() == 1 {
            drop(slots);
            self.woken.task.wake();
        }
    }
}

struct Place {
    flight: Option<Flight>,
    signal: Arc<SlotWaker>,
    waker: Waker,
}

#[derive(Default)]
pub(super) struct InFlight {
    places: Vec<Place>,
    /// Slots and serials in the order of publication; settled ones are skipped lazily.
    order: VecDeque<(Slot, u64)>,
    serial: u64,
    count: usize,
    woken: Arc<Woken>,
}

impl InFlight {
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Takes a message into `slot` and starts its publish call. `sent_at` is the time by the
    /// confirm clock.
    pub(super) fn start(
        &mut self,
        slot: Slot,
        item: Item,
        call: PublishCall,
        sent_at: Duration,
    ) -> lapin::Result<()> {
        while self.places.len() <= slot {
            let signal = Arc::new(SlotWaker {
                slot: self.places.len(),
                queued: AtomicBool::new(false),
                woken: Arc::clone(&self.woken),
            });
            self.places.push(Place {
                flight: None,
                waker: Waker::from(Arc::clone(&signal)),
                signal,
            });
        }
        self.serial += 1;
        self.count += 1;
        self.order.push_back((slot, self.serial));
        let place = &mut self.places[slot];
        place.flight = Some(Flight {
            item,
            stage: Stage::Publishing(call),
            serial: self.serial,
            sent_at,
        });
        let Some(flight) = place.flight.as_mut() else {
            return Ok(());
        };
        let Stage::Publishing(call) = &mut flight.stage else {
            return Ok(());
        };
        match call.as_mut().poll(&mut Context::from_waker(&place.waker)) {
            Poll::Pending => Ok(()),
            Poll::Ready(Ok(confirm)) => {
                flight.stage = Stage::Confirming(confirm);
                // Not polled yet, so nothing will wake it: the next pass has to look.
                place.signal.wake_by_ref();
                Ok(())
            }
            Poll::Ready(Err(error)) => {
                flight.stage = Stage::Answered;
                Err(error)
            }
        }
    }

    /// Completes when something was woken. Cancel safe; one waiter.
    pub(super) fn woken(&self) -> impl Future<Output = ()> + Send + use<> {
        let woken = Arc::clone(&self.woken);
        poll_fn(move |cx| {
            woken.task.register(cx.waker());
            let slots = woken.slots.lock().unwrap_or_else(|e| e.into_inner());
            if slots.is_empty() {
                Poll::Pending
            } else {
                Poll::Ready(())
            }
        })
    }

    /// Takes what was woken since the last time: the beginning of a pass.
    pub(super) fn take_woken(&self) -> Vec<Slot> {
        let mut slots = self.woken.slots.lock().unwrap_or_else(|e| e.into_inner());
        std::mem::take(&mut *slots)
    }

    /// Makes the next pass look at everything.
    pub(super) fn wake_all(&self) {
        for place in &self.places {
            if place.flight.is_some() {
                place.signal.wake_by_ref();
            }
        }
    }

    pub(super) fn poll(&mut self, slot: Slot) -> Poll<lapin::Result<Confirmation>> {
        let Some(place) = self.places.get_mut(slot) else {
            return Poll::Pending;
        };
        // Before the poll: a completion behind it must put the slot on the list again.
        place.signal.queued.store(false, Ordering::Release);
        let Some(flight) = place.flight.as_mut() else {
            return Poll::Pending;
        };
        let mut cx = Context::from_waker(&place.waker);
        loop {
            match &mut flight.stage {
                Stage::Publishing(call) => match call.as_mut().poll(&mut cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(confirm)) => flight.stage = Stage::Confirming(confirm),
                    Poll::Ready(Err(error)) => {
                        flight.stage = Stage::Answered;
                        return Poll::Ready(Err(error));
                    }
                },
                Stage::Confirming(confirm) => match Pin::new(confirm).poll(&mut cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(answer) => {
                        flight.stage = Stage::Answered;
                        return Poll::Ready(answer);
                    }
                },
                Stage::Answered => return Poll::Pending,
            }
        }
    }

    /// The message of a slot that was settled.
    pub(super) fn remove(&mut self, slot: Slot) -> Option<Item> {
        let flight = self.places.get_mut(slot)?.flight.take()?;
        self.count -= 1;
        Some(flight.item)
    }

    /// When the oldest message without an answer was handed over, by the confirm clock.
    pub(super) fn oldest(&mut self) -> Option<Duration> {
        while let Some(&(slot, serial)) = self.order.front() {
            match &self.places[slot].flight {
                Some(f) if f.serial == serial && !matches!(f.stage, Stage::Answered) => {
                    return Some(f.sent_at);
                }
                _ => self.order.pop_front(),
            };
        }
        None
    }

    /// Everything without outcome, in the order of publication. For a channel that is retired.
    pub(super) fn take_all(&mut self) -> Vec<Item> {
        let mut left: Vec<Flight> = self
            .places
            .iter_mut()
            .filter_map(|p| p.flight.take())
            .collect();
        left.sort_unstable_by_key(|f| f.serial);
        self.count = 0;
        self.order.clear();
        left.into_iter().map(|f| f.item).collect()
    }

    pub(super) fn messages(&self) -> impl Iterator<Item = &Message> {
        self.places
            .iter()
            .filter_map(|p| p.flight.as_ref().map(|f| &*f.item.message))
    }
}
