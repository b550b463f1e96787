//! Who leads: a lease by the database's clock, and the epoch that fences every write.
//!
//! The lease row is touched by acquiring and renewing only; writes are fenced by a row of their
//! own, on which they share a lock. A long flush therefore never keeps a renewal waiting, while
//! a take-over waits for the last write of the epoch before (at most until the server ends the
//! session of a leader that was stopped in the middle of it).

use std::sync::Arc;
use std::time::Duration;

use outbox_core::ports::PortResult;
use sqlx::{Connection, MySqlConnection, Row};

use crate::connect::Db;
use crate::error::{DbError, DbResult};
use crate::layouts::text;

/// The right to write, for as long as no other epoch has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Epoch {
    /// The configured `name`.
    pub name: Arc<str>,
    /// The number.
    pub number: u64,
}

impl Epoch {
    /// Proves inside a transaction that the epoch is current, and keeps it so until the
    /// transaction's end. To be its first statement.
    pub async fn fence(&self, conn: &mut MySqlConnection) -> DbResult<()> {
        // Not FOR SHARE, which MariaDB does not know.
        let query = "SELECT epoch FROM outboxd_fence WHERE name = ? LOCK IN SHARE MODE";
        self.compare(query, conn).await
    }

    /// Whether the epoch is current, such as before a dump is opened.
    pub async fn verify(&self, db: &Db) -> PortResult<()> {
        let work = async {
            let mut session = db.session().await?;
            let query = "SELECT epoch FROM outboxd_fence WHERE name = ?";
            self.compare(query, &mut session).await?;
            session.finish();
            Ok(())
        };
        db.run("verify the epoch", work).await
    }

    async fn compare(&self, query: &'static str, conn: &mut MySqlConnection) -> DbResult<()> {
        let current: Option<u64> = sqlx::query_scalar(query)
            .bind(&*self.name)
            .fetch_optional(conn)
            .await?;
        if current == Some(self.number) {
            Ok(())
        } else {
            Err(DbError::Fenced { held: self.number })
        }
    }
}

/// One process's claim to the lease of a name.
#[derive(Clone, Debug)]
pub struct Lease {
    db: Db,
    name: Arc<str>,
    instance: String,
    owner: String,
    ttl: Duration,
}

/// The lease as anyone sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseState {
    /// The instance that leads; `None` where the lease is over or given back.
    pub leader: Option<String>,
    /// The instance that led last.
    pub last_instance: String,
    /// The epoch.
    pub epoch: u64,
    /// Microseconds until the lease ends, negative once it has.
    pub remaining_micros: i64,
    /// Instances that asked for the lease within the last minute and do not lead.
    pub standbys: Vec<String>,
}

/// Whether a claim to the lease has a chance.
enum Takeable {
    /// Nobody ever had the lease.
    Never,
    /// It is free, or this instance's; with the epoch to follow.
    Yes(u64),
    /// Another instance leads.
    No,
}

impl Lease {
    /// A claim with a fresh owner token.
    #[must_use]
    pub fn new(db: Db, name: Arc<str>, instance: impl Into<String>, ttl: Duration) -> Self {
        Self {
            db,
            name,
            instance: instance.into(),
            owner: format!("{:032x}", rand::random::<u128>()),
            ttl,
        }
    }

    /// Takes the lease if nobody leads, or this very instance did; `None` while another leads.
    pub async fn acquire(&self) -> PortResult<Option<Epoch>> {
        let work = async {
            let mut session = self.db.session().await?;
            let epoch = match self.takeable(&mut session, "").await? {
                Takeable::No => None,
                Takeable::Yes(_) => self.take(&mut session).await?,
                Takeable::Never => {
                    self.prepare(&mut session).await?;
                    self.take(&mut session).await?
                }
            };
            if epoch.is_none() {
                self.announce(&mut session).await?;
            }
            session.finish();
            Ok(epoch)
        };
        self.db.run("acquire the lease", work).await
    }

    async fn takeable(&self, conn: &mut MySqlConnection, lock: &str) -> DbResult<Takeable> {
        let row = crate::sql::query(format!(
            "SELECT epoch, instance, owner, lease_until <= UTC_TIMESTAMP(6) \
             FROM outboxd_lease WHERE name = ? {lock}"
        ))
        .bind(&*self.name)
        .fetch_optional(conn)
        .await?;
        let Some(row) = row else {
            return Ok(Takeable::Never);
        };
        let over: i64 = row.try_get_unchecked(3)?;
        let ours = text(&row, 1)? == self.instance;
        let free = over != 0 || ours || text(&row, 2)?.is_empty();
        Ok(if free {
            Takeable::Yes(row.try_get(0)?)
        } else {
            Takeable::No
        })
    }

    /// Makes the row of a lease that nobody has: only a row that is there can be locked, and two
    /// first takers must not begin the same epoch.
    async fn prepare(&self, conn: &mut MySqlConnection) -> DbResult<()> {
        sqlx::query(
            "INSERT INTO outboxd_lease \
             (name, owner, instance, epoch, lease_until, acquired_at, renewed_at) \
             VALUES (?, '', '', 0, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), UTC_TIMESTAMP(6)) \
             ON DUPLICATE KEY UPDATE name = VALUES(name)",
        )
        .bind(&*self.name)
        .execute(conn)
        .await?;
        Ok(())
    }

    async fn take(&self, conn: &mut MySqlConnection) -> DbResult<Option<Epoch>> {
        let mut tx = conn.begin().await?;
        let Takeable::Yes(last) = self.takeable(&mut tx, "FOR UPDATE").await? else {
            tx.rollback().await?;
            return Ok(None);
        };
        let epoch = last + 1;
        sqlx::query(
            "UPDATE outboxd_lease SET owner = ?, instance = ?, epoch = ?, \
             lease_until = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, \
             acquired_at = UTC_TIMESTAMP(6), renewed_at = UTC_TIMESTAMP(6) WHERE name = ?",
        )
        .bind(&self.owner)
        .bind(&self.instance)
        .bind(epoch)
        .bind(self.ttl_micros())
        .bind(&*self.name)
        .execute(&mut *tx)
        .await?;
        set_fence(&mut tx, &self.name, epoch).await?;
        sqlx::query("DELETE FROM outboxd_instance WHERE name = ? AND instance = ?")
            .bind(&*self.name)
            .bind(&self.instance)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(Some(Epoch {
            name: Arc::clone(&self.name),
            number: epoch,
        }))
    }

    /// Says that this instance stands by, and forgets those that were not heard of for a day.
    async fn announce(&self, conn: &mut MySqlConnection) -> DbResult<()> {
        sqlx::query(
            "INSERT INTO outboxd_instance (name, instance, seen_at) \
             VALUES (?, ?, UTC_TIMESTAMP(6)) ON DUPLICATE KEY UPDATE seen_at = VALUES(seen_at)",
        )
        .bind(&*self.name)
        .bind(&self.instance)
        .execute(&mut *conn)
        .await?;
        sqlx::query(
            "DELETE FROM outboxd_instance \
             WHERE name = ? AND seen_at < UTC_TIMESTAMP(6) - INTERVAL 1 DAY",
        )
        .bind(&*self.name)
        .execute(conn)
        .await?;
        Ok(())
    }

    /// Extends the lease. `Fenced` once another epoch has begun; a lease that has run out but
    /// that nobody took is extended.
    pub async fn renew(&self, epoch: &Epoch) -> PortResult<()> {
        let work = async {
            let mut session = self.db.session().await?;
            let done = sqlx::query(
                "UPDATE outboxd_lease SET lease_until = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, \
                 renewed_at = UTC_TIMESTAMP(6) WHERE name = ? AND owner = ? AND epoch = ?",
            )
            .bind(self.ttl_micros())
            .bind(&*self.name)
            .bind(&self.owner)
            .bind(epoch.number)
            .execute(&mut *session)
            .await?;
            session.finish();
            if done.rows_affected() == 0 {
                return Err(DbError::Fenced { held: epoch.number });
            }
            Ok(())
        };
        self.db.run("renew the lease", work).await
    }

    /// Gives the lease back, if it is still ours: the next instance takes it at once.
    pub async fn release(&self, epoch: &Epoch) -> PortResult<()> {
        let work = async {
            let mut session = self.db.session().await?;
            sqlx::query(
                "UPDATE outboxd_lease SET owner = '', lease_until = UTC_TIMESTAMP(6) \
                 WHERE name = ? AND owner = ? AND epoch = ?",
            )
            .bind(&*self.name)
            .bind(&self.owner)
            .bind(epoch.number)
            .execute(&mut *session)
            .await?;
            session.finish();
            Ok(())
        };
        self.db.run("give the lease back", work).await
    }

    fn ttl_micros(&self) -> u64 {
        u64::try_from(self.ttl.as_micros()).unwrap_or(u64::MAX)
    }
}

/// The lease of `name`; `None` if nobody ever took it.
pub async fn state(db: &Db, name: &str) -> PortResult<Option<LeaseState>> {
    let work = async {
        let mut session = db.session().await?;
        let row = sqlx::query(
            "SELECT epoch, instance, owner, \
             CAST(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), lease_until) AS SIGNED) \
             FROM outboxd_lease WHERE name = ?",
        )
        .bind(name)
        .fetch_optional(&mut *session)
        .await?;
        let seen: Vec<String> = sqlx::query_scalar(
            "SELECT instance FROM outboxd_instance \
             WHERE name = ? AND seen_at > UTC_TIMESTAMP(6) - INTERVAL 1 MINUTE ORDER BY instance",
        )
        .bind(name)
        .fetch_all(&mut *session)
        .await?;
        session.finish();
        let Some(row) = row else { return Ok(None) };
        let instance = text(&row, 1)?;
        let remaining_micros: i64 = row.try_get_unchecked(3)?;
        let leads = remaining_micros > 0 && !text(&row, 2)?.is_empty();
        let leader = leads.then(|| instance.clone());
        Ok(Some(LeaseState {
            standbys: seen
                .into_iter()
                .filter(|s| leader.as_ref() != Some(s))
                .collect(),
            leader,
            last_instance: instance,
            epoch: row.try_get(0)?,
            remaining_micros,
        }))
    };
    db.run("read the lease", work).await
}

/// Ends the current epoch on an operator's behalf, inside the transaction that moves the
/// position: whoever leads takes the lease again, and starts from what is stored.
pub(crate) async fn raise_epoch(conn: &mut MySqlConnection, name: &str) -> DbResult<u64> {
    sqlx::query(
        "INSERT INTO outboxd_lease \
         (name, owner, instance, epoch, lease_until, acquired_at, renewed_at) \
         VALUES (?, '', '', 1, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), UTC_TIMESTAMP(6)) \
         ON DUPLICATE KEY UPDATE epoch = epoch + 1",
    )
    .bind(name)
    .execute(&mut *conn)
    .await?;
    let epoch: u64 = sqlx::query_scalar("SELECT epoch FROM outboxd_lease WHERE name = ?")
        .bind(name)
        .fetch_one(&mut *conn)
        .await?;
    set_fence(conn, name, epoch).await?;
    Ok(epoch)
}

async fn set_fence(conn: &mut MySqlConnection, name: &str, epoch: u64) -> DbResult<()> {
    sqlx::query(
        "INSERT INTO outboxd_fence (name, epoch) VALUES (?, ?) \
         ON DUPLICATE KEY UPDATE epoch = VALUES(epoch)",
    )
    .bind(name)
    .bind(epoch)
    .execute(conn)
    .await?;
    Ok(())
}
