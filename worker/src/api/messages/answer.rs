//! A message as Anthropic's clients read it, whole; `stream.rs` has it in events.

use keyway_wire::openai::Usage;
use serde_json::{Map, Value, json};

use crate::answer::output::{StopReason, TextOutput};
use crate::answer::reader::Shown;
use crate::api::request::Call;
use crate::api::running::{Running, usage_of};
use crate::engine::sequence::FinishReason;

/// What is known of a message before it is said.
#[derive(Debug)]
pub(in crate::api) struct MessageHead {
    /// In its id, its signatures and the ids of its calls.
    random: String,
    model: String,
}

/// Why a message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ending<'a> {
    pub(super) reason: &'static str,
    /// The stop sequence, where one ended it.
    pub(super) sequence: Option<&'a str>,
}

impl MessageHead {
    pub(in crate::api) fn new(call: &Call) -> Self {
        Self { random: format!("{:032x}", fastrand::u128(..)), model: call.model.clone() }
    }

    /// The message with this content.
    pub(super) fn message(&self, content: &[Value], ending: Option<Ending<'_>>, usage: &Value) -> Value {
        json!({
            "id": format!("msg_{}", self.random), "type": "message", "role": "assistant", "model": self.model,
            "content": content, "stop_reason": ending.map(|ending| ending.reason),
            "stop_sequence": ending.and_then(|ending| ending.sequence), "usage": usage,
        })
    }

    pub(in crate::api) fn whole(&self, choice: &Running, text: &Shown) -> Value {
        let ending = Ending::of(&choice.output, choice.has_calls);
        let usage = told(&usage_of(std::slice::from_ref(choice)));
        self.message(&self.content(text), Some(ending), &usage)
    }

    /// At least one block: clients look at the first.
    fn content(&self, text: &Shown) -> Vec<Value> {
        let mut content = Vec::new();
        if !text.reasoning.is_empty() {
            let signature = self.signature();
            content.push(json!({"type": "thinking", "thinking": text.reasoning, "signature": signature}));
        }
        if !text.content.is_empty() || text.reasoning.is_empty() && text.calls.is_empty() {
            content.push(json!({"type": "text", "text": text.content}));
        }
        content.extend(text.calls.iter().map(|call| {
            let id = self.call_id(call.index);
            json!({"type": "tool_use", "id": id, "name": call.name, "input": input(&call.arguments)})
        }));
        content
    }

    /// Stands for a proof that a thought is the model's own: nothing here asks for one.
    pub(super) fn signature(&self) -> &str {
        &self.random
    }

    pub(super) fn call_id(&self, index: usize) -> String {
        format!("toolu_{}{index:02x}", &self.random[..20])
    }
}

/// A call's arguments. Those of a call that was cut off are no object.
fn input(arguments: &str) -> Map<String, Value> {
    serde_json::from_str(arguments).unwrap_or_default()
}

impl<'a> Ending<'a> {
    /// Of a finished output. Who calls functions waits for what they give, whatever followed the calls.
    pub(super) fn of(output: &'a TextOutput, has_calls: bool) -> Self {
        let (reason, sequence) = match (output.finish, &output.stop_reason) {
            (Some(FinishReason::Length), _) => ("max_tokens", None),
            _ if has_calls => ("tool_use", None),
            (_, Some(StopReason::Text(text))) => ("stop_sequence", Some(text.as_str())),
            _ => ("end_turn", None),
        };
        Self { reason, sequence }
    }
}

/// Token counts: what was cached does not count as input once more.
pub(super) fn told(usage: &Usage) -> Value {
    let cached = usage.cached_tokens().unwrap_or(0);
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(cached), "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached, "output_tokens": usage.completion_tokens,
    })
}
