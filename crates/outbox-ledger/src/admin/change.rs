//! Changing rows: retry, abandon, purge.

use std::time::Duration;

use outbox_core::ports::PortResult;
use outbox_core::row::{Aggregate, RowId, TableIdx};
use outbox_core::status::Status;
use sqlx::MySqlConnection;
use tokio::sync::Mutex;

use super::{Admin, One};
use crate::claims::terms::Terms;
use crate::error::DbResult;
use crate::parked::{self, ParkedTable};
use crate::record::{quoted, unlocked};
use crate::{retention, sql};

/// What becomes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// failed -> pending, no retry spent, due now.
    Retry,
    /// pending or failed -> abandoned.
    Abandon,
}

impl Change {
    const fn from(self) -> &'static [Status] {
        match self {
            Self::Retry => &[Status::Failed],
            Self::Abandon => &[Status::Pending, Status::Failed],
        }
    }
}

impl Admin {
    /// Failed rows with these keys go back to pending, due at once, all their retries before
    /// them. Returns how many.
    pub async fn retry(&self, table: Option<TableIdx>, ids: &[String]) -> PortResult<u64> {
        let work = self.change_these(Change::Retry, table, ids);
        self.db.run("retry rows", work).await
    }

    /// The same for every row that has failed by now, of one table or of all.
    pub async fn retry_all_failed(&self, table: Option<TableIdx>) -> PortResult<u64> {
        let mut changed = 0;
        for table in self.these(table) {
            // Row by row in the order of keys, each at most once: what fails again meanwhile is
            // not for this command.
            let mut after = None;
            loop {
                let work = self.retry_page(table, after.as_ref());
                let (n, last) = self.db.run("retry all failed rows", work).await?;
                changed += n;
                after = last;
                if after.is_none() {
                    break;
                }
            }
        }
        Ok(changed)
    }

    /// Pending and failed rows with these keys are never published. Returns how many.
    pub async fn abandon(&self, table: Option<TableIdx>, ids: &[String]) -> PortResult<u64> {
        let work = self.change_these(Change::Abandon, table, ids);
        self.db.run("abandon rows", work).await
    }

    /// The same for the pending and failed rows of an aggregate (of any type, where none is
    /// given), in one table or in all.
    pub async fn abandon_aggregate(
        &self,
        table: Option<TableIdx>,
        kind: Option<&str>,
        id: &str,
    ) -> PortResult<u64> {
        let work = async {
            let mut session = self.db.session().await?;
            let mut changed = 0;
            for table in self.these(table) {
                changed += match self.one(&mut session, table).await? {
                    One::Table(terms) => abandon_aggregate(&mut session, &terms, kind, id).await?,
                    One::Parked(parked) => parked.abandon_aggregate(&mut session, kind, id).await?,
                };
            }
            session.finish();
            Ok(changed)
        };
        self.db.run("abandon an aggregate", work).await
    }

    /// Deletes rows that were sent longer than `older_than` ago, in small chunks, one
    /// transaction each; `progress` hears how many so far after each.
    pub async fn purge(
        &self,
        table: Option<TableIdx>,
        older_than: Duration,
        mut progress: impl FnMut(u64) + Send,
    ) -> PortResult<u64> {
        let mut deleted = 0;
        for table in self.these(table) {
            let place = Mutex::new(None);
            loop {
                let work = self.purge_chunk(table, &place, older_than);
                let (n, more) = self.db.run("delete sent rows", work).await?;
                deleted += n;
                progress(deleted);
                if !more {
                    break;
                }
            }
        }
        Ok(deleted)
    }

    async fn purge_chunk(
        &self,
        table: TableIdx,
        place: &Mutex<Option<RowId>>,
        older_than: Duration,
    ) -> DbResult<(u64, bool)> {
        let mut session = self.db.session().await?;
        let done = match self.one(&mut session, table).await? {
            One::Table(terms) => {
                let limit = retention::CHUNK;
                retention::purge(&mut session, &terms, place, older_than, limit).await?
            }
            One::Parked(_) => (0, false),
        };
        session.finish();
        Ok(done)
    }

    async fn change_these(
        &self,
        change: Change,
        table: Option<TableIdx>,
        printed: &[String],
    ) -> DbResult<u64> {
        let mut session = self.db.session().await?;
        let mut changed = 0;
        if let Some(table) = self.owner(&mut session, table, printed).await? {
            let mut ids = self.ids(table, printed)?;
            ids.sort_unstable();
            ids.dedup();
            for ids in ids.chunks(sql::BATCH) {
                changed += match self.one(&mut session, table).await? {
                    One::Table(terms) => apply(&mut session, &terms, change, ids).await?,
                    One::Parked(parked) => parked.apply(&mut session, change, ids).await?,
                };
            }
        }
        session.finish();
        Ok(changed)
    }

    async fn retry_page(
        &self,
        table: TableIdx,
        after: Option<&RowId>,
    ) -> DbResult<(u64, Option<RowId>)> {
        let mut session = self.db.session().await?;
        let done = match self.one(&mut session, table).await? {
            One::Table(terms) => {
                let id = terms.id("c");
                let behind = after.map_or(String::new(), |_| format!("AND {id} > ?"));
                let mut query = sql::query(format!(
                    "SELECT {id} FROM {} c {} WHERE {} {behind} ORDER BY {id} LIMIT {}",
                    terms.table.name,
                    terms.access.by_status,
                    terms.is("c", Status::Failed),
                    sql::BATCH
                ));
                if let Some(after) = after {
                    query = sql::bind_id(query, after);
                }
                let rows = query.fetch_all(&mut *session).await?;
                let ids = rows.iter().map(|row| terms.table.row_id(row, 0));
                let ids = ids.collect::<DbResult<Vec<_>>>()?;
                let changed = apply(&mut session, &terms, Change::Retry, &ids).await?;
                let full = ids.len() == sql::BATCH;
                (changed, ids.last().filter(|_| full).cloned())
            }
            One::Parked(parked) => (parked.retry_all(&mut session).await?, None),
        };
        session.finish();
        Ok(done)
    }
}

/// One statement, by primary key, compared with the states that the change begins from.
async fn apply(
    conn: &mut MySqlConnection,
    terms: &Terms<'_>,
    change: Change,
    ids: &[RowId],
) -> DbResult<u64> {
    if ids.is_empty() {
        return Ok(0);
    }
    let table = terms.table;
    let columns = &table.spec.columns;
    let status = quoted(columns.status.as_ref());
    let to = match change {
        Change::Abandon => terms.status(Status::Abandoned),
        Change::Retry => {
            let mut set = terms.status(Status::Pending);
            set.push_str(&format!(", {} = 0", quoted(columns.retry_count.as_ref())));
            if let Some(next) = &columns.next_retry_at {
                set.push_str(&format!(", {} = {}", sql::quote(next), table.now(next)));
            }
            set
        }
    };
    let query = sql::query(format!(
        "UPDATE {} c FORCE INDEX (PRIMARY) SET {status} = {to}{} WHERE {} IN {} AND {}",
        table.name,
        unlocked(table),
        terms.id("c"),
        sql::list(ids.len()),
        terms.is_one_of("c", change.from()),
    ));
    Ok(sql::bind_ids(query, ids)
        .execute(conn)
        .await?
        .rows_affected())
}

async fn abandon_aggregate(
    conn: &mut MySqlConnection,
    terms: &Terms<'_>,
    kind: Option<&str>,
    id: &str,
) -> DbResult<u64> {
    let typed = terms.table.spec.columns.aggregate_type.is_some();
    if !typed && kind.is_some_and(|k| !k.is_empty()) {
        return Ok(0);
    }
    let aggregate = Aggregate {
        table: terms.table.idx,
        kind: kind.unwrap_or_default().into(),
        id: id.into(),
    };
    let condition = if kind.is_none() && typed {
        terms.of_aggregate_id("c", id)
    } else {
        terms.of_aggregate("c", &aggregate)
    };
    let Some((condition, values)) = condition else {
        return Ok(0);
    };
    let mut changed = 0;
    loop {
        let mut query = sql::query(format!(
            "SELECT {} FROM {} c WHERE {condition} AND {} LIMIT {}",
            terms.id("c"),
            terms.table.name,
            terms.is_one_of("c", Change::Abandon.from()),
            sql::BATCH
        ));
        for value in &values {
            query = sql::bind_id(query, value);
        }
        let rows = query.fetch_all(&mut *conn).await?;
        let ids = rows.iter().map(|row| terms.table.row_id(row, 0));
        let mut ids = ids.collect::<DbResult<Vec<_>>>()?;
        ids.sort_unstable();
        changed += apply(conn, terms, Change::Abandon, &ids).await?;
        if ids.len() < sql::BATCH {
            return Ok(changed);
        }
    }
}

impl ParkedTable {
    const RETRY: &str = "UPDATE outboxd_parked SET status = 0, retry_count = 0, \
        next_retry_at = UTC_TIMESTAMP(6), locked_by = NULL, locked_until = NULL, \
        updated_at = UTC_TIMESTAMP(6) WHERE";
    const ABANDON: &str = "UPDATE outboxd_parked SET status = 4, locked_by = NULL, \
        locked_until = NULL, updated_at = UTC_TIMESTAMP(6) WHERE";

    async fn apply(
        &self,
        conn: &mut MySqlConnection,
        change: Change,
        ids: &[RowId],
    ) -> DbResult<u64> {
        let (head, tail) = match change {
            Change::Retry => (Self::RETRY, "AND status = 2"),
            Change::Abandon => (Self::ABANDON, "AND status IN (0, 2)"),
        };
        let query = self.keyed(head, ids, tail);
        let query = parked::bind_keys(self.bound(query), ids);
        Ok(query.execute(conn).await?.rows_affected())
    }

    async fn retry_all(&self, conn: &mut MySqlConnection) -> DbResult<u64> {
        let query = sql::query(format!(
            "{} name = ? AND table_name = ? AND status = 2",
            Self::RETRY
        ));
        Ok(self.bound(query).execute(conn).await?.rows_affected())
    }

    async fn abandon_aggregate(
        &self,
        conn: &mut MySqlConnection,
        kind: Option<&str>,
        id: &str,
    ) -> DbResult<u64> {
        let typed = kind.map_or("", |_| "AND aggregate_type = ?");
        let query = sql::query(format!(
            "{} name = ? AND table_name = ? AND aggregate_id = ? {typed} AND status IN (0, 2)",
            Self::ABANDON
        ));
        let mut query = self.bound(query).bind(id.to_owned());
        if let Some(kind) = kind {
            query = query.bind(kind.to_owned());
        }
        Ok(query.execute(conn).await?.rows_affected())
    }
}
