//! What processes use, from /proc.

use std::collections::VecDeque;
use std::fs::read_to_string;

use anyhow::{Context, Result};

/// Processor time of a process so far, in seconds.
pub fn cpu(pid: u32) -> Result<f64> {
    let stat = read_to_string(format!("/proc/{pid}/stat"))?;
    // Behind the name, which may hold anything.
    let rest = stat.rsplit_once(") ").context("an odd stat file")?.1;
    let ticks: Vec<u64> = rest
        .split(' ')
        .skip(11)
        .take(2)
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    // USER_HZ is 100 on every Linux that this runs on.
    Ok(seconds(ticks.iter().sum::<u64>()) / 100.0)
}

#[allow(clippy::cast_precision_loss)] // processor time within a run is far below 2^52 ticks
fn seconds(ticks: u64) -> f64 {
    ticks as f64
}

/// Resident memory in bytes.
pub fn resident(pid: u32) -> Result<u64> {
    let status = read_to_string(format!("/proc/{pid}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .context("no resident memory")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024)
}

/// The descendant of this process whose program is called `name`.
pub fn descendant(name: &str) -> Result<u32> {
    let mut left = VecDeque::from([std::process::id()]);
    while let Some(pid) = left.pop_front() {
        if read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name) {
            return Ok(pid);
        }
        let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
            continue;
        };
        for thread in threads.flatten() {
            let children = read_to_string(thread.path().join("children")).unwrap_or_default();
            left.extend(
                children
                    .split_whitespace()
                    .filter_map(|c| c.parse::<u32>().ok()),
            );
        }
    }
    anyhow::bail!("no {name} runs below this process")
}

/// The load average of the last minute.
pub fn load() -> f64 {
    let text = read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ')
        .next()
        .and_then(|one| one.parse().ok())
        .unwrap_or(f64::NAN)
}

/// `name` of /proc/cpuinfo or /proc/meminfo.
pub fn info(file: &str, name: &str) -> String {
    let text = read_to_string(file).unwrap_or_default();
    text.lines()
        .find_map(|line| line.split_once(':').filter(|(key, _)| key.trim() == name))
        .map_or_else(|| "unknown".into(), |(_, value)| value.trim().to_owned())
}
