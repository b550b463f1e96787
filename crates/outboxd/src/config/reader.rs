//! Reads a TOML table key by key, collecting every mistake instead of stopping at the first, and
//! noting every key with its effective value, so that `config --print` and the documentation
//! come from the same walk as the configuration itself.

use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;
use toml::{Table, Value};

/// One key as it is in effect.
#[derive(Clone, Debug)]
pub struct Shown {
    /// Dotted path, such as `mysql.heartbeat` or `outbox.0.table`.
    pub path: String,
    /// The value as TOML, secrets masked; `None` for an optional key that is not set.
    pub value: Option<String>,
    /// Whether the value is the default.
    pub is_default: bool,
    /// One line of explanation.
    pub help: &'static str,
    /// The words to choose from, as TOML; empty: not a choice.
    pub choices: Vec<String>,
}

impl Shown {
    /// The explanation, with what is allowed.
    pub fn explained(&self) -> String {
        match self.choices.as_slice() {
            [] => self.help.to_owned(),
            choices => format!("{}; one of {}", self.help, choices.join(", ")),
        }
    }
}

/// What the walk collects.
#[derive(Debug, Default)]
pub struct Collected {
    /// Every mistake, naming key, value and what is allowed.
    pub mistakes: Vec<String>,
    /// Every known key.
    pub shown: Vec<Shown>,
}

/// A table being read.
pub struct Reader<'a> {
    path: String,
    table: Table,
    known: Vec<&'static str>,
    out: &'a mut Collected,
}

impl<'a> Reader<'a> {
    /// Reads `table`, found at the dotted `path` (empty for the root).
    pub fn new(path: impl Into<String>, table: Table, out: &'a mut Collected) -> Self {
        Self {
            path: path.into(),
            table,
            known: Vec::new(),
            out,
        }
    }

    /// The dotted path of `key` here.
    pub fn full(&self, key: &str) -> String {
        if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        }
    }

    /// Records a mistake about `key`.
    pub fn mistake(&mut self, key: &str, text: impl Display) {
        let path = self.full(key);
        self.out.mistakes.push(format!("{path}: {text}"));
    }

    /// Whether `key` is set here. Asked before it is taken.
    pub fn is_set(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    fn take(&mut self, key: &'static str) -> Option<Value> {
        self.known.push(key);
        self.table.remove(key)
    }

    fn show(&mut self, key: &str, value: Option<String>, is_default: bool, help: &'static str) {
        let path = self.full(key);
        self.out.shown.push(Shown {
            path,
            value,
            is_default,
            help,
            choices: Vec::new(),
        });
    }

    /// Takes `key`, parses it with `parse` (the error says what is allowed) and prints it with
    /// `print`; the default where it is absent or wrong.
    fn value<T>(
        &mut self,
        key: &'static str,
        default: T,
        help: &'static str,
        parse: impl FnOnce(&Value) -> Result<T, String>,
        print: impl FnOnce(&T) -> String,
    ) -> T {
        let taken = self.take(key);
        let is_default = taken.is_none();
        let value = match taken {
            None => default,
            Some(v) => parse(&v).unwrap_or_else(|allowed| {
                self.mistake(key, format_args!("{} is not allowed: {allowed}", brief(&v)));
                default
            }),
        };
        self.show(key, Some(print(&value)), is_default, help);
        value
    }

    /// As [`Reader::value`], without a default.
    fn optional<T>(
        &mut self,
        key: &'static str,
        help: &'static str,
        parse: impl FnOnce(&Value) -> Result<T, String>,
        print: impl FnOnce(&T) -> String,
    ) -> Option<T> {
        let taken = self.take(key)?;
        match parse(&taken) {
            Ok(value) => {
                self.show(key, Some(print(&value)), false, help);
                Some(value)
            }
            Err(allowed) => {
                self.mistake(
                    key,
                    format_args!("{} is not allowed: {allowed}", brief(&taken)),
                );
                None
            }
        }
    }

    /// Notes an optional key that is not set, for `--print`.
    pub fn absent(&mut self, key: &'static str, help: &'static str) {
        self.show(key, None, true, help);
    }

    /// A text.
    pub fn text(&mut self, key: &'static str, default: &str, help: &'static str) -> String {
        self.value(key, default.to_owned(), help, text, |s| quoted(s))
    }

    /// A text that must be there.
    pub fn required_text(&mut self, key: &'static str, help: &'static str) -> String {
        if !self.is_set(key) {
            self.known.push(key);
            self.mistake(key, "missing; it has no default");
            return String::new();
        }
        self.value(key, String::new(), help, text, |s| quoted(s))
    }

    /// A text that may be absent.
    pub fn optional_text(&mut self, key: &'static str, help: &'static str) -> Option<String> {
        if !self.is_set(key) {
            self.known.push(key);
            self.absent(key, help);
            return None;
        }
        self.optional(key, help, text, |s| quoted(s))
    }

    /// A path that may be absent.
    pub fn optional_path(&mut self, key: &'static str, help: &'static str) -> Option<PathBuf> {
        self.optional_text(key, help).map(PathBuf::from)
    }

    /// A secret that may be absent; `mask` prints what may be shown of it.
    pub fn optional_secret(
        &mut self,
        key: &'static str,
        help: &'static str,
        mask: impl FnOnce(&str) -> String,
    ) -> Option<SecretString> {
        let Some(taken) = self.take(key) else {
            self.absent(key, help);
            return None;
        };
        // The value itself must not get into a mistake.
        if let Value::String(s) = taken {
            self.show(key, Some(quoted(&mask(&s))), false, help);
            Some(SecretString::from(s))
        } else {
            self.mistake(key, "must be a text");
            None
        }
    }

    /// A boolean.
    pub fn flag(&mut self, key: &'static str, default: bool, help: &'static str) -> bool {
        self.value(key, default, help, boolean, ToString::to_string)
    }

    /// A whole number within `range`.
    pub fn number(
        &mut self,
        key: &'static str,
        default: u64,
        range: std::ops::RangeInclusive<u64>,
        help: &'static str,
    ) -> u64 {
        self.value(
            key,
            default,
            help,
            |v| number(v, &range),
            ToString::to_string,
        )
    }

    /// A whole number within `range` that may be absent.
    pub fn optional_number(
        &mut self,
        key: &'static str,
        range: std::ops::RangeInclusive<u64>,
        help: &'static str,
    ) -> Option<u64> {
        if !self.is_set(key) {
            self.known.push(key);
            self.absent(key, help);
            return None;
        }
        self.optional(key, help, |v| number(v, &range), ToString::to_string)
    }

    /// A number within `range`.
    pub fn real(
        &mut self,
        key: &'static str,
        default: f64,
        range: std::ops::RangeInclusive<f64>,
        help: &'static str,
    ) -> f64 {
        let parse = |v: &Value| {
            let n = match v {
                Value::Float(f) => Some(*f),
                Value::Integer(i) => i.to_string().parse().ok(),
                Value::String(s) => s.parse().ok(),
                _ => None,
            };
            n.filter(|n| range.contains(n))
                .ok_or_else(|| format!("a number from {} to {}", range.start(), range.end()))
        };
        self.value(key, default, help, parse, |n| format!("{n:?}"))
    }

    /// A duration within `range`.
    pub fn duration(
        &mut self,
        key: &'static str,
        default: Duration,
        range: std::ops::RangeInclusive<Duration>,
        help: &'static str,
    ) -> Duration {
        self.value(
            key,
            default,
            help,
            |v| duration(v, &range),
            |d| quoted(&print_duration(*d)),
        )
    }

    /// A duration within `range` that may be absent.
    pub fn optional_duration(
        &mut self,
        key: &'static str,
        range: std::ops::RangeInclusive<Duration>,
        help: &'static str,
    ) -> Option<Duration> {
        if !self.is_set(key) {
            self.known.push(key);
            self.absent(key, help);
            return None;
        }
        self.optional(
            key,
            help,
            |v| duration(v, &range),
            |d| quoted(&print_duration(*d)),
        )
    }

    /// A size in bytes within `range`.
    pub fn size(
        &mut self,
        key: &'static str,
        default: u64,
        range: std::ops::RangeInclusive<u64>,
        help: &'static str,
    ) -> u64 {
        self.value(
            key,
            default,
            help,
            |v| size(v, &range),
            |n| quoted(&print_size(*n)),
        )
    }

    /// A size that may be absent.
    pub fn optional_size(
        &mut self,
        key: &'static str,
        range: std::ops::RangeInclusive<u64>,
        help: &'static str,
    ) -> Option<u64> {
        if !self.is_set(key) {
            self.known.push(key);
            self.absent(key, help);
            return None;
        }
        self.optional(key, help, |v| size(v, &range), |n| quoted(&print_size(*n)))
    }

    /// One of a closed set of words.
    pub fn choice<T: Copy + PartialEq>(
        &mut self,
        key: &'static str,
        default: T,
        choices: &[(&'static str, T)],
        help: &'static str,
    ) -> T {
        let parse = |v: &Value| {
            let found = v
                .as_str()
                .and_then(|s| choices.iter().find(|(name, _)| *name == s));
            found.map(|(_, t)| *t).ok_or_else(|| {
                let names: Vec<_> = choices.iter().map(|(name, _)| quoted(name)).collect();
                format!("one of {}", names.join(", "))
            })
        };
        let print = |t: &T| {
            choices
                .iter()
                .find(|(_, c)| c == t)
                .map_or_else(String::new, |(n, _)| quoted(n))
        };
        let value = self.value(key, default, help, parse, print);
        if let Some(shown) = self.out.shown.last_mut() {
            shown.choices = choices.iter().map(|(name, _)| quoted(name)).collect();
        }
        value
    }

    /// A scalar in any form, as text or number; for `status_values`.
    pub fn raw(&mut self, key: &'static str, default: Value, help: &'static str) -> Value {
        self.value(key, default, help, |v| Ok(v.clone()), ToString::to_string)
    }

    /// The table under `key`, empty where it is absent.
    pub fn section(&mut self, key: &'static str) -> Table {
        match self.take(key) {
            None => Table::new(),
            Some(Value::Table(t)) => t,
            Some(v) => {
                self.mistake(key, format_args!("{} is not allowed: a section", brief(&v)));
                Table::new()
            }
        }
    }

    /// The list of tables under `key`.
    pub fn sections(&mut self, key: &'static str) -> Vec<Table> {
        let Some(taken) = self.take(key) else {
            return Vec::new();
        };
        let list = match taken {
            Value::Array(list) => list,
            // Set through the environment alone: indices are keys there.
            Value::Table(t) if t.keys().all(|k| k.parse::<usize>().is_ok()) => {
                let mut numbered: Vec<_> = t
                    .into_iter()
                    .filter_map(|(k, v)| Some((k.parse::<usize>().ok()?, v)))
                    .collect();
                numbered.sort_by_key(|(n, _)| *n);
                numbered.into_iter().map(|(_, v)| v).collect()
            }
            v => vec![v],
        };
        let mut tables = Vec::new();
        for (n, v) in list.into_iter().enumerate() {
            match v {
                Value::Table(t) => tables.push(t),
                v => self.mistake(
                    key,
                    format_args!("entry {n} is {}, not a section", brief(&v)),
                ),
            }
        }
        tables
    }

    /// A reader of a section below this one.
    pub fn below(&mut self, key: &str, table: Table) -> Reader<'_> {
        let path = self.full(key);
        Reader::new(path, table, self.out)
    }

    /// Ends the reading: what has not been taken is unknown.
    pub fn finish(mut self) {
        for key in std::mem::take(&mut self.table).keys() {
            let near = nearest(key, &self.known);
            let hint = near.map_or_else(
                || format!("known here: {}", self.known.join(", ")),
                |k| format!("did you mean {k}?"),
            );
            self.mistake(key, format_args!("unknown key; {hint}"));
        }
    }
}

fn text(v: &Value) -> Result<String, String> {
    match v {
        Value::String(s) => Ok(s.clone()),
        Value::Integer(i) => Ok(i.to_string()),
        _ => Err("a text".to_owned()),
    }
}

fn boolean(v: &Value) -> Result<bool, String> {
    match v {
        Value::Boolean(b) => Ok(*b),
        Value::String(s) if s == "true" => Ok(true),
        Value::String(s) if s == "false" => Ok(false),
        _ => Err("true or false".to_owned()),
    }
}

fn number(v: &Value, range: &std::ops::RangeInclusive<u64>) -> Result<u64, String> {
    let n = match v {
        Value::Integer(i) => u64::try_from(*i).ok(),
        Value::String(s) => s.parse().ok(),
        _ => None,
    };
    n.filter(|n| range.contains(n))
        .ok_or_else(|| format!("a whole number from {} to {}", range.start(), range.end()))
}

fn duration(v: &Value, range: &std::ops::RangeInclusive<Duration>) -> Result<Duration, String> {
    v.as_str()
        .and_then(|s| humantime::parse_duration(s).ok())
        .filter(|d| range.contains(d))
        .ok_or_else(|| {
            let (from, to) = (print_duration(*range.start()), print_duration(*range.end()));
            format!("a duration from {from} to {to}, such as \"500ms\", \"5s\" or \"2h\"")
        })
}

fn size(v: &Value, range: &std::ops::RangeInclusive<u64>) -> Result<u64, String> {
    let n = match v {
        Value::Integer(i) => u64::try_from(*i).ok(),
        Value::String(s) => s.parse::<bytesize::ByteSize>().ok().map(|b| b.as_u64()),
        _ => None,
    };
    n.filter(|n| range.contains(n)).ok_or_else(|| {
        let (from, to) = (print_size(*range.start()), print_size(*range.end()));
        format!("a size from {from} to {to}, such as \"64MiB\"")
    })
}

/// As humantime prints it, without the spaces.
pub fn print_duration(d: Duration) -> String {
    humantime::format_duration(d).to_string().replace(' ', "")
}

/// The largest binary unit that divides it.
pub fn print_size(n: u64) -> String {
    [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]
        .into_iter()
        .find(|(unit, _)| n >= *unit && n.is_multiple_of(*unit))
        .map_or_else(
            || format!("{n}B"),
            |(unit, name)| format!("{}{name}", n / unit),
        )
}

fn quoted(s: &str) -> String {
    Value::String(s.to_owned()).to_string()
}

/// A value for an error message: short, and on one line.
fn brief(v: &Value) -> String {
    let printed = v.to_string().replace('\n', " ");
    if printed.chars().count() > 60 {
        format!("{}…", printed.chars().take(60).collect::<String>())
    } else {
        printed
    }
}

/// The known key that `key` was probably meant to be: at most two edits away.
fn nearest(key: &str, known: &[&'static str]) -> Option<&'static str> {
    known
        .iter()
        .map(|k| (edits(key, k), *k))
        .filter(|(n, _)| *n <= 2)
        .min()
        .map(|(_, k)| k)
}

/// Levenshtein distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_key_gets_the_key_that_was_meant() {
        assert_eq!(
            nearest("intervall", &["batch", "interval"]),
            Some("interval")
        );
        assert_eq!(nearest("colour", &["batch", "interval"]), None);
    }

    #[test]
    fn sizes_and_durations_print_as_they_are_written() {
        assert_eq!(print_size(64 << 20), "64MiB");
        assert_eq!(print_size(1000), "1000B");
        assert_eq!(print_duration(Duration::from_millis(50)), "50ms");
        assert_eq!(print_duration(Duration::from_secs(480)), "8m");
    }
}
