//! HTTP: health, metrics, the API of the contract, the console and the runbook.
//!
//! `docs/openapi.json` describes every address; tests compare it with the routes here.

mod api;
mod guard;
mod history;
mod overview;
mod page;
mod problem;
mod serve;
mod trouble;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::timeout::TimeoutLayer;

use crate::run::Daemon;
use history::History;
use overview::Overviews;
use problem::Problem;

/// No request of ours has a body worth more.
const BODY: usize = 64 * 1024;
/// A request that takes longer is answered with 503: the database, most likely.
const REQUEST: Duration = Duration::from_secs(40);
const OPENAPI: &str = include_str!("../../../docs/openapi.json");

/// What the handlers share.
struct App {
    daemon: Arc<Daemon>,
    overviews: Overviews,
    history: History,
}

/// Serves until `stop`.
pub async fn serve(
    listener: TcpListener,
    daemon: Arc<Daemon>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let app = Arc::new(App {
        daemon,
        overviews: Overviews::default(),
        history: History::default(),
    });
    let sampling = app.history.run(&app.daemon, &stop);
    let serving = serve::serve(listener, router(app.clone()), stop.clone());
    tokio::join!(serving, sampling).0
}

/// Every address; what is not here is not served.
fn routes() -> Vec<(&'static str, MethodRouter<Arc<App>>)> {
    vec![
        ("/", get(page::console)),
        ("/runbook", get(page::runbook)),
        ("/livez", get(async || "alive\n")),
        ("/readyz", get(readyz)),
        ("/metrics", get(exposition)),
        ("/api/openapi.json", get(openapi)),
        ("/api/live", get(api::live)),
        ("/api/status", get(api::status)),
        ("/api/rows", get(api::rows::list)),
        ("/api/rows/retry", post(api::rows::retry_many)),
        ("/api/rows/abandon", post(api::rows::abandon_many)),
        ("/api/rows/{table}/{id}", get(api::rows::show)),
        ("/api/rows/{table}/{id}/retry", post(api::rows::retry)),
        ("/api/rows/{table}/{id}/abandon", post(api::rows::abandon)),
        ("/api/pause", post(api::pause)),
        ("/api/resume", post(api::resume)),
        ("/api/sweep", post(api::sweep)),
        ("/api/ack-gap", post(api::ack_gap)),
    ]
}

fn router(app: Arc<App>) -> Router {
    routes()
        .into_iter()
        .fold(Router::new(), |router, (path, methods)| {
            router.route(path, methods)
        })
        .fallback(async || Problem::not_found("there is nothing at this address"))
        .method_not_allowed_fallback(async || {
            Problem::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "this address takes another method; the header Allow names it",
            )
        })
        .layer(TimeoutLayer::with_status_code(
            StatusCode::SERVICE_UNAVAILABLE,
            REQUEST,
        ))
        .layer(RequestBodyLimitLayer::new(BODY))
        .layer(middleware::from_fn_with_state(app.clone(), guard::guard))
        .with_state(app)
}

async fn openapi() -> Response {
    let kind = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, kind)], OPENAPI).into_response()
}

async fn readyz(State(app): State<Arc<App>>) -> Response {
    let health = app.daemon.health.get();
    let status = if health.ready() {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, axum::Json(health)).into_response()
}

async fn exposition(State(app): State<Arc<App>>) -> Response {
    app.daemon.meters.refresh(tailing(&app.daemon));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    (
        [(header::CONTENT_TYPE, kind)],
        app.daemon.exposition.render(),
    )
        .into_response()
}

/// Whether a relay runs here now.
fn tailing(daemon: &Daemon) -> bool {
    daemon.control.get().is_some_and(|c| c.relay.is_some())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_route_is_in_the_openapi_document_and_the_other_way_round() {
        let document: serde_json::Value = serde_json::from_str(OPENAPI).unwrap();
        let paths = document["paths"].as_object().unwrap();
        let described: BTreeSet<&str> = paths.keys().map(String::as_str).collect();
        let served: BTreeSet<&str> = routes().iter().map(|(path, _)| *path).collect();
        assert_eq!(described, served);
        assert_eq!(
            document["info"]["version"].as_str(),
            Some(env!("CARGO_PKG_VERSION"))
        );
    }
}
