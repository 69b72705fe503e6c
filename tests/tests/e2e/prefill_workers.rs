//! Hazard: one of our own workers computes a prompt and another answers, and the answer differs from one
//! worker's, the KV is computed twice, or blocks stay held at either end.

use keyway_tests::openai::{CHAT, DONE};
use keyway_tests::{Client, Gateway, Metrics, Next, RealWorker, eventually, post};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
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
        CHAT => body["messages"] = json!([{ "role": "user", "content": long(i) }]),
        _ => body["prompt"] = long(i).into(),
    }
    if stream {
        body["stream_options"] = json!({ "include_usage": true });
    }
    body
}

/// What an answer says, and its usage.
async fn whole(addr: std::net::SocketAddr, path: &str, body: &Value) -> (String, Value) {
    let response = post(addr, path, body.to_string().as_bytes()).await;
    assert_eq!(response.status(), 200, "{}", response.text());
    let said = response.json();
    let choice = &said["choices"][0];
    let text = choice["message"]["content"].as_str().or(choice["text"].as_str()).expect("text");
    assert_eq!(said.get("kv_transfer_params"), None, "no client is told where KV is");
    (text.to_owned(), said["usage"].clone())
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
        let choice = &event["choices"][0];
        text += choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        if event["usage"].is_object() {
            usage = event["usage"].clone();
        }
    }
}

#[tokio::test]
async fn two_workers_say_what_one_says_and_the_prompt_is_computed_once() {
    let fleet = Fleet::start("120").await;
    let (mut requests, mut behind_blocks) = (0, 0);
    for (i, (path, stream)) in [(CHAT, false), (CHAT, true), (COMPLETIONS, false), (COMPLETIONS, true)]
        .repeat(3)
        .into_iter()
        .enumerate()
    {
        let body = request(path, i, stream);
        let ask = async |addr| {
            if stream { streamed(addr, path, &body).await } else { whole(addr, path, &body).await }
        };
        let (text, usage) = ask(fleet.gateway.addr).await;
        let (expected, _) = ask(fleet.alone.addr()).await;
        assert_eq!(text, expected, "{path} {stream}");
        let prompt = usage["prompt_tokens"].as_u64().expect("a count");
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
