//! Who leads. One lease row elects; this loop takes it, leads for as long as it holds, and stands
//! by otherwise.
//!
//! Progress: the lease is asked for every third of its time, so a silent leader is replaced
//! within one and a third of it. Resumption: leading begins from what is stored, whoever stored
//! it. Cancellation: leading ends in its own drain, then the lease is given back.

use std::time::Duration;

use outbox_core::ports::{Disposition, chain};
use outbox_ledger::lease::Lease;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::Daemon;
use super::servers::jittered;
use super::session;
use crate::health::{Part, Role};

/// Longest pause after a failed attempt.
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Runs until stopped.
pub async fn run(daemon: std::sync::Arc<Daemon>, stop: CancellationToken) -> anyhow::Result<()> {
    let name: std::sync::Arc<str> = daemon.config.name.as_str().into();
    let ttl = daemon.config.lease_ttl;
    let lease = Lease::new(daemon.db.clone(), name, daemon.config.instance.clone(), ttl);
    let mut backoff = Backoff::default();
    let mut said = String::new();
    while !stop.is_cancelled() {
        let pause = match lease.acquire().await {
            Ok(Some(epoch)) => {
                said.clear();
                info!(
                    epoch = epoch.number,
                    instance = daemon.config.instance,
                    "leading"
                );
                daemon.health.change(|h| {
                    h.role = Role::Leader;
                    h.mysql = Part::good("connected");
                });
                let ended = session::lead(&daemon, &lease, &epoch, &stop).await;
                if let Err(e) = lease.release(&epoch).await {
                    warn!(
                        error = chain(&e),
                        "the lease could not be given back; it runs out by itself"
                    );
                }
                let pause = after_leading(&daemon, ended, &mut backoff);
                daemon.health.change(|h| {
                    h.tail = Part::bad("not leading");
                    if h.role == Role::Leader {
                        h.role = Role::Starting;
                    }
                });
                pause
            }
            Ok(None) => {
                backoff.reset();
                if said != "standby" {
                    info!(
                        instance = daemon.config.instance,
                        "another instance leads; standing by"
                    );
                    "standby".clone_into(&mut said);
                }
                daemon.health.change(|h| {
                    h.role = Role::Standby;
                    h.mysql = Part::good("connected");
                });
                jittered(ttl / 3).min(ttl / 3)
            }
            Err(e) => {
                let text = chain(&e);
                let halted = e.disposition == Disposition::Halt;
                if said != text {
                    if halted {
                        error!(
                            error = text,
                            "cannot lead; `outboxd check` says what to do (is `outboxd migrate` done?)"
                        );
                    } else {
                        warn!(error = text, "MySQL is not available; trying again");
                    }
                    said.clone_from(&text);
                }
                daemon.health.change(|h| {
                    h.role = if halted { Role::Halted } else { Role::Starting };
                    h.mysql = Part::bad(text);
                });
                backoff.next()
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
    daemon.health.change(|h| h.role = Role::Stopping);
    Ok(())
}

/// What the end of a session means, and how long to wait before the next attempt.
fn after_leading(
    daemon: &Daemon,
    ended: Result<(), session::SessionError>,
    backoff: &mut Backoff,
) -> Duration {
    match ended {
        Ok(()) => {
            backoff.reset();
            Duration::ZERO
        }
        Err(session::SessionError::Fenced) => {
            warn!("another instance has taken over, or an operator moved the position");
            backoff.reset();
            daemon.config.lease_ttl / 3
        }
        Err(session::SessionError::Again(e)) => {
            warn!(error = format!("{e:#}"), "leading ended; it is begun again");
            daemon
                .health
                .change(|h| h.mysql = Part::bad(format!("{e:#}")));
            backoff.next()
        }
        Err(session::SessionError::Halt(e)) => {
            error!(
                error = format!("{e:#}"),
                "cannot go on; `outboxd check` says what to do"
            );
            daemon.health.change(|h| {
                h.role = Role::Halted;
                h.tail = Part::bad(format!("{e:#}"));
            });
            backoff.next().max(BACKOFF_MAX)
        }
    }
}

/// Pauses between failed attempts, doubling, with jitter.
#[derive(Default)]
struct Backoff(u32);

impl Backoff {
    fn next(&mut self) -> Duration {
        let mean = Duration::from_millis(200) * 2_u32.pow(self.0.min(5));
        self.0 += 1;
        jittered(mean).min(BACKOFF_MAX)
    }

    fn reset(&mut self) {
        self.0 = 0;
    }
}
