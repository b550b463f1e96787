//! The server: version, binlog, clock.

use std::sync::Arc;
use std::time::SystemTime;

use outbox_core::spec::TableSpec;
use sqlx::mysql::MySqlRow;
use sqlx::{Column as _, Executor as _, MySqlConnection, Row};

use super::Checks;
use crate::connect::{Db, Family};
use crate::error::{DbError, DbResult};
use crate::layouts::{optional, text};
use crate::sql;
use crate::zone::OFFSET;

/// A shorter retention does not outlast a bad night.
const RETENTION_SECONDS: u64 = 86_400;
/// Clocks that differ by more make lags and ages hard to read.
const CLOCK_SECONDS: i64 = 2;

/// Everything about the server that is written to.
pub(super) async fn check(db: &Db, specs: &[Arc<TableSpec>], checks: &mut Checks) -> DbResult<()> {
    check_binlog(db, specs, checks).await?;
    let mut session = db.session().await?;
    let (read_only, super_read_only) = (
        variable(&mut session, "read_only").await?,
        variable(&mut session, "super_read_only").await?,
    );
    if on(super_read_only.as_deref()) || on(read_only.as_deref()) {
        checks.fail(
            "read_only",
            "the server is read-only: statuses and the position cannot be written",
            "point mysql.url at the primary; to tail a replica, set mysql.replica_url",
        );
    } else {
        checks.ok("read_only", "OFF");
    }
    clock(&mut session, checks).await?;
    session.finish();
    Ok(())
}

/// What reading the binlog needs.
pub(super) async fn check_binlog(
    db: &Db,
    specs: &[Arc<TableSpec>],
    checks: &mut Checks,
) -> DbResult<()> {
    let family = db.family().await?;
    let mut session = db.session().await?;
    version(&mut session, family, checks).await?;
    if on(variable(&mut session, "log_bin").await?.as_deref()) {
        checks.ok("log_bin", "ON");
    } else {
        checks.fail(
            "log_bin",
            "the server writes no binary log",
            "start the server with log_bin, or set tail.enabled = false to poll only",
        );
    }
    format(&mut session, checks).await?;
    match family {
        Family::MySql => gtid(&mut session, checks).await?,
        Family::MariaDb => strict(&mut session, checks).await?,
    }
    retention(&mut session, checks).await?;
    replica(&mut session, checks).await?;
    filters(&mut session, specs, checks).await?;
    session.finish();
    Ok(())
}

async fn version(conn: &mut MySqlConnection, family: Family, checks: &mut Checks) -> DbResult<()> {
    let version = variable(conn, "version").await?.unwrap_or_default();
    let (name, least, words) = match family {
        Family::MySql => ("MySQL", (8, 0), "MySQL 8.0"),
        Family::MariaDb => ("MariaDB", (10, 6), "MariaDB 10.6"),
    };
    let mut numbers = version
        .split(['.', '-'])
        .map(|n| n.parse::<u32>().unwrap_or(0));
    let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if found < least {
        checks.fail(
            "version",
            format!("{name} {version} does not know SKIP LOCKED"),
            format!("upgrade to {words} or later"),
        );
    } else {
        checks.ok("version", format!("{name} {version}"));
    }
    Ok(())
}

async fn format(conn: &mut MySqlConnection, checks: &mut Checks) -> DbResult<()> {
    for (name, wanted) in [("binlog_format", "ROW"), ("binlog_row_image", "FULL")] {
        match variable(conn, name).await? {
            Some(value) if value.eq_ignore_ascii_case(wanted) => checks.ok(name, value),
            Some(value) => checks.fail(
                name,
                format!("{value}: inserts cannot be read from the binlog"),
                format!(
                    "SET PERSIST {name} = '{wanted}' (MariaDB: SET GLOBAL, and in the server's \
                     configuration), then let the application reconnect: sessions keep the old value"
                ),
            ),
            None => checks.ok(name, "not a setting of this server"),
        }
    }
    let name = "binlog_row_metadata";
    match variable(conn, name).await? {
        Some(value) if value.eq_ignore_ascii_case("FULL") => checks.ok(name, value),
        Some(value) => checks.warn(
            name,
            format!(
                "{value}: the binlog does not name columns; around a change of a table's columns \
                 rows are left to the poller"
            ),
            "SET PERSIST binlog_row_metadata = 'FULL' (MariaDB: SET GLOBAL, and in the server's \
             configuration)",
        ),
        None => checks.ok(name, "not a setting of this server"),
    }
    Ok(())
}

async fn gtid(conn: &mut MySqlConnection, checks: &mut Checks) -> DbResult<()> {
    match variable(conn, "gtid_mode").await? {
        Some(mode) if mode.eq_ignore_ascii_case("ON") => checks.ok("gtid_mode", mode),
        Some(mode) => checks.warn(
            "gtid_mode",
            format!("{mode}: after a failover the position is lost and the table is swept"),
            "turn gtid_mode on: positions then hold on every server of the topology",
        ),
        None => checks.ok("gtid_mode", "not a setting of this server"),
    }
    Ok(())
}

/// MariaDB always has GTIDs; only the order of their numbers is a matter of choice.
async fn strict(conn: &mut MySqlConnection, checks: &mut Checks) -> DbResult<()> {
    let name = "gtid_strict_mode";
    if on(variable(conn, name).await?.as_deref()) {
        checks.ok(name, "ON");
    } else {
        checks.warn(
            name,
            "OFF: a write to a replica can put the GTIDs of a domain out of order, and after a \
             failover the position may be lost",
            "SET GLOBAL gtid_strict_mode = ON on every server of the topology, and in their \
             configuration",
        );
    }
    Ok(())
}

async fn retention(conn: &mut MySqlConnection, checks: &mut Checks) -> DbResult<()> {
    let name = "binlog_expire_logs_seconds";
    // On RDS the setting that counts is kept in a table, and NULL is "as soon as possible".
    let rds = "SELECT CAST(value AS CHAR) FROM mysql.rds_configuration \
               WHERE name = 'binlog retention hours'";
    let hours = conn.fetch_optional(rds).await;
    if let Ok(Some(row)) = hours {
        let hours = optional(&row, 0)?
            .and_then(|h| h.parse::<u64>().ok())
            .unwrap_or(0);
        if hours * 3600 < RETENTION_SECONDS {
            checks.warn(
                "binlog retention hours",
                format!("{hours}: an outage that lasts longer loses the position"),
                "CALL mysql.rds_set_configuration('binlog retention hours', 72)",
            );
        } else {
            checks.ok("binlog retention hours", hours.to_string());
        }
        return Ok(());
    }
    match variable(conn, name)
        .await?
        .and_then(|s| s.parse::<f64>().ok())
    {
        None => checks.ok(name, "not a setting of this server"),
        Some(0.0) => checks.ok(name, "0: logs do not expire"),
        #[allow(clippy::cast_precision_loss)] // a day in seconds is exact
        Some(s) if s < RETENTION_SECONDS as f64 => checks.warn(
            name,
            format!("{s}: an outage that lasts longer loses the position"),
            "raise it above the longest outage that outboxd is to survive, a day at least",
        ),
        Some(s) => checks.ok(name, s.to_string()),
    }
    Ok(())
}

/// A replica's binlog holds what it has replicated only if it is told to.
async fn replica(conn: &mut MySqlConnection, checks: &mut Checks) -> DbResult<()> {
    let mut found = None;
    for statement in ["SHOW REPLICA STATUS", "SHOW SLAVE STATUS"] {
        match conn.fetch_all(statement).await {
            Ok(rows) => {
                found = Some(rows);
                break;
            }
            // Unknown here, or not allowed: nothing can be said.
            Err(sqlx::Error::Database(_)) => {}
            Err(e) => return Err(e.into()),
        }
    }
    let Some(rows) = found.filter(|rows| !rows.is_empty()) else {
        return Ok(());
    };
    let new = variable(conn, "log_replica_updates").await?;
    let logs = match new {
        Some(value) => Some(value),
        None => variable(conn, "log_slave_updates").await?,
    };
    if on(logs.as_deref()) {
        checks.ok("log_replica_updates", "ON");
    } else {
        checks.fail(
            "log_replica_updates",
            "the server is a replica and does not log what it replicates",
            "start it with log_replica_updates (log_slave_updates), or tail the primary",
        );
    }
    for row in &rows {
        for column in [
            "Replicate_Do_DB",
            "Replicate_Ignore_DB",
            "Replicate_Do_Table",
            "Replicate_Ignore_Table",
            "Replicate_Wild_Do_Table",
            "Replicate_Wild_Ignore_Table",
        ] {
            let filter = by_name(row, column)?.unwrap_or_default();
            if !filter.is_empty() {
                checks.warn(
                    "replication filter",
                    format!("{column} = {filter}"),
                    "make sure that the filter lets the outbox tables through",
                );
            }
        }
    }
    Ok(())
}

/// `binlog_do_db` and `binlog_ignore_db` leave whole schemas out of the log.
async fn filters(
    conn: &mut MySqlConnection,
    specs: &[Arc<TableSpec>],
    checks: &mut Checks,
) -> DbResult<()> {
    let mut row = None;
    for statement in ["SHOW BINARY LOG STATUS", "SHOW MASTER STATUS"] {
        match conn.fetch_optional(statement).await {
            Ok(found) => {
                row = found;
                break;
            }
            // Said where the account is checked.
            Err(sqlx::Error::Database(_)) => {}
            Err(e) => return Err(e.into()),
        }
    }
    let Some(row) = row else { return Ok(()) };
    let list = |column: &str| -> DbResult<Vec<String>> {
        let value = by_name(&row, column)?.unwrap_or_default();
        let names = value.split(',').map(|s| s.trim().to_owned());
        Ok(names.filter(|s| !s.is_empty()).collect())
    };
    let (only, never) = (list("Binlog_Do_DB")?, list("Binlog_Ignore_DB")?);
    for spec in specs {
        let left_out =
            never.contains(&spec.schema) || (!only.is_empty() && !only.contains(&spec.schema));
        if left_out {
            checks.fail(
                "binlog filter",
                format!("the binlog leaves out {}", spec.schema),
                "change binlog_do_db or binlog_ignore_db, and restart the server",
            );
        }
    }
    Ok(())
}

async fn clock(conn: &mut MySqlConnection, checks: &mut Checks) -> DbResult<()> {
    let row = sql::query(format!(
        "SELECT CAST(UNIX_TIMESTAMP() AS SIGNED), {OFFSET}, @@SESSION.time_zone"
    ))
    .fetch_one(conn)
    .await?;
    let (theirs, offset): (i64, i64) = (row.try_get_unchecked(0)?, row.try_get_unchecked(1)?);
    let ours = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(0));
    let apart = (ours - theirs).abs();
    if apart > CLOCK_SECONDS {
        checks.warn(
            "clock",
            format!("this machine and the server are {apart} s apart"),
            "synchronise both clocks; due times and claims go by the server's, lags are shown by both",
        );
    } else {
        checks.ok("clock", "this machine and the server agree");
    }
    let (sign, minutes) = (if offset < 0 { '-' } else { '+' }, offset.abs() / 60);
    checks.ok(
        "time zone",
        format!(
            "{}: DATETIME columns are taken to be {sign}{:02}:{:02} of UTC",
            text(&row, 2)?,
            minutes / 60,
            minutes % 60
        ),
    );
    Ok(())
}

/// A global variable as printed; `None` where the server does not know it.
pub(super) async fn variable(conn: &mut MySqlConnection, name: &str) -> DbResult<Option<String>> {
    let query = sql::query(format!("SELECT CAST(@@GLOBAL.{name} AS CHAR)"));
    match query.persistent(false).fetch_one(conn).await {
        Ok(row) => optional(&row, 0),
        Err(e) => match DbError::from(e) {
            DbError::Server { number: 1193, .. } => Ok(None),
            e => Err(e),
        },
    }
}

fn on(value: Option<&str>) -> bool {
    value.is_some_and(|v| v == "1" || v.eq_ignore_ascii_case("ON"))
}

/// A column by its name: the families, and the versions, order and number them differently.
fn by_name(row: &MySqlRow, name: &str) -> DbResult<Option<String>> {
    let mut columns = row.columns().iter();
    match columns.position(|c| c.name().eq_ignore_ascii_case(name)) {
        Some(at) => optional(row, at),
        None => Ok(None),
    }
}
