//! Signals by SQL: `INSERT INTO outboxd_signal (name, type, data) VALUES …`.

use outbox_core::ports::PortResult;
use sqlx::Row;

use crate::connect::Db;
use crate::layouts::{optional, text};

/// Bytes of `data` that are read; a longer one is cut, and refused as bad JSON.
const MAX_DATA: u32 = 65_536;
/// Characters of `result` that are stored.
const MAX_RESULT: usize = 4000;

/// A signal that has not been answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Its number, in which order signals are obeyed.
    pub id: u64,
    /// `pause`, `resume`, `sweep`…, as inserted.
    pub kind: String,
    /// Its `data`, as inserted.
    pub data: Option<String>,
}

/// The oldest unanswered signals of `name`, at most `limit`.
pub async fn undone(db: &Db, name: &str, limit: u32) -> PortResult<Vec<Signal>> {
    let work = async {
        let mut session = db.session().await?;
        let rows = sqlx::query(
            "SELECT id, type, LEFT(data, ?) FROM outboxd_signal \
             WHERE name = ? AND done_at IS NULL ORDER BY id LIMIT ?",
        )
        .bind(MAX_DATA)
        .bind(name)
        .bind(limit)
        .fetch_all(&mut *session)
        .await?;
        session.finish();
        rows.iter()
            .map(|row| {
                Ok(Signal {
                    id: row.try_get(0)?,
                    kind: text(row, 1)?,
                    data: optional(row, 2)?,
                })
            })
            .collect()
    };
    db.run("read signals", work).await
}

/// Inserts a signal, as the command line does to be answered by the leader; returns its number.
pub async fn send(db: &Db, name: &str, kind: &str, data: Option<&str>) -> PortResult<u64> {
    let work = async {
        let mut session = db.session().await?;
        let done = sqlx::query("INSERT INTO outboxd_signal (name, type, data) VALUES (?, ?, ?)")
            .bind(name)
            .bind(kind)
            .bind(data)
            .execute(&mut *session)
            .await?;
        session.finish();
        Ok(done.last_insert_id())
    };
    db.run("send a signal", work).await
}

/// Answers a signal. Only the first answer counts.
pub async fn complete(db: &Db, id: u64, result: &str) -> PortResult<()> {
    let work = async {
        let mut session = db.session().await?;
        sqlx::query(
            "UPDATE outboxd_signal SET done_at = UTC_TIMESTAMP(6), result = ? \
             WHERE id = ? AND done_at IS NULL",
        )
        .bind(result.chars().take(MAX_RESULT).collect::<String>())
        .bind(id)
        .execute(&mut *session)
        .await?;
        session.finish();
        Ok(())
    };
    db.run("answer a signal", work).await
}

/// The answer to a signal; `None` while there is none.
pub async fn answer(db: &Db, id: u64) -> PortResult<Option<String>> {
    let work = async {
        let mut session = db.session().await?;
        let row = sqlx::query(
            "SELECT COALESCE(result, '') FROM outboxd_signal \
             WHERE id = ? AND done_at IS NOT NULL",
        )
        .bind(id)
        .fetch_optional(&mut *session)
        .await?;
        session.finish();
        row.map(|r| text(&r, 0)).transpose()
    };
    db.run("read a signal's answer", work).await
}
