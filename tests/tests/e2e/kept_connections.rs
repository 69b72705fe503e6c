//! Hazard: a worker closes a kept connection as the next request goes out, and that is held against it or
//! shown to the client; or what must not be sent twice is.

use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::openai::{CHAT, DONE, chat, chat_stream, delta};
use keyway_tests::tls::{Authority, TlsFront};
use keyway_tests::{Client, Cluster, Exchange, FakeWorker, Gateway, H2Call, H2Worker, Metrics, get, post};

/// What was counted of one worker.
async fn counts(gateway: &Gateway) -> [f64; 4] {
    let metrics: Metrics = gateway.metrics().await;
    let names = [
        "keyway_connection_races_total",
        "keyway_retries_total",
        "keyway_worker_ejections_total",
        "keyway_worker_ready",
    ];
    names.map(|name| metrics.sum(name, &[]))
}

/// Sends requests, each over a connection that has answered before and that the worker closes under it.
async fn race(gateway: &Gateway, worker: &FakeWorker, times: usize) {
    for i in 0..times {
        // So that one is kept: a probe's will do as well.
        worker.answer();
        assert_eq!(post(gateway.addr, CHAT, &chat(&format!("before {i}"))).await.status(), 200);
        worker.manual();
        let mut exchange =
            Exchange::post(PROTOCOLS[i % 2], gateway.addr, CHAT, &chat_stream(&format!("request {i}"))).await;
        worker.call().await.cut();
        let mut again = worker.call().await;
        again.begin_stream().await;
        assert_eq!(exchange.status().await, 200);
        again.say("one").await;
        assert_eq!(exchange.next_event().await.event(), delta("one").to_string());
        again.done().await;
        assert_eq!(exchange.next_event().await.event(), DONE);
    }
}

fn said_nothing(gateway: &Gateway) {
    let log = gateway.process.log();
    let blames = ["gave no answer", "ready=false"];
    let blamed = log.iter().find(|line| blames.iter().any(|blame| line.contains(blame)));
    assert_eq!(blamed, None);
}

#[tokio::test]
async fn a_close_that_crosses_a_request_is_seen_by_nobody() {
    let cluster = Cluster::builder().fakes(1).config("[limits]\nmax_cores = 1").start().await;
    race(&cluster.gateway, &cluster.fakes[0], 12).await;
    cluster.gateway.idle().await;
    let [races, retries, ejections, ready] = counts(&cluster.gateway).await;
    assert!(races >= 12.0, "{races}");
    assert_eq!((retries, ejections, ready), (0.0, 0.0, 1.0));
    said_nothing(&cluster.gateway);
}

#[tokio::test]
async fn a_close_over_tls_is_one_too() {
    let worker = FakeWorker::start().await;
    let authority = Authority::new();
    let front = TlsFront::start(worker.addr(), &authority.sign("worker"), None).await;
    let config = format!(
        "[limits]\nmax_cores = 1\n[[worker]]\nurl = \"https://{}\"\ntls = {{ ca_file = {:?} }}\n",
        front.addr, authority.ca_file
    );
    let gateway = Gateway::builder().config(&config).start().await;
    gateway.wait_ready(1).await;
    race(&gateway, &worker, 4).await;
    let [races, retries, ejections, ready] = counts(&gateway).await;
    assert!(races >= 4.0, "{races}");
    assert_eq!((retries, ejections, ready), (0.0, 0.0, 1.0));
    said_nothing(&gateway);
}

#[tokio::test]
async fn a_kept_http2_connection_that_ends_is_nobody_s_fault() {
    let worker = H2Worker::start(100).await;
    let config = "[limits]\nmax_cores = 1";
    let gateway = Gateway::builder().config(config).args(&["--worker", &worker.url()]).start().await;
    gateway.wait_ready(1).await;
    for protocol in PROTOCOLS {
        // Three that wait for their heads, and go over one new connection together.
        let mut asked = Vec::new();
        for i in 0..3 {
            asked.push(
                Exchange::post(protocol, gateway.addr, CHAT, &chat_stream(&format!("request {i}"))).await,
            );
        }
        let lost = [worker.call().await, worker.call().await, worker.call().await];
        worker.hang_up();
        let mut again = [worker.call().await, worker.call().await, worker.call().await];
        assert!(again.iter().all(|call| call.connection != lost[0].connection));
        for call in &mut again {
            call.begin_stream();
            call.say("one");
        }
        for exchange in &mut asked {
            assert_eq!(exchange.status().await, 200);
            assert_eq!(exchange.next_event().await.event(), delta("one").to_string());
        }
        for call in again {
            call.done();
        }
    }
    gateway.idle().await;
    assert_eq!(counts(&gateway).await, [6.0, 0.0, 0.0, 1.0]);
    said_nothing(&gateway);
}

#[tokio::test]
async fn what_must_not_be_sent_twice_goes_over_a_connection_of_its_own() {
    let cluster = Cluster::builder().fakes(1).config("[limits]\nmax_cores = 1").start().await;
    let worker = &cluster.fakes[0];
    for i in 0..4 {
        cluster.chat(&format!("keeps a connection {i}")).await;
        worker.manual();
        let before = worker.request_count();
        let mut client = Client::connect(cluster.addr()).await;
        client.post("/v1/batches", b"{}").await;
        worker.call().await.cut();
        let response = client.response().await;
        assert_eq!((response.status(), worker.request_count() - before), (502, 1), "{}", response.text());
        worker.answer();
    }
    assert_eq!(counts(&cluster.gateway).await[0], 0.0);
}

async fn asked(worker: &H2Worker, gateway: &Gateway) -> (Exchange, H2Call) {
    let exchange = Exchange::post(PROTOCOLS[0], gateway.addr, CHAT, &chat_stream("hi")).await;
    (exchange, worker.call().await)
}

#[tokio::test]
async fn what_must_not_be_sent_twice_is_not_over_http2_and_nobody_is_blamed() {
    let worker = H2Worker::start(100).await;
    let config = "[limits]\nmax_cores = 1";
    let gateway = Gateway::builder().config(config).args(&["--worker", &worker.url()]).start().await;
    gateway.wait_ready(1).await;
    for _ in 0..3 {
        // So that the connection has carried an answer.
        let (mut exchange, mut call) = asked(&worker, &gateway).await;
        call.begin_stream();
        call.done();
        assert_eq!(exchange.status().await, 200);
        let mut client = Client::connect(gateway.addr).await;
        client.post("/v1/batches", b"{}").await;
        let _call = worker.call().await;
        worker.hang_up();
        let response = client.response().await;
        assert_eq!(response.status(), 502);
        assert_eq!(response.json()["error"]["code"], "connection_closed");
    }
    // Once each: the next call is another request's.
    let (mut exchange, mut call) = asked(&worker, &gateway).await;
    assert_eq!(call.head.uri.path(), CHAT);
    call.begin_stream();
    call.done();
    assert_eq!(exchange.status().await, 200);
    assert_eq!(counts(&gateway).await[1..], [0.0, 0.0, 1.0]);
    said_nothing(&gateway);
}

#[tokio::test]
async fn a_worker_that_never_answers_is_to_blame_and_the_log_says_why() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    for (answer, cause) in [
        (&b""[..], "closed the connection without a word"),
        (b"HTTP/1.1 200 OK\r\ncontent-le", "before its answer's end"),
        (b"SSH-2.0-OpenSSH\r\n", "malformed: its head is not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", "malformed: its length"),
    ] {
        worker.manual();
        let body = chat("hi");
        let asking = post(cluster.addr(), CHAT, &body);
        let failing = async {
            loop {
                let mut call = worker.call().await;
                call.raw(answer).await;
                call.cut();
            }
        };
        let response = tokio::select! { response = asking => response, () = failing => unreachable!() };
        assert_eq!(response.status(), 502, "{cause}");
        assert!(response.json()["error"]["code"].is_string());
        cluster.gateway.process.announced(cause).await;
        let log = cluster.gateway.process.log();
        let said = log.iter().rev().find(|line| line.contains("worker gave no answer")).expect("a warning");
        assert!(said.contains(cause) && said.contains("lost"), "{said}");
        worker.answer();
    }
    assert_eq!(get(cluster.gateway.admin, "/livez").await.status(), 200);
}
