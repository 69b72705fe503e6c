//! A worker and an HTTP client for the tests. Checks nothing itself.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use keyway_worker::model::ModelSource;
use keyway_worker::{RunningWorker, WorkerOptions, start};
use serde_json::{Value, json};

/// How long a state that must come may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A small worker on a free port, with the random model: these tests need an engine, no sense.
pub(crate) fn options() -> WorkerOptions {
    WorkerOptions {
        model: ModelSource::Random,
        listen: ([127, 0, 0, 1], 0).into(),
        num_kv_blocks: Some(2048),
        ..WorkerOptions::default()
    }
}

pub(crate) async fn worker() -> RunningWorker {
    start(options()).await.unwrap()
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: http::HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    /// A stream's events without the last, which must be `[DONE]`.
    pub(crate) fn events(&self) -> Vec<Value> {
        let mut events: Vec<&str> = self.text.split_terminator("\n\n").collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{}", self.text);
        events.iter().map(|e| serde_json::from_str(e.strip_prefix("data: ").unwrap()).unwrap()).collect()
    }
}

/// One client, HTTP/1.1 or HTTP/2.
pub(crate) fn client(http2: bool) -> Client<HttpConnector, Full<Bytes>> {
    Client::builder(TokioExecutor::new()).http2_only(http2).build_http()
}

pub(crate) async fn send(addr: SocketAddr, method: &str, path: &str, body: &str) -> Answer {
    send_by(&client(false), addr, method, path, body).await
}

pub(crate) async fn send_by(
    client: &Client<HttpConnector, Full<Bytes>>,
    addr: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> Answer {
    let request = http::Request::builder().method(method).uri(format!("http://{addr}{path}"));
    let request =
        request.header("content-type", "application/json").body(Full::from(body.to_owned())).unwrap();
    let (head, body) = client.request(request).await.unwrap().into_parts();
    let text = String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap();
    Answer { status: head.status.as_u16(), headers: head.headers, text }
}

pub(crate) async fn post(addr: SocketAddr, path: &str, body: &Value) -> Answer {
    send(addr, "POST", path, &body.to_string()).await
}

/// `body` with the fields of `more` on top.
pub(crate) fn with(mut body: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("an object") };
    body.as_object_mut().unwrap().extend(more);
    body
}

/// A greedy chat request.
pub(crate) fn chat(content: &str, max_tokens: usize) -> Value {
    json!({
        "model": "keyway-random", "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens,
        "temperature": 0, "ignore_eos": true,
    })
}

/// A greedy completion request.
pub(crate) fn completion(prompt: impl Into<Value>, max_tokens: usize) -> Value {
    json!({
        "model": "keyway-random", "prompt": prompt.into(), "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": true,
    })
}

/// A series' value: `name` with its labels, as the exposition spells it.
pub(crate) async fn metric(addr: SocketAddr, name: &str) -> f64 {
    let text = send(addr, "GET", "/metrics", "").await.text;
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
    text.lines().find_map(value).unwrap_or_else(|| panic!("no {name} in {text}"))
}

/// Waits until a series has a value.
pub(crate) async fn metric_becomes(addr: SocketAddr, name: &str, expected: f64) {
    let reached = async {
        while metric(addr, name).await != expected {
            tokio::task::yield_now().await;
        }
    };
    let in_time = tokio::time::timeout(PATIENCE, reached).await.is_ok();
    assert!(in_time, "{name} is {} and not {expected}", metric(addr, name).await);
}
