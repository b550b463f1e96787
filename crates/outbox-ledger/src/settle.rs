//! The tail's write-back: statuses, layouts and the position, in one transaction that is fenced by
//! the epoch.
//!
//! A deadlock repeats the whole transaction, which is harmless: every change compares first. A
//! lock wait that runs out repeats it too, taking only the rows that can be had; the others come
//! back busy, and then the position is not stored, because it would pass them.

use std::sync::Arc;

use async_trait::async_trait;
use outbox_core::failure::FailureClass;
use outbox_core::ports::{
    Behind, Ledger, PortResult, Recorded, RowOutcome, Seen, SettleReport, Settlement, Verdict,
};
use outbox_core::retry::RetryPolicy;
use outbox_core::row::{Aggregate, OutboxRow, RowId, TableIdx};
use outbox_core::spec::{OnSent, Tracking};
use outbox_core::{Position, Status};
use sqlx::{Connection as _, MySqlConnection};
use tokio::sync::Mutex;

use crate::connect::Db;
use crate::error::{DEADLOCK, DbError, DbResult, LOCK_WAIT_TIMEOUT};
use crate::lease::Epoch;
use crate::parked::{NewParked, ParkedTable};
use crate::position::Writer;
use crate::record::{Mode, record, take};
use crate::table::OutboxTable;
use crate::{behind, layouts, look, position, sql};

/// Deadlocks in a row before the caller hears of it and backs off.
const ATTEMPTS: u32 = 5;

/// The tail's side of the database, for one epoch.
#[derive(Debug)]
pub struct TailLedger {
    db: Db,
    epoch: Epoch,
    tables: Arc<Vec<OutboxTable>>,
    parked: Vec<ParkedTable>,
    retry: RetryPolicy,
    writer: Mutex<Writer>,
}

impl TailLedger {
    /// A ledger that writes under `epoch`. `tables` are all that are configured, in their order.
    #[must_use]
    pub fn new(db: Db, epoch: Epoch, tables: Arc<Vec<OutboxTable>>, retry: RetryPolicy) -> Self {
        let parked = tables
            .iter()
            .map(|t| ParkedTable::new(epoch.name.clone(), t.idx, &t.spec));
        Self {
            parked: parked.collect(),
            db,
            epoch,
            tables,
            retry,
            writer: Mutex::default(),
        }
    }

    fn table(&self, table: TableIdx) -> DbResult<(&OutboxTable, &ParkedTable)> {
        let at = usize::from(table.0);
        let found = self.tables.get(at).zip(self.parked.get(at));
        found.ok_or_else(|| DbError::Config(format!("there is no outbox number {at}")))
    }

    async fn once(&self, settlement: &Settlement, skip_locked: bool) -> DbResult<SettleReport> {
        // Taken for the whole transaction: two flushes must not store positions out of order.
        let mut writer = self.writer.lock().await;
        let mut session = self.db.session().await?;
        let mut tx = session.begin().await?;
        let work = self.work(&mut tx, settlement, &mut writer, skip_locked);
        let (rows, pending) = match work.await {
            Ok(done) => done,
            // At once: the repetition must not meet the locks of this attempt.
            Err(e) => {
                let _ = tx.rollback().await;
                return Err(e);
            }
        };
        tx.commit().await?;
        session.finish();
        let checkpointed = pending.is_some();
        if let Some(pending) = pending {
            writer.committed(pending);
        }
        Ok(SettleReport { rows, checkpointed })
    }

    /// What one transaction does.
    async fn work(
        &self,
        tx: &mut MySqlConnection,
        settlement: &Settlement,
        writer: &mut Writer,
        skip_locked: bool,
    ) -> DbResult<(Vec<Recorded>, Option<position::Pending>)> {
        self.epoch.fence(tx).await?;
        let rows = self.rows(tx, settlement, skip_locked).await?;
        let whole = !rows.contains(&Recorded::Busy);
        let mut pending = None;
        if let Some(position) = settlement.checkpoint.as_ref().filter(|_| whole) {
            for (table, layout) in &settlement.layouts {
                let name = self.table(*table)?.0.spec.full_name();
                layouts::store(tx, &self.epoch.name, &name, layout.as_ref()).await?;
            }
            if let Some(left) = &settlement.behind {
                behind::store(tx, &self.epoch.name, &self.tables, left).await?;
            }
            pending = Some(writer.store(tx, &self.epoch, position).await?);
        }
        Ok((rows, pending))
    }

    async fn rows(
        &self,
        conn: &mut MySqlConnection,
        settlement: &Settlement,
        skip_locked: bool,
    ) -> DbResult<Vec<Recorded>> {
        let mut recorded = vec![Recorded::Gone; settlement.outcomes.len()];
        for table in &*self.tables {
            let (at, outcomes): (Vec<usize>, Vec<&RowOutcome>) = settlement
                .outcomes
                .iter()
                .enumerate()
                .filter(|(_, o)| o.key.table == table.idx)
                .unzip();
            if at.is_empty() {
                continue;
            }
            let (_, parked) = self.table(table.idx)?;
            let rows = match table.spec.tracking {
                Tracking::Status => {
                    let mode = Mode {
                        token: None,
                        skip_locked,
                    };
                    record(conn, table, &self.retry, mode, &outcomes).await?
                }
                Tracking::None => {
                    untracked(conn, table, parked, &self.retry, skip_locked, &outcomes).await?
                }
            };
            for (i, r) in at.into_iter().zip(rows) {
                recorded[i] = r;
            }
        }
        Ok(recorded)
    }
}

/// Outcomes of a table without status columns: what was sent needs nothing (or its deletion),
/// what failed or must wait is parked.
async fn untracked(
    conn: &mut MySqlConnection,
    table: &OutboxTable,
    parked: &ParkedTable,
    retry: &RetryPolicy,
    skip_locked: bool,
    outcomes: &[&RowOutcome],
) -> DbResult<Vec<Recorded>> {
    let (mut recorded, mut park, mut delete) = (Vec::new(), Vec::new(), Vec::new());
    for (i, outcome) in outcomes.iter().enumerate() {
        let new = |status, retry_count, due_in, message, error| NewParked {
            id: &outcome.key.id,
            aggregate: &outcome.aggregate,
            message,
            status,
            retry_count,
            due_in,
            error,
        };
        recorded.push(match &outcome.verdict {
            Verdict::Sent => {
                delete.push((outcome.key.id.clone(), i));
                Recorded::Sent
            }
            Verdict::Failed {
                failure,
                retry_count,
                message,
            } => {
                let delay = match failure.class {
                    FailureClass::Retryable => retry.next(*retry_count),
                    FailureClass::Permanent => None,
                };
                let (status, count, answer) = match delay {
                    Some(_) => (Status::Pending, retry_count + 1, Recorded::WillRetry),
                    None => (Status::Failed, *retry_count, Recorded::Failed),
                };
                park.push(new(
                    status,
                    count,
                    delay,
                    message.as_deref(),
                    Some(failure.to_string()),
                ));
                answer
            }
            Verdict::Parked { message } => {
                let error = message.as_ref().err().map(ToString::to_string);
                park.push(new(
                    Status::Pending,
                    0,
                    None,
                    message.as_deref().ok(),
                    error,
                ));
                Recorded::WillRetry
            }
        });
    }
    parked.park(conn, &park).await?;
    if table.spec.on_sent == OnSent::Delete {
        let busy = remove(conn, table, skip_locked, &mut delete).await?;
        for i in busy {
            recorded[i] = Recorded::Busy;
        }
    }
    Ok(recorded)
}

/// Deletes rows that were sent, and returns the places of those that somebody keeps locked.
async fn remove(
    conn: &mut MySqlConnection,
    table: &OutboxTable,
    skip_locked: bool,
    rows: &mut [(RowId, usize)],
) -> DbResult<Vec<usize>> {
    rows.sort_unstable();
    let mut kept = Vec::new();
    for chunk in rows.chunks(sql::BATCH) {
        let mut ids: Vec<RowId> = chunk.iter().map(|(id, _)| id.clone()).collect();
        if skip_locked {
            let (free, busy) = take(conn, table, &ids).await?;
            ids = free;
            let places = chunk.iter().filter(|(id, _)| busy.contains(id));
            kept.extend(places.map(|(_, i)| *i));
        }
        if ids.is_empty() {
            continue;
        }
        let text = format!(
            "DELETE FROM {} WHERE {} IN {}",
            table.name,
            table.id,
            sql::list(ids.len())
        );
        let query = sql::bind_ids(sql::query(text), &ids);
        query.execute(&mut *conn).await?;
    }
    Ok(kept)
}

#[async_trait]
impl Ledger for TailLedger {
    async fn settle(&self, settlement: &Settlement) -> PortResult<SettleReport> {
        let work = async {
            let (mut skip_locked, mut attempt) = (false, 1);
            loop {
                match self.once(settlement, skip_locked).await {
                    Err(e) if e.number() == Some(DEADLOCK) && attempt < ATTEMPTS => attempt += 1,
                    Err(e) if e.number() == Some(LOCK_WAIT_TIMEOUT) && !skip_locked => {
                        skip_locked = true
                    }
                    done => return done,
                }
            }
        };
        self.db
            .run(&format!("settle {} rows", settlement.outcomes.len()), work)
            .await
    }

    async fn look(&self, table: TableIdx, ids: &[RowId]) -> PortResult<Vec<Seen>> {
        let work = async {
            let (table, parked) = self.table(table)?;
            let mut session = self.db.session().await?;
            let seen = match table.spec.tracking {
                Tracking::Status => look::look(&mut session, table, ids).await?,
                Tracking::None => parked.look(&mut session, ids).await?,
            };
            session.finish();
            Ok(seen)
        };
        self.db.run("read rows back", work).await
    }

    async fn holding(&self, table: TableIdx, limit: usize) -> PortResult<Vec<(Aggregate, RowId)>> {
        let work = async {
            let (table, parked) = self.table(table)?;
            let mut session = self.db.session().await?;
            let rows = match table.spec.tracking {
                Tracking::Status => look::holding(&mut session, table, limit).await?,
                Tracking::None => parked.holding(&mut session, limit).await?,
            };
            session.finish();
            Ok(rows)
        };
        self.db
            .run("read the rows that hold their aggregates", work)
            .await
    }

    async fn behind(&self) -> PortResult<Vec<Behind>> {
        let work = async {
            let mut session = self.db.session().await?;
            let left = behind::load(&mut session, &self.epoch.name, &self.tables).await?;
            session.finish();
            Ok(left)
        };
        self.db
            .run("read what is left behind the checkpoint", work)
            .await
    }

    async fn remaining(
        &self,
        table: TableIdx,
        aggregates: &[Aggregate],
        limit: usize,
    ) -> PortResult<Vec<(Aggregate, RowId)>> {
        let work = async {
            let (table, parked) = self.table(table)?;
            let mut session = self.db.session().await?;
            let rows = match table.spec.tracking {
                Tracking::Status => look::remaining(&mut session, table, aggregates, limit).await?,
                Tracking::None => parked.remaining(&mut session, aggregates, limit).await?,
            };
            session.finish();
            Ok(rows)
        };
        self.db
            .run("read what is left of held aggregates", work)
            .await
    }

    async fn read(&self, table: TableIdx, ids: &[RowId]) -> PortResult<Vec<OutboxRow>> {
        let work = async {
            let (table, _) = self.table(table)?;
            let mut session = self.db.session().await?;
            let rows = look::read(&mut session, table, ids).await?;
            session.finish();
            Ok(rows)
        };
        self.db.run("read whole rows", work).await
    }

    async fn coordinate(&self) -> PortResult<Position> {
        position::coordinate(&self.db, Some(&self.epoch.name)).await
    }
}
