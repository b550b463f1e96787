//! Output for people and for programs. Standard output carries results only; logs and questions
//! go to standard error.

#![allow(clippy::print_stdout)]

use std::io::IsTerminal as _;

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

/// Prints a line.
pub fn line(text: impl std::fmt::Display) {
    println!("{text}");
}

/// Prints one JSON document.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

/// Prints a table that fits the terminal; where output is no terminal, cells are not wrapped.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_header(header.iter().copied());
    if std::io::stdout().is_terminal() {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    for row in rows {
        table.add_row(row.iter().map(|cell| printable(cell)));
    }
    println!("{table}");
}

/// Text of a row is the application's: control characters must not reach the terminal.
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|c| {
            if c.is_control() && c != '\n' {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}

/// A counter on standard error while something long runs; silent where that is no terminal.
pub fn progress(what: &'static str) -> indicatif::ProgressBar {
    let bar = indicatif::ProgressBar::new_spinner().with_message(what);
    if let Ok(style) = indicatif::ProgressStyle::with_template("{spinner} {pos} {msg} ({elapsed})")
    {
        bar.set_style(style);
    }
    bar
}
