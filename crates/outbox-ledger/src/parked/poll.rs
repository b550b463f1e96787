//! The poller's side of parked rows.

use std::collections::HashMap;
use std::time::Duration;

use outbox_core::failure::FailureClass;
use outbox_core::ports::{
    Cursor, Recorded, RowOutcome, Scan, Seen, StuckReport, TableBacklog, Verdict,
};
use outbox_core::retry::RetryPolicy;
use outbox_core::row::{Aggregate, OutboxRow, RowId};
use outbox_core::status::Status;
use sqlx::{MySqlConnection, Row};

use super::{COLUMNS, ParkedTable, READY, WIDTH, aggregate_hash, bind_keys, micros, shorten};
use crate::error::DbResult;
use crate::sql;

impl ParkedTable {
    /// Candidates. Nothing parked is ever "left behind": it is due at once, or later. The
    /// cursor's `created_at` carries the place in the order of parking.
    pub(crate) async fn scan(
        &self,
        conn: &mut MySqlConnection,
        scan: &Scan,
        limit: usize,
    ) -> DbResult<Vec<(Cursor, OutboxRow)>> {
        let (after, sweep) = match scan {
            Scan::LeftBehind { .. } => return Ok(Vec::new()),
            Scan::Due => (0, false),
            Scan::Pending { after } => {
                let place = after.as_ref().and_then(|c| c.created_at.as_deref());
                (place.and_then(|p| p.parse().ok()).unwrap_or(0_u64), true)
            }
        };
        let mut query = sql::query(self.candidates(sweep, limit));
        for _ in 0..3 {
            query = self.bound(query).bind(after);
        }
        let rows = self.bound(query).fetch_all(conn).await?;
        rows.iter()
            .map(|row| {
                let seq: u64 = row.try_get_unchecked(WIDTH)?;
                let row = self.bind(row)?;
                let cursor = Cursor {
                    created_at: Some(seq.to_string()),
                    key: row.key.clone(),
                };
                Ok((cursor, row))
            })
            .collect()
    }

    /// Three ways to be due, each by its index, so that rows that wait for their time cost
    /// nothing.
    fn candidates(&self, sweep: bool, limit: usize) -> String {
        let waits = if sweep || !self.ordered {
            String::new()
        } else {
            format!("AND {}", self.head())
        };
        let branch = |due: &str, order: &str| {
            format!(
                "(SELECT c.id_hash AS k FROM outboxd_parked c FORCE INDEX (due) \
                 WHERE c.name = ? AND c.table_name = ? AND c.seq > ? AND {due} {waits} \
                 ORDER BY {order} LIMIT {limit})"
            )
        };
        let free = "(c.locked_until IS NULL OR c.locked_until < UTC_TIMESTAMP(6))";
        // A page of the sweep is cut in the order of parking, one of the due by their time.
        let by = if sweep {
            "c.seq"
        } else {
            "c.next_retry_at, c.seq"
        };
        format!(
            "SELECT {COLUMNS}, p.seq FROM ({} UNION ALL {} UNION ALL {}) x \
             STRAIGHT_JOIN outboxd_parked p ON p.id_hash = x.k \
             WHERE p.name = ? AND p.table_name = ? ORDER BY p.seq LIMIT {limit}",
            branch(
                &format!("c.status = 0 AND c.next_retry_at IS NULL AND {free}"),
                "c.seq"
            ),
            branch(
                &format!("c.status = 0 AND c.next_retry_at <= UTC_TIMESTAMP(6) AND {free}"),
                by
            ),
            branch(
                "c.status = 3 AND c.locked_until < UTC_TIMESTAMP(6)",
                "c.seq"
            ),
        )
    }

    /// No earlier row of its aggregate waits: rows behind one that does would fill every page.
    /// A scalar subquery, which the server does not turn into a join over everything.
    fn head(&self) -> String {
        format!(
            "(SELECT 1 FROM outboxd_parked e FORCE INDEX (by_aggregate) WHERE e.name = c.name \
             AND e.table_name = c.table_name AND e.aggregate_hash = c.aggregate_hash \
             AND e.seq < c.seq AND e.status IN {} LIMIT 1) IS NULL",
            self.unsettled_statuses()
        )
    }

    /// The unsettled rows of each aggregate, at most `limit` each, and whether they are ready.
    pub(crate) async fn unsettled(
        &self,
        conn: &mut MySqlConnection,
        aggregates: &[Aggregate],
        limit: usize,
    ) -> DbResult<Vec<(OutboxRow, bool)>> {
        let branch = format!(
            "(SELECT id_hash AS k FROM outboxd_parked FORCE INDEX (by_aggregate) \
             WHERE name = ? AND table_name = ? AND aggregate_hash = ? AND status IN {} \
             ORDER BY seq LIMIT {limit})",
            self.unsettled_statuses()
        );
        let mut found = Vec::new();
        for aggregates in aggregates.chunks(32) {
            let mut query = sql::query(format!(
                "SELECT {COLUMNS}, {READY} FROM ({}) x \
                 STRAIGHT_JOIN outboxd_parked p ON p.id_hash = x.k \
                 WHERE p.name = ? AND p.table_name = ? ORDER BY p.seq",
                vec![branch.as_str(); aggregates.len()].join(" UNION ALL ")
            ))
            .persistent(false);
            for aggregate in aggregates {
                query = self.bound(query).bind(aggregate_hash(aggregate));
            }
            for row in self.bound(query).fetch_all(&mut *conn).await? {
                let ready: i64 = row.try_get_unchecked(WIDTH)?;
                found.push((self.bind(&row)?, ready != 0));
            }
        }
        Ok(found)
    }

    /// Claims by key what is ready; returns what is ours now.
    pub(crate) async fn claim(
        &self,
        conn: &mut MySqlConnection,
        token: &str,
        lock_ttl: Duration,
        ids: &[RowId],
    ) -> DbResult<Vec<RowId>> {
        let columns = "SELECT id_kind, row_id, aggregate_type, aggregate_id FROM outboxd_parked \
             FORCE INDEX (PRIMARY) WHERE";
        let tail = format!("AND {READY} FOR UPDATE SKIP LOCKED");
        let query = self.keyed(columns, ids, &tail);
        let rows = bind_keys(self.bound(query), ids)
            .fetch_all(&mut *conn)
            .await?;
        let ours = rows
            .iter()
            .map(|row| Ok(self.identity(row)?.1))
            .collect::<DbResult<Vec<_>>>()?;
        if ours.is_empty() {
            return Ok(ours);
        }
        let set = "UPDATE outboxd_parked SET status = 3, locked_by = ?, locked_until = \
             UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, updated_at = UTC_TIMESTAMP(6) WHERE";
        let query = self.keyed(set, &ours, "");
        let query = query.bind(token.to_owned()).bind(micros(lock_ttl));
        bind_keys(self.bound(query), &ours).execute(conn).await?;
        Ok(ours)
    }

    /// Gives claims back, uncharged.
    pub(crate) async fn release(
        &self,
        conn: &mut MySqlConnection,
        token: &str,
        ids: &[RowId],
    ) -> DbResult<u64> {
        let set = "UPDATE outboxd_parked SET status = 0, locked_by = NULL, locked_until = NULL, \
             updated_at = UTC_TIMESTAMP(6) WHERE";
        let query = self.keyed(set, ids, "AND status = 3 AND locked_by = ?");
        let query = bind_keys(self.bound(query), ids).bind(token.to_owned());
        Ok(query.execute(conn).await?.rows_affected())
    }

    /// Records outcomes: a row that was sent leaves, one that failed is compared with the claim
    /// (without a token: with pending).
    pub(crate) async fn record(
        &self,
        conn: &mut MySqlConnection,
        token: Option<&str>,
        retry: &RetryPolicy,
        outcomes: &[&RowOutcome],
    ) -> DbResult<Vec<Recorded>> {
        let sent: Vec<RowId> = outcomes
            .iter()
            .filter(|o| matches!(o.verdict, Verdict::Sent))
            .map(|o| o.key.id.clone())
            .collect();
        let seen = self.look(conn, &sent).await?;
        let gone: HashMap<&RowId, bool> = sent
            .iter()
            .zip(&seen)
            .map(|(id, seen)| {
                let abandoned = matches!(
                    seen,
                    Seen::Row {
                        status: Status::Abandoned,
                        ..
                    }
                );
                (id, *seen == Seen::Absent || abandoned)
            })
            .collect();
        for ids in sent.chunks(sql::BATCH) {
            let query = self.keyed("DELETE FROM outboxd_parked WHERE", ids, "AND status <> 4");
            bind_keys(self.bound(query), ids)
                .execute(&mut *conn)
                .await?;
        }
        let mut recorded = Vec::with_capacity(outcomes.len());
        for outcome in outcomes {
            recorded.push(match &outcome.verdict {
                Verdict::Sent if gone.get(&outcome.key.id) == Some(&true) => Recorded::Gone,
                Verdict::Sent => Recorded::Sent,
                Verdict::Parked { .. } => {
                    if let Some(token) = token {
                        let id = std::slice::from_ref(&outcome.key.id);
                        self.release(conn, token, id).await?;
                    }
                    Recorded::WillRetry
                }
                Verdict::Failed {
                    failure,
                    retry_count,
                    ..
                } => {
                    let due = match failure.class {
                        FailureClass::Retryable => retry.next(*retry_count),
                        FailureClass::Permanent => None,
                    };
                    let error = shorten(&failure.to_string());
                    let id = &outcome.key.id;
                    self.fail(conn, token, id, *retry_count, due, error).await?
                }
            });
        }
        Ok(recorded)
    }

    async fn fail(
        &self,
        conn: &mut MySqlConnection,
        token: Option<&str>,
        id: &RowId,
        retry_count: u32,
        due: Option<Duration>,
        error: String,
    ) -> DbResult<Recorded> {
        let ids = std::slice::from_ref(id);
        let guard = match token {
            Some(_) => "AND retry_count = ? AND status = 3 AND locked_by = ?",
            None => "AND retry_count = ? AND status = 0",
        };
        let set = "UPDATE outboxd_parked SET status = ?, retry_count = ?, next_retry_at = \
             UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, locked_by = NULL, locked_until = NULL, \
             last_error = ?, updated_at = UTC_TIMESTAMP(6) WHERE";
        let (status, count, outcome) = match due {
            Some(_) => (0_i64, retry_count.saturating_add(1), Recorded::WillRetry),
            None => (2, retry_count, Recorded::Failed),
        };
        let query = self
            .keyed(set, ids, guard)
            .bind(status)
            .bind(count)
            .bind(due.map(micros))
            .bind(error);
        let query = bind_keys(self.bound(query), ids)
            .bind(retry_count)
            .bind(token.map(str::to_owned));
        if query.execute(&mut *conn).await?.rows_affected() > 0 {
            return Ok(outcome);
        }
        // Recorded already by a transaction whose answer was lost, or no longer ours.
        Ok(match self.look(conn, ids).await?.first() {
            Some(Seen::Row {
                status: Status::Pending,
                retry_count: now,
                ..
            }) if due.is_some() && *now == count => Recorded::WillRetry,
            Some(Seen::Row {
                status: Status::Failed,
                ..
            }) if due.is_none() => Recorded::Failed,
            _ => Recorded::Gone,
        })
    }

    /// Counts and resets rows that were claimed too long ago.
    pub(crate) async fn patrol(
        &self,
        conn: &mut MySqlConnection,
        warn_after: Duration,
        reset_after: Duration,
    ) -> DbResult<StuckReport> {
        let old = "status = 3 AND updated_at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND";
        let query = sql::query(format!(
            "SELECT COUNT(*) FROM outboxd_parked WHERE name = ? AND table_name = ? AND {old}"
        ));
        let row = self
            .bound(query)
            .bind(micros(warn_after))
            .fetch_one(&mut *conn)
            .await?;
        let query = sql::query(format!(
            "UPDATE outboxd_parked SET status = 0, locked_by = NULL, locked_until = NULL, \
             updated_at = UTC_TIMESTAMP(6) WHERE name = ? AND table_name = ? AND {old}"
        ));
        let reset = self
            .bound(query)
            .bind(micros(reset_after))
            .execute(conn)
            .await?;
        Ok(StuckReport {
            stuck: u64::try_from(row.try_get_unchecked::<i64, _>(0)?).unwrap_or(0),
            reset: reset.rows_affected(),
        })
    }

    /// Counts by status, and the age of the oldest row that is due.
    pub(crate) async fn backlog(&self, conn: &mut MySqlConnection) -> DbResult<TableBacklog> {
        let query = sql::query(
            "SELECT status, COUNT(*) FROM outboxd_parked \
             WHERE name = ? AND table_name = ? GROUP BY status"
                .to_owned(),
        );
        let rows = self.bound(query).fetch_all(&mut *conn).await?;
        let by_status = rows
            .iter()
            .map(|row| {
                let count: i64 = row.try_get_unchecked(1)?;
                Ok((super::status(row, 0)?, u64::try_from(count).unwrap_or(0)))
            })
            .collect::<DbResult<Vec<_>>>()?;
        let query = sql::query(
            "SELECT CAST(TIMESTAMPDIFF(SECOND, created_at, UTC_TIMESTAMP(6)) AS SIGNED) \
             FROM outboxd_parked WHERE name = ? AND table_name = ? AND status = 0 \
             AND (next_retry_at IS NULL OR next_retry_at <= UTC_TIMESTAMP(6)) \
             ORDER BY seq LIMIT 1"
                .to_owned(),
        );
        let oldest = self.bound(query).fetch_optional(conn).await?;
        let age: Option<i64> = oldest.map(|r| r.try_get_unchecked(0)).transpose()?;
        Ok(TableBacklog {
            by_status,
            oldest_pending_seconds: age.map(|s| u64::try_from(s).unwrap_or(0)),
        })
    }
}
