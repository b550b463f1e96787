//! No anonymous tasks: each has a name and a declared answer to an error.
//!
//! A [`Crew`] is a set of named tasks that live and end together. The end of any of them,
//! good or bad, ends the crew; tasks that must survive failures retry inside, with backoff. Cancelling
//! the crew's token asks every task to end; one that has not within the deadline is aborted and named.

use std::future::Future;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::error;

/// A set of tasks that end together.
pub struct Crew {
    stop: CancellationToken,
    tasks: JoinSet<(&'static str, anyhow::Result<()>)>,
    names: std::collections::HashMap<tokio::task::Id, &'static str>,
}

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
