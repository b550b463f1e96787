//! Judges a delivery: nothing lost, nothing that nobody committed, few copies, every aggregate in order.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::sink::Received;
use crate::writer::{Row, Written};

/// Knows what was committed.
#[derive(Debug, Default)]
pub struct Oracle {
    rows: Vec<Row>,
    overtakings: usize,
}

/// What a delivery looked like that passed.
#[derive(Debug, Clone, Default)]
pub struct Verdict {
    /// Different messages.
    pub delivered: usize,
    /// Copies that were published (not: delivered again by the broker).
    pub duplicates: usize,
    /// Pairs of one aggregate of which the one committed later came first.
    pub overtakings: usize,
    /// From COMMIT's return to the first arrival, sorted. Zero where it came before the return was seen.
    pub latencies: Vec<Duration>,
}

impl Verdict {
    /// The latency that this share (0 to 100) of the messages did not exceed.
    #[must_use]
    pub fn percentile(&self, percent: usize) -> Duration {
        let last = self.latencies.len().saturating_sub(1);
        self.latencies
            .get(last * percent.min(100) / 100)
            .copied()
            .unwrap_or_default()
    }
}

impl Oracle {
    /// For what one or more writers wrote; no two of them to one aggregate.
    #[must_use]
    pub fn new(written: impl IntoIterator<Item = Written>) -> Self {
        Self {
            rows: written.into_iter().flat_map(|one| one.committed).collect(),
            overtakings: 0,
        }
    }

    /// Lets so many pairs of one aggregate come in the wrong order: those that outboxd has counted.
    #[must_use]
    pub fn allow_overtakings(mut self, pairs: usize) -> Self {
        self.overtakings = pairs;
        self
    }

    /// Judges what was received, in its order.
    ///
    /// # Errors
    /// The first law that was broken, with examples.
    pub fn judge(&self, received: &[Received], duplicates_at_most: usize) -> Result<Verdict> {
        let wanted: HashMap<&str, &Row> =
            self.rows.iter().map(|row| (row.id.as_str(), row)).collect();
        let mut first: HashMap<&str, (usize, &Received)> = HashMap::new();
        let (mut duplicates, mut ghosts) = (0, Vec::new());
        for (at, message) in received.iter().enumerate() {
            let Some(row) = wanted.get(message.id.as_str()) else {
                ghosts.push(message.id.as_str());
                continue;
            };
            if message.body != row.payload.as_bytes() {
                bail!(
                    "the body of message {} is not its row's payload",
                    message.id
                );
            }
            if first.contains_key(message.id.as_str()) {
                duplicates += usize::from(!message.redelivered);
            } else {
                first.insert(&message.id, (at, message));
            }
        }
        let lost: Vec<&str> = wanted
            .keys()
            .copied()
            .filter(|id| !first.contains_key(id))
            .collect();
        if !lost.is_empty() {
            bail!(
                "lost {} of {}, such as {:?}",
                lost.len(),
                wanted.len(),
                &lost[..lost.len().min(5)]
            );
        }
        if !ghosts.is_empty() {
            bail!(
                "{} messages nobody committed, such as {:?}",
                ghosts.len(),
                &ghosts[..ghosts.len().min(5)]
            );
        }
        if duplicates > duplicates_at_most {
            bail!("{duplicates} duplicates, {duplicates_at_most} allowed");
        }
        let overtakings = self.in_order(&first)?;
        Ok(Verdict {
            delivered: first.len(),
            duplicates,
            overtakings,
            latencies: self.latencies(&first),
        })
    }

    /// Per aggregate, first arrivals have to be in the order of the commits. Returns how many pairs are not.
    fn in_order(&self, first: &HashMap<&str, (usize, &Received)>) -> Result<usize> {
        let mut earlier: HashMap<&str, Vec<(usize, &str)>> = HashMap::new();
        let (mut pairs, mut example) = (0, String::new());
        for row in &self.rows {
            let Some(&(at, _)) = first.get(row.id.as_str()) else {
                continue;
            };
            // Sorted by arrival: behind it are those that were committed earlier and came later.
            let came = earlier.entry(&row.aggregate).or_default();
            let place = came.partition_point(|(before, _)| *before < at);
            pairs += came.len() - place;
            if let Some((_, id)) = came.get(place) {
                example = format!(
                    "aggregate {}: {} came before {id}, which was committed first",
                    row.aggregate, row.id
                );
            }
            came.insert(place, (at, &row.id));
        }
        if pairs > self.overtakings {
            bail!(
                "{example}; {pairs} such pairs, {} allowed",
                self.overtakings
            );
        }
        Ok(pairs)
    }

    fn latencies(&self, first: &HashMap<&str, (usize, &Received)>) -> Vec<Duration> {
        let came = self.rows.iter().filter_map(|row| {
            let (_, message) = first.get(row.id.as_str())?;
            Some(message.at.duration_since(row.at).unwrap_or_default())
        });
        let mut latencies: Vec<Duration> = came.collect();
        latencies.sort_unstable();
        latencies
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::SystemTime;

    use lapin::BasicProperties;

    use super::*;

    fn oracle() -> Oracle {
        let row = |id: &str, aggregate: &str| Row {
            id: id.into(),
            aggregate: aggregate.into(),
            payload: format!("p{id}"),
            at: SystemTime::UNIX_EPOCH,
        };
        let committed = vec![row("1", "a"), row("2", "b"), row("3", "a")];
        Oracle::new([Written {
            committed,
            rolled_back: vec!["4".into()],
        }])
    }

    fn came(ids: &[&str]) -> Vec<Received> {
        ids.iter()
            .map(|id| Received {
                id: (*id).into(),
                properties: BasicProperties::default(),
                exchange: String::new(),
                routing_key: String::new(),
                body: format!("p{id}").into_bytes(),
                redelivered: false,
                at: SystemTime::UNIX_EPOCH + Duration::from_millis(5),
            })
            .collect()
    }

    fn no(received: &[Received], duplicates: usize) -> String {
        oracle()
            .judge(received, duplicates)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn aggregates_may_interleave_and_a_late_copy_breaks_no_order() {
        let verdict = oracle().judge(&came(&["2", "1", "3", "1"]), 1).unwrap();
        assert_eq!((verdict.delivered, verdict.duplicates), (3, 1));
        assert_eq!(verdict.percentile(99), Duration::from_millis(5));
    }

    #[test]
    fn every_broken_law_is_named() {
        assert!(no(&came(&["1", "2"]), 0).contains("lost 1 of 3"));
        assert!(no(&came(&["1", "2", "3", "4"]), 0).contains("nobody committed"));
        assert!(no(&came(&["1", "2", "3", "3"]), 0).contains("1 duplicates, 0 allowed"));
        assert!(no(&came(&["3", "2", "1"]), 0).contains("aggregate a: 3 came before 1"));
        let mut other = came(&["1", "2", "3"]);
        other[1].body = b"p9".to_vec();
        assert!(no(&other, 0).contains("not its row's payload"));
    }

    #[test]
    fn overtakings_are_counted_in_pairs_against_what_is_allowed() {
        let row = |id: &str| Row {
            id: id.into(),
            aggregate: "a".into(),
            payload: format!("p{id}"),
            at: SystemTime::UNIX_EPOCH,
        };
        let oracle = |pairs| {
            let committed = vec![row("1"), row("2"), row("3")];
            let written = Written {
                committed,
                rolled_back: Vec::new(),
            };
            Oracle::new([written]).allow_overtakings(pairs)
        };
        let received = came(&["2", "3", "1"]);
        assert_eq!(oracle(2).judge(&received, 0).unwrap().overtakings, 2);
        let no = oracle(1).judge(&received, 0).unwrap_err().to_string();
        assert!(no.contains("2 such pairs, 1 allowed"), "{no}");
    }

    #[test]
    fn what_the_broker_delivers_again_is_no_duplicate() {
        let mut received = came(&["1", "2", "3", "3"]);
        received[3].redelivered = true;
        assert_eq!(oracle().judge(&received, 0).unwrap().duplicates, 0);
    }
}
