//! Finding the one message that the broker punishes with channel or connection: the suspects go
//! out one at a time, in their order, over connections of their own.

use outbox_core::failure::Failure;
use outbox_core::ports::{PublishOutcome, Ticket};
use tokio::time::timeout;

use lapin::Confirmation;

use super::RabbitConfig;
use super::checks::too_large;
use super::classify::{Loss, loss, telling};
use super::convert::convert;
use super::in_flight::Item;
use super::link::Link;
use super::session::{describe, publish};

/// Tries the suspects until the first guilty one; the rest is unconfirmed. At most two
/// connections are opened. Dropped in between, it leaves its connection cut, and its caller must
/// count everything without outcome as unconfirmed.
pub(super) async fn try_alone(
    config: &RabbitConfig,
    suspects: &[Item],
    mut decided: impl FnMut(Ticket, PublishOutcome),
) {
    let mut link: Option<Link> = None;
    for item in suspects {
        let at = match &mut link {
            Some(link) => link,
            None => match Link::open(config).await {
                Ok(opened) => link.insert(opened),
                Err(error) => {
                    let error = outbox_core::ports::chain(&error);
                    tracing::warn!(error, "cannot try suspects: no connection");
                    return;
                }
            },
        };
        match alone(config, at, item).await {
            Alone::Decided(outcome) => {
                let guilty = matches!(outcome, PublishOutcome::Refused(_));
                decided(item.ticket, outcome);
                if guilty {
                    break;
                }
            }
            Alone::Unknown => break,
        }
    }
    if let Some(link) = link {
        link.close(config.close_timeout).await;
    }
}

enum Alone {
    Decided(PublishOutcome),
    Unknown,
}

async fn alone(config: &RabbitConfig, link: &mut Link, item: &Item) -> Alone {
    let converted = match convert(&item.message, link.frame_max) {
        Ok(converted) => converted,
        Err(failure) => return Alone::Decided(PublishOutcome::Refused(failure)),
    };
    let call = publish(&link.channel, converted, &item.message);
    let answer = timeout(config.confirm_timeout, async { call.await?.await }).await;
    let error = match answer {
        Err(_) => return Alone::Unknown,
        // With nothing else on the channel a return can only be this message's own.
        Ok(Ok(Confirmation::Ack(Some(r)) | Confirmation::Nack(Some(r)))) => {
            return Alone::Decided(PublishOutcome::Returned(describe(r).1));
        }
        Ok(Ok(Confirmation::Ack(None))) => return Alone::Decided(PublishOutcome::Confirmed),
        Ok(Ok(Confirmation::Nack(None))) => return Alone::Decided(PublishOutcome::Nacked),
        Ok(Ok(Confirmation::NotRequested)) => return Alone::Unknown,
        Ok(Err(error)) => error,
    };
    if !telling(&error) {
        return Alone::Unknown;
    }
    match loss(&error) {
        Loss::Suspect(text) => {
            let failure = Failure::permanent("refused_by_broker", text);
            Alone::Decided(PublishOutcome::Refused(failure))
        }
        Loss::TooLarge { max, .. } => {
            Alone::Decided(PublishOutcome::Refused(too_large(&item.message, max)))
        }
        _ => Alone::Unknown,
    }
}
