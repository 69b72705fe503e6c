//! What one event of a stream says, in the words of every API that streams: generated content, its end, token
//! counts, an error. Reads only the fields that are measured; those of the APIs differ, so that no event
//! needs to be told whose it is.
//!
//! The load tester's own reading on purpose: a fault shared with the gateway's would hide itself. Formats:
//! OpenAI's API reference (chat, completions and responses, "streaming events"), Anthropic's ("streaming
//! messages"), and what engines write beside those: vLLM's `{"object":"error"}` (before 0.10), FastAPI's
//! `{"detail":…}`, SGLang's and vLLM's `finish_reason: "abort"`.

mod content;
mod counts;
mod error;
mod quick;
mod reader;

use keyway_wire::openai::Usage;
use serde::Deserialize;
use serde_json::value::RawValue;

use self::content::{Choice, Given, Str, text_of};
pub use self::{
    counts::Counts,
    error::{error_message, error_of_body},
    reader::Reader,
};
use super::sse;

/// What an event says.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct EventContent {
    /// It carries generated content: text, a thought, a refusal, a call's name or arguments, audio, an output
    /// item. A role, an empty delta, a keep-alive and the word that an answer was begun carry none.
    pub generated: bool,
    /// It says why generating ended.
    pub finished: bool,
    /// It is the stream's last word.
    pub done: bool,
    /// Token counts up to this event, those told before among them; `None` if it tells none.
    pub usage: Option<Usage>,
}

/// An event that says that its answer is worth nothing.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Bad {
    /// The server says that it failed; its message.
    #[error("{0}")]
    Error(String),
    /// Generating was broken off; the finish reason that says so.
    #[error("finish reason {0:?}")]
    Aborted(String),
    /// The event is neither `[DONE]` nor JSON of a known shape.
    #[error("an event is not JSON of a stream: {0}")]
    Unreadable(String),
}

/// Finish reasons of answers that were broken off: SGLang's and vLLM's, proxies', TensorRT-LLM's.
const BROKEN_OFF: [&str; 6] = ["abort", "aborted", "error", "failed", "cancelled", "timeout"];

#[derive(Deserialize)]
struct Chunk<'a> {
    // What few events have is boxed: a chunk is moved about for every token.
    #[serde(borrow)]
    choices: Option<Vec<Choice<'a>>>,
    /// Of chat and completions, and of Anthropic's `message_delta`.
    usage: Option<Box<Counts>>,
    /// What kind of event it is, in responses and messages.
    #[serde(borrow, rename = "type")]
    kind: Option<Str<'a>>,
    #[serde(borrow)]
    delta: Option<&'a RawValue>,
    #[serde(borrow)]
    item: Option<&'a RawValue>,
    #[serde(borrow)]
    content_block: Option<&'a RawValue>,
    #[serde(borrow)]
    response: Option<Box<Response<'a>>>,
    message: Option<Box<Message>>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow)]
    detail: Option<&'a RawValue>,
}

/// A response, as its first and last events carry it.
#[derive(Deserialize)]
struct Response<'a> {
    #[serde(borrow)]
    status: Option<Str<'a>>,
    usage: Option<Counts>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow)]
    incomplete_details: Option<Details<'a>>,
}

#[derive(Deserialize)]
struct Details<'a> {
    #[serde(borrow)]
    reason: Option<Str<'a>>,
}

/// `message` is an object with counts in Anthropic's `message_start`, and a text in some errors.
#[derive(Deserialize)]
#[serde(untagged)]
enum Message {
    Begun { usage: Option<Counts> },
    Other(serde::de::IgnoredAny),
}

/// The `delta` of Anthropic's `message_delta`, which says why generating stopped.
#[derive(Deserialize)]
struct Stopped<'a> {
    #[serde(borrow)]
    stop_reason: Option<Str<'a>>,
}

impl EventContent {
    /// Reads one event; `so_far` are the counts that events before it told.
    pub fn read(event: sse::Event<'_>, so_far: Option<&Usage>) -> Result<Self, Bad> {
        Self::read_with_text(event, so_far).map(|(said, _)| said)
    }

    /// The same, and the text that it carries where that is written as it is meant.
    fn read_with_text<'a>(
        event: sse::Event<'a>,
        so_far: Option<&Usage>,
    ) -> Result<(Self, Option<&'a str>), Bad> {
        if event.data == b"[DONE]" {
            return Ok((Self { done: true, ..Self::default() }, None));
        }
        let named_error = event.name == b"error";
        let chunk: Chunk<'_> = match serde_json::from_slice(event.data) {
            Ok(chunk) => chunk,
            Err(_) if named_error => return Err(Bad::Error(error_message(event.data))),
            Err(error) => return Err(Bad::Unreadable(error.to_string())),
        };
        // Every chunk of a token says of what kind of object it is: it is read where there is no choice
        // alone.
        if named_error || chunk.is_error() || (chunk.choices.is_none() && error::is_object(event.data)) {
            return Err(Bad::Error(error_message(event.data)));
        }
        let said = match (&chunk.choices, text_in(chunk.kind.as_ref())) {
            (Some(choices), _) => of_choices(choices)?,
            (None, Some(kind)) => chunk.of_kind(kind)?,
            (None, None) => Self::default(),
        };
        let usage = chunk.counts().map(|counts| counts.onto(so_far));
        Ok((Self { usage, ..said }, chunk.plain_text()))
    }
}

/// The text of an event's first choice, without thoughts; empty where there is none.
pub fn text(data: &[u8]) -> String {
    serde_json::from_slice::<Chunk<'_>>(data).map(|chunk| chunk.text()).unwrap_or_default()
}

fn text_in<'a>(field: Option<&'a Str<'_>>) -> Option<&'a str> {
    field.map(|text| &*text.0)
}

fn of_choices(choices: &[Choice<'_>]) -> Result<EventContent, Bad> {
    let mut said = EventContent::default();
    for choice in choices {
        if let Some(reason) = text_in(choice.finish_reason.as_ref()) {
            not_broken_off(reason)?;
            said.finished = true;
        }
        said.generated |= choice.has_content();
    }
    Ok(said)
}

fn not_broken_off(reason: &str) -> Result<(), Bad> {
    if BROKEN_OFF.contains(&reason) { Err(Bad::Aborted(reason.to_owned())) } else { Ok(()) }
}

// === impl Chunk ===

impl Chunk<'_> {
    fn is_error(&self) -> bool {
        let kind = text_in(self.kind.as_ref());
        let ended_badly = |response: &Response<'_>| {
            matches!(text_in(response.status.as_ref()), Some("failed" | "cancelled"))
                || response.error.is_some_and(error::is_told)
        };
        self.error.is_some_and(error::is_told)
            || matches!(kind, Some("error" | "response.failed" | "response.cancelled"))
            || self.response.as_deref().is_some_and(ended_badly)
            || (self.detail.is_some_and(error::is_told) && self.choices.is_none() && kind.is_none())
    }

    /// An event of a response or a message.
    fn of_kind(&self, kind: &str) -> Result<EventContent, Bad> {
        let mut said = EventContent { generated: self.has_content(kind), ..EventContent::default() };
        match kind {
            "response.completed" => (said.finished, said.done) = (true, true),
            "response.incomplete" => {
                let details =
                    self.response.as_ref().and_then(|response| response.incomplete_details.as_ref());
                not_broken_off(
                    details.and_then(|details| text_in(details.reason.as_ref())).unwrap_or_default(),
                )?;
                (said.finished, said.done) = (true, true);
            }
            "message_delta" => {
                if let Some(reason) = self.stop_reason() {
                    not_broken_off(&reason.0)?;
                    said.finished = true;
                }
            }
            "message_stop" => said.done = true,
            _ => {}
        }
        Ok(said)
    }

    fn has_content(&self, kind: &str) -> bool {
        let given = |part: Option<&RawValue>| part.is_some_and(Given::is_in);
        match kind {
            "message_delta" => false,
            "response.output_item.added" => given(self.item),
            "content_block_start" => given(self.content_block),
            // Deltas of a response, of a block: text, thoughts, arguments, audio, whatever comes to it.
            _ if kind.ends_with("delta") => given(self.delta),
            _ => false,
        }
    }

    fn stop_reason(&self) -> Option<Str<'_>> {
        serde_json::from_str::<Stopped<'_>>(self.delta?.get()).ok()?.stop_reason
    }

    fn counts(&self) -> Option<&Counts> {
        let begun = || match self.message.as_deref()? {
            Message::Begun { usage } => usage.as_ref(),
            Message::Other(_) => None,
        };
        self.usage.as_deref().or_else(begun).or_else(|| self.response.as_ref()?.usage.as_ref())
    }

    fn text(&self) -> String {
        match (&self.choices, text_in(self.kind.as_ref())) {
            (Some(choices), _) => choices.first().map(Choice::text).unwrap_or_default(),
            (None, Some("response.output_text.delta" | "content_block_delta")) => {
                self.delta.map(text_of).unwrap_or_default()
            }
            _ => String::new(),
        }
    }
}

#[cfg(test)]
mod tests;
