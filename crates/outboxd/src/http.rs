//! HTTP: health, metrics, the API of the contract, the console.

mod api;
mod problem;
mod serve;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::timeout::TimeoutLayer;

use crate::health::Role;
use crate::run::Daemon;
use problem::Problem;

/// No request of ours has a body worth more.
const BODY: usize = 64 * 1024;
/// A request that takes longer is answered with 503: the database, most likely.
const REQUEST: Duration = Duration::from_secs(40);
const CONSOLE: &str = include_str!("http/console.html");
/// The console's own script and style only; nothing from elsewhere, no frames.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Serves until `stop`.
pub async fn serve(
    listener: TcpListener,
    daemon: Arc<Daemon>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    serve::serve(listener, router(daemon), stop).await
}

fn router(daemon: Arc<Daemon>) -> Router {
    Router::new()
        .route("/", get(console))
        .route("/livez", get(async || (StatusCode::OK, "alive\n")))
        .route("/readyz", get(readyz))
        .route("/metrics", get(exposition))
        .route("/api/status", get(api::status))
        .route("/api/rows", get(api::rows))
        .route("/api/rows/{table}/{id}", get(api::row))
        .route("/api/rows/{table}/{id}/{change}", post(api::change))
        .route("/api/pause", post(api::pause))
        .route("/api/resume", post(api::resume))
        .route("/api/sweep", post(api::sweep))
        .route("/api/ack-gap", post(api::ack_gap))
        .fallback(async || Problem::not_found("there is nothing at this address"))
        .method_not_allowed_fallback(async || {
            Problem::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "this address takes another method",
            )
        })
        .layer(TimeoutLayer::with_status_code(
            StatusCode::SERVICE_UNAVAILABLE,
            REQUEST,
        ))
        .layer(RequestBodyLimitLayer::new(BODY))
        .with_state(daemon)
}

async fn console() -> Response {
    let policy = HeaderName::from_static("content-security-policy");
    ([(policy, HeaderValue::from_static(POLICY))], Html(CONSOLE)).into_response()
}

async fn readyz(State(daemon): State<Arc<Daemon>>) -> Response {
    let health = daemon.health.get();
    let status = if health.ready() {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, axum::Json(health)).into_response()
}

async fn exposition(State(daemon): State<Arc<Daemon>>) -> Response {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], daemon.exposition.render()).into_response()
}

/// What is wrong, in words; empty when all is well.
fn reasons(daemon: &Daemon) -> Vec<String> {
    let h = daemon.health.get();
    let mut reasons = Vec::new();
    if !h.mysql.ok && h.role != Role::Starting {
        reasons.push(format!("MySQL: {}", h.mysql.detail));
    }
    if h.role == Role::Leader {
        for (name, part) in [("RabbitMQ", &h.rabbitmq), ("tail", &h.tail)] {
            if !part.ok {
                reasons.push(format!("{name}: {}", part.detail));
            }
        }
    }
    if h.role == Role::Halted {
        reasons.push(format!("halted: {} {}", h.tail.detail, h.mysql.detail));
    }
    if h.gaps > 0 {
        reasons.push(format!(
            "{} gaps in the binlog are not acknowledged (`outboxd ack-gap`)",
            h.gaps
        ));
    }
    if h.paused {
        reasons.push("publishing is paused (`outboxd resume`)".to_owned());
    }
    reasons
}
