//! `list`, `show`, `retry`, `abandon`.

use std::process::ExitCode;

use outbox_core::{Status, TableIdx};
use outbox_ledger::admin::{Admin, Filter};
use outbox_ledger::connect::Db;
use serde_json::{Value, json};

use super::{output, yes_or_no};
use crate::config::Config;
use crate::run::servers;

/// Reasons are cut to this in the list; `show` has the whole.
const REASON: usize = 80;

/// The table of that name, or `None` for all.
pub fn find(admin: &Admin, table: Option<&str>) -> anyhow::Result<Option<TableIdx>> {
    let Some(name) = table else { return Ok(None) };
    let found = admin.find(name);
    let bare = |full: &str| full.rsplit_once('.').is_some_and(|(_, bare)| bare == name);
    let mut broken = admin.broken().iter();
    if let (None, Some(b)) = (found, broken.find(|b| b.table == name || bare(&b.table))) {
        anyhow::bail!("the table {} cannot be used: {}", b.table, b.error);
    }
    found.map(Some).ok_or_else(|| {
        anyhow::anyhow!(
            "no outbox is named {name}; configured: {}",
            admin.names().join(", ")
        )
    })
}

/// Rows, newest first, without payload.
pub async fn list(
    config: &Config,
    db: &Db,
    table: Option<&str>,
    status: Option<Status>,
    aggregate_id: Option<String>,
    limit: u32,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    let admin = servers::admin(config, db).await?;
    let filter = Filter {
        table: find(&admin, table)?,
        status,
        aggregate_id,
        aggregate_type: None,
    };
    let rows = admin.list(&filter, None, usize::try_from(limit)?).await?;
    if as_json {
        output::json(&rows)?;
        return Ok(ExitCode::SUCCESS);
    }
    let text = |v: &Option<String>| v.clone().unwrap_or_default();
    let header = [
        "table",
        "id",
        "status",
        "aggregate",
        "event",
        "retries",
        "next retry",
        "last error",
    ];
    output::table(
        &header,
        rows.iter().map(|r| {
            let error = text(&r.last_error);
            let short: String = error.chars().take(REASON).collect();
            let short = if short.len() < error.len() {
                format!("{short}…")
            } else {
                short
            };
            let aggregate = format!("{} {}", r.aggregate_type, r.aggregate_id)
                .trim()
                .to_owned();
            vec![
                r.table.clone(),
                r.id.clone(),
                r.status.clone(),
                aggregate,
                text(&r.event_type),
                r.retry_count.to_string(),
                text(&r.next_retry_at),
                short,
            ]
        }),
    );
    Ok(ExitCode::SUCCESS)
}

/// One row with its payload.
pub async fn show(
    config: &Config,
    db: &Db,
    table: Option<&str>,
    id: &str,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    let admin = servers::admin(config, db).await?;
    let Some(row) = admin.show(find(&admin, table)?, id).await? else {
        anyhow::bail!("there is no row {id}");
    };
    if as_json {
        output::json(&row)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut facts = vec![
        vec!["table".to_owned(), row.row.table.clone()],
        vec!["status".to_owned(), row.row.status.clone()],
    ];
    for (name, value) in &row.columns {
        let text = match value {
            Value::Null => "NULL".to_owned(),
            Value::String(s) => s.clone(),
            other => other.to_string(),
        };
        facts.push(vec![name.clone(), text]);
    }
    output::table(&["", ""], facts);
    Ok(ExitCode::SUCCESS)
}

/// Failed rows back to pending.
pub async fn retry(
    config: &Config,
    db: &Db,
    table: Option<&str>,
    ids: &[String],
    all_failed: bool,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    let admin = servers::admin(config, db).await?;
    let table = find(&admin, table)?;
    let changed = if all_failed {
        admin.retry_all_failed(table).await?
    } else {
        admin.retry(table, ids).await?
    };
    answer(changed, "rows are pending again", as_json)
}

/// Pending or failed rows to abandoned.
pub async fn abandon(
    config: &Config,
    db: &Db,
    table: Option<&str>,
    ids: &[String],
    aggregate: Option<(Option<&str>, &str)>,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    let admin = servers::admin(config, db).await?;
    let table = find(&admin, table)?;
    let changed = match aggregate {
        Some((kind, id)) => admin.abandon_aggregate(table, kind, id).await?,
        None => admin.abandon(table, ids).await?,
    };
    answer(changed, "rows are abandoned", as_json)
}

fn answer(changed: u64, what: &str, as_json: bool) -> anyhow::Result<ExitCode> {
    if as_json {
        output::json(&json!({ "changed": changed }))?;
    } else {
        output::line(format!("{changed} {what}"));
    }
    Ok(yes_or_no(changed > 0))
}
