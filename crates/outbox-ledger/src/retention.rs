//! Deleting sent rows: few at a time, by primary key, never others.

use std::time::Duration;

use outbox_core::row::{RowId, TableIdx};
use outbox_core::status::Status;
use sqlx::{Connection as _, MySqlConnection};
use tokio::sync::Mutex;

use crate::claims::terms::{Terms, by_created};
use crate::error::{DEADLOCK, DbResult, LOCK_WAIT_TIMEOUT};
use crate::lease::Epoch;
use crate::parked::micros;
use crate::sql;

/// Rows of one DELETE.
const CHUNK: usize = 1000;
/// Pages of keys that one call walks over where no index leads to old rows.
const PAGES: usize = 20;
/// Keys in such a page.
const PAGE: usize = 1000;

/// How far each table was walked.
#[derive(Debug)]
pub(crate) struct Places(Vec<Mutex<Option<RowId>>>);

impl Places {
    pub(crate) fn new(tables: usize) -> Self {
        Self((0..tables).map(|_| Mutex::new(None)).collect())
    }

    /// The place of a table that was configured.
    pub(crate) fn of(&self, table: TableIdx) -> &Mutex<Option<RowId>> {
        &self.0[usize::from(table.0)]
    }
}

/// Deletes at most `limit` rows that were sent longer than `older_than` ago. 0 means that there
/// are no more, or, where no index leads to them, none in the next pages of the table.
pub(crate) async fn purge(
    conn: &mut MySqlConnection,
    epoch: Option<&Epoch>,
    terms: Terms<'_>,
    place: &Mutex<Option<RowId>>,
    older_than: Duration,
    limit: usize,
) -> DbResult<u64> {
    let Some(sent_at) = terms.updated_at("c").or_else(|| terms.created_at("c")) else {
        return Ok(0);
    };
    let age = micros(older_than);
    let old = format!("{sent_at} < NOW(6) - INTERVAL {age} MICROSECOND");
    let sent = terms.is("c", Status::Sent);
    let limit = limit.min(CHUNK);
    if let Some(index) = &terms.access.by_settled {
        let ids = select(
            conn,
            terms,
            &format!("{index} WHERE {sent} AND {old} ORDER BY {sent_at} LIMIT {limit}"),
            None,
        )
        .await?;
        return delete(conn, epoch, terms, &format!("{sent} AND {old}"), ids).await;
    }
    let mut place = place.lock().await;
    let mut ids = Vec::new();
    for _ in 0..PAGES {
        let page = page(conn, terms, place.as_ref()).await?;
        let found = select(
            conn,
            terms,
            &format!(
                "FORCE INDEX (PRIMARY) WHERE {sent} AND {old} AND {} IN {} LIMIT {}",
                terms.id("c"),
                sql::list(page.len()),
                limit - ids.len()
            ),
            Some(&page),
        )
        .await?;
        // What is left of a page is still there for the next call.
        let whole = ids.len() + found.len() < limit;
        let any = !found.is_empty();
        ids.extend(found);
        if !whole {
            break;
        }
        // Integer keys grow with time: behind a page without an old row there is none.
        let ended = page.len() < PAGE || (!any && by_created(terms.table).is_none());
        *place = page.last().filter(|_| !ended).cloned();
        if ended {
            break;
        }
    }
    drop(place);
    delete(conn, epoch, terms, &format!("{sent} AND {old}"), ids).await
}

/// The next keys of the table, whatever their rows.
async fn page(
    conn: &mut MySqlConnection,
    terms: Terms<'_>,
    after: Option<&RowId>,
) -> DbResult<Vec<RowId>> {
    let id = terms.id("c");
    let behind = after.map_or(String::new(), |_| format!("WHERE {id} > ?"));
    let rest = format!("FORCE INDEX (PRIMARY) {behind} ORDER BY {id} LIMIT {PAGE}");
    select(conn, terms, &rest, after.map(std::slice::from_ref)).await
}

async fn select(
    conn: &mut MySqlConnection,
    terms: Terms<'_>,
    rest: &str,
    ids: Option<&[RowId]>,
) -> DbResult<Vec<RowId>> {
    if ids.is_some_and(<[RowId]>::is_empty) {
        return Ok(Vec::new());
    }
    let text = format!(
        "SELECT {} FROM {} c {rest}",
        terms.id("c"),
        terms.table.name
    );
    let query = sql::bind_ids(sql::query(text), ids.unwrap_or_default());
    let rows = query.fetch_all(conn).await?;
    rows.iter().map(|row| terms.table.row_id(row, 0)).collect()
}

/// Deletes by key, in the keys' order, what still is what it was.
async fn delete(
    conn: &mut MySqlConnection,
    epoch: Option<&Epoch>,
    terms: Terms<'_>,
    still: &str,
    mut ids: Vec<RowId>,
) -> DbResult<u64> {
    if ids.is_empty() {
        return Ok(0);
    }
    ids.sort_unstable();
    let (table, id) = (terms.table, terms.id("c"));
    // Only the form with two table names takes an alias and an index on every server.
    let text = format!(
        "DELETE c FROM {} c FORCE INDEX (PRIMARY) WHERE {id} IN {} AND {still}",
        table.name,
        sql::list(ids.len())
    );
    let mut attempt = 1;
    loop {
        let mut tx = conn.begin().await?;
        if let Some(epoch) = epoch {
            epoch.fence(&mut tx).await?;
        }
        let done = sql::bind_ids(sql::query(text.clone()), &ids)
            .execute(&mut *tx)
            .await;
        match done.map_err(crate::error::DbError::from) {
            Ok(done) => {
                tx.commit().await?;
                return Ok(done.rows_affected());
            }
            Err(e) if matches!(e.number(), Some(DEADLOCK | LOCK_WAIT_TIMEOUT)) && attempt < 3 => {
                attempt += 1;
                tx.rollback().await?;
            }
            Err(e) => return Err(e),
        }
    }
}
