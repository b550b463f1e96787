//! `docs/configuration.md` is made from the same walk as the configuration, and a test fails when
//! it is stale. `OUTBOXD_WRITE_DOCS=1 cargo test -p outboxd configuration_page` writes it.

use std::fmt::Write as _;

use super::reader::Shown;

const HEAD: &str = "\
# Configuration

TOML, in `outboxd.toml`, or the file named by `--config` or `OUTBOXD_CONFIG`. Every key can be set
by environment: `OUTBOXD__MYSQL__URL` for `mysql.url` (upper case, `__` between levels), entries of a
list by index: `OUTBOXD__OUTBOX__0__TABLE`. The environment wins over the file. Unknown keys and bad
values are errors, and all of them are reported at once. `outboxd config --print` shows what is in
effect, secrets masked.

Durations are written like `500ms`, `5s`, `2h`, sizes like `64KiB`, `16MiB` or a number of bytes.
A secret can stand in a file instead (`url_file`), which is read again on every connect.
";

const TAIL: &str = "
## Notes

* **Templates** (`exchange`, `routing_key`): text with `{column}` of the outbox table; `{{` and `}}`
  are braces. A column that is NULL fails the row. `exchange = \"\"` is the default exchange, whose
  routing key is the queue's name.
* **Optional columns** (`headers`, `next_retry_at`, `locked_by`, `locked_until`, `last_error`,
  `created_at`, `updated_at`, `aggregate_type`) may be absent from the table: `outboxd check` and the
  log say once what then degrades. A column set to `\"\"` is not there.
* **`tracking = \"none\"`**: no status columns. The binlog is the truth; rows that fail are copied to
  `outboxd_parked` and retried from there.
* **Status columns of text**: `status_values = { pending = \"NEW\", sent = \"SENT\", failed = \"FAILED\",
  processing = \"SENDING\", abandoned = \"DEAD\" }`; all numbers or all texts. Columns of other names:
  `columns = { id = \"event_id\", payload = \"body\", headers = \"\" }`; what is not named keeps its default.
* **Keys**: one primary-key column, an integer, a string or a binary string (16 bytes print as a UUID, others
  as hex). DECIMAL and composite keys are refused by `check`.
* **Passwords in URLs** are percent-encoded: `@` is `%40`, `/` is `%2F`, `:` is `%3A`, `#` is `%23`, `%` is `%25`.
* **Several RabbitMQ nodes**: `rabbitmq.url = \"amqp://u:p@a:5672/%2f,amqp://u:p@b:5672/%2f\"`, tried in
  turn.
";

/// The page for these keys.
fn page(shown: &[Shown]) -> String {
    let mut out = HEAD.to_owned();
    // Keys of a section stand together, sections in the order in which they first appear.
    let section_of = |k: &Shown| k.path.rsplit_once('.').map_or("", |(s, _)| s).to_owned();
    let mut order: Vec<String> = Vec::new();
    for k in shown {
        if !order.contains(&section_of(k)) {
            order.push(section_of(k));
        }
    }
    let mut sorted: Vec<&Shown> = shown.iter().collect();
    sorted.sort_by_key(|k| order.iter().position(|s| *s == section_of(k)));
    let mut section = "?";
    for k in sorted {
        let (at, key) = k.path.rsplit_once('.').unwrap_or(("", &k.path));
        if at != section {
            section = at;
            let title = match at {
                "" => "Top level".to_owned(),
                "outbox.0" => "`[[outbox]]`, one or more".to_owned(),
                nested if nested.starts_with("outbox.0.") => {
                    format!("`{}` of an outbox", nested.trim_start_matches("outbox.0."))
                }
                section => format!("`[{section}]`"),
            };
            // Writing to a String cannot fail.
            let _ = write!(
                out,
                "\n## {title}\n\n| key | default | meaning |\n|---|---|---|\n"
            );
        }
        let default = match &k.value {
            Some(v) if k.is_default => format!("`{v}`"),
            Some(_) => "required".to_owned(),
            None => "unset".to_owned(),
        };
        let _ = writeln!(out, "| `{key}` | {default} | {} |", k.explained());
    }
    out.push_str(TAIL);
    out
}

#[test]
#[allow(clippy::unwrap_used)]
fn the_configuration_page_lists_every_key_with_its_default() {
    let set = [
        ("OUTBOXD__MYSQL__URL", "mysql://u:p@h/db"),
        ("OUTBOXD__RABBITMQ__URL", "amqp://h"),
        ("OUTBOXD__OUTBOX__0__TABLE", "outbox"),
    ];
    let set = set.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty.toml");
    std::fs::write(&empty, "").unwrap();
    let config = super::load(Some(&empty), set).unwrap();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");
    let wanted = page(&config.shown);
    if std::env::var_os("OUTBOXD_WRITE_DOCS").is_some() {
        std::fs::write(path, &wanted).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        written == wanted,
        "docs/configuration.md is stale: write it as config/docs.rs says"
    );
}
