//! Hazard: an engine, or what stands in front of it, refuses or fails in a shape that the clients of the API
//! that was asked cannot read: they raise an error without its text or class, or one about the JSON.

use keyway_tests::openai::{CHAT, FAKE_MODEL};
use keyway_tests::{Call, Client, Cluster, Response};
use serde_json::{Value, json};

const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

/// vLLM's answer to a field out of range, below any path.
const VLLM: &str = r#"{"error":{"message":"max_tokens must be at least 1","type":"Bad Request","param":"max_tokens","code":400}}"#;
const FASTAPI: &str =
    r#"{"detail":[{"type":"missing","loc":["body","messages"],"msg":"Field required","input":{}}]}"#;
const PAGE: &str = "<html><head><title>502 Bad Gateway</title></head></html>";
const ANTHROPICS: &str =
    r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"},"request_id":"req_1"}"#;

fn request(path: &str, stream: bool) -> Value {
    let said = json!([{ "role": "user", "content": "Hi" }]);
    let field = if path == RESPONSES { "input" } else { "messages" };
    json!({ "model": FAKE_MODEL, "max_tokens": 9, "stream": stream, field: said })
}

async fn calls(cluster: &Cluster, path: &str, stream: bool) -> (Client, Call) {
    cluster.fakes[0].manual();
    let mut client = Client::connect(cluster.addr()).await;
    client.request("POST", path, &[], request(path, stream).to_string().as_bytes()).await;
    (client, cluster.fakes[0].call().await)
}

async fn answered(cluster: &Cluster, path: &str, status: u16, (kind, body): (&str, &str)) -> Response {
    let (mut client, call) = calls(cluster, path, false).await;
    call.respond(status, &[("content-type", kind), ("retry-after", "7")], body.as_bytes()).await;
    client.response().await
}

#[tokio::test]
async fn an_engine_s_error_is_one_that_the_api_s_clients_read() {
    let cluster = Cluster::builder().fakes(1).start().await;
    let json = "application/json";
    for (status, kind, body, class, text) in [
        (400, json, VLLM, "invalid_request_error", "max_tokens must be at least 1"),
        (422, json, FASTAPI, "invalid_request_error", "body.messages: Field required"),
        (404, json, r#"{"detail":"Not Found"}"#, "not_found_error", "Not Found"),
        (401, "text/plain", "Who are you?\n", "authentication_error", "Who are you?"),
        (413, "text/html", PAGE, "request_too_large", PAGE),
        (403, "text/html", "", "permission_error", "The engine answered with status 403."),
        (405, "text/event-stream", "data: {\"error\":{\"message\":\"m\"}}\n\n", "invalid_request_error", "m"),
    ] {
        for path in
            [MESSAGES, "/v1/messages/count_tokens", CHAT, RESPONSES, "/v1/completions", "/v1/embeddings"]
        {
            cluster.gateway.wait_ready(1).await;
            let response = answered(&cluster, path, status, (kind, body)).await;
            let what = format!("{path} {status} {body}: {}", response.text());
            assert_eq!((response.status(), response.header("retry-after")), (status, Some("7")), "{what}");
            assert_eq!(response.header("content-type"), Some(json), "{what}");
            let told = response.json();
            assert_eq!(told["error"]["message"], text, "{what}");
            if path.starts_with(MESSAGES) {
                assert_eq!(
                    (&told["type"], &told["error"]["type"]),
                    (&"error".into(), &class.into()),
                    "{what}"
                );
            } else if body == VLLM {
                assert_eq!(response.text(), VLLM, "what has the API's shape passes");
            } else if let Some(event) = body.strip_prefix("data: ") {
                assert_eq!(
                    response.text(),
                    event.trim_end(),
                    "out of its event, what has the API's shape passes"
                );
            } else {
                assert!(told["error"]["type"].is_string() && told["error"].get("param").is_some(), "{what}");
            }
        }
    }
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn what_clients_read_and_what_is_no_api_of_theirs_passes_byte_for_byte() {
    let cluster = Cluster::builder().fakes(1).start().await;
    for (path, status, body) in [
        (MESSAGES, 400, ANTHROPICS),
        (CHAT, 400, VLLM),
        ("/v1/rerank", 400, FASTAPI),
        ("/tokenize", 422, PAGE),
    ] {
        cluster.gateway.wait_ready(1).await;
        let response = answered(&cluster, path, status, ("application/json; charset=utf-8", body)).await;
        let kind = response.header("content-type");
        assert_eq!((response.status(), kind), (status, Some("application/json; charset=utf-8")), "{path}");
        assert_eq!(response.text(), body, "{path}");
    }
    // What is compressed is not undone.
    cluster.gateway.wait_ready(1).await;
    let (mut client, call) = calls(&cluster, MESSAGES, false).await;
    call.respond(400, &[("content-encoding", "gzip")], b"\x1f\x8b").await;
    assert_eq!(client.response().await.body, b"\x1f\x8b");
    // An answer to HEAD has no body, and is given none.
    cluster.gateway.wait_ready(1).await;
    let mut client = Client::connect(cluster.addr()).await;
    client.request("HEAD", "/v1/responses/resp_1", &[], b"").await;
    cluster.fakes[0].call().await.respond(404, &[("content-type", "text/html")], b"").await;
    let response = client.response().await;
    assert_eq!((response.status(), &*response.text()), (404, ""));
}

#[tokio::test]
async fn a_long_page_is_told_by_its_beginning() {
    let cluster = Cluster::builder().fakes(1).start().await;
    let page = "é".repeat(400_000);
    let response = answered(&cluster, MESSAGES, 400, ("text/html", &page)).await;
    let told = response.json();
    let text = told["error"]["message"].as_str().unwrap();
    assert!(text.len() <= 2_048 && text.len() > 1_000 && page.starts_with(text));
    // The whole page was read: the connection serves the next request.
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_requests_total", &[("outcome", "worker_status")]), 1.0);
}

/// Without its name an event with an error is heard by none of Anthropic's clients.
#[tokio::test]
async fn an_error_within_a_stream_is_told_once_in_the_shape_of_the_api() {
    let cluster = Cluster::builder().fakes(1).start().await;
    let said = r#"{"error":{"message":"no room left","type":"BadRequestError","code":400}}"#;
    let detail = r#"{"detail":"no room left"}"#;
    for (path, event, class) in [
        (MESSAGES, said, Some("invalid_request_error")),
        (MESSAGES, detail, Some("api_error")),
        (RESPONSES, detail, None),
        (CHAT, detail, None),
    ] {
        cluster.gateway.wait_ready(1).await;
        let (mut client, mut call) = calls(&cluster, path, true).await;
        call.begin_stream().await;
        call.event(event).await;
        call.end().await;
        let text = client.response().await.text();
        let what = format!("{path} {event}: {text}");
        assert_eq!(text.matches("no room left").count(), if path == RESPONSES { 2 } else { 1 }, "{what}");
        assert_eq!(text.matches("data:").count(), 1, "{what}");
        assert_eq!(text.contains("event: error\n"), path != CHAT, "{what}");
        let data = text.split_once("data: ").unwrap().1;
        let told: Value = serde_json::from_str(data.trim()).unwrap();
        assert_eq!(told["error"]["message"], "no room left", "{what}");
        if let Some(class) = class {
            assert_eq!((&told["type"], &told["error"]["type"]), (&"error".into(), &class.into()), "{what}");
        }
    }
}
