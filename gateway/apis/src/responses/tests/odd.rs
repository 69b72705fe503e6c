//! Whatever clients and engines send, nothing panics.

use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{Api, to_chat};

/// Names and texts of requests and answers, so that a random body is often nearly one.
const WORDS: [&str; 46] = [
    "type",
    "role",
    "content",
    "text",
    "input",
    "input_text",
    "output_text",
    "user",
    "assistant",
    "developer",
    "name",
    "function",
    "arguments",
    "reasoning",
    "summary",
    "message",
    "function_call",
    "custom_tool_call",
    "function_call_output",
    "call_id",
    "output",
    "namespace",
    "custom",
    "tools",
    "allowed_tools",
    "mode",
    "required",
    "parameters",
    "format",
    "json_schema",
    "schema",
    "effort",
    "input_image",
    "image_url",
    "input_file",
    "file_data",
    "id",
    "status",
    "incomplete",
    "item_reference",
    "tool_calls",
    "index",
    "delta",
    "{\"input\":\"a\"}",
    "prompt_tokens",
    "completion_tokens",
];

fn word() -> impl Strategy<Value = &'static str> {
    prop::sample::select(&WORDS[..])
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        4 => word().prop_map(Value::from),
        1 => Just(Value::Null),
        1 => any::<bool>().prop_map(Value::from),
        1 => any::<i32>().prop_map(Value::from),
        1 => Just(Value::from(u64::MAX)),
    ];
    leaf.prop_recursive(4, 32, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((word(), inner), 0..7).prop_map(|fields| fields
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect()),
        ]
    })
}

/// An item, a part or a tool, whose kind is one that is known.
fn any_part() -> impl Strategy<Value = Value> {
    (any_json(), word(), word()).prop_map(|(mut part, of, role)| {
        if let Value::Object(fields) = &mut part {
            fields.insert("type".to_owned(), of.into());
            fields.insert("role".to_owned(), role.into());
        }
        part
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn an_odd_body_is_refused_or_a_chat(
        items in prop::collection::vec(any_part(), 0..4),
        tools in prop::collection::vec(any_part(), 0..3),
        more in any_json(),
    ) {
        let said = json!([{"role": "user", "content": items}, {"role": "assistant", "content": items}]);
        for input in [Value::from(items.clone()), said, more.clone()] {
            for choice in [&more, &json!("auto")] {
                let body = json!({"model": "m", "input": input, "tools": tools, "tool_choice": choice,
                    "text": more, "reasoning": more});
                if let Ok(translated) = to_chat(Api::Responses, body.to_string().as_bytes(), crate::SystemPlace::Anywhere) {
                    let chat: Value = serde_json::from_slice(&translated.chat).unwrap();
                    prop_assert!(chat["messages"].is_array());
                }
            }
            let body = json!({"input": input, "tools": tools}).to_string();
            let _ = to_chat(Api::Responses, body.as_bytes(), crate::SystemPlace::Anywhere);
        }
    }

    #[test]
    fn an_odd_answer_is_told_or_passed_over(
        deltas in prop::collection::vec(any_json(), 0..5),
        odd in ".{0,20}",
    ) {
        let mut back = to_chat(Api::Responses, b"{\"input\":\"\"}", crate::SystemPlace::Anywhere).unwrap().back;
        let mut out = Vec::new();
        for delta in deltas {
            let choice = json!({"index": 0, "delta": delta, "finish_reason": delta});
            let chunk = json!({"object": "chat.completion.chunk", "choices": [choice], "usage": delta});
            for data in [chunk, delta] {
                let data = data.to_string();
                back.event(data.as_bytes(), &mut out);
                let _ = back.whole(data.as_bytes());
                let error: Value = serde_json::from_slice(&back.error(400, data.as_bytes())).unwrap();
                prop_assert!(error.is_object());
            }
        }
        back.event(odd.as_bytes(), &mut out);
        let error: Value = serde_json::from_slice(&back.error(500, odd.as_bytes())).unwrap();
        prop_assert!(error["error"]["message"].is_string());
        back.end(&mut out);
        prop_assert!(String::from_utf8(out).is_ok());
    }
}
