//! The command line.

use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::cases::Case;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// The parts (publishing, marking, reading back), and the drain of a backlog against them.
    Drain,
    /// Latency at a steady rate, beside an application that publishes itself and a polling loop.
    Live,
    /// Memory and processor time at full speed, and at rest.
    Soak,
}

/// Measures outboxd on servers of its own; see docs/benchmarks.md.
#[derive(Debug, Parser)]
#[command(name = "bench")]
pub struct Args {
    /// Parts to run; all if not given.
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<Part>,
    /// Cases of the drain.
    #[arg(long, value_delimiter = ',', default_values = ["json500", "json18", "json10k", "classic", "blob"])]
    pub cases: Vec<Case>,
    /// How the first case is recorded; the other cases are always marked.
    #[arg(long, value_delimiter = ',', default_values = ["mark", "mark-full", "delete", "none"])]
    pub modes: Vec<Mode>,
    /// Rows of the drain's first case; the others have a quarter of them (10 KB: a twentieth).
    #[arg(long, default_value_t = 200_000)]
    pub rows: u32,
    /// Rows in each of the transactions that write the backlog.
    #[arg(long, default_value_t = 1)]
    pub per_transaction: u32,
    /// Rounds; figures are medians.
    #[arg(long, default_value_t = 3)]
    pub rounds: u32,
    /// Rows a second of the live part.
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1000])]
    pub rates: Vec<u32>,
    /// How long each rate is kept.
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration)]
    pub live: Duration,
    /// How long the soak runs at full speed.
    #[arg(long, default_value = "60s", value_parser = humantime::parse_duration)]
    pub soak: Duration,
    /// How long it rests afterwards.
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration)]
    pub idle: Duration,
    /// Write docs/benchmarks.md and docs/benchmarks.json too, not only target/bench.json.
    #[arg(long)]
    pub write: bool,
}

/// How a drain records what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Rows are marked; the account may write MINIMAL row images.
    Mark,
    /// Rows are marked, with FULL row images: the account lacks SESSION_VARIABLES_ADMIN.
    MarkFull,
    /// Rows are deleted.
    Delete,
    /// `tracking = "none"`: only the position is stored.
    None,
}

impl Args {
    /// Whether that part is to run.
    pub fn has(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}
