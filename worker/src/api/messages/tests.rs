//! Messages over a model that says what it is told to: what becomes of a request's fields, and what clients
//! read, whole and in events.

use std::sync::Arc;

use http::{Method, StatusCode};
use serde_json::json;

use super::*;
use crate::api::tests::scripted::{Got, ask, ask_as_anthropics, saying};
use crate::api::{App, JSON};

const ALL: &str = "<think>Hm.</think>Let me look.\n<tool_call>{\"name\": \"look\", \"arguments\": {\"at\": \
                   \"it\"}}</tool_call>\n<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";

fn request(more: &Value) -> Value {
    let mut body = json!({"model": "m", "max_tokens": 400, "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn tools() -> Value {
    json!({"tools": [{"name": "look", "description": "Looks.", "input_schema": {"properties": {"at": {}}}},
        {"name": "now", "input_schema": {"type": "object"}}]})
}

async fn send(app: &Arc<App>, more: &Value) -> Got {
    ask(app, Method::POST, "/v1/messages", &request(more)).await
}

async fn content(app: &Arc<App>, more: &Value) -> Value {
    let got = send(app, more).await;
    assert_eq!(got.status, 200, "{}", got.text);
    got.json()["content"].clone()
}

#[tokio::test]
async fn a_message_has_its_thoughts_its_text_and_its_calls_in_blocks() {
    let app = saying(ALL);
    let message = send(&app, &tools()).await.json();
    assert_eq!(message["content"][0]["thinking"], "Hm.");
    assert!(message["content"][0]["signature"].as_str().is_some_and(|text| !text.is_empty()));
    assert_eq!(message["content"][1], json!({"type": "text", "text": "Let me look."}));
    let call = &message["content"][2];
    assert_eq!((&call["name"], &call["input"]), (&json!("look"), &json!({"at": "it"})));
    assert_eq!(message["content"][3]["input"], json!({}));
    assert_ne!(call["id"], message["content"][3]["id"]);
    assert!(call["id"].as_str().unwrap().starts_with("toolu_"));
    assert!(message["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("tool_use"), &Value::Null));
    assert_eq!(message["usage"]["output_tokens"], ALL.len() + 1);
}

#[tokio::test]
async fn events_say_what_the_whole_message_says() {
    let app = saying(ALL);
    let whole = send(&app, &tools()).await.json();
    let mut more = tools();
    more["stream"] = true.into();
    let events = send(&app, &more).await.events();
    let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(names[..2], ["message_start", "ping"]);
    assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);
    // Blocks come one after the other, and joined they are the whole message's.
    let mut blocks: Vec<Value> = Vec::new();
    let mut inputs = String::new();
    let mut is_open = false;
    for event in &events[2..events.len() - 2] {
        let index = event["index"].as_u64().unwrap() as usize;
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert!(!is_open && index == blocks.len());
                blocks.push(event["content_block"].clone());
                (is_open, inputs) = (true, String::new());
            }
            "content_block_delta" => {
                assert!(is_open && index == blocks.len() - 1);
                let (delta, block) = (&event["delta"], blocks.last_mut().unwrap());
                let field = match delta["type"].as_str().unwrap() {
                    "text_delta" => "text",
                    "thinking_delta" => "thinking",
                    "signature_delta" => "signature",
                    _ => {
                        inputs += delta["partial_json"].as_str().unwrap();
                        continue;
                    }
                };
                let joined = block[field].as_str().unwrap().to_owned() + delta[field].as_str().unwrap();
                block[field] = joined.into();
            }
            _ => {
                assert!(is_open && event["type"] == "content_block_stop");
                if !inputs.is_empty() {
                    blocks.last_mut().unwrap()["input"] = serde_json::from_str(&inputs).unwrap();
                }
                is_open = false;
            }
        }
    }
    let without_random = |blocks: &[Value]| -> Vec<Value> {
        let mut blocks = blocks.to_vec();
        for block in blocks.iter_mut().filter_map(Value::as_object_mut) {
            let random = ["id", "signature"].map(|name| block.remove(name)).into_iter().flatten();
            assert!(random.into_iter().all(|text| text.as_str().is_some_and(|text| !text.is_empty())));
        }
        blocks
    };
    assert_eq!(without_random(&blocks), without_random(whole["content"].as_array().unwrap()));
    let start = &events[0]["message"];
    assert_eq!((&start["content"], &start["stop_reason"]), (&json!([]), &Value::Null));
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"], json!({"stop_reason": "tool_use", "stop_sequence": null}));
    assert_eq!(end["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
    // The second time its beginning is cached, which counts on its own.
    let usage = &start["usage"];
    let input = whole["usage"]["input_tokens"].as_u64().unwrap();
    let cached = usage["cache_read_input_tokens"].as_u64().unwrap();
    assert!(cached > 0 && usage["input_tokens"].as_u64() == Some(input - cached), "{usage}");
}

#[tokio::test]
async fn the_end_has_its_reason() {
    for (more, text, reason, sequence) in [
        (json!({}), "One two three", "end_turn", Value::Null),
        (json!({"stop_sequences": ["zero", " three"]}), "One two", "stop_sequence", json!(" three")),
        (json!({"max_tokens": 3}), "One", "max_tokens", Value::Null),
    ] {
        let message = send(&saying("One two three"), &more).await.json();
        assert_eq!(message["content"], json!([{"type": "text", "text": text}]), "{more}");
        assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!(reason), &sequence));
    }
    assert_eq!(content(&saying(""), &json!({})).await, json!([{"type": "text", "text": ""}]));
    let silent = send(&saying(""), &json!({"stream": true})).await.events();
    assert_eq!(silent.iter().filter(|event| event["type"] == "content_block_start").count(), 1);
}

#[tokio::test]
async fn who_must_not_call_says_its_calls() {
    let mut more = tools();
    more["tool_choice"] = json!({"type": "none"});
    let said = content(&saying("<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>"), &more).await;
    assert_eq!((said.as_array().unwrap().len(), &said[0]["type"]), (1, &json!("text")));
    more["tool_choice"] = json!({"type": "auto", "disable_parallel_tool_use": true});
    let said = content(&saying(ALL), &more).await;
    assert_eq!(said.as_array().unwrap().iter().filter(|block| block["type"] == "tool_use").count(), 1);
    // What comes of a call that is cut off is no object.
    more["max_tokens"] = (ALL.find("\"it").unwrap() + 1).into();
    let cut = send(&saying(ALL), &more).await.json();
    assert_eq!((&cut["content"][2]["input"], &cut["stop_reason"]), (&json!({}), &json!("max_tokens")));
}

#[tokio::test]
async fn what_is_not_acted_on_is_named_and_what_decides_is_refused() {
    let app = saying("Yes");
    let got = send(
        &app,
        &json!({"session_id": "s", "context_management": {"edits": []}, "metadata": {"user_id": "u"}, "verbosity": 1,
            "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000, "a b": 1,
            "output_config": {"effort": "low", "task_budget": 3}, "service_tier": "auto"}),
    )
    .await;
    assert_eq!(got.status, 200, "{}", got.text);
    let names = got.headers["x-keyway-ignored"].to_str().unwrap();
    let mut names: Vec<&str> = names.split(", ").collect();
    names.sort_unstable();
    let expected = [
        "context_management",
        "output_config.effort",
        "output_config.task_budget",
        "session_id",
        "thinking.budget_tokens",
        "verbosity",
    ];
    assert_eq!(names, expected);
    assert!(!send(&app, &json!({})).await.headers.contains_key("x-keyway-ignored"));
    let unknown = json!([{"role": "user", "content": [{"type": "sound"}]}]);
    for more in [
        json!({"mcp_servers": [{"url": "x"}]}),
        json!({"messages": []}),
        json!({"messages": "Hi"}),
        json!({"messages": unknown}),
        json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        json!({"max_tokens": null}),
        json!({"max_tokens": 0}),
        json!({"system": 1}),
        json!({"stop_sequences": [1]}),
        json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        json!({"thinking": {"type": "deep"}}),
        json!({"tool_choice": {"type": "any"}}),
        json!({"tools": [{"name": "a b", "input_schema": {}}]}),
        json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        json!({"output_config": {"format": {"type": "xml"}}}),
        json!({"compaction": {"type": "summary"}}),
        json!({"keyway": {}}),
    ] {
        let got = send(&app, &more).await;
        let error = got.json();
        assert_eq!((got.status, &error["type"]), (StatusCode::BAD_REQUEST, &json!("error")), "{more}");
        assert_eq!(error["error"]["type"], "invalid_request_error");
        assert!(error["error"]["message"].as_str().is_some_and(|text| text.len() > 20), "{error}");
    }
}

#[tokio::test]
async fn a_thread_is_refused_so_that_clients_send_the_whole_conversation() {
    let app = saying("Yes");
    for thread in [json!({"type": "create"}), json!({"type": "continue", "previous_message_id": "msg_1"})] {
        let mut body = request(&json!({"thread": thread}));
        for path in ["/v1/messages", "/v1/messages/count_tokens"] {
            let got = ask(&app, Method::POST, path, &body).await;
            let error = got.json();
            assert_eq!(
                (got.status, &error["error"]["type"]),
                (StatusCode::BAD_REQUEST, &json!("invalid_request_error"))
            );
            assert_eq!(
                error["error"]["details"],
                json!({"error_code": "thread_unsupported_request"}),
                "{path}"
            );
        }
        body["thread"] = Value::Null;
        assert_eq!(ask(&app, Method::POST, "/v1/messages", &body).await.status, 200);
    }
    assert_eq!(send(&app, &json!({"max_tokens": 0})).await.json()["error"].get("details"), None);
}

#[tokio::test]
async fn models_are_listed_as_this_api_s_clients_read_them() {
    let app = saying("Yes");
    let page = ask_as_anthropics(&app, "/v1/models?limit=5").await;
    assert_eq!(page.headers.get("request-id"), page.headers.get("x-request-id"));
    let page = page.json();
    let model = &page["data"][0];
    assert_eq!((&page["first_id"], &page["has_more"]), (&json!("m"), &json!(false)));
    assert_eq!((&model["type"], &model["display_name"]), (&json!("model"), &json!("m")));
    assert_eq!(&ask_as_anthropics(&app, "/v1/models/m").await.json(), model);
    for (path, status) in [("/v1/models/n", 404), ("/v1/models?limit=no", 400)] {
        let refused = ask_as_anthropics(&app, path).await;
        assert_eq!((refused.status.as_u16(), &refused.json()["type"]), (status, &json!("error")), "{path}");
    }
    let others = ask(&app, Method::GET, "/v1/models", &Value::Null).await;
    assert_eq!((&others.json()["object"], others.headers.get("request-id")), (&json!("list"), None));
    let told = send(&app, &json!({})).await;
    assert_eq!(told.headers.get("request-id"), told.headers.get("x-request-id"));
}

#[tokio::test]
async fn a_tool_that_is_no_function_is_refused_under_its_own_name() {
    let got = send(&saying("Yes"), &json!({"tools": [{"type": "bash_20250124", "name": "bash"}]})).await;
    let message = got.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("'tools' cannot be read: one of them is no function."), "{message}");
}

#[tokio::test]
async fn a_prompt_is_counted_as_the_message_counts_it() {
    let app = saying("Yes");
    let mut more = tools();
    more["system"] = json!([{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]);
    let usage = send(&app, &more).await.json()["usage"].clone();
    let mut body = request(&more);
    body.as_object_mut().unwrap().remove("max_tokens");
    body["compaction"] = json!({"type": "summary"});
    let counted = ask(&app, Method::POST, "/v1/messages/count_tokens", &body).await;
    assert_eq!(counted.json(), json!({"input_tokens": usage["input_tokens"]}), "{usage}");
    let refused = ask(&app, Method::GET, "/v1/messages/count_tokens", &Value::Null).await;
    assert_eq!((refused.status, &refused.json()["type"]), (StatusCode::METHOD_NOT_ALLOWED, &json!("error")));
}

/// In front, each new one would make the whole prompt another.
#[tokio::test]
async fn what_the_system_says_late_stays_where_it_stands() {
    let each = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    let refuses = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
                   {{ raise_exception('first') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    let said = json!({"system": "S", "messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}]});
    for (source, prompt) in [
        (each, "<system>S<user>Hi<system>Be brief."),
        (refuses, "<system>S<user>Hi\n\n<system-reminder>\nBe brief.\n</system-reminder>"),
    ] {
        let mut app = saying("Yes");
        let template = keyway_text::ChatTemplate::from_source(source, serde_json::Map::new()).unwrap();
        Arc::get_mut(&mut app).unwrap().text.template = Arc::new(template);
        let counted = ask(&app, Method::POST, "/v1/messages/count_tokens", &request(&said)).await;
        assert_eq!(counted.json(), json!({"input_tokens": prompt.len()}), "a byte is a token");
        assert_eq!(send(&app, &said).await.json()["usage"]["input_tokens"], prompt.len());
    }
}

#[tokio::test]
async fn a_stream_that_breaks_says_so_and_does_not_end() {
    let events = send(&saying("ab\0"), &json!({"stream": true})).await.events();
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")));
    assert!(events.iter().all(|event| event["type"] != "message_stop"));
}

#[test]
fn an_error_has_the_class_by_which_clients_come_back_or_do_not() {
    for (error, kind) in [
        (ApiError::model_not_found("a", "b"), "not_found_error"),
        (ApiError::too_large(), "request_too_large"),
        (ApiError::overloaded(), "rate_limit_error"),
        (ApiError::no_memory(crate::request_memory::NoMemory::Busy), "overloaded_error"),
        (ApiError::engine_stopped(), "api_error"),
        (ApiError::missing("max_tokens"), "invalid_request_error"),
    ] {
        assert_eq!(error_of(&error)["error"]["type"], kind);
    }
    let version = HeaderMap::from_iter([(http::HeaderName::from_static(ANTHROPIC_VERSION), JSON)]);
    for (path, without, with) in [
        ("/v1/messages", true, true),
        ("/v1/messages/count_tokens", true, true),
        ("/v1/messages2", false, false),
        ("/v1/models", false, true),
        ("/v1/models/org/name", false, true),
        ("/v1/chat/completions", false, false),
    ] {
        assert_eq!((has(path, &HeaderMap::new()), has(path, &version)), (without, with), "{path}");
    }
}
