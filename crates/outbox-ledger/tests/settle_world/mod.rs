//! What tests of the tail's write-back are made of.
#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used)]

use anyhow::Result;
use outbox_core::failure::Failure;
use outbox_core::ports::{Ledger, PortResult, RowOutcome, SettleReport, Settlement, Verdict};
use outbox_core::position::Position;
use outbox_core::retry::RetryPolicy;
use outbox_core::spec::TableSpec;
use outbox_ledger::connect::{Db, DbConfig, UrlSource};
use outbox_ledger::position::PositionStore;
use outbox_ledger::settle::TailLedger;

use super::claims_world::{NAME, World, aggregate, key};

pub const SOURCE: &str = "3e11fa47-71ca-11e1-9e33-c80aa9429562";

/// A table of so many pending rows, numbered from 1.
pub async fn fresh(world: &World, rows: u64) -> Result<()> {
    world.server.exec("TRUNCATE TABLE outbox").await?;
    for from in (1..=rows).step_by(500) {
        let values: Vec<String> = (from..=rows.min(from + 499))
            .map(|id| format!("({id}, 'order', 'a{id}', 'Paid', '{{}}')"))
            .collect();
        let head = "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)";
        let insert = format!("{head} VALUES {}", values.join(", "));
        world.server.exec(insert).await?;
    }
    Ok(())
}

pub async fn tail(world: &World, specs: &[TableSpec]) -> Result<TailLedger> {
    let tables = world.tables(specs).await?;
    Ok(TailLedger::new(
        world.db.clone(),
        world.epoch.clone(),
        tables,
        RetryPolicy::default(),
    ))
}

pub fn db_at(url: &str) -> Db {
    Db::new(DbConfig::new(UrlSource::Value(url.to_owned().into()))).unwrap()
}

/// A position behind the n-th transaction of a source.
pub fn at(n: u64) -> Position {
    Position::Gtid(format!("{SOURCE}:1-{n}").parse().unwrap())
}

pub async fn settle(
    ledger: &TailLedger,
    outcomes: Vec<RowOutcome>,
    checkpoint: Option<Position>,
) -> PortResult<SettleReport> {
    let settlement = Settlement {
        outcomes,
        checkpoint,
        ..Settlement::default()
    };
    ledger.settle(&settlement).await
}

pub async fn stored(world: &World) -> Result<Option<Position>> {
    let positions = PositionStore::new(world.db.clone(), NAME.into());
    Ok(positions.load().await?.and_then(|s| s.position))
}

pub fn verdict(id: u64, verdict: Verdict) -> RowOutcome {
    RowOutcome {
        key: key(id),
        aggregate: aggregate("order", &format!("a{id}")),
        verdict,
    }
}

pub fn sent(id: u64) -> RowOutcome {
    verdict(id, Verdict::Sent)
}

pub fn failed(failure: Failure, retry_count: u32) -> Verdict {
    Verdict::Failed {
        failure,
        retry_count,
        message: None,
    }
}

pub fn refused(id: u64, retry_count: u32) -> RowOutcome {
    verdict(
        id,
        failed(Failure::retryable("nack", "refused"), retry_count),
    )
}

pub fn undeliverable(id: u64) -> RowOutcome {
    let failure = Failure::permanent("null_column", "payload is NULL");
    verdict(id, failed(failure, 0))
}

/// `id:status` of every row.
pub async fn statuses(world: &World) -> Result<String> {
    let all = "SELECT COALESCE(GROUP_CONCAT(CONCAT(id, ':', status) ORDER BY id SEPARATOR ' '), '') FROM outbox";
    Ok(world.server.first::<String>(all).await?.unwrap_or_default())
}

/// Whether a transaction waits for a row.
pub async fn waiting(world: &World) -> bool {
    let them = "SELECT COUNT(*) FROM performance_schema.data_lock_waits";
    world.server.count(them).await.is_ok_and(|n| n > 0)
}
