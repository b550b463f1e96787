//! What may happen.

use outbox_core::ports::Disposition;
use outbox_core::{Failure, Status};
use outbox_testkit::fakes::message;
use rand::RngExt;

use super::{Committed, History, LOCK_TTL, MILLI};
use crate::support::{TABLE, aggregate};

impl History {
    pub(super) async fn event(&mut self) -> Result<(), String> {
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
            93..95 => self.give_up_in_a_blockade().await,
            95..97 => {
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

    pub(super) fn insert(&mut self) {
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

    /// The broker stops taking messages in the midst of a sweep, and rows that wait for it are given
    /// up meanwhile.
    async fn give_up_in_a_blockade(&mut self) {
        let Some(leader) = &self.leader else { return };
        let (broker, handle) = (leader.broker.clone(), leader.handle.clone());
        self.tell("blockade".to_owned());
        for _ in 0..15 {
            self.insert();
        }
        handle.request_sweep(None);
        tokio::time::sleep(self.rng.random_range(1..50) * MILLI).await;
        broker.set_blocked(true);
        tokio::time::sleep(1000 * MILLI).await;
        for _ in 0..10 {
            self.abandon();
        }
        tokio::time::sleep(12_000 * MILLI).await;
        broker.set_blocked(false);
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
}
