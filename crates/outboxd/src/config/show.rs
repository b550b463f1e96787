//! `config --print`: the effective configuration as TOML, each key explained.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::Config;
use super::reader::Shown;

/// Prints every key with its value, in TOML that can be read back (secrets are masked).
pub fn print(config: &Config) -> String {
    let mut out = String::new();
    let mut sections: Vec<(String, Vec<&Shown>)> = Vec::new();
    let mut index = BTreeMap::new();
    for shown in &config.shown {
        let section = shown.path.rsplit_once('.').map_or("", |(s, _)| s);
        let at = *index.entry(section).or_insert_with(|| {
            sections.push((section.to_owned(), Vec::new()));
            sections.len() - 1
        });
        sections[at].1.push(shown);
    }
    for (section, keys) in sections {
        if !section.is_empty() {
            // Writing to a String cannot fail.
            let _ = writeln!(out, "\n{}", header(&section));
        }
        for k in keys {
            let key = k
                .path
                .rsplit_once('.')
                .map_or(k.path.as_str(), |(_, key)| key);
            let note = if k.is_default { " (default)" } else { "" };
            let _ = match &k.value {
                Some(value) => writeln!(out, "{key} = {value}  # {}{note}", k.explained()),
                None => writeln!(out, "# {key} is not set  # {}", k.explained()),
            };
        }
    }
    out
}

/// `outbox.0` is an entry of a list, `outbox.0.columns` a table of its last entry.
fn header(section: &str) -> String {
    let mut parts = section.split('.').filter(|p| p.parse::<usize>().is_err());
    let (first, rest) = (parts.next().unwrap_or_default(), parts.next());
    match (first, rest) {
        (list, None) if section != list => format!("[[{list}]]"),
        (section, None) => format!("[{section}]"),
        (section, Some(below)) => format!("[{section}.{below}]"),
    }
}
