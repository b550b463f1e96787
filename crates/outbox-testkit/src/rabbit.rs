//! A RabbitMQ node of a test's own.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;

use crate::database::tail;
use crate::process::{Process, contained};
use crate::root;

const START: Duration = Duration::from_secs(90);
const STOP: Duration = Duration::from_secs(60);

static SHARED: OnceCell<Arc<Rabbit>> = OnceCell::const_new();

/// One node. Dropping it kills it and removes its data.
#[derive(Debug)]
pub struct Rabbit {
    /// Where it listens on 127.0.0.1.
    pub port: u16,
    dist: u16,
    epmd: u16,
    name: String,
    root: &'static Path,
    process: Option<Process>,
}

impl Rabbit {
    /// Starts a node and waits until it answers.
    ///
    /// # Errors
    /// The node's log, if it does not start.
    pub async fn start() -> Result<Self> {
        Self::start_with("").await
    }

    /// Starts a node with these lines in its `rabbitmq.conf`.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_with(config: &str) -> Result<Self> {
        let root = root::servers().await?;
        let _starting = root::STARTING.acquire().await?;
        let name = root::unique("rabbit");
        let mut node = Self {
            port: 0,
            dist: 0,
            epmd: 0,
            name,
            root,
            process: None,
        };
        std::fs::create_dir_all(node.data())?;
        std::fs::write(node.data().join("rabbitmq.conf"), config)?;
        for _ in 0..5 {
            (node.port, node.dist, node.epmd) =
                (root::free_port()?, root::free_port()?, root::free_port()?);
            node.spawn()?;
            match node.wait_ready().await {
                Ok(()) => return Ok(node),
                Err(error) if node.log().contains("eaddrinuse") => {
                    tracing::debug!(%error, "another program took a port");
                }
                Err(error) => return Err(error),
            }
        }
        bail!("RabbitMQ found no free ports in five attempts")
    }

    /// One node for all tests of this process that do it no harm; it lives as long as the process. Use exchange and
    /// queue names of your own.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn shared() -> Result<Arc<Self>> {
        SHARED
            .get_or_try_init(|| async { Ok(Arc::new(Self::start().await?)) })
            .await
            .cloned()
    }

    fn data(&self) -> PathBuf {
        self.root.join("srv").join(&self.name)
    }

    /// Its log since the last start.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read(self.data().join("node.log"))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    fn command(&self, program: &str) -> Command {
        let folder = format!("/srv/{}", self.name);
        let mut command = contained(Some(self.root), program);
        command
            .env_clear()
            .env(
                "PATH",
                "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            )
            // The cookie is made there: a shared one is a race between two first starts.
            .env("HOME", &folder)
            .env("LANG", "C.UTF-8")
            .env("RABBITMQ_NODENAME", format!("{}@localhost", self.name))
            .env("RABBITMQ_NODE_PORT", self.port.to_string())
            .env("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_DIST_PORT", self.dist.to_string())
            .env("RABBITMQ_MNESIA_BASE", &folder)
            .env("RABBITMQ_CONFIG_FILE", format!("{folder}/rabbitmq.conf"))
            .env(
                "RABBITMQ_ENABLED_PLUGINS_FILE",
                format!("{folder}/enabled_plugins"),
            )
            .env("RABBITMQ_LOGS", "-")
            // A name server of its own, in its own namespace: it dies with the node and nobody else depends on it.
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("ERL_EPMD_PORT", self.epmd.to_string())
            // No shell between us and the node: signals reach the node itself.
            .env("RUNNING_UNDER_SYSTEMD", "true");
        command
    }

    fn spawn(&mut self) -> Result<()> {
        let log = std::fs::File::create(self.data().join("node.log"))?;
        let mut command = self.command("/usr/lib/rabbitmq/bin/rabbitmq-server");
        command.stdout(log.try_clone()?).stderr(log);
        self.process = Some(Process::spawn(command, true)?);
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
            // It listens once it has booted. Somebody else's node may have been faster on this port.
            match self.greeting().await {
                Ok(greeting)
                    if greeting
                        .windows(self.name.len())
                        .any(|part| part == self.name.as_bytes()) =>
                {
                    return Ok(());
                }
                Ok(_) => tracing::debug!("another node answers on this port"),
                Err(error) if tokio::time::Instant::now() > end => {
                    return Err(error.context(format!(
                        "{} does not answer: {}",
                        self.name,
                        tail(&self.log())
                    )));
                }
                Err(_) => {}
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// What the node says to a client that knocks: Connection.Start, in which its name stands.
    async fn greeting(&self) -> Result<Vec<u8>> {
        let knock = async {
            let mut socket = TcpStream::connect(("127.0.0.1", self.port)).await?;
            socket.write_all(b"AMQP\x00\x00\x09\x01").await?;
            let mut header = [0; 7];
            socket.read_exact(&mut header).await?;
            let [_, _, _, a, b, c, d] = header;
            let mut body = vec![0; usize::try_from(u32::from_be_bytes([a, b, c, d]))?.min(65_536)];
            socket.read_exact(&mut body).await?;
            anyhow::Ok(body)
        };
        tokio::time::timeout(Duration::from_secs(5), knock)
            .await
            .context("no greeting")?
    }

    /// `rabbitmqctl` with these arguments; returns what it printed.
    ///
    /// # Errors
    /// What it said, if it fails.
    pub async fn ctl(&self, args: &[&str]) -> Result<String> {
        let mut command = self.command("/usr/lib/rabbitmq/bin/rabbitmqctl");
        command.args(args).stdin(Stdio::null());
        let out = tokio::process::Command::from(command)
            .kill_on_drop(true)
            .output()
            .await?;
        if !out.status.success() {
            bail!(
                "rabbitmqctl {}: {}",
                args.join(" "),
                String::from_utf8_lossy(&out.stderr).trim()
            );
        }
        Ok(String::from_utf8(out.stdout)?)
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

    /// Starts it again on the same ports and data, after [`Self::kill9`] or [`Self::stop`].
    ///
    /// # Errors
    /// It runs already, or does not start.
    pub async fn restart(&mut self) -> Result<()> {
        if let Some(process) = &mut self.process
            && process.ended()?.is_none()
        {
            bail!("{} still runs", self.name);
        }
        self.spawn()?;
        self.wait_ready().await
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

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> String {
        Self::url_through(self.port)
    }

    /// The URL through another port of loopback, such as a proxy's.
    #[must_use]
    pub fn url_through(port: u16) -> String {
        format!("amqp://guest:guest@127.0.0.1:{port}/%2f")
    }

    /// A new connection, without recovery.
    ///
    /// # Errors
    /// The node's.
    pub async fn connect(&self) -> Result<Connection> {
        connect(&self.url()).await
    }

    /// A durable topic exchange, a durable quorum queue, and a binding between them.
    ///
    /// # Errors
    /// The node's.
    pub async fn topology(&self, exchange: &str, queue: &str, binding: &str) -> Result<()> {
        let connection = self.connect().await?;
        let channel = connection.create_channel().await?;
        declare_exchange(&channel, exchange).await?;
        declare_queue(&channel, queue).await?;
        bind(&channel, exchange, queue, binding).await?;
        connection.close(200, "done".into()).await?;
        Ok(())
    }

    /// Runs something on a channel of a connection of its own.
    ///
    /// # Errors
    /// The node's, or what `work` returned.
    pub async fn with_channel<T>(
        &self,
        work: impl AsyncFnOnce(&Channel) -> Result<T>,
    ) -> Result<T> {
        let connection = self.connect().await?;
        let channel = connection.create_channel().await?;
        let result = work(&channel).await;
        // The channel's error is the interesting one, not that of closing what it has broken.
        let _ = connection.close(200, "done".into()).await;
        result
    }

    /// How many messages are ready in a queue.
    ///
    /// # Errors
    /// The node's; the queue does not exist.
    pub async fn depth(&self, queue: &str) -> Result<u32> {
        self.with_channel(async |channel| {
            let options = QueueDeclareOptions {
                passive: true,
                ..QueueDeclareOptions::default()
            };
            let queue = channel
                .queue_declare(queue.into(), options, FieldTable::default())
                .await?;
            Ok(queue.message_count())
        })
        .await
    }
}

impl Drop for Rabbit {
    fn drop(&mut self) {
        self.process = None;
        if let Err(error) = std::fs::remove_dir_all(self.data()) {
            tracing::warn!(%error, "a test's data folder was left behind");
        }
    }
}

/// A connection to any AMQP URL, without recovery, within 10 s.
///
/// # Errors
/// The node's.
pub async fn connect(url: &str) -> Result<Connection> {
    let connect = Connection::connect(url, ConnectionProperties::default());
    Ok(tokio::time::timeout(Duration::from_secs(10), connect)
        .await
        .context("connecting took too long")??)
}

/// Declares a durable topic exchange.
///
/// # Errors
/// The node's.
pub async fn declare_exchange(channel: &Channel, exchange: &str) -> Result<()> {
    let options = ExchangeDeclareOptions {
        durable: true,
        ..ExchangeDeclareOptions::default()
    };
    channel
        .exchange_declare(
            exchange.into(),
            ExchangeKind::Topic,
            options,
            FieldTable::default(),
        )
        .await?;
    Ok(())
}

/// Declares a durable quorum queue.
///
/// # Errors
/// The node's.
pub async fn declare_queue(channel: &Channel, queue: &str) -> Result<()> {
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    let mut arguments = FieldTable::default();
    arguments.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("quorum".into()),
    );
    channel
        .queue_declare(queue.into(), options, arguments)
        .await?;
    Ok(())
}

/// Binds a queue to an exchange.
///
/// # Errors
/// The node's.
pub async fn bind(channel: &Channel, exchange: &str, queue: &str, binding: &str) -> Result<()> {
    channel
        .queue_bind(
            queue.into(),
            exchange.into(),
            binding.into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await?;
    Ok(())
}
