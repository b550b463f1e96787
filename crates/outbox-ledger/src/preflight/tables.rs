//! The configured tables.

mod columns;

use std::collections::HashMap;
use std::sync::Arc;

use outbox_core::row::TableIdx;
use outbox_core::spec::{OnSent, Ordering, TableSpec, Tracking};
use outbox_core::status::Status;
use sqlx::{MySqlConnection, Row};

use super::Checks;
use super::account::allowed;
use crate::claims::indexes::{aggregate_index, indexes, status_index};
use crate::claims::terms::by_created;
use crate::connect::{Db, Family};
use crate::error::{DbError, DbResult};
use crate::layouts::{read_layout, text};
use crate::record::quoted;
use crate::sql;
use crate::table::OutboxTable;

/// A row from further in the future than clocks and rounding explain.
const FUTURE_SECONDS: i64 = 120;

pub(super) async fn check(
    db: &Db,
    name: &str,
    specs: &[Arc<TableSpec>],
    checks: &mut Checks,
) -> DbResult<()> {
    let family = db.family().await?;
    let mut session = db.session().await?;
    for (at, spec) in specs.iter().enumerate() {
        checks.prefix = format!("{}: ", spec.full_name());
        let idx = TableIdx(u16::try_from(at).unwrap_or(u16::MAX));
        table(&mut session, family, idx, spec, name.into(), checks).await?;
    }
    session.finish();
    checks.prefix.clear();
    shared_exchanges(specs, checks);
    Ok(())
}

async fn table(
    conn: &mut MySqlConnection,
    family: Family,
    idx: TableIdx,
    spec: &TableSpec,
    name: Arc<str>,
    checks: &mut Checks,
) -> DbResult<()> {
    let layout = read_layout(conn, family, &spec.schema, &spec.table).await?;
    let Some(layout) = layout else {
        checks.fail(
            "table",
            "there is no such table, or the account may not see it",
            "create it (`outboxd migrate --with-outbox` makes the default one), name it in \
             outbox.table, or GRANT SELECT on it",
        );
        return Ok(());
    };
    if layout.engine.eq_ignore_ascii_case("InnoDB") {
        checks.ok("engine", "InnoDB");
    } else {
        checks.fail(
            "engine",
            format!(
                "{}: its rows do not commit and roll back with the business rows",
                if layout.engine.is_empty() {
                    "a view"
                } else {
                    &layout.engine
                }
            ),
            "ALTER TABLE … ENGINE = InnoDB",
        );
    }
    let outbox = match OutboxTable::new(idx, spec, layout, name) {
        Ok(outbox) => outbox,
        Err(DbError::Config(why)) => {
            checks.fail(
                "columns",
                why,
                "name the table's columns in outbox.columns; the primary key must be one column, \
                 an integer, UUID or string",
            );
            return Ok(());
        }
        Err(e) => return Err(e),
    };
    columns::check(&outbox, checks);
    rights(conn, &outbox, checks).await?;
    surroundings(conn, family, &outbox, checks).await?;
    if spec.tracking == Tracking::Status {
        find_by_index(conn, &outbox, checks).await?;
    }
    young(conn, &outbox, checks).await
}

async fn rights(
    conn: &mut MySqlConnection,
    outbox: &OutboxTable,
    checks: &mut Checks,
) -> DbResult<()> {
    let table = &outbox.name;
    let tracked = outbox.spec.tracking == Tracking::Status;
    let mut tried = vec![("SELECT", format!("SELECT * FROM {table} LIMIT 0"))];
    if tracked {
        let columns = &outbox.spec.columns;
        let written = [
            &columns.status,
            &columns.retry_count,
            &columns.next_retry_at,
            &columns.locked_by,
            &columns.locked_until,
            &columns.last_error,
            &columns.updated_at,
        ];
        let set: Vec<String> = written
            .into_iter()
            .flatten()
            .map(|c| format!("{c} = {c}", c = sql::quote(c)))
            .collect();
        tried.push((
            "UPDATE",
            format!("UPDATE {table} SET {} WHERE FALSE", set.join(", ")),
        ));
    }
    let mut denied = Vec::new();
    for (right, statement) in tried {
        if !allowed(conn, statement).await? {
            denied.push(right);
        }
    }
    let delete = allowed(conn, format!("DELETE FROM {table} WHERE FALSE")).await?;
    if !delete && outbox.spec.on_sent == OnSent::Delete {
        denied.push("DELETE");
    }
    if !denied.is_empty() {
        let denied = denied.join(", ");
        checks.fail(
            "rights",
            format!("not granted: {denied}"),
            format!("GRANT {denied} ON {table}"),
        );
    } else if !delete && tracked {
        checks.warn(
            "rights",
            "DELETE is not granted: sent rows cannot be purged",
            format!("GRANT DELETE ON {table}, unless sent rows are to stay"),
        );
    } else {
        checks.ok("rights", "granted");
    }
    Ok(())
}

/// What may refuse or multiply our updates: triggers, constraints, partitions.
async fn surroundings(
    conn: &mut MySqlConnection,
    family: Family,
    outbox: &OutboxTable,
    checks: &mut Checks,
) -> DbResult<()> {
    let spec = &outbox.spec;
    let names = |statement: &'static str| {
        sqlx::query(statement)
            .bind(spec.schema.clone())
            .bind(spec.table.clone())
    };
    let triggers = names(
        "SELECT CAST(TRIGGER_NAME AS CHAR) FROM information_schema.TRIGGERS \
         WHERE EVENT_OBJECT_SCHEMA = ? AND EVENT_OBJECT_TABLE = ? \
         AND EVENT_MANIPULATION IN ('UPDATE', 'DELETE')",
    )
    .fetch_all(&mut *conn)
    .await?;
    for row in &triggers {
        checks.warn(
            "trigger",
            format!("{} runs for every status that is written", text(row, 0)?),
            "make sure that it is quick and never refuses an update of the status columns",
        );
    }
    let clauses = match family {
        Family::MariaDb => {
            "SELECT CAST(CHECK_CLAUSE AS CHAR) FROM information_schema.CHECK_CONSTRAINTS \
             WHERE CONSTRAINT_SCHEMA = ? AND TABLE_NAME = ?"
        }
        Family::MySql => {
            "SELECT CAST(c.CHECK_CLAUSE AS CHAR) FROM information_schema.TABLE_CONSTRAINTS t \
             JOIN information_schema.CHECK_CONSTRAINTS c \
             ON c.CONSTRAINT_SCHEMA = t.CONSTRAINT_SCHEMA AND c.CONSTRAINT_NAME = t.CONSTRAINT_NAME \
             WHERE t.TABLE_SCHEMA = ? AND t.TABLE_NAME = ? AND t.CONSTRAINT_TYPE = 'CHECK' \
             AND t.ENFORCED = 'YES'"
        }
    };
    let columns = &spec.columns;
    let written: Vec<&String> = [
        &columns.status,
        &columns.retry_count,
        &columns.next_retry_at,
        &columns.locked_by,
        &columns.locked_until,
        &columns.last_error,
    ]
    .into_iter()
    .flatten()
    .collect();
    for row in names(clauses).fetch_all(&mut *conn).await? {
        let clause = text(&row, 0)?;
        let concerns = |c: &&&String| {
            let mut words = clause.split(|ch: char| !ch.is_alphanumeric() && ch != '_');
            words.any(|w| w.eq_ignore_ascii_case(c))
        };
        if let Some(column) = written.iter().find(concerns) {
            checks.warn(
                "constraint",
                format!("CHECK {clause} is about {column}, which outboxd writes"),
                "make sure that it allows every status, and retry_count up to retry.max_retries",
            );
        }
    }
    let partitions = names(
        "SELECT COUNT(PARTITION_NAME) FROM information_schema.PARTITIONS \
         WHERE TABLE_SCHEMA = ? AND TABLE_NAME = ?",
    )
    .fetch_one(conn)
    .await?;
    let partitions: i64 = partitions.try_get_unchecked(0)?;
    if partitions > 0 {
        checks.warn(
            "partitions",
            format!("{partitions}: every look for due rows goes through all of them"),
            "before dropping a partition, make sure that all of its rows are sent",
        );
    }
    Ok(())
}

async fn find_by_index(
    conn: &mut MySqlConnection,
    outbox: &OutboxTable,
    checks: &mut Checks,
) -> DbResult<()> {
    let found = indexes(conn, &outbox.spec.schema, &outbox.spec.table).await?;
    let columns = &outbox.spec.columns;
    let status = columns.status.as_deref().unwrap_or_default();
    // After the status what tells due rows from waiting ones, or what orders them.
    let then = match (&columns.next_retry_at, by_created(outbox)) {
        (_, Some(created)) => Some(created),
        (Some(next), None) => Some(next.as_str()),
        (None, None) => None,
    };
    let wanted: Vec<&str> = [status].into_iter().chain(then).collect();
    let quoted_list = |columns: &[&str]| {
        let quoted: Vec<_> = columns.iter().map(|c| sql::quote(c)).collect();
        quoted.join(", ")
    };
    let add = |columns: &[&str]| {
        format!(
            "ALTER TABLE {} ADD INDEX ({}), ALGORITHM = INPLACE, LOCK = NONE",
            outbox.name,
            quoted_list(columns)
        )
    };
    match status_index(outbox, &found) {
        Some(index) if index.leads(&wanted) => {
            checks.ok("index", format!("due rows: {}", index.name))
        }
        Some(index) => checks.warn(
            "index",
            format!(
                "due rows are looked for among all pending ones: {} does not go on with {}",
                index.name,
                then.unwrap_or_default()
            ),
            add(&wanted),
        ),
        None => checks.warn(
            "index",
            "no index begins with the status: every poll reads the whole table",
            add(&wanted),
        ),
    }
    let kind = columns.aggregate_type.as_deref();
    let key: Vec<&str> = kind
        .into_iter()
        .chain([columns.aggregate_id.as_str(), status])
        .collect();
    match aggregate_index(outbox, &found) {
        Some(index) => checks.ok("index", format!("aggregates: {}", index.name)),
        None if outbox.spec.ordering == Ordering::None => {}
        None => checks.warn(
            "index",
            "no index leads to the rows of an aggregate: keeping order reads all pending rows, \
             and rows that wait for an earlier one may fill whole polls",
            add(&key),
        ),
    }
    if status_index(outbox, &found).is_some() {
        unknown_statuses(conn, outbox, checks).await?;
    }
    Ok(())
}

/// Rows whose status is none of the configured values are nobody's. By the index, which jumps
/// from value to value.
async fn unknown_statuses(
    conn: &mut MySqlConnection,
    outbox: &OutboxTable,
    checks: &mut Checks,
) -> DbResult<()> {
    let query = sql::query(format!(
        "SELECT CAST(s AS CHAR) FROM (SELECT DISTINCT {} AS s FROM {} LIMIT 100) x",
        quoted(outbox.spec.columns.status.as_ref()),
        outbox.name
    ));
    let values = &outbox.spec.status_values;
    let mut unknown = Vec::new();
    for row in query.persistent(false).fetch_all(conn).await? {
        let stored = crate::layouts::optional(&row, 0)?;
        let known = stored.as_deref().and_then(|s| values.from_text(s));
        if known.is_none() {
            unknown.push(stored.unwrap_or_else(|| "NULL".to_owned()));
        }
    }
    if !unknown.is_empty() {
        let names: Vec<_> = Status::ALL.iter().map(|s| s.name()).collect();
        checks.warn(
            "status values",
            format!(
                "rows with the status {} are never published",
                unknown.join(", ")
            ),
            format!("set outbox.status_values: {}", names.join(", ")),
        );
    }
    Ok(())
}

/// The newest row is not from the future, unless zones are mixed up.
async fn young(
    conn: &mut MySqlConnection,
    outbox: &OutboxTable,
    checks: &mut Checks,
) -> DbResult<()> {
    let Some(created) = outbox.spec.columns.created_at.as_deref() else {
        return Ok(());
    };
    if by_created(outbox).is_some() {
        // No key tells which row is the newest.
        return Ok(());
    }
    let query = sql::query(format!(
        "SELECT CAST(TIMESTAMPDIFF(SECOND, NOW(), {}) AS SIGNED) FROM {} ORDER BY {} DESC LIMIT 1",
        sql::quote(created),
        outbox.name,
        outbox.id
    ));
    let row = query.persistent(false).fetch_optional(conn).await?;
    let ahead: Option<i64> = match row {
        Some(row) => row.try_get_unchecked(0)?,
        None => None,
    };
    if let Some(ahead) = ahead.filter(|a| *a > FUTURE_SECONDS) {
        checks.warn(
            "time zone",
            format!("the newest row was created {ahead} s in the future"),
            "set mysql.time_zone to the zone that the application writes its DATETIME columns in",
        );
    }
    Ok(())
}

/// Consumers tell rows apart by table and message id; two tables on one exchange may have the
/// same ids.
fn shared_exchanges(specs: &[Arc<TableSpec>], checks: &mut Checks) {
    let mut by_exchange: HashMap<String, Vec<String>> = HashMap::new();
    for spec in specs {
        let exchange = spec.exchange.to_string();
        by_exchange
            .entry(exchange)
            .or_default()
            .push(spec.full_name());
    }
    let mut shared: Vec<_> = by_exchange
        .into_iter()
        .filter(|(_, t)| t.len() > 1)
        .collect();
    shared.sort();
    for (exchange, tables) in shared {
        checks.warn(
            "shared exchange",
            format!("{} publish to {exchange:?}", tables.join(" and ")),
            "consumers must take app_id, outbox-table and message_id together for a message's \
             identity",
        );
    }
}
