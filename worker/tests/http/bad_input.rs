//! What is wrong with a request is said once, clearly, in OpenAI's shape, with the field at fault.

use serde_json::{Value, json};

use crate::client::{chat, completion, metric, options, post, send, with, worker};
use keyway_worker::{WorkerOptions, start};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Status, `param`, `code` and a piece of the message.
type Expected<'a> = (u16, Option<&'a str>, &'a str, &'a str);

fn check(answer: &crate::client::Answer, expected: Expected<'_>) {
    let error = &answer.json()["error"];
    let (status, param, code, message) = expected;
    assert_eq!(answer.status, status, "{}", answer.text);
    assert_eq!((error["param"].as_str(), error["code"].as_str()), (param, Some(code)), "{}", answer.text);
    assert!(error["message"].as_str().unwrap().contains(message), "{}", answer.text);
    assert_eq!(error["type"], "invalid_request_error");
}

type Case = (&'static str, Value, Expected<'static>);

const INVALID: &str = "invalid_value";
const UNSUPPORTED: &str = "unsupported_parameter";

fn wrong_values() -> Vec<Case> {
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    vec![
        (CHAT, json!({"model": "other"}), (404, Some("model"), "model_not_found", "`other` does not exist")),
        (CHAT, json!({"model": 1}), (400, Some("model"), INVALID, "a string, not a number")),
        (CHAT, json!({"messages": null}), (400, Some("messages"), "missing_required_parameter", "messages")),
        (CHAT, json!({"messages": []}), (400, Some("messages"), INVALID, "at least one")),
        (CHAT, json!({"messages": "hi"}), (400, Some("messages"), INVALID, "an array, not a string")),
        (CHAT, json!({"messages": ["hi"]}), (400, Some("messages[0]"), INVALID, "an object")),
        (
            CHAT,
            json!({"messages": [{"role": "robot", "content": ""}]}),
            (400, Some("messages[0].role"), INVALID, "one of"),
        ),
        (CHAT, user(json!(null)), (400, Some("messages[0].content"), INVALID, "a string or an array")),
        (
            CHAT,
            user(json!([{"type": "image_url"}])),
            (400, Some("messages[0].content[0]"), INVALID, "of type text"),
        ),
        (CHAT, json!({"temperature": 2.5}), (400, Some("temperature"), INVALID, "between 0 and 2, not 2.5")),
        (CHAT, json!({"temperature": "hot"}), (400, Some("temperature"), INVALID, "not a string")),
        (CHAT, json!({"top_p": -0.1}), (400, Some("top_p"), INVALID, "between 0 and 1")),
        (CHAT, json!({"max_tokens": 0}), (400, Some("max_tokens"), INVALID, "at least 1, not 0")),
        (CHAT, json!({"max_tokens": 1.5}), (400, Some("max_tokens"), INVALID, "an integer")),
        (CHAT, json!({"seed": "x"}), (400, Some("seed"), INVALID, "64-bit")),
        (CHAT, json!({"priority": "high"}), (400, Some("priority"), INVALID, "64-bit integer, not a string")),
        (CHAT, json!({"stream": "yes"}), (400, Some("stream"), INVALID, "true or false")),
        (
            CHAT,
            json!({"stream_options": {}}),
            (400, Some("stream_options"), INVALID, "only allowed when 'stream'"),
        ),
        (CHAT, json!({"stop": [""]}), (400, Some("stop"), INVALID, "1 to 1024 bytes")),
        (CHAT, json!({"stop": [1]}), (400, Some("stop"), INVALID, "strings, not a number")),
        (CHAT, json!({"stop": vec!["a"; 17]}), (400, Some("stop"), INVALID, "the most is 16")),
    ]
}

fn unsupported_values() -> Vec<Case> {
    vec![
        (CHAT, json!({"n": 0}), (400, Some("n"), INVALID, "between 1 and 128, not 0")),
        (CHAT, json!({"logprobs": 3}), (400, Some("logprobs"), INVALID, "true or false")),
        (CHAT, json!({"top_logprobs": 3}), (400, Some("top_logprobs"), INVALID, "needs 'logprobs'")),
        (
            CHAT,
            json!({"logprobs": true, "top_logprobs": 21}),
            (400, Some("top_logprobs"), INVALID, "between 0 and 20"),
        ),
        (CHAT, json!({"functions": [{}]}), (400, Some("functions"), UNSUPPORTED, "Leave it out")),
        (
            CHAT,
            json!({"reasoning_effort": "much"}),
            (400, Some("reasoning_effort"), INVALID, "one of none, minimal"),
        ),
        (CHAT, json!({"reasoning_effort": 3}), (400, Some("reasoning_effort"), INVALID, "string")),
        (
            CHAT,
            json!({"presence_penalty": 2.5}),
            (400, Some("presence_penalty"), INVALID, "between -2 and 2"),
        ),
        (CHAT, json!({"logit_bias": {"foo": 1}}), (400, Some("logit_bias"), INVALID, "between 0 and 319")),
        (CHAT, json!({"logit_bias": {"5": 101}}), (400, Some("logit_bias"), INVALID, "-100 and 100")),
        (CHAT, json!({"stop_token_ids": [320]}), (400, Some("stop_token_ids"), INVALID, "between 0 and 319")),
        (CHAT, json!({"keyway": {}, "n": 2}), (400, Some("keyway"), INVALID, "single prompt and answer")),
        (
            CHAT,
            json!({"prompt_logprobs": 1, "stream": true}),
            (400, Some("prompt_logprobs"), INVALID, "does not go with 'stream'"),
        ),
        (CHAT, json!({"colour": "red"}), (400, Some("colour"), UNSUPPORTED, "Unrecognized request argument")),
        (
            CHAT,
            json!({"max_tokens": 40000}),
            (400, Some("messages"), "context_length_exceeded", "you requested 40019 tokens"),
        ),
    ]
}

fn wrong_completions() -> Vec<Case> {
    vec![
        (COMPLETIONS, json!({"prompt": null}), (400, Some("prompt"), "missing_required_parameter", "prompt")),
        (COMPLETIONS, json!({"prompt": ""}), (400, Some("prompt"), INVALID, "at least one token")),
        (COMPLETIONS, json!({"prompt": []}), (400, Some("prompt"), INVALID, "at least one token")),
        (COMPLETIONS, json!({"prompt": [1, "a"]}), (400, Some("prompt"), INVALID, "not a number")),
        (COMPLETIONS, json!({"prompt": [1, 320]}), (400, Some("prompt"), INVALID, "between 0 and 319")),
        (COMPLETIONS, json!({"prompt": {}}), (400, Some("prompt"), INVALID, "not an object")),
        (COMPLETIONS, json!({"prompt": vec!["a"; 129]}), (400, Some("prompt"), INVALID, "the most is 128")),
        (COMPLETIONS, json!({"suffix": "x"}), (400, Some("suffix"), UNSUPPORTED, "")),
        (COMPLETIONS, json!({"best_of": 2}), (400, Some("best_of"), UNSUPPORTED, "other than 'n'")),
        (COMPLETIONS, json!({"logprobs": 21}), (400, Some("logprobs"), INVALID, "between 0 and 20")),
        (COMPLETIONS, json!({"max_tokens": 0}), (400, Some("max_tokens"), INVALID, "at least 1")),
        (COMPLETIONS, json!({"prompt": vec!["a"; 2], "n": 65}), (400, Some("n"), INVALID, "the most is 128")),
        (
            COMPLETIONS,
            json!({"prompt": "a".repeat(40_000)}),
            (400, Some("prompt"), "context_length_exceeded", "at least 32768 tokens"),
        ),
    ]
}

#[tokio::test]
async fn fields() {
    let worker = worker().await;
    let cases = [wrong_values(), unsupported_values(), wrong_completions()].concat();
    let count = cases.len();
    for (path, more, expected) in cases {
        let body = if path == CHAT { chat("", 1) } else { completion("a", 1) };
        check(&post(worker.addr(), path, &with(body, more)).await, expected);
    }
    assert_eq!(
        metric(worker.addr(), "keyway_worker_requests_total{outcome=\"invalid\"}").await,
        count as f64
    );
    assert_eq!(metric(worker.addr(), "keyway_worker_prompt_tokens_total").await, 0.0);
    worker.shutdown().await;
}

#[tokio::test]
async fn bodies_paths_and_methods() {
    let worker = worker().await;
    let addr = worker.addr();
    let malformed = |message| (400, None, "invalid_json", message);
    check(&send(addr, "POST", CHAT, "").await, malformed("could not parse"));
    check(&send(addr, "POST", CHAT, "[1]").await, malformed("not an object"));
    check(&send(addr, "POST", CHAT, "{\"model\": \"x\"").await, malformed("could not parse"));
    check(
        &send(addr, "POST", "/v1/images/generations", "{}").await,
        (404, None, "unknown_url", "POST /v1/images/generations"),
    );
    check(&send(addr, "GET", CHAT, "").await, (405, None, "method_not_supported", "use POST"));
    check(&send(addr, "POST", "/v1/models", "{}").await, (405, None, "method_not_supported", "use GET"));
    check(&send(addr, "GET", "/v1/models/x", "").await, (404, Some("model"), "model_not_found", "`x`"));
    let huge = send(addr, "POST", CHAT, &" ".repeat((64 << 20) + 1)).await;
    check(&huge, (413, None, "request_too_large", "64 MiB"));
    worker.shutdown().await;
}

#[tokio::test]
async fn a_prompt_that_can_never_fit_is_refused_and_the_longest_that_can_is_not() {
    let worker = start(WorkerOptions { num_kv_blocks: Some(4), ..options() }).await.unwrap();
    let addr = worker.addr();
    let post = async |prompt: usize, max_tokens: usize| {
        post(addr, COMPLETIONS, &completion("a".repeat(prompt), max_tokens)).await
    };
    assert_eq!(post(60, 4).await.status, 200);
    check(
        &post(60, 5).await,
        (400, Some("prompt"), "context_length_exceeded", "maximum context length is 64 tokens"),
    );
    check(
        &post(64, 1).await,
        (400, Some("prompt"), "context_length_exceeded", "64 in the prompt, 1 in the completion"),
    );
    worker.shutdown().await;
}

#[tokio::test]
async fn a_full_queue_says_when_to_come_back() {
    let worker = start(WorkerOptions { max_running: Some(1), ..options() }).await.unwrap();
    let addr = worker.addr();
    // Eight requests of 128 endless prompts fill the queue of 1024.
    let body = completion(vec!["a"; 128], 30_000);
    let fill: Vec<_> = (0..8)
        .map(|_| {
            let body = body.clone();
            tokio::spawn(async move { post(addr, COMPLETIONS, &body).await })
        })
        .collect();
    crate::client::metric_becomes(addr, "keyway_worker_requests_waiting", 1023.0).await;
    let refused = post(addr, COMPLETIONS, &completion("b", 1)).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (429, &json!("engine_overloaded")));
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(metric(addr, "keyway_worker_requests_total{outcome=\"overloaded\"}").await, 1.0);
    fill.iter().for_each(tokio::task::JoinHandle::abort);
    crate::client::metric_becomes(addr, "keyway_worker_requests_waiting", 0.0).await;
    worker.shutdown().await;
}
