//! DATETIME and TIMESTAMP text as the server prints it.

use crate::row::Cell;

/// Microseconds since the epoch, or `None` for NULL, for dates that do not exist (such as
/// `0000-00-00`, which old SQL modes store), and for anything that is not a date.
pub(super) fn micros(cell: &Cell, zone_offset: i32) -> Option<i64> {
    let Cell::Text(text) = cell else { return None };
    let text = std::str::from_utf8(text).ok()?.trim();
    let (date, time) = text.split_once([' ', 'T']).unwrap_or((text, "00:00:00"));
    let mut parts = date.splitn(3, '-').map(digits);
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    let (time, fraction) = time.split_once('.').unwrap_or((time, ""));
    let mut parts = time.splitn(3, ':').map(digits);
    let (hour, minute, second) = (parts.next()??, parts.next()??, parts.next()??);
    if year > 9999 || hour > 23 || minute > 59 || second > 59 || fraction.len() > 6 {
        return None;
    }
    let fraction = if fraction.is_empty() {
        0
    } else {
        digits(fraction)? * 10_i64.pow(6 - u32::try_from(fraction.len()).ok()?)
    };
    let seconds = days(year, month, day)? * 86_400 + hour * 3_600 + minute * 60 + second;
    Some((seconds - i64::from(zone_offset)) * 1_000_000 + fraction)
}

fn digits(text: &str) -> Option<i64> {
    let plain = (1..=6).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| text.parse().ok())?
}

/// Days since 1970-01-01 of a date that exists.
fn days(year: i64, month: i64, day: i64) -> Option<i64> {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let last = match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if year == 0 || !(1..=last).contains(&day) {
        return None;
    }
    // Years that start in March put the leap day last, which makes the sum below regular.
    let (y, m) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let before_year = 365 * y + y / 4 - y / 100 + y / 400;
    Some(before_year + (153 * m + 2) / 5 + day - 1 - 719_468)
}
