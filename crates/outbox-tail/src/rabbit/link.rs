//! One connection with one channel in confirm mode.
//!
//! TCP and TLS are ours, so that lapin starts its thread only for a socket that is connected, and
//! so that we keep a handle of the socket: cutting it ends lapin's thread whatever it waits for
//! (a silent port, a blocked broker, a close that nobody answers).

use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::Stream;
use lapin::options::{ConfirmSelectOptions, ExchangeDeclareOptions};
use lapin::tcp::{AsyncTcpStream, OwnedTLSConfig};
use lapin::types::{FieldTable, ShortString};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{Channel, Connection, ConnectionProperties, Event, ExchangeKind};
use outbox_core::ports::chain;
use secrecy::{ExposeSecret, SecretString};
use tokio::time::timeout;

use super::classify::{Loss, loss};
use super::tls::{self, TlsError};
use super::{ExchangeType, RabbitConfig, Urls};

/// Why there is no connection. Names the server, never a credential.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The URL file cannot be read.
    #[error("cannot read the url file {}", path.display())]
    UrlFile {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not a URL. The text is not shown: it may hold a password.
    #[error("url {index} of rabbitmq.url is not an amqp or amqps url")]
    Url {
        /// Which one, from 1.
        index: usize,
    },
    /// The TLS files are unusable.
    #[error("tls files")]
    Tls(#[from] TlsError),
    /// Name resolution, TCP or TLS failed.
    #[error("{server}")]
    Io {
        /// Host and port.
        server: String,
        /// Why.
        source: std::io::Error,
    },
    /// The broker refused, or hung up.
    #[error("{server}: {doing}")]
    Amqp {
        /// Host and port.
        server: String,
        /// What was being done.
        doing: &'static str,
        /// Why.
        source: lapin::Error,
    },
    /// No answer in time.
    #[error("{server}: no answer to {doing} within {after:?}")]
    Timeout {
        /// Host and port.
        server: String,
        /// What was being done.
        doing: &'static str,
        /// The deadline.
        after: Duration,
    },
    /// A configured exchange is not usable.
    #[error("{server}: exchange {name:?} {problem}")]
    Exchange {
        /// Host and port.
        server: String,
        /// The exchange.
        name: String,
        /// What is the matter.
        problem: String,
    },
    /// No server could be used; each with its reason.
    #[error("{0}")]
    All(String),
}

/// Cuts the socket when dropped.
struct Socket(TcpStream);

impl Drop for Socket {
    fn drop(&mut self) {
        // It may be closed already, which is as good.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

pub(super) struct Link {
    pub(super) channel: Arc<Channel>,
    pub(super) connection: Arc<Connection>,
    pub(super) events: Pin<Box<dyn Stream<Item = Event> + Send>>,
    pub(super) server: String,
    /// Largest frame, in bytes.
    pub(super) frame_max: usize,
    socket: Socket,
}

impl Link {
    /// Tries each URL, and each address of it, in turn.
    pub(super) async fn open(config: &RabbitConfig) -> Result<Self, LinkError> {
        let mut errors = Vec::new();
        for uri in uris(config).await? {
            let server = format!("{}:{}", uri.authority.host, uri.authority.port);
            let tls = match uri.scheme {
                AMQPScheme::AMQP => None,
                AMQPScheme::AMQPS => Some(tls::config(&config.tls)?),
            };
            let addresses = match resolve(&uri, &server, config.connect_timeout).await {
                Ok(addresses) => addresses,
                Err(error) => {
                    errors.push(error);
                    continue;
                }
            };
            for address in addresses {
                match Box::pin(connect(config, &uri, tls.as_ref(), &server, address)).await {
                    Ok(link) => return Ok(link),
                    // What the broker says of the exchanges, another address would say as well.
                    Err(error @ LinkError::Exchange { .. }) => return Err(error),
                    Err(error) => errors.push(error),
                }
            }
        }
        if errors.len() == 1
            && let Some(only) = errors.pop()
        {
            return Err(only);
        }
        let texts: Vec<String> = errors.iter().map(|e| chain(e)).collect();
        Err(LinkError::All(texts.join("; ")))
    }

    pub(super) fn alive(&self) -> bool {
        self.connection.status().connected() && self.channel.status().connected()
    }

    /// Says good-bye, for at most `polite`, and cuts the socket. A blocked connection cannot
    /// even say that much: lapin writes nothing on it.
    pub(super) async fn close(self, polite: Duration) {
        if self.connection.status().connected() {
            let bye = self.connection.close(200, "bye".into());
            let _ = timeout(polite, bye).await;
        }
        drop(self.socket);
    }
}

async fn uris(config: &RabbitConfig) -> Result<Vec<AMQPUri>, LinkError> {
    let text = match &config.urls {
        Urls::Inline(text) => text.clone(),
        Urls::File(path) => match tokio::fs::read_to_string(path).await {
            Ok(text) => SecretString::from(text),
            Err(source) => {
                let path = path.clone();
                return Err(LinkError::UrlFile { path, source });
            }
        },
    };
    let seconds = u16::try_from(config.heartbeat.as_secs()).unwrap_or(u16::MAX);
    let mut uris = Vec::new();
    for (i, url) in text.expose_secret().split(',').enumerate() {
        let parsed: Result<AMQPUri, String> = url.trim().parse();
        let mut uri = parsed.map_err(|_| LinkError::Url { index: i + 1 })?;
        uri.query.heartbeat.get_or_insert(seconds.max(1));
        uris.push(uri);
    }
    Ok(uris)
}

async fn resolve(
    uri: &AMQPUri,
    server: &str,
    deadline: Duration,
) -> Result<Vec<SocketAddr>, LinkError> {
    let host = uri.authority.host.trim_matches(['[', ']']);
    let lookup = tokio::net::lookup_host((host, uri.authority.port));
    let found = step(server, "name resolution", deadline, lookup).await?;
    match found {
        Ok(addresses) => Ok(addresses.collect()),
        Err(source) => Err(LinkError::Io {
            server: server.to_owned(),
            source,
        }),
    }
}

/// One step under its deadline.
async fn step<F: Future>(
    server: &str,
    doing: &'static str,
    after: Duration,
    work: F,
) -> Result<F::Output, LinkError> {
    timeout(after, work).await.map_err(|_| LinkError::Timeout {
        server: server.to_owned(),
        doing,
        after,
    })
}

async fn connect(
    config: &RabbitConfig,
    uri: &AMQPUri,
    tls: Option<&OwnedTLSConfig>,
    server: &str,
    address: SocketAddr,
) -> Result<Link, LinkError> {
    let after = config.connect_timeout;
    let io = |source| LinkError::Io {
        server: server.to_owned(),
        source,
    };
    let amqp = |doing| {
        move |source| LinkError::Amqp {
            server: server.to_owned(),
            doing,
            source,
        }
    };
    let runtime = lapin::runtime::default_runtime().map_err(amqp("start"))?;
    let tcp = AsyncTcpStream::connect(&runtime, address);
    let stream = step(server, "the tcp connect", after, tcp)
        .await?
        .map_err(io)?;
    let AsyncTcpStream::Plain(plain) = &stream else {
        return Err(io(std::io::Error::other("not a plain stream")));
    };
    let descriptor = plain.get_ref().as_fd().try_clone_to_owned().map_err(io)?;
    let socket = Socket(TcpStream::from(descriptor));
    let stream = match tls {
        None => stream,
        Some(tls) => {
            let host = uri.authority.host.as_str();
            let handshake = stream.into_tls(host, tls.as_ref());
            step(server, "the tls handshake", after, handshake)
                .await?
                .map_err(io)?
        }
    };

    let stream = Mutex::new(Some(stream));
    let take = async move |_: AMQPUri, _| {
        // lapin would ask again only to reconnect by itself, which is off.
        let taken = stream.lock().unwrap_or_else(|e| e.into_inner()).take();
        taken.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotConnected).into())
    };
    let name = config.connection_name.as_str().into();
    let properties = ConnectionProperties::default().with_connection_name(name);
    let login = Connection::connector(uri.clone(), runtime, take, properties);
    let connection = step(server, "the login", after, login)
        .await?
        .map_err(amqp("login"))?;
    let events = Box::pin(connection.events_listener());

    declare(config, &connection, server).await?;
    let open = connection.create_channel();
    let channel = step(server, "the channel's opening", after, open)
        .await?
        .map_err(amqp("open a channel"))?;
    let select = channel.confirm_select(ConfirmSelectOptions::default());
    step(server, "confirm mode", after, select)
        .await?
        .map_err(amqp("confirm mode"))?;
    let frame_max = usize::try_from(connection.configuration().frame_max()).unwrap_or(usize::MAX);
    Ok(Link {
        channel: Arc::new(channel),
        connection: Arc::new(connection),
        events,
        server: server.to_owned(),
        frame_max,
        socket,
    })
}

/// Declares or checks the configured exchanges, on a channel of its own: a refusal closes it.
async fn declare(
    config: &RabbitConfig,
    connection: &Connection,
    server: &str,
) -> Result<(), LinkError> {
    for name in config.exchanges.iter().filter(|n| !n.is_empty()) {
        let mut passive = config.declare.is_none();
        loop {
            let kind = config.declare.unwrap_or(ExchangeType::Topic);
            let asked = declare_one(connection, name, kind, passive);
            let deadline = config.connect_timeout;
            let answer = step(server, "an exchange's declaration", deadline, asked).await?;
            let Err(error) = answer else { break };
            let problem = match loss(&error) {
                // Not allowed to create it; it may be there all the same.
                Loss::Exchange { missing: false, .. } if !passive => {
                    passive = true;
                    continue;
                }
                Loss::Exchange { missing: true, .. } => "is missing".to_owned(),
                Loss::Exchange { text, .. } => format!("is refused: {text}"),
                Loss::Suspect(text) => format!("exists with other properties: {text}"),
                other if error.is_amqp_soft_error() => other.text().to_owned(),
                _ => {
                    return Err(LinkError::Amqp {
                        server: server.to_owned(),
                        doing: "declare an exchange",
                        source: error,
                    });
                }
            };
            return Err(LinkError::Exchange {
                server: server.to_owned(),
                name: name.clone(),
                problem,
            });
        }
    }
    Ok(())
}

/// Declares one exchange, durable, or asks whether it is there.
pub(super) async fn declare_one(
    connection: &Connection,
    name: &str,
    kind: ExchangeType,
    passive: bool,
) -> lapin::Result<()> {
    let Ok(name) = ShortString::try_new(name) else {
        return Err(std::io::Error::other("an exchange's name over 255 bytes").into());
    };
    let channel = connection.create_channel().await?;
    let kind = match kind {
        ExchangeType::Topic => ExchangeKind::Topic,
        ExchangeType::Direct => ExchangeKind::Direct,
        ExchangeType::Fanout => ExchangeKind::Fanout,
        ExchangeType::Headers => ExchangeKind::Headers,
    };
    let options = ExchangeDeclareOptions {
        passive,
        durable: true,
        ..ExchangeDeclareOptions::default()
    };
    channel
        .exchange_declare(name, kind, options, FieldTable::default())
        .await?;
    channel.close(200, "done".into()).await
}
