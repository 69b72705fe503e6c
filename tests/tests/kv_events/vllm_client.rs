//! The worker's events as vLLM's clients read them: Python's msgspec with vLLM's structures, over libzmq.

use keyway_tests::bins::workspace_root;
use keyway_tests::eventually::patient;
use keyway_tests::{RealWorker, tools};

async fn read_by_python(format: &str) {
    let Some(python) = tools::python() else { return };
    let any = "tcp://127.0.0.1:0";
    let flags = ["--kv-events", any, "--kv-replay", any, "--kv-events-topic", "kv@test"];
    let tight = ["--num-kv-blocks", "40", "--kv-events-format", format];
    let mut worker = RealWorker::spawn(&[&flags[..], &tight].concat());
    worker.ready().await;
    let events = worker.process.announced("KV events on ").await;
    let replay = worker.process.announced("KV replay on ").await;
    let mut command = tokio::process::Command::new(python);
    command
        .arg(workspace_root().join("tests/python/kv_events.py"))
        .args([format, &events, &replay, &format!("http://{}", worker.addr())])
        .env("NO_PROXY", "*")
        .kill_on_drop(true);
    let output = patient("the Python client", command.output()).await.expect("Python runs");
    let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned();
    assert!(output.status.success(), "{said}");
}

#[tokio::test]
async fn maps_replays_and_snapshots_are_vllms() {
    read_by_python("map").await;
}

#[tokio::test]
async fn arrays_replays_and_snapshots_are_vllms() {
    read_by_python("array").await;
}
