//! A request's tokens do not depend on what ran before or beside it: invariant 7, through the whole worker.

use serde_json::{Value, json};

use crate::client::{completion, metric, options, post, with};
use keyway_worker::{WorkerOptions, start};

/// Prompts of 1 to 700 tokens; half of them share a beginning.
fn prompts(random: &mut fastrand::Rng) -> Vec<Vec<u32>> {
    let shared: Vec<u32> = (0..200).map(|_| random.u32(32..127)).collect();
    let prompt = |i: usize| {
        let own = (0..random.usize(1..500)).map(|_| random.u32(32..127)).collect::<Vec<_>>();
        if i.is_multiple_of(2) { [shared.clone(), own].concat() } else { own }
    };
    (0..8).map(prompt).collect()
}

/// The texts of all prompts, sent in one request, or each alone one after the other.
async fn texts(addr: std::net::SocketAddr, prompts: &[Vec<u32>], batch: bool, more: &Value) -> Vec<Value> {
    let groups: Vec<&[Vec<u32>]> = if batch { vec![prompts] } else { prompts.chunks(1).collect() };
    let mut texts = Vec::new();
    for group in groups {
        let answer = post(addr, "/v1/completions", &with(completion(json!(group), 40), more.clone())).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        texts.extend(answer.json()["choices"].as_array().unwrap().iter().map(|c| c["text"].clone()));
    }
    texts
}

#[tokio::test]
async fn cold_warm_batched_and_preempted_tokens_are_the_same() {
    let mut random = fastrand::Rng::with_seed(5);
    let roomy = start(options()).await.unwrap();
    // 60 blocks for up to 8 sequences of up to 47: they preempt each other.
    let tight = WorkerOptions {
        num_kv_blocks: Some(60),
        max_batched_tokens: Some(48),
        max_running: Some(8),
        ..options()
    };
    let tight = start(tight).await.unwrap();
    for sampling in [json!({"temperature": 0}), json!({"temperature": 0.9, "top_p": 0.95, "seed": 3})] {
        let prompts = prompts(&mut random);
        // A salt nobody used means a cold cache.
        let cold_salt = |i: usize| with(sampling.clone(), json!({"cache_salt": format!("{i} {sampling}")}));
        let mut cold = Vec::new();
        for (i, prompt) in prompts.iter().enumerate() {
            cold.extend(texts(roomy.addr(), std::slice::from_ref(prompt), false, &cold_salt(i)).await);
        }
        assert_eq!(cold, texts(roomy.addr(), &prompts, true, &sampling).await, "in a batch");
        assert_eq!(cold, texts(roomy.addr(), &prompts, false, &sampling).await, "warm");
        assert_eq!(cold, texts(roomy.addr(), &prompts, true, &sampling).await, "warm and in a batch");
        assert_eq!(cold, texts(tight.addr(), &prompts, true, &sampling).await, "in tight space");
    }
    assert!(
        metric(tight.addr(), "keyway_worker_preemptions_total").await > 0.0,
        "the tight space was not tight"
    );
    roomy.shutdown().await;
    tight.shutdown().await;
}
