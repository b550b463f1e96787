//! The sections but `[[outbox]]`, key by key. The explanations are what `config --print` shows.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use outbox_core::retry::RetryPolicy;
use secrecy::{ExposeSecret, SecretString};

use super::reader::Reader;
use super::*;

const MIB: u64 = 1 << 20;
/// Bodies and windows beyond this do not fit what AMQP and a small machine carry.
const MOST_BYTES: u64 = 4 << 30;

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn from_to(from_ms: u64, to_s: u64) -> RangeInclusive<Duration> {
    Duration::from_millis(from_ms)..=secs(to_s)
}

const DAY: u64 = 86_400;

/// Reads the whole configuration; `None` where a mistake leaves nothing to build one from. The
/// mistakes are in what the reader collects.
pub fn read(mut root: Reader<'_>) -> Option<Config> {
    let name = root.text(
        "name",
        "outboxd",
        "one lease and one position per name; app_id of messages",
    );
    if name.is_empty() || name.len() > 64 || name.chars().any(char::is_control) {
        root.mistake("name", "1 to 64 characters are allowed");
    }
    let instance = root.optional_text(
        "instance",
        "who this instance is; default: host name and http.listen",
    );
    let table = root.section("mysql");
    let mysql = mysql(root.below("mysql", table));
    let schema = mysql.as_ref().map(|m| m.schema.clone()).unwrap_or_default();
    let tables = root.sections("outbox");
    if tables.is_empty() {
        root.mistake(
            "outbox",
            "missing; at least one [[outbox]] with a table is needed",
        );
    }
    let outbox = super::outbox::read(&mut root, tables, &schema);
    let table = root.section("rabbitmq");
    let largest = outbox.iter().filter_map(|t| t.max_body).max().unwrap_or(0);
    let rabbitmq = rabbitmq(root.below("rabbitmq", table), largest);
    if let Some(r) = &rabbitmq
        && r.declare_exchange.is_some()
        && outbox
            .iter()
            .all(|t| t.exchange.as_static().is_none_or(str::is_empty))
    {
        root.mistake(
            "rabbitmq.declare_exchange",
            "no outbox has a static exchange to declare",
        );
    }
    let table = root.section("retry");
    let retry = retry(root.below("retry", table));
    let table = root.section("poller");
    let poller = poller(root.below("poller", table));
    let table = root.section("stuck");
    let stuck = stuck(root.below("stuck", table));
    let table = root.section("tail");
    let tail = tail(root.below("tail", table));
    if !tail.enabled && !poller.enabled {
        root.mistake(
            "tail.enabled",
            "tail and poller are both off: nothing would be published",
        );
    }
    if !tail.enabled
        && outbox
            .iter()
            .any(|t| t.tracking == outbox_core::spec::Tracking::None)
    {
        root.mistake(
            "tail.enabled",
            "a table with tracking = \"none\" is delivered by the tail only",
        );
    }
    let table = root.section("lease");
    let mut lease = root.below("lease", table);
    let help = "a leader that is silent for so long is replaced";
    let lease_ttl = lease.duration("ttl", secs(15), from_to(2000, 3600), help);
    lease.finish();
    let table = root.section("retention");
    let mut retention = root.below("retention", table);
    let help = "sent rows older than this are deleted; unset: kept";
    let sent_after = retention.optional_duration("sent_after", from_to(1000, 3650 * DAY), help);
    retention.finish();
    let table = root.section("http");
    let http = http(root.below("http", table));
    let table = root.section("log");
    let log = log(root.below("log", table));
    root.finish();
    let http = http?;
    let instance = instance.unwrap_or_else(|| {
        let host = hostname::get()
            .map(|h| h.to_string_lossy().into_owned())
            .unwrap_or_default();
        format!("{host}:{}", http.listen)
    });
    Some(Config {
        name,
        instance,
        mysql: mysql?,
        outbox: outbox.into_iter().map(Arc::new).collect(),
        rabbitmq: rabbitmq?,
        retry,
        poller,
        stuck,
        tail,
        lease_ttl,
        sent_after,
        http,
        log,
        shown: Vec::new(),
    })
}

/// `url` or `url_file`, exactly one.
fn url_source(r: &mut Reader<'_>, schemes: &[&str]) -> Option<UrlSource> {
    let file = r.optional_path(
        "url_file",
        "file that holds the URL, read again on every connect",
    );
    let url = r.optional_secret("url", "URL of the server, with user and password", mask);
    match (url, file) {
        (Some(_), Some(_)) => r.mistake(
            "url",
            "url and url_file are both set; one of them is allowed",
        ),
        (None, None) => r.mistake("url", "missing; set url or url_file"),
        (None, Some(path)) if !path.exists() => {
            r.mistake(
                "url_file",
                format_args!("{} does not exist", path.display()),
            );
        }
        (None, Some(path)) => {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            match unsound(text.trim(), schemes) {
                None => return Some(UrlSource::File(path)),
                Some(why) => {
                    r.mistake(
                        "url_file",
                        format_args!("what {} holds is {why}", path.display()),
                    );
                }
            }
        }
        (Some(url), None) => match unsound(url.expose_secret(), schemes) {
            None => return Some(UrlSource::Inline(url)),
            Some(why) => r.mistake("url", why),
        },
    }
    None
}

/// What is wrong with a URL, or with one of several; never quotes it.
fn unsound(urls: &str, schemes: &[&str]) -> Option<String> {
    let form = || {
        let forms = schemes.iter();
        let forms = forms.map(|s| format!("{s}://user:password@host:port/…"));
        let forms = forms.collect::<Vec<_>>().join(" or ");
        format!("not a URL of the form {forms}")
    };
    urls.split(',')
        .find_map(|one| match url::Url::parse(one.trim()) {
            Ok(u) if is_torn(&u) => Some(format!("{}; {ENCODE}", form())),
            Ok(u) if schemes.contains(&u.scheme()) && u.has_host() => None,
            Ok(_) => Some(form()),
            Err(_) => Some(format!("{}; {ENCODE}", form())),
        })
}

const ENCODE: &str = "special characters of the password are percent-encoded: \
     @ is %40, / is %2F, # is %23, ? is %3F, : is %3A, % is %25";

/// Whether an unencoded character of the password ended the URL's authority too early: what was
/// to be the host stands behind an @ further on.
fn is_torn(url: &url::Url) -> bool {
    let rest = [Some(url.path()), url.query(), url.fragment()];
    rest.into_iter().flatten().any(|part| part.contains('@'))
}

/// A URL without its password.
fn mask(url: &str) -> String {
    let mask_one = |one: &str| match url::Url::parse(one.trim()) {
        Ok(u) if is_torn(&u) => "***".to_owned(),
        Ok(mut u) if u.password().is_some() => {
            if u.set_password(Some("***")).is_err() {
                return "***".to_owned();
            }
            u.to_string()
        }
        Ok(u) => u.to_string(),
        Err(_) => "***".to_owned(),
    };
    url.split(',').map(mask_one).collect::<Vec<_>>().join(",")
}

fn tls(r: &mut Reader<'_>) -> TlsFiles {
    let files = TlsFiles {
        ssl_ca: r.optional_path("ssl_ca", "PEM file of the certificate authorities"),
        ssl_cert: r.optional_path("ssl_cert", "PEM file of the client certificate"),
        ssl_key: r.optional_path("ssl_key", "PEM file of the client key"),
    };
    for (key, path) in [
        ("ssl_ca", &files.ssl_ca),
        ("ssl_cert", &files.ssl_cert),
        ("ssl_key", &files.ssl_key),
    ] {
        if let Some(path) = path.as_ref().filter(|p| !p.exists()) {
            r.mistake(key, format_args!("{} does not exist", path.display()));
        }
    }
    if files.ssl_cert.is_some() != files.ssl_key.is_some() {
        r.mistake("ssl_cert", "ssl_cert and ssl_key go together");
    }
    files
}

fn mysql(mut r: Reader<'_>) -> Option<Mysql> {
    let url = url_source(&mut r, &["mysql"]);
    let replica_url = r.optional_secret("replica_url", "tail this replica, write to url", mask);
    let replica = replica_url.as_ref();
    if let Some(why) = replica.and_then(|u| unsound(u.expose_secret(), &["mysql"])) {
        r.mistake("replica_url", why);
    }
    let modes = [
        ("disabled", SslMode::Disabled),
        ("preferred", SslMode::Preferred),
        ("required", SslMode::Required),
        ("verify_ca", SslMode::VerifyCa),
        ("verify_identity", SslMode::VerifyIdentity),
    ];
    let ssl_mode = r.choice(
        "ssl_mode",
        SslMode::Preferred,
        &modes,
        "encryption, as in MySQL's own clients",
    );
    let tls = tls(&mut r);
    if matches!(ssl_mode, SslMode::VerifyCa) && tls.ssl_ca.is_none() {
        r.mistake(
            "ssl_ca",
            "missing; verify_ca needs the authority to verify against",
        );
    }
    let help = "server_id of the dump; 0: derived from name and database";
    let server_id = r.number("server_id", 0, 0..=u64::from(u32::MAX), help);
    let help = "zone of the outbox's DATETIME columns; unset: the server's";
    let time_zone = r.optional_text("time_zone", help);
    let help = "the server speaks at least so often; three silent periods are a dead link";
    let heartbeat = r.duration("heartbeat", secs(5), from_to(1000, 600), help);
    let schema = match &url {
        Some(UrlSource::Inline(u)) => database(u),
        Some(UrlSource::File(path)) => {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            database(&SecretString::from(text.trim().to_owned()))
        }
        None => Some(String::new()),
    };
    if schema.is_none() {
        r.mistake(
            "url",
            "names no database; write mysql://user:password@host:port/database",
        );
    }
    r.finish();
    Some(Mysql {
        url: url?,
        replica_url,
        schema: schema?,
        ssl_mode,
        tls,
        server_id: u32::try_from(server_id).unwrap_or_default(),
        time_zone,
        heartbeat,
    })
}

fn database(url: &SecretString) -> Option<String> {
    let url = url::Url::parse(url.expose_secret()).ok()?;
    let path = url.path().trim_matches('/');
    (!path.is_empty() && !path.contains('/')).then(|| path.to_owned())
}

fn rabbitmq(mut r: Reader<'_>, largest_body: u64) -> Option<Rabbitmq> {
    let url = url_source(&mut r, &["amqp", "amqps"]);
    let tls = tls(&mut r);
    let kinds = [
        ("none", None),
        ("topic", Some(ExchangeKind::Topic)),
        ("direct", Some(ExchangeKind::Direct)),
        ("fanout", Some(ExchangeKind::Fanout)),
        ("headers", Some(ExchangeKind::Headers)),
    ];
    let help = "declare the configured static exchanges, durable, with this type";
    let declare_exchange = r.choice("declare_exchange", None, &kinds, help);
    let max_in_flight = r.number(
        "max_in_flight",
        4096,
        1..=1_000_000,
        "unconfirmed rows at most",
    );
    let help = "bytes of unconfirmed rows at most; at least max_body";
    let max_bytes = r.size(
        "max_in_flight_bytes",
        64 * MIB,
        64 * 1024..=MOST_BYTES,
        help,
    );
    if max_bytes < largest_body {
        r.mistake(
            "max_in_flight_bytes",
            "less than an outbox's max_body, which could then never be sent",
        );
    }
    let help = "a confirm that takes longer retires the channel";
    let confirm_timeout = r.duration("confirm_timeout", secs(30), from_to(100, 3600), help);
    r.finish();
    Some(Rabbitmq {
        url: url?,
        tls,
        declare_exchange,
        max_in_flight: usize::try_from(max_in_flight).ok()?,
        max_in_flight_bytes: usize::try_from(max_bytes).ok()?,
        confirm_timeout,
    })
}

fn retry(mut r: Reader<'_>) -> RetryPolicy {
    let d = RetryPolicy::default();
    let policy = RetryPolicy {
        base: r.duration(
            "base",
            d.base,
            from_to(1, 30 * DAY),
            "delay before the first retry of a row",
        ),
        factor: r.real(
            "factor",
            d.factor,
            1.0..=100.0,
            "growth of the delay from one retry to the next",
        ),
        cap: r.duration("cap", d.cap, from_to(1, 30 * DAY), "longest delay"),
        max_retries: u32::try_from(r.number(
            "max_retries",
            u64::from(d.max_retries),
            0..=1000,
            "retries before a row is failed",
        ))
        .unwrap_or(d.max_retries),
    };
    r.finish();
    policy
}

fn poller(mut r: Reader<'_>) -> Poller {
    let count = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let poller = Poller {
        enabled: r.flag(
            "enabled",
            true,
            "poll the tables for what the tail did not settle",
        ),
        sweep_rate: r
            .optional_number(
                "sweep_rate",
                1..=10_000_000,
                "rows a second of sweep and replay; unset: no limit",
            )
            .and_then(|n| u32::try_from(n).ok()),
        interval: r.duration(
            "interval",
            secs(5),
            from_to(10, 3600),
            "time between two polls",
        ),
        degraded_interval: r.duration(
            "degraded_interval",
            secs(1),
            from_to(10, 3600),
            "time between two polls while the tail cannot run",
        ),
        batch: count(r.number(
            "batch",
            100,
            1..=100_000,
            "rows of one poll; a full one is followed by the next",
        )),
        pending_grace: r.duration(
            "pending_grace",
            secs(30),
            from_to(0, DAY),
            "a row is the tail's for at least so long",
        ),
        lock_ttl: r.duration(
            "lock_ttl",
            secs(60),
            from_to(1000, DAY),
            "how long a claim holds",
        ),
    };
    r.finish();
    poller
}

fn stuck(mut r: Reader<'_>) -> Stuck {
    let stuck = Stuck {
        interval: r.duration(
            "interval",
            secs(60),
            from_to(100, DAY),
            "time between two patrols",
        ),
        warn_after: r.duration(
            "warn_after",
            secs(300),
            from_to(100, 30 * DAY),
            "a claim this old is warned of",
        ),
        reset_after: r.duration(
            "reset_after",
            secs(1800),
            from_to(100, 30 * DAY),
            "a claim this old is taken away: back to pending",
        ),
        backlog_warn: r.number(
            "backlog_warn",
            1000,
            1..=u64::from(u32::MAX),
            "more pending rows are warned of",
        ),
    };
    if stuck.reset_after < stuck.warn_after {
        r.mistake("reset_after", "less than warn_after");
    }
    r.finish();
    stuck
}

fn tail(mut r: Reader<'_>) -> Tail {
    let count = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let tail = Tail {
        enabled: r.flag("enabled", true, "tail the binlog; false: poller only"),
        flush_interval: r.duration("flush_interval", Duration::from_millis(50), from_to(1, 60), "outcomes are written at least so often"),
        flush_rows: count(r.number("flush_rows", 1000, 1..=100_000, "outcomes of one write at most")),
        checkpoint_interval: r.duration(
            "checkpoint_interval",
            secs(10),
            from_to(100, 3600),
            "the position of a quiet outbox is stored at most so often",
        ),
        verify_after: r.duration(
            "verify_after",
            secs(10),
            from_to(0, DAY),
            "rows committed longer ago are read back before they are published",
        ),
        max_transaction_bytes: count(r.size(
            "max_transaction_bytes",
            64 * MIB,
            64 * 1024..=MOST_BYTES,
            "outbox rows of one transaction that are kept in memory at most; more is left to the table",
        )),
    };
    r.finish();
    tail
}

fn http(mut r: Reader<'_>) -> Option<Http> {
    let listen = r.text(
        "listen",
        "127.0.0.1:9470",
        "address of health, metrics, API and console",
    );
    let help = "needed for every POST, and to listen beyond loopback";
    let token = r.optional_secret("token", help, |_| "***".to_owned());
    if token.as_ref().is_some_and(|t| t.expose_secret().len() < 8) {
        r.mistake("token", "shorter than 8 characters");
    }
    let parsed = listen.parse::<SocketAddr>();
    match parsed {
        Err(_) => r.mistake(
            "listen",
            format_args!(
                "\"{listen}\" is not allowed: an address and port, such as \"127.0.0.1:9470\""
            ),
        ),
        Ok(a) if !a.ip().is_loopback() && token.is_none() => {
            r.mistake(
                "token",
                format_args!("missing; http.listen = \"{listen}\" is beyond loopback"),
            );
        }
        Ok(_) => {}
    }
    r.finish();
    Some(Http {
        listen: parsed.ok()?,
        token,
    })
}

fn log(mut r: Reader<'_>) -> Log {
    let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
    let format = r.choice(
        "format",
        LogFormat::Text,
        &formats,
        "for people, or one JSON object on each line",
    );
    let help = "error, warn, info, debug, trace, or directives such as info,outbox_tail=debug";
    let level = r.text("level", "info", help);
    if !crate::logging::is_level(&level) {
        r.mistake("level", format_args!("\"{level}\" is not allowed: {help}"));
    }
    r.finish();
    Log { format, level }
}
