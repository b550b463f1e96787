//! The checkpoint row. A long GTID set (failovers and holes make hundreds of KB of it) is kept
//! apart in `outboxd_gtid` and rewritten now and then; the row that every flush rewrites holds
//! only what was added since.

use outbox_core::gtid::GtidSet;
use outbox_core::gtid::mariadb::{GtidList, MariadbPosition};
use outbox_core::position::{FilePosition, Position};
use sqlx::mysql::MySqlArguments;
use sqlx::query::Query;
use sqlx::{MySql, MySqlConnection, Row};

use super::StoredPosition;
use crate::error::{DbError, DbResult};
use crate::layouts::optional;
use crate::lease::Epoch;

/// A set of up to this many intervals is written whole: some hundred bytes.
const SHORT_SET: usize = 16;
/// A difference of more intervals than this is folded into the whole set. Ordinary traffic only
/// lengthens the intervals of the difference, so that this happens after failovers, not often.
const LONG_DIFFERENCE: usize = 64;

/// How MariaDB's empty list is written: the empty text is MySQL's empty set.
const EMPTY_LIST: &str = "-";

/// How a position is written.
#[derive(Debug, Default, PartialEq, Eq)]
struct Form {
    gtid: Option<String>,
    based: bool,
    /// The whole set for `outboxd_gtid`, if that is due.
    base: Option<String>,
    server: Option<String>,
    /// Beside a list of MariaDB's GTIDs: where that is on the server it was read from.
    file: Option<(String, u64)>,
}

/// Stores the positions of one session, and knows what the whole set in the table is.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    /// The set in `outboxd_gtid`; `None` where it is not known for certain.
    base: Option<GtidSet>,
}

impl Writer {
    /// Stores a position within the caller's transaction. What follows from the commit is told
    /// by [`Writer::committed`]; without it the next position is written whole.
    pub(crate) async fn store(
        &mut self,
        conn: &mut MySqlConnection,
        epoch: &Epoch,
        position: &Position,
    ) -> DbResult<Pending> {
        let base = self.base.take();
        let form = form(position, base.as_ref());
        write_base(conn, &epoch.name, &form).await?;
        let query = sqlx::query(
            "INSERT INTO outboxd_checkpoint \
             (gtid, gtid_based, server, file, pos, name, epoch, stored_at) \
             VALUES (?, ?, ?, ?, ?, ?, ?, UTC_TIMESTAMP(6)) ON DUPLICATE KEY UPDATE \
             gtid = VALUES(gtid), gtid_based = VALUES(gtid_based), server = VALUES(server), \
             file = VALUES(file), pos = VALUES(pos), epoch = VALUES(epoch), by_operator = FALSE, \
             stored_at = VALUES(stored_at)",
        );
        bind(query, &form, epoch).execute(conn).await?;
        Ok(Pending(match position {
            Position::Gtid(set) if form.base.is_some() => Some(set.clone()),
            _ => base,
        }))
    }

    /// The transaction of the last store was committed.
    pub(crate) fn committed(&mut self, pending: Pending) {
        self.base = pending.0;
    }
}

/// What the writer knows once its transaction is committed.
#[derive(Debug)]
pub(crate) struct Pending(Option<GtidSet>);

/// Writes a position that has no relation to the one before it, and forgets stored layouts.
pub(super) async fn replace(
    conn: &mut MySqlConnection,
    epoch: &Epoch,
    position: Option<&Position>,
    sweep: bool,
    by_operator: bool,
) -> DbResult<()> {
    let mut form = position.map_or_else(Form::default, |p| form(p, None));
    // Whole in this row: a writer of the same epoch goes on adding to the set that it left in
    // `outboxd_gtid`.
    if let Some(whole) = form.base.take() {
        (form.gtid, form.based) = (Some(whole), false);
    }
    let query = sqlx::query(
        "INSERT INTO outboxd_checkpoint \
         (gtid, gtid_based, server, file, pos, name, epoch, sweep, by_operator, stored_at) \
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, UTC_TIMESTAMP(6)) ON DUPLICATE KEY UPDATE \
         gtid = VALUES(gtid), gtid_based = VALUES(gtid_based), server = VALUES(server), \
         file = VALUES(file), pos = VALUES(pos), epoch = VALUES(epoch), sweep = VALUES(sweep), \
         by_operator = VALUES(by_operator), stored_at = VALUES(stored_at)",
    );
    bind(query, &form, epoch)
        .bind(sweep)
        .bind(by_operator)
        .execute(&mut *conn)
        .await?;
    sqlx::query("DELETE FROM outboxd_layout WHERE name = ?")
        .bind(&*epoch.name)
        .execute(conn)
        .await?;
    Ok(())
}

type Bound<'q> = Query<'q, MySql, MySqlArguments>;

fn bind<'q>(query: Bound<'q>, form: &Form, epoch: &Epoch) -> Bound<'q> {
    let file = form.file.as_ref();
    query
        .bind(form.gtid.clone())
        .bind(form.based)
        .bind(form.server.clone())
        .bind(file.map(|f| f.0.clone()))
        .bind(file.map(|f| f.1))
        .bind(epoch.name.to_string())
        .bind(epoch.number)
}

async fn write_base(conn: &mut MySqlConnection, name: &str, form: &Form) -> DbResult<()> {
    if let Some(base) = &form.base {
        sqlx::query(
            "INSERT INTO outboxd_gtid (name, gtid_set) VALUES (?, ?) \
             ON DUPLICATE KEY UPDATE gtid_set = VALUES(gtid_set)",
        )
        .bind(name)
        .bind(base)
        .execute(conn)
        .await?;
    }
    Ok(())
}

fn form(position: &Position, base: Option<&GtidSet>) -> Form {
    let set = match position {
        Position::Gtid(set) => set,
        Position::Mariadb(at) => {
            return Form {
                gtid: Some(if at.list.is_empty() {
                    EMPTY_LIST.to_owned()
                } else {
                    at.list.to_string()
                }),
                file: at.near.clone(),
                ..Form::default()
            };
        }
        Position::File(at) => {
            return Form {
                server: Some(at.server.clone()),
                file: Some((at.file.clone(), at.pos)),
                ..Form::default()
            };
        }
    };
    let (gtid, based, base) = if intervals(set) <= SHORT_SET {
        (set.to_string(), false, None)
    } else {
        let difference = base
            .filter(|base| set.contains_all(base))
            .map(|base| set.subtract(base))
            .filter(|d| intervals(d) <= LONG_DIFFERENCE);
        match difference {
            Some(difference) => (difference.to_string(), true, None),
            None => (String::new(), true, Some(set.to_string())),
        }
    };
    Form {
        gtid: Some(gtid),
        based,
        base,
        ..Form::default()
    }
}

fn intervals(set: &GtidSet) -> usize {
    set.sids().map(|sid| sid.intervals.len()).sum()
}

/// The stored position of `name`.
pub(super) async fn load(
    conn: &mut MySqlConnection,
    name: &str,
) -> DbResult<Option<StoredPosition>> {
    let row = sqlx::query(
        "SELECT c.gtid, c.gtid_based, g.gtid_set, c.server, c.file, c.pos, c.sweep, \
         c.by_operator, CAST(GREATEST(0, TIMESTAMPDIFF(SECOND, c.stored_at, UTC_TIMESTAMP(6))) \
         AS UNSIGNED), c.epoch FROM outboxd_checkpoint c \
         LEFT JOIN outboxd_gtid g ON g.name = c.name WHERE c.name = ?",
    )
    .bind(name)
    .fetch_optional(conn)
    .await?;
    let Some(row) = row else { return Ok(None) };
    let flag = |i| row.try_get_unchecked::<i64, _>(i).map(|n| n != 0);
    let position = match (optional(&row, 0)?, optional(&row, 3)?, optional(&row, 4)?) {
        (Some(gtid), _, file) if list(&gtid).is_some() => {
            let near = match file {
                Some(file) => Some((file, row.try_get_unchecked(5)?)),
                None => None,
            };
            let list = list(&gtid).unwrap_or_default();
            Some(Position::Mariadb(MariadbPosition { list, near }))
        }
        (Some(gtid), _, _) => {
            let mut set = parse(&gtid)?;
            if flag(1)? {
                let base = optional(&row, 2)?;
                let base = base.ok_or_else(|| corrupt("outboxd_gtid has lost its row"))?;
                set.merge(&parse(&base)?);
            }
            Some(Position::Gtid(set))
        }
        (None, Some(server), Some(file)) => Some(Position::File(FilePosition {
            server,
            file,
            pos: row.try_get_unchecked(5)?,
        })),
        _ => None,
    };
    Ok(Some(StoredPosition {
        position,
        sweep: flag(6)?,
        by_operator: flag(7)?,
        age_seconds: row.try_get_unchecked(8)?,
        epoch: row.try_get_unchecked(9)?,
    }))
}

/// MariaDB's list, if it is one: no GTID set of MySQL reads like it.
fn list(text: &str) -> Option<GtidList> {
    match text {
        "" => None,
        EMPTY_LIST => Some(GtidList::default()),
        text => text.parse().ok(),
    }
}

fn parse(text: &str) -> DbResult<GtidSet> {
    text.parse()
        .map_err(|e| corrupt(&format!("the stored position is {e}")))
}

fn corrupt(what: &str) -> DbError {
    DbError::Corrupt(what.to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const SOURCE: &str = "3e11fa47-71ca-11e1-9e33-c80aa9429562";

    /// Every second transaction up to `last`: one interval each.
    fn holes(last: usize) -> GtidSet {
        let numbers: Vec<String> = (1..=last).step_by(2).map(|n| n.to_string()).collect();
        format!("{SOURCE}:{}", numbers.join(":")).parse().unwrap()
    }

    #[test]
    fn a_list_is_written_with_its_file_and_told_from_a_set() {
        for text in ["", "0-1-5", "0-1-5,3-2-9"] {
            let position = MariadbPosition {
                list: text.parse().unwrap(),
                near: Some(("binlog.000003".into(), 512)),
            };
            let form = form(&Position::Mariadb(position.clone()), None);
            assert_eq!(list(form.gtid.as_deref().unwrap()), Some(position.list));
            assert_eq!((form.server, form.file), (None, position.near));
        }
        for set in [String::new(), holes(9).to_string()] {
            assert_eq!(list(&set), None);
        }
    }

    #[test]
    fn a_short_set_is_written_whole_and_without_a_base() {
        let set = holes(9);
        let form = form(&Position::Gtid(set.clone()), None);
        assert!(!form.based && form.base.is_none());
        assert_eq!(form.gtid.unwrap().parse::<GtidSet>().unwrap(), set);
    }

    #[test]
    fn a_long_set_is_written_whole_once_and_then_only_its_difference() {
        let mut set = holes(2000);
        let first = form(&Position::Gtid(set.clone()), None);
        assert_eq!(first.base.as_deref(), Some(set.to_string().as_str()));
        let base = set.clone();
        set.merge(&format!("{SOURCE}:5000-6000").parse().unwrap());
        let next = form(&Position::Gtid(set.clone()), Some(&base));
        assert_eq!(next.gtid.as_deref(), Some(&*format!("{SOURCE}:5000-6000")));
        assert_eq!((next.based, next.base), (true, None));
        // A difference that has itself become long is folded in.
        set.merge(&holes(9000));
        assert!(form(&Position::Gtid(set), Some(&base)).base.is_some());
    }

    #[test]
    fn a_set_that_lost_something_is_not_written_as_a_difference() {
        let base = holes(3000);
        let smaller = form(&Position::Gtid(holes(2000)), Some(&base));
        assert!(smaller.base.is_some());
    }
}
