//! Hazard: one of our own workers computes a prompt and another answers, and the answer differs from one
//! worker's, the KV is computed twice, or blocks stay held at either end.

use keyway_tests::openai::{CHAT, DONE};
use keyway_tests::{Client, Gateway, Metrics, Next, RealWorker, eventually, post};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";
/// Tokens of a block.
const BLOCK: u64 = 16;

/// A worker for each part, and one that is asked by itself.
struct Fleet {
    gateway: Gateway,
    prefill: RealWorker,
    decode: RealWorker,
    alone: RealWorker,
}

impl Fleet {
    /// Every prompt that may be computed apart is.
    async fn start(keep: &str) -> Self {
        let args = ["--kv-transfer-listen", "127.0.0.1:0", "--kv-transfer-keep", keep];
        let (mut prefill, mut decode) = (RealWorker::spawn(&args), RealWorker::spawn(&args));
        let mut alone = RealWorker::spawn(&[]);
        for worker in [&mut prefill, &mut decode, &mut alone] {
            worker.ready().await;
        }
        let gateway = Gateway::builder()
            .config("[routing]\nsplit = \"always\"\nprefill_from_tokens = 1\n")
            .args(&["--worker", &format!("http://{};role=prefill", prefill.addr())])
            .args(&["--worker", &format!("http://{};role=decode", decode.addr())])
            .start()
            .await;
        gateway.wait_ready(2).await;
        Self { gateway, prefill, decode, alone }
    }

    /// Waits until neither worker holds a block, nor keeps one for the other.
    async fn hold_nothing(&self) {
        self.gateway.idle().await;
        for worker in [&self.prefill, &self.decode] {
            eventually!(
                held(&Metrics::fetch(worker.addr()).await) == 0.0,
                "nothing is held; {:?}",
                held(&Metrics::fetch(worker.addr()).await)
            );
        }
    }
}

fn held(metrics: &Metrics) -> f64 {
    ["keyway_worker_kv_blocks_used", "keyway_worker_kv_blocks_held", "keyway_worker_kv_transfers_kept"]
        .iter()
        .map(|name| metrics.sum(name, &[]))
        .sum()
}

/// A question of some hundred tokens that no other one begins with.
fn long(i: usize) -> String {
    format!("{i} is the number of this question. {}", "Tell me more of it. ".repeat(10 + i))
}

fn request(path: &str, i: usize, stream: bool) -> Value {
    let mut body = json!({ "max_tokens": 20, "temperature": 0, "ignore_eos": true, "stream": stream, "model": "keyway-random" });
    match path {
        CHAT | MESSAGES => body["messages"] = json!([{ "role": "user", "content": long(i) }]),
        RESPONSES => {
            body["input"] = long(i).into();
            body["max_output_tokens"] = body.as_object_mut().expect("an object").remove("max_tokens").into();
        }
        _ => body["prompt"] = long(i).into(),
    }
    if path == MESSAGES {
        // More than the one token that the first leg asks for.
        body["thinking"] = json!({ "type": "enabled", "budget_tokens": 1024 });
        body["max_tokens"] = 1025.into();
        body["stop_sequences"] = json!([" "]);
    }
    if stream && matches!(path, CHAT | COMPLETIONS) {
        body["stream_options"] = json!({ "include_usage": true });
    }
    body
}

/// What an answer says, and its usage.
async fn whole(addr: std::net::SocketAddr, path: &str, body: &Value) -> (String, Value) {
    let response = post(addr, path, body.to_string().as_bytes()).await;
    assert_eq!(response.status(), 200, "{}", response.text());
    let said = response.json();
    assert_eq!(said.get("kv_transfer_params"), None, "no client is told where KV is");
    (text_of(&said), said["usage"].clone())
}

/// The text of a whole answer, or of a piece of one, in any API.
fn text_of(said: &Value) -> String {
    let choice = &said["choices"][0];
    let blocks = [&said["content"], &said["output"]].into_iter().filter_map(Value::as_array).flatten();
    let parts =
        blocks.flat_map(|block| block["content"].as_array().cloned().unwrap_or_else(|| vec![block.clone()]));
    let parts: Vec<Value> = parts.collect();
    let pieces =
        [&choice["message"]["content"], &choice["text"], &choice["delta"]["content"], &said["delta"]["text"]];
    let response_piece = (said["type"] == "response.output_text.delta").then(|| &said["delta"]);
    let pieces = pieces.into_iter().chain(response_piece).chain(parts.iter().map(|part| &part["text"]));
    pieces.filter_map(Value::as_str).collect()
}

/// Tokens of the prompt, and how many of them were cached, by a usage of any API.
fn prompt_of(usage: &Value) -> (u64, u64) {
    let count = |name: &str| usage[name].as_u64().unwrap_or(0);
    let details = [&usage["prompt_tokens_details"], &usage["input_tokens_details"]].into_iter();
    let within: u64 = details.filter_map(|details| details["cached_tokens"].as_u64()).sum();
    let beside = count("cache_read_input_tokens");
    (count("prompt_tokens") + count("input_tokens") + beside, within + beside)
}

/// The same of a stream.
async fn streamed(addr: std::net::SocketAddr, path: &str, body: &Value) -> (String, Value) {
    let mut client = Client::connect(addr).await;
    client.post(path, body.to_string().as_bytes()).await;
    assert_eq!(client.head().await.status(), 200);
    let (mut text, mut usage) = (String::new(), Value::Null);
    loop {
        let Next::Event(event) = client.next_event().await else { panic!("the stream broke") };
        if event == DONE {
            return (text, usage);
        }
        let event: Value = serde_json::from_str(&event).expect("JSON");
        text += &text_of(&event);
        for said in [&event["usage"], &event["message"]["usage"], &event["response"]["usage"]] {
            if prompt_of(said).0 > 0 {
                usage = said.clone();
            }
        }
        if matches!(
            event["type"].as_str(),
            Some("message_stop" | "response.completed" | "response.incomplete")
        ) {
            return (text, usage);
        }
    }
}

#[tokio::test]
async fn two_workers_say_what_one_says_and_the_prompt_is_computed_once() {
    let fleet = Fleet::start("120").await;
    let (mut requests, mut behind_blocks) = (0, 0);
    let paths = [CHAT, COMPLETIONS, MESSAGES, RESPONSES].into_iter();
    let ways: Vec<_> = paths.flat_map(|path| [(path, false), (path, true)]).collect();
    for (i, (path, stream)) in ways.repeat(2).into_iter().enumerate() {
        let body = request(path, i, stream);
        let ask = async |addr| {
            if stream { streamed(addr, path, &body).await } else { whole(addr, path, &body).await }
        };
        let (text, usage) = ask(fleet.gateway.addr).await;
        let (expected, _) = ask(fleet.alone.addr()).await;
        assert_eq!(text, expected, "{path} {stream}");
        assert!(path == MESSAGES || !text.is_empty(), "{path} {stream}");
        let (prompt, _) = prompt_of(&usage);
        assert!(prompt > 10 * BLOCK, "{usage}");
        behind_blocks += prompt - (prompt - 1) / BLOCK * BLOCK;
        requests += 1;
    }
    fleet.hold_nothing().await;
    let (prefill, decode) =
        (Metrics::fetch(fleet.prefill.addr()).await, Metrics::fetch(fleet.decode.addr()).await);
    let count = |metrics: &Metrics, direction| {
        metrics.sum("keyway_worker_kv_transfers_total", &[("direction", direction), ("outcome", "done")])
    };
    assert_eq!(
        (count(&prefill, "export"), count(&decode, "import")),
        (f64::from(requests), f64::from(requests))
    );
    let tokens = |name: &str| decode.sum(&format!("keyway_worker_{name}_tokens_total"), &[]);
    let computed = tokens("prompt") - tokens("cached") - tokens("external");
    assert_eq!(computed, behind_blocks as f64, "all full blocks came, but for those that were there");
    assert!(tokens("external") > 1000.0);
    assert_eq!(decode.sum("vllm:external_prefix_cache_hits_total", &[]), tokens("external"));
    let legs = fleet.gateway.metrics().await;
    assert_eq!(legs.sum("keyway_prefill_legs_total", &[("outcome", "done")]), f64::from(requests));
}

/// The client is told what was found where its prompt was computed, in every API's way.
#[tokio::test]
async fn what_was_cached_is_told_as_of_one_worker() {
    let fleet = Fleet::start("120").await;
    for (i, path) in [CHAT, COMPLETIONS, MESSAGES, RESPONSES].into_iter().enumerate() {
        for stream in [false, true] {
            let body = request(path, 30 + 2 * i + usize::from(stream), stream);
            let ask = async || {
                let addr = fleet.gateway.addr;
                if stream { streamed(addr, path, &body).await.1 } else { whole(addr, path, &body).await.1 }
            };
            let (prompt, _) = prompt_of(&ask().await);
            let usage = ask().await;
            let full = (prompt - 1) / BLOCK * BLOCK;
            assert_eq!(prompt_of(&usage), (prompt, full), "{path} {stream}: {usage}");
        }
    }
    let legs = fleet.gateway.metrics().await;
    assert_eq!(legs.sum("keyway_prefill_legs_total", &[("outcome", "done")]), 16.0);
    fleet.hold_nothing().await;
}

/// What the first leg said is of no use any more: its worker is gone, or the KV is.
#[tokio::test]
async fn a_worker_that_dies_between_the_legs_costs_nothing_but_time() {
    let mut fleet = Fleet::start("120").await;
    let mut first = request(CHAT, 1, false);
    first["max_tokens"] = 1.into();
    first["kv_transfer_params"] = json!({ "do_remote_decode": true, "do_remote_prefill": false });
    let said = post(fleet.prefill.addr(), CHAT, first.to_string().as_bytes()).await.json();
    let mut second = request(CHAT, 1, false);
    second["kv_transfer_params"] = said["kv_transfer_params"].clone();
    assert_eq!(second["kv_transfer_params"]["do_remote_prefill"], true, "{said}");
    assert!(held(&Metrics::fetch(fleet.prefill.addr()).await) > 0.0, "it is kept");
    fleet.prefill.process.kill();
    let (expected, _) = whole(fleet.alone.addr(), CHAT, &request(CHAT, 1, false)).await;
    assert_eq!(whole(fleet.decode.addr(), CHAT, &second).await.0, expected);
    let outcome =
        |metrics: Metrics, outcome| metrics.sum("keyway_worker_kv_transfers_total", &[("outcome", outcome)]);
    assert_eq!(outcome(Metrics::fetch(fleet.decode.addr()).await, "unreachable"), 1.0);
    // Through the gateway the worker that is left answers all by itself.
    let (expected, _) = whole(fleet.alone.addr(), CHAT, &request(CHAT, 2, false)).await;
    assert_eq!(whole(fleet.gateway.addr, CHAT, &request(CHAT, 2, false)).await.0, expected);
    eventually!(held(&Metrics::fetch(fleet.decode.addr()).await) == 0.0, "nothing is held");
}

#[tokio::test]
async fn clients_that_leave_at_any_moment_leave_nothing_held() {
    let fleet = Fleet::start("0.2").await;
    for i in 0..12 {
        let mut client = Client::connect(fleet.gateway.addr).await;
        client.post(CHAT, request(CHAT, i, i % 2 == 0).to_string().as_bytes()).await;
        if i % 3 == 0 {
            // In the midst of the answer, rather than before it.
            client.head().await;
        }
        for _ in 0..i * 20 {
            tokio::task::yield_now().await;
        }
        drop(client);
    }
    fleet.hold_nothing().await;
    let body = request(CHAT, 20, false);
    let (expected, _) = whole(fleet.alone.addr(), CHAT, &body).await;
    assert_eq!(whole(fleet.gateway.addr, CHAT, &body).await.0, expected);
}

#[tokio::test]
async fn what_is_asked_of_kv_in_the_wrong_way_is_refused_with_the_field() {
    let fleet = Fleet::start("120").await;
    let keep = json!({ "do_remote_decode": true });
    for (field, value) in [("stream", json!(true)), ("n", json!(2))] {
        let mut body = request(CHAT, 1, false);
        body[field] = value;
        body["kv_transfer_params"] = keep.clone();
        let response = post(fleet.prefill.addr(), CHAT, body.to_string().as_bytes()).await;
        assert_eq!(
            (response.status(), &response.json()["error"]["param"]),
            (400, &json!("kv_transfer_params"))
        );
    }
    let mut body = request(CHAT, 1, false);
    body["kv_transfer_params"] = keep;
    let response = post(fleet.alone.addr(), CHAT, body.to_string().as_bytes()).await;
    assert_eq!(response.status(), 400, "a worker without a listener keeps nothing");
    // Words of another engine: the prompt is computed.
    body["kv_transfer_params"] = json!({ "do_remote_prefill": true, "remote_block_ids": [[1]], "remote_host": "10.0.0.1", "remote_port": 5600 });
    let (expected, _) = whole(fleet.alone.addr(), CHAT, &request(CHAT, 1, false)).await;
    assert_eq!(whole(fleet.decode.addr(), CHAT, &body).await.0, expected);
    let metrics = Metrics::fetch(fleet.decode.addr()).await;
    assert_eq!(metrics.sum("keyway_worker_kv_transfers_total", &[("outcome", "foreign")]), 1.0);
}
