//! Hazard: a client that asks for a WebSocket gets an answer that it cannot tell from a fault, or bytes of
//! another protocol than the worker's reach it. What is wrong is said by the gateway, in the API's shape, and
//! no worker hears of it.

use keyway_tests::openai::{CHAT, chat};
use keyway_tests::{Client, Cluster, Response, post};
use serde_json::Value;

const KEY: (&str, &str) = ("sec-websocket-key", "a2V5d2F5IGtleXdheSE=");
/// 16 bytes in base64.
const GOOD_KEY: (&str, &str) = ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==");

async fn ask(cluster: &Cluster, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
    let mut client = Client::connect(cluster.addr()).await;
    client.request(method, path, headers, body).await;
    let answer = client.response().await;
    assert!(client.try_head().await.is_none(), "what may follow is no request");
    answer
}

fn code(answer: &Response) -> String {
    let error: Value = answer.json();
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert!(error["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{error}");
    error["error"]["code"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn a_websocket_is_refused_clearly_and_no_worker_hears_of_it() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let upgrade = [("connection", "keep-alive, Upgrade"), ("upgrade", "WebSocket")];
    let whole = [&upgrade[..], &[("sec-websocket-version", "13"), GOOD_KEY]].concat();
    for path in ["/v1/realtime?model=fake-model", "/v1/responses", "/v1/anything/else", "/generate"] {
        let answer = ask(&cluster, "GET", path, &whole, b"").await;
        assert_eq!((answer.status(), code(&answer).as_str()), (501, "websocket_unsupported"), "{path}");
        assert!(answer.header("x-request-id").is_some());
    }
    assert_eq!(cluster.fakes[0].request_count(), 0);
    assert_eq!(post(cluster.addr(), CHAT, &chat("others are served")).await.status(), 200);
}

#[tokio::test]
async fn what_is_wrong_with_a_request_for_one_is_said() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let (connection, upgrade) = (("connection", "upgrade"), ("upgrade", "websocket"));
    let version = ("sec-websocket-version", "13");
    for (headers, status, names) in [
        (vec![upgrade, version, GOOD_KEY], 400, "bad_upgrade"),
        (vec![("connection", "close"), upgrade, version, GOOD_KEY], 400, "bad_upgrade"),
        (vec![connection, upgrade, version], 400, "bad_upgrade"),
        (vec![connection, upgrade, version, KEY], 400, "bad_upgrade"),
        (vec![connection, upgrade, GOOD_KEY], 426, "websocket_version"),
        (vec![connection, upgrade, ("sec-websocket-version", "8"), GOOD_KEY], 426, "websocket_version"),
        (vec![connection, upgrade, version, version, GOOD_KEY], 426, "websocket_version"),
    ] {
        let answer = ask(&cluster, "GET", "/v1/realtime", &headers, b"").await;
        assert_eq!((answer.status(), code(&answer).as_str()), (status, names), "{headers:?}");
        let offered = (status == 426).then_some("13");
        assert_eq!(answer.header("sec-websocket-version"), offered, "{headers:?}");
    }
    let whole = [connection, upgrade, version, GOOD_KEY];
    let answer = ask(&cluster, "POST", CHAT, &whole, &chat("not so")).await;
    assert_eq!((answer.status(), code(&answer).as_str()), (400, "bad_upgrade"));
    let answer = ask(&cluster, "GET", "/v1/realtime", &whole, b"{}").await;
    assert_eq!((answer.status(), code(&answer).as_str()), (400, "bad_upgrade"));
    assert_eq!(cluster.fakes[0].request_count(), 0);
}

#[tokio::test]
async fn an_offer_of_another_protocol_is_passed_over() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    for (connection, upgrade) in
        [("Upgrade, HTTP2-Settings", "h2c"), ("upgrade", "TLS/1.3"), ("upgrade", "websocketish")]
    {
        let mut client = Client::connect(cluster.addr()).await;
        let headers = [("connection", connection), ("upgrade", upgrade), ("http2-settings", "AAMAAABk")];
        client.request("POST", CHAT, &headers, &chat(upgrade)).await;
        assert_eq!(client.response().await.status(), 200, "{upgrade}");
        let seen = cluster.fakes[0].requests().pop().expect("it arrived").head;
        assert_eq!((seen.header("upgrade"), seen.header("connection")), (None, None), "{upgrade}");
    }
}

#[tokio::test]
async fn an_extended_connect_of_http2_harms_nobody_else_on_its_connection() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let stream = tokio::net::TcpStream::connect(cluster.addr()).await.unwrap();
    let (send, connection) = h2::client::handshake(stream).await.unwrap();
    let driver = tokio::spawn(connection);
    assert!(!send.is_extended_connect_protocol_enabled(), "it is not offered, so a browser takes HTTP/1.1");
    let mut request = http::Request::builder().method("CONNECT");
    request = request.uri(format!("http://{}/v1/realtime", cluster.addr()));
    request = request.extension(h2::ext::Protocol::from_static("websocket"));
    let mut ready = send.clone().ready().await.unwrap();
    if let Ok((answer, _stream)) = ready.send_request(request.body(()).unwrap(), false) {
        let refused = answer.await.map_or(true, |answer| answer.status().is_client_error());
        assert!(refused, "no tunnel");
    }
    let request = http::Request::get(format!("http://{}/v1/models", cluster.addr())).body(()).unwrap();
    let (answer, _) = send.clone().ready().await.unwrap().send_request(request, true).unwrap();
    assert_eq!(answer.await.unwrap().status(), 200);
    assert_eq!(cluster.fakes[0].request_count(), 0);
    driver.abort();
}
