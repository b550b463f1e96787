//! Connecting: secrets read anew every time, TLS, session settings, the dump itself.

use std::path::PathBuf;
use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{
    BinlogStream, BinlogStreamRequest, ClientIdentity, Conn, DriverError, Opts, OptsBuilder, Sid,
    SslOpts,
};
use openssl::pkcs12::Pkcs12;
use openssl::pkey::PKey;
use openssl::stack::Stack;
use openssl::x509::X509;
use outbox_core::Position;
use outbox_core::gtid::mariadb::GtidList;
use secrecy::{ExposeSecret, SecretString};

use super::error::StreamError;
use super::facts::{self, Family, ServerFacts};

/// Where the connection URL comes from.
#[derive(Clone, Debug)]
pub enum UrlSource {
    /// Given.
    Inline(SecretString),
    /// A file that holds it, read again on every connect.
    File(PathBuf),
}

/// How the connection is encrypted; the words are MySQL's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SslMode {
    /// Never.
    Disabled,
    /// Where the server can.
    #[default]
    Preferred,
    /// Always; the server's certificate is not verified.
    Required,
    /// Always, with a certificate of the given CA.
    VerifyCa,
    /// Always, with a certificate of the given CA for this host.
    VerifyIdentity,
}

/// TLS settings; files are PEM, read again on every connect.
#[derive(Clone, Debug, Default)]
pub struct StreamTls {
    /// `ssl_mode`.
    pub mode: SslMode,
    /// `ssl_ca`, may be a bundle.
    pub ca: Option<PathBuf>,
    /// `ssl_cert`, may be followed by its chain.
    pub cert: Option<PathBuf>,
    /// `ssl_key`.
    pub key: Option<PathBuf>,
}

/// Settings of the replication stream.
#[derive(Clone, Debug)]
pub struct StreamConfig {
    /// `mysql://user:password@host:port/schema`; parameters of the URL are not looked at.
    pub url: UrlSource,
    /// TLS.
    pub tls: StreamTls,
    /// Must differ from that of every other reader of this server.
    pub server_id: u32,
    /// How often the server says that it is alive; three periods of silence are a dead link.
    pub heartbeat: Duration,
    /// Limit of every single step of connecting.
    pub connect_timeout: Duration,
    /// Bytes of outbox rows that one transaction may hold in memory.
    pub max_transaction_bytes: usize,
    /// Seconds east of UTC of the tables' DATETIME columns.
    pub zone_offset: i32,
    /// The database of the `outboxd_*` tables.
    pub own_schema: String,
    /// When the position that is opened first was stored, microseconds since the epoch by the
    /// server's clock, if known: lets a reset of the server be told from a continued history.
    pub position_stored_at: Option<i64>,
}

impl StreamConfig {
    /// Settings with the defaults of the configuration.
    #[must_use]
    pub fn new(url: UrlSource, server_id: u32, own_schema: impl Into<String>) -> Self {
        Self {
            url,
            tls: StreamTls::default(),
            server_id,
            heartbeat: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(10),
            max_transaction_bytes: 64 << 20,
            zone_offset: 0,
            own_schema: own_schema.into(),
            position_stored_at: None,
        }
    }
}

/// Runs one step under its deadline.
pub(crate) async fn within<T, E>(
    limit: Duration,
    operation: &'static str,
    step: impl Future<Output = Result<T, E>>,
) -> Result<T, StreamError>
where
    E: Into<mysql_async::Error>,
{
    match tokio::time::timeout(limit, step).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => Err(classify(operation, e.into())),
        Err(_) => Err(StreamError::Timeout { operation, limit }),
    }
}

/// What an error of a statement or of connecting means.
pub(crate) fn classify(operation: &'static str, error: mysql_async::Error) -> StreamError {
    if let mysql_async::Error::Server(e) = &error
        && e.code == 1227
    {
        return StreamError::Halt {
            check: "grants",
            advice: "GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* to the user of mysql.url"
                .to_owned(),
            source: Some(Box::new(error)),
        };
    }
    // Refused passwords included: they are rotated, and the file is read again.
    let source: Box<dyn std::error::Error + Send + Sync> = match error {
        // Its text prints the packet.
        mysql_async::Error::Driver(DriverError::UnexpectedPacket { .. }) => {
            "an unexpected packet".into()
        }
        error => Box::new(error),
    };
    StreamError::Unavailable { operation, source }
}

/// Connects, within the limit of one step.
pub(crate) async fn connect(config: &StreamConfig) -> Result<Conn, StreamError> {
    let limit = config.connect_timeout;
    let opts = options(config).await?;
    let plain = config.tls.mode == SslMode::Preferred && opts.ssl_opts().is_some();
    let conn = tokio::time::timeout(limit, Conn::new(opts.clone())).await;
    match conn {
        Ok(Err(mysql_async::Error::Driver(DriverError::NoClientSslFlagFromServer))) if plain => {
            let opts = OptsBuilder::from_opts(opts).ssl_opts(None::<SslOpts>);
            within(limit, "connecting to the server", Conn::new(opts)).await
        }
        Ok(Ok(conn)) => Ok(conn),
        Ok(Err(e)) => Err(classify("connecting to the server", e)),
        Err(_) => Err(StreamError::Timeout {
            operation: "connecting to the server",
            limit,
        }),
    }
}

async fn options(config: &StreamConfig) -> Result<Opts, StreamError> {
    let url = match &config.url {
        UrlSource::Inline(url) => url.clone(),
        UrlSource::File(path) => {
            let text = tokio::fs::read_to_string(path)
                .await
                .map_err(unreadable_file)?;
            SecretString::from(text.trim().to_owned())
        }
    };
    // Parameters are for other drivers; this one refuses those that it does not know.
    let address = url.expose_secret().split('?').next().unwrap_or_default();
    let opts = Opts::from_url(address).map_err(|_| {
        StreamError::halt(
            "mysql.url",
            "it is not mysql://user:password@host:port/schema",
        )
    })?;
    let tls = tls(&config.tls).await?;
    Ok(OptsBuilder::from_opts(opts)
        .db_name(None::<String>)
        // Else it leaves for the server's socket, whatever the URL says.
        .prefer_socket(false)
        .tcp_keepalive(Some(Duration::from_secs(15)))
        .tcp_nodelay(true)
        // Its own limit would be the server's, which is lower than what a dump may send.
        .max_allowed_packet(Some(1 << 30))
        .wait_timeout(Some(28_800))
        .ssl_opts(tls)
        .into())
}

fn unreadable_file(error: std::io::Error) -> StreamError {
    StreamError::Unavailable {
        operation: "reading a file that mysql settings name",
        source: Box::new(error),
    }
}

async fn tls(tls: &StreamTls) -> Result<Option<SslOpts>, StreamError> {
    if tls.mode == SslMode::Disabled {
        return Ok(None);
    }
    let verify_ca = matches!(tls.mode, SslMode::VerifyCa | SslMode::VerifyIdentity);
    let verify_host = tls.mode == SslMode::VerifyIdentity;
    let mut opts = SslOpts::default()
        .with_danger_accept_invalid_certs(!verify_ca)
        .with_danger_skip_domain_validation(!verify_host);
    if let Some(ca) = &tls.ca {
        let pem = tokio::fs::read(ca).await.map_err(unreadable_file)?;
        // Text between the certificates of a bundle is common, and not for the driver.
        let certs = X509::stack_from_pem(&pem).map_err(|e| bad_pem("mysql.ssl_ca", e))?;
        if certs.is_empty() {
            return Err(StreamError::halt(
                "mysql.ssl_ca",
                "the file holds no certificate",
            ));
        }
        let pem = |c: &X509| c.to_pem().map(Into::into);
        let roots = certs.iter().map(pem).collect::<Result<_, _>>();
        opts = opts
            .with_root_certs(roots.map_err(|e| bad_pem("mysql.ssl_ca", e))?)
            .with_disable_built_in_roots(true);
    }
    match (&tls.cert, &tls.key) {
        (Some(cert), Some(key)) => {
            let cert = tokio::fs::read(cert).await.map_err(unreadable_file)?;
            let key = tokio::fs::read(key).await.map_err(unreadable_file)?;
            let archive = pkcs12(&cert, &key).map_err(|e| bad_pem("mysql.ssl_cert", e))?;
            let identity = ClientIdentity::new(archive.into()).with_password(ARCHIVE_PASSWORD);
            Ok(Some(opts.with_client_identity(Some(identity))))
        }
        (None, None) => Ok(Some(opts)),
        _ => Err(StreamError::halt(
            "mysql.ssl_cert",
            "ssl_cert and ssl_key belong together",
        )),
    }
}

/// The archive never leaves memory; some versions of OpenSSL refuse an empty password.
const ARCHIVE_PASSWORD: &str = "outboxd";

/// The driver takes nothing but PKCS#12.
fn pkcs12(cert: &[u8], key: &[u8]) -> Result<Vec<u8>, openssl::error::ErrorStack> {
    let key = PKey::private_key_from_pem(key)?;
    let mut certs = X509::stack_from_pem(cert)?.into_iter();
    let mut archive = Pkcs12::builder();
    let leaf = match certs.next() {
        Some(leaf) => leaf,
        None => X509::from_pem(cert)?,
    };
    let mut chain = Stack::new()?;
    for cert in certs {
        chain.push(cert)?;
    }
    archive.name("outboxd").pkey(&key).cert(&leaf).ca(chain);
    archive.build2(ARCHIVE_PASSWORD)?.to_der()
}

fn bad_pem(check: &'static str, error: openssl::error::ErrorStack) -> StreamError {
    StreamError::Halt {
        check,
        advice: "the file is not PEM as expected".to_owned(),
        source: Some(Box::new(error)),
    }
}

/// Connects and asks the server what it is, for preflight and status.
pub async fn probe(config: &StreamConfig) -> Result<ServerFacts, StreamError> {
    let mut conn = connect(config).await?;
    let limit = config.connect_timeout;
    let facts = within(
        limit,
        "reading the server's settings",
        facts::read(&mut conn),
    )
    .await?;
    // The answer is there; how the connection ends does not matter.
    let _ = tokio::time::timeout(limit, conn.disconnect()).await;
    Ok(facts)
}

/// Session settings of a dump.
pub(crate) async fn prepare(
    conn: &mut Conn,
    config: &StreamConfig,
    facts: &ServerFacts,
) -> Result<(), StreamError> {
    let limit = config.connect_timeout;
    let period = config.heartbeat.as_nanos();
    let mut settings = vec![
        format!("SET @source_heartbeat_period = {period}, @master_heartbeat_period = {period}"),
        "SET @source_binlog_checksum = @@GLOBAL.binlog_checksum".to_owned(),
    ];
    if facts.family == Family::Mariadb {
        // Without it the server rewrites GTID events for readers of another age.
        settings.push("SET @mariadb_slave_capability = 4".to_owned());
    }
    for sql in settings {
        within(limit, "preparing the binlog stream", conn.query_drop(sql)).await?;
    }
    // While the window is full nothing is read for long, and the server must not give up on us.
    // Some versions want a privilege for it; the window closes the dump in time anyway.
    let patient = "SET SESSION net_write_timeout = GREATEST(@@SESSION.net_write_timeout, 600)";
    match within(
        limit,
        "preparing the binlog stream",
        conn.query_drop(patient),
    )
    .await
    {
        Err(StreamError::Halt { .. }) | Ok(()) => Ok(()),
        Err(StreamError::Unavailable { source, .. }) if is_server_error(&*source) => Ok(()),
        Err(e) => Err(e),
    }
}

fn is_server_error(error: &(dyn std::error::Error + 'static)) -> bool {
    matches!(error.downcast_ref(), Some(mysql_async::Error::Server(_)))
}

/// Asks for everything behind `after`.
pub(crate) async fn dump(
    mut conn: Conn,
    config: &StreamConfig,
    after: &Position,
) -> Result<BinlogStream, StreamError> {
    let request = BinlogStreamRequest::new(config.server_id);
    let request = match after {
        Position::Gtid(set) => {
            let sids: Result<Vec<Sid<'_>>, _> = set.sids().map(|sid| dump_sid(&sid)).collect();
            let sids = sids.map_err(|e| classify("preparing the binlog stream", e.into()))?;
            request.with_gtid().with_gtid_set(sids)
        }
        Position::Mariadb(p) => {
            go_on_from(&mut conn, config, &p.list).await?;
            request.with_filename(&[][..]).with_pos(4u64)
        }
        Position::File(p) => request.with_filename(p.file.as_bytes()).with_pos(p.pos),
    };
    let operation = "asking for the binlog";
    within(
        config.connect_timeout,
        operation,
        conn.get_binlog_stream(request),
    )
    .await
}

/// MariaDB takes the list from variables of the session, and looks for the file itself.
async fn go_on_from(
    conn: &mut Conn,
    config: &StreamConfig,
    list: &GtidList,
) -> Result<(), StreamError> {
    // Strict: a transaction that should be there and is not ends the dump, not the row.
    let settings = format!(
        "SET @slave_connect_state = '{list}', @slave_gtid_strict_mode = 1, \
         @slave_gtid_ignore_duplicates = 0"
    );
    within(
        config.connect_timeout,
        "preparing the binlog stream",
        conn.query_drop(settings),
    )
    .await
}

/// Each tag of a source is an entry of its own.
fn dump_sid(sid: &outbox_core::gtid::GtidSid<'_>) -> std::io::Result<Sid<'static>> {
    let mut text = outbox_core::binder::print_binary(&sid.source);
    if !sid.tag.is_empty() {
        text.push(':');
        text.push_str(sid.tag);
    }
    for (start, end) in sid.intervals {
        text.push_str(&format!(":{start}-{}", end - 1));
    }
    text.parse()
}
