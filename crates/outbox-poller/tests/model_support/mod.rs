//! A history: what happens to an outbox table, its leaders and its servers, drawn from a seed.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use outbox_core::ports::{Disposition, PortResult, PublishOutcome};
use outbox_core::retry::RetryPolicy;
use outbox_core::spec::Ordering;
use outbox_core::{Failure, Status};
use outbox_poller::{Poller, PollerConfig, PollerHandle, SweepConfig};
use outbox_testkit::fakes::{FakeBroker, FakeGate, FakeTable};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::support::{Counts, aggregate, spec};

mod events;
mod oracle;

pub(crate) use oracle::judge;

const MILLI: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
pub(crate) const LOCK_TTL: Duration = Duration::from_secs(20);
const SETTLES_WITHIN: Duration = Duration::from_secs(600);

/// What the outside saw of one row.
#[derive(Clone, Debug)]
pub(crate) struct Committed {
    pub(crate) id: u64,
    pub(crate) aggregate: u64,
    /// When it was committed, or due where it was delayed.
    pub(crate) from: Duration,
    pub(crate) abandoned: Option<Duration>,
    /// It was failed once, or somebody else had it: nothing is said about its order.
    pub(crate) out_of_order: bool,
}

/// What reached the broker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) id: u64,
    pub(crate) at: Duration,
}

#[derive(Default)]
pub(crate) struct Log {
    pub(crate) submitted: Vec<Seen>,
    pub(crate) arrived: Vec<Seen>,
    /// Refusals that cost a retry.
    pub(crate) refusals: u64,
}

/// How often a message is refused, in percent.
#[derive(Clone, Copy, Debug, Default)]
struct Refusals {
    nacked: u32,
    returned: u32,
    permanent: u32,
}

/// One leader, from its start until it ends or is replaced.
struct Leader {
    broker: Arc<FakeBroker>,
    gate: Arc<FakeGate>,
    counts: Arc<Counts>,
    handle: PollerHandle,
    stop: CancellationToken,
    task: JoinHandle<PortResult<()>>,
}

/// A history while it is played.
pub(crate) struct History {
    rng: StdRng,
    pub(crate) ordering: Ordering,
    pub(crate) table: Arc<FakeTable>,
    pub(crate) log: Arc<Mutex<Log>>,
    refusals: Refusals,
    leader: Option<Leader>,
    zombies: Vec<Leader>,
    pub(crate) rows: Vec<Committed>,
    next: u64,
    late: Vec<u64>,
    /// Something happened that may make copies.
    pub(crate) copies: bool,
    /// Verdicts of the broker were lost: overtaking cannot be counted.
    pub(crate) lost: bool,
    pub(crate) overtaken: u64,
    pub(crate) story: Vec<String>,
}

impl History {
    /// Plays one to its end; an error says what did not come to its end.
    pub(crate) async fn play(seed: u64) -> Result<Self, String> {
        let mut rng = StdRng::seed_from_u64(seed);
        let ordering = [Ordering::Aggregate, Ordering::Strict, Ordering::None];
        let ordering = ordering[rng.random_range(0..3)];
        let mut percent = |of: &[u32]| of[rng.random_range(0..of.len())];
        let refusals = Refusals {
            nacked: percent(&[0, 0, 5, 25]),
            returned: percent(&[0, 0, 5, 25]),
            permanent: percent(&[0, 0, 0, 10]),
        };
        let retry = RetryPolicy {
            base: 5 * SECOND,
            factor: 2.0,
            cap: 15 * SECOND,
            max_retries: 3,
        };
        let mut history = Self {
            rng,
            ordering,
            table: Arc::new(FakeTable::new(retry, LOCK_TTL)),
            log: Arc::default(),
            refusals,
            leader: None,
            zombies: Vec::new(),
            rows: Vec::new(),
            next: 1,
            late: Vec::new(),
            copies: false,
            lost: false,
            overtaken: 0,
            story: vec![format!("{ordering:?} {refusals:?}")],
        };
        let latency = history.rng.random_range(0..4) * MILLI;
        history.table.set_latency(latency);
        for _ in 0..history.rng.random_range(0..12) {
            history.insert();
        }
        history.lead();
        for _ in 0..history.rng.random_range(3..25) {
            let pause = [0, 1, 3, 20, 300, 4000, 12_000][history.rng.random_range(0..7)];
            tokio::time::sleep(pause * MILLI).await;
            history.event().await?;
        }
        history.settle().await?;
        Ok(history)
    }

    fn tell(&mut self, what: String) {
        let now = self.table.now();
        self.story.push(format!("{now:?} {what}"));
    }

    fn any_row(&mut self) -> Option<usize> {
        (!self.rows.is_empty()).then(|| self.rng.random_range(0..self.rows.len()))
    }

    /// The leader's process dies.
    async fn crash(&mut self) -> Result<(), String> {
        let Some(leader) = self.leader.take() else {
            return Ok(());
        };
        self.tell("crash".to_owned());
        (self.copies, self.lost) = (true, true);
        leader.task.abort();
        match leader.task.await {
            Err(e) if e.is_panic() => return Err(format!("the poller panicked: {e}")),
            Ok(Err(e)) => return Err(format!("the leader ended: {e}")),
            _ => {}
        }
        // What it had handed over arrives, as far as the broker got.
        leader.broker.drop_answers(self.rng.random_range(0..20));
        self.lead();
        Ok(())
    }

    /// Somebody else leads, while the last leader does not know it yet.
    fn replace(&mut self) {
        let Some(leader) = self.leader.take() else {
            return;
        };
        self.tell("replaced".to_owned());
        (self.copies, self.lost) = (true, true);
        self.zombies.push(leader);
        self.lead();
    }

    fn lead(&mut self) {
        let config = PollerConfig {
            batch: self.rng.random_range(1..20),
            max_in_flight: self.rng.random_range(1..12),
            ..PollerConfig::default()
        };
        let (broker, gate) = (self.broker(), Arc::new(FakeGate::default()));
        let counts = Arc::new(Counts::default());
        let (poller, handle) = Poller::new(
            config,
            vec![Arc::new(spec("outbox", self.ordering))],
            Arc::new(self.table.session()),
            broker.clone(),
            gate.clone(),
            counts.clone(),
        );
        let (stop, stopped) = (CancellationToken::new(), CancellationToken::new());
        let sweeps = self.rng.random_range(0..2) == 0;
        let run = stop.clone();
        let task = tokio::spawn(async move {
            let _gone = stopped.drop_guard();
            if sweeps {
                poller.sweep(SweepConfig::default(), run.clone()).await?;
            }
            poller.run(run).await
        });
        self.leader = Some(Leader {
            broker,
            gate,
            counts,
            handle,
            stop,
            task,
        });
    }

    fn broker(&mut self) -> Arc<FakeBroker> {
        let broker = Arc::new(FakeBroker::default());
        broker.set_latency([0, 1, 2, 40, 900][self.rng.random_range(0..5)] * MILLI);
        let (log, refusals) = (self.log.clone(), self.refusals);
        let mut rng = StdRng::seed_from_u64(self.rng.random());
        broker.answer(move |message| {
            let drawn = rng.random_range(0..100);
            let (nacked, returned) = (refusals.nacked, refusals.nacked + refusals.returned);
            // A message that is refused for ever is refused by every leader's connection.
            let id: u64 = message.message_id.parse().unwrap();
            if id % 10 == 3 && refusals.permanent > 0 {
                let failure = Failure::permanent("body_too_large", "told to");
                return PublishOutcome::Refused(failure);
            }
            if drawn >= returned {
                return PublishOutcome::Confirmed;
            }
            log.lock().unwrap().refusals += 1;
            if drawn < nacked {
                PublishOutcome::Nacked
            } else {
                PublishOutcome::Returned("NO_ROUTE".to_owned())
            }
        });
        for arrived in [false, true] {
            let (log, table) = (self.log.clone(), self.table.clone());
            let note = move |message: &outbox_core::Message| {
                let id = message.message_id.parse().unwrap();
                let seen = Seen {
                    id,
                    at: table.now(),
                };
                let mut log = log.lock().unwrap();
                if arrived {
                    log.arrived.push(seen);
                } else {
                    log.submitted.push(seen);
                }
            };
            if arrived {
                broker.on_arrival(note);
            } else {
                broker.watch(note);
            }
        }
        broker
    }

    /// No more faults: everything comes to its end, and then there is peace.
    async fn settle(&mut self) -> Result<(), String> {
        self.tell("peace".to_owned());
        if let Some(leader) = &self.leader {
            for of in 0..3 {
                leader.gate.set_busy(&aggregate(&format!("a{of}")), false);
            }
            leader.gate.set_behind(false);
            leader.handle.resume(None);
        }
        let deadline = Instant::now() + SETTLES_WITHIN;
        while self.open() > 0 {
            if Instant::now() > deadline {
                return Err(self.report("rows are left"));
            }
            tokio::time::sleep(SECOND).await;
        }
        // Outages end, and records that were kept are made.
        tokio::time::sleep(60 * SECOND).await;
        let (asked, since) = (self.table.statements(), Instant::now());
        tokio::time::sleep(60 * SECOND).await;
        let asked = self.table.statements() - asked;
        // A leader that was replaced goes on reading until it wants to write.
        if asked > 150 * (1 + self.zombies.len() as u64) {
            let took = since.elapsed();
            return Err(self.report(&format!("{asked} statements in {took:?} of peace")));
        }
        self.end().await
    }

    async fn end(&mut self) -> Result<(), String> {
        let Some(leader) = self.leader.take() else {
            return Ok(());
        };
        if leader.gate.held() > 0 {
            return Err(self.report("rows are held in the tail for ever"));
        }
        for zombie in std::mem::take(&mut self.zombies) {
            zombie.stop.cancel();
            self.overtaken += *zombie.counts.overtaken.lock().unwrap();
            let ended = tokio::time::timeout(60 * SECOND, zombie.task).await;
            match ended.map_err(|_| self.report("a replaced leader does not end"))? {
                Ok(Err(e)) if e.disposition != Disposition::Fenced => {
                    return Err(self.report(&format!("a replaced leader ended: {e}")));
                }
                Err(e) => return Err(self.report(&format!("a replaced leader: {e}"))),
                _ => {}
            }
        }
        leader.stop.cancel();
        let ended = tokio::time::timeout(60 * SECOND, leader.task).await;
        self.overtaken += *leader.counts.overtaken.lock().unwrap();
        match ended.map_err(|_| self.report("the leader does not end"))? {
            Ok(Ok(())) => Ok(()),
            other => Err(self.report(&format!("the leader ended: {other:?}"))),
        }
    }

    fn open(&self) -> usize {
        self.table.count(Status::Pending) + self.table.count(Status::Processing)
    }

    /// What happened, for a person.
    pub(crate) fn report(&self, what: &str) -> String {
        let log = self.log.lock().unwrap();
        let rows: Vec<String> = self
            .table
            .rows()
            .iter()
            .map(|(key, row)| {
                format!(
                    "{} {} {} {} {:?}",
                    key.id, row.aggregate.id, row.status, row.retry_count, row.last_error
                )
            })
            .collect();
        let ids = |of: &[Seen]| -> Vec<String> {
            of.iter().map(|s| format!("{}@{:?}", s.id, s.at)).collect()
        };
        format!(
            "{what}\n{}\nrows\n{}\nsubmitted {:?}\narrived {:?}",
            self.story.join("\n"),
            rows.join("\n"),
            ids(&log.submitted),
            ids(&log.arrived)
        )
    }

    /// First arrivals, in order.
    pub(crate) fn first_arrivals(&self) -> HashMap<u64, usize> {
        let log = self.log.lock().unwrap();
        let mut seen = HashSet::new();
        let first = log.arrived.iter().filter(|s| seen.insert(s.id));
        first.enumerate().map(|(place, s)| (s.id, place)).collect()
    }
}
