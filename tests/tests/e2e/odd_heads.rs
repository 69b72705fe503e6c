//! Hazard: a worker's answer is not HTTP, or could be read in two ways, and what of it reaches the client is
//! not an error that the client's library understands. It gets a 502 in the API's shape and nothing of the
//! worker's bytes.

use std::net::SocketAddr;

use keyway_tests::h2_client::H2Client;
use keyway_tests::openai::{CHAT, answer, chat, chat_stream};
use keyway_tests::{Call, Client, Cluster, End, FakeWorker, Gateway, H2Worker};

/// What nobody may see.
const LEAK: &str = "of-the-worker";

/// Heads that are none, with what follows them.
fn malformed() -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = [
        "nonsense of-the-worker\r\n\r\n",
        "HTTP/1.1 two hundred\r\n\r\nof-the-worker",
        "HTTP/1.1 99 of-the-worker\r\n\r\n",
        "HTTP/2.0 200 OK\r\n\r\nof-the-worker",
        "HTTP/1.1 200 OK\r\nx of-the-worker\r\ncontent-length: 2\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 13\r\n\r\nof-the-worker",
        "HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nof-the-worker",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nd\r\nof-the-worker\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\nof-the-worker",
        "HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\nd\r\nof-the-worker\r\n0\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nof-the-worker",
        "HTTP/1.1 103 Early Hints\r\nlink: </of-the-worker>\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, chunked\r\n\r\nof-the-worker",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\nd\r\nof-the-worker\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: +13\r\n\r\nof-the-worker",
        "HTTP/1.1 204 No Content\r\ncontent-length: of-the-worker\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "\0\x01\x02of-the-worker",
        "HTTP/1.1 200 OK\r\nx-half: of-the-worker",
        "",
    ]
    .map(|head| head.as_bytes().to_vec())
    .to_vec();
    let long = "of-the-worker".repeat(10_000);
    all.push(format!("HTTP/1.1 200 OK\r\nx-long: {long}\r\ncontent-length: 2\r\n\r\n{{}}").into_bytes());
    let many = "x-one-of-many: of-the-worker\r\n".repeat(200);
    all.push(format!("HTTP/1.1 200 OK\r\n{many}content-length: 2\r\n\r\n{{}}").into_bytes());
    let whole = "HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\nof-the-worker";
    all.push(["HTTP/1.1 102 Processing\r\n\r\n".repeat(100), whole.to_owned()].concat().into_bytes());
    let hint = format!("HTTP/1.1 103 Early Hints\r\nlink: <{}>\r\n\r\n", "of-the-worker".repeat(1_000));
    all.push([hint.repeat(10), whole.to_owned()].concat().into_bytes());
    all.push([b"HTTP/1.1 200 OK\r\nx-bytes: \x01\x7f\r\n\r\n", LEAK.as_bytes()].concat());
    all
}

#[tokio::test]
async fn an_answer_that_is_none_is_a_502_in_the_api_s_shape() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    for (n, head) in malformed().into_iter().enumerate() {
        for body in [chat("whole"), chat_stream("as events")] {
            let mut client = Client::connect(cluster.addr()).await;
            client.post(CHAT, &body).await;
            let answers = async {
                loop {
                    let mut call = worker.call().await;
                    call.raw(&head).await;
                    call.cut();
                }
            };
            let answer = tokio::select! {
                answer = client.response() => answer,
                () = answers => continue,
            };
            let error = answer.json();
            assert_eq!((answer.status(), answer.end), (502, End::Complete), "{n}: {error}");
            assert_eq!(answer.header("content-type"), Some("application/json"), "{n}");
            assert_eq!(error["error"]["type"], "server_error", "{n}: {error}");
            assert!(
                error["error"]["code"].is_string() && error["error"]["message"].is_string(),
                "{n}: {error}"
            );
            assert!(answer.header("x-request-id").is_some(), "{n}");
            let raw = [&answer.head.raw[..], &answer.body].concat();
            assert!(!String::from_utf8_lossy(&raw).contains(LEAK), "{n}: {error}");
        }
    }
    cluster.gateway.idle().await;
    worker.answer();
    cluster.chat("served as ever").await;
}

#[tokio::test]
async fn interim_answers_and_trailers_harm_nothing() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    for interim in
        ["", "HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 102 P\r\n\r\nHTTP/1.1 103 E\r\nlink: </x>\r\n\r\n"]
    {
        for trailers in ["", "x-sum: 1\r\n", "content-length: 7\r\nx-request-id: theirs\r\n"] {
            let mut client = Client::connect(cluster.addr()).await;
            client.post(CHAT, &chat("with trailers")).await;
            let mut call = worker.call().await;
            let head =
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
            call.raw(format!("{interim}{head}2\r\n{{}}\r\n0\r\n{trailers}\r\n").as_bytes()).await;
            let answer = client.response().await;
            assert_eq!((answer.status(), answer.end), (200, End::Complete), "{interim:?} {trailers:?}");
            assert_eq!((answer.body.as_slice(), answer.header("link")), (&b"{}"[..], None));
            call.cut();
        }
    }
    cluster.gateway.idle().await;
}

/// What a client sees of an answer over either protocol: status, the fields that frame it, and its body.
async fn told(
    addr: SocketAddr,
    http2: bool,
    worker: &FakeWorker,
    head: &str,
) -> (Call, u16, Vec<String>, Vec<u8>) {
    let framing = ["content-length", "transfer-encoding"];
    let answered = async || {
        let mut call = worker.call().await;
        call.raw(format!("HTTP/1.1 {head}\r\n\r\n").as_bytes()).await;
        call
    };
    if http2 {
        let mut client = H2Client::connect(addr).await;
        let mut exchange = client.post(CHAT, &chat("nothing")).await;
        let call = answered().await;
        let head = exchange.head().await;
        let fields = framing.iter().filter(|name| head.headers.contains_key(**name));
        return (
            call,
            head.status.as_u16(),
            fields.map(ToString::to_string).collect(),
            exchange.body().await.0,
        );
    }
    let mut client = Client::connect(addr).await;
    client.post(CHAT, &chat("nothing")).await;
    let call = answered().await;
    let answer = client.response().await;
    let fields = framing.iter().filter(|name| answer.header(name).is_some());
    (call, answer.status(), fields.map(ToString::to_string).collect(), answer.body)
}

#[tokio::test]
async fn a_204_is_told_without_length_or_body_whatever_comes_with_it() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    let mut held = Vec::new();
    for (head, late) in [
        ("204 No Content", ""),
        ("204 No Content\r\ncontent-length: 0", ""),
        ("204 No Content\r\ncontent-length: 13", "of-the-worker"),
        ("204 No Content\r\ntransfer-encoding: chunked", "d\r\nof-the-worker\r\n0\r\n\r\n"),
        (
            "204 No Content\r\ncontent-length: 99",
            "HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\nof-the-worker",
        ),
    ] {
        for http2 in [false, true] {
            let (mut call, status, fields, body) = told(cluster.addr(), http2, worker, head).await;
            assert_eq!((status, fields, body), (204, Vec::new(), Vec::new()), "{head:?}");
            // What comes late is nobody's answer, so this connection gets no other request.
            if late.is_empty() {
                call.cut();
            } else {
                call.try_raw(late.as_bytes()).await;
                held.push(call);
            }
            let mut next = Client::connect(cluster.addr()).await;
            next.post(CHAT, &chat("the next")).await;
            worker.call().await.respond_json(200, &answer("fine", 1, 0)).await;
            let answer = next.response().await;
            assert!(answer.status() == 200 && !answer.text().contains(LEAK), "{head:?}: {}", answer.text());
        }
    }
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn trailers_that_heads_alone_may_say_stay_behind_on_either_side() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    let mut client = H2Client::connect(cluster.addr()).await;
    let mut exchange = client.post(CHAT, &chat("with trailers")).await;
    let mut call = worker.call().await;
    let head = "HTTP/1.1 200 OK\r\nconnection: keep-alive\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    let trailers = "x-sum: 1\r\ncontent-length: 7\r\nx-request-id: theirs\r\nset-cookie: a=b\r\n";
    call.raw(format!("{head}2\r\n{{}}\r\n0\r\n{trailers}\r\n").as_bytes()).await;
    exchange.head().await;
    assert_eq!(exchange.body().await.0, b"{}");
    let came = exchange.trailers().await;
    assert_eq!(came.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["x-sum"]);
    call.cut();
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn over_http2_too_a_worker_s_interim_answers_have_an_end() {
    let worker = H2Worker::start(10).await;
    let gateway = Gateway::builder().args(&["--worker", &worker.url()]).start().await;
    gateway.wait_ready(1).await;
    for (count, status) in [(0, 200), (60, 200), (1_000, 502)] {
        let mut client = Client::connect(gateway.addr).await;
        client.post(CHAT, &chat("after hints")).await;
        let answers = async {
            loop {
                let mut call = worker.call().await;
                call.interim(103, count);
                if count < 100 {
                    call.respond(&answer("fine", 1, 0).to_string());
                } else {
                    call.must_be_reset().await;
                }
            }
        };
        let answer = tokio::select! { answer = client.response() => answer, () = answers => continue };
        assert_eq!(answer.status(), status, "{count}: {}", answer.text());
    }
    gateway.idle().await;
}

#[tokio::test]
async fn over_http2_too_a_204_has_no_body_and_trailers_are_filtered() {
    let worker = H2Worker::start(10).await;
    let gateway = Gateway::builder().args(&["--worker", &worker.url()]).start().await;
    gateway.wait_ready(1).await;
    let mut client = H2Client::connect(gateway.addr).await;
    for (status, length) in [(204, Some("13")), (204, None), (304, None)] {
        let mut exchange = client.post(CHAT, &chat("nothing")).await;
        let mut call = worker.call().await;
        call.head(status, &length.map(|length| ("content-length", length)).into_iter().collect::<Vec<_>>());
        call.try_raw(LEAK.as_bytes());
        let head = exchange.head().await;
        assert_eq!((head.status.as_u16(), head.headers.get("content-length")), (status, None));
        assert_eq!(exchange.body().await.0, b"");
    }
    let mut exchange = client.post(CHAT, &chat("with trailers")).await;
    let mut call = worker.call().await;
    call.head(200, &[("content-type", "application/json")]);
    call.raw(b"{}", false);
    let names = ["x-sum", "content-length", "host", "set-cookie", "x-keyway-worker"];
    call.trailers(
        names
            .map(|name| (name.parse().expect("a name"), http::HeaderValue::from_static("1")))
            .into_iter()
            .collect(),
    );
    exchange.head().await;
    assert_eq!(exchange.body().await.0, b"{}");
    let came = exchange.trailers().await;
    assert_eq!(came.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["x-sum"]);
    gateway.idle().await;
}
