//! Clients that go away, and workers that do.

use std::net::SocketAddr;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::client::{chat, completion, metric, metric_becomes, options, post, with, worker};
use keyway_worker::{WorkerOptions, start};

/// More tokens than a test waits for.
const ENDLESS: usize = 30_000;

/// Sends a request on a connection of its own and leaves the answer to the caller.
async fn begin(addr: SocketAddr, path: &str, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    let body = body.to_string();
    let head = format!("POST {path} HTTP/1.1\r\nhost: worker\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).await.unwrap();
    stream
}

async fn nothing_is_left(addr: SocketAddr) {
    for gauge in ["requests_running", "requests_waiting", "num_waiting_uncached_tokens", "kv_blocks_used"] {
        metric_becomes(addr, &format!("keyway_worker_{gauge}"), 0.0).await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_blocks() {
    let worker = worker().await;
    let addr = worker.addr();
    for stream in [true, false] {
        let body = with(chat("Talk", ENDLESS), json!({"stream": stream}));
        let mut connection = begin(addr, "/v1/chat/completions", &body).await;
        if stream {
            connection.read_u8().await.unwrap();
        }
        metric_becomes(addr, "keyway_worker_requests_running", 1.0).await;
        drop(connection);
        nothing_is_left(addr).await;
    }
    metric_becomes(addr, "keyway_worker_requests_total{outcome=\"aborted\"}", 2.0).await;
    assert!(metric(addr, "keyway_worker_generation_tokens_total").await < 2.0 * ENDLESS as f64);
    worker.shutdown().await;
}

#[tokio::test]
async fn a_client_that_leaves_the_queue_is_forgotten() {
    let worker = start(WorkerOptions { max_running: Some(1), ..options() }).await.unwrap();
    let addr = worker.addr();
    let body = with(chat("Talk", ENDLESS), json!({"stream": true}));
    let running = begin(addr, "/v1/chat/completions", &body).await;
    metric_becomes(addr, "keyway_worker_requests_running", 1.0).await;
    let waiting = begin(addr, "/v1/chat/completions", &body).await;
    metric_becomes(addr, "keyway_worker_requests_waiting", 1.0).await;
    drop(waiting);
    metric_becomes(addr, "keyway_worker_requests_waiting", 0.0).await;
    drop(running);
    nothing_is_left(addr).await;
    worker.shutdown().await;
}

#[tokio::test]
async fn prompts_that_wait_are_counted_without_what_is_cached() {
    let worker = start(WorkerOptions { max_running: Some(1), ..options() }).await.unwrap();
    let addr = worker.addr();
    let gauge = "keyway_worker_num_waiting_uncached_tokens";
    let ids = |from: usize, tokens: usize| -> Value { (from..from + tokens).map(|id| id % 200).collect() };
    let first = with(completion(ids(0, 100), ENDLESS), json!({"stream": true}));
    let running = begin(addr, "/v1/completions", &first).await;
    metric_becomes(addr, "keyway_worker_requests_running", 1.0).await;
    metric_becomes(addr, gauge, 0.0).await;
    let other = begin(addr, "/v1/completions", &completion(ids(7, 300), 1)).await;
    metric_becomes(addr, gauge, 300.0).await;
    // Six blocks of 16 are those of the prompt that runs.
    let like = begin(addr, "/v1/completions", &completion(ids(0, 250), 1)).await;
    metric_becomes(addr, gauge, 300.0 + 250.0 - 96.0).await;
    drop((running, other, like));
    nothing_is_left(addr).await;
    worker.shutdown().await;
}

#[tokio::test]
async fn a_stop_string_ends_the_generation_too() {
    let worker = worker().await;
    let addr = worker.addr();
    let text = post(addr, "/v1/completions", &completion("x", 20)).await.json()["choices"][0]["text"].clone();
    let body = with(completion(json!(["x", "x"]), ENDLESS), json!({"stop": &text.as_str().unwrap()[..3]}));
    assert_eq!(post(addr, "/v1/completions", &body).await.json()["choices"][1]["text"], "");
    nothing_is_left(addr).await;
    worker.shutdown().await;
}

#[tokio::test]
async fn a_shutdown_lets_open_answers_end() {
    let worker = worker().await;
    let addr = worker.addr();
    let body = with(chat("Talk", 3000), json!({"stream": true}));
    let mut connection = begin(addr, "/v1/chat/completions", &body).await;
    metric_becomes(addr, "keyway_worker_requests_running", 1.0).await;
    let mut answer = String::new();
    tokio::join!(worker.shutdown(), async {
        connection.read_to_string(&mut answer).await.unwrap();
    });
    assert!(answer.contains("data: [DONE]"), "the answer was cut off");
    assert!(TcpStream::connect(addr).await.is_err(), "the port still accepts");
}
