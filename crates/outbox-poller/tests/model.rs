//! Random histories with seeds: rows are inserted, refused, abandoned and retried, leaders crash or
//! are replaced while they still act, broker and database go away. Whatever happens, every
//! committed row ends as sent, failed with a reason or abandoned, and order holds.
//!
//! `POLLER_SEED=n` repeats one history, `POLLER_RUNS=n` sets how many there are.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model_support;
mod support;

use model_support::{History, judge};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is a number, not {text}"))
    })
}

fn run(seed: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let verdict = runtime.block_on(async {
        let end = History::play(seed).await?;
        judge(&end)
    });
    if let Err(why) = verdict {
        panic!("POLLER_SEED={seed}: {why}");
    }
}

fn run_all(default: u64) {
    if let Some(seed) = number("POLLER_SEED") {
        return run(seed);
    }
    for seed in 0..number("POLLER_RUNS").unwrap_or(default) {
        run(seed);
    }
}

#[test]
fn whatever_happens_every_row_comes_to_its_end_in_order() {
    run_all(1000);
}

#[test]
#[ignore = "ten times as many histories"]
fn whatever_happens_every_row_comes_to_its_end_in_order_at_length() {
    run_all(10_000);
}
