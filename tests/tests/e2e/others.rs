//! Hazard: this gateway is not the only one. What others send to a worker it does not see, unless it asks the worker.

use keyway_tests::cluster::config_file;
use keyway_tests::openai::chat;
use keyway_tests::{Cluster, eventually, post};
use serde_json::Value;

/// Requests that the gateway believes to be at each worker.
async fn in_flight(cluster: &Cluster) -> Vec<u64> {
    let explanation: Value = post(cluster.gateway.admin, "/explain", &chat("hello")).await.json();
    let of = |fake: &keyway_tests::FakeWorker| {
        let name = fake.addr().to_string();
        let row = explanation["workers"].as_array()?.iter().find(|row| row["worker"] == name.as_str())?;
        row["requests_in_flight"].as_u64()
    };
    cluster.fakes.iter().map(|fake| of(fake).unwrap_or_default()).collect()
}

async fn served_by_the_first(cluster: &Cluster) -> usize {
    let mut first = 0;
    for i in 0..12 {
        let answer = cluster.chat(&format!("Prompt {i}, which is nobody else's. {i}")).await;
        first += usize::from(cluster.served_by(&answer) == 0);
    }
    first
}

#[tokio::test]
async fn a_worker_that_others_keep_busy_is_left_to_them() {
    let config = config_file("[routing]\nload_scrape_ms = 50\n");
    let cluster =
        Cluster::builder().fakes(2).args(&["--config", config.path().to_str().unwrap()]).start().await;
    let free = served_by_the_first(&cluster).await;
    assert!((1..12).contains(&free), "both are sent some while neither is busy: {free}");
    cluster.fakes[0].set_metrics("vllm:num_requests_running 8\nvllm:num_requests_waiting 30\n");
    eventually!(in_flight(&cluster).await == [38, 0]);
    assert_eq!(served_by_the_first(&cluster).await, 0);
    cluster.fakes[0].set_metrics("vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n");
    eventually!(in_flight(&cluster).await == [0, 0]);
    assert_eq!(
        cluster.gateway.metrics().await.sum("keyway_requests_in_flight", &[]),
        0.0,
        "others' are not its own"
    );
}
