//! Hazard: more than the gateway will hold, in one request or in all. It is refused in OpenAI's shape before any
//! worker sees it, and what is held is let go.

use keyway_tests::openai::{CHAT, chat, chat_stream};
use keyway_tests::{Client, Cluster, Exchange, FakeWorker, Gateway, Protocol, eventually, http1, post};

/// The default limit of a request body, in bytes.
const LIMIT: usize = 64 << 20;

#[tokio::test]
async fn a_declared_length_over_the_limit_is_refused_without_reading_it() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let mut client = Client::connect(cluster.addr()).await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: k\r\ncontent-length: {}\r\n\r\n", LIMIT + 1);
    client.send(head.as_bytes()).await;
    let response = client.response().await;
    assert_eq!(response.status(), 413);
    let error = &response.json()["error"];
    assert!(error["message"].as_str().is_some_and(|m| m.contains(&LIMIT.to_string())), "{error}");
    assert_eq!(cluster.fakes[0].request_count(), 0);
    cluster.chat("the next one is fine").await;
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn a_chunked_body_is_refused_once_it_passes_the_limit() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let mut client = Client::connect(cluster.addr()).await;
    client
        .send(format!("POST {CHAT} HTTP/1.1\r\nhost: k\r\ntransfer-encoding: chunked\r\n\r\n").as_bytes())
        .await;
    let chunk = http1::chunk(&vec![b' '; 1 << 20]);
    for _ in 0..LIMIT >> 20 {
        client.send(&chunk).await;
    }
    client.try_send(&http1::chunk(b"x")).await; // the byte too many
    let response = client.response().await;
    assert_eq!(response.status(), 413);
    assert_eq!(cluster.fakes[0].request_count(), 0);
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn a_place_is_held_until_the_stream_s_end_and_then_free() {
    let worker = FakeWorker::start().await;
    worker.manual();
    let toml = format!("worker = [\"http://{}\"]\n[limits]\nmax_in_flight = 1\n", worker.addr());
    let gateway = Gateway::builder().config(&toml).start().await;
    gateway.wait_ready(1).await;
    let mut exchange = Exchange::post(Protocol::Http1, gateway.addr, CHAT, &chat_stream("first")).await;
    let mut call = worker.call().await;
    call.begin_stream().await;
    call.say("one").await;
    assert_eq!(exchange.status().await, 200);
    exchange.next_event().await.event();
    // The head is long gone, the stream is not over: the place is still taken.
    let refused = post(gateway.addr, CHAT, &chat("second")).await;
    assert!([429, 503].contains(&refused.status()), "{}", refused.status());
    assert!(refused.header("retry-after").is_some());
    assert!(refused.json()["error"]["message"].is_string());
    call.done().await;
    exchange.body().await;
    worker.answer();
    eventually!(post(gateway.addr, CHAT, &chat("third")).await.status() == 200);
    assert_eq!(worker.requests().iter().filter(|r| r.body == chat("second")).count(), 0);
    gateway.idle().await;
}

#[tokio::test]
async fn malformed_requests_are_answered_by_400_and_reach_no_worker() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    for request in [
        "POST /v1/chat/completions\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nhost: k\r\ncontent-length: -1\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nhost: k\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
        "POST /v1/chat/completions HTTP/1.1\r\nhost: k\r\nbad header: x\r\n\r\n",
        "\u{1}\u{2}\u{3} nonsense\r\n\r\n",
    ] {
        let mut client = Client::connect(cluster.addr()).await;
        client.send(request.as_bytes()).await;
        if let Some(head) = client.try_head().await {
            assert_eq!(head.status(), 400, "{request:?}");
        }
    }
    assert_eq!(cluster.fakes[0].request_count(), 0);
    assert_eq!(post(cluster.addr(), CHAT, &chat("fine")).await.status(), 200);
}
