//! Real replication between two servers of a test.

use std::time::Duration;

use anyhow::{Context, Result};

use super::{Flavour, Mysql};
use crate::wait;

impl Mysql {
    /// Makes this server replicate everything that `source` has ever logged, by GTID where the source has GTIDs.
    ///
    /// # Errors
    /// The servers'.
    pub async fn replica_of(&self, source: &Self) -> Result<()> {
        source
            .exec("CREATE USER IF NOT EXISTS 'repl'@'%' IDENTIFIED BY 'secret'")
            .await?;
        source
            .exec("GRANT REPLICATION SLAVE ON *.* TO 'repl'@'%'")
            .await?;
        let port = source.port;
        match self.flavour {
            Flavour::Mysql => {
                let from = if source.options.gtid {
                    "SOURCE_AUTO_POSITION = 1"
                } else {
                    "SOURCE_LOG_FILE = 'binlog.000001', SOURCE_LOG_POS = 4"
                };
                self.exec(format!(
                    "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', SOURCE_PORT = {port}, SOURCE_USER = 'repl', \
                     SOURCE_PASSWORD = 'secret', GET_SOURCE_PUBLIC_KEY = 1, SOURCE_CONNECT_RETRY = 1, {from}"
                ))
                .await?;
                self.exec("START REPLICA").await?;
            }
            Flavour::Mariadb => {
                self.exec(format!(
                    "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {port}, MASTER_USER = 'repl', \
                     MASTER_PASSWORD = 'secret', MASTER_CONNECT_RETRY = 1, MASTER_USE_GTID = slave_pos"
                ))
                .await?;
                self.exec("START SLAVE").await?;
            }
        }
        Ok(())
    }

    /// Waits until this replica has applied all that `source` has committed by now.
    ///
    /// # Errors
    /// It has not after `timeout`.
    pub async fn caught_up_with(&self, source: &Self, timeout: Duration) -> Result<()> {
        let query = match source.flavour {
            Flavour::Mysql if source.options.gtid => {
                let set: String = source
                    .first("SELECT @@GLOBAL.gtid_executed")
                    .await?
                    .context("no GTIDs")?;
                format!("SELECT GTID_SUBSET('{set}', @@GLOBAL.gtid_executed)")
            }
            Flavour::Mysql => {
                let row: mysql_async::Row = source
                    .first("SHOW BINARY LOG STATUS")
                    .await?
                    .context("no binlog")?;
                let file: String = row.get(0).context("no file")?;
                let position: u64 = row.get(1).context("no position")?;
                format!("SELECT COALESCE(SOURCE_POS_WAIT('{file}', {position}, 0.1), -1) >= 0")
            }
            Flavour::Mariadb => {
                let position: String = source
                    .first("SELECT @@GLOBAL.gtid_binlog_pos")
                    .await?
                    .context("no GTIDs")?;
                format!("SELECT MASTER_GTID_WAIT('{position}', 0.1) = 0")
            }
        };
        wait::until("the replica has caught up", timeout, async || {
            matches!(self.first::<i64>(&query).await, Ok(Some(1)))
        })
        .await
    }
}
