//! The command line from outside, without servers: exit codes and where output goes.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output};

const MINIMAL: &str = r#"
[mysql]
url = "mysql://app:hidden-one@127.0.0.1:1/app"
[[outbox]]
table = "outbox"
[rabbitmq]
url = "amqp://guest:hidden-two@127.0.0.1:1/%2f"
"#;

fn outboxd(dir: &Path, config: &str, args: &[&str]) -> Output {
    let file = dir.join("outboxd.toml");
    std::fs::write(&file, config).unwrap();
    Command::new(env!("CARGO_BIN_EXE_outboxd"))
        .arg("--config")
        .arg(&file)
        .args(args)
        .env_remove("OUTBOXD_CONFIG")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_wrong_configuration_exits_with_78_and_names_every_mistake() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!("{MINIMAL}\n[poller]\nintervall = \"5s\"\nbatch = -1\n");
    let out = outboxd(dir.path(), &config, &["status"]);
    assert_eq!(out.status.code(), Some(78));
    let errors = text(&out.stderr);
    assert!(
        errors.contains("poller.intervall") && errors.contains("poller.batch"),
        "{errors}"
    );
    assert!(
        out.stdout.is_empty() && !errors.contains("hidden"),
        "{errors}"
    );
}

#[test]
fn a_server_that_is_away_exits_with_69_and_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for command in [&["status"][..], &["list"], &["migrate"], &["ack-gap"]] {
        let out = outboxd(dir.path(), MINIMAL, command);
        let errors = text(&out.stderr);
        assert_eq!(out.status.code(), Some(69), "{command:?}: {errors}");
        assert!(
            errors.contains("127.0.0.1:1") && !errors.contains("hidden"),
            "{errors}"
        );
    }
}

#[test]
fn wrong_usage_exits_with_2() {
    let dir = tempfile::tempdir().unwrap();
    for command in [
        &["nonsense"][..],
        &["retry"],
        &["list", "--status", "lost"],
        &["position"],
    ] {
        assert_eq!(
            outboxd(dir.path(), MINIMAL, command).status.code(),
            Some(2),
            "{command:?}"
        );
    }
}

#[test]
fn printing_needs_no_server_and_shows_no_secret() {
    let dir = tempfile::tempdir().unwrap();
    let sql = outboxd(dir.path(), "", &["migrate", "--with-outbox", "--print"]);
    assert!(sql.status.success());
    for table in [
        "outboxd_lease",
        "outboxd_checkpoint",
        "outboxd_signal",
        "TABLE IF NOT EXISTS outbox ",
    ] {
        assert!(text(&sql.stdout).contains(table), "{table}");
    }
    let config = outboxd(dir.path(), MINIMAL, &["config", "--print"]);
    let printed = text(&config.stdout);
    assert!(
        config.status.success() && printed.contains("interval = \"5s\""),
        "{printed}"
    );
    assert!(!printed.contains("hidden"), "{printed}");
    let again = outboxd(
        dir.path(),
        &printed.replace("***", "x"),
        &["config", "--print"],
    );
    assert!(
        again.status.success(),
        "what is printed can be read back: {}",
        text(&again.stderr)
    );
}

#[test]
fn every_command_of_the_contract_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let help = text(&outboxd(dir.path(), MINIMAL, &["--help"]).stdout);
    for command in [
        "run",
        "migrate",
        "check",
        "status",
        "list",
        "show",
        "retry",
        "abandon",
        "replay",
        "pause",
        "resume",
        "sweep",
        "position",
        "ack-gap",
        "purge",
        "tail",
        "config",
        "demo",
        "completions",
    ] {
        assert!(
            help.contains(&format!("  {command} ")),
            "{command} is not in\n{help}"
        );
    }
    let completions = outboxd(dir.path(), MINIMAL, &["completions", "bash"]);
    assert!(text(&completions.stdout).contains("outboxd"));
}
