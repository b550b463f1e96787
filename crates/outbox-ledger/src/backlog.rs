//! How much waits, and what is stuck.

use std::time::Duration;

use outbox_core::ports::{StuckReport, TableBacklog};
use outbox_core::status::Status;
use sqlx::{MySqlConnection, Row};

use crate::claims::terms::Terms;
use crate::error::DbResult;
use crate::layouts::text;
use crate::parked::micros;
use crate::record::{quoted, unlocked};
use crate::sql;

/// Due retries among which the oldest row is looked for.
const LOOKED_AT: u32 = 1000;

/// Counts by status but for sent rows, and the age of the oldest row that is due.
pub(crate) async fn count(conn: &mut MySqlConnection, terms: &Terms<'_>) -> DbResult<TableBacklog> {
    let status = quoted(terms.table.spec.columns.status.as_ref());
    let counted = Status::ALL.into_iter().filter(|s| *s != Status::Sent);
    let counted: Vec<Status> = counted.collect();
    let query = sql::query(format!(
        "SELECT CAST(c.{status} AS CHAR), COUNT(*) FROM {} c {} WHERE {} GROUP BY c.{status}",
        terms.table.name,
        terms.access.by_status,
        terms.is_one_of("c", &counted),
    ));
    let mut by_status: Vec<(Status, u64)> = counted.into_iter().map(|s| (s, 0)).collect();
    for row in query.fetch_all(&mut *conn).await? {
        let stored = text(&row, 0)?;
        let count: i64 = row.try_get_unchecked(1)?;
        let status = terms.table.spec.status_values.from_text(&stored);
        for slot in &mut by_status {
            if Some(slot.0) == status {
                slot.1 += u64::try_from(count).unwrap_or(0);
            }
        }
    }
    Ok(TableBacklog {
        by_status,
        oldest_pending_seconds: oldest(conn, terms).await?,
    })
}

/// Never-attempted rows in the index's order, which is the order of their insertion, and the
/// retries that have been due the longest: not the minimum over a backlog of millions.
async fn oldest(conn: &mut MySqlConnection, terms: &Terms<'_>) -> DbResult<Option<u64>> {
    let Some(since) = terms.created_at("c").or_else(|| terms.updated_at("c")) else {
        return Ok(None);
    };
    let pending = terms.is("c", Status::Pending);
    let branch = |due: &str, limit: u32| {
        format!(
            "(SELECT {since} AS since FROM {} c {} WHERE {pending} AND {due} LIMIT {limit})",
            terms.table.name, terms.access.by_status,
        )
    };
    let branches = match terms.next_retry_at("c") {
        Some(at) => format!(
            "{} UNION ALL {}",
            branch(&format!("{at} IS NULL"), 1),
            branch(&format!("{at} <= NOW(6)"), LOOKED_AT)
        ),
        None => branch(&terms.due("c"), LOOKED_AT),
    };
    let query = sql::query(format!(
        "SELECT CAST(TIMESTAMPDIFF(SECOND, MIN(since), NOW(6)) AS SIGNED) FROM ({branches}) x"
    ));
    let row = query.fetch_one(conn).await?;
    let age: Option<i64> = row.try_get_unchecked(0)?;
    Ok(age.map(|s| u64::try_from(s).unwrap_or(0)))
}

/// Counts and resets rows that are in processing for too long, whatever their claim says.
///
/// A row is in processing since `updated_at`, which every claim sets; without that column since
/// its claim's end, and without an end since `created_at`.
pub(crate) async fn patrol(
    conn: &mut MySqlConnection,
    terms: &Terms<'_>,
    warn_after: Duration,
    reset_after: Duration,
) -> DbResult<StuckReport> {
    let until = terms
        .locks()
        .map(|(_, until)| format!("c.{}", sql::quote(until)));
    let since = match (terms.updated_at("c"), until, terms.created_at("c")) {
        (Some(updated), _, _) => updated,
        (None, Some(until), Some(created)) => format!("COALESCE({until}, {created})"),
        (None, Some(until), None) => until,
        (None, None, Some(created)) => created,
        (None, None, None) => return Ok(StuckReport::default()),
    };
    let table = terms.table;
    let (processing, hint) = (terms.is("c", Status::Processing), &terms.access.by_status);
    let stuck = sql::query(format!(
        "SELECT COUNT(*) FROM {} c {hint} WHERE {processing} \
         AND {since} < NOW(6) - INTERVAL ? MICROSECOND",
        table.name
    ))
    .bind(micros(warn_after))
    .fetch_one(&mut *conn)
    .await?;
    let stuck: i64 = stuck.try_get_unchecked(0)?;
    let old = sql::query(format!(
        "SELECT {} FROM {} c {hint} WHERE {processing} \
         AND {since} < NOW(6) - INTERVAL ? MICROSECOND LIMIT {}",
        terms.id("c"),
        table.name,
        sql::BATCH
    ))
    .bind(micros(reset_after))
    .fetch_all(&mut *conn)
    .await?;
    let ids = old
        .iter()
        .map(|row| table.row_id(row, 0))
        .collect::<DbResult<Vec<_>>>()?;
    let mut reset = 0;
    if !ids.is_empty() {
        // By key, and compared once more: a claim may be a moment old.
        let status = quoted(table.spec.columns.status.as_ref());
        let query = sql::query(format!(
            "UPDATE {} c FORCE INDEX (PRIMARY) SET {status} = {}{} WHERE {} IN {} \
             AND {processing} AND {since} < NOW(6) - INTERVAL ? MICROSECOND",
            table.name,
            terms.status(Status::Pending),
            unlocked(table),
            terms.id("c"),
            sql::list(ids.len()),
        ));
        let query = sql::bind_ids(query, &ids).bind(micros(reset_after));
        reset = query.execute(conn).await?.rows_affected();
    }
    Ok(StuckReport {
        stuck: u64::try_from(stuck).unwrap_or(0),
        reset,
    })
}
