//! What operators do with rows: list, show, retry, abandon, replay, purge; in parked rows too.
//!
//! Every change compares first: a row that is not in the state to be changed stays as it is and
//! is not counted.

mod change;
mod read;
mod replay;
mod status;

use std::sync::Arc;

use outbox_core::ports::{PortError, PortResult};
use outbox_core::retry::RetryPolicy;
use outbox_core::row::{RowId, TableIdx};
use outbox_core::spec::{TableSpec, Tracking};
use serde::Serialize;
use sqlx::MySqlConnection;

pub use read::{Filter, RowDetail, RowSummary};
pub use replay::{ReplayPage, ReplayRange};
pub use status::{GapView, Lag, StatusOverview, TableStatus};

use crate::claims::terms::{Access, Terms, parse_as};
use crate::connect::Db;
use crate::error::{DbError, DbResult};
use crate::parked::ParkedTable;
use crate::sql;
use crate::table::OutboxTable;

/// Rows of all configured tables, for operators.
#[derive(Debug)]
pub struct Admin {
    db: Db,
    name: Arc<str>,
    tables: Arc<Vec<OutboxTable>>,
    parked: Vec<ParkedTable>,
    retry: RetryPolicy,
    broken: Vec<BrokenTable>,
}

/// A configured table that cannot be used; the others can.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BrokenTable {
    /// `schema.table`.
    pub table: String,
    /// Why not.
    pub error: String,
}

/// Where the rows of a table are that an operator can do something about.
enum One<'a> {
    Table(Terms<'a>),
    Parked(&'a ParkedTable),
}

impl Admin {
    /// Opens the configured tables; those that cannot be used are left out (see
    /// [`Admin::broken`]). Tables are numbered anew, without them.
    ///
    /// # Errors
    /// Where the database cannot be asked, or no table can be used.
    pub async fn open(
        db: Db,
        name: Arc<str>,
        specs: &[Arc<TableSpec>],
        retry: RetryPolicy,
    ) -> PortResult<Self> {
        let work = async {
            let family = db.family().await?;
            let mut session = db.session().await?;
            let (tables, mut broken) =
                OutboxTable::open_all(&mut session, family, specs, &name).await?;
            session.finish();
            match tables.is_empty().then(|| broken.pop()).flatten() {
                Some((_, error)) => Err(error),
                None => Ok((tables, broken)),
            }
        };
        let (tables, broken) = db.run("open the outbox tables", work).await?;
        let broken = broken.into_iter().map(|(spec, error)| BrokenTable {
            table: spec.full_name(),
            error: error.to_string(),
        });
        Ok(Self {
            broken: broken.collect(),
            ..Self::new(db, name, Arc::new(tables), retry)
        })
    }

    /// Rows of tables that are open already.
    #[must_use]
    pub fn new(db: Db, name: Arc<str>, tables: Arc<Vec<OutboxTable>>, retry: RetryPolicy) -> Self {
        let parked = tables
            .iter()
            .map(|t| ParkedTable::new(Arc::clone(&name), t.idx, &t.spec));
        Self {
            parked: parked.collect(),
            db,
            name,
            tables,
            retry,
            broken: Vec::new(),
        }
    }

    /// Configured tables that cannot be used.
    #[must_use]
    pub fn broken(&self) -> &[BrokenTable] {
        &self.broken
    }

    /// The table of this name: as configured, with its schema or without.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<TableIdx> {
        let full = self.tables.iter().find(|t| t.spec.full_name() == name);
        let bare = || self.tables.iter().find(|t| t.spec.table == name);
        full.or_else(bare).map(|t| t.idx)
    }

    /// The full names of all tables, in their order.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.tables.iter().map(|t| t.spec.full_name()).collect()
    }

    fn outbox(&self, table: TableIdx) -> DbResult<&OutboxTable> {
        let found = self.tables.get(usize::from(table.0));
        found.ok_or_else(|| DbError::Config(format!("there is no outbox number {}", table.0)))
    }

    async fn one(&self, conn: &mut MySqlConnection, table: TableIdx) -> DbResult<One<'_>> {
        let table = self.outbox(table)?;
        if table.spec.tracking == Tracking::None {
            return Ok(One::Parked(&self.parked[usize::from(table.idx.0)]));
        }
        Ok(One::Table(Terms {
            access: Arc::new(Access::read(conn, table).await?),
            table,
            retry: &self.retry,
        }))
    }

    /// The tables that a command is about: one, or all.
    fn these(&self, table: Option<TableIdx>) -> Vec<TableIdx> {
        match table {
            Some(table) => vec![table],
            None => self.tables.iter().map(|t| t.idx).collect(),
        }
    }

    /// Keys as a person writes them; one that cannot be a key of this table is none of its rows.
    fn ids(&self, table: TableIdx, printed: &[String]) -> DbResult<Vec<RowId>> {
        let table = self.outbox(table)?;
        let id = &table.spec.columns.id;
        let ids = printed.iter().filter_map(|p| parse_as(table, id, p));
        Ok(ids.collect())
    }

    /// The one table that these keys are in. Where none was named and several hold some of them,
    /// it must be.
    async fn owner(
        &self,
        conn: &mut MySqlConnection,
        table: Option<TableIdx>,
        printed: &[String],
    ) -> DbResult<Option<TableIdx>> {
        let tables = self.these(table);
        if let [only] = tables.as_slice() {
            return Ok(Some(*only));
        }
        let mut owner: Option<TableIdx> = None;
        for table in tables {
            let ids = self.ids(table, printed)?;
            let mut any = false;
            for ids in ids.chunks(sql::BATCH) {
                any |= self.any_exists(conn, table, ids).await?;
            }
            if !any {
                continue;
            }
            if let Some(other) = owner {
                return Err(DbError::Config(format!(
                    "both {} and {} have such rows: name the table",
                    self.outbox(other)?.spec.full_name(),
                    self.outbox(table)?.spec.full_name()
                )));
            }
            owner = Some(table);
        }
        Ok(owner)
    }

    async fn any_exists(
        &self,
        conn: &mut MySqlConnection,
        table: TableIdx,
        ids: &[RowId],
    ) -> DbResult<bool> {
        match self.one(conn, table).await? {
            One::Parked(parked) => {
                let seen = parked.look(conn, ids).await?;
                Ok(seen.iter().any(|s| *s != outbox_core::ports::Seen::Absent))
            }
            One::Table(terms) => {
                let text = format!(
                    "SELECT 1 FROM {} WHERE {} IN {} LIMIT 1",
                    terms.table.name,
                    terms.table.id,
                    sql::list(ids.len())
                );
                let query = sql::bind_ids(sql::query(text), ids);
                Ok(query.fetch_optional(conn).await?.is_some())
            }
        }
    }
}

/// Wrong words of an operator, such as an unknown table, as an error of `operation`.
fn refuse(operation: &str, why: impl Into<String>) -> PortError {
    DbError::Config(why.into()).during(operation)
}
