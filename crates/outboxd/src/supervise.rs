//! No anonymous tasks: each has a name and a declared answer to an error.
//!
//! A [`Crew`] is a set of named tasks that live and end together. A task that ends with an error
//! either ends the crew or is started again with a growing pause, as declared. Cancelling the
//! crew's token asks every task to end; one that has not within the deadline is aborted and named.

use std::future::Future;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

/// A set of tasks that end together.
pub struct Crew {
    stop: CancellationToken,
    tasks: JoinSet<(&'static str, anyhow::Result<()>)>,
    names: std::collections::HashMap<tokio::task::Id, &'static str>,
}

/// Pauses before a failed task is started again: doubling from the first to the second.
const RESTART_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

impl Crew {
    /// A crew that ends when `stop` is cancelled.
    pub fn new(stop: CancellationToken) -> Self {
        Self {
            stop,
            tasks: JoinSet::new(),
            names: std::collections::HashMap::new(),
        }
    }

    /// Asked to end by this.
    pub fn token(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Spawns a task whose end, good or bad, ends the crew.
    pub fn vital<F>(&mut self, name: &'static str, task: F)
    where
        F: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let handle = self.tasks.spawn(async move { (name, task.await) });
        self.names.insert(handle.id(), name);
    }

    /// Spawns a task that is started again when it fails, and whose end is nobody's end.
    pub fn restarted<F, Fut>(&mut self, name: &'static str, mut make: F)
    where
        F: FnMut() -> Fut + Send + 'static,
        Fut: Future<Output = anyhow::Result<()>> + Send,
    {
        let stop = self.stop.clone();
        let supervised = async move {
            let mut pause = RESTART_PAUSE.0;
            loop {
                let begun = Instant::now();
                match make().await {
                    Ok(()) => break,
                    Err(e) if stop.is_cancelled() => {
                        warn!(
                            task = name,
                            error = format!("{e:#}"),
                            "task failed while stopping"
                        );
                        break;
                    }
                    Err(e) => {
                        warn!(
                            task = name,
                            error = format!("{e:#}"),
                            pause_s = pause.as_secs(),
                            "task failed; it is started again"
                        );
                    }
                }
                if begun.elapsed() > RESTART_PAUSE.1 {
                    pause = RESTART_PAUSE.0;
                }
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = stop.cancelled() => break,
                }
                pause = (pause * 2).min(RESTART_PAUSE.1);
            }
            // Ends the crew's wait for it, not the crew.
            stop.cancelled().await;
            Ok(())
        };
        self.vital(name, supervised);
    }

    /// Waits until a vital task ends or the crew is stopped, then ends the others within
    /// `deadline`. The first error is the crew's.
    pub async fn join(mut self, deadline: Duration) -> anyhow::Result<()> {
        let mut first = Ok(());
        tokio::select! {
            () = self.stop.cancelled() => {}
            Some(ended) = self.tasks.join_next_with_id() => {
                first = self.note(ended);
            }
        }
        self.stop.cancel();
        let end = Instant::now() + deadline;
        while let Ok(Some(ended)) =
            tokio::time::timeout_at(end, self.tasks.join_next_with_id()).await
        {
            let result = self.note(ended);
            first = first.and(result);
        }
        if !self.tasks.is_empty() {
            let late: Vec<_> = self.names.values().copied().collect();
            error!(
                tasks = late.join(", "),
                deadline_s = deadline.as_secs(),
                "tasks did not end in time and are aborted"
            );
            self.tasks.shutdown().await;
        }
        first
    }

    fn note(
        &mut self,
        ended: Result<
            (tokio::task::Id, (&'static str, anyhow::Result<()>)),
            tokio::task::JoinError,
        >,
    ) -> anyhow::Result<()> {
        match ended {
            Ok((id, (_, result))) => {
                self.names.remove(&id);
                result
            }
            Err(e) => {
                let name = self.names.remove(&e.id()).unwrap_or("unknown");
                Err(anyhow::anyhow!("task {name} panicked"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[tokio::test(start_paused = true)]
    async fn an_error_of_a_vital_task_ends_the_crew_and_is_its_error() {
        let mut crew = Crew::new(CancellationToken::new());
        let stop = crew.token();
        crew.vital("waits", async move {
            stop.cancelled().await;
            Ok(())
        });
        crew.vital("fails", async { anyhow::bail!("broken") });
        let ended = crew.join(Duration::from_secs(1)).await;
        assert_eq!(ended.map_err(|e| e.to_string()), Err("broken".to_owned()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failing_task_is_started_again_with_a_growing_pause() {
        let mut crew = Crew::new(CancellationToken::new());
        let (stop, runs) = (crew.token(), Arc::new(AtomicUsize::new(0)));
        let counted = runs.clone();
        crew.restarted("flaky", move || {
            counted.fetch_add(1, Ordering::SeqCst);
            async { anyhow::bail!("again") }
        });
        crew.vital("clock", async move {
            tokio::time::sleep(Duration::from_secs(16)).await;
            stop.cancel();
            Ok(())
        });
        assert!(crew.join(Duration::from_secs(1)).await.is_ok());
        // After 0, 1, 3, 7 and 15 seconds.
        assert_eq!(runs.load(Ordering::SeqCst), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_does_not_end_is_aborted_at_the_deadline() {
        let mut crew = Crew::new(CancellationToken::new());
        let stop = crew.token();
        crew.vital("deaf", std::future::pending());
        stop.cancel();
        let begun = Instant::now();
        assert!(crew.join(Duration::from_secs(3)).await.is_ok());
        assert_eq!(begun.elapsed(), Duration::from_secs(3));
    }

    #[tokio::test]
    async fn a_panic_is_an_error_of_its_task() {
        let mut crew = Crew::new(CancellationToken::new());
        crew.vital("panics", async {
            #[allow(clippy::panic)]
            {
                panic!("on purpose")
            }
        });
        let text = crew
            .join(Duration::from_secs(1))
            .await
            .map_err(|e| e.to_string());
        assert_eq!(text, Err("task panics panicked".to_owned()));
    }
}
