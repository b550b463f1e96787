//! Pages of a sweep: read, compared with the heads of their aggregates, and asked of the tail.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use outbox_core::ports::{Cursor, Disposition, Gate, HeldRow, PollStore, PortResult, Scan, chain};
use outbox_core::{Aggregate, OutboxRow, RowKey, TableIdx};
use tokio::time::Instant;
use tracing::warn;

use crate::flight::Place;
use crate::poller::{distinct, pause};
use crate::record::held;

/// Pages of which the keys are remembered: the table may show the last ones as pending for as long
/// as their records are under way.
const REMEMBERED: usize = 8;

/// Aggregates whose first unsettled row may be another than the sweep's.
pub(super) enum Suspects {
    Nobody,
    These(HashSet<Aggregate>),
    Everybody,
}

impl Suspects {
    pub(super) fn contains(&self, aggregate: &Aggregate) -> bool {
        match self {
            Self::Nobody => false,
            Self::These(these) => these.contains(aggregate),
            Self::Everybody => true,
        }
    }
}

/// Where a row of a page stands in its aggregate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Nobody before it waits.
    Clear,
    /// Behind a row that waits, or one that this sweep has passed and that became due behind it.
    Behind,
    /// Not to be delivered any more, or not now: somebody else has it.
    Gone,
}

/// Which rows of the suspects may go.
#[derive(Default)]
pub(super) struct Clear {
    /// Suspects, and whether one of their rows waits.
    suspects: HashMap<Aggregate, bool>,
    rows: HashSet<RowKey>,
}

impl Clear {
    pub(super) fn of(&self, row: &OutboxRow) -> Standing {
        match self.suspects.get(&row.aggregate) {
            Some(_) if self.rows.contains(&row.key) => Standing::Clear,
            Some(true) => Standing::Behind,
            Some(false) => Standing::Gone,
            None => Standing::Clear,
        }
    }
}

/// A page.
pub(super) struct Page {
    /// Rows in order, and whether they are the poller's.
    pub(super) rows: Vec<(OutboxRow, bool)>,
    /// The suspects among them.
    suspects: Vec<Aggregate>,
    /// What was unsettled of the suspects once the tail had let go of the rows, in order, and
    /// whether it was ready.
    unsettled: Vec<(Aggregate, RowKey, bool)>,
    pub(super) cursor: Option<Cursor>,
    /// When it was asked for.
    pub(super) at: Instant,
}

impl Page {
    /// Walks each suspect from its first row on as far as all is ready and this sweep's.
    pub(super) fn clear(&self, ours: impl Fn(&RowKey) -> bool) -> Clear {
        let mut clear = Clear::default();
        clear
            .suspects
            .extend(self.suspects.iter().map(|a| (a.clone(), false)));
        for (aggregate, key, ready) in &self.unsettled {
            let Some(broken) = clear.suspects.get_mut(aggregate).filter(|b| !**b) else {
                continue;
            };
            if *ready && ours(key) {
                clear.rows.insert(key.clone());
            } else {
                *broken = true;
            }
        }
        clear
    }
}

#[derive(Clone)]
pub(super) struct Reader {
    pub(super) store: Arc<dyn PollStore>,
    pub(super) gate: Arc<dyn Gate>,
    pub(super) table: TableIdx,
    pub(super) suspects: Arc<Suspects>,
    pub(super) limit: usize,
}

impl Reader {
    /// Reads the page behind `after`, for as long as the database takes to be there. `open` are
    /// the rows of earlier pages that the table may still show.
    pub(super) async fn read(
        self,
        after: Option<Cursor>,
        open: HashMap<Aggregate, usize>,
    ) -> PortResult<Page> {
        let scan = Scan::Pending { after };
        let mut errors = 0;
        loop {
            match self.once(&scan, &open).await {
                Err(e) if e.disposition == Disposition::Backoff => {
                    if errors == 0 {
                        warn!(error = chain(&e), "the sweep waits for the database");
                    }
                    tokio::time::sleep(pause(errors)).await;
                    errors += 1;
                }
                done => return done,
            }
        }
    }

    async fn once(&self, scan: &Scan, open: &HashMap<Aggregate, usize>) -> PortResult<Page> {
        let at = Instant::now();
        let found = self.store.scan(self.table, scan, self.limit).await?;
        let cursor = found.last().map(|(cursor, _)| cursor.clone());
        let rows: Vec<OutboxRow> = found.into_iter().map(|(_, row)| row).collect();
        let asked: Vec<HeldRow> = rows.iter().map(held).collect();
        let granted = if asked.is_empty() {
            Vec::new()
        } else {
            self.gate.hold(&asked).await
        };
        // Once they are held: what the tail had refused of them before is seen now.
        let suspects = distinct(rows.iter().filter(|r| self.suspects.contains(&r.aggregate)));
        let unsettled = match self.unsettled(&suspects, &rows, open).await {
            Ok(unsettled) => unsettled,
            Err(e) => {
                self.gate.done(&asked).await;
                return Err(e);
            }
        };
        Ok(Page {
            rows: rows.into_iter().zip(granted).collect(),
            suspects,
            unsettled,
            cursor,
            at,
        })
    }

    /// The unsettled rows of each suspect, from the first on, as many as the sweep knows of it: a
    /// row that it does not know stands among them.
    async fn unsettled(
        &self,
        suspects: &[Aggregate],
        rows: &[OutboxRow],
        open: &HashMap<Aggregate, usize>,
    ) -> PortResult<Vec<(Aggregate, RowKey, bool)>> {
        let mut counts: HashMap<&Aggregate, usize> = HashMap::new();
        for row in rows {
            *counts.entry(&row.aggregate).or_default() += 1;
        }
        // Few questions, and never more than twice the rows.
        let mut by_limit: BTreeMap<usize, Vec<Aggregate>> = BTreeMap::new();
        for aggregate in suspects {
            let known = |of: Option<&usize>| of.copied().unwrap_or_default();
            let count = known(counts.get(aggregate)) + known(open.get(aggregate));
            let class = by_limit.entry(count.next_power_of_two()).or_default();
            class.push(aggregate.clone());
        }
        let mut found = Vec::new();
        for (limit, aggregates) in by_limit {
            let read = self.store.unsettled(self.table, &aggregates, limit).await?;
            found.extend(
                read.into_iter()
                    .map(|(row, ready)| (row.aggregate, row.key, ready)),
            );
        }
        Ok(found)
    }
}

/// Pages of which something may be under way.
#[derive(Default)]
pub(super) struct Pages {
    /// Where the next page begins.
    pub(super) cursor: Option<Cursor>,
    loaded: VecDeque<Loaded>,
}

struct Loaded {
    first: Place,
    before: Option<Cursor>,
    at: Instant,
    keys: HashSet<RowKey>,
}

impl Pages {
    pub(super) fn begin(&mut self, page: &Page, first: Place) {
        let before = std::mem::replace(&mut self.cursor, page.cursor.clone());
        self.loaded.push_back(Loaded {
            first,
            before,
            at: page.at,
            keys: page.rows.iter().map(|(row, _)| row.key.clone()).collect(),
        });
    }

    /// Forgets pages that are settled for long; `open` is the first place without a verdict.
    pub(super) fn forget_before(&mut self, open: Option<Place>) {
        let open = open.unwrap_or(Place::MAX);
        while self.loaded.len() > REMEMBERED
            && self.loaded.get(1).is_some_and(|next| next.first <= open)
        {
            self.loaded.pop_front();
        }
    }

    /// How long ago the row of that place was read.
    pub(super) fn age(&self, place: Place) -> Duration {
        let page = self.loaded.iter().rev().find(|page| page.first <= place);
        page.map_or(Duration::ZERO, |page| page.at.elapsed())
    }

    pub(super) fn contains(&self, row: &RowKey) -> bool {
        self.loaded.iter().any(|page| page.keys.contains(row))
    }

    /// Reads again from the page of that place.
    pub(super) fn turn_back(&mut self, place: Place) {
        while let Some(page) = self.loaded.pop_back() {
            self.cursor = page.before;
            if page.first <= place {
                break;
            }
        }
        self.loaded.clear();
    }
}
