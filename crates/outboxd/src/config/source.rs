//! Where the configuration comes from: the file, then the environment on top of it.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::Config;
use super::reader::{Collected, Reader};

const PREFIX: &str = "OUTBOXD__";
const FILE_VARIABLE: &str = "OUTBOXD_CONFIG";
const DEFAULT_FILE: &str = "outboxd.toml";

/// Every mistake of a configuration.
#[derive(Debug, thiserror::Error)]
#[error("the configuration has {} mistake{}:\n  {}", .0.len(), if .0.len() == 1 { "" } else { "s" }, .0.join("\n  "))]
pub struct ConfigError(pub Vec<String>);

/// Loads the file (`--config`, else `OUTBOXD_CONFIG`, else `outboxd.toml` where it exists) and
/// what the environment sets on top of it.
pub fn load(
    file: Option<&Path>,
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<Config, ConfigError> {
    let environment: Vec<_> = environment.into_iter().collect();
    let named = file.map(Path::to_path_buf).or_else(|| {
        environment
            .iter()
            .find(|(k, _)| k == FILE_VARIABLE)
            .map(|(_, v)| PathBuf::from(v))
    });
    let mut table = read_file(named)?;
    let mut collected = Collected::default();
    for (key, value) in environment {
        if let Some(path) = key.strip_prefix(PREFIX) {
            let path: Vec<String> = path.split("__").map(str::to_ascii_lowercase).collect();
            if let Err(e) = overlay(&mut table, &path, value) {
                collected.mistakes.push(format!("{key}: {e}"));
            }
        }
    }
    let config = super::sections::read(Reader::new("", table, &mut collected));
    match config {
        Some(mut config) if collected.mistakes.is_empty() => {
            config.shown = collected.shown;
            Ok(config)
        }
        _ => Err(ConfigError(collected.mistakes)),
    }
}

fn read_file(named: Option<PathBuf>) -> Result<Table, ConfigError> {
    let path = match named {
        Some(path) => path,
        // Everything may come from the environment.
        None if !Path::new(DEFAULT_FILE).exists() => return Ok(Table::new()),
        None => PathBuf::from(DEFAULT_FILE),
    };
    let one = |text: String| ConfigError(vec![text]);
    let text = std::fs::read_to_string(&path)
        .map_err(|e| one(format!("cannot read {}: {e}", path.display())))?;
    text.parse::<Table>().map_err(|e| {
        // The library's own text quotes the line, which may hold a password.
        let line = e
            .span()
            .map_or(1, |s| 1 + text[..s.start].matches('\n').count());
        one(format!(
            "{}, line {line}: not TOML: {}",
            path.display(),
            e.message()
        ))
    })
}

/// Sets `path` to `value`. List entries go by index, and an index may be at most one past the end.
fn overlay(table: &mut Table, path: &[String], value: String) -> Result<(), String> {
    let [first, rest @ ..] = path else {
        return Err("names no key".to_owned());
    };
    if rest.is_empty() {
        table.insert(first.clone(), Value::String(value));
        return Ok(());
    }
    match table
        .entry(first.clone())
        .or_insert_with(|| Value::Table(Table::new()))
    {
        Value::Table(t) => overlay(t, rest, value),
        Value::Array(list) => {
            let [index, rest @ ..] = rest else {
                return Err("names no entry".to_owned());
            };
            let at: usize = index.parse().map_err(|_| format!("{index} is no index"))?;
            if at > list.len() {
                return Err(format!(
                    "there are {} entries, so {at} is out of range",
                    list.len()
                ));
            }
            if at == list.len() {
                list.push(Value::Table(Table::new()));
            }
            match &mut list[at] {
                Value::Table(t) if !rest.is_empty() => overlay(t, rest, value),
                _ => Err(format!("entry {at} is set whole, not by key")),
            }
        }
        _ => Err(format!("{first} is a value, not a section")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const MINIMAL: &str = r#"
        [mysql]
        url = "mysql://u:secret@127.0.0.1:3306/app"
        [[outbox]]
        table = "outbox"
        [rabbitmq]
        url = "amqp://guest:hidden@127.0.0.1:5672/%2f"
    "#;

    fn with(extra: &str, environment: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        std::fs::write(&path, format!("{MINIMAL}{extra}")).unwrap();
        load(
            Some(&path),
            environment
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned())),
        )
    }

    fn mistakes(extra: &str, environment: &[(&str, &str)]) -> Vec<String> {
        with(extra, environment).unwrap_err().0
    }

    #[test]
    fn a_minimal_file_is_enough_and_defaults_are_those_of_the_contract() {
        let c = with("", &[]).unwrap();
        assert_eq!(
            (c.name.as_str(), c.mysql.schema.as_str()),
            ("outboxd", "app")
        );
        assert_eq!(c.rabbitmq.max_in_flight, 4096);
        assert_eq!(c.retry, outbox_core::retry::RetryPolicy::default());
        assert_eq!(c.outbox[0].full_name(), "app.outbox");
        assert_eq!(c.outbox[0].routing_key.to_string(), "{event_type}");
    }

    #[test]
    fn every_mistake_is_named_at_once() {
        let m = mistakes(
            "[poller]\nintervall = \"5s\"\nbatch = -1\n[lease]\nttl = \"soon\"\n",
            &[],
        );
        assert_eq!(m.len(), 3, "{m:?}");
        assert!(
            m.iter()
                .any(|m| m.contains("poller.intervall") && m.contains("interval?"))
        );
        assert!(
            m.iter()
                .any(|m| m.contains("poller.batch") && m.contains("-1"))
        );
        assert!(
            m.iter()
                .any(|m| m.contains("lease.ttl") && m.contains("soon"))
        );
    }

    #[test]
    fn the_environment_overrides_the_file_also_inside_lists() {
        let c = with(
            "",
            &[
                ("OUTBOXD__POLLER__BATCH", "7"),
                ("OUTBOXD__OUTBOX__0__TABLE", "other.events"),
                ("OUTBOXD__OUTBOX__1__TABLE", "second"),
                ("OUTBOXD__OUTBOX__0__COLUMNS__ID", "event_id"),
            ],
        )
        .unwrap();
        assert_eq!(c.poller.batch, 7);
        assert_eq!(c.outbox[0].full_name(), "other.events");
        assert_eq!(c.outbox[0].columns.id, "event_id");
        assert_eq!(c.outbox[0].columns.message_id, "event_id", "follows the id");
        assert_eq!(c.outbox[1].full_name(), "app.second");
    }

    #[test]
    fn everything_may_come_from_the_environment() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("empty.toml");
        std::fs::write(&path, "").unwrap();
        let set = [
            ("OUTBOXD__MYSQL__URL", "mysql://u:p@h/db"),
            ("OUTBOXD__RABBITMQ__URL", "amqp://h"),
            ("OUTBOXD__OUTBOX__0__TABLE", "outbox"),
        ];
        let set = set.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        assert_eq!(load(Some(&path), set).unwrap().outbox.len(), 1);
    }

    #[test]
    fn secrets_are_in_no_error_and_in_no_print() {
        let m = mistakes(
            "[http]\nlisten = \"0.0.0.0:1\"\n",
            &[("OUTBOXD__MYSQL__URL", "mysql//u:secret@h")],
        );
        assert!(!m.join("\n").contains("secret"), "{m:?}");
        let c = with("[http]\ntoken = \"tok-hidden\"\n", &[]).unwrap();
        let printed = super::super::print(&c);
        assert!(
            !printed.contains("secret") && !printed.contains("hidden"),
            "{printed}"
        );
        assert!(!format!("{c:?}").contains("secret"));
        let broken = load_text("[mysql]\nurl = \"mysql://u:secret@h/db\nx")
            .unwrap_err()
            .0;
        assert!(!broken.join("").contains("secret"), "{broken:?}");
    }

    fn load_text(text: &str) -> Result<Config, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        std::fs::write(&path, text).unwrap();
        load(Some(&path), [])
    }

    #[test]
    fn the_printed_configuration_is_toml_that_names_every_key() {
        let c = with("", &[]).unwrap();
        let printed = super::super::print(&c);
        let again: Table = printed.parse().unwrap();
        assert_eq!(again["poller"]["interval"].as_str(), Some("5s"));
        assert!(printed.contains("# sweep_rate"), "{printed}");
    }

    #[test]
    fn what_does_not_fit_together_is_a_mistake() {
        let m = mistakes(
            "max_in_flight_bytes = \"1MiB\"\n",
            &[("OUTBOXD__OUTBOX__0__MAX_BODY", "2MiB")],
        );
        assert!(m[0].contains("max_in_flight_bytes"), "{m:?}");
        assert!(mistakes("[http]\nlisten = \"0.0.0.0:9470\"\n", &[])[0].contains("token"));
        let m = mistakes("", &[("OUTBOXD__OUTBOX__1__TABLE", "app.outbox")]);
        assert!(m[0].contains("twice"), "{m:?}");
        let m = mistakes("", &[("OUTBOXD__OUTBOX__0__TABLE", "a.b.c")]);
        assert!(m[0].contains("outbox.0.table"), "{m:?}");
        let m = mistakes("", &[("OUTBOXD__OUTBOX__0__ROUTING_KEY", "{event_type")]);
        assert!(
            m[0].contains("routing_key") && m[0].contains("closed"),
            "{m:?}"
        );
    }
}
