//! The indexes of a table, and which of them lead to the poller's rows.

use sqlx::{Column as _, MySqlConnection, Row as _};

use super::terms::by_created;
use crate::error::DbResult;
use crate::layouts::text;
use crate::table::OutboxTable;

/// An index: its name and columns in order.
pub(crate) struct Index {
    pub(crate) name: String,
    pub(crate) columns: Vec<String>,
}

impl Index {
    /// Whether these columns lead it, in this order.
    pub(crate) fn leads(&self, columns: &[&str]) -> bool {
        self.columns.len() >= columns.len()
            && columns
                .iter()
                .zip(&self.columns)
                .all(|(want, has)| want.eq_ignore_ascii_case(has))
    }
}

/// The indexes that statements may name: B-trees over whole columns, visible to the optimizer.
pub(crate) async fn indexes(
    conn: &mut MySqlConnection,
    schema: &str,
    table: &str,
) -> DbResult<Vec<Index>> {
    // Every column, since MySQL's IS_VISIBLE and MariaDB's IGNORED do not exist in the other.
    let rows = sqlx::query(
        "SELECT s.* FROM information_schema.STATISTICS s \
         WHERE s.TABLE_SCHEMA = ? AND s.TABLE_NAME = ? ORDER BY s.INDEX_NAME, s.SEQ_IN_INDEX",
    )
    .bind(schema)
    .bind(table)
    .fetch_all(conn)
    .await?;
    let mut found: Vec<(Index, bool)> = Vec::new();
    for row in &rows {
        let at = |column: &str| -> DbResult<String> {
            let mut columns = row.columns().iter();
            let place = columns.position(|c| c.name().eq_ignore_ascii_case(column));
            place.map_or(Ok(String::new()), |i| text(row, i))
        };
        let (name, column) = (at("INDEX_NAME")?, at("COLUMN_NAME")?);
        let usable = at("INDEX_TYPE")? == "BTREE"
            && at("IS_VISIBLE")? != "NO"
            && at("IGNORED")? != "YES"
            && at("SUB_PART")?.is_empty()
            && !column.is_empty();
        match found.last_mut() {
            Some((index, all)) if index.name == name => {
                // What follows an unusable part is of no use either.
                if usable && *all {
                    index.columns.push(column);
                }
                *all &= usable;
            }
            _ => found.push((
                Index {
                    name,
                    columns: if usable { vec![column] } else { Vec::new() },
                },
                usable,
            )),
        }
    }
    Ok(found.into_iter().map(|(index, _)| index).collect())
}

/// The best index for rows of one status, in the order of preference of [`Terms`].
pub(crate) fn status_index<'a>(table: &OutboxTable, indexes: &'a [Index]) -> Option<&'a Index> {
    let columns = &table.spec.columns;
    let status = columns.status.as_deref()?;
    let find = |next: Option<&str>| {
        next.and_then(|next| indexes.iter().find(|i| i.leads(&[status, next])))
    };
    let then = if by_created(table).is_some() {
        &columns.created_at
    } else {
        &columns.next_retry_at
    };
    find(then.as_deref())
        .or_else(|| find(columns.next_retry_at.as_deref()))
        .or_else(|| find(columns.created_at.as_deref()))
        .or_else(|| indexes.iter().find(|i| i.leads(&[status])))
}

/// The best index for the rows of one aggregate.
pub(crate) fn aggregate_index<'a>(table: &OutboxTable, indexes: &'a [Index]) -> Option<&'a Index> {
    let columns = &table.spec.columns;
    let id = columns.aggregate_id.as_str();
    let status = columns.status.as_deref().unwrap_or_default();
    let key: Vec<Vec<&str>> = match columns.aggregate_type.as_deref() {
        Some(kind) => vec![
            vec![kind, id, status],
            vec![id, kind, status],
            vec![kind, id],
            vec![id, kind],
            vec![id],
        ],
        None => vec![vec![id, status], vec![id]],
    };
    key.iter()
        .find_map(|columns| indexes.iter().find(|i| i.leads(columns)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_lead_an_index_in_their_order() {
        let index = Index {
            name: "i".into(),
            columns: ["Status", "next_retry_at"].map(String::from).into(),
        };
        assert!(index.leads(&["status"]) && index.leads(&["status", "NEXT_RETRY_AT"]));
        assert!(
            !index.leads(&["next_retry_at"]) && !index.leads(&["status", "next_retry_at", "id"])
        );
    }
}
