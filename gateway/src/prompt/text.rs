//! A request's body to the text that the engine would tokenise: the chat template rendered with everything
//! the client sent for it (`keyway-text`'s conversations), or a completion's prompts. Which tokens an image
//! becomes only the engine knows, so of a chat with one the text ends where the first message with one
//! begins. With a template of its own a request has no text here at all, and is routed by its body's text.

use keyway_apis::messages_in_place;
use keyway_text::{ChatTemplate, Conversation, ConversationError, PromptText, TextError};
use serde::Deserialize;
use serde_json::Value;

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
    /// Engines make other tokens of this API's requests.
    Differs,
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
            Self::Differs => "differs",
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

/// A completion request, as far as its prompt depends on it.
#[derive(Deserialize)]
struct Completion {
    prompt: Value,
    add_special_tokens: Option<bool>,
}

/// An API whose prompts are known here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptApi {
    /// OpenAI's chat completions.
    Chat,
    /// OpenAI's completions.
    Completions,
    /// Anthropic's Messages, as vLLM reads them.
    Messages,
    /// The same, as `keyway-worker` reads them: what the system says late stays where it stands.
    MessagesInPlace,
    /// OpenAI's Responses.
    Responses,
}

impl PromptApi {
    /// How many there are.
    pub const COUNT: usize = 5;

    /// The API of a path.
    pub fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            "/v1/messages" => Self::Messages,
            "/v1/responses" => Self::Responses,
            _ => return None,
        })
    }
}

/// The prompts of a request; several only for a completion's batch.
pub fn read(api: PromptApi, body: &[u8], template: &ChatTemplate) -> Result<Vec<Prompt>, Unknown> {
    if body.len() > MAX_TOKENIZE_BYTES {
        return Err(Unknown::TooLarge);
    }
    let chat = match api {
        PromptApi::Completions => return completion(body),
        PromptApi::Chat => Conversation::from_chat(body)?,
        PromptApi::Messages => Conversation::from_messages(body, template)?,
        PromptApi::MessagesInPlace => messages_in_place(body, template)?,
        PromptApi::Responses => Conversation::from_responses(body)?,
    };
    // Of fewer bytes nothing comes that an engine takes for a message.
    if chat.len() * MIN_MESSAGE_BYTES > body.len() {
        return Err(Unknown::TooLarge);
    }
    Ok(vec![match chat.render(template, MAX_TOKENIZE_BYTES)? {
        PromptText::Whole { text, add_special } => Prompt::Text { text, add_special },
        PromptText::Beginning(text) => Prompt::Beginning(text),
    }])
}

impl From<ConversationError> for Unknown {
    fn from(error: ConversationError) -> Self {
        match error {
            ConversationError::Unsupported(_) | ConversationError::Tools(_) => Self::Unsupported,
            ConversationError::Text(TextError::TooLong) => Self::TooLarge,
            ConversationError::Text(_) => Self::Failed,
        }
    }
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
    use serde_json::{Map, json};

    use super::*;

    fn texts(path: &str, body: &Value) -> Result<Vec<Prompt>, Unknown> {
        read(PromptApi::of(path).unwrap(), body.to_string().as_bytes(), &TextModel::builtin().template)
    }

    fn chat_text(body: &Value) -> String {
        match texts("/v1/chat/completions", body).unwrap().remove(0) {
            Prompt::Text { text, add_special: false } => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn messages_of_nothing_and_bodies_beyond_any_prompt_are_not_rendered() {
        let read = |body: String| read(PromptApi::Chat, body.as_bytes(), &TextModel::builtin().template);
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
    fn what_the_system_says_late_is_read_as_the_engine_reads_it() {
        let source = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
            {{ raise_exception('first') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}";
        let template = ChatTemplate::from_source(source, Map::new()).unwrap();
        let said = json!([{ "role": "user", "content": "Hi" }, { "role": "system", "content": "Late." }]);
        let body = json!({ "messages": said }).to_string();
        for (api, want) in [
            (PromptApi::Messages, "<system>Late.<user>Hi"),
            (PromptApi::MessagesInPlace, "<user>Hi\n\n<system-reminder>\nLate.\n</system-reminder>"),
        ] {
            let prompts = super::read(api, body.as_bytes(), &template).unwrap();
            assert_eq!(prompts, [Prompt::Text { text: want.to_owned(), add_special: false }], "{api:?}");
        }
    }

    #[test]
    fn tools_arguments_and_variables_reach_the_template() {
        let source = "{{ tools | length if tools else 'none' }} {{ enable_thinking }} \
            {% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}";
        let template = ChatTemplate::from_source(source, Map::new()).unwrap();
        let render = |body: Value| match read(PromptApi::Chat, body.to_string().as_bytes(), &template)
            .unwrap()
            .remove(0)
        {
            Prompt::Text { text, .. } => text,
            _ => unreachable!("a chat of text"),
        };
        let call =
            json!({ "type": "function", "function": { "name": "f", "arguments": "{\"city\":\"Bonn\"}" } });
        let assistant = json!({ "role": "assistant", "content": null, "tool_calls": [call] });
        let text = render(json!({
            "messages": [assistant], "tools": [{ "type": "function", "function": { "name": "f" } }], "chat_template_kwargs": { "enable_thinking": 7 },
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
            json!({ "type": "text_of_a_kind" }),
        ];
        for (other, role) in others.iter().zip(["user", "tool", "user", "user"]) {
            for parts in [json!([other]), json!([other, seen]), json!([seen, other])] {
                let odd = json!({ "role": role, "content": parts });
                let Ok(Prompt::Beginning(text)) = read(json!([said, answer, odd, said]), json!({})) else {
                    panic!("{odd}")
                };
                assert!(beginning.starts_with(&text) || role == "tool", "{odd}: {text}");
                assert!(text.contains("z<|im_end|>") && !text.contains('\u{f8ff}'), "{odd}: {text}");
            }
        }
        // What is set around a prompt.
        assert_eq!(read(json!([shown]), json!({ "add_special_tokens": true })), Err(Unknown::Unsupported));
        // A template that reads parts, and one that leaves the message out: where it would be is not said.
        let by = |source: &str| {
            let template = ChatTemplate::from_source(source, Map::new()).unwrap();
            let asked = json!({ "role": "user", "content": [{ "type": "text", "text": "x" }] });
            let body = json!({ "messages": [asked, shown] }).to_string();
            super::read(PromptApi::Chat, body.as_bytes(), &template).map(|mut prompts| prompts.remove(0))
        };
        let parts = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}";
        assert_eq!(by(parts), Ok(Prompt::Beginning("<user>x<user>".to_owned())));
        assert_eq!(by("{{ messages | length }}"), Err(Unknown::Unsupported));
    }

    #[test]
    fn an_agent_s_request_is_rendered_whichever_api_it_speaks() {
        let prompt = |path: &str, body: Value| match texts(path, &body).unwrap().remove(0) {
            Prompt::Text { text, add_special: false } => text,
            other => panic!("{other:?}"),
        };
        let (call, answer) =
            ("\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>", "one");
        let want = format!(
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes{call}<|im_end|>\n\
             <|im_start|>tool\n{answer}<|im_end|>\n<|im_start|>assistant\n"
        );
        let used = json!({ "type": "tool_use", "id": "c", "name": "f", "input": { "n": 1 } });
        let said = json!([
            { "role": "user", "content": "hi" },
            { "role": "assistant", "content": [{ "type": "text", "text": "yes" }, used] },
            { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "c", "content": answer }] },
        ]);
        assert_eq!(prompt("/v1/messages", json!({ "system": "S", "messages": said, "max_tokens": 1 })), want);
        let input = json!([
            { "role": "user", "content": [{ "type": "input_text", "text": "hi" }] },
            { "role": "assistant", "content": "yes" },
            { "type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"n\":1}" },
            { "type": "function_call_output", "call_id": "c", "output": answer },
        ]);
        assert_eq!(prompt("/v1/responses", json!({ "instructions": "S", "input": input })), want);
        let goes_on = json!({ "input": "hi", "previous_response_id": "resp_1" });
        assert_eq!(texts("/v1/responses", &goes_on), Err(Unknown::Unsupported));
    }

    #[test]
    fn what_only_the_engine_knows_is_not_guessed() {
        for (path, body) in [
            ("/v1/chat/completions", json!({ "messages": [], "chat_template": "x" })),
            ("/v1/chat/completions", json!({ "messages": 3 })),
            ("/v1/completions", json!({ "prompt": [-1] })),
            ("/v1/completions", json!({ "prompt": {} })),
        ] {
            assert_eq!(texts(path, &body), Err(Unknown::Unsupported), "{body}");
        }
    }
}
