//! The mock fleet from outside: raw requests over real sockets, engines that take no time unless a test says
//! otherwise.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use keyway_loadtest::{
    engine_model::{Profile, named},
    mock::{First, Fleet, KvEvents, Names, Options},
};
use keyway_wire::kv_event::{
    EventBatch, KvEvent, WireFormat,
    frames::{Live, ReplayReply, ReplayRequest},
};
use serde_json::{Value, json};
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _, SubSocket, ZmqMessage};

fn options(profile: Profile) -> Options {
    Options {
        host: "127.0.0.1".into(),
        workers: 1,
        base_port: 0,
        model: "mock".into(),
        profile,
        time_scale: 1.0,
        output_tokens: 5,
        image_tokens: 0,
        metrics: Names::Vllm,
        render: false,
        first: First::None,
        kv_transfer: None,
        prefill: 0,
        faults: Vec::new(),
        kv_events: None,
    }
}

fn instant() -> Options {
    options(named("instant").unwrap())
}

#[tokio::test]
async fn embeddings_are_of_their_texts_and_each_is_computed_as_a_prompt() {
    let fleet = Fleet::start(&instant()).await.unwrap();
    let caller = Caller::of(&fleet);
    let body = json!({"model": "mock", "input": ["one text that is long", "another"], "dimensions": 4});
    let (status, answer) = caller.text(Method::POST, "/v1/embeddings", &body.to_string()).await;
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!((status, answer["data"].as_array().unwrap().len()), (StatusCode::OK, 2));
    assert_eq!(answer["usage"]["prompt_tokens"], 6 + 2);
    let metrics = caller.text(Method::GET, "/metrics", "").await.1;
    assert!(metrics.contains("vllm:prompt_tokens_total") && metrics.contains(" 8"), "{metrics}");
    let (status, _) = caller.text(Method::POST, "/v1/embeddings", r#"{"model":"mock","input":[]}"#).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
}

struct Caller {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
}

impl Caller {
    fn of(fleet: &Fleet) -> Self {
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { client, url: fleet.addresses[0].url.clone() }
    }

    async fn send(&self, method: Method, path: &str, body: &str) -> http::Response<Incoming> {
        let request = Request::builder().method(method).uri(format!("{}{path}", self.url));
        self.client.request(request.body(Full::new(Bytes::from(body.to_owned()))).unwrap()).await.unwrap()
    }

    async fn text(&self, method: Method, path: &str, body: &str) -> (StatusCode, String) {
        let answer = self.send(method, path, body).await;
        let status = answer.status();
        let bytes = answer.into_body().collect().await.map(http_body_util::Collected::to_bytes).unwrap();
        (status, String::from_utf8(bytes.to_vec()).unwrap())
    }

    async fn chat(&self, body: &Value) -> (StatusCode, Value) {
        let (status, text) = self.text(Method::POST, "/v1/chat/completions", &body.to_string()).await;
        (status, serde_json::from_str(&text).unwrap())
    }

    /// The value of a series without labels of its own.
    async fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.text(Method::GET, "/metrics", "").await;
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap();
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }
}

fn events(text: &str) -> Vec<Value> {
    let data = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

fn question(words: usize) -> Value {
    json!({"model": "mock", "messages": [{"role": "user", "content": "word ".repeat(words)}], "max_tokens": 6})
}

#[tokio::test]
async fn a_stream_has_every_token_then_usage_then_done() {
    let fleet = Fleet::start(&instant()).await.unwrap();
    let caller = Caller::of(&fleet);
    let mut body = question(40);
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    for cached in [0, 48] {
        let (status, text) = caller.text(Method::POST, "/v1/chat/completions", &body.to_string()).await;
        assert_eq!(status, StatusCode::OK);
        assert!(text.ends_with("data: [DONE]\n\n"));
        let events = events(&text);
        let words: Vec<_> =
            events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
        // The role comes first, with no text.
        assert_eq!((words.len(), words[0], words[1].len()), (7, "", 4));
        assert_eq!(events[6]["choices"][0]["finish_reason"], "length");
        assert_eq!(events[6]["object"], "chat.completion.chunk");
        let usage = &events[7]["usage"];
        // <|user|> 2, 200 bytes 50, <|end|> 2, <|assistant|> 4.
        assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(58), &json!(6)));
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], cached);
    }
    assert_eq!(caller.metric("vllm:prefix_cache_hits_total").await, 48.0);
    assert_eq!(caller.metric("vllm:prefix_cache_queries_total").await, 116.0);
    assert_eq!(caller.metric("vllm:time_to_first_token_seconds_count").await, 2.0);
    assert_eq!(caller.metric("vllm:num_requests_running").await, 0.0);
}

#[tokio::test]
async fn the_next_turn_finds_the_answer_cached() {
    let fleet = Fleet::start(&instant()).await.unwrap();
    let caller = Caller::of(&fleet);
    let mut body = question(20);
    body["max_tokens"] = 100.into();
    let (_, first) = caller.chat(&body).await;
    assert_eq!(first["object"], "chat.completion");
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({"role": "user", "content": "go on"}));
    let (_, second) = caller.chat(&body).await;
    // 33 prompt tokens and 100 of the answer, of which the last was never computed: 132 tokens, 8 whole
    // blocks.
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], 128);
}

#[tokio::test]
async fn mistakes_get_openai_errors() {
    let fleet = Fleet::start(&instant()).await.unwrap();
    let caller = Caller::of(&fleet);
    let (status, error) = caller.chat(&json!({"model": "other", "messages": []})).await;
    assert_eq!((status, &error["error"]["code"]), (StatusCode::NOT_FOUND, &json!("model_not_found")));
    let (status, _) = caller.chat(&json!({"messages": []})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let mut long = question(10);
    long["max_tokens"] = 100_000_000.into();
    long["max_tokens"] = 2_000_000.into();
    let (status, error) = caller.chat(&long).await;
    assert_eq!(
        (status, &error["error"]["code"]),
        (StatusCode::BAD_REQUEST, &json!("context_length_exceeded"))
    );
    assert_eq!(caller.text(Method::GET, "/nothing", "").await.0, StatusCode::NOT_FOUND);
    assert_eq!(caller.text(Method::GET, "/health", "").await.0, StatusCode::OK);
    let (_, models) = caller.text(Method::GET, "/v1/models", "").await;
    assert_eq!(serde_json::from_str::<Value>(&models).unwrap()["data"][0]["id"], "mock");
}

#[tokio::test]
async fn refusals_and_cuts_strike_their_share() {
    let faults = vec!["status=429x0.5".parse().unwrap(), "cut=3".parse().unwrap()];
    let fleet = Fleet::start(&Options { faults, ..instant() }).await.unwrap();
    let caller = Caller::of(&fleet);
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(caller.chat(&question(5)).await.0.as_u16());
    }
    assert_eq!(statuses, [200, 429, 200, 429]);
    let mut body = question(5);
    body["stream"] = true.into();
    let mut answer = caller.send(Method::POST, "/v1/chat/completions", &body.to_string()).await;
    let mut seen = Vec::new();
    let broke = loop {
        match answer.body_mut().frame().await {
            Some(Ok(frame)) => seen.extend_from_slice(frame.data_ref().unwrap()),
            Some(Err(_)) => break true,
            None => break false,
        }
    };
    let seen = String::from_utf8(seen).unwrap();
    assert!(broke && !seen.contains("[DONE]"));
    // The role and three tokens.
    assert_eq!(events(&seen).len(), 4);
    assert_eq!(caller.text(Method::DELETE, "/mock/faults", "").await.0, StatusCode::OK);
    assert_eq!(caller.chat(&question(5)).await.0, StatusCode::OK);
}

#[tokio::test]
async fn a_client_that_leaves_frees_the_engine() {
    // A step takes a minute: nothing comes out while the test looks.
    let mut slow = named("h100-8b").unwrap();
    slow.cost.step_ns = 60e9;
    let fleet = Fleet::start(&Options { time_scale: 600.0, ..options(slow) }).await.unwrap();
    let caller = Caller::of(&fleet);
    let mut body = question(5);
    body["stream"] = true.into();
    body["max_tokens"] = 10_000.into();
    let mut answer = caller.send(Method::POST, "/v1/chat/completions", &body.to_string()).await;
    answer.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(caller.metric("vllm:num_requests_running").await, 1.0);
    drop(answer);
    let gone = async {
        while caller.metric("vllm:num_requests_running").await > 0.0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), gone).await.expect("the request is aborted");
    let (_, metrics) = caller.text(Method::GET, "/metrics", "").await;
    assert!(metrics.contains("finished_reason=\"abort\"} 1"), "{metrics}");
}

#[tokio::test]
async fn a_worker_that_died_comes_back_empty() {
    let fleet = Fleet::start(&instant()).await.unwrap();
    let caller = Caller::of(&fleet);
    caller.chat(&question(40)).await;
    let (status, listed) = caller.text(Method::POST, "/mock/faults", "die@0s..200ms").await;
    assert_eq!((status, listed.starts_with("die@")), (StatusCode::OK, true));
    let request = || Request::get(format!("{}/health", caller.url)).body(Full::default()).unwrap();
    let refused = async { while caller.client.request(request()).await.is_ok() {} };
    tokio::time::timeout(Duration::from_secs(30), refused).await.expect("nothing listens");
    let back = async { while caller.client.request(request()).await.is_err() {} };
    tokio::time::timeout(Duration::from_secs(30), back).await.expect("it listens again");
    let (_, answer) = caller.chat(&question(40)).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

async fn replay(url: &str, from: u64) -> Vec<(u64, EventBatch)> {
    request_batches(url, ReplayRequest::From(from)).await
}

async fn request_batches(url: &str, request: ReplayRequest) -> Vec<(u64, EventBatch)> {
    let mut socket = DealerSocket::new();
    socket.connect(url).await.unwrap();
    let frames = request.frames().map(Bytes::from).to_vec();
    socket.send(ZmqMessage::try_from(frames).unwrap()).await.unwrap();
    let mut batches = Vec::new();
    loop {
        let frames = socket.recv().await.unwrap().into_vec();
        match ReplayReply::parse(&frames).unwrap() {
            ReplayReply::Batch { seq, payload } => {
                let decoded = EventBatch::decode(payload).unwrap();
                assert_eq!(decoded.malformed, 0);
                batches.push((seq, decoded.batch));
            }
            ReplayReply::End => return batches,
        }
    }
}

#[tokio::test]
async fn kv_events_are_live_and_can_be_replayed_in_every_form() {
    for format in [WireFormat::VllmMap, WireFormat::VllmArray, WireFormat::SglangMap, WireFormat::SglangArray]
    {
        let kv_events = Some(KvEvents { base_port: 0, replay_base_port: 0, format });
        let fleet = Fleet::start(&Options { kv_events, ..instant() }).await.unwrap();
        let (events, asked) = fleet.addresses[0].kv.clone().unwrap();
        let mut subscriber = SubSocket::new();
        subscriber.connect(&events).await.unwrap();
        subscriber.subscribe("").await.unwrap();
        let caller = Caller::of(&fleet);
        // The subscription takes effect at some moment: whatever was sent before it is in the replay.
        let mut words = 20;
        let live = loop {
            words += 20;
            caller.chat(&question(words)).await;
            let received = tokio::time::timeout(Duration::from_millis(200), subscriber.recv()).await;
            if let Ok(message) = received {
                break message.unwrap().into_vec();
            }
        };
        let live = Live::parse(&live).unwrap();
        caller.chat(&question(words + 20)).await;
        let batches = replay(&asked, 0).await;
        assert_eq!(
            batches.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(),
            (0..batches.len() as u64).collect::<Vec<_>>()
        );
        assert_eq!(EventBatch::decode(live.payload).unwrap().batch, batches[live.seq as usize].1);
        let KvEvent::BlockStored(first) = &batches[0].1.events[0] else { panic!("{batches:?}") };
        assert_eq!((first.block_size, first.token_ids.len()), (16, 16 * first.block_hashes.len()));
        assert_eq!(first.token_ids[0], u32::from_le_bytes(*b"<|us"));
        // The second prompt begins as the first: its new blocks hang below one of those.
        let KvEvent::BlockStored(second) = &batches[1].1.events[0] else { panic!("{batches:?}") };
        assert!(second.parent_block_hash.as_ref().is_some_and(|parent| first.block_hashes.contains(parent)));
        assert_eq!(replay(&asked, 1).await[0].0, 1);
    }
}

/// Whether something listens at a ZMQ address.
async fn listens(url: &str) -> bool {
    let address = url.trim_start_matches("tcp://");
    tokio::net::TcpStream::connect(address).await.is_ok()
}

#[tokio::test]
async fn a_dead_worker_s_event_sockets_are_closed_and_open_again_with_it() {
    let kv_events = Some(KvEvents { base_port: 0, replay_base_port: 0, format: WireFormat::VllmMap });
    let fleet = Fleet::start(&Options { kv_events, ..instant() }).await.unwrap();
    let (events, asked) = fleet.addresses[0].kv.clone().unwrap();
    let caller = Caller::of(&fleet);
    caller.chat(&question(40)).await;
    assert!(!replay(&asked, 0).await.is_empty() && listens(&events).await);
    assert_eq!(caller.text(Method::POST, "/mock/faults", "die@0s..1s").await.0, StatusCode::OK);
    let closed = async { while listens(&events).await || listens(&asked).await {} };
    tokio::time::timeout(Duration::from_secs(30), closed).await.expect("the sockets close");
    let opened = async { while !(listens(&events).await && listens(&asked).await) {} };
    tokio::time::timeout(Duration::from_secs(30), opened).await.expect("the sockets open");
    // A new engine: nothing is kept, and numbers begin anew.
    assert!(replay(&asked, 0).await.is_empty());
    let health = || Request::get(format!("{}/health", caller.url)).body(Full::default()).unwrap();
    let alive = async { while caller.client.request(health()).await.is_err() {} };
    tokio::time::timeout(Duration::from_secs(30), alive).await.expect("it listens");
    caller.chat(&question(40)).await;
    assert_eq!(replay(&asked, 0).await[0].0, 0);
}

#[tokio::test]
async fn a_snapshot_holds_what_is_cached() {
    let kv_events = Some(KvEvents { base_port: 0, replay_base_port: 0, format: WireFormat::VllmMap });
    let fleet = Fleet::start(&Options { kv_events, ..instant() }).await.unwrap();
    let (_, asked) = fleet.addresses[0].kv.clone().unwrap();
    let caller = Caller::of(&fleet);
    caller.chat(&question(400)).await;
    let snapshot = request_batches(&asked, ReplayRequest::Snapshot).await;
    assert_eq!(snapshot[0].1.events, [KvEvent::AllBlocksCleared]);
    let stored = |batches: &[(u64, EventBatch)]| -> Vec<_> {
        let events = batches.iter().flat_map(|(_, batch)| batch.events.clone());
        events
            .filter_map(|e| if let KvEvent::BlockStored(s) = e { Some(s.block_hashes) } else { None })
            .flatten()
            .collect()
    };
    let told = stored(&replay(&asked, 0).await);
    assert!(told.len() > 5);
    assert_eq!(stored(&snapshot), told);
    // It goes on from the first batch that it does not cover.
    let next = replay(&asked, 0).await.last().unwrap().0 + 1;
    assert!(snapshot.iter().all(|(seq, _)| *seq == next));
}

#[tokio::test]
async fn prompts_are_rendered_where_that_is_asked_for() {
    let ask = json!({ "model": "mock", "prompt": "abcde", "max_tokens": 3 }).to_string();
    let messages = json!([{ "role": "user", "content": "why?" }]);
    let chat = json!({ "model": "mock", "messages": messages, "stream": true }).to_string();
    let (render, of_chat) = ("/v1/completions/render", "/v1/chat/completions/render");
    let fleet = Fleet::start(&Options { render: true, ..instant() }).await.unwrap();
    let caller = Caller::of(&fleet);
    let (status, text) = caller.text(Method::POST, render, &ask).await;
    assert_eq!(status, StatusCode::OK);
    let said: Value = serde_json::from_str(&text).unwrap();
    let ids = json!([u32::from_le_bytes(*b"abcd"), u32::from(b'e')]);
    assert_eq!((&said[0]["token_ids"], &said[0]["sampling_params"]["max_tokens"]), (&ids, &json!(3)));
    let (_, text) = caller.text(Method::POST, of_chat, &chat).await;
    let said: Value = serde_json::from_str(&text).unwrap();
    let (_, answer) = caller.chat(&json!({ "model": "mock", "messages": messages })).await;
    assert_eq!(
        said["token_ids"].as_array().unwrap().len() as u64,
        answer["usage"]["prompt_tokens"].as_u64().unwrap()
    );
    assert_eq!(caller.text(Method::POST, render, "{}").await.0, StatusCode::BAD_REQUEST);
    let plain = Fleet::start(&instant()).await.unwrap();
    assert_eq!(Caller::of(&plain).text(Method::POST, render, &ask).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn metrics_have_the_names_that_were_asked_for() {
    let fleet = Fleet::start(&Options { metrics: Names::Sglang, ..instant() }).await.unwrap();
    let caller = Caller::of(&fleet);
    caller.chat(&question(40)).await;
    let (_, text) = caller.text(Method::GET, "/metrics", "").await;
    assert!(!text.contains("vllm:"));
    assert_eq!(caller.metric("sglang:num_requests_total").await, 1.0);
    assert_eq!(caller.metric("sglang:generation_tokens_total").await, 6.0);
    assert!(caller.metric("sglang:token_usage").await < 1.0);
    assert!(text.contains("sglang:time_to_first_token_seconds_bucket{model_name=\"mock\""), "{text}");
    // Tokens that wait are on a page of their own.
    let (_, page) = caller.text(Method::GET, "/v1/loads?include=core&format=prometheus", "").await;
    assert!(page.contains("\nsglang_num_waiting_uncached_tokens{dp_rank=\"0\"} 0\n"), "{page}");
    let (_, page) = caller.text(Method::GET, "/v1/loads", "").await;
    let page: serde_json::Value = serde_json::from_str(&page).unwrap();
    assert_eq!(page["loads"][0]["num_waiting_uncached_tokens"], 0, "{page}");
}

/// The first frame of a stream whose engine does nothing, if there is one.
async fn before_the_first_token(first: First, path: &str, body: &str) -> String {
    let fleet =
        Fleet::start(&Options { first, faults: vec!["stall".parse().unwrap()], ..instant() }).await.unwrap();
    let mut answer = Caller::of(&fleet).send(Method::POST, path, body).await.into_body();
    let frame = answer.frame().await.unwrap().unwrap();
    String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap()
}

#[tokio::test]
async fn a_stream_says_before_its_first_token_what_it_was_told_to() {
    let chat = r#"{"messages":[{"role":"user","content":"hi"}],"stream":true}"#;
    let (text, input) = (r#"{"prompt":"hi","stream":true}"#, r#"{"input":"hi","stream":true}"#);
    for (path, body, want) in [
        ("/v1/chat/completions", chat, "\"role\":\"assistant\""),
        ("/v1/completions", text, "\"text\":\"\""),
        ("/v1/responses", input, "event: response.created\n"),
        ("/v1/messages", chat, "event: message_start\n"),
    ] {
        let said = before_the_first_token(First::Role, path, body).await;
        assert!(said.contains(want), "{path}: {said}");
        assert_eq!(before_the_first_token(First::Comment, path, body).await, ": keep-alive\n\n", "{path}");
    }
}

#[tokio::test]
async fn what_is_said_first_changes_nothing_of_the_answer() {
    let body = r#"{"messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":3}"#;
    let mut answers = Vec::new();
    for first in [First::None, First::Role, First::Comment] {
        let fleet = Fleet::start(&Options { first, ..instant() }).await.unwrap();
        let (_, text) = Caller::of(&fleet).text(Method::POST, "/v1/messages", body).await;
        answers.push(text.replace(": keep-alive\n\n", ""));
    }
    assert!(answers[0].ends_with("event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"));
    assert_eq!(answers[0].matches("text_delta").count(), 3);
    assert_eq!(answers, vec![answers[0].clone(); 3]);
}

/// What a worker found of the prompt, and what its answer says of where the KV is.
async fn asked_with_kv(caller: &Caller, kv: Option<Value>) -> (u64, Value) {
    let mut body = question(400);
    body["max_tokens"] = 1.into();
    if let Some(kv) = kv {
        body["kv_transfer_params"] = kv;
    }
    let (status, said) = caller.chat(&body).await;
    assert_eq!(status, StatusCode::OK, "{said}");
    let cached = said["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (cached, said["kv_transfer_params"].clone())
}

#[tokio::test]
async fn kv_moves_between_workers_as_requests_ask() {
    let transfer = Some(keyway_core::Transfer { handover_ms: 1.0, ms_per_token: 0.001 });
    let fleet = Fleet::start(&Options { workers: 5, kv_transfer: transfer, ..instant() }).await.unwrap();
    let callers: Vec<_> =
        (0..5).map(|i| Caller { url: fleet.addresses[i].url.clone(), ..Caller::of(&fleet) }).collect();
    let (_, models) = callers[0].text(Method::GET, "/v1/models", "").await;
    let models: Value = serde_json::from_str(&models).unwrap();
    let port = models["data"][0]["kv_source_port"].as_u64().expect("a port");
    assert!(fleet.addresses[0].url.ends_with(&format!(":{port}")));
    let source = |port: u64| {
        Some(
            json!({"remote_kv_source": {"kv_request_id": "1", "remote_host": "127.0.0.1", "remote_port": port}}),
        )
    };
    assert_eq!(asked_with_kv(&callers[1], source(port)).await, (0, Value::Null), "nobody has it yet");
    let all = asked_with_kv(&callers[1], None).await.0;
    assert!(all > 300, "{all}");
    // Worker 0 fetches from 1, and has it from then on; a port that is nobody's has nothing.
    let port_of = |i: usize| fleet.addresses[i].url.rsplit_once(':').unwrap().1.parse::<u64>().unwrap();
    assert_eq!(asked_with_kv(&callers[0], source(1)).await.0, 0);
    assert_eq!(asked_with_kv(&callers[2], source(port_of(1))).await.0, all);
    assert_eq!(asked_with_kv(&callers[2], None).await.0, all);
    // One computes it for another, which asks once.
    let mut long = question(500);
    long["max_tokens"] = 1.into();
    let keep = json!({"do_remote_decode": true, "do_remote_prefill": false});
    long["kv_transfer_params"] = keep;
    let (_, said) = callers[0].chat(&long).await;
    let kept = said["kv_transfer_params"].clone();
    assert_eq!(
        (&kept["do_remote_prefill"], &kept["remote_num_tokens"]),
        (&json!(true), &said["usage"]["prompt_tokens"])
    );
    long["kv_transfer_params"] = kept;
    let cached = |said: &Value| said["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let prompt = said["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(cached(&callers[3].chat(&long).await.1), prompt - 1, "all but the last token has come");
    assert_eq!(cached(&callers[4].chat(&long).await.1), 0, "it was fetched");
}

#[tokio::test]
async fn without_transfers_what_is_said_of_kv_is_not_heeded() {
    let fleet = Fleet::start(&Options { workers: 2, ..instant() }).await.unwrap();
    let caller = Caller::of(&fleet);
    let (_, models) = caller.text(Method::GET, "/v1/models", "").await;
    assert!(!models.contains("kv_source_port"), "{models}");
    let keep = json!({"do_remote_decode": true, "do_remote_prefill": false});
    assert_eq!(asked_with_kv(&caller, Some(keep)).await, (0, Value::Null));
}
