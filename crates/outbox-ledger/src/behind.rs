//! What lies unpublished behind the checkpoint without a trace in its table: aggregates of which
//! rows were passed over and never attempted, and tables where it is not known which.

use outbox_core::ports::Behind;
use outbox_core::row::{Aggregate, TableIdx};
use serde::{Deserialize, Serialize};
use sqlx::MySqlConnection;

use crate::error::{DbError, DbResult};
use crate::layouts::text;
use crate::table::OutboxTable;

/// One entry as stored: by the table's name, as numbers change with the configuration.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    table: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    aggregate: Option<(String, String)>,
}

/// Stores what is left behind, within the transaction that stores the checkpoint.
pub(crate) async fn store(
    conn: &mut MySqlConnection,
    name: &str,
    tables: &[OutboxTable],
    behind: &[Behind],
) -> DbResult<()> {
    let full_name = |idx: TableIdx| {
        let table = tables.iter().find(|t| t.idx == idx);
        table.map(|t| t.spec.full_name())
    };
    let entries = behind.iter().filter_map(|left| match left {
        Behind::Table(table) => Some(Entry {
            table: full_name(*table)?,
            aggregate: None,
        }),
        Behind::Aggregate(Aggregate { table, kind, id }) => Some(Entry {
            table: full_name(*table)?,
            aggregate: Some((kind.to_string(), id.to_string())),
        }),
    });
    let entries: Vec<_> = entries.collect();
    let json = serde_json::to_string(&entries).map_err(|e| DbError::Corrupt(e.to_string()))?;
    sqlx::query(
        "INSERT INTO outboxd_behind (name, behind) VALUES (?, ?) \
         ON DUPLICATE KEY UPDATE behind = VALUES(behind)",
    )
    .bind(name)
    .bind(json)
    .execute(conn)
    .await?;
    Ok(())
}

/// What was stored with the checkpoint, of the tables that are configured.
pub(crate) async fn load(
    conn: &mut MySqlConnection,
    name: &str,
    tables: &[OutboxTable],
) -> DbResult<Vec<Behind>> {
    let row = sqlx::query("SELECT behind FROM outboxd_behind WHERE name = ?")
        .bind(name)
        .fetch_optional(conn)
        .await?;
    let Some(row) = row else {
        return Ok(Vec::new());
    };
    let entries: Vec<Entry> = serde_json::from_str(&text(&row, 0)?)
        .map_err(|e| DbError::Corrupt(format!("outboxd_behind cannot be read: {e}")))?;
    let behind = entries.into_iter().filter_map(|entry| {
        let table = tables
            .iter()
            .find(|t| t.spec.full_name() == entry.table)?
            .idx;
        Some(match entry.aggregate {
            None => Behind::Table(table),
            Some((kind, id)) => Behind::Aggregate(Aggregate {
                table,
                kind: kind.into(),
                id: id.into(),
            }),
        })
    });
    let mut behind: Vec<_> = behind.collect();
    behind.sort_unstable();
    Ok(behind)
}
