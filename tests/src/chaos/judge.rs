//! What has to hold once every fault is lifted.

use std::collections::HashSet;

use anyhow::{Context, Result, ensure};
use outbox_testkit::{Oracle, Verdict, Written, wait};

use crate::fault::Abandoned;
use crate::world::{OUTBOXES, SOON, WINDOW, World};

/// The result for one table.
#[derive(Debug)]
pub(crate) struct Judged {
    /// Table.
    pub(crate) name: &'static str,
    /// Rows that were committed.
    pub(crate) committed: usize,
    /// Rows that were rolled back.
    pub(crate) rolled_back: usize,
    /// What was delivered, and how.
    pub(crate) verdict: Verdict,
    /// Overtakings that the program has counted.
    pub(crate) counted: usize,
    /// Rows that the application gave up; none of them came.
    pub(crate) abandoned: usize,
}

/// Waits until every row is final, then judges.
///
/// # Errors
/// The first law that was broken, with the ends of the logs.
pub(crate) async fn judge(
    world: &World,
    written: Vec<Written>,
    abandoned: &Abandoned,
    faults: usize,
) -> Result<Vec<Judged>> {
    let mut judged = Vec::new();
    for (i, written) in written.into_iter().enumerate() {
        let one = table(world, i, written, abandoned, faults).await;
        judged.push(one.with_context(|| format!("{}\n{}", OUTBOXES[i].name, world.logs()))?);
    }
    Ok(judged)
}

async fn table(
    world: &World,
    i: usize,
    written: Written,
    abandoned: &Abandoned,
    faults: usize,
) -> Result<Judged> {
    let (outbox, first) = (OUTBOXES[i], i == 0);
    let given_up: &[String] = if first { &abandoned.pending } else { &[] };
    let final_abandoned = given_up.len() + if first { abandoned.delayed.len() } else { 0 };
    all_final(world, outbox.name, final_abandoned).await?;

    let given_up: HashSet<&String> = given_up.iter().collect();
    let (committed, rolled_back) = (written.committed.len(), written.rolled_back.len());
    let mut wanted = written;
    wanted.committed.retain(|row| !given_up.contains(&row.id));
    world.sinks[i].wait_for_ids(wanted.ids(), SOON).await?;
    let received = world.sinks[i].received();

    let mut counted = 0.0;
    if first {
        for node in &world.nodes {
            counted += node.overtaken().await;
        }
    }
    let counted = format!("{counted:.0}").parse()?;
    let oracle = Oracle::new([wanted]).allow_overtakings(counted);
    Ok(Judged {
        name: outbox.name,
        committed,
        rolled_back,
        verdict: oracle.judge(&received, faults * WINDOW)?,
        counted,
        abandoned: final_abandoned,
    })
}

/// Every row is sent, or abandoned by the application.
async fn all_final(world: &World, table: &str, abandoned: usize) -> Result<()> {
    let rows = format!("SELECT COUNT(*) FROM {table} WHERE status");
    wait::until_ok("every row is final", SOON, async || {
        let left = world.mysql.count(format!("{rows} NOT IN (1, 4)")).await?;
        ensure!(left == 0, "{left} rows of {table} are not");
        anyhow::Ok(())
    })
    .await?;
    let marked = world.mysql.count(format!("{rows} = 4")).await?;
    ensure!(
        usize::try_from(marked)? == abandoned,
        "{marked} rows of {table} are abandoned; the application gave up {abandoned}"
    );
    Ok(())
}
