//! The poller's side of the database: candidates, claims, their outcomes.
//!
//! Candidates are read without locks. Claims lock by primary key only, never wait for a row that
//! somebody keeps locked, and end before anything is published; every write-back presents the
//! claim's token, and is fenced by the epoch. A claim ends by itself on the database's clock.
//!
//! A table without `locked_by` and `locked_until` cannot hold a claim: there, being the lease's
//! holder is the only protection, and write-backs compare the row with pending instead.

mod scans;
pub(crate) mod terms;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use outbox_core::Position;
use outbox_core::ports::{
    ClaimToken, Cursor, PollStore, PortResult, Recorded, RowOutcome, Scan, StuckReport,
    TableBacklog,
};
use outbox_core::retry::RetryPolicy;
use outbox_core::row::{Aggregate, OutboxRow, RowId, RowKey, TableIdx};
use outbox_core::spec::Tracking;
use outbox_core::status::Status;
use sqlx::{Connection as _, MySqlConnection};

use self::terms::{Access, Terms};
use crate::connect::Db;
use crate::error::{DEADLOCK, DbError, DbResult, LOCK_WAIT_TIMEOUT};
use crate::lease::Epoch;
use crate::parked::{ParkedTable, micros};
use crate::record::{Mode, record, unlocked};
use crate::table::OutboxTable;
use crate::{backlog, position, retention, sql};

/// Deadlocks in a row before the caller hears of it and backs off.
const ATTEMPTS: u32 = 5;

/// The poller's side of the database, for one epoch.
#[derive(Debug)]
pub struct PollLedger {
    db: Db,
    epoch: Epoch,
    tables: Arc<Vec<OutboxTable>>,
    access: Vec<Access>,
    parked: Vec<ParkedTable>,
    retry: RetryPolicy,
    lock_ttl: Duration,
    /// Where purges of tables without a fitting index go on.
    purge: retention::Places,
}

impl PollLedger {
    /// Looks at the indexes of `tables`, which are all that are configured, in their order.
    /// Claims last `lock_ttl`.
    pub async fn open(
        db: Db,
        epoch: Epoch,
        tables: Arc<Vec<OutboxTable>>,
        retry: RetryPolicy,
        lock_ttl: Duration,
    ) -> PortResult<Self> {
        let work = async {
            let mut session = db.session().await?;
            let mut access = Vec::with_capacity(tables.len());
            for table in &*tables {
                access.push(Access::read(&mut session, table).await?);
            }
            session.finish();
            Ok(access)
        };
        let access = db.run("read the tables' indexes", work).await?;
        let parked = tables
            .iter()
            .map(|t| ParkedTable::new(epoch.name.clone(), t.idx, &t.spec));
        Ok(Self {
            parked: parked.collect(),
            purge: retention::Places::new(tables.len()),
            db,
            epoch,
            tables,
            access,
            retry,
            lock_ttl,
        })
    }

    fn table(&self, table: TableIdx) -> DbResult<One<'_>> {
        let at = usize::from(table.0);
        let found = self.tables.get(at).zip(self.access.get(at));
        let (table, access) =
            found.ok_or_else(|| DbError::Config(format!("there is no outbox number {at}")))?;
        if table.spec.tracking == Tracking::None {
            return Ok(One::Parked(&self.parked[at]));
        }
        Ok(One::Table(Terms {
            table,
            access,
            retry: &self.retry,
        }))
    }

    async fn claim_once(
        &self,
        table: TableIdx,
        token: &str,
        ids: &[RowId],
    ) -> DbResult<Vec<RowId>> {
        let mut session = self.db.session().await?;
        let mut tx = session.begin().await?;
        self.epoch.fence(&mut tx).await?;
        let mut ours = Vec::with_capacity(ids.len());
        for ids in ids.chunks(sql::BATCH) {
            ours.extend(match self.table(table)? {
                One::Parked(parked) => parked.claim(&mut tx, token, self.lock_ttl, ids).await?,
                One::Table(terms) => claim(&mut tx, terms, token, self.lock_ttl, ids).await?,
            });
        }
        tx.commit().await?;
        session.finish();
        Ok(ours)
    }

    async fn record_once(
        &self,
        token: Option<&str>,
        outcomes: &[RowOutcome],
        skip_locked: bool,
    ) -> DbResult<Vec<Recorded>> {
        let mut recorded = vec![Recorded::Gone; outcomes.len()];
        let mut session = self.db.session().await?;
        let mut tx = session.begin().await?;
        self.epoch.fence(&mut tx).await?;
        for table in &*self.tables {
            let (at, ours): (Vec<usize>, Vec<&RowOutcome>) = outcomes
                .iter()
                .enumerate()
                .filter(|(_, o)| o.key.table == table.idx)
                .unzip();
            if at.is_empty() {
                continue;
            }
            let rows = match self.table(table.idx)? {
                One::Parked(parked) => parked.record(&mut tx, token, &self.retry, &ours).await?,
                One::Table(terms) => {
                    let mode = Mode {
                        token: token.filter(|_| terms.locks().is_some()),
                        skip_locked,
                    };
                    record(&mut tx, table, &self.retry, mode, &ours).await?
                }
            };
            for (i, r) in at.into_iter().zip(rows) {
                recorded[i] = r;
            }
        }
        tx.commit().await?;
        session.finish();
        Ok(recorded)
    }

    async fn release_once(&self, token: &str, rows: &[RowKey]) -> DbResult<()> {
        let mut session = self.db.session().await?;
        let mut tx = session.begin().await?;
        self.epoch.fence(&mut tx).await?;
        for table in &*self.tables {
            let ids = ids_of(rows, table.idx);
            for ids in ids.chunks(sql::BATCH) {
                match self.table(table.idx)? {
                    One::Parked(parked) => drop(parked.release(&mut tx, token, ids).await?),
                    One::Table(terms) => release(&mut tx, terms, token, ids).await?,
                }
            }
        }
        tx.commit().await?;
        session.finish();
        Ok(())
    }

    async fn patrol_once(
        &self,
        table: TableIdx,
        warn_after: Duration,
        reset_after: Duration,
    ) -> DbResult<StuckReport> {
        let mut session = self.db.session().await?;
        let mut tx = session.begin().await?;
        self.epoch.fence(&mut tx).await?;
        let report = match self.table(table)? {
            One::Parked(parked) => parked.patrol(&mut tx, warn_after, reset_after).await?,
            One::Table(terms) => backlog::patrol(&mut tx, terms, warn_after, reset_after).await?,
        };
        tx.commit().await?;
        session.finish();
        Ok(report)
    }
}

/// Where the poller's rows of a table are.
enum One<'a> {
    Table(Terms<'a>),
    Parked(&'a ParkedTable),
}

/// Keys of one table, in the order in which every session of ours locks them.
fn ids_of(rows: &[RowKey], table: TableIdx) -> Vec<RowId> {
    let ours = rows.iter().filter(|k| k.table == table);
    let mut ids: Vec<RowId> = ours.map(|k| k.id.clone()).collect();
    ids.sort_unstable();
    ids
}

/// Claims what is ready. Locks are taken on existing rows only, and none is waited for: a row
/// that is locked is in somebody's hands, and comes back with the next scan.
async fn claim(
    conn: &mut MySqlConnection,
    terms: Terms<'_>,
    token: &str,
    lock_ttl: Duration,
    ids: &[RowId],
) -> DbResult<Vec<RowId>> {
    let table = terms.table;
    let lock = if terms.locks().is_some() {
        "FOR UPDATE SKIP LOCKED"
    } else {
        ""
    };
    let query = sql::query(format!(
        "SELECT t.{} FROM {} t FORCE INDEX (PRIMARY) WHERE t.{} IN {} AND {} {lock}",
        table.id,
        table.name,
        table.id,
        sql::list(ids.len()),
        terms.ready("t")
    ));
    let rows = sql::bind_ids(query, ids).fetch_all(&mut *conn).await?;
    let ours = rows
        .iter()
        .map(|row| table.row_id(row, 0))
        .collect::<DbResult<Vec<_>>>()?;
    let Some((by, until)) = terms.locks().filter(|_| !ours.is_empty()) else {
        return Ok(ours);
    };
    let status = crate::record::quoted(table.spec.columns.status.as_ref());
    let updated = table.spec.columns.updated_at.as_deref();
    let updated = updated.map_or(String::new(), |c| {
        format!(", {} = {}", sql::quote(c), table.now(c))
    });
    let query = sql::query(format!(
        "UPDATE {} FORCE INDEX (PRIMARY) SET {status} = {}, {} = ?, \
         {} = NOW(6) + INTERVAL ? MICROSECOND{updated} WHERE {} IN {}",
        table.name,
        terms.status(Status::Processing),
        sql::quote(by),
        sql::quote(until),
        table.id,
        sql::list(ours.len()),
    ));
    let query = query.bind(token.to_owned()).bind(micros(lock_ttl));
    sql::bind_ids(query, &ours).execute(conn).await?;
    Ok(ours)
}

async fn release(
    conn: &mut MySqlConnection,
    terms: Terms<'_>,
    token: &str,
    ids: &[RowId],
) -> DbResult<()> {
    let Some((by, _)) = terms.locks() else {
        return Ok(());
    };
    let table = terms.table;
    let status = crate::record::quoted(table.spec.columns.status.as_ref());
    let query = sql::query(format!(
        "UPDATE {} FORCE INDEX (PRIMARY) SET {status} = {}{} \
         WHERE {} IN {} AND {status} = {} AND {} = ?",
        table.name,
        terms.status(Status::Pending),
        unlocked(table),
        table.id,
        sql::list(ids.len()),
        terms.status(Status::Processing),
        sql::quote(by),
    ));
    let query = sql::bind_ids(query, ids).bind(token.to_owned());
    query.execute(conn).await?;
    Ok(())
}

/// Whether a transaction that failed so is to be repeated.
fn repeatable(error: &DbError) -> bool {
    matches!(error.number(), Some(DEADLOCK | LOCK_WAIT_TIMEOUT))
}

#[async_trait]
impl PollStore for PollLedger {
    async fn scan(
        &self,
        table: TableIdx,
        scan: &Scan,
        limit: usize,
    ) -> PortResult<Vec<(Cursor, OutboxRow)>> {
        let work = async {
            let mut session = self.db.session().await?;
            let rows = match self.table(table)? {
                One::Parked(parked) => parked.scan(&mut session, scan, limit).await?,
                One::Table(terms) => scans::scan(&mut session, terms, scan, limit).await?,
            };
            session.finish();
            Ok(rows)
        };
        self.db.run("look for rows to publish", work).await
    }

    async fn unsettled(
        &self,
        table: TableIdx,
        aggregates: &[Aggregate],
        limit: usize,
    ) -> PortResult<Vec<(OutboxRow, bool)>> {
        let work = async {
            let mut session = self.db.session().await?;
            let rows = match self.table(table)? {
                One::Parked(parked) => parked.unsettled(&mut session, aggregates, limit).await?,
                One::Table(terms) => {
                    scans::unsettled(&mut session, terms, aggregates, limit).await?
                }
            };
            session.finish();
            Ok(rows)
        };
        self.db.run("read the rows of held aggregates", work).await
    }

    async fn claim(
        &self,
        table: TableIdx,
        rows: &[RowKey],
    ) -> PortResult<(ClaimToken, Vec<RowKey>)> {
        // A fresh token for every claim: a write-back that comes late matches nothing of a later
        // claim, not even of this process.
        let token = format!("outboxd-{:032x}", rand::random::<u128>());
        let ids = ids_of(rows, table);
        let work = async {
            let mut attempt = 1;
            loop {
                match self.claim_once(table, &token, &ids).await {
                    Err(e) if repeatable(&e) && attempt < ATTEMPTS => attempt += 1,
                    done => return done,
                }
            }
        };
        let ours = self
            .db
            .run(&format!("claim {} rows", ids.len()), work)
            .await?;
        let keys = ours.into_iter().map(|id| RowKey { table, id }).collect();
        Ok((ClaimToken(token), keys))
    }

    async fn record(
        &self,
        token: Option<&ClaimToken>,
        outcomes: &[RowOutcome],
    ) -> PortResult<Vec<Recorded>> {
        let token = token.map(|t| t.0.as_str());
        let work = async {
            let (mut skip_locked, mut attempt) = (false, 1);
            loop {
                match self.record_once(token, outcomes, skip_locked).await {
                    Err(e) if e.number() == Some(DEADLOCK) && attempt < ATTEMPTS => attempt += 1,
                    Err(e) if e.number() == Some(LOCK_WAIT_TIMEOUT) && !skip_locked => {
                        skip_locked = true;
                    }
                    done => return done,
                }
            }
        };
        let operation = format!("record {} outcomes", outcomes.len());
        self.db.run(&operation, work).await
    }

    async fn release(&self, token: &ClaimToken, rows: &[RowKey]) -> PortResult<()> {
        let work = async {
            let mut attempt = 1;
            loop {
                match self.release_once(&token.0, rows).await {
                    Err(e) if repeatable(&e) && attempt < ATTEMPTS => attempt += 1,
                    done => return done,
                }
            }
        };
        let operation = format!("give {} claims back", rows.len());
        self.db.run(&operation, work).await
    }

    async fn coordinate(&self) -> PortResult<Position> {
        position::coordinate(&self.db).await
    }

    async fn patrol(
        &self,
        table: TableIdx,
        warn_after: Duration,
        reset_after: Duration,
    ) -> PortResult<StuckReport> {
        let work = async {
            let mut attempt = 1;
            loop {
                match self.patrol_once(table, warn_after, reset_after).await {
                    Err(e) if repeatable(&e) && attempt < ATTEMPTS => attempt += 1,
                    done => return done,
                }
            }
        };
        self.db.run("look for rows that are stuck", work).await
    }

    async fn backlog(&self, table: TableIdx) -> PortResult<TableBacklog> {
        let work = async {
            let mut session = self.db.session().await?;
            let counts = match self.table(table)? {
                One::Parked(parked) => parked.backlog(&mut session).await?,
                One::Table(terms) => backlog::count(&mut session, terms).await?,
            };
            session.finish();
            Ok(counts)
        };
        self.db.run("count the backlog", work).await
    }

    async fn purge(&self, table: TableIdx, older_than: Duration, limit: usize) -> PortResult<u64> {
        let One::Table(terms) = self.table(table).map_err(|e| e.during("purge"))? else {
            // Parked rows leave when they are sent.
            return Ok(0);
        };
        let place = self.purge.of(table);
        let work = async {
            let mut session = self.db.session().await?;
            let epoch = Some(&self.epoch);
            let done =
                retention::purge(&mut session, epoch, terms, place, older_than, limit).await?;
            session.finish();
            Ok(done)
        };
        self.db.run("purge sent rows", work).await
    }
}
