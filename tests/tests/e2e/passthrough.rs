//! Hazard: the gateway changes what it carries. Requests and answers cross byte for byte, whatever is in
//! them.

use keyway_tests::cluster::config_file;
use keyway_tests::openai::{CHAT, chat};
use keyway_tests::{Client, Cluster, End, FakeWorker, Gateway, Protocol, get, post};

/// Unknown fields, odd spacing, a duplicate key, escapes, non-ASCII text, a number no float holds, trailing
/// space.
const ODD_BODY: &str = "\n{ \"model\" :\t\"fake-model\",\"messages\":[ {\"role\":\"user\",\"content\":\"Gr\u{fc}\u{df}e \
                        \\u00e9 \u{65e5}\u{672c} \u{1f511}\"} ],\r\n \"temperature\":0.10, \"temperature\":0.1000,\"x_unknown\":\
                        {\"deep\":[1,2,{\"n\":123456789012345678901234567890}]}, \"stream\":false }  \n";

#[tokio::test]
async fn an_odd_body_arrives_byte_for_byte() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    assert_eq!(post(cluster.addr(), CHAT, ODD_BODY.as_bytes()).await.status(), 200);
    assert_eq!(cluster.fakes[0].requests()[0].body, ODD_BODY.as_bytes());
}

#[tokio::test]
async fn an_odd_body_arrives_byte_for_byte_over_http2() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let mut exchange =
        keyway_tests::Exchange::post(Protocol::Http2, cluster.addr(), CHAT, ODD_BODY.as_bytes()).await;
    assert_eq!(exchange.status().await, 200);
    assert_eq!(cluster.fakes[0].requests()[0].body, ODD_BODY.as_bytes());
}

#[tokio::test]
async fn bodies_that_are_not_json_or_not_requests_pass_too() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let bodies: [&[u8]; 5] = [b"", b"not json", b"[1,2", b"\xff\xfe\x00binary", b"{\"model\":7}"];
    for body in bodies {
        let response = post(cluster.addr(), "/v1/audio/transcriptions", body).await;
        assert_eq!(response.status(), 200, "{body:?}: {}", response.text());
    }
    let requests = cluster.fakes[0].requests();
    let arrived: Vec<&[u8]> = requests.iter().map(|r| r.body.as_slice()).collect();
    assert_eq!(arrived, bodies);
}

#[tokio::test]
async fn a_chunked_body_arrives_whole() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let mut client = Client::connect(cluster.addr()).await;
    client
        .send(format!("POST {CHAT} HTTP/1.1\r\nhost: k\r\ntransfer-encoding: chunked\r\n\r\n").as_bytes())
        .await;
    let body = chat("in pieces");
    for piece in body.chunks(7) {
        client.send(&keyway_tests::http1::chunk(piece)).await;
    }
    client.send(keyway_tests::http1::LAST_CHUNK).await;
    assert_eq!(client.response().await.status(), 200);
    assert_eq!(cluster.fakes[0].requests()[0].body, body);
}

#[tokio::test]
async fn a_prompt_of_20_megabytes_passes() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let body = chat(&"All work and no play. ".repeat(1_000_000));
    assert!(body.len() > 20_000_000);
    assert_eq!(post(cluster.addr(), CHAT, &body).await.status(), 200);
    assert!(cluster.fakes[0].requests()[0].body == body, "the body changed");
}

#[tokio::test]
async fn methods_paths_and_queries_pass_as_they_are() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let targets = [
        ("GET", "/v1/files?limit=2&after=%2Fa%20b&&x"),
        ("DELETE", "/v1/models/meta-llama%2FLlama-3.1-8B"),
        ("PUT", "/v1/some/new/thing"),
        ("PATCH", "/v1/x;y=1,2"),
        ("POST", "/v1/responses?api-version=2026-01-01"),
    ];
    for (method, target) in targets {
        let mut client = Client::connect(cluster.addr()).await;
        client.request(method, target, &[], b"{}").await;
        assert_eq!(client.response().await.status(), 200, "{method} {target}");
    }
    let requests = cluster.fakes[0].requests();
    assert_eq!(requests.iter().map(keyway_tests::fake_worker::Recorded::target).collect::<Vec<_>>(), targets);
}

#[tokio::test]
async fn end_to_end_headers_pass_and_hop_by_hop_ones_do_not() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let mut client = Client::connect(cluster.addr()).await;
    let headers = [
        ("authorization", "Bearer sk-client"),
        ("x-many", "b"),
        ("X-Many", "a"),
        ("openai-organization", "org-1"),
        ("x-request-id", "client-chose-this"),
        ("x-named", "hop"),
        ("connection", "keep-alive, x-named"),
        ("keep-alive", "timeout=5"),
        ("te", "trailers"),
        ("proxy-authorization", "secret"),
    ];
    client.request("POST", CHAT, &headers, &chat("hi")).await;
    let response = client.response().await;
    let arrived = cluster.fakes[0].requests()[0].head.clone();
    assert_eq!(arrived.header("authorization"), Some("Bearer sk-client"));
    assert_eq!(arrived.header_values("x-many"), ["b", "a"]);
    assert_eq!(arrived.header("openai-organization"), Some("org-1"));
    assert_eq!(arrived.header("x-request-id"), Some("client-chose-this"));
    for hop in ["x-named", "keep-alive", "te", "proxy-authorization"] {
        assert_eq!(arrived.header(hop), None, "{hop}");
    }
    assert_eq!(response.header("x-request-id"), Some("client-chose-this"));
}

#[tokio::test]
async fn an_answer_comes_back_byte_for_byte_with_its_headers() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    let body = b"{ \"odd\" :  [1,2 ],\"odd\":\"\\u00e9 \xc3\xa9\" }\n\n";
    let mut client = Client::connect(cluster.addr()).await;
    client.post(CHAT, &chat("hi")).await;
    let headers = [
        ("content-type", "application/json"),
        ("openai-processing-ms", "12"),
        ("x-many", "2"),
        ("x-many", "1"),
    ];
    cluster.fakes[0].call().await.respond(200, &headers, body).await;
    let response = client.response().await;
    assert_eq!((response.status(), response.end), (200, End::Complete));
    assert_eq!(response.body, body);
    assert_eq!(response.header("openai-processing-ms"), Some("12"));
    assert_eq!(response.head.header_values("x-many"), ["2", "1"]);
    assert!(
        response.header("x-request-id").is_some_and(|id| !id.is_empty()),
        "a request without an id gets one"
    );
}

#[tokio::test]
async fn paths_outside_v1_are_refused_in_openai_s_shape_and_reach_no_worker() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let leaving =
        ["/v1/../metrics", "/v1/%2e%2E/metrics", "/v1/./../x", "/v1/..%2fmetrics", "/v1/a%2F..%2F..%2Fx"];
    for path in
        ["/", "/v2/chat/completions", "/metrics", "/v1", "/v1x/models", "/workers"].iter().chain(&leaving)
    {
        let response = get(cluster.addr(), path).await;
        // An escaped slash is refused whatever stands behind it.
        let status = if path.to_ascii_lowercase().contains("%2f") { 400 } else { 404 };
        assert_eq!(response.status(), status, "{path}");
        let error = &response.json()["error"];
        assert!(error["message"].is_string() && error["type"].is_string(), "{path}: {error}");
    }
    assert_eq!(cluster.fakes[0].request_count(), 0);
}

#[tokio::test]
async fn a_client_that_waits_for_100_continue_gets_it() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let (mut client, body) = (Client::connect(cluster.addr()).await, chat("patient"));
    let length = body.len();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: k\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
    );
    client.send(head.as_bytes()).await;
    assert_eq!(client.head().await.status(), 100);
    client.send(&body).await;
    assert_eq!(client.response().await.status(), 200);
    assert_eq!(cluster.fakes[0].requests()[0].head.header("expect"), None, "the body is sent without asking");
}

#[tokio::test]
async fn the_worker_s_own_key_replaces_the_client_s() {
    let worker = FakeWorker::start().await;
    let key = config_file("sk-worker-key\n");
    let toml = format!("[[worker]]\nurl = \"http://{}\"\napi_key_file = {:?}\n", worker.addr(), key.path());
    let gateway = Gateway::builder().config(&toml).start().await;
    gateway.wait_ready(1).await;
    let mut client = Client::connect(gateway.addr).await;
    client.request("POST", CHAT, &[("authorization", "Bearer sk-client-key")], &chat("hi")).await;
    assert_eq!(client.response().await.status(), 200);
    assert_eq!(worker.requests()[0].head.header_values("authorization"), ["Bearer sk-worker-key"]);
}

#[tokio::test]
async fn one_connection_carries_many_requests() {
    let cluster = Cluster::of_fakes(2, "round-robin").await;
    let mut client = Client::connect(cluster.addr()).await;
    for i in 0..10 {
        client.post(CHAT, &chat(&format!("request {i}"))).await;
        assert_eq!(client.response().await.end, End::Complete);
    }
    cluster.gateway.idle().await;
}
