//! How statements are put together: names quoted in one place, values always bound.
//!
//! Lists of keys are bound too, padded to the next power of two by repeating the last key: a
//! prepared statement is then the same for many batch sizes, and the driver's cache holds eleven
//! forms of each instead of a thousand. Text statements would spare the cache altogether, but need
//! every value escaped by hand.

use std::fmt::Write as _;

use outbox_core::row::RowId;
use outbox_core::status::StatusValue;
use sqlx::mysql::MySqlArguments;
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, MySql};

/// Most keys in one statement.
pub const BATCH: usize = 1000;

/// A name in backquotes.
#[must_use]
pub fn quote(name: &str) -> String {
    format!("`{}`", name.replace('`', "``"))
}

/// `schema`.`table`.
#[must_use]
pub fn quote_table(schema: &str, table: &str) -> String {
    format!("{}.{}", quote(schema), quote(table))
}

/// How many placeholders a list of `len` keys gets.
#[must_use]
pub fn padded(len: usize) -> usize {
    len.max(1).next_power_of_two()
}

/// `(?,?,…)` for a list of `len` keys, padded.
#[must_use]
pub fn list(len: usize) -> String {
    let mut text = String::from("(?");
    for _ in 1..padded(len) {
        text.push_str(",?");
    }
    text.push(')');
    text
}

/// `((?,?),(?,?),…)` for a list of `len` rows of `width` values, padded.
#[must_use]
pub fn rows(len: usize, width: usize) -> String {
    let row = format!("({})", vec!["?"; width].join(","));
    let mut text = format!("({row}");
    for _ in 1..padded(len) {
        let _ = write!(text, ",{row}");
    }
    text.push(')');
    text
}

/// A query under construction.
pub type Bound<'q> = Query<'q, MySql, MySqlArguments>;

/// A statement whose text consists of our own words and quoted names only.
pub fn query<'q>(text: String) -> Bound<'q> {
    sqlx::query(AssertSqlSafe(text))
}

/// Binds one key by its kind.
pub fn bind_id<'q>(query: Bound<'q>, id: &RowId) -> Bound<'q> {
    match id {
        RowId::Int(n) => query.bind(*n),
        RowId::UInt(n) => query.bind(*n),
        RowId::Text(s) => query.bind(s.to_string()),
        RowId::Binary(b) => query.bind(b.to_vec()),
    }
}

/// Binds a list of keys for [`list`], the last one repeated. The list is not empty.
pub fn bind_ids<'q>(mut query: Bound<'q>, ids: &[RowId]) -> Bound<'q> {
    for id in ids {
        query = bind_id(query, id);
    }
    if let Some(last) = ids.last() {
        for _ in ids.len()..padded(ids.len()) {
            query = bind_id(query, last);
        }
    }
    query
}

/// Binds a stored status.
pub fn bind_status<'q>(query: Bound<'q>, value: &StatusValue) -> Bound<'q> {
    match value {
        StatusValue::Number(n) => query.bind(*n),
        StatusValue::Text(s) => query.bind(s.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_backquote_stays_one_name() {
        assert_eq!(quote_table("app", "o`x"), "`app`.`o``x`");
    }

    #[test]
    fn lists_have_as_many_places_as_their_padding() {
        for len in 1..=BATCH {
            assert_eq!(list(len).matches('?').count(), padded(len));
        }
        assert_eq!(list(3), "(?,?,?,?)");
        assert_eq!(rows(2, 2), "((?,?),(?,?))");
        assert!(padded(BATCH) <= 1024);
    }
}
