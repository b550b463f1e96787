//! The folder that servers run from, free ports, and a limit on how many servers start at once.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::process::Command;
use tokio::sync::{OnceCell, Semaphore};

/// A start takes a core for seconds; more at once only make each other time out.
pub(crate) static STARTING: Semaphore = Semaphore::const_new(2);

static ROOT: OnceCell<PathBuf> = OnceCell::const_new();

/// The project's folder.
#[must_use]
pub fn project() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

/// The server folder, provisioned by `scripts/services` if that was not done before (which takes a minute).
///
/// # Errors
/// What the script said.
pub async fn servers() -> Result<&'static Path> {
    let root = ROOT.get_or_try_init(provision).await?;
    Ok(root)
}

async fn provision() -> Result<PathBuf> {
    let script = project().join("scripts/services");
    let out = Command::new(&script)
        .arg("provision")
        .stdin(Stdio::null())
        .output()
        .await
        .with_context(|| format!("running {}", script.display()))?;
    if !out.status.success() {
        bail!(
            "services provision: {}",
            String::from_utf8_lossy(&out.stderr).trim()
        );
    }
    let text = String::from_utf8(out.stdout)?;
    let root = text
        .lines()
        .last()
        .context("services provision printed no path")?;
    Ok(PathBuf::from(root))
}

/// A port on loopback that nobody listens on.
///
/// Taken from below the range of outgoing connections, so that a stranger's connection cannot sit on the port while
/// its server restarts. Another process may still be faster; whoever binds it has to try again with another one.
///
/// # Errors
/// None of a thousand random ports was free.
pub fn free_port() -> Result<u16> {
    for _ in 0..1000 {
        let port = rand::random_range(14_000..32_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no free port on loopback")
}

/// A name for a server's folder that no other has. Our process id in it tells `scripts/services` whose it was, if this
/// process is killed before it can remove the folder.
pub(crate) fn unique(prefix: &str) -> String {
    let id = uuid::Uuid::new_v4().simple().to_string();
    format!("{prefix}-{}-{}", std::process::id(), &id[..8])
}
