//! `migrate`, `position`, `replay`, `purge`.

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use outbox_core::gtid::mariadb::GtidList;
use outbox_core::position::FilePosition;
use outbox_core::{Position, TableIdx};
use outbox_ledger::admin::ReplayRange;
use outbox_ledger::connect::Db;
use outbox_ledger::position::{self, PositionStore};
use outbox_ledger::{lease, migrate as migrations, pause, zone};
use outbox_tail::stream::{self, Family, Resume};
use serde_json::json;

use super::args::PositionCommand;
use super::{output, yes_or_no};
use crate::config::Config;
use crate::run::servers;

/// Creates or updates our own tables.
pub async fn migrate(db: &Db, with_outbox: bool) -> anyhow::Result<ExitCode> {
    let applied = migrations::run(db, with_outbox).await?;
    let outbox = if with_outbox {
        "; the default outbox table is there"
    } else {
        ""
    };
    match applied.len() {
        0 => output::line(format!("nothing to migrate{outbox}")),
        n => output::line(format!("{n} migrations applied{outbox}")),
    }
    Ok(ExitCode::SUCCESS)
}

/// The server whose binlog is read.
fn tailed(config: &Config, db: &Db) -> anyhow::Result<Db> {
    Ok(servers::replica_database(config)?.unwrap_or_else(|| db.clone()))
}

/// Shows or moves the stored position.
pub async fn position(
    config: &Config,
    db: &Db,
    action: PositionCommand,
) -> anyhow::Result<ExitCode> {
    let positions = PositionStore::new(db.clone(), Arc::from(config.name.as_str()));
    let stored = positions.load().await?;
    match action {
        PositionCommand::Show(json) => {
            let Some(stored) = stored else {
                output::line("no position is stored yet");
                return Ok(yes_or_no(false));
            };
            let printed = stored.position.as_ref().map(ToString::to_string);
            if json.json {
                output::json(
                    &json!({ "position": printed, "age_seconds": stored.age_seconds, "sweep_due": stored.sweep }),
                )?;
            } else {
                let printed = printed.unwrap_or_else(|| {
                    "reset: the next start begins from where the server is".to_owned()
                });
                output::line(format!("{printed}, stored {} s ago", stored.age_seconds));
            }
            Ok(ExitCode::SUCCESS)
        }
        PositionCommand::Set {
            gtid,
            file,
            pos,
            dry_run,
        } => {
            let facts = stream::probe(&servers::stream(
                config,
                db.schema(),
                zone::offset(db).await?,
            ))
            .await?;
            let wanted = match (gtid, file.zip(pos)) {
                (Some(gtid), _) if gtid.trim().is_empty() => {
                    bail!(
                        "--gtid is empty, which would read the whole binlog again; `position reset` goes on from where the server is"
                    )
                }
                (Some(gtid), _) if facts.family == Family::Mariadb => {
                    let list: GtidList = gtid.parse().context("--gtid")?;
                    Position::Mariadb(list.into())
                }
                (Some(gtid), _) => Position::Gtid(gtid.parse().context("--gtid")?),
                (None, Some((file, pos))) => Position::File(FilePosition {
                    server: facts.server.clone(),
                    file,
                    pos,
                }),
                (None, None) => bail!("--gtid, or --file with --pos"),
            };
            match stream::check_resume(&wanted, &facts) {
                Resume::Continue => {}
                Resume::Behind(missing) => bail!("the server does not have {missing} yet"),
                Resume::Lost { detail, .. } => {
                    bail!("the server cannot continue from {wanted}: {detail}")
                }
                Resume::NeedsGtid => bail!("an offset over 4 GiB needs GTIDs"),
            }
            if let Position::File(at) = &wanted
                && let Some(why) = position::not_a_boundary(&tailed(config, db)?, at).await?
            {
                bail!("{wanted} is not between two transactions: {why}");
            }
            store(
                config,
                db,
                &positions,
                Some(&wanted),
                false,
                dry_run,
                &format!("the position is {wanted}"),
            )
            .await
        }
        PositionCommand::Reset { dry_run } => {
            let text = "the next start sweeps the tables and goes on from where the server is then";
            store(config, db, &positions, None, true, dry_run, text).await
        }
    }
}

/// Stores it, unless an instance leads that is not paused.
async fn store(
    config: &Config,
    db: &Db,
    positions: &PositionStore,
    position: Option<&Position>,
    sweep: bool,
    dry_run: bool,
    text: &str,
) -> anyhow::Result<ExitCode> {
    let leads = lease::state(db, &config.name).await?.and_then(|s| s.leader);
    if let Some(leader) = leads.filter(|_| !dry_run)
        && !pause::read(db, &config.name).await?.all
    {
        bail!("{leader} leads; `outboxd pause` first, then move the position");
    }
    if dry_run {
        output::line(format!("would be done: {text}"));
        return Ok(ExitCode::SUCCESS);
    }
    let epoch = positions.set_by_operator(position, sweep).await?;
    output::line(format!(
        "{text} (epoch {epoch}: every instance starts from it)"
    ));
    Ok(ExitCode::SUCCESS)
}

/// What to replay, as it was given.
pub struct Replayed {
    /// First and last key.
    pub ids: Option<(String, String)>,
    /// Created since.
    pub since: Option<String>,
    /// Created until.
    pub until: Option<String>,
}

/// Publishes sent rows again.
pub async fn replay(
    config: &Config,
    db: &Db,
    table: Option<&str>,
    wanted: Replayed,
    yes: bool,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    let admin = servers::admin(config, db).await?;
    let table = match super::rows::find(&admin, table)? {
        Some(table) => table,
        None if config.outbox.len() == 1 => TableIdx(0),
        None => bail!("several outboxes are configured; name one with --table"),
    };
    let zone = i64::from(zone::offset(db).await?) * 1_000_000;
    let moment = |text: &str| moment(text).map(|local| local - zone);
    let (what, range) = match (wanted.ids, wanted.since) {
        (Some((from, to)), _) => (
            format!("sent rows {from} to {to}"),
            ReplayRange::Ids { from, to },
        ),
        (None, Some(since)) => {
            let until = wanted.until.as_deref().map(moment).transpose()?;
            (
                format!("sent rows created since {since}"),
                ReplayRange::Created {
                    since: moment(&since)?,
                    until,
                },
            )
        }
        (None, None) => bail!("--from-id and --to-id, or --since"),
    };
    if !yes && !confirmed(&format!("publish {what} again?"))? {
        return Ok(yes_or_no(false));
    }
    let bar = output::progress("rows published again");
    let published =
        crate::run::replay::run(config, &admin, table, &range, |n| bar.set_position(n)).await?;
    bar.finish_and_clear();
    if as_json {
        output::json(&json!({ "published": published }))?;
    } else {
        output::line(format!("{published} rows published again"));
    }
    Ok(yes_or_no(published > 0))
}

/// Microseconds since the epoch of a date and time without zone.
fn moment(text: &str) -> anyhow::Result<i64> {
    use time::macros::format_description;
    let text = text.trim().replace('T', " ");
    let whole = if text.len() == 10 {
        format!("{text} 00:00:00")
    } else {
        text.clone()
    };
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]");
    let parsed = time::PrimitiveDateTime::parse(&whole, format);
    let at =
        parsed.with_context(|| format!("\"{text}\" is not a time like \"2026-01-31 08:00:00\""))?;
    Ok(at.assume_utc().unix_timestamp() * 1_000_000)
}

/// Deletes sent rows in small chunks.
pub async fn purge(
    config: &Config,
    db: &Db,
    table: Option<&str>,
    older_than: Duration,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    let admin = servers::admin(config, db).await?;
    let table = super::rows::find(&admin, table)?;
    let bar = output::progress("rows deleted");
    let deleted = admin
        .purge(table, older_than, |n| bar.set_position(n))
        .await?;
    bar.finish_and_clear();
    if as_json {
        output::json(&json!({ "deleted": deleted }))?;
    } else {
        output::line(format!("{deleted} rows deleted"));
    }
    Ok(yes_or_no(deleted > 0))
}

/// Asks on the terminal; where there is none, `--yes` is needed.
#[allow(clippy::print_stderr)]
fn confirmed(question: &str) -> anyhow::Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!("{question} There is no terminal to ask on; add --yes");
    }
    eprint!("{question} [y/N] ");
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
