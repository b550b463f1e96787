//! Reading rows back: how they stand, by the database's clock.

use std::collections::HashMap;

use outbox_core::ports::Seen;
use outbox_core::row::{Aggregate, OutboxRow, RowId};
use outbox_core::status::Status;
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row};

use crate::error::DbResult;
use crate::layouts::text;
use crate::record::quoted;
use crate::sql::{self, Bound};
use crate::table::OutboxTable;

/// Aggregates in one statement: each is a range of the index on them.
const AGGREGATES: usize = 128;

/// How the rows stand, parallel to `ids`.
pub(crate) async fn look(
    conn: &mut MySqlConnection,
    table: &OutboxTable,
    ids: &[RowId],
) -> DbResult<Vec<Seen>> {
    let columns = &table.spec.columns;
    let future = |column: &Option<String>| {
        column.as_ref().map_or("0".to_owned(), |c| {
            format!("COALESCE({} > NOW(6), 0)", sql::quote(c))
        })
    };
    let mut found = HashMap::with_capacity(ids.len());
    for ids in ids.chunks(sql::BATCH) {
        let statement = format!(
            "SELECT {id}, CAST({} AS CHAR), CAST({} AS UNSIGNED), CAST({} AS SIGNED), CAST({} AS SIGNED) FROM {} WHERE {id} IN {}",
            quoted(columns.status.as_ref()),
            quoted(columns.retry_count.as_ref()),
            future(&columns.next_retry_at),
            future(&columns.locked_until),
            table.name,
            sql::list(ids.len()),
            id = table.id
        );
        for row in sql::bind_ids(sql::query(statement), ids)
            .fetch_all(&mut *conn)
            .await?
        {
            let count: u64 = row.try_get_unchecked(2)?;
            let flag = |i| row.try_get_unchecked::<i64, _>(i).map(|n| n != 0);
            let seen = Seen::Row {
                // A status that nobody knows is nobody's to publish.
                status: table
                    .spec
                    .status_values
                    .from_text(&text(&row, 1)?)
                    .unwrap_or(Status::Abandoned),
                retry_count: u32::try_from(count).unwrap_or(u32::MAX),
                delayed: flag(3)?,
                claimed: flag(4)?,
            };
            found.insert(table.row_id(&row, 0)?, seen);
        }
    }
    Ok(ids
        .iter()
        .map(|id| found.get(id).copied().unwrap_or(Seen::Absent))
        .collect())
}

/// Rows that hold their aggregate: attempted and pending, claimed, processing, and failed ones
/// where these hold too.
pub(crate) async fn holding(
    conn: &mut MySqlConnection,
    table: &OutboxTable,
    limit: usize,
) -> DbResult<Vec<(Aggregate, RowId)>> {
    let columns = &table.spec.columns;
    let (status, count) = (
        quoted(columns.status.as_ref()),
        quoted(columns.retry_count.as_ref()),
    );
    // A retry has a due time wherever the table can hold one, and the index finds those.
    let retried = match &columns.next_retry_at {
        Some(next) => format!("{} IS NOT NULL AND {count} > 0", sql::quote(next)),
        None => format!("{count} > 0"),
    };
    let mut statuses = vec![Status::Pending, Status::Processing];
    let mut condition = format!("({status} = ? AND {retried}) OR {status} = ?");
    if let Some(until) = &columns.locked_until {
        condition.push_str(&format!(
            " OR ({status} = ? AND {} > NOW(6))",
            sql::quote(until)
        ));
        statuses.push(Status::Pending);
    }
    if table.spec.failed_blocks_aggregate {
        condition.push_str(&format!(" OR {status} = ?"));
        statuses.push(Status::Failed);
    }
    let statement = format!(
        "{} WHERE {condition} {} LIMIT {limit}",
        identity(table),
        order(table)
    );
    let mut query = sql::query(statement);
    for status in statuses {
        query = sql::bind_status(query, table.spec.status_values.value(status));
    }
    let rows = query.fetch_all(conn).await?;
    rows.iter().map(|row| bind_identity(table, row)).collect()
}

/// What is left of these aggregates.
pub(crate) async fn remaining(
    conn: &mut MySqlConnection,
    table: &OutboxTable,
    aggregates: &[Aggregate],
    limit: usize,
) -> DbResult<Vec<(Aggregate, RowId)>> {
    let columns = &table.spec.columns;
    let status = quoted(columns.status.as_ref());
    let mut open = vec![Status::Pending, Status::Processing];
    if table.spec.failed_blocks_aggregate {
        open.push(Status::Failed);
    }
    let places = vec!["?"; open.len()].join(", ");
    // A never-attempted row that is delayed is outside the order.
    let delayed = columns
        .next_retry_at
        .as_ref()
        .map_or(String::new(), |next| {
            let count = quoted(columns.retry_count.as_ref());
            format!(
                " AND NOT ({count} = 0 AND COALESCE({} > NOW(6), 0))",
                sql::quote(next)
            )
        });
    let mut found = Vec::new();
    for aggregates in aggregates.chunks(AGGREGATES) {
        let statement = format!(
            "{} WHERE {} AND {status} IN ({places}){delayed} {} LIMIT {limit}",
            identity(table),
            aggregates_are(table, aggregates.len()),
            order(table)
        );
        let mut query = bind_aggregates(table, sql::query(statement), aggregates);
        for status in &open {
            query = sql::bind_status(query, table.spec.status_values.value(*status));
        }
        for row in query.fetch_all(&mut *conn).await? {
            found.push(bind_identity(table, &row)?);
        }
    }
    found.truncate(limit);
    Ok(found)
}

/// Whole rows by key.
pub(crate) async fn read(
    conn: &mut MySqlConnection,
    table: &OutboxTable,
    ids: &[RowId],
) -> DbResult<Vec<OutboxRow>> {
    let mut found = Vec::new();
    for ids in ids.chunks(sql::BATCH) {
        let statement = format!(
            "{} WHERE {} IN {} {}",
            table.select(),
            table.id,
            sql::list(ids.len()),
            order(table)
        );
        for row in sql::bind_ids(sql::query(statement), ids)
            .fetch_all(&mut *conn)
            .await?
        {
            found.extend(table.bind(&row)?);
        }
    }
    Ok(found)
}

/// `((aggregate_type = ? AND aggregate_id = ?) OR …)` for so many aggregates, padded.
pub(crate) fn aggregates_are(table: &OutboxTable, len: usize) -> String {
    let columns = &table.spec.columns;
    let id = sql::quote(&columns.aggregate_id);
    match &columns.aggregate_type {
        Some(kind) => {
            let one = format!("({} = ? AND {id} = ?)", sql::quote(kind));
            format!("({})", vec![one; sql::padded(len)].join(" OR "))
        }
        None => format!("{id} IN {}", sql::list(len)),
    }
}

/// Binds what [`aggregates_are`] has places for.
pub(crate) fn bind_aggregates<'q>(
    table: &OutboxTable,
    mut query: Bound<'q>,
    aggregates: &[Aggregate],
) -> Bound<'q> {
    for i in 0..sql::padded(aggregates.len()) {
        let Some(aggregate) = aggregates.get(i).or(aggregates.last()) else {
            break;
        };
        if table.spec.columns.aggregate_type.is_some() {
            query = query.bind(aggregate.kind.to_string());
        }
        query = query.bind(aggregate.id.to_string());
    }
    query
}

/// Delivery order: by id where ids are integers, else by `created_at` and id.
pub(crate) fn order(table: &OutboxTable) -> String {
    match created_order(table) {
        Some(created) => format!("ORDER BY {created}, {}", table.id),
        None => format!("ORDER BY {}", table.id),
    }
}

/// The `created_at` column, quoted, where it is part of the delivery order.
pub(crate) fn created_order(table: &OutboxTable) -> Option<String> {
    let id = table.layout.column(&table.spec.columns.id)?;
    let integer = id.data_type.ends_with("int");
    table
        .spec
        .columns
        .created_at
        .as_ref()
        .filter(|_| !integer)
        .map(|c| sql::quote(c))
}

/// `SELECT id, aggregate_type, aggregate_id FROM …` for [`bind_identity`].
fn identity(table: &OutboxTable) -> String {
    let columns = &table.spec.columns;
    let kind = columns
        .aggregate_type
        .as_ref()
        .map_or("''".to_owned(), |c| sql::quote(c));
    format!(
        "SELECT {}, CAST({kind} AS CHAR), CAST({} AS CHAR) FROM {}",
        table.id,
        sql::quote(&columns.aggregate_id),
        table.name
    )
}

fn bind_identity(table: &OutboxTable, row: &MySqlRow) -> DbResult<(Aggregate, RowId)> {
    let aggregate = Aggregate {
        table: table.idx,
        kind: text(row, 1)?.into(),
        id: text(row, 2)?.into(),
    };
    Ok((aggregate, table.row_id(row, 0)?))
}
