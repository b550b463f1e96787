//! The API and its description.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use outbox_testkit::http::{Response, request};
use outbox_testkit::{Outboxd, wait};
use serde_json::Value;

use crate::schema::Document;
use crate::world::{BEARER, SOON, World};

async fn document(world: &World) -> Result<Document> {
    let served = world.read("/api/openapi.json").await?;
    let kept = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/openapi.json"
    ))?;
    ensure!(
        served == serde_json::from_str::<Value>(&kept)?,
        "another document is served"
    );
    Ok(Document(served))
}

/// The status, and a problem of just that status.
fn is_problem(answer: &Response, status: u16) -> Result<()> {
    let problem = answer.json().with_context(|| format!("{answer:?}"))?;
    ensure!(
        answer.status == status
            && answer.header("content-type") == Some("application/problem+json")
            && problem["status"] == status
            && problem["detail"].as_str().is_some_and(|d| !d.is_empty())
            && answer.header("x-content-type-options") == Some("nosniff"),
        "{status} was expected: {answer:?}"
    );
    Ok(())
}

#[tokio::test]
async fn every_route_answers_as_the_openapi_document_says() -> Result<()> {
    let world = World::start("").await?;
    world.insert(1, 2, "OrderPaid", "{}").await?;
    let document = document(&world).await?;
    let paths = document.0["paths"].as_object().context("no paths")?;
    for (path, methods) in paths {
        let methods = methods.as_object().context("no methods")?;
        let address = path.replace("{table}", "outbox").replace("{id}", "1");
        let mut described: BTreeSet<String> = methods.keys().map(|m| m.to_uppercase()).collect();
        if described.contains("GET") {
            described.insert("HEAD".to_owned());
        }
        let refused = world.raw("OPTIONS", &address, &[], "").await?;
        is_problem(&refused, 405)?;
        let allow = refused.header("allow").context("no Allow")?;
        let taken: BTreeSet<String> = allow.split(',').map(|m| m.trim().to_owned()).collect();
        ensure!(
            taken == described,
            "{path}: {taken:?}, described {described:?}"
        );

        if methods.contains_key("get") {
            let answer = world.outboxd.get(&address).await?;
            let (schema, kind) = document.answer(path, "get", answer.status)?;
            ensure!(
                answer.status == 200
                    && answer
                        .header("content-type")
                        .is_some_and(|k| k.starts_with(&kind)),
                "{path}: {answer:?}"
            );
            if kind == "application/json" {
                document.check(schema, &answer.json()?, path)?;
            }
        } else {
            for headers in [
                &[][..],
                &[("authorization", "Bearer open-sesame-2")],
                &[("authorization", "Basic open-sesame-1")],
            ] {
                let answer = world.outboxd.post(&address, headers, "{}").await?;
                is_problem(&answer, 401)?;
                ensure!(
                    answer
                        .header("www-authenticate")
                        .is_some_and(|h| h.starts_with("Bearer"))
                );
                let (schema, kind) = document.answer(path, "post", 401)?;
                ensure!(kind == "application/problem+json");
                document.check(schema, &answer.json()?, path)?;
            }
            let answer = world
                .outboxd
                .post(&address, &[BEARER, ("origin", "http://evil.example")], "{}")
                .await?;
            is_problem(&answer, 403)?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn every_refusal_is_a_problem() -> Result<()> {
    let world = World::start("").await?;
    let get = async |path: &str| world.outboxd.get(path).await;
    let post = async |headers: &[(&str, &str)], body: &str| {
        let headers = [&[BEARER], headers].concat();
        world.raw("POST", "/api/rows/retry", &headers, body).await
    };
    for (path, status) in [
        ("/nothing", 404),
        ("/api/nothing", 404),
        ("/api/rows/elsewhere/1", 404),
        ("/api/rows/outbox/4711", 404),
        ("/api/rows/outbox/no-number", 404),
        ("/api/rows/outbox/%ff", 400),
        ("/api/rows?status=lost", 400),
        ("/api/rows?limit=0", 400),
        ("/api/rows?limit=501", 400),
        ("/api/rows?limit=many", 400),
        ("/api/rows?colour=red", 400),
        ("/api/rows?table=elsewhere", 404),
        ("/api/live?after=-1", 400),
    ] {
        is_problem(&get(path).await?, status).with_context(|| path.to_owned())?;
    }
    for method in ["DELETE", "PUT", "PATCH", "POST"] {
        is_problem(&world.raw(method, "/api/status", &[], "").await?, 405)?;
    }
    let json = ("content-type", "application/json");
    is_problem(&post(&[("content-type", "text/plain")], "{}").await?, 415)?;
    is_problem(&post(&[], "{}").await?, 415)?;
    is_problem(&post(&[json], "{").await?, 400)?;
    is_problem(&post(&[json], "{\"colour\": 1}").await?, 400)?;
    is_problem(&post(&[json], "{}").await?, 400)?;
    is_problem(
        &post(
            &[json],
            &format!("{{\"table\": \"{}\"}}", "x".repeat(70_000)),
        )
        .await?,
        413,
    )?;
    is_problem(
        &post(&[json], "{\"table\": \"elsewhere\", \"all_failed\": true}").await?,
        404,
    )?;
    is_problem(
        &world
            .raw("GET", "/api/rows", &[("host", "evil.example")], "")
            .await?,
        421,
    )?;

    // Without a token nothing can be changed at all.
    let config = world.config.clone().with("instance = \"other\"")?;
    let mut open = Outboxd::new(config.without("http.token")?)?;
    open.start().await?;
    open.wait_ready().await?;
    is_problem(&open.post("/api/pause", &[BEARER], "{}").await?, 403)?;
    ensure!(world.read("/api/status").await?["paused"] == false);
    Ok(())
}

#[tokio::test]
async fn beyond_loopback_rows_are_read_with_the_token_only() -> Result<()> {
    let world = World::start("").await?;
    let mut wide = Outboxd::new(world.config.clone().with("instance = \"wide\"")?)?;
    wide.env(
        "OUTBOXD__HTTP__LISTEN",
        &format!("0.0.0.0:{}", wide.http_port),
    );
    wide.start().await?;
    wide.wait_ready().await?;
    for path in [
        "/api/rows",
        "/api/rows/outbox/1",
        "/api/status",
        "/api/live",
    ] {
        is_problem(&wide.get(path).await?, 401)?;
    }
    let named = [BEARER, ("host", "outboxd.internal:9470")];
    ensure!(
        request(wide.http_port, "GET", "/api/rows", &named, "")
            .await?
            .status
            == 200
    );
    for path in [
        "/",
        "/livez",
        "/readyz",
        "/metrics",
        "/runbook",
        "/api/openapi.json",
    ] {
        ensure!(wide.get(path).await?.status == 200, "{path}");
    }
    Ok(())
}

fn ids(page: &Value) -> Vec<String> {
    let rows = page["rows"].as_array().into_iter().flatten();
    rows.filter_map(|r| r["id"].as_str())
        .map(str::to_owned)
        .collect()
}

#[tokio::test]
async fn rows_come_in_pages_and_by_filter_and_whole() -> Result<()> {
    let world = World::start("").await?;
    for id in 1..=7 {
        world
            .insert(id, 2, "OrderPaid", &format!("{{\"n\": {id}.1}}"))
            .await?;
    }
    let mut pages = Vec::new();
    let mut after = String::new();
    loop {
        let page = world
            .read(&format!("/api/rows?status=failed&limit=3{after}"))
            .await?;
        pages.push(ids(&page));
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    ensure!(
        pages == [vec!["7", "6", "5"], vec!["4", "3", "2"], vec!["1"]],
        "{pages:?}"
    );
    // A page that is full and the last one says so.
    let exact = world.read("/api/rows?status=failed&limit=7").await?;
    ensure!(exact["next"].is_null() && exact["more"] == false, "{exact}");
    let one = world
        .read("/api/rows?status=failed&aggregate_id=o-1&aggregate_type=order")
        .await?;
    ensure!(ids(&one) == ["7", "4", "1"], "{one}");
    ensure!(ids(&world.read("/api/rows?status=pending").await?).is_empty());
    ensure!(
        one["rows"][0].get("columns").is_none(),
        "no payload in a list"
    );
    let whole = world.read("/api/rows/outbox/7").await?;
    ensure!(
        whole["columns"]["payload"] == "{\"n\": 7.1}" && whole["last_error"] == "no route",
        "{whole}"
    );
    Ok(())
}

#[tokio::test]
async fn rows_are_retried_and_abandoned_one_by_one_and_together() -> Result<()> {
    let world = World::start("").await?;
    for id in 1..=8 {
        world.insert(id, 2, "OrderPaid", "{}").await?;
    }
    ensure!(world.order("/api/rows/outbox/1/retry", "").await?["changed"] == 1);
    world.status_of(1, 1).await?;
    world.order("/api/rows/app.outbox/2/abandon", "{}").await?;
    world.status_of(2, 4).await?;
    let again = world
        .outboxd
        .post("/api/rows/outbox/2/retry", &[BEARER], "")
        .await?;
    is_problem(&again, 409)?;
    ensure!(again.body.contains("row 2 is abandoned"), "{}", again.body);
    is_problem(
        &world
            .outboxd
            .post("/api/rows/outbox/99/retry", &[BEARER], "")
            .await?,
        404,
    )?;

    let both = world
        .order(
            "/api/rows/abandon",
            "{\"table\": \"outbox\", \"ids\": [\"3\", \"4\", \"1\"]}",
        )
        .await?;
    ensure!(both["changed"] == 2, "{both}");
    let some = world.order("/api/rows/retry", "{\"ids\": [\"5\"]}").await?;
    ensure!(some["changed"] == 1, "{some}");
    // 5 is pending by now, or sent; 8 is of the same aggregate.
    let of = world
        .order("/api/rows/abandon", "{\"aggregate_id\": \"o-2\"}")
        .await?;
    ensure!(of["changed"] == 1 || of["changed"] == 2, "{of}");
    world.status_of(8, 4).await?;
    let rest = world
        .order("/api/rows/retry", "{\"all_failed\": true}")
        .await?;
    ensure!(rest["changed"] == 2, "{rest}");
    world.status_of(6, 1).await?;
    world.status_of(7, 1).await
}

#[tokio::test]
async fn publishing_is_paused_and_resumed_and_gaps_are_acknowledged() -> Result<()> {
    let world = World::start("").await?;
    world.order("/api/pause", "{\"table\": \"outbox\"}").await?;
    ensure!(world.read("/api/status").await?["paused_tables"][0] == "app.outbox");
    world
        .order("/api/resume", "{\"table\": \"outbox\"}")
        .await?;
    world.order("/api/pause", "").await?;
    let status = world.read("/api/status").await?;
    ensure!(
        status["paused"] == true && status["live"]["troubles"][0]["code"] == "paused",
        "{status}"
    );
    world.insert(1, 0, "OrderPaid", "{}").await?;
    world.order("/api/sweep", "").await?;
    let swept = "SELECT COUNT(*) FROM outboxd_signal WHERE type = 'sweep' AND done_at IS NOT NULL";
    wait::until("the leader has obeyed", SOON, async || {
        matches!(world.mysql.count(swept).await, Ok(1))
    })
    .await?;
    ensure!(
        world
            .mysql
            .count("SELECT COUNT(*) FROM outbox WHERE status <> 1")
            .await?
            == 1
    );
    world.order("/api/resume", "").await?;
    world.status_of(1, 1).await?;

    let gap = format!(
        "INSERT INTO outboxd_gap (name, reason, found_at) VALUES ('{}', 'purged', UTC_TIMESTAMP(6))",
        world.name
    );
    world.mysql.exec(gap).await?;
    wait::until(
        "not ready",
        SOON,
        async || matches!(world.outboxd.get("/readyz").await, Ok(r) if r.status == 503),
    )
    .await?;
    let live = world.read("/api/live").await?;
    ensure!(live["troubles"][0]["code"] == "gap", "{live}");
    ensure!(world.order("/api/ack-gap", "{}").await?["detail"] == "1 gaps acknowledged");
    ensure!(world.outboxd.get("/readyz").await?.status == 200, "at once");
    Ok(())
}

#[tokio::test]
async fn what_this_instance_sees_is_told_while_the_database_is_away() -> Result<()> {
    let mut world = World::start("mysql.heartbeat = \"1s\"").await?;
    world.mysql.kill9()?;
    wait::until("the trouble is named", SOON, async || {
        let live = world.read("/api/live").await.unwrap_or_default();
        let codes: Vec<_> = live["troubles"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|t| t["code"].clone())
            .collect();
        codes.contains(&Value::from("mysql"))
    })
    .await?;
    let status = world.outboxd.get("/api/status").await?;
    is_problem(&status, 503)?;
    ensure!(status.json()?["trouble"]["runbook"] == "runbook#mysql-is-away");
    ensure!(world.outboxd.get("/livez").await?.status == 200);
    Ok(())
}
