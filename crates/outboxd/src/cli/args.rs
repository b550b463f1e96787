//! The command line, as the contract names it.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use outbox_core::Status;

/// Publishes outbox rows from MySQL to RabbitMQ, milliseconds after their commit.
#[derive(Debug, Parser)]
#[command(
    name = "outboxd",
    version,
    disable_help_subcommand = true,
    max_term_width = 100
)]
pub struct Cli {
    /// Configuration file [default: $OUTBOXD_CONFIG, else outboxd.toml]
    #[arg(long, global = true, value_name = "PATH")]
    pub config: Option<PathBuf>,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon
    Run,
    /// Create or update our own tables (outboxd_*); safe to repeat
    Migrate {
        /// Print the SQL instead
        #[arg(long)]
        print: bool,
        /// Also the default outbox table
        #[arg(long)]
        with_outbox: bool,
    },
    /// Check both servers, the account and the tables; says what to do about each finding
    Check(Json),
    /// Leader, position, lag, backlog, gaps and pauses; needs no running daemon
    Status(Json),
    /// List rows, newest first, without their payload
    List {
        /// Only this table
        #[arg(long)]
        table: Option<String>,
        /// Only rows with this status
        #[arg(long, value_parser = status)]
        status: Option<Status>,
        /// Only rows of this aggregate
        #[arg(long)]
        aggregate_id: Option<String>,
        /// At most so many
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        limit: u32,
        #[command(flatten)]
        json: Json,
    },
    /// Show one row with its payload
    Show {
        /// Primary key
        id: String,
        /// The table, where several are configured
        #[arg(long)]
        table: Option<String>,
        #[command(flatten)]
        json: Json,
    },
    /// Failed rows back to pending, due now
    Retry {
        /// Primary keys
        #[arg(required_unless_present = "all_failed", conflicts_with = "all_failed")]
        ids: Vec<String>,
        /// Every failed row
        #[arg(long)]
        all_failed: bool,
        /// Only this table
        #[arg(long)]
        table: Option<String>,
        #[command(flatten)]
        json: Json,
    },
    /// Pending or failed rows to abandoned: final, never published
    Abandon {
        /// Primary keys
        #[arg(
            required_unless_present = "aggregate_id",
            conflicts_with = "aggregate_id"
        )]
        ids: Vec<String>,
        /// Every pending or failed row of this aggregate
        #[arg(long)]
        aggregate_id: Option<String>,
        /// With --aggregate-id: only of this type
        #[arg(long, requires = "aggregate_id")]
        aggregate_type: Option<String>,
        /// Only this table
        #[arg(long)]
        table: Option<String>,
        #[command(flatten)]
        json: Json,
    },
    /// Publish sent rows again, marked with the header outboxd-replay
    Replay {
        /// First primary key
        #[arg(long, requires = "to_id", conflicts_with = "since")]
        from_id: Option<String>,
        /// Last primary key
        #[arg(long, requires = "from_id")]
        to_id: Option<String>,
        /// Rows created since then, in the outbox's time zone ("2026-01-31 08:00:00")
        #[arg(long, required_unless_present = "from_id")]
        since: Option<String>,
        /// Rows created until then
        #[arg(long, requires = "since")]
        until: Option<String>,
        /// The table, where several are configured
        #[arg(long)]
        table: Option<String>,
        /// Do not ask
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        json: Json,
    },
    /// Stop publishing; kept across restarts
    Pause {
        /// Only this table
        #[arg(long)]
        table: Option<String>,
    },
    /// Go on publishing
    Resume {
        /// Only this table
        #[arg(long)]
        table: Option<String>,
    },
    /// Publish every due pending row now
    Sweep,
    /// The stored binlog position
    Position {
        /// What to do with it
        #[command(subcommand)]
        action: PositionCommand,
    },
    /// Acknowledge recorded gaps
    AckGap,
    /// Delete sent rows in small chunks
    Purge {
        /// Only rows that were sent longer ago, such as 7d
        #[arg(long, value_parser = humantime::parse_duration)]
        older_than: Duration,
        /// Only this table
        #[arg(long)]
        table: Option<String>,
        #[command(flatten)]
        json: Json,
    },
    /// Print decoded outbox inserts as JSON lines; publishes and writes nothing
    Tail,
    /// The configuration
    Config {
        /// Print what is in effect, secrets masked, each key explained
        #[arg(long, required = true)]
        print: bool,
    },
    /// Write sample orders with their outbox rows, in transactions, some rolled back
    Demo {
        /// Orders a second
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
        rate: u32,
        /// Orders in all
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
        count: u32,
        /// Receive them too, from a queue of this name, and print each with its latency
        #[arg(long, value_name = "QUEUE")]
        watch: Option<String>,
    },
    /// Print the completion script of a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page
    #[command(hide = true)]
    Man,
}

/// What to do with the position.
#[derive(Debug, Subcommand)]
pub enum PositionCommand {
    /// Print it
    Show(Json),
    /// Set it; checked against the server first
    Set {
        /// A GTID set; on MariaDB a list such as 0-1-100
        #[arg(long, required_unless_present = "file", conflicts_with = "file")]
        gtid: Option<String>,
        /// Binlog file
        #[arg(long, requires = "pos")]
        file: Option<String>,
        /// Offset in the file
        #[arg(long, requires = "file")]
        pos: Option<u64>,
        /// Only say what would be done
        #[arg(long)]
        dry_run: bool,
    },
    /// Start from where the server is now, after a sweep
    Reset {
        /// Only say what would be done
        #[arg(long)]
        dry_run: bool,
    },
}

/// Output for programs.
#[derive(Clone, Copy, Debug, Args)]
pub struct Json {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn status(name: &str) -> Result<Status, String> {
    Status::from_name(name).ok_or_else(|| {
        let names = Status::ALL.map(Status::name);
        format!("one of {} is allowed", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
