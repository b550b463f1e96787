//! One `[[outbox]]` section, parsed into what cannot be wrong.

use crate::status::StatusValues;
use crate::template::Template;

/// A configured outbox table.
#[derive(Clone, Debug)]
pub struct TableSpec {
    /// Database.
    pub schema: String,
    /// Table.
    pub table: String,
    /// Whether the table has status columns.
    pub tracking: Tracking,
    /// What happens to a row that was confirmed.
    pub on_sent: OnSent,
    /// Column names by role.
    pub columns: ColumnNames,
    /// How statuses are stored.
    pub status_values: StatusValues,
    /// Exchange template.
    pub exchange: Template,
    /// Routing key template.
    pub routing_key: Template,
    /// Order per aggregate.
    pub ordering: Ordering,
    /// Whether a failed row keeps holding its aggregate.
    pub failed_blocks_aggregate: bool,
    /// What a returned message means.
    pub on_unroutable: OnUnroutable,
    /// Largest body in bytes; a larger one fails permanently.
    pub max_body: Option<u64>,
}

impl TableSpec {
    /// `schema.table`, the `outbox-table` header and the label of metrics.
    #[must_use]
    pub fn full_name(&self) -> String {
        format!("{}.{}", self.schema, self.table)
    }
}

/// `tracking`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracking {
    /// Status columns: the table is the truth.
    Status,
    /// No status columns: the binlog is the truth.
    None,
}

/// `on_sent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnSent {
    /// Set the status to sent.
    Mark,
    /// Delete the row.
    Delete,
}

/// `ordering`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    /// Pipelined; what is in flight behind a refused row may overtake it.
    Aggregate,
    /// One unconfirmed row per aggregate.
    Strict,
    /// No order.
    None,
}

/// `on_unroutable`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnUnroutable {
    /// Retryable.
    Retry,
    /// Permanent.
    Fail,
}

/// Column names by role; `None` is "not there" (configured as `""`, or found absent).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names are those of the configuration
pub struct ColumnNames {
    pub id: String,
    pub message_id: String,
    pub aggregate_type: Option<String>,
    pub aggregate_id: String,
    pub event_type: String,
    pub payload: String,
    pub headers: Option<String>,
    pub status: Option<String>,
    pub retry_count: Option<String>,
    pub next_retry_at: Option<String>,
    pub locked_by: Option<String>,
    pub locked_until: Option<String>,
    pub last_error: Option<String>,
    pub created_at: Option<String>,
    pub updated_at: Option<String>,
}

impl ColumnNames {
    /// The column configured for the role of that name, if there is one.
    #[must_use]
    pub fn by_role(&self, role: &str) -> Option<&str> {
        match role {
            "id" => Some(&self.id),
            "message_id" => Some(&self.message_id),
            "aggregate_type" => self.aggregate_type.as_deref(),
            "aggregate_id" => Some(&self.aggregate_id),
            "event_type" => Some(&self.event_type),
            "payload" => Some(&self.payload),
            "headers" => self.headers.as_deref(),
            "status" => self.status.as_deref(),
            "retry_count" => self.retry_count.as_deref(),
            "next_retry_at" => self.next_retry_at.as_deref(),
            "locked_by" => self.locked_by.as_deref(),
            "locked_until" => self.locked_until.as_deref(),
            "last_error" => self.last_error.as_deref(),
            "created_at" => self.created_at.as_deref(),
            "updated_at" => self.updated_at.as_deref(),
            _ => None,
        }
    }
}

impl Default for ColumnNames {
    fn default() -> Self {
        let own = |s: &str| s.to_owned();
        Self {
            id: own("id"),
            message_id: own("id"),
            aggregate_type: Some(own("aggregate_type")),
            aggregate_id: own("aggregate_id"),
            event_type: own("event_type"),
            payload: own("payload"),
            headers: Some(own("headers")),
            status: Some(own("status")),
            retry_count: Some(own("retry_count")),
            next_retry_at: Some(own("next_retry_at")),
            locked_by: Some(own("locked_by")),
            locked_until: Some(own("locked_until")),
            last_error: Some(own("last_error")),
            created_at: Some(own("created_at")),
            updated_at: Some(own("updated_at")),
        }
    }
}
