//! The crate graph the project promises, asserted: which crate may use which. The load tester compiles no
//! engine, the routing core no runtime, and nothing depends on the tests.
#![allow(clippy::expect_used, reason = "helpers of tests fail the test by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use keyway_tests::bins::workspace_root;
use serde_json::Value;

/// Each crate and the crates of this workspace it may depend on, in any section of its manifest.
const GRAPH: [(&str, &[&str]); 12] = [
    ("keyway-wire", &[]),
    ("keyway-lines", &[]),
    ("keyway-clients", &[]),
    ("keyway-zmq", &["keyway-wire"]),
    ("keyway-core", &["keyway-wire"]),
    ("keyway-text", &["keyway-wire"]),
    ("keyway-apis", &["keyway-text"]),
    ("keyway-kernels", &[]),
    (
        "keyway-worker",
        &[
            "keyway-wire",
            "keyway-lines",
            "keyway-clients",
            "keyway-zmq",
            "keyway-text",
            "keyway-apis",
            "keyway-kernels",
        ],
    ),
    (
        "keyway",
        &[
            "keyway-wire",
            "keyway-lines",
            "keyway-clients",
            "keyway-core",
            "keyway-text",
            "keyway-apis",
            "keyway-worker",
        ],
    ),
    ("keyway-loadtest", &["keyway-wire", "keyway-zmq", "keyway-core"]),
    (
        "keyway-tests",
        &[
            "keyway",
            "keyway-core",
            "keyway-kernels",
            "keyway-loadtest",
            "keyway-text",
            "keyway-wire",
            "keyway-worker",
            "keyway-zmq",
        ],
    ),
];

/// Crates that the routing core, which does no I/O, must not use.
const RUNTIME: [&str; 6] = ["tokio", "hyper", "hyper-util", "h2", "futures-util", "tower"];

/// Each crate's dependencies by name.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--offline", "--no-deps", "--format-version", "1"])
        .current_dir(workspace_root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let name = |v: &Value| v["name"].as_str().expect("a name").to_owned();
    let packages = metadata["packages"].as_array().expect("packages");
    packages
        .iter()
        .map(|p| (name(p), p["dependencies"].as_array().into_iter().flatten().map(name).collect()))
        .collect()
}

#[test]
fn each_crate_depends_only_on_what_it_may() {
    let found = dependencies();
    let promised: BTreeMap<&str, &[&str]> = GRAPH.into_iter().collect();
    assert_eq!(
        found.keys().map(String::as_str).collect::<Vec<_>>(),
        promised.keys().copied().collect::<Vec<_>>(),
        "the crates of the workspace are those of the graph"
    );
    for (name, dependencies) in &found {
        let ours = dependencies.iter().map(String::as_str).filter(|d| promised.contains_key(d));
        let wrong: Vec<&str> = ours.filter(|d| !promised[name.as_str()].contains(d)).collect();
        assert!(wrong.is_empty(), "{name} must not depend on {wrong:?}");
    }
}

#[test]
fn the_routing_core_uses_no_runtime() {
    let found = dependencies();
    for name in ["keyway-core", "keyway-wire", "keyway-kernels"] {
        let wrong: Vec<_> = RUNTIME.iter().filter(|r| found[name].contains(**r)).collect();
        assert!(wrong.is_empty(), "{name} must not depend on {wrong:?}");
    }
}
