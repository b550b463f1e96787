//! Waiting for a condition, never for a time.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::{Instant, sleep};

const EVERY: Duration = Duration::from_millis(25);

/// Waits until `predicate` is true; after `timeout` it fails, naming `what` did not happen.
pub async fn until<F>(what: &str, timeout: Duration, mut predicate: F) -> Result<()>
where
    F: AsyncFnMut() -> bool,
{
    until_ok(what, timeout, async || {
        if predicate().await {
            Ok(())
        } else {
            Err("not yet")
        }
    })
    .await
}

/// Waits until `attempt` succeeds and returns its value; after `timeout` it fails with `what` and the last error.
pub async fn until_ok<T, E, F>(what: &str, timeout: Duration, mut attempt: F) -> Result<T>
where
    F: AsyncFnMut() -> Result<T, E>,
    E: Debug,
{
    let end = Instant::now() + timeout;
    loop {
        // One attempt that hangs must not outlive the deadline.
        match tokio::time::timeout_at(end, attempt()).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) if Instant::now() >= end => {
                bail!("not within {timeout:?}: {what} (last: {error:?})")
            }
            Ok(Err(_)) => sleep(EVERY).await,
            Err(_) => bail!("not within {timeout:?}: {what} (the last attempt hung)"),
        }
    }
}
