//! What must hold once a history has come to its end.

use std::collections::HashMap;
use std::time::Duration;

use outbox_core::Status;
use outbox_core::spec::Ordering;

use super::{Committed, History};
use crate::support::TABLE;

/// What a leader read longer ago is not published any more.
const FRESH: Duration = Duration::from_millis(10_200);

/// Says what does not hold.
pub(crate) fn judge(history: &History) -> Result<(), String> {
    ends(history)?;
    abandoned(history)?;
    transitions(history)?;
    copies(history)?;
    order(history)
}

/// Every committed row is sent, failed with a reason, or abandoned; nothing else was published.
fn ends(history: &History) -> Result<(), String> {
    let arrived = history.first_arrivals();
    for row in &history.rows {
        let Some(found) = history.table.row(TABLE, row.id) else {
            return Err(history.report(&format!("row {} is gone", row.id)));
        };
        let well = match found.status {
            Status::Sent => arrived.contains_key(&row.id),
            Status::Failed => found.last_error.is_some(),
            Status::Abandoned => row.abandoned.is_some(),
            Status::Pending | Status::Processing => false,
        };
        if !well {
            return Err(history.report(&format!("row {} ends as {}", row.id, found.status)));
        }
    }
    let from: HashMap<u64, Duration> = history.rows.iter().map(|r| (r.id, r.from)).collect();
    let log = history.log.lock().unwrap();
    let early = log
        .submitted
        .iter()
        .find(|s| from.get(&s.id).is_none_or(|from| s.at < *from));
    let early = early.map(|s| s.id);
    drop(log);
    match early {
        Some(id) => Err(history.report(&format!("row {id} was published before its time"))),
        None => Ok(()),
    }
}

/// A row that was abandoned before it was read is not published.
fn abandoned(history: &History) -> Result<(), String> {
    for row in &history.rows {
        let Some(at) = row.abandoned else { continue };
        let log = history.log.lock().unwrap();
        let late = log.submitted.iter().rfind(|s| s.id == row.id);
        let late = late.is_some_and(|s| s.at > at + FRESH);
        drop(log);
        if late {
            return Err(history.report(&format!("row {} was abandoned long before", row.id)));
        }
    }
    Ok(())
}

/// Leaders change statuses as they may, and charge for refusals only.
fn transitions(history: &History) -> Result<(), String> {
    for t in history.table.transitions() {
        let legal = matches!(
            (t.from, t.to),
            (
                Status::Pending,
                Status::Sent | Status::Processing | Status::Failed
            ) | (
                Status::Processing,
                Status::Sent | Status::Pending | Status::Failed
            ) | (Status::Failed, Status::Sent)
        );
        if !legal {
            return Err(history.report(&format!("an illegal change: {t:?}")));
        }
    }
    let refusals = history.log.lock().unwrap().refusals;
    if history.table.charged() > refusals {
        let charged = history.table.charged();
        return Err(history.report(&format!("{charged} retries for {refusals} refusals")));
    }
    Ok(())
}

/// Nothing is published twice without a reason.
fn copies(history: &History) -> Result<(), String> {
    if history.copies {
        return Ok(());
    }
    let mut times: HashMap<u64, usize> = HashMap::new();
    for seen in &history.log.lock().unwrap().arrived {
        *times.entry(seen.id).or_default() += 1;
    }
    match times.into_iter().find(|(_, n)| *n > 1) {
        Some((id, n)) => Err(history.report(&format!("row {id} arrived {n} times"))),
        None => Ok(()),
    }
}

/// Rows of one aggregate arrive in the order in which they were committed, as far as ids say the
/// same: strictly, or with as many overtakings as were counted.
fn order(history: &History) -> Result<(), String> {
    if history.ordering == Ordering::None || (history.ordering != Ordering::Strict && history.lost)
    {
        return Ok(());
    }
    let first = history.first_arrivals();
    let place = |row: &Committed| first.get(&row.id).copied();
    let failed = |row: &Committed| {
        let now = history.table.row(TABLE, row.id);
        row.out_of_order || row.abandoned.is_some() || now.is_none_or(|r| r.status != Status::Sent)
    };
    let mut overtaking = HashMap::new();
    for (n, earlier) in history.rows.iter().enumerate() {
        for later in &history.rows[n + 1..] {
            let (earlier, later) = if earlier.id < later.id {
                (earlier, later)
            } else {
                (later, earlier)
            };
            let ordered = earlier.aggregate == later.aggregate
                && earlier.from < later.from
                && !failed(earlier);
            if ordered
                && let (Some(a), Some(b)) = (place(earlier), place(later))
                && a > b
            {
                overtaking.insert(later.id, earlier.id);
            }
        }
    }
    let allowed = if history.ordering == Ordering::Strict {
        0
    } else {
        history.overtaken
    };
    if overtaking.len() as u64 > allowed {
        return Err(history.report(&format!(
            "overtaken (later: earlier) {overtaking:?}, counted {}",
            history.overtaken
        )));
    }
    Ok(())
}
