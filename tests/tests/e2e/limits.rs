//! Hazard: more than the gateway will hold, in one request or in all. It is refused in OpenAI's shape before
//! any worker sees it, and what is held is let go.

use std::net::SocketAddr;

use bytes::Bytes;
use keyway_tests::eventually::patient;
use keyway_tests::exchange::PROTOCOLS;
use keyway_tests::openai::{CHAT, chat, chat_stream};
use keyway_tests::{Client, Cluster, End, Exchange, FakeWorker, Gateway, Protocol, eventually, http1, post};
use tokio::net::TcpStream;

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
async fn a_refusal_is_read_by_who_still_sends_what_was_refused() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let refused = [
        (format!("POST {CHAT} HTTP/1.1\r\nhost: k\r\ncontent-length: {}\r\n\r\n", 2 * LIMIT), 413),
        (format!("POST {CHAT} HTTP/1.1\r\nhost: k\r\nx: {}\r\ncontent-length: {LIMIT}\r\n\r\n", "y".repeat(HEAD.0)), 431),
        (format!("POST /nowhere HTTP/1.1\r\nhost: k\r\ncontent-length: {LIMIT}\r\n\r\n"), 404),
        ("GET /v1/realtime HTTP/1.1\r\nhost: k\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
          sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".to_owned(), 501),
    ];
    for (head, status) in refused {
        let mut client = Client::connect(cluster.addr()).await;
        client.send(head.as_bytes()).await;
        // More than lies in both sockets' buffers, so it comes after the refusal; as clients do that read
        // once all is sent.
        for _ in 0..16 {
            client.send(&vec![b' '; 1 << 20]).await;
        }
        let response = client.response().await;
        assert_eq!((response.status(), response.end), (status, End::Complete), "{head}");
    }
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

/// Bytes of the largest head, and header fields, and bytes of the longest path and query.
const HEAD: (usize, usize, usize) = (32 << 10, 96, 8 << 10);

/// A `POST` with this many bytes of head, so many header fields, and so many bytes of path and query.
struct Shape {
    head: usize,
    fields: usize,
    path: usize,
}

impl Shape {
    fn path(&self) -> String {
        let begin = "/v1/chat/completions?x=";
        format!("{begin}{}", "q".repeat(self.path - begin.len()))
    }

    /// Header fields beside the host's and the length's, so long that the head is as long as it is to be.
    fn fields(&self, host: &str, length: usize) -> Vec<(String, String)> {
        let line =
            format!("POST {} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {length}\r\n\r\n", self.path());
        let mut fields: Vec<_> =
            (0..self.fields - 2).map(|i| (format!("x-{i:02}"), "v".to_owned())).collect();
        let so_far =
            line.len() + fields.iter().map(|(name, value)| name.len() + value.len() + 4).sum::<usize>();
        fields[0].1.push_str(&"v".repeat(self.head.saturating_sub(so_far)));
        fields
    }

    async fn over_http1(&self, addr: SocketAddr) -> (u16, Vec<u8>) {
        let mut client = Client::connect(addr).await;
        let body = chat("in a large head");
        let fields = self.fields(&addr.to_string(), body.len());
        let fields: Vec<_> = fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        client.request("POST", &self.path(), &fields, &body).await;
        let response = client.response().await;
        (response.status(), response.body)
    }

    async fn over_http2(&self, addr: SocketAddr) -> (u16, Vec<u8>) {
        let stream = TcpStream::connect(addr).await.unwrap();
        let (mut send, connection) = h2::client::handshake(stream).await.unwrap();
        let driver = tokio::spawn(connection);
        let body = chat("in a large head");
        let mut request = http::Request::post(format!("http://{addr}{}", self.path()));
        // The host is none of the fields here, and "host: " and the line's end do not count.
        let at = Self { head: self.head + "host: \r\n".len(), fields: self.fields + 1, ..*self };
        for (name, value) in at.fields(&addr.to_string(), body.len()) {
            request = request.header(name, value);
        }
        let request = request.header("content-length", body.len()).body(()).unwrap();
        let (response, mut out) = send.send_request(request, false).unwrap();
        let _ = out.send_data(Bytes::from(body), true); // refused already, maybe
        let (head, mut body) = patient("an answer", response).await.expect("an answer").into_parts();
        let mut whole = Vec::new();
        while let Some(Ok(piece)) = patient("the body", body.data()).await {
            whole.extend_from_slice(&piece);
        }
        driver.abort();
        (head.status.as_u16(), whole)
    }

    /// What the answer is over either protocol: its status, and the error's code.
    async fn answers(&self, addr: SocketAddr) -> [(u16, String); 2] {
        let code = |(status, body): (u16, Vec<u8>)| {
            let json: serde_json::Value =
                serde_json::from_slice(&body).unwrap_or_else(|_| panic!("{status} without JSON"));
            assert!(
                status == 200 || json["error"]["message"].as_str().is_some_and(|m| m.contains("limit")),
                "{json}"
            );
            (status, json["error"]["code"].as_str().unwrap_or_default().to_owned())
        };
        [code(self.over_http1(addr).await), code(self.over_http2(addr).await)]
    }
}

#[tokio::test]
async fn a_head_at_its_limits_passes_and_one_above_is_told_why() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let (head, fields, path) = HEAD;
    let within = [
        Shape { head, fields: 4, path: 30 },
        Shape { fields, head: 3_000, path: 30 },
        Shape { path, head: 9_000, fields: 4 },
    ];
    for (i, shape) in within.iter().enumerate() {
        let answers = shape.answers(cluster.addr()).await;
        assert_eq!(answers.map(|(status, _)| status), [200, 200]);
        assert_eq!(cluster.fakes[0].request_count(), 2 * (i + 1));
    }
    let above = [
        (Shape { head: head + 1, fields: 4, path: 30 }, 431, "head_too_large"),
        (Shape { fields: fields + 1, head: 3_000, path: 30 }, 431, "head_too_large"),
        (Shape { path: path + 1, head: 9_000, fields: 4 }, 414, "uri_too_long"),
        (Shape { head: 60_000, fields: 4, path: 30 }, 431, "head_too_large"),
    ];
    for (shape, status, code) in above {
        for answer in shape.answers(cluster.addr()).await {
            assert_eq!((answer.0, answer.1.as_str()), (status, code));
        }
    }
    assert_eq!(cluster.fakes[0].request_count(), 6, "who is refused reaches no worker");
    cluster.gateway.idle().await;
}

/// Of what is several times as large no more is read than that.
#[tokio::test]
async fn a_head_that_is_larger_by_far_is_refused_before_its_end() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let endless = format!("POST {CHAT} HTTP/1.1\r\nhost: k\r\nx: {}", "v".repeat(1 << 20));
    let many = format!("POST {CHAT} HTTP/1.1\r\nhost: k\r\n{}\r\n", "x: v\r\n".repeat(10_000));
    for head in [&endless, &many] {
        let mut client = Client::connect(cluster.addr()).await;
        client.try_send(head.as_bytes()).await;
        // Nothing, where what was not read has reset the connection.
        if let Some(answer) = client.try_head().await {
            assert_eq!(answer.status(), 431);
        }
    }
    assert_eq!(cluster.fakes[0].request_count(), 0);
    cluster.chat("the next one is fine").await;
}

#[tokio::test]
async fn a_body_at_the_limit_passes_and_one_above_is_refused_unread() {
    const SMALL: usize = 10_000;
    let limits = format!("[limits]\nmax_body_bytes = {SMALL}");
    let cluster = Cluster::builder().fakes(1).config(&limits).start().await;
    let mut at = chat("padded");
    at.resize(SMALL, b' ');
    for protocol in PROTOCOLS {
        let mut exchange = Exchange::post(protocol, cluster.addr(), CHAT, &at).await;
        assert_eq!(exchange.status().await, 200);
        exchange.body().await;
        let above = [&at[..], b" "].concat();
        let mut exchange = Exchange::post(protocol, cluster.addr(), CHAT, &above).await;
        assert_eq!(exchange.status().await, 413);
        let (body, _) = exchange.body().await;
        let error: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(error["error"]["code"], "request_too_large");
    }
    let chunked = format!("POST {CHAT} HTTP/1.1\r\nhost: k\r\ntransfer-encoding: chunked\r\n\r\n");
    let mut client = Client::connect(cluster.addr()).await;
    client.send(&[chunked.as_bytes(), &http1::chunk(&at), http1::LAST_CHUNK].concat()).await;
    assert_eq!(client.response().await.status(), 200);
    let mut client = Client::connect(cluster.addr()).await;
    // Nothing follows: who waits for the body's end would not answer.
    client.send(&[chunked.as_bytes(), &http1::chunk(&at), &http1::chunk(b" ")].concat()).await;
    assert_eq!(client.response().await.status(), 413);
    assert_eq!(cluster.fakes[0].request_count(), 3);
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
