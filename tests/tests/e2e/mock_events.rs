//! Hazard: the mock's KV events are read by our own code alone. Structures written from the engines'
//! documentation, in msgspec, read them over libzmq: live, replayed, in every form, with evictions.

use std::process::Command;

use keyway_tests::bins::{bin, workspace_root};
use keyway_tests::process::Process;
use keyway_tests::{eventually, tools};

async fn read_by_python(form: &str) {
    let Some(python) = tools::python() else { return };
    // So few blocks that prompts push each other out.
    let options = "mock --profile instant --base-port 0 --kv-blocks 40 --kv-events --kv-events-base-port 0 \
                   --kv-replay-base-port 0 --kv-events-format";
    let mut command = Command::new(bin("keyway-loadtest"));
    let mock = Process::spawn("mock", command.args(options.split_whitespace()).arg(form));
    let url = mock.announced("ready on ").await;
    let (events, replay) = (mock.announced("KV events on ").await, mock.announced("replay on ").await);
    let mut command = tokio::process::Command::new(python);
    let [url, events] = [&url, &events].map(|word| word.trim_end_matches(','));
    command
        .arg(workspace_root().join("tests/python/mock_kv_events.py"))
        .args([form, events, &replay, url])
        .env("NO_PROXY", "*")
        .kill_on_drop(true);
    let output = eventually::patient("the Python subscriber", command.output()).await.expect("Python runs");
    let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned();
    assert!(output.status.success(), "{said}");
}

#[tokio::test]
async fn vllm_s_structures_read_them() {
    read_by_python("vllm-map").await;
    read_by_python("vllm-array").await;
}

#[tokio::test]
async fn sglang_s_structures_read_them() {
    read_by_python("sglang-map").await;
    read_by_python("sglang-array").await;
}
