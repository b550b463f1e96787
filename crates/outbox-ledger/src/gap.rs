//! Stretches of the binlog that could not be read, kept until an operator acknowledges them.

use outbox_core::Position;
use outbox_core::ports::PortResult;
use sqlx::{MySqlConnection, Row};

use crate::connect::Db;
use crate::error::DbResult;
use crate::layouts::{optional, text};

/// A gap to be recorded, together with the position behind it
/// ([`PositionStore::start_at`](crate::position::PositionStore::start_at)).
#[derive(Clone, Debug)]
pub struct NewGap {
    /// The position that was lost.
    pub from: Option<Position>,
    /// Where reading goes on.
    pub to: Option<Position>,
    /// What happened, in words.
    pub reason: String,
}

/// A recorded gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    /// Its number.
    pub id: u64,
    /// The position that was lost, as printed.
    pub from: Option<String>,
    /// Where reading went on, as printed.
    pub to: Option<String>,
    /// What happened.
    pub reason: String,
    /// When it was found, `YYYY-MM-DD hh:mm:ss` in UTC.
    pub found_at: String,
    /// When it was acknowledged.
    pub acknowledged_at: Option<String>,
}

pub(crate) async fn record(conn: &mut MySqlConnection, name: &str, gap: &NewGap) -> DbResult<()> {
    sqlx::query(
        "INSERT INTO outboxd_gap (name, gap_from, gap_to, reason, found_at) \
         VALUES (?, ?, ?, ?, UTC_TIMESTAMP(6))",
    )
    .bind(name)
    .bind(gap.from.as_ref().map(Position::to_string))
    .bind(gap.to.as_ref().map(Position::to_string))
    .bind(gap.reason.chars().take(4000).collect::<String>())
    .execute(conn)
    .await?;
    Ok(())
}

/// The gaps of `name` that nobody has acknowledged, oldest first, at most `limit`.
pub async fn unacknowledged(db: &Db, name: &str, limit: u32) -> PortResult<Vec<Gap>> {
    let work = async {
        let mut session = db.session().await?;
        let rows = sqlx::query(
            "SELECT id, gap_from, gap_to, reason, CAST(found_at AS CHAR(19)), \
             CAST(acknowledged_at AS CHAR(19)) FROM outboxd_gap \
             WHERE name = ? AND acknowledged_at IS NULL ORDER BY id LIMIT ?",
        )
        .bind(name)
        .bind(limit)
        .fetch_all(&mut *session)
        .await?;
        session.finish();
        rows.iter()
            .map(|row| {
                Ok(Gap {
                    id: row.try_get(0)?,
                    from: optional(row, 1)?,
                    to: optional(row, 2)?,
                    reason: text(row, 3)?,
                    found_at: text(row, 4)?,
                    acknowledged_at: optional(row, 5)?,
                })
            })
            .collect()
    };
    db.run("list gaps", work).await
}

/// Acknowledges all gaps of `name` and returns how many there were.
pub async fn acknowledge(db: &Db, name: &str) -> PortResult<u64> {
    let work = async {
        let mut session = db.session().await?;
        let done = sqlx::query(
            "UPDATE outboxd_gap SET acknowledged_at = UTC_TIMESTAMP(6) \
             WHERE name = ? AND acknowledged_at IS NULL",
        )
        .bind(name)
        .execute(&mut *session)
        .await?;
        session.finish();
        Ok(done.rows_affected())
    };
    db.run("acknowledge gaps", work).await
}
