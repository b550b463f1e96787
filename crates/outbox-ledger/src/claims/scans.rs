//! Statements that look for rows. What they cost follows the rows that they return: keys are
//! found in an index, branch by branch, each cut at the limit, and whole rows are read by key.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::TryStreamExt as _;
use outbox_core::ports::{Cursor, Scan};
use outbox_core::row::{Aggregate, OutboxRow, RowId};
use outbox_core::status::Status;
use sqlx::{MySqlConnection, Row};

use super::terms::{Terms, by_created};
use crate::error::DbResult;
use crate::layouts::optional;
use crate::parked::micros;
use crate::sql;

/// A page ends early behind this many bytes of messages.
const PAGE_BYTES: usize = 32 << 20;
/// Aggregates in one statement.
const AGGREGATES: usize = 32;

/// Candidates in delivery order, at most `limit`.
///
/// `Due` takes those that have been due the longest, `LeftBehind` the first by the index, and
/// neither gives rows of an aggregate whose earlier row still waits; `Pending` is cut in delivery
/// order. A page may end before the limit where its messages are large: only an empty one is the
/// end.
pub(super) async fn scan(
    conn: &mut MySqlConnection,
    terms: &Terms<'_>,
    scan: &Scan,
    limit: usize,
) -> DbResult<Vec<(Cursor, OutboxRow)>> {
    let (branches, after) = match scan {
        Scan::Due => (due(terms, limit), None),
        Scan::LeftBehind { min_age } => (vec![left_behind(terms, *min_age, limit)], None),
        Scan::Pending { after } => (pending(terms, after.as_ref(), limit), after.as_ref()),
    };
    let created = by_created(terms.table).map(|c| format!("t.{}", sql::quote(c)));
    let extra = created.map_or("NULL".to_owned(), |c| format!("CAST({c} AS CHAR)"));
    let text = whole(
        terms,
        &branches,
        &extra,
        u64::try_from(limit).unwrap_or(u64::MAX),
    );
    let mut query = sql::query(text);
    for _ in &branches {
        let Some(cursor) = after else { break };
        if let Some(created) = &cursor.created_at {
            query = query.bind(created.clone()).bind(created.clone());
        }
        query = sql::bind_id(query, &cursor.key.id);
    }
    let (mut found, mut bytes) = (Vec::new(), 0);
    let mut rows = query.fetch(conn);
    while let Some(row) = rows.try_next().await? {
        let created_at = optional(&row, terms.table.width())?;
        let Some(row) = terms.table.bind(&row)? else {
            continue;
        };
        bytes += row.weight();
        let key = row.key.clone();
        found.push((Cursor { created_at, key }, row));
        if bytes > PAGE_BYTES {
            break;
        }
    }
    Ok(found)
}

/// Whole rows for the keys that the branches find, in delivery order, with one more column.
///
/// Only keys are sorted, and the rows are read one by one in their order: a sort of whole rows fails
/// (error 1038) where one of them is larger than the server's sort buffer.
fn whole(terms: &Terms<'_>, branches: &[String], extra: &str, limit: u64) -> String {
    let table = terms.table;
    let select = table.select();
    let list = select
        .strip_prefix("SELECT ")
        .and_then(|s| s.strip_suffix(&format!(" FROM {}", table.name)))
        .unwrap_or("*");
    let join = |to: &str, keys: &str| {
        format!(
            "STRAIGHT_JOIN {} {to} FORCE INDEX (PRIMARY) ON {} = {keys}.outboxd_key",
            table.name,
            terms.id(to),
        )
    };
    format!(
        "SELECT {list}, {extra} FROM (SELECT outboxd_found.outboxd_key FROM ({}) AS outboxd_found {} \
         ORDER BY {} LIMIT {limit}) AS outboxd_keys {}",
        branches.join(" UNION ALL "),
        join("o", "outboxd_found"),
        terms.order("o"),
        join("t", "outboxd_keys"),
    )
}

/// `(SELECT key … WHERE … LIMIT …)`.
fn keys(terms: &Terms<'_>, conditions: &[String], order: &str, limit: usize) -> String {
    format!(
        "(SELECT {} AS outboxd_key FROM {} c {} WHERE {} {order} LIMIT {limit})",
        terms.id("c"),
        terms.table.name,
        terms.access.by_status,
        conditions.join(" AND "),
    )
}

fn due(terms: &Terms<'_>, limit: usize) -> Vec<String> {
    let pending = terms.is("c", Status::Pending);
    let unblocked = terms.unblocked("c");
    let attempted = match terms.next_retry_at("c") {
        Some(at) => keys(
            terms,
            &[
                pending,
                format!("{at} <= NOW(6)"),
                terms.free("c"),
                unblocked.clone(),
            ],
            &format!("ORDER BY {at}"),
            limit,
        ),
        None => keys(
            terms,
            &[
                pending,
                format!("{} > 0", terms.retry_count("c")),
                terms.due("c"),
                terms.free("c"),
                unblocked.clone(),
            ],
            "",
            limit,
        ),
    };
    let mut branches = vec![attempted];
    if terms.locks().is_some() {
        branches.push(keys(terms, &[terms.expired("c"), unblocked], "", limit));
    }
    branches
}

/// An attempted row without a due time counts too, where there is a column for one: an operator
/// or the application took it away, and nobody else would ever find the row.
fn left_behind(terms: &Terms<'_>, min_age: Duration, limit: usize) -> String {
    let fresh = match terms.next_retry_at("c") {
        Some(at) => format!("{at} IS NULL"),
        None => format!("{} = 0", terms.retry_count("c")),
    };
    let mut conditions = vec![terms.is("c", Status::Pending), fresh, terms.free("c")];
    if let Some(since) = terms.created_at("c").or_else(|| terms.updated_at("c")) {
        let age = micros(min_age);
        conditions.push(format!("{since} <= NOW(6) - INTERVAL {age} MICROSECOND"));
    }
    conditions.push(terms.unblocked("c"));
    keys(terms, &conditions, "", limit)
}

/// One branch for each way to be due, so that each is read in the index's own order.
fn pending(terms: &Terms<'_>, after: Option<&Cursor>, limit: usize) -> Vec<String> {
    let behind = after.map(
        |cursor| match (by_created(terms.table), &cursor.created_at) {
            (Some(column), Some(_)) => {
                let at = format!("c.{}", sql::quote(column));
                let place = "CAST(? AS DATETIME(6))";
                format!(
                    "{at} >= {place} AND ({at} > {place} OR {} > ?)",
                    terms.id("c")
                )
            }
            _ => format!("{} > ?", terms.id("c")),
        },
    );
    let order = format!("ORDER BY {}", terms.order("c"));
    let branch = |conditions: Vec<String>| {
        let all: Vec<String> = conditions.into_iter().chain(behind.clone()).collect();
        keys(terms, &all, &order, limit)
    };
    let pending = terms.is("c", Status::Pending);
    let mut branches = match terms.next_retry_at("c") {
        Some(at) => vec![
            branch(vec![
                pending.clone(),
                format!("{at} IS NULL"),
                terms.free("c"),
            ]),
            branch(vec![pending, format!("{at} <= NOW(6)"), terms.free("c")]),
        ],
        None => vec![branch(vec![pending, terms.due("c"), terms.free("c")])],
    };
    if terms.locks().is_some() {
        branches.push(branch(vec![terms.expired("c")]));
    }
    branches
}

/// The unsettled rows of each aggregate in delivery order, at most `limit` each, and whether they
/// may be claimed now. Rows that were never attempted and are delayed are outside the order.
pub(super) async fn unsettled(
    conn: &mut MySqlConnection,
    terms: &Terms<'_>,
    aggregates: &[Aggregate],
    limit: usize,
) -> DbResult<Vec<(OutboxRow, bool)>> {
    let mut found = Vec::new();
    for aggregates in aggregates.chunks(AGGREGATES) {
        let conditions: Vec<(String, Vec<RowId>)> = aggregates
            .iter()
            .filter_map(|a| terms.of_aggregate("c", a))
            .collect();
        if conditions.is_empty() {
            continue;
        }
        let (branches, values) = match &terms.access.by_aggregate {
            Some(index) => by_index(terms, index, &conditions, limit),
            None => by_window(terms, &conditions, limit),
        };
        let mut query = sql::query(whole(terms, &branches, &terms.ready("t"), u64::MAX))
            // As many forms as there are numbers of aggregates: not for the driver's cache.
            .persistent(false);
        for value in &values {
            query = sql::bind_id(query, value);
        }
        let mut left: HashMap<&Aggregate, usize> = aggregates.iter().map(|a| (a, limit)).collect();
        for row in query.fetch_all(&mut *conn).await? {
            let ready: i64 = row.try_get_unchecked(terms.table.width())?;
            let Some(row) = terms.table.bind(&row)? else {
                continue;
            };
            // A collation may find more than was asked for.
            if let Some(left) = left.get_mut(&row.aggregate).filter(|left| **left > 0) {
                *left -= 1;
                found.push((row, ready != 0));
            }
        }
    }
    Ok(found)
}

/// One branch for each aggregate and status: each is a range of the index, in its order.
fn by_index(
    terms: &Terms<'_>,
    index: &str,
    conditions: &[(String, Vec<RowId>)],
    limit: usize,
) -> (Vec<String>, Vec<RowId>) {
    let (mut branches, mut values) = (Vec::new(), Vec::new());
    for (condition, bound) in conditions {
        for status in terms.unsettled() {
            branches.push(format!(
                "(SELECT {} AS outboxd_key FROM {} c {index} WHERE {condition} AND {} AND NOT {} \
                 ORDER BY {} LIMIT {limit})",
                terms.id("c"),
                terms.table.name,
                terms.is("c", status),
                terms.delayed("c"),
                terms.order("c"),
            ));
            values.extend(bound.iter().cloned());
        }
    }
    (branches, values)
}

/// One pass over all unsettled rows for all the aggregates together, where no index leads to one.
fn by_window(
    terms: &Terms<'_>,
    conditions: &[(String, Vec<RowId>)],
    limit: usize,
) -> (Vec<String>, Vec<RowId>) {
    let any: Vec<String> = conditions.iter().map(|(c, _)| format!("({c})")).collect();
    let branch = format!(
        "(SELECT outboxd_key FROM (SELECT {} AS outboxd_key, ROW_NUMBER() OVER (PARTITION BY {} \
         ORDER BY {}) AS place FROM {} c {} WHERE {} AND NOT {} AND ({})) AS outboxd_places \
         WHERE place <= {limit})",
        terms.id("c"),
        terms.aggregate("c"),
        terms.order("c"),
        terms.table.name,
        terms.access.by_status,
        terms.is_one_of("c", &terms.unsettled()),
        terms.delayed("c"),
        any.join(" OR "),
    );
    let values = conditions.iter().flat_map(|(_, v)| v.iter().cloned());
    (vec![branch], values.collect())
}
