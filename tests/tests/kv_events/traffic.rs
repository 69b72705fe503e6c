//! A worker in this process, with a small cache, and requests that share prefixes and do not fit it.

use futures_util::future::join_all;
use keyway_tests::post;
use keyway_worker::{KvEventOptions, RunningWorker, WireFormat, WorkerOptions, start};
use serde_json::json;

/// A worker of 40 blocks, which publishes.
pub(crate) async fn worker(format: WireFormat) -> RunningWorker {
    let any: keyway_worker::ZmqAddr = "tcp://127.0.0.1:0".parse().expect("an address");
    let topic = "kv@test".to_owned();
    let kv_events = KvEventOptions { publish: any.clone(), replay: Some(any), topic, format };
    let options = WorkerOptions {
        listen: ([127, 0, 0, 1], 0).into(),
        num_kv_blocks: Some(40),
        max_running: Some(4),
        max_batched_tokens: Some(64),
        kv_events: Some(kv_events),
        ..WorkerOptions::default()
    };
    start(options).await.expect("a worker")
}

/// Some requests at once, of a few families of prompts, with and without salts.
pub(crate) async fn round(worker: &RunningWorker, random: &mut fastrand::Rng) {
    let requests: Vec<_> = (0..random.usize(1..7))
        .map(|_| {
            let family = random.u32(0..4);
            let mut prompt: Vec<u32> = (0..random.u32(10..180)).map(|i| 10 + (family + i / 20) % 90).collect();
            if random.bool() {
                prompt.extend((0..20).map(|_| random.u32(10..200)));
            }
            let salt = if random.f64() < 0.3 { "tenant" } else { "" };
            json!({
                "model": worker.model_name(), "prompt": prompt, "max_tokens": random.u32(1..24), "temperature": 0,
                "ignore_eos": true, "cache_salt": salt,
            })
        })
        .collect();
    ask(worker, &requests).await;
}

/// A request with a prompt of its own, which changes the cache.
pub(crate) async fn mark(worker: &RunningWorker, random: &mut fastrand::Rng) {
    let prompt: Vec<u32> = (0..40).map(|_| random.u32(10..200)).collect();
    let request = json!({ "model": worker.model_name(), "prompt": prompt, "max_tokens": 1 });
    ask(worker, &[request]).await;
}

async fn ask(worker: &RunningWorker, requests: &[serde_json::Value]) {
    let answers = requests.iter().map(async |request| {
        let answer = post(worker.addr(), "/v1/completions", request.to_string().as_bytes()).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
    });
    join_all(answers).await;
}
