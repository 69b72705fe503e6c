//! Hazard: a worker's answer is not HTTP, or could be read in two ways, and what of it reaches the client is not an error that the
//! client's library understands. It gets a 502 in the API's shape and nothing of the worker's bytes.

use keyway_tests::openai::{CHAT, chat, chat_stream};
use keyway_tests::{Client, Cluster, End};

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
