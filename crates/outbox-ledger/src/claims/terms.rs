//! What the poller's statements about one table are made of: conditions in the table's own
//! columns, and the indexes that they are read by.
//!
//! The indexes are named in the statements. The optimizer would choose them too, but by
//! statistics that an outbox makes stale within seconds: one day it reads a million sent rows in
//! key order to find the hundred that are pending.

use std::sync::Arc;
use std::time::Duration;

use outbox_core::retry::RetryPolicy;
use outbox_core::row::{Aggregate, RowId};
use outbox_core::spec::Ordering;
use outbox_core::status::{Status, StatusValue};
use sqlx::MySqlConnection;

use super::indexes::{Index, aggregate_index, indexes, status_index};
use crate::error::DbResult;
use crate::parked::{micros, unprint_binary};
use crate::sql;
use crate::table::OutboxTable;

/// How rows of one table are found.
#[derive(Clone, Debug, Default)]
pub(crate) struct Access {
    /// `FORCE INDEX (…)` for rows of one status, or nothing.
    pub(crate) by_status: String,
    /// The same for rows of one aggregate; `None` where no index leads to them.
    pub(crate) by_aggregate: Option<String>,
    /// The columns that lead that index, as far as rows of one aggregate and status share them.
    shared: Vec<String>,
    /// The same for sent rows by `updated_at`.
    pub(crate) by_settled: Option<String>,
}

/// Conditions on the rows of one table, seen through an alias.
#[derive(Clone, Debug)]
pub(crate) struct Terms<'a> {
    pub(crate) table: &'a OutboxTable,
    pub(crate) access: Arc<Access>,
    pub(crate) retry: &'a RetryPolicy,
}

/// `created_at`, where the delivery order begins with it: ids that are no integers say nothing
/// about the order of their rows.
pub(crate) fn by_created(table: &OutboxTable) -> Option<&str> {
    let id = table.layout.column(&table.spec.columns.id);
    let integer = id.is_some_and(|c| c.data_type.ends_with("int"));
    table
        .spec
        .columns
        .created_at
        .as_deref()
        .filter(|_| !integer)
}

fn force(index: &Index) -> String {
    format!("FORCE INDEX ({})", sql::quote(&index.name))
}

impl Access {
    /// Looks at the table's indexes.
    pub(crate) async fn read(conn: &mut MySqlConnection, table: &OutboxTable) -> DbResult<Self> {
        let indexes = indexes(conn, &table.spec.schema, &table.spec.table).await?;
        let columns = &table.spec.columns;
        let settled = match (&columns.status, &columns.updated_at) {
            (Some(status), Some(updated)) => indexes.iter().find(|i| i.leads(&[status, updated])),
            _ => None,
        };
        let aggregate = aggregate_index(table, &indexes);
        let all = aggregate.map_or(&[][..], |i| &i.columns);
        let shared = all.iter().take_while(|c| {
            let is =
                |name: &Option<String>| name.as_ref().is_some_and(|n| n.eq_ignore_ascii_case(c));
            is(&columns.aggregate_type)
                || is(&columns.status)
                || columns.aggregate_id.eq_ignore_ascii_case(c)
        });
        Ok(Self {
            by_status: status_index(table, &indexes).map_or_else(String::new, force),
            by_aggregate: aggregate.map(force),
            shared: shared.cloned().collect(),
            by_settled: settled.map(force),
        })
    }
}

impl Terms<'_> {
    /// `alias.column` of a column that is there.
    fn at(alias: &str, column: Option<&str>) -> Option<String> {
        column.map(|c| format!("{alias}.{}", sql::quote(c)))
    }

    pub(crate) fn id(&self, a: &str) -> String {
        format!("{a}.{}", self.table.id)
    }

    pub(crate) fn next_retry_at(&self, a: &str) -> Option<String> {
        Self::at(a, self.table.spec.columns.next_retry_at.as_deref())
    }

    pub(crate) fn created_at(&self, a: &str) -> Option<String> {
        Self::at(a, self.table.spec.columns.created_at.as_deref())
    }

    pub(crate) fn updated_at(&self, a: &str) -> Option<String> {
        Self::at(a, self.table.spec.columns.updated_at.as_deref())
    }

    pub(crate) fn retry_count(&self, a: &str) -> String {
        let column = self.table.spec.columns.retry_count.as_deref();
        Self::at(a, column).unwrap_or_else(|| "0".to_owned())
    }

    /// `locked_by` and `locked_until`; a claim needs both.
    pub(crate) fn locks(&self) -> Option<(&str, &str)> {
        let columns = &self.table.spec.columns;
        columns
            .locked_by
            .as_deref()
            .zip(columns.locked_until.as_deref())
    }

    fn locked_until(&self, a: &str) -> Option<String> {
        Self::at(a, self.locks().map(|(_, until)| until))
    }

    /// `alias.status` is this one.
    pub(crate) fn is(&self, a: &str, status: Status) -> String {
        let column = self.table.spec.columns.status.as_deref();
        match Self::at(a, column) {
            Some(column) => format!("{column} = {}", self.status(status)),
            None => "FALSE".to_owned(),
        }
    }

    /// A status as a literal. Configuration, not data; and constant, so that one statement can
    /// hold it many times.
    pub(crate) fn status(&self, status: Status) -> String {
        match self.table.spec.status_values.value(status) {
            StatusValue::Number(n) => n.to_string(),
            StatusValue::Text(s) => {
                format!("'{}'", s.replace('\\', "\\\\").replace('\'', "''"))
            }
        }
    }

    /// Statuses that hold an aggregate.
    pub(crate) fn unsettled(&self) -> Vec<Status> {
        let mut statuses = vec![Status::Pending, Status::Processing];
        if self.table.spec.failed_blocks_aggregate {
            statuses.push(Status::Failed);
        }
        statuses
    }

    /// Its time has come.
    pub(crate) fn due(&self, a: &str) -> String {
        if let Some(at) = self.next_retry_at(a) {
            return format!("({at} IS NULL OR {at} <= NOW(6))");
        }
        let Some(since) = self.updated_at(a).or_else(|| self.created_at(a)) else {
            return "TRUE".to_owned();
        };
        let count = self.retry_count(a);
        let backoff = backoff(self.retry, &count);
        format!("({count} = 0 OR {since} + INTERVAL ({backoff}) MICROSECOND <= NOW(6))")
    }

    /// Nobody's claim is on it. A relay of the application's own may claim pending rows.
    pub(crate) fn free(&self, a: &str) -> String {
        match self.locked_until(a) {
            Some(until) => format!("({until} IS NULL OR {until} < NOW(6))"),
            None => "TRUE".to_owned(),
        }
    }

    /// Claimed once, and not any more. A claim without an end is the patrol's.
    pub(crate) fn expired(&self, a: &str) -> String {
        match self.locked_until(a) {
            Some(until) => format!("({} AND {until} < NOW(6))", self.is(a, Status::Processing)),
            None => "FALSE".to_owned(),
        }
    }

    /// It may be claimed now.
    pub(crate) fn ready(&self, a: &str) -> String {
        format!(
            "(({} AND {} AND {}) OR {})",
            self.is(a, Status::Pending),
            self.due(a),
            self.free(a),
            self.expired(a)
        )
    }

    /// Never attempted and delayed: outside the order until its time.
    pub(crate) fn delayed(&self, a: &str) -> String {
        match self.next_retry_at(a) {
            Some(at) => format!(
                "({} AND {} = 0 AND {at} IS NOT NULL AND {at} > NOW(6))",
                self.is(a, Status::Pending),
                self.retry_count(a)
            ),
            None => "FALSE".to_owned(),
        }
    }

    /// Comes before `b` in the delivery order.
    fn before(&self, a: &str, b: &str) -> String {
        let (ai, bi) = (self.id(a), self.id(b));
        match by_created(self.table) {
            Some(column) => {
                let column = sql::quote(column);
                let (at, bt) = (format!("{a}.{column}"), format!("{b}.{column}"));
                format!("({at} < {bt} OR ({at} = {bt} AND {ai} < {bi}))")
            }
            None => format!("{ai} < {bi}"),
        }
    }

    /// The delivery order.
    pub(crate) fn order(&self, a: &str) -> String {
        match by_created(self.table) {
            Some(column) => format!("{a}.{}, {}", sql::quote(column), self.id(a)),
            None => self.id(a),
        }
    }

    /// The first unsettled row of its aggregate does not wait for its time or for a claim's end.
    /// Rows behind one that does would fill page after page and starve the others. Only where an
    /// index makes that cheap: one row of it for each status. Scalar subqueries, which are never
    /// turned into a join over the whole table.
    pub(crate) fn unblocked(&self, a: &str) -> String {
        let spec = &self.table.spec;
        let Some(index) = &self.access.by_aggregate else {
            return "TRUE".to_owned();
        };
        if spec.ordering == Ordering::None {
            return "TRUE".to_owned();
        }
        let same = |column: &String| {
            let c = sql::quote(column);
            format!("e.{c} = {a}.{c} AND ")
        };
        let kind = spec.columns.aggregate_type.as_ref();
        // Said in full, columns that are all the same included: by the key alone the server sorts
        // what the index has in order.
        let shared = self.access.shared.iter();
        let shared: String = shared.map(|c| format!("e.{}, ", sql::quote(c))).collect();
        let first = |status| {
            format!(
                "COALESCE((SELECT {} FROM {} e {index} WHERE {}{}{} AND {} AND NOT {} \
                 ORDER BY {shared}{} LIMIT 1), TRUE)",
                self.ready("e"),
                self.table.name,
                kind.map_or(String::new(), same),
                same(&spec.columns.aggregate_id),
                self.is("e", status),
                self.before("e", a),
                self.delayed("e"),
                self.order("e"),
            )
        };
        let firsts: Vec<String> = self.unsettled().into_iter().map(first).collect();
        firsts.join(" AND ")
    }

    pub(crate) fn is_one_of(&self, a: &str, statuses: &[Status]) -> String {
        let column = self.table.spec.columns.status.as_deref();
        let values: Vec<_> = statuses.iter().map(|s| self.status(*s)).collect();
        match Self::at(a, column) {
            Some(column) => format!("{column} IN ({})", values.join(", ")),
            None => "FALSE".to_owned(),
        }
    }

    /// The aggregate's columns.
    pub(crate) fn aggregate(&self, a: &str) -> String {
        let columns = &self.table.spec.columns;
        let names = columns.aggregate_type.iter().chain([&columns.aggregate_id]);
        let names: Vec<_> = names.map(|c| format!("{a}.{}", sql::quote(c))).collect();
        names.join(", ")
    }

    /// The condition that a row belongs to an aggregate, and what to bind for it; `None` for one
    /// that no row of the table can belong to.
    pub(crate) fn of_aggregate(
        &self,
        a: &str,
        aggregate: &Aggregate,
    ) -> Option<(String, Vec<RowId>)> {
        of_aggregate(self.table, a, aggregate)
    }

    /// The same for any aggregate of this id, whatever its type.
    pub(crate) fn of_aggregate_id(&self, a: &str, id: &str) -> Option<(String, Vec<RowId>)> {
        let column = self.table.spec.columns.aggregate_id.as_str();
        print_like(self.table, a, [(column, id)])
    }
}

/// The condition that a row of the table, seen through an alias, belongs to an aggregate, and what
/// to bind for it; `None` for one that no row can belong to.
pub(crate) fn of_aggregate(
    table: &OutboxTable,
    a: &str,
    aggregate: &Aggregate,
) -> Option<(String, Vec<RowId>)> {
    let columns = &table.spec.columns;
    let kind = columns.aggregate_type.as_deref();
    let kind = kind.map(|c| (c, &*aggregate.kind));
    let id = (columns.aggregate_id.as_str(), &*aggregate.id);
    print_like(table, a, kind.into_iter().chain([id]))
}

/// The condition that columns print like this.
fn print_like<'b>(
    table: &OutboxTable,
    a: &str,
    parts: impl IntoIterator<Item = (&'b str, &'b str)>,
) -> Option<(String, Vec<RowId>)> {
    let (mut conditions, mut values) = (Vec::new(), Vec::new());
    for (column, value) in parts {
        let nullable = table.layout.column(column)?.nullable;
        let name = format!("{a}.{}", sql::quote(column));
        match (parse_as(table, column, value), value.is_empty()) {
            (Some(v), true) if nullable => {
                conditions.push(format!("({name} = ? OR {name} IS NULL)"));
                values.push(v);
            }
            (Some(v), _) => {
                conditions.push(format!("{name} = ?"));
                values.push(v);
            }
            // No integer prints as nothing: it was NULL.
            (None, true) if nullable => conditions.push(format!("{name} IS NULL")),
            (None, _) => return None,
        }
    }
    Some((conditions.join(" AND "), values))
}

/// The value of a column that prints like this, of the kind to compare that column with.
pub(crate) fn parse_as(table: &OutboxTable, column: &str, printed: &str) -> Option<RowId> {
    let column = table.layout.column(column)?;
    match column.data_type.as_str() {
        "tinyint" | "smallint" | "mediumint" | "int" | "bigint" if column.unsigned => {
            printed.parse().ok().map(RowId::UInt)
        }
        "tinyint" | "smallint" | "mediumint" | "int" | "bigint" => {
            printed.parse().ok().map(RowId::Int)
        }
        "binary" | "varbinary" | "tinyblob" | "blob" | "mediumblob" | "longblob" => {
            unprint_binary(printed).map(|b| RowId::Binary(b.into()))
        }
        _ => Some(RowId::Text(printed.into())),
    }
}

/// The delay after the n-th retry was spent, in microseconds, as SQL; n is the column `count`.
fn backoff(retry: &RetryPolicy, count: &str) -> String {
    let mut delays: Vec<i64> = Vec::new();
    // Delays grow until the cap: what repeats, repeats for ever. The bound is for a factor of 1.
    for spent in 0..retry.max_retries.min(64) {
        let delay = retry.next(spent).map_or(0, micros);
        if delays.last() == Some(&delay) {
            break;
        }
        delays.push(delay);
    }
    let last = delays
        .last()
        .copied()
        .unwrap_or_else(|| micros(Duration::ZERO));
    let mut text = format!("CASE {count}");
    for (n, delay) in delays.iter().enumerate() {
        text.push_str(&format!(" WHEN {} THEN {delay}", n + 1));
    }
    text.push_str(&format!(" ELSE {last} END"));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backoff_without_a_due_column_is_the_policys() {
        assert_eq!(
            backoff(&RetryPolicy::default(), "n"),
            "CASE n WHEN 1 THEN 30000000 WHEN 2 THEN 60000000 WHEN 3 THEN 120000000 \
             WHEN 4 THEN 240000000 WHEN 5 THEN 480000000 ELSE 480000000 END"
        );
    }
}
