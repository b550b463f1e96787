//! What `docker/` expects of the program: the metrics of the alert rules and of the dashboard exist, and every alert
//! has its entry in the runbook.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use outbox_testkit::wait;
use serde_json::Value;

use crate::world::World;

fn file(path: &str) -> Result<String> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path);
    std::fs::read_to_string(&path).with_context(|| path.display().to_string())
}

/// The names of our metrics in a text.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words
        .filter(|w| w.starts_with("outboxd_"))
        .map(str::to_owned)
        .collect()
}

/// Every query of the dashboard, wherever it stands.
fn queries(dashboard: &Value, found: &mut Vec<String>) {
    match dashboard {
        Value::Object(members) => {
            if let Some(Value::String(query)) = members.get("expr") {
                found.push(query.clone());
            }
            members.values().for_each(|v| queries(v, found));
        }
        Value::Array(items) => items.iter().for_each(|v| queries(v, found)),
        _ => {}
    }
}

#[tokio::test]
async fn every_metric_of_alerts_and_dashboard_is_exposed() -> Result<()> {
    let alerts = file("docker/alerts.yml")?;
    let dashboard: Value = serde_json::from_str(&file("docker/dashboard.json")?)?;
    let mut shown = Vec::new();
    queries(&dashboard, &mut shown);
    let expressions: Vec<&str> = alerts
        .lines()
        .filter_map(|l| l.trim().strip_prefix("expr:"))
        .collect();
    ensure!(
        shown.len() > 10 && expressions.len() > 8,
        "{} queries, {} alerts",
        shown.len(),
        expressions.len()
    );
    let mut wanted = names(&shown.join("\n"));
    for expression in &expressions {
        let of = names(expression);
        // The job's own `up`, or one of ours.
        ensure!(!of.is_empty() || expression.contains("up{"), "{expression}");
        wanted.extend(of);
    }
    let world = World::start("").await?;
    world.insert(1, 0, "OrderPaid", "{}").await?;
    world.status_of(1, 1).await?;
    let mut missing = BTreeSet::new();
    let there = wait::until(
        "every metric is there",
        Duration::from_secs(30),
        async || {
            let page = world
                .outboxd
                .get("/metrics")
                .await
                .map(|p| p.body)
                .unwrap_or_default();
            let exposed: BTreeSet<&str> = page
                .lines()
                .filter(|l| !l.starts_with('#'))
                .filter_map(|l| l.split(['{', ' ']).next())
                .collect();
            missing = wanted
                .iter()
                .filter(|name| !exposed.contains(name.as_str()))
                .cloned()
                .collect();
            missing.is_empty()
        },
    )
    .await;
    ensure!(there.is_ok(), "not exposed: {missing:?}");
    Ok(())
}

#[test]
fn every_alert_has_its_entry_in_the_runbook() -> Result<()> {
    let alerts = file("docker/alerts.yml")?;
    let runbook = file("docs/operations.md")?;
    let anchors: BTreeSet<String> = runbook
        .lines()
        .filter_map(|l| l.strip_prefix("### ").or_else(|| l.strip_prefix("## ")))
        .map(|h| {
            h.to_lowercase()
                .replace(' ', "-")
                .replace(|c: char| !(c.is_alphanumeric() || c == '-' || c == '_'), "")
        })
        .collect();
    let links: Vec<&str> = alerts
        .lines()
        .filter_map(|l| l.trim().strip_prefix("runbook: "))
        .collect();
    let alerts: Vec<&str> = alerts
        .lines()
        .filter_map(|l| l.trim().strip_prefix("- alert: "))
        .collect();
    ensure!(
        links.len() == alerts.len() && !links.is_empty(),
        "{alerts:?} {links:?}"
    );
    for (alert, link) in alerts.iter().zip(links) {
        let anchor = link
            .trim_matches('"')
            .strip_prefix("docs/operations.md#")
            .context("a link elsewhere")?;
        ensure!(anchors.contains(anchor), "{alert}: {anchor}");
        ensure!(
            runbook.contains(&format!("`{alert}`")),
            "the runbook does not name {alert}"
        );
    }
    Ok(())
}

#[test]
fn the_compose_file_mounts_what_is_here() -> Result<()> {
    let compose = file("docker-compose.yml")?;
    for name in [
        "prometheus.yml",
        "alerts.yml",
        "datasource.yml",
        "dashboards.yml",
        "dashboard.json",
        "accounts.sql",
    ] {
        ensure!(
            compose.contains(&format!("./docker/{name}:")),
            "{name} is not mounted"
        );
        file(&format!("docker/{name}"))?;
    }
    ensure!(file("docker/prometheus.yml")?.contains("alerts.yml"));
    Ok(())
}
