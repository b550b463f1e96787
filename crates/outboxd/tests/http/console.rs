//! The console in a real browser.

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::browser::{Browser, is_accessible};
use crate::world::{TOKEN, World};

/// Would change the title of the page if anything took it for markup.
const HOSTILE: &str = r#"{"note": "<script>document.title = \"taken\"</script><img src=x onerror=\"document.title = 1\">"}"#;
const SAID: &str = "document.getElementById('said').textContent";

async fn hostile_row(world: &World, id: u32) -> Result<()> {
    let payload = HOSTILE.replace('\\', "\\\\").replace('\'', "''");
    world.insert(id, 2, "<b>Bold</b>", &payload).await?;
    world
        .mysql
        .exec(format!(
            "UPDATE outbox SET last_error = '<script>document.title = 2</script>' WHERE id = {id}"
        ))
        .await
        .map(drop)
}

#[tokio::test]
async fn the_console_shows_and_steers_in_a_browser() -> Result<()> {
    let Some(browser) = Browser::start().await? else {
        return Ok(());
    };
    // A publish that nobody takes is wrong at once: a row to be retried for good reason.
    let world = World::start("").await?;
    let used = steer(&world, &browser).await;
    let complaints = browser.complaints().await?;
    used.with_context(|| format!("the browser says {complaints:?}"))?;
    // The wrong token's 401 is logged by the browser itself.
    let others: Vec<_> = complaints.iter().filter(|c| !c.contains("401")).collect();
    ensure!(others.is_empty(), "{others:?}");
    browser.close().await
}

async fn steer(world: &World, browser: &Browser) -> Result<()> {
    for id in 1..=4 {
        world.insert(id, 2, "OrderPaid", "{}").await?;
    }
    hostile_row(world, 5).await?;
    browser
        .open(&format!("http://127.0.0.1:{}/", world.outboxd.http_port))
        .await?;
    let text = "document.body.innerText";
    browser
        .until("document.querySelectorAll('#rows tr').length === 5", text)
        .await?;
    browser
        .until(
            "document.getElementById('ready').textContent === 'ready'",
            text,
        )
        .await?;
    browser
        .until(
            "document.getElementById('backlog').innerText.includes('app.outbox')",
            text,
        )
        .await?;
    is_accessible(browser).await?;

    // Live: rows flow and the page tells without being asked.
    for id in 100..160 {
        world.insert(id, 0, "OrderPaid", "{}").await?;
    }
    browser
        .until(
            "document.querySelector('#plot-latency polyline') !== null",
            text,
        )
        .await?;
    browser
        .until(
            "document.getElementById('latency-now').textContent.includes('ms')",
            text,
        )
        .await?;

    // Without a token, and with a wrong one.
    browser
        .click("tr[data-id='1'] button[aria-label='Retry row 1']")
        .await?;
    browser
        .until("document.getElementById('token-dialog').open", SAID)
        .await?;
    browser.write("#token", "not-the-token").await?;
    browser.click("#token-form button").await?;
    browser
        .until("!document.getElementById('token-dialog').open", SAID)
        .await?;
    browser.click("button[aria-label='Retry row 1']").await?;
    browser
        .until(
            &format!("{SAID}.includes('token is missing or wrong')"),
            SAID,
        )
        .await?;
    browser
        .until("document.getElementById('token-dialog').open", SAID)
        .await?;
    world.status_of(1, 2).await?;
    browser.write("#token", TOKEN).await?;
    browser.click("#token-form button").await?;

    // One row, then a question before what cannot be undone, then the rest together.
    browser.click("button[aria-label='Retry row 1']").await?;
    world.status_of(1, 1).await?;
    browser
        .until("document.querySelector(\"tr[data-id='1']\") === null", text)
        .await?;
    browser.click("button[aria-label='Abandon row 2']").await?;
    browser.click("#ask [data-close]").await?;
    world.status_of(2, 2).await?;
    browser.click("button[aria-label='Abandon row 2']").await?;
    browser.click("#ask-yes").await?;
    world.status_of(2, 4).await?;
    browser.click("input[aria-label='Select row 3']").await?;
    browser.click("input[aria-label='Select row 4']").await?;
    browser.click("#retry-picked").await?;
    world.status_of(3, 1).await?;
    world.status_of(4, 1).await?;

    // Text stays text: in the list, in the reason and in the payload.
    browser
        .until("document.querySelectorAll('#rows tr').length === 1", text)
        .await?;
    browser.click("button[aria-label='View row 5']").await?;
    browser
        .until(
            "document.getElementById('payload').textContent.includes('<script>document.title')",
            text,
        )
        .await?;
    browser
        .until(
            "document.getElementById('rows').innerText.includes('<b>Bold</b>')",
            text,
        )
        .await?;
    let made = browser.value("document.querySelectorAll('main script, main img, dialog script, dialog img, td b').length").await?;
    ensure!(made == json!(0), "{made} elements were made of text");
    ensure!(
        browser
            .value("document.title")
            .await?
            .as_str()
            .is_some_and(|t| t.contains("outboxd"))
    );
    browser.press("\u{e00c}").await?;
    browser
        .until("!document.getElementById('detail').open", text)
        .await?;

    // By keyboard: pause, and on again.
    browser.press("p").await?;
    browser.click("#ask-yes").await?;
    browser
        .until(
            "document.getElementById('troubles').innerText.includes('publishing is paused')",
            text,
        )
        .await?;
    world.insert(200, 0, "OrderPaid", "{}").await?;
    browser
        .until(
            "document.getElementById('pause').textContent === 'Resume'",
            text,
        )
        .await?;
    world.status_of(200, 0).await?;
    browser.click("#pause").await?;
    world.status_of(200, 1).await?;
    browser
        .until(
            "!document.getElementById('troubles').innerText.includes('publishing is paused')",
            text,
        )
        .await?;

    // What is wrong leads into the runbook.
    let link = "document.querySelector('#troubles a[href^=\"runbook#\"]')?.getAttribute('href')";
    browser
        .until(&format!("{link} === 'runbook#rows-have-failed'"), text)
        .await?;
    browser.click("#troubles a").await?;
    browser
        .until(
            "document.querySelector(':target')?.id === 'rows-have-failed'",
            "location.href",
        )
        .await
}

#[tokio::test]
async fn the_console_fits_a_phone_and_the_dark() -> Result<()> {
    let Some(browser) = Browser::start().await? else {
        return Ok(());
    };
    let world = World::start("").await?;
    for id in 1..=3 {
        world.insert(id, 2, "OrderPaid", "{}").await?;
    }
    hostile_row(&world, 4).await?;
    browser
        .open(&format!("http://127.0.0.1:{}/", world.outboxd.http_port))
        .await?;
    let text = "document.body.innerText";
    browser
        .until("document.querySelectorAll('#rows tr').length === 4", text)
        .await?;
    let pictures = std::env::var_os("OUTBOXD_SCREENSHOTS").is_some();
    // For a picture, enough of a history to look at.
    let rounds = if pictures { 32 } else { 2 };
    for round in 0..rounds {
        for n in 0..(8 + round % 7 * 4) {
            world
                .insert(1000 + round * 100 + n, 0, "OrderPaid", "{\"total\": 12.5}")
                .await?;
        }
        browser
            .until(&format!("samples.length > {round}"), "samples.length")
            .await?;
    }
    browser
        .until(
            "document.querySelectorAll('#plot-rate polyline').length > 0",
            text,
        )
        .await?;
    let colour = "getComputedStyle(document.body).backgroundColor";
    browser.scheme("light").await?;
    let light = browser.value(colour).await?;
    browser.picture("console-light.png").await?;
    browser.scheme("dark").await?;
    ensure!(
        browser.value(colour).await? != light,
        "dark is not another colour"
    );
    browser.picture("console-dark.png").await?;
    for width in [360, 640, 1240] {
        browser.width(width, 1500).await?;
        let over = browser
            .value("document.documentElement.scrollWidth - innerWidth")
            .await?;
        ensure!(
            over.as_i64().is_some_and(|n| n <= 0),
            "{width} px: {over} px too wide"
        );
        if width == 360 {
            browser.picture("console-phone.png").await?;
        }
    }
    browser.close().await
}
