//! Figures of all rounds, as a table, as JSON and as the page.

use std::fmt::Write as _;
use std::time::SystemTime;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use outbox_testkit::root::project;
use serde::Serialize;

use crate::args::Args;
use crate::usage;
use crate::world::World;

/// What a figure counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Rows or messages a second.
    Rate,
    /// A share.
    Ratio,
    /// Seconds.
    Seconds,
    /// Milliseconds.
    Millis,
    /// Mebibytes.
    Mebibytes,
    /// A number of things.
    Count,
    /// Things a second, of which there are few.
    PerSecond,
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Rate => format!("{value:.0}/s"),
            Self::Ratio => format!("{value:.2}"),
            Self::Seconds => format!("{value:.2} s"),
            Self::Millis => format!("{value:.1} ms"),
            Self::Mebibytes => format!("{value:.1} MiB"),
            Self::Count => format!("{value:.0}"),
            Self::PerSecond => format!("{value:.2}/s"),
        }
    }
}

#[derive(Debug, Serialize)]
struct Figure {
    part: String,
    name: String,
    unit: Unit,
    median: f64,
    rounds: Vec<f64>,
}

/// All figures of a run, and where they come from.
#[derive(Debug, Serialize)]
pub struct Report {
    when: String,
    machine: String,
    versions: String,
    options: String,
    /// The machine's load average at the beginning of each round.
    load: Vec<f64>,
    figures: Vec<Figure>,
    #[serde(skip)]
    names: u32,
}

impl Report {
    /// A report without figures.
    ///
    /// # Errors
    /// A server or the program that does not say its version.
    pub async fn new(world: &World, args: &Args) -> Result<Self> {
        let cores = std::thread::available_parallelism()?;
        let model = usage::info("/proc/cpuinfo", "model name");
        let memory = usage::info("/proc/meminfo", "MemTotal");
        let mysql: Option<String> = world.mysql.first("SELECT VERSION()").await?;
        let rabbit = world.rabbit.ctl(&["version"]).await?;
        let program = world
            .program("bench-version", "")?
            .ok(&["--version"])
            .await?;
        Ok(Self {
            when: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            machine: format!(
                "{cores} cores ({model}), {memory} of memory; both servers, the program and the load on it"
            ),
            versions: format!(
                "{}, MySQL {}, RabbitMQ {}",
                program.trim(),
                mysql.unwrap_or_default(),
                rabbit.trim()
            ),
            options: format!(
                "{} rows, {} in a transaction, {} rounds",
                args.rows, args.per_transaction, args.rounds
            ),
            load: Vec::new(),
            figures: Vec::new(),
            names: 0,
        })
    }

    /// A name that no other program of this run has.
    pub fn unique(&mut self, what: &str) -> String {
        self.names += 1;
        format!("bench-{what}-{}", self.names)
    }

    /// The next round begins.
    pub fn begin_round(&mut self, round: u32) {
        self.load.push(usage::load());
        eprintln!("round {round}, load average {:.2}", usage::load());
    }

    /// One figure of this round.
    pub fn add(&mut self, part: &str, name: &str, unit: Unit, value: f64) {
        eprintln!("  {part}: {name}: {}", unit.show(value));
        let known = self
            .figures
            .iter_mut()
            .find(|f| f.part == part && f.name == name);
        match known {
            Some(figure) => {
                figure.rounds.push(value);
                figure.median = median(&figure.rounds);
            }
            None => self.figures.push(Figure {
                part: part.to_owned(),
                name: name.to_owned(),
                unit,
                median: value,
                rounds: vec![value],
            }),
        }
    }

    /// Prints the table and writes the files.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn finish(self, args: &Args) -> Result<()> {
        println!("{}", self.table());
        let json = serde_json::to_string_pretty(&self)? + "\n";
        std::fs::create_dir_all(project().join("target"))?;
        std::fs::write(project().join("target/bench.json"), &json)?;
        if args.write {
            std::fs::write(project().join("docs/benchmarks.json"), &json)?;
            std::fs::write(project().join("docs/benchmarks.md"), self.page())?;
        }
        Ok(())
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::UTF8_HORIZONTAL_ONLY);
        table.set_header(["part", "figure", "median", "least", "most"]);
        let mut last = "";
        for figure in &self.figures {
            let part = if figure.part == last {
                ""
            } else {
                &figure.part
            };
            last = &figure.part;
            let (least, most) = spread(&figure.rounds);
            table.add_row([
                part.to_owned(),
                figure.name.clone(),
                figure.unit.show(figure.median),
                figure.unit.show(least),
                figure.unit.show(most),
            ]);
        }
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }

    fn page(&self) -> String {
        let loads: Vec<String> = self.load.iter().map(|l| format!("{l:.2}")).collect();
        let mut page = format!(
            "# Benchmarks\n\n{INTRODUCTION}\n\
             * When: {}\n* Machine: {}\n* Load average of the machine as each round began: {}\n* Versions: {}\n\
             * Size: {}\n\nThe same figures with every round's value: [benchmarks.json](benchmarks.json).\n",
            self.when,
            self.machine,
            loads.join(", "),
            self.versions,
            self.options
        );
        let mut last = "";
        for figure in &self.figures {
            if figure.part != last {
                let _ = write!(
                    page,
                    "\n## {}\n\n| figure | median | least | most |\n|---|--:|--:|--:|\n",
                    capital(&figure.part)
                );
                last = &figure.part;
            }
            let (least, most) = spread(&figure.rounds);
            let show = |value| figure.unit.show(value);
            let _ = writeln!(
                page,
                "| {} | {} | {} | {} |",
                figure.name,
                show(figure.median),
                show(least),
                show(most)
            );
        }
        page
    }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(letters).collect()
    })
}

/// The middle one, or the mean of the two in the middle.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match (sorted.get(half), sorted.len() % 2) {
        (Some(one), 1) => *one,
        (Some(one), _) => f64::midpoint(*one, sorted[half - 1]),
        (None, _) => f64::NAN,
    }
}

fn spread(values: &[f64]) -> (f64, f64) {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    (
        least,
        values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
    )
}

const INTRODUCTION: &str = "\
Written by `make bench` (`BENCH=\"--help\"` shows how to run parts of it); not edited by hand. All figures come from one
run on the same two servers, started for it with the durability settings that they have by default. They are medians of
the rounds, with the least and the most. The absolute figures are this machine's; what carries over is their ratio.
A load average well above 3 as a round begins means that other work shared the machine: rates are then lower and
latencies longer than the machine allows, and even ratios are rough.

How it is measured:

* **Parts.** P publishes with lapin alone: the same bodies, properties, queue and window (4,096) as the program,
  persistent, mandatory, confirmed, from the first call to the last confirm. M, D and V mark, delete and read rows in
  batches of 1,000 by primary key, one connection.
* **Limit of a drain.** 1/(1/P + 1/M + 1/V): each row is published, marked and read back, and everything shares one
  machine. A drain may exceed it where these steps overlap. Without status columns there is nothing to mark or read back,
  and the limit is P.
* **Drain.** The program is stopped, the rows are committed, the program is started: it catches up through the binlog,
  reading each row back before it is published. Timed from the first to the last message at the broker.
* **Live.** Single-row transactions at a fixed schedule that nothing holds up (a row that is late counts as late), from
  COMMIT's return to receipt by a consumer. The same for an application that publishes right after its commit, and for
  a loop that publishes 100 pending rows every second.
* **Soak.** Rows are written as fast as they are delivered; memory and processor time are read from /proc.
";
