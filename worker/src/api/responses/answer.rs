//! A response as OpenAI's clients read it, whole; `stream.rs` has it in events. At its end it is kept, if its
//! request did not say otherwise.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::items::Items;
use super::request::Asked;
use super::store::Kept;
use crate::answer::reader::Shown;
use crate::api::App;
use crate::api::answer::unix_seconds;
use crate::api::request::Call;
use crate::api::running::{Running, usage_of};
use crate::engine::sequence::FinishReason;

/// A response in the making.
#[derive(Debug)]
pub(in crate::api) struct Making {
    id: String,
    created_at: u64,
    model: String,
    repeated: Map<String, Value>,
    /// The input's items, if it is to be kept.
    input: Option<Vec<u8>>,
    pub(super) items: Items,
    app: Arc<App>,
}

/// What has become of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status<'a> {
    InProgress,
    Completed,
    /// Its tokens were all that it might have.
    Incomplete,
    /// For the reason that this says.
    Failed(&'a str),
}

impl Making {
    /// Of a call, whose fields it takes.
    pub(in crate::api) fn new(app: &Arc<App>, call: &mut Call) -> Self {
        let Asked { repeated, items, names } = std::mem::take(&mut call.asked);
        Self {
            id: format!("resp_{:032x}", fastrand::u128(..)),
            created_at: unix_seconds(),
            model: call.model.clone(),
            repeated,
            input: items,
            items: Items::new(names, call.stream),
            app: Arc::clone(app),
        }
    }

    /// The response as it is now.
    pub(super) fn told(&self, status: Status<'_>, usage: Value) -> Value {
        let error = match status {
            Status::Failed(message) => json!({"code": "server_error", "message": message}),
            _ => Value::Null,
        };
        let incomplete = match status {
            Status::Incomplete => json!({"reason": "max_output_tokens"}),
            _ => Value::Null,
        };
        let mut told = json!({
            "id": self.id, "object": "response", "created_at": self.created_at, "status": status.name(),
            "error": error, "incomplete_details": incomplete, "model": self.model, "output": self.items.done(),
            "usage": usage, "previous_response_id": null,
        });
        if let Value::Object(told) = &mut told {
            told.extend(self.repeated.clone());
        }
        told
    }

    /// Ends the response: its last item, and what is kept of it.
    pub(super) fn end(&mut self, out: &mut Vec<u8>, choice: &Running) -> Ended {
        let status = match choice.output.finish {
            Some(FinishReason::Length) => Status::Incomplete,
            _ => Status::Completed,
        };
        self.items.close(out, status.name());
        let response = self.told(status, usage(choice));
        self.keep(&response);
        Ended { event: status.event(), response }
    }

    fn keep(&mut self, response: &Value) {
        let Some(mut items) = self.input.take() else { return };
        for item in self.items.done() {
            if !items.is_empty() {
                items.push(b',');
            }
            // Writing plain values to memory cannot fail.
            let _ = serde_json::to_writer(&mut items, item);
        }
        let response = Bytes::from(response.to_string());
        self.app.responses.keep(&self.id, Kept { response, items: items.into() });
    }

    /// The whole response, of all that was said.
    pub(in crate::api) fn whole(mut self, choice: &Running, text: Shown) -> Value {
        // There are no events.
        let mut out = Vec::new();
        self.items.add(&mut out, text);
        self.end(&mut out, choice).response
    }
}

/// A response at its end, and the event that says so.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) event: &'static str,
    pub(super) response: Value,
}

impl Status<'_> {
    const fn name(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Failed(_) => "failed",
        }
    }

    /// The event of a response that has come so far.
    const fn event(self) -> &'static str {
        match self {
            Self::InProgress => "response.in_progress",
            Self::Completed => "response.completed",
            Self::Incomplete => "response.incomplete",
            Self::Failed(_) => "response.failed",
        }
    }
}

/// Token counts.
fn usage(choice: &Running) -> Value {
    let usage = usage_of(std::slice::from_ref(choice));
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens().unwrap_or(0), "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.output.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    })
}
