//! outboxd: publishes outbox rows from MySQL to RabbitMQ, milliseconds after their commit.
#![allow(unreachable_pub)] // a program exports nothing; `pub` marks what other modules use

mod cli;
mod config;
mod health;
mod http;
mod logging;
mod metrics;
mod run;
mod supervise;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
