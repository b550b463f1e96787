//! Text to UTF-8, as the server converts it.
//!
//! Bytes that the server itself would print as `?` are refused, never replaced, and so are the
//! few sequences that it converts differently from [`encoding_rs`] and that are not listed here.

mod collation;
mod multibyte;
mod tables;

use bytes::Bytes;

use multibyte::Multibyte;

/// A character set that can be converted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Charset {
    /// ASCII, `utf8mb3` or `utf8mb4`: validated, never copied.
    Utf8 {
        /// Only ASCII is valid.
        ascii: bool,
    },
    /// One byte a character, the lower half ASCII.
    Single(&'static [u16; 128]),
    /// East Asian sets.
    Multi(&'static Multibyte),
    /// `ucs2`: big-endian, no surrogates.
    Ucs2,
    /// `utf16`, big-endian.
    Utf16,
    /// `utf16le`.
    Utf16le,
    /// `utf32`, big-endian.
    Utf32,
}

impl Charset {
    /// By its name in `information_schema`; `None`: cannot be converted.
    pub(super) fn by_name(name: &str) -> Option<Self> {
        use tables::*;
        Some(match name {
            "ascii" => Self::Utf8 { ascii: true },
            "utf8" | "utf8mb3" | "utf8mb4" => Self::Utf8 { ascii: false },
            "ucs2" => Self::Ucs2,
            "utf16" => Self::Utf16,
            "utf16le" => Self::Utf16le,
            "utf32" => Self::Utf32,
            "latin1" => Self::Single(&LATIN1),
            "latin2" => Self::Single(&LATIN2),
            "latin5" => Self::Single(&LATIN5),
            "latin7" => Self::Single(&LATIN7),
            "cp1250" => Self::Single(&CP1250),
            "cp1251" => Self::Single(&CP1251),
            "cp1256" => Self::Single(&CP1256),
            "cp1257" => Self::Single(&CP1257),
            "cp850" => Self::Single(&CP850),
            "cp852" => Self::Single(&CP852),
            "cp866" => Self::Single(&CP866),
            "dec8" => Self::Single(&DEC8),
            "hp8" => Self::Single(&HP8),
            "greek" => Self::Single(&GREEK),
            "hebrew" => Self::Single(&HEBREW),
            "koi8r" => Self::Single(&KOI8R),
            "koi8u" => Self::Single(&KOI8U),
            "tis620" => Self::Single(&TIS620),
            "geostd8" => Self::Single(&GEOSTD8),
            "keybcs2" => Self::Single(&KEYBCS2),
            "macce" => Self::Single(&MACCE),
            "macroman" => Self::Single(&MACROMAN),
            _ => Self::Multi(Multibyte::by_name(name)?),
        })
    }

    /// Converts; without a copy where the bytes are UTF-8 already. `None`: not valid.
    pub(super) fn decode(self, bytes: Bytes) -> Option<Bytes> {
        match self {
            Self::Utf8 { ascii: true } => bytes.is_ascii().then_some(bytes),
            Self::Utf8 { ascii: false } => std::str::from_utf8(&bytes).is_ok().then_some(bytes),
            Self::Single(_) | Self::Multi(_) if bytes.is_ascii() => Some(bytes),
            Self::Single(table) => bytes
                .iter()
                .map(|b| single(table, *b))
                .collect::<Option<String>>()
                .map(Bytes::from),
            Self::Multi(set) => set.decode(&bytes).map(Bytes::from),
            Self::Ucs2 => wide(&bytes, u16::from_be_bytes, true),
            Self::Utf16 => wide(&bytes, u16::from_be_bytes, false),
            Self::Utf16le => wide(&bytes, u16::from_le_bytes, false),
            Self::Utf32 => {
                let (units, rest) = bytes.as_chunks::<4>();
                let text: Option<String> = units
                    .iter()
                    .map(|u| char::from_u32(u32::from_be_bytes(*u)))
                    .collect();
                text.filter(|_| rest.is_empty()).map(Bytes::from)
            }
        }
    }
}

/// The name of a collation's character set; `None`: not known.
pub(super) fn of_collation(id: u16) -> Option<&'static str> {
    collation::charset(id)
}

fn single(table: &[u16; 128], byte: u8) -> Option<char> {
    match byte.checked_sub(0x80) {
        None => Some(char::from(byte)),
        Some(upper) => match table.get(usize::from(upper)) {
            None | Some(0) => None,
            Some(code) => char::from_u32(u32::from(*code)),
        },
    }
}

fn wide(bytes: &[u8], unit: fn([u8; 2]) -> u16, no_surrogates: bool) -> Option<Bytes> {
    let (units, rest) = bytes.as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    let units = units.iter().map(|u| unit(*u));
    let text: Option<String> = char::decode_utf16(units)
        .map(|c| c.ok().filter(|c| !no_surrogates || u32::from(*c) <= 0xffff))
        .collect();
    text.map(Bytes::from)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn decode(charset: &str, bytes: &'static [u8]) -> Option<String> {
        let bytes = Charset::by_name(charset)
            .unwrap()
            .decode(Bytes::from_static(bytes))?;
        Some(String::from_utf8(bytes.to_vec()).unwrap())
    }

    #[test]
    fn text_becomes_utf8_whatever_its_character_set() {
        for (charset, bytes, text) in [
            ("latin1", &b"caf\xe9 \x80"[..], "café €"),
            ("latin1", b"\x81", "\u{81}"),
            ("latin5", b"\xfd", "ı"),
            ("cp1251", b"\xcf\xf0", "Пр"),
            ("koi8r", b"\xf0", "П"),
            ("greek", b"\xe1", "α"),
            ("gbk", b"a\xd6\xd0\xce\xc4", "a中文"),
            ("gb2312", b"\xd6\xd0\xa1\xa4", "中・"),
            ("gb18030", b"\xd6\xd0\x95\x32\x82\x36\x80", ""),
            ("gb18030", b"\xd6\xd0\x95\x32\x82\x36", "中\u{20000}"),
            ("big5", b"\xa4\xa4", "中"),
            ("sjis", b"\x81\x60\xb1\x5c", "〜ｱ\\"),
            ("cp932", b"\x81\x60\x87\x40", "～①"),
            ("ujis", b"\xa1\xc1\x8e\xb1", "〜ｱ"),
            ("eucjpms", b"\xa1\xc1\x8f\xb0\xa1", "～丂"),
            ("euckr", b"\xc7\xd1", "한"),
            ("ucs2", b"\x00A\x4e\x2d", "A中"),
            ("utf16", b"\xd8\x3d\xde\x00", "😀"),
            ("utf16le", b"\x3d\xd8\x00\xde", "😀"),
            ("utf32", b"\x00\x01\xf6\x00", "😀"),
            ("utf8mb4", "😀".as_bytes(), "😀"),
        ] {
            let expected = (!text.is_empty()).then(|| text.to_owned());
            assert_eq!(decode(charset, bytes), expected, "{charset}");
        }
    }

    #[test]
    fn bytes_without_a_character_are_refused_not_replaced() {
        for (charset, bytes) in [
            ("ascii", &b"\xe9"[..]),
            ("cp1250", b"\x81"),
            ("utf8mb4", b"\xff"),
            ("utf8mb4", b"\xed\xa0\x80"),
            ("gbk", b"\x80"),
            ("gbk", b"\xd6"),
            ("gb2312", b"\x81\x40"),
            ("big5", b"\xc7\x40"),
            ("sjis", b"\x87\x40"),
            ("ujis", b"\xad\xa1"),
            ("ucs2", b"\xd8\x3d\xde\x00"),
            ("utf16", b"\xd8\x3d"),
            ("utf16", b"\x00"),
            ("utf32", b"\x00\x11\x00\x00"),
        ] {
            assert_eq!(decode(charset, bytes), None, "{charset} {bytes:x?}");
        }
    }

    #[test]
    fn unknown_character_sets_are_not_guessed() {
        assert!(Charset::by_name("swe7").is_none());
        assert!(Charset::by_name("armscii8").is_none());
        assert_eq!(of_collation(0), None);
        assert_eq!(of_collation(255), Some("utf8mb4"));
        assert_eq!(of_collation(63), Some("binary"));
    }
}
