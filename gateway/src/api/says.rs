//! What one event of a stream says. A token is generated content in whatever shape: text, a thought, a
//! refusal, a call's name or arguments, audio, an output item; a comment, a role, an empty delta, or the word
//! that an answer was begun, is none.
//!
//! Formats: OpenAI's API reference (chat completions, completions and responses, "streaming events"),
//! Anthropic's (messages, "streaming"), and what engines write beside those: vLLM's `{"object":"error"}`
//! (before 0.10), SGLang's and vLLM's `finish_reason: "abort"`, FastAPI's `{"detail":…}`.

use super::Api;
use crate::{json::Value, sse::Event};

/// What an event says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Said {
    /// It carries generated content.
    pub generated: bool,
    /// It is more than the word that an answer was begun: what another worker says would not fit behind it.
    pub binds: bool,
    /// It says that the answer has come to an end.
    pub end: Option<End>,
    /// It says that the answer failed.
    pub fault: Option<AtFault>,
    /// It says so only by why the output ended: `finish_reason: "abort"`.
    pub aborts: bool,
    /// It says so in the words of its API, on which that API's clients raise an error.
    pub raises: bool,
}

/// How an answer has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// Its content is complete; counts, or the stream's last word, may follow.
    Finished,
    /// Nothing follows: `[DONE]`, `message_stop`, `response.completed` or `response.incomplete`.
    Done,
}

/// Whose fault an error is, as far as it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtFault {
    /// The worker's: it is overloaded, its engine has died, was shut down, or was put to sleep. Another
    /// worker may do better.
    Worker,
    /// The request's, as the worker sees it: any other one would then say the same.
    Request,
}

impl Said {
    /// Reads one event of a stream of this API.
    pub fn of(api: Api, event: &Event<'_>) -> Self {
        if event.data.as_ref().is_none_or(|data| data.trim_ascii().is_empty()) {
            return Self::default();
        }
        let data = event.text().map(str::trim).unwrap_or_default();
        if data == "[DONE]" {
            return Self { end: Some(End::Done), binds: true, ..Self::default() };
        }
        let Some(fields) = Value::document(data) else {
            // Of no shape that is known: whatever it is, the worker has made it.
            return Self::TOKEN;
        };
        let mut chunk = Chunk::default();
        fields.map_while(Result::ok).for_each(|(name, value)| chunk.take(&name, value));
        let said = chunk.said(api, event.name == b"error");
        Self { binds: said.binds || said.generated || said.end.is_some() || said.fault.is_some(), ..said }
    }

    const TOKEN: Self =
        Self { generated: true, binds: true, end: None, fault: None, aborts: false, raises: false };
}

/// The fields of a chunk that matter, as they are written.
#[derive(Debug, Default)]
struct Chunk<'a> {
    kind: Option<Value<'a>>,
    choices: Option<Value<'a>>,
    error: Option<Value<'a>>,
    delta: Option<Value<'a>>,
    block: Option<Value<'a>>,
    response: Option<Value<'a>>,
    detail: bool,
    is_error_object: bool,
    /// A status at the top: older vLLM's `{"object":"error","code":500}`.
    code: Option<Value<'a>>,
}

impl<'a> Chunk<'a> {
    fn take(&mut self, name: &str, value: Value<'a>) {
        if value.raw() == "null" {
            return;
        }
        match name {
            "type" => self.kind = Some(value),
            "choices" => self.choices = Some(value),
            "error" => self.error = Some(value),
            "delta" => self.delta = Some(value),
            "content_block" => self.block = Some(value),
            "response" => self.response = Some(value),
            "detail" => self.detail = true,
            "object" => self.is_error_object = value.raw() == "\"error\"",
            "code" | "status" | "status_code" => self.code = Some(value),
            _ => {}
        }
    }

    fn said(&self, api: Api, named_error: bool) -> Said {
        let kind = self.kind.and_then(Value::text).unwrap_or_default();
        if let Some(fault) = self.fault(&kind, named_error) {
            let raises = match api {
                Api::Messages => named_error && kind == "error" && self.error.is_some(),
                // Of an error without fields clients could tell nothing.
                Api::Responses => self.has_error_object() || kind == "response.failed",
                _ => self.has_error_object() && self.choices.is_none(),
            };
            return Said { fault: Some(fault), raises, ..Said::default() };
        }
        if self.choices.is_some() {
            return self.of_choices();
        }
        match api {
            Api::Responses => self.of_responses(&kind),
            Api::Messages => self.of_messages(&kind),
            Api::Chat | Api::Completions => Said::default(),
            Api::Other => Said::TOKEN,
        }
    }

    fn has_error_object(&self) -> bool {
        self.error.is_some_and(|error| error.raw().starts_with('{'))
    }

    fn fault(&self, kind: &str, named_error: bool) -> Option<AtFault> {
        if let Some(error) = self.error {
            return Some(fault_of(error, self.code));
        }
        // `response.failed` says in its response what failed.
        let failed = || self.response?.fields()?.find_map(|f| f.ok().filter(|(name, _)| name == "error"));
        match kind {
            "response.failed" => Some(failed().map_or(AtFault::Worker, |(_, error)| fault_of(error, None))),
            "response.cancelled" => Some(AtFault::Worker),
            "error" | "abort" => Some(fault_of(Value::found("{}"), self.code)),
            _ if named_error || self.is_error_object => Some(fault_of(Value::found("{}"), self.code)),
            _ if self.detail && self.choices.is_none() && self.kind.is_none() => Some(AtFault::Worker),
            _ => None,
        }
    }

    /// Chat completions and completions: a choice's text or delta, and why it ended.
    fn of_choices(&self) -> Said {
        let mut said = Said::default();
        let choices = self.choices.and_then(Value::items).into_iter().flatten().map_while(Result::ok);
        for (name, value) in choices.filter_map(Value::fields).flatten().map_while(Result::ok) {
            match &*name {
                "delta" => said.generated |= has_content(value, &["role"]),
                "text" | "token_ids" => said.generated |= is_given(value),
                "finish_reason" if value.raw() != "null" => match value.text().as_deref() {
                    Some("abort" | "error") => (said.fault, said.aborts) = (Some(AtFault::Worker), true),
                    _ => said.end = Some(End::Finished),
                },
                _ => {}
            }
        }
        said
    }

    fn of_responses(&self, kind: &str) -> Said {
        let generated = match kind {
            "response.output_item.added" => true,
            _ => kind.rsplit('.').next() == Some("delta") && self.delta.is_some_and(is_given),
        };
        let ended = matches!(kind, "response.completed" | "response.incomplete");
        let opens = matches!(kind, "response.created" | "response.queued" | "response.in_progress");
        Said { generated, binds: !opens, end: ended.then_some(End::Done), ..Said::default() }
    }

    fn of_messages(&self, kind: &str) -> Said {
        let (mut generated, mut binds, mut end) = (false, true, None);
        match kind {
            "message_start" | "ping" => binds = false,
            // A block of text begins empty; a call begins with its name.
            "content_block_start" => generated = self.block.is_some_and(begins_with_content),
            "content_block_delta" => {
                generated = self.delta.is_some_and(|delta| has_content(delta, &["type"]));
            }
            "message_delta" => {
                let mut reasons =
                    self.delta.and_then(Value::fields).into_iter().flatten().map_while(Result::ok);
                let stopped = |(name, value): (_, Value<'_>)| name == "stop_reason" && value.raw() != "null";
                end = reasons.any(stopped).then_some(End::Finished);
            }
            "message_stop" => end = Some(End::Done),
            _ => {}
        }
        Said { generated, binds, end, ..Said::default() }
    }
}

/// Whether a value is there and not empty.
fn is_given(value: Value<'_>) -> bool {
    !matches!(value.raw(), "null" | "\"\"" | "[]" | "{}" | "false")
}

/// Whether an object has anything in it besides these fields.
fn has_content(object: Value<'_>, besides: &[&str]) -> bool {
    let mut fields = object.fields().into_iter().flatten().map_while(Result::ok);
    fields.any(|(name, value)| !besides.contains(&&*name) && is_given(value))
}

fn begins_with_content(block: Value<'_>) -> bool {
    let mut fields = block.fields().into_iter().flatten().map_while(Result::ok);
    let is_text = |kind: &str| matches!(kind, "text" | "thinking");
    fields.any(|(name, value)| match &*name {
        "type" => !value.text().is_some_and(|kind| is_text(&kind)),
        "text" | "thinking" => is_given(value),
        _ => false,
    })
}

/// Words of an error's `type` or `code` that blame the request.
const OF_REQUESTS: [&str; 10] = [
    "invalid_request_error",
    "badrequesterror",
    "notfounderror",
    "not_found_error",
    "authentication_error",
    "permission_error",
    "request_too_large",
    "validation_error",
    "invalid_grammar",
    "context_length_exceeded",
];

/// Whose fault an error is: by its status, where it has one, else by its words; the worker's where it does
/// not say.
fn fault_of(error: Value<'_>, status_beside: Option<Value<'_>>) -> AtFault {
    let fields = error.fields().into_iter().flatten().map_while(Result::ok);
    let beside = status_beside.map(|status| ("status".into(), status));
    let mut words = AtFault::Worker;
    for (name, value) in fields.chain(beside) {
        if !matches!(&*name, "code" | "status" | "status_code" | "type") {
            continue;
        }
        let text = value.text();
        let text = text.as_deref().unwrap_or_else(|| value.raw());
        match text.parse::<u16>() {
            // Too many requests, or too slow a one, is not the request's own doing.
            Ok(408 | 429 | 500..) => return AtFault::Worker,
            Ok(400..500) => return AtFault::Request,
            _ if OF_REQUESTS.contains(&text.to_ascii_lowercase().as_str()) => words = AtFault::Request,
            _ => {}
        }
    }
    words
}

#[cfg(test)]
mod tests;
