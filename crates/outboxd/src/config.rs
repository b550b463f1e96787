//! The configuration: a TOML file, overlaid by the environment, parsed into types that cannot be
//! wrong, with every mistake reported at once.

#[cfg(test)]
mod docs;
mod outbox;
mod reader;
mod sections;
mod show;
mod source;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use outbox_core::retry::RetryPolicy;
use outbox_core::spec::TableSpec;
use secrecy::SecretString;

pub use show::print;
pub use source::load;

/// Everything that is configured, validated.
#[derive(Debug)]
pub struct Config {
    /// One lease and one position per name; `app_id` of messages.
    pub name: String,
    /// Who this instance is.
    pub instance: String,
    /// `[mysql]`.
    pub mysql: Mysql,
    /// `[[outbox]]`, at least one.
    pub outbox: Vec<Arc<TableSpec>>,
    /// `[rabbitmq]`.
    pub rabbitmq: Rabbitmq,
    /// `[retry]`.
    pub retry: RetryPolicy,
    /// `[poller]`.
    pub poller: Poller,
    /// `[stuck]`.
    pub stuck: Stuck,
    /// `[tail]`.
    pub tail: Tail,
    /// `[lease]`: time after which a silent leader is replaced.
    pub lease_ttl: Duration,
    /// `[retention]`: age at which sent rows are deleted.
    pub sent_after: Option<Duration>,
    /// `[http]`.
    pub http: Http,
    /// `[log]`.
    pub log: Log,
    /// Every key as it is in effect, for `config --print`.
    pub shown: Vec<reader::Shown>,
}

/// A URL with a password: in the configuration, or in a file that is read on every connect.
#[derive(Clone, Debug)]
pub enum UrlSource {
    /// `url`.
    Inline(SecretString),
    /// `url_file`.
    File(PathBuf),
}

/// `ssl_mode` of the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SslMode {
    /// Never encrypted.
    Disabled,
    /// Encrypted where the server can, unverified.
    Preferred,
    /// Encrypted, unverified.
    Required,
    /// Encrypted, the certificate verified against the CA.
    VerifyCa,
    /// As `VerifyCa`, and the host name.
    VerifyIdentity,
}

/// PEM files.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)] // the names are those of the configuration
pub struct TlsFiles {
    pub ssl_ca: Option<PathBuf>,
    pub ssl_cert: Option<PathBuf>,
    pub ssl_key: Option<PathBuf>,
}

/// `[mysql]`.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the names are those of the configuration
pub struct Mysql {
    pub url: UrlSource,
    pub replica_url: Option<SecretString>,
    pub schema: String,
    pub ssl_mode: SslMode,
    pub tls: TlsFiles,
    /// 0: derived from name and database.
    pub server_id: u32,
    pub time_zone: Option<String>,
    pub heartbeat: Duration,
}

/// `declare_exchange`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names are those of AMQP
pub enum ExchangeKind {
    Topic,
    Direct,
    Fanout,
    Headers,
}

/// `[rabbitmq]`.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the names are those of the configuration
pub struct Rabbitmq {
    pub url: UrlSource,
    pub tls: TlsFiles,
    pub declare_exchange: Option<ExchangeKind>,
    pub max_in_flight: usize,
    pub max_in_flight_bytes: usize,
    pub confirm_timeout: Duration,
}

/// `[poller]`.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the names are those of the configuration
pub struct Poller {
    pub enabled: bool,
    pub sweep_rate: Option<u32>,
    pub interval: Duration,
    pub degraded_interval: Duration,
    pub batch: usize,
    pub pending_grace: Duration,
    pub lock_ttl: Duration,
}

/// `[stuck]`.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the names are those of the configuration
pub struct Stuck {
    pub interval: Duration,
    pub warn_after: Duration,
    pub reset_after: Duration,
    pub backlog_warn: u64,
}

/// `[tail]`.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the names are those of the configuration
pub struct Tail {
    pub enabled: bool,
    pub flush_interval: Duration,
    pub flush_rows: usize,
    pub checkpoint_interval: Duration,
    pub verify_after: Duration,
    pub max_transaction_bytes: usize,
}

/// `[http]`.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the names are those of the configuration
pub struct Http {
    pub listen: SocketAddr,
    pub token: Option<SecretString>,
}

/// `log.format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object on each line.
    Json,
}

/// `[log]`.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the names are those of the configuration
pub struct Log {
    pub format: LogFormat,
    pub level: String,
}
