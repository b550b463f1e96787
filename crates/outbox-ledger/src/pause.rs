//! What an operator has paused; kept across restarts, read with every lease renewal.

use outbox_core::ports::PortResult;

use crate::connect::Db;

/// What is paused for a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paused {
    /// Everything.
    pub all: bool,
    /// Single tables, `schema.table`.
    pub tables: Vec<String>,
}

impl Paused {
    /// Whether the table of this full name is paused.
    #[must_use]
    pub fn covers(&self, table: &str) -> bool {
        self.all || self.tables.iter().any(|t| t == table)
    }
}

/// What is paused.
pub async fn read(db: &Db, name: &str) -> PortResult<Paused> {
    let work = async {
        let mut session = db.session().await?;
        let mut tables: Vec<String> = sqlx::query_scalar(
            "SELECT table_name FROM outboxd_pause WHERE name = ? ORDER BY table_name",
        )
        .bind(name)
        .fetch_all(&mut *session)
        .await?;
        session.finish();
        let count = tables.len();
        tables.retain(|t| !t.is_empty());
        Ok(Paused {
            all: tables.len() < count,
            tables,
        })
    };
    db.run("read what is paused", work).await
}

/// Pauses one table, or everything. Harmless when repeated.
pub async fn set(db: &Db, name: &str, table: Option<&str>) -> PortResult<()> {
    let work = async {
        let mut session = db.session().await?;
        sqlx::query(
            "INSERT INTO outboxd_pause (name, table_name, paused_at) \
             VALUES (?, ?, UTC_TIMESTAMP(6)) ON DUPLICATE KEY UPDATE name = VALUES(name)",
        )
        .bind(name)
        .bind(table.unwrap_or_default())
        .execute(&mut *session)
        .await?;
        session.finish();
        Ok(())
    };
    db.run("pause", work).await
}

/// Resumes one table, or everything, single tables included. Returns how many pauses ended.
pub async fn clear(db: &Db, name: &str, table: Option<&str>) -> PortResult<u64> {
    let work = async {
        let mut session = db.session().await?;
        let query = match table {
            Some(table) => {
                sqlx::query("DELETE FROM outboxd_pause WHERE name = ? AND table_name = ?")
                    .bind(name)
                    .bind(table)
            }
            None => sqlx::query("DELETE FROM outboxd_pause WHERE name = ?").bind(name),
        };
        let done = query.execute(&mut *session).await?;
        session.finish();
        Ok(done.rows_affected())
    };
    db.run("resume", work).await
}
