//! Clients that nobody may trust: silent ones, slow ones, ones that flood, ones that take all places.

use std::net::SocketAddr;
use std::time::Duration;

use keyway_worker::{ClientBounds, RunningWorker, WorkerOptions, start};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::client::{completion, options, post, send_by};

/// How long what must come may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Times that a test can wait for.
const SHORT: ClientBounds = ClientBounds {
    connections: 100,
    header_read: Duration::from_millis(300),
    body_idle: Duration::from_millis(300),
    body: Duration::from_secs(30),
    stall: Duration::from_millis(300),
};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

async fn worker(clients: ClientBounds) -> RunningWorker {
    start(WorkerOptions { clients, ..options() }).await.unwrap()
}

/// All that comes until the worker closes.
async fn until_closed(stream: &mut TcpStream) -> String {
    let mut came = Vec::new();
    // A reset is an end too.
    let _ = timeout(PATIENCE, stream.read_to_end(&mut came)).await.expect("the worker closes");
    String::from_utf8_lossy(&came).into_owned()
}

async fn said(addr: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    until_closed(&mut stream).await
}

#[tokio::test]
async fn who_says_nothing_or_half_a_head_is_closed() {
    let worker = worker(SHORT).await;
    let request = b"GET /health HTTP/1.1\r\nhost: w\r\n\r\n";
    for (bytes, answers) in [
        (&b""[..], 0),
        (b"GET /health HTT", 0),
        (b"POST /v1/completions HTTP/1.1\r\nhost: w\r\nx: ", 0),
        (b"PRI * HTTP/2.0\r\n\r\nS", 0),
        (&[PREFACE, SETTINGS].concat(), 0),
        // A head over HTTP/2 that never ends.
        (&[PREFACE, SETTINGS, &[0, 0, 1, 1, 0, 0, 0, 0, 1, 0x82]].concat(), 0),
        (request, 1),
        (&[&request[..], b"GET"].concat(), 1),
    ] {
        let came = said(worker.addr(), bytes).await;
        assert_eq!(
            came.matches("HTTP/1.1 200 OK").count(),
            answers,
            "{:?}: {came}",
            String::from_utf8_lossy(bytes)
        );
    }
    worker.shutdown().await;
}

#[tokio::test]
async fn a_body_that_pauses_is_given_up_and_one_that_comes_in_pieces_is_not() {
    let worker = worker(SHORT).await;
    let body = completion("in pieces", 1).to_string();
    let head = |length: usize| {
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: w\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
        )
    };
    let came =
        said(worker.addr(), [head(body.len() + 1).as_bytes(), body.as_bytes()].concat().as_slice()).await;
    assert!(came.starts_with("HTTP/1.1 408 ") && came.contains("body_too_slow"), "{came}");
    let mut stream = TcpStream::connect(worker.addr()).await.unwrap();
    stream.write_all(head(body.len()).as_bytes()).await.unwrap();
    for piece in body.as_bytes().chunks(7) {
        stream.write_all(piece).await.unwrap();
        tokio::task::yield_now().await;
    }
    assert!(until_closed(&mut stream).await.starts_with("HTTP/1.1 200 "));
    worker.shutdown().await;
}

#[tokio::test]
async fn an_answer_may_take_longer_than_a_client_may_be_silent() {
    let few = WorkerOptions { clients: SHORT, ..options() };
    let worker = start(few).await.unwrap();
    for http2 in [false, true] {
        let client = crate::client::client(http2);
        let body = completion("long", 20_000).to_string();
        let answer = timeout(PATIENCE, send_by(&client, worker.addr(), "POST", "/v1/completions", &body))
            .await
            .unwrap();
        assert_eq!(answer.json()["usage"]["completion_tokens"], 20_000);
    }
    worker.shutdown().await;
}

#[tokio::test]
async fn who_has_been_idle_for_longest_makes_room() {
    let worker = worker(ClientBounds { connections: 3, ..ClientBounds::default() }).await;
    let mut idle = Vec::new();
    for _ in 0..3 {
        let mut stream = TcpStream::connect(worker.addr()).await.unwrap();
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: w\r\n\r\n").await.unwrap();
        let mut first = [0; 12];
        stream.read_exact(&mut first).await.unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
        idle.push(stream);
    }
    for _ in 0..4 {
        let answer =
            timeout(PATIENCE, post(worker.addr(), "/v1/completions", &completion("a", 1))).await.unwrap();
        assert_eq!(answer.status, 200);
    }
    // The first of them it was.
    until_closed(&mut idle[0]).await;
    worker.shutdown().await;
}

#[tokio::test]
async fn a_flood_of_frames_that_ask_for_nothing_ends_its_connection() {
    let worker = worker(ClientBounds::default()).await;
    const PING: &[u8] = b"\0\0\x08\x06\0\0\0\0\0flooding";
    const WINDOW: &[u8] = b"\0\0\x04\x08\0\0\0\0\0\0\0\0\x01";
    for frame in [PING, SETTINGS, WINDOW] {
        let mut stream = TcpStream::connect(worker.addr()).await.unwrap();
        stream.write_all(&[PREFACE, SETTINGS].concat()).await.unwrap();
        let (mut from, mut to) = stream.split();
        let floods = async {
            let many = frame.repeat(100);
            while to.write_all(&many).await.is_ok() {
                tokio::task::yield_now().await;
            }
        };
        let reads = async {
            let mut room = [0; 4096];
            while from.read(&mut room).await.is_ok_and(|bytes| bytes > 0) {}
        };
        let over = async {
            tokio::select! { () = floods => {}, () = reads => {} }
        };
        timeout(PATIENCE, over).await.expect("the connection is closed");
    }
    assert_eq!(post(worker.addr(), "/v1/completions", &completion("a", 1)).await.status, 200);
    worker.shutdown().await;
}

#[tokio::test]
async fn a_stream_over_http2_that_nobody_reads_is_given_up() {
    let worker = worker(SHORT).await;
    // One request, by indexed fields alone but for its path; its window is never opened.
    let path = b"/v1/completions";
    let headers = [&[0x83, 0x86, 0x04, path.len() as u8][..], path, &[0x01, 1, b'w']].concat();
    let body =
        crate::client::with(completion("unread", 30_000), serde_json::json!({"stream": true})).to_string();
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
    };
    let mut stream = TcpStream::connect(worker.addr()).await.unwrap();
    let begin = [PREFACE, SETTINGS, &frame(1, 4, 1, &headers), &frame(0, 1, 1, body.as_bytes())].concat();
    stream.write_all(&begin).await.unwrap();
    crate::client::metric_becomes(worker.addr(), "keyway_worker_requests_running", 1.0).await;
    // It is aborted long before its last token.
    crate::client::metric_becomes(worker.addr(), "keyway_worker_requests_total{outcome=\"aborted\"}", 1.0)
        .await;
    worker.shutdown().await;
}
