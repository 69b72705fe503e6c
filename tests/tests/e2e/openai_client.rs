//! Hazard: the gateway is right by the letter and useless to the client everybody uses. The official `openai`
//! Python client against the gateway: answers, streams, and errors as its own exceptions.

use std::process::Output;

use keyway_tests::bins::workspace_root;
use keyway_tests::{Cluster, eventually, tools};

/// Runs one scenario of `tests/python/openai_client.py`; `None` when the client is not installed.
async fn scenario(name: &str, cluster: &Cluster) -> Option<Output> {
    let python = tools::python()?;
    let mut command = tokio::process::Command::new(python);
    command
        .arg(workspace_root().join("tests/python/openai_client.py"))
        .args([name, &format!("http://{}/v1", cluster.addr())])
        .env("NO_PROXY", "*")
        .kill_on_drop(true);
    let output = keyway_tests::eventually::patient("the Python client", command.output()).await;
    Some(output.expect("Python runs"))
}

fn passed(output: &Output) {
    let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned();
    assert!(output.status.success(), "{said}");
}

#[tokio::test]
async fn it_lists_models_answers_and_streams() {
    let cluster = Cluster::builder().workers(2).start().await;
    if let Some(output) = scenario("answers", &cluster).await {
        passed(&output);
    }
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn it_raises_not_found_for_an_unknown_model() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    if let Some(output) = scenario("unknown-model", &cluster).await {
        passed(&output);
    }
}

#[tokio::test]
async fn it_raises_api_error_when_a_stream_breaks() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    let break_off = async {
        let mut call = worker.call().await;
        call.begin_stream().await;
        call.say("one").await;
        call.cut();
    };
    if tools::python().is_some() {
        let (output, ()) = tokio::join!(scenario("broken-stream", &cluster), break_off);
        passed(&output.expect("installed"));
    }
}

#[tokio::test]
async fn closing_its_stream_aborts_the_worker_s_call() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    let stream_on = async {
        let mut call = worker.call().await;
        call.begin_stream().await;
        call.say("one").await;
        call.must_be_aborted().await;
    };
    if tools::python().is_some() {
        let (output, ()) = tokio::join!(scenario("closed-stream", &cluster), stream_on);
        passed(&output.expect("installed"));
        eventually!(worker.active() == 0);
        cluster.gateway.idle().await;
    }
}
