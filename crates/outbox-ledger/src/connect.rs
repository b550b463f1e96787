//! Connections to MySQL and MariaDB: a small pool, sessions set up alike, errors that name the
//! server and never a credential.

mod tls;

use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use outbox_core::ports::PortResult;
use secrecy::{ExposeSecret, SecretString};
use sqlx::mysql::{MySqlConnectOptions, MySqlPool, MySqlPoolOptions};
use sqlx::pool::PoolConnection;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, MySql, MySqlConnection};

pub use tls::{SslMode, Tls};

use crate::error::{DbError, DbResult};

/// How long a session waits for a connection, a new one included.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one operation may take, all its statements together: lock waits and their repetition
/// fit in, a dead link does not hold a task for longer.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a statement waits for a row lock. Short: rows that the application keeps locked are
/// passed over, the others must not wait for them.
const LOCK_WAIT_SECONDS: u64 = 2;

/// Where the URL comes from.
#[derive(Clone, Debug)]
pub enum UrlSource {
    /// `mysql.url`.
    Value(SecretString),
    /// `mysql.url_file`, read again before every new connection.
    File(PathBuf),
}

/// `[mysql]`, as far as statements need it.
#[derive(Clone, Debug)]
pub struct DbConfig {
    /// The server, the account and the schema.
    pub url: UrlSource,
    /// TLS.
    pub tls: Tls,
    /// Zone of the outbox's DATETIME columns; `None`: the server's own.
    pub time_zone: Option<String>,
    /// Most connections at once.
    pub max_connections: u32,
    /// A session that is silent for this long is ended by the server: the locks of a leader that
    /// was stopped in the middle of a transaction outlast its lease by no more than this.
    pub lease_ttl: Duration,
    /// Write MINIMAL row images where the account may (SESSION_VARIABLES_ADMIN). Off for sessions
    /// that insert outbox rows: the tail needs those whole.
    pub minimal_images: bool,
}

impl DbConfig {
    /// Defaults for everything but the URL.
    #[must_use]
    pub fn new(url: UrlSource) -> Self {
        Self {
            url,
            tls: Tls::default(),
            time_zone: None,
            max_connections: 8,
            lease_ttl: Duration::from_secs(15),
            minimal_images: true,
        }
    }
}

/// The two families of servers, which differ in statements, variables and GTIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// MySQL and Percona Server.
    MySql,
    /// MariaDB.
    MariaDb,
}

/// The row images that our own sessions write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowImage {
    /// Only what changed: a fiftieth of the binlog bytes.
    Minimal,
    /// What the server is set to.
    ServerDefault,
}

/// A pool of sessions. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Db(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pool: MySqlPool,
    config: DbConfig,
    material: tls::Material,
    /// Which certificate of the CA bundle the server's is verified against.
    variant: AtomicUsize,
    server: String,
    schema: String,
    setup: Arc<Setup>,
}

/// What every new session is told, and what was learnt from the last one.
#[derive(Debug)]
struct Setup {
    statement: String,
    minimal_images: bool,
    learnt: AtomicU8,
}

const LEARNT_MARIADB: u8 = 1;
const LEARNT_MINIMAL: u8 = 2;
const LEARNT_ANYTHING: u8 = 4;

impl Db {
    /// Reads the URL and the TLS files; connects to nothing yet.
    pub fn new(config: DbConfig) -> DbResult<Self> {
        let material = tls::Material::load(&config.tls)?;
        let base = base_options(&config.url)?;
        let schema = base
            .get_database()
            .ok_or_else(|| DbError::Config("the URL names no database".to_owned()))?
            .to_owned();
        let server = match base.get_socket() {
            Some(path) => path.display().to_string(),
            None => format!("{}:{}", base.get_host(), base.get_port()),
        };
        let setup = Arc::new(Setup::new(&config));
        let idle_limit = config.lease_ttl / 2;
        let hook = Arc::clone(&setup);
        let pool = MySqlPoolOptions::new()
            .max_connections(config.max_connections)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .idle_timeout(idle_limit)
            // A ping costs a round trip; within half of the server's own limit a connection is
            // there, and if not, the operation fails and is repeated on a fresh one.
            .test_before_acquire(false)
            .after_connect(move |conn, _| {
                let setup = Arc::clone(&hook);
                Box::pin(async move { setup.run(conn).await })
            })
            .before_acquire(move |_, meta| Box::pin(async move { Ok(meta.idle_for < idle_limit) }))
            .connect_lazy_with(material.apply(base, config.tls.mode, 0));
        Ok(Self(Arc::new(Inner {
            pool,
            config,
            material,
            variant: AtomicUsize::new(0),
            server,
            schema,
            setup,
        })))
    }

    /// `host:port`.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.0.server
    }

    /// The schema of the URL, where our own tables are.
    #[must_use]
    pub fn schema(&self) -> &str {
        &self.0.schema
    }

    /// Family of the server and row images of our sessions, learnt from the last connection.
    pub async fn traits(&self) -> DbResult<(Family, RowImage)> {
        let learnt = || self.0.setup.learnt.load(Ordering::Relaxed);
        if learnt() == 0 {
            self.session().await?.finish();
        }
        let bits = learnt();
        let family = if bits & LEARNT_MARIADB == 0 {
            Family::MySql
        } else {
            Family::MariaDb
        };
        let image = if bits & LEARNT_MINIMAL == 0 {
            RowImage::ServerDefault
        } else {
            RowImage::Minimal
        };
        Ok((family, image))
    }

    /// Family of the server.
    pub async fn family(&self) -> DbResult<Family> {
        Ok(self.traits().await?.0)
    }

    /// Takes a session, opening one if none is idle.
    pub async fn session(&self) -> DbResult<Session> {
        if self.0.pool.num_idle() == 0 {
            self.refresh().await?;
        }
        let mut tried = 1;
        loop {
            match self.0.pool.acquire().await.map_err(DbError::from) {
                Ok(conn) => return Ok(Session { conn: Some(conn) }),
                // The server's certificate may be signed by another one of the bundle.
                Err(DbError::Tls(_)) if tried < self.0.material.variants() => {
                    tried += 1;
                    self.0.variant.fetch_add(1, Ordering::Relaxed);
                    self.refresh().await?;
                }
                Err(DbError::Busy) => return Err(self.explain().await),
                Err(e) => return Err(e),
            }
        }
    }

    /// Runs one operation within its time; `operation` names it in errors.
    pub async fn run<T>(
        &self,
        operation: &str,
        work: impl Future<Output = DbResult<T>>,
    ) -> PortResult<T> {
        let named = |e: DbError| e.during(format!("{operation} at {}", self.0.server));
        match tokio::time::timeout(OPERATION_TIMEOUT, work).await {
            Ok(result) => result.map_err(named),
            Err(_) => Err(named(DbError::Timeout(OPERATION_TIMEOUT))),
        }
    }

    /// Closes all connections.
    pub async fn close(&self) {
        // Never for long: a connection to a dead server does not close by itself.
        let _ = tokio::time::timeout(Duration::from_secs(1), self.0.pool.close()).await;
    }

    /// Options for the next connections, with the URL read again.
    async fn refresh(&self) -> DbResult<()> {
        self.0.pool.set_connect_options(self.options().await?);
        Ok(())
    }

    async fn options(&self) -> DbResult<MySqlConnectOptions> {
        let source = self.0.config.url.clone();
        let base = tokio::task::spawn_blocking(move || base_options(&source))
            .await
            .map_err(|e| DbError::Io(std::io::Error::other(e)))??;
        let variant = self.0.variant.load(Ordering::Relaxed);
        Ok(self.0.material.apply(base, self.0.config.tls.mode, variant))
    }

    /// Why the pool gave no connection: it keeps the reason to itself.
    async fn explain(&self) -> DbError {
        let probe = async {
            let mut conn = self.options().await?.connect().await?;
            self.0.setup.run(&mut conn).await?;
            conn.close().await?;
            DbResult::Ok(())
        };
        match tokio::time::timeout(ACQUIRE_TIMEOUT, probe).await {
            Ok(Err(e)) => e,
            Ok(Ok(())) => DbError::Busy,
            Err(_) => DbError::Timeout(ACQUIRE_TIMEOUT),
        }
    }
}

impl Setup {
    fn new(config: &DbConfig) -> Self {
        let wait = config.lease_ttl.as_secs().max(1);
        let mut statement = format!(
            "SET SESSION sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION', \
             SESSION innodb_lock_wait_timeout = {LOCK_WAIT_SECONDS}, \
             SESSION wait_timeout = {wait}"
        );
        if let Some(zone) = &config.time_zone {
            // SET takes no parameters here; a zone has no business with quotes or backslashes.
            let zone = zone.replace(['\'', '\\'], "");
            statement.push_str(&format!(", SESSION time_zone = '{zone}'"));
        }
        Self {
            statement,
            minimal_images: config.minimal_images,
            learnt: AtomicU8::new(0),
        }
    }

    async fn run(&self, conn: &mut MySqlConnection) -> Result<(), sqlx::Error> {
        conn.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            .await?;
        conn.execute(AssertSqlSafe(self.statement.as_str())).await?;
        let mut learnt = LEARNT_ANYTHING;
        let version: String = sqlx::query_scalar("SELECT CAST(@@version AS CHAR)")
            .fetch_one(&mut *conn)
            .await?;
        if version.to_ascii_lowercase().contains("mariadb") {
            learnt |= LEARNT_MARIADB;
        }
        if self.minimal_images {
            match conn
                .execute("SET SESSION binlog_row_image = 'MINIMAL'")
                .await
            {
                Ok(_) => learnt |= LEARNT_MINIMAL,
                // The privilege is optional.
                Err(sqlx::Error::Database(_)) => {}
                Err(e) => return Err(e),
            }
        }
        self.learnt.store(learnt, Ordering::Relaxed);
        Ok(())
    }
}

/// The URL's options, without what the driver would decide for us: the time zone, SQL modes, and
/// statements in the log.
fn base_options(source: &UrlSource) -> DbResult<MySqlConnectOptions> {
    let url = match source {
        UrlSource::Value(url) => url.clone(),
        UrlSource::File(path) => std::fs::read_to_string(path)
            .map(|text| SecretString::from(text.trim().to_owned()))
            .map_err(|e| DbError::Config(format!("url_file {}: {e}", path.display())))?,
    };
    // The parser's words may quote the URL, and with it the password.
    let options = MySqlConnectOptions::from_str(url.expose_secret())
        .map_err(|_| DbError::Config("the MySQL URL cannot be read".to_owned()))?;
    Ok(options
        .charset("utf8mb4")
        .timezone(None)
        .pipes_as_concat(false)
        .no_engine_substitution(false)
        .disable_statement_logging())
}

/// One connection, taken from the pool. It goes back by [`Session::finish`]; dropped in any other
/// way (an error, a timeout, a cancelled task) it is closed, and the server rolls back.
#[derive(Debug)]
pub struct Session {
    conn: Option<PoolConnection<MySql>>,
}

impl Session {
    /// Gives the connection back to the pool. No transaction may be open.
    pub fn finish(mut self) {
        drop(self.conn.take());
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(conn) = self.conn.take() {
            drop(conn.detach());
        }
    }
}

#[allow(clippy::expect_used)] // taken only by what consumes the session
impl Deref for Session {
    type Target = MySqlConnection;

    fn deref(&self) -> &MySqlConnection {
        self.conn.as_ref().expect("a session has its connection")
    }
}

#[allow(clippy::expect_used)]
impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut MySqlConnection {
        self.conn.as_mut().expect("a session has its connection")
    }
}
