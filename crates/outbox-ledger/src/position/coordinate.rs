//! Where the server's binlog ends now.

use outbox_core::position::{FilePosition, Position};
use sqlx::mysql::MySqlRow;
use sqlx::{Executor, MySqlConnection, Row};

use crate::connect::Family;
use crate::error::{DbError, DbResult};
use crate::layouts::text;

/// The end of the binlog: everything committed before this call lies before it. A GTID set where
/// `gtid_mode` is ON, else file and offset; always the latter on MariaDB.
pub async fn read_coordinate(conn: &mut MySqlConnection, family: Family) -> DbResult<Position> {
    if family == Family::MySql {
        let row = conn
            .fetch_one("SELECT @@GLOBAL.gtid_mode, @@GLOBAL.gtid_executed")
            .await?;
        if text(&row, 0)?.eq_ignore_ascii_case("ON") {
            let set = text(&row, 1)?.parse();
            return set
                .map(Position::Gtid)
                .map_err(|e| DbError::Corrupt(format!("gtid_executed is {e}")));
        }
    }
    let server = server_identity(conn, family).await?;
    let row = binary_log_status(conn).await?;
    let row = row.ok_or_else(|| DbError::Config("the server writes no binary log".to_owned()))?;
    Ok(Position::File(FilePosition {
        server,
        file: row.try_get_unchecked("File")?,
        pos: row.try_get_unchecked("Position")?,
    }))
}

/// `SHOW MASTER STATUS` is gone in MySQL 8.4; its successor is unknown to the others.
async fn binary_log_status(conn: &mut MySqlConnection) -> DbResult<Option<MySqlRow>> {
    match conn.fetch_optional("SHOW BINARY LOG STATUS").await {
        Err(e) => match DbError::from(e) {
            DbError::Server { number: 1064, .. } => {
                Ok(conn.fetch_optional("SHOW MASTER STATUS").await?)
            }
            e => Err(e),
        },
        Ok(row) => Ok(row),
    }
}

/// What a file position is bound to: `@@server_uuid`, which follows the data directory. MariaDB
/// has none; its `@@server_uid` follows machine and port where the version has it, else the
/// server's id, host name and port have to do.
pub(super) async fn server_identity(
    conn: &mut MySqlConnection,
    family: Family,
) -> DbResult<String> {
    if family == Family::MySql {
        return text(&conn.fetch_one("SELECT @@server_uuid").await?, 0);
    }
    match conn.fetch_one("SELECT @@server_uid").await {
        Ok(row) => text(&row, 0),
        Err(e) => match DbError::from(e) {
            DbError::Server { number: 1193, .. } => {
                let fallback = "SELECT CONCAT(@@server_id, '@', @@hostname, ':', @@port)";
                text(&conn.fetch_one(fallback).await?, 0)
            }
            e => Err(e),
        },
    }
}
