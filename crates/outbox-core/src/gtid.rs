//! MySQL GTID sets, tags included (`uuid:tag:1-5`), with interval arithmetic.

use std::fmt;
use std::str::FromStr;

pub mod mariadb;
#[cfg(test)]
mod tests;

/// Numbers run from 1 to this, as on the server (`GNO_END` is `i64::MAX`, exclusive).
const MAX_NUMBER: u64 = i64::MAX as u64 - 1;
/// Characters of a tag, as on the server.
const MAX_TAG: usize = 32;

/// A set of transactions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GtidSet {
    /// Sorted by source, then tag; no entry is without intervals.
    entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    source: [u8; 16],
    tag: String,
    /// Half-open, ascending, disjoint and not adjacent, never empty.
    intervals: Vec<(u64, u64)>,
}

/// One transaction: source, tag (empty: none), number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gtid {
    /// The originating server's UUID, as its 16 bytes.
    pub source: [u8; 16],
    /// The tag, lower case, empty for none.
    pub tag: String,
    /// Transaction number, from 1.
    pub number: u64,
}

/// Text that is no GTID set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a GTID set: {0}")]
pub struct GtidError(pub String);

/// One source and tag with its intervals `[start, end)`, for the dump request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GtidSid<'a> {
    /// Server UUID.
    pub source: [u8; 16],
    /// Tag, empty for none.
    pub tag: &'a str,
    /// Half-open, ascending, disjoint.
    pub intervals: &'a [(u64, u64)],
}

impl GtidSet {
    /// Adds one transaction; false if it was there (or its number is none that a server gives).
    pub fn add(&mut self, gtid: &Gtid) -> bool {
        let n = gtid.number;
        if n == 0 || n > MAX_NUMBER {
            return false;
        }
        let at = match self.find(&gtid.source, &gtid.tag) {
            Ok(at) => at,
            Err(at) => {
                let entry = Entry {
                    source: gtid.source,
                    tag: gtid.tag.clone(),
                    intervals: vec![(n, n + 1)],
                };
                self.entries.insert(at, entry);
                return true;
            }
        };
        let intervals = &mut self.entries[at].intervals;
        // The first interval that does not end before `n`.
        let i = intervals.partition_point(|&(_, end)| end < n);
        match intervals.get(i).copied() {
            Some((start, end)) if start <= n && n < end => return false,
            Some((start, end)) if end == n => match intervals.get(i + 1).copied() {
                Some((next, last)) if next == n + 1 => {
                    intervals[i] = (start, last);
                    intervals.remove(i + 1);
                }
                _ => intervals[i].1 = n + 1,
            },
            Some((start, _)) if start == n + 1 => intervals[i].0 = n,
            _ => intervals.insert(i, (n, n + 1)),
        }
        true
    }

    /// Whether every transaction of `other` is in this set.
    #[must_use]
    pub fn contains_all(&self, other: &Self) -> bool {
        other.entries.iter().all(|theirs| {
            self.intervals(&theirs.source, &theirs.tag)
                .is_some_and(|ours| {
                    theirs.intervals.iter().all(|&(start, end)| {
                        let i = ours.partition_point(|&(_, e)| e <= start);
                        ours.get(i).is_some_and(|&(s, e)| s <= start && end <= e)
                    })
                })
        })
    }

    /// Whether it holds this transaction.
    #[must_use]
    pub fn contains(&self, gtid: &Gtid) -> bool {
        self.intervals(&gtid.source, &gtid.tag).is_some_and(|ours| {
            let i = ours.partition_point(|&(_, end)| end <= gtid.number);
            ours.get(i).is_some_and(|&(start, _)| start <= gtid.number)
        })
    }

    /// This set without `other`.
    #[must_use]
    pub fn subtract(&self, other: &Self) -> Self {
        let entries = self.entries.iter().filter_map(|entry| {
            let Some(theirs) = other.intervals(&entry.source, &entry.tag) else {
                return Some(entry.clone());
            };
            let intervals = without(&entry.intervals, theirs);
            (!intervals.is_empty()).then(|| Entry {
                source: entry.source,
                tag: entry.tag.clone(),
                intervals,
            })
        });
        Self {
            entries: entries.collect(),
        }
    }

    /// Both together.
    pub fn merge(&mut self, other: &Self) {
        for theirs in &other.entries {
            match self.find(&theirs.source, &theirs.tag) {
                Err(at) => self.entries.insert(at, theirs.clone()),
                Ok(at) => {
                    let ours = &mut self.entries[at].intervals;
                    ours.extend_from_slice(&theirs.intervals);
                    normalise(ours);
                }
            }
        }
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Number of transactions.
    #[must_use]
    pub fn len(&self) -> u64 {
        let lengths = self.sids().flat_map(|s| s.intervals).map(|(s, e)| e - s);
        lengths.fold(0, u64::saturating_add)
    }

    /// Sources and tags in order.
    pub fn sids(&self) -> impl Iterator<Item = GtidSid<'_>> {
        self.entries.iter().map(|e| GtidSid {
            source: e.source,
            tag: &e.tag,
            intervals: &e.intervals,
        })
    }

    fn find(&self, source: &[u8; 16], tag: &str) -> Result<usize, usize> {
        self.entries
            .binary_search_by(|e| (&e.source, e.tag.as_str()).cmp(&(source, tag)))
    }

    fn intervals(&self, source: &[u8; 16], tag: &str) -> Option<&[(u64, u64)]> {
        let at = self.find(source, tag).ok()?;
        Some(&self.entries[at].intervals)
    }
}

/// `ours` without `theirs`, both in normal form.
fn without(ours: &[(u64, u64)], theirs: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let (mut left, mut theirs) = (Vec::new(), theirs.iter().copied().peekable());
    for &(mut start, end) in ours {
        while let Some(&(s, e)) = theirs.peek() {
            if s >= end {
                break;
            }
            if start < s {
                left.push((start, s));
            }
            start = start.max(e);
            if e > end {
                break; // it may reach into the next interval of ours
            }
            theirs.next();
        }
        if start < end {
            left.push((start, end));
        }
    }
    left
}

/// Sorts, and joins what overlaps or touches.
fn normalise(intervals: &mut Vec<(u64, u64)>) {
    intervals.sort_unstable();
    intervals.dedup_by(|next, last| {
        let joined = next.0 <= last.1;
        if joined {
            last.1 = last.1.max(next.1);
        }
        joined
    });
}

impl fmt::Display for GtidSet {
    /// As the server prints `@@gtid_executed`, without its line breaks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last: Option<&[u8; 16]> = None;
        for entry in &self.entries {
            if last != Some(&entry.source) {
                if last.is_some() {
                    f.write_str(",")?;
                }
                f.write_str(&crate::binder::print_binary(&entry.source))?;
                last = Some(&entry.source);
            }
            if !entry.tag.is_empty() {
                write!(f, ":{}", entry.tag)?;
            }
            for &(start, end) in &entry.intervals {
                write!(f, ":{start}")?;
                if end - start > 1 {
                    write!(f, "-{}", end - 1)?;
                }
            }
        }
        Ok(())
    }
}

impl FromStr for GtidSet {
    type Err = GtidError;

    fn from_str(text: &str) -> Result<Self, GtidError> {
        let mut set = Self::default();
        for part in text.split(',') {
            let mut fields = part.split(':').map(str::trim);
            let source = fields.next().unwrap_or_default();
            if source.is_empty() && fields.next().is_none() {
                continue; // a trailing comma, or the empty set
            }
            let source = parse_uuid(source).ok_or_else(|| refuse(source, "is not a UUID"))?;
            let (mut tag, mut open) = (String::new(), true);
            for field in fields {
                if field.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
                    if open && !tag.is_empty() {
                        return Err(refuse(&tag, "is a tag without numbers"));
                    }
                    tag = parse_tag(field)?;
                    open = true;
                } else {
                    let interval = parse_interval(field)?;
                    set.push(source, &tag, interval);
                    open = false;
                }
            }
            if open {
                return Err(refuse(part.trim(), "ends without numbers"));
            }
        }
        for entry in &mut set.entries {
            normalise(&mut entry.intervals);
        }
        Ok(set)
    }
}

impl GtidSet {
    /// Appends an interval, which leaves the entry to be normalised.
    fn push(&mut self, source: [u8; 16], tag: &str, interval: (u64, u64)) {
        match self.find(&source, tag) {
            Ok(at) => self.entries[at].intervals.push(interval),
            Err(at) => {
                let entry = Entry {
                    source,
                    tag: tag.to_owned(),
                    intervals: vec![interval],
                };
                self.entries.insert(at, entry);
            }
        }
    }
}

/// Quotes a bounded piece of the text: it may be anything, of any length.
fn refuse(piece: &str, why: &str) -> GtidError {
    let shown: String = piece.chars().take(64).collect();
    GtidError(format!("{shown:?} {why}"))
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let bytes = text.as_bytes();
    let dashes = [8, 13, 18, 23];
    if bytes.len() != 36 || dashes.iter().any(|&i| bytes[i] != b'-') {
        return None;
    }
    let digit = |b: u8| {
        char::from(b)
            .to_digit(16)
            .and_then(|d| u8::try_from(d).ok())
    };
    let mut digits = (0..36).filter(|i| !dashes.contains(i)).map(|i| bytes[i]);
    let mut uuid = [0; 16];
    for byte in &mut uuid {
        *byte = digit(digits.next()?)? << 4 | digit(digits.next()?)?;
    }
    Some(uuid)
}

fn parse_tag(text: &str) -> Result<String, GtidError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if text.len() > MAX_TAG || !text.chars().all(plain) {
        return Err(refuse(text, "is not a tag"));
    }
    Ok(text.to_ascii_lowercase())
}

fn parse_interval(text: &str) -> Result<(u64, u64), GtidError> {
    let number = |t: &str| {
        let t = t.trim();
        // `parse` alone would take a plus sign.
        let digits = !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit());
        let n = t
            .parse()
            .ok()
            .filter(|n| digits && (1..=MAX_NUMBER).contains(n));
        n.ok_or_else(|| {
            refuse(
                text,
                "is neither a number nor an interval of numbers from 1",
            )
        })
    };
    let (first, last) = match text.split_once('-') {
        None => (number(text)?, number(text)?),
        Some((first, last)) => (number(first)?, number(last)?),
    };
    if last < first {
        return Err(refuse(text, "ends before it starts"));
    }
    Ok((first, last + 1))
}
