//! OpenAI's Responses over real sockets: the prompt is a chat's, and so is what the model says to it.

use serde_json::{Value, json};

use crate::client::{chat, metric_becomes, post, send, with, worker};

const RESPONSES: &str = "/v1/responses";

fn request(content: &str, max_tokens: usize) -> Value {
    json!({"model": "keyway-random", "max_output_tokens": max_tokens, "input": content, "temperature": 0,
        "ignore_eos": true})
}

#[tokio::test]
async fn a_response_is_what_a_chat_says_and_the_next_finds_it_cached() {
    let worker = worker().await;
    let addr = worker.addr();
    let chat = post(addr, "/v1/chat/completions", &chat("Hello", 24)).await.json();
    let said = chat["choices"][0]["message"]["content"].as_str().unwrap();
    let first = post(addr, RESPONSES, &request("Hello", 24)).await;
    assert!(first.headers.contains_key("x-keyway-numerics-id"));
    let first = first.json();
    assert_eq!(first["output"][0]["content"][0]["text"], said);
    assert_eq!(first["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);

    let more = json!({"previous_response_id": first["id"], "stream": true});
    let second = post(addr, RESPONSES, &with(request("More", 8), more)).await;
    let data = second.text.lines().filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = data.map(|data| serde_json::from_str(data).unwrap()).collect();
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["previous_response_id"], first["id"]);
    let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(last["output"][0]["content"][0]["text"], text);
    let cached = last["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached >= chat["usage"]["prompt_tokens"].as_u64().unwrap(), "{last}");

    let path = format!("{RESPONSES}/{}", first["id"].as_str().unwrap());
    assert_eq!(send(addr, "GET", &path, "").await.json(), first);
    assert_eq!(send(addr, "DELETE", &path, "").await.json()["deleted"], true);
    assert_eq!(send(addr, "GET", &path, "").await.status, 404);
    worker.shutdown().await;
}

#[tokio::test]
async fn a_function_that_must_be_called_is_and_a_form_is_kept() {
    let worker = worker().await;
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"], "additionalProperties": false});
    let brief =
        json!({"logit_bias": {"34": 6, "125": 6}, "temperature": 1.0, "seed": 3, "ignore_eos": false});
    let base = with(request("Weather?", 900), brief);
    let tools = json!({"tools": [{"type": "function", "name": "weather", "parameters": schema}],
        "tool_choice": "required", "parallel_tool_calls": false});
    let response = post(worker.addr(), RESPONSES, &with(base.clone(), tools)).await.json();
    let call = &response["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("weather")), "{response}");
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["city"].is_string());
    let form = json!({"text": {"format": {"type": "json_schema", "name": "w", "schema": schema}}});
    let response = post(worker.addr(), RESPONSES, &with(base, form)).await.json();
    let said = response["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(said).unwrap()["city"].is_string(), "{said}");
    worker.shutdown().await;
}

#[tokio::test]
async fn an_answer_that_is_cancelled_or_deleted_is_made_no_further() {
    let worker = worker().await;
    let addr = worker.addr();
    let running = "keyway_worker_requests_running";
    for (method, rest) in [("POST", "/cancel"), ("DELETE", "")] {
        let body = with(request("Hello", 30_000), json!({"background": true}));
        let begun = post(addr, RESPONSES, &body).await.json();
        assert_eq!(begun["status"], "queued");
        let path = format!("{RESPONSES}/{}", begun["id"].as_str().unwrap());
        while send(addr, "GET", &path, "").await.json()["status"] == "queued" {
            tokio::task::yield_now().await;
        }
        assert_eq!(send(addr, "GET", &path, "").await.json()["status"], "in_progress");
        let going_on = json!({"previous_response_id": begun["id"]});
        let early = post(addr, RESPONSES, &with(request("And?", 4), going_on)).await;
        assert_eq!((early.status, &early.json()["error"]["code"]), (400, &json!("response_unfinished")));
        metric_becomes(addr, running, 1.0).await;
        assert_eq!(send(addr, method, &format!("{path}{rest}"), "").await.status, 200);
        metric_becomes(addr, running, 0.0).await;
        let after = send(addr, "GET", &path, "").await;
        let expected = if method == "POST" { json!("cancelled") } else { Value::Null };
        assert_eq!(after.json()["status"], expected, "{}", after.text);
    }
    worker.shutdown().await;
}
