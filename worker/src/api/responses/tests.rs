//! Responses over a model that says what it is told to: what becomes of a request's fields, what clients
//! read, whole and in events, and how a conversation goes on by its last answer.

use std::sync::Arc;

use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::api::App;
use crate::api::tests::scripted::{Got, ask, saying};
use crate::request_memory::RequestMemory;

const PATH: &str = "/v1/responses";

const ALL: &str = "<think>Hm.</think>Let me look.\n<tool_call>{\"name\": \"look\", \"arguments\": {\"at\": \
                   \"it\"}}</tool_call>\n<tool_call>{\"name\": \"patch\", \"arguments\": {\"input\": \
                   \"a\\nb\"}}</tool_call>\n<tool_call>{\"name\": \"fs__read\", \"arguments\": {}}</tool_call>";

fn request(more: &Value) -> Value {
    let mut body = json!({"model": "m", "input": "Hi"});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn tools() -> Value {
    json!({"tools": [
        {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {}}}},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read", "parameters": {}}]},
        {"type": "web_search"},
    ]})
}

async fn send(app: &Arc<App>, more: &Value) -> Got {
    ask(app, Method::POST, PATH, &request(more)).await
}

async fn answer(app: &Arc<App>, more: &Value) -> Value {
    let got = send(app, more).await;
    assert_eq!(got.status, 200, "{}", got.text);
    got.json()
}

/// Items without what differs each time.
fn without_ids(items: &Value) -> Vec<Value> {
    let mut items = items.as_array().unwrap().clone();
    for item in items.iter_mut().filter_map(Value::as_object_mut) {
        assert!(item.remove("id").is_some_and(|id| id.as_str().is_some_and(|id| id.contains('_'))));
        item.remove("call_id");
    }
    items
}

#[tokio::test]
async fn a_response_has_its_thoughts_its_text_and_its_calls_as_items() {
    let response = answer(&saying(ALL), &tools()).await;
    let part = |kind: &str, text: &str| json!([{"type": kind, "text": text}]);
    let items = without_ids(&response["output"]);
    assert_eq!(items[0]["content"], part("reasoning_text", "Hm."));
    assert_eq!(items[0]["summary"], json!([]));
    let text = &items[1]["content"][0];
    assert_eq!((&text["text"], &text["annotations"]), (&json!("Let me look."), &json!([])));
    let call = json!({"type": "function_call", "status": "completed", "name": "look",
        "arguments": "{\"at\": \"it\"}"});
    assert_eq!(items[2], call);
    let custom = json!({"type": "custom_tool_call", "status": "completed", "name": "patch", "input": "a\nb"});
    assert_eq!(items[3], custom);
    assert_eq!((&items[4]["name"], &items[4]["namespace"]), (&json!("read"), &json!("fs")));
    assert_eq!((&response["status"], &response["object"]), (&json!("completed"), &json!("response")));
    let usage = &response["usage"];
    assert_eq!(usage["output_tokens"], ALL.len() + 1);
    // From behind the opening tag to the end of the closing one.
    assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], "Hm.</think>".len());
    let sum = usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], sum);
}

#[tokio::test]
async fn events_are_numbered_and_say_what_the_whole_response_says() {
    let app = saying(ALL);
    let whole = answer(&app, &tools()).await;
    let mut more = tools();
    more["stream"] = true.into();
    let events = send(&app, &more).await.events();
    let numbers: Vec<u64> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let mut names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    names.dedup();
    let names: Vec<&str> = names.iter().map(|name| name.strip_prefix("response.").unwrap()).collect();
    let text = |kind: &'static str| {
        let growth = [[kind, ".delta"].concat(), [kind, ".done"].concat()];
        ["output_item.added", "content_part.added"]
            .map(str::to_owned)
            .into_iter()
            .chain(growth)
            .chain(["content_part.done", "output_item.done"].map(str::to_owned))
    };
    let call = |kind: &'static str| {
        [
            "output_item.added".to_owned(),
            [kind, ".delta"].concat(),
            [kind, ".done"].concat(),
            "output_item.done".to_owned(),
        ]
    };
    let expected: Vec<String> = ["created", "in_progress"]
        .map(str::to_owned)
        .into_iter()
        .chain(text("reasoning_text"))
        .chain(text("output_text"))
        .chain(call("function_call_arguments"))
        .chain(call("custom_tool_call_input"))
        .chain(call("function_call_arguments"))
        .chain(["completed".to_owned()])
        .collect();
    assert_eq!(names, expected);
    let response = &events.last().unwrap()["response"];
    assert_eq!(without_ids(&response["output"]), without_ids(&whole["output"]));
    // What the deltas join to is what the end of each item says.
    for (index, item) in response["output"].as_array().unwrap().iter().enumerate() {
        let mine = events.iter().filter(|event| event["output_index"] == index);
        let joined: String = mine.clone().filter_map(|event| event["delta"].as_str()).collect();
        let content = item["content"][0]["text"].as_str();
        let said = content.or(item["arguments"].as_str()).or(item["input"].as_str()).unwrap();
        assert_eq!(joined, said);
        assert!(mine.filter_map(|event| event["item_id"].as_str()).all(|id| item["id"] == id));
    }
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(events[0]["response"]["id"], response["id"]);
}

#[tokio::test]
async fn an_answer_that_is_cut_off_is_incomplete_and_one_that_breaks_has_failed() {
    let cut = answer(&saying("One two"), &json!({"max_output_tokens": 3})).await;
    assert_eq!((&cut["status"], &cut["output"][0]["status"]), (&json!("incomplete"), &json!("incomplete")));
    assert_eq!(cut["incomplete_details"], json!({"reason": "max_output_tokens"}));
    let events = send(&saying("One two"), &json!({"max_output_tokens": 3, "stream": true})).await.events();
    assert_eq!(events.last().unwrap()["type"], "response.incomplete");
    let events = send(&saying("ab\0"), &json!({"stream": true})).await.events();
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(last["response"]["error"]["code"], "server_error");
}

#[tokio::test]
async fn a_conversation_goes_on_by_the_id_of_its_last_answer() {
    let app = saying("Yes");
    let first = answer(&app, &json!({"instructions": "Be brief."})).await;
    let id = first["id"].as_str().unwrap();
    let second = answer(&app, &json!({"previous_response_id": id, "input": "And?"})).await;
    assert_eq!(second["previous_response_id"], id);
    let items =
        json!([{"role": "user", "content": "Hi"}, first["output"][0], {"role": "user", "content": "And?"}]);
    let written_out = answer(&app, &json!({"input": items, "store": false})).await;
    assert_eq!(second["usage"]["input_tokens"], written_out["usage"]["input_tokens"]);
    // A third turn has both; and a stream is kept as a whole answer is.
    let more = json!({"previous_response_id": second["id"], "input": [{"role": "user", "content": "So?"}],
        "stream": true});
    let third = send(&app, &more).await.events().pop().unwrap()["response"].clone();
    let more_tokens = third["usage"]["input_tokens"].as_u64() > second["usage"]["input_tokens"].as_u64();
    assert!(more_tokens, "{third}");
    let path = format!("{PATH}/{}", third["id"].as_str().unwrap());
    assert_eq!(ask(&app, Method::GET, &path, &Value::Null).await.json(), third);
    for (method, rest, status, code) in [
        (Method::GET, "?stream=true", StatusCode::BAD_REQUEST, "unsupported_parameter"),
        (Method::GET, "/output_items", StatusCode::NOT_FOUND, "unknown_url"),
        (Method::GET, "/input_items?limit=0", StatusCode::BAD_REQUEST, "invalid_value"),
        (Method::GET, "/cancel", StatusCode::METHOD_NOT_ALLOWED, "method_not_supported"),
        (Method::POST, "/cancel", StatusCode::BAD_REQUEST, "not_in_background"),
        (Method::POST, "", StatusCode::NOT_FOUND, "unknown_url"),
        (Method::PUT, "", StatusCode::METHOD_NOT_ALLOWED, "method_not_supported"),
    ] {
        let got = ask(&app, method, &format!("{path}{rest}"), &Value::Null).await;
        assert_eq!((got.status, &got.json()["error"]["code"]), (status, &json!(code)), "{rest}");
    }
    let said = ask(&app, Method::GET, &format!("{path}/input_items?order=asc"), &Value::Null).await.json();
    let said = said["data"].as_array().unwrap().iter().map(|item| &item["content"][0]["text"]);
    assert_eq!(said.collect::<Vec<_>>(), ["Hi", "Yes", "And?", "Yes", "So?"]);
    let plainly = ask(&app, Method::GET, &format!("{path}?stream=false&include=x"), &Value::Null).await;
    assert_eq!(plainly.json(), third);
    let gone = ask(&app, Method::DELETE, &path, &Value::Null).await.json();
    assert_eq!((&gone["deleted"], &gone["id"]), (&json!(true), &third["id"]));
    for unknown in [third["id"].clone(), written_out["id"].clone(), json!("resp_none")] {
        let got = send(&app, &json!({"previous_response_id": unknown})).await;
        assert_eq!(
            (got.status, &got.json()["error"]["param"]),
            (StatusCode::NOT_FOUND, &json!("previous_response_id"))
        );
        let path = format!("{PATH}/{}", unknown.as_str().unwrap());
        assert_eq!(
            ask(&app, Method::GET, &path, &Value::Null).await.json()["error"]["code"],
            "response_not_found"
        );
    }
}

/// Asks for a response until it has ended.
async fn ended(app: &Arc<App>, id: &Value) -> Value {
    loop {
        let path = format!("{PATH}/{}", id.as_str().unwrap());
        let now = ask(app, Method::GET, &path, &Value::Null).await.json();
        if !["queued", "in_progress"].contains(&now["status"].as_str().unwrap()) {
            return now;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_answer_may_be_asked_for_later() {
    let app = saying("Yes");
    let queued = answer(&app, &json!({"background": true, "metadata": {"a": "b"}})).await;
    assert_eq!((&queued["status"], &queued["background"]), (&json!("queued"), &json!(true)));
    assert_eq!((&queued["output"], &queued["usage"]), (&json!([]), &Value::Null));
    let done = ended(&app, &queued["id"]).await;
    assert_eq!(
        (&done["status"], &done["output"][0]["content"][0]["text"]),
        (&json!("completed"), &json!("Yes"))
    );
    assert!(done["usage"]["output_tokens"].is_u64() && done["metadata"] == queued["metadata"]);
    // It goes on as any other, and can be cancelled no more.
    let path = format!("{PATH}/{}/cancel", done["id"].as_str().unwrap());
    assert_eq!(ask(&app, Method::POST, &path, &Value::Null).await.json(), done);
    let second = answer(&app, &json!({"previous_response_id": done["id"], "input": "And?"})).await;
    assert_eq!(second["background"], false);
    let breaks = saying("ab\0");
    let queued = answer(&breaks, &json!({"background": true})).await;
    let failed = ended(&breaks, &queued["id"]).await;
    assert_eq!((&failed["status"], &failed["error"]["code"]), (&json!("failed"), &json!("server_error")));
    for more in [json!({"store": false}), json!({"stream": true})] {
        let mut body = more.clone();
        body["background"] = true.into();
        let refused = send(&app, &body).await;
        assert_eq!(
            (refused.status, &refused.json()["error"]["param"]),
            (StatusCode::BAD_REQUEST, &json!("background"))
        );
    }
}

#[tokio::test]
async fn the_model_calls_what_it_may() {
    let mut more = tools();
    let calls = async |more: &Value| {
        let response = answer(&saying(ALL), more).await;
        let output = response["output"].as_array().unwrap().clone();
        output.iter().filter(|item| item["type"].as_str().unwrap().contains("call")).count()
    };
    assert_eq!(calls(&more).await, 3);
    more["parallel_tool_calls"] = false.into();
    assert_eq!(calls(&more).await, 1);
    more["tool_choice"] = "none".into();
    assert_eq!(calls(&more).await, 0);
    for (choice, status) in [
        (json!({"type": "function", "name": "other"}), 400),
        (json!({"type": "web_search"}), 400),
        (json!("perhaps"), 400),
        (
            json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}),
            200,
        ),
    ] {
        more["tool_choice"] = choice.clone();
        assert_eq!(send(&saying("Yes"), &more).await.status, status, "{choice}");
    }
}

#[tokio::test]
async fn an_answer_repeats_its_request_and_what_is_not_acted_on_is_named() {
    let more = json!({"metadata": {"a": "b"}, "temperature": 0.5, "session_id": "s", "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}, "truncation": "auto",
        "include": ["reasoning.encrypted_content"], "user": "u", "max_output_tokens": 50});
    let got = send(&saying("Yes"), &more).await;
    let response = got.json();
    for (name, expected) in [
        ("metadata", json!({"a": "b"})),
        ("temperature", json!(0.5)),
        ("top_p", json!(1.0)),
        ("user", json!("u")),
        ("store", json!(true)),
        ("tools", json!([])),
        ("tool_choice", json!("auto")),
        ("max_output_tokens", json!(50)),
        ("text", json!({"verbosity": "low", "format": {"type": "text"}})),
    ] {
        assert_eq!(response[name], expected, "{name}");
    }
    let mut names: Vec<&str> = got.headers["x-keyway-ignored"].to_str().unwrap().split(", ").collect();
    names.sort_unstable();
    assert_eq!(
        names,
        ["include", "reasoning.effort", "reasoning.summary", "session_id", "text.verbosity", "truncation"]
    );
    for more in [
        json!({"input": null}),
        json!({"input": 1}),
        json!({"input": [{"type": "sound"}]}),
        json!({"background": "yes"}),
        json!({"conversation": "c"}),
        json!({"prompt": {"id": "p"}}),
        json!({"keyway": {}}),
        json!({"max_output_tokens": 0}),
        json!({"text": {"format": {"type": "json_schema"}}}),
        json!({"tools": {}}),
        json!({"top_logprobs": 2}),
    ] {
        let got = send(&saying("Yes"), &more).await;
        let error = got.json();
        assert_eq!(
            (got.status, &error["error"]["type"]),
            (StatusCode::BAD_REQUEST, &json!("invalid_request_error")),
            "{more}"
        );
    }
}

/// Agents with many servers of tools send very many; each is looked at once.
#[tokio::test]
async fn very_many_tools_and_large_forms_are_taken_or_refused_by_what_is_too_much() {
    let name = |n: usize| format!("f{n}");
    let tools: Vec<Value> = (0..20_000)
        .map(
            |n| json!({"type": "function", "name": name(n), "description": "x".repeat(50), "parameters": {}}),
        )
        .collect();
    let all: Vec<Value> = (0..20_000).map(|n| json!({"type": "function", "name": name(n)})).collect();
    let allowed = json!({"type": "allowed_tools", "mode": "auto", "tools": all});
    let form =
        |schema: Value| json!({"text": {"format": {"type": "json_schema", "name": "s", "schema": schema}}});
    let names: Vec<String> = (0..5_000).map(name).collect();
    let mut deep = json!({"type": "string"});
    for _ in 0..400 {
        deep = json!({"type": "array", "items": deep});
    }
    let mut app = saying("Yes");
    Arc::get_mut(&mut app).unwrap().memory = Arc::new(RequestMemory::new(1 << 30));
    // Each is a part of the prompt.
    let too_long = "maximum context length is 4096 tokens";
    for (mut more, status, words) in [
        (json!({"tools": tools, "tool_choice": "auto"}), 400, too_long),
        (json!({"tools": tools, "tool_choice": allowed}), 400, too_long),
        (json!({"tools": tools, "tool_choice": "required"}), 400, too_long),
        (form(json!({"enum": names})), 200, ""),
        (form(deep), 400, "recursion limit exceeded"),
    ] {
        more["max_output_tokens"] = 4.into();
        let got = send(&app, &more).await;
        assert_eq!(got.status.as_u16(), status, "{words}: {}", &got.text[..got.text.len().min(300)]);
        if !words.is_empty() {
            assert!(got.json()["error"]["message"].as_str().unwrap().contains(words), "{}", got.text);
        }
    }
}
