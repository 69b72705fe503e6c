//! A request to `/v1/responses` and the chat that it becomes have one prompt. The texts that vLLM 0.32 makes
//! of the requests are in `gateway/text/tests/data/api_prompts.jsonl`. Two differences are vLLM's own, and no
//! chat is without them. Only a template that prints a call or the list of functions whole shows them.

#![allow(clippy::unwrap_used, reason = "a failed helper fails its test")]

use keyway_apis::{Api, SystemPlace, to_chat};
use keyway_text::{ChatTemplate, Conversation, PromptText};
use serde_json::{Map, Value};

const GOLDENS: &str = include_str!("../../text/tests/data/api_prompts.jsonl");

/// The prompt of the chat that a request becomes.
fn prompt(body: &Value, template: &ChatTemplate) -> Result<String, String> {
    let chat = to_chat(Api::Responses, body.to_string().as_bytes(), SystemPlace::Anywhere)
        .map_err(|refusal| refusal.to_string())?;
    let conversation = Conversation::from_chat(&chat.chat).map_err(|error| error.to_string())?;
    match conversation.render(template, 1 << 20) {
        Ok(PromptText::Whole { text, .. }) => Ok(text),
        other => Err(format!("{other:?}")),
    }
}

/// A text that vLLM makes of a request, as it makes it of the same chat: its type of chats' calls has the
/// arguments before the name, and a list without functions is none.
fn of_chat(want: &str) -> String {
    const BEGIN: &str = "\"function\": {\"name\": ";
    let want = want.strip_prefix("[]").unwrap_or(want);
    let piece = |piece: &str| match piece.split_once(", \"arguments\": ") {
        Some((name, rest)) if !name.contains(", ") => {
            let (arguments, rest) = rest.split_once("}, \"type\": \"function\"").unwrap();
            format!(
                "\"function\": {{\"arguments\": {arguments}, \"name\": {name}}}, \"type\": \"function\"{rest}"
            )
        }
        _ => format!("{BEGIN}{piece}"),
    };
    let mut pieces = want.split(BEGIN);
    let first = pieces.next().unwrap_or_default().to_owned();
    std::iter::once(first).chain(pieces.map(piece)).collect()
}

#[test]
fn a_request_as_a_chat_has_the_prompt_that_vllm_makes_of_it() {
    let mut lines = GOLDENS.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let head = lines.next().unwrap();
    let templates = head["templates"].as_object().unwrap().iter();
    let templates: Vec<(&str, ChatTemplate)> = templates
        .map(|(name, source)| {
            (&**name, ChatTemplate::from_source(source.as_str().unwrap(), Map::new()).unwrap())
        })
        .collect();
    let (mut faults, mut count) = (Vec::new(), 0);
    for line in lines.filter(|line| line["path"] == "/v1/responses") {
        for (name, template) in &templates {
            let Some(want) = line[*name].as_str() else { continue };
            count += 1;
            let want = of_chat(want);
            match prompt(&line["body"], template) {
                Ok(got) if got == want => {}
                got => faults.push(format!("{name} {}\n  {got:?}\n  not\n  {want:?}", line["body"])),
            }
        }
    }
    assert!(count > 120, "{count}");
    assert!(faults.is_empty(), "{}:\n{}", faults.len(), faults.join("\n"));
}
