//! A worker in this process, and a client that asks it.

use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use keyway_worker::model::ModelSource;
use keyway_worker::{RunningWorker, WorkerOptions, start};
use serde_json::{Value, json};

/// A worker with this model on a free port.
pub(crate) async fn worker(model: ModelSource) -> RunningWorker {
    let options = WorkerOptions { model, listen: ([127, 0, 0, 1], 0).into(), ..WorkerOptions::default() };
    start(options).await.unwrap()
}

/// Asks over HTTP.
#[derive(Clone)]
pub(crate) struct Asker {
    client: Client<HttpConnector, Full<Bytes>>,
    addr: SocketAddr,
}

impl Asker {
    pub(crate) fn new(addr: SocketAddr) -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http(), addr }
    }

    /// The answer to one question, as a first-time user asks it.
    pub(crate) async fn ask(&self, question: &str) -> String {
        self.chat(&json!([{"role": "user", "content": question}])).await
    }

    /// The answer to a conversation.
    pub(crate) async fn chat(&self, messages: &Value) -> String {
        let answer = self.post("/v1/chat/completions", &json!({"messages": messages})).await;
        let content = answer["choices"][0]["message"]["content"].as_str();
        content.unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    /// A path's text.
    pub(crate) async fn get(&self, path: &str) -> String {
        self.send("GET", path, String::new()).await
    }

    async fn post(&self, path: &str, body: &Value) -> Value {
        serde_json::from_str(&self.send("POST", path, body.to_string()).await).unwrap()
    }

    async fn send(&self, method: &str, path: &str, body: String) -> String {
        let request = http::Request::builder().method(method).uri(format!("http://{}{path}", self.addr));
        let request = request.header("content-type", "application/json").body(Full::from(body)).unwrap();
        let (head, body) = self.client.request(request).await.unwrap().into_parts();
        let text = String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap();
        assert_eq!(head.status, 200, "{path}: {text}");
        text
    }
}
