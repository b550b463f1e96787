//! The API: the same operations as the commands, over the same database.

pub(super) mod body;
pub(super) mod rows;

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use outbox_core::ports::{PortResult, chain};
use outbox_ledger::admin::Admin;
use outbox_ledger::{gap, pause as pauses, signal};
use serde::Deserialize;
use serde_json::{Value, json};

use super::guard::{Operator, Reader};
use super::problem::Problem;
use super::{App, history, trouble};
use crate::run::{Daemon, servers};
use body::Body;

/// How long a pause waits until what was handed to the broker has its answer.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) type Answer = Result<Json<Value>, Problem>;

/// What this instance sees by itself, without asking the database.
fn own(daemon: &Daemon) -> Value {
    let health = daemon.health.get();
    let relay = daemon
        .control
        .get()
        .and_then(|c| c.relay)
        .map(|r| r.status());
    json!({
        "instance": daemon.config.instance,
        "version": env!("CARGO_PKG_VERSION"),
        "role": health.role,
        "ready": health.ready(),
        "paused": health.paused,
        "mysql": health.mysql,
        "rabbitmq": health.rabbitmq,
        "tail": health.tail,
        "lag_seconds": relay.as_ref().map(|r| r.lag.as_secs_f64()),
        "read": relay.as_ref().and_then(|r| r.read.as_ref()).map(ToString::to_string),
        "in_flight_rows": relay.as_ref().map(|r| r.in_flight_rows),
        "in_flight_bytes": relay.as_ref().map(|r| r.in_flight_bytes),
        "max_in_flight": daemon.config.rabbitmq.max_in_flight,
        "held_aggregates": relay.as_ref().map(|r| r.held.iter().sum::<usize>()),
    })
}

/// From when on to show samples.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LiveQuery {
    after: Option<u64>,
}

/// What this instance sees, with the samples of the last minutes.
pub(super) async fn live(
    _: Reader,
    State(app): State<Arc<App>>,
    query: Result<Query<LiveQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query.map_err(|e| Problem::bad(e.body_text()))?;
    let troubles = trouble::all(&app.daemon, None);
    let mut live = own(&app.daemon);
    live["troubles"] = json!(troubles);
    live["interval_seconds"] = json!(history::INTERVAL.as_secs_f64());
    live["samples"] = json!(app.history.after(query.after.unwrap_or(0)));
    Ok(Json(live))
}

/// Everything at a glance: what is stored, and what this instance sees.
pub(super) async fn status(_: Reader, State(app): State<Arc<App>>) -> Answer {
    let overview = app.overviews.get(&app.daemon).await.map_err(|e| {
        let text = trouble::unread(&chain(&e));
        Problem::from(e).with("trouble", json!(text))
    })?;
    let troubles = trouble::all(&app.daemon, Some(&overview));
    let mut live = own(&app.daemon);
    live["reasons"] = json!(trouble::words(&troubles));
    live["troubles"] = json!(troubles);
    let mut status = json!(*overview);
    status["lag_seconds"] = live["lag_seconds"].clone();
    status["live"] = live;
    Ok(Json(status))
}

/// Which table an order is about.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Which {
    table: Option<String>,
}

/// Stops publishing, of one table or of all.
pub(super) async fn pause(
    _: Operator,
    State(app): State<Arc<App>>,
    Body(which): Body<Which>,
) -> Answer {
    let table = full_name(&app.daemon, which.table.as_deref())?;
    pauses::set(&app.daemon.db, &app.daemon.config.name, table.as_deref()).await?;
    order(&app, "pause", table.as_deref(), "paused").await
}

/// Goes on publishing.
pub(super) async fn resume(
    _: Operator,
    State(app): State<Arc<App>>,
    Body(which): Body<Which>,
) -> Answer {
    let table = full_name(&app.daemon, which.table.as_deref())?;
    pauses::clear(&app.daemon.db, &app.daemon.config.name, table.as_deref()).await?;
    order(&app, "resume", table.as_deref(), "resumed").await
}

/// Obeyed here at once where this instance leads; else the leader is told.
async fn order(app: &App, kind: &str, table: Option<&str>, done: &str) -> Answer {
    let daemon = &app.daemon;
    app.overviews.forget().await;
    if daemon.control.get().is_none() {
        tell(daemon, kind, table).await?;
        return Ok(said(format!("{done}; the leader has been told")));
    }
    match tokio::time::timeout(PATIENCE, crate::run::apply_pauses(daemon)).await {
        Ok(obeyed) => obeyed?,
        Err(_) => {
            let text =
                format!("{done}, but what was handed to the broker before has no answer yet");
            return Ok(said(text));
        }
    }
    Ok(said(done.to_owned()))
}

/// Publishes every due pending row now.
pub(super) async fn sweep(
    _: Operator,
    State(app): State<Arc<App>>,
    Body(which): Body<Which>,
) -> Answer {
    let table = full_name(&app.daemon, which.table.as_deref())?;
    // By signal: whichever instance leads sees it.
    tell(&app.daemon, "sweep", table.as_deref()).await?;
    Ok(said("the leader has been told to sweep".to_owned()))
}

/// Acknowledges recorded gaps.
pub(super) async fn ack_gap(
    _: Operator,
    State(app): State<Arc<App>>,
    Body(Nothing {}): Body<Nothing>,
) -> Answer {
    let daemon = &app.daemon;
    let gaps = gap::acknowledge(&daemon.db, &daemon.config.name).await?;
    daemon.health.change(|h| h.gaps = 0);
    app.overviews.forget().await;
    Ok(said(format!("{gaps} gaps acknowledged")))
}

/// An order without particulars.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Nothing {}

async fn tell(daemon: &Daemon, kind: &str, table: Option<&str>) -> PortResult<()> {
    let data = table.map_or_else(|| json!({}), |t| json!({ "table": t }));
    let data = data.to_string();
    signal::send(&daemon.db, &daemon.config.name, kind, Some(&data)).await?;
    Ok(())
}

fn said(detail: String) -> Json<Value> {
    Json(json!({ "detail": detail }))
}

/// The full name of the table that was named, if one was.
fn full_name(daemon: &Daemon, table: Option<&str>) -> Result<Option<String>, Problem> {
    let Some(table) = table else { return Ok(None) };
    match crate::cli::full_name(&daemon.config, table) {
        Ok(full) => Ok(Some(full)),
        Err(_) => Err(unknown(table)),
    }
}

fn unknown(table: &str) -> Problem {
    Problem::not_found(format!("no outbox is named {table}"))
}

async fn admin(app: &App) -> Result<Admin, Problem> {
    Ok(servers::admin(&app.daemon.config, &app.daemon.db).await?)
}
