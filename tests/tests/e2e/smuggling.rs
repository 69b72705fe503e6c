//! Hazard: bytes that two readers of HTTP frame differently, so that one client's request hides in another's;
//! tunnels; and connections opened to be reset. Refused, never repaired (RFC 9112 §6, §11.2; CVE-2023-44487).

use bytes::Bytes;
use keyway_tests::eventually::patient;
use keyway_tests::fake_worker::Recorded;
use keyway_tests::openai::{CHAT, chat, chat_stream};
use keyway_tests::{Cluster, eventually, post};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::ambiguous::{HIDDEN, ambiguous, odd, odd_body, with_headers};

/// Sends bytes and returns all that comes back until the gateway closes. That there are no more is not said:
/// it would be taken for the client's leaving.
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

#[tokio::test]
async fn a_request_that_can_be_framed_in_two_ways_is_refused() {
    let cluster = impatient().await;
    let corpus = ambiguous();
    assert!(corpus.len() > 120);
    let mut faults = Vec::new();
    for request in &corpus {
        let answer = exchange(&cluster, format!("{request}{HIDDEN}").as_bytes()).await;
        let reached: Vec<String> =
            cluster.fakes[0].requests().iter().map(|seen| seen.target().1.to_owned()).collect();
        let refused = answer.is_empty()
            || ["HTTP/1.1 4", "HTTP/1.1 501"].iter().any(|status| answer.starts_with(status));
        // The connection has ended, and nothing behind it was answered.
        let refused = refused && answer.matches("HTTP/1.1 ").count() <= 1;
        if !reached.is_empty() || !refused {
            faults.push(format!("{request:?}: {:?}", answer.lines().next()));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert_eq!(post(cluster.addr(), CHAT, &chat("fine")).await.status(), 200);
}

#[tokio::test]
async fn an_odd_request_is_one_request_and_the_one_behind_it_another() {
    let cluster = impatient().await;
    let mut seen = 0;
    for request in odd() {
        let answer = exchange(&cluster, format!("{request}{HIDDEN}").as_bytes()).await;
        let answer = answer.trim_start_matches("HTTP/1.1 100 Continue\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200"), "{request:?}: {answer}");
        let requests = cluster.fakes[0].requests();
        let new: Vec<(&str, &str)> = requests[seen..].iter().map(Recorded::target).collect();
        assert_eq!(new, [("POST", CHAT), ("GET", "/v1/smuggled")], "{request:?}");
        assert_eq!(requests[seen].body, odd_body().into_bytes(), "{request:?}");
        seen = requests.len();
    }
}

#[tokio::test]
async fn what_is_refused_for_its_framing_spoils_nothing_before_it() {
    let cluster = impatient().await;
    let body = odd_body();
    let clear = with_headers(&format!("content-length: {}", body.len()), &body);
    let chunked = with_headers(
        "transfer-encoding: chunked",
        &format!("{:x}\r\n{body}\r\n0\r\nx: y\r\n\r\n", body.len()),
    );
    let both = with_headers("content-length: 4\r\ntransfer-encoding: chunked", "0\r\n\r\n");
    let answer = exchange(&cluster, format!("{clear}{chunked}{clear}{both}{HIDDEN}").as_bytes()).await;
    let statuses: Vec<&str> = answer.split("HTTP/1.1 ").skip(1).map(|answer| &answer[..3]).collect();
    assert_eq!(statuses, ["200", "200", "200", "400"]);
    let bodies: Vec<Vec<u8>> = cluster.fakes[0].requests().into_iter().map(|seen| seen.body).collect();
    assert_eq!(bodies, vec![body.into_bytes(); 3]);
}

#[tokio::test]
async fn a_client_s_trailers_reach_no_worker() {
    let cluster = impatient().await;
    let body = odd_body();
    let names = [
        "content-length",
        "transfer-encoding",
        "host",
        "authorization",
        "cookie",
        "x-priority",
        "connection",
        "x-mine",
    ];
    let trailers = names.map(|name| format!("{name}: of-a-trailer\r\n")).concat();
    let chunked = format!("{:x}\r\n{body}\r\n0\r\n{trailers}\r\n", body.len());
    let headers = "connection: x-mine, close\r\ntrailer: x-priority\r\ntransfer-encoding: chunked";
    let answer = exchange(&cluster, with_headers(headers, &chunked).as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let seen = cluster.fakes[0].requests();
    assert_eq!((seen.len(), &seen[0].body), (1, &body.into_bytes()));
    assert!(!String::from_utf8_lossy(&seen[0].head.raw).contains("of-a-trailer"));
    assert_eq!((seen[0].head.header("transfer-encoding"), seen[0].head.header("trailer")), (None, None));
}

#[tokio::test]
async fn there_are_no_tunnels() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let connect =
        exchange(&cluster, b"CONNECT k:443 HTTP/1.1\r\nhost: k:443\r\nconnection: close\r\n\r\n").await;
    assert!(connect.starts_with("HTTP/1.1 4"), "{connect}");
    assert_eq!(cluster.fakes[0].request_count(), 0);
    for upgrade in ["websocket", "h2c", "websocket, h2c", "anything/1"] {
        let headers = format!("upgrade: {upgrade}\r\nconnection: upgrade, close\r\ncontent-length: 2");
        let answer = exchange(&cluster, with_headers(&headers, "{}").as_bytes()).await;
        assert!(!answer.starts_with("HTTP/1.1 101"), "{upgrade}: {answer}");
    }
    let seen = cluster.fakes[0].requests();
    assert_eq!(seen.len(), 2, "a WebSocket is refused, and no other upgrade is made");
    for seen in seen {
        assert_eq!((seen.head.header("upgrade"), seen.head.header("connection")), (None, None));
    }
    let good = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
                sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==";
    let ask = format!("GET /v1/realtime HTTP/1.1\r\nhost: k\r\n{good}\r\n\r\n{HIDDEN}");
    let answer = exchange(&cluster, ask.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 501"), "{answer}");
    assert_eq!(answer.matches("HTTP/1.1").count(), 1, "what follows is no request: {answer}");
    assert_eq!(cluster.fakes[0].request_count(), 2);
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
