//! Anthropic's Messages over real sockets: the prompt is a chat's, and so is what the model says to it.

use serde_json::{Value, json};

use crate::client::{chat, post, send, with, worker};

const MESSAGES: &str = "/v1/messages";

fn request(content: &str, max_tokens: usize) -> Value {
    let message = json!({"role": "user", "content": content});
    json!({"model": "keyway-random", "max_tokens": max_tokens, "messages": [message], "temperature": 0,
        "ignore_eos": true})
}

#[tokio::test]
async fn a_message_is_what_a_chat_says() {
    let worker = worker().await;
    let chat = post(worker.addr(), "/v1/chat/completions", &chat("Hello", 12)).await.json();
    let said = &chat["choices"][0]["message"]["content"];
    let answer = post(worker.addr(), MESSAGES, &request("Hello", 12)).await;
    assert!(answer.headers.contains_key("x-keyway-numerics-id"));
    let message = answer.json();
    assert_eq!(message["content"], json!([{"type": "text", "text": said}]));
    assert_eq!(message["stop_reason"], "max_tokens");
    let usage = &message["usage"];
    let input = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(chat["usage"]["prompt_tokens"], input);
    assert_eq!(usage["output_tokens"], 12);

    let streamed = post(worker.addr(), MESSAGES, &with(request("Hello", 12), json!({"stream": true}))).await;
    assert_eq!(streamed.headers["content-type"], "text/event-stream; charset=utf-8");
    let data = streamed.text.lines().filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = data.map(|data| serde_json::from_str(data).unwrap()).collect();
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, said.as_str().unwrap());
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    worker.shutdown().await;
}

#[tokio::test]
async fn a_tool_that_must_be_called_is() {
    let worker = worker().await;
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"], "additionalProperties": false});
    let brief =
        json!({"logit_bias": {"34": 6, "125": 6}, "temperature": 1.0, "seed": 3, "ignore_eos": false});
    let base = with(
        with(request("Weather?", 900), brief),
        json!({"tools": [
        {"name": "weather", "input_schema": schema}, {"name": "now", "input_schema": {"type": "object"}}]}),
    );
    let forced = with(base.clone(), json!({"tool_choice": {"type": "tool", "name": "weather"}}));
    let message = post(worker.addr(), MESSAGES, &forced).await.json();
    let call = &message["content"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("tool_use"), &json!("weather")), "{message}");
    assert!(call["input"]["city"].is_string() && message["stop_reason"] == "tool_use", "{message}");
    let format = json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}, "tools": []});
    let message = post(worker.addr(), MESSAGES, &with(base, format)).await.json();
    let said: Value = serde_json::from_str(message["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(said["city"].is_string(), "{message}");
    worker.shutdown().await;
}

#[tokio::test]
async fn errors_are_anthropics() {
    let worker = worker().await;
    for (body, status, kind) in [
        ("{".to_owned(), 400, "invalid_request_error"),
        (with(request("x", 1), json!({"model": "other"})).to_string(), 404, "not_found_error"),
        (request("x", 40_000).to_string(), 400, "invalid_request_error"),
    ] {
        let answer = send(worker.addr(), "POST", MESSAGES, &body).await;
        assert_eq!((answer.status, answer.json()["error"]["type"].as_str()), (status, Some(kind)));
    }
    worker.shutdown().await;
}
