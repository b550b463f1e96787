//! Dates and times as the server prints them, from the row format's packed integers.

use std::fmt::Write as _;

use super::read::{uint_be, uint_le};

/// Bytes of a fraction of so many digits.
pub(super) const fn fraction_bytes(digits: u16) -> usize {
    match digits {
        0 => 0,
        1 | 2 => 1,
        3 | 4 => 2,
        _ => 3,
    }
}

/// Microseconds of a fraction's bytes.
fn micros(raw: u64, bytes: usize) -> u64 {
    match bytes {
        0 => 0,
        1 => raw * 10_000,
        2 => raw * 100,
        _ => raw,
    }
}

fn push_fraction(out: &mut String, micros: u64, digits: u16) {
    if digits > 0 {
        let all = format!("{micros:06}");
        out.push('.');
        out.push_str(all.get(..usize::from(digits)).unwrap_or(&all));
    }
}

/// DATE: 3 bytes, little-endian.
pub(super) fn date(bytes: &[u8]) -> Option<String> {
    let n = uint_le(bytes);
    let (year, month, day) = (n >> 9, n >> 5 & 15, n & 31);
    (year <= 9999 && month <= 12).then(|| format!("{year:04}-{month:02}-{day:02}"))
}

/// TIME of servers before 5.6: 3 bytes, little-endian, the digits of HHMMSS.
pub(super) fn old_time(bytes: &[u8]) -> Option<String> {
    let n = uint_le(bytes);
    let (sign, n) = if n & 0x80_0000 != 0 {
        ("-", 0x100_0000 - n)
    } else {
        ("", n)
    };
    let (hour, minute, second) = (n / 10_000, n / 100 % 100, n % 100);
    (hour <= 838 && minute < 60 && second < 60)
        .then(|| format!("{sign}{hour:02}:{minute:02}:{second:02}"))
}

/// DATETIME of servers before 5.6: 8 bytes, little-endian, the digits of YYYYMMDDHHMMSS.
pub(super) fn old_datetime(bytes: &[u8]) -> Option<String> {
    let n = uint_le(bytes);
    let (date, time) = (n / 1_000_000, n % 1_000_000);
    civil(
        [date / 10_000, date / 100 % 100, date % 100],
        [time / 10_000, time / 100 % 100, time % 100],
    )
}

fn civil([year, month, day]: [u64; 3], [hour, minute, second]: [u64; 3]) -> Option<String> {
    let fits = year <= 9999 && month <= 12 && day <= 31;
    (fits && hour < 24 && minute < 60 && second < 60)
        .then(|| format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}"))
}

/// The whole seconds of a packed date and time: year * 13 + month, day, hour, minute, second.
fn packed_datetime(n: u64) -> Option<String> {
    let (date, time) = (n >> 17, n & 0x1_ffff);
    let months = date >> 5;
    civil(
        [months / 13, months % 13, date & 31],
        [time >> 12, time >> 6 & 63, time & 63],
    )
}

/// DATETIME: 5 bytes, big-endian, and the fraction.
pub(super) fn datetime(bytes: &[u8], digits: u16) -> Option<String> {
    let (whole, fraction) = bytes.split_at_checked(5)?;
    let n = uint_be(whole).checked_sub(0x80_0000_0000)?;
    let micros = micros(uint_be(fraction), fraction.len());
    if micros > 999_999 {
        return None;
    }
    let mut out = packed_datetime(n)?;
    push_fraction(&mut out, micros, digits);
    Some(out)
}

/// TIME: 3 bytes, big-endian, and the fraction, as one number with an offset.
pub(super) fn time(bytes: &[u8], digits: u16) -> Option<String> {
    let fraction = bytes.len().checked_sub(3)?;
    let offset = 0x80_0000_u64 << (8 * fraction);
    let raw = uint_be(bytes);
    let (sign, n) = if raw < offset {
        ("-", offset - raw)
    } else {
        ("", raw - offset)
    };
    let mask = (1_u64 << (8 * fraction)) - 1;
    clock(
        sign,
        n >> (8 * fraction),
        micros(n & mask, fraction),
        digits,
    )
}

fn clock(sign: &str, n: u64, micros: u64, digits: u16) -> Option<String> {
    let (hour, minute, second) = (n >> 12, n >> 6 & 63, n & 63);
    if hour > 838 || minute > 59 || second > 59 || micros > 999_999 {
        return None;
    }
    let mut out = format!("{sign}{hour:02}:{minute:02}:{second:02}");
    push_fraction(&mut out, micros, digits);
    Some(out)
}

/// TIMESTAMP: seconds since the epoch and the fraction, printed in the zone so many seconds east
/// of UTC.
pub(super) fn timestamp(seconds: u64, fraction: &[u8], digits: u16, zone: i32) -> Option<String> {
    let micros = micros(uint_be(fraction), fraction.len());
    if micros > 999_999 {
        return None;
    }
    let mut out = if seconds == 0 && micros == 0 {
        "0000-00-00 00:00:00".to_owned()
    } else {
        let local = i64::try_from(seconds).ok()?.checked_add(i64::from(zone))?;
        let (year, month, day) = date_of(local.div_euclid(86_400))?;
        let s = local.rem_euclid(86_400);
        let mut out = format!("{year:04}-{month:02}-{day:02}");
        let _ = write!(out, " {:02}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
        out
    };
    push_fraction(&mut out, micros, digits);
    Some(out)
}

fn date_of(days: i64) -> Option<(i32, u8, u8)> {
    let julian = i32::try_from(days).ok()?.checked_add(2_440_588)?;
    let date = ::time::Date::from_julian_day(julian).ok()?;
    Some((date.year(), u8::from(date.month()), date.day()))
}

/// What a packed value inside a JSON document is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonTemporal {
    Date,
    Time,
    Datetime,
}

/// A date or time inside a JSON document: 8 bytes, little-endian, the packed number times 2^24
/// plus microseconds. Always six digits of fraction, but none for dates.
pub(super) fn json(bytes: &[u8], kind: JsonTemporal) -> Option<String> {
    let bytes: [u8; 8] = bytes.try_into().ok()?;
    let packed = i64::from_le_bytes(bytes);
    let sign = if packed < 0 { "-" } else { "" };
    let n = packed.unsigned_abs();
    let (whole, micros) = (n >> 24, n & 0xff_ffff);
    match kind {
        JsonTemporal::Time => clock(sign, whole, micros, 6),
        _ if packed < 0 || micros > 999_999 => None,
        JsonTemporal::Date => packed_datetime(whole).map(|mut text| {
            text.truncate(10);
            text
        }),
        JsonTemporal::Datetime => {
            let mut out = packed_datetime(whole)?;
            push_fraction(&mut out, micros, 6);
            Some(out)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(s: &str) -> Option<String> {
        Some(s.to_owned())
    }

    #[test]
    fn times_before_zero_borrow_from_the_fraction() {
        assert_eq!(time(&[0x7f, 0xff, 0xff, 0xf6], 2), text("-00:00:00.10"));
        assert_eq!(time(&[0x80, 0x10, 0x83], 0), text("01:02:03"));
        assert_eq!(
            time(&[0x4b, 0x91, 0x05, 0xf0, 0xbd, 0xc1], 6),
            text("-838:59:58.999999")
        );
        assert_eq!(time(&[0x7f, 0xff, 0xff], 0), text("-00:00:01"));
    }

    #[test]
    fn the_zero_date_prints_as_zeros_in_every_type() {
        assert_eq!(date(&[0, 0, 0]), text("0000-00-00"));
        assert_eq!(
            datetime(&[0x80, 0, 0, 0, 0, 0], 1),
            text("0000-00-00 00:00:00.0")
        );
        assert_eq!(timestamp(0, &[], 0, 7200), text("0000-00-00 00:00:00"));
        assert_eq!(old_datetime(&[0; 8]), text("0000-00-00 00:00:00"));
    }

    #[test]
    fn timestamps_print_in_the_zone_given() {
        assert_eq!(timestamp(1, &[], 0, -3600), text("1969-12-31 23:00:01"));
        assert_eq!(
            timestamp(1_700_000_000, &[0x04, 0xd2], 4, 28_800),
            text("2023-11-15 06:13:20.1234")
        );
        assert_eq!(
            timestamp(951_782_400, &[], 0, 0),
            text("2000-02-29 00:00:00")
        );
    }

    #[test]
    fn old_formats_hold_decimal_digits() {
        assert_eq!(old_time(&123_456_u32.to_le_bytes()[..3]), text("12:34:56"));
        assert_eq!(
            old_time(&(-10_203_i32).to_le_bytes()[..3]),
            text("-01:02:03")
        );
        let n = 20_240_229_235_958_u64;
        assert_eq!(old_datetime(&n.to_le_bytes()), text("2024-02-29 23:59:58"));
    }

    #[test]
    fn impossible_values_are_refused() {
        assert_eq!(old_datetime(&u64::MAX.to_le_bytes()), None);
        assert_eq!(datetime(&[0xff; 8], 6), None);
        assert_eq!(time(&[0xff; 3], 0), None);
        assert_eq!(timestamp(u64::MAX, &[], 0, 0), None);
        assert_eq!(json(&[0xff; 8], JsonTemporal::Datetime), None);
        assert_eq!(json(&[0; 7], JsonTemporal::Date), None);
    }
}
