//! The daemon: HTTP, the election, and what a leader does.

mod chores;
mod control;
mod election;
mod gate;
pub mod replay;
pub mod servers;
mod session;
mod signals;
mod stats;
mod tables;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use metrics_exporter_prometheus::PrometheusHandle;
use outbox_ledger::connect::Db;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

pub use chores::pauses as apply_pauses;
pub use control::{Control, ControlSlot};

use crate::config::Config;
use crate::health::HealthBoard;
use crate::logging::LevelHandle;
use crate::metrics::Meters;
use crate::supervise::Crew;

/// How long everything may take to end after SIGTERM: the tail's drain, the last checkpoint, the
/// lease. What is cut off then is repeated by the next start, never lost.
const STOP_DEADLINE: Duration = Duration::from_secs(25);

/// What every part of the daemon shares.
pub struct Daemon {
    /// The configuration.
    pub config: Arc<Config>,
    /// The database.
    pub db: Db,
    /// What this instance is doing.
    pub health: HealthBoard,
    /// Metrics by table.
    pub meters: Arc<Meters>,
    /// The exposition.
    pub exposition: PrometheusHandle,
    /// The log level.
    pub level: LevelHandle,
    /// Steers the parts of a leader, while this instance leads.
    pub control: ControlSlot,
}

/// Runs until SIGTERM or SIGINT.
pub async fn run(config: Config, level: LevelHandle) -> anyhow::Result<ExitCode> {
    let exposition = crate::metrics::install().context("metrics")?;
    let tables: Vec<String> = config.outbox.iter().map(|t| t.full_name()).collect();
    let listener = TcpListener::bind(config.http.listen)
        .await
        .with_context(|| format!("cannot listen on {} (http.listen)", config.http.listen))?;
    let daemon = Arc::new(Daemon {
        db: servers::database(&config)?,
        meters: Arc::new(Meters::new(&tables)),
        config: Arc::new(config),
        health: HealthBoard::default(),
        control: ControlSlot::default(),
        exposition,
        level,
    });
    info!(
        version = env!("CARGO_PKG_VERSION"),
        name = daemon.config.name,
        instance = daemon.config.instance,
        listen = %daemon.config.http.listen,
        tables = tables.join(","),
        "starting"
    );
    let stop = CancellationToken::new();
    // HTTP outlives the election, so that health tells of the end too.
    let http_stop = CancellationToken::new();
    let http = tokio::spawn(crate::http::serve(
        listener,
        daemon.clone(),
        http_stop.clone(),
    ));
    let mut crew = Crew::new(stop.clone());
    crew.vital("termination", termination(stop.clone()));
    crew.vital("election", election::run(daemon.clone(), stop.clone()));
    crew.vital("metrics", stats::run(daemon.clone(), stop.clone()));
    let ended = crew.join(STOP_DEADLINE).await;
    http_stop.cancel();
    // Its own drain is bounded.
    match http.await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => warn!(error = format!("{e:#}"), "HTTP failed"),
        Err(_) => warn!("HTTP panicked"),
    }
    daemon.db.close().await;
    ended?;
    info!("stopped");
    Ok(ExitCode::SUCCESS)
}

/// Ends everything at the first SIGTERM or SIGINT, and the process at once at the second.
async fn termination(stop: CancellationToken) -> anyhow::Result<()> {
    let (mut term, mut int) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
        () = stop.cancelled() => return Ok(()),
    }
    info!("stopping: draining what is in flight; a second signal exits at once");
    stop.cancel();
    // Lives as long as the process: the second signal may come at any time of the end.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        if let Ok(runtime) = runtime {
            runtime.block_on(async {
                tokio::select! {
                    _ = term.recv() => {}
                    _ = int.recv() => {}
                }
            });
            std::process::exit(130);
        }
    });
    Ok(())
}
