//! What happened, as a table for the terminal and for the page.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::Result;
use outbox_testkit::root::project;

use crate::Args;
use crate::fault::{FAULTS, Fault};
use crate::judge::Judged;

/// A whole run.
#[derive(Debug)]
pub(crate) struct Report {
    /// Each fault, in order, with the time until messages came again where that was waited for.
    pub(crate) faults: Vec<(Fault, Option<Duration>)>,
    /// The tables.
    pub(crate) judged: Vec<Judged>,
    /// Recorded gaps.
    pub(crate) gaps: u64,
    /// The last epoch: how often leadership was taken.
    pub(crate) epoch: u64,
}

const INTRODUCTION: &str = "# Chaos

Two instances of outboxd, MySQL 9.7 and RabbitMQ 4, all processes of their own; proxies between each
instance and its servers; one writer per outbox table, which rolls back one transaction in ten. One
fault after the other, in an order that a seed decides, each lifted before the next begins, half of
them before the last one was recovered from. In the end all faults are lifted, and this has to hold:

* every committed row was received, with its own payload, and no row that was rolled back, or given
  up by the application while it waited for the broker or for its time;
* every row is final: sent, or abandoned by the application;
* copies are no more than one window per fault;
* each aggregate was received in commit order; with `ordering = \"aggregate\"` no more pairs came in
  the wrong order than `outboxd_overtaken_total` says, with `\"strict\"` none;
* neither instance ended by itself or panicked.

```
cargo run -p outbox-e2e --bin chaos -- --seconds 600 --seed 1
```

This page is the output of one run (`--write`).
";

impl Report {
    /// Both tables, in Markdown.
    pub(crate) fn tables(&self) -> String {
        let mut text = String::from(
            "| fault | times | messages again after: median | longest |\n|---|---:|---:|---:|\n",
        );
        for (fault, name) in FAULTS {
            let these = self.faults.iter().filter(|(f, _)| *f == fault);
            let mut times: Vec<Duration> = these.clone().filter_map(|(_, time)| *time).collect();
            times.sort_unstable();
            let show = |time: Option<&Duration>| {
                time.map_or("–".to_owned(), |t| format!("{:.1} s", t.as_secs_f64()))
            };
            let _ = writeln!(
                text,
                "| {name} | {} | {} | {} |",
                these.count(),
                show(times.get(times.len() / 2)),
                show(times.last())
            );
        }
        text.push_str(
            "\n| table | committed | rolled back | received | copies | overtakings: seen | counted | abandoned |\n\
             |---|---:|---:|---:|---:|---:|---:|---:|\n",
        );
        for one in &self.judged {
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} | {} | {} |",
                one.name,
                one.committed,
                one.rolled_back,
                one.verdict.delivered,
                one.verdict.duplicates,
                one.verdict.overtakings,
                one.counted,
                one.abandoned
            );
        }
        let _ = writeln!(
            text,
            "\n{} faults; gaps recorded: {}; last epoch: {}.",
            self.faults.len(),
            self.gaps,
            self.epoch
        );
        text
    }

    /// Writes docs/chaos.md.
    pub(crate) fn write(&self, args: &Args) -> Result<()> {
        let page = format!(
            "{INTRODUCTION}\n## The run\n\n`--seconds {} --seed {} --rate {} --aggregates {}`: nothing lost, \
             nothing that nobody committed.\n\n{}\n\
             Committed and received are the writers' rows. A row abandoned is one of them that waited for the broker,\n\
             or a delayed one of its own; none of either came. The time until messages come again is counted\n\
             from the end of the fault until ten more of each table have come, after the faults where that was\n\
             waited for.\n",
            args.seconds,
            args.seed,
            args.rate,
            args.aggregates,
            self.tables()
        );
        std::fs::write(project().join("docs/chaos.md"), page)?;
        Ok(())
    }
}
