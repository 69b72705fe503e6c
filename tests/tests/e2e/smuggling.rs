//! Hazard: bytes that two readers of HTTP frame differently, so that one client's request hides in another's; tunnels; and
//! connections opened to be reset. Refused, never repaired (RFC 9112 §6, §11.2; CVE-2023-44487).

use bytes::Bytes;
use keyway_tests::eventually::patient;
use keyway_tests::openai::{CHAT, chat, chat_stream};
use keyway_tests::{Cluster, eventually, post};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What hides behind an ambiguous request: it must reach nobody. Whoever answers it closes.
const HIDDEN: &str = "GET /v1/smuggled HTTP/1.1\r\nhost: k\r\nconnection: close\r\n\r\n";

/// Sends bytes and returns all that comes back until the gateway closes. That there are no more is not said: it would be taken
/// for the client's leaving.
async fn exchange(cluster: &Cluster, bytes: &[u8]) -> String {
    let mut stream = patient("connection", TcpStream::connect(cluster.addr())).await.expect("connect");
    // The gateway may close while this is being sent.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let _ = patient("the end of the connection", stream.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// A gateway that soon gives up on the rest of a body.
async fn impatient() -> Cluster {
    Cluster::builder().fakes(1).config("[limits]\nbody_idle_ms = 200").start().await
}

fn with_headers(headers: &str, body: &str) -> String {
    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: k\r\n{headers}\r\n\r\n{body}")
}

#[tokio::test]
async fn a_request_that_can_be_framed_in_two_ways_is_refused() {
    let cluster = impatient().await;
    let lengths =
        ["+2", "-2", "2, 3", "0x2", "2 2", "", "1e0", "2;", "18446744073709551618", "\u{b2}", "2\t3"];
    let codings = [
        "transfer-encoding: xchunked",
        "transfer-encoding: chunked, identity",
        "transfer-encoding: chunked, gzip",
        "transfer-encoding : chunked",
        "transfer-encoding: chunked\r\ntransfer-encoding: gzip",
        "transfer-encoding: \"chunked\"",
        "transfer-encoding: \u{b}chunked",
        "x: y\r\n transfer-encoding: chunked",
        "transfer-encoding: chun\0ked",
        " transfer-encoding: chunked",
        "transfer-encoding\0: chunked",
    ];
    let sizes = ["+2", "-2", "0x2", "2 2", "g", "", "10000000000000002", "2\n", ";2", "2\r\r"];
    let lines = [
        "POST /v1/chat/completions  HTTP/1.1\r\nhost: k\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1 x\r\nhost: k\r\n\r\n",
        "POST /v1/chat/completions HTTP/2.0\r\nhost: k\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.12\r\nhost: k\r\n\r\n",
        "POST /v1/chat/\0completions HTTP/1.1\r\nhost: k\r\n\r\n",
        "PO ST /v1/chat/completions HTTP/1.1\r\nhost: k\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\n: x\r\nhost: k\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nhost: k\r\nx: a\rb\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nhost k\r\n\r\n",
    ];
    let mut corpus: Vec<String> =
        lengths.iter().map(|length| with_headers(&format!("content-length: {length}"), "{}")).collect();
    corpus.push(with_headers("content-length: 2\r\ncontent-length: 3", "{}"));
    corpus.extend(codings.iter().map(|coding| with_headers(coding, "2\r\n{}\r\n0\r\n\r\n")));
    corpus.extend(
        sizes
            .iter()
            .map(|size| with_headers("transfer-encoding: chunked", &format!("{size}\r\n{{}}\r\n0\r\n\r\n"))),
    );
    corpus.push(with_headers("transfer-encoding: chunked", "2\r\n{}x\r\n0\r\n\r\n"));
    corpus.extend(lines.iter().map(|&line| line.to_owned()));
    assert!(corpus.len() > 40);
    let mut faults = Vec::new();
    for request in &corpus {
        let answer = exchange(&cluster, format!("{request}{HIDDEN}").as_bytes()).await;
        let reached: Vec<String> =
            cluster.fakes[0].requests().iter().map(|seen| seen.target().1.to_owned()).collect();
        if reached.iter().any(|target| target.contains("smuggled")) || answer.starts_with("HTTP/1.1 2") {
            faults.push(format!("{request:?}: {:?}", answer.lines().next()));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert_eq!(post(cluster.addr(), CHAT, &chat("fine")).await.status(), 200);
}

#[tokio::test]
async fn where_length_and_chunks_disagree_nothing_behind_them_is_a_request() {
    let cluster = impatient().await;
    let both = "content-length: 4\r\ntransfer-encoding: chunked";
    let _ = exchange(&cluster, format!("{}{HIDDEN}", with_headers(both, "0\r\n\r\n")).as_bytes()).await;
    let old = "POST /v1/chat/completions HTTP/1.0\r\nhost: k\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n";
    let _ = exchange(&cluster, format!("{old}{HIDDEN}").as_bytes()).await;
    assert_eq!(post(cluster.addr(), CHAT, &chat("fine")).await.status(), 200);
    let targets: Vec<String> =
        cluster.fakes[0].requests().iter().map(|seen| seen.target().1.to_owned()).collect();
    assert!(!targets.iter().any(|target| target.contains("smuggled")), "{targets:?}");
}

#[tokio::test]
async fn there_are_no_tunnels() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let connect =
        exchange(&cluster, b"CONNECT k:443 HTTP/1.1\r\nhost: k:443\r\nconnection: close\r\n\r\n").await;
    assert!(connect.starts_with("HTTP/1.1 4"), "{connect}");
    assert_eq!(cluster.fakes[0].request_count(), 0);
    let upgrade = with_headers("upgrade: websocket\r\nconnection: upgrade, close\r\ncontent-length: 2", "{}");
    let answer = exchange(&cluster, upgrade.as_bytes()).await;
    assert!(!answer.starts_with("HTTP/1.1 101"), "{answer}");
    for seen in cluster.fakes[0].requests() {
        assert_eq!((seen.head.header("upgrade"), seen.head.header("connection")), (None, None));
    }
}

#[tokio::test]
async fn streams_opened_to_be_reset_cost_a_connection_and_no_more() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].hang();
    let stream = TcpStream::connect(cluster.addr()).await.unwrap();
    let (send, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let body = Bytes::from(chat_stream("reset me"));
    let mut opened = 0;
    for _ in 0..20_000 {
        let Ok(mut ready) = send.clone().ready().await else { break };
        let request = http::Request::post(format!("http://{}{CHAT}", cluster.addr())).body(()).unwrap();
        let Ok((answer, mut out)) = ready.send_request(request, false) else { break };
        opened += 1;
        let _ = out.send_data(body.clone(), true);
        out.send_reset(h2::Reason::CANCEL);
        drop(answer);
    }
    assert!(opened > 0);
    drop(send);
    connection.abort();
    cluster.gateway.idle().await;
    eventually!(cluster.fakes[0].active() == 0);
    cluster.fakes[0].answer();
    assert_eq!(post(cluster.addr(), CHAT, &chat("others are served")).await.status(), 200);
}
