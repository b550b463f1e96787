//! Rows: list, show, retry, abandon.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use outbox_core::{Status, TableIdx};
use outbox_ledger::admin::{Admin, Filter};
use serde::Deserialize;
use serde_json::json;

use super::body::Body;
use super::{Answer, admin, unknown};
use crate::http::App;
use crate::http::guard::{Operator, Reader};
use crate::http::problem::Problem;

/// Rows of a page unless asked otherwise, and at most; also the most that one order changes by id.
const PAGE: (u32, u32) = (50, 500);

/// Filters of the list.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::http) struct RowsQuery {
    table: Option<String>,
    status: Option<String>,
    aggregate_type: Option<String>,
    aggregate_id: Option<String>,
    after: Option<String>,
    limit: Option<u32>,
}

/// Rows, newest first, without payload; `next` is the `after` of the next page.
pub(in crate::http) async fn list(
    _: Reader,
    State(app): State<Arc<App>>,
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
    let only = app.daemon.config.outbox.len() == 1;
    if query.after.is_some() && query.table.is_none() && !only {
        return Err(Problem::bad("after: pages are of one table; name it"));
    }
    let admin = admin(&app).await?;
    let table = optional(&admin, query.table.as_deref())?;
    let filter = Filter {
        table,
        status,
        aggregate_id: query.aggregate_id,
        aggregate_type: query.aggregate_type,
    };
    // One more than asked for tells whether there is a next page.
    let wanted = limit as usize;
    let mut rows = admin
        .list(&filter, query.after.as_deref(), wanted + 1)
        .await?;
    let more = rows.len() > wanted;
    rows.truncate(wanted);
    let next = rows
        .last()
        .filter(|_| more && (table.is_some() || only))
        .map(|r| r.id.clone());
    Ok(Json(json!({ "rows": rows, "next": next, "more": more })))
}

type Key = Result<Path<(String, String)>, PathRejection>;

/// One row with its payload.
pub(in crate::http) async fn show(_: Reader, State(app): State<Arc<App>>, key: Key) -> Answer {
    let (table, id) = parts(key)?;
    let admin = admin(&app).await?;
    let row = admin.show(Some(find(&admin, &table)?), &id).await?;
    let row = row.ok_or_else(|| Problem::not_found(format!("{table} has no row {id}")))?;
    Ok(Json(json!(row)))
}

/// One failed row back to pending.
pub(in crate::http) async fn retry(
    _: Operator,
    State(app): State<Arc<App>>,
    key: Key,
    Body(super::Nothing {}): Body<super::Nothing>,
) -> Answer {
    one(&app, key, Change::Retry).await
}

/// One pending or failed row to abandoned.
pub(in crate::http) async fn abandon(
    _: Operator,
    State(app): State<Arc<App>>,
    key: Key,
    Body(super::Nothing {}): Body<super::Nothing>,
) -> Answer {
    one(&app, key, Change::Abandon).await
}

#[derive(Clone, Copy)]
enum Change {
    Retry,
    Abandon,
}

impl Change {
    async fn apply(
        self,
        admin: &Admin,
        table: Option<TableIdx>,
        ids: &[String],
    ) -> Result<u64, Problem> {
        Ok(match self {
            Self::Retry => admin.retry(table, ids).await?,
            Self::Abandon => admin.abandon(table, ids).await?,
        })
    }

    const fn done(self) -> &'static str {
        match self {
            Self::Retry => "pending again",
            Self::Abandon => "abandoned",
        }
    }
}

async fn one(app: &App, key: Key, change: Change) -> Answer {
    let (table, id) = parts(key)?;
    let admin = admin(app).await?;
    let at = Some(find(&admin, &table)?);
    let changed = change.apply(&admin, at, std::slice::from_ref(&id)).await?;
    if changed == 0 {
        return Err(match admin.show(at, &id).await? {
            None => Problem::not_found(format!("{table} has no row {id}")),
            Some(row) => Problem::new(
                StatusCode::CONFLICT,
                format!(
                    "row {id} is {}, which cannot become {}",
                    row.row.status,
                    change.done()
                ),
            ),
        });
    }
    app.overviews.forget().await;
    Ok(changed_to(
        changed,
        format!("row {id} is {}", change.done()),
    ))
}

/// Which rows to retry: these, or every failed one.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(in crate::http) struct RetryMany {
    table: Option<String>,
    ids: Vec<String>,
    all_failed: bool,
}

/// Many failed rows back to pending.
pub(in crate::http) async fn retry_many(
    _: Operator,
    State(app): State<Arc<App>>,
    Body(many): Body<RetryMany>,
) -> Answer {
    if many.all_failed != many.ids.is_empty() {
        return Err(Problem::bad("give either ids or all_failed"));
    }
    if !many.all_failed {
        return by_id(&app, many.table.as_deref(), &many.ids, Change::Retry).await;
    }
    let admin = admin(&app).await?;
    let table = optional(&admin, many.table.as_deref())?;
    let changed = admin.retry_all_failed(table).await?;
    app.overviews.forget().await;
    Ok(changed_to(
        changed,
        format!("{changed} rows are pending again"),
    ))
}

/// Which rows to abandon: these, or those of an aggregate.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(in crate::http) struct AbandonMany {
    table: Option<String>,
    ids: Vec<String>,
    aggregate_type: Option<String>,
    aggregate_id: Option<String>,
}

/// Many pending or failed rows to abandoned.
pub(in crate::http) async fn abandon_many(
    _: Operator,
    State(app): State<Arc<App>>,
    Body(many): Body<AbandonMany>,
) -> Answer {
    let Some(aggregate) = &many.aggregate_id else {
        if many.aggregate_type.is_some() {
            return Err(Problem::bad("aggregate_type: aggregate_id is missing"));
        }
        return by_id(&app, many.table.as_deref(), &many.ids, Change::Abandon).await;
    };
    if !many.ids.is_empty() {
        return Err(Problem::bad("give either ids or aggregate_id"));
    }
    let admin = admin(&app).await?;
    let table = optional(&admin, many.table.as_deref())?;
    let kind = many.aggregate_type.as_deref();
    let changed = admin.abandon_aggregate(table, kind, aggregate).await?;
    app.overviews.forget().await;
    Ok(changed_to(changed, format!("{changed} rows are abandoned")))
}

async fn by_id(app: &App, table: Option<&str>, ids: &[String], change: Change) -> Answer {
    if ids.is_empty() || ids.len() > PAGE.1 as usize {
        return Err(Problem::bad(format!("ids: 1 to {} are allowed", PAGE.1)));
    }
    let admin = admin(app).await?;
    let table = optional(&admin, table)?;
    if table.is_none() && app.daemon.config.outbox.len() > 1 {
        return Err(Problem::bad("table: ids are of one table; name it"));
    }
    let changed = change.apply(&admin, table, ids).await?;
    app.overviews.forget().await;
    let text = format!("{changed} of {} rows are {}", ids.len(), change.done());
    Ok(changed_to(changed, text))
}

fn changed_to(changed: u64, detail: String) -> Json<serde_json::Value> {
    Json(json!({ "changed": changed, "detail": detail }))
}

fn parts(key: Key) -> Result<(String, String), Problem> {
    let Path(parts) = key.map_err(|e| Problem::bad(e.body_text()))?;
    Ok(parts)
}

fn optional(admin: &Admin, table: Option<&str>) -> Result<Option<TableIdx>, Problem> {
    table.map(|t| find(admin, t)).transpose()
}

fn find(admin: &Admin, table: &str) -> Result<TableIdx, Problem> {
    admin.find(table).ok_or_else(|| unknown(table))
}
