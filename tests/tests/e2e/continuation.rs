//! Hazard: a stream of an engine that says no token ids breaks off, and another could have gone on with its
//! words: who goes on repeats some, leaves some out, says more than was asked for, or shows that it is
//! another.

use std::net::SocketAddr;
use std::process::Command;

use keyway_tests::bins::bin;
use keyway_tests::chaos_proxy::{ChaosProxy, Countdown};
use keyway_tests::openai::{CHAT, DONE, chat_stream, delta};
use keyway_tests::process::Process;
use keyway_tests::{Client, Cluster, End, FakeWorker, Gateway, Next, post};
use serde_json::{Value, json};

use crate::resume::{COMPLETIONS, Seen, chat, cut_at, either};

const BY_TEXT: &str = "[resume]\ncontinue_text = true\n";

/// A simulated engine that heeds `continue_final_message` and whose answers follow from their prompts alone.
async fn mock(profile: &str) -> (Process, SocketAddr) {
    let mut command = Command::new(bin("keyway-loadtest"));
    command.args(["mock", "--base-port", "0", "--output-tokens", "20", "--profile", profile]);
    let process = Process::spawn("mock", &mut command);
    let url = process.announced("ready on ").await;
    let addr = url.trim_start_matches("http://").trim_end_matches([',', '/']).parse().expect("an address");
    (process, addr)
}

#[tokio::test]
async fn another_engine_s_stream_cut_before_any_event_goes_on_from_its_text() {
    let (mut mocks, mut proxies) = (Vec::new(), Vec::new());
    let (mut gateway, countdown) = (Gateway::builder().config(BY_TEXT), Countdown::default());
    for _ in 0..3 {
        let (process, addr) = mock("instant").await;
        let proxy = ChaosProxy::sharing(addr, countdown.clone()).await;
        gateway = gateway.worker(proxy.addr());
        mocks.push(process);
        proxies.push(proxy);
    }
    let gateway = gateway.start().await;
    gateway.wait_ready(3).await;
    cut_at(&gateway, &proxies[0], CHAT, &chat(json!({"model": "mock"}))).await;
    // Without a budget of the client's, and with one that is counted as it should be.
    cut_at(&gateway, &proxies[0], CHAT, &chat(json!({"model": "mock", "max_tokens": null}))).await;
    gateway.idle().await;
    let metrics = gateway.metrics().await;
    assert!(metrics.sum("keyway_streams_resumed_total", &[("how", "text")]) >= 20.0);
}

#[tokio::test]
async fn an_engine_killed_mid_stream_is_not_seen_where_its_text_can_be_continued() {
    let mut mocks = vec![mock("h100-8b").await, mock("h100-8b").await];
    let mut gateway = Gateway::builder().config(BY_TEXT);
    for (_, addr) in &mocks {
        gateway = gateway.worker(*addr);
    }
    let gateway = gateway.start().await;
    gateway.wait_ready(2).await;
    let request = chat(json!({"model": "mock", "max_tokens": 200}));
    let whole = Seen::of(&post(gateway.addr, CHAT, &request).await).content();
    let mut client = Client::connect(gateway.addr).await;
    client.post(CHAT, &request).await;
    client.head().await;
    let mut seen = Seen::default();
    for events in 1.. {
        match client.next_event().await {
            Next::Event(data) if data == DONE => seen.done += 1,
            Next::Event(data) => seen.take(serde_json::from_str(&data).expect("JSON")),
            Next::End { end, torn } => {
                assert_eq!((end, torn), (End::Complete, false));
                break;
            }
        }
        if events == 9 {
            let workers = gateway.workers().await;
            let workers = workers.as_array().expect("a list");
            let busy = workers.iter().find(|worker| worker["requests_in_flight"].as_u64() > Some(0));
            let name = busy.and_then(|worker| worker["worker"].as_str()).expect("it streams");
            let victim = mocks.iter_mut().find(|(_, addr)| addr.to_string() == name).expect("ours");
            victim.0.kill();
        }
    }
    assert_eq!(seen.names.len(), 1);
    assert_eq!(seen.content(), whole);
    assert_eq!(gateway.metrics().await.sum("keyway_streams_resumed_total", &[("how", "text")]), 1.0);
    gateway.idle().await;
}

#[tokio::test]
async fn a_continuation_is_asked_for_as_engines_understand_it_and_shows_no_seam() {
    let cluster = Cluster::builder().fakes(2).policy("round-robin").config(BY_TEXT).start().await;
    cluster.fakes.iter().for_each(FakeWorker::manual);
    let chunk =
        |id: &str, delta: Value| json!({"id": id, "created": 1, "choices": [{"index": 0, "delta": delta}]});
    let mut client = Client::connect(cluster.addr()).await;
    let mut request: Value = serde_json::from_slice(&chat_stream("hi")).expect("JSON");
    request["max_tokens"] = 10.into();
    client.post(CHAT, request.to_string().as_bytes()).await;
    let (first, mut call) = either(&cluster).await;
    call.begin_stream().await;
    assert_eq!(client.head().await.status(), 200);
    for delta in
        [json!({"role": "assistant", "content": ""}), json!({"content": "Hello"}), json!({"content": " "})]
    {
        call.event(&chunk("a", delta.clone()).to_string()).await;
        assert_eq!(client.next_event().await.event(), chunk("a", delta).to_string());
    }
    call.cut();
    let (second, mut call) = either(&cluster).await;
    assert_ne!(first, second);
    let asked: Value = serde_json::from_slice(&call.request.body).expect("JSON");
    request["messages"]
        .as_array_mut()
        .expect("a list")
        .push(json!({"role": "assistant", "content": "Hello"}));
    request["continue_final_message"] = true.into();
    request["add_generation_prompt"] = false.into();
    request["max_tokens"] = 9.into();
    assert_eq!(asked, request, "one token was said; the white space will be said again");
    call.begin_stream().await;
    for delta in [json!({"role": "assistant", "content": ""}), json!({"content": " world"})] {
        call.event(&chunk("b", delta).to_string()).await;
    }
    call.done().await;
    let next: Value = serde_json::from_str(&client.next_event().await.event()).expect("JSON");
    assert_eq!(next, chunk("a", json!({"content": "world"})));
    assert_eq!(client.next_event().await.event(), DONE);
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn what_text_does_not_say_ends_honestly() {
    let cluster = Cluster::builder().fakes(2).policy("round-robin").config(BY_TEXT).start().await;
    cluster.fakes.iter().for_each(FakeWorker::manual);
    let said = delta("one");
    for (path, fields, says, reason) in [
        (CHAT, json!({"n": 2}), &said, "choices"),
        (CHAT, json!({"logprobs": true}), &said, "logprobs"),
        (CHAT, json!({"response_format": {"type": "json_object"}}), &said, "form"),
        (CHAT, json!({"tools": [{}], "tool_choice": "required"}), &said, "tools"),
        (CHAT, json!({"continue_final_message": true}), &said, "own_extension"),
        (COMPLETIONS, json!({"prompt": [1, 2]}), &said, "prompt_ids"),
        (COMPLETIONS, json!({"prompt": "a", "echo": true}), &said, "echo"),
        (CHAT, json!({}), &json!({"choices": [{"delta": {"reasoning_content": "hm"}}]}), "thoughts"),
    ] {
        let mut request: Value = serde_json::from_slice(&chat_stream("hi")).expect("JSON");
        request.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        let mut client = Client::connect(cluster.addr()).await;
        client.post(path, request.to_string().as_bytes()).await;
        let (_, mut call) = either(&cluster).await;
        call.begin_stream().await;
        call.event(&says.to_string()).await;
        assert_eq!(client.head().await.status(), 200);
        assert_eq!(client.next_event().await.event(), says.to_string());
        call.cut();
        assert!(client.next_event().await.event().contains("stream_lost"), "{reason}");
        assert_eq!(client.next_event().await, Next::End { end: End::Aborted, torn: false });
        let metrics = cluster.gateway.metrics().await;
        assert_eq!(metrics.sum("keyway_streams_not_resumed_total", &[("reason", reason)]), 1.0);
    }
    cluster.gateway.idle().await;
}
