//! Who may know whom: the dependencies that keep the domain free of I/O, SQL out of the tail, and
//! both servers out of the poller.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

const SQL: [&str; 2] = ["sqlx", "sqlx-mysql"];
const STREAM: [&str; 3] = ["mysql_async", "mysql_common", "mysql_cdc"];
const BROKER: [&str; 2] = ["lapin", "amqprs"];
const RUNTIME: [&str; 3] = ["tokio", "tokio-util", "async-std"];
const OURS: [&str; 7] = [
    "outbox-core",
    "outbox-tail",
    "outbox-ledger",
    "outbox-poller",
    "outbox-testkit",
    "outboxd",
    "outbox-e2e",
];

/// Direct dependencies of a member of the workspace, development ones apart.
struct Member {
    name: String,
    normal: BTreeSet<String>,
}

fn members() -> Vec<Member> {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version",
            "1",
            "--no-deps",
            "--offline",
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "cargo metadata failed");
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let member = |package: &Value| Member {
        name: package["name"].as_str().unwrap().to_owned(),
        normal: package["dependencies"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|d| d["kind"] != "dev")
            .map(|d| d["name"].as_str().unwrap().to_owned())
            .collect(),
    };
    packages.iter().map(member).collect()
}

fn normal(name: &str) -> BTreeSet<String> {
    let found = members().into_iter().find(|m| m.name == name);
    found.unwrap_or_else(|| panic!("no crate {name}")).normal
}

fn knows_none(name: &str, forbidden: &[&[&str]]) {
    let normal = normal(name);
    for other in forbidden.iter().flat_map(|group| group.iter()) {
        assert!(!normal.contains(*other), "{name} must not know {other}");
    }
}

fn knows_of_ours(name: &str, allowed: &[&str]) {
    let ours = OURS.map(str::to_owned).into();
    let known: Vec<_> = normal(name).intersection(&ours).cloned().collect();
    assert_eq!(known, allowed, "of our own crates, {name} knows these");
}

#[test]
fn the_domain_knows_nobody() {
    knows_of_ours("outbox-core", &[]);
    knows_none("outbox-core", &[&RUNTIME, &SQL, &STREAM, &BROKER]);
}

#[test]
fn the_tail_knows_no_sql() {
    knows_of_ours("outbox-tail", &["outbox-core"]);
    knows_none("outbox-tail", &[&SQL]);
}

#[test]
fn the_ledger_knows_neither_stream_nor_broker() {
    knows_of_ours("outbox-ledger", &["outbox-core"]);
    knows_none("outbox-ledger", &[&STREAM, &BROKER]);
}

#[test]
fn the_poller_reaches_both_servers_through_ports_only() {
    knows_of_ours("outbox-poller", &["outbox-core"]);
    knows_none("outbox-poller", &[&SQL, &STREAM, &BROKER]);
}

#[test]
fn the_testkit_is_for_tests_only() {
    for member in members() {
        let tests = matches!(&*member.name, "outbox-testkit" | "outbox-e2e");
        let uses = member.normal.contains("outbox-testkit");
        assert!(tests || !uses, "{} ships the testkit", member.name);
    }
}

#[test]
fn libraries_have_typed_errors() {
    for name in [
        "outbox-core",
        "outbox-tail",
        "outbox-ledger",
        "outbox-poller",
    ] {
        knows_none(name, &[&["anyhow", "eyre"]]);
    }
}
