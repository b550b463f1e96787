//! Sent rows to be published once more, page by page.

use outbox_core::ports::{Cursor, PortResult};
use outbox_core::row::{OutboxRow, RowId, TableIdx};
use outbox_core::status::Status;
use sqlx::MySqlConnection;

use super::{Admin, One, refuse};
use crate::claims::terms::{Terms, by_created, parse_as};
use crate::error::DbResult;
use crate::layouts::optional;
use crate::sql;

/// Keys that one call looks at, where rows are found by walking over their keys.
const WALK: usize = 10_000;

/// Which sent rows to replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayRange {
    /// From one key to another, both included, as printed.
    Ids {
        /// The first.
        from: String,
        /// The last.
        to: String,
    },
    /// Created within a time, in microseconds since the epoch (UTC).
    Created {
        /// From this moment on.
        since: i64,
        /// Up to and without this moment; `None`: to the end.
        until: Option<i64>,
    },
}

/// A page of rows to replay, in delivery order.
#[derive(Clone, Debug, Default)]
pub struct ReplayPage {
    /// The rows; there may be none, and more behind them.
    pub rows: Vec<OutboxRow>,
    /// Where the next page begins; `None` at the end.
    pub next: Option<Cursor>,
}

/// A condition with what is bound for it.
struct Range {
    condition: String,
    ids: Vec<RowId>,
    times: Vec<String>,
}

impl Admin {
    /// The next page of sent rows in a range, behind `after`, at most `limit`.
    pub async fn replay_page(
        &self,
        table: TableIdx,
        range: &ReplayRange,
        after: Option<&Cursor>,
        limit: usize,
    ) -> PortResult<ReplayPage> {
        const WHAT: &str = "read rows to replay";
        let outbox = self.outbox(table).map_err(|e| e.during(WHAT))?;
        let terms_of = |range: &ReplayRange| -> Result<Range, &'static str> {
            match range {
                ReplayRange::Ids { from, to } => {
                    let column = &outbox.spec.columns.id;
                    let parse = |p| parse_as(outbox, column, p);
                    let ids = parse(from)
                        .zip(parse(to))
                        .ok_or("no such key in this table")?;
                    let id = &outbox.id;
                    Ok(Range {
                        condition: format!("c.{id} >= ? AND c.{id} <= ?"),
                        ids: vec![ids.0, ids.1],
                        times: Vec::new(),
                    })
                }
                ReplayRange::Created { since, until } => {
                    let column = outbox.spec.columns.created_at.as_deref();
                    let column = column.ok_or("the table has no created_at: name keys instead")?;
                    let column = format!("c.{}", sql::quote(column));
                    let place = "FROM_UNIXTIME(CAST(? AS DECIMAL(20, 6)))";
                    let end = until.map_or(String::new(), |_| format!(" AND {column} < {place}"));
                    let moments = [Some(*since), *until].into_iter().flatten();
                    Ok(Range {
                        condition: format!("{column} >= {place}{end}"),
                        ids: Vec::new(),
                        times: moments.map(seconds).collect(),
                    })
                }
            }
        };
        let range = terms_of(range).map_err(|why| refuse(WHAT, why))?;
        let work = async {
            let mut session = self.db.session().await?;
            let page = match self.one(&mut session, table).await? {
                One::Table(terms) if by_created(terms.table).is_none() => {
                    walk(&mut session, &terms, &range, after, limit).await?
                }
                One::Table(terms) => sorted(&mut session, &terms, &range, after, limit).await?,
                // What was sent is not kept.
                One::Parked(_) => ReplayPage::default(),
            };
            session.finish();
            Ok(page)
        };
        self.db.run(WHAT, work).await
    }
}

/// By key, where that is the order: a bounded number of keys at a time.
async fn walk(
    conn: &mut MySqlConnection,
    terms: &Terms<'_>,
    range: &Range,
    after: Option<&Cursor>,
    limit: usize,
) -> DbResult<ReplayPage> {
    let id = terms.id("c");
    let behind = |lower: Option<&RowId>| lower.map_or("TRUE".to_owned(), |_| format!("{id} > ?"));
    // A range of keys begins at its first; what lies before need not be walked over.
    let (start, lower) = match (after, range.ids.first()) {
        (Some(cursor), _) => (format!("{id} > ?"), Some(&cursor.key.id)),
        (None, Some(first)) => (format!("{id} >= ?"), Some(first)),
        (None, None) => (behind(None), None),
    };
    let mut query = sql::query(format!(
        "SELECT {id} FROM {} c FORCE INDEX (PRIMARY) WHERE {start} ORDER BY {id} LIMIT 1 OFFSET {}",
        terms.table.name,
        WALK - 1
    ));
    if let Some(lower) = lower {
        query = sql::bind_id(query, lower);
    }
    let end = query.fetch_optional(&mut *conn).await?;
    let end = end.map(|row| terms.table.row_id(&row, 0)).transpose()?;
    let mut query = sql::query(format!(
        "{} c FORCE INDEX (PRIMARY) WHERE {start} AND {} AND {} AND {} ORDER BY {id} LIMIT {limit}",
        terms.table.select(),
        end.as_ref()
            .map_or("TRUE".to_owned(), |_| format!("{id} <= ?")),
        terms.is("c", Status::Sent),
        range.condition,
    ));
    for bound in lower.into_iter().chain(&end).chain(&range.ids) {
        query = sql::bind_id(query, bound);
    }
    for time in &range.times {
        query = query.bind(time.clone());
    }
    let mut page = ReplayPage::default();
    for row in query.fetch_all(conn).await? {
        page.rows.extend(terms.table.bind(&row)?);
    }
    let past = |id: &RowId| range.ids.last().is_some_and(|last| id >= last);
    let next = match page.rows.last() {
        Some(last) if page.rows.len() == limit => Some(last.key.id.clone()),
        _ => end,
    };
    page.next = next.filter(|id| !past(id)).map(|id| Cursor {
        created_at: None,
        key: outbox_core::RowKey {
            table: terms.table.idx,
            id,
        },
    });
    Ok(page)
}

/// By creation and key.
async fn sorted(
    conn: &mut MySqlConnection,
    terms: &Terms<'_>,
    range: &Range,
    after: Option<&Cursor>,
    limit: usize,
) -> DbResult<ReplayPage> {
    let created = by_created(terms.table).map(|c| format!("c.{}", sql::quote(c)));
    let created = created.unwrap_or_else(|| terms.id("c"));
    let place = "CAST(? AS DATETIME(6))";
    let behind = after.map_or("TRUE".to_owned(), |_| {
        format!(
            "({created} > {place} OR ({created} = {place} AND {} > ?))",
            terms.id("c")
        )
    });
    let select = terms.table.select();
    let (list, from) = select.rsplit_once(" FROM ").unwrap_or((&select, ""));
    let mut query = sql::query(format!(
        "{list}, CAST({created} AS CHAR) FROM {from} c WHERE {behind} AND {} AND {} \
         ORDER BY {} LIMIT {limit}",
        terms.is("c", Status::Sent),
        range.condition,
        terms.order("c"),
    ));
    if let Some(after) = after {
        let at = after.created_at.clone();
        query = sql::bind_id(query.bind(at.clone()).bind(at), &after.key.id);
    }
    for id in &range.ids {
        query = sql::bind_id(query, id);
    }
    for time in &range.times {
        query = query.bind(time.clone());
    }
    let rows = query.fetch_all(conn).await?;
    let mut page = ReplayPage::default();
    for row in &rows {
        page.rows.extend(terms.table.bind(row)?);
    }
    if let (Some(row), Some(last)) = (rows.last(), page.rows.last())
        && rows.len() == limit
    {
        page.next = Some(Cursor {
            created_at: optional(row, terms.table.width())?,
            key: last.key.clone(),
        });
    }
    Ok(page)
}

/// Microseconds as seconds with a fraction, exactly.
fn seconds(micros: i64) -> String {
    let (whole, part) = (micros.div_euclid(1_000_000), micros.rem_euclid(1_000_000));
    if whole < 0 {
        // Before the epoch FROM_UNIXTIME knows nothing.
        return "0".to_owned();
    }
    format!("{whole}.{part:06}")
}
