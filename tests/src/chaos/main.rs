//! Chaos: two instances, real servers, a writer, and one fault after the other; in the end nothing may be lost.
//!
//! The order of the faults and their lengths come from the seed; what they meet does not, so a seed repeats a run in
//! kind, not to the byte.
#![allow(clippy::print_stdout)] // a command line program

mod fault;
mod judge;
mod report;
mod world;

use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use tokio::time::{Instant, sleep};

use fault::{Abandoned, FAULTS, Fault};
use report::Report;
use world::World;

/// Faults on servers of its own, and the judgement; see docs/chaos.md.
#[derive(Debug, Parser)]
#[command(name = "chaos")]
pub(crate) struct Args {
    /// How long faults go on.
    #[arg(long, default_value_t = 600)]
    pub(crate) seconds: u64,
    /// Decides the faults; random if not given.
    #[arg(long, default_value_t = rand::random_range(1..1_000_000))]
    pub(crate) seed: u64,
    /// Rows a second, about.
    #[arg(long, default_value_t = 100.0)]
    pub(crate) rate: f64,
    /// Aggregates, half of them in each table.
    #[arg(long, default_value_t = 50)]
    pub(crate) aggregates: u32,
    /// Only faults whose description contains this.
    #[arg(long, default_value = "")]
    pub(crate) only: String,
    /// Write docs/chaos.md.
    #[arg(long)]
    pub(crate) write: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    println!("chaos --seconds {} --seed {}", args.seconds, args.seed);
    let report = run(&args)
        .await
        .with_context(|| format!("seed {}", args.seed))?;
    println!("\n{}", report.tables());
    if args.write {
        report.write(&args)?;
    }
    Ok(())
}

async fn run(args: &Args) -> Result<Report> {
    let mut world = World::start().await?;
    let writers = world.writers(args.rate, args.aggregates, args.seed)?;
    let mut abandoned = Abandoned::default();
    let faults = faults(args, &mut world, &mut abandoned).await?;

    world.flows().await?;
    let mut written = Vec::new();
    for writer in writers {
        written.push(writer.finish().await?);
    }
    let judged = judge::judge(&world, written, &abandoned, faults.len()).await?;
    world.alive()?;
    let gaps = world
        .mysql
        .count("SELECT COUNT(*) FROM outboxd_gap")
        .await?;
    let epoch = world.mysql.count("SELECT epoch FROM outboxd_lease").await?;
    Ok(Report {
        faults,
        judged,
        gaps,
        epoch,
    })
}

/// One fault after the other until the time is over.
async fn faults(
    args: &Args,
    world: &mut World,
    abandoned: &mut Abandoned,
) -> Result<Vec<(Fault, Option<Duration>)>> {
    let mut random = StdRng::seed_from_u64(args.seed);
    let (start, mut done) = (Instant::now(), Vec::new());
    let mut bag: Vec<&(Fault, &str)> = Vec::new();
    while start.elapsed() < Duration::from_secs(args.seconds) {
        if bag.is_empty() {
            // Each kind comes as often as any other.
            bag.extend(FAULTS.iter().filter(|(_, name)| name.contains(&args.only)));
            bag.shuffle(&mut random);
        }
        let (fault, name) = *bag.pop().context("no fault is called that")?;
        let wait = random.random();
        sleep(Duration::from_millis(random.random_range(500..3000))).await;
        let at = start.elapsed().as_secs_f64();
        fault::inject(fault, world, &mut random, abandoned)
            .await
            .with_context(|| format!("{name}\n{}", world.logs()))?;
        let lifted = start.elapsed().as_secs_f64();
        // Every other fault meets what the one before has left.
        let mut again = None;
        if wait {
            let since = Instant::now();
            world.flows().await.context(name)?;
            again = Some(since.elapsed());
        }
        world.alive()?;
        println!(
            "{at:6.1} s to {lifted:6.1} s  {name}; {} received, {} copies{}",
            world.received(),
            world.copies(),
            again.map_or(String::new(), |t| format!(
                "; again after {:.1} s",
                t.as_secs_f64()
            ))
        );
        done.push((fault, again));
    }
    Ok(done)
}
