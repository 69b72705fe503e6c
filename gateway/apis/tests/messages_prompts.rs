//! Requests of other APIs as chats, against the prompts that vLLM 0.32 makes of the requests themselves
//! (`gateway/text/tests/data/api_prompts.jsonl`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed helper fails its test")]

use keyway_apis::{Api, SystemPlace, to_chat};
use keyway_text::{ChatTemplate, Conversation, PromptText};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

const GOLDENS: &str = include_str!("../../text/tests/data/api_prompts.jsonl");

/// Where a template shows system messages.
fn place(template: &ChatTemplate) -> SystemPlace {
    match template.shows_late() {
        (true, true) => SystemPlace::Anywhere,
        (true, false) => SystemPlace::NoDevelopers,
        (false, _) => SystemPlace::InFront,
    }
}

/// The prompt of the chat that a request becomes.
fn prompt(api: Api, body: &str, template: &ChatTemplate) -> Result<String, String> {
    let translated = to_chat(api, body.as_bytes(), place(template)).map_err(|refusal| refusal.to_string())?;
    let conversation = Conversation::from_chat(&translated.chat).map_err(|error| error.to_string())?;
    match conversation.render(template, 1 << 20).map_err(|error| error.to_string())? {
        PromptText::Whole { text, .. } => Ok(text),
        PromptText::Beginning(text) => Err(format!("only its beginning is known: {text}")),
    }
}

/// Why a chat cannot have the prompt of the request to `/v1/messages`.
fn why_not(body: &Value, template: &str) -> Option<&'static str> {
    if body["tools"] == json!([]) && template == "text" {
        return Some("an empty list of tools is none in a chat");
    }
    let says =
        |message: &Value| message["role"] == "system" && message["content"].to_string().contains("Reminder");
    if template == "parts" && body["messages"].as_array().unwrap().iter().any(says) {
        return Some("vLLM moves what the system says late in front, and loses the cached conversation");
    }
    None
}

#[test]
fn messages_have_the_prompt_that_vllm_makes_of_them() {
    let mut lines = GOLDENS.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let head = lines.next().unwrap();
    let template = |source: &Value| ChatTemplate::from_source(source.as_str().unwrap(), Map::new()).unwrap();
    let templates: Vec<(&String, ChatTemplate)> = head["templates"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, source)| (name, template(source)))
        .collect();
    let (mut faults, mut same, mut other) = (Vec::new(), 0, 0);
    for line in lines.filter(|line| line["path"] == "/v1/messages") {
        for (name, template) in &templates {
            let Some(want) = line[name.as_str()].as_str() else { continue };
            let got = prompt(Api::Messages, &line["body"].to_string(), template);
            let is_same = got.as_deref() == Ok(want);
            if is_same == why_not(&line["body"], name).is_some() {
                faults.push(format!("{name} {}\n  {got:?}\n  not\n  {want:?}", line["body"]));
            }
            *if is_same { &mut same } else { &mut other } += 1;
        }
    }
    assert!(faults.is_empty(), "{}:\n{}", faults.len(), faults.join("\n"));
    assert_eq!((same, other), (130, 4));
}

/// A conversation of Claude Code's form: in each turn a call, its result, and a reminder by the system.
fn turns(count: usize) -> Value {
    let mut messages = vec![json!({"role": "user", "content": "Mend the test. ".repeat(20)})];
    for turn in 0..count {
        let id = format!("toolu_{turn}");
        messages.extend([
            json!({"role": "system", "content": [{"type": "text", "text": format!("{turn} tokens used.")}]}),
            json!({"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Where is it?", "signature": "s"},
                {"type": "tool_use", "id": id, "name": "look", "input": {"at": turn}}]}),
            json!({"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": id, "content": "Nothing there. ".repeat(20)}]}),
        ]);
    }
    messages.push(json!({"role": "system", "content": "Be brief."}));
    json!({"model": "m", "max_tokens": 4, "system": "You write programs.", "messages": messages})
}

/// What a template of a family makes of system messages is as it is with Qwen's newest models, which take
/// them in front alone, and with older ones, which take them anywhere.
#[test]
fn a_conversation_with_late_system_messages_keeps_its_prefix() {
    let each = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
    let first = "{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}\
                 {{ raise_exception('System message must be at the beginning.') }}{% endif %}";
    for (source, moved) in [(each.to_owned(), false), (format!("{first}{each}"), true)] {
        let template = ChatTemplate::from_source(&source, Map::new()).unwrap();
        assert_eq!(place(&template) == SystemPlace::InFront, moved);
        let engines = |body: &Value| {
            let body = body.to_string();
            let conversation = Conversation::from_messages(body.as_bytes(), &template).unwrap();
            match conversation.render(&template, 1 << 20).unwrap() {
                PromptText::Whole { text, .. } => text,
                PromptText::Beginning(text) => panic!("only its beginning is known: {text}"),
            }
        };
        for count in 1..5 {
            let (before, now) = (turns(count), turns(count + 1));
            let [before, now] = [before, now]
                .map(|body| (prompt(Api::Messages, &body.to_string(), &template), engines(&body)));
            let shared = |before: &str, now: &str| {
                before.bytes().zip(now.bytes()).take_while(|(before, now)| before == now).count()
            };
            let (ours, theirs) =
                (shared(before.0.as_ref().unwrap(), now.0.as_ref().unwrap()), shared(&before.1, &now.1));
            // All but the last reminder, which the next turn has in another place.
            assert!(ours + 100 > before.0.as_ref().unwrap().len(), "{ours}: {:?}", before.0);
            assert_eq!(theirs < 100, moved, "moved in front, it would share {theirs}");
        }
    }
}

/// The prompt that `keyway-worker` makes is the one of the chat to which the gateway translates, however the
/// template takes what the system says late.
#[test]
fn the_worker_s_prompt_of_late_system_messages_is_the_translated_one() {
    let each = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
    let refuses = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
                   {{ raise_exception('first') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    let drops = "{{ messages[0].content }}{% for m in messages %}{% if m.role != 'system' %}\
                 <{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}";
    let mut in_parts = turns(1);
    let late = json!({"role": "system", "content": [{"type": "text", "text": "Late."}]});
    let texts = json!([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]);
    let user = json!({"role": "user", "content": texts});
    in_parts["messages"] =
        json!([late, user, late, {"role": "assistant", "content": "Hm."}, late, user, late]);
    for source in [each, refuses, drops] {
        let template = ChatTemplate::from_source(source, Map::new()).unwrap();
        for body in [turns(1), turns(3), in_parts.clone()] {
            let body = body.to_string();
            let conversation = keyway_apis::messages_in_place(body.as_bytes(), &template).unwrap();
            let PromptText::Whole { text, .. } = conversation.render(&template, 1 << 20).unwrap() else {
                panic!("only its beginning is known");
            };
            assert!(text.contains("Late.") || text.contains("Be brief."), "{text}");
            assert_eq!(Ok(text), prompt(Api::Messages, &body, &template), "{source}");
        }
    }
}

const ROLES: [&str; 3] = ["user", "assistant", "system"];

const WORDS: [&str; 30] = [
    "type",
    "role",
    "content",
    "text",
    "messages",
    "system",
    "user",
    "assistant",
    "tools",
    "tool",
    "name",
    "id",
    "input",
    "tool_use",
    "tool_use_id",
    "tool_result",
    "tool_reference",
    "thinking",
    "image",
    "source",
    "url",
    "data",
    "tool_addition",
    "tool_removal",
    "tool_definition",
    "definition",
    "input_schema",
    "tool_choice",
    "disabled",
    "{\"a\":1}",
];

fn any_json() -> impl Strategy<Value = Value> {
    let word = || prop::sample::select(&WORDS[..]);
    let leaf = prop_oneof![
        6 => word().prop_map(Value::from),
        1 => Just(Value::Null),
        1 => any::<bool>().prop_map(Value::from),
        1 => any::<i32>().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((word(), inner), 0..7).prop_map(|fields| fields
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect()),
        ]
    })
}

/// Blocks and tools that are right.
fn right() -> (Vec<Value>, Vec<Value>) {
    let png = json!({"type": "image", "source": {"type": "base64", "data": "AA=="}});
    let blocks = vec![
        json!({"type": "text", "text": "a", "cache_control": {}}),
        json!({"type": "image", "source": {"type": "url", "url": "u"}}),
        json!({"type": "thinking", "thinking": "t", "signature": "s"}),
        json!({"type": "tool_use", "id": "i", "name": "tool", "input": {"a": 1}}),
        json!({"type": "tool_result", "tool_use_id": "i", "content": [png, {"type": "text", "text": "b"}]}),
        json!({"type": "tool_addition", "tool": {"type": "tool_reference", "name": "tool"}}),
        json!({"type": "tool_removal", "tool": {"type": "tool_reference", "name": "tool"}}),
    ];
    let tools = vec![
        json!({"name": "tool", "description": "d", "input_schema": {"type": "object"}, "strict": true}),
        json!({"name": "tool", "input_schema": {}, "defer_loading": true}),
        json!({"type": "web_search_20250305", "name": "web_search"}),
    ];
    (blocks, tools)
}

/// One of these, or one that has something else in one place.
fn nearly(right: Vec<Value>) -> impl Strategy<Value = Value> {
    let other = prop::option::weighted(0.2, (any::<prop::sample::Index>(), any_json()));
    (prop::sample::select(right), other).prop_map(|(mut part, other)| {
        if let (Some((place, value)), Some(fields)) = (other, part.as_object_mut()) {
            let place = place.index(fields.len());
            if let Some((_, field)) = fields.iter_mut().nth(place) {
                *field = value;
            }
        }
        part
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Whatever clients send, it is a chat in JSON or a refusal that names what is wrong.
    #[test]
    fn no_body_is_too_odd(
        said in prop::collection::vec((prop::sample::select(&ROLES[..]), nearly(right().0)), 1..4),
        tools in prop::collection::vec(nearly(right().1), 0..3),
        (more, field) in (any_json(), prop::sample::select(&WORDS[..])),
    ) {
        let message = |(role, part)| json!({"role": role, "content": [part]});
        let messages: Value = said.into_iter().map(message).collect();
        let plain = json!({"model": "m", "max_tokens": 4, "messages": messages});
        let mut with_tools = plain.clone();
        with_tools["tools"] = tools.into();
        let mut odd = with_tools.clone();
        odd[field] = more.clone();
        for body in [plain, with_tools, odd, more] {
            match to_chat(Api::Messages, body.to_string().as_bytes(), SystemPlace::InFront) {
                Ok(translated) => {
                    let chat: Value = serde_json::from_slice(&translated.chat).unwrap();
                    prop_assert!(chat["messages"].is_array() && chat["max_tokens"].is_u64());
                }
                Err(refusal) => prop_assert!(!refusal.message.is_empty()),
            }
        }
    }

    /// A body that is cut or changed somewhere is no reason to panic.
    #[test]
    fn no_bytes_are_too_odd(at in 0..400usize, byte in any::<u8>(), cuts in any::<bool>()) {
        let mut body = json!({"model": "m", "max_tokens": 4, "system": "\u{e9}", "tools": [
            {"name": "f", "input_schema": {"a": 1}}], "messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": "u"}}]}]}).to_string().into_bytes();
        let at = at % body.len();
        if cuts { body.truncate(at) } else { body[at] = byte }
        if let Ok(translated) = to_chat(Api::Messages, &body, SystemPlace::Anywhere) {
            prop_assert!(serde_json::from_slice::<Value>(&translated.chat).is_ok());
        }
    }
}
