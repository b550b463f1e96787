//! Packed decimals: groups of nine digits in four bytes, big-endian, the first bit inverted as
//! the sign, all bits inverted where negative.

use super::error::Malformed;
use super::read::{Reader, uint_be};

/// Bytes of a group of so many digits.
const BYTES: [usize; 10] = [0, 1, 1, 2, 2, 3, 3, 4, 4, 4];

/// The server's limits.
const MAX_PRECISION: u8 = 65;
const MAX_SCALE: u8 = 38;

/// Bytes of a decimal; `None` where no such decimal can be declared.
pub(super) fn size(precision: u8, scale: u8) -> Option<usize> {
    if precision == 0 || precision > MAX_PRECISION || scale > precision || scale > MAX_SCALE {
        return None;
    }
    let (whole, fraction) = (usize::from(precision - scale), usize::from(scale));
    Some(whole / 9 * 4 + BYTES[whole % 9] + fraction / 9 * 4 + BYTES[fraction % 9])
}

/// Prints a decimal as the server does, its whole part with at least `pad` digits.
pub(super) fn print(
    bytes: &[u8],
    precision: u8,
    scale: u8,
    pad: usize,
) -> Result<String, Malformed> {
    const BAD: Malformed = Malformed::new("decimal");
    if size(precision, scale) != Some(bytes.len()) {
        return Err(BAD);
    }
    let mut bytes = bytes.to_vec();
    let negative = bytes[0] & 0x80 == 0;
    bytes[0] ^= 0x80;
    if negative {
        bytes.iter_mut().for_each(|b| *b = !*b);
    }
    let (whole, fraction) = (usize::from(precision - scale), usize::from(scale));
    let mut r = Reader::new(&bytes, "decimal");
    let mut digits = String::with_capacity(usize::from(precision) + pad + 3);
    // Odd digits come first in the whole part and last in the fraction.
    group(&mut r, whole % 9, &mut digits)?;
    for _ in 0..whole / 9 {
        group(&mut r, 9, &mut digits)?;
    }
    let mut out = String::with_capacity(digits.len() + usize::from(scale) + 3);
    if negative {
        out.push('-');
    }
    let significant = digits.trim_start_matches('0');
    let least = pad.max(1);
    out.extend(std::iter::repeat_n(
        '0',
        least.saturating_sub(significant.len()),
    ));
    out.push_str(significant);
    if fraction > 0 {
        out.push('.');
        for _ in 0..fraction / 9 {
            group(&mut r, 9, &mut out)?;
        }
        group(&mut r, fraction % 9, &mut out)?;
    }
    Ok(out)
}

fn group(r: &mut Reader<'_>, digits: usize, out: &mut String) -> Result<(), Malformed> {
    if digits == 0 {
        return Ok(());
    }
    let n = uint_be(r.take(BYTES[digits])?);
    let text = format!("{n:0digits$}");
    if text.len() != digits {
        return Err(r.malformed());
    }
    out.push_str(&text);
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn packed_digits_print_with_sign_and_scale() {
        // 1234567890.1234 as DECIMAL(14,4), from the server's own documentation of the format.
        let plus = [0x81, 0x0d, 0xfb, 0x38, 0xd2, 0x04, 0xd2];
        let minus = [0x7e, 0xf2, 0x04, 0xc7, 0x2d, 0xfb, 0x2d];
        assert_eq!(print(&plus, 14, 4, 0).unwrap(), "1234567890.1234");
        assert_eq!(print(&minus, 14, 4, 0).unwrap(), "-1234567890.1234");
        assert_eq!(print(&[0x80, 50], 4, 2, 0).unwrap(), "0.50");
        assert_eq!(print(&[0x80, 50], 4, 2, 2).unwrap(), "00.50");
    }

    #[test]
    fn digits_above_the_base_and_impossible_declarations_are_refused() {
        assert!(print(&[0x80, 100], 4, 2, 0).is_err());
        assert!(print(&[0x80], 4, 2, 0).is_err());
        assert_eq!(size(66, 0), None);
        assert_eq!(size(3, 4), None);
        assert_eq!(size(0, 0), None);
    }
}
