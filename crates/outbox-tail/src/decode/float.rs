//! Floating point numbers as the server prints them.

use std::fmt::Write as _;

/// The server prints a number without exponent while its decimal point is within this many
/// digits.
const PLAIN_DIGITS: i32 = 15;

/// FLOAT columns without declared decimals are printed with this many significant digits.
const FLOAT_DIGITS: usize = 6;

/// A DOUBLE without declared decimals: the shortest digits that give the same number back.
pub(super) fn print_double(value: f64) -> String {
    if !value.is_finite() {
        return "0".to_owned();
    }
    print_digits(&format!("{value:e}"))
}

/// A FLOAT without declared decimals.
pub(super) fn print_float(value: f32) -> String {
    let value = f64::from(value);
    if !value.is_finite() {
        return "0".to_owned();
    }
    let shortest = format!("{value:e}");
    let digits = shortest.bytes().take_while(|b| *b != b'e');
    if digits.filter(u8::is_ascii_digit).count() <= FLOAT_DIGITS {
        print_digits(&shortest)
    } else {
        print_digits(&format!("{value:.*e}", FLOAT_DIGITS - 1))
    }
}

/// A number with declared decimals. Digits past the shortest ones that give the same number back
/// are zeros.
pub(super) fn print_fixed(value: f64, decimals: usize) -> String {
    if !value.is_finite() {
        return "0".to_owned();
    }
    let shortest = format!("{value}");
    let have = shortest.split_once('.').map_or(0, |(_, f)| f.len());
    if have > decimals {
        return format!("{value:.decimals$}");
    }
    let mut out = shortest;
    if decimals > 0 {
        if have == 0 {
            out.push('.');
        }
        out.extend(std::iter::repeat_n('0', decimals - have));
    }
    out
}

/// A DOUBLE inside a JSON document: always recognisable as one.
pub(super) fn print_json(value: f64) -> String {
    let mut out = print_double(value);
    if !out.contains(['.', 'e']) {
        out.push_str(".0");
    }
    out
}

/// Prints `-d.ddde±x` in the server's way.
fn print_digits(scientific: &str) -> String {
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (sign, mantissa) = match mantissa.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", mantissa),
    };
    let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    let digits = match digits.trim_end_matches('0') {
        "" => "0",
        trimmed => trimmed,
    };
    let len = i32::try_from(digits.len()).unwrap_or(i32::MAX);
    // Digits before the decimal point; negative: zeros behind it.
    let point = exponent + 1;
    let plain = point > -PLAIN_DIGITS && (point <= PLAIN_DIGITS || len > point);
    let mut out = String::with_capacity(32);
    out.push_str(sign);
    if !plain {
        let (first, rest) = digits.split_at(1);
        out.push_str(first);
        if !rest.is_empty() {
            out.push('.');
            out.push_str(rest);
        }
        let _ = write!(out, "e{exponent}");
    } else if point <= 0 {
        out.push_str("0.");
        out.extend((point..0).map(|_| '0'));
        out.push_str(digits);
    } else if point >= len {
        out.push_str(digits);
        out.extend((len..point).map(|_| '0'));
    } else {
        let (whole, fraction) = digits.split_at(usize::try_from(point).unwrap_or(0));
        out.push_str(whole);
        out.push('.');
        out.push_str(fraction);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_print_as_the_server_prints_them() {
        for (value, text) in [
            (0.1, "0.1"),
            (-0.0, "-0"),
            (1e15, "1e15"),
            (1e14, "100000000000000"),
            (1e20, "1e20"),
            (
                1.234_567_890_123_456_7e-14,
                "0.000000000000012345678901234567",
            ),
            (1e-15, "0.000000000000001"),
            (1e-16, "1e-16"),
            (12_345_678_901_234_567.0, "1.2345678901234568e16"),
            (1_234_567_890_123_456.5, "1234567890123456.5"),
            (f64::MIN, "-1.7976931348623157e308"),
            (5e-324, "5e-324"),
        ] {
            assert_eq!(print_double(value), text);
        }
    }

    #[test]
    fn floats_have_six_digits_at_most() {
        for (value, text) in [
            (0.1, "0.1"),
            (16_777_217.0, "16777200"),
            (1e20, "1e20"),
            (f32::MIN, "-3.40282e38"),
            (1e-7, "0.0000001"),
        ] {
            assert_eq!(print_float(value), text);
        }
    }

    #[test]
    fn declared_decimals_are_filled_with_zeros_behind_the_shortest_digits() {
        assert_eq!(
            print_fixed(123_456_789_012_345.67, 4),
            "123456789012345.6700"
        );
        assert_eq!(print_fixed(1e23, 2), "100000000000000000000000.00");
        assert_eq!(print_fixed(f64::from(0.1_f32), 3), "0.100");
        assert_eq!(print_fixed(2.5, 0), "2");
    }

    #[test]
    fn doubles_in_json_stay_doubles() {
        for (value, text) in [
            (2.0, "2.0"),
            (3e100, "3e100"),
            (-0.0, "-0.0"),
            (1e-7, "0.0000001"),
        ] {
            assert_eq!(print_json(value), text);
        }
    }
}
