//! MySQL's binary JSON as text, byte for byte as the server prints it.
//!
//! Members come in stored order. Offsets inside a document may point anywhere; two rules keep a
//! hostile one harmless. The nesting is bounded as the server bounds it, and every byte of the
//! input pays for at most one visit, so that values that share bytes cannot multiply the output.

use std::io::Write as _;

use bytes::Bytes;

use super::error::Malformed;
use super::read::{Reader, uint_le};
use super::temporal::{JsonTemporal, json as temporal};
use super::{decimal, float};

/// The server refuses documents nested deeper.
const MAX_DEPTH: u32 = 100;

/// The server breaks base64 into lines of so many characters.
const BASE64_LINE: usize = 76;

const BAD: Malformed = Malformed::new("JSON document");

/// MySQL's binary JSON as the text that the server prints.
pub fn to_text(data: &[u8]) -> Result<Bytes, Malformed> {
    // What `INSERT IGNORE` leaves in a column that is NOT NULL; the server reads it as null.
    let Some((&kind, body)) = data.split_first() else {
        return Ok(Bytes::from_static(b"null"));
    };
    let mut printer = Printer {
        out: Vec::with_capacity(data.len()),
        budget: data.len(),
    };
    printer.value(kind, body, 0)?;
    match std::str::from_utf8(&printer.out) {
        Ok(_) => Ok(Bytes::from(printer.out)),
        Err(_) => Err(BAD),
    }
}

struct Printer {
    out: Vec<u8>,
    /// Bytes of the input that have not been paid with yet.
    budget: usize,
}

/// Object or array, with offsets and counts of two or four bytes.
struct Container<'a> {
    body: &'a [u8],
    width: usize,
    count: usize,
    /// Entries behind the two counts.
    entries: Reader<'a>,
}

impl Printer {
    fn pay(&mut self, bytes: usize) -> Result<(), Malformed> {
        self.budget = self.budget.checked_sub(bytes).ok_or(BAD)?;
        Ok(())
    }

    /// Prints the value whose bytes start `body`.
    fn value(&mut self, kind: u8, body: &[u8], depth: u32) -> Result<(), Malformed> {
        match kind {
            0x00 => self.object(body, 2, depth + 1),
            0x01 => self.object(body, 4, depth + 1),
            0x02 => self.array(body, 2, depth + 1),
            0x03 => self.array(body, 4, depth + 1),
            0x04 => self.literal(*body.first().ok_or(BAD)?),
            0x05..=0x0b => self.number(kind, body),
            0x0c => {
                let text = self.sized(body)?;
                self.string(text);
                Ok(())
            }
            0x0f => {
                let (&field, rest) = body.split_first().ok_or(BAD)?;
                let data = self.sized(rest)?;
                self.opaque(field, data)
            }
            _ => Err(BAD),
        }
    }

    fn literal(&mut self, value: u8) -> Result<(), Malformed> {
        self.out.extend_from_slice(match value {
            0 => b"null",
            1 => b"true",
            2 => b"false",
            _ => return Err(BAD),
        });
        Ok(())
    }

    fn number(&mut self, kind: u8, body: &[u8]) -> Result<(), Malformed> {
        let width = match kind {
            0x05 | 0x06 => 2,
            0x07 | 0x08 => 4,
            _ => 8,
        };
        let bytes = body.get(..width).ok_or(BAD)?;
        let n = uint_le(bytes);
        let _ = match kind {
            0x05 | 0x07 | 0x09 => write!(self.out, "{}", sign_extend(n, width)),
            0x0b => write!(self.out, "{}", float::print_json(f64::from_bits(n))),
            _ => write!(self.out, "{n}"),
        };
        Ok(())
    }

    /// The bytes behind a length of seven bits a byte.
    fn sized<'a>(&mut self, body: &'a [u8]) -> Result<&'a [u8], Malformed> {
        let mut len = 0_usize;
        for (i, byte) in body.iter().take(5).enumerate() {
            len |= usize::from(byte & 0x7f) << (7 * i);
            if byte & 0x80 == 0 {
                let data = body.get(i + 1..).and_then(|b| b.get(..len)).ok_or(BAD)?;
                self.pay(len)?;
                return Ok(data);
            }
        }
        Err(BAD)
    }

    fn string(&mut self, text: &[u8]) {
        self.out.push(b'"');
        // Runs without an escape are copied whole.
        let mut plain = 0;
        for (i, &byte) in text.iter().enumerate() {
            let escape = match byte {
                b'"' => b'"',
                b'\\' => b'\\',
                0x08 => b'b',
                0x09 => b't',
                0x0a => b'n',
                0x0c => b'f',
                0x0d => b'r',
                0x00..=0x1f => b'u',
                _ => continue,
            };
            self.out.extend_from_slice(&text[plain..i]);
            plain = i + 1;
            self.out.extend_from_slice(&[b'\\', escape]);
            if escape == b'u' {
                let _ = write!(self.out, "{byte:04x}");
            }
        }
        self.out.extend_from_slice(&text[plain..]);
        self.out.push(b'"');
    }

    /// A value of a SQL type that JSON does not have.
    fn opaque(&mut self, field: u8, data: &[u8]) -> Result<(), Malformed> {
        use super::table_map::code;
        let kind = match field {
            code::NEWDECIMAL => {
                let [precision, scale, digits @ ..] = data else {
                    return Err(BAD);
                };
                let text = decimal::print(digits, *precision, *scale, 0).map_err(|_| BAD)?;
                self.out.extend_from_slice(text.as_bytes());
                return Ok(());
            }
            code::VAR_STRING => {
                self.string(data);
                return Ok(());
            }
            code::DATE => JsonTemporal::Date,
            code::TIME => JsonTemporal::Time,
            code::DATETIME | code::TIMESTAMP => JsonTemporal::Datetime,
            _ => {
                let text = format!("base64:type{field}:{}", base64(data));
                self.string(text.as_bytes());
                return Ok(());
            }
        };
        let text = temporal(data, kind).ok_or(BAD)?;
        self.string(text.as_bytes());
        Ok(())
    }

    fn open<'a>(
        &mut self,
        body: &'a [u8],
        width: usize,
        depth: u32,
        key: usize,
    ) -> Result<Container<'a>, Malformed> {
        if depth > MAX_DEPTH {
            return Err(BAD);
        }
        let mut r = Reader::new(body, BAD.what);
        let count = r.len(width)?;
        let size = r.len(width)?;
        let body = body.get(..size).ok_or(BAD)?;
        // Each element has its type and its value or offset, each member its key's place too.
        let entries = count.checked_mul(key + 1 + width).ok_or(BAD)?;
        let header = entries
            .checked_add(2 * width)
            .filter(|h| *h <= size)
            .ok_or(BAD)?;
        self.pay(header)?;
        Ok(Container {
            body,
            width,
            count,
            entries: Reader::new(&body[2 * width..header], BAD.what),
        })
    }

    fn object(&mut self, body: &[u8], width: usize, depth: u32) -> Result<(), Malformed> {
        let mut object = self.open(body, width, depth, width + 2)?;
        let mut keys = Reader::new(object.entries.take(object.count * (width + 2))?, BAD.what);
        self.out.push(b'{');
        for i in 0..object.count {
            if i > 0 {
                self.out.extend_from_slice(b", ");
            }
            let (offset, len) = (keys.len(width)?, keys.len(2)?);
            let key = object
                .body
                .get(offset..)
                .and_then(|b| b.get(..len))
                .ok_or(BAD)?;
            self.pay(len)?;
            self.string(key);
            self.out.extend_from_slice(b": ");
            self.element(&mut object, depth)?;
        }
        self.out.push(b'}');
        Ok(())
    }

    fn array(&mut self, body: &[u8], width: usize, depth: u32) -> Result<(), Malformed> {
        let mut array = self.open(body, width, depth, 0)?;
        self.out.push(b'[');
        for i in 0..array.count {
            if i > 0 {
                self.out.extend_from_slice(b", ");
            }
            self.element(&mut array, depth)?;
        }
        self.out.push(b']');
        Ok(())
    }

    /// The next element: small values are in the entry itself.
    fn element(&mut self, container: &mut Container<'_>, depth: u32) -> Result<(), Malformed> {
        let kind = container.entries.u8()?;
        let inlined = match kind {
            0x04..=0x06 => true,
            0x07 | 0x08 => container.width == 4,
            _ => false,
        };
        let entry = container.entries.take(container.width)?;
        if inlined {
            return self.value(kind, entry, depth);
        }
        let offset = usize::try_from(uint_le(entry)).map_err(|_| BAD)?;
        let body = container.body.get(offset..).ok_or(BAD)?;
        self.value(kind, body, depth)
    }
}

fn sign_extend(n: u64, width: usize) -> i64 {
    let unused = 64 - 8 * width;
    (n << unused).cast_signed() >> unused
}

fn base64(data: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(data.len() / 3 * 4 + data.len() / 57 + 8);
    let mut line = 0;
    for chunk in data.chunks(3) {
        if line == BASE64_LINE {
            out.push('\n');
            line = 0;
        }
        let group = (0..3).fold(0_usize, |n, i| {
            n << 8 | usize::from(*chunk.get(i).unwrap_or(&0))
        });
        for i in 0..4 {
            let digit = ALPHABET[group >> (18 - 6 * i) & 63];
            out.push(if i > chunk.len() {
                '='
            } else {
                char::from(digit)
            });
        }
        line += 4;
    }
    out
}

#[cfg(test)]
mod tests;
