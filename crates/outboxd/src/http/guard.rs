//! Who may ask: hosts, origins, the token; and what every answer carries.
//!
//! On loopback anybody on this machine may read. A web page from elsewhere may not, though the
//! browser runs on this machine: its requests carry its own name as `Host` (DNS rebinding), or
//! say that they come from another site. Beyond loopback reading rows needs the token too.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, uri::Authority};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use openssl::sha::sha256;
use secrecy::ExposeSecret as _;
use subtle::ConstantTimeEq as _;

use super::App;
use super::problem::Problem;

/// Refuses what no request of ours is, and completes every answer.
pub(super) async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let loopback = app.daemon.config.http.listen.ip().is_loopback();
    let refused = refusal(&request, loopback);
    let mut response = match refused {
        Some(problem) => problem.into_response(),
        None => next.run(request).await,
    };
    // Layers and extractors answer in plain text.
    let plain = (response.status().is_client_error() || response.status().is_server_error())
        && !is_json(response.headers());
    if plain {
        let allow = response.headers().get(header::ALLOW).cloned();
        response = Problem::generic(response.status()).into_response();
        if let Some(allow) = allow {
            response.headers_mut().insert(header::ALLOW, allow);
        }
    }
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers
            .entry(HeaderName::from_static(name))
            .or_insert(HeaderValue::from_static(value));
    }
    response
}

/// `no-store`: rows, and a console of an older version, are not for caches.
const HEADERS: [(&str, &str); 7] = [
    ("cache-control", "no-store"),
    (
        "content-security-policy",
        "default-src 'none'; frame-ancestors 'none'; base-uri 'none'",
    ),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
];

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok());
    kind.is_some_and(|k| k.starts_with("application/") && k.contains("json"))
}

fn refusal(request: &Request, loopback: bool) -> Option<Problem> {
    let headers = request.headers();
    if loopback && !host(request).is_none_or(|h| is_local(&h)) {
        let text = "this instance listens on loopback and answers to localhost and loopback addresses only";
        return Some(Problem::new(StatusCode::MISDIRECTED_REQUEST, text));
    }
    let reads = matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS
    );
    (!reads && foreign(headers)).then(|| {
        Problem::new(
            StatusCode::FORBIDDEN,
            "a page of another origin may not change anything here",
        )
    })
}

/// The name that the client believes to talk to. Whoever sends none is no browser.
fn host(request: &Request) -> Option<String> {
    if let Some(authority) = request.uri().authority() {
        return Some(authority.host().to_owned());
    }
    let value = request.headers().get(header::HOST)?;
    // What is no authority is nobody's name.
    let parsed = value
        .to_str()
        .ok()
        .and_then(|v| v.parse::<Authority>().ok());
    Some(parsed.map_or_else(|| "?".to_owned(), |a| a.host().to_owned()))
}

fn is_local(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let lower = bare.trim_end_matches('.').to_ascii_lowercase();
    lower == "localhost"
        || lower.ends_with(".localhost")
        || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Whether a browser says that another site sent this. `Sec-Fetch-Site` cannot be forged by a
/// page; browsers that do not send it send `Origin` with every POST.
fn foreign(headers: &HeaderMap) -> bool {
    if let Some(site) = headers.get("sec-fetch-site") {
        return site != "same-origin" && site != "none";
    }
    let Some(origin) = headers.get(header::ORIGIN) else {
        return false;
    };
    let origin = origin.to_str().unwrap_or_default();
    let name = origin.split_once("://").map(|(_, name)| name);
    let host = headers.get(header::HOST).and_then(|v| v.to_str().ok());
    name.is_none() || name != host
}

/// The token was given: needed by everything that changes something.
pub(super) struct Operator;

impl FromRequestParts<Arc<App>> for Operator {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let Some(token) = &app.daemon.config.http.token else {
            return Err(Problem::new(
                StatusCode::FORBIDDEN,
                "no http.token is configured, so nothing can be changed here",
            ));
        };
        if bears(&parts.headers, token.expose_secret()) {
            Ok(Self)
        } else {
            Err(Problem::new(
                StatusCode::UNAUTHORIZED,
                "the bearer token is missing or wrong",
            ))
        }
    }
}

/// May read what the API shows: anybody on loopback, else who bears the token.
pub(super) struct Reader;

impl FromRequestParts<Arc<App>> for Reader {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        if !app.daemon.config.http.listen.ip().is_loopback() {
            Operator::from_request_parts(parts, app).await?;
        }
        Ok(Self)
    }
}

fn bears(headers: &HeaderMap, token: &str) -> bool {
    let given = headers
        .get(header::AUTHORIZATION)
        .map_or(&b""[..], HeaderValue::as_bytes);
    let scheme = given.get(..7).unwrap_or_default();
    let given = given.get(7..).unwrap_or_default();
    // In constant time, and of digests: neither how much of a guess is right nor the token's
    // length shows.
    let right = sha256(given).ct_eq(&sha256(token.as_bytes()));
    bool::from(right) && scheme.eq_ignore_ascii_case(b"bearer ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn asked(method: &str, uri: &str, headers: &[(&str, &str)]) -> Request {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(axum::body::Body::empty()).unwrap()
    }

    #[test]
    fn on_loopback_only_local_names_are_answered() {
        for host in [
            "localhost",
            "LOCALHOST:9470",
            "127.0.0.1:9470",
            "127.8.9.1",
            "[::1]:1",
            "outboxd.localhost:80",
            "localhost.",
        ] {
            let request = asked("GET", "/api/rows", &[("host", host)]);
            assert!(refusal(&request, true).is_none(), "{host}");
        }
        for host in [
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example:9470",
            "192.168.0.1",
            "evil@localhost@x",
            "",
            "a b",
        ] {
            let request = asked("GET", "/api/rows", &[("host", host)]);
            assert!(refusal(&request, true).is_some(), "{host}");
            assert!(refusal(&request, false).is_none(), "{host}");
        }
        let absolute = asked(
            "GET",
            "http://evil.example/api/rows",
            &[("host", "localhost")],
        );
        assert!(refusal(&absolute, true).is_some());
        assert!(refusal(&asked("GET", "/livez", &[]), true).is_none());
    }

    #[test]
    fn a_page_of_another_origin_changes_nothing() {
        let local = ("host", "localhost:9470");
        let refused = |headers: &[(&str, &str)]| {
            refusal(&asked("POST", "/api/pause", headers), true).is_some()
        };
        assert!(!refused(&[local]));
        assert!(!refused(&[local, ("origin", "http://localhost:9470")]));
        assert!(!refused(&[
            local,
            ("sec-fetch-site", "same-origin"),
            ("origin", "https://ops.example")
        ]));
        for (name, value) in [
            ("origin", "http://evil.example"),
            ("origin", "http://localhost:1"),
            ("origin", "null"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ] {
            assert!(refused(&[local, (name, value)]), "{name}: {value}");
        }
        // Reading is kept from it by the browser: nothing here allows another origin.
        let read = asked(
            "GET",
            "/api/rows",
            &[local, ("sec-fetch-site", "cross-site")],
        );
        assert!(refusal(&read, true).is_none());
    }

    #[test]
    fn the_token_counts_whole_and_only_behind_its_scheme() {
        let with = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, HeaderValue::from_static(value));
            bears(&headers, "sesame-1")
        };
        assert!(with("Bearer sesame-1") && with("bearer sesame-1"));
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer sesame",
            "Bearer sesame-12",
            "Basic  sesame-1",
            "sesame-1",
        ] {
            assert!(!with(wrong), "{wrong}");
        }
        assert!(!bears(&HeaderMap::new(), "sesame-1"));
    }
}
