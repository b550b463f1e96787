//! Where the binlog ended as the stream was opened.

use super::event::{RawEvent, kind};
use super::facts::ServerFacts;

/// The end of the binlog at open. A heartbeat says that the server has nothing more to send only
/// from there on: a server that skips transactions which the reader has sends one too, behind
/// each stretch of them, with everything else yet to come.
#[derive(Clone, Debug, Default)]
pub(super) struct Tip {
    /// Files that were there, oldest first.
    files: Vec<String>,
    /// Size of the last one.
    size: u64,
}

impl Tip {
    pub(super) fn of(facts: &ServerFacts) -> Self {
        Self {
            files: facts.binlogs.iter().map(|(f, _)| f.clone()).collect(),
            size: facts.binlogs.last().map_or(0, |(_, size)| *size),
        }
    }

    /// Whether a heartbeat in `file` stands at the end or behind it. Where its offset cannot be
    /// told, it does not: the position of a later group will.
    pub(super) fn reached_by(&self, file: &str, heartbeat: &RawEvent<'_>) -> bool {
        match self.files.iter().position(|f| f == file) {
            // A newer file, or the server did not say which there are.
            None => true,
            Some(at) if at + 1 < self.files.len() => false,
            Some(_) => offset(heartbeat).is_some_and(|offset| offset >= self.size),
        }
    }
}

/// The offset that a heartbeat tells; of the older form only below 4 GiB.
fn offset(heartbeat: &RawEvent<'_>) -> Option<u64> {
    if heartbeat.kind == kind::HEARTBEAT {
        return (heartbeat.log_pos > 0).then_some(u64::from(heartbeat.log_pos));
    }
    // Fields of type, length and value; the offset is of type 2, a length-encoded integer.
    let mut data = heartbeat.data;
    loop {
        let (&field, rest) = data.split_first()?;
        let (&length, rest) = rest.split_first()?;
        let (value, rest) = rest.split_at_checked(usize::from(length))?;
        if field == 2 {
            let (&first, more) = value.split_first()?;
            let bytes = match first {
                0..=250 => return Some(u64::from(first)),
                252 => 2,
                253 => 3,
                254 => 8,
                _ => return None,
            };
            let mut whole = [0; 8];
            whole[..bytes].copy_from_slice(more.get(..bytes)?);
            return Some(u64::from_le_bytes(whole));
        }
        data = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heartbeat(kind: u8, log_pos: u32, data: &[u8]) -> RawEvent<'_> {
        RawEvent {
            kind,
            flags: 0,
            timestamp: 0,
            server_id: 1,
            size: 0,
            log_pos,
            data,
        }
    }

    fn tip() -> Tip {
        Tip {
            files: vec!["b.000001".into(), "b.000002".into()],
            size: 70_000,
        }
    }

    #[test]
    fn a_heartbeat_before_the_end_is_none_of_an_idle_server() {
        let at = |file: &str, pos| tip().reached_by(file, &heartbeat(kind::HEARTBEAT, pos, b""));
        assert!(!at("b.000001", 90_000));
        assert!(!at("b.000002", 500));
        assert!(!at("b.000002", 0));
        assert!(at("b.000002", 70_000));
        assert!(at("b.000003", 4));
        assert!(Tip::default().reached_by("b.000001", &heartbeat(kind::HEARTBEAT, 4, b"")));
    }

    #[test]
    fn the_newer_form_tells_offsets_of_any_size() {
        let name = b"\x01\x08b.000002";
        let with = |value: &[u8]| {
            let length = u8::try_from(value.len()).unwrap_or(0);
            [name, [2, length].as_slice(), value].concat()
        };
        let at =
            |data: &[u8]| tip().reached_by("b.000002", &heartbeat(kind::HEARTBEAT_V2, 0, data));
        assert!(!at(&with(&[200])));
        assert!(!at(&with(&[252, 0, 200])));
        assert!(at(&with(&[253, 0, 200, 1])));
        assert!(at(&with(&[254, 0, 0, 0, 0, 2, 0, 0, 0])));
        // Cut short, or without the field.
        assert!(!at(&with(&[254, 0, 0])));
        assert!(!at(name));
        assert!(!at(b"\x02"));
    }
}
