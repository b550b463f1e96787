//! The API: the same operations as the commands, over the same database.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use outbox_core::{Status, TableIdx};
use outbox_ledger::admin::{Admin, Filter};
use outbox_ledger::{gap, pause as pauses};
use secrecy::ExposeSecret as _;
use serde::Deserialize;
use serde_json::{Value, json};
use subtle::ConstantTimeEq as _;

use super::problem::Problem;
use crate::run::{Daemon, servers};

type Answer = Result<Json<Value>, Problem>;

/// Rows of a page unless asked otherwise, and at most.
const PAGE: (u32, u32) = (50, 500);

/// Everything at a glance: what is stored, and what this instance sees.
pub async fn status(State(daemon): State<Arc<Daemon>>) -> Answer {
    let overview = servers::admin(&daemon.config, &daemon.db)
        .await?
        .overview()
        .await?;
    let mut status = json!(overview);
    let health = daemon.health.get();
    let relay = daemon
        .control
        .get()
        .and_then(|c| c.relay)
        .map(|r| r.status());
    let lag = relay.as_ref().map(|r| r.lag.as_secs_f64());
    status["lag_seconds"] = json!(lag);
    status["live"] = json!({
        "instance": daemon.config.instance,
        "role": health.role,
        "ready": health.ready(),
        "mysql": health.mysql,
        "rabbitmq": health.rabbitmq,
        "tail": health.tail,
        "reasons": super::reasons(&daemon),
        "read": relay.as_ref().and_then(|r| r.read.as_ref()).map(ToString::to_string),
        "in_flight_rows": relay.as_ref().map(|r| r.in_flight_rows),
        "in_flight_bytes": relay.as_ref().map(|r| r.in_flight_bytes),
    });
    Ok(Json(status))
}

/// Filters of the list.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowsQuery {
    table: Option<String>,
    status: Option<String>,
    aggregate_id: Option<String>,
    after: Option<String>,
    limit: Option<u32>,
}

/// Rows, newest first, without payload; `next` is the `after` of the next page.
pub async fn rows(
    State(daemon): State<Arc<Daemon>>,
    query: Result<Query<RowsQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query.map_err(|e| Problem::bad(e.body_text()))?;
    let status = match &query.status {
        None => None,
        Some(name) => Some(Status::from_name(name).ok_or_else(|| {
            Problem::bad(format!(
                "status: one of {} is allowed",
                Status::ALL.map(Status::name).join(", ")
            ))
        })?),
    };
    let limit = query.limit.unwrap_or(PAGE.0);
    if !(1..=PAGE.1).contains(&limit) {
        return Err(Problem::bad(format!("limit: 1 to {} is allowed", PAGE.1)));
    }
    if query.after.is_some() && query.table.is_none() && daemon.config.outbox.len() > 1 {
        return Err(Problem::bad("after: pages are of one table; name it"));
    }
    let admin = servers::admin(&daemon.config, &daemon.db).await?;
    let table = query
        .table
        .as_deref()
        .map(|t| find(&admin, t))
        .transpose()?;
    let filter = Filter {
        table,
        status,
        aggregate_id: query.aggregate_id,
        aggregate_type: None,
    };
    let rows = admin
        .list(&filter, query.after.as_deref(), limit as usize)
        .await?;
    let pages = table.is_some() || daemon.config.outbox.len() == 1;
    let next = rows
        .last()
        .filter(|_| pages && rows.len() == limit as usize)
        .map(|r| r.id.clone());
    Ok(Json(json!({ "rows": rows, "next": next })))
}

/// One row with its payload.
pub async fn row(
    State(daemon): State<Arc<Daemon>>,
    Path((table, id)): Path<(String, String)>,
) -> Answer {
    let admin = servers::admin(&daemon.config, &daemon.db).await?;
    let row = admin.show(Some(find(&admin, &table)?), &id).await?;
    let row = row.ok_or_else(|| Problem::not_found(format!("{table} has no row {id}")))?;
    Ok(Json(json!(row)))
}

/// `retry` or `abandon` of one row.
pub async fn change(
    State(daemon): State<Arc<Daemon>>,
    Path((table, id, change)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Answer {
    if !["retry", "abandon"].contains(&change.as_str()) {
        return Err(Problem::not_found(
            "a row can be POSTed to retry or abandon",
        ));
    }
    authorized(&daemon, &headers)?;
    let admin = servers::admin(&daemon.config, &daemon.db).await?;
    let at = Some(find(&admin, &table)?);
    let ids = std::slice::from_ref(&id);
    let (changed, done) = match change.as_str() {
        "retry" => (admin.retry(at, ids).await?, "is pending again"),
        _ => (admin.abandon(at, ids).await?, "is abandoned"),
    };
    if changed == 0 {
        let text = format!("{table} has no row {id} whose status allows {change}");
        return Err(Problem::new(StatusCode::CONFLICT, text));
    }
    Ok(Json(
        json!({ "changed": changed, "detail": format!("row {id} {done}") }),
    ))
}

/// Stops publishing.
pub async fn pause(State(daemon): State<Arc<Daemon>>, headers: HeaderMap) -> Answer {
    authorized(&daemon, &headers)?;
    pauses::set(&daemon.db, &daemon.config.name, None).await?;
    crate::run::apply_pauses(&daemon).await?;
    Ok(done("paused"))
}

/// Goes on publishing.
pub async fn resume(State(daemon): State<Arc<Daemon>>, headers: HeaderMap) -> Answer {
    authorized(&daemon, &headers)?;
    pauses::clear(&daemon.db, &daemon.config.name, None).await?;
    crate::run::apply_pauses(&daemon).await?;
    Ok(done("resumed"))
}

/// Publishes every due pending row now.
pub async fn sweep(State(daemon): State<Arc<Daemon>>, headers: HeaderMap) -> Answer {
    authorized(&daemon, &headers)?;
    // By signal: whichever instance leads sees it.
    outbox_ledger::signal::send(&daemon.db, &daemon.config.name, "sweep", Some("{}")).await?;
    Ok(done("the leader has been told to sweep"))
}

/// Acknowledges recorded gaps.
pub async fn ack_gap(State(daemon): State<Arc<Daemon>>, headers: HeaderMap) -> Answer {
    authorized(&daemon, &headers)?;
    let gaps = gap::acknowledge(&daemon.db, &daemon.config.name).await?;
    Ok(done(&format!("{gaps} gaps acknowledged")))
}

fn done(detail: &str) -> Json<Value> {
    Json(json!({ "detail": detail }))
}

fn find(admin: &Admin, table: &str) -> Result<TableIdx, Problem> {
    admin
        .find(table)
        .ok_or_else(|| Problem::not_found(format!("no outbox is named {table}")))
}

/// Every POST needs the configured token; without one nobody may.
fn authorized(daemon: &Daemon, headers: &HeaderMap) -> Result<(), Problem> {
    let Some(token) = &daemon.config.http.token else {
        return Err(Problem::new(
            StatusCode::FORBIDDEN,
            "no http.token is configured, so nothing can be changed here",
        ));
    };
    let given = headers
        .get(header::AUTHORIZATION)
        .and_then(|v| v.to_str().ok());
    let given = given
        .and_then(|v| v.strip_prefix("Bearer "))
        .unwrap_or_default();
    // In constant time: how much of a guess is right must not show.
    if bool::from(given.as_bytes().ct_eq(token.expose_secret().as_bytes())) {
        Ok(())
    } else {
        Err(Problem::new(
            StatusCode::UNAUTHORIZED,
            "the bearer token is missing or wrong",
        ))
    }
}
