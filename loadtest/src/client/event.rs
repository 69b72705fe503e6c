//! What one event of an OpenAI stream says, chat or completion: text, its end, token counts, an error. Reads only
//! the fields that are measured.

use std::borrow::Cow;

use keyway_wire::openai::Usage;
use serde::{Deserialize, de::IgnoredAny};

/// One event.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// `[DONE]`: the stream is complete.
    Done,
    /// The server says that it failed; its message.
    Error(String),
    /// A chunk of the answer.
    Chunk {
        /// It carries text, reasoning or a tool call.
        has_text: bool,
        /// It carries a finish reason.
        finished: bool,
        /// Token counts, as a rule in the last chunk.
        usage: Option<Usage>,
    },
}

/// The event is neither `[DONE]` nor JSON of a known shape.
#[derive(Debug, thiserror::Error)]
#[error("an event is not JSON of an OpenAI stream: {0}")]
pub struct BadEvent(#[from] serde_json::Error);

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(default, borrow)]
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    finish_reason: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow)]
    content: Option<Cow<'a, str>>,
    #[serde(borrow)]
    reasoning_content: Option<Cow<'a, str>>,
    #[serde(borrow)]
    reasoning: Option<Cow<'a, str>>,
    tool_calls: Option<IgnoredAny>,
}

impl Event {
    /// Reads the data of one event.
    pub fn read(data: &[u8]) -> Result<Self, BadEvent> {
        if data == b"[DONE]" {
            return Ok(Self::Done);
        }
        let chunk: Chunk<'_> = serde_json::from_slice(data)?;
        if let Some(error) = chunk.error {
            let message = error.get("message").and_then(serde_json::Value::as_str);
            return Ok(Self::Error(message.map_or_else(|| error.to_string(), str::to_owned)));
        }
        Ok(Self::Chunk {
            has_text: chunk.choices.iter().any(Choice::has_text),
            finished: chunk.choices.iter().any(|choice| choice.finish_reason.is_some()),
            usage: chunk.usage,
        })
    }
}

/// The text of a chunk's first choice, without reasoning; empty where there is none.
pub fn text(data: &[u8]) -> String {
    let chunk: Option<Chunk<'_>> = serde_json::from_slice(data).ok();
    let choice = chunk.and_then(|chunk| chunk.choices.into_iter().next());
    let text = choice.and_then(|choice| choice.delta.and_then(|delta| delta.content).or(choice.text));
    text.map(Cow::into_owned).unwrap_or_default()
}

impl Choice<'_> {
    fn has_text(&self) -> bool {
        let filled = |text: &Option<Cow<'_, str>>| text.as_deref().is_some_and(|text| !text.is_empty());
        filled(&self.text)
            || self.delta.as_ref().is_some_and(|delta| {
                filled(&delta.content)
                    || filled(&delta.reasoning_content)
                    || filled(&delta.reasoning)
                    || delta.tool_calls.is_some()
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(has_text: bool, finished: bool) -> Event {
        Event::Chunk { has_text, finished, usage: None }
    }

    #[test]
    fn every_kind_of_event() {
        for (data, want) in [
            ("[DONE]", Event::Done),
            (
                r#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#,
                chunk(false, false),
            ),
            (r#"{"choices":[{"delta":{"content":"a\nb"}}],"usage":null}"#, chunk(true, false)),
            (r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#, chunk(true, false)),
            (r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#, chunk(false, true)),
            (r#"{"choices":[{"text":"x","finish_reason":"length"}]}"#, chunk(true, true)),
            (
                r#"{"error":{"message":"out of blocks","type":"server_error"}}"#,
                Event::Error("out of blocks".into()),
            ),
            (r#"{"error":"plain"}"#, Event::Error("\"plain\"".into())),
        ] {
            assert_eq!(Event::read(data.as_bytes()).unwrap(), want, "{data}");
        }
        let usage =
            r#"{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}"#;
        let Event::Chunk { usage: Some(usage), .. } = Event::read(usage.as_bytes()).unwrap() else {
            panic!()
        };
        assert_eq!((usage.prompt_tokens, usage.cached_tokens()), (9, Some(8)));
        assert!(Event::read(b"<html>").is_err());
        assert_eq!(text(br#"{"choices":[{"delta":{"content":"a\nb"}}]}"#), "a\nb");
        assert_eq!(text(br#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#), "");
    }
}
