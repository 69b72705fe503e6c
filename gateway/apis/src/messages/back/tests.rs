//! Answers of engines as messages, whole and cut into chunks.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::messages::events::tests::{added_up, read as events_of};

fn back(stops: &[&str]) -> MessageBack {
    MessageBack::new(Some("asked".into()), stops.iter().map(|stop| (*stop).to_owned()).collect())
}

fn chunk(delta: &Value, finish: &Value) -> Value {
    json!({"object": "chat.completion.chunk", "model": "engine's",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
}

fn usage() -> Value {
    json!({"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}})
}

fn usage_chunk() -> Value {
    json!({"object": "chat.completion.chunk", "choices": [], "usage": usage()})
}

/// What a stream of these chunks comes to; `None` stands for the line behind the last one.
fn stream(back: &mut MessageBack, chunks: &[Option<Value>]) -> Vec<u8> {
    let mut out = Vec::new();
    for chunk in chunks {
        let data = chunk.as_ref().map_or("[DONE]".to_owned(), Value::to_string);
        back.event(data.as_bytes(), &mut out);
    }
    out
}

fn types(out: &[u8]) -> Vec<String> {
    events_of(out).iter().map(|event| event["type"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_whole_answer_is_a_message() {
    let call =
        json!({"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
    let chat = json!({"object": "chat.completion", "model": "engine's", "usage": usage(), "choices": [{
        "index": 0, "finish_reason": "tool_calls",
        "message": {"role": "assistant", "reasoning": "Hm.", "content": "Look.", "tool_calls": [call]}}]});
    let message: Value =
        serde_json::from_slice(&back(&[]).whole(chat.to_string().as_bytes()).unwrap()).unwrap();
    let content = json!([
        {"type": "thinking", "thinking": "Hm.", "signature": message["content"][0]["signature"]},
        {"type": "text", "text": "Look."},
        {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}},
    ]);
    assert_eq!((&message["content"], &message["model"]), (&content, &json!("asked")));
    assert_eq!((&message["stop_reason"], &message["usage"]["input_tokens"]), (&json!("tool_use"), &json!(5)));
    let named = MessageBack::new(None, Vec::new()).whole(chat.to_string().as_bytes()).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&named).unwrap()["model"], "engine's");
    for none in ["{\"error\": {\"message\": \"m\"}}", "[]", "hello", "{\"object\": \"list\"}"] {
        assert_eq!(back(&[]).whole(none.as_bytes()), Err(NoChat), "{none}");
    }
}

#[test]
fn a_stop_sequence_is_told_where_the_request_has_it() {
    for (stop, reason, told) in [
        (json!("END"), "stop_sequence", json!("END")),
        (json!("<eos>"), "end_turn", Value::Null),
        (json!(7), "end_turn", Value::Null),
        (Value::Null, "end_turn", Value::Null),
    ] {
        let chat = json!({"object": "chat.completion", "choices": [{"index": 0, "message": {"content": "a"},
            "finish_reason": "stop", "stop_reason": stop}]});
        let message = back(&["END"]).whole(chat.to_string().as_bytes()).unwrap();
        let message: Value = serde_json::from_slice(&message).unwrap();
        assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!(reason), &told));
    }
}

#[test]
fn the_end_waits_for_the_counts() {
    let said = [
        Some(chunk(&json!({"role": "assistant", "content": ""}), &Value::Null)),
        Some(chunk(&json!({"content": "a"}), &json!("stop"))),
    ];
    let mut waiting = back(&[]);
    let mut out = stream(&mut waiting, &said);
    assert_eq!(types(&out), ["message_start", "ping", "content_block_start", "content_block_delta"]);
    waiting.event(usage_chunk().to_string().as_bytes(), &mut out);
    let (message, has_ended) = added_up(&out);
    assert!(has_ended);
    let counts = json!({"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
        "output_tokens": 5});
    assert_eq!((&message["usage"], &message["content"][0]["text"]), (&counts, &json!("a")));
    // The end is told once.
    let before = out.len();
    waiting.event(b"[DONE]", &mut out);
    waiting.end(&mut out);
    assert_eq!(out.len(), before);
    // Engines that count nothing, and those that do so in every chunk.
    for end in [Some(None), None] {
        let mut back = back(&[]);
        let mut out = stream(&mut back, &said);
        if let Some(done) = end {
            out.extend(stream(&mut back, &[done]));
        } else {
            back.end(&mut out);
        }
        assert!(added_up(&out).1);
    }
    let mut counted = chunk(&json!({"content": "a"}), &json!("length"));
    counted["usage"] = usage();
    let (message, has_ended) = added_up(&stream(&mut back(&[]), &[Some(counted), None]));
    assert_eq!((&message["usage"], &message["stop_reason"]), (&counts, &json!("max_tokens")));
    assert!(has_ended);
}

#[test]
fn a_stream_that_breaks_has_no_end() {
    let said = Some(chunk(&json!({"content": "a"}), &Value::Null));
    for rest in [vec![], vec![None], vec![Some(usage_chunk()), None]] {
        let mut back = back(&[]);
        let mut out = stream(&mut back, &[vec![said.clone()], rest].concat());
        back.end(&mut out);
        assert_eq!(types(&out).last().unwrap(), "content_block_delta");
    }
    let error = json!({"error": {"message": "Lost.", "type": "server_error", "code": null}});
    for broken in [
        vec![said.clone(), Some(error.clone())],
        vec![Some(error)],
        vec![said.clone(), Some(json!({"choices": [{"delta": {"tool_calls": 3}}]}))],
        vec![
            Some(json!({"choices": [], "object": ""})),
            Some(json!({"object": "error", "message": "Lost."})),
        ],
    ] {
        let mut back = back(&[]);
        let mut out = stream(&mut back, &[broken, vec![said.clone(), None]].concat());
        back.end(&mut out);
        let last = events_of(&out).pop().unwrap();
        assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")), "{last}");
    }
}

#[test]
fn an_error_has_the_shape_of_this_api() {
    let error = back(&[]).error(429, b"{\"error\": {\"message\": \"Later.\"}}");
    let want = json!({"type": "error", "error": {"type": "rate_limit_error", "message": "Later."}});
    assert_eq!(serde_json::from_slice::<Value>(&error).unwrap(), want);
}

proptest! {
    /// Whatever pieces an engine's stream is cut into, it adds up to the whole answer.
    #[test]
    fn chunks_add_up_to_the_whole_answer(
        (reasoning, content) in ("[a-é\\n]{0,6}", "[a-é\\n]{0,6}"),
        texts in prop::collection::vec("[a-é\"{}]{0,5}", 0..3),
        (first, size, named) in (0..2usize, 1..5usize, any::<bool>()),
        finish in prop::sample::select(&["stop", "length", "tool_calls", "content_filter"][..]),
    ) {
        let arguments = |text: &String| json!({"a": text, "b": [1]}).to_string();
        let arguments: Vec<String> = texts.iter().map(arguments).collect();
        let calls: Vec<Value> = arguments.iter().enumerate().map(|(i, arguments)| {
            let function = json!({"name": "f", "arguments": arguments});
            json!({"id": format!("call_{i}"), "type": "function", "function": function})
        }).collect();
        let thoughts = if named { "reasoning" } else { "reasoning_content" };
        let whole = json!({"object": "chat.completion", "usage": usage(), "choices": [{"index": 0,
            "finish_reason": finish,
            "message": {thoughts: reasoning, "content": content, "tool_calls": calls}}]});
        let pieces = |text: &str| -> Vec<String> {
            text.chars().collect::<Vec<_>>().chunks(size).map(|piece| piece.iter().collect()).collect()
        };
        let mut deltas = vec![json!({"role": "assistant", "content": ""}); first];
        deltas.extend(pieces(&reasoning).into_iter().map(|piece| json!({thoughts: piece})));
        deltas.extend(pieces(&content).into_iter().map(|piece| json!({"content": piece, "tool_calls": []})));
        for (i, arguments) in arguments.iter().enumerate() {
            let function = json!({"name": "f", "arguments": ""});
            let begun = json!({"index": i, "id": format!("call_{i}"), "function": function});
            deltas.push(json!({"tool_calls": [begun]}));
            deltas.extend(pieces(arguments).into_iter().map(|piece| {
                json!({"tool_calls": [{"index": i, "function": {"arguments": piece}}]})
            }));
        }
        let mut chunks: Vec<_> = deltas.iter().map(|delta| Some(chunk(delta, &Value::Null))).collect();
        chunks.extend([Some(chunk(&json!({}), &json!(finish))), Some(usage_chunk()), None]);
        let (mut streamed, has_ended) = added_up(&stream(&mut back(&[]), &chunks));
        let whole = back(&[]).whole(whole.to_string().as_bytes()).unwrap();
        let mut whole: Value = serde_json::from_slice(&whole).unwrap();
        for message in [&mut streamed, &mut whole] {
            prop_assert!(message["id"].take().as_str().is_some_and(|id| id.starts_with("msg_")));
            for block in message["content"].as_array_mut().unwrap() {
                if block["type"] == "thinking" {
                    prop_assert!(block["signature"].take().as_str().is_some_and(|text| !text.is_empty()));
                }
            }
        }
        prop_assert_eq!((streamed, has_ended), (whole, true));
    }

    /// Whatever an engine sends, it is told or not, and nothing follows the end.
    #[test]
    fn no_chunk_is_too_odd(chunks in prop::collection::vec("[\\[\\]{}\":,a-z0-9]{0,20}", 0..6)) {
        let (mut back, mut out) = (back(&[]), Vec::new());
        for data in &chunks {
            back.event(data.as_bytes(), &mut out);
            let _ = back.error(500, data.as_bytes());
        }
        back.end(&mut out);
        prop_assert!(types(&out).len() <= 1);
    }
}
