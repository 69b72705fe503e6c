//! A request's body to the text that the engine would tokenise: the chat template rendered with everything
//! the client sent for it, or a completion's prompts. It follows keyway-worker and vLLM. Which tokens an
//! image becomes only the engine knows, so of a chat with one the text ends where the first message with one
//! begins. With a template of its own a request has no text here at all, and is routed by its body's text.

use std::borrow::Cow;

use keyway_text::{ChatTemplate, Field, Message, RenderOptions, TextError};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::limits::{MAX_TOKENIZE_BYTES, MIN_MESSAGE_BYTES};

/// Why a prompt's tokens are not known; also a metric's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unknown {
    /// Not a request whose prompt is understood here.
    Unsupported,
    /// The template or the tokenizer refuses it.
    Failed,
    /// Too many long prompts at once.
    Overflow,
    /// To render and tokenise it would take memory out of proportion.
    TooLarge,
    /// It has more tokens than any worker has room for.
    TooLong,
}

impl Unknown {
    /// Its name in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unsupported => "unsupported",
            Self::Failed => "failed",
            Self::Overflow => "overflow",
            Self::TooLarge => "too_large",
            Self::TooLong => "too_long",
        }
    }
}

/// What is to be tokenised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Text, and whether the tokenizer puts its own tokens around it.
    Text {
        /// As the engine would tokenise it.
        text: String,
        /// Such as a BOS token.
        add_special: bool,
    },
    /// Text that the prompt begins with: what follows is an image, or else no text.
    Beginning(String),
    /// Token ids from the client.
    Ids(Vec<u32>),
}

impl Prompt {
    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Text { text, .. } | Self::Beginning(text) => text.len(),
            Self::Ids(ids) => size_of_val(&ids[..]),
        }
    }
}

/// A chat request, as far as its prompt depends on it.
#[derive(Deserialize)]
struct Conversation<'a> {
    #[serde(borrow)]
    messages: Vec<Message<'a>>,
    tools: Option<Value>,
    documents: Option<Value>,
    chat_template: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<Value>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    add_special_tokens: Option<bool>,
}

/// A completion request, as far as its prompt depends on it.
#[derive(Deserialize)]
struct Completion {
    prompt: Value,
    add_special_tokens: Option<bool>,
}

/// The prompts of a request to `path`; several only for a completion's batch.
pub fn read(path: &str, body: &[u8], template: &ChatTemplate) -> Result<Vec<Prompt>, Unknown> {
    if body.len() > MAX_TOKENIZE_BYTES {
        return Err(Unknown::TooLarge);
    }
    match path {
        "/v1/chat/completions" => Ok(vec![chat(body, template)?]),
        "/v1/completions" => completion(body),
        _ => Err(Unknown::Unsupported),
    }
}

fn chat(body: &[u8], template: &ChatTemplate) -> Result<Prompt, Unknown> {
    let mut chat: Conversation<'_> = serde_json::from_slice(body).map_err(|_| Unknown::Unsupported)?;
    if chat.chat_template.is_some_and(|template| !template.is_null()) {
        return Err(Unknown::Unsupported);
    }
    if chat.messages.len() * MIN_MESSAGE_BYTES > body.len() {
        return Err(Unknown::TooLarge);
    }
    let mut all_is_text = true;
    for message in &mut chat.messages {
        all_is_text &= prepare(message).ok_or(Unknown::Unsupported)?;
    }
    let mut variables = chat.chat_template_kwargs.unwrap_or_default();
    if let Some(effort) = chat.reasoning_effort.filter(|effort| !effort.is_null()) {
        variables.entry("reasoning_effort").or_insert(effort);
    }
    let given =
        |list: Option<Value>| list.filter(|list| list.as_array().is_some_and(|list| !list.is_empty()));
    let options = RenderOptions {
        add_generation_prompt: chat.add_generation_prompt.unwrap_or(true),
        continue_final_message: chat.continue_final_message.unwrap_or(false),
        tools: given(chat.tools),
        documents: given(chat.documents),
        variables,
        now_unix_seconds: None,
        bytes_max: MAX_TOKENIZE_BYTES,
        ..RenderOptions::default()
    };
    let mut text = template.render_messages(chat.messages, &options).map_err(|error| match error {
        TextError::TooLong => Unknown::TooLarge,
        _ => Unknown::Failed,
    })?;
    let add_special = chat.add_special_tokens.unwrap_or(false);
    if all_is_text {
        return Ok(Prompt::Text { text, add_special });
    }
    match text.find(NO_TEXT) {
        Some(begins) if !add_special => {
            text.truncate(begins);
            Ok(Prompt::Beginning(text))
        }
        _ => Err(Unknown::Unsupported),
    }
}

/// Stands for the content of a message that is not all text, to find in the rendered prompt where that
/// message begins. Private use characters, so that no client's text is taken for it by chance; if one is, the
/// prompt's known beginning is shorter.
const NO_TEXT: &str = "\u{f8ff}keyway: no text\u{f8ff}";

/// Makes a message what templates expect, as a worker makes it: calls' arguments objects, no content an empty
/// text. Whether its content is all text; `None` if it cannot be rendered.
fn prepare(message: &mut Message<'_>) -> Option<bool> {
    let mut all_is_text = true;
    let content = message.get("content").filter(|content| !content.is_null());
    // The template's renderer joins parts where it does not read them.
    let is_text = |part: &Value| part["type"] == "text" && part["text"].is_string();
    match content.map(Field::items) {
        None => message.set("content", Field::Text(Cow::Borrowed(""))),
        Some(parts) if !parts.unwrap_or_default().iter().all(is_text) => {
            all_is_text = false;
            let stands_in = serde_json::json!([{ "type": "text", "text": NO_TEXT }]);
            message.set("content", Field::Other(Cow::Owned(stands_in)));
        }
        Some(_) => {}
    }
    for call in message.get_mut("tool_calls").and_then(Field::items_mut).into_iter().flatten() {
        if let Some(Value::String(json)) = call["function"].get("arguments") {
            let parsed = if json.trim().is_empty() {
                Some(Value::Object(Map::new()))
            } else {
                serde_json::from_str(json).ok()
            };
            call["function"]["arguments"] = parsed?;
        }
    }
    Some(all_is_text)
}

fn completion(body: &[u8]) -> Result<Vec<Prompt>, Unknown> {
    let completion: Completion = serde_json::from_slice(body).map_err(|_| Unknown::Unsupported)?;
    let add_special = completion.add_special_tokens.unwrap_or(true);
    let one = |prompt: Value| match prompt {
        Value::String(text) => Some(Prompt::Text { text, add_special }),
        Value::Array(ids) => {
            let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
            ids.iter().map(id).collect::<Option<_>>().map(Prompt::Ids)
        }
        _ => None,
    };
    let prompts: Option<Vec<Prompt>> = match completion.prompt {
        Value::Array(items) if items.iter().any(|item| item.is_string() || item.is_array()) => {
            items.into_iter().map(one).collect()
        }
        prompt => one(prompt).map(|prompt| vec![prompt]),
    };
    prompts.filter(|prompts| !prompts.is_empty()).ok_or(Unknown::Unsupported)
}

#[cfg(test)]
mod tests {
    use keyway_text::TextModel;
    use serde_json::json;

    use super::*;

    fn texts(path: &str, body: &Value) -> Result<Vec<Prompt>, Unknown> {
        read(path, body.to_string().as_bytes(), &TextModel::builtin().template)
    }

    fn chat_text(body: &Value) -> String {
        match texts("/v1/chat/completions", body).unwrap().remove(0) {
            Prompt::Text { text, add_special: false } => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn messages_of_nothing_and_bodies_beyond_any_prompt_are_not_rendered() {
        let read =
            |body: String| read("/v1/chat/completions", body.as_bytes(), &TextModel::builtin().template);
        let messages = |message: &str| format!("{{\"messages\":[{}]}}", vec![message; 1_000].join(","));
        assert_eq!(read(messages("{}")), Err(Unknown::TooLarge));
        assert!(read(messages("{\"role\":\"\",\"content\":\"\"}")).is_ok());
        let one = messages("{\"role\":\"user\",\"content\":\"\"}");
        let padded = |size: usize| format!("{one}{}", " ".repeat(size - one.len()));
        assert!(read(padded(MAX_TOKENIZE_BYTES)).is_ok());
        assert_eq!(read(padded(MAX_TOKENIZE_BYTES + 1)), Err(Unknown::TooLarge));
    }

    #[test]
    fn a_chat_is_rendered_with_its_parts_joined() {
        let parts = json!([{ "type": "text", "text": "one" }, { "type": "text", "text": "two" }]);
        let body = json!({ "messages": [{ "role": "user", "content": parts }], "temperature": 0 });
        assert_eq!(chat_text(&body), "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n");
        let body =
            json!({ "messages": [{ "role": "user", "content": "x" }], "add_generation_prompt": false });
        assert_eq!(chat_text(&body), "<|im_start|>user\nx<|im_end|>\n");
    }

    #[test]
    fn tools_arguments_and_variables_reach_the_template() {
        let source = "{{ tools | length if tools else 'none' }} {{ enable_thinking }} \
            {% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}";
        let template = ChatTemplate::from_source(source, Map::new()).unwrap();
        let render = |body: Value| match chat(body.to_string().as_bytes(), &template).unwrap() {
            Prompt::Text { text, .. } => text,
            _ => unreachable!("a chat of text"),
        };
        let call =
            json!({ "type": "function", "function": { "name": "f", "arguments": "{\"city\":\"Bonn\"}" } });
        let assistant = json!({ "role": "assistant", "content": null, "tool_calls": [call] });
        let text = render(json!({
            "messages": [assistant], "tools": [{ "type": "function" }], "chat_template_kwargs": { "enable_thinking": 7 },
        }));
        assert_eq!(text, "1 7 Bonn");
        assert!(render(json!({ "messages": [], "tools": [] })).starts_with("none"));
    }

    #[test]
    fn completions_are_text_ids_or_several() {
        let text = |text: &str| Prompt::Text { text: text.to_owned(), add_special: true };
        let read = |prompt: Value| texts("/v1/completions", &json!({ "prompt": prompt })).unwrap();
        assert_eq!(read(json!("a")), [text("a")]);
        assert_eq!(read(json!([1, 2])), [Prompt::Ids(vec![1, 2])]);
        assert_eq!(read(json!(["a", "b"])), [text("a"), text("b")]);
        assert_eq!(read(json!([[1], [2]])), [Prompt::Ids(vec![1]), Prompt::Ids(vec![2])]);
    }

    #[test]
    fn a_chat_with_an_image_has_its_text_up_to_the_message_with_the_first() {
        let image = json!({ "type": "image_url", "image_url": { "url": "http://x" } });
        let (said, seen) =
            (json!({ "role": "user", "content": "x" }), json!({ "type": "text", "text": "y" }));
        let shown = json!({ "role": "user", "content": [seen, image] });
        let answer = json!({ "role": "assistant", "content": "z" });
        let read = |messages: Value, more: Value| {
            let mut body = json!({ "messages": messages });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            texts("/v1/chat/completions", &body).map(|mut prompts| prompts.remove(0))
        };
        let beginning =
            "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nz<|im_end|>\n<|im_start|>user\n";
        for messages in [json!([said, answer, shown]), json!([said, answer, shown, answer, shown])] {
            assert_eq!(read(messages, json!({})), Ok(Prompt::Beginning(beginning.to_owned())));
        }
        // Whatever it is that is no text, wherever it stands, and in whoever's message.
        let others = [
            json!({ "type": "input_audio", "input_audio": { "data": "AAAA", "format": "wav" } }),
            json!({ "type": "video_url", "video_url": { "url": "http://x" } }),
            json!({ "type": "file", "file": { "file_id": "f" } }),
            json!({ "type": "text" }),
            json!("bare"),
        ];
        for (other, role) in others.iter().zip(["user", "tool", "user", "user", "user"]) {
            for parts in [json!([other]), json!([other, seen]), json!([seen, other])] {
                let odd = json!({ "role": role, "content": parts });
                let Ok(Prompt::Beginning(text)) = read(json!([said, answer, odd, said]), json!({})) else {
                    panic!("{odd}")
                };
                assert!(beginning.starts_with(&text) || role == "tool", "{odd}: {text}");
                assert!(text.contains("z<|im_end|>") && !text.contains(NO_TEXT), "{odd}: {text}");
            }
        }
        // What is set around a prompt, and a client that writes the mark.
        assert_eq!(read(json!([shown]), json!({ "add_special_tokens": true })), Err(Unknown::Unsupported));
        let odd = json!({ "role": "user", "content": NO_TEXT });
        assert_eq!(
            read(json!([odd, shown]), json!({})),
            Ok(Prompt::Beginning("<|im_start|>user\n".to_owned()))
        );
        // A template that reads parts, and one that leaves the message out: where it would be is not said.
        let by = |source: &str| {
            let template = ChatTemplate::from_source(source, Map::new()).unwrap();
            let asked = json!({ "role": "user", "content": [{ "type": "text", "text": "x" }] });
            chat(json!({ "messages": [asked, shown] }).to_string().as_bytes(), &template)
        };
        let parts = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}";
        assert_eq!(by(parts), Ok(Prompt::Beginning("<user>x<user>".to_owned())));
        assert_eq!(by("{{ messages | length }}"), Err(Unknown::Unsupported));
    }

    #[test]
    fn what_only_the_engine_knows_is_not_guessed() {
        for (path, body) in [
            ("/v1/chat/completions", json!({ "messages": [], "chat_template": "x" })),
            ("/v1/chat/completions", json!({ "messages": 3 })),
            ("/v1/completions", json!({ "prompt": [-1] })),
            ("/v1/completions", json!({ "prompt": {} })),
            ("/v1/embeddings", json!({ "input": "x" })),
        ] {
            assert_eq!(texts(path, &body), Err(Unknown::Unsupported), "{body}");
        }
    }
}
