//! From the configuration to the libraries' own settings.

use std::sync::Arc;
use std::time::Duration;

use outbox_core::ports::PortResult;
use outbox_core::spec::TableSpec;
use outbox_ledger::admin::Admin;
use outbox_ledger::connect::{self as ledger, Db, DbConfig};
use outbox_ledger::error::DbResult;
use outbox_tail::rabbit::{self, ExchangeType, RabbitConfig};
use outbox_tail::stream::{self, StreamConfig, StreamTls};

use crate::config::{Config, ExchangeKind, SslMode, UrlSource};

/// The ledger's pool.
pub fn database(config: &Config) -> DbResult<Db> {
    database_at(config, ledger_url(&config.mysql.url), true)
}

/// A pool whose sessions write whole row images, for the demo's application side.
pub fn application_database(config: &Config) -> DbResult<Db> {
    database_at(config, ledger_url(&config.mysql.url), false)
}

/// A pool on the server that is tailed, where that is another one.
pub fn replica_database(config: &Config) -> DbResult<Option<Db>> {
    let Some(url) = &config.mysql.replica_url else {
        return Ok(None);
    };
    database_at(config, ledger::UrlSource::Value(url.clone()), true).map(Some)
}

fn database_at(config: &Config, url: ledger::UrlSource, minimal_images: bool) -> DbResult<Db> {
    let tls = &config.mysql.tls;
    Db::new(DbConfig {
        tls: ledger::Tls {
            mode: match config.mysql.ssl_mode {
                SslMode::Disabled => ledger::SslMode::Disabled,
                SslMode::Preferred => ledger::SslMode::Preferred,
                SslMode::Required => ledger::SslMode::Required,
                SslMode::VerifyCa => ledger::SslMode::VerifyCa,
                SslMode::VerifyIdentity => ledger::SslMode::VerifyIdentity,
            },
            ca: tls.ssl_ca.clone(),
            cert: tls.ssl_cert.clone(),
            key: tls.ssl_key.clone(),
        },
        time_zone: config.mysql.time_zone.clone(),
        lease_ttl: config.lease_ttl,
        minimal_images,
        ..DbConfig::new(url)
    })
}

fn ledger_url(url: &UrlSource) -> ledger::UrlSource {
    match url {
        UrlSource::Inline(url) => ledger::UrlSource::Value(url.clone()),
        UrlSource::File(path) => ledger::UrlSource::File(path.clone()),
    }
}

/// A publisher's settings; `part` is shown by the broker beside the connection.
pub fn broker(config: &Config, part: &str) -> RabbitConfig {
    let r = &config.rabbitmq;
    let urls = match &r.url {
        UrlSource::Inline(url) => rabbit::Urls::Inline(url.clone()),
        UrlSource::File(path) => rabbit::Urls::File(path.clone()),
    };
    RabbitConfig {
        tls: rabbit::TlsFiles {
            ca: r.tls.ssl_ca.clone(),
            cert: r.tls.ssl_cert.clone(),
            key: r.tls.ssl_key.clone(),
        },
        connection_name: format!("{} {part}", config.name),
        declare: r.declare_exchange.map(|kind| match kind {
            ExchangeKind::Topic => ExchangeType::Topic,
            ExchangeKind::Direct => ExchangeType::Direct,
            ExchangeKind::Fanout => ExchangeType::Fanout,
            ExchangeKind::Headers => ExchangeType::Headers,
        }),
        exchanges: static_exchanges(&config.outbox),
        confirm_timeout: r.confirm_timeout,
        ..RabbitConfig::new(urls)
    }
}

/// The exchanges whose names do not depend on rows.
pub fn static_exchanges(tables: &[Arc<TableSpec>]) -> Vec<String> {
    let mut names: Vec<String> = tables
        .iter()
        .filter_map(|t| t.exchange.as_static())
        .filter(|e| !e.is_empty())
        .map(str::to_owned)
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// `server_id` of the dump: as configured, else derived from name and database, so that two
/// deployments on one server differ and a restart keeps its own. Never 0; outside the range that
/// people give to servers by hand.
pub fn server_id(config: &Config) -> u32 {
    if config.mysql.server_id != 0 {
        return config.mysql.server_id;
    }
    // FNV-1a: stable over releases, which std's hasher is not.
    let text = format!("{}\0{}", config.name, config.mysql.schema);
    let hash = text.bytes().fold(0x811c_9dc5_u32, |h, b| {
        (h ^ u32::from(b)).wrapping_mul(0x0100_0193)
    });
    0x4000_0000 | (hash & 0x3fff_ffff)
}

/// The stream's settings: from the replica, where one is configured.
pub fn stream(config: &Config, own_schema: &str, zone_offset: i32) -> StreamConfig {
    let url = match (&config.mysql.replica_url, &config.mysql.url) {
        (Some(url), _) | (None, UrlSource::Inline(url)) => stream::UrlSource::Inline(url.clone()),
        (None, UrlSource::File(path)) => stream::UrlSource::File(path.clone()),
    };
    let tls = &config.mysql.tls;
    StreamConfig {
        tls: StreamTls {
            mode: match config.mysql.ssl_mode {
                SslMode::Disabled => stream::SslMode::Disabled,
                SslMode::Preferred => stream::SslMode::Preferred,
                SslMode::Required => stream::SslMode::Required,
                SslMode::VerifyCa => stream::SslMode::VerifyCa,
                SslMode::VerifyIdentity => stream::SslMode::VerifyIdentity,
            },
            ca: tls.ssl_ca.clone(),
            cert: tls.ssl_cert.clone(),
            key: tls.ssl_key.clone(),
        },
        heartbeat: config.mysql.heartbeat,
        max_transaction_bytes: config.tail.max_transaction_bytes,
        zone_offset,
        ..StreamConfig::new(url, server_id(config), own_schema)
    }
}

/// A delay around `mean`, half to one and a half of it, so that instances do not act in step.
pub fn jittered(mean: Duration) -> Duration {
    mean.mul_f64(0.5 + rand::random::<f64>())
}

/// Operators' side of the tables.
pub async fn admin(config: &Config, db: &Db) -> PortResult<Admin> {
    Admin::open(
        db.clone(),
        Arc::from(config.name.as_str()),
        &config.outbox,
        config.retry,
    )
    .await
}
