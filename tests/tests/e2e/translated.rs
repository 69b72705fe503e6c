//! Hazard: an agent speaks Anthropic's Messages or OpenAI's Responses, its model's engines speak chats alone,
//! and something is lost on the way there or back.

use keyway_tests::openai::{CHAT, FAKE_MODEL, answer, delta, usage_chunk};
use keyway_tests::{Call, Client, Cluster, Next, eventually, post};
use serde_json::{Value, json};

const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

async fn cluster(fakes: usize) -> Cluster {
    let config = format!("[[model]]\nname = \"{FAKE_MODEL}\"\ntranslate = true\n");
    Cluster::builder().fakes(fakes).config(&config).start().await
}

fn messages(question: &str, stream: bool) -> Value {
    json!({
        "model": FAKE_MODEL, "max_tokens": 50, "stream": stream, "system": "Be brief.", "service_tier": "auto",
        "messages": [{ "role": "user", "content": [{ "type": "text", "text": question, "cache_control": { "type": "ephemeral" } }] }],
        "tools": [{ "name": "look", "description": "Looks.", "input_schema": { "type": "object", "properties": { "at": { "type": "string" } } } }],
        "tool_choice": { "type": "any" },
    })
}

fn responses(question: &str, stream: bool) -> Value {
    json!({
        "model": FAKE_MODEL, "max_output_tokens": 50, "stream": stream, "instructions": "Be brief.", "store": false,
        "input": [{ "role": "user", "content": [{ "type": "input_text", "text": question }] }],
        "tools": [{ "type": "function", "name": "look", "parameters": { "type": "object", "properties": {} } }],
    })
}

/// Sends a request; returns the client and the call as it arrived.
async fn asked(cluster: &Cluster, path: &str, headers: &[(&str, &str)], body: &Value) -> (Client, Call) {
    cluster.fakes[0].manual();
    let mut client = Client::connect(cluster.addr()).await;
    client.request("POST", path, headers, body.to_string().as_bytes()).await;
    (client, cluster.fakes[0].call().await)
}

fn body(call: &Call) -> Value {
    serde_json::from_slice(&call.request.body).unwrap()
}

/// A chat that calls the tool.
fn calls() -> Value {
    let mut chat = answer("", 40, 32);
    let call = json!({ "id": "call_7", "type": "function", "function": { "name": "look", "arguments": "{\"at\":\"x\"}" } });
    chat["choices"][0]["message"] =
        json!({ "role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": [call] });
    chat["choices"][0]["finish_reason"] = "tool_calls".into();
    chat
}

/// The chunk that ends a streamed chat's only choice.
fn end(reason: &str) -> Value {
    let mut chunk = delta("");
    chunk["choices"][0]["finish_reason"] = reason.into();
    chunk
}

/// The events of a stream until it ends.
async fn events(client: &mut Client) -> Vec<Value> {
    let mut events = Vec::new();
    while let Next::Event(data) = client.next_event().await {
        events.push(serde_json::from_str(&data).unwrap());
    }
    events
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_message_goes_as_a_chat_and_comes_back_as_a_message() {
    let cluster = cluster(1).await;
    let headers = [("x-api-key", "k"), ("anthropic-version", "2023-06-01"), ("x-session-id", "s")];
    let (mut client, call) =
        asked(&cluster, "/v1/messages?beta=true", &headers, &messages("Where?", false)).await;
    assert_eq!(call.request.target(), ("POST", CHAT));
    assert_eq!(call.request.head.header("authorization"), Some("Bearer k"));
    assert_eq!(
        (call.request.head.header("x-api-key"), call.request.head.header("anthropic-version")),
        (None, None)
    );
    let chat = body(&call);
    let said = json!([{ "role": "system", "content": "Be brief." }, { "role": "user", "content": "Where?" }]);
    assert_eq!(
        (&chat["messages"], &chat["max_tokens"], &chat["tool_choice"]),
        (&said, &50.into(), &"required".into())
    );
    let function = json!({ "name": "look", "description": "Looks.", "parameters": { "type": "object", "properties": { "at": { "type": "string" } } } });
    assert_eq!(chat["tools"], json!([{ "type": "function", "function": function }]));
    call.respond_json(200, &calls()).await;
    let response = client.response().await;
    let message = response.json();
    assert_eq!((response.status(), response.header("content-type")), (200, Some("application/json")));
    assert!(response.header("x-keyway-ignored").unwrap().contains("service_tier"));
    assert_eq!(response.header("request-id"), response.header("x-request-id"));
    let head = (message["type"].as_str(), message["model"].as_str(), message["stop_reason"].as_str());
    assert_eq!(head, (Some("message"), Some(FAKE_MODEL), Some("tool_use")));
    assert_eq!(message["content"][0]["thinking"], "Hm.");
    assert_eq!(message["content"][1], json!({ "type": "text", "text": "Wait." }));
    assert_eq!(
        message["content"][2],
        json!({ "type": "tool_use", "id": "call_7", "name": "look", "input": { "at": "x" } })
    );
    let usage = &message["usage"];
    assert_eq!((&usage["input_tokens"], &usage["cache_read_input_tokens"]), (&8.into(), &32.into()));
    cluster.gateway.idle().await;
    let metrics = cluster.gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_prompt_tokens_total", &[]), 40.0);
    assert_eq!(metrics.sum("keyway_cached_tokens_total", &[("source", "reported")]), 32.0);
}

#[tokio::test]
async fn a_response_goes_as_a_chat_and_comes_back_as_a_response() {
    let cluster = cluster(1).await;
    let (mut client, call) = asked(&cluster, RESPONSES, &[], &responses("Where?", false)).await;
    assert_eq!(call.request.target(), ("POST", CHAT));
    let chat = body(&call);
    assert_eq!(chat["messages"][0], json!({ "role": "system", "content": "Be brief." }));
    assert_eq!((&chat["messages"][1]["role"], &chat["max_tokens"]), (&"user".into(), &50.into()));
    call.respond_json(200, &calls()).await;
    let response = client.response().await.json();
    let head = (response["object"].as_str(), response["status"].as_str(), response["model"].as_str());
    assert_eq!(head, (Some("response"), Some("completed"), Some(FAKE_MODEL)));
    let output = response["output"].as_array().unwrap();
    assert_eq!(kinds(output), ["reasoning", "message", "function_call"]);
    assert_eq!(
        (&output[2]["call_id"], &output[2]["arguments"]),
        (&"call_7".into(), &"{\"at\":\"x\"}".into())
    );
    let usage = &response["usage"];
    assert_eq!(
        (&usage["input_tokens"], &usage["input_tokens_details"]["cached_tokens"]),
        (&40.into(), &32.into())
    );
    cluster.gateway.idle().await;
}

/// A template that is not known may refuse what the system says late, or drop it: only what is known to show
/// it where it stands gets it there.
#[tokio::test]
async fn what_the_system_says_late_is_said_where_it_stands() {
    let said = json!([
        { "role": "user", "content": "Hi" },
        { "role": "system", "content": "Be brief." },
        { "role": "assistant", "content": "Hello." },
        { "role": "user", "content": "Where?" },
    ]);
    let reminded = "Hi\n\n<system-reminder>\nBe brief.\n</system-reminder>";
    for (tokenizer, roles, first) in [
        ("", &["user", "assistant", "user"][..], reminded),
        ("tokenizer = \"random\"", &["user", "system", "assistant", "user"], "Hi"),
    ] {
        let config = format!("[[model]]\nname = \"{FAKE_MODEL}\"\ntranslate = true\n{tokenizer}\n");
        let cluster = Cluster::builder().fakes(1).config(&config).start().await;
        for (path, field) in [(MESSAGES, "messages"), (RESPONSES, "input")] {
            let request = json!({ "model": FAKE_MODEL, "max_tokens": 50, field: said });
            let (mut client, call) = asked(&cluster, path, &[], &request).await;
            let chat = body(&call);
            let messages = chat["messages"].as_array().unwrap();
            let found: Vec<&str> = messages.iter().map(|said| said["role"].as_str().unwrap()).collect();
            assert_eq!((&found[..], &messages[0]["content"]), (roles, &first.into()), "{path} {tokenizer}");
            call.respond_json(200, &answer("There.", 40, 0)).await;
            assert_eq!(client.response().await.status(), 200);
        }
        cluster.gateway.idle().await;
    }
}

#[tokio::test]
async fn streams_come_back_event_by_event() {
    let cluster = cluster(1).await;
    for path in [MESSAGES, RESPONSES] {
        let request = if path == MESSAGES { messages("Where?", true) } else { responses("Where?", true) };
        let (mut client, mut call) = asked(&cluster, path, &[], &request).await;
        assert_eq!(body(&call)["stream_options"], json!({ "include_usage": true }));
        call.begin_stream().await;
        call.event(&delta("Over").to_string()).await;
        client.head().await;
        // What the worker has said is told before it says more.
        let mut said = String::new();
        while !said.contains("Over") {
            said = client.next_event().await.event();
        }
        for event in [delta(" there."), end("stop"), usage_chunk(40, 32)] {
            call.event(&event.to_string()).await;
        }
        call.done().await;
        let events = events(&mut client).await;
        let last = events.last().unwrap();
        if path == MESSAGES {
            assert_eq!(last["type"], "message_stop");
        } else {
            assert_eq!(
                (&last["type"], &last["response"]["usage"]["input_tokens"]),
                (&"response.completed".into(), &40.into())
            );
            assert_eq!(last["response"]["output"][0]["content"][0]["text"], "Over there.");
        }
    }
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn what_goes_wrong_is_told_in_the_api_that_was_asked() {
    let cluster = cluster(1).await;
    // A worker's refusal.
    let (mut client, call) = asked(&cluster, MESSAGES, &[], &messages("Where?", false)).await;
    let error = json!({ "error": { "message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded" } });
    call.respond_json(400, &error).await;
    let response = client.response().await;
    let told = response.json();
    assert_eq!((response.status(), &told["type"]), (400, &"error".into()));
    assert_eq!(told["error"], json!({ "type": "invalid_request_error", "message": "too long" }));
    // What no chat can do, refused before a worker is asked.
    let mut request = responses("Where?", false);
    request["previous_response_id"] = "resp_1".into();
    let response = post(cluster.addr(), RESPONSES, request.to_string().as_bytes()).await;
    let told = response.json();
    assert_eq!((response.status(), &told["error"]["param"]), (400, &"previous_response_id".into()));
    let response =
        post(cluster.addr(), MESSAGES, json!({ "model": FAKE_MODEL }).to_string().as_bytes()).await;
    assert_eq!((response.status(), &response.json()["type"]), (400, &"error".into()));
    let mut request = messages("Where?", false);
    request["thread"] = json!({ "type": "continue", "id": "t" });
    let told = post(cluster.addr(), MESSAGES, request.to_string().as_bytes()).await.json();
    assert_eq!(told["error"]["details"], json!({ "error_code": "thread_unsupported_request" }));
    assert!(cluster.fakes[0].try_call().is_none());
    // An answer that is no chat.
    let (mut client, call) = asked(&cluster, MESSAGES, &[], &messages("Where?", false)).await;
    call.respond_json(200, &json!({ "hello": "world" })).await;
    let response = client.response().await;
    assert_eq!((response.status(), &response.json()["error"]["type"]), (502, &"api_error".into()));
    // A stream that breaks off.
    for (path, failed) in [(MESSAGES, "error"), (RESPONSES, "response.failed")] {
        let request = if path == MESSAGES { messages("Where?", true) } else { responses("Where?", true) };
        let (mut client, mut call) = asked(&cluster, path, &[], &request).await;
        call.begin_stream().await;
        call.event(&delta("Over").to_string()).await;
        call.event(&json!({ "error": { "message": "out of memory", "type": "server_error" } }).to_string())
            .await;
        call.end().await;
        client.head().await;
        let events = events(&mut client).await;
        assert_eq!(kinds(&events).last(), Some(&failed), "{path}: {events:?}");
    }
    cluster.gateway.idle().await;
}

#[tokio::test]
async fn turns_find_what_those_before_have_left() {
    let cluster = cluster(4).await;
    let long = "Tell me more of whales, and of what they eat. ".repeat(12);
    let chat = json!({
        "model": FAKE_MODEL,
        "messages": [{ "role": "system", "content": "Be brief." }, { "role": "user", "content": long }],
    });
    let (mut message, mut first) = (messages(&long, false), responses(&long, false));
    for request in [&mut message, &mut first] {
        request.as_object_mut().unwrap().retain(|name, _| !name.starts_with("tool"));
    }
    let mut second = first.clone();
    let said = json!({ "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": "Krill." }] });
    second["input"].as_array_mut().unwrap().extend([said, json!({ "role": "user", "content": "And?" })]);
    for (path, request, before) in [
        (CHAT, &chat, None),
        (MESSAGES, &message, Some(&chat)),
        (RESPONSES, &first, None),
        (RESPONSES, &second, Some(&first)),
    ] {
        let response = post(cluster.addr(), path, request.to_string().as_bytes()).await;
        assert_eq!(response.status(), 200, "{path}: {}", response.text());
        let matched: u64 = response.header("x-keyway-matched-tokens").unwrap().parse().unwrap();
        assert_eq!(matched > 100, before.is_some(), "{path}: {matched} tokens of {request}");
    }
}

#[tokio::test]
async fn a_body_that_grows_in_memory_has_to_find_room_first() {
    let config = format!(
        "[[model]]\nname = \"{FAKE_MODEL}\"\ntranslate = true\n[limits]\nmax_body_memory_bytes = 33554432\n"
    );
    let cluster = Cluster::builder().fakes(1).config(&config).start().await;
    let of_numbers = format!("{{\"model\":\"{FAKE_MODEL}\",\"input\":[{}1]}}", "1,".repeat(200_000));
    let of_text = json!({ "model": FAKE_MODEL, "input": "whale ".repeat(66_000) }).to_string();
    let refused = post(cluster.addr(), RESPONSES, of_numbers.as_bytes()).await;
    assert!([429, 503].contains(&refused.status()), "{}", refused.text());
    let answered = post(cluster.addr(), RESPONSES, of_text.as_bytes()).await;
    assert_eq!(answered.status(), 200, "{}", answered.text());
    cluster.gateway.idle().await;
    // A thread that gives way to all others may still look where the prompt leaves its past.
    let held = async || cluster.gateway.metrics().await.sum("keyway_body_memory_bytes", &[]);
    eventually!(held().await == 0.0, "what was held is given back");
}

#[tokio::test]
async fn other_models_requests_pass_as_they_are() {
    let config = "[[model]]\nname = \"another\"\ntranslate = true\n";
    let cluster = Cluster::builder().fakes(1).config(config).start().await;
    let request = messages("Where?", false);
    let (mut client, call) = asked(&cluster, MESSAGES, &[("x-api-key", "k")], &request).await;
    assert_eq!(
        (call.request.target(), call.request.head.header("x-api-key")),
        (("POST", MESSAGES), Some("k"))
    );
    assert_eq!(call.request.body, request.to_string().as_bytes());
    call.respond_json(200, &json!({ "type": "message" })).await;
    assert_eq!(client.response().await.text(), r#"{"type":"message"}"#);
    cluster.gateway.idle().await;
}

/// Engines with these APIs of their own refuse what Codex sends with each request.
#[tokio::test]
async fn what_engines_refuse_of_their_own_apis_goes_as_a_chat_where_it_is_said() {
    let config = format!("[[model]]\nname = \"{FAKE_MODEL}\"\ntranslate = \"custom-tools\"\n");
    let cluster = Cluster::builder().fakes(1).config(&config).start().await;
    let mut request = responses("Where?", false);
    for (path, request) in [(RESPONSES, &request), (MESSAGES, &messages("Where?", false))] {
        let (mut client, call) = asked(&cluster, path, &[], request).await;
        assert_eq!(call.request.target(), ("POST", path));
        assert_eq!(call.request.body, request.to_string().as_bytes());
        call.respond_json(200, &json!({})).await;
        assert_eq!(client.response().await.text(), "{}");
    }
    let format = json!({ "type": "grammar", "syntax": "lark", "definition": "start: /.+/" });
    let patch = json!({ "type": "custom", "name": "patch", "format": format });
    request["tools"].as_array_mut().unwrap().push(patch);
    let (mut client, call) = asked(&cluster, RESPONSES, &[], &request).await;
    assert_eq!(call.request.target(), ("POST", CHAT));
    assert_eq!(body(&call)["tools"][1]["function"]["name"], "patch");
    let mut chat = calls();
    chat["choices"][0]["message"]["tool_calls"][0]["function"] =
        json!({ "name": "patch", "arguments": "{\"input\":\"*** Begin\"}" });
    call.respond_json(200, &chat).await;
    let response = client.response().await.json();
    let called = &response["output"][2];
    assert_eq!((&called["type"], &called["input"]), (&"custom_tool_call".into(), &"*** Begin".into()));
    cluster.gateway.idle().await;
}

/// An engine that does not know the field answers the new messages without the conversation.
#[tokio::test]
async fn a_thread_reaches_only_workers_that_keep_it() {
    let cluster = Cluster::builder().fakes(1).start().await;
    let mut request = messages("And?", false);
    request["thread"] = json!({ "type": "continue", "previous_message_id": "msg_1" });
    let refused = post(cluster.addr(), MESSAGES, request.to_string().as_bytes()).await;
    let details = json!({ "error_code": "thread_unsupported_request" });
    assert_eq!((refused.status(), &refused.json()["error"]["details"]), (400, &details));
    assert_eq!(cluster.fakes[0].request_count(), 0);
    let config = format!("[[model]]\nname = \"{FAKE_MODEL}\"\nthreads = true\n");
    let cluster = Cluster::builder().fakes(1).config(&config).start().await;
    let (mut client, call) = asked(&cluster, MESSAGES, &[], &request).await;
    assert_eq!(body(&call)["thread"], request["thread"]);
    call.respond_json(200, &json!({ "type": "message" })).await;
    assert_eq!(client.response().await.status(), 200);
}

#[tokio::test]
async fn tokens_are_counted_where_the_tokenizer_is_known() {
    let config = "[[model]]\nname = \"keyway-random\"\ntokenizer = \"random\"\ntranslate = true\n";
    let cluster = Cluster::builder().workers(1).config(config).start().await;
    let mut request = messages("How many tokens are these?", false);
    request["model"] = "keyway-random".into();
    request.as_object_mut().unwrap().remove("max_tokens");
    let counted = post(cluster.addr(), "/v1/messages/count_tokens", request.to_string().as_bytes()).await;
    assert_eq!(counted.status(), 200, "{}", counted.text());
    request["max_tokens"] = 5.into();
    let answered = post(cluster.addr(), MESSAGES, request.to_string().as_bytes()).await.json();
    let usage = &answered["usage"];
    let found = |name: &str| usage[name].as_u64().unwrap();
    let prompt = found("input_tokens") + found("cache_read_input_tokens");
    assert_eq!(counted.json(), json!({ "input_tokens": prompt }));
    let unknown = messages("How many?", false);
    let response = post(cluster.addr(), "/v1/messages/count_tokens", unknown.to_string().as_bytes()).await;
    assert_eq!(response.status(), 404, "a model that nobody serves");
}
