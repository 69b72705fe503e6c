//! Hazard: the gateway believes in prefixes that a worker without KV events has long evicted. Its metrics say
//! how much it holds, and its answers show when it holds less.

use keyway_tests::{Cluster, eventually};
use serde_json::Value;

fn capacity(workers: &Value) -> Option<u64> {
    workers[0]["cache_capacity_tokens"].as_u64()
}

/// Sends prompts of about 1,000 tokens each, none like another.
async fn fill(cluster: &Cluster, prompts: usize) {
    for i in 0..prompts {
        cluster.chat(&format!("Prompt {i}. {}", "so and so on, ".repeat(280))).await;
    }
}

#[tokio::test]
async fn the_index_claims_no_more_than_a_worker_says_it_holds() {
    let cluster = Cluster::builder().fakes(1).start().await;
    cluster.fakes[0].set_metrics("vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"500\"} 1\n");
    eventually!(capacity(&cluster.gateway.workers().await) == Some(8000));
    fill(&cluster, 20).await;
    let metrics = cluster.gateway.metrics().await;
    let blocks = metrics.sum("keyway_worker_cached_blocks", &[]);
    // 64 bytes of text are about as many tokens as a block has.
    assert!((300.0..=500.0).contains(&blocks), "{blocks}");
    assert_eq!(metrics.sum("keyway_worker_cache_capacity_tokens", &[]), 8000.0);
}

#[tokio::test]
async fn answers_teach_the_size_of_a_cache_that_says_nothing() {
    let cluster = Cluster::builder().fakes(1).start().await;
    cluster.fakes[0].set_usage(1000, 0);
    fill(&cluster, 12).await;
    assert_eq!(
        capacity(&cluster.gateway.workers().await),
        None,
        "nothing was predicted, so nothing was learned"
    );
    // The same again: predicted, and each time reported as forgotten.
    fill(&cluster, 12).await;
    let learned = capacity(&cluster.gateway.workers().await).expect("learned");
    assert!(learned < 12_000, "{learned}");
    let metrics = cluster.gateway.metrics().await;
    assert!(metrics.sum("keyway_predictions_total", &[("result", "over")]) >= 1.0);
    assert!(metrics.sum("keyway_prediction_error_tokens_total", &[("direction", "over")]) > 500.0);
}
