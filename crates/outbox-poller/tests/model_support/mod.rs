//! A history: what happens to an outbox table, its leaders and its servers, drawn from a seed.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use outbox_core::ports::{Disposition, PortResult, PublishOutcome};
use outbox_core::retry::RetryPolicy;
use outbox_core::spec::Ordering;
use outbox_core::{Failure, Status};
use outbox_poller::{Poller, PollerConfig, PollerHandle, SweepConfig};
use outbox_testkit::fakes::{FakeBroker, FakeGate, FakeTable, message};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::support::{Counts, TABLE, aggregate, spec};

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
            let pause = [0, 1, 3, 20, 300, 4000][history.rng.random_range(0..6)];
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

    async fn event(&mut self) -> Result<(), String> {
        match self.rng.random_range(0..100) {
            0..40 => {
                for _ in 0..self.rng.random_range(1..6) {
                    self.insert();
                }
            }
            40..48 => self.abandon(),
            48..54 => self.retry_failed(),
            54..58 => self.claim_by_somebody(),
            58..63 => self.crash().await?,
            63..68 => self.replace(),
            68..76 => self.broker_fault(),
            76..84 => self.database_fault(),
            84..89 => self.lock(),
            89..93 => self.tail(),
            93..97 => {
                self.tell("sweep".to_owned());
                if let Some(leader) = &self.leader {
                    leader.handle.request_sweep(None);
                }
            }
            _ => {
                let pause = self.rng.random_range(0..2) == 0;
                self.tell(format!("pause {pause}"));
                if let Some(leader) = &self.leader {
                    if pause {
                        leader.handle.pause(None);
                    } else {
                        leader.handle.resume(None);
                    }
                }
            }
        }
        Ok(())
    }

    fn insert(&mut self) {
        let id = match self.rng.random_range(0..10) {
            // Taken now, committed after rows with higher ids.
            0 => {
                self.late.push(self.next);
                self.next += 1;
                return;
            }
            1 if !self.late.is_empty() => self.late.remove(0),
            _ => {
                self.next += 1;
                self.next - 1
            }
        };
        let of = self.rng.random_range(0..3);
        let name = format!("a{of}");
        let bad = self.rng.random_range(0..30) == 0;
        let message = if bad {
            Err(Failure::permanent("null_column", "told to"))
        } else {
            Ok(message(id, 10))
        };
        self.table.insert_message(TABLE, id, &name, message);
        let delayed = self.rng.random_range(0..10) == 0;
        let mut from = self.table.now();
        if delayed {
            from += self.rng.random_range(0..40_000) * MILLI;
            self.table
                .update(TABLE, id, |row| row.next_retry_at = Some(from));
        }
        self.tell(format!("insert {id} of {name}, delayed {delayed}"));
        self.rows.push(Committed {
            id,
            aggregate: of,
            from,
            abandoned: None,
            out_of_order: bad,
        });
    }

    /// The application's own `UPDATE … WHERE status IN (pending, failed)`.
    fn abandon(&mut self) {
        let Some(n) = self.any_row() else { return };
        let (id, now) = (self.rows[n].id, self.table.now());
        let mut done = false;
        self.table.update(TABLE, id, |row| {
            done = matches!(row.status, Status::Pending | Status::Failed);
            if done {
                row.status = Status::Abandoned;
            }
        });
        if done {
            self.rows[n].abandoned = Some(now);
            self.tell(format!("abandon {id}"));
        }
    }

    fn retry_failed(&mut self) {
        let failed: Vec<u64> = self
            .table
            .rows()
            .into_iter()
            .filter(|(_, row)| row.status == Status::Failed)
            .filter_map(|(key, _)| key.id.to_string().parse().ok())
            .collect();
        for id in failed {
            self.table.update(TABLE, id, |row| {
                (row.status, row.retry_count, row.next_retry_at) = (Status::Pending, 0, None);
            });
            for row in self.rows.iter_mut().filter(|row| row.id == id) {
                row.out_of_order = true;
            }
            self.tell(format!("retry {id}"));
        }
    }

    /// A relay of the application's own takes a row, and never comes back.
    fn claim_by_somebody(&mut self) {
        let Some(n) = self.any_row() else { return };
        let (id, now) = (self.rows[n].id, self.table.now());
        let until = now + LOCK_TTL;
        self.table.update(TABLE, id, |row| {
            let due = row.next_retry_at.is_none_or(|at| at <= now);
            if row.status == Status::Pending && due {
                row.status = Status::Processing;
                (row.locked_by, row.locked_until) = (Some("somebody".to_owned()), Some(until));
            }
        });
        self.tell(format!("somebody claims {id}"));
    }

    fn lock(&mut self) {
        let Some(n) = self.any_row() else { return };
        let (id, table) = (self.rows[n].id, self.table.clone());
        let for_ms = self.rng.random_range(0..30_000);
        self.tell(format!("row {id} is locked for {for_ms} ms"));
        table.set_locked(TABLE, id, true);
        tokio::spawn(async move {
            tokio::time::sleep(for_ms * MILLI).await;
            table.set_locked(TABLE, id, false);
        });
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

    fn broker_fault(&mut self) {
        let Some(leader) = &self.leader else { return };
        let broker = leader.broker.clone();
        let kind = self.rng.random_range(0..4);
        let arrived = self.rng.random_range(0..8);
        let lasts = [5, 400, 6000, 40_000][self.rng.random_range(0..4)] * MILLI;
        self.tell(format!("broker fault {kind}, {arrived} arrive, {lasts:?}"));
        if kind == 0 {
            broker.set_blocked(true);
        } else {
            (self.copies, self.lost) = (true, true);
            broker.drop_answers(arrived);
        }
        if kind > 1 {
            broker.set_down(true);
        }
        tokio::spawn(async move {
            tokio::time::sleep(lasts).await;
            broker.set_blocked(false);
            broker.set_down(false);
        });
    }

    fn database_fault(&mut self) {
        let times = self.rng.random_range(1..6);
        match self.rng.random_range(0..3) {
            0 => {
                self.tell(format!("{times} statements fail"));
                self.table.fail_next(times, Disposition::Backoff);
            }
            1 => {
                self.tell(format!("{times} answers are lost"));
                self.table.lose_answers(times);
            }
            _ => {
                let lasts = [5, 400, 6000, 40_000][self.rng.random_range(0..4)] * MILLI;
                self.tell(format!("the database is away for {lasts:?}"));
                let table = self.table.clone();
                table.set_away(true);
                tokio::spawn(async move {
                    tokio::time::sleep(lasts).await;
                    table.set_away(false);
                });
            }
        }
    }

    /// The tail does something.
    fn tail(&mut self) {
        let of = aggregate(&format!("a{}", self.rng.random_range(0..3)));
        let what = self.rng.random_range(0..6);
        self.tell(format!("tail {what} {}", of.id));
        let Some(leader) = &self.leader else { return };
        match what {
            0 => leader.gate.set_busy(&of, true),
            1 => leader.gate.set_busy(&of, false),
            2 => leader.gate.set_tailing(true),
            3 => leader.gate.set_tailing(false),
            4 => leader.gate.set_behind(true),
            _ => leader.gate.leave(of),
        }
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
