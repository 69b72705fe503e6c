//! Hazard: a request that never ends. Each part of it has a clock, and whoever lets it run out is told which.

use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::openai::{CHAT, chat, chat_stream, delta};
use keyway_tests::{Client, End, Exchange, FakeWorker, Gateway, Next, Protocol, post};
use serde_json::Value;

/// A gateway with these limits before one worker that the test answers for.
async fn with_limits(limits: &str) -> (Gateway, FakeWorker) {
    let worker = FakeWorker::start().await;
    let toml = format!("worker = [\"http://{}\"]\n[limits]\n{limits}\n", worker.addr());
    let gateway = Gateway::builder().config(&toml).start().await;
    gateway.wait_ready(1).await;
    worker.manual();
    (gateway, worker)
}

#[tokio::test]
async fn a_stream_that_stops_is_ended_honestly_and_aborted_at_the_worker() {
    let (gateway, worker) = with_limits("answer_idle_ms = 400").await;
    for protocol in PROTOCOLS {
        let mut exchange = Exchange::post(protocol, gateway.addr, CHAT, &chat_stream("hi")).await;
        let mut call = worker.call().await;
        call.begin_stream().await;
        call.say("one").await;
        assert_eq!(exchange.status().await, 200);
        assert_eq!(exchange.next_event().await.event(), delta("one").to_string());
        let error: Value = serde_json::from_str(&exchange.next_event().await.event()).unwrap();
        assert_eq!(error["error"]["code"], "worker_stalled", "{error}");
        assert_eq!(exchange.next_event().await, Next::End { end: End::Aborted, torn: false });
        call.must_be_aborted().await;
        gateway.idle().await;
    }
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_requests_total", &[("outcome", "worker_stalled")]), 2.0);
}

#[tokio::test]
async fn a_client_that_stops_reading_is_given_up() {
    let (gateway, worker) = with_limits("client_stall_ms = 1000").await;
    let mut client = Client::connect(gateway.addr).await;
    client.post(CHAT, &chat_stream("hi")).await;
    let mut call = worker.call().await;
    call.begin_stream().await;
    // More than all buffers hold; the client takes none of it.
    let event = delta(&"x".repeat(1 << 20)).to_string();
    let endless = async { while call.try_event(&event).await {} };
    keyway_tests::eventually::patient("the gateway to give up", endless).await;
    gateway.idle().await;
    drop(client);
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_refused_and_aborted_at_the_worker() {
    let (gateway, worker) = with_limits("request_timeout_ms = 400").await;
    for protocol in PROTOCOLS {
        let mut exchange = Exchange::post(protocol, gateway.addr, CHAT, &chat("hi")).await;
        let call = worker.call().await;
        assert_eq!(exchange.status().await, 504);
        let (body, _) = exchange.body().await;
        let error: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(error["error"]["code"], "deadline_exceeded", "{error}");
        call.must_be_aborted().await;
        gateway.idle().await;
    }
}

#[tokio::test]
async fn a_stream_ends_at_the_request_s_time_too() {
    let (gateway, worker) = with_limits("request_timeout_ms = 600").await;
    let mut exchange = Exchange::post(Protocol::Http1, gateway.addr, CHAT, &chat_stream("hi")).await;
    let mut call = worker.call().await;
    call.begin_stream().await;
    call.say("one").await;
    assert_eq!(exchange.status().await, 200);
    exchange.next_event().await.event();
    let error: Value = serde_json::from_str(&exchange.next_event().await.event()).unwrap();
    assert_eq!(error["error"]["code"], "deadline_exceeded", "{error}");
    assert_eq!(exchange.next_event().await, Next::End { end: End::Aborted, torn: false });
    call.must_be_aborted().await;
}

#[tokio::test]
async fn a_body_that_stops_is_refused_and_reaches_no_worker() {
    let (gateway, worker) = with_limits("body_idle_ms = 400").await;
    let mut client = Client::connect(gateway.addr).await;
    let body = chat("never sent whole");
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: k\r\ncontent-length: {}\r\n\r\n", body.len());
    client.send(head.as_bytes()).await;
    client.send(&body[..10]).await;
    let response = client.response().await;
    assert_eq!(response.status(), 408);
    assert_eq!(response.json()["error"]["code"], "body_too_slow");
    assert_eq!(worker.request_count(), 0);
    gateway.idle().await;
}

#[tokio::test]
async fn a_connection_on_which_no_whole_head_comes_is_closed() {
    let (gateway, worker) = with_limits("header_read_ms = 400").await;
    // Nothing, what either protocol may begin with, one that has begun, and the second request of a
    // connection.
    for sent in ["", "P", "PRI * HTTP/2.0\r\n\r\nSM", "POST /v1/chat/completions HTTP/1.1\r\nhost: k\r\n"] {
        let mut client = Client::connect(gateway.addr).await;
        client.send(sent.as_bytes()).await;
        assert!(client.try_head().await.is_none(), "after {sent:?}");
    }
    let mut client = Client::connect(gateway.addr).await;
    client.request("GET", "/v1/models", &[], b"").await;
    assert_eq!(client.response().await.status(), 200);
    assert!(client.try_head().await.is_none(), "after an answer");
    assert_eq!(worker.request_count(), 0);
    gateway.idle().await;
}

#[tokio::test]
async fn a_new_time_for_heads_holds_for_new_connections() {
    let (gateway, worker) = with_limits("header_read_ms = 3600000").await;
    let toml = format!("worker = [\"http://{}\"]\n[limits]\nheader_read_ms = 400\n", worker.addr());
    gateway.rewrite(&toml);
    let said = post(gateway.admin, "/reload", b"").await;
    assert!(said.text().contains("limits.*_ms"), "{}", said.text());
    let mut silent = Client::connect(gateway.addr).await;
    silent.send(b"POST /v1/chat/completions HTTP/1.1\r\n").await;
    assert!(silent.try_head().await.is_none());
}
