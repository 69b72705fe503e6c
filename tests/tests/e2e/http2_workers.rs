//! Hazard: many requests share a connection to a worker, and one of them is another's misfortune: it reads
//! slowly, leaves, or takes the connection with it; or the worker asks to be left, and what it has not begun
//! is lost.

use std::collections::BTreeMap;

use keyway_tests::exchange::{PROTOCOLS, Protocol};
use keyway_tests::openai::{CHAT, DONE, answer, chat, chat_stream, delta};
use keyway_tests::tls::{Authority, TlsFront};
use keyway_tests::{Client, End, Exchange, FakeWorker, Gateway, H2Call, H2Worker, Next, eventually, post};

async fn gateway_of(workers: &[&H2Worker]) -> Gateway {
    // Each core has connections of its own.
    let mut gateway = Gateway::builder().config("[limits]\nmax_cores = 1").args(&["--policy", "round-robin"]);
    for worker in workers {
        gateway = gateway.args(&["--worker", &worker.url()]);
    }
    let gateway = gateway.start().await;
    gateway.wait_ready(workers.len()).await;
    gateway
}

async fn begun(worker: &H2Worker, gateway: &Gateway, protocol: Protocol) -> (Exchange, H2Call) {
    let mut exchange = Exchange::post(protocol, gateway.addr, CHAT, &chat_stream("hi")).await;
    let mut call = worker.call().await;
    call.begin_stream();
    call.say("one");
    assert_eq!(exchange.status().await, 200);
    assert_eq!(exchange.next_event().await.event(), delta("one").to_string());
    (exchange, call)
}

async fn either(workers: &[H2Worker; 2]) -> (usize, H2Call) {
    tokio::select! {
        call = workers[0].call() => (0, call),
        call = workers[1].call() => (1, call),
    }
}

async fn goes_on(exchange: &mut Exchange, mut call: H2Call) {
    call.say("two");
    call.done();
    assert_eq!(exchange.next_event().await.event(), delta("two").to_string());
    assert_eq!(exchange.next_event().await.event(), DONE);
    assert_eq!(exchange.next_event().await, Next::End { end: End::Complete, torn: false });
}

#[tokio::test]
async fn requests_share_connections_and_never_more_than_the_worker_allows() {
    let worker = H2Worker::start(10).await;
    let gateway = gateway_of(&[&worker]).await;
    let mut open = Vec::new();
    let mut by_connection = BTreeMap::<usize, usize>::new();
    for i in 0..25 {
        let (exchange, call) = begun(&worker, &gateway, PROTOCOLS[i % 2]).await;
        *by_connection.entry(call.connection).or_default() += 1;
        assert_eq!(call.body, chat_stream("hi"), "byte for byte");
        assert_eq!(call.head.uri.authority().map(|a| format!("http://{a};http2=true")), Some(worker.url()));
        let hop = ["host", "connection", "transfer-encoding"];
        assert!(hop.iter().all(|name| !call.head.headers.contains_key(*name)), "{:?}", call.head.headers);
        open.push((exchange, call));
    }
    assert_eq!(by_connection.values().copied().collect::<Vec<_>>(), [10, 10, 5]);
    for (mut exchange, call) in open {
        goes_on(&mut exchange, call).await;
    }
    gateway.idle().await;
    // What is free again is used again.
    let connections = worker.connections();
    let (mut exchange, call) = begun(&worker, &gateway, Protocol::Http1).await;
    goes_on(&mut exchange, call).await;
    assert_eq!(worker.connections(), connections);
    // An answer as a whole, with its length.
    let mut client = Client::connect(gateway.addr).await;
    client.post(CHAT, &chat("whole")).await;
    let text = answer("one", 1, 0).to_string();
    worker.call().await.respond(&text);
    let response = client.response().await;
    assert_eq!((response.status(), response.text()), (200, text.clone()));
    assert_eq!(response.header("content-length"), Some(text.len().to_string().as_str()));
}

#[tokio::test]
async fn leaving_at_any_moment_resets_the_stream_and_no_other() {
    let worker = H2Worker::start(100).await;
    let gateway = gateway_of(&[&worker]).await;
    let (mut staying, stays) = begun(&worker, &gateway, Protocol::Http1).await;
    for protocol in PROTOCOLS {
        for events in 0..=3 {
            for body in [chat_stream("hi"), chat("hi")] {
                let mut exchange = Exchange::post(protocol, gateway.addr, CHAT, &body).await;
                let mut call = worker.call().await;
                assert_eq!(call.connection, stays.connection);
                if events > 0 {
                    call.begin_stream();
                    assert_eq!(exchange.status().await, 200);
                }
                if events > 1 {
                    call.say("one");
                    exchange.next_event().await.event();
                }
                if events > 2 {
                    // All is said, but the stream has not ended.
                    call.raw(format!("data: {DONE}\n\n").as_bytes(), false);
                    assert_eq!(exchange.next_event().await.event(), DONE);
                }
                let connection = exchange.disconnect();
                assert_eq!(call.must_be_reset().await, h2::Reason::CANCEL, "{protocol:?} after {events}");
                drop(connection);
            }
        }
    }
    eventually!(gateway.metrics().await.sum("keyway_requests_in_flight", &[]) == 1.0);
    goes_on(&mut staying, stays).await;
    gateway.idle().await;
    assert_eq!(gateway.ready_workers().await, 1, "an abort is nobody's failure");
}

#[tokio::test]
async fn a_client_that_reads_nothing_fills_its_own_window_alone() {
    let worker = H2Worker::start(100).await;
    let gateway = gateway_of(&[&worker]).await;
    let mut unread = Vec::new();
    for _ in 0..4 {
        let (exchange, mut call) = begun(&worker, &gateway, Protocol::Http2).await;
        // Far more than sockets and windows hold.
        let event = format!("data: {}\n\n", delta(&"x".repeat(1_000)));
        call.raw(event.repeat(8_000).as_bytes(), false);
        unread.push((exchange, call));
    }
    let (mut reading, reads) = begun(&worker, &gateway, Protocol::Http1).await;
    assert_eq!(reads.connection, unread[0].1.connection);
    goes_on(&mut reading, reads).await;
    drop(unread);
    gateway.idle().await;
}

#[tokio::test]
async fn a_worker_that_leaves_ends_what_it_has_begun_and_loses_nothing() {
    let worker = H2Worker::start(100).await;
    let gateway = gateway_of(&[&worker]).await;
    let (mut early, began) = begun(&worker, &gateway, Protocol::Http1).await;
    worker.leave();
    for _ in 0..5 {
        // Before the gateway has heard of it, or after: the next one is served, on another connection.
        let (mut late, call) = begun(&worker, &gateway, Protocol::Http2).await;
        goes_on(&mut late, call).await;
    }
    let (mut late, call) = begun(&worker, &gateway, Protocol::Http1).await;
    assert_ne!(call.connection, began.connection);
    goes_on(&mut late, call).await;
    goes_on(&mut early, began).await;
    gateway.idle().await;
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_retries_total", &[]), 0.0, "no worker had failed");
}

#[tokio::test]
async fn what_a_worker_has_not_begun_goes_elsewhere_and_what_it_may_have_does_not() {
    let workers = [H2Worker::start(100).await, H2Worker::start(100).await];
    let gateway = gateway_of(&[&workers[0], &workers[1]]).await;
    // Not to be repeated by its path; refused it may be all the same.
    for path in ["/v1/files", CHAT] {
        let mut client = Client::connect(gateway.addr).await;
        client.post(path, &chat("refused")).await;
        let (first, call) = either(&workers).await;
        call.reset(h2::Reason::REFUSED_STREAM);
        for _ in 0..2 {
            // The same one again: it may have been full for a moment.
            let call = workers[first].call().await;
            call.reset(h2::Reason::REFUSED_STREAM);
        }
        workers[1 - first].call().await.respond("{}");
        assert_eq!(client.response().await.status(), 200, "{path}");
    }
    let mut client = Client::connect(gateway.addr).await;
    client.post("/v1/files", &chat("begun")).await;
    either(&workers).await.1.reset(h2::Reason::INTERNAL_ERROR);
    assert_eq!(client.response().await.status(), 502);
    // Generating may be repeated, at another worker.
    let mut client = Client::connect(gateway.addr).await;
    client.post(CHAT, &chat("begun")).await;
    let (first, call) = either(&workers).await;
    call.reset(h2::Reason::INTERNAL_ERROR);
    workers[1 - first].call().await.respond("{}");
    assert_eq!(client.response().await.status(), 200);
    assert_eq!(gateway.ready_workers().await, 2, "to refuse is no failure");
    gateway.idle().await;
}

#[tokio::test]
async fn a_worker_killed_with_many_streams_open_breaks_each_of_them_and_each_is_told() {
    let workers = [H2Worker::start(100).await, H2Worker::start(100).await];
    let gateway = gateway_of(&[&workers[0], &workers[1]]).await;
    let (mut begun, mut waiting) = (Vec::new(), Vec::new());
    for i in 0..60 {
        let exchange = Exchange::post(PROTOCOLS[i % 2], gateway.addr, CHAT, &chat_stream("hi")).await;
        let (at, mut call) = either(&workers).await;
        call.begin_stream();
        if i % 4 < 2 {
            call.say("one");
            begun.push((exchange, call, at));
        } else {
            waiting.push((exchange, call, at));
        }
    }
    for (exchange, ..) in begun.iter_mut().chain(&mut waiting) {
        assert_eq!(exchange.status().await, 200);
    }
    assert_eq!(begun.iter().chain(&waiting).filter(|(.., at)| *at == 0).count(), 30, "by turns");
    workers[0].stop().await;
    for (mut exchange, call, at) in begun {
        assert_eq!(exchange.next_event().await.event(), delta("one").to_string());
        if at == 0 {
            assert!(exchange.next_event().await.event().contains("stream_lost"));
            assert_eq!(exchange.next_event().await, Next::End { end: End::Aborted, torn: false });
        } else {
            goes_on(&mut exchange, call).await;
        }
    }
    // Who had nothing yet begins again at the other one.
    let lost = waiting.iter().filter(|(.., at)| *at == 0).count();
    for _ in 0..lost {
        let mut call = workers[1].call().await;
        call.begin_stream();
        call.say("again");
        call.done();
    }
    for (mut exchange, mut call, at) in waiting {
        if at == 0 {
            assert_eq!(exchange.next_event().await.event(), delta("again").to_string());
            assert_eq!(exchange.next_event().await.event(), DONE);
        } else {
            call.say("one");
            assert_eq!(exchange.next_event().await.event(), delta("one").to_string());
            goes_on(&mut exchange, call).await;
        }
    }
    gateway.idle().await;
}

#[tokio::test]
async fn an_answer_that_its_worker_resets_does_not_end_well() {
    let worker = H2Worker::start(100).await;
    let gateway = gateway_of(&[&worker]).await;
    for reason in [h2::Reason::CANCEL, h2::Reason::NO_ERROR, h2::Reason::INTERNAL_ERROR] {
        let (mut exchange, call) = begun(&worker, &gateway, Protocol::Http1).await;
        call.reset(reason);
        assert!(exchange.next_event().await.event().contains("stream_lost"), "{reason}");
        assert_eq!(exchange.next_event().await, Next::End { end: End::Aborted, torn: false });
    }
    gateway.idle().await;
}

#[tokio::test]
async fn over_tls_the_worker_chooses_and_http1_comes_first_unless_configured() {
    let authority = Authority::new();
    let identity = authority.sign("worker");
    let (fake, scripted) = (FakeWorker::start().await, H2Worker::start(100).await);
    // What the worker knows, what is configured, what is spoken.
    for (knows, http2, speaks_h2) in [
        (&["h2", "http/1.1"][..], false, false),
        (&["h2", "http/1.1"], true, true),
        (&["http/1.1"], true, false),
        (&["h2"], false, true),
    ] {
        let backend = if speaks_h2 { scripted.addr() } else { fake.addr() };
        let front = TlsFront::speaking(backend, &identity, knows).await;
        let toml = format!(
            "[[worker]]\nurl = \"https://{}\"\nhttp2 = {http2}\ntls = {{ ca_file = {:?} }}\n",
            front.addr, authority.ca_file
        );
        let gateway = Gateway::builder().config(&toml).start().await;
        gateway.wait_ready(1).await;
        if speaks_h2 {
            let (mut exchange, call) = begun(&scripted, &gateway, Protocol::Http1).await;
            goes_on(&mut exchange, call).await;
        } else {
            let response = post(gateway.addr, CHAT, &chat("hi")).await;
            assert_eq!(response.status(), 200, "{knows:?} {http2}");
        }
    }
}
