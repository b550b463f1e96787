//! Deleting sent rows: few at a time, by primary key, never others.

use std::time::Duration;

use outbox_core::row::{RowId, TableIdx};
use outbox_core::status::Status;
use sqlx::{MySqlConnection, Row};
use tokio::sync::Mutex;

use crate::claims::terms::{Terms, by_created};
use crate::error::DbResult;
use crate::parked::micros;
use crate::sql;

/// Rows of one DELETE at most: its locks are short, and its transaction small.
pub const CHUNK: usize = 1000;
/// Pages of keys that one call walks over where no index leads to old rows.
const PAGES: usize = 10;
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

/// Deletes at most `limit` rows that were sent longer than `older_than` ago, in the caller's
/// transaction. Returns how many, and whether more may be found by asking again.
pub(crate) async fn purge(
    conn: &mut MySqlConnection,
    terms: &Terms<'_>,
    place: &Mutex<Option<RowId>>,
    older_than: Duration,
    limit: usize,
) -> DbResult<(u64, bool)> {
    let Some(sent_at) = terms.updated_at("c").or_else(|| terms.created_at("c")) else {
        // No row's age is known; `check` says so.
        return Ok((0, false));
    };
    let age = micros(older_than);
    let old = format!(
        "{} AND {sent_at} < NOW(6) - INTERVAL {age} MICROSECOND",
        terms.is("c", Status::Sent)
    );
    let limit = limit.min(CHUNK);
    let id = terms.id("c");
    let (ids, more) = if let Some(index) = &terms.access.by_settled {
        let text = format!(
            "SELECT {id} FROM {} c {index} WHERE {old} ORDER BY {sent_at} LIMIT {limit}",
            terms.table.name
        );
        let ids = keys(conn, terms, text, &[]).await?;
        let more = ids.len() == limit;
        (ids, more)
    } else {
        walk(conn, terms, place, &old, limit).await?
    };
    if ids.is_empty() {
        return Ok((0, more));
    }
    let mut ids = ids;
    ids.sort_unstable();
    // Only the form that names its table twice takes an alias and an index everywhere.
    let text = format!(
        "DELETE c FROM {} c FORCE INDEX (PRIMARY) WHERE {id} IN {} AND {old}",
        terms.table.name,
        sql::list(ids.len())
    );
    let done = sql::bind_ids(sql::query(text), &ids).execute(conn).await?;
    Ok((done.rows_affected(), more))
}

/// Old rows in the next pages of the table, by primary key.
async fn walk(
    conn: &mut MySqlConnection,
    terms: &Terms<'_>,
    place: &Mutex<Option<RowId>>,
    old: &str,
    limit: usize,
) -> DbResult<(Vec<RowId>, bool)> {
    let mut place = place.lock().await;
    let mut ids = Vec::new();
    for _ in 0..PAGES {
        let (page, ended) = page(conn, terms, place.as_ref(), old).await?;
        if !page.is_empty() {
            let text = format!(
                "SELECT {} FROM {} c FORCE INDEX (PRIMARY) WHERE {} IN {} AND {old} LIMIT {}",
                terms.id("c"),
                terms.table.name,
                terms.id("c"),
                sql::list(page.len()),
                limit - ids.len()
            );
            ids.extend(keys(conn, terms, text, &page).await?);
        }
        if ids.len() == limit {
            // What is left of this page is still there for the next call.
            return Ok((ids, true));
        }
        *place = page.last().filter(|_| !ended).cloned();
        if ended {
            return Ok((ids, false));
        }
    }
    Ok((ids, true))
}

/// The next keys of the table, whatever their rows, and whether no old row comes behind them:
/// the table ends there, or its keys grow with time and have come to the young rows.
async fn page(
    conn: &mut MySqlConnection,
    terms: &Terms<'_>,
    after: Option<&RowId>,
    old: &str,
) -> DbResult<(Vec<RowId>, bool)> {
    let id = terms.id("c");
    let since = terms
        .created_at("c")
        .filter(|_| by_created(terms.table).is_none());
    // The age alone, of the row's creation: it was not sent before.
    let young = match (since, old.rsplit_once(" < ")) {
        (Some(since), Some((_, limit))) => format!("COALESCE({since} >= {limit}, 0)"),
        _ => "0".to_owned(),
    };
    let behind = after.map_or(String::new(), |_| format!("WHERE {id} > ?"));
    let mut query = sql::query(format!(
        "SELECT {id}, CAST({young} AS SIGNED) FROM {} c FORCE INDEX (PRIMARY) {behind} \
         ORDER BY {id} LIMIT {PAGE}",
        terms.table.name
    ));
    if let Some(after) = after {
        query = sql::bind_id(query, after);
    }
    let rows = query.fetch_all(conn).await?;
    let mut young = rows.len() < PAGE;
    if let Some(last) = rows.last() {
        young |= last.try_get_unchecked::<i64, _>(1)? != 0;
    }
    let ids = rows.iter().map(|row| terms.table.row_id(row, 0));
    Ok((ids.collect::<DbResult<_>>()?, young))
}

async fn keys(
    conn: &mut MySqlConnection,
    terms: &Terms<'_>,
    text: String,
    ids: &[RowId],
) -> DbResult<Vec<RowId>> {
    let rows = sql::bind_ids(sql::query(text), ids).fetch_all(conn).await?;
    rows.iter().map(|row| terms.table.row_id(row, 0)).collect()
}
