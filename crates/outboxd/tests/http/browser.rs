//! Headless Chromium through chromedriver: the WebDriver protocol is HTTP and JSON.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use outbox_testkit::http::request_within;
use outbox_testkit::{root, wait};
use serde_json::{Value, json};

/// Chromium takes its time to start on a busy machine.
const SLOW: Duration = Duration::from_secs(120);
const SOON: Duration = Duration::from_secs(60);
/// Under this name WebDriver refers to an element.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

pub struct Browser {
    driver: Child,
    port: u16,
    session: String,
}

/// Ends the driver too when the test fails; the browser ends with its driver.
impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

fn chromedriver() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join("chromedriver"))
        .find(|program| program.exists())
}

impl Browser {
    /// `None`, with a loud word, where there is no Chromium.
    #[allow(clippy::print_stderr)]
    pub async fn start() -> Result<Option<Self>> {
        let Some(program) = chromedriver() else {
            eprintln!(
                "SKIPPED: no chromedriver on PATH; the console was not looked at in a browser"
            );
            return Ok(None);
        };
        let port = root::free_port()?;
        let driver = Command::new(program)
            .arg(format!("--port={port}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let mut browser = Self {
            driver,
            port,
            session: String::new(),
        };
        wait::until("chromedriver answers", SOON, async || {
            matches!(browser.send("GET", "/status", Value::Null).await, Ok(v) if v["ready"] == true)
        })
        .await?;
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "goog:loggingPrefs": { "browser": "ALL" },
            "goog:chromeOptions": { "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1240,1500"] }
        } } });
        let session = browser.send("POST", "/session", wanted).await?;
        let id = session["sessionId"].as_str().context("no session")?;
        browser.session = format!("/session/{id}");
        Ok(Some(browser))
    }

    async fn send(&self, method: &str, path: &str, body: Value) -> Result<Value> {
        let text = if method == "POST" {
            body.to_string()
        } else {
            String::new()
        };
        let headers = [("content-type", "application/json")];
        let path = format!("{}{path}", self.session);
        let answer = request_within(SLOW, self.port, method, &path, &headers, &text).await?;
        let value = answer.json()?["value"].clone();
        if answer.status != 200 {
            bail!("{method} {path}: {value}");
        }
        Ok(value)
    }

    pub async fn open(&self, url: &str) -> Result<()> {
        self.send("POST", "/url", json!({ "url": url }))
            .await
            .map(drop)
    }

    /// The value of an expression in the page.
    pub async fn value(&self, expression: &str) -> Result<Value> {
        let script = json!({ "script": format!("return ({expression})"), "args": [] });
        self.send("POST", "/execute/sync", script).await
    }

    /// Waits until an expression is true in the page; what `show` says is told if it never is.
    pub async fn until(&self, expression: &str, show: &str) -> Result<()> {
        let held = wait::until(expression, SOON, async || {
            matches!(self.value(expression).await, Ok(Value::Bool(true)))
        })
        .await;
        if held.is_err() {
            bail!("{expression}: {:?}", self.value(show).await);
        }
        Ok(())
    }

    async fn find(&self, css: &str) -> Result<String> {
        let found = json!({ "using": "css selector", "value": css });
        let found = wait::until_ok(&format!("{css} is there"), SOON, async || {
            self.send("POST", "/element", found.clone()).await
        })
        .await?;
        Ok(found[ELEMENT].as_str().context("no element")?.to_owned())
    }

    /// As a person clicks: the element has to be visible, and nothing may lie over it. The page may put another
    /// one in its place between finding and clicking.
    pub async fn click(&self, css: &str) -> Result<()> {
        wait::until_ok(&format!("{css} is clicked"), SOON, async || {
            let id = self.find(css).await?;
            self.send("POST", &format!("/element/{id}/click"), json!({}))
                .await
        })
        .await
        .map(drop)
    }

    pub async fn write(&self, css: &str, text: &str) -> Result<()> {
        let id = self.find(css).await?;
        self.send(
            "POST",
            &format!("/element/{id}/value"),
            json!({ "text": text }),
        )
        .await
        .map(drop)
    }

    /// Keys to whatever has the focus.
    pub async fn press(&self, key: &str) -> Result<()> {
        let actions = json!({ "actions": [{ "type": "key", "id": "keyboard", "actions": [
            { "type": "keyDown", "value": key }, { "type": "keyUp", "value": key }
        ] }] });
        self.send("POST", "/actions", actions).await.map(drop)
    }

    pub async fn scheme(&self, scheme: &str) -> Result<()> {
        let params = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.devtools("Emulation.setEmulatedMedia", params).await
    }

    pub async fn width(&self, width: u32, height: u32) -> Result<()> {
        let params = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.devtools("Emulation.setDeviceMetricsOverride", params)
            .await
    }

    async fn devtools(&self, command: &str, params: Value) -> Result<()> {
        let body = json!({ "cmd": command, "params": params });
        self.send("POST", "/goog/cdp/execute", body).await.map(drop)
    }

    /// The page as PNG, into the folder that `OUTBOXD_SCREENSHOTS` names; nowhere without it.
    pub async fn picture(&self, name: &str) -> Result<()> {
        let Some(folder) = std::env::var_os("OUTBOXD_SCREENSHOTS") else {
            return Ok(());
        };
        let shot = self.send("GET", "/screenshot", Value::Null).await?;
        let png = openssl::base64::decode_block(shot.as_str().context("no picture")?)?;
        std::fs::write(PathBuf::from(folder).join(name), png)?;
        Ok(())
    }

    /// What the browser complained about: refused by the policy, uncaught errors.
    pub async fn complaints(&self) -> Result<Vec<String>> {
        let log = self
            .send("POST", "/se/log", json!({ "type": "browser" }))
            .await?;
        let entries = log.as_array().context("no log")?;
        let messages = entries.iter().filter_map(|e| e["message"].as_str());
        Ok(messages.map(str::to_owned).collect())
    }

    pub async fn close(self) -> Result<()> {
        self.send("DELETE", "", Value::Null).await.map(drop)
    }
}

/// A name for every control, no name twice: what a screen reader and a keyboard need.
pub async fn is_accessible(browser: &Browser) -> Result<()> {
    let nameless = "[...document.querySelectorAll('button, input, select, a, svg[role=img], progress')]\
        .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length))\
        .map(e => e.outerHTML)";
    let found = browser.value(nameless).await?;
    ensure!(found == json!([]), "without a name: {found}");
    let twice = "[...document.querySelectorAll('[id]')].map(e => e.id).filter((id, n, all) => all.indexOf(id) !== n)";
    let found = browser.value(twice).await?;
    ensure!(found == json!([]), "the same id twice: {found}");
    Ok(())
}
