//! The poller's side of the database: candidates, claims, their outcomes.
//!
//! Candidates are read without locks. Claims lock by primary key only, never wait for a row that
//! somebody keeps locked, and end before anything is published; every write-back presents the
//! claim's token, and is fenced by the epoch. A claim ends by itself on the database's clock.
//!
//! A table without `locked_by` and `locked_until` cannot hold a claim: there, being the lease's
//! holder is the only protection, and write-backs compare the row with pending instead.

pub(crate) mod indexes;
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
use tokio::sync::Mutex;

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
/// A named index does not exist.
const NO_SUCH_INDEX: u16 = 1176;

/// The poller's side of the database, for one epoch.
#[derive(Debug)]
pub struct PollLedger {
    db: Db,
    epoch: Epoch,
    tables: Arc<Vec<OutboxTable>>,
    /// Looked up when first needed, and again when a named index is gone.
    access: Vec<Mutex<Option<Arc<Access>>>>,
    parked: Vec<ParkedTable>,
    retry: RetryPolicy,
    lock_ttl: Duration,
    /// Where purges of tables without a fitting index go on.
    purge: retention::Places,
}

impl PollLedger {
    /// A store for `tables`, which are all that are configured, in their order. Claims last
    /// `lock_ttl`.
    #[must_use]
    pub fn new(
        db: Db,
        epoch: Epoch,
        tables: Arc<Vec<OutboxTable>>,
        retry: RetryPolicy,
        lock_ttl: Duration,
    ) -> Self {
        let parked = tables
            .iter()
            .map(|t| ParkedTable::new(epoch.name.clone(), t.idx, &t.spec));
        Self {
            parked: parked.collect(),
            access: tables.iter().map(|_| Mutex::default()).collect(),
            purge: retention::Places::new(tables.len()),
            db,
            epoch,
            tables,
            retry,
            lock_ttl,
        }
    }

    async fn table(&self, conn: &mut MySqlConnection, table: TableIdx) -> DbResult<One<'_>> {
        let at = usize::from(table.0);
        let found = self.tables.get(at).zip(self.access.get(at));
        let (table, access) =
            found.ok_or_else(|| DbError::Config(format!("there is no outbox number {at}")))?;
        if table.spec.tracking == Tracking::None {
            return Ok(One::Parked(&self.parked[at]));
        }
        let mut access = access.lock().await;
        let access = match &*access {
            Some(known) => Arc::clone(known),
            None => Arc::clone(access.insert(Arc::new(Access::read(conn, table).await?))),
        };
        Ok(One::Table(Terms {
            table,
            access,
            retry: &self.retry,
        }))
    }

    /// Whether work that failed so is to be repeated: after a deadlock or a lock wait, and where
    /// an index that its statements name was dropped.
    async fn again(&self, error: &DbError, attempt: &mut u32) -> bool {
        *attempt += 1;
        let passing = match error.number() {
            Some(DEADLOCK | LOCK_WAIT_TIMEOUT) => true,
            Some(NO_SUCH_INDEX) => {
                let mut forgotten = false;
                for access in &self.access {
                    forgotten |= access.lock().await.take().is_some();
                }
                forgotten
            }
            _ => false,
        };
        passing && *attempt < ATTEMPTS
    }

    async fn record_all(
        &self,
        conn: &mut MySqlConnection,
        token: Option<&str>,
        outcomes: &[RowOutcome],
        skip_locked: bool,
    ) -> DbResult<Vec<Recorded>> {
        let mut recorded = vec![Recorded::Gone; outcomes.len()];
        for table in &*self.tables {
            let (at, ours): (Vec<usize>, Vec<&RowOutcome>) = outcomes
                .iter()
                .enumerate()
                .filter(|(_, o)| o.key.table == table.idx)
                .unzip();
            if at.is_empty() {
                continue;
            }
            let rows = match self.table(conn, table.idx).await? {
                One::Parked(parked) => parked.record(conn, token, &self.retry, &ours).await?,
                One::Table(terms) => {
                    let mode = Mode {
                        token: token.filter(|_| terms.locks().is_some()),
                        skip_locked,
                    };
                    record(conn, table, &self.retry, mode, &ours).await?
                }
            };
            for (i, r) in at.into_iter().zip(rows) {
                recorded[i] = r;
            }
        }
        Ok(recorded)
    }
}

/// Work on a session, repeated where [`PollLedger::again`] says so. A macro, because closures that
/// lend the session to a future are not yet known to be `Send`.
macro_rules! repeated {
    ($ledger:expr, |$session:ident| $work:expr) => {
        async {
            let mut attempt = 0;
            loop {
                let once = async {
                    let mut session = $ledger.db.session().await?;
                    let $session: &mut MySqlConnection = &mut session;
                    let done: DbResult<_> = $work;
                    let done = done?;
                    session.finish();
                    DbResult::Ok(done)
                };
                match once.await {
                    Err(e) if $ledger.again(&e, &mut attempt).await => {}
                    done => break done,
                }
            }
        }
    };
}

/// The same in a transaction that is fenced by the epoch.
macro_rules! fenced {
    ($ledger:expr, |$conn:ident| $work:expr) => {
        repeated!($ledger, |session| {
            let mut tx = session.begin().await?;
            $ledger.epoch.fence(&mut tx).await?;
            let $conn: &mut MySqlConnection = &mut tx;
            let done: DbResult<_> = $work;
            match done {
                Ok(done) => {
                    tx.commit().await?;
                    Ok(done)
                }
                // At once: a repetition must not meet the locks of this attempt.
                Err(e) => {
                    let _ = tx.rollback().await;
                    Err(e)
                }
            }
        })
    };
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
    terms: &Terms<'_>,
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
    terms: &Terms<'_>,
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

#[async_trait]
impl PollStore for PollLedger {
    async fn scan(
        &self,
        table: TableIdx,
        scan: &Scan,
        limit: usize,
    ) -> PortResult<Vec<(Cursor, OutboxRow)>> {
        let work = repeated!(self, |conn| match self.table(conn, table).await? {
            One::Parked(parked) => parked.scan(conn, scan, limit).await,
            One::Table(terms) => scans::scan(conn, &terms, scan, limit).await,
        });
        self.db.run("look for rows to publish", work).await
    }

    async fn unsettled(
        &self,
        table: TableIdx,
        aggregates: &[Aggregate],
        limit: usize,
    ) -> PortResult<Vec<(OutboxRow, bool)>> {
        let work = repeated!(self, |conn| match self.table(conn, table).await? {
            One::Parked(parked) => parked.unsettled(conn, aggregates, limit).await,
            One::Table(terms) => scans::unsettled(conn, &terms, aggregates, limit).await,
        });
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
        let work = fenced!(self, |conn| {
            let mut ours = Vec::with_capacity(ids.len());
            for ids in ids.chunks(sql::BATCH) {
                ours.extend(match self.table(conn, table).await? {
                    One::Parked(parked) => parked.claim(conn, &token, self.lock_ttl, ids).await?,
                    One::Table(terms) => claim(conn, &terms, &token, self.lock_ttl, ids).await?,
                });
            }
            Ok(ours)
        });
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
        let mut skip_locked = false;
        let work = fenced!(self, |conn| {
            let skip = skip_locked;
            // The first attempt waits for locks; whatever stopped it, the others do not.
            skip_locked = true;
            self.record_all(conn, token, outcomes, skip).await
        });
        let operation = format!("record {} outcomes", outcomes.len());
        self.db.run(&operation, work).await
    }

    async fn release(&self, token: &ClaimToken, rows: &[RowKey]) -> PortResult<()> {
        let work = fenced!(self, |conn| {
            for table in &*self.tables {
                for ids in ids_of(rows, table.idx).chunks(sql::BATCH) {
                    match self.table(conn, table.idx).await? {
                        One::Parked(parked) => drop(parked.release(conn, &token.0, ids).await?),
                        One::Table(terms) => release(conn, &terms, &token.0, ids).await?,
                    }
                }
            }
            Ok(())
        });
        let operation = format!("give {} claims back", rows.len());
        self.db.run(&operation, work).await
    }

    async fn coordinate(&self) -> PortResult<Position> {
        position::coordinate(&self.db, Some(&self.epoch.name)).await
    }

    async fn patrol(
        &self,
        table: TableIdx,
        warn_after: Duration,
        reset_after: Duration,
    ) -> PortResult<StuckReport> {
        let work = fenced!(self, |conn| match self.table(conn, table).await? {
            One::Parked(parked) => parked.patrol(conn, warn_after, reset_after).await,
            One::Table(terms) => backlog::patrol(conn, &terms, warn_after, reset_after).await,
        });
        self.db.run("look for rows that are stuck", work).await
    }

    async fn backlog(&self, table: TableIdx) -> PortResult<TableBacklog> {
        let work = repeated!(self, |conn| match self.table(conn, table).await? {
            One::Parked(parked) => parked.backlog(conn).await,
            One::Table(terms) => backlog::count(conn, &terms).await,
        });
        self.db.run("count the backlog", work).await
    }

    async fn purge(&self, table: TableIdx, older_than: Duration, limit: usize) -> PortResult<u64> {
        let work = fenced!(self, |conn| match self.table(conn, table).await? {
            // Parked rows leave when they are sent.
            One::Parked(_) => Ok(0),
            One::Table(terms) => {
                let place = self.purge.of(table);
                Ok(retention::purge(conn, &terms, place, older_than, limit)
                    .await?
                    .0)
            }
        });
        self.db.run("delete sent rows", work).await
    }
}
