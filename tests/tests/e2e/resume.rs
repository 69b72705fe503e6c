//! Hazard: a worker breaks off a stream that another could have gone on with, or the one who goes on says
//! something twice, leaves something out, or shows that it is another.

use keyway_tests::chaos_proxy::{ChaosProxy, Countdown};
use keyway_tests::h2_client::H2Client;
use keyway_tests::openai::{CHAT, DONE, chat_stream, delta};
use keyway_tests::{
    Call, Client, Cluster, End, FakeWorker, Gateway, Next, RealWorker, Response, eventually, post,
};
use serde_json::{Value, json};

pub(crate) const COMPLETIONS: &str = "/v1/completions";
const OFF: &str = "[resume]\nenabled = false\n";

/// What a client makes of a stream.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Seen {
    text: String,
    /// Every chunk's, so that another worker's would show.
    pub(crate) names: Vec<String>,
    roles: usize,
    logprobs: Vec<Value>,
    finish: Vec<String>,
    usage: Vec<Value>,
    pub(crate) done: usize,
}

impl Seen {
    pub(crate) fn of(response: &Response) -> Self {
        assert_eq!((response.status(), &response.end), (200, &End::Complete), "{}", response.text());
        let mut seen = Self::default();
        let text = response.text();
        for event in text.split_terminator("\n\n") {
            match event.strip_prefix("data: ").expect("data") {
                DONE => seen.done += 1,
                data => seen.take(serde_json::from_str(data).expect("JSON")),
            }
        }
        seen
    }

    pub(crate) fn take(&mut self, mut chunk: Value) {
        assert!(chunk["error"].is_null() && chunk["keyway"].is_null(), "{chunk}");
        let name = format!(
            "{} {} {} {}",
            chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]
        );
        if !self.names.contains(&name) {
            self.names.push(name);
        }
        if let Some(usage) = chunk["usage"].as_object_mut() {
            // How much was cached is a matter of the worker.
            usage.remove("prompt_tokens_details");
            self.usage.push(chunk["usage"].take());
        }
        let Some(choice) = chunk["choices"].get_mut(0) else { return };
        self.roles += usize::from(choice["delta"]["role"].is_string());
        self.text += choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        self.finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
        if !choice["logprobs"].is_null() {
            self.logprobs.push(choice["logprobs"].take());
        }
    }

    /// What does not differ between two answers to one question.
    pub(crate) fn content(self) -> Self {
        Self { names: Vec::new(), ..self }
    }
}

fn body(fields: Value) -> Vec<u8> {
    let mut body = json!({
        "model": "keyway-random", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 9,
        "ignore_eos": true,
    });
    body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
    body.to_string().into_bytes()
}

pub(crate) fn chat(fields: Value) -> Vec<u8> {
    let mut fields = fields;
    fields["messages"] = json!([{"role": "user", "content": "Tell me where a stream may be cut."}]);
    body(fields)
}

async fn three_breakable_workers(config: &str) -> Cluster {
    Cluster::builder().workers(3).breakable().config(config).start().await
}

async fn resumed(cluster: &Cluster) -> f64 {
    resumed_by(&cluster.gateway).await
}

async fn resumed_by(gateway: &Gateway) -> f64 {
    gateway.metrics().await.sum("keyway_streams_resumed_total", &[])
}

/// Cuts the stream before each of its events in turn.
async fn cut_everywhere(cluster: &Cluster, path: &str, body: &[u8]) {
    cut_at(&cluster.gateway, &cluster.proxies[0], path, body).await;
}

pub(crate) async fn cut_at(gateway: &Gateway, proxy: &ChaosProxy, path: &str, body: &[u8]) {
    let ask = async || Seen::of(&post(gateway.addr, path, body).await);
    let whole = ask().await.content();
    assert_eq!((whole.done, whole.finish.len(), whole.usage.len()), (1, 1, 1), "{whole:?}");
    let mut events = 0;
    loop {
        let before = resumed_by(gateway).await;
        proxy.cut_after_events(events);
        let seen = ask().await;
        if proxy.cuts() {
            break;
        }
        assert_eq!(seen.names.len(), 1, "cut before event {events}: {:?}", seen.names);
        assert_eq!(seen.content(), whole, "cut before event {events} of {}", String::from_utf8_lossy(body));
        assert_eq!(resumed_by(gateway).await, before + 1.0);
        events += 1;
    }
    // Role, tokens, end, usage, [DONE].
    assert!(events >= 10, "only {events} events were cut");
}

#[tokio::test]
async fn a_stream_cut_before_any_event_is_the_stream_that_was_not() {
    let cluster = three_breakable_workers("").await;
    cut_everywhere(&cluster, CHAT, &chat(json!({"temperature": 0}))).await;
    let seeded = json!({"temperature": 1.2, "seed": 7, "logprobs": true, "top_logprobs": 1});
    cut_everywhere(&cluster, CHAT, &chat(seeded)).await;
    let completion = json!({"prompt": "Cut", "temperature": 1.2, "seed": 8, "logprobs": 0});
    cut_everywhere(&cluster, COMPLETIONS, &body(completion)).await;
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn over_http2_a_cut_connection_is_not_seen_either() {
    let cluster = Cluster::builder().workers(3).breakable().http2().start().await;
    cut_everywhere(&cluster, CHAT, &chat(json!({"temperature": 0}))).await;
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn a_sampled_stream_without_a_seed_goes_on_with_the_gateway_s() {
    let cluster = three_breakable_workers("").await;
    // What was said before the cut is repeated to the next worker: had it another seed, ids and text would
    // not agree with the tokens that follow, and greedy continuations of different beginnings differ.
    let request = chat(json!({"temperature": 1.5}));
    let mut cut = 0.0;
    for events in [1, 2, 3, 4, 7, 10, 11] {
        cluster.proxies[0].cut_after_events(events);
        let seen = Seen::of(&post(cluster.addr(), CHAT, &request).await);
        // Tokens that end inside a character share an event with the next, so a stream may be shorter than
        // the cut; none has fewer than a role, a text, an end, a usage and `[DONE]`.
        let was_cut = !cluster.proxies[0].cuts();
        assert!(was_cut || events > 4, "no cut after {events} events");
        cut += f64::from(u8::from(was_cut));
        assert_eq!((seen.names.len(), seen.roles, seen.done), (1, 1, 1));
        assert_eq!(seen.usage[0]["completion_tokens"], 9);
    }
    assert_eq!(resumed(&cluster).await, cut);
}

#[tokio::test]
async fn two_killed_workers_are_not_seen() {
    let mut cluster = Cluster::builder().workers(3).start().await;
    let request = chat(json!({"temperature": 0.9, "seed": 3, "max_tokens": 8000}));
    let whole = Seen::of(&post(cluster.addr(), CHAT, &request).await).content();
    let mut client = Client::connect(cluster.addr()).await;
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
        if events == 3 || events == 2000 {
            // Whoever streams now; its connection is the only one that counts.
            let workers = cluster.gateway.workers().await;
            let busy = workers
                .as_array()
                .expect("a list")
                .iter()
                .find(|w| w["requests_in_flight"].as_u64() > Some(0));
            let Some(name) = busy.and_then(|worker| worker["worker"].as_str().map(str::to_owned)) else {
                continue;
            };
            let victim = cluster.workers.iter_mut().find(|w| w.addr().to_string() == name).expect("ours");
            victim.process.kill();
        }
    }
    assert_eq!(seen.names.len(), 1);
    assert_eq!(seen.content(), whole);
    assert!(resumed(&cluster).await >= 1.0);
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn what_cannot_be_resumed_ends_honestly_and_says_why() {
    let cluster = three_breakable_workers("").await;
    for (fields, reason) in [
        (json!({"n": 2}), "choices"),
        (json!({"response_format": {"type": "json_object"}}), "form"),
        (json!({"keyway": {"seed": 1}}), "own_extension"),
    ] {
        cluster.proxies[0].cut_after_events(2);
        let response = post(cluster.addr(), CHAT, &chat(fields)).await;
        assert!(!cluster.proxies[0].cuts());
        assert_eq!(response.end, End::Aborted, "{reason}");
        let text = response.text();
        assert!(text.contains("\"error\"") && !text.contains(DONE), "{reason}: {text}");
        // Who asks for ids is given them.
        assert_eq!(text.contains("\"keyway\""), reason == "own_extension", "{text}");
        let metrics = cluster.gateway.metrics().await;
        assert_eq!(metrics.sum("keyway_streams_not_resumed_total", &[("reason", reason)]), 1.0);
    }
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn a_worker_of_other_numerics_does_not_go_on() {
    let (mut workers, mut proxies) = (Vec::new(), Vec::new());
    let (mut gateway, countdown) = (Gateway::builder(), Countdown::default());
    for args in [&[][..], &["--quantize", "int8"]] {
        let mut worker = RealWorker::spawn(args);
        worker.ready().await;
        let proxy = ChaosProxy::sharing(worker.addr(), countdown.clone()).await;
        gateway = gateway.worker(proxy.addr());
        workers.push(worker);
        proxies.push(proxy);
    }
    let gateway = gateway.start().await;
    gateway.wait_ready(2).await;
    proxies[0].cut_after_events(3);
    let response = post(gateway.addr, CHAT, &chat(json!({"temperature": 0}))).await;
    assert_eq!(response.end, End::Aborted);
    assert!(response.text().contains("stream_lost") && !response.text().contains(DONE));
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_streams_not_resumed_total", &[("reason", "no_worker")]), 1.0);
    gateway.idle().await;
}

#[tokio::test]
async fn a_stream_that_loses_every_worker_is_given_up() {
    let cluster = Cluster::of_fakes(6, "round-robin").await;
    cluster.fakes.iter().for_each(FakeWorker::manual);
    let mut client = Client::connect(cluster.addr()).await;
    client.post(CHAT, &chat_stream("hi")).await;
    for _ in 0..4 {
        let calls = cluster.fakes.iter().map(|fake| Box::pin(fake.call()));
        let (mut call, ..) = futures_util::future::select_all(calls).await;
        call.begin_stream().await;
        call.cut();
    }
    assert_eq!(client.head().await.status(), 200);
    assert!(client.next_event().await.event().contains("stream_lost"));
    assert_eq!(cluster.fakes.iter().map(FakeWorker::request_count).sum::<usize>(), 4);
    let metrics = cluster.gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_streams_not_resumed_total", &[("reason", "attempts")]), 1.0);
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn switched_off_nothing_is_resumed() {
    let cluster = three_breakable_workers(OFF).await;
    for events in [0, 1, 5] {
        cluster.proxies[0].cut_after_events(events);
        let response = post(cluster.addr(), CHAT, &chat(json!({"temperature": 0}))).await;
        assert_eq!(response.end, End::Aborted);
        assert!(response.text().contains("stream_lost") && !response.text().contains(DONE));
    }
    assert_eq!(resumed(&cluster).await, 0.0);
}

/// The next call, at whichever of two workers.
pub(crate) async fn either(cluster: &Cluster) -> (usize, Call) {
    tokio::select! {
        call = cluster.fakes[0].call() => (0, call),
        call = cluster.fakes[1].call() => (1, call),
    }
}

#[tokio::test]
async fn any_engine_s_stream_begins_again_while_the_client_has_nothing_of_it() {
    let cluster = Cluster::of_fakes(2, "round-robin").await;
    cluster.fakes.iter().for_each(FakeWorker::manual);
    let request = chat_stream("hi");
    let mut client = Client::connect(cluster.addr()).await;
    client.post(CHAT, &request).await;
    let (first, mut call) = either(&cluster).await;
    call.begin_stream().await;
    assert_eq!(client.head().await.status(), 200);
    call.chunk(b"data: {\"half").await;
    call.cut();
    let (second, mut call) = either(&cluster).await;
    assert_ne!(first, second);
    assert_eq!(call.request.body, request, "the same request, byte for byte");
    call.begin_stream().await;
    call.say("whole").await;
    assert_eq!(client.next_event().await.event(), delta("whole").to_string());
    // From here on the client has something, and this engine cannot go on from there.
    call.cut();
    assert!(client.next_event().await.event().contains("stream_lost"));
    assert_eq!(client.next_event().await, Next::End { end: End::Aborted, torn: false });
    assert_eq!(cluster.fakes.iter().map(FakeWorker::request_count).sum::<usize>(), 2);
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_streams_resumed_total", &[("how", "restart")]), 1.0);
    assert_eq!(metrics.sum("keyway_streams_not_resumed_total", &[("reason", "engine")]), 1.0);
}

#[tokio::test]
async fn streams_that_break_all_at_once_are_resumed_within_the_retry_budget() {
    // As many as the budget has at once, and twice as much again: time may not fill it up before all have
    // asked.
    const BROKEN: usize = 300;
    let cluster = Cluster::of_fakes(2, "round-robin").await;
    cluster.fakes.iter().for_each(FakeWorker::manual);
    let mut client = H2Client::connect(cluster.addr()).await;
    let (mut open, mut calls) = (Vec::new(), [Vec::new(), Vec::new()]);
    for _ in 0..2 * BROKEN {
        let mut exchange = client.post(CHAT, &chat_stream("hi")).await;
        let (at, mut call) = either(&cluster).await;
        call.begin_stream().await;
        exchange.head().await;
        calls[at].push(call);
        open.push(exchange);
    }
    let [broken, _others] = calls;
    assert_eq!(broken.len(), BROKEN);
    cluster.fakes.iter().for_each(FakeWorker::answer);
    broken.into_iter().for_each(Call::cut);
    // What is not read has no place in the connection's window, and waits.
    for mut exchange in open {
        tokio::spawn(async move { while matches!(exchange.next_event().await, Next::Event(_)) {} });
    }
    let reason = async |reason: &str| {
        cluster.gateway.metrics().await.sum("keyway_streams_not_resumed_total", &[("reason", reason)])
    };
    eventually!(resumed(&cluster).await + reason("budget").await == BROKEN as f64);
    assert!(resumed(&cluster).await >= 100.0 && reason("budget").await > 0.0);
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_search() {
    let cluster = Cluster::of_fakes(2, "round-robin").await;
    cluster.fakes.iter().for_each(FakeWorker::manual);
    let mut client = Client::connect(cluster.addr()).await;
    client.post(CHAT, &chat_stream("hi")).await;
    let (_, mut call) = either(&cluster).await;
    call.begin_stream().await;
    client.head().await;
    call.cut();
    let (second, call) = either(&cluster).await;
    drop(client);
    call.must_be_aborted().await;
    eventually!(cluster.fakes[second].active() == 0);
    cluster.gateway.idle().await;
}
