//! The commands: parsing, exit codes, and what each does.
//!
//! Exit codes: 0 done; 1 the command's own "no"; 2 usage; 69 a server could not be reached;
//! 78 configuration.

pub mod args;
mod check;
mod demo;
mod maintain;
mod operate;
mod output;
mod rows;
pub use operate::full_name;
mod status;
mod tail;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use outbox_core::ports::{Disposition, PortError};
use outbox_tail::stream::{StreamDisposition, StreamError};

use crate::config::{self, Config, Log, LogFormat};
use crate::run::servers;
use args::{Cli, Command};

const NO: u8 = 1;
const UNREACHABLE: u8 = 69;
const CONFIGURATION: u8 = 78;

/// The program.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.command {
        Command::Completions { shell } => {
            clap_complete::generate(
                shell,
                &mut Cli::command(),
                "outboxd",
                &mut std::io::stdout(),
            );
            return ExitCode::SUCCESS;
        }
        Command::Man => {
            let written = clap_mangen::Man::new(Cli::command()).render(&mut std::io::stdout());
            return if written.is_ok() {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(NO)
            };
        }
        Command::Migrate {
            print: true,
            with_outbox,
        } => {
            output::line(outbox_ledger::migrate::print(with_outbox).trim_end());
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    let config = match config::load(cli.config.as_deref(), std::env::vars()) {
        Ok(config) => config,
        Err(e) => {
            complain(&e.to_string());
            return ExitCode::from(CONFIGURATION);
        }
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(e) => {
            complain(&format!("cannot start: {e}"));
            return ExitCode::from(NO);
        }
    };
    let done = runtime.block_on(command(cli.command, config));
    // A connection attempt that hangs in a library must not keep the process.
    runtime.shutdown_timeout(std::time::Duration::from_millis(200));
    match done {
        Ok(code) => code,
        Err(e) => {
            let text = format!("{e:#}");
            let hint = hint(&text).map_or_else(String::new, |h| format!("; {h}"));
            complain(&format!("{text}{hint}"));
            ExitCode::from(code(&e))
        }
    }
}

/// What to do about what the server says of our own tables.
fn hint(error: &str) -> Option<&'static str> {
    let ours = error.contains(".outboxd_") || error.contains("'outboxd_");
    match ours {
        true if error.contains("error 1146") => Some("run `outboxd migrate` first"),
        true if error.contains("error 1142") && error.contains("CREATE") => {
            Some("`migrate` needs an account that may CREATE, ALTER and INDEX")
        }
        _ => None,
    }
}

async fn command(command: Command, config: Config) -> anyhow::Result<ExitCode> {
    if matches!(command, Command::Run) {
        let level = crate::logging::init(&config.log);
        return crate::run::run(config, level).await;
    }
    // Commands answer on standard output; only what is wrong is logged. What check finds wrong
    // is its answer.
    let level = match command {
        Command::Check(_) => "off",
        _ => "warn",
    };
    crate::logging::init(&Log {
        format: LogFormat::Text,
        level: level.to_owned(),
    });
    if let Command::Config { .. } = command {
        output::line(config::print(&config).trim_end());
        return Ok(ExitCode::SUCCESS);
    }
    let db = servers::database(&config)?;
    let done = match command {
        Command::Migrate { with_outbox, .. } => maintain::migrate(&db, with_outbox).await,
        Command::Check(json) => check::run(&config, &db, json.json).await,
        Command::Status(json) => status::run(&config, &db, json.json).await,
        Command::List {
            table,
            status,
            aggregate_id,
            limit,
            json,
        } => {
            rows::list(
                &config,
                &db,
                table.as_deref(),
                status,
                aggregate_id,
                limit,
                json.json,
            )
            .await
        }
        Command::Show { id, table, json } => {
            rows::show(&config, &db, table.as_deref(), &id, json.json).await
        }
        Command::Retry {
            ids,
            all_failed,
            table,
            json,
        } => rows::retry(&config, &db, table.as_deref(), &ids, all_failed, json.json).await,
        Command::Abandon {
            ids,
            aggregate_id,
            aggregate_type,
            table,
            json,
        } => {
            let aggregate = aggregate_id
                .as_deref()
                .map(|id| (aggregate_type.as_deref(), id));
            rows::abandon(&config, &db, table.as_deref(), &ids, aggregate, json.json).await
        }
        Command::Replay {
            from_id,
            to_id,
            since,
            until,
            table,
            yes,
            json,
        } => {
            let range = maintain::Replayed {
                ids: from_id.zip(to_id),
                since,
                until,
            };
            maintain::replay(&config, &db, table.as_deref(), range, yes, json.json).await
        }
        Command::Pause { table } => operate::pause(&config, &db, table.as_deref()).await,
        Command::Resume { table } => operate::resume(&config, &db, table.as_deref()).await,
        Command::Sweep => operate::sweep(&config, &db).await,
        Command::Position { action } => maintain::position(&config, &db, action).await,
        Command::AckGap => operate::ack_gap(&config, &db).await,
        Command::Purge {
            older_than,
            table,
            json,
        } => maintain::purge(&config, &db, table.as_deref(), older_than, json.json).await,
        Command::Tail => tail::run(&config, &db).await,
        Command::Demo { rate, count, watch } => {
            let application = servers::application_database(&config)?;
            demo::run(&config, &application, rate, count, watch.as_deref())
                .await
                .map(yes_or_no)
        }
        Command::Run | Command::Config { .. } | Command::Completions { .. } | Command::Man => {
            Ok(yes_or_no(true))
        }
    };
    db.close().await;
    done
}

/// 0 for yes, 1 for the command's own no.
fn yes_or_no(yes: bool) -> ExitCode {
    if yes {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(NO)
    }
}

/// A server that cannot be reached is 69, whatever the command.
fn code(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if let Some(e) = cause.downcast_ref::<PortError>() {
            return match e.disposition {
                Disposition::Backoff => UNREACHABLE,
                Disposition::Fenced | Disposition::Halt => NO,
            };
        }
        if let Some(e) = cause.downcast_ref::<StreamError>() {
            return if e.disposition() == StreamDisposition::Backoff {
                UNREACHABLE
            } else {
                NO
            };
        }
        if cause
            .downcast_ref::<outbox_ledger::error::DbError>()
            .is_some_and(|e| e.disposition() == Disposition::Backoff)
            || cause.downcast_ref::<lapin::Error>().is_some()
        {
            return UNREACHABLE;
        }
    }
    NO
}

#[allow(clippy::print_stderr)]
fn complain(text: &str) {
    eprintln!("outboxd: {text}");
}

#[cfg(test)]
mod tests {
    use super::hint;

    #[test]
    fn what_is_said_of_our_own_tables_alone_gets_a_hint() {
        let missing =
            "load the position: mysql error 1146: Table 'app.outboxd_checkpoint' doesn't exist";
        assert!(hint(missing).is_some_and(|h| h.contains("migrate")));
        let denied = "migrate: mysql error 1142: CREATE command denied to user 'o'@'h' for table 'outboxd_migrations'";
        assert!(hint(denied).is_some_and(|h| h.contains("CREATE")));
        let theirs = "list rows: mysql error 1146: Table 'app.outbox' doesn't exist";
        assert_eq!(hint(theirs), None);
    }
}
