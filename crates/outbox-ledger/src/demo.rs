//! Sample orders with their outbox rows, for the first try: what an application does.

use std::time::SystemTime;

use outbox_core::ports::PortResult;
use sqlx::Connection as _;
use sqlx::Row as _;

use crate::connect::Db;
use crate::error::{DbError, DbResult};
use crate::sql;

/// One order that was written.
#[derive(Clone, Debug)]
pub struct Order {
    /// Primary key of its outbox row.
    pub outbox_id: String,
    /// When its commit (or rollback) was answered.
    pub ended: SystemTime,
    /// Whether it was committed.
    pub committed: bool,
}

/// Creates the sample application's own table.
pub async fn prepare(db: &Db) -> PortResult<()> {
    db.run("create the table demo_orders", async {
        let mut session = db.session().await?;
        let table = sql::quote_table(db.schema(), "demo_orders");
        sql::query(format!(
            "CREATE TABLE IF NOT EXISTS {table} (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, \
             customer VARCHAR(64) NOT NULL, amount_cents INT NOT NULL) ENGINE=InnoDB"
        ))
        .execute(&mut *session)
        .await?;
        session.finish();
        Ok(())
    })
    .await
}

/// Writes one order and its outbox row in one transaction, then commits it or rolls it back.
/// `outbox` is the default outbox table, as `schema.table` parts.
pub async fn order(db: &Db, outbox: (&str, &str), n: u32, commit: bool) -> PortResult<Order> {
    db.run("write a sample order", write(db, outbox, n, commit))
        .await
}

async fn write(db: &Db, outbox: (&str, &str), n: u32, commit: bool) -> DbResult<Order> {
    let mut session = db.session().await?;
    let mut tx = session.begin().await?;
    let (orders, outbox) = (
        sql::quote_table(db.schema(), "demo_orders"),
        sql::quote_table(outbox.0, outbox.1),
    );
    let amount = 500 + i64::from(n) * 37 % 9_500;
    let customer = format!("customer-{}", n % 7);
    let inserted = sql::query(format!(
        "INSERT INTO {orders} (customer, amount_cents) VALUES (?, ?)"
    ))
    .bind(&customer)
    .bind(amount)
    .execute(&mut *tx)
    .await?;
    let order = inserted.last_insert_id();
    let payload =
        serde_json::json!({ "order": order, "customer": customer, "amount_cents": amount });
    sql::query(format!(
        "INSERT INTO {outbox} (aggregate_type, aggregate_id, event_type, payload) \
         VALUES ('order', ?, 'OrderPlaced', ?)"
    ))
    .bind(order.to_string())
    .bind(payload.to_string())
    .execute(&mut *tx)
    .await?;
    let id = sql::query("SELECT CAST(LAST_INSERT_ID() AS CHAR)".to_owned())
        .fetch_one(&mut *tx)
        .await?;
    let outbox_id: String = id.try_get(0).map_err(DbError::from)?;
    if commit {
        tx.commit().await?;
    } else {
        tx.rollback().await?;
    }
    let ended = SystemTime::now();
    session.finish();
    Ok(Order {
        outbox_id,
        ended,
        committed: commit,
    })
}
