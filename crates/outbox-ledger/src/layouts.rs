//! Table layouts, from `information_schema` and as stored with the position.

use std::sync::Arc;

use async_trait::async_trait;
use outbox_core::layout::{Column, Generated, TableLayout};
use outbox_core::ports::{Layouts, PortResult};
use outbox_core::row::TableIdx;
use outbox_core::{Position, spec::TableSpec};
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row};

use crate::connect::{Db, Family};
use crate::error::{DbError, DbResult};
use crate::position::read_coordinate;

/// Layouts of the configured tables.
#[derive(Clone, Debug)]
pub struct TableLayouts {
    db: Db,
    name: Arc<str>,
    specs: Vec<Arc<TableSpec>>,
}

impl TableLayouts {
    /// Layouts of `specs`, in the order of their [`TableIdx`], stored under `name`.
    #[must_use]
    pub fn new(db: Db, name: Arc<str>, specs: Vec<Arc<TableSpec>>) -> Self {
        Self { db, name, specs }
    }

    fn spec(&self, table: TableIdx) -> DbResult<&TableSpec> {
        let spec = self.specs.get(usize::from(table.0));
        spec.map(|s| &**s)
            .ok_or_else(|| DbError::Config(format!("there is no outbox table {}", table.0)))
    }
}

#[async_trait]
impl Layouts for TableLayouts {
    async fn current(&self, table: TableIdx) -> PortResult<(TableLayout, Position)> {
        let work = async {
            let spec = self.spec(table)?;
            let family = self.db.family().await?;
            let mut session = self.db.session().await?;
            let layout = read_layout(&mut session, family, &spec.schema, &spec.table)
                .await?
                .ok_or_else(|| missing(spec))?;
            let coordinate = read_coordinate(&mut session, family, Some(&self.name)).await?;
            session.finish();
            Ok((layout, coordinate))
        };
        self.db.run("read a table's layout", work).await
    }

    async fn stored(&self, table: TableIdx) -> PortResult<Option<TableLayout>> {
        let work = async {
            let spec = self.spec(table)?;
            let mut session = self.db.session().await?;
            let text: Option<String> = sqlx::query_scalar(
                "SELECT layout FROM outboxd_layout WHERE name = ? AND table_name = ?",
            )
            .bind(&*self.name)
            .bind(spec.full_name())
            .fetch_optional(&mut *session)
            .await?;
            session.finish();
            // What an older or newer version wrote in another form is as good as nothing stored.
            Ok(text.and_then(|t| serde_json::from_str(&t).ok()))
        };
        self.db.run("read a stored layout", work).await
    }
}

pub(crate) fn missing(spec: &TableSpec) -> DbError {
    DbError::Config(format!("there is no table {}", spec.full_name()))
}

/// Stores the layout that holds from the checkpoint of the same transaction on.
pub(crate) async fn store(
    conn: &mut MySqlConnection,
    name: &str,
    table: &str,
    layout: Option<&TableLayout>,
) -> DbResult<()> {
    let Some(layout) = layout else {
        sqlx::query("DELETE FROM outboxd_layout WHERE name = ? AND table_name = ?")
            .bind(name)
            .bind(table)
            .execute(conn)
            .await?;
        return Ok(());
    };
    let text = serde_json::to_string(layout).map_err(|e| DbError::Corrupt(e.to_string()))?;
    sqlx::query(
        "INSERT INTO outboxd_layout (name, table_name, layout) VALUES (?, ?, ?) \
         ON DUPLICATE KEY UPDATE layout = VALUES(layout)",
    )
    .bind(name)
    .bind(table)
    .bind(text)
    .execute(conn)
    .await?;
    Ok(())
}

/// The layout of a table now; `None` if there is no such table, or the account may not see it.
pub async fn read_layout(
    conn: &mut MySqlConnection,
    family: Family,
    schema: &str,
    table: &str,
) -> DbResult<Option<TableLayout>> {
    let engine = sqlx::query(
        "SELECT ENGINE FROM information_schema.TABLES WHERE TABLE_SCHEMA = ? AND TABLE_NAME = ?",
    )
    .bind(schema)
    .bind(table)
    .fetch_optional(&mut *conn)
    .await?;
    let Some(engine) = engine else {
        return Ok(None);
    };
    let rows = sqlx::query(
        "SELECT COLUMN_NAME, DATA_TYPE, COLUMN_TYPE, CHARACTER_SET_NAME, \
         CAST(CHARACTER_OCTET_LENGTH AS UNSIGNED), CAST(DATETIME_PRECISION AS UNSIGNED), \
         IS_NULLABLE, EXTRA FROM information_schema.COLUMNS \
         WHERE TABLE_SCHEMA = ? AND TABLE_NAME = ? ORDER BY ORDINAL_POSITION",
    )
    .bind(schema)
    .bind(table)
    .fetch_all(&mut *conn)
    .await?;
    let keys = sqlx::query(
        "SELECT COLUMN_NAME FROM information_schema.KEY_COLUMN_USAGE WHERE TABLE_SCHEMA = ? \
         AND TABLE_NAME = ? AND CONSTRAINT_NAME = 'PRIMARY' ORDER BY ORDINAL_POSITION",
    )
    .bind(schema)
    .bind(table)
    .fetch_all(&mut *conn)
    .await?;
    let checks = json_checks(conn, family, schema, table).await?;
    let columns = rows.iter().map(|row| column(row, &checks));
    Ok(Some(TableLayout {
        columns: columns.collect::<DbResult<_>>()?,
        primary_key: keys.iter().map(|r| text(r, 0)).collect::<DbResult<_>>()?,
        engine: text(&engine, 0)?,
    }))
}

/// The table's CHECK clauses, without the spaces and quotes that the families print differently.
async fn json_checks(
    conn: &mut MySqlConnection,
    family: Family,
    schema: &str,
    table: &str,
) -> DbResult<Vec<String>> {
    let query = match family {
        Family::MariaDb => {
            "SELECT CHECK_CLAUSE FROM information_schema.CHECK_CONSTRAINTS \
             WHERE CONSTRAINT_SCHEMA = ? AND TABLE_NAME = ?"
        }
        Family::MySql => {
            "SELECT c.CHECK_CLAUSE FROM information_schema.TABLE_CONSTRAINTS t \
             JOIN information_schema.CHECK_CONSTRAINTS c \
             ON c.CONSTRAINT_SCHEMA = t.CONSTRAINT_SCHEMA AND c.CONSTRAINT_NAME = t.CONSTRAINT_NAME \
             WHERE t.TABLE_SCHEMA = ? AND t.TABLE_NAME = ? AND t.CONSTRAINT_TYPE = 'CHECK' \
             AND t.ENFORCED = 'YES'"
        }
    };
    let rows = sqlx::query(query)
        .bind(schema)
        .bind(table)
        .fetch_all(conn)
        .await?;
    rows.iter()
        .map(|r| Ok(bare(&text(r, 0)?)))
        .collect::<DbResult<_>>()
}

fn bare(clause: &str) -> String {
    clause
        .chars()
        .filter(|c| !matches!(c, ' ' | '`' | '(' | ')'))
        .flat_map(char::to_lowercase)
        .collect()
}

fn column(row: &MySqlRow, checks: &[String]) -> DbResult<Column> {
    let name = text(row, 0)?;
    let data_type = text(row, 1)?.to_ascii_lowercase();
    let column_type = text(row, 2)?;
    let extra = text(row, 7)?.to_ascii_uppercase();
    let number = |i| row.try_get_unchecked::<Option<u64>, _>(i);
    let listed = matches!(data_type.as_str(), "enum" | "set");
    let check = bare(&format!("json_valid{name}"));
    Ok(Column {
        unsigned: !listed && column_type.to_ascii_lowercase().contains(" unsigned"),
        members: if listed {
            members(&column_type)
        } else {
            Vec::new()
        },
        charset: optional(row, 3)?,
        octets: number(4)?,
        fraction: number(5)?.and_then(|n| u8::try_from(n).ok()).unwrap_or(0),
        nullable: text(row, 6)?.eq_ignore_ascii_case("YES"),
        generated: if extra.contains("VIRTUAL GENERATED") {
            Generated::Virtual
        } else if extra.contains("STORED GENERATED") || extra.contains("PERSISTENT") {
            Generated::Stored
        } else {
            Generated::No
        },
        invisible: extra.contains("INVISIBLE"),
        json: data_type == "json" || checks.contains(&check),
        name,
        data_type,
        column_type,
    })
}

/// Members of `enum('a','it''s')`: quotes are doubled, and a few characters escaped.
fn members(column_type: &str) -> Vec<String> {
    let mut members = Vec::new();
    let mut chars = column_type.chars().peekable();
    let mut current: Option<String> = None;
    while let Some(c) = chars.next() {
        match (&mut current, c) {
            (None, '\'') => current = Some(String::new()),
            (None, _) => {}
            (Some(text), '\'') if chars.next_if_eq(&'\'').is_some() => text.push('\''),
            (Some(_), '\'') => members.extend(current.take()),
            (Some(text), '\\') => match chars.next() {
                Some('n') => text.push('\n'),
                Some('r') => text.push('\r'),
                Some('0') => text.push('\0'),
                Some(other) => text.push(other),
                None => {}
            },
            (Some(text), other) => text.push(other),
        }
    }
    members
}

/// A text column whatever type the server calls it: MySQL and MariaDB differ in that.
pub(crate) fn text(row: &MySqlRow, index: usize) -> DbResult<String> {
    Ok(optional(row, index)?.unwrap_or_default())
}

pub(crate) fn optional(row: &MySqlRow, index: usize) -> DbResult<Option<String>> {
    let bytes: Option<&[u8]> = row.try_get_unchecked(index)?;
    Ok(bytes.map(|b| String::from_utf8_lossy(b).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_unescaped() {
        assert_eq!(
            members(r"enum('a','it''s','b,c','x\\y','','n\nl')"),
            ["a", "it's", "b,c", r"x\y", "", "n\nl"]
        );
    }
}
