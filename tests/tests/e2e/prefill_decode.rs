//! Hazard: one worker computes a prompt and another answers, and a leg that fails costs the client its
//! answer, leaves something behind at a worker, or shows the client that there were two.

use keyway_tests::openai::{CHAT, DONE, FAKE_MODEL, answer, chat, chat_stream, delta, usage_chunk};
use keyway_tests::{Call, Client, FakeWorker, Gateway, eventually, get, post};
use serde_json::{Value, json};

/// More than is computed in one place, by far.
pub(crate) fn long(question: &str) -> String {
    format!("{question} {}", "A prompt that takes its time. ".repeat(80))
}

/// Workers for each part, all answered by the test.
pub(crate) struct Fleet {
    pub(crate) gateway: Gateway,
    pub(crate) prefill: Vec<FakeWorker>,
    pub(crate) decode: Vec<FakeWorker>,
}

impl Fleet {
    /// All prompts that may are computed apart, whatever that costs.
    async fn start(prefill: usize, decode: usize) -> Self {
        Self::splitting("always", prefill, decode).await
    }

    pub(crate) async fn splitting(split: &str, prefill: usize, decode: usize) -> Self {
        let mut gateway = Gateway::builder().config(&format!("[routing]\nsplit = \"{split}\"\n"));
        let mut workers = [Vec::new(), Vec::new()];
        for (role, count) in [(0, prefill), (1, decode)] {
            for _ in 0..count {
                let fake = FakeWorker::start().await;
                fake.manual();
                let name = ["prefill", "decode"][role];
                gateway = gateway.args(&["--worker", &format!("http://{};role={name}", fake.addr())]);
                workers[role].push(fake);
            }
        }
        let gateway = gateway.start().await;
        gateway.wait_ready(prefill + decode).await;
        let [prefill, decode] = workers;
        Self { gateway, prefill, decode }
    }

    pub(crate) async fn ask(&self, body: &[u8]) -> Client {
        let mut client = Client::connect(self.gateway.addr).await;
        client.post(CHAT, body).await;
        client
    }

    /// The call at any of some workers.
    async fn call_at(workers: &[FakeWorker]) -> (usize, Call) {
        loop {
            for (at, worker) in workers.iter().enumerate() {
                if let Some(call) = worker.try_call() {
                    return (at, call);
                }
            }
            tokio::task::yield_now().await;
        }
    }

    pub(crate) async fn legs(&self, outcome: &str) -> f64 {
        self.gateway.metrics().await.sum("keyway_prefill_legs_total", &[("outcome", outcome)])
    }
}

fn body(call: &Call) -> Value {
    serde_json::from_slice(&call.request.body).unwrap()
}

/// What an engine says of a prompt whose KV it keeps: whatever is in there goes on as it is.
fn params(name: &str) -> Value {
    json!({ "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[3, 4], [9]],
            "remote_engine_id": name, "remote_host": "10.0.0.1", "remote_port": 5600, "of the future": { "a": [1.50] } })
}

pub(crate) async fn keep(call: Call, name: &str, cached_tokens: u64) {
    let mut said = answer("x", 500, cached_tokens);
    said["kv_transfer_params"] = params(name);
    call.respond_json(200, &said).await;
}

#[tokio::test]
async fn one_worker_computes_the_prompt_and_another_answers() {
    let fleet = Fleet::start(1, 1).await;
    let asked = json!({ "model": FAKE_MODEL, "messages": [{ "role": "user", "content": long("Who?") }], "max_tokens": 30,
                        "temperature": 0.5, "min_tokens": 3 });
    let mut client = fleet.ask(asked.to_string().as_bytes()).await;
    let call = fleet.prefill[0].call().await;
    let mut want = asked.clone();
    want.as_object_mut().unwrap().remove("min_tokens");
    want["max_tokens"] = 1.into();
    want["stream"] = false.into();
    want["kv_transfer_params"] = json!({ "do_remote_decode": true, "do_remote_prefill": false });
    assert_eq!(body(&call), want);
    assert!(fleet.decode[0].try_call().is_none(), "it has nothing to fetch yet");
    keep(call, "p", 320).await;
    let call = fleet.decode[0].call().await;
    let mut want = asked.clone();
    want["kv_transfer_params"] = params("p");
    assert_eq!(body(&call), want);
    // The engine that answers has found nothing in its own cache.
    call.respond_json(200, &answer("Me.", 500, 0)).await;
    let response = client.response().await;
    let said = response.json();
    assert_eq!(response.status(), 200);
    assert_eq!(response.header("x-keyway-worker"), Some(fleet.decode[0].addr().to_string().as_str()));
    assert_eq!(said["choices"][0]["message"]["content"], "Me.");
    assert_eq!(said["usage"]["prompt_tokens_details"]["cached_tokens"], 320, "one request has one usage");
    fleet.gateway.idle().await;
    let metrics = fleet.gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_prefill_legs_total", &[("outcome", "done")]), 1.0);
    assert_eq!(metrics.sum("keyway_prompt_tokens_total", &[]), 500.0, "the prompt is counted once");
    assert_eq!(metrics.sum("keyway_cached_tokens_total", &[("source", "reported")]), 320.0);
    let decode = fleet.decode[0].addr().to_string();
    assert_eq!(metrics.sum("keyway_predictions_total", &[("worker", &decode)]), 0.0);
}

#[tokio::test]
async fn a_stream_comes_from_the_worker_that_answers_with_the_usage_of_both() {
    let fleet = Fleet::start(1, 1).await;
    let mut asked: Value = serde_json::from_slice(&chat_stream(&long("Who?"))).unwrap();
    asked["stream_options"] = json!({ "include_usage": true });
    let mut client = fleet.ask(asked.to_string().as_bytes()).await;
    let call = fleet.prefill[0].call().await;
    assert_eq!((&body(&call)["stream"], body(&call).get("stream_options")), (&false.into(), None));
    keep(call, "p", 128).await;
    let mut call = fleet.decode[0].call().await;
    assert_eq!((&body(&call)["kv_transfer_params"], &body(&call)["stream"]), (&params("p"), &true.into()));
    call.begin_stream().await;
    call.event(&delta("Me.").to_string()).await;
    call.event(&usage_chunk(500, 0).to_string()).await;
    call.done().await;
    assert_eq!(client.head().await.status(), 200);
    let told: Value = serde_json::from_str(&client.next_event().await.event()).unwrap();
    assert_eq!(told["choices"][0]["delta"]["content"], "Me.");
    let told: Value = serde_json::from_str(&client.next_event().await.event()).unwrap();
    assert_eq!(told["usage"]["prompt_tokens_details"]["cached_tokens"], 128);
    assert_eq!(client.next_event().await.event(), DONE);
}

#[tokio::test]
async fn what_is_short_or_says_itself_where_kv_is_is_computed_where_it_is_answered() {
    let fleet = Fleet::start(1, 1).await;
    let own = json!({ "model": FAKE_MODEL, "messages": [{ "role": "user", "content": long("Own?") }],
                      "kv_transfer_params": { "do_remote_prefill": true, "remote_host": "elsewhere" } });
    let several =
        json!({ "model": FAKE_MODEL, "messages": [{ "role": "user", "content": long("Two?") }], "n": 2 });
    for asked in [chat("Short?"), own.to_string().into_bytes(), several.to_string().into_bytes()] {
        let mut client = fleet.ask(&asked).await;
        let call = fleet.decode[0].call().await;
        assert_eq!(call.request.body, asked, "the body is the client's own");
        call.respond_json(200, &answer("Me.", 500, 0)).await;
        assert_eq!(client.response().await.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    }
    assert_eq!(fleet.prefill[0].request_count(), 0);
}

#[tokio::test]
async fn a_first_leg_that_fails_costs_the_client_nothing_but_time() {
    for outcome in ["busy", "failed", "rejected", "unreadable", "no_params", "lost"] {
        let fleet = Fleet::start(1, 1).await;
        let mut client = fleet.ask(&chat(&long("Who?"))).await;
        let mut call = fleet.prefill[0].call().await;
        match outcome {
            "busy" => call.respond_json(503, &json!({})).await,
            "failed" => call.respond_json(500, &json!({})).await,
            "rejected" => call.respond_json(400, &json!({ "error": { "message": "no" } })).await,
            "unreadable" => call.respond(200, &[("content-type", "application/json")], b"<html>").await,
            "no_params" => call.respond_json(200, &answer("x", 500, 0)).await,
            _ => {
                call.head(200, &[("content-type", "application/json"), ("content-length", "900")]).await;
                call.cut();
            }
        }
        let call = fleet.decode[0].call().await;
        assert_eq!(call.request.body, chat(&long("Who?")), "{outcome}: it computes all of it");
        call.respond_json(200, &answer("Me.", 500, 0)).await;
        assert_eq!(client.response().await.status(), 200, "{outcome}");
        assert_eq!(fleet.legs(outcome).await, 1.0, "{outcome}");
        fleet.gateway.idle().await;
    }
}

/// An engine may keep KV of chats and know nothing of that in another API: then that one's prompts stay in
/// one place, and no other's.
#[tokio::test]
async fn every_api_has_a_first_leg_of_its_own_words_and_is_passed_over_by_itself() {
    let fleet = Fleet::start(1, 1).await;
    let ask = async |path: &str, body: &Value| {
        let mut client = Client::connect(fleet.gateway.addr).await;
        client.post(path, body.to_string().as_bytes()).await;
        client
    };
    let messages = |question: &str| {
        json!({ "model": FAKE_MODEL, "max_tokens": 30, "system": "Be kind.",
                "messages": [{ "role": "user", "content": long(question) }] })
    };
    let message = json!({ "type": "message", "role": "assistant", "content": [{ "type": "text", "text": "Me." }],
                          "stop_reason": "max_tokens", "usage": { "input_tokens": 500, "output_tokens": 1, "cache_read_input_tokens": 0 } });
    let mut client = ask("/v1/messages", &messages("Who?")).await;
    let call = fleet.prefill[0].call().await;
    let mut want = messages("Who?");
    want["max_tokens"] = 1.into();
    want["stream"] = false.into();
    want["kv_transfer_params"] = json!({ "do_remote_decode": true, "do_remote_prefill": false });
    assert_eq!((call.request.target().1, body(&call)), ("/v1/messages", want));
    call.respond_json(200, &message).await;
    let call = fleet.decode[0].call().await;
    assert_eq!(body(&call), messages("Who?"), "the first leg said nothing of KV");
    call.respond_json(200, &message).await;
    assert_eq!(client.response().await.json(), message);
    let mut client = ask("/v1/messages", &messages("And who else?")).await;
    fleet.decode[0].call().await.respond_json(200, &message).await;
    assert_eq!(client.response().await.status(), 200);
    assert_eq!(fleet.legs("no_params").await, 1.0, "it is not asked again");
    let mut client = fleet.ask(&chat(&long("A chat?"))).await;
    keep(fleet.prefill[0].call().await, "p", 0).await;
    fleet.decode[0].call().await.respond_json(200, &answer("Me.", 500, 0)).await;
    assert_eq!(client.response().await.status(), 200);
    let asked =
        json!({ "model": FAKE_MODEL, "max_output_tokens": 30, "input": long("A response?"), "store": true });
    let response = |cached: u64| {
        json!({ "object": "response", "status": "incomplete", "output": [],
                "usage": { "input_tokens": 500, "output_tokens": 1, "input_tokens_details": { "cached_tokens": cached } } })
    };
    let mut client = ask("/v1/responses", &asked).await;
    let call = fleet.prefill[0].call().await;
    assert_eq!(call.request.target().1, "/v1/responses");
    let sent = body(&call);
    assert_eq!(
        (&sent["max_output_tokens"], &sent["store"], &sent["stream"]),
        (&1.into(), &false.into(), &false.into())
    );
    let mut said = response(320);
    said["kv_transfer_params"] = params("p");
    call.respond_json(200, &said).await;
    let call = fleet.decode[0].call().await;
    assert_eq!((&body(&call)["store"], &body(&call)["kv_transfer_params"]), (&true.into(), &params("p")));
    call.respond_json(200, &response(0)).await;
    assert_eq!(client.response().await.json(), response(320), "one request has one usage");
    assert_eq!(fleet.legs("done").await, 2.0);
    fleet.gateway.idle().await;
}

#[tokio::test]
async fn another_worker_computes_the_prompt_where_one_fails_or_is_away() {
    let fleet = Fleet::start(2, 1).await;
    let mut client = fleet.ask(&chat(&long("Who?"))).await;
    let (first, call) = Fleet::call_at(&fleet.prefill).await;
    call.cut();
    keep(fleet.prefill[1 - first].call().await, "second", 0).await;
    let call = fleet.decode[0].call().await;
    assert_eq!(body(&call)["kv_transfer_params"]["remote_engine_id"], "second");
    call.respond_json(200, &answer("Me.", 500, 0)).await;
    assert_eq!(client.response().await.status(), 200);
    fleet.prefill[0].stop().await;
    fleet.prefill[1].stop().await;
    let mut client = fleet.ask(&chat(&long("Anybody?"))).await;
    let call = fleet.decode[0].call().await;
    assert_eq!(call.request.body, chat(&long("Anybody?")));
    call.respond_json(200, &answer("Me.", 500, 0)).await;
    assert_eq!(client.response().await.status(), 200);
}

#[tokio::test]
async fn a_prompt_that_breaks_two_workers_for_prefill_breaks_no_third_worker() {
    let fleet = Fleet::start(2, 1).await;
    let mut client = fleet.ask(&chat(&long("Who breaks?"))).await;
    Fleet::call_at(&fleet.prefill).await.1.cut();
    Fleet::call_at(&fleet.prefill).await.1.cut();
    assert_eq!(client.response().await.status(), 502);
    assert_eq!(fleet.decode[0].request_count(), 0);
    let again = post(fleet.gateway.addr, CHAT, &chat(&long("Who breaks?"))).await;
    assert!(again.text().contains("breaks_workers"), "its like is refused: {}", again.text());
    fleet.gateway.idle().await;
}

#[tokio::test]
async fn a_worker_that_says_nothing_of_kv_computes_no_further_prompt_in_vain() {
    let fleet = Fleet::start(1, 1).await;
    for (nth, legs) in [(0, 1), (1, 1)] {
        let mut client = fleet.ask(&chat(&long(&format!("Question {nth}?")))).await;
        if nth == 0 {
            fleet.prefill[0].call().await.respond_json(200, &answer("x", 500, 0)).await;
        }
        fleet.decode[0].call().await.respond_json(200, &answer("Me.", 500, 0)).await;
        assert_eq!(client.response().await.status(), 200);
        assert_eq!(fleet.prefill[0].request_count(), legs, "request {nth}");
    }
}

#[tokio::test]
async fn a_request_that_all_refuse_is_held_against_no_worker() {
    let fleet = Fleet::start(2, 1).await;
    let mut client = fleet.ask(&chat(&long("Whose fault?"))).await;
    for _ in 0..2 {
        Fleet::call_at(&fleet.prefill)
            .await
            .1
            .respond_json(400, &json!({ "error": { "message": "no" } }))
            .await;
    }
    fleet.decode[0].call().await.respond_json(400, &json!({ "error": { "message": "no" } })).await;
    assert_eq!(client.response().await.status(), 400, "the client sees the refusal");
    let mut client = fleet.ask(&chat(&long("And this one?"))).await;
    keep(Fleet::call_at(&fleet.prefill).await.1, "p", 0).await;
    fleet.decode[0].call().await.respond_json(200, &answer("Me.", 500, 0)).await;
    assert_eq!(client.response().await.status(), 200);
}

#[tokio::test]
async fn a_worker_that_refuses_to_answer_leaves_no_place_that_another_is_sent_to() {
    let fleet = Fleet::start(1, 2).await;
    let mut client = fleet.ask(&chat(&long("Who?"))).await;
    keep(fleet.prefill[0].call().await, "first", 0).await;
    let (refuses, call) = Fleet::call_at(&fleet.decode).await;
    call.respond_json(500, &json!({})).await;
    // The engine that refused may have let the prompt's KV go: it is computed anew, from the cache.
    keep(fleet.prefill[0].call().await, "anew", 480).await;
    let call = fleet.decode[1 - refuses].call().await;
    assert_eq!(body(&call)["kv_transfer_params"]["remote_engine_id"], "anew");
    call.respond_json(200, &answer("Me.", 500, 0)).await;
    let response = client.response().await;
    assert_eq!((response.status(), fleet.legs("done").await), (200, 2.0));
    assert_eq!(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 480);
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_leg_that_it_is_on() {
    let fleet = Fleet::start(1, 1).await;
    let client = fleet.ask(&chat(&long("Who?"))).await;
    let call = fleet.prefill[0].call().await;
    drop(client);
    call.must_be_aborted().await;
    fleet.gateway.idle().await;
    assert_eq!(fleet.decode[0].request_count(), 0, "nobody waits for an answer");
    let client = fleet.ask(&chat(&long("Who else?"))).await;
    keep(fleet.prefill[0].call().await, "p", 0).await;
    let call = fleet.decode[0].call().await;
    drop(client);
    call.must_be_aborted().await;
    fleet.gateway.idle().await;
}

#[tokio::test]
async fn a_worker_for_prefill_alone_answers_nobody() {
    let fleet = Fleet::start(1, 1).await;
    fleet.decode[0].stop().await;
    eventually!(fleet.gateway.ready_workers().await == 1, "the worker for decode is down");
    let response = post(fleet.gateway.addr, CHAT, &chat(&long("Who?"))).await;
    assert_eq!(response.status(), 503, "{}", response.text());
    assert_eq!(fleet.prefill[0].request_count(), 0);
}

#[tokio::test]
async fn a_first_leg_is_a_demand_for_prefill_and_what_follows_one_for_decode() {
    let fleet = Fleet::start(1, 1).await;
    let scale = async |role: &str, field: &str| {
        let rows = get(fleet.gateway.admin, "/scale").await.json();
        let row = rows.as_array().unwrap().iter().find(|row| row["role"] == role).cloned();
        row.map_or(Value::Null, |row| row[field].clone())
    };
    let waits = async |role: &str| scale(role, "backlog_tokens").await.as_f64().unwrap_or(-1.0) > 100.0;
    eventually!(scale("prefill", "ready").await == 1 && scale("decode", "ready").await == 1);
    assert_eq!(get(fleet.gateway.admin, "/scale").await.json().as_array().map(Vec::len), Some(2));

    let explained = post(fleet.gateway.admin, "/explain", &chat(&long("Why?"))).await.json();
    let row = &explained["workers"][0];
    assert_eq!((row["role"].as_str(), row["chosen"].as_bool()), (Some("decode"), Some(true)), "{explained}");

    let mut client = fleet.ask(&chat(&long("Who?"))).await;
    let call = fleet.prefill[0].call().await;
    eventually!(waits("prefill").await && !waits("decode").await);
    keep(call, "p", 0).await;
    let call = fleet.decode[0].call().await;
    eventually!(!waits("prefill").await && !waits("decode").await);
    call.respond_json(200, &answer("Me.", 500, 0)).await;
    assert_eq!(client.response().await.status(), 200);

    // Nobody for prefill keeps it: the other one computes it, which is said of those who should have.
    let mut client = fleet.ask(&chat(&long("And then?"))).await;
    fleet.prefill[0].call().await.respond_json(503, &json!({ "error": { "message": "busy" } })).await;
    let call = fleet.decode[0].call().await;
    eventually!(waits("prefill").await && !waits("decode").await);
    call.respond_json(200, &answer("I.", 500, 0)).await;
    assert_eq!(client.response().await.status(), 200);
    fleet.gateway.idle().await;
    eventually!(!waits("prefill").await && !waits("decode").await);
    let metrics = fleet.gateway.metrics().await;
    for role in ["prefill", "decode"] {
        assert_eq!(metrics.sum("keyway_worker_role", &[("role", role)]), 1.0);
        assert_eq!(metrics.sum("keyway_scale_workers", &[("role", role), ("state", "ready")]), 1.0);
    }
    assert_eq!(metrics.sum("keyway_desired_workers", &[("role", "")]), 0.0);
}
