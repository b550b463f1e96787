//! Floating point numbers as the server prints them.

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
    print_digits(&shortest(value))
}

/// The shortest digits that give the same number back. Where two are equally near, the server
/// takes the even one, which is what exact formatting does and shortest formatting does not.
fn shortest(value: f64) -> String {
    let shortest = format!("{value:e}");
    let digits = mantissa_digits(&shortest);
    let even = format!("{value:.*e}", digits.saturating_sub(1));
    if even != shortest && even.parse() == Ok(value) {
        even
    } else {
        shortest
    }
}

fn mantissa_digits(scientific: &str) -> usize {
    let mantissa = scientific.bytes().take_while(|b| *b != b'e');
    mantissa.filter(u8::is_ascii_digit).count()
}

/// A FLOAT without declared decimals.
pub(super) fn print_float(value: f32) -> String {
    let value = f64::from(value);
    if !value.is_finite() {
        return "0".to_owned();
    }
    let shortest = shortest(value);
    if mantissa_digits(&shortest) <= FLOAT_DIGITS {
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
    let mut out = Digits::of(&shortest(value)).plain();
    let have = out
        .split_once('.')
        .map_or(0, |(_, fraction)| fraction.len());
    if have > decimals {
        return format!("{value:.decimals$}");
    }
    if have == 0 && decimals > 0 {
        out.push('.');
    }
    out.extend(std::iter::repeat_n('0', decimals - have));
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

/// Prints `-d.ddde-x` in the server's way.
fn print_digits(scientific: &str) -> String {
    let digits = Digits::of(scientific);
    let point = digits.point;
    if point > -PLAIN_DIGITS && (point <= PLAIN_DIGITS || digits.len() > point) {
        return digits.plain();
    }
    let (first, rest) = digits.digits.split_at(1);
    let dot = if rest.is_empty() { "" } else { "." };
    format!("{}{first}{dot}{rest}e{}", digits.sign, point - 1)
}

struct Digits {
    sign: &'static str,
    /// At least one, without trailing zeros.
    digits: String,
    /// Digits before the decimal point; negative: zeros behind it.
    point: i32,
}

impl Digits {
    fn of(scientific: &str) -> Self {
        let (mantissa, exponent) = scientific.split_once('e').unwrap_or((scientific, "0"));
        let mut digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
        digits.truncate(digits.trim_end_matches('0').len().max(1));
        Self {
            sign: if mantissa.starts_with('-') { "-" } else { "" },
            digits,
            point: exponent.parse::<i32>().unwrap_or(0) + 1,
        }
    }

    fn len(&self) -> i32 {
        i32::try_from(self.digits.len()).unwrap_or(i32::MAX)
    }

    /// Without an exponent.
    fn plain(&self) -> String {
        let Self {
            sign,
            digits,
            point,
        } = self;
        let zeros = |n: i32| "0".repeat(usize::try_from(n).unwrap_or(0));
        if *point <= 0 {
            format!("{sign}0.{}{digits}", zeros(-point))
        } else if *point >= self.len() {
            format!("{sign}{digits}{}", zeros(point - self.len()))
        } else {
            let (whole, fraction) = digits.split_at(usize::try_from(*point).unwrap_or(0));
            format!("{sign}{whole}.{fraction}")
        }
    }
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
            // Half-way between two shortest forms.
            (-(2_140_781_096_510_942.0 + 0.25), "-2140781096510942.2"),
            (2_140_781_096_510_942.0 + 0.75, "2140781096510942.8"),
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
