//! A chat's answers as responses: whole, in events however the chat's are cut, and errors.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{tools, translated};
use crate::Back;

fn back(more: &Value) -> Box<dyn Back> {
    translated(more).unwrap().back
}

fn usage() -> Value {
    json!({"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 2}})
}

/// A chat's whole answer.
fn answered(message: &Value, finish: &str) -> Value {
    json!({"object": "chat.completion", "model": "engine's", "created": 77, "usage": usage(),
        "choices": [{"index": 0, "message": message, "finish_reason": finish}]})
}

fn chunk(delta: &Value, finish: Option<&str>) -> Value {
    json!({"object": "chat.completion.chunk", "model": "engine's", "created": 77,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
}

fn whole(more: &Value, chat: &Value) -> Value {
    serde_json::from_slice(&back(more).whole(chat.to_string().as_bytes()).unwrap()).unwrap()
}

/// The events that a stream comes to.
fn events(more: &Value, data: &[String]) -> Vec<Value> {
    let (mut back, mut out) = (back(more), Vec::new());
    for data in data {
        back.event(data.as_bytes(), &mut out);
    }
    back.end(&mut out);
    let text = String::from_utf8(out).unwrap();
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        data
    };
    let events: Vec<Value> = text.split_terminator("\n\n").map(event).collect();
    let numbers = events.iter().map(|event| event["sequence_number"].as_u64().unwrap());
    assert!(numbers.eq(0..events.len() as u64), "{text}");
    events
}

fn without_ids(mut response: Value) -> Value {
    for name in ["id", "created_at"] {
        assert!(response.as_object_mut().unwrap().remove(name).is_some(), "{response}");
    }
    for item in response["output"].as_array_mut().unwrap() {
        assert!(item.as_object_mut().unwrap().remove("id").is_some_and(|id| id.is_string()), "{item}");
    }
    response
}

fn call(id: &str, name: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

#[test]
fn a_whole_answer_has_its_items_and_repeats_its_request() {
    let more =
        json!({"tools": tools(), "metadata": {"a": "b"}, "store": true, "reasoning": {"effort": "low"}});
    let message = json!({"role": "assistant", "reasoning": "Hm.", "content": "I look.", "tool_calls": [
        call("c1", "look", "{\"a\":1}"), call("c2", "patch", "{\"input\":\"a\\nb\"}"),
        call("c3", "fs__read", "{}")]});
    let response = whole(&more, &answered(&message, "tool_calls"));
    for (name, expected) in [
        ("object", json!("response")),
        ("status", json!("completed")),
        ("model", json!("m")),
        ("created_at", json!(77)),
        ("metadata", json!({"a": "b"})),
        ("store", json!(false)),
        ("tools", tools()),
        ("tool_choice", json!("auto")),
        ("temperature", Value::Null),
        ("text", json!({"format": {"type": "text"}})),
        ("reasoning", json!({"effort": "low"})),
        ("error", Value::Null),
        (
            "usage",
            json!({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
                "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 14}),
        ),
    ] {
        assert_eq!(response[name], expected, "{name}");
    }
    let status = "completed";
    let part = |kind: &str, text: &str| json!([{"type": kind, "text": text}]);
    let text = json!([{"type": "output_text", "annotations": [], "logprobs": [], "text": "I look."}]);
    let output = json!([
        {"type": "reasoning", "status": status, "summary": [], "content": part("reasoning_text", "Hm.")},
        {"type": "message", "status": status, "role": "assistant", "content": text},
        {"type": "function_call", "status": status, "name": "look", "call_id": "c1",
            "arguments": "{\"a\":1}"},
        {"type": "custom_tool_call", "status": status, "name": "patch", "call_id": "c2", "input": "a\nb"},
        {"type": "function_call", "status": status, "name": "read", "namespace": "fs", "call_id": "c3",
            "arguments": "{}"},
    ]);
    assert_eq!(without_ids(response)["output"], output);
}

#[test]
fn how_a_chat_ends_is_a_responses_status() {
    let message = json!({"role": "assistant", "content": "Hi"});
    for (finish, status, reason) in [
        ("stop", "completed", Value::Null),
        ("tool_calls", "completed", Value::Null),
        ("length", "incomplete", json!({"reason": "max_output_tokens"})),
        ("content_filter", "incomplete", json!({"reason": "content_filter"})),
    ] {
        let response = whole(&json!({}), &answered(&message, finish));
        assert_eq!((&response["status"], &response["incomplete_details"]), (&json!(status), &reason));
        assert_eq!(response["output"][0]["status"], status);
        let stream = [chunk(&message, None), chunk(&json!({}), Some(finish))].map(|data| data.to_string());
        let last = events(&json!({}), &stream).pop().unwrap();
        assert_eq!(last["type"], format!("response.{status}"));
        // No usage came.
        assert_eq!((&last["response"]["status"], &last["response"]["usage"]), (&json!(status), &Value::Null));
    }
    for none in ["[DONE]", "{\"error\": {\"message\": \"m\"}}", "{}"] {
        assert!(back(&json!({})).whole(none.as_bytes()).is_err());
    }
    // A request without a model has the engine's.
    let mut chat =
        crate::to_chat(crate::Api::Responses, b"{\"input\":\"\"}", crate::SystemPlace::Anywhere).unwrap();
    let response = chat.back.whole(answered(&message, "stop").to_string().as_bytes()).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&response).unwrap()["model"], "engine's");
}

#[test]
fn a_stream_ends_once_with_what_comes_last() {
    let said = chunk(&json!({"role": "assistant", "content": "Hi"}), None).to_string();
    let finish = chunk(&json!({}), Some("stop")).to_string();
    let counts = json!({"object": "chat.completion.chunk", "choices": [], "usage": usage()}).to_string();
    let error = json!({"error": {"message": "It broke.", "code": 500}}).to_string();
    let done = "[DONE]".to_owned();
    for (data, last, usage) in [
        (vec![&said, &finish, &counts, &done], "response.completed", json!(14)),
        (vec![&said, &finish, &done, &counts], "response.completed", Value::Null),
        (vec![&said, &counts, &finish], "response.completed", json!(14)),
        (vec![&finish, &counts, &error, &said], "response.completed", json!(14)),
        (vec![&said, &finish, &error, &counts], "response.failed", Value::Null),
        (vec![&error], "response.failed", Value::Null),
        // What broke off has no end.
        (vec![&said], "response.output_text.delta", Value::Null),
        (vec![&said, &done], "response.output_text.delta", Value::Null),
    ] {
        let data: Vec<String> = data.into_iter().cloned().collect();
        let events = events(&json!({"stream": true}), &data);
        assert_eq!(
            (&events[0]["type"], &events[1]["type"]),
            (&json!("response.created"), &json!("response.in_progress"))
        );
        let told = events.last().unwrap();
        assert_eq!(told["type"], last, "{data:?}");
        let response = &told["response"];
        assert_eq!(response["usage"]["total_tokens"], usage, "{data:?}");
        if last == "response.failed" {
            assert_eq!(response["error"], json!({"code": "server_error", "message": "It broke."}));
        }
    }
    let of = |data: &[&str]| {
        let data: Vec<String> = data.iter().map(|data| (*data).to_owned()).collect();
        events(&json!({}), &data).last().map(|event| event["type"].clone())
    };
    let nothing = r#"{"choices":[],"created":0,"id":"","object":"","prompt_filter_results":[]}"#;
    assert_eq!(of(&[nothing, "{}", "[DONE]"]), None, "what says nothing begins nothing");
    assert_eq!(of(&["no chunk", &said]), Some("response.failed".into()), "what it said would be lost");
}

#[test]
fn errors_of_all_shapes_become_openais() {
    let own = r#"{"error":{"message":"m","type":"t","param":"messages","code":7}}"#;
    assert_eq!(back(&json!({})).error(400, own.as_bytes()), own.as_bytes());
    for (status, body, message, of) in [
        (422, r#"{"detail":"Wrong."}"#, "Wrong.", "invalid_request_error"),
        (
            422,
            r#"{"detail":[{"loc":["body","messages",0],"msg":"Field required"},{"msg":"odd"}]}"#,
            "body.messages.0: Field required; odd",
            "invalid_request_error",
        ),
        (
            400,
            r#"{"object":"error","message":"Too long.","type":"BadRequestError"}"#,
            "Too long.",
            "BadRequestError",
        ),
        (500, r#"{"error":"Oh."}"#, "Oh.", "server_error"),
        (502, "Bad Gateway\n", "Bad Gateway", "server_error"),
        (429, "\"Slow down.\"", "Slow down.", "rate_limit_error"),
        (404, "", "The engine answered with status 404.", "not_found_error"),
        (503, "\u{fffd}", "\u{fffd}", "server_error"),
    ] {
        let told: Value = serde_json::from_slice(&back(&json!({})).error(status, body.as_bytes())).unwrap();
        assert_eq!(
            (&told["error"]["message"], &told["error"]["type"]),
            (&json!(message), &json!(of)),
            "{body}"
        );
    }
}

/// A text cut in pieces.
fn pieces(text: &str, cuts: &[usize]) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (chars.len() + 1)).collect();
    cuts.extend([0, chars.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|cut| chars[cut[0]..cut[1]].iter().collect()).collect()
}

/// Functions of `tools()`, and one that is none.
const NAMES: [&str; 4] = ["look", "patch", "fs__read", "other"];

proptest! {
    /// However a chat's answer is cut in chunks, the last event has the response that is told whole.
    #[test]
    fn events_come_to_the_whole_answer(
        reasoning in ".{0,6}",
        content in ".{0,6}",
        calls in prop::collection::vec((prop::sample::select(&NAMES[..]), ".{0,6}"), 0..4),
        cuts in prop::collection::vec(0_usize..20, 0..4),
        finish in prop::sample::select(vec!["stop", "length", "tool_calls"]),
    ) {
        let more = json!({"tools": tools(), "stream": true});
        let named = |(nth, (name, text)): (usize, &(&str, String))| call(&format!("c{nth}"), name, text);
        let told: Vec<Value> = calls.iter().enumerate().map(named).collect();
        let message = json!({"reasoning": reasoning, "content": content, "tool_calls": told});
        let mut data = vec![chunk(&json!({"role": "assistant", "content": ""}), None)];
        for (field, text) in [("reasoning", &reasoning), ("content", &content)] {
            data.extend(pieces(text, &cuts).into_iter().map(|piece| chunk(&json!({field: piece}), None)));
        }
        for (nth, (name, text)) in calls.iter().enumerate() {
            let function = json!({"name": name, "arguments": ""});
            let begun = json!({"index": nth, "id": format!("c{nth}"), "function": function});
            data.push(chunk(&json!({"tool_calls": [begun]}), None));
            for piece in pieces(text, &cuts) {
                let more = json!({"index": nth, "function": {"arguments": piece}});
                data.push(chunk(&json!({"tool_calls": [more]}), None));
            }
        }
        data.push(chunk(&json!({}), Some(finish)));
        data.push(json!({"object": "chat.completion.chunk", "choices": [], "usage": usage()}));
        let data: Vec<String> = data.iter().map(Value::to_string).collect();
        let events = events(&more, &data);
        let last = events.last().unwrap()["response"].clone();
        prop_assert_eq!(without_ids(last.clone()), without_ids(whole(&more, &answered(&message, finish))));
        // What the deltas of an item join to is what its end says.
        for (index, item) in last["output"].as_array().unwrap().iter().enumerate() {
            let deltas = events.iter().filter(|event| event["output_index"] == index);
            let joined: String = deltas.filter_map(|event| event["delta"].as_str()).collect();
            let said = [&item["content"][0]["text"], &item["arguments"], &item["input"]];
            prop_assert_eq!(Some(joined.as_str()), said.iter().find_map(|said| said.as_str()));
        }
    }
}
