//! Our own tables, through sqlx's migrator under a table name of our own: an application that uses
//! sqlx in the same schema has a `_sqlx_migrations` already.
//!
//! Every file holds one idempotent statement, so a migration that was cut off in the middle is
//! repaired by running it again.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use outbox_core::ports::PortResult;
use sqlx::MySqlConnection;
use sqlx::migrate::{Migrate as _, MigrateError, Migrator};

use crate::connect::Db;
use crate::error::{DbError, DbResult};
use crate::sql;

const TABLE: &str = "outboxd_migrations";
/// `no such table`: before the first migration.
const NO_SUCH_TABLE: u16 = 1146;
const DEFAULT_OUTBOX: &str = include_str!("../../../migrations/default-outbox/outbox.sql");

static MIGRATIONS: Migrator = sqlx::migrate!("../../migrations");

/// How far a schema is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Migrations that this program brings and the schema lacks, in order.
    pub missing: Vec<i64>,
    /// A version of this program's that was begun and not finished. Those that only a newer
    /// program knows are not counted: it may be migrating right now.
    pub dirty: Option<i64>,
}

impl Version {
    /// Whether this program can run on the schema. A schema that is ahead is fine: changes are
    /// additive, old and new versions run side by side during an upgrade.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.missing.is_empty() && self.dirty.is_none()
    }
}

fn migrator() -> Migrator {
    let mut migrator = Migrator::with_migrations(MIGRATIONS.iter().cloned().collect());
    migrator.dangerous_set_table_name(TABLE);
    // A newer version of this program may have been here.
    migrator.set_ignore_missing(true);
    // Locked by [`run`], for longer.
    migrator.set_locking(false);
    migrator
}

/// Every statement that [`run`] would execute.
#[must_use]
pub fn print(with_outbox: bool) -> String {
    let mut text = String::new();
    for migration in MIGRATIONS.iter() {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{};\n",
            migration.sql.as_str().trim().trim_end_matches(';')
        );
    }
    if with_outbox {
        let _ = writeln!(text, "{};", DEFAULT_OUTBOX.trim().trim_end_matches(';'));
    }
    text
}

/// Creates or updates our own tables, and the default outbox table where asked for. Safe to
/// repeat, and to repeat after it was cut off. Returns the versions that were applied.
pub async fn run(db: &Db, with_outbox: bool) -> PortResult<Vec<i64>> {
    let work = async {
        let mut session = db.session().await?;
        // Before anything is read: what another `migrate` has begun looks cut off.
        session.lock().await.map_err(failed)?;
        let before = read_version(&mut session).await?;
        if let Some(dirty) = before.dirty {
            tracing::warn!(
                version = dirty,
                "an earlier migration was cut off; it is run again"
            );
            sql::query(format!("DELETE FROM {TABLE} WHERE version = ?"))
                .bind(dirty)
                .execute(&mut *session)
                .await?;
        }
        let missing = read_version(&mut session).await?.missing;
        migrator()
            .run_direct(None, &mut *session, false)
            .await
            .map_err(failed)?;
        session.unlock().await.map_err(failed)?;
        if with_outbox {
            sql::query(DEFAULT_OUTBOX.to_owned())
                .execute(&mut *session)
                .await?;
        }
        session.finish();
        Ok(missing)
    };
    db.run("migrate", work).await
}

/// How far the schema is; reads only.
pub async fn version(db: &Db) -> PortResult<Version> {
    let work = async {
        let mut session = db.session().await?;
        let version = read_version(&mut session).await?;
        session.finish();
        Ok(version)
    };
    db.run("read the version of our tables", work).await
}

pub(crate) async fn read_version(conn: &mut MySqlConnection) -> DbResult<Version> {
    let text = format!("SELECT version, success FROM {TABLE} ORDER BY version");
    let rows = match sql::query(text)
        .fetch_all(conn)
        .await
        .map_err(DbError::from)
    {
        Ok(rows) => rows,
        Err(e) if e.number() == Some(NO_SUCH_TABLE) => Vec::new(),
        Err(e) => return Err(e),
    };
    let (mut done, mut dirty) = (BTreeSet::new(), None);
    for row in &rows {
        use sqlx::Row as _;
        let version: i64 = row.try_get_unchecked(0)?;
        if row.try_get_unchecked::<i64, _>(1)? != 0 {
            done.insert(version);
        } else if MIGRATIONS.version_exists(version) {
            dirty = Some(version);
        }
    }
    let missing = MIGRATIONS
        .iter()
        .map(|m| m.version)
        .filter(|v| !done.contains(v))
        .collect();
    Ok(Version { missing, dirty })
}

fn failed(error: MigrateError) -> DbError {
    match error {
        MigrateError::Execute(e) | MigrateError::ExecuteMigration(e, _) => DbError::from(e),
        MigrateError::Dirty(version) => DbError::Corrupt(format!(
            "migration {version}, which this version of outboxd does not know, was not finished; \
             run `migrate` of the newer version"
        )),
        other => DbError::Corrupt(other.to_string()),
    }
}
