//! Hazard: a prompt goes from one vLLM to another by Mooncake, and the second asks the wrong engine for it,
//! or waits for KV that nobody keeps.

use keyway_tests::openai::{CHAT, FAKE_MODEL, answer, chat, chat_stream, delta, usage_chunk};
use keyway_tests::{Call, Client, FakeWorker, Gateway};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";

/// One worker of each part, and what the first says at its bootstrap port.
struct Fleet {
    gateway: Gateway,
    prefill: FakeWorker,
    decode: FakeWorker,
    bootstrap: FakeWorker,
}

fn long(question: &str) -> String {
    format!("{question} {}", "A prompt that takes its time. ".repeat(80))
}

impl Fleet {
    async fn start() -> Self {
        let (prefill, decode, bootstrap) =
            (FakeWorker::start().await, FakeWorker::start().await, FakeWorker::start().await);
        prefill.manual();
        decode.manual();
        let of = |fake: &FakeWorker, options: &str| format!("http://{};{options}", fake.addr());
        let port = bootstrap.addr().port();
        let said = json!({ "0": { "engine_id": "engine-7", "worker_addr": { "0": { "0": "tcp://10.0.0.1:4000" } } } });
        bootstrap.answer_at("/query", 200, &[("content-type", "application/json")], &said.to_string());
        let gateway = Gateway::builder()
            .config("[routing]\nsplit = \"always\"\n")
            .args(&[
                "--worker",
                &of(&prefill, &format!("role=prefill;kv-transfer=mooncake;bootstrap-port={port}")),
            ])
            .args(&["--worker", &of(&decode, "role=decode;kv-transfer=mooncake")])
            .start()
            .await;
        gateway.wait_ready(2).await;
        Self { gateway, prefill, decode, bootstrap }
    }

    async fn ask(&self, path: &str, body: &[u8]) -> Client {
        let mut client = Client::connect(self.gateway.addr).await;
        client.post(path, body).await;
        client
    }

    async fn legs(&self, outcome: &str) -> f64 {
        self.gateway.metrics().await.sum("keyway_prefill_legs_total", &[("outcome", outcome)])
    }
}

fn params(call: &Call) -> Value {
    let body: Value = serde_json::from_slice(&call.request.body).unwrap();
    body["kv_transfer_params"].clone()
}

/// What a vLLM says of a prompt that it has computed: nothing of where its KV is.
async fn keep(call: Call, cached_tokens: u64, finish_reason: &str) {
    let mut said = answer("x", 500, cached_tokens);
    said["choices"][0]["finish_reason"] = finish_reason.into();
    call.respond_json(200, &said).await;
}

#[tokio::test]
async fn the_worker_that_answers_learns_whom_to_fetch_from() {
    let fleet = Fleet::start().await;
    let completion = json!({ "model": FAKE_MODEL, "prompt": long("What?"), "max_tokens": 9 }).to_string();
    let mut ids = Vec::new();
    for (path, asked) in [(CHAT, chat(&long("Who?"))), (COMPLETIONS, completion.into_bytes())] {
        let mut client = fleet.ask(path, &asked).await;
        let call = fleet.prefill.call().await;
        let id = params(&call)["transfer_id"].as_str().unwrap().to_owned();
        let first = json!({ "do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id });
        assert_eq!(params(&call), first);
        assert!(
            fleet.decode.try_call().is_none(),
            "it would wait there for a prompt that may never be computed"
        );
        keep(call, 320, "length").await;
        let call = fleet.decode.call().await;
        let at = format!("http://{}", fleet.bootstrap.addr());
        let place = format!(
            r#"{{"kv_transfer_params":{{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":"{at}","remote_engine_id":"engine-7","transfer_id":"{id}"}},"#
        );
        assert_eq!(call.request.body, [place.as_bytes(), &asked[1..]].concat());
        call.respond_json(200, &answer("Me.", 500, 0)).await;
        assert_eq!(client.response().await.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 320);
        ids.push(id);
    }
    assert_ne!(ids[0], ids[1]);
    fleet.gateway.idle().await;
    assert_eq!(fleet.legs("done").await, 2.0);
}

#[tokio::test]
async fn a_stream_has_the_usage_of_both() {
    let fleet = Fleet::start().await;
    let mut asked: Value = serde_json::from_slice(&chat_stream(&long("Who?"))).unwrap();
    asked["stream_options"] = json!({ "include_usage": true });
    let mut client = fleet.ask(CHAT, asked.to_string().as_bytes()).await;
    keep(fleet.prefill.call().await, 128, "length").await;
    let mut call = fleet.decode.call().await;
    call.begin_stream().await;
    call.event(&delta("Me.").to_string()).await;
    call.event(&usage_chunk(500, 0).to_string()).await;
    call.done().await;
    assert_eq!(client.head().await.status(), 200);
    assert!(client.next_event().await.event().contains("Me."));
    let told: Value = serde_json::from_str(&client.next_event().await.event()).unwrap();
    assert_eq!(told["usage"]["prompt_tokens_details"]["cached_tokens"], 128);
}

#[tokio::test]
async fn kv_that_is_not_kept_is_not_waited_for() {
    for outcome in ["busy", "failed", "rejected", "lost", "unreadable", "ended", "no_params"] {
        let fleet = Fleet::start().await;
        if outcome == "no_params" {
            fleet.bootstrap.stop().await;
        }
        let mut client = fleet.ask(CHAT, &chat(&long("Who?"))).await;
        let call = fleet.prefill.call().await;
        match outcome {
            "busy" => call.respond_json(503, &json!({})).await,
            "failed" => call.respond_json(500, &json!({})).await,
            "rejected" => call.respond_json(400, &json!({ "error": { "message": "no" } })).await,
            "unreadable" => call.respond(200, &[("content-type", "application/json")], b"<html>").await,
            // vLLM keeps no KV of an answer that its first token has ended.
            "ended" => keep(call, 0, "stop").await,
            "no_params" => keep(call, 0, "length").await,
            _ => call.cut(),
        }
        let call = fleet.decode.call().await;
        assert_eq!(call.request.body, chat(&long("Who?")), "{outcome}: it computes all of it");
        call.respond_json(200, &answer("Me.", 500, 0)).await;
        assert_eq!(client.response().await.status(), 200, "{outcome}");
        assert_eq!(fleet.legs(outcome).await, 1.0, "{outcome}");
        fleet.gateway.idle().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_leg_that_it_is_on() {
    let fleet = Fleet::start().await;
    let client = fleet.ask(CHAT, &chat(&long("Who?"))).await;
    let call = fleet.prefill.call().await;
    drop(client);
    call.must_be_aborted().await;
    fleet.gateway.idle().await;
    assert_eq!(fleet.decode.request_count(), 0, "nobody waits for an answer");
    let client = fleet.ask(CHAT, &chat(&long("Who else?"))).await;
    keep(fleet.prefill.call().await, 0, "length").await;
    let call = fleet.decode.call().await;
    drop(client);
    call.must_be_aborted().await;
    fleet.gateway.idle().await;
}
