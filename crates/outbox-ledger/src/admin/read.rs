//! Listing and showing rows.

use outbox_core::binder::print_binary;
use outbox_core::ports::PortResult;
use outbox_core::row::{Cell, RowId, TableIdx};
use outbox_core::status::Status;
use serde::Serialize;
use serde_json::{Map, Value};
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row};

use super::{Admin, One, refuse};
use crate::cells::CellPlan;
use crate::claims::terms::{Terms, by_created, parse_as};
use crate::error::DbResult;
use crate::layouts::{optional, text};
use crate::parked::{self, ParkedTable};
use crate::sql;

/// Which rows to list.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// One table, or all, one after the other.
    pub table: Option<TableIdx>,
    /// One status.
    pub status: Option<Status>,
    /// One aggregate id.
    pub aggregate_id: Option<String>,
    /// One aggregate type.
    pub aggregate_type: Option<String>,
}

/// A row without its payload. Times are as the server prints them in the outbox's zone; those of
/// parked rows are in UTC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RowSummary {
    /// `schema.table`.
    pub table: String,
    /// Primary key, as printed.
    pub id: String,
    /// Empty where the table has none.
    pub aggregate_type: String,
    /// Aggregate id.
    pub aggregate_id: String,
    /// Event type; `None` for a parked row whose message could not be built.
    pub event_type: Option<String>,
    /// Name of the status.
    pub status: String,
    /// Retries spent.
    pub retry_count: u64,
    /// Not before.
    pub next_retry_at: Option<String>,
    /// Holder of a claim.
    pub locked_by: Option<String>,
    /// End of the claim.
    pub locked_until: Option<String>,
    /// Why it was not delivered.
    pub last_error: Option<String>,
    /// Creation (of a parked row: when it was parked).
    pub created_at: Option<String>,
    /// Last change.
    pub updated_at: Option<String>,
    /// Kept in `outboxd_parked`.
    pub parked: bool,
}

/// A row with everything in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RowDetail {
    /// The row.
    #[serde(flatten)]
    pub row: RowSummary,
    /// All columns of the table by name, the payload among them; of a parked row its envelope
    /// and body. Binary values in hex, UUIDs hyphenated.
    pub columns: Map<String, Value>,
}

/// What a summary shows, by role.
const ROLES: [&str; 12] = [
    "id",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "status",
    "retry_count",
    "next_retry_at",
    "locked_by",
    "locked_until",
    "last_error",
    "created_at",
    "updated_at",
];

impl Admin {
    /// Rows, newest first within each table, at most `limit`; `after` is the last row of the page
    /// before, in the table of the filter or in the only one.
    pub async fn list(
        &self,
        filter: &Filter,
        after: Option<&str>,
        limit: usize,
    ) -> PortResult<Vec<RowSummary>> {
        const WHAT: &str = "list rows";
        let tables = self.these(filter.table);
        if after.is_some() && tables.len() != 1 {
            return Err(refuse(WHAT, "a page after a row needs its table named"));
        }
        let work = async {
            let mut session = self.db.session().await?;
            let mut rows = Vec::new();
            for table in tables {
                let room = limit - rows.len();
                if room == 0 {
                    break;
                }
                rows.extend(match self.one(&mut session, table).await? {
                    One::Table(terms) => {
                        let after = after.map(|a| {
                            let id = &terms.table.spec.columns.id;
                            parse_as(terms.table, id, a)
                        });
                        match after {
                            Some(None) => Vec::new(),
                            after => {
                                page(&mut session, &terms, filter, after.flatten(), room).await?
                            }
                        }
                    }
                    One::Parked(parked) => parked.list(&mut session, filter, after, room).await?,
                });
            }
            session.finish();
            Ok(rows)
        };
        self.db.run(WHAT, work).await
    }

    /// One row whole; `None` if there is none. Where no table is named and several hold such a
    /// row, one must be.
    pub async fn show(&self, table: Option<TableIdx>, id: &str) -> PortResult<Option<RowDetail>> {
        let work = async {
            let mut session = self.db.session().await?;
            let printed = [id.to_owned()];
            let Some(table) = self.owner(&mut session, table, &printed).await? else {
                session.finish();
                return Ok(None);
            };
            let ids = self.ids(table, &printed)?;
            let detail = match (ids.first(), self.one(&mut session, table).await?) {
                (None, _) => None,
                (Some(id), One::Table(terms)) => show(&mut session, &terms, id).await?,
                (Some(id), One::Parked(parked)) => parked.show(&mut session, id).await?,
            };
            session.finish();
            Ok(detail)
        };
        self.db.run("show a row", work).await
    }
}

/// Summaries of one table: which columns are read, and what they are.
struct Summaries<'a> {
    terms: &'a Terms<'a>,
    plan: CellPlan,
    roles: Vec<&'static str>,
}

impl<'a> Summaries<'a> {
    fn new(terms: &'a Terms<'a>) -> DbResult<Self> {
        let columns = &terms.table.spec.columns;
        let there: Vec<(&str, String)> = ROLES
            .into_iter()
            .filter_map(|role| Some((role, columns.by_role(role)?.to_owned())))
            .collect();
        let (roles, names): (Vec<_>, Vec<_>) = there.into_iter().unzip();
        Ok(Self {
            plan: CellPlan::new(&terms.table.layout, &names)?,
            terms,
            roles,
        })
    }

    fn bind(&self, row: &MySqlRow) -> DbResult<RowSummary> {
        let cells = self.plan.decode(row)?;
        let get = |role: &str| {
            let at = self.roles.iter().position(|r| *r == role)?;
            cells.get(at).and_then(print)
        };
        let stored = get("status").unwrap_or_default();
        let table = self.terms.table;
        Ok(RowSummary {
            table: table.spec.full_name(),
            id: get("id").unwrap_or_default(),
            aggregate_type: get("aggregate_type").unwrap_or_default(),
            aggregate_id: get("aggregate_id").unwrap_or_default(),
            event_type: get("event_type"),
            // A status that nobody knows is shown as it is stored.
            status: match table.spec.status_values.from_text(&stored) {
                Some(status) => status.name().to_owned(),
                None => stored,
            },
            retry_count: get("retry_count").and_then(|n| n.parse().ok()).unwrap_or(0),
            next_retry_at: get("next_retry_at"),
            locked_by: get("locked_by"),
            locked_until: get("locked_until"),
            last_error: get("last_error"),
            created_at: get("created_at"),
            updated_at: get("updated_at"),
            parked: false,
        })
    }
}

async fn page(
    conn: &mut MySqlConnection,
    terms: &Terms<'_>,
    filter: &Filter,
    after: Option<RowId>,
    limit: usize,
) -> DbResult<Vec<RowSummary>> {
    let summaries = Summaries::new(terms)?;
    let columns = &terms.table.spec.columns;
    let (mut conditions, mut values) = (vec!["TRUE".to_owned()], Vec::new());
    let wanted = [
        (columns.aggregate_type.as_deref(), &filter.aggregate_type),
        (Some(columns.aggregate_id.as_str()), &filter.aggregate_id),
    ];
    for (column, wanted) in wanted {
        let Some(wanted) = wanted else { continue };
        let value = column.and_then(|c| Some((c, parse_as(terms.table, c, wanted)?)));
        let Some((column, value)) = value else {
            // No row of this table can have it.
            return Ok(Vec::new());
        };
        conditions.push(format!("c.{} = ?", sql::quote(column)));
        values.push(value);
    }
    let mut hint = "";
    if let Some(status) = filter.status {
        conditions.push(terms.is("c", status));
        // Sent rows are the table: the newest are found by key. Others are found among a million.
        if status != Status::Sent && values.is_empty() {
            hint = &terms.access.by_status;
        }
    }
    let id = terms.id("c");
    let order = match by_created(terms.table) {
        Some(column) => format!("c.{} DESC, {id} DESC", sql::quote(column)),
        None => format!("{id} DESC"),
    };
    if let Some(after) = after {
        match by_created(terms.table) {
            Some(column) => {
                let column = sql::quote(column);
                let (table, key) = (&terms.table.name, &terms.table.id);
                conditions.push(format!(
                    "(c.{column}, {id}) < (SELECT a.{column}, a.{key} FROM {table} a WHERE a.{key} = ?)"
                ));
            }
            None => conditions.push(format!("{id} < ?")),
        }
        values.push(after);
    }
    let mut query = sql::query(format!(
        "SELECT {} FROM {} c {hint} WHERE {} ORDER BY {order} LIMIT {limit}",
        summaries.plan.list(),
        terms.table.name,
        conditions.join(" AND "),
    ))
    .persistent(false);
    for value in &values {
        query = sql::bind_id(query, value);
    }
    let rows = query.fetch_all(conn).await?;
    rows.iter().map(|row| summaries.bind(row)).collect()
}

async fn show(
    conn: &mut MySqlConnection,
    terms: &Terms<'_>,
    id: &RowId,
) -> DbResult<Option<RowDetail>> {
    let summaries = Summaries::new(terms)?;
    let layout = &terms.table.layout;
    let names: Vec<String> = layout.columns.iter().map(|c| c.name.clone()).collect();
    let plan = CellPlan::new(layout, &names)?;
    let one = |list: &str| {
        let query = sql::query(format!(
            "SELECT {list} FROM {} c WHERE {} = ?",
            terms.table.name,
            terms.id("c")
        ));
        sql::bind_id(query.persistent(false), id)
    };
    let Some(row) = one(summaries.plan.list())
        .fetch_optional(&mut *conn)
        .await?
    else {
        return Ok(None);
    };
    let summary = summaries.bind(&row)?;
    let Some(row) = one(plan.list()).fetch_optional(conn).await? else {
        return Ok(None);
    };
    let cells = plan.decode(&row)?;
    let columns = names.into_iter().zip(cells.iter().map(json)).collect();
    Ok(Some(RowDetail {
        row: summary,
        columns,
    }))
}

fn print(cell: &Cell) -> Option<String> {
    match cell {
        Cell::Null => None,
        Cell::Int(n) => Some(n.to_string()),
        Cell::UInt(n) => Some(n.to_string()),
        Cell::Text(t) => Some(String::from_utf8_lossy(t).into_owned()),
        Cell::Binary(b) => Some(print_binary(b)),
    }
}

fn json(cell: &Cell) -> Value {
    match cell {
        Cell::Int(n) => Value::from(*n),
        Cell::UInt(n) => Value::from(*n),
        other => print(other).map_or(Value::Null, Value::from),
    }
}

impl ParkedTable {
    const SUMMARY: &str = "row_id, aggregate_type, aggregate_id, \
        JSON_UNQUOTE(JSON_EXTRACT(envelope, '$.event_type')), status, retry_count, \
        CAST(next_retry_at AS CHAR), locked_by, CAST(locked_until AS CHAR), last_error, \
        CAST(created_at AS CHAR), CAST(updated_at AS CHAR)";

    fn summary(&self, row: &MySqlRow) -> DbResult<RowSummary> {
        Ok(RowSummary {
            table: self.table.clone(),
            id: text(row, 0)?,
            aggregate_type: text(row, 1)?,
            aggregate_id: text(row, 2)?,
            event_type: optional(row, 3)?,
            status: parked::status(row, 4)?.name().to_owned(),
            retry_count: row.try_get_unchecked::<u32, _>(5)?.into(),
            next_retry_at: optional(row, 6)?,
            locked_by: optional(row, 7)?,
            locked_until: optional(row, 8)?,
            last_error: optional(row, 9)?,
            created_at: optional(row, 10)?,
            updated_at: optional(row, 11)?,
            parked: true,
        })
    }

    async fn list(
        &self,
        conn: &mut MySqlConnection,
        filter: &Filter,
        after: Option<&str>,
        limit: usize,
    ) -> DbResult<Vec<RowSummary>> {
        let mut conditions = String::new();
        if let Some(status) = filter.status {
            conditions.push_str(&format!(" AND status = {}", parked::stored(status)));
        }
        let texts = [
            ("aggregate_type = ?", filter.aggregate_type.as_deref()),
            ("aggregate_id = ?", filter.aggregate_id.as_deref()),
            (
                "seq < (SELECT a.seq FROM outboxd_parked a WHERE a.name = p.name \
                 AND a.table_name = p.table_name AND a.id_hash = UNHEX(SHA2(?, 256)))",
                after,
            ),
        ];
        for (condition, _) in texts.iter().filter(|(_, value)| value.is_some()) {
            conditions.push_str(&format!(" AND {condition}"));
        }
        let mut query = self.bound(sql::query(format!(
            "SELECT {} FROM outboxd_parked p WHERE name = ? AND table_name = ? {conditions} \
             ORDER BY seq DESC LIMIT {limit}",
            Self::SUMMARY
        )));
        for value in texts.iter().filter_map(|(_, value)| *value) {
            query = query.bind(value.to_owned());
        }
        let rows = query.persistent(false).fetch_all(conn).await?;
        rows.iter().map(|row| self.summary(row)).collect()
    }

    async fn show(&self, conn: &mut MySqlConnection, id: &RowId) -> DbResult<Option<RowDetail>> {
        let ids = std::slice::from_ref(id);
        let head = format!(
            "SELECT {}, envelope, body FROM outboxd_parked WHERE",
            Self::SUMMARY
        );
        let query = parked::bind_keys(self.bound(self.keyed(&head, ids, "")), ids);
        let Some(row) = query.fetch_optional(conn).await? else {
            return Ok(None);
        };
        let envelope = optional(&row, 12)?.and_then(|e| serde_json::from_str(&e).ok());
        let body: Option<&[u8]> = row.try_get_unchecked(13)?;
        let body = body.map(|b| match std::str::from_utf8(b) {
            Ok(text) => text.to_owned(),
            Err(_) => print_binary(b),
        });
        let columns = [
            ("envelope".to_owned(), envelope.unwrap_or(Value::Null)),
            ("payload".to_owned(), body.map_or(Value::Null, Value::from)),
        ];
        Ok(Some(RowDetail {
            row: self.summary(&row)?,
            columns: columns.into_iter().collect(),
        }))
    }
}
