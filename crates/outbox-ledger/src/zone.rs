//! The zone of the outbox's DATETIME columns.

use outbox_core::ports::PortResult;

use crate::connect::Db;

/// Seconds east of UTC, now, as an expression of a session. Truncated alike on both sides, since
/// both read the same instant of the statement.
pub(crate) const OFFSET: &str = "CAST(TIMESTAMPDIFF(SECOND, UTC_TIMESTAMP(), NOW()) AS SIGNED)";

/// Seconds east of UTC that the outbox's zone has now.
pub async fn offset(db: &Db) -> PortResult<i32> {
    let work = async {
        let mut session = db.session().await?;
        let seconds = sqlx::query_scalar::<_, i64>(sqlx::AssertSqlSafe(format!("SELECT {OFFSET}")))
            .fetch_one(&mut *session)
            .await?;
        session.finish();
        Ok(i32::try_from(seconds).unwrap_or(0))
    };
    db.run("read the time zone", work).await
}
