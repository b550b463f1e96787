//! Logs on standard error, for people or as one JSON object on each line.

use std::io;

use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Layer as _, Registry, reload};

use crate::config::{Log, LogFormat};

/// Changes the level while the program runs.
#[derive(Clone, Debug)]
pub struct LevelHandle(reload::Handle<Targets, Registry>);

/// A level that is none.
#[derive(Debug, thiserror::Error)]
#[error("not a log level: {0}")]
pub struct BadLevel(String);

impl LevelHandle {
    /// Sets the level, in the form of `log.level`.
    pub fn set(&self, level: &str) -> Result<(), BadLevel> {
        let targets = targets(level).ok_or_else(|| BadLevel(level.chars().take(100).collect()))?;
        self.0.reload(targets).map_err(|e| BadLevel(e.to_string()))
    }
}

/// Installs the subscriber. Targets that print message bodies or secrets are off whatever the
/// level says.
pub fn init(log: &Log) -> LevelHandle {
    let filter =
        targets(&log.level).unwrap_or_else(|| Targets::new().with_default(tracing::Level::INFO));
    let (filter, handle) = reload::Layer::new(filter);
    let base = tracing_subscriber::fmt::layer().with_writer(io::stderr);
    match log.format {
        LogFormat::Text => {
            let layer = base.with_ansi(false).with_filter(filter);
            tracing_subscriber::registry().with(layer).init();
        }
        LogFormat::Json => {
            let layer = base.json().flatten_event(true).with_filter(filter);
            tracing_subscriber::registry().with(layer).init();
        }
    }
    LevelHandle(handle)
}

/// Levels, or `target=level`, separated by commas. The library alone takes any word for a target.
pub fn is_level(text: &str) -> bool {
    text.split(',').all(|part| {
        let level = part.split_once('=').map_or(part, |(_, level)| level);
        level
            .trim()
            .parse::<tracing::level_filters::LevelFilter>()
            .is_ok()
    })
}

/// The level's directives, with the noisy targets off. Libraries are heard from `warn` on unless
/// named, because at `debug` they print what they send.
fn targets(level: &str) -> Option<Targets> {
    if !is_level(level) {
        return None;
    }
    let asked: Targets = level.parse().ok()?;
    let mut all = Targets::new();
    let plain = !level.contains('=');
    if let Some(default) = asked.default_level() {
        all = if plain {
            let ours = [
                "outboxd",
                "outbox_core",
                "outbox_tail",
                "outbox_ledger",
                "outbox_poller",
            ];
            let libraries = default.min(tracing::level_filters::LevelFilter::WARN);
            ours.into_iter()
                .fold(all.with_default(libraries), |all, t| {
                    all.with_target(t, default)
                })
        } else {
            all.with_default(default)
        };
    }
    all = all.with_targets(asked.iter());
    let off = outbox_tail::rabbit::NOISY_TARGETS;
    Some(off.iter().fold(all, |all, t| {
        all.with_target(*t, tracing::level_filters::LevelFilter::OFF)
    }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use tracing::Level;

    #[test]
    fn libraries_are_heard_from_warn_on_and_noisy_ones_never() {
        let t = targets("debug").unwrap();
        assert!(t.would_enable("outbox_tail::relay", &Level::DEBUG));
        assert!(!t.would_enable("sqlx::query", &Level::INFO));
        assert!(t.would_enable("sqlx::query", &Level::WARN));
        for noisy in outbox_tail::rabbit::NOISY_TARGETS {
            assert!(
                !targets("trace,lapin=trace")
                    .unwrap()
                    .would_enable(noisy, &Level::ERROR)
            );
        }
    }

    #[test]
    fn directives_are_taken_and_nonsense_is_refused() {
        let t = targets("info,outbox_ledger=trace").unwrap();
        assert!(t.would_enable("outbox_ledger::settle", &Level::TRACE));
        assert!(targets("loud").is_none());
    }
}
