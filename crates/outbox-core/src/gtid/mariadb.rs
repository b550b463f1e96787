//! MariaDB's GTIDs: `domain-server-sequence`. Within a domain the binlog is one sequence, so that
//! the last GTID of each domain says what was read.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::{GtidError, refuse};

/// One transaction (MariaDB: event group).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DomainGtid {
    /// The replication domain; 0 unless the server is told otherwise.
    pub domain: u32,
    /// `server_id` of the server that wrote it first.
    pub server: u32,
    /// Ascending within the domain.
    pub sequence: u64,
}

impl fmt::Display for DomainGtid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.domain, self.server, self.sequence)
    }
}

impl FromStr for DomainGtid {
    type Err = GtidError;

    fn from_str(text: &str) -> Result<Self, GtidError> {
        let wrong = || refuse(text, "is not domain-server-sequence");
        // `parse` alone would take a plus sign.
        let number = |t: &str| {
            let digits = !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit());
            t.parse::<u64>().ok().filter(|_| digits).ok_or_else(wrong)
        };
        let mut fields = text.split('-');
        let mut next = || number(fields.next().unwrap_or_default());
        let (domain, server, sequence) = (next()?, next()?, next()?);
        if fields.next().is_some() {
            return Err(wrong());
        }
        Ok(Self {
            domain: u32::try_from(domain).map_err(|_| wrong())?,
            server: u32::try_from(server).map_err(|_| wrong())?,
            sequence,
        })
    }
}

/// The last transaction of each domain: MariaDB's position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GtidList(BTreeMap<u32, DomainGtid>);

impl GtidList {
    /// A transaction was read; it takes the place of the last one of its domain, whatever its
    /// sequence is: the binlog's order counts.
    pub fn set(&mut self, gtid: DomainGtid) {
        self.0.insert(gtid.domain, gtid);
    }

    /// The last one of a domain.
    #[must_use]
    pub fn get(&self, domain: u32) -> Option<DomainGtid> {
        self.0.get(&domain).copied()
    }

    /// All of them, by domain.
    pub fn iter(&self) -> impl Iterator<Item = DomainGtid> + '_ {
        self.0.values().copied()
    }

    /// Whether nothing was read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it is at least as far as `other` in every domain of that. By sequence alone: after
    /// a failover another server goes on with the same sequence.
    #[must_use]
    pub fn reaches(&self, other: &Self) -> bool {
        other
            .iter()
            .all(|theirs| self.is_at(theirs) != Ordering::Less)
    }

    /// How many transactions `other` is ahead, by the sequences.
    #[must_use]
    pub fn behind(&self, other: &Self) -> u64 {
        let ahead = other.iter().map(|theirs| {
            let ours = self.get(theirs.domain).map_or(0, |g| g.sequence);
            theirs.sequence.saturating_sub(ours)
        });
        ahead.fold(0, u64::saturating_add)
    }

    fn is_at(&self, gtid: DomainGtid) -> Ordering {
        match self.get(gtid.domain) {
            Some(ours) => ours.sequence.cmp(&gtid.sequence),
            None => Ordering::Less,
        }
    }
}

impl FromIterator<DomainGtid> for GtidList {
    /// The last one of each domain counts.
    fn from_iter<I: IntoIterator<Item = DomainGtid>>(gtids: I) -> Self {
        let mut list = Self::default();
        gtids.into_iter().for_each(|gtid| list.set(gtid));
        list
    }
}

impl fmt::Display for GtidList {
    /// As the server prints `@@gtid_binlog_pos`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, gtid) in self.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(f, "{comma}{gtid}")?;
        }
        Ok(())
    }
}

impl FromStr for GtidList {
    type Err = GtidError;

    /// The empty text is the empty list; a domain may be named once.
    fn from_str(text: &str) -> Result<Self, GtidError> {
        let mut list = Self::default();
        if text.trim().is_empty() {
            return Ok(list);
        }
        for part in text.split(',') {
            let gtid: DomainGtid = part.trim().parse()?;
            if list.get(gtid.domain).is_some() {
                return Err(refuse(part.trim(), "names a domain again"));
            }
            list.set(gtid);
        }
        Ok(list)
    }
}

/// Where a stream of MariaDB's binlog is.
#[derive(Clone, Debug, Default)]
pub struct MariadbPosition {
    /// The last transaction of each domain: where a dump goes on, on any server that has it.
    pub list: GtidList,
    /// File and offset on the server that it was read from, if known. Told to operators and never
    /// compared: they differ from server to server.
    pub near: Option<(String, u64)>,
}

impl PartialEq for MariadbPosition {
    fn eq(&self, other: &Self) -> bool {
        self.list == other.list
    }
}

impl Eq for MariadbPosition {}

impl From<GtidList> for MariadbPosition {
    fn from(list: GtidList) -> Self {
        Self { list, near: None }
    }
}

impl fmt::Display for MariadbPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gtid {}", self.list)?;
        match &self.near {
            Some((file, pos)) => write!(f, " ({file}:{pos})"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn list(text: &str) -> GtidList {
        text.parse().unwrap()
    }

    #[test]
    fn what_the_server_prints_is_read_and_printed_again() {
        for text in ["", "0-1-270", "0-1-270,7-4294967295-18446744073709551615"] {
            assert_eq!(list(text).to_string(), text);
        }
        assert_eq!(list(" 2-3-130 ,\n 1-2-120").to_string(), "1-2-120,2-3-130");
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "0",
            "0-1",
            "0-1-2-3",
            "-1-2",
            "0-1-",
            "+0-1-2",
            "0-1-x",
            "4294967296-1-2",
            "0-4294967296-2",
            "0-1-18446744073709551616",
            "0-1-2,",
            "0-1-2,0-2-3",
            "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5",
        ] {
            assert!(text.parse::<GtidList>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_list_reaches_another_by_the_sequence_of_each_domain() {
        for (ours, theirs, reaches, behind) in [
            ("", "", true, 0),
            ("0-1-5", "", true, 0),
            ("", "0-1-5", false, 5),
            ("0-1-5", "0-1-5", true, 0),
            ("0-1-4", "0-1-5", false, 1),
            // The same sequence, gone on with by another server.
            ("0-2-6", "0-1-5", true, 0),
            ("0-1-5", "0-1-5,3-1-2", false, 2),
            ("0-1-5,3-1-2", "0-1-4,3-1-9", false, 7),
        ] {
            assert_eq!(
                list(ours).reaches(&list(theirs)),
                reaches,
                "{ours} {theirs}"
            );
            assert_eq!(list(ours).behind(&list(theirs)), behind, "{ours} {theirs}");
        }
    }

    #[test]
    fn file_and_offset_are_told_and_not_compared() {
        let plain = MariadbPosition::from(list("0-1-5"));
        let near = MariadbPosition {
            near: Some(("binlog.000003".into(), 512)),
            ..plain.clone()
        };
        assert_eq!(plain, near);
        assert_eq!(plain.to_string(), "gtid 0-1-5");
        assert_eq!(near.to_string(), "gtid 0-1-5 (binlog.000003:512)");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[-0-9, a-z\n]{0,40}") {
            if let Ok(list) = text.parse::<GtidList>() {
                prop_assert_eq!(list.to_string().parse::<GtidList>(), Ok(list));
            }
        }

        #[test]
        fn reading_on_reaches_all_that_was_read(
            gtids in proptest::collection::vec((0_u32..4, 1_u32..4, 1_u64..50), 0..20),
        ) {
            let (mut read, mut sequence) = (GtidList::default(), 0);
            for (domain, server, step) in gtids {
                let before = read.clone();
                sequence += step;
                read.set(DomainGtid { domain, server, sequence });
                prop_assert!(read.reaches(&before));
                prop_assert!(!before.reaches(&read));
            }
        }
    }
}
