use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use outbox_core::ports::{
    ClaimToken, Cursor, PollStore, PortResult, Recorded, RowOutcome, Scan, StuckReport,
    TableBacklog,
};
use outbox_core::position::FilePosition;
use outbox_core::{Aggregate, OutboxRow, Position, RowKey, Status, TableIdx};

use super::{FakeRow, FakeTable, guard};

#[async_trait]
impl PollStore for FakeTable {
    async fn scan(
        &self,
        table: TableIdx,
        scan: &Scan,
        limit: usize,
    ) -> PortResult<Vec<(Cursor, OutboxRow)>> {
        self.statement("scan").await?;
        let (state, now) = (guard(&self.state), self.now());
        let wanted = |key: &RowKey, row: &FakeRow| match scan {
            Scan::Due => {
                row.ready(now)
                    && (row.next_retry_at.is_some() || row.status == Status::Processing)
                    && !state.behind(key, row, now)
            }
            Scan::LeftBehind { min_age } => {
                row.status == Status::Pending
                    && row.next_retry_at.is_none()
                    && row.created_at + *min_age <= now
                    && !state.behind(key, row, now)
            }
            Scan::Pending { after } => {
                row.ready(now) && after.as_ref().is_none_or(|cursor| *key > cursor.key)
            }
        };
        let rows = state.rows.iter().filter(|(k, _)| k.table == table);
        let found = rows.filter(|(k, r)| wanted(k, r)).take(limit);
        Ok(found
            .map(|(key, row)| {
                let cursor = Cursor {
                    created_at: None,
                    key: key.clone(),
                };
                (cursor, row.read(key))
            })
            .collect())
    }

    async fn unsettled(
        &self,
        table: TableIdx,
        aggregates: &[Aggregate],
        limit: usize,
    ) -> PortResult<Vec<(OutboxRow, bool)>> {
        self.statement("unsettled").await?;
        let (state, now) = (guard(&self.state), self.now());
        let mut left: HashMap<&Aggregate, usize> = aggregates.iter().map(|a| (a, limit)).collect();
        let mut found = Vec::new();
        for (key, row) in state.rows.iter().filter(|(k, _)| k.table == table) {
            if let Some(left) = left.get_mut(&row.aggregate)
                && *left > 0
                && state.unsettled(row, now)
            {
                *left -= 1;
                found.push((row.read(key), row.ready(now)));
            }
        }
        Ok(found)
    }

    async fn claim(&self, _: TableIdx, rows: &[RowKey]) -> PortResult<(ClaimToken, Vec<RowKey>)> {
        self.write("claim").await?;
        let (mut state, now) = (guard(&self.state), self.now());
        state.tokens += 1;
        let token = ClaimToken(format!("token-{}", state.tokens));
        let until = now + state.lock_ttl;
        let mut ours = Vec::new();
        for key in rows {
            let (free, before) = (!state.locked.contains(key), state.status(key));
            if let Some(row) = state.rows.get_mut(key).filter(|row| free && row.ready(now)) {
                row.status = Status::Processing;
                (row.locked_by, row.locked_until) = (Some(token.0.clone()), Some(until));
                row.updated_at = now;
                ours.push(key.clone());
            }
            state.changed(key, before);
        }
        state.claims += ours.len() as u64;
        Self::answered(&mut state, "claim", (token, ours))
    }

    async fn record(
        &self,
        token: Option<&ClaimToken>,
        outcomes: &[RowOutcome],
    ) -> PortResult<Vec<Recorded>> {
        self.write("record").await?;
        let (mut state, now) = (guard(&self.state), self.now());
        state.most_recorded = state.most_recorded.max(outcomes.len());
        let recorded = outcomes.iter().map(|o| state.record(token, o, now));
        let recorded = recorded.collect();
        Self::answered(&mut state, "record", recorded)
    }

    async fn release(&self, token: &ClaimToken, rows: &[RowKey]) -> PortResult<()> {
        self.write("release").await?;
        let mut state = guard(&self.state);
        for key in rows {
            let before = state.status(key);
            if let Some(row) = state.rows.get_mut(key)
                && row.status == Status::Processing
                && row.locked_by.as_ref() == Some(&token.0)
            {
                row.status = Status::Pending;
                (row.locked_by, row.locked_until) = (None, None);
            }
            state.changed(key, before);
        }
        Ok(())
    }

    async fn coordinate(&self) -> PortResult<Position> {
        self.statement("coordinate").await?;
        Ok(Position::File(FilePosition {
            server: "fake".to_owned(),
            file: "binlog.000001".to_owned(),
            pos: 4,
        }))
    }

    async fn patrol(
        &self,
        table: TableIdx,
        warn_after: Duration,
        reset_after: Duration,
    ) -> PortResult<StuckReport> {
        self.write("patrol").await?;
        let (mut state, now) = (guard(&self.state), self.now());
        let mut report = StuckReport::default();
        let rows = state.rows.iter_mut().filter(|(k, _)| k.table == table);
        for (_, row) in rows.filter(|(_, r)| r.status == Status::Processing) {
            let age = now.saturating_sub(row.updated_at);
            if age >= reset_after {
                row.status = Status::Pending;
                (row.locked_by, row.locked_until) = (None, None);
                report.reset += 1;
            }
            report.stuck += u64::from(age >= warn_after && age < reset_after);
        }
        Ok(report)
    }

    async fn backlog(&self, table: TableIdx) -> PortResult<TableBacklog> {
        self.statement("backlog").await?;
        let (state, now) = (guard(&self.state), self.now());
        let of = |status| {
            let rows = state
                .rows
                .iter()
                .filter(|(k, r)| k.table == table && r.status == status);
            rows.map(|(_, r)| r.clone()).collect::<Vec<_>>()
        };
        let open = [
            Status::Pending,
            Status::Failed,
            Status::Processing,
            Status::Abandoned,
        ];
        let oldest = of(Status::Pending).iter().map(|r| now - r.created_at).max();
        Ok(TableBacklog {
            by_status: open.map(|s| (s, of(s).len() as u64)).to_vec(),
            oldest_pending_seconds: oldest.map(|d| d.as_secs()),
        })
    }

    async fn purge(&self, table: TableIdx, older_than: Duration, limit: usize) -> PortResult<u64> {
        self.write("purge").await?;
        let (mut state, now) = (guard(&self.state), self.now());
        let old = state.rows.iter().filter(|(k, r)| {
            k.table == table && r.status == Status::Sent && r.updated_at + older_than <= now
        });
        let old: Vec<RowKey> = old.map(|(k, _)| k.clone()).take(limit).collect();
        for key in &old {
            state.rows.remove(key);
        }
        Ok(old.len() as u64)
    }
}
