//! `check`: what is wrong with servers, account or tables, and what to do about it.

use std::process::ExitCode;
use std::time::Duration;

use outbox_core::ports::{BrokerState, Publisher as _};
use outbox_ledger::connect::Db;
use outbox_ledger::preflight::{self, Check, Level};
use outbox_tail::rabbit::RabbitPublisher;
use tokio_util::sync::CancellationToken;

use super::{output, yes_or_no};
use crate::config::Config;
use crate::run::servers;

/// How long RabbitMQ may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs every check; no when one fails.
pub async fn run(config: &Config, db: &Db, as_json: bool) -> anyhow::Result<ExitCode> {
    let mut checks = preflight::check(db, &config.name, &config.outbox).await?;
    if let Some(replica) = servers::replica_database(config)? {
        checks.extend(preflight::check_replica(&replica, &config.outbox).await?);
        replica.close().await;
    }
    checks.push(broker(config).await?);
    let failed = checks.iter().any(|c| c.level == Level::Fail);
    if as_json {
        output::json(&checks)?;
        return Ok(yes_or_no(!failed));
    }
    for c in &checks {
        output::line(format!("{:4}  {}: {}", c.level.name(), c.name, c.what));
        if let Some(fix) = &c.fix {
            output::line(format!("      -> {fix}"));
        }
    }
    Ok(yes_or_no(!failed))
}

/// Connects as the daemon would, configured exchanges included.
async fn broker(config: &Config) -> anyhow::Result<Check> {
    let (publisher, driver) = RabbitPublisher::new(servers::broker(config, "check"));
    let stop = CancellationToken::new();
    let driver = tokio::spawn(driver.run(stop.clone()));
    let begun = publisher.state();
    // The first attempt says it all; the daemon would go on trying.
    let failed = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(50));
        loop {
            ticks.tick().await;
            let state = publisher.state();
            if matches!(state, BrokerState::Down(_)) && state != begun {
                return;
            }
        }
    };
    let connected = tokio::select! {
        ready = tokio::time::timeout(PATIENCE, publisher.ready()) => ready.is_ok(),
        () = failed => false,
    };
    let state = publisher.state();
    stop.cancel();
    driver.await?;
    let exchanges = servers::static_exchanges(&config.outbox).join(", ");
    Ok(match state {
        BrokerState::Up if connected => Check {
            name: "rabbitmq".to_owned(),
            level: Level::Ok,
            what: format!("connected; exchanges: {}", if exchanges.is_empty() { "by row" } else { &exchanges }),
            fix: None,
        },
        state => Check {
            name: "rabbitmq".to_owned(),
            level: Level::Fail,
            what: state.to_string(),
            fix: Some("check rabbitmq.url, the account's permissions, and that the exchange exists (or set rabbitmq.declare_exchange)".to_owned()),
        },
    })
}
