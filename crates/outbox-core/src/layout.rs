//! What `information_schema` says of a table, as far as outboxd needs it.

use serde::{Deserialize, Serialize};

/// A table as the server describes it now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableLayout {
    /// Columns in their order.
    pub columns: Vec<Column>,
    /// Names of the primary key's columns.
    pub primary_key: Vec<String>,
    /// Storage engine, as printed.
    pub engine: String,
}

/// One column.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// `DATA_TYPE` in lower case: `bigint`, `varchar`, `json`, `uuid`…
    pub data_type: String,
    /// `COLUMN_TYPE` as printed: `bigint unsigned`, `enum('a','b')`…
    pub column_type: String,
    /// Integers and decimals only.
    pub unsigned: bool,
    /// `CHARACTER_SET_NAME`; `None` for what is not text.
    pub charset: Option<String>,
    /// Declared octets of BINARY(n), else `CHARACTER_OCTET_LENGTH`.
    pub octets: Option<u64>,
    /// Digits after the second of temporal types.
    pub fraction: u8,
    /// Members of ENUM and SET, unescaped, in order.
    pub members: Vec<String>,
    /// NULL allowed.
    pub nullable: bool,
    /// A generated column.
    pub generated: Generated,
    /// INVISIBLE.
    pub invisible: bool,
    /// Declared to hold JSON: a JSON column, or MariaDB's text with a `json_valid` check.
    pub json: bool,
}

/// Kind of a generated column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Generated {
    /// An ordinary column.
    No,
    /// Computed when read.
    Virtual,
    /// Computed when written.
    Stored,
}

impl TableLayout {
    /// The column of that name (MySQL compares column names without regard to case).
    #[must_use]
    pub fn column(&self, name: &str) -> Option<&Column> {
        self.columns
            .iter()
            .find(|c| c.name.eq_ignore_ascii_case(name))
    }
}
