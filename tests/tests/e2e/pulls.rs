//! Hazard: a worker fetches what another one has cached, and the answer differs from one worker's, the
//! prompt is computed all the same, or a worker that cannot fetch costs the client its answer.

use keyway_tests::openai::{CHAT, answer, chat};
use keyway_tests::{Call, Client, FakeWorker, Gateway, Metrics, RealWorker, eventually, post};
use serde_json::{Value, json};

/// Tokens of a block of our own workers.
const BLOCK: u64 = 16;
/// Each request goes to the next worker, so the second of two equal ones to one that has not seen it.
const IN_TURN: [&str; 2] = ["--policy", "round-robin"];
const PULLS: &str = "keyway_kv_pulls_total";

/// A question of some hundred tokens that no other one begins with.
fn long(i: usize) -> String {
    format!("{i} is what is asked about here. {}", "Say what comes behind that. ".repeat(12 + i))
}

fn request(i: usize) -> Value {
    let messages = json!([{ "role": "user", "content": long(i) }]);
    json!({ "model": "keyway-random", "messages": messages, "max_tokens": 20, "temperature": 0, "ignore_eos": true })
}

/// What an answer says, the tokens of its prompt, and how many of these were cached.
async fn ask(addr: std::net::SocketAddr, i: usize) -> (String, u64, u64) {
    let response = post(addr, CHAT, request(i).to_string().as_bytes()).await;
    assert_eq!(response.status(), 200, "{}", response.text());
    let said = response.json();
    let text = said["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
    let usage = &said["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    (text, usage["prompt_tokens"].as_u64().expect("a count"), cached)
}

/// Our own workers say where they give their KV: nothing is configured but their addresses.
#[tokio::test]
async fn our_own_workers_answer_from_what_another_one_has() {
    let args = ["--kv-transfer-listen", "127.0.0.1:0"];
    let (mut first, mut second) = (RealWorker::spawn(&args), RealWorker::spawn(&args));
    let mut alone = RealWorker::spawn(&[]);
    for worker in [&mut first, &mut second, &mut alone] {
        worker.ready().await;
    }
    let urls = [first.addr(), second.addr()].map(|addr| format!("http://{addr}"));
    let gateway = Gateway::builder()
        .config("[routing]\npull = \"always\"\n")
        .args(&IN_TURN)
        .args(&["--worker", &urls[0], "--worker", &urls[1]])
        .start()
        .await;
    gateway.wait_ready(2).await;
    for i in 0..6 {
        let (expected, ..) = ask(alone.addr(), i).await;
        let (text, _, cached) = ask(gateway.addr, i).await;
        // What templates begin with is known from the second question on.
        assert!(cached < 4 * BLOCK, "{i}: {cached}");
        assert_eq!(text, expected, "{i}");
        let (text, prompt, cached) = ask(gateway.addr, i).await;
        assert_eq!((text, cached), (expected, (prompt - 1) / BLOCK * BLOCK), "{i}");
        // So that the next new question goes to the other worker.
        ask(gateway.addr, i).await;
    }
    gateway.idle().await;
    let workers = [Metrics::fetch(first.addr()).await, Metrics::fetch(second.addr()).await];
    let moved = |direction| -> f64 {
        let labels = [("direction", direction), ("outcome", "done")];
        workers.iter().map(|metrics| metrics.sum("keyway_worker_kv_transfers_total", &labels)).sum()
    };
    assert!(moved("import") >= 6.0 && moved("import") == moved("export"), "{}", moved("import"));
    for metrics in &workers {
        assert!(metrics.sum("vllm:external_prefix_cache_hits_total", &[]) > 100.0);
        assert_eq!(metrics.sum("keyway_worker_kv_blocks_held", &[]), 0.0);
    }
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.sum(PULLS, &[("outcome", "done")]), metrics.sum(PULLS, &[]));
    assert!(metrics.sum("keyway_prompt_ways_total", &[("way", "pull")]) >= 6.0);
    gateway.process.announced(&format!("pulled_from=\"{}\"", first.addr())).await;
}

/// Workers that the test answers for, each with a port at which it gives its KV.
struct Fleet {
    gateway: Gateway,
    workers: Vec<FakeWorker>,
}

impl Fleet {
    async fn start(ports: &[u16]) -> Self {
        let mut gateway = Gateway::builder().config("[routing]\npull = \"always\"\n").args(&IN_TURN);
        let mut workers = Vec::new();
        for port in ports {
            let fake = FakeWorker::start().await;
            fake.manual();
            gateway = gateway.args(&["--worker", &format!("http://{};kv-source-port={port}", fake.addr())]);
            workers.push(fake);
        }
        let gateway = gateway.start().await;
        gateway.wait_ready(ports.len()).await;
        Self { gateway, workers }
    }

    async fn ask(&self, body: &[u8]) -> Client {
        let mut client = Client::connect(self.gateway.addr).await;
        client.post(CHAT, body).await;
        client
    }

    /// Which of the workers is asked, and what.
    async fn call(&self) -> (usize, Call) {
        loop {
            for (at, worker) in self.workers.iter().enumerate() {
                if let Some(call) = worker.try_call() {
                    return (at, call);
                }
            }
            tokio::task::yield_now().await;
        }
    }

    /// One question is answered, with so many tokens cached; by whom, and what it was told of KV.
    async fn answered(&self, body: &[u8], cached: u64) -> (usize, Value) {
        let mut client = self.ask(body).await;
        let (at, call) = self.call().await;
        let told = said_of_kv(&call);
        call.respond_json(200, &answer("So.", 500, cached)).await;
        assert_eq!(client.response().await.status(), 200);
        (at, told)
    }

    async fn pulls(&self, outcome: &str) -> f64 {
        self.gateway.metrics().await.sum(PULLS, &[("outcome", outcome)])
    }
}

/// What a worker is told of KV.
fn said_of_kv(call: &Call) -> Value {
    serde_json::from_slice::<Value>(&call.request.body).unwrap()["kv_transfer_params"].clone()
}

#[tokio::test]
async fn a_worker_is_told_in_vllm_s_words_where_to_fetch() {
    let fleet = Fleet::start(&[5710, 5711]).await;
    let mut asked: Value = serde_json::from_slice(&chat(&long(30))).unwrap();
    asked["temperature"] = json!(0.25);
    let body = asked.to_string();
    let (first, told) = fleet.answered(body.as_bytes(), 0).await;
    assert_eq!(told, Value::Null, "no worker has it yet");
    let mut client = fleet.ask(body.as_bytes()).await;
    let (second, call) = fleet.call().await;
    assert_ne!(first, second);
    let told = said_of_kv(&call);
    let source = &told["remote_kv_source"];
    let id = source["kv_request_id"].as_str().expect("a name");
    assert_eq!((id.len(), &source["remote_host"]), (32, &json!("127.0.0.1")));
    assert_eq!(source["remote_port"], 5710 + first as u64);
    let mut want = asked.clone();
    want["kv_transfer_params"] = told.clone();
    assert_eq!(
        serde_json::from_slice::<Value>(&call.request.body).unwrap(),
        want,
        "all else is the client's"
    );
    call.respond_json(200, &answer("So.", 500, 496)).await;
    assert_eq!(client.response().await.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 496);
    eventually!(fleet.pulls("done").await == 1.0, "it came");
    // Both have it now.
    assert_eq!(fleet.answered(body.as_bytes(), 496).await.1, Value::Null);
    // What says itself where KV comes from, or has several answers, is left as it is.
    for (field, value) in [("n", json!(2)), ("kv_transfer_params", json!({ "mine": 1 }))] {
        let mut asked: Value = serde_json::from_slice(&chat(&format!("{field} {}", long(31)))).unwrap();
        asked[field] = value;
        for _ in 0..2 {
            let mut client = fleet.ask(asked.to_string().as_bytes()).await;
            let (_, call) = fleet.call().await;
            assert_eq!(serde_json::from_slice::<Value>(&call.request.body).unwrap(), asked);
            call.respond_json(200, &answer("So.", 500, 0)).await;
            client.response().await;
        }
    }
    assert_eq!(fleet.gateway.metrics().await.sum("keyway_predictions_total", &[("result", "over")]), 0.0);
}

/// A worker that was started without a tier for it refuses the field: it is asked without, at once.
#[tokio::test]
async fn a_worker_that_refuses_to_fetch_still_answers() {
    for status in [400, 422] {
        let fleet = Fleet::start(&[5710, 5711]).await;
        let body = chat(&long(40));
        let (first, told) = fleet.answered(&body, 0).await;
        assert_eq!(told, Value::Null);
        let mut client = fleet.ask(&body).await;
        let (second, call) = fleet.call().await;
        assert_ne!(first, second);
        assert_ne!(said_of_kv(&call), Value::Null);
        call.respond_json(status, &json!({ "error": { "message": "unknown field", "code": status } })).await;
        let (again, call) = fleet.call().await;
        assert_eq!((again, said_of_kv(&call)), (second, Value::Null), "the same worker, without");
        call.respond_json(200, &answer("So.", 500, 0)).await;
        assert_eq!(client.response().await.status(), 200);
        eventually!(fleet.pulls("refused").await == 1.0, "it has refused");
        // It fetches nothing any more, and nothing is fetched from it.
        for i in 50..53 {
            for _ in 0..2 {
                assert_eq!(fleet.answered(&chat(&long(i)), 0).await.1, Value::Null);
            }
        }
        let refuses = "refuses to fetch what other workers have cached";
        fleet.gateway.process.announced(refuses).await;
        let told = |line: &&String| line.contains(refuses);
        assert_eq!(fleet.gateway.process.log().iter().filter(told).count(), 1);
        let metrics = fleet.gateway.metrics().await;
        assert_eq!(metrics.sum("keyway_retries_total", &[]), 0.0, "no other worker was asked");
    }
}

/// A request that is refused for its own sake is refused, and nothing is held against the worker.
#[tokio::test]
async fn a_refusal_of_the_request_itself_reaches_the_client() {
    let fleet = Fleet::start(&[5710, 5711]).await;
    let body = chat(&long(42));
    fleet.answered(&body, 0).await;
    let mut client = fleet.ask(&body).await;
    for _ in 0..3 {
        // With the field, without it, and at the other worker.
        let (_, call) = fleet.call().await;
        let wrong = json!({ "error": { "message": "top_p must be below 1", "code": 400 } });
        call.respond_json(400, &wrong).await;
    }
    let response = client.response().await;
    assert_eq!(
        (response.status(), &response.json()["error"]["message"]),
        (400, &json!("top_p must be below 1"))
    );
    assert_eq!(fleet.pulls("refused").await, 0.0);
}

/// What was to come and did not is no error of the index, and after three times in a row nothing is asked
/// for.
#[tokio::test]
async fn where_nothing_comes_nothing_is_fetched_any_more() {
    let fleet = Fleet::start(&[5710, 5711]).await;
    let mut missed = [0, 0];
    for i in 0..10 {
        let body = chat(&format!("{i} {}", long(43)));
        let (first, told) = fleet.answered(&body, 0).await;
        assert_eq!(told, Value::Null);
        let (second, told) = fleet.answered(&body, 0).await;
        assert_ne!(first, second);
        missed[second] += u32::from(told != Value::Null);
        if i % 2 == 1 {
            // So that the next new one goes to the other worker.
            fleet.answered(&body, 496).await;
        }
    }
    assert!(missed.iter().all(|times| *times <= 3) && missed.iter().sum::<u32>() >= 3, "{missed:?}");
    eventually!(fleet.pulls("missed").await == f64::from(missed.iter().sum::<u32>()), "each is counted");
    let metrics = fleet.gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_cache_capacity_corrections_total", &[]), 0.0);
    fleet.gateway.process.announced("three times in a row").await;
}

#[tokio::test]
async fn never_is_never() {
    let mut gateway = Gateway::builder().config("[routing]\npull = \"never\"\n").args(&IN_TURN);
    let workers = [FakeWorker::start().await, FakeWorker::start().await];
    for worker in &workers {
        worker.manual();
        gateway = gateway.args(&["--worker", &format!("http://{};kv-source-port=5710", worker.addr())]);
    }
    let gateway = gateway.start().await;
    gateway.wait_ready(2).await;
    let fleet = Fleet { gateway, workers: workers.into() };
    let body = chat(&long(44));
    for _ in 0..4 {
        assert_eq!(fleet.answered(&body, 0).await.1, Value::Null);
    }
    assert_eq!(fleet.gateway.metrics().await.sum(PULLS, &[]), 0.0);
}
