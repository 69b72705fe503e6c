//! Hundreds of random requests over HTTP at once, in tight memory: good and bad ones, streams, resumptions,
//! and clients that leave. Each answer must be what the request gets alone, and nothing may be left behind.

use std::net::SocketAddr;

use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::client::{Answer, client, completion, metric, metric_becomes, options, post, with, worker};
use keyway_worker::{WorkerOptions, start};

const COMPLETIONS: &str = "/v1/completions";
const REQUESTS: u64 = 300;
const AT_ONCE: usize = 24;

/// A request and what it is to come to.
struct Case {
    body: Value,
    /// Status, text and finish reason.
    expected: (u16, String, String),
    /// Leaves after this many pieces of the answer.
    patience: Option<usize>,
}

/// A request without the client's whims, by number.
fn body(random: &mut fastrand::Rng) -> Value {
    let shared =
        "All of us begin like this, more or less far into the sentence, and go our own way after it.";
    let own: String = (0..random.usize(1..30)).map(|_| random.alphanumeric()).collect();
    let prompt = format!("{}{own}", &shared[..random.usize(0..shared.len())]);
    let mut body = with(
        completion(prompt, random.usize(1..40)),
        json!({
            "temperature": if random.bool() { 0.0 } else { 1.2 }, "seed": random.u32(..),
            "priority": random.i32(-2..3), "cache_salt": if random.bool() { "a" } else { "" },
            "ignore_eos": random.bool(),
        }),
    );
    if random.bool() {
        body["stop"] = json!([random.alphabetic().to_string(), "zz"]);
    }
    if random.u8(0..10) == 0 {
        body["max_tokens"] = json!(if random.bool() { 0 } else { 1_000_000 });
    }
    body
}

fn text_and_finish(answer: &Answer, stream: bool) -> (u16, String, String) {
    if answer.status != 200 {
        return (answer.status, String::new(), String::new());
    }
    let events = if stream { answer.events() } else { vec![answer.json()] };
    let text = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
    let finish = events.last().unwrap()["choices"][0]["finish_reason"].as_str().unwrap().to_owned();
    (answer.status, text, finish)
}

/// Gives a request a client: one that reads all, one that leaves, or one that resumes what another had.
async fn case(alone: SocketAddr, random: &mut fastrand::Rng) -> Case {
    let mut body = body(random);
    let asked = with(body.clone(), json!({"keyway": {}}));
    let answer = post(alone, COMPLETIONS, &asked).await;
    let mut expected = text_and_finish(&answer, false);
    let ids = answer.json()["keyway"]["ids"].as_array().cloned().unwrap_or_default();
    // What was shown for a part of the ids is known where each is a character and no stop string begins.
    if body.get("stop").is_none() && ids.len() > 1 && ids.len() == expected.1.len() && random.bool() {
        let cut = random.usize(1..ids.len());
        body["keyway"] = json!({"output_ids": ids[..cut], "emitted_bytes": cut});
        expected.1.drain(..cut);
    }
    body["stream"] = json!(random.bool());
    let patience = (random.u8(0..4) == 0).then(|| random.usize(0..5));
    Case { body, expected, patience }
}

async fn play(addr: SocketAddr, case: Case) {
    let Some(patience) = case.patience else {
        let answer = post(addr, COMPLETIONS, &case.body).await;
        assert_eq!(text_and_finish(&answer, case.body["stream"] == true), case.expected, "{}", case.body);
        return;
    };
    let request = http::Request::post(format!("http://{addr}{COMPLETIONS}"));
    let request = request.body(Full::from(case.body.to_string())).unwrap();
    let client = client(false);
    let answer = client.request(request);
    if patience == 0 {
        // Leaves before there is an answer, or with it.
        let _ = tokio::time::timeout(std::time::Duration::ZERO, answer).await;
        return;
    }
    let mut body = answer.await.unwrap().into_body();
    for _ in 0..patience {
        if body.frame().await.is_none() {
            break;
        }
    }
}

#[tokio::test]
async fn hundreds_of_random_requests_leave_nothing_behind() {
    let mut random = fastrand::Rng::with_seed(9);
    let alone = worker().await;
    let tight = WorkerOptions {
        num_kv_blocks: Some(24),
        max_batched_tokens: Some(40),
        max_running: Some(8),
        ..options()
    };
    let tight = start(tight).await.unwrap();
    let addr = tight.addr();
    let mut cases = Vec::new();
    for _ in 0..REQUESTS {
        cases.push(case(alone.addr(), &mut random).await);
    }
    let mut playing = JoinSet::new();
    for case in cases {
        while playing.len() >= AT_ONCE {
            playing.join_next().await.unwrap().unwrap();
        }
        playing.spawn(play(addr, case));
    }
    while let Some(played) = playing.join_next().await {
        played.unwrap();
    }
    for gauge in ["requests_running", "requests_waiting", "kv_blocks_used"] {
        metric_becomes(addr, &format!("keyway_worker_{gauge}"), 0.0).await;
    }
    let count = async |outcome: &str| {
        metric(addr, &format!("keyway_worker_requests_total{{outcome=\"{outcome}\"}}")).await
    };
    for outcome in ["stop", "length", "aborted", "invalid"] {
        assert!(count(outcome).await > 0.0, "no request ended with {outcome}: the soak tests too little");
    }
    assert_eq!(count("error").await + count("overloaded").await, 0.0);
    assert!(metric(addr, "keyway_worker_preemptions_total").await > 0.0, "the memory was not tight");
    assert!(metric(addr, "keyway_worker_cached_tokens_total").await > 0.0);
    alone.shutdown().await;
    tight.shutdown().await;
}
