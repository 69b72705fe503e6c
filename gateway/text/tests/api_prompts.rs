//! Requests' prompts against vLLM: `data/api_prompts.jsonl`, made by `tests/external/api_prompts`, holds
//! requests to three APIs and the texts that vLLM 0.32 makes of each with two templates; null where it
//! refuses the request, which may be understood here all the same.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed helper fails its test")]

use keyway_text::{ChatTemplate, Conversation, PromptText};
use proptest::prelude::*;
use serde_json::{Map, Value};

const GOLDENS: &str = include_str!("data/api_prompts.jsonl");

fn prompt(path: &str, body: &str, template: &ChatTemplate) -> Result<String, String> {
    let conversation = match path {
        "/v1/messages" => Conversation::from_messages(body.as_bytes(), template),
        "/v1/responses" => Conversation::from_responses(body.as_bytes()),
        _ => Conversation::from_chat(body.as_bytes()),
    };
    match conversation.and_then(|conversation| conversation.render(template, 1 << 20)) {
        Ok(PromptText::Whole { text, .. }) => Ok(text),
        Ok(PromptText::Beginning(text)) => Err(format!("only its beginning is known: {text}")),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn every_request_has_the_prompt_that_vllm_makes_of_it() {
    let mut lines = GOLDENS.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let head = lines.next().unwrap();
    let templates: Vec<(&String, ChatTemplate)> = head["templates"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, source)| {
            (name, ChatTemplate::from_source(source.as_str().unwrap(), Map::new()).unwrap())
        })
        .collect();
    let (mut faults, mut counts) = (Vec::new(), Map::new());
    for line in lines {
        let path = line["path"].as_str().unwrap();
        let body = line["body"].to_string();
        for (name, template) in &templates {
            let Some(want) = line[name.as_str()].as_str() else { continue };
            let count = counts.entry(path).or_insert(0.into());
            *count = (count.as_u64().unwrap() + 1).into();
            match prompt(path, &body, template) {
                Ok(got) if got == want => {}
                got => faults.push(format!("{path} {name} {body}\n  {got:?}\n  not\n  {want:?}")),
            }
        }
    }
    assert!(counts.values().all(|count| count.as_u64().unwrap() > 60), "{counts:?}");
    assert!(faults.is_empty(), "{}:\n{}", faults.len(), faults.join("\n"));
}

/// Names and texts that the three APIs have, so that a random body is often nearly one of theirs.
const WORDS: [&str; 34] = [
    "type",
    "role",
    "content",
    "text",
    "messages",
    "input",
    "system",
    "user",
    "assistant",
    "tool",
    "tools",
    "name",
    "function",
    "arguments",
    "tool_use",
    "tool_result",
    "tool_calls",
    "thinking",
    "reasoning",
    "summary",
    "image",
    "function_call",
    "function_call_output",
    "call_id",
    "output",
    "namespace",
    "definition",
    "tool_definition",
    "tool_addition",
    "tool_removal",
    "input_schema",
    "developer",
    "instructions",
    "{\"a\":1}",
];

fn any_json() -> impl Strategy<Value = Value> {
    let word = || prop::sample::select(&WORDS[..]);
    let leaf = prop_oneof![
        4 => word().prop_map(Value::from),
        1 => Just(Value::Null),
        1 => any::<bool>().prop_map(Value::from),
        1 => any::<i32>().prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 48, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((word(), inner), 0..7).prop_map(|fields| fields
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect()),
        ]
    })
}

/// A block, an item, a message or a tool, whose kind is one that is known.
fn any_part() -> impl Strategy<Value = Value> {
    let kind = || prop::sample::select(&WORDS[..]);
    (any_json(), kind(), kind()).prop_map(|(mut part, of, role)| {
        if let Value::Object(fields) = &mut part {
            fields.insert("type".to_owned(), of.into());
            fields.insert("role".to_owned(), role.into());
        }
        part
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Whatever clients send, it is a prompt or an error.
    #[test]
    fn no_body_is_too_odd(
        list in prop::collection::vec(any_part(), 0..4),
        content in prop::collection::vec(any_part(), 0..4),
        tools in prop::collection::vec(any_part(), 0..3),
        more in any_json(),
    ) {
        let template = ChatTemplate::from_source("{% for m in messages %}{{ m | tojson }}{% endfor %}", Map::new()).unwrap();
        let said = serde_json::json!([{ "role": "user", "content": content }, { "role": "system", "content": content }]);
        for path in ["/v1/messages", "/v1/responses", "/v1/chat/completions"] {
            for messages in [Value::from(list.clone()), said.clone(), more.clone()] {
                let body = serde_json::json!({
                    "messages": messages, "input": messages, "tools": tools, "system": more, "thinking": more,
                    "reasoning": more, "output_config": more,
                });
                let _ = prompt(path, &body.to_string(), &template);
            }
        }
    }
}
