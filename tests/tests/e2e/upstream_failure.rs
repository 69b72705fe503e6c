//! Hazard: a worker fails, and the client gets half an answer that looks whole, the same answer twice, or
//! none where another worker could have given it. Also the reverse: a client's mistake is held against a
//! worker.

use keyway_tests::chaos_proxy::Fault;
use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::openai::{CHAT, DONE, chat, chat_stream, delta};
use keyway_tests::{
    ChaosProxy, Client, Cluster, End, Exchange, FakeWorker, Gateway, Next, Response, eventually, http1, post,
};
use serde_json::Value;

/// Reads a stream that must end by one error event, no `[DONE]`, and an aborted body; returns the events
/// before.
async fn broken_off(exchange: &mut Exchange) -> Vec<String> {
    let mut events = Vec::new();
    let end = loop {
        match exchange.next_event().await {
            Next::Event(data) => events.push(data),
            end @ Next::End { .. } => break end,
        }
    };
    assert_eq!(end, Next::End { end: End::Aborted, torn: false }, "after {events:?}");
    assert!(!events.iter().any(|e| e == DONE), "{events:?}");
    let last: Value = serde_json::from_str(&events.pop().expect("an error event")).expect("JSON");
    assert!(last["error"]["message"].is_string() && last["error"]["type"].is_string(), "{last}");
    assert!(!last.to_string().contains("127.0.0.1"), "addresses stay inside: {last}");
    events
}

/// Breaks off every call before its head: on a kept connection, where that may be its own end, and on a new
/// one.
pub(crate) async fn cuts(worker: &FakeWorker) -> ! {
    loop {
        worker.call().await.cut();
    }
}

#[tokio::test]
async fn a_refusing_worker_s_requests_go_to_another() {
    let cluster = Cluster::of_fakes(2, "round-robin").await;
    cluster.fakes[0].stop().await;
    for i in 0..12 {
        assert_eq!(cluster.served_by(&cluster.chat(&format!("request {i}")).await), 1);
    }
    eventually!(cluster.gateway.ready_workers().await == 1, "the refusing worker is down");
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn a_call_that_dies_before_its_head_is_repeated_elsewhere() {
    let cluster = Cluster::of_fakes(2, "round-robin").await;
    let [a, b] = &cluster.fakes[..] else { panic!("two workers") };
    a.manual();
    b.answer();
    let mut served = Vec::new();
    for i in 0..4 {
        let mut client = Client::connect(cluster.addr()).await;
        client.post(CHAT, &chat(&format!("request {i}"))).await;
        let response = tokio::select! {
            response = client.response() => response,
            never = cuts(a) => never,
        };
        assert_eq!((response.status(), response.end), (200, End::Complete));
        served.push(cluster.served_by(&response));
    }
    assert_eq!(served, [1; 4], "every answer is b's");
    assert!(a.request_count() > 0, "a was tried");
}

#[tokio::test]
async fn when_no_worker_answers_the_client_is_told_so() {
    let cluster = Cluster::of_fakes(2, "prefix").await;
    cluster.fakes.iter().for_each(FakeWorker::manual);
    let mut client = Client::connect(cluster.addr()).await;
    client.post(CHAT, &chat("hi")).await;
    let response = tokio::select! {
        response = client.response() => response,
        never = cuts(&cluster.fakes[0]) => never,
        never = cuts(&cluster.fakes[1]) => never,
    };
    assert!([502, 503].contains(&response.status()), "{}", response.status());
    assert!(response.json()["error"]["message"].is_string());
    assert!(!response.text().contains("127.0.0.1"), "addresses stay inside: {}", response.text());
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn a_broken_stream_ends_by_an_error_event_and_is_not_repeated() {
    let cluster = Cluster::of_fakes(2, "prefix").await;
    for protocol in PROTOCOLS {
        cluster.fakes.iter().for_each(FakeWorker::manual);
        let before: usize = cluster.fakes.iter().map(FakeWorker::request_count).sum();
        let mut exchange = Exchange::post(protocol, cluster.addr(), CHAT, &chat_stream("hi")).await;
        let mut call =
            tokio::select! { call = cluster.fakes[0].call() => call, call = cluster.fakes[1].call() => call };
        call.begin_stream().await;
        call.say("one").await;
        call.say("two").await;
        assert_eq!(exchange.status().await, 200);
        assert_eq!(exchange.next_event().await.event(), delta("one").to_string());
        call.cut();
        assert_eq!(broken_off(&mut exchange).await, [delta("two").to_string()], "{protocol:?}");
        let after: usize = cluster.fakes.iter().map(FakeWorker::request_count).sum();
        assert_eq!(after - before, 1, "nothing is sent twice once a byte was relayed");
        cluster.gateway.idle().await;
    }
    let metrics = cluster.gateway.metrics().await;
    assert_eq!(
        metrics.sum("keyway_requests_total", &[("outcome", "complete")]),
        0.0,
        "a broken stream is no success"
    );
    assert_eq!(metrics.sum("keyway_requests_total", &[]), 2.0);
}

#[tokio::test]
async fn a_stream_cut_inside_an_event_shows_whole_events_only() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    let second = format!("data: {}\n\n", delta("zwölf"));
    for protocol in PROTOCOLS {
        for cut in [1, 5, 7, second.len() / 2, second.find('ö').unwrap() + 1, second.len() - 1] {
            cluster.gateway.wait_ready(1).await;
            let mut exchange = Exchange::post(protocol, cluster.addr(), CHAT, &chat_stream("hi")).await;
            let mut call = cluster.fakes[0].call().await;
            call.begin_stream().await;
            call.say("one").await;
            call.chunk(&second.as_bytes()[..cut]).await;
            assert_eq!(exchange.status().await, 200);
            assert_eq!(exchange.next_event().await.event(), delta("one").to_string());
            call.cut();
            assert!(broken_off(&mut exchange).await.is_empty(), "{protocol:?}, cut at {cut}");
        }
    }
}

#[tokio::test]
async fn a_connection_cut_at_any_byte_never_looks_like_a_whole_answer() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    let whole = post(worker.addr(), CHAT, &chat_stream("hi")).await;
    let wire = [whole.head.raw.clone(), http1::chunk(&whole.body)].concat();
    let done = whole.head.raw.len() + whole.text().find("data: [DONE]").expect("it ends so");
    worker.manual();
    for cut in (1..done).step_by(37) {
        cluster.gateway.wait_ready(1).await;
        let mut exchange = Exchange::post(PROTOCOLS[cut % 2], cluster.addr(), CHAT, &chat_stream("hi")).await;
        let mut call = worker.call().await;
        call.raw(&wire[..cut]).await;
        call.cut();
        if cut < whole.head.raw.len() {
            assert_eq!(exchange.status().await, 502, "cut at {cut}");
            continue;
        }
        assert_eq!(exchange.status().await, 200);
        for event in broken_off(&mut exchange).await {
            assert!(whole.text().contains(&format!("data: {event}\n\n")), "cut at {cut}: {event}");
        }
    }
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn a_worker_s_answer_may_come_byte_by_byte_or_after_a_stall() {
    let worker = FakeWorker::start().await;
    let proxy = ChaosProxy::start(worker.addr()).await;
    let gateway = Gateway::builder().worker(proxy.addr()).start().await;
    gateway.wait_ready(1).await;
    let whole = post(worker.addr(), CHAT, &chat_stream("hi")).await;
    proxy.set(Fault::Drip);
    let dripped = post(gateway.addr, CHAT, &chat_stream("hi")).await;
    assert_eq!((dripped.text(), dripped.end), (whole.text(), End::Complete));

    proxy.set(Fault::StallAfter(0));
    let mut client = Client::connect(gateway.addr).await;
    client.post(CHAT, &chat_stream("hi")).await;
    eventually!(worker.request_count() == 3, "the worker has answered into the stall");
    proxy.set(Fault::None);
    let stalled = client.response().await;
    assert_eq!((stalled.text(), stalled.end), (whole.text(), End::Complete));
    gateway.idle().await;
}

#[tokio::test]
async fn an_unstreamed_answer_that_is_too_short_is_aborted() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    for protocol in PROTOCOLS {
        cluster.gateway.wait_ready(1).await;
        let mut exchange = Exchange::post(protocol, cluster.addr(), CHAT, &chat("hi")).await;
        let mut call = cluster.fakes[0].call().await;
        call.head(200, &[("content-type", "application/json"), ("content-length", "50")]).await;
        call.raw(b"{\"half\":").await;
        assert_eq!(exchange.status().await, 200);
        call.cut();
        assert_eq!(exchange.body().await.1, End::Aborted, "{protocol:?}");
        cluster.gateway.idle().await;
    }
}

#[tokio::test]
async fn bytes_beyond_the_promised_length_reach_nobody() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    let mut client = Client::connect(cluster.addr()).await;
    client.post(CHAT, &chat("hi")).await;
    let mut call = cluster.fakes[0].call().await;
    call.raw(
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged",
    )
    .await;
    assert_eq!(client.response().await.text(), "{}");
    call.must_be_aborted().await; // a connection in that state is not used again
    cluster.fakes[0].answer();
    client.post(CHAT, &chat("next")).await;
    assert_eq!(client.response().await.json()["choices"][0]["message"]["content"], "one two three");
}

#[tokio::test]
async fn a_worker_s_own_errors_pass_unchanged_and_a_client_s_mistake_marks_no_worker() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    for status in [400, 401, 404, 413, 422, 429, 500, 503] {
        for _ in 0..6 {
            worker.manual();
            let mut client = Client::connect(cluster.addr()).await;
            client.post(CHAT, &chat("hi")).await;
            let body = format!("{{\"error\": {{\"message\":\"scripted {status}\" }}}}");
            let headers = [("content-type", "application/json"), ("retry-after", "7")];
            worker.call().await.respond(status, &headers, body.as_bytes()).await;
            let response = client.response().await;
            assert_eq!((response.status(), response.text()), (status, body));
            assert_eq!(response.header("retry-after"), Some("7"));
        }
        assert_eq!(cluster.gateway.ready_workers().await, 1, "after {status}");
    }
    worker.answer();
    cluster.chat("after").await;
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn an_error_inside_a_stream_passes_unchanged_and_is_not_counted_as_success() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    let mut exchange = Exchange::post(PROTOCOLS[0], cluster.addr(), CHAT, &chat_stream("hi")).await;
    let mut call = cluster.fakes[0].call().await;
    call.begin_stream().await;
    call.say("one").await;
    let error = r#"{"error": {"message": "engine trouble", "type": "internal", "code": 500}}"#;
    call.event(error).await;
    call.done().await;
    assert_eq!(exchange.status().await, 200);
    let events = [exchange.next_event().await, exchange.next_event().await, exchange.next_event().await];
    assert_eq!(events.map(Next::event), [delta("one").to_string(), error.to_owned(), DONE.to_owned()]);
    assert_eq!(exchange.next_event().await, Next::End { end: End::Complete, torn: false });
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_requests_total", &[("outcome", "complete")]), 0.0);
}

#[tokio::test]
async fn a_worker_that_comes_back_is_used_again() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.chat("before").await;
    cluster.fakes[0].stop().await;
    eventually!(
        cluster.gateway.readyz().await == 503 || post_status(&cluster).await == 503,
        "no worker is ready"
    );
    let refused: Response = post(cluster.addr(), CHAT, &chat("down")).await;
    assert_eq!(refused.status(), 503);
    assert!(refused.header("retry-after").is_some(), "{:?}", refused.head);
    assert!(refused.json()["error"]["message"].is_string());
    cluster.fakes[0].restart().await;
    cluster.gateway.wait_ready(1).await;
    cluster.chat("after").await;
    assert_eq!(cluster.gateway.readyz().await, 200);
}

async fn post_status(cluster: &Cluster) -> u16 {
    post(cluster.addr(), CHAT, &chat("probe")).await.status()
}

#[tokio::test]
async fn a_worker_that_streams_is_alive_whatever_its_probe_says() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    let mut exchange = Exchange::post(PROTOCOLS[0], cluster.addr(), CHAT, &chat_stream("hi")).await;
    let mut call = cluster.fakes[0].call().await;
    call.begin_stream().await;
    assert_eq!(exchange.status().await, 200);
    cluster.fakes[0].set_health(500);
    call.say("still here").await;
    assert_eq!(exchange.next_event().await.event(), delta("still here").to_string());
    assert_eq!(cluster.gateway.ready_workers().await, 1);
    call.done().await;
    assert_eq!(exchange.next_event().await.event(), DONE);
}

#[tokio::test]
async fn without_a_worker_that_answers_the_gateway_is_alive_but_not_ready() {
    let dead = FakeWorker::start().await;
    dead.stop().await;
    let gateway = Gateway::builder().worker(dead.addr()).start().await;
    assert_eq!(keyway_tests::get(gateway.admin, "/livez").await.status(), 200);
    assert_eq!(gateway.readyz().await, 503);
    let response = post(gateway.addr, CHAT, &chat("hi")).await;
    assert_eq!(response.status(), 503);
    assert!(response.header("retry-after").is_some());
}
