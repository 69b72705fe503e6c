//! What a chat's answer says, whole or a chunk of it, in the forms that engines write today: thoughts as
//! `reasoning` or `reasoning_content` or a part of the content, a content as text or parts, arguments as text
//! or an object, cached tokens in the usage's details. Chunks that say nothing come, too.

use serde::Deserialize;
use serde_json::Value;

use crate::{CallDelta, Counts, Finish, NoChat, Said};

/// What one answer, or one chunk of a stream, says of its first choice.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// As the engine names it.
    pub(crate) model: Option<String>,
    /// When it began, in Unix seconds; 0 where the engine does not say.
    pub(crate) created: u64,
    pub(crate) said: Said,
    pub(crate) finish: Option<Finish>,
    pub(crate) counts: Option<Counts>,
    /// An error in the middle of a stream: its `error` object.
    pub(crate) error: Option<Value>,
    /// Whether it has a choice, be it one that says nothing.
    pub(crate) has_choice: bool,
}

#[derive(Deserialize)]
struct Answer {
    model: Option<String>,
    created: Option<Value>,
    choices: Option<Vec<Choice>>,
    usage: Option<Usage>,
    error: Option<Value>,
    /// Of errors that have no object of their own: vLLM's before, and FastAPI's.
    message: Option<Value>,
    detail: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    index: Option<usize>,
    #[serde(alias = "delta")]
    message: Option<Message>,
    finish_reason: Option<String>,
    stop_reason: Option<Value>,
    /// SGLang's word for it.
    matched_stop: Option<Value>,
}

#[derive(Deserialize, Default)]
struct Message {
    content: Option<Value>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    refusal: Option<String>,
    tool_calls: Option<Vec<Call>>,
}

#[derive(Deserialize)]
struct Call {
    index: Option<usize>,
    id: Option<String>,
    function: Option<Function>,
}

#[derive(Deserialize)]
struct Function {
    name: Option<String>,
    arguments: Option<Value>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
    completion_tokens_details: Option<Details>,
}

#[derive(Deserialize, Default)]
struct Details {
    cached_tokens: Option<u64>,
    reasoning_tokens: Option<u64>,
}

/// Reads a whole answer.
///
/// # Errors
/// It is no chat's.
pub(crate) fn read(json: &[u8]) -> Result<Told, NoChat> {
    read_chunk(json).ok().filter(|told| told.has_choice && told.error.is_none()).ok_or(NoChat)
}

/// Reads a chunk of a stream, or its error.
///
/// # Errors
/// It is no JSON object, or a field is of another type than in a chat: what it says would be lost.
pub(crate) fn read_chunk(json: &[u8]) -> Result<Told, NoChat> {
    let answer: Answer = serde_json::from_slice(json).map_err(|_| NoChat)?;
    let choices = answer.choices.unwrap_or_default();
    let mut told = Told {
        model: answer.model,
        created: answer.created.and_then(|created| created.as_f64()).map_or(0, |created| created as u64),
        counts: answer.usage.map(Counts::from),
        error: answer.error.or(answer.message).or(answer.detail).filter(|error| !error.is_null()),
        has_choice: !choices.is_empty(),
        ..Told::default()
    };
    for choice in choices {
        if choice.index.unwrap_or(0) == 0 {
            let stop = choice.stop_reason.or(choice.matched_stop);
            told.finish = choice.finish_reason.map(|reason| finish(&reason, stop));
            told.said = choice.message.unwrap_or_default().into();
            break;
        }
    }
    Ok(told)
}

fn finish(reason: &str, stop: Option<Value>) -> Finish {
    match (reason, stop) {
        ("length", _) => Finish::Length,
        ("tool_calls" | "function_call", _) => Finish::Calls,
        ("content_filter", _) => Finish::Filtered,
        (_, Some(Value::String(sequence))) => Finish::Sequence(sequence),
        _ => Finish::Stop,
    }
}

impl Told {
    /// Whether it says nothing at all: some engines begin with such a chunk, or keep connections alive by it.
    pub(crate) fn is_empty(&self) -> bool {
        !self.has_choice && self.counts.is_none() && self.error.is_none()
    }
}

/// What is thought and said in a content, which is a text or parts.
fn add_content(content: Value, said: &mut Said) {
    match content {
        Value::String(text) => said.content.push_str(&text),
        Value::Array(parts) => {
            for part in parts {
                let Value::Object(mut part) = part else { continue };
                if let Some(thought) = part.remove("thinking") {
                    let mut inner = Said::default();
                    add_content(thought, &mut inner);
                    said.reasoning.push_str(&inner.content);
                }
                add_content(part.remove("text").unwrap_or_default(), said);
            }
        }
        _ => {}
    }
}

/// Arguments as JSON text, which is what most engines write.
fn json_text(arguments: Option<Value>) -> String {
    match arguments {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(json)) => json,
        Some(object) => object.to_string(),
    }
}

impl From<Message> for Said {
    fn from(message: Message) -> Self {
        let call = |(nth, call): (usize, Call)| {
            let Function { name, arguments } =
                call.function.unwrap_or(Function { name: None, arguments: None });
            CallDelta {
                index: call.index.unwrap_or(nth),
                id: call.id.filter(|id| !id.is_empty()),
                name: name.filter(|name| !name.is_empty()),
                arguments: json_text(arguments),
            }
        };
        let calls = message.tool_calls.unwrap_or_default().into_iter().enumerate().map(call).collect();
        let reasoning = message.reasoning.or(message.reasoning_content).unwrap_or_default();
        let mut said = Self { reasoning, content: String::new(), calls };
        add_content(message.content.unwrap_or_default(), &mut said);
        if said.content.is_empty() {
            said.content = message.refusal.unwrap_or_default();
        }
        said
    }
}

impl From<Usage> for Counts {
    fn from(usage: Usage) -> Self {
        let details = |details: Option<Details>| details.unwrap_or_default();
        Self {
            prompt: usage.prompt_tokens.unwrap_or(0),
            cached: details(usage.prompt_tokens_details).cached_tokens.unwrap_or(0),
            answer: usage.completion_tokens.unwrap_or(0),
            reasoning: details(usage.completion_tokens_details).reasoning_tokens.unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_whole_and_in_chunks() {
        let whole = read(
            br#"{"object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant",
            "content":null,"reasoning_content":"r","tool_calls":[{"id":"c","type":"function","function":
            {"name":"f","arguments":"{}"}}]},"finish_reason":"tool_calls"}],"created":1764365000,
            "usage":{"prompt_tokens":9,"completion_tokens":2,
            "prompt_tokens_details":{"cached_tokens":4},"completion_tokens_details":null}}"#,
        )
        .unwrap();
        let call =
            CallDelta { index: 0, id: Some("c".into()), name: Some("f".into()), arguments: "{}".into() };
        let said = Said { reasoning: "r".into(), content: String::new(), calls: vec![call] };
        assert_eq!((whole.said, whole.finish, whole.model), (said, Some(Finish::Calls), Some("m".into())));
        assert_eq!(whole.created, 1_764_365_000);
        assert_eq!(whole.counts, Some(Counts { prompt: 9, cached: 4, answer: 2, reasoning: 0 }));
        let chunk = read(
            br#"{"object":"chat.completion.chunk","choices":[{"index":1,"delta":{"content":"other"}},
            {"index":0,"delta":{"content":"c","refusal":null},"finish_reason":"stop","stop_reason":"END"}]}"#,
        )
        .unwrap();
        assert_eq!((&*chunk.said.content, chunk.finish), ("c", Some(Finish::Sequence("END".into()))));
        let sglang =
            br#"{"object":"chat.completion","choices":[{"finish_reason":"stop","matched_stop":"E"}]}"#;
        assert_eq!(read(sglang).unwrap().finish, Some(Finish::Sequence("E".into())));
        let usage =
            read_chunk(br#"{"object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":3}}"#);
        assert_eq!(usage.unwrap().counts.unwrap().prompt, 3);
        for error in
            [r#"{"error":{"message":"x"}}"#, r#"{"object":"error","message":"x"}"#, r#"{"detail":"x"}"#]
        {
            assert!(read_chunk(error.as_bytes()).unwrap().error.is_some(), "{error}");
        }
        for none in [&b"[DONE]"[..], b"{}", b"{\"detail\":\"x\"}", b"\"chat.completion\""] {
            assert_eq!(read(none).unwrap_err(), NoChat);
        }
    }

    #[test]
    fn other_engines_words_are_read_as_well() {
        let said = |choice: &str| read_chunk(format!(r#"{{"choices":[{choice}]}}"#).as_bytes()).unwrap().said;
        let parts = said(
            r#"{"index":null,"delta":{"content":[{"type":"thinking","thinking":[{"type":"text","text":"Hm"}]},
            {"type":"text","text":"c"},"odd",{"type":"reference"}],"refusal":"r"}}"#,
        );
        assert_eq!((&*parts.reasoning, &*parts.content), ("Hm", "c"));
        let call = said(r#"{"delta":{"tool_calls":[{"function":{"name":"f","arguments":{"a":1}}}]}}"#);
        assert_eq!(call.calls[0].arguments, r#"{"a":1}"#);
        assert_eq!(said(r#"{"delta":{"refusal":"No."}}"#).content, "No.");
        for nothing in [
            r#"{"choices":[],"created":0,"id":"","model":"","object":"","prompt_filter_results":[]}"#,
            "{}",
            r#"{"choices":null,"usage":null}"#,
        ] {
            assert!(read_chunk(nothing.as_bytes()).unwrap().is_empty(), "{nothing}");
        }
        let usage = read_chunk(br#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":null}}"#);
        assert_eq!(usage.unwrap().counts, Some(Counts { prompt: 7, ..Counts::default() }));
        assert_eq!(read_chunk(br#"{"choices":[{"delta":{"tool_calls":3}}]}"#).unwrap_err(), NoChat);
    }
}
