//! Hazard: a Compose file that does not start: an option that no program knows, a name that is no service, a
//! file that is not there. Without containers: the programs themselves, with the commands of the file.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use keyway_tests::bins::{bin, workspace_root};
use keyway_tests::openai::{CHAT, chat_for};
use keyway_tests::process::Process;
use keyway_tests::{Gateway, post, tools};
use serde::Deserialize;

use crate::manifests::said;

#[derive(Deserialize)]
struct Composed {
    faults: Vec<String>,
    /// Service, program, arguments.
    ours: Vec<(String, String, Vec<String>)>,
}

fn compose() -> PathBuf {
    workspace_root().join("deploy/compose")
}

/// What a file says; `None` means: skip the test.
fn read(file: &str) -> Option<Composed> {
    let python = tools::python()?;
    let script = workspace_root().join("tests/python/compose.py");
    let output = Command::new(python).arg(script).arg(compose().join(file)).output().expect("Python runs");
    assert!(output.status.success(), "{file}: {}", said(&output));
    Some(serde_json::from_slice(&output.stdout).expect("JSON"))
}

#[test]
fn what_compose_files_name_is_there_and_the_gateway_takes_its_command() {
    for file in ["fleet.yaml", "vllm.yaml"] {
        let Some(Composed { faults, ours }) = read(file) else { return };
        assert!(faults.is_empty(), "{file}: {faults:?}");
        let gateways = ours.iter().filter(|(_, program, _)| program == "keyway");
        for (name, program, command) in gateways {
            let check = Command::new(bin(program)).args(["config", "check"]).args(command).output();
            let check = check.expect("keyway runs");
            assert!(check.status.success(), "{file}: {name}: {}", said(&check));
        }
    }
}

#[test]
fn prometheus_takes_what_the_file_gives_it() {
    let Some(promtool) = tools::tool("promtool") else { return };
    let folder = tempfile::tempdir().unwrap();
    fs::copy(compose().join("prometheus.yml"), folder.path().join("prometheus.yml")).unwrap();
    for rules in ["rules.yml", "alerts.yml"] {
        fs::copy(compose().join("../prometheus").join(rules), folder.path().join(rules)).unwrap();
    }
    let check = Command::new(promtool)
        .args(["check", "config"])
        .arg(folder.path().join("prometheus.yml"))
        .output()
        .expect("promtool runs");
    assert!(check.status.success(), "{}", said(&check));
}

/// Addresses are the system's choice; all else is as in the file.
#[tokio::test]
async fn the_fleet_of_the_file_answers() {
    let Some(Composed { ours, .. }) = read("fleet.yaml") else { return };
    let command =
        |service: &str| ours.iter().find(|(name, ..)| name == service).expect("the service").2.clone();
    let mut engines = command("engines");
    for (option, value) in [("--host", "127.0.0.1"), ("--base-port", "0")] {
        let at = engines.iter().position(|word| word == option).expect("the option");
        engines[at + 1] = value.into();
    }
    engines.extend(["--kv-events-base-port", "0", "--kv-replay-base-port", "0"].map(Into::into));
    let engines = Process::spawn("engines", Command::new(bin("keyway-loadtest")).args(engines));
    engines.announced("put a gateway").await;
    let log = engines.log().join("\n");
    let mut urls = log.split("ready on ").skip(1).map(|rest| rest.split([',', '\n']).next().expect("a URL"));
    let workers = command("gateway").into_iter().filter(|word| word.starts_with("--worker="));
    let workers: Vec<String> =
        workers.map(|_| format!("--worker={}", urls.next().expect("an engine"))).collect();
    assert_eq!((workers.len(), urls.next()), (2, None), "each engine is a worker");
    let workers: Vec<&str> = workers.iter().map(String::as_str).collect();
    let gateway = Gateway::builder().args(&workers).start().await;
    gateway.wait_ready(2).await;
    let answer = post(gateway.addr, CHAT, &chat_for("mock", "hi", false)).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
}
