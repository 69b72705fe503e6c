//! Hazard: the index believes a worker to hold what it never computed, and conversations follow that. Only
//! requests that are known to fill a prefix cache, and were answered, leave anything there.

use keyway_tests::fake_worker::Call;
use keyway_tests::openai::{CHAT, FAKE_MODEL, chat, chat_stream};
use keyway_tests::{Client, Cluster, eventually, post};
use serde_json::json;

/// What the index believes the only worker to hold of a chat with this body.
async fn held(cluster: &Cluster, body: &[u8]) -> u64 {
    let explained = post(cluster.gateway.admin, "/explain", body).await.json();
    explained["workers"][0]["matched_tokens"].as_u64().expect("a count")
}

async fn blocks(cluster: &Cluster) -> f64 {
    cluster.gateway.metrics().await.sum("keyway_index_blocks", &[])
}

fn prompt(of: &str) -> String {
    format!("{of}: {}", "a long enough beginning, ".repeat(40))
}

#[tokio::test]
async fn what_computes_no_prompt_of_a_chat_is_not_counted_as_cached() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    for path in [
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
        "/tokenize",
        "/detokenize",
        "/v1/embeddings",
        "/v1/moderations",
        "/v1/rerank",
        "/score",
        "/rerank",
        "/pooling",
        "/classify",
        "/v1/audio/speech",
        "/v1/images/generations",
        "/v1/chat/completions/render",
        "/v1/chat/completions/",
        "/v1/nobody/knows",
    ] {
        let body = chat(&prompt(path));
        assert_eq!(post(cluster.addr(), path, &body).await.status(), 200, "{path}");
        assert_eq!(held(&cluster, &body).await, 0, "{path}");
    }
    for method in ["GET", "PUT", "DELETE", "PATCH"] {
        let body = chat(&prompt(method));
        let mut client = Client::connect(cluster.addr()).await;
        client.request(method, CHAT, &[], &body).await;
        assert_eq!(client.response().await.status(), 200, "{method}");
        assert_eq!(held(&cluster, &body).await, 0, "{method}");
    }
    assert_eq!(blocks(&cluster).await, 0.0);
}

#[tokio::test]
async fn what_generates_is() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    for path in [CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/generate"] {
        let body = chat(&prompt(path));
        assert_eq!(post(cluster.addr(), path, &body).await.status(), 200, "{path}");
        assert!(held(&cluster, &body).await > 100, "{path}");
    }
}

#[tokio::test]
async fn a_refused_or_failed_request_leaves_nothing() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].manual();
    for status in [400, 401, 404, 413, 422, 429, 500, 503, 307] {
        let body = chat(&prompt(&status.to_string()));
        let refuse = async |call: Call| call.respond_json(status, &json!({ "error": {} })).await;
        answered(&cluster, &body, refuse).await;
        assert_eq!(held(&cluster, &body).await, 0, "{status}");
        let body = chat_stream(&prompt(&format!("{status} as events")));
        let refuse = async |call: Call| {
            let head = [("content-type", "text/event-stream")];
            call.respond(status, &head, b"data: {\"error\":{\"message\":\"no\"}}\n\n").await;
        };
        answered(&cluster, &body, refuse).await;
        assert_eq!(held(&cluster, &body).await, 0, "{status} as events");
    }
    let body = chat_stream(&prompt("an error at once"));
    let fail = async |mut call: Call| {
        call.begin_stream().await;
        call.event(r#"{"error":{"message":"the engine refuses","code":400}}"#).await;
        call.done().await;
    };
    answered(&cluster, &body, fail).await;
    assert_eq!(held(&cluster, &body).await, 0, "an error at once");
    let body = chat(&prompt("cut"));
    answered(&cluster, &body, async |call: Call| call.cut()).await;
    assert_eq!(held(&cluster, &body).await, 0, "cut");
    assert_eq!(blocks(&cluster).await, 0.0);
}

/// Sends a chat, lets the worker do `answer` to every try of it, and waits until nothing of it is in flight.
async fn answered(cluster: &Cluster, body: &[u8], answer: impl AsyncFn(Call)) {
    let mut client = Client::connect(cluster.addr()).await;
    client.post(CHAT, body).await;
    let worker = async {
        loop {
            answer(cluster.fakes[0].call().await).await;
        }
    };
    tokio::select! { _ = client.response() => {}, () = worker => {} }
    drop(client);
    cluster.gateway.idle().await;
    eventually!(cluster.gateway.ready_workers().await == 1, "{}", cluster.gateway.workers().await);
}

#[tokio::test]
async fn a_request_counts_in_its_worker_s_load_as_what_it_is() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    cluster.fakes[0].hang();
    for (path, computes) in
        [("/tokenize", false), ("/v1/messages/count_tokens", false), ("/v1/embeddings", true)]
    {
        let mut client = Client::connect(cluster.addr()).await;
        client.post(path, &chat(&prompt(path))).await;
        eventually!(cluster.fakes[0].active() == 1);
        let workers = cluster.gateway.workers().await;
        assert_eq!(workers[0]["requests_in_flight"], 1, "{path}: {workers}");
        assert_eq!(workers[0]["waiting_prefill_tokens"].as_u64() > Some(0), computes, "{path}: {workers}");
        drop(client);
        eventually!(cluster.fakes[0].active() == 0);
        cluster.gateway.idle().await;
    }
}

#[tokio::test]
async fn counting_tokens_is_no_turn_of_a_session() {
    let cluster = Cluster::of_fakes(2, "prefix").await;
    let send = async |path: &str, system: &str, turns: usize| {
        let mut messages = vec![json!({ "role": "system", "content": system.repeat(40) })];
        for turn in 0..turns {
            messages.push(json!({ "role": "user", "content": format!("question {turn} ").repeat(20) }));
        }
        let body = json!({ "model": FAKE_MODEL, "messages": messages }).to_string();
        let mut client = Client::connect(cluster.addr()).await;
        client.request("POST", path, &[("x-session-id", "s")], body.as_bytes()).await;
        assert_eq!(client.response().await.status(), 200);
    };
    let drifts = async || cluster.gateway.metrics().await.sum("keyway_prompt_drifts_total", &[]);
    for turn in 1..5 {
        send(CHAT, "the session's own ", turn).await;
        for path in ["/v1/messages/count_tokens", "/tokenize", "/v1/embeddings"] {
            send(path, "of something else ", 1).await;
        }
    }
    assert_eq!(drifts().await, 0.0);
    send(CHAT, "of something else ", 6).await;
    assert_eq!(drifts().await, 1.0, "a turn that leaves the past is still seen");
}
