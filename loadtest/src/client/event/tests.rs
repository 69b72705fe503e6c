//! Events in every shape that streams of the four APIs have, and what each says.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn read(data: &str) -> Result<EventContent, Bad> {
    read_named("", data)
}

fn read_named(name: &str, data: &str) -> Result<EventContent, Bad> {
    EventContent::read(sse::Event { name: name.as_bytes(), data: data.as_bytes() }, None)
}

fn said(generated: bool, finished: bool, done: bool) -> EventContent {
    EventContent { generated, finished, done, usage: None }
}

#[test]
fn content_of_every_kind_is_generated_in_every_api() {
    for data in [
        r#"{"choices":[{"delta":{"content":"a\nb"}}],"usage":null}"#,
        r#"{"choices":[{"delta":{"content":[{"type":"text","text":"a"}]}}]}"#,
        r#"{"choices":[{"delta":{"role":"assistant","reasoning_content":"hm"}}]}"#,
        r#"{"choices":[{"delta":{"content":null,"reasoning":"hm"}}]}"#,
        r#"{"choices":[{"delta":{"refusal":"no"}}]}"#,
        r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"c","function":{"name":"f","arguments":""}}]}}]}"#,
        r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}"#,
        r#"{"choices":[{"delta":{"function_call":{"arguments":"{"}}}]}"#,
        r#"{"choices":[{"delta":{"audio":{"id":"a","data":"AAAA"}}}]}"#,
        r#"{"choices":[{"delta":{"content":""}},{"index":1,"delta":{"content":"b"}}]}"#,
        r#"{"choices":[{"text":"x"}],"error":null}"#,
        r#"{"choices":[{"text":"","token_ids":[7]}]}"#,
        r#"{"type":"response.output_text.delta","delta":"hi"}"#,
        r#"{"type":"response.reasoning_text.delta","delta":"hm"}"#,
        r#"{"type":"response.function_call_arguments.delta","delta":"{"}"#,
        r#"{"type":"response.refusal.delta","delta":"no"}"#,
        r#"{"type":"response.audio.delta","delta":"AAAA"}"#,
        r#"{"type":"response.output_item.added","item":{"type":"function_call","id":"i","name":"f","arguments":""}}"#,
        r#"{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"t","name":"f","input":{}}}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"hi"}}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"{"}}"#,
    ] {
        assert_eq!(read(data), Ok(said(true, false, false)), "{data}");
    }
}

#[test]
fn what_only_opens_an_answer_is_not_generated() {
    for data in [
        r#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#,
        r#"{"choices":[{"delta":{"role":"assistant","content":null,"tool_calls":[]}}]}"#,
        r#"{"choices":[{"delta":{"content":[]}}]}"#,
        r#"{"choices":[{"delta":{}}],"object":"chat.completion.chunk"}"#,
        r#"{"choices":[{"delta":null}]}"#,
        r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":""}}]}}]}"#,
        r#"{"choices":[{"delta":{"audio":{"id":"a","data":"","expires_at":7}}}]}"#,
        r#"{"choices":[{"text":"","token_ids":[],"logprobs":null}]}"#,
        r#"{"choices":[]}"#,
        r#"{"choices":null}"#,
        r#"{"type":"response.created","response":{"id":"r","status":"in_progress","error":null}}"#,
        r#"{"type":"response.in_progress","response":{"id":"r"}}"#,
        r#"{"type":"response.output_item.added","item":{"type":"message","id":"i","role":"assistant","status":"in_progress","content":[]}}"#,
        r#"{"type":"response.content_part.added","part":{"type":"output_text","text":"","annotations":[]}}"#,
        r#"{"type":"response.output_text.delta","delta":""}"#,
        r#"{"type":"message_start","message":{"id":"m","role":"assistant","content":[]}}"#,
        r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":""}}"#,
        r#"{"type":"ping"}"#,
        "{}",
    ] {
        assert_eq!(read(data), Ok(EventContent::default()), "{data}");
    }
}

#[test]
fn why_it_ended_and_that_it_did() {
    for (data, want) in [
        ("[DONE]", said(false, false, true)),
        (r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#, said(false, true, false)),
        (r#"{"choices":[{"delta":{"content":"a"},"finish_reason":"tool_calls"}]}"#, said(true, true, false)),
        (r#"{"choices":[{"text":"x","finish_reason":"length"}]}"#, said(true, true, false)),
        (r#"{"type":"response.completed","response":{"status":"completed"}}"#, said(false, true, true)),
        (
            r#"{"type":"response.incomplete","response":{"incomplete_details":{"reason":"max_output_tokens"}}}"#,
            said(false, true, true),
        ),
        (r#"{"type":"message_delta","delta":{"stop_reason":"max_tokens"}}"#, said(false, true, false)),
        (r#"{"type":"message_delta","delta":{"stop_reason":null}}"#, said(false, false, false)),
        (r#"{"type":"message_stop"}"#, said(false, false, true)),
    ] {
        assert_eq!(read(data), Ok(want), "{data}");
    }
}

#[test]
fn errors_in_all_their_forms() {
    for (name, data, message) in [
        ("", r#"{"error":{"message":"out of blocks","type":"server_error"}}"#, "out of blocks"),
        ("", r#"{"error":"plain"}"#, "plain"),
        ("", r#"{"error":{"code":500}}"#, r#"{"code":500}"#),
        ("", r#"{"choices":[],"error":{"message":"dead"}}"#, "dead"),
        ("", r#"{"object":"error","message":"dead","code":500}"#, "dead"),
        ("", r#"{"type":"error","error":{"type":"overloaded_error","message":"busy"}}"#, "busy"),
        ("", r#"{"type":"error","code":"500","message":"dead","sequence_number":3}"#, "dead"),
        (
            "",
            r#"{"type":"response.failed","response":{"status":"failed","error":{"message":"dead"}}}"#,
            "dead",
        ),
        (
            "",
            r#"{"type":"response.completed","response":{"status":"failed","error":{"message":"dead"}}}"#,
            "dead",
        ),
        (
            "",
            r#"{"type":"response.completed","response":{"status":"cancelled"}}"#,
            r#"{"type":"response.completed","response":{"status":"cancelled"}}"#,
        ),
        ("", r#"{"detail":"dead"}"#, "dead"),
        ("", r#"{"detail":[{"msg":"missing"}]}"#, r#"{"detail":[{"msg":"missing"}]}"#),
        ("error", r#"{"message":"dead"}"#, "dead"),
        ("error", "dead <tag>", "dead <tag>"),
        ("error", "{}", "{}"),
    ] {
        match read_named(name, data) {
            Err(Bad::Error(said)) => {
                let same = said == message
                    || serde_json::from_str::<serde_json::Value>(&said).ok()
                        == serde_json::from_str(message).ok();
                assert!(same, "{data}: {said}");
            }
            other => panic!("{data}: {other:?}"),
        }
    }
    for fine in [r#"{"error":null}"#, r#"{"error":"","choices":[]}"#, r#"{"error":{}}"#, r#"{"detail":null}"#]
    {
        assert_eq!(read(fine), Ok(EventContent::default()), "{fine}");
    }
}

#[test]
fn answers_that_were_broken_off_say_so_by_their_finish_reason() {
    for (reason, data) in [
        ("abort", r#"{"choices":[{"delta":{},"finish_reason":"abort"}]}"#),
        ("error", r#"{"choices":[{"text":"x","finish_reason":"error"}]}"#),
        ("abort", r#"{"choices":[{"finish_reason":"stop"},{"index":1,"finish_reason":"abort"}]}"#),
        ("abort", r#"{"type":"message_delta","delta":{"stop_reason":"abort"}}"#),
        ("error", r#"{"type":"response.incomplete","response":{"incomplete_details":{"reason":"error"}}}"#),
    ] {
        assert_eq!(read(data), Err(Bad::Aborted(reason.into())), "{data}");
    }
    assert!(matches!(read("<html>"), Err(Bad::Unreadable(_))));
}

#[test]
fn counts_in_every_api_s_words() {
    for (data, prompt, cached, completion) in [
        (
            r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":8}}}"#,
            9,
            Some(8),
            2,
        ),
        (r#"{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}"#, 9, None, 0),
        (
            r#"{"type":"response.completed","response":{"usage":{"input_tokens":9,"output_tokens":2,"input_tokens_details":{"cached_tokens":8}}}}"#,
            9,
            Some(8),
            2,
        ),
        // Anthropic counts as input what no cache had.
        (
            r#"{"type":"message_start","message":{"usage":{"input_tokens":1,"cache_read_input_tokens":8,"output_tokens":1}}}"#,
            9,
            Some(8),
            1,
        ),
    ] {
        let usage = read(data).unwrap().usage.unwrap();
        assert_eq!(
            (usage.prompt_tokens, usage.cached_tokens(), usage.completion_tokens),
            (prompt, cached, completion),
            "{data}"
        );
    }
    let begun = Usage { prompt_tokens: 9, completion_tokens: 1, total_tokens: 10, ..Usage::default() };
    let delta = r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":5}}"#;
    let event = sse::Event { name: b"message_delta", data: delta.as_bytes() };
    let usage = EventContent::read(event, Some(&begun)).unwrap().usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.total_tokens), (9, 5, 14));
}

#[test]
fn texts_are_kept_without_thoughts() {
    for (data, want) in [
        (r#"{"choices":[{"delta":{"content":"a\nb"}}]}"#, "a\nb"),
        (r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#, ""),
        (r#"{"choices":[{"text":"x"}]}"#, "x"),
        (r#"{"type":"response.output_text.delta","delta":"hi"}"#, "hi"),
        (r#"{"type":"response.reasoning_text.delta","delta":"hm"}"#, ""),
        (r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":"hi"}}"#, "hi"),
        (r#"{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"hm"}}"#, ""),
    ] {
        assert_eq!(text(data.as_bytes()), want, "{data}");
    }
}

proptest! {
    /// A field that nobody has thought of takes nothing from what an event says.
    #[test]
    fn unknown_fields_change_nothing(
        text in ".{0,8}",
        name in "x_[a-z]{1,6}",
        value in prop::sample::select(vec![json!(null), json!(1), json!("s"), json!([1, {"a": "b"}]), json!({"error": "x"})]),
    ) {
        let mut event = json!({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]});
        event[&name] = value;
        let want = said(!text.is_empty(), false, false);
        prop_assert_eq!(read(&event.to_string()), Ok(want));
    }

    /// No bytes make the reader do worse than refuse them.
    #[test]
    fn any_data_is_read_or_refused(data in prop::collection::vec(any::<u8>(), 0..60)) {
        let _ = EventContent::read(sse::Event { name: b"", data: &data }, None);
    }
}
