//! Pages of a sweep: read, compared with the heads of their aggregates, and asked of the tail.

use std::collections::{HashSet, VecDeque};
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
    fn among(&self, rows: &[OutboxRow]) -> Vec<Aggregate> {
        match self {
            Self::Nobody => Vec::new(),
            Self::These(these) => distinct(rows.iter().filter(|r| these.contains(&r.aggregate))),
            Self::Everybody => distinct(rows),
        }
    }
}

/// The first unsettled row of an aggregate.
pub(super) struct Head {
    pub(super) key: RowKey,
    pub(super) ready: bool,
}

/// A page.
pub(super) struct Page {
    /// Rows in order, and whether they are the poller's.
    pub(super) rows: Vec<(OutboxRow, bool)>,
    pub(super) heads: Vec<(Aggregate, Head)>,
    pub(super) cursor: Option<Cursor>,
    /// When it was asked for.
    pub(super) at: Instant,
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
    /// Reads the page behind `after`, for as long as the database takes to be there.
    pub(super) async fn read(self, after: Option<Cursor>) -> PortResult<Page> {
        let scan = Scan::Pending { after };
        let mut errors = 0;
        loop {
            match self.once(&scan).await {
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

    async fn once(&self, scan: &Scan) -> PortResult<Page> {
        let at = Instant::now();
        let found = self.store.scan(self.table, scan, self.limit).await?;
        let cursor = found.last().map(|(cursor, _)| cursor.clone());
        let rows: Vec<OutboxRow> = found.into_iter().map(|(_, row)| row).collect();
        let suspects = self.suspects.among(&rows);
        let heads = if suspects.is_empty() {
            Vec::new()
        } else {
            let heads = self.store.unsettled(self.table, &suspects, 1).await?;
            let head = |(row, ready): (OutboxRow, bool)| {
                let key = row.key;
                (row.aggregate, Head { key, ready })
            };
            heads.into_iter().map(head).collect()
        };
        let asked: Vec<HeldRow> = rows.iter().map(held).collect();
        let granted = if asked.is_empty() {
            Vec::new()
        } else {
            self.gate.hold(&asked).await
        };
        Ok(Page {
            rows: rows.into_iter().zip(granted).collect(),
            heads,
            cursor,
            at,
        })
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
