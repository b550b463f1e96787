//! Where in the server's files the stream is.

/// File and offset behind the last event. Headers carry the low 32 bits of the offset only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) file: String,
    pub(crate) pos: u64,
    /// `pos` is known to be right, so that the next event is expected to begin there.
    anchored: bool,
    /// The offset went backwards within a file: it passed 4 GiB, and is a guess from here on.
    overflowed: bool,
}

impl Place {
    /// At a place that is known.
    pub(crate) fn at(file: &str, pos: u64) -> Self {
        Self {
            file: file.to_owned(),
            pos,
            anchored: true,
            overflowed: false,
        }
    }

    /// A file begins. True if it is another one than before.
    pub(crate) fn rotate(&mut self, file: &str) -> bool {
        if self.file == file {
            return false;
        }
        // The first event of a dump by GTID may lie anywhere in its file.
        let anchored = !self.file.is_empty();
        *self = Self {
            anchored,
            ..Self::at(file, 4)
        };
        true
    }

    /// An event of `size` bytes ends at the offset with these low bits.
    pub(crate) fn advance(&mut self, log_pos: u32, size: u32) {
        const SPAN: u64 = 1 << 32;
        let low = u64::from(log_pos);
        let expected = self.pos + u64::from(size);
        let high = self.pos / SPAN * SPAN;
        if self.anchored && expected % SPAN == low {
            self.pos = expected;
        } else if !self.anchored || low >= self.pos % SPAN {
            self.pos = high + low;
            self.anchored = true;
        } else {
            self.pos = high + SPAN + low;
            self.overflowed = true;
        }
    }

    /// Whether a dump can begin here: the request has 32 bits for the offset.
    pub(crate) fn storable(&self) -> bool {
        !self.overflowed && u32::try_from(self.pos).is_ok()
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.file, self.pos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_beyond_four_gib_is_followed_but_not_stored() {
        let mut place = Place::at("binlog.000001", 4_294_966_000);
        place.advance(4_294_967_000, 1_000);
        assert!(place.storable());
        place.advance(512, 808);
        assert_eq!(place.pos, (1 << 32) + 512);
        assert!(!place.storable());
        place.advance(1_512, 1_000);
        assert_eq!(place.pos, (1 << 32) + 1_512);
        assert!(place.rotate("binlog.000002"));
        place.advance(126, 122);
        assert!(place.storable());
        assert_eq!(place.pos, 126);
    }

    #[test]
    fn a_step_backwards_is_an_overflow_whatever_the_size() {
        let mut place = Place::at("binlog.000001", 4_294_967_000);
        place.advance(512, 40);
        assert!(!place.storable());
    }

    #[test]
    fn the_first_event_of_a_dump_by_gtid_may_lie_anywhere() {
        let mut place = Place::default();
        assert!(place.rotate("binlog.000009"));
        place.advance(4_000_000_000, 79);
        assert_eq!(place.pos, 4_000_000_000);
        assert!(place.storable());
        assert!(!place.rotate("binlog.000009"));
    }

    #[test]
    fn skipped_events_are_no_overflow() {
        let mut place = Place::at("binlog.000001", 100);
        place.advance(5_000, 50);
        assert_eq!(place.pos, 5_000);
        assert!(place.storable());
    }
}
