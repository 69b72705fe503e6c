//! Hazard: a picture counts as its base64. A megabyte of it would be 300,000 tokens: others wait behind it,
//! workers are asked for that nobody needs, and no prompt with a picture is found again.

use std::net::SocketAddr;
use std::process::Command;

use keyway_tests::bins::bin;
use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::openai::{CHAT, chat_stream};
use keyway_tests::process::Process;
use keyway_tests::{Cluster, Exchange, Gateway, Metrics, Response, eventually, post};
use serde_json::{Value, json};

/// What the simulated engine makes of a picture, whatever its size. Not what the gateway takes one for
/// unasked.
const IMAGE_TOKENS: u64 = 2_600;

/// A picture of so many bytes, as one that nobody can look into.
fn picture(fill: char, bytes: usize) -> Value {
    let base64 = fill.to_string().repeat(bytes);
    json!({ "type": "image_url", "image_url": { "url": format!("data:image/png;base64,{base64}") } })
}

fn text(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

fn chat(model: &str, parts: &Value, stream: bool) -> Vec<u8> {
    let messages = json!([{ "role": "user", "content": parts }]);
    json!({ "model": model, "messages": messages, "max_tokens": 2, "stream": stream })
        .to_string()
        .into_bytes()
}

async fn backlog(cluster: &Cluster) -> f64 {
    cluster.gateway.metrics().await.sum("keyway_scale_backlog_tokens", &[])
}

#[tokio::test]
async fn who_comes_behind_a_picture_does_not_wait_for_its_bytes() {
    let megabyte = picture('A', 1 << 20);
    let letters = (0..200_000).map(|i| i.to_string()).collect::<Vec<_>>().join(" ");
    for (parts, is_long) in [(json!([megabyte, text("what?")]), false), (json!([text(&letters)]), true)] {
        let cluster = Cluster::builder().fakes(1).start().await;
        cluster.fakes[0].manual();
        let body = chat("fake-model", &parts, true);
        let first = Exchange::post(PROTOCOLS[0], cluster.addr(), CHAT, &body).await;
        let call = cluster.fakes[0].call().await;
        eventually!(backlog(&cluster).await > 500.0, "it is planned for");
        let tokens = backlog(&cluster).await;
        assert_eq!(tokens > 100_000.0, is_long, "{tokens}");
        let word = Exchange::post(PROTOCOLS[0], cluster.addr(), CHAT, &chat_stream("one")).await;
        if is_long {
            let waiting = || async { cluster.gateway.metrics().await.sum("keyway_requests_waiting", &[]) };
            eventually!(waiting().await == 1.0);
            assert_eq!(cluster.fakes[0].request_count(), 1);
        } else {
            drop(cluster.fakes[0].call().await);
        }
        drop((first, call, word));
    }
}

/// A simulated engine whose pictures have a price of their own.
async fn mock() -> (Process, SocketAddr) {
    let mut command = Command::new(bin("keyway-loadtest"));
    command.args(["mock", "--base-port", "0", "--profile", "instant"]);
    command.args(["--image-tokens", &IMAGE_TOKENS.to_string()]);
    let process = Process::spawn("mock", &mut command);
    let url = process.announced("ready on ").await;
    let addr = url.trim_start_matches("http://").trim_end_matches([',', '/']).parse().expect("an address");
    (process, addr)
}

/// Tokens that were predicted and those that were found.
fn found(response: &Response) -> (u64, u64) {
    assert_eq!(response.status(), 200, "{}", response.text());
    let answer: Value = serde_json::from_str(&response.text()).expect("JSON");
    let matched = response.header("x-keyway-matched-tokens").and_then(|tokens| tokens.parse().ok());
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    (matched.expect("exposed"), cached.expect("reported"))
}

/// Asks, and waits until the answer has been learned from.
async fn ask(gateway: &Gateway, parts: &Value) -> Response {
    let answer = post(gateway.addr, CHAT, &chat("mock", parts, false)).await;
    gateway.idle().await;
    answer
}

#[tokio::test]
async fn the_same_picture_is_found_again_with_its_tokens_and_another_is_not() {
    let (mocks, mut gateway) = ([mock().await, mock().await], Gateway::builder());
    for (_, addr) in &mocks {
        gateway = gateway.worker(*addr);
    }
    let gateway = gateway.start().await;
    gateway.wait_ready(2).await;
    let words = text(&"some words that are about as long as such words are, ".repeat(40));
    // Answers tell how many bytes a token of text has, and then what a picture costs.
    ask(&gateway, &json!([words])).await;
    for fill in ['a', 'b', 'c'] {
        ask(&gateway, &json!([picture(fill, 3_000), text("and this?")])).await;
    }
    gateway.idle().await;
    let metrics: Metrics = gateway.metrics().await;
    let over = |metrics: &Metrics| metrics.sum("keyway_predictions_total", &[("result", "over")]);
    let before = over(&metrics);
    for (fill, bytes) in [('d', 900_000), ('e', 300), ('f', 40_000)] {
        let begin = json!([picture(fill, bytes), text("what is this?"), words]);
        let (predicted, cached) = found(&ask(&gateway, &begin).await);
        assert!(predicted < 100 && cached < 100, "{predicted} and {cached} of a picture that nobody knows");
        let turn = json!([picture(fill, bytes), text("what is this?"), words, text("and behind it?")]);
        let (predicted, cached) = found(&ask(&gateway, &turn).await);
        assert!(cached > IMAGE_TOKENS, "{cached}");
        assert!(predicted.abs_diff(cached) <= cached / 10, "{predicted} of {cached} at {bytes} bytes");
    }
    assert_eq!(over(&gateway.metrics().await), before);
}
