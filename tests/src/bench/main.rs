//! The benchmark: what outboxd reaches, beside what the servers allow, all in one run on the same servers.
//!
//! A figure of its own says little: it is the machine's. So every round measures the parts first (publishing, marking,
//! reading back) and the program right after, and the page shows their ratio. Nothing is asserted; a run prints a table
//! and writes JSON, and with `--write` the page.
#![allow(clippy::print_stdout, clippy::print_stderr)] // a command line program
#![allow(unreachable_pub)] // a program exports nothing; `pub` marks what other modules use

mod args;
mod cases;
mod drain;
mod live;
mod raw;
mod report;
mod soak;
mod usage;
mod world;

use anyhow::Result;
use clap::Parser;

use args::{Args, Part};
use report::Report;
use world::World;

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let world = World::start(&args).await?;
    let mut report = Report::new(&world, &args).await?;
    for round in 1..=args.rounds {
        report.begin_round(round);
        if args.has(Part::Drain) {
            drain::round(&world, &args, &mut report).await?;
        }
        if args.has(Part::Live) {
            live::round(&world, &args, &mut report).await?;
        }
        if args.has(Part::Soak) {
            soak::round(&world, &args, &mut report).await?;
        }
    }
    report.finish(&args)
}
