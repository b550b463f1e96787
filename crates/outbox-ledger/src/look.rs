//! Reading rows back: how they stand, by the database's clock.

use std::collections::HashMap;

use outbox_core::binder::print_binary;
use outbox_core::ports::Seen;
use outbox_core::row::{Aggregate, Cell, OutboxRow, RowId};
use outbox_core::status::Status;
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row};

use crate::cells::CellPlan;
use crate::claims::terms::{by_created, of_aggregate};
use crate::error::DbResult;
use crate::layouts::text;
use crate::record::quoted;
use crate::sql;
use crate::table::OutboxTable;

/// Aggregates in one statement: each is a range of the index on them.
const AGGREGATES: usize = 128;
/// What the table is called in statements on aggregates.
const ALIAS: &str = "o";

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
            "SELECT {id}, CAST({} AS CHAR), CAST(GREATEST(COALESCE({}, 0), 0) AS UNSIGNED), \
             CAST({} AS SIGNED), CAST({} AS SIGNED) FROM {} WHERE {id} IN {}",
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
    let identity = Identity::of(table)?;
    let statement = format!(
        "{} WHERE {condition} {} LIMIT {limit}",
        identity.select(),
        order(table)
    );
    let mut query = sql::query(statement);
    for status in statuses {
        query = sql::bind_status(query, table.spec.status_values.value(status));
    }
    let rows = query.fetch_all(conn).await?;
    rows.iter().map(|row| identity.bind(row)).collect()
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
    let identity = Identity::of(table)?;
    // What no row of the table can belong to has nothing left.
    let terms: Vec<(String, Vec<RowId>)> = aggregates
        .iter()
        .filter_map(|aggregate| of_aggregate(table, ALIAS, aggregate))
        .collect();
    let mut found = Vec::new();
    for terms in terms.chunks(AGGREGATES) {
        // Padded like every list, by the last one.
        let mut any: Vec<&(String, Vec<RowId>)> = terms.iter().collect();
        any.resize(sql::padded(terms.len()), &terms[terms.len() - 1]);
        let conditions: Vec<String> = any.iter().map(|(term, _)| format!("({term})")).collect();
        let statement = format!(
            "{} WHERE ({}) AND {status} IN ({places}){delayed} {} LIMIT {limit}",
            identity.select(),
            conditions.join(" OR "),
            order(table)
        );
        let mut query = sql::query(statement);
        for value in any.iter().flat_map(|(_, values)| values) {
            query = sql::bind_id(query, value);
        }
        for status in &open {
            query = sql::bind_status(query, table.spec.status_values.value(*status));
        }
        for row in query.fetch_all(&mut *conn).await? {
            found.push(identity.bind(&row)?);
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

/// Delivery order: by id where ids are integers, else by `created_at` and id.
fn order(table: &OutboxTable) -> String {
    match by_created(table) {
        Some(created) => format!("ORDER BY {}, {}", sql::quote(created), table.id),
        None => format!("ORDER BY {}", table.id),
    }
}

/// How the identity of rows is read: key and aggregate, printed as in their messages.
struct Identity<'a> {
    table: &'a OutboxTable,
    aggregate: CellPlan,
}

impl<'a> Identity<'a> {
    fn of(table: &'a OutboxTable) -> DbResult<Self> {
        let columns = &table.spec.columns;
        let names = columns.aggregate_type.iter().chain([&columns.aggregate_id]);
        let names: Vec<String> = names.cloned().collect();
        let aggregate = CellPlan::new(&table.layout, &names)?;
        Ok(Self { table, aggregate })
    }

    /// `SELECT … FROM the table`, which is called [`ALIAS`].
    fn select(&self) -> String {
        let (list, id) = (self.aggregate.list(), &self.table.id);
        format!("SELECT {list}, {id} FROM {} {ALIAS}", self.table.name)
    }

    fn bind(&self, row: &MySqlRow) -> DbResult<(Aggregate, RowId)> {
        let mut cells = self.aggregate.decode(row)?;
        let id = cells.pop().map_or(String::new(), |cell| printed(&cell));
        let kind = cells.pop().map_or(String::new(), |cell| printed(&cell));
        let aggregate = Aggregate {
            table: self.table.idx,
            kind: kind.into(),
            id: id.into(),
        };
        Ok((aggregate, self.table.row_id(row, self.aggregate.len())?))
    }
}

/// A cell as text, as the binder prints it; NULL is empty.
fn printed(cell: &Cell) -> String {
    match cell {
        Cell::Null => String::new(),
        Cell::Int(n) => n.to_string(),
        Cell::UInt(n) => n.to_string(),
        Cell::Text(t) => String::from_utf8_lossy(t).into_owned(),
        Cell::Binary(b) => print_binary(b),
    }
}
