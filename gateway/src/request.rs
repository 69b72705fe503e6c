//! What routing needs of a request body, read in one pass without copying it: the model, whether the answer
//! streams, and the hashed prefix of the prompt. The body itself goes to the worker as it came.
//!
//! The prompt's canonical text is, in the order a chat template renders it: model, system text and tools, then the
//! messages in turn. Strings are taken unescaped, so `\u00e9` and `é` are the same prompt; other values verbatim.
//! A body that is not a JSON object is not an error here: the worker answers it as it does without a gateway.

use std::{borrow::Cow, num::NonZeroUsize};

use keyway_core::{
    keyer::{PrefixChain, TextKeyer},
    waiting_room::Share,
};
use keyway_wire::block_hash::HashKey;

use crate::{json::Value, token_keyer::TokenPrompt};

/// How prompts are cut and hashed.
#[derive(Debug, Clone, Copy)]
pub struct KeyerConfig {
    /// Secret of the hash chain.
    pub key: HashKey,
    /// Bytes of canonical text in one block.
    pub block_bytes: NonZeroUsize,
}

/// What routing knows of one request.
#[derive(Debug)]
pub struct RequestInfo {
    /// The model named in the body.
    pub model: Option<String>,
    /// Whether the client asked for a stream.
    pub stream: bool,
    /// Separates its tenant's cache from others' (`cache_salt`); empty if there is none.
    pub salt: String,
    /// The prompt's hashed prefix, by its text; empty where there is no prompt.
    pub chain: PrefixChain,
    /// The prompt's tokens, where the model's tokenizer is known.
    pub tokens: Option<TokenPrompt>,
    /// Whose it is, where it has to wait.
    pub share: Share,
}

/// Reads a body, all but its tokens.
pub fn read(body: &[u8], config: KeyerConfig) -> RequestInfo {
    let fields = std::str::from_utf8(body).ok().and_then(Fields::of).unwrap_or_default();
    let salt = fields.salt.and_then(Value::text).map(Cow::into_owned).unwrap_or_default();
    let mut keyer = TextKeyer::new(config.key, salt.as_bytes(), config.block_bytes);
    let model = fields.model.and_then(Value::text).map(Cow::into_owned);
    if let Some(model) = &model {
        keyer.push_text(model);
        keyer.end_field(tag::MODEL);
    }
    for (value, tag) in [(fields.system, tag::SYSTEM), (fields.tools, tag::TOOLS)] {
        if let Some(value) = value {
            push_value(&mut keyer, value, tag);
        }
    }
    for value in [fields.messages, fields.input].into_iter().flatten() {
        push_messages(&mut keyer, value);
    }
    if let Some(value) = fields.prompt {
        push_value(&mut keyer, value, tag::PROMPT);
    }
    let stream = fields.stream.is_some_and(|value| value.raw() == "true");
    RequestInfo { model, stream, salt, chain: keyer.finish(), tokens: None, share: Share::default() }
}

/// Which field a piece of canonical text came from; part of the hash, so never renumber.
mod tag {
    pub(super) const MODEL: u8 = 1;
    pub(super) const SYSTEM: u8 = 2;
    pub(super) const TOOLS: u8 = 3;
    pub(super) const PROMPT: u8 = 4;
    pub(super) const MESSAGE_NAME: u8 = 5;
    pub(super) const MESSAGE_VALUE: u8 = 6;
    pub(super) const MESSAGE_END: u8 = 7;
}

fn push_value(keyer: &mut TextKeyer, value: Value<'_>, tag: u8) {
    match value.text() {
        Some(text) => keyer.push_text(&text),
        None => keyer.push_text(value.raw()),
    }
    keyer.end_field(tag);
}

/// Messages field by field; anything that is not a list of objects (the `input` of `/v1/responses` or
/// `/v1/embeddings` may be text) as one value.
fn push_messages(keyer: &mut TextKeyer, value: Value<'_>) {
    let messages =
        value.items().and_then(|items| items.map(|item| item.ok()?.fields()).collect::<Option<Vec<_>>>());
    let Some(messages) = messages else {
        return push_value(keyer, value, tag::PROMPT);
    };
    for message in messages {
        for (name, value) in message.map_while(Result::ok) {
            keyer.push_text(&name);
            keyer.end_field(tag::MESSAGE_NAME);
            push_value(keyer, value, tag::MESSAGE_VALUE);
        }
        keyer.end_field(tag::MESSAGE_END);
    }
}

/// The fields that routing reads. A repeated key counts as its last value, as in the engines' own JSON readers.
#[derive(Default)]
struct Fields<'a> {
    model: Option<Value<'a>>,
    stream: Option<Value<'a>>,
    salt: Option<Value<'a>>,
    system: Option<Value<'a>>,
    tools: Option<Value<'a>>,
    messages: Option<Value<'a>>,
    input: Option<Value<'a>>,
    prompt: Option<Value<'a>>,
}

impl<'a> Fields<'a> {
    /// `None` where the body is not a JSON object, or breaks off.
    fn of(body: &'a str) -> Option<Self> {
        let mut fields = Self::default();
        for field in Value::document(body)? {
            let (name, value) = field.ok()?;
            let field = match name.as_ref() {
                "model" => &mut fields.model,
                "stream" => &mut fields.stream,
                "cache_salt" => &mut fields.salt,
                "system" | "instructions" => &mut fields.system,
                "tools" => &mut fields.tools,
                "messages" => &mut fields.messages,
                "input" => &mut fields.input,
                "prompt" => &mut fields.prompt,
                _ => continue,
            };
            *field = Some(value);
        }
        Some(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(body: &str) -> RequestInfo {
        let config = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(16).unwrap() };
        read(body.as_bytes(), config)
    }

    fn shared(a: &str, b: &str) -> usize {
        let (a, b) = (info(a).chain.blocks, info(b).chain.blocks);
        a.iter().zip(&b).take_while(|(x, y)| x == y).count()
    }

    #[test]
    fn a_follow_up_turn_keeps_the_earlier_turns_prefix() {
        let first = r#"{"model":"m","messages":[{"role":"user","content":"tell me about whales, at some length please"}]}"#;
        let second = r#"{"model":"m","messages":[{"role":"user","content":"tell me about whales, at some length please"},{"role":"assistant","content":"no"},{"role":"user","content":"why"}]}"#;
        let first_blocks = info(first).chain.blocks.len();
        assert!(first_blocks >= 4);
        assert!(shared(first, second) >= first_blocks - 1);
    }

    #[test]
    fn escapes_spacing_and_field_order_outside_the_prompt_do_not_matter() {
        let plain =
            r#"{"model":"m","messages":[{"role":"user","content":"éééééééééééééééééééé"}],"stream":true}"#;
        let escaped = "{ \"stream\" : true, \"x\":[1], \"messages\": [ {\"role\":\"user\", \"content\":\"\\u00e9éééééééééééééééééé\\u00e9\"} ], \"model\":\"m\"}";
        let blocks = info(plain).chain.blocks.len();
        assert!(blocks > 1);
        assert_eq!(shared(plain, escaped), blocks);
        assert!(info(escaped).stream);
    }

    #[test]
    fn tools_system_text_and_model_are_part_of_the_prefix() {
        let body = |model: &str, tools: &str| {
            format!(
                r#"{{"model":"{model}","tools":{tools},"messages":[{{"role":"user","content":"0123456789abcdef0123456789abcdef"}}]}}"#
            )
        };
        assert_eq!(shared(&body("m", "[1]"), &body("m", "[2]")), 0);
        assert_eq!(shared(&body("m", "[1]"), &body("n", "[1]")), 0);
    }

    #[test]
    fn a_tenant_s_salt_separates_its_prompts() {
        let body =
            |salt: &str| format!(r#"{{"prompt":"0123456789abcdef0123456789abcdef","cache_salt":{salt}}}"#);
        assert_eq!(shared(&body("\"a\""), &body("\"b\"")), 0);
        assert_eq!(shared(&body("\"\\u0061\""), &body("\"a\"")), 2);
        assert_eq!(shared(&body("null"), r#"{"prompt":"0123456789abcdef0123456789abcdef"}"#), 2);
    }

    #[test]
    fn the_last_of_a_repeated_key_counts() {
        assert_eq!(info(r#"{"model":"a","model":"b"}"#).model.as_deref(), Some("b"));
    }

    #[test]
    fn text_prompts_token_prompts_and_input_lists_are_hashed() {
        for body in [
            r#"{"prompt":"0123456789abcdef0123456789abcdef"}"#,
            r#"{"prompt":[1000,1001,1002,1003,1004,1005,1006,1007]}"#,
            r#"{"input":"0123456789abcdef0123456789abcdef"}"#,
            r#"{"input":[{"role":"user","content":"0123456789abcdef0123456789abcdef"}]}"#,
        ] {
            assert!(!info(body).chain.blocks.is_empty(), "{body}");
        }
    }

    #[test]
    fn what_is_not_a_json_object_has_no_prefix() {
        for body in ["", "[]", "nonsense", "{\"model\":", "{\"model\":3}", "\u{feff}{}", "{\"messages\":3}"] {
            assert_eq!(info(body).model, None, "{body}");
        }
    }
}
