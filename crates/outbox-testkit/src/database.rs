//! A MySQL or MariaDB server of a test's own.

mod replication;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use mysql_async::prelude::{FromRow, Queryable};
use mysql_async::{Conn, Opts, OptsBuilder};

use crate::process::{Process, contained};
use crate::root;

/// A folder with a MariaDB of another version, as `scripts/services mariadb` makes it, in place of the host's.
static MARIADB: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| std::env::var_os("OUTBOXD_MARIADB").map(PathBuf::from));

const START: Duration = Duration::from_secs(60);
const STOP: Duration = Duration::from_secs(60);

/// How to start a server.
#[derive(Debug, Clone)]
pub struct MysqlOptions {
    /// GTIDs on (MySQL only; MariaDB always has them).
    pub gtid: bool,
    /// Random if unset.
    pub server_id: Option<u32>,
    /// More command line options, such as `--binlog-row-image=MINIMAL`.
    pub options: Vec<String>,
}

impl Default for MysqlOptions {
    fn default() -> Self {
        Self {
            gtid: true,
            server_id: None,
            options: Vec::new(),
        }
    }
}

impl MysqlOptions {
    /// Without GTIDs.
    #[must_use]
    pub fn without_gtid() -> Self {
        Self {
            gtid: false,
            ..Self::default()
        }
    }

    /// With one more command line option.
    #[must_use]
    pub fn option(mut self, option: impl Into<String>) -> Self {
        self.options.push(option.into());
        self
    }
}

/// Which server it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// MySQL 9.7.
    Mysql,
    /// The host's MariaDB, or the one that `OUTBOXD_MARIADB` names.
    Mariadb,
}

/// Either server: both have the same face.
pub type Database = Mysql;

/// Starts MariaDB servers.
#[derive(Debug, Clone, Copy)]
pub struct Mariadb;

impl Mariadb {
    /// Starts a MariaDB server (Debian's `mariadb-server` package has to be installed) and waits until it answers.
    ///
    /// # Errors
    /// The server's log, if it does not start.
    pub async fn start(options: MysqlOptions) -> Result<Database> {
        Database::launch(Flavour::Mariadb, options).await
    }
}

/// One server. Dropping it kills it and removes its data.
#[derive(Debug)]
pub struct Mysql {
    flavour: Flavour,
    options: MysqlOptions,
    server_id: u32,
    /// Where it listens on 127.0.0.1.
    pub port: u16,
    name: String,
    root: &'static Path,
    process: Option<Process>,
}

impl Mysql {
    /// Starts a MySQL 9.7 server and waits until it answers.
    ///
    /// # Errors
    /// The server's log, if it does not start.
    pub async fn start(options: MysqlOptions) -> Result<Self> {
        Self::launch(Flavour::Mysql, options).await
    }

    async fn launch(flavour: Flavour, options: MysqlOptions) -> Result<Self> {
        let root = match (flavour, MARIADB.as_deref()) {
            (Flavour::Mariadb, Some(root)) => root,
            _ => root::servers().await?,
        };
        let _starting = root::STARTING.acquire().await?;
        let kind = match flavour {
            Flavour::Mysql => "mysql",
            Flavour::Mariadb => "mariadb",
        };
        let template = root.join("srv").join(format!("{kind}-template"));
        if !template.join(".ready").exists() {
            bail!("no template data for {kind}: is the server installed? (scripts/prepare)");
        }
        let server_id = options
            .server_id
            .unwrap_or_else(|| rand::random_range(1_000..900_000));
        let name = root::unique(kind);
        let mut server = Self {
            flavour,
            options,
            server_id,
            port: 0,
            name,
            root,
            process: None,
        };
        copy(&template, &server.data()).await?;
        for _ in 0..5 {
            server.port = root::free_port()?;
            server.spawn()?;
            match server.wait_ready().await {
                Ok(()) => return Ok(server),
                Err(error) if server.log().contains("Address already in use") => {
                    tracing::debug!(%error, "another program took the port");
                }
                Err(error) => return Err(error),
            }
        }
        bail!("{kind} found no free port in five attempts")
    }

    /// Which server it is.
    #[must_use]
    pub fn flavour(&self) -> Flavour {
        self.flavour
    }

    /// Its server_id.
    #[must_use]
    pub fn server_id(&self) -> u32 {
        self.server_id
    }

    /// Its data folder, as seen from outside: binlogs and `err.log` are in there.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        self.root.join("srv").join(&self.name)
    }

    /// Its error log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read(self.data().join("err.log"))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    fn command(&self) -> Command {
        // Sockets and pid files are relative to the data folder, which the server makes its working folder.
        let (mut command, data) = match self.flavour {
            Flavour::Mysql => {
                let mut command = contained(Some(self.root), "/usr/sbin/mysqld");
                command.args([
                    "--no-defaults",
                    "--mysqlx=OFF",
                    "--innodb-redo-log-capacity=64M",
                ]);
                if self.options.gtid {
                    command.args(["--gtid-mode=ON", "--enforce-gtid-consistency=ON"]);
                }
                (command, format!("/srv/{}", self.name))
            }
            Flavour::Mariadb => {
                let (root, data) = match MARIADB.as_deref() {
                    Some(root) => (Some(root), format!("/srv/{}", self.name)),
                    None => (None, self.data().display().to_string()),
                };
                let mut command = contained(root, "/usr/sbin/mariadbd");
                command.args([
                    "--no-defaults",
                    "--binlog-format=ROW",
                    "--skip-name-resolve",
                ]);
                // Its temporary tables are named by its process id, which is the same in every process namespace: two
                // servers with one folder for them delete each other's files, and fail or crash.
                command.arg(format!("--tmpdir={data}"));
                (command, data)
            }
        };
        command
            .args([
                "--user=root",
                "--bind-address=127.0.0.1",
                "--log-bin=binlog",
                "--log-error=err.log",
            ])
            .args([
                "--socket=sock",
                "--pid-file=pid",
                "--max-connections=200",
                "--innodb-buffer-pool-size=64M",
            ])
            .arg(format!("--datadir={data}"))
            .arg(format!("--port={}", self.port))
            .arg(format!("--server-id={}", self.server_id))
            .args(&self.options.options)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    fn spawn(&mut self) -> Result<()> {
        // The log of an earlier run must not explain this one.
        let log = self.data().join("err.log");
        if log.exists() {
            std::fs::rename(&log, self.data().join("err.log.before"))?;
        }
        self.process = Some(Process::spawn(self.command(), true)?);
        Ok(())
    }

    async fn wait_ready(&mut self) -> Result<()> {
        let end = tokio::time::Instant::now() + START;
        loop {
            if let Some(process) = &mut self.process
                && let Some(status) = process.ended()?
            {
                bail!("{} ended ({status}): {}", self.name, tail(&self.log()));
            }
            match self.first::<String>("SELECT @@datadir").await {
                // Somebody else's server may have been faster on this port.
                Ok(Some(folder)) if folder.trim_end_matches('/').ends_with(&self.name) => {
                    return Ok(());
                }
                Ok(other) => tracing::debug!(?other, "another server answers on this port"),
                Err(error) if tokio::time::Instant::now() > end => {
                    return Err(error.context(format!(
                        "{} does not answer: {}",
                        self.name,
                        tail(&self.log())
                    )));
                }
                Err(_) => {}
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Starts it again on the same port and data, after [`Self::kill9`] or [`Self::stop`].
    ///
    /// # Errors
    /// It runs already, or does not start.
    pub async fn restart(&mut self) -> Result<()> {
        self.spawn_again()?;
        self.wait_ready().await
    }

    /// Starts it again with other command line options, on the same port and data.
    ///
    /// # Errors
    /// As [`Self::restart`].
    pub async fn restart_with(&mut self, options: MysqlOptions) -> Result<()> {
        self.options = options;
        self.restart().await
    }

    fn spawn_again(&mut self) -> Result<()> {
        if let Some(process) = &mut self.process
            && process.ended()?.is_none()
        {
            bail!("{} still runs", self.name);
        }
        self.spawn()
    }

    fn running(&mut self) -> Result<&mut Process> {
        self.process
            .as_mut()
            .ok_or_else(|| anyhow!("{} does not run", self.name))
    }

    /// SIGKILL; its data stays.
    ///
    /// # Errors
    /// The system's.
    pub fn kill9(&mut self) -> Result<()> {
        self.running()?.kill9()
    }

    /// A clean shutdown; its data stays.
    ///
    /// # Errors
    /// It did not end.
    pub async fn stop(&mut self) -> Result<()> {
        self.running()?.terminate(STOP).await?;
        Ok(())
    }

    /// SIGSTOP: connections stay open and nothing answers.
    ///
    /// # Errors
    /// It does not run.
    pub fn pause(&mut self) -> Result<()> {
        self.running()?.pause()
    }

    /// SIGCONT.
    ///
    /// # Errors
    /// It does not run.
    pub fn resume(&mut self) -> Result<()> {
        self.running()?.resume()
    }

    /// The URL for `user` (`outboxd` or `migrator`, see [`Self::prepare`]) and database `app`.
    #[must_use]
    pub fn url(&self, user: &str) -> String {
        self.url_through(user, self.port)
    }

    /// The same through another port of loopback, such as a proxy's.
    #[must_use]
    pub fn url_through(&self, user: &str, port: u16) -> String {
        format!("mysql://{user}:secret@127.0.0.1:{port}/app")
    }

    /// A new connection as root, without a database.
    ///
    /// # Errors
    /// The server's.
    pub async fn root_conn(&self) -> Result<Conn> {
        self.connect(None).await
    }

    /// A new connection as root, in database `app`.
    ///
    /// # Errors
    /// The server's.
    pub async fn conn(&self) -> Result<Conn> {
        self.connect(Some("app")).await
    }

    async fn connect(&self, database: Option<&str>) -> Result<Conn> {
        let opts: Opts = OptsBuilder::default()
            .ip_or_hostname("127.0.0.1")
            .tcp_port(self.port)
            .user(Some("root"))
            .db_name(database)
            .prefer_socket(false)
            .into();
        let connect = tokio::time::timeout(Duration::from_secs(10), Conn::new(opts));
        Ok(connect.await.context("connecting took too long")??)
    }

    /// Runs one statement as root, in database `app` if that exists.
    ///
    /// # Errors
    /// The server's, with the statement.
    pub async fn exec(&self, sql: impl AsRef<str>) -> Result<u64> {
        let sql = sql.as_ref();
        let mut conn = self.any_conn().await?;
        conn.query_drop(sql).await.with_context(|| sql.to_owned())?;
        let rows = conn.affected_rows();
        conn.disconnect().await?;
        Ok(rows)
    }

    /// All rows of a query as root, in database `app` if that exists.
    ///
    /// # Errors
    /// The server's, with the statement.
    pub async fn query_rows<T>(&self, sql: impl AsRef<str>) -> Result<Vec<T>>
    where
        T: FromRow + Send + 'static,
    {
        let sql = sql.as_ref();
        let mut conn = self.any_conn().await?;
        let rows = conn.query(sql).await.with_context(|| sql.to_owned())?;
        conn.disconnect().await?;
        Ok(rows)
    }

    /// The first row of a query.
    ///
    /// # Errors
    /// The server's, with the statement.
    pub async fn first<T>(&self, sql: impl AsRef<str>) -> Result<Option<T>>
    where
        T: FromRow + Send + 'static,
    {
        Ok(self.query_rows(sql).await?.into_iter().next())
    }

    /// The one number that a query such as `SELECT COUNT(*)` returns.
    ///
    /// # Errors
    /// The server's, or it returned nothing.
    pub async fn count(&self, sql: impl AsRef<str>) -> Result<u64> {
        let sql = sql.as_ref();
        self.first::<u64>(sql)
            .await?
            .with_context(|| format!("no row: {sql}"))
    }

    async fn any_conn(&self) -> Result<Conn> {
        match self.conn().await {
            Err(error) if is_unknown_database(&error) => self.root_conn().await,
            other => other,
        }
    }

    /// Database `app`, and the users `outboxd` (exactly the documented grants) and `migrator`, password `secret`.
    ///
    /// # Errors
    /// The server's.
    pub async fn prepare(&self) -> Result<()> {
        let mut conn = self.root_conn().await?;
        for sql in [
            "CREATE DATABASE IF NOT EXISTS app",
            "CREATE USER IF NOT EXISTS 'outboxd'@'%' IDENTIFIED BY 'secret'",
            "CREATE USER IF NOT EXISTS 'migrator'@'%' IDENTIFIED BY 'secret'",
            "GRANT ALL ON app.* TO 'migrator'@'%'",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON app.* TO 'outboxd'@'%'",
            "GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO 'outboxd'@'%'",
        ] {
            conn.query_drop(sql).await.context(sql)?;
        }
        conn.disconnect().await?;
        Ok(())
    }
}

impl Drop for Mysql {
    fn drop(&mut self) {
        self.process = None;
        if let Err(error) = std::fs::remove_dir_all(self.data()) {
            tracing::warn!(%error, "a test's data folder was left behind");
        }
    }
}

fn is_unknown_database(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref::<mysql_async::Error>(), Some(mysql_async::Error::Server(server)) if server.code == 1049)
}

/// Copies a template, as cheaply as the file system can.
async fn copy(from: &Path, to: &Path) -> Result<()> {
    let out = tokio::process::Command::new("cp")
        .args(["-a", "--reflink=auto", "--sparse=auto", "--"])
        .args([from, to])
        .stdin(Stdio::null())
        .output()
        .await?;
    if !out.status.success() {
        bail!(
            "copying the template: {}",
            String::from_utf8_lossy(&out.stderr).trim()
        );
    }
    Ok(())
}

/// The end of a log, for an error message.
pub(crate) fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().rev().take(12).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}
