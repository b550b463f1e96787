use encoding_rs::{BIG5, EUC_JP, EUC_KR, Encoding, GB18030, GBK, SHIFT_JIS};

/// An East Asian character set, by its differences from the one that [`encoding_rs`] knows. They
/// were found by comparing every sequence with the server; a test does so again.
#[derive(Debug)]
pub(in super::super) struct Multibyte {
    name: &'static str,
    encoding: &'static Encoding,
    /// Ranges of sequences, as big-endian numbers, that have another character here or none.
    refused: &'static [(u32, u32)],
    /// Sequences that have another character here.
    instead: &'static [(u32, char)],
    /// Sequences that stand for private use characters are the same here.
    private_use: bool,
    form: Form,
}

/// How long a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Two bytes.
    Double,
    /// Two bytes, both in the upper half.
    DoubleUpper,
    /// Two bytes, or four where the second is a digit.
    Gb18030,
    /// Two bytes, or one for half-width katakana.
    Shift,
    /// Two bytes, or three behind 0x8f.
    Euc,
}

static SETS: [Multibyte; 9] = [
    Multibyte {
        name: "gbk",
        encoding: GBK,
        refused: &[
            (0xa2e3, 0xa2e3),
            (0xa3a0, 0xa3a0),
            (0xa6d9, 0xa6df),
            (0xa6ec, 0xa6ed),
            (0xa6f3, 0xa6f3),
            (0xa8bc, 0xa8bc),
            (0xa8bf, 0xa8bf),
            (0xa989, 0xa995),
            (0xfe50, 0xfea0),
        ],
        instead: &[],
        private_use: false,
        form: Form::Double,
    },
    Multibyte {
        name: "gb2312",
        encoding: GBK,
        refused: &[
            (0x8140, 0xa0fe),
            (0xa2a1, 0xa2aa),
            (0xa2e3, 0xa2e3),
            (0xa6d9, 0xa6f5),
            (0xa8bb, 0xa8c0),
            (0xf840, 0xfefe),
        ],
        instead: &[(0xa1a4, '\u{30fb}'), (0xa1aa, '\u{2015}')],
        private_use: false,
        form: Form::DoubleUpper,
    },
    Multibyte {
        name: "gb18030",
        encoding: GB18030,
        refused: &[
            (0xa3a0, 0xa3a0),
            (0xa6d9, 0xa6df),
            (0xa6ec, 0xa6ed),
            (0xa6f3, 0xa6f3),
            (0xfe59, 0xfe59),
            (0xfe61, 0xfe61),
            (0xfe66, 0xfe67),
            (0xfe6d, 0xfe6d),
            (0xfe7e, 0xfe7e),
            (0xfe90, 0xfe90),
            (0xfea0, 0xfea0),
        ],
        instead: &[],
        private_use: true,
        form: Form::Gb18030,
    },
    Multibyte {
        name: "big5",
        encoding: BIG5,
        refused: &[
            (0x8740, 0xa0fe),
            (0xa145, 0xa145),
            (0xa14e, 0xa14e),
            (0xa15a, 0xa15a),
            (0xa1c2, 0xa1c3),
            (0xa1c5, 0xa1c5),
            (0xa1e3, 0xa1e3),
            (0xa1f2, 0xa1f3),
            (0xa1fe, 0xa242),
            (0xa244, 0xa244),
            (0xa246, 0xa247),
            (0xa2cc, 0xa2cc),
            (0xa2ce, 0xa2ce),
            (0xa3c0, 0xa3e1),
            (0xc6a1, 0xc8fe),
            (0xf9dd, 0xfefe),
        ],
        instead: &[],
        private_use: false,
        form: Form::Double,
    },
    Multibyte {
        name: "sjis",
        encoding: SHIFT_JIS,
        refused: &[(0x8740, 0x879c), (0xed40, 0xfcfc)],
        instead: &[
            (0x815f, '\\'),
            (0x8160, '\u{301c}'),
            (0x8161, '\u{2016}'),
            (0x817c, '\u{2212}'),
            (0x8191, '\u{a2}'),
            (0x8192, '\u{a3}'),
            (0x81ca, '\u{ac}'),
        ],
        private_use: false,
        form: Form::Shift,
    },
    Multibyte {
        name: "cp932",
        encoding: SHIFT_JIS,
        refused: &[],
        instead: &[],
        private_use: true,
        form: Form::Shift,
    },
    Multibyte {
        name: "eucjpms",
        encoding: EUC_JP,
        refused: &[(0xf5a1, 0xfefe), (0x8f_f3a1, 0x8f_fefe)],
        instead: &[(0x8f_a2c3, '\u{ffe4}')],
        private_use: false,
        form: Form::Euc,
    },
    Multibyte {
        name: "ujis",
        encoding: EUC_JP,
        refused: &[(0xada1, 0xadfe), (0xf5a1, 0xfefe), (0x8f_f3a1, 0x8f_fefe)],
        instead: &[
            (0xa1c0, '\\'),
            (0xa1c1, '\u{301c}'),
            (0xa1c2, '\u{2016}'),
            (0xa1dd, '\u{2212}'),
            (0xa1f1, '\u{a2}'),
            (0xa1f2, '\u{a3}'),
            (0xa2cc, '\u{ac}'),
            (0x8f_a2b7, '~'),
        ],
        private_use: false,
        form: Form::Euc,
    },
    Multibyte {
        name: "euckr",
        encoding: EUC_KR,
        refused: &[],
        instead: &[],
        private_use: false,
        form: Form::Double,
    },
];

impl Multibyte {
    pub(super) fn by_name(name: &str) -> Option<&'static Self> {
        SETS.iter().find(|s| s.name == name)
    }

    /// Converts character by character, so that the exceptions can be seen.
    pub(super) fn decode(&self, mut bytes: &[u8]) -> Option<String> {
        let mut out = String::with_capacity(bytes.len() * 3 / 2);
        while let Some(&first) = bytes.first() {
            if first.is_ascii() {
                out.push(char::from(first));
                bytes = &bytes[1..];
                continue;
            }
            let (sequence, rest) = bytes.split_at_checked(self.length(bytes)?)?;
            out.push(self.character(sequence)?);
            bytes = rest;
        }
        Some(out)
    }

    /// Bytes of the sequence that starts here, which is not ASCII.
    fn length(&self, bytes: &[u8]) -> Option<usize> {
        let (first, second) = (bytes[0], bytes.get(1).copied());
        Some(match self.form {
            Form::Shift if matches!(first, 0xa1..=0xdf) => 1,
            Form::Gb18030 if second?.is_ascii_digit() => 4,
            Form::Euc if first == 0x8f => 3,
            Form::DoubleUpper if second? < 0xa1 => return None,
            // 0x80 is a euro sign or a control character elsewhere.
            _ if first == 0x80 => return None,
            _ => 2,
        })
    }

    fn character(&self, sequence: &[u8]) -> Option<char> {
        let code = sequence.iter().fold(0_u32, |n, b| n << 8 | u32::from(*b));
        if let Some((_, c)) = self.instead.iter().find(|(s, _)| *s == code) {
            return Some(*c);
        }
        if self
            .refused
            .iter()
            .any(|(first, last)| (*first..=*last).contains(&code))
        {
            return None;
        }
        let text = self
            .encoding
            .decode_without_bom_handling_and_without_replacement(sequence)?;
        let mut chars = text.chars();
        let c = chars.next()?;
        let private = matches!(c, '\u{e000}'..='\u{f8ff}');
        (chars.next().is_none() && (self.private_use || !private)).then_some(c)
    }
}
