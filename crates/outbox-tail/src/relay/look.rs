//! Reading back: rows before they are published, and rows that hold their aggregates.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use outbox_core::order::{Check, Ended, Found};
use outbox_core::ports::{Deferral, Ledger, PortResult, Seen};
use outbox_core::window::RowSeq;
use outbox_core::{Aggregate, RowId, RowKey, Status, TableIdx};
use tokio::time::Instant;

use super::desk::Desk;
use super::link::Job;

/// Rows that one look reads back at most; a quarter of a small window, so that one batch is
/// looked at while the one before it is published.
const LOOK_ROWS: usize = 512;
/// Held aggregates that are looked up together.
const CHECK_HOLDS: usize = 500;
/// Ids of what remains that are read at once.
const REMAINING: usize = 4096;
/// Aggregates whose remainder is read one by one where all together are too many.
const ONE_BY_ONE: usize = 16;
/// A row committed longer ago than this cannot still be on its way to visibility, but for a
/// server that waits for a replica: one more look, soon, is enough.
const OLD: Duration = Duration::from_secs(60);
const OLD_ABSENT_FOR: Duration = Duration::from_secs(1);

pub(super) struct Looked {
    seqs: Vec<RowSeq>,
    result: PortResult<Vec<Seen>>,
}

pub(super) struct Checked {
    checks: Vec<Check>,
    result: PortResult<Vec<Answer>>,
}

enum Answer {
    Seen(Aggregate, RowId, Seen),
    Parked(Aggregate, RowId, bool),
    Remaining(Aggregate, Option<Vec<RowId>>),
}

impl Desk {
    /// The next rows to read back, in order.
    pub(super) fn next_look(&mut self, ledger: &Arc<dyn Ledger>) -> Option<Job<Looked>> {
        let now = Instant::now();
        while let Some((at, seq)) = self.absent.first().copied()
            && at <= now
        {
            self.absent.remove(&(at, seq));
            self.to_look.insert(seq);
        }
        let limit = LOOK_ROWS.min(self.config.max_in_flight / 4).max(1);
        let mut seqs = Vec::new();
        let mut tables: HashMap<TableIdx, (Vec<usize>, Vec<RowId>)> = HashMap::new();
        while seqs.len() < limit
            && let Some(seq) = self.to_look.pop_first()
        {
            if let Some(row) = self.rows.get(&seq) {
                let (places, ids) = tables.entry(row.key.table).or_default();
                places.push(seqs.len());
                ids.push(row.key.id.clone());
                seqs.push(seq);
            }
        }
        if seqs.is_empty() {
            return None;
        }
        let ledger = Arc::clone(ledger);
        Some(Box::pin(async move {
            let looks = tables
                .iter()
                .map(|(table, (_, ids))| ledger.look(*table, ids));
            let answers: PortResult<Vec<_>> = join_all(looks).await.into_iter().collect();
            let result = answers.map(|answers| {
                let mut all = vec![Seen::Absent; seqs.len()];
                for ((_, (places, _)), seen) in tables.iter().zip(answers) {
                    for (place, seen) in places.iter().zip(seen) {
                        all[*place] = seen;
                    }
                }
                all
            });
            Looked { seqs, result }
        }))
    }

    /// Rows were read back. On an error they are to be looked at again.
    pub(super) fn looked(&mut self, looked: Looked) -> PortResult<()> {
        match looked.result {
            Ok(seen) => {
                for (seq, seen) in looked.seqs.into_iter().zip(seen) {
                    self.judge(seq, seen);
                }
                self.follow_lanes();
                Ok(())
            }
            Err(e) => {
                self.to_look.extend(looked.seqs);
                Err(e)
            }
        }
    }

    fn judge(&mut self, seq: RowSeq, seen: Seen) {
        let Some(row) = self.rows.get_mut(&seq) else {
            return;
        };
        let table = row.key.table;
        if seen == Seen::Absent {
            self.not_visible(seq);
            return;
        }
        if row.absent.take().is_some() {
            self.window.bring_back(seq);
        }
        if seen.is_fresh() {
            row.verified_at = Some(Instant::now());
            self.queue.insert(seq);
            return;
        }
        let outside_the_order = matches!(
            seen,
            Seen::Row {
                status: Status::Pending,
                retry_count: 0,
                delayed: true,
                claimed: false
            }
        );
        let failed = matches!(
            seen,
            Seen::Row {
                status: Status::Failed,
                ..
            }
        );
        if failed {
            self.drop_row(seq, Ended::Failed);
        } else if seen.is_final() {
            self.drop_row(seq, Ended::Gone);
        } else if outside_the_order {
            self.observer.deferred(table, Deferral::Delayed);
            self.drop_row(seq, Ended::Gone);
        } else {
            self.leave(seq, Deferral::NotFresh);
        }
    }

    /// "Not found" never means rolled back: the row may become visible yet. It keeps its place in
    /// its lane, but not in the window.
    fn not_visible(&mut self, seq: RowSeq) {
        let absent_for = self.config.absent_for;
        let Some(row) = self.rows.get_mut(&seq) else {
            return;
        };
        let now = Instant::now();
        let (since, tries) = row.absent.unwrap_or((now, 0));
        let old = row.age + row.read_at.elapsed() > OLD;
        let bound = if old {
            OLD_ABSENT_FOR.min(absent_for)
        } else {
            absent_for
        };
        if tries > 0 && now - since >= bound {
            self.observer.deferred(row.key.table, Deferral::NotVisible);
            self.drop_row(seq, Ended::Gone);
            return;
        }
        row.absent = Some((since, tries + 1));
        let pause = Duration::from_millis(100).saturating_mul(1 << tries.min(4));
        self.absent.insert((now + pause.min(bound), seq));
        self.window.set_aside(seq);
    }

    /// Looks up rows that hold aggregates: those that came back from the poller, and with `all`
    /// others in turn.
    pub(super) fn next_check(
        &mut self,
        ledger: &Arc<dyn Ledger>,
        all: bool,
    ) -> Option<Job<Checked>> {
        let checks = self.lanes.checks(CHECK_HOLDS, all);
        if checks.is_empty() {
            return None;
        }
        let mut tables: HashMap<TableIdx, Vec<Check>> = HashMap::new();
        for check in &checks {
            tables
                .entry(check.aggregate.table)
                .or_default()
                .push(check.clone());
        }
        let tables: Vec<_> = tables
            .into_iter()
            .map(|(t, checks)| (t, self.tracks(t), checks))
            .collect();
        let ledger = Arc::clone(ledger);
        Some(Box::pin(async move {
            let mut answers = Vec::new();
            let result = async {
                for (table, tracks, checks) in &tables {
                    check_table(&*ledger, *table, *tracks, checks, &mut answers).await?;
                }
                Ok(())
            };
            let result = result.await.map(|()| answers);
            Checked { checks, result }
        }))
    }

    /// Held rows were looked up.
    pub(super) fn checked(&mut self, checked: Checked) -> PortResult<()> {
        let answers = match checked.result {
            Ok(answers) => answers,
            Err(e) => {
                self.lanes.check_failed(&checked.checks);
                return Err(e);
            }
        };
        let now = self.now();
        for answer in answers {
            match answer {
                Answer::Seen(aggregate, id, seen) => {
                    let found = self.judge_held(aggregate.table, seen);
                    self.found(&aggregate, id, found, now);
                }
                Answer::Parked(aggregate, id, parked) => {
                    let found = if parked { Found::Open } else { Found::Final };
                    self.found(&aggregate, id, found, now);
                }
                Answer::Remaining(aggregate, ids) => {
                    let table = aggregate.table;
                    let theirs = |id: &RowId| {
                        !self.keys.contains_key(&RowKey {
                            table,
                            id: id.clone(),
                        })
                    };
                    let ids = ids.map(|ids| ids.into_iter().filter(theirs).collect());
                    self.lanes.remaining(&aggregate, ids);
                }
            }
        }
        self.follow_lanes();
        Ok(())
    }
}

impl Desk {
    fn judge_held(&self, table: TableIdx, seen: Seen) -> Found {
        let spec = self.specs.get(usize::from(table.0));
        let failed_holds = spec.is_some_and(|s| s.failed_blocks_aggregate);
        match seen {
            Seen::Absent => Found::Absent,
            Seen::Row {
                status: Status::Failed,
                ..
            } if failed_holds => Found::Open,
            Seen::Row { .. } if seen.is_final() => Found::Final,
            Seen::Row { .. } => Found::Open,
        }
    }

    fn found(&mut self, aggregate: &Aggregate, id: RowId, found: Found, now: Duration) {
        let key = RowKey {
            table: aggregate.table,
            id,
        };
        // Of what the tail itself has unsettled the ledger does not know the end.
        if !self.keys.contains_key(&key) {
            self.lanes.found(aggregate, &key.id, found, now);
        }
    }
}

async fn check_table(
    ledger: &dyn Ledger,
    table: TableIdx,
    tracks: bool,
    checks: &[Check],
    answers: &mut Vec<Answer>,
) -> PortResult<()> {
    // A table without status columns says only what remains parked.
    let reread: Vec<_> = checks.iter().filter(|c| c.many || !tracks).collect();
    if tracks {
        let mut owners = Vec::new();
        let mut ids = Vec::new();
        for check in checks {
            owners.extend(std::iter::repeat_n(&check.aggregate, check.ids.len()));
            ids.extend(check.ids.iter().cloned());
        }
        let seen = match ids.as_slice() {
            [] => Vec::new(),
            ids => ledger.look(table, ids).await?,
        };
        for ((aggregate, id), seen) in owners.into_iter().zip(ids).zip(seen) {
            answers.push(Answer::Seen(aggregate.clone(), id, seen));
        }
    }
    let aggregates: Vec<_> = reread.iter().map(|c| c.aggregate.clone()).collect();
    for (aggregate, ids) in remaining(ledger, table, aggregates).await? {
        let check = reread.iter().find(|c| c.aggregate == aggregate);
        if let (false, Some(left), Some(check)) = (tracks, &ids, check) {
            for id in &check.ids {
                answers.push(Answer::Parked(
                    aggregate.clone(),
                    id.clone(),
                    left.contains(id),
                ));
            }
        }
        answers.push(Answer::Remaining(aggregate, ids));
    }
    Ok(())
}

/// What remains of each aggregate; `None` where the answer was cut off.
async fn remaining(
    ledger: &dyn Ledger,
    table: TableIdx,
    aggregates: Vec<Aggregate>,
) -> PortResult<Vec<(Aggregate, Option<Vec<RowId>>)>> {
    if aggregates.is_empty() {
        return Ok(Vec::new());
    }
    let rows = ledger.remaining(table, &aggregates, REMAINING).await?;
    if rows.len() < REMAINING {
        let mut found: HashMap<Aggregate, Vec<RowId>> = HashMap::new();
        for (aggregate, id) in rows {
            found.entry(aggregate).or_default().push(id);
        }
        let ids = |a: Aggregate| {
            let ids = found.remove(&a).unwrap_or_default();
            (a, Some(ids))
        };
        return Ok(aggregates.into_iter().map(ids).collect());
    }
    let mut all = Vec::new();
    for (i, aggregate) in aggregates.into_iter().enumerate() {
        let mut ids = None;
        if i < ONE_BY_ONE {
            let one = std::slice::from_ref(&aggregate);
            let rows = ledger.remaining(table, one, REMAINING).await?;
            ids = (rows.len() < REMAINING).then(|| rows.into_iter().map(|(_, id)| id).collect());
        }
        all.push((aggregate, ids));
    }
    Ok(all)
}
