//! Hazard: this gateway is not the only one. What others send to a worker it does not see, unless it asks the
//! worker.

use std::time::Duration;

use bytes::Bytes;
use keyway_tests::cluster::config_file;
use keyway_tests::openai::{chat, chat_for};
use keyway_tests::{Cluster, Exchange, Gateway, Metrics, Protocol, eventually, post};
use keyway_zmq::{PubLimits, PubSocket};
use serde_json::{Value, json};
use tokio::net::TcpListener;

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

/// What one gateway sends, another knows in tokens: real workers say how many wait that they have not cached.
#[tokio::test]
async fn a_real_worker_s_queue_is_seen_through_another_gateway() {
    let scrape = "[routing]\nload_scrape_ms = 50\n";
    let builder = Cluster::builder().workers(2).worker_args(&["--max-running", "1"]).config(scrape);
    let cluster = builder.start().await;
    let shared = cluster.workers[0].addr();
    let other = Gateway::builder().worker(shared).start().await;
    other.wait_ready(1).await;
    let send = async |prompt: Vec<u32>, max_tokens: u32| {
        let body = json!({
            "model": "keyway-random", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true, "stream": true,
        });
        Exchange::post(Protocol::Http1, other.addr, "/v1/completions", body.to_string().as_bytes()).await
    };
    let series = async |name: &str| Metrics::fetch(shared).await.sum(&format!("keyway_worker_{name}"), &[]);
    let running = send(vec![5; 64], 30_000).await;
    eventually!(series("requests_running").await == 1.0);
    let waiting = (send((0..700).map(|id| id % 200).collect(), 1).await, send(vec![5; 300], 1).await);
    // Of the second, four blocks are cached.
    eventually!(series("num_waiting_uncached_tokens").await == 700.0 + 236.0);

    let known = async || -> Vec<u64> {
        let request = chat_for("keyway-random", "hello", false);
        let explained: Value = post(cluster.gateway.admin, "/explain", &request).await.json();
        let of = |row: &Value| row["waiting_prefill_tokens"].as_u64().unwrap_or_default();
        let rows = explained["workers"].as_array().cloned().unwrap_or_default();
        let busy = rows.iter().filter(|row| row["worker"] == shared.to_string().as_str()).map(of);
        busy.chain(rows.iter().filter(|row| row["worker"] != shared.to_string().as_str()).map(of)).collect()
    };
    // What the page said fades until it is read again.
    eventually!(known().await.first().is_some_and(|tokens| (900..=936).contains(tokens)));
    assert_eq!(known().await[1], 0);
    drop((running, waiting));
    eventually!(known().await == [0, 0]);
}

/// SGLang counts tokens on a page of its own; older ones do not.
#[tokio::test]
async fn an_engine_is_asked_where_it_counts_tokens() {
    let cluster = Cluster::builder().fakes(1).config("[routing]\nload_scrape_ms = 50\n").start().await;
    let engine = &cluster.fakes[0];
    let waiting = async || -> u64 {
        let explained: Value = post(cluster.gateway.admin, "/explain", &chat("hello")).await.json();
        explained["workers"][0]["waiting_prefill_tokens"].as_u64().unwrap_or_default()
    };
    let loads = |tokens: u32| {
        format!(
            "sglang_num_running_reqs 2\nsglang_num_waiting_reqs 1\nsglang_num_waiting_uncached_tokens {tokens}\n"
        )
    };
    engine.set_loads(Some(&loads(64_000)));
    engine.set_metrics(
        "# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 5\nsglang:num_queue_reqs 0\n",
    );
    eventually!(in_flight(&cluster).await == [3]);
    // What the page said fades until it is read again.
    eventually!((62_000..=64_000).contains(&waiting().await));
    engine.set_loads(Some(&loads(640)));
    eventually!((600..=640).contains(&waiting().await));
    engine.set_loads(None);
    eventually!(in_flight(&cluster).await == [5]);
}

/// A load as SGLang publishes it: running, waiting, tokens, the most of those, rank, waiting and not cached.
fn load_stat(running: u8, waiting: u8, uncached: u32) -> Vec<Bytes> {
    let mut payload = vec![0x97, 0xa8];
    payload.extend(b"LoadStat");
    payload.extend([running, waiting, 0, 0, 0, 0xce]);
    payload.extend(uncached.to_be_bytes());
    [&b"load"[..], &[0; 8], &payload].map(Bytes::copy_from_slice).to_vec()
}

/// An engine that says its load itself is believed, and asked again once it says nothing more.
#[tokio::test]
async fn an_engine_s_own_word_of_its_load_is_heard() {
    let cluster = Cluster::builder().fakes(1).config("[routing]\nload_scrape_ms = 50\n").start().await;
    let stall = Duration::from_secs(10);
    let limits = PubLimits { connections: 8, kept_messages: 100, kept_bytes: 1 << 20, stall };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let publisher = PubSocket::new(listener, limits).unwrap();
    let engine = &cluster.fakes[0];
    let ports = json!({ "kv_events": { "load_endpoint_port_base": publisher.local_addr().port() } });
    engine.answer_at("/server_info", 200, &[], &ports.to_string());
    // What it answers when it is asked.
    engine.set_metrics("sglang:num_running_reqs 5\nsglang:num_queue_reqs 0\n");
    eventually!({
        publisher.send(&load_stat(2, 1, 640));
        in_flight(&cluster).await == [3]
    });
    publisher.send(&load_stat(40, 30, 64_000));
    eventually!(in_flight(&cluster).await == [70]);
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
