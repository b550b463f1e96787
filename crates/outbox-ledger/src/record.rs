//! Recording outcomes in an outbox table: exact columns, compare-and-set. Used by the tail's
//! settle and by the poller's claims alike.

use std::collections::{HashMap, HashSet};

use outbox_core::failure::{Failure, FailureClass};
use outbox_core::ports::{Recorded, RowOutcome, Verdict};
use outbox_core::retry::RetryPolicy;
use outbox_core::row::RowId;
use outbox_core::spec::OnSent;
use outbox_core::status::Status;
use sqlx::{MySqlConnection, Row};

use crate::error::{DbError, DbResult, LOCK_NOWAIT, LOCK_WAIT_TIMEOUT};
use crate::parked::micros;
use crate::sql;
use crate::table::OutboxTable;

/// How outcomes are compared and taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mode<'a> {
    /// The claim that failures are recorded under; `None`: the row is compared with pending.
    pub(crate) token: Option<&'a str>,
    /// Somebody keeps rows locked: take those that can be had, and leave the rest `Busy`.
    pub(crate) skip_locked: bool,
}

/// Records outcomes of one table within the caller's transaction, parallel to `outcomes`.
pub(crate) async fn record(
    conn: &mut MySqlConnection,
    table: &OutboxTable,
    retry: &RetryPolicy,
    mode: Mode<'_>,
    outcomes: &[&RowOutcome],
) -> DbResult<Vec<Recorded>> {
    let mut recorded = vec![Recorded::Gone; outcomes.len()];
    let mut sent: Vec<(usize, &RowId)> = Vec::new();
    let mut failed = Vec::new();
    for (i, outcome) in outcomes.iter().enumerate() {
        match &outcome.verdict {
            Verdict::Sent => sent.push((i, &outcome.key.id)),
            Verdict::Failed {
                failure,
                retry_count,
                ..
            } => {
                failed.push((i, &outcome.key.id, failure, *retry_count));
            }
            // Only tables without status columns park.
            Verdict::Parked { .. } => {}
        }
    }
    // In the order of the primary key, as every session of ours: fewer deadlocks.
    sent.sort_unstable_by(|a, b| a.1.cmp(b.1));
    failed.sort_unstable_by(|a, b| a.1.cmp(b.1));
    for chunk in sent.chunks(sql::BATCH) {
        record_sent(conn, table, mode, chunk, &mut recorded).await?;
    }
    for (i, id, failure, retry_count) in failed {
        recorded[i] = record_failed(conn, table, retry, mode, id, failure, retry_count).await?;
    }
    Ok(recorded)
}

async fn record_sent(
    conn: &mut MySqlConnection,
    table: &OutboxTable,
    mode: Mode<'_>,
    chunk: &[(usize, &RowId)],
    recorded: &mut [Recorded],
) -> DbResult<()> {
    let mut ids: Vec<RowId> = chunk.iter().map(|(_, id)| (*id).clone()).collect();
    let mut busy = HashSet::new();
    if mode.skip_locked {
        (ids, busy) = take(conn, table, &ids).await?;
    }
    for (i, _) in chunk.iter().filter(|(_, id)| busy.contains(*id)) {
        recorded[*i] = Recorded::Busy;
    }
    if ids.is_empty() {
        return Ok(());
    }
    let list = sql::list(ids.len());
    let open = [Status::Pending, Status::Processing, Status::Failed];
    let (status, id) = (quoted(table.spec.columns.status.as_ref()), &table.id);
    let text = match table.spec.on_sent {
        OnSent::Mark => format!(
            "UPDATE {} FORCE INDEX (PRIMARY) SET {status} = ?{} WHERE {id} IN {list} AND {status} IN (?, ?, ?)",
            table.name,
            unlocked(table),
        ),
        OnSent::Delete => {
            format!(
                "DELETE FROM {} WHERE {id} IN {list} AND {status} IN (?, ?, ?)",
                table.name
            )
        }
    };
    let mut query = sql::query(text);
    if table.spec.on_sent == OnSent::Mark {
        query = sql::bind_status(query, table.spec.status_values.value(Status::Sent));
    }
    query = sql::bind_ids(query, &ids);
    for status in open {
        query = sql::bind_status(query, table.spec.status_values.value(status));
    }
    let matched = query.execute(&mut *conn).await?.rows_affected();
    let all = usize::try_from(matched).is_ok_and(|n| n == ids.len());
    let now = if all {
        HashMap::new()
    } else {
        statuses(conn, table, &ids).await?
    };
    // What could be taken, in the order of the chunk, which is sorted.
    for (i, id) in chunk {
        if ids.binary_search(id).is_err() {
            continue;
        }
        // A row that is there and sent was marked, now or before; one that is to be deleted and
        // is not there was deleted, now or before.
        let sent = match table.spec.on_sent {
            _ if all => true,
            OnSent::Mark => matches!(now.get(*id), Some((Some(Status::Sent), _))),
            OnSent::Delete => !now.contains_key(*id),
        };
        recorded[*i] = if sent { Recorded::Sent } else { Recorded::Gone };
    }
    Ok(())
}

async fn record_failed(
    conn: &mut MySqlConnection,
    table: &OutboxTable,
    retry: &RetryPolicy,
    mode: Mode<'_>,
    id: &RowId,
    failure: &Failure,
    retry_count: u32,
) -> DbResult<Recorded> {
    if mode.skip_locked {
        let (free, busy) = take(conn, table, std::slice::from_ref(id)).await?;
        if free.is_empty() {
            let busy = busy.contains(id);
            return Ok(if busy { Recorded::Busy } else { Recorded::Gone });
        }
    }
    let columns = &table.spec.columns;
    let (status, count) = (
        quoted(columns.status.as_ref()),
        quoted(columns.retry_count.as_ref()),
    );
    let delay = match failure.class {
        FailureClass::Retryable => retry.next(retry_count),
        FailureClass::Permanent => None,
    };
    let mut set = format!("{status} = ?, {count} = ?{}", unlocked(table));
    if let Some(next) = &columns.next_retry_at {
        let next_at = if delay.is_some() {
            format!("{} + INTERVAL ? MICROSECOND", table.now(next))
        } else {
            "NULL".to_owned()
        };
        set.push_str(&format!(", {} = {next_at}", sql::quote(next)));
    }
    if let Some(error) = &columns.last_error {
        set.push_str(&format!(", {} = ?", sql::quote(error)));
    }
    let claim = mode.token.zip(columns.locked_by.as_ref());
    // Whoever holds a claim on the row records its failures. A relay of the application's own may
    // claim a row and leave it pending.
    let held = match (claim, &columns.locked_until) {
        (Some((_, by)), _) => format!(" AND {} = ?", sql::quote(by)),
        (None, Some(until)) => {
            format!(" AND COALESCE({} <= NOW(6), TRUE)", sql::quote(until))
        }
        (None, None) => String::new(),
    };
    // NULL and numbers below zero are read as no retries.
    let text = format!(
        "UPDATE {} FORCE INDEX (PRIMARY) SET {set} WHERE {} = ? AND {status} = ? \
         AND GREATEST(COALESCE({count}, 0), 0) = ?{held}",
        table.name, table.id
    );
    let (from, to) = (
        if claim.is_some() {
            Status::Processing
        } else {
            Status::Pending
        },
        if delay.is_some() {
            Status::Pending
        } else {
            Status::Failed
        },
    );
    let after = if delay.is_some() {
        retry_count + 1
    } else {
        retry_count
    };
    let values = &table.spec.status_values;
    let mut query = sql::bind_status(sql::query(text), values.value(to)).bind(after);
    if let (Some(delay), true) = (delay, columns.next_retry_at.is_some()) {
        query = query.bind(micros(delay));
    }
    if let Some(error) = &columns.last_error {
        query = query.bind(fitted(table, error, &failure.to_string()));
    }
    query = sql::bind_status(sql::bind_id(query, id), values.value(from)).bind(retry_count);
    if let Some((token, _)) = claim {
        query = query.bind(token.to_owned());
    }
    let matched = query.execute(&mut *conn).await?.rows_affected();
    let wanted = if delay.is_some() {
        Recorded::WillRetry
    } else {
        Recorded::Failed
    };
    if matched > 0 {
        return Ok(wanted);
    }
    // The answer to an earlier commit may have been lost: then it stands there already.
    let now = statuses(conn, table, std::slice::from_ref(id)).await?;
    Ok(match now.get(id) {
        Some((Some(status), count)) if *status == to && *count == after => wanted,
        _ => Recorded::Gone,
    })
}

/// Locks what can be had of these rows, without waiting: those, in the order of `ids`, and those
/// that somebody keeps locked. What is in neither is not there.
pub(crate) async fn take(
    conn: &mut MySqlConnection,
    table: &OutboxTable,
    ids: &[RowId],
) -> DbResult<(Vec<RowId>, HashSet<RowId>)> {
    let free = among(conn, table, ids, " FOR UPDATE SKIP LOCKED").await?;
    let (free, rest): (Vec<RowId>, Vec<RowId>) =
        ids.iter().cloned().partition(|id| free.contains(id));
    let mut busy = HashSet::new();
    if rest.is_empty() {
        return Ok((free, busy));
    }
    let there = among(conn, table, &rest, "").await?;
    for id in rest {
        if there.contains(&id) || !is_absent(conn, table, &id).await? {
            busy.insert(id);
        }
    }
    Ok((free, busy))
}

/// Which of these rows a SELECT returns; `tail` says how it locks.
async fn among(
    conn: &mut MySqlConnection,
    table: &OutboxTable,
    ids: &[RowId],
    tail: &str,
) -> DbResult<HashSet<RowId>> {
    let text = format!(
        "SELECT {id} FROM {} WHERE {id} IN {}{tail}",
        table.name,
        sql::list(ids.len()),
        id = table.id
    );
    let rows = sql::bind_ids(sql::query(text), ids).fetch_all(conn).await?;
    rows.iter().map(|row| table.row_id(row, 0)).collect()
}

/// Whether a row that is not visible is not there. The binlog may tell of a row before its commit
/// is finished: that row is locked, and not visible yet.
async fn is_absent(conn: &mut MySqlConnection, table: &OutboxTable, id: &RowId) -> DbResult<bool> {
    let text = format!(
        "SELECT 1 FROM {} WHERE {} = ? FOR UPDATE NOWAIT",
        table.name, table.id
    );
    let row = sql::bind_id(sql::query(text), id)
        .fetch_optional(conn)
        .await;
    match row.map_err(DbError::from) {
        Ok(row) => Ok(row.is_none()),
        Err(e) if matches!(e.number(), Some(LOCK_NOWAIT | LOCK_WAIT_TIMEOUT)) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Status and retry count now.
async fn statuses(
    conn: &mut MySqlConnection,
    table: &OutboxTable,
    ids: &[RowId],
) -> DbResult<HashMap<RowId, (Option<Status>, u32)>> {
    let columns = &table.spec.columns;
    let text = format!(
        "SELECT {id}, CAST({} AS CHAR), CAST(GREATEST(COALESCE({}, 0), 0) AS UNSIGNED) FROM {} WHERE {id} IN {}",
        quoted(columns.status.as_ref()),
        quoted(columns.retry_count.as_ref()),
        table.name,
        sql::list(ids.len()),
        id = table.id
    );
    let rows = sql::bind_ids(sql::query(text), ids).fetch_all(conn).await?;
    let read = |row: &sqlx::mysql::MySqlRow| {
        let status = crate::layouts::optional(row, 1)?
            .and_then(|text| table.spec.status_values.from_text(&text));
        let count: u64 = row.try_get_unchecked(2)?;
        Ok((
            table.row_id(row, 0)?,
            (status, u32::try_from(count).unwrap_or(u32::MAX)),
        ))
    };
    rows.iter().map(read).collect()
}

/// `, locked_by = NULL, …` for the columns that are there: what ends every claim.
pub(crate) fn unlocked(table: &OutboxTable) -> String {
    let columns = &table.spec.columns;
    let mut text = String::new();
    for column in [&columns.locked_by, &columns.locked_until]
        .into_iter()
        .flatten()
    {
        text.push_str(&format!(", {} = NULL", sql::quote(column)));
    }
    // Said even where the column updates itself: another table's may not.
    if let Some(updated) = &columns.updated_at {
        text.push_str(&format!(
            ", {} = {}",
            sql::quote(updated),
            table.now(updated)
        ));
    }
    text
}

/// A column that tables with status columns have; the configuration refuses them without.
pub(crate) fn quoted(column: Option<&String>) -> String {
    sql::quote(column.map_or("status", String::as_str))
}

/// A reason that fits the column: its length in characters, its character set.
pub(crate) fn fitted(table: &OutboxTable, column: &str, reason: &str) -> String {
    let Some(column) = table.layout.column(column) else {
        return String::new();
    };
    // The layout counts octets, of which each character has as many as the longest.
    let (width, narrow) = match column.charset.as_deref() {
        Some("utf8mb4") => (4, false),
        Some("gb18030" | "utf16" | "utf16le" | "utf32") => (4, true),
        Some("utf8mb3" | "utf8" | "ujis" | "eucjpms") => (3, true),
        Some("gbk" | "gb2312" | "big5" | "sjis" | "cp932" | "euckr" | "ucs2") => (2, true),
        _ => (1, true),
    };
    let room = column.octets.map_or(Failure::MAX_REASON, |o| {
        usize::try_from(o / width).unwrap_or(Failure::MAX_REASON)
    });
    let reason = reason.chars().take(room.min(Failure::MAX_REASON));
    reason
        .map(|c| if narrow && !c.is_ascii() { '?' } else { c })
        .collect()
}
