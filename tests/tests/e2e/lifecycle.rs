//! Hazard: a gateway that is told to stop cuts the streams it carries, or never stops.

use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::openai::{CHAT, DONE, chat, chat_stream, delta};
use keyway_tests::{Client, Cluster, Exchange, FakeWorker, Gateway, eventually, post};

#[tokio::test]
async fn sigterm_lets_open_streams_finish_and_takes_no_new_connection() {
    let mut cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    let mut open = Vec::new();
    for protocol in PROTOCOLS {
        let mut exchange = Exchange::post(protocol, cluster.addr(), CHAT, &chat_stream("hi")).await;
        let mut call = cluster.fakes[0].call().await;
        call.begin_stream().await;
        call.say("one").await;
        assert_eq!(exchange.status().await, 200);
        exchange.next_event().await.event();
        open.push((exchange, call));
    }
    cluster.gateway.process.terminate();
    eventually!(
        tokio::net::TcpStream::connect(cluster.addr()).await.is_err(),
        "the listener closes while streams are open"
    );
    for (exchange, mut call) in open {
        let mut exchange = exchange;
        call.say("two").await;
        assert_eq!(exchange.next_event().await.event(), delta("two").to_string());
        call.done().await;
        assert_eq!(exchange.next_event().await.event(), DONE);
    }
    assert_eq!(cluster.gateway.process.ended().await.code(), Some(0));
}

#[tokio::test]
async fn who_waits_for_a_place_as_the_end_comes_cuts_no_stream_of_others() {
    // All places there are: who comes then waits for one.
    const PLACES: usize = 9;
    let worker = FakeWorker::start().await;
    worker.manual();
    let toml = format!("worker = [\"http://{}\"]\n[limits]\nmax_connections = {}\n", worker.addr(), PLACES);
    let mut gateway = Gateway::builder().config(&toml).start().await;
    gateway.wait_ready(1).await;
    let mut open = Vec::new();
    for _ in 0..PLACES {
        let mut exchange = Exchange::post(PROTOCOLS[0], gateway.addr, CHAT, &chat_stream("hi")).await;
        let mut call = worker.call().await;
        call.begin_stream().await;
        call.say("one").await;
        assert_eq!(exchange.status().await, 200);
        exchange.next_event().await.event();
        open.push((exchange, call));
    }
    let _waiting = Client::connect(gateway.addr).await;
    gateway.process.terminate();
    eventually!(tokio::net::TcpStream::connect(gateway.addr).await.is_err());
    for (mut exchange, mut call) in open {
        call.say("two").await;
        assert_eq!(exchange.next_event().await.event(), delta("two").to_string());
        call.done().await;
        assert_eq!(exchange.next_event().await.event(), DONE);
    }
    assert_eq!(gateway.process.ended().await.code(), Some(0));
}

#[tokio::test]
async fn a_drain_that_takes_too_long_is_cut() {
    let worker = FakeWorker::start().await;
    worker.hang();
    let toml = format!("worker = [\"http://{}\"]\n[limits]\ndrain_seconds = 0\n", worker.addr());
    let mut gateway = Gateway::builder().config(&toml).start().await;
    gateway.wait_ready(1).await;
    let exchange = Exchange::post(PROTOCOLS[0], gateway.addr, CHAT, &chat_stream("hi")).await;
    eventually!(worker.active() == 1);
    gateway.process.terminate();
    gateway.process.ended().await;
    eventually!(worker.active() == 0 && worker.aborted() == 1, "the worker's call is aborted");
    drop(exchange);
}

#[tokio::test]
async fn balancers_are_told_before_the_listener_closes() {
    let worker = FakeWorker::start().await;
    let toml = format!("worker = [\"http://{}\"]\n[limits]\ndrain_delay_seconds = 3600\n", worker.addr());
    let gateway = Gateway::builder().config(&toml).start().await;
    gateway.wait_ready(1).await;
    let mut kept = Client::connect(gateway.addr).await;
    kept.post(CHAT, &chat("before")).await;
    let before = kept.response().await;
    assert_eq!((before.status(), before.header("connection")), (200, None));
    let mut operator = Client::connect(gateway.admin).await;
    operator.request("POST", "/drain", &[("content-type", "application/json")], b"").await;
    assert_eq!(operator.response().await.status(), 202);
    eventually!(gateway.readyz().await == 503);
    // Whoever still comes is served, and whoever stays is told to go.
    assert_eq!(post(gateway.addr, CHAT, &chat("late")).await.status(), 200);
    kept.post(CHAT, &chat("again")).await;
    let last = kept.response().await;
    assert_eq!((last.status(), last.header("connection")), (200, Some("close")));
}
