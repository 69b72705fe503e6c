//! The worker extension: a generation broken off at any moment goes on exactly on another worker.

use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::client::{Answer, chat, completion, options, post, send, with, worker};
use keyway_worker::{RunningWorker, WorkerOptions, start};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// A worker that shares nothing with the first but the model: other blocks, other chunks, no room to spare.
async fn elsewhere() -> RunningWorker {
    let tight = WorkerOptions {
        block_size: 32,
        max_batched_tokens: Some(7),
        max_running: Some(3),
        num_kv_blocks: Some(12),
        ..options()
    };
    start(tight).await.unwrap()
}

/// What a client and its gateway have of a stream.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Have {
    ids: Vec<u64>,
    text: String,
    roles: usize,
    finish: Option<String>,
    usage: Option<Value>,
}

impl Have {
    fn take(&mut self, event: &Value) {
        let ids = event["keyway"]["ids"].as_array().unwrap_or_else(|| panic!("no ids in {event}"));
        self.ids.extend(ids.iter().map(|id| id.as_u64().unwrap()));
        if event["usage"].is_object() {
            self.usage = Some(event["usage"].clone());
        }
        let Some(choice) = event["choices"].get(0) else { return };
        let text = choice["delta"]["content"].as_str().or(choice["text"].as_str());
        self.text.push_str(text.unwrap_or_default());
        self.roles += usize::from(choice["delta"]["role"].is_string());
        if let Some(finish) = choice["finish_reason"].as_str() {
            self.finish = Some(finish.to_owned());
        }
    }

    fn of(events: &[Value]) -> Self {
        let mut have = Self::default();
        for event in events {
            have.take(event);
        }
        have
    }

    /// Cached tokens are a matter of the worker and its history.
    fn without_cached(mut self) -> Self {
        if let Some(usage) = &mut self.usage {
            usage.as_object_mut().unwrap().remove("prompt_tokens_details");
        }
        self
    }
}

fn streamed(body: Value, keyway: Value) -> Value {
    with(body, json!({"stream": true, "stream_options": {"include_usage": true}, "keyway": keyway}))
}

/// Cuts the stream after each event and resumes it on `other`: the whole must be the same.
pub(crate) async fn cut_everywhere(first: SocketAddr, other: SocketAddr, path: &str, body: &Value) -> Have {
    let events = post(first, path, &streamed(body.clone(), json!({}))).await.events();
    let whole = Have::of(&events).without_cached();
    let end = events.iter().position(|e| !e["choices"][0]["finish_reason"].is_null()).unwrap();
    for cut in 0..=end {
        let mut have = Have::of(&events[..cut]);
        let keyway = json!({"output_ids": have.ids, "emitted_bytes": have.text.len()});
        let answer = post(other, path, &streamed(body.clone(), keyway)).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        for event in answer.events() {
            have.take(&event);
        }
        if cut == 0 {
            have.roles = whole.roles; // it was present but empty: a resumption tells no role
        }
        assert_eq!(have.without_cached(), whole, "cut after {cut} events of {path}");
    }
    whole
}

#[tokio::test]
async fn a_stream_cut_after_any_event_goes_on_the_same_elsewhere() {
    let (first, other) = (worker().await, elsewhere().await);
    for sampling in [json!({"temperature": 0}), json!({"temperature": 1.1, "top_p": 0.95, "seed": 77})] {
        let body = with(chat("Cut me anywhere", 24), sampling.clone());
        let whole = cut_everywhere(first.addr(), other.addr(), CHAT, &body).await;
        assert_eq!((whole.ids.len(), whole.roles, whole.finish.as_deref()), (24, 1, Some("length")));
        assert_eq!(whole.usage.unwrap()["completion_tokens"], 24);
        let body = with(completion("Cut", 20), sampling);
        let whole = cut_everywhere(first.addr(), other.addr(), COMPLETIONS, &body).await;
        // The same with a stop string in the middle of the text.
        let stop = &whole.text[9..13];
        let stopped =
            cut_everywhere(first.addr(), other.addr(), COMPLETIONS, &with(body, json!({"stop": [stop]})))
                .await;
        assert_eq!((&*stopped.text, stopped.finish.as_deref()), (&whole.text[..9], Some("stop")));
        assert_eq!(stopped.ids[..], whole.ids[..13]);
    }
    first.shutdown().await;
    other.shutdown().await;
}

#[tokio::test]
async fn a_generation_that_ends_by_itself_ends_the_same() {
    let (first, other) = (worker().await, elsewhere().await);
    let ending = async |seed: u64| {
        let more = json!({"ignore_eos": false, "temperature": 2.0, "seed": seed});
        let body = with(completion("x", 200), more);
        let answer = post(first.addr(), COMPLETIONS, &body).await.json();
        (answer["choices"][0]["finish_reason"] == "stop").then_some(body)
    };
    let mut body = None;
    for seed in 0..200 {
        body = body.or(ending(seed).await);
    }
    let body = body.expect("no seed ends by itself: the test tests nothing");
    cut_everywhere(first.addr(), other.addr(), COMPLETIONS, &body).await;
    first.shutdown().await;
    other.shutdown().await;
}

/// Resumes `prompt`, whole, and returns the text.
async fn resumed(addr: SocketAddr, ids: &[u32], emitted: usize, more: Value) -> Answer {
    let keyway = json!({"output_ids": ids, "emitted_bytes": emitted});
    post(addr, COMPLETIONS, &with(with(completion("abc", 20), json!({"keyway": keyway})), more)).await
}

#[tokio::test]
async fn an_output_cut_inside_a_character_or_a_stop_string_goes_on_behind_what_was_shown() {
    let worker = worker().await;
    let addr = worker.addr();
    let text = |answer: Answer| answer.json()["choices"][0]["text"].as_str().unwrap().to_owned();
    // The random model says ASCII only, so the first byte of an é stays alone.
    let ids: Vec<u32> = "café".bytes().take(4).map(u32::from).collect();
    let all = text(resumed(addr, &ids, 0, json!({})).await);
    assert!(all.starts_with("caf\u{fffd}") && all.len() > 6, "{all:?}");
    for emitted in 0..=3 {
        assert_eq!(text(resumed(addr, &ids, emitted, json!({})).await), all[emitted..]);
    }
    // Two characters of a stop string were taken and not shown.
    let whole = post(addr, COMPLETIONS, &with(completion("abc", 20), json!({"keyway": {}}))).await.json();
    let ids: Vec<u32> = serde_json::from_value(whole["keyway"]["ids"].clone()).unwrap();
    let all = whole["choices"][0]["text"].as_str().unwrap();
    assert_eq!((ids.len(), all.len()), (20, 20));
    let stop = json!({"stop": &all[6..10]});
    for cut in 6..10 {
        let rest = resumed(addr, &ids[..cut], 6, stop.clone()).await.json();
        assert_eq!(
            (&rest["choices"][0]["text"], &rest["choices"][0]["finish_reason"]),
            (&json!(""), &json!("stop"))
        );
        assert_eq!(rest["keyway"]["ids"], json!(ids[cut..10]));
        assert_eq!(rest["usage"]["completion_tokens"], 10);
    }
    worker.shutdown().await;
}

#[tokio::test]
async fn the_extensions_seed_beats_the_requests() {
    let worker = worker().await;
    let text = async |more: Value| {
        let body = with(with(completion("seeded", 24), json!({"temperature": 1.0})), more);
        post(worker.addr(), COMPLETIONS, &body).await.json()["choices"][0]["text"].clone()
    };
    let seven = text(json!({"seed": 7})).await;
    assert_eq!(seven, text(json!({"seed": 8, "keyway": {"seed": 7}})).await);
    assert_ne!(seven, text(json!({"seed": 7, "keyway": {"seed": u64::MAX}})).await);
    worker.shutdown().await;
}

#[tokio::test]
async fn without_the_extension_nothing_is_said_of_ids_and_each_answer_names_its_numerics() {
    let worker = worker().await;
    let models = send(worker.addr(), "GET", "/v1/models", "").await.json();
    for stream in [false, true] {
        let answer = post(worker.addr(), CHAT, &with(chat("a", 3), json!({"stream": stream}))).await;
        assert!(!answer.text.contains("keyway\":"), "{}", answer.text);
        assert_eq!(
            answer.headers["x-keyway-numerics-id"],
            models["data"][0]["numerics_id"].as_str().unwrap()
        );
    }
    worker.shutdown().await;
}

#[tokio::test]
async fn what_cannot_be_resumed_is_refused() {
    let worker = worker().await;
    let ids = |n: usize| vec![97; n];
    let invalid = "invalid_value";
    let (whole, output, emitted) = (Some("keyway"), Some("keyway.output_ids"), Some("keyway.emitted_bytes"));
    let keyway = |keyway: Value| json!({"keyway": keyway});
    let cases = [
        (keyway(json!(1)), whole, invalid, "must be an object, not a number"),
        (keyway(json!({"seed": -1})), Some("keyway.seed"), invalid, "unsigned 64-bit"),
        (keyway(json!({"colour": 1})), Some("colour"), "unsupported_parameter", "colour"),
        (keyway(json!({"output_ids": "a"})), output, invalid, "an array of token ids"),
        (keyway(json!({"output_ids": [1, 320]})), output, invalid, "between 0 and 319"),
        (keyway(json!({"output_ids": ids(20)})), output, "output_complete", "nothing to resume"),
        (keyway(json!({"emitted_bytes": 1})), emitted, invalid, "needs 'keyway.output_ids'"),
        (keyway(json!({"output_ids": ids(3), "emitted_bytes": 4})), emitted, invalid, "give 3 bytes"),
        (
            keyway(json!({"output_ids": "é".bytes().collect::<Vec<_>>(), "emitted_bytes": 1})),
            emitted,
            invalid,
            "inside a character",
        ),
        (json!({"prompt": ["a", "b"], "keyway": {}}), whole, invalid, "a single prompt"),
        (
            json!({"stop": "aa", "keyway": {"output_ids": ids(3)}}),
            output,
            "output_complete",
            "nothing to resume",
        ),
        (
            json!({"ignore_eos": false, "keyway": {"output_ids": [97, 256]}}),
            output,
            "output_complete",
            "nothing to resume",
        ),
        (json!({"n": 2, "keyway": {}}), Some("keyway"), "invalid_value", "single prompt and answer"),
        (json!({"echo": true, "keyway": {"output_ids": [97]}}), output, "not_resumable", "'echo'"),
    ];
    for (more, param, code, message) in cases {
        let answer = post(worker.addr(), COMPLETIONS, &with(completion("a", 20), more.clone())).await;
        let error = &answer.json()["error"];
        assert_eq!(
            (answer.status, error["param"].as_str(), error["code"].as_str()),
            (400, param, Some(code)),
            "{more}"
        );
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
    }
    worker.shutdown().await;
}
