//! A configured outbox table as the server has it: its layout, the columns that are there, and
//! how its rows are read.

use std::sync::Arc;

use outbox_core::binder::{BindContext, Binder};
use outbox_core::layout::TableLayout;
use outbox_core::ports::Disposition;
use outbox_core::row::{OutboxRow, RowId, TableIdx};
use outbox_core::spec::{ColumnNames, TableSpec, Tracking};
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row};

use crate::cells::CellPlan;
use crate::connect::Family;
use crate::error::{DbError, DbResult};
use crate::layouts::{missing, read_layout};
use crate::sql;
use crate::zone::OFFSET;

/// A table whose layout fits its section of the configuration.
#[derive(Debug)]
pub struct OutboxTable {
    /// Its place in the configuration.
    pub idx: TableIdx,
    /// Its section, without the optional columns that the table does not have.
    pub spec: Arc<TableSpec>,
    /// Its layout at the time it was opened.
    pub layout: TableLayout,
    /// Roles of the optional columns that were configured and are not there.
    pub absent: Vec<&'static str>,
    /// Quoted, with its schema.
    pub name: String,
    /// The primary key column, quoted.
    pub id: String,
    binder: Binder,
    plan: CellPlan,
}

impl OutboxTable {
    /// Reads the layout and fits the section to it.
    pub async fn open(
        conn: &mut MySqlConnection,
        family: Family,
        idx: TableIdx,
        spec: &TableSpec,
        app_id: Arc<str>,
    ) -> DbResult<Self> {
        let layout = read_layout(conn, family, &spec.schema, &spec.table)
            .await?
            .ok_or_else(|| missing(spec))?;
        Self::new(idx, spec, layout, app_id)
    }

    /// Opens tables one by one, numbered in their order without those that cannot be used, and
    /// could not be by asking again: these come back with their errors.
    ///
    /// # Errors
    /// Where the database cannot be asked.
    pub async fn open_all(
        conn: &mut MySqlConnection,
        family: Family,
        specs: &[Arc<TableSpec>],
        app_id: &Arc<str>,
    ) -> DbResult<(Vec<Self>, Vec<(Arc<TableSpec>, DbError)>)> {
        let (mut tables, mut broken) = (Vec::with_capacity(specs.len()), Vec::new());
        for spec in specs {
            let idx = u16::try_from(tables.len())
                .map_err(|_| DbError::Config("more than 65,535 tables".to_owned()))?;
            match Self::open(conn, family, TableIdx(idx), spec, Arc::clone(app_id)).await {
                Ok(table) => tables.push(table),
                Err(e) if e.disposition() == Disposition::Halt => {
                    broken.push((Arc::clone(spec), e));
                }
                Err(e) => return Err(e),
            }
        }
        Ok((tables, broken))
    }

    /// Fits the section to a layout.
    pub fn new(
        idx: TableIdx,
        spec: &TableSpec,
        layout: TableLayout,
        app_id: Arc<str>,
    ) -> DbResult<Self> {
        let mut spec = spec.clone();
        let absent = drop_absent(&mut spec.columns, spec.tracking, &layout);
        let spec = Arc::new(spec);
        let binder = Binder::new(idx, Arc::clone(&spec), &layout, app_id)
            .map_err(|e| DbError::Config(format!("{}: {e}", spec.full_name())))?;
        let plan = CellPlan::new(&layout, binder.wanted())?;
        Ok(Self {
            idx,
            layout,
            absent,
            name: sql::quote_table(&spec.schema, &spec.table),
            id: sql::quote(&spec.columns.id),
            binder,
            plan,
            spec,
        })
    }

    /// The start of a statement that reads whole rows for [`OutboxTable::bind`]:
    /// `SELECT … FROM the table`.
    #[must_use]
    pub fn select(&self) -> String {
        format!("SELECT {}, {OFFSET} FROM {}", self.plan.list(), self.name)
    }

    /// The row of a result of [`OutboxTable::select`]; further columns may follow, from
    /// [`OutboxTable::width`] on. `None` (and a warning) for a row without identity or of an
    /// unknown status, which is nobody's to publish.
    pub fn bind(&self, row: &MySqlRow) -> DbResult<Option<OutboxRow>> {
        let context = BindContext {
            commit_time: None,
            zone_offset: row.try_get_unchecked(self.plan.len())?,
        };
        match self.binder.bind(&self.plan.decode(row)?, context) {
            Ok(row) => Ok(Some(row)),
            Err(error) => {
                tracing::warn!(table = self.spec.full_name(), %error, "row passed over");
                Ok(None)
            }
        }
    }

    /// Columns that [`OutboxTable::select`] reads.
    #[must_use]
    pub fn width(&self) -> usize {
        self.plan.len() + 1
    }

    /// A key as its column returns it, at `index` of a row that selected the bare key column.
    pub fn row_id(&self, row: &MySqlRow, index: usize) -> DbResult<RowId> {
        let column = self.column(&self.spec.columns.id)?;
        Ok(match column.data_type.as_str() {
            "tinyint" | "smallint" | "mediumint" | "int" | "bigint" if column.unsigned => {
                RowId::UInt(row.try_get_unchecked(index)?)
            }
            "tinyint" | "smallint" | "mediumint" | "int" | "bigint" => {
                RowId::Int(row.try_get_unchecked(index)?)
            }
            "binary" | "varbinary" | "tinyblob" | "blob" | "mediumblob" | "longblob" => {
                RowId::Binary(row.try_get_unchecked::<&[u8], _>(index)?.into())
            }
            _ => RowId::Text(crate::layouts::text(row, index)?.into()),
        })
    }

    /// A column of the layout.
    pub fn column(&self, name: &str) -> DbResult<&outbox_core::layout::Column> {
        self.layout.column(name).ok_or_else(|| {
            DbError::Config(format!("{} has no column {name}", self.spec.full_name()))
        })
    }

    /// Now, in the column's own precision: a DATETIME(0) would round a finer now up, into the
    /// future.
    #[must_use]
    pub fn now(&self, column: &str) -> String {
        let fraction = self.layout.column(column).map_or(6, |c| c.fraction);
        format!("NOW({fraction})")
    }
}

/// Removes the optional columns that are not there, and returns their roles. A table without
/// status columns has none of the state columns by definition.
fn drop_absent(
    columns: &mut ColumnNames,
    tracking: Tracking,
    layout: &TableLayout,
) -> Vec<&'static str> {
    let mut absent = Vec::new();
    let mut check = |role: &'static str, column: &mut Option<String>| {
        if column.as_ref().is_some_and(|c| layout.column(c).is_none()) {
            *column = None;
            absent.push(role);
        }
    };
    check("aggregate_type", &mut columns.aggregate_type);
    check("headers", &mut columns.headers);
    check("created_at", &mut columns.created_at);
    if tracking == Tracking::None {
        for column in [
            &mut columns.status,
            &mut columns.retry_count,
            &mut columns.next_retry_at,
            &mut columns.locked_by,
            &mut columns.locked_until,
            &mut columns.last_error,
            &mut columns.updated_at,
        ] {
            *column = None;
        }
        return absent;
    }
    check("next_retry_at", &mut columns.next_retry_at);
    check("locked_by", &mut columns.locked_by);
    check("locked_until", &mut columns.locked_until);
    check("last_error", &mut columns.last_error);
    check("updated_at", &mut columns.updated_at);
    absent
}
