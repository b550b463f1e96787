//! What a server is, and whether a position can be continued on it.

#[cfg(test)]
mod tests;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Row, Value};
use outbox_core::Position;
use outbox_core::gtid::GtidSet;
use outbox_core::gtid::mariadb::MariadbPosition;
use outbox_core::position::FilePosition;

use super::error::{LostReason, StreamError};
use super::mariadb::{self, MariadbGtids};

/// MySQL or MariaDB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// MySQL, Percona Server, Aurora, RDS.
    Mysql,
    /// MariaDB.
    Mariadb,
}

/// What a server says of itself. Absent variables are empty or `None`.
#[derive(Clone, Debug)]
pub struct ServerFacts {
    /// `@@version`.
    pub version: String,
    /// Which kind of server.
    pub family: Family,
    /// What file positions are bound to: `@@server_uuid`; on MariaDB `@@server_uid` or, where the
    /// version has none, `server_id@hostname:port`.
    pub server: String,
    /// `@@server_id`, which MariaDB's GTIDs name.
    pub server_id: u32,
    /// `@@gtid_mode`, upper case.
    pub gtid_mode: String,
    /// `@@binlog_format`, upper case.
    pub binlog_format: String,
    /// `@@binlog_row_image`, upper case.
    pub row_image: String,
    /// `@@binlog_row_metadata`, upper case.
    pub row_metadata: String,
    /// Whether a binlog is written.
    pub log_bin: bool,
    /// Whether transactions of a source are written to the own binlog.
    pub log_replica_updates: bool,
    /// `@@read_only` or `@@super_read_only`.
    pub read_only: bool,
    /// Seconds that binlogs are kept; 0: for ever.
    pub expire_logs_seconds: Option<u64>,
    /// `lower_case_table_names` is not 0.
    pub fold_names: bool,
    /// The server replicates from another one.
    pub is_replica: bool,
    /// Its replication is filtered.
    pub is_filtered: bool,
    /// `@@gtid_executed`; empty unless `gtid_mode` is ON.
    pub executed: GtidSet,
    /// `@@gtid_purged`.
    pub purged: GtidSet,
    /// MariaDB's GTIDs; `None` on MySQL, and where no binlog is written.
    pub mariadb: Option<MariadbGtids>,
    /// Binlog files with their sizes in bytes, oldest first.
    pub binlogs: Vec<(String, u64)>,
    /// The coordinate: everything that was committed before this was read lies before it.
    pub coordinate: Position,
}

impl ServerFacts {
    /// Whether positions are GTID sets, or MariaDB's lists.
    #[must_use]
    pub fn uses_gtid(&self) -> bool {
        self.gtid_mode == "ON" || self.mariadb.is_some()
    }

    /// The name of the oldest binlog file.
    #[must_use]
    pub fn first_binlog(&self) -> Option<&str> {
        self.binlogs.first().map(|(name, _)| name.as_str())
    }
}

/// Whether and how a position can be continued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// It can.
    Continue,
    /// Not yet: a replica that has not caught up, and what it lacks, as printed.
    Behind(String),
    /// It cannot.
    Lost {
        /// Why.
        reason: LostReason,
        /// Whether transactions are known to be missing.
        certain: bool,
        /// What is known.
        detail: String,
    },
    /// It could, but the protocol has no way to say so.
    NeedsGtid,
}

pub(super) fn lost(reason: LostReason, certain: bool, detail: impl Into<String>) -> Resume {
    Resume::Lost {
        reason,
        certain,
        detail: detail.into(),
    }
}

/// Decides whether `position` can be continued on the server.
#[must_use]
pub fn check_resume(position: &Position, facts: &ServerFacts) -> Resume {
    match position {
        Position::Gtid(set) => check_set(set, facts),
        Position::Mariadb(position) => mariadb::check_list(&position.list, facts),
        Position::File(position) => check_file(position, facts),
    }
}

fn check_set(set: &GtidSet, facts: &ServerFacts) -> Resume {
    if facts.gtid_mode != "ON" {
        let mode = if facts.gtid_mode.is_empty() {
            "absent"
        } else {
            &facts.gtid_mode
        };
        let detail = format!("the position is a GTID set, but gtid_mode is {mode}");
        return lost(LostReason::ModeChanged, false, detail);
    }
    let missing = set.subtract(&facts.executed);
    if !missing.is_empty() {
        // What a replica lacks of other servers' transactions it may yet get. What a server lacks
        // of its own it has lost.
        let own = source_of(&facts.server);
        let foreign = missing.sids().all(|sid| Some(sid.source) != own);
        if facts.is_replica && foreign {
            return Resume::Behind(missing.to_string());
        }
        let detail = format!("the server does not know {missing}");
        return lost(LostReason::NotContained, false, detail);
    }
    let purged = facts.purged.subtract(set);
    if !purged.is_empty() {
        return lost(
            LostReason::Purged,
            true,
            format!("purged before it was read: {purged}"),
        );
    }
    Resume::Continue
}

fn check_file(position: &FilePosition, facts: &ServerFacts) -> Resume {
    if position.server != facts.server {
        let detail = format!(
            "the position belongs to server {}, this is {}",
            position.server, facts.server
        );
        return lost(LostReason::ForeignServer, false, detail);
    }
    if u32::try_from(position.pos).is_err() {
        return Resume::NeedsGtid;
    }
    if position.pos < 4 {
        return lost(
            LostReason::InvalidOffset,
            false,
            "offsets in a binlog begin at 4",
        );
    }
    let file = &position.file;
    match facts.binlogs.iter().find(|(name, _)| name == file) {
        Some((_, size)) if *size < position.pos => lost(
            LostReason::Reset,
            false,
            format!("{file} has {size} bytes only; the binlogs were reset"),
        ),
        Some(_) => Resume::Continue,
        None => {
            let of = |name: &str| FilePosition {
                server: position.server.clone(),
                file: name.to_owned(),
                pos: position.pos,
            };
            let first = facts.first_binlog().map(of);
            let older = first
                .as_ref()
                .and_then(|f| position.compare(f))
                .is_some_and(|o| o.is_lt());
            if older {
                lost(LostReason::Purged, true, format!("{file} was purged"))
            } else {
                let detail = format!("{file} is not there; the binlogs were reset or renamed");
                lost(LostReason::Reset, false, detail)
            }
        }
    }
}

/// The 16 bytes of a server's UUID.
pub(crate) fn source_of(uuid: &str) -> Option<[u8; 16]> {
    let set: GtidSet = format!("{uuid}:1").parse().ok()?;
    set.sids().next().map(|sid| sid.source)
}

/// Reads the facts. Statements and variables that a version does not know are no error.
pub(crate) async fn read(conn: &mut Conn) -> Result<ServerFacts, mysql_async::Error> {
    let variables: Vec<(String, String)> = conn
        .query(
            "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'server_uuid', \
             'server_uid', 'server_id', 'hostname', 'port', 'gtid_mode', 'binlog_format', \
             'binlog_row_image', 'binlog_row_metadata', 'log_bin', 'log_replica_updates', \
             'log_slave_updates', 'read_only', 'super_read_only', 'binlog_expire_logs_seconds', \
             'expire_logs_days', 'lower_case_table_names')",
        )
        .await?;
    let get = |name: &str| {
        variables
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.as_str())
    };
    let text = |name: &str| get(name).unwrap_or_default();
    let on = |name: &str| {
        let value = text(name);
        value.eq_ignore_ascii_case("ON") || value == "1"
    };
    let family = if text("version").contains("MariaDB") {
        Family::Mariadb
    } else {
        Family::Mysql
    };
    let server = get("server_uuid")
        .or_else(|| get("server_uid"))
        .map_or_else(
            || {
                format!(
                    "{}@{}:{}",
                    text("server_id"),
                    text("hostname"),
                    text("port")
                )
            },
            str::to_owned,
        );
    let gtid_mode = text("gtid_mode").to_ascii_uppercase();
    let days = get("expire_logs_days").and_then(|d| d.parse::<f64>().ok());
    let seconds = get("binlog_expire_logs_seconds").and_then(|s| s.parse().ok());
    let mut facts = ServerFacts {
        version: text("version").to_owned(),
        family,
        server_id: text("server_id").parse().unwrap_or_default(),
        gtid_mode,
        binlog_format: text("binlog_format").to_ascii_uppercase(),
        row_image: text("binlog_row_image").to_ascii_uppercase(),
        row_metadata: text("binlog_row_metadata").to_ascii_uppercase(),
        log_bin: on("log_bin"),
        log_replica_updates: on("log_replica_updates") || on("log_slave_updates"),
        read_only: on("read_only") || on("super_read_only"),
        expire_logs_seconds: seconds.or_else(|| days.map(days_to_seconds)),
        fold_names: text("lower_case_table_names") != "0",
        is_replica: false,
        is_filtered: false,
        executed: GtidSet::default(),
        purged: GtidSet::default(),
        mariadb: None,
        binlogs: Vec::new(),
        coordinate: Position::File(FilePosition {
            server: server.clone(),
            file: String::new(),
            pos: 0,
        }),
        server,
    };
    read_replication(conn, &mut facts).await?;
    read_binlogs(conn, &mut facts).await?;
    Ok(facts)
}

/// MariaDB counts days, in fractions.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped before"
)]
fn days_to_seconds(days: f64) -> u64 {
    (days.clamp(0.0, 36_500.0) * 86_400.0) as u64
}

async fn read_replication(
    conn: &mut Conn,
    facts: &mut ServerFacts,
) -> Result<(), mysql_async::Error> {
    let rows = match either(conn, "SHOW REPLICA STATUS", "SHOW SLAVE STATUS").await {
        Ok(rows) => rows,
        // MariaDB wants a privilege for it that a reader of the binlog need not have. Whether
        // something is replicated at all, everybody may know.
        Err(mysql_async::Error::Server(e)) if e.code == 1227 => {
            let running: Option<(String, String)> = conn
                .query_first("SHOW GLOBAL STATUS LIKE 'Slaves_running'")
                .await?;
            facts.is_replica = running.is_some_and(|(_, n)| n != "0");
            return Ok(());
        }
        Err(e) => return Err(e),
    };
    facts.is_replica = !rows.is_empty();
    facts.is_filtered = rows.iter().any(|row| {
        row.columns_ref().iter().any(|c| {
            let name = c.name_str();
            (name.starts_with("Replicate_Do")
                || name.starts_with("Replicate_Ignore")
                || name.starts_with("Replicate_Wild"))
                && name != "Replicate_Ignore_Server_Ids"
                && column::<String>(row, &name).is_some_and(|v| !v.is_empty())
        })
    });
    Ok(())
}

async fn read_binlogs(conn: &mut Conn, facts: &mut ServerFacts) -> Result<(), mysql_async::Error> {
    if !facts.log_bin {
        return Ok(());
    }
    if facts.gtid_mode == "ON" {
        let sets: Option<(String, String)> = conn
            .query_first("SELECT @@GLOBAL.gtid_executed, @@GLOBAL.gtid_purged")
            .await?;
        let (executed, purged) = sets.unwrap_or_default();
        let parse = |text: String| {
            text.parse::<GtidSet>()
                .map_err(|e| mysql_async::Error::Other(Box::new(e)))
        };
        facts.executed = parse(executed)?;
        facts.purged = parse(purged)?;
        facts.coordinate = Position::Gtid(facts.executed.clone());
    } else {
        let rows = either(conn, "SHOW BINARY LOG STATUS", "SHOW MASTER STATUS").await?;
        if let (Some(row), Position::File(end)) = (rows.first(), &mut facts.coordinate) {
            end.file = column(row, "File").unwrap_or_default();
            end.pos = column(row, "Position").unwrap_or_default();
        }
    }
    // Read after the coordinate, so that its file is among them.
    let logs: Vec<Row> = conn.query("SHOW BINARY LOGS").await?;
    let log = |row: &Row| Some((column(row, "Log_name")?, column(row, "File_size")?));
    facts.binlogs = logs.iter().filter_map(log).collect();
    if facts.family == Family::Mariadb {
        let known = mariadb::read(conn, facts.first_binlog()).await?;
        let near = match &facts.coordinate {
            Position::File(end) => Some((end.file.clone(), end.pos)),
            _ => None,
        };
        facts.coordinate = Position::Mariadb(MariadbPosition {
            list: known.position.clone(),
            near,
        });
        facts.mariadb = Some(known);
    }
    Ok(())
}

/// By name: versions differ in the columns that they have.
fn column<T: mysql_async::prelude::FromValue>(row: &Row, name: &str) -> Option<T> {
    let place = row
        .columns_ref()
        .iter()
        .position(|c| c.name_str() == name)?;
    match row.as_ref(place)? {
        Value::NULL => None,
        value => mysql_async::from_value_opt(value.clone()).ok(),
    }
}

/// A statement under its present name, or else its former one.
async fn either(conn: &mut Conn, now: &str, then: &str) -> Result<Vec<Row>, mysql_async::Error> {
    match conn.query(now).await {
        Err(mysql_async::Error::Server(e)) if e.code == 1064 => conn.query(then).await,
        other => other,
    }
}

/// What forbids tailing altogether.
pub(crate) fn check_settings(facts: &ServerFacts) -> Result<(), StreamError> {
    if !facts.log_bin {
        return Err(StreamError::halt(
            "log_bin",
            "the server writes no binlog: start it with log_bin",
        ));
    }
    if !facts.binlog_format.is_empty() && facts.binlog_format != "ROW" {
        let advice = format!("binlog_format is {}: set it to ROW", facts.binlog_format);
        return Err(StreamError::halt("binlog_format", advice));
    }
    if facts.is_replica && !facts.log_replica_updates {
        let advice = "this replica does not log what it replicates: set log_replica_updates = ON";
        return Err(StreamError::halt("log_replica_updates", advice));
    }
    Ok(())
}
