//! The account, and our own tables.

use sqlx::{Executor as _, MySqlConnection};

use super::Checks;
use crate::connect::{Db, Family, RowImage};
use crate::error::{DbError, DbResult};
use crate::layouts::text;
use crate::{migrate, sql};

/// Rights that are missing: on a schema, a table, a column, the server.
const DENIED: [u16; 5] = [1044, 1142, 1143, 1045, 1227];
/// The server is read-only, which is a check of its own.
const READ_ONLY: [u16; 2] = [1290, 1836];

pub(super) async fn check(db: &Db, checks: &mut Checks) -> DbResult<()> {
    check_replication(db, checks).await?;
    match db.traits().await?.1 {
        RowImage::Minimal => checks.ok(
            "SESSION_VARIABLES_ADMIN",
            "our own writes use MINIMAL row images",
        ),
        RowImage::ServerDefault => checks.warn(
            "SESSION_VARIABLES_ADMIN",
            "not granted: marking a row writes its whole image to the binlog, payload included, \
             some fifty times the bytes",
            "optional: GRANT SESSION_VARIABLES_ADMIN ON *.* (MariaDB: BINLOG ADMIN)",
        ),
    }
    own_tables(db, checks).await
}

/// What reading the binlog needs.
pub(super) async fn check_replication(db: &Db, checks: &mut Checks) -> DbResult<()> {
    let family = db.family().await?;
    let mut session = db.session().await?;
    let client = either(
        &mut session,
        ["SHOW BINARY LOG STATUS", "SHOW MASTER STATUS"],
    )
    .await?;
    report(
        checks,
        "REPLICATION CLIENT",
        client,
        "the binlog's coordinate cannot be read",
        "GRANT REPLICATION CLIENT ON *.* (MariaDB: BINLOG MONITOR)",
    );
    let replica = match family {
        Family::MySql => either(&mut session, ["SHOW REPLICAS", "SHOW SLAVE HOSTS"]).await?,
        Family::MariaDb => granted(&mut session).await?,
    };
    report(
        checks,
        "REPLICATION SLAVE",
        replica,
        "the binlog cannot be read",
        "GRANT REPLICATION SLAVE ON *.*",
    );
    session.finish();
    Ok(())
}

fn report(checks: &mut Checks, name: &str, granted: bool, lack: &str, fix: &str) {
    if granted {
        checks.ok(name, "granted");
    } else {
        checks.fail(name, format!("not granted: {lack}"), fix);
    }
}

/// Whether one of two spellings of a statement is allowed.
async fn either(conn: &mut MySqlConnection, statements: [&'static str; 2]) -> DbResult<bool> {
    for statement in statements {
        match conn.fetch_all(statement).await {
            Ok(_) => return Ok(true),
            Err(e) => match DbError::from(e) {
                DbError::Server { number, .. } if DENIED.contains(&number) => return Ok(false),
                // A syntax error: the other spelling is this server's.
                DbError::Server { .. } => {}
                e => return Err(e),
            },
        }
    }
    Ok(false)
}

/// MariaDB has no harmless statement for this right, but shows the grants of enabled roles too.
async fn granted(conn: &mut MySqlConnection) -> DbResult<bool> {
    let rows = conn.fetch_all("SHOW GRANTS").await?;
    let mut any = false;
    for row in &rows {
        let grant = text(row, 0)?.to_ascii_uppercase();
        let (rights, rest) = grant.split_once(" ON ").unwrap_or((&grant, ""));
        any |= rest.starts_with("*.*")
            && ["REPLICATION SLAVE", "REPLICATION REPLICA", "ALL PRIVILEGES"]
                .iter()
                .any(|r| rights.contains(r));
    }
    Ok(any)
}

/// Whether the account may do this; the statement changes nothing, whatever it finds. Of a server
/// that is read-only nothing can be learnt, and another check says so.
pub(super) async fn allowed(conn: &mut MySqlConnection, statement: String) -> DbResult<bool> {
    match sql::query(statement).persistent(false).execute(conn).await {
        Ok(_) => Ok(true),
        Err(e) => match DbError::from(e) {
            DbError::Server { number, .. } if DENIED.contains(&number) => Ok(false),
            DbError::Server { number, .. } if READ_ONLY.contains(&number) => Ok(true),
            e => Err(e),
        },
    }
}

async fn own_tables(db: &Db, checks: &mut Checks) -> DbResult<()> {
    let mut session = db.session().await?;
    let version = migrate::read_version(&mut session).await;
    let version = match version {
        Err(e) if e.number().is_some_and(|n| DENIED.contains(&n)) => {
            checks.fail(
                "outboxd tables",
                format!("they are not there, or may not be read: {e}"),
                "run `outboxd migrate`, and grant SELECT, INSERT, UPDATE, DELETE on them",
            );
            session.finish();
            return Ok(());
        }
        other => other?,
    };
    if !version.is_current() {
        let what = match version.dirty {
            Some(dirty) => format!("migration {dirty} was cut off"),
            None => format!("{} migrations are missing", version.missing.len()),
        };
        checks.fail("outboxd tables", what, "run `outboxd migrate`");
        session.finish();
        return Ok(());
    }
    let rows = sqlx::query(
        "SELECT CAST(TABLE_NAME AS CHAR) FROM information_schema.TABLES \
         WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME LIKE 'outboxd\\_%' \
         AND TABLE_NAME <> 'outboxd_migrations'",
    )
    .fetch_all(&mut *session)
    .await?;
    let mut denied = Vec::new();
    for row in &rows {
        let name = text(row, 0)?;
        let table = sql::quote_table(db.schema(), &name);
        for (right, statement) in [
            ("SELECT", format!("SELECT 1 FROM {table} LIMIT 0")),
            (
                "INSERT",
                format!("INSERT INTO {table} SELECT * FROM {table} WHERE FALSE"),
            ),
            (
                "UPDATE",
                format!("UPDATE {table} SET name = name WHERE FALSE"),
            ),
            ("DELETE", format!("DELETE FROM {table} WHERE FALSE")),
        ] {
            if !allowed(&mut session, statement).await? {
                denied.push(format!("{right} on {name}"));
            }
        }
    }
    session.finish();
    if denied.is_empty() {
        checks.ok("outboxd tables", "up to date, and ours to read and write");
    } else {
        checks.fail(
            "outboxd tables",
            format!("not granted: {}", denied.join(", ")),
            format!(
                "GRANT SELECT, INSERT, UPDATE, DELETE on the outboxd_* tables of {}",
                db.schema()
            ),
        );
    }
    Ok(())
}
