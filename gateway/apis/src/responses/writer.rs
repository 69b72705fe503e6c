//! A response as OpenAI's clients read it, whole or in numbered events: it is created, its items grow, it is
//! completed.

use serde_json::{Map, Value, json};

use super::items::Items;
use super::names::ToolNames;
use crate::{Counts, Finish, Said};

/// Writes one response while its answer comes. Without [`ResponseWriter::begin`] no events are written.
#[derive(Debug)]
pub struct ResponseWriter {
    id: String,
    created_at: u64,
    model: String,
    repeated: Map<String, Value>,
    items: Items,
}

/// What has become of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status<'a> {
    /// Nothing of it was made yet.
    Queued,
    InProgress,
    Completed,
    /// For the reason that this says.
    Incomplete(&'static str),
    /// For the reason that this says.
    Failed(&'a str),
}

impl ResponseWriter {
    /// A response of this model to a request, begun at this time (Unix seconds): `repeated` are the request's
    /// fields that it repeats.
    pub fn new(model: String, created_at: u64, repeated: Map<String, Value>, names: ToolNames) -> Self {
        Self {
            id: format!("resp_{:032x}", fastrand::u128(..)),
            created_at,
            model,
            repeated,
            items: Items::new(names),
        }
    }

    /// The response's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Items that are complete.
    pub fn items(&self) -> &[Value] {
        self.items.done()
    }

    /// Appends the first events; what follows is told in events, too.
    pub fn begin(&mut self, out: &mut Vec<u8>) {
        self.items.stream();
        for event in ["response.created", "response.in_progress"] {
            let response = self.told(Status::InProgress, Value::Null);
            self.items.tell(out, event, json!({"response": response}));
        }
    }

    /// Adds what was said, and appends its events.
    pub fn add(&mut self, out: &mut Vec<u8>, said: Said) {
        self.items.add(out, said);
    }

    /// Ends the response and appends its last events; returns it whole. Without `counts` it has no usage.
    pub fn end(&mut self, out: &mut Vec<u8>, finish: &Finish, counts: Option<Counts>) -> Value {
        let status = Status::of(finish);
        self.items.close(out, status.name());
        let response = self.told(status, counts.map_or(Value::Null, usage));
        if self.items.streams() {
            self.items.tell(out, status.event(), json!({"response": &response}));
        }
        response
    }

    /// Ends a response that breaks off, and appends the events that say so; returns it whole.
    pub fn fail(&mut self, out: &mut Vec<u8>, message: &str) -> Value {
        self.items.close(out, "incomplete");
        let status = Status::Failed(message);
        let response = self.told(status, Value::Null);
        self.items.tell(out, status.event(), json!({"response": &response}));
        response
    }

    /// The response before its end, for a client that does not wait for it: whether its answer has begun.
    pub fn unfinished(&self, has_begun: bool) -> Value {
        self.told(if has_begun { Status::InProgress } else { Status::Queued }, Value::Null)
    }

    /// Notes what the chat says of itself: when it began, and its model, where the request named none.
    pub(super) fn note(&mut self, created_at: u64, model: Option<String>) {
        self.created_at = created_at;
        if let Some(model) = model.filter(|_| self.model.is_empty()) {
            self.model = model;
        }
    }

    /// The response as it is now.
    fn told(&self, status: Status<'_>, usage: Value) -> Value {
        let error = match status {
            Status::Failed(message) => json!({"code": "server_error", "message": message}),
            _ => Value::Null,
        };
        let incomplete = match status {
            Status::Incomplete(reason) => json!({"reason": reason}),
            _ => Value::Null,
        };
        let mut told = json!({
            "id": self.id, "object": "response", "created_at": self.created_at, "status": status.name(),
            "error": error, "incomplete_details": incomplete, "model": self.model,
            "output": self.items.done(), "usage": usage, "previous_response_id": null,
        });
        if let Value::Object(told) = &mut told {
            told.extend(self.repeated.clone());
        }
        told
    }
}

impl Status<'_> {
    const fn of(finish: &Finish) -> Self {
        match finish {
            Finish::Stop | Finish::Sequence(_) | Finish::Calls => Self::Completed,
            Finish::Length => Self::Incomplete("max_output_tokens"),
            Finish::Filtered => Self::Incomplete("content_filter"),
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete(_) => "incomplete",
            Self::Failed(_) => "failed",
        }
    }

    /// The event of a response that has come so far.
    const fn event(self) -> &'static str {
        match self {
            Self::Queued => "response.queued",
            Self::InProgress => "response.in_progress",
            Self::Completed => "response.completed",
            Self::Incomplete(_) => "response.incomplete",
            Self::Failed(_) => "response.failed",
        }
    }
}

/// Token counts as a response has them.
fn usage(counts: Counts) -> Value {
    json!({
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.answer,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt.saturating_add(counts.answer),
    })
}
