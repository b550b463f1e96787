//! Columns: whether they can hold what is written to them, and what their absence costs.

use outbox_core::layout::{Column, Generated};
use outbox_core::spec::Tracking;
use outbox_core::status::{Status, StatusValue};

use super::super::Checks;
use crate::table::OutboxTable;

/// Characters of a claim's token.
const TOKEN: u64 = 40;
/// The only character sets of MySQL and MariaDB that the binlog's text cannot be converted from.
const UNREADABLE: [&str; 2] = ["swe7", "armscii8"];

pub(super) fn check(outbox: &OutboxTable, checks: &mut Checks) {
    let before = checks.all.len();
    let columns = &outbox.spec.columns;
    let column = |name: &Option<String>| name.as_deref().and_then(|n| outbox.layout.column(n));
    if let Some(status) = column(&columns.status) {
        statuses(outbox, status, checks);
    }
    if let Some(count) = column(&columns.retry_count)
        && !count.data_type.ends_with("int")
    {
        wrong(checks, count, "retry_count", "an integer");
    }
    for (role, name, cleared) in [
        ("next_retry_at", &columns.next_retry_at, true),
        ("locked_until", &columns.locked_until, true),
        ("created_at", &columns.created_at, false),
        ("updated_at", &columns.updated_at, false),
    ] {
        // Without status columns no statement compares times.
        let tracked = outbox.spec.tracking == Tracking::Status;
        let Some(column) = column(name).filter(|_| tracked) else {
            continue;
        };
        if !matches!(column.data_type.as_str(), "datetime" | "timestamp") {
            wrong(checks, column, role, "DATETIME or TIMESTAMP");
        } else if cleared && !column.nullable {
            wrong(checks, column, role, "nullable: it is set to NULL");
        }
    }
    if let Some(by) = column(&columns.locked_by) {
        let room = characters(by);
        if room.is_some_and(|r| r < TOKEN) {
            let needed = format!("{TOKEN} characters long, 64 for what may come");
            wrong(checks, by, "locked_by", &needed);
        } else if !by.nullable {
            wrong(checks, by, "locked_by", "nullable: it is set to NULL");
        }
    }
    written(outbox, checks);
    charsets(outbox, checks);
    if outbox.spec.tracking == Tracking::Status {
        degraded(outbox, checks);
    } else if outbox.absent.contains(&"aggregate_type") {
        aggregate_type(checks);
    }
    if checks.all.len() == before {
        checks.ok("columns", "all there, and fit for what is written");
    }
}

fn wrong(checks: &mut Checks, column: &Column, role: &str, wanted: &str) {
    checks.fail(
        role,
        format!("column {} is {}", column.name, column.column_type),
        format!("it must be {wanted}; or set outbox.columns.{role} to another column"),
    );
}

/// The longest text that fits, in characters; `None` for what is no text.
fn characters(column: &Column) -> Option<u64> {
    let width = match column.charset.as_deref()? {
        "utf8mb4" | "utf16" | "utf16le" | "utf32" | "gb18030" => 4,
        "utf8mb3" | "utf8" | "ujis" | "eucjpms" => 3,
        "ucs2" | "gbk" | "gb2312" | "big5" | "sjis" | "cp932" | "euckr" => 2,
        _ => 1,
    };
    column.octets.map(|o| o / width)
}

fn statuses(outbox: &OutboxTable, column: &Column, checks: &mut Checks) {
    let mut misfits = Vec::new();
    for status in Status::ALL {
        let value = outbox.spec.status_values.value(status);
        let (fits, shown) = match value {
            StatusValue::Number(n) => (number_fits(column, *n), n.to_string()),
            StatusValue::Text(s) => (text_fits(column, s), format!("{s:?}")),
        };
        if !fits {
            misfits.push(format!("{status} = {shown}"));
        }
    }
    if !misfits.is_empty() {
        checks.fail(
            "status",
            format!(
                "column {} is {} and cannot hold {}",
                column.name,
                column.column_type,
                misfits.join(", ")
            ),
            "alter the column, or set outbox.status_values to what it holds (numbers for integer \
             columns, strings for others)",
        );
    }
}

fn number_fits(column: &Column, n: i64) -> bool {
    let bits = match column.data_type.as_str() {
        "tinyint" => 8,
        "smallint" => 16,
        "mediumint" => 24,
        "int" => 32,
        "bigint" => return !column.unsigned || n >= 0,
        _ => return false,
    };
    if column.unsigned {
        (0..1_i64 << bits).contains(&n)
    } else {
        (-(1_i64 << (bits - 1))..1_i64 << (bits - 1)).contains(&n)
    }
}

fn text_fits(column: &Column, text: &str) -> bool {
    match column.data_type.as_str() {
        "enum" => column.members.iter().any(|m| m.eq_ignore_ascii_case(text)),
        "char" | "varchar" | "tinytext" | "text" | "mediumtext" | "longtext" => {
            let length = u64::try_from(text.chars().count()).unwrap_or(u64::MAX);
            characters(column).is_none_or(|room| length <= room)
        }
        _ => false,
    }
}

/// Columns that are written must not compute themselves.
fn written(outbox: &OutboxTable, checks: &mut Checks) {
    for role in [
        "status",
        "retry_count",
        "next_retry_at",
        "locked_by",
        "locked_until",
        "last_error",
        "updated_at",
    ] {
        let name = outbox.spec.columns.by_role(role);
        if let Some(column) = name.and_then(|n| outbox.layout.column(n))
            && column.generated != Generated::No
        {
            wrong(checks, column, role, "an ordinary column: it is written");
        }
    }
}

fn charsets(outbox: &OutboxTable, checks: &mut Checks) {
    for role in [
        "id",
        "message_id",
        "aggregate_type",
        "aggregate_id",
        "event_type",
        "payload",
        "headers",
        "status",
    ] {
        let name = outbox.spec.columns.by_role(role);
        if let Some(column) = name.and_then(|n| outbox.layout.column(n))
            && let Some(charset) = column.charset.as_deref()
            && UNREADABLE.contains(&charset)
        {
            checks.fail(
                role,
                format!("column {} has the character set {charset}, which the binlog's text cannot be converted from", column.name),
                "ALTER TABLE … CONVERT TO CHARACTER SET utf8mb4",
            );
        }
    }
}

/// What the absence of optional columns costs.
fn degraded(outbox: &OutboxTable, checks: &mut Checks) {
    let columns = &outbox.spec.columns;
    if columns.aggregate_type.is_none() {
        aggregate_type(checks);
    }
    let mut absent = |role: &str, what: &str| {
        checks.warn(
            role,
            format!("there is no such column: {what}"),
            format!("add it, or set outbox.columns.{role} to its name"),
        );
    };
    if columns.next_retry_at.is_none() {
        absent(
            "next_retry_at",
            match (&columns.updated_at, &columns.created_at) {
                (Some(_), _) => {
                    "a retry is due by updated_at and retry_count; rows cannot be delayed"
                }
                (None, Some(_)) => {
                    "a retry is due by created_at and retry_count, so an old row is retried at every poll; rows cannot be delayed"
                }
                (None, None) => "retries do not wait; rows cannot be delayed",
            },
        );
    }
    if columns.locked_by.is_none() || columns.locked_until.is_none() {
        absent(
            if columns.locked_by.is_none() {
                "locked_by"
            } else {
                "locked_until"
            },
            "claims rest on the lease alone; an application's own relay must be stopped",
        );
    }
    if columns.last_error.is_none() {
        absent("last_error", "why a row failed is in the log only");
    }
    if columns.created_at.is_none() {
        absent(
            "created_at",
            "messages carry the commit time, those of the poller none; ages are not known",
        );
    }
    if columns.updated_at.is_none() {
        absent(
            "updated_at",
            "stuck rows are found by locked_until or created_at, and sent rows are purged by their creation",
        );
    }
}

fn aggregate_type(checks: &mut Checks) {
    checks.ok(
        "aggregate_type",
        "there is no such column: aggregates go by aggregate_id alone",
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(data_type: &str, unsigned: bool) -> Column {
        Column {
            name: "status".into(),
            data_type: data_type.into(),
            column_type: data_type.into(),
            unsigned,
            charset: None,
            octets: None,
            fraction: 0,
            members: Vec::new(),
            nullable: false,
            generated: Generated::No,
            invisible: false,
            json: false,
        }
    }

    #[test]
    fn numbers_fit_integer_columns_of_their_range_only() {
        assert!(number_fits(&column("tinyint", false), -128));
        assert!(!number_fits(&column("tinyint", false), 128));
        assert!(number_fits(&column("tinyint", true), 255));
        assert!(!number_fits(&column("tinyint", true), -1));
        assert!(number_fits(&column("bigint", false), i64::MIN));
        assert!(!number_fits(&column("varchar", false), 0));
    }

    #[test]
    fn texts_fit_by_members_or_by_characters() {
        let mut status = column("enum", false);
        status.members = vec!["PENDING".into()];
        assert!(text_fits(&status, "pending") && !text_fits(&status, "sent"));
        let mut status = column("varchar", false);
        (status.charset, status.octets) = (Some("utf8mb4".into()), Some(32));
        assert!(text_fits(&status, "ABCDEFGH") && !text_fits(&status, "ABCDEFGHI"));
        assert!(!text_fits(&column("tinyint", false), "PENDING"));
    }
}
