//! Where the server's binlog ends now.

use outbox_core::gtid::mariadb::GtidList;
use outbox_core::position::{FilePosition, Position};
use sqlx::mysql::MySqlRow;
use sqlx::{Executor, MySqlConnection, Row};

use crate::connect::Family;
use crate::error::{DbError, DbResult};
use crate::layouts::text;

const NO_LOG: &str = "the server writes no binary log";

/// The end of the binlog: everything committed before this call lies before it. A GTID set where
/// `gtid_mode` is ON, else file and offset; on MariaDB the last GTID of each domain. Where the
/// position that is stored under `name` is one by file (set by hand, or from before `gtid_mode`
/// was switched on), the tail goes on by file, and what is compared with it must be of its kind.
pub async fn read_coordinate(
    conn: &mut MySqlConnection,
    family: Family,
    name: Option<&str>,
) -> DbResult<Position> {
    if family == Family::MySql && !by_file(conn, name).await? {
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
    if family == Family::MariaDb {
        let row = conn
            .fetch_one("SELECT CAST(@@GLOBAL.log_bin AS CHAR), @@GLOBAL.gtid_binlog_pos")
            .await?;
        if text(&row, 0)? != "ON" {
            return Err(DbError::Config(NO_LOG.to_owned()));
        }
        let list: Result<GtidList, _> = text(&row, 1)?.parse();
        return list
            .map(|list| Position::Mariadb(list.into()))
            .map_err(|e| DbError::Corrupt(format!("gtid_binlog_pos is {e}")));
    }
    let server = text(&conn.fetch_one("SELECT @@server_uuid").await?, 0)?;
    let row = binary_log_status(conn).await?;
    let row = row.ok_or_else(|| DbError::Config(NO_LOG.to_owned()))?;
    Ok(Position::File(FilePosition {
        server,
        file: row.try_get_unchecked("File")?,
        pos: row.try_get_unchecked("Position")?,
    }))
}

/// Whether the stored position is one by file.
async fn by_file(conn: &mut MySqlConnection, name: Option<&str>) -> DbResult<bool> {
    let Some(name) = name else { return Ok(false) };
    let query = "SELECT file FROM outboxd_checkpoint WHERE name = ? AND gtid IS NULL";
    let file = sqlx::query_scalar::<_, Option<String>>(query).bind(name);
    Ok(file.fetch_optional(conn).await?.flatten().is_some())
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
