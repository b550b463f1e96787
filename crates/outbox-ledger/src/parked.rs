//! Rows of tables without status columns that could not be published at once: kept whole in
//! `outboxd_parked`, claimed, recorded and administered there as in a table.
//!
//! Rows are delivered in the order in which they were parked, which is the order in which the
//! tail passed over them. A row that is sent leaves the table.

mod poll;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use outbox_core::failure::Failure;
use outbox_core::message::Message;
use outbox_core::ports::Seen;
use outbox_core::row::{Aggregate, OutboxRow, RowId, RowKey, RowState, TableIdx};
use outbox_core::spec::{Ordering, TableSpec};
use outbox_core::status::{Status, StatusValues};
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row};

use crate::error::{DbError, DbResult};
use crate::layouts::{optional, text};
use crate::sql::{self, Bound};

/// Bytes and rows of one INSERT: far below any `max_allowed_packet`, unless one body is larger.
const INSERT_BYTES: usize = 1 << 20;
const INSERT_ROWS: usize = 64;

/// The columns of [`ParkedTable::bind`].
const COLUMNS: &str = "id_kind, row_id, aggregate_type, aggregate_id, envelope, body, status, \
    retry_count, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', next_retry_at) AS SIGNED), \
    locked_by, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', locked_until) AS SIGNED), last_error";
/// How many they are: where further columns begin.
const WIDTH: usize = 12;

/// May be claimed now.
const READY: &str = "((status = 0 AND (next_retry_at IS NULL OR next_retry_at <= UTC_TIMESTAMP(6)) \
    AND (locked_until IS NULL OR locked_until < UTC_TIMESTAMP(6))) \
    OR (status = 3 AND locked_until < UTC_TIMESTAMP(6)))";

/// The parked rows of one outbox table.
#[derive(Clone, Debug)]
pub struct ParkedTable {
    pub(crate) idx: TableIdx,
    pub(crate) name: Arc<str>,
    pub(crate) table: String,
    failed_blocks: bool,
    ordered: bool,
}

/// A row to be parked.
#[derive(Clone, Debug)]
pub struct NewParked<'a> {
    /// Identity.
    pub id: &'a RowId,
    /// Order.
    pub aggregate: &'a Aggregate,
    /// What to publish later; `None` where none could be built, which fails when its turn comes.
    pub message: Option<&'a Message>,
    /// `Pending` or `Failed`.
    pub status: Status,
    /// Retries spent.
    pub retry_count: u32,
    /// Not to be published before; `None`: at its turn.
    pub due_in: Option<Duration>,
    /// For `last_error`.
    pub error: Option<String>,
}

impl ParkedTable {
    /// The parked rows of the table with this section, under the configured `name`.
    #[must_use]
    pub fn new(name: Arc<str>, idx: TableIdx, spec: &TableSpec) -> Self {
        Self {
            idx,
            name,
            table: spec.full_name(),
            failed_blocks: spec.failed_blocks_aggregate,
            ordered: spec.ordering != Ordering::None,
        }
    }

    /// Parks rows, in their order. A row that is parked already stays as it is, so that repeating
    /// a transaction whose answer was lost does no harm.
    pub async fn park(&self, conn: &mut MySqlConnection, rows: &[NewParked<'_>]) -> DbResult<()> {
        let mut rest = rows;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = rest.iter().take(INSERT_ROWS).take_while(|row| {
                bytes += row.message.map_or(0, Message::weight);
                bytes <= INSERT_BYTES
            });
            let (now, later) = rest.split_at(fits.count().max(1));
            self.insert(conn, now).await?;
            rest = later;
        }
        Ok(())
    }

    async fn insert(&self, conn: &mut MySqlConnection, rows: &[NewParked<'_>]) -> DbResult<()> {
        let one = "(?,?,?,?,?,?,?,?,?,?,?,?,UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND,?,\
            UTC_TIMESTAMP(6),UTC_TIMESTAMP(6))";
        let mut query = sql::query(format!(
            "INSERT INTO outboxd_parked (name, table_name, id_hash, id_kind, row_id, \
             aggregate_type, aggregate_id, aggregate_hash, envelope, body, status, retry_count, \
             next_retry_at, last_error, created_at, updated_at) VALUES {} \
             ON DUPLICATE KEY UPDATE name = VALUES(name)",
            vec![one; rows.len()].join(",")
        ))
        .persistent(false);
        for row in rows {
            let printed = row.id.to_string();
            let due = row.due_in.map(micros);
            query = query
                .bind(&*self.name)
                .bind(&self.table)
                .bind(hash(&[&printed]))
                .bind(kind(row.id))
                .bind(printed)
                .bind(row.aggregate.kind.to_string())
                .bind(row.aggregate.id.to_string())
                .bind(aggregate_hash(row.aggregate))
                .bind(row.message.map(|m| m.envelope().to_string()))
                .bind(row.message.map(|m| m.body.to_vec()))
                .bind(stored(row.status))
                .bind(row.retry_count)
                .bind(due)
                .bind(row.error.as_deref().map(shorten));
        }
        query.execute(conn).await?;
        Ok(())
    }

    /// How the rows stand, parallel to `ids`; `Absent` for those that are not parked.
    pub async fn look(&self, conn: &mut MySqlConnection, ids: &[RowId]) -> DbResult<Vec<Seen>> {
        let mut seen = vec![Seen::Absent; ids.len()];
        for (ids, seen) in ids.chunks(sql::BATCH).zip(seen.chunks_mut(sql::BATCH)) {
            let query = self.keyed(
                "SELECT row_id, status, retry_count, \
                 COALESCE(next_retry_at > UTC_TIMESTAMP(6), 0), \
                 COALESCE(locked_until >= UTC_TIMESTAMP(6), 0) FROM outboxd_parked WHERE ",
                ids,
                "",
            );
            for row in bind_keys(self.bound(query), ids)
                .fetch_all(&mut *conn)
                .await?
            {
                let printed = text(&row, 0)?;
                let state = Seen::Row {
                    status: status(&row, 1)?,
                    retry_count: row.try_get_unchecked(2)?,
                    delayed: row.try_get_unchecked::<i64, _>(3)? != 0,
                    claimed: row.try_get_unchecked::<i64, _>(4)? != 0,
                };
                for (id, slot) in ids.iter().zip(&mut *seen) {
                    if id.to_string() == printed {
                        *slot = state;
                    }
                }
            }
        }
        Ok(seen)
    }

    /// Rows that hold their aggregate, in order, at most `limit`.
    pub async fn holding(
        &self,
        conn: &mut MySqlConnection,
        limit: usize,
    ) -> DbResult<Vec<(Aggregate, RowId)>> {
        let query = sql::query(format!(
            "SELECT id_kind, row_id, aggregate_type, aggregate_id FROM outboxd_parked \
             WHERE name = ? AND table_name = ? AND status IN {} ORDER BY seq LIMIT {limit}",
            self.unsettled_statuses()
        ));
        let rows = self.bound(query).fetch_all(conn).await?;
        rows.iter().map(|row| self.identity(row)).collect()
    }

    /// What is left of these aggregates, in order, at most `limit` in all.
    pub async fn remaining(
        &self,
        conn: &mut MySqlConnection,
        aggregates: &[Aggregate],
        limit: usize,
    ) -> DbResult<Vec<(Aggregate, RowId)>> {
        let mut found = Vec::new();
        for aggregates in aggregates.chunks(sql::BATCH) {
            let mut query = self.bound(sql::query(format!(
                "SELECT id_kind, row_id, aggregate_type, aggregate_id FROM outboxd_parked \
                 WHERE name = ? AND table_name = ? AND aggregate_hash IN {} AND status IN {} \
                 ORDER BY seq LIMIT {limit}",
                sql::list(aggregates.len()),
                self.unsettled_statuses()
            )));
            for i in 0..sql::padded(aggregates.len()) {
                let aggregate = aggregates.get(i).or(aggregates.last());
                query = query.bind(aggregate.map(aggregate_hash));
            }
            for row in query.fetch_all(&mut *conn).await? {
                found.push(self.identity(&row)?);
            }
        }
        found.truncate(limit);
        Ok(found)
    }

    /// Whole rows by key, in order.
    pub async fn read(
        &self,
        conn: &mut MySqlConnection,
        ids: &[RowId],
    ) -> DbResult<Vec<OutboxRow>> {
        let head = format!("SELECT {COLUMNS} FROM outboxd_parked WHERE ");
        let query = self.keyed(&head, ids, " ORDER BY seq");
        let rows = bind_keys(self.bound(query), ids).fetch_all(conn).await?;
        rows.iter().map(|row| self.bind(row)).collect()
    }

    /// A statement on some keys: `head`, the condition, `tail`. Bind the key's parts with
    /// [`ParkedTable::bound`] and [`bind_keys`].
    pub(crate) fn keyed<'q>(&self, head: &str, ids: &[RowId], tail: &str) -> Bound<'q> {
        sql::query(format!(
            "{head} name = ? AND table_name = ? AND id_hash IN {} {tail}",
            sql::list(ids.len())
        ))
    }

    pub(crate) fn bound<'q>(&self, query: Bound<'q>) -> Bound<'q> {
        query.bind(self.name.to_string()).bind(self.table.clone())
    }

    fn unsettled_statuses(&self) -> &'static str {
        if self.failed_blocks {
            "(0, 3, 2)"
        } else {
            "(0, 3)"
        }
    }

    fn identity(&self, row: &MySqlRow) -> DbResult<(Aggregate, RowId)> {
        let aggregate = Aggregate {
            table: self.idx,
            kind: text(row, 2)?.into(),
            id: text(row, 3)?.into(),
        };
        let (kind, printed): (i8, _) = (row.try_get_unchecked(0)?, text(row, 1)?);
        let id = restore(kind, &printed)
            .ok_or_else(|| DbError::Corrupt(format!("outboxd_parked holds the id {printed}")))?;
        Ok((aggregate, id))
    }

    fn bind(&self, row: &MySqlRow) -> DbResult<OutboxRow> {
        let (aggregate, id) = self.identity(row)?;
        let error = optional(row, 11)?;
        let body: Option<&[u8]> = row.try_get_unchecked(5)?;
        let message = match optional(row, 4)? {
            None => Err(error.unwrap_or_else(|| "no message was built".to_owned())),
            Some(envelope) => serde_json::from_str(&envelope)
                .map_err(|e| e.to_string())
                .and_then(|envelope| {
                    let body = Bytes::copy_from_slice(body.unwrap_or_default());
                    Message::from_envelope(envelope, body).map_err(|e| e.to_string())
                }),
        };
        Ok(OutboxRow {
            key: RowKey {
                table: self.idx,
                id,
            },
            aggregate,
            state: RowState {
                status: status(row, 6)?,
                retry_count: row.try_get_unchecked(7)?,
                next_retry_at: row.try_get_unchecked(8)?,
                locked_by: optional(row, 9)?,
                locked_until: row.try_get_unchecked(10)?,
            },
            message: message
                .map(Arc::new)
                .map_err(|reason| Failure::permanent("unbuildable", reason)),
        })
    }
}

pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX / 1_000_000)
}

/// At most what `last_error` holds, by characters.
pub(crate) fn shorten(reason: &str) -> String {
    reason.chars().take(Failure::MAX_REASON).collect()
}

fn hash(parts: &[&str]) -> Vec<u8> {
    let mut sha = openssl::sha::Sha256::new();
    for part in parts {
        // The length first, or ("ab", "c") and ("a", "bc") were the same.
        if parts.len() > 1 {
            sha.update(&(part.len() as u64).to_be_bytes());
        }
        sha.update(part.as_bytes());
    }
    sha.finish().to_vec()
}

fn aggregate_hash(aggregate: &Aggregate) -> Vec<u8> {
    hash(&[&aggregate.kind, &aggregate.id])
}

pub(crate) fn bind_keys<'q>(mut query: Bound<'q>, ids: &[RowId]) -> Bound<'q> {
    for i in 0..sql::padded(ids.len()) {
        let id = ids.get(i).or(ids.last());
        query = query.bind(id.map(|id| hash(&[&id.to_string()])));
    }
    query
}

const fn kind(id: &RowId) -> i8 {
    match id {
        RowId::Int(_) => 0,
        RowId::UInt(_) => 1,
        RowId::Text(_) => 2,
        RowId::Binary(_) => 3,
    }
}

fn restore(kind: i8, printed: &str) -> Option<RowId> {
    match kind {
        0 => printed.parse().ok().map(RowId::Int),
        1 => printed.parse().ok().map(RowId::UInt),
        2 => Some(RowId::Text(printed.into())),
        3 => unprint_binary(printed).map(|b| RowId::Binary(b.into())),
        _ => None,
    }
}

/// The bytes that [`outbox_core::binder::print_binary`] prints like this: hex, or a UUID.
pub(crate) fn unprint_binary(printed: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> = printed
        .chars()
        .filter(|c| *c != '-')
        .map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok()))
        .collect::<Option<_>>()?;
    digits
        .len()
        .is_multiple_of(2)
        .then(|| digits.chunks(2).map(|d| d[0] << 4 | d[1]).collect())
}

/// How this table stores a status: by the default numbers.
pub(crate) fn stored(status: Status) -> i64 {
    match StatusValues::default().value(status) {
        outbox_core::status::StatusValue::Number(n) => *n,
        outbox_core::status::StatusValue::Text(_) => 0,
    }
}

pub(crate) fn status(row: &MySqlRow, index: usize) -> DbResult<Status> {
    let n: i8 = row.try_get_unchecked(index)?;
    StatusValues::default()
        .from_number(i64::from(n))
        .ok_or_else(|| DbError::Corrupt(format!("outboxd_parked holds the status {n}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_id_comes_back() {
        for id in [
            RowId::Int(-5),
            RowId::UInt(u64::MAX),
            RowId::Text("a-b c".into()),
            RowId::Binary([0, 1, 255].as_slice().into()),
            RowId::Binary([7; 16].as_slice().into()),
        ] {
            assert_eq!(restore(kind(&id), &id.to_string()), Some(id));
        }
        assert_eq!(restore(3, "0g"), None);
        assert_eq!(restore(9, "1"), None);
    }

    #[test]
    fn aggregates_that_only_join_alike_differ() {
        assert_ne!(hash(&["ab", "c"]), hash(&["a", "bc"]));
    }
}
