//! Looking for changes of tables between a position and where their layouts are known to hold.
//! Only tables without status columns need it: their rows cannot be left to the table, so that
//! what was written between the position and the reading of the layout has to be decodable.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::StreamExt as _;
use outbox_core::Position;

use super::assemble::{Assembler, Step};
use super::connect::{self, StreamConfig};
use super::error::StreamError;
use super::facts::ServerFacts;
use super::source::raw;
use super::tables::Tables;

/// The gap is mostly milliseconds of writes; after a long outage it may be much.
const LIMIT: Duration = Duration::from_secs(120);

/// The tables, by their place, that a statement between `after` and `until` may have changed.
pub(super) async fn changed(
    config: &StreamConfig,
    facts: &ServerFacts,
    tables: Tables,
    after: &Position,
    until: &Position,
) -> Result<BTreeSet<usize>, StreamError> {
    let all: BTreeSet<usize> = (0..tables.len()).collect();
    let mut assembler = Assembler::new(tables, config.max_transaction_bytes, config.zone_offset);
    assembler.restart(after, None, [0; 16]);
    let mut conn = connect::connect(config).await?;
    connect::prepare(&mut conn, config, facts).await?;
    let mut stream = connect::dump(conn, config, after).await?;
    let mut changed = BTreeSet::new();
    let read = async {
        while assembler.end().reaches(until) == Some(false) {
            let event = match stream.next().await {
                Some(Ok(event)) => event,
                Some(Err(e)) => return Err(connect::classify("reading the binlog", e)),
                None => return Err(StreamError::Ended),
            };
            match assembler.feed(&raw(&event)) {
                Ok(Step::Group(group)) => {
                    let of = |idx| all.iter().find(|p| assembler.tables.idx(**p) == idx);
                    changed.extend(group.layouts.iter().filter_map(|(idx, _)| of(*idx)));
                }
                Ok(_) => {}
                // The reader proper meets it again, and says what it is.
                Err(_) => return Ok(all.clone()),
            }
        }
        Ok(changed)
    };
    match tokio::time::timeout(LIMIT, read).await {
        Ok(changed) => changed,
        Err(_) => Ok(all),
    }
}
