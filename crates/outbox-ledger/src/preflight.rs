//! What is wrong with the server, the account or the tables, before it hurts: each check says
//! what it saw and what to do about it.
//!
//! Rights are tried rather than parsed out of grants: roles, wildcards and column privileges then
//! count as the server counts them. The statements that try them change nothing.

mod account;
mod server;
mod tables;

use std::sync::Arc;

use outbox_core::ports::PortResult;
use outbox_core::spec::TableSpec;
use serde::Serialize;

use crate::connect::Db;
use crate::error::{DbError, DbResult};

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, with a cost or a risk.
    Warn,
    /// Does not work.
    Fail,
}

impl Level {
    /// The name that is printed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was checked, such as `binlog_format` or `app.outbox: status`.
    pub name: String,
    /// How it ended.
    pub level: Level,
    /// What was seen.
    pub what: String,
    /// What to do, unless all is well.
    pub fix: Option<String>,
}

/// The checks of one run, in their order.
#[derive(Debug, Default)]
struct Checks {
    all: Vec<Check>,
    /// In front of every name.
    prefix: String,
}

impl Checks {
    fn add(&mut self, level: Level, name: &str, what: impl Into<String>, fix: Option<String>) {
        self.all.push(Check {
            name: format!("{}{name}", self.prefix),
            level,
            what: what.into(),
            fix,
        });
    }

    fn ok(&mut self, name: &str, what: impl Into<String>) {
        self.add(Level::Ok, name, what, None);
    }

    fn warn(&mut self, name: &str, what: impl Into<String>, fix: impl Into<String>) {
        self.add(Level::Warn, name, what, Some(fix.into()));
    }

    fn fail(&mut self, name: &str, what: impl Into<String>, fix: impl Into<String>) {
        self.add(Level::Fail, name, what, Some(fix.into()));
    }
}

/// All checks of the server that is written to: its settings, the account, our own tables and
/// the configured ones. The error is that of a server that cannot be reached.
pub async fn check(db: &Db, name: &str, specs: &[Arc<TableSpec>]) -> PortResult<Vec<Check>> {
    let work = async {
        let mut checks = Checks::default();
        if !connect(db, &mut checks).await? {
            return Ok(checks.all);
        }
        server::check(db, specs, &mut checks).await?;
        account::check(db, &mut checks).await?;
        tables::check(db, name, specs, &mut checks).await?;
        Ok(checks.all)
    };
    db.run("check the database", work).await
}

/// The checks of a server that is only read from: `mysql.replica_url`.
pub async fn check_replica(db: &Db, specs: &[Arc<TableSpec>]) -> PortResult<Vec<Check>> {
    let work = async {
        let mut checks = Checks {
            prefix: "replica: ".to_owned(),
            ..Checks::default()
        };
        if connect(db, &mut checks).await? {
            server::check_binlog(db, specs, &mut checks).await?;
            account::check_replication(db, &mut checks).await?;
        }
        Ok(checks.all)
    };
    db.run("check the replica", work).await
}

/// Whether a session could be opened; false after a failed check that says why not.
async fn connect(db: &Db, checks: &mut Checks) -> DbResult<bool> {
    match db.session().await {
        Ok(session) => {
            session.finish();
            Ok(true)
        }
        Err(DbError::Driver(sqlx::Error::Protocol(why))) if why.contains("plugin") => {
            checks.fail(
                "account",
                format!("statements cannot log in with this account: {why}"),
                "use an account with caching_sha2_password (or, on MariaDB, \
                 mysql_native_password); ed25519 and parsec are not supported",
            );
            Ok(false)
        }
        Err(e) => Err(e),
    }
}
