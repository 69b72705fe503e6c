//! Hazard: SGLang's workers for a part of requests are asked at once, and a leg that fails, is slow, or is
//! left by its client makes the other one wait for nobody; a worker that can compute no prompt is asked to
//! compute one; more requests wait at it than it admits; a client chooses where KV comes from.

use keyway_tests::openai::{CHAT, FAKE_MODEL, answer, chat, chat_stream, delta, usage_chunk};
use keyway_tests::{Call, Client, FakeWorker, Gateway, eventually, get, post};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";

/// SGLang's workers for each part, all answered by the test.
struct Fleet {
    gateway: Gateway,
    prefill: Vec<FakeWorker>,
    decode: Vec<FakeWorker>,
}

/// Says what an SGLang says of itself.
fn speak(fake: &FakeWorker, mode: &str, window: u32) {
    let models =
        json!({ "object": "list", "data": [{ "id": FAKE_MODEL, "object": "model", "owned_by": "sglang" }] });
    let info = json!({ "model_path": "m", "disaggregation_mode": mode, "disaggregation_bootstrap_port": 9123,
                       "max_running_requests": null, "internal_states": [{ "effective_max_running_requests_per_dp": window }] });
    let kind = [("content-type", "application/json")];
    fake.answer_at("/v1/models", 200, &kind, &models.to_string());
    fake.answer_at("/server_info", 200, &kind, &info.to_string());
}

impl Fleet {
    async fn start(prefill: usize, decode: usize) -> Self {
        Self::with_window(prefill, decode, 64, "").await
    }

    async fn with_window(prefill: usize, decode: usize, window: u32, toml: &str) -> Self {
        let mut gateway = Gateway::builder().config(toml);
        let mut workers = [Vec::new(), Vec::new()];
        for (role, count) in [(0, prefill), (1, decode)] {
            for _ in 0..count {
                let fake = FakeWorker::start().await;
                fake.manual();
                speak(&fake, ["prefill", "decode"][role], window);
                gateway = gateway.worker(fake.addr());
                workers[role].push(fake);
            }
        }
        let gateway = gateway.start().await;
        gateway.wait_ready(prefill + decode).await;
        let [prefill, decode] = workers;
        Self { gateway, prefill, decode }
    }

    async fn ask(&self, path: &str, body: &[u8]) -> Client {
        let mut client = Client::connect(self.gateway.addr).await;
        client.post(path, body).await;
        client
    }

    /// Both legs of a request, and at which workers they are.
    async fn legs(&self) -> ((usize, Call), (usize, Call)) {
        (call_at(&self.prefill).await, call_at(&self.decode).await)
    }

    async fn counted(&self, outcome: &str) -> f64 {
        self.gateway.metrics().await.sum("keyway_prefill_legs_total", &[("outcome", outcome)])
    }

    /// A whole request that goes well, as proof that nothing is held against anybody.
    async fn serves(&self) {
        let mut client = self.ask(CHAT, &chat("And this?")).await;
        let ((_, prefill), (_, decode)) = self.legs().await;
        prefill.respond_json(200, &answer("x", 500, 0)).await;
        decode.respond_json(200, &answer("Me.", 500, 0)).await;
        assert_eq!(client.response().await.status(), 200);
        self.gateway.idle().await;
    }
}

/// The next call at any of some workers.
async fn call_at(workers: &[FakeWorker]) -> (usize, Call) {
    loop {
        let mut arrived = workers.iter().enumerate().map(|(at, worker)| (at, worker.try_call()));
        if let Some((at, Some(call))) = arrived.find(|(_, call)| call.is_some()) {
            return (at, call);
        }
        tokio::task::yield_now().await;
    }
}

fn body(call: &Call) -> Value {
    serde_json::from_slice(&call.request.body).unwrap()
}

fn room(call: &Call) -> u64 {
    body(call)["bootstrap_room"].as_u64().unwrap()
}

/// The client's body with the fields by which its legs meet, in front.
fn with_room(asked: &[u8], room: u64) -> Vec<u8> {
    let met = format!(r#"{{"bootstrap_host":"127.0.0.1","bootstrap_port":9123,"bootstrap_room":{room},"#);
    [met.as_bytes(), &asked[1..]].concat()
}

/// What a worker streams that computes a prompt.
async fn stream_first_token(mut call: Call, cached_tokens: u64) {
    call.begin_stream().await;
    call.event(&delta("M").to_string()).await;
    call.event(&usage_chunk(500, cached_tokens).to_string()).await;
    call.done().await;
}

#[tokio::test]
async fn both_legs_have_the_client_s_body_and_a_room_and_the_client_has_one_answer() {
    let fleet = Fleet::start(1, 1).await;
    let completion =
        json!({ "model": FAKE_MODEL, "prompt": "Short?", "max_tokens": 9 }).to_string().into_bytes();
    let mut rooms = Vec::new();
    for (path, asked) in [(CHAT, chat("Short?")), (COMPLETIONS, completion)] {
        let mut client = fleet.ask(path, &asked).await;
        let ((_, prefill), (_, decode)) = fleet.legs().await;
        rooms.push(room(&prefill));
        assert_eq!(prefill.request.body, with_room(&asked, rooms[rooms.len() - 1]));
        assert_eq!(prefill.request.body, decode.request.body);
        prefill.respond_json(200, &answer("x", 500, 320)).await;
        decode.respond_json(200, &answer("Me.", 500, 0)).await;
        let response = client.response().await;
        let said = response.json();
        assert_eq!((response.status(), &said["choices"][0]["message"]["content"]), (200, &"Me.".into()));
        assert_eq!(said["usage"]["prompt_tokens_details"]["cached_tokens"], 320, "one request has one usage");
    }
    assert_ne!(rooms[0], rooms[1]);
    fleet.gateway.idle().await;
    let metrics = fleet.gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_prefill_legs_total", &[("outcome", "done")]), 2.0);
    assert_eq!(metrics.sum("keyway_prompt_tokens_total", &[]), 1000.0, "a prompt is counted once");
    let decode = fleet.decode[0].addr().to_string();
    assert_eq!(metrics.sum("keyway_predictions_total", &[("worker", &decode)]), 0.0);
}

#[tokio::test]
async fn a_stream_is_the_answering_worker_s_whichever_is_the_first_to_speak() {
    let fleet = Fleet::start(1, 1).await;
    for prefill_first in [true, false] {
        let mut asked: Value = serde_json::from_slice(&chat_stream("Who?")).unwrap();
        asked["stream_options"] = json!({ "include_usage": true });
        let mut client = fleet.ask(CHAT, asked.to_string().as_bytes()).await;
        let ((_, prefill), (_, mut decode)) = fleet.legs().await;
        assert_eq!(body(&prefill)["stream"], true, "the body is the same");
        let slow = if prefill_first {
            stream_first_token(prefill, 128).await;
            None
        } else {
            Some(prefill)
        };
        decode.begin_stream().await;
        decode.event(&delta("Me.").to_string()).await;
        assert_eq!(client.head().await.status(), 200);
        let told: Value = serde_json::from_str(&client.next_event().await.event()).unwrap();
        assert_eq!(
            told["choices"][0]["delta"]["content"], "Me.",
            "it waits for no leg that has done its part"
        );
        if let Some(prefill) = slow {
            stream_first_token(prefill, 0).await;
        }
        decode.event(&usage_chunk(500, 7).to_string()).await;
        let told: Value = serde_json::from_str(&client.next_event().await.event()).unwrap();
        if prefill_first {
            assert_eq!(told["usage"]["prompt_tokens_details"]["cached_tokens"], 128);
        }
        decode.done().await;
        assert_eq!(client.next_event().await.event(), "[DONE]");
        fleet.gateway.idle().await;
    }
    eventually!(fleet.counted("done").await == 2.0, "both legs are read to their end");
}

#[tokio::test]
async fn a_client_chooses_no_room_and_no_host() {
    let fleet = Fleet::start(1, 1).await;
    let asked = json!({ "model": FAKE_MODEL, "messages": [], "bootstrap_host": "evil", "bootstrap_port": 1, "bootstrap_room": 7,
                        "disagg_prefill_dp_rank": 3 });
    let _client = fleet.ask(CHAT, asked.to_string().as_bytes()).await;
    let ((_, prefill), (_, decode)) = fleet.legs().await;
    let want = json!({ "model": FAKE_MODEL, "messages": [], "bootstrap_host": "127.0.0.1", "bootstrap_port": 9123,
                       "bootstrap_room": room(&prefill) });
    assert_eq!((body(&prefill), body(&decode)), (want.clone(), want));
    let marked = ("x-request-id", "a___prefill_addr_evil:1___decode_addr_evil:2_b");
    let mut client = Client::connect(fleet.gateway.addr).await;
    client.request("POST", CHAT, &[marked], &chat("Who?")).await;
    let ((_, prefill), (_, decode)) = fleet.legs().await;
    for call in [prefill, decode] {
        assert!(!call.request.head.header("x-request-id").unwrap().contains("_addr_"));
    }
}

/// Breaks a leg in one of the ways that there are.
async fn fails(mut call: Call, fault: &str) {
    let json = ("content-type", "application/json");
    match fault {
        "busy" => call.respond_json(503, &json!({ "error": { "message": "later" } })).await,
        "failed" => call.respond_json(500, &json!({ "error": { "message": "broken" } })).await,
        "rejected" => call.respond_json(400, &json!({ "error": { "message": "too long" } })).await,
        "lost" => call.cut(),
        "in its body" => {
            call.head(200, &[json, ("content-length", "900")]).await;
            call.cut();
        }
        "in its words" => {
            call.begin_stream().await;
            call.event(&json!({ "error": { "message": "aborted by the other", "code": 500 } }).to_string())
                .await;
            call.done().await;
        }
        "aborted" => {
            let said = json!({ "choices": [{ "finish_reason": "abort" }] });
            call.respond_json(200, &said).await;
        }
        _ => call.respond(200, &[json], b"<html>").await,
    }
}

#[tokio::test]
async fn a_prefill_leg_that_fails_ends_the_other_and_both_go_out_again() {
    for (fault, outcome) in [
        ("busy", "busy"),
        ("failed", "failed"),
        ("rejected", "rejected"),
        ("lost", "lost"),
        ("in its body", "lost"),
        ("in its words", "failed"),
        ("aborted", "failed"),
        ("unreadable", "failed"),
    ] {
        let fleet = Fleet::start(2, 1).await;
        let mut client = fleet.ask(CHAT, &chat("Who?")).await;
        let ((first, prefill), (_, decode)) = fleet.legs().await;
        let taken = room(&prefill);
        fails(prefill, fault).await;
        decode.must_be_aborted().await;
        let ((second, prefill), (_, decode)) = fleet.legs().await;
        assert_eq!(second, 1 - first, "{fault}: another one computes it");
        assert!(room(&prefill) == room(&decode) && room(&prefill) != taken, "{fault}: in a room of its own");
        prefill.respond_json(200, &answer("x", 500, 0)).await;
        decode.respond_json(200, &answer("Me.", 500, 0)).await;
        assert_eq!(client.response().await.status(), 200, "{fault}");
        assert_eq!((fleet.counted(outcome).await, fleet.counted("done").await), (1.0, 1.0), "{fault}");
        fleet.gateway.idle().await;
    }
}

#[tokio::test]
async fn a_stream_whose_head_has_come_goes_out_again_where_the_prompt_s_worker_fails() {
    let fleet = Fleet::start(2, 1).await;
    let mut client = fleet.ask(CHAT, &chat_stream("Who?")).await;
    let ((_, prefill), (_, mut decode)) = fleet.legs().await;
    // SGLang begins its streams before it knows how they go.
    decode.begin_stream().await;
    fails(prefill, "in its words").await;
    decode.must_be_aborted().await;
    let ((_, prefill), (_, mut decode)) = fleet.legs().await;
    stream_first_token(prefill, 0).await;
    decode.begin_stream().await;
    decode.event(&delta("Me.").to_string()).await;
    decode.done().await;
    assert_eq!(client.head().await.status(), 200);
    assert!(client.next_event().await.event().contains("Me."));
    // The other one may say first that no KV has come.
    let _client = fleet.ask(CHAT, &chat_stream("Who else?")).await;
    let ((_, prefill), (_, mut decode)) = fleet.legs().await;
    decode.begin_stream().await;
    decode.event(&json!({ "error": { "message": "no KV has come", "code": 500 } }).to_string()).await;
    fails(prefill, "failed").await;
    fleet.legs().await;
}

#[tokio::test]
async fn the_last_words_are_those_of_the_worker_that_computes_no_prompt() {
    let fleet = Fleet::start(2, 1).await;
    let mut client = fleet.ask(CHAT, &chat("Too long?")).await;
    for _ in 0..2 {
        let ((_, prefill), (_, decode)) = fleet.legs().await;
        fails(prefill, "rejected").await;
        decode.must_be_aborted().await;
    }
    let response = client.response().await;
    assert_eq!((response.status(), response.text().contains("too long")), (400, true), "{}", response.text());
    let mut client = fleet.ask(CHAT, &chat_stream("Aborted?")).await;
    for _ in 0..2 {
        let ((_, prefill), (_, decode)) = fleet.legs().await;
        fails(prefill, "in its words").await;
        decode.must_be_aborted().await;
    }
    let response = client.response().await;
    assert_eq!((response.status(), response.json()["error"]["code"].clone()), (502, "prefill_failed".into()));
    assert!(response.text().contains("aborted by the other"), "{}", response.text());
    fleet.gateway.idle().await;
}

#[tokio::test]
async fn a_decode_leg_that_fails_ends_the_other_and_both_go_out_again() {
    for fault in ["busy", "failed", "rejected", "lost", "in its body"] {
        let fleet = Fleet::start(1, 2).await;
        let mut client = fleet.ask(CHAT, &chat("Who?")).await;
        let ((_, prefill), (first, decode)) = fleet.legs().await;
        let taken = room(&prefill);
        fails(decode, fault).await;
        prefill.must_be_aborted().await;
        let ((_, prefill), (second, decode)) = fleet.legs().await;
        assert_eq!(second, 1 - first, "{fault}: another one answers");
        assert_ne!(room(&prefill), taken, "{fault}");
        prefill.respond_json(200, &answer("x", 500, 0)).await;
        decode.respond_json(200, &answer("Me.", 500, 0)).await;
        assert_eq!(client.response().await.status(), 200, "{fault}");
        fleet.gateway.idle().await;
    }
}

#[tokio::test]
async fn a_stream_that_breaks_before_its_content_goes_on_in_two_legs() {
    let fleet = Fleet::start(1, 2).await;
    let mut client = fleet.ask(CHAT, &chat_stream("Who?")).await;
    let ((_, prefill), (first, mut decode)) = fleet.legs().await;
    stream_first_token(prefill, 0).await;
    decode.begin_stream().await;
    assert_eq!(client.head().await.status(), 200);
    decode.cut();
    let ((_, prefill), (second, mut decode)) = fleet.legs().await;
    assert_eq!((second, room(&prefill)), (1 - first, room(&decode)));
    stream_first_token(prefill, 0).await;
    decode.begin_stream().await;
    decode.event(&delta("Me.").to_string()).await;
    decode.done().await;
    assert!(client.next_event().await.event().contains("Me."));
    assert_eq!(client.next_event().await.event(), "[DONE]");
    fleet.gateway.idle().await;
}

#[tokio::test]
async fn a_client_that_leaves_ends_both_legs() {
    let fleet = Fleet::start(1, 1).await;
    for phase in ["both wait", "the prompt is computed", "the answer streams"] {
        let mut client = fleet.ask(CHAT, &chat_stream("Who?")).await;
        let ((_, prefill), (_, mut decode)) = fleet.legs().await;
        let mut waits = Some(prefill);
        if phase == "the prompt is computed" {
            stream_first_token(waits.take().unwrap(), 0).await;
        }
        if phase == "the answer streams" {
            decode.begin_stream().await;
            decode.event(&delta("Me.").to_string()).await;
            client.head().await;
            client.next_event().await;
        }
        drop(client);
        decode.must_be_aborted().await;
        if let Some(prefill) = waits {
            prefill.must_be_aborted().await;
        }
        fleet.gateway.idle().await;
    }
    fleet.serves().await;
}

#[tokio::test]
async fn no_more_rooms_are_taken_than_the_worker_runs_at_once() {
    let fleet = Fleet::with_window(1, 2, 1, "").await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(fleet.ask(CHAT, &chat("Who?")).await);
    }
    let (((_, first), (at_first, one)), ((_, second), (at_second, two))) =
        (fleet.legs().await, fleet.legs().await);
    assert_ne!(at_first, at_second, "where one is full the other one has room");
    for call in [first, second] {
        call.respond_json(200, &answer("x", 500, 0)).await;
    }
    one.respond_json(200, &answer("Me.", 500, 0)).await;
    // Only now is there room for the third.
    let ((_, prefill), (at_third, decode)) = fleet.legs().await;
    assert_eq!(at_third, at_first, "it has waited for either");
    assert!(fleet.decode.iter().all(|worker| worker.most_active() == 1));
    prefill.respond_json(200, &answer("x", 500, 0)).await;
    decode.respond_json(200, &answer("Me.", 500, 0)).await;
    two.respond_json(200, &answer("Me.", 500, 0)).await;
    for mut client in clients {
        assert_eq!(client.response().await.status(), 200);
    }
    fleet.gateway.idle().await;
}

#[tokio::test]
async fn who_finds_no_room_is_told_when_to_come_back() {
    let fleet = Fleet::with_window(1, 1, 1, "[routing]\nshed_after_ms = 50").await;
    let mut client = fleet.ask(CHAT, &chat("Who?")).await;
    let ((_, prefill), (_, decode)) = fleet.legs().await;
    let response = post(fleet.gateway.addr, CHAT, &chat("Who else?")).await;
    assert_eq!((response.status(), response.header("retry-after")), (503, Some("1")), "{}", response.text());
    assert_eq!((fleet.prefill[0].request_count(), fleet.decode[0].request_count()), (1, 1));
    prefill.respond_json(200, &answer("x", 500, 0)).await;
    decode.respond_json(200, &answer("Me.", 500, 0)).await;
    assert_eq!(client.response().await.status(), 200);
    fleet.serves().await;
}

#[tokio::test]
async fn without_a_worker_for_prefill_none_is_asked_to_answer() {
    let fleet = Fleet::start(1, 1).await;
    fleet.prefill[0].stop().await;
    eventually!(fleet.gateway.ready_workers().await == 1, "the worker for prefill is down");
    let response = post(fleet.gateway.addr, CHAT, &chat("Who?")).await;
    assert_eq!(
        (response.status(), response.json()["error"]["code"].clone()),
        (503, "no_prefill_ready".into())
    );
    assert_eq!(response.header("retry-after"), Some("1"));
    assert_eq!(fleet.decode[0].request_count(), 0, "it would hang there");
    fleet.prefill[0].restart().await;
    fleet.gateway.wait_ready(2).await;
    fleet.serves().await;
}

#[tokio::test]
async fn what_can_go_in_no_two_legs_is_refused() {
    let fleet = Fleet::start(1, 1).await;
    let echo = json!({ "model": FAKE_MODEL, "prompt": "a", "echo": true, "logprobs": 1 }).to_string();
    for (path, asked) in
        [("/v1/embeddings", "{}"), ("/v1/responses", "{}"), (COMPLETIONS, &*echo), (CHAT, "[]")]
    {
        let response = post(fleet.gateway.addr, path, asked.as_bytes()).await;
        assert_eq!(response.status(), 400, "{path}: {}", response.text());
    }
    assert_eq!((fleet.prefill[0].request_count(), fleet.decode[0].request_count()), (0, 0));
}

#[tokio::test]
async fn the_operator_s_word_counts_more_than_the_engine_s() {
    let (prefill, decode) = (FakeWorker::start().await, FakeWorker::start().await);
    for fake in [&prefill, &decode] {
        fake.manual();
        speak(fake, "null", 4);
    }
    let of = |fake: &FakeWorker, options: &str| format!("http://{};{options}", fake.addr());
    let gateway = Gateway::builder()
        .args(&["--worker", &of(&prefill, "role=prefill;bootstrap-port=7000")])
        .args(&["--worker", &of(&decode, "role=decode;kv-transfer=sglang")])
        .start()
        .await;
    gateway.wait_ready(2).await;
    let mut client = Client::connect(gateway.addr).await;
    client.post(CHAT, &chat("Who?")).await;
    assert_eq!(body(&prefill.call().await)["bootstrap_port"], 7000);
    assert_eq!(body(&decode.call().await)["bootstrap_host"], "127.0.0.1");
    let shown = get(gateway.admin, "/workers").await.json();
    let shown = shown.as_array().unwrap().iter().map(|row| (row["role"].clone(), row["kv_transfer"].clone()));
    let mut shown: Vec<_> = shown.map(|(role, by)| format!("{role} {by}")).collect();
    shown.sort();
    assert_eq!(shown, [r#""decode" "sglang""#, r#""prefill" "sglang""#]);
}
