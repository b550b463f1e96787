//! From cells to a row with its message. The tail and the poller bind the same way, so that the
//! message does not depend on the path.

mod headers;
mod time;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::sync::Arc;

use crate::failure::Failure;
use crate::layout::{Column, TableLayout};
use crate::message::{ContentType, HeaderValue, MAX_SHORT_STRING, Message};
use crate::row::{Aggregate, Cell, OutboxRow, RowId, RowKey, RowState, TableIdx};
use crate::spec::{TableSpec, Tracking};
use crate::status::Status;
use crate::template::Template;

/// Binds the cells of one table. Cells come in the order of [`Binder::wanted`].
#[derive(Debug)]
pub struct Binder {
    wanted: Vec<String>,
    table: TableIdx,
    spec: Arc<TableSpec>,
    app_id: Arc<str>,
    full_name: String,
    /// The exchange, where its template names no column.
    exchange: Option<Arc<str>>,
    /// The aggregate type where the table has none, shared by all rows.
    no_kind: Arc<str>,
    payload_is_json: bool,
    roles: Roles,
    /// Columns of the templates, by the name that the template uses.
    placeholders: Vec<(String, usize)>,
}

/// Indices into `wanted`.
#[derive(Debug, Default)]
struct Roles {
    id: usize,
    message_id: usize,
    aggregate_type: Option<usize>,
    aggregate_id: usize,
    event_type: usize,
    payload: usize,
    headers: Option<usize>,
    status: Option<usize>,
    retry_count: Option<usize>,
    next_retry_at: Option<usize>,
    locked_by: Option<usize>,
    locked_until: Option<usize>,
    created_at: Option<usize>,
}

/// What is not in the row itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct BindContext {
    /// Seconds since the epoch; the message's timestamp where the table has no `created_at`.
    pub commit_time: Option<i64>,
    /// Seconds east of UTC of the DATETIME columns' zone.
    pub zone_offset: i32,
}

/// A table that cannot be bound: each missing or unusable column, by role and name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.join("; "))]
pub struct LayoutError(pub Vec<String>);

/// A row that has no identity or no known status: it can be neither published nor recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BindError(pub String);

impl Binder {
    /// Checks the layout and finds the columns. Absent optional columns degrade silently here;
    /// the caller says so once.
    pub fn new(
        table: TableIdx,
        spec: Arc<TableSpec>,
        layout: &TableLayout,
        app_id: Arc<str>,
    ) -> Result<Self, LayoutError> {
        let mut find = Finder {
            layout,
            wanted: Vec::new(),
            errors: Vec::new(),
        };
        let roles = find.roles(&spec);
        let placeholders = find.placeholders(&spec);
        let exchange = spec.exchange.as_static().map(Arc::<str>::from);
        for (what, text) in [
            ("name", Some(&*app_id)),
            ("exchange", exchange.as_deref()),
            ("routing_key", spec.routing_key.as_static()),
        ] {
            if text.is_some_and(|t| t.len() > MAX_SHORT_STRING) {
                let error = format!("{what}: longer than {MAX_SHORT_STRING} bytes");
                find.errors.push(error);
            }
        }
        if !find.errors.is_empty() {
            return Err(LayoutError(find.errors));
        }
        Ok(Self {
            wanted: find.wanted,
            table,
            full_name: spec.full_name(),
            exchange,
            no_kind: Arc::from(""),
            payload_is_json: layout.column(&spec.columns.payload).is_some_and(|c| c.json),
            roles,
            placeholders,
            spec,
            app_id,
        })
    }

    /// The columns to read, in the order that [`Binder::bind`] takes their cells.
    #[must_use]
    pub fn wanted(&self) -> &[String] {
        &self.wanted
    }

    /// Binds one row.
    pub fn bind(&self, cells: &[Cell], context: BindContext) -> Result<OutboxRow, BindError> {
        if cells.len() != self.wanted.len() {
            let (got, want) = (cells.len(), self.wanted.len());
            return Err(BindError(format!("{got} cells for {want} columns")));
        }
        let id = self.id(&cells[self.roles.id])?;
        let state = self.state(cells, &id, context)?;
        let kind = self.roles.aggregate_type.map(|i| &cells[i]);
        let aggregate = Aggregate {
            table: self.table,
            kind: match kind {
                None | Some(Cell::Null) => Arc::clone(&self.no_kind),
                Some(cell) => Arc::from(&*text(cell)),
            },
            id: Arc::from(&*text(&cells[self.roles.aggregate_id])),
        };
        let message = self.message(cells, &id, &aggregate, context).map(Arc::new);
        Ok(OutboxRow {
            key: RowKey {
                table: self.table,
                id,
            },
            aggregate,
            state,
            message,
        })
    }

    /// Identity and, where it is known too, aggregate of a row of which only some cells are known;
    /// cells in the order of [`Binder::wanted`].
    #[must_use]
    pub fn identify(&self, cells: &[Option<Cell>]) -> Option<(RowId, Option<Aggregate>)> {
        let cell = |i: usize| cells.get(i).and_then(Option::as_ref);
        let id = self.id(cell(self.roles.id)?).ok()?;
        let kind = match self.roles.aggregate_type {
            None => Some(Arc::clone(&self.no_kind)),
            Some(i) => cell(i).map(|c| match c {
                Cell::Null => Arc::clone(&self.no_kind),
                c => Arc::from(&*text(c)),
            }),
        };
        let aggregate = kind
            .zip(cell(self.roles.aggregate_id))
            .map(|(kind, id)| Aggregate {
                table: self.table,
                kind,
                id: Arc::from(&*text(id)),
            });
        Some((id, aggregate))
    }

    fn id(&self, cell: &Cell) -> Result<RowId, BindError> {
        match cell {
            Cell::Int(n) => Ok(RowId::Int(*n)),
            Cell::UInt(n) => Ok(RowId::UInt(*n)),
            Cell::Text(t) => std::str::from_utf8(t)
                .map(|s| RowId::Text(Arc::from(s)))
                .map_err(|_| BindError(format!("{} is not UTF-8", self.spec.columns.id))),
            Cell::Binary(b) => Ok(RowId::Binary(Arc::from(&**b))),
            Cell::Null => Err(BindError(format!("{} is NULL", self.spec.columns.id))),
        }
    }

    fn state(
        &self,
        cells: &[Cell],
        id: &RowId,
        context: BindContext,
    ) -> Result<RowState, BindError> {
        let cell = |role: Option<usize>| role.map_or(&Cell::Null, |i| &cells[i]);
        let micros = |role| time::micros(cell(role), context.zone_offset);
        let status = match self.roles.status.map(|i| &cells[i]) {
            None => Status::Pending,
            Some(cell) => self.status(cell).ok_or_else(|| {
                let column = self.spec.columns.status.as_deref().unwrap_or_default();
                let shown: String = text(cell).chars().take(64).collect();
                let shown = match cell {
                    Cell::Null => "NULL".to_owned(),
                    _ => format!("{shown:?}"),
                };
                BindError(format!(
                    "{column} of row {id} is {shown}, which is none of status_values"
                ))
            })?,
        };
        Ok(RowState {
            status,
            retry_count: match cell(self.roles.retry_count) {
                Cell::Int(n) => u32::try_from((*n).max(0)).unwrap_or(u32::MAX),
                Cell::UInt(n) => u32::try_from(*n).unwrap_or(u32::MAX),
                other => text(other).trim().parse().unwrap_or(0),
            },
            next_retry_at: micros(self.roles.next_retry_at),
            locked_by: match cell(self.roles.locked_by) {
                Cell::Null => None,
                other => Some(text(other).into_owned()),
            },
            locked_until: micros(self.roles.locked_until),
        })
    }

    fn status(&self, cell: &Cell) -> Option<Status> {
        let values = &self.spec.status_values;
        match cell {
            Cell::Null => None,
            Cell::Int(n) => values.from_number(*n),
            Cell::UInt(n) => values.from_number(i64::try_from(*n).ok()?),
            Cell::Text(t) | Cell::Binary(t) => values.from_text(std::str::from_utf8(t).ok()?),
        }
    }

    fn message(
        &self,
        cells: &[Cell],
        id: &RowId,
        aggregate: &Aggregate,
        context: BindContext,
    ) -> Result<Message, Failure> {
        let (roles, names) = (&self.roles, &self.spec.columns);
        let exchange = match &self.exchange {
            Some(exchange) => Arc::clone(exchange),
            None => self.render("exchange", &self.spec.exchange, cells)?.into(),
        };
        let routing_key = self.render("routing_key", &self.spec.routing_key, cells)?;
        let message_id = required(&names.message_id, &cells[roles.message_id])?;
        let event_type = required(&names.event_type, &cells[roles.event_type])?;
        let (content_type, body) = match &cells[roles.payload] {
            Cell::Null => return Err(null(&names.payload)),
            Cell::Text(t) if self.payload_is_json => (ContentType::Json, t.clone()),
            Cell::Text(t) => (ContentType::Text, t.clone()),
            Cell::Binary(b) => (ContentType::Binary, b.clone()),
            other => (ContentType::Text, text(other).into_owned().into()),
        };
        if let Some(max) = self.spec.max_body
            && u64::try_from(body.len()).unwrap_or(u64::MAX) > max
        {
            let (column, bytes) = (&names.payload, body.len());
            let reason = format!("{column} has {bytes} bytes, more than max_body = {max}");
            return Err(Failure::permanent("body_too_large", reason));
        }
        let own = |name: &str, value: &str| (name.to_owned(), HeaderValue::Text(value.to_owned()));
        let mut headers = vec![
            (headers::ID.to_owned(), HeaderValue::Text(id.to_string())),
            own(headers::TABLE, &self.full_name),
            own(headers::AGGREGATE_TYPE, &aggregate.kind),
            own(headers::AGGREGATE_ID, &aggregate.id),
        ];
        if let (Some(i), Some(column)) = (roles.headers, &names.headers) {
            headers::append(column, &cells[i], &mut headers)?;
        }
        let created = roles
            .created_at
            .and_then(|i| time::micros(&cells[i], context.zone_offset))
            .map(|micros| micros.div_euclid(1_000_000));
        let timestamp = created.or(context.commit_time);
        Ok(Message {
            exchange,
            templated_exchange: self.exchange.is_none(),
            routing_key,
            content_type,
            message_id,
            event_type,
            timestamp: timestamp.and_then(|t| u64::try_from(t).ok()),
            app_id: Arc::clone(&self.app_id),
            headers,
            body,
        })
    }

    fn render(&self, what: &str, template: &Template, cells: &[Cell]) -> Result<String, Failure> {
        let value = |name: &str, out: &mut String| {
            let found = self.placeholders.iter().find(|(n, _)| n == name);
            match found.map(|&(_, i)| &cells[i]) {
                None | Some(Cell::Null) => false,
                Some(cell) => {
                    out.push_str(&text(cell));
                    true
                }
            }
        };
        let rendered = template.render(value).map_err(|name| {
            let column = self.placeholders.iter().find(|(n, _)| n == name);
            let column = column.map_or(name, |&(_, i)| self.wanted[i].as_str());
            let reason = format!("{what} needs {column}, which is NULL");
            Failure::permanent("null_in_template", reason)
        })?;
        short(what, rendered)
    }
}

/// Finds columns in a layout and collects what is wrong.
struct Finder<'a> {
    layout: &'a TableLayout,
    wanted: Vec<String>,
    errors: Vec<String>,
}

impl Finder<'_> {
    fn roles(&mut self, spec: &TableSpec) -> Roles {
        let names = &spec.columns;
        let tracked = spec.tracking == Tracking::Status;
        let state = |name: &Option<String>| name.clone().filter(|_| tracked);
        let roles = Roles {
            id: self.required("id", &names.id),
            message_id: self.required("message_id", &names.message_id),
            aggregate_type: self.optional(names.aggregate_type.as_deref()),
            aggregate_id: self.required("aggregate_id", &names.aggregate_id),
            event_type: self.required("event_type", &names.event_type),
            payload: self.required("payload", &names.payload),
            headers: self.optional(names.headers.as_deref()),
            status: tracked.then(|| {
                let name = names.status.as_deref().unwrap_or_default();
                self.required("status", name)
            }),
            retry_count: tracked.then(|| {
                let name = names.retry_count.as_deref().unwrap_or_default();
                self.required("retry_count", name)
            }),
            next_retry_at: self.optional(state(&names.next_retry_at).as_deref()),
            locked_by: self.optional(state(&names.locked_by).as_deref()),
            locked_until: self.optional(state(&names.locked_until).as_deref()),
            created_at: self.optional(names.created_at.as_deref()),
        };
        self.check_key(&names.id);
        roles
    }

    /// The one primary-key column, of a type that identifies a row exactly.
    fn check_key(&mut self, id: &str) {
        const TYPES: [&str; 10] = [
            "tinyint",
            "smallint",
            "mediumint",
            "int",
            "bigint",
            "char",
            "varchar",
            "binary",
            "varbinary",
            "uuid",
        ];
        let Some(column) = self.layout.column(id) else {
            return; // said already
        };
        if !TYPES.contains(&column.data_type.as_str()) {
            self.errors.push(format!(
                "id: column {id} is {}, and must be an integer, a UUID, or a string",
                column.column_type
            ));
        }
        match self.layout.primary_key.as_slice() {
            [key] if key.eq_ignore_ascii_case(id) => {}
            [] => self.errors.push(format!(
                "id: column {id} must be the table's primary key; it has none"
            )),
            key => self.errors.push(format!(
                "id: column {id} must be the table's whole primary key, which is ({})",
                key.join(", ")
            )),
        }
    }

    fn required(&mut self, role: &str, name: &str) -> usize {
        if name.is_empty() {
            self.errors.push(format!("{role}: a column is needed"));
            return 0;
        }
        let found = self.optional(Some(name));
        found.unwrap_or_else(|| {
            let error = format!("{role}: the table has no column {name}");
            self.errors.push(error);
            0
        })
    }

    fn optional(&mut self, name: Option<&str>) -> Option<usize> {
        let column = self.layout.column(name.filter(|n| !n.is_empty())?)?;
        Some(self.want(&column.name))
    }

    fn want(&mut self, name: &str) -> usize {
        let known = self.wanted.iter().position(|w| w == name);
        known.unwrap_or_else(|| {
            self.wanted.push(name.to_owned());
            self.wanted.len() - 1
        })
    }

    /// A placeholder names a column of the table or, where it has none of that name, a role: the
    /// default `{event_type}` goes on working where that column is called otherwise.
    fn placeholders(&mut self, spec: &TableSpec) -> Vec<(String, usize)> {
        let mut found: Vec<(String, usize)> = Vec::new();
        let both = [
            ("exchange", &spec.exchange),
            ("routing_key", &spec.routing_key),
        ];
        for (what, template) in both {
            for name in template.columns() {
                if found.iter().any(|(n, _)| n == name) {
                    continue;
                }
                let by_role = || {
                    let column = spec.columns.by_role(name)?;
                    self.layout.column(column)
                };
                let column: Option<&Column> = self.layout.column(name).or_else(by_role);
                match column.map(|c| c.name.clone()) {
                    Some(column) => {
                        let at = self.want(&column);
                        found.push((name.to_owned(), at));
                    }
                    None => self
                        .errors
                        .push(format!("{what}: the table has no column {name}")),
                }
            }
        }
        found
    }
}

/// The cell as text; NULL is empty.
fn text(cell: &Cell) -> Cow<'_, str> {
    match cell {
        Cell::Null => Cow::Borrowed(""),
        Cell::Int(n) => Cow::Owned(n.to_string()),
        Cell::UInt(n) => Cow::Owned(n.to_string()),
        Cell::Text(t) => String::from_utf8_lossy(t),
        Cell::Binary(b) => Cow::Owned(print_binary(b)),
    }
}

/// A column that becomes a short string of the message.
fn required(column: &str, cell: &Cell) -> Result<String, Failure> {
    match cell {
        Cell::Null => Err(null(column)),
        cell => short(column, text(cell).into_owned()),
    }
}

fn null(column: &str) -> Failure {
    Failure::permanent("null_column", format!("{column} is NULL"))
}

/// Refuses what AMQP cannot carry as a short string.
fn short(what: &str, value: String) -> Result<String, Failure> {
    if value.len() > MAX_SHORT_STRING {
        let bytes = value.len();
        let reason = format!("{what} has {bytes} bytes, more than {MAX_SHORT_STRING}");
        return Err(Failure::permanent("string_too_long", reason));
    }
    Ok(value)
}

/// 16 bytes as a hyphenated UUID, others in hex.
#[must_use]
pub fn print_binary(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut out = String::with_capacity(bytes.len() * 2 + 4);
    for (i, byte) in bytes.iter().enumerate() {
        if bytes.len() == 16 && matches!(i, 4 | 6 | 8 | 10) {
            out.push('-');
        }
        out.push(char::from(DIGITS[usize::from(byte >> 4)]));
        out.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    out
}
