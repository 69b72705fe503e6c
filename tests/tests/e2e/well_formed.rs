//! Hazard: a request that HTTP forbids is served, or refused without a word that its client understands:
//! which server it is for is not clear, its body is transferred in a way that is not read here, or its method
//! would have it sent back.

use http::{HeaderMap, HeaderValue, Request};
use keyway_tests::eventually::patient;
use keyway_tests::openai::{CHAT, chat};
use keyway_tests::{Client, Cluster, post};
use tokio::net::TcpStream;

/// Status, and the error's code, of the answer to a request written by hand; the connection ends with it.
async fn refused(addr: std::net::SocketAddr, request: &str) -> (u16, String) {
    let mut client = Client::connect(addr).await;
    client.send(request.as_bytes()).await;
    let answer = client.response().await;
    assert_eq!(answer.header("connection"), Some("close"), "{request:?}");
    assert!(client.try_head().await.is_none(), "it is closed: {request:?}");
    let json = answer.json();
    assert!(json["error"]["message"].is_string(), "{json}");
    (answer.status(), json["error"]["code"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn what_http_forbids_is_refused_in_words_on_both_listeners() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let host = |code: &str| (400, code.to_owned());
    for addr in [cluster.addr(), cluster.gateway.admin] {
        for fields in [
            "",
            "host: k\r\nhost: k\r\n",
            "host:\r\n",
            "host: a b\r\n",
            "host: a@b\r\n",
            "host: k:x\r\n",
            "host: [::1\r\n",
        ] {
            for target in ["/v1/models", "/livez", "/health"] {
                let request = format!("GET {target} HTTP/1.1\r\n{fields}\r\n");
                assert_eq!(refused(addr, &request).await, host("bad_host"), "{request:?}");
            }
        }
        let old = "GET /health HTTP/1.0\r\nhost: k\r\nhost: other\r\n\r\n";
        assert_eq!(refused(addr, old).await, host("bad_host"));
        for coding in ["gzip, chunked", "chunked, chunked", ",chunked"] {
            let request =
                format!("POST /v1/files HTTP/1.1\r\nhost: k\r\ntransfer-encoding: {coding}\r\n\r\n0\r\n\r\n");
            let code = "transfer_coding_unsupported".to_owned();
            assert_eq!(refused(addr, &request).await, (501, code), "{coding}");
        }
        let trace = "TRACE /v1/models HTTP/1.1\r\nhost: k\r\nauthorization: Bearer of-a-client\r\n\r\n";
        assert_eq!(refused(addr, trace).await, (405, "method_not_allowed".to_owned()));
    }
    assert_eq!(cluster.fakes[0].request_count(), 0);
    // HTTP/1.0 had no hosts.
    let mut old = Client::connect(cluster.addr()).await;
    old.send(b"GET /health HTTP/1.0\r\n\r\n").await;
    assert_eq!(old.response().await.status(), 200);
    assert_eq!(post(cluster.addr(), CHAT, &chat("fine")).await.status(), 200);
}

/// Status of a request over HTTP/2 with these fields, and with trailers if there are any.
async fn over_http2(cluster: &Cluster, authority: &str, hosts: &[&str], trailers: Option<HeaderMap>) -> u16 {
    let stream = TcpStream::connect(cluster.addr()).await.expect("connect");
    let (mut send, connection) = h2::client::handshake(stream).await.expect("handshake");
    let driver = tokio::spawn(connection);
    let mut request = Request::post(format!("http://{authority}{CHAT}"));
    for host in hosts {
        request = request.header("host", *host);
    }
    let (answer, mut body) =
        send.send_request(request.body(()).expect("a request"), false).expect("a stream");
    let text = bytes::Bytes::from(chat("over HTTP/2"));
    body.send_data(text, trailers.is_none()).expect("sent");
    if let Some(trailers) = trailers {
        body.send_trailers(trailers).expect("sent");
    }
    let status = patient("an answer", answer).await.expect("an answer").status().as_u16();
    driver.abort();
    status
}

#[tokio::test]
async fn over_http2_host_and_authority_agree_and_trailers_frame_nothing() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    for (authority, hosts, status) in [
        ("k", &[][..], 200),
        ("k", &["k"], 200),
        ("k", &["K:80"], 200),
        ("k", &["other"], 400),
        ("k", &["k:81"], 400),
        ("k", &["k", "k"], 400),
        ("k", &[""], 400),
        ("user@k", &[], 400),
        ("k..x", &[], 400),
        ("k:70000", &[], 400),
    ] {
        assert_eq!(over_http2(&cluster, authority, hosts, None).await, status, "{authority} {hosts:?}");
    }
    assert_eq!(cluster.fakes[0].request_count(), 3);
    for (name, status) in [("x-sum", 200), ("content-length", 400), ("host", 400)] {
        let trailers = HeaderMap::from_iter([(name.parse().expect("a name"), HeaderValue::from_static("5"))]);
        assert_eq!(over_http2(&cluster, "k", &[], Some(trailers)).await, status, "{name}");
    }
    assert_eq!(over_http2(&cluster, "k", &[], Some(HeaderMap::new())).await, 400);
    assert_eq!(cluster.fakes[0].request_count(), 4);
}
