//! `cargo run -p outbox-fuzz -- SECONDS [SEED]`: feeds mutated events to the row decoder.
//!
//! The corpus was recorded from real servers: layouts and row events of tables with every column
//! type, and JSON documents. Whatever the bytes are, the decoder must not panic, must end, and
//! must not allocate more than a small multiple of its input. A failure prints the seed of its
//! run, which repeats it: `cargo run -p outbox-fuzz -- 0 SEED`.

mod alloc;
mod mutate;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use outbox_core::layout::TableLayout;
use outbox_tail::decode::{Flavour, RowsEvent, TableDecoder, TableMap, json_to_text};
use rand::prelude::*;
use serde::Deserialize;

#[global_allocator]
static ALLOCATOR: alloc::Counting = alloc::Counting;

/// Memory for each byte of input: a column of a table map takes about a hundred bytes.
const FACTOR: usize = 256;
/// zlib can claim about a thousand bytes for each of its own.
const ZLIB_FACTOR: usize = 1_100;
/// Memory whatever the input: the plan and the cells of one row.
const BASE: usize = 256 << 10;

/// One recorded table. Bytes are in hex.
#[derive(Deserialize)]
struct Recorded {
    mariadb: bool,
    layout: TableLayout,
    events: Vec<(u8, String)>,
    json: Vec<String>,
}

struct Sample {
    flavour: Flavour,
    layout: TableLayout,
    wanted: Vec<String>,
    events: Vec<(u8, Vec<u8>)>,
    json: Vec<Vec<u8>>,
}

fn corpus() -> Result<Vec<Sample>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus");
    let mut samples = Vec::new();
    for entry in std::fs::read_dir(folder).context(folder)? {
        let path = entry?.path();
        let text = std::fs::read(&path)?;
        let recorded: Recorded =
            serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
        let events = recorded
            .events
            .iter()
            .map(|(kind, hex)| Ok((*kind, unhex(hex)?)));
        samples.push(Sample {
            flavour: if recorded.mariadb {
                Flavour::Mariadb
            } else {
                Flavour::Mysql
            },
            wanted: recorded
                .layout
                .columns
                .iter()
                .map(|c| c.name.clone())
                .collect(),
            layout: recorded.layout,
            events: events.collect::<Result<_>>()?,
            json: recorded
                .json
                .iter()
                .map(|hex| unhex(hex))
                .collect::<Result<_>>()?,
        });
    }
    ensure!(!samples.is_empty(), "no corpus in {folder}");
    Ok(samples)
}

fn unhex(hex: &str) -> Result<Vec<u8>> {
    let digits = (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16));
    Ok(digits.collect::<Result<_, _>>()?)
}

/// What a run came to, to see that the mutations reach deep enough.
#[derive(Debug, Default)]
struct Tally {
    runs: u64,
    rows: u64,
    errors: u64,
    documents: u64,
}

/// One mutated table map with its rows, or one mutated document.
fn run(samples: &[Sample], seed: u64, tally: &mut Tally) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(seed);
    let sample = &samples[rng.random_range(0..samples.len())];
    tally.runs += 1;
    if !sample.json.is_empty() && rng.random_bool(0.4) {
        let mut document = sample.json[rng.random_range(0..sample.json.len())].clone();
        mutate::mutate(&mut document, &mut rng);
        let (text, peak) = alloc::peak(|| json_to_text(&document));
        within(peak, document.len(), FACTOR)?;
        if let Ok(text) = text {
            tally.documents += 1;
            serde_json::from_slice::<&serde_json::value::RawValue>(&text)
                .context("the text is not JSON")?;
        }
        return Ok(());
    }
    let mut events = sample.events.clone();
    let mutated = rng.random_range(0..events.len());
    mutate::mutate(&mut events[mutated].1, &mut rng);
    if rng.random_bool(0.05) {
        events[mutated].0 =
            [19, 23, 24, 25, 30, 31, 32, 39, 166, 167, 168][rng.random_range(0..11)];
    }
    let mut decoder = None;
    for (kind, body) in events {
        let body = Bytes::from(body);
        let factor = if kind >= 166 { ZLIB_FACTOR } else { FACTOR };
        let ((), peak) = alloc::peak(|| event(sample, kind, &body, &mut decoder, tally));
        within(peak, body.len(), factor)?;
    }
    Ok(())
}

fn event(
    sample: &Sample,
    kind: u8,
    body: &Bytes,
    decoder: &mut Option<TableDecoder>,
    tally: &mut Tally,
) {
    if kind == 19 {
        let _ = TableMap::peek(body);
        let map = TableMap::parse(body, sample.flavour);
        *decoder = map
            .ok()
            .and_then(|m| TableDecoder::new(&m, &sample.layout, &sample.wanted).ok());
        return;
    }
    let _ = RowsEvent::peek(body);
    let (Some(decoder), Ok(event)) = (decoder, RowsEvent::parse(kind, body)) else {
        tally.errors += 1;
        return;
    };
    for row in decoder.rows(&event, 3_600) {
        match row {
            Ok(_) => tally.rows += 1,
            Err(_) => tally.errors += 1,
        }
    }
}

fn within(peak: usize, input: usize, factor: usize) -> Result<()> {
    ensure!(
        peak <= BASE + factor * input,
        "{peak} bytes allocated for {input} bytes of input"
    );
    Ok(())
}

/// Runs with consecutive seeds while `more` says so.
fn fuzz(first_seed: u64, mut more: impl FnMut(u64) -> bool) -> Result<Tally> {
    let samples = corpus()?;
    let mut tally = Tally::default();
    while more(tally.runs) {
        let seed = first_seed.wrapping_add(tally.runs);
        let result = catch_unwind(AssertUnwindSafe(|| run(&samples, seed, &mut tally)));
        match result {
            Ok(result) => result.with_context(|| format!("seed {seed}"))?,
            Err(_) => bail!("a panic with seed {seed}"),
        }
    }
    Ok(tally)
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let seconds = args
        .next()
        .context("usage: outbox-fuzz SECONDS [SEED]")?
        .parse()?;
    let seed = args
        .next()
        .map_or_else(|| Ok(rand::random()), |s| s.parse())?;
    let end = Instant::now() + Duration::from_secs(seconds);
    let tally = fuzz(seed, |runs| runs == 0 || Instant::now() < end)?;
    println!(
        "{} runs from seed {seed}: {} rows and {} documents decoded, {} errors; no panic, no \
         allocation out of proportion",
        tally.runs, tally.rows, tally.documents, tally.errors
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_of_mutated_events_neither_panic_nor_allocate_much() {
        let tally = fuzz(1, |runs| runs < 3_000).unwrap();
        // The mutations leave enough whole to reach the cells.
        let deep = tally.rows > 5_000 && tally.documents > 50 && tally.errors > 500;
        assert!(deep, "{tally:?}");
    }
}
