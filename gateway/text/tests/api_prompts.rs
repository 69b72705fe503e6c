//! Requests' prompts against vLLM: `data/api_prompts.jsonl`, made by `tests/external/api_prompts`, holds
//! requests to three APIs and the texts that vLLM 0.32 makes of each with two templates; null where it
//! refuses the request, which may be understood here all the same.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed helper fails its test")]

use keyway_text::{ChatTemplate, Conversation, PromptText};
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
