//! The stored position, and the coordinate that the server has now.

mod checkpoint;
mod coordinate;

use std::sync::Arc;

use outbox_core::Position;
use outbox_core::layout::TableLayout;
use outbox_core::ports::PortResult;
use outbox_core::position::FilePosition;
use sqlx::{Connection, Executor as _, Row as _};

pub(crate) use checkpoint::{Pending, Writer};
pub use coordinate::read_coordinate;

use crate::connect::Db;
use crate::error::DbError;
use crate::gap::{self, NewGap};
use crate::layouts;
use crate::lease::{Epoch, raise_epoch};

/// `SHOW BINLOG EVENTS` cannot read what is there.
const BAD_EVENTS: u16 = 1220;

/// What is stored for a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPosition {
    /// Where to go on; `None` after `position reset`.
    pub position: Option<Position>,
    /// Rows from before the position are still to be swept.
    pub sweep: bool,
    /// An operator set it, and it has not moved since.
    pub by_operator: bool,
    /// Seconds since it was stored, by the database's clock.
    pub age_seconds: u64,
    /// The epoch that stored it.
    pub epoch: u64,
}

/// Positions of one name.
#[derive(Clone, Debug)]
pub struct PositionStore {
    db: Db,
    name: Arc<str>,
}

impl PositionStore {
    /// The positions of `name`.
    #[must_use]
    pub fn new(db: Db, name: Arc<str>) -> Self {
        Self { db, name }
    }

    /// The stored position; `None` before the first start.
    pub async fn load(&self) -> PortResult<Option<StoredPosition>> {
        let work = async {
            let mut session = self.db.session().await?;
            let stored = checkpoint::load(&mut session, &self.name).await?;
            session.finish();
            Ok(stored)
        };
        self.db.run("load the position", work).await
    }

    /// Stores where to start, whether a sweep is due from there, and the gap that made it
    /// necessary, all at once. Stored layouts are forgotten, as they were those of another place,
    /// and `layouts` (by the tables' full names) are stored: those that hold at the position.
    pub async fn start_at(
        &self,
        epoch: &Epoch,
        position: &Position,
        layouts: &[(String, TableLayout)],
        sweep: bool,
        gap: Option<&NewGap>,
    ) -> PortResult<()> {
        let work = async {
            let mut session = self.db.session().await?;
            let mut tx = session.begin().await?;
            epoch.fence(&mut tx).await?;
            if let Some(gap) = gap {
                gap::record(&mut tx, &self.name, gap).await?;
            }
            checkpoint::replace(&mut tx, epoch, Some(position), sweep, false).await?;
            for (table, layout) in layouts {
                layouts::store(&mut tx, &self.name, table, Some(layout)).await?;
            }
            tx.commit().await?;
            session.finish();
            Ok(())
        };
        self.db.run("store the start position", work).await
    }

    /// Asks for a sweep that survives a restart, such as after a skipped group.
    pub async fn request_sweep(&self, epoch: &Epoch) -> PortResult<()> {
        self.set_sweep(epoch, true).await
    }

    /// The sweep is over.
    pub async fn finish_sweep(&self, epoch: &Epoch) -> PortResult<()> {
        self.set_sweep(epoch, false).await
    }

    async fn set_sweep(&self, epoch: &Epoch, due: bool) -> PortResult<()> {
        let work = async {
            let mut session = self.db.session().await?;
            let mut tx = session.begin().await?;
            epoch.fence(&mut tx).await?;
            sqlx::query("UPDATE outboxd_checkpoint SET sweep = ? WHERE name = ?")
                .bind(due)
                .bind(&*self.name)
                .execute(&mut *tx)
                .await?;
            tx.commit().await?;
            session.finish();
            Ok(())
        };
        self.db.run("record the sweep", work).await
    }

    /// Moves the position on an operator's word (`None`: as before the first start), ends the
    /// current epoch, so that whoever leads starts again from here, and forgets stored layouts.
    /// Returns the epoch that ended all others. The position has been validated.
    pub async fn set_by_operator(
        &self,
        position: Option<&Position>,
        sweep: bool,
    ) -> PortResult<u64> {
        let work = async {
            let mut session = self.db.session().await?;
            let mut tx = session.begin().await?;
            let number = raise_epoch(&mut tx, &self.name).await?;
            let epoch = Epoch {
                name: Arc::clone(&self.name),
                number,
            };
            checkpoint::replace(&mut tx, &epoch, position, sweep, true).await?;
            tx.commit().await?;
            session.finish();
            Ok(number)
        };
        self.db.run("set the position", work).await
    }
}

/// The coordinate that the server has now, of the kind of the position stored under `name`.
pub async fn coordinate(db: &Db, name: Option<&str>) -> PortResult<Position> {
    let work = async {
        let family = db.family().await?;
        let mut session = db.session().await?;
        let position = read_coordinate(&mut session, family, name).await?;
        session.finish();
        Ok(position)
    };
    db.run("read the server's coordinate", work).await
}

/// Why a place in a binlog file is not one between two groups, by the event that the server finds
/// there; `None` where it is one, or the end of the file.
pub async fn not_a_boundary(db: &Db, at: &FilePosition) -> PortResult<Option<String>> {
    let work = async {
        let mut session = db.session().await?;
        // The name is one that the server listed; the statement takes no parameters.
        let query = format!(
            "SHOW BINLOG EVENTS IN '{}' FROM {} LIMIT 1",
            at.file.replace(['\'', '\\'], ""),
            at.pos
        );
        let found = sqlx::raw_sql(sqlx::AssertSqlSafe(query))
            .fetch_optional(&mut *session)
            .await;
        let found = match found.map_err(DbError::from) {
            Err(DbError::Server { number, message }) if number == BAD_EVENTS => {
                return Ok(Some(message));
            }
            found => found?,
        };
        let Some(row) = found else {
            // The end of the file, or within its last event.
            let logs = session.fetch_all("SHOW BINARY LOGS").await?;
            session.finish();
            let mut sizes = logs.iter().filter_map(|log| {
                let name: String = log.try_get_unchecked(0).ok()?;
                let size: u64 = log.try_get_unchecked(1).ok()?;
                (name == at.file).then_some(size)
            });
            let ends = sizes.any(|size| size == at.pos);
            return Ok((!ends).then(|| "no event begins there".to_owned()));
        };
        session.finish();
        // MySQL shows the first event that begins there or behind it.
        let begins: u64 = row.try_get_unchecked(1)?;
        if begins != at.pos {
            return Ok(Some(format!("the next event begins at {begins}")));
        }
        let kind = layouts::text(&row, 2)?;
        let inner = [
            "Table_map",
            "Write_rows",
            "Update_rows",
            "Delete_rows",
            "Xid",
            "Rows_query",
        ];
        let inside = inner.iter().any(|i| kind.starts_with(i));
        Ok(inside.then(|| format!("a {kind} event begins there")))
    };
    db.run("look at the binlog", work).await
}
