use bytes::Bytes;

use super::error::Malformed;

/// Reads little-endian values from the front of a slice, never past its end.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    /// `what` names the part in errors.
    pub(super) const fn new(rest: &'a [u8], what: &'static str) -> Self {
        Self { rest, what }
    }

    pub(super) const fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(super) const fn malformed(&self) -> Malformed {
        Malformed::new(self.what)
    }

    pub(super) fn take(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let Some((head, rest)) = self.rest.split_at_checked(n) else {
            return Err(self.malformed());
        };
        self.rest = rest;
        Ok(head)
    }

    pub(super) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.take(1)?[0])
    }

    /// An unsigned integer of `n` bytes, at most 8.
    pub(super) fn uint(&mut self, n: usize) -> Result<u64, Malformed> {
        Ok(uint_le(self.take(n)?))
    }

    /// A length of `n` bytes.
    pub(super) fn len(&mut self, n: usize) -> Result<usize, Malformed> {
        usize::try_from(self.uint(n)?).map_err(|_| self.malformed())
    }

    /// A length-encoded integer.
    pub(super) fn lenenc(&mut self) -> Result<u64, Malformed> {
        match self.u8()? {
            n @ 0..=250 => Ok(u64::from(n)),
            252 => self.uint(2),
            253 => self.uint(3),
            254 => self.uint(8),
            251 | 255 => Err(self.malformed()),
        }
    }

    /// A length-encoded length.
    pub(super) fn lenenc_len(&mut self) -> Result<usize, Malformed> {
        usize::try_from(self.lenenc()?).map_err(|_| self.malformed())
    }

    /// Bytes behind their length-encoded length.
    pub(super) fn lenenc_bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let n = self.lenenc_len()?;
        self.take(n)
    }
}

/// Little-endian, at most 8 bytes.
pub(super) fn uint_le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
}

/// Big-endian, at most 8 bytes.
pub(super) fn uint_be(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |n, b| n << 8 | u64::from(*b))
}

/// The part of `data` that `part` is a slice of, without a copy.
pub(super) fn share(data: &Bytes, part: &[u8]) -> Bytes {
    if part.is_empty() {
        Bytes::new()
    } else {
        data.slice_ref(part)
    }
}

/// Bit `n` of a bitmap whose bits are numbered from the lowest of each byte.
pub(super) fn bit(map: &[u8], n: usize) -> bool {
    map.get(n / 8).is_some_and(|b| b >> (n % 8) & 1 == 1)
}
