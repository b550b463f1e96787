//! Runs the real program with a configuration of its own.

use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tempfile::TempDir;
use tokio::sync::OnceCell;
use toml::{Table, Value};

use crate::database::tail;
use crate::http::{self, Response};
use crate::process::{Process, tied};
use crate::{Database, root, wait};

const READY: Duration = Duration::from_secs(60);
const CLI: Duration = Duration::from_secs(120);

static BINARY: OnceCell<PathBuf> = OnceCell::const_new();

/// The program: `OUTBOXD_BIN`, or `target/debug/outboxd`, built now so that it is this source's.
async fn binary() -> Result<&'static PathBuf> {
    BINARY
        .get_or_try_init(|| async {
            if let Some(path) = std::env::var_os("OUTBOXD_BIN") {
                // The program is started from other folders than the one this was meant for.
                return Ok(std::path::absolute(root::project().join(path))?);
            }
            // The whole workspace's choice of features: the same build as `cargo test --workspace`.
            let out = tokio::process::Command::new(
                std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
            )
            .args([
                "build",
                "--quiet",
                "--workspace",
                "--bin",
                "outboxd",
                "--message-format=json",
            ])
            .current_dir(root::project())
            .stdin(Stdio::null())
            .output()
            .await?;
            if !out.status.success() {
                bail!(
                    "building outboxd: {}",
                    tail(&String::from_utf8_lossy(&out.stderr))
                );
            }
            let messages = String::from_utf8(out.stdout)?;
            let path = messages
                .lines()
                .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
                .find_map(|message| message.get("executable")?.as_str().map(PathBuf::from));
            path.context("cargo built no outboxd")
        })
        .await
}

/// A configuration, made of TOML.
#[derive(Debug, Clone)]
pub struct OutboxdConfig {
    table: Table,
}

impl OutboxdConfig {
    /// The default outbox table to exchange `outbox`, routed by event type; name `accept`; a lease of 5 s.
    ///
    /// # Errors
    /// A URL that cannot stand in TOML.
    pub fn new(mysql_url: &str, rabbit_url: &str) -> Result<Self> {
        let table = toml::from_str(
            r#"
            name = "accept"
            mysql = {}
            rabbitmq = {}
            http = {}
            lease = { ttl = "5s" }
            [[outbox]]
            table = "outbox"
            exchange = "outbox"
            routing_key = "{event_type}"
            "#,
        )?;
        Self { table }
            .set("mysql.url", mysql_url)?
            .set("rabbitmq.url", rabbit_url)
    }

    /// Sets one key, such as `("poller.interval", "500ms")` or `("retry.max_retries", 2)`.
    ///
    /// # Errors
    /// Something on the way is not a table.
    pub fn set(mut self, key: &str, value: impl Into<Value>) -> Result<Self> {
        let (path, last) = key.rsplit_once('.').unwrap_or(("", key));
        let mut table = &mut self.table;
        for part in path.split('.').filter(|part| !part.is_empty()) {
            table = table
                .entry(part)
                .or_insert_with(|| Value::Table(Table::new()))
                .as_table_mut()
                .with_context(|| format!("{part} in {key} is not a table"))?;
        }
        table.insert(last.to_owned(), value.into());
        Ok(self)
    }

    /// Takes one key away, if it is there.
    ///
    /// # Errors
    /// Something on the way is not a table.
    pub fn without(mut self, key: &str) -> Result<Self> {
        let (path, last) = key.rsplit_once('.').unwrap_or(("", key));
        let mut table = &mut self.table;
        for part in path.split('.').filter(|part| !part.is_empty()) {
            table = table
                .get_mut(part)
                .and_then(Value::as_table_mut)
                .with_context(|| format!("{part} in {key} is not a table"))?;
        }
        table.remove(last);
        Ok(self)
    }

    /// Puts these keys over what is there, tables merged, everything else (lists of `[[outbox]]` too) replaced.
    ///
    /// # Errors
    /// It is not TOML.
    pub fn with(mut self, toml: &str) -> Result<Self> {
        merge(&mut self.table, toml::from_str(toml)?);
        Ok(self)
    }
}

fn merge(into: &mut Table, from: Table) {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => merge(old, new),
            (_, value) => {
                into.insert(key, value);
            }
        }
    }
}

/// What a command said.
#[derive(Debug, Clone)]
pub struct Output {
    /// Its exit code; none if a signal ended it.
    pub code: Option<i32>,
    /// What it printed.
    pub stdout: String,
    /// What it complained about.
    pub stderr: String,
}

/// One instance of the program, running or not. Dropping it kills it.
#[derive(Debug)]
pub struct Outboxd {
    /// Where its HTTP listens on 127.0.0.1.
    pub http_port: u16,
    folder: TempDir,
    env: Vec<(String, String)>,
    process: Option<Process>,
}

impl Outboxd {
    /// Writes the configuration, with an HTTP port of its own; starts nothing.
    ///
    /// # Errors
    /// No folder or port.
    pub fn new(config: OutboxdConfig) -> Result<Self> {
        let http_port = root::free_port()?;
        let config = config.set("http.listen", format!("127.0.0.1:{http_port}"))?;
        let folder = TempDir::with_prefix("outboxd-test-")?;
        std::fs::write(
            folder.path().join("outboxd.toml"),
            toml::to_string(&config.table)?,
        )?;
        Ok(Self {
            http_port,
            folder,
            env: Vec::new(),
            process: None,
        })
    }

    /// Another environment variable for everything started from now on.
    pub fn env(&mut self, name: &str, value: &str) {
        self.env.push((name.into(), value.into()));
    }

    /// The configuration's file.
    #[must_use]
    pub fn config_path(&self) -> PathBuf {
        self.folder.path().join("outboxd.toml")
    }

    /// Starts the daemon. It may not be ready yet.
    ///
    /// # Errors
    /// It runs already; there is no program.
    pub async fn start(&mut self) -> Result<()> {
        if let Some(process) = &mut self.process
            && process.ended()?.is_none()
        {
            bail!("outboxd runs already");
        }
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log_path())?;
        let mut command = tied(binary().await?);
        command.arg("--config").arg(self.config_path()).arg("run");
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command
            .current_dir(self.folder.path())
            .stdout(log.try_clone()?)
            .stderr(log);
        self.process = Some(Process::spawn(command, false)?);
        Ok(())
    }

    /// Waits until `/readyz` says 200.
    ///
    /// # Errors
    /// It ended, or is not ready after 60 s; with the end of its log.
    pub async fn wait_ready(&mut self) -> Result<()> {
        let mut ended = None;
        let waited = wait::until("outboxd is ready", READY, async || {
            ended = self
                .process
                .as_mut()
                .and_then(|process| process.ended().ok().flatten());
            ended.is_some() || matches!(self.get("/readyz").await, Ok(Response { status: 200, .. }))
        })
        .await;
        match ended {
            Some(status) => bail!("outboxd ended ({status}): {}", tail(&self.log())),
            None => waited.with_context(|| tail(&self.log())),
        }
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join("outboxd.log")
    }

    /// All that it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read(self.log_path())
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    fn running(&mut self) -> Result<&mut Process> {
        self.process
            .as_mut()
            .ok_or_else(|| anyhow!("outboxd was not started"))
    }

    /// Its process id.
    ///
    /// # Errors
    /// It was not started.
    pub fn pid(&mut self) -> Result<u32> {
        self.running()?.pid()
    }

    /// Its exit status if it has ended.
    ///
    /// # Errors
    /// It was not started.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.running()?.ended()
    }

    /// SIGKILL.
    ///
    /// # Errors
    /// It was not started.
    pub fn kill9(&mut self) -> Result<()> {
        self.running()?.kill9()
    }

    /// SIGTERM, and its exit status.
    ///
    /// # Errors
    /// It does not end within 60 s.
    pub async fn terminate(&mut self) -> Result<ExitStatus> {
        self.running()?.terminate(READY).await
    }

    /// SIGSTOP.
    ///
    /// # Errors
    /// It does not run.
    pub fn freeze(&mut self) -> Result<()> {
        self.running()?.pause()
    }

    /// SIGCONT.
    ///
    /// # Errors
    /// It does not run.
    pub fn thaw(&mut self) -> Result<()> {
        self.running()?.resume()
    }

    /// Runs a command of the program with this configuration.
    ///
    /// # Errors
    /// It takes longer than two minutes.
    pub async fn cli(&self, args: &[&str]) -> Result<Output> {
        self.cli_env(args, &[]).await
    }

    /// The same with more environment variables.
    ///
    /// # Errors
    /// It takes longer than two minutes.
    pub async fn cli_env(&self, args: &[&str], env: &[(&str, &str)]) -> Result<Output> {
        let mut command = tokio::process::Command::new(binary().await?);
        command.arg("--config").arg(self.config_path()).args(args);
        command
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .envs(env.iter().copied());
        command
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let out = tokio::time::timeout(CLI, command.output())
            .await
            .with_context(|| format!("outboxd {} hangs", args.join(" ")))??;
        Ok(Output {
            code: out.status.code(),
            stdout: String::from_utf8(out.stdout)?,
            stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
        })
    }

    /// Runs a command that has to end with 0, and returns what it printed.
    ///
    /// # Errors
    /// Another exit code, with what it said.
    pub async fn ok(&self, args: &[&str]) -> Result<String> {
        expect_zero(args, self.cli(args).await?)
    }

    /// `outboxd migrate ARGS` as the user `migrator`.
    ///
    /// # Errors
    /// As [`Self::ok`].
    pub async fn migrate(&self, database: &Database, args: &[&str]) -> Result<String> {
        let all = [&["migrate"], args].concat();
        let url = database.url("migrator");
        expect_zero(
            &all,
            self.cli_env(&all, &[("OUTBOXD__MYSQL__URL", &url)]).await?,
        )
    }

    /// `outboxd status --json`.
    ///
    /// # Errors
    /// As [`Self::ok`], or it is not JSON.
    pub async fn status(&self) -> Result<serde_json::Value> {
        let text = self.ok(&["status", "--json"]).await?;
        serde_json::from_str(&text).with_context(|| format!("not JSON: {text}"))
    }

    /// HTTP GET.
    ///
    /// # Errors
    /// No answer.
    pub async fn get(&self, path: &str) -> Result<Response> {
        http::request(self.http_port, "GET", path, &[], "").await
    }

    /// HTTP POST of JSON.
    ///
    /// # Errors
    /// No answer.
    pub async fn post(&self, path: &str, headers: &[(&str, &str)], body: &str) -> Result<Response> {
        let headers = [&[("content-type", "application/json")], headers].concat();
        http::request(self.http_port, "POST", path, &headers, body).await
    }

    /// The sum of all series of a metric whose line starts with `prefix`, such as `outboxd_published_total{`.
    ///
    /// # Errors
    /// No answer, or a value that is not a number.
    pub async fn metric(&self, prefix: &str) -> Result<f64> {
        let page = self.get("/metrics").await?.body;
        let values = page
            .lines()
            .filter(|line| line.starts_with(prefix))
            .filter_map(|line| line.rsplit(' ').next());
        values
            .map(|value| value.parse::<f64>().with_context(|| value.to_owned()))
            .sum()
    }
}

fn expect_zero(args: &[&str], out: Output) -> Result<String> {
    if out.code != Some(0) {
        bail!(
            "outboxd {}: exit {:?}\n{}\n{}",
            args.join(" "),
            out.code,
            out.stdout,
            out.stderr
        );
    }
    Ok(out.stdout)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_configuration_is_merged_key_by_key_and_lists_are_replaced() {
        let config = OutboxdConfig::new("mysql://a", "amqp://b").unwrap();
        let config = config.set("retry.max_retries", 2).unwrap();
        let config = config
            .with("name = \"x\"\nretry.base = \"1s\"\n[[outbox]]\ntable = \"events\"")
            .unwrap();
        let retry = config.table["retry"].as_table().unwrap();
        assert_eq!(
            (retry["max_retries"].as_integer(), retry["base"].as_str()),
            (Some(2), Some("1s"))
        );
        assert_eq!(config.table["outbox"].as_array().unwrap().len(), 1);
        assert_eq!(config.table["outbox"][0].get("exchange"), None);
        assert_eq!(config.table["mysql"]["url"].as_str(), Some("mysql://a"));
        assert!(config.set("name.deeper", 1).is_err());
    }
}
