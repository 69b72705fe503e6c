//! A message in Anthropic's events: a block of content begins, grows and ends before the next one begins.

use serde_json::{Value, json};

use super::answer::{Ending, MessageHead, told};
use crate::answer::answer_format::CallDelta;
use crate::answer::reader::Shown;
use crate::api::error::ApiError;
use crate::api::request::Call;
use crate::api::running::{Running, usage_of};
use crate::api::stream::{Events, write_named};

/// Tells one message.
#[derive(Debug)]
pub(in crate::api) struct MessageEvents {
    head: MessageHead,
    has_begun: bool,
    /// The block at hand.
    open: Option<Block>,
    /// Blocks that have ended.
    ended: usize,
}

/// A block that may still grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    /// The call of this number.
    Call(usize),
}

impl MessageEvents {
    pub(in crate::api) fn new(call: &Call) -> Self {
        Self { head: MessageHead::new(call), has_begun: false, open: None, ended: 0 }
    }

    /// Begins a block, unless it is the one at hand.
    fn turn_to(&mut self, out: &mut Vec<u8>, block: Block, content: &Value) {
        if self.open == Some(block) {
            return;
        }
        self.close(out);
        self.open = Some(block);
        let event = json!({"type": "content_block_start", "index": self.ended, "content_block": content});
        write_named(out, "content_block_start", &event);
    }

    fn grow(&self, out: &mut Vec<u8>, delta: &Value) {
        let event = json!({"type": "content_block_delta", "index": self.ended, "delta": delta});
        write_named(out, "content_block_delta", &event);
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        let Some(block) = self.open.take() else { return };
        if block == Block::Thinking {
            self.grow(out, &json!({"type": "signature_delta", "signature": self.head.signature()}));
        }
        write_named(out, "content_block_stop", &json!({"type": "content_block_stop", "index": self.ended}));
        self.ended += 1;
    }

    fn add(&mut self, out: &mut Vec<u8>, text: Shown) {
        // A call that goes on does so before anything that follows it.
        let goes_on = |call: &CallDelta| self.open == Some(Block::Call(call.index));
        let (going_on, beginning): (Vec<_>, Vec<_>) = text.calls.into_iter().partition(goes_on);
        for call in going_on {
            self.grow(out, &json!({"type": "input_json_delta", "partial_json": call.arguments}));
        }
        if !text.reasoning.is_empty() {
            let empty = json!({"type": "thinking", "thinking": "", "signature": ""});
            self.turn_to(out, Block::Thinking, &empty);
            self.grow(out, &json!({"type": "thinking_delta", "thinking": text.reasoning}));
        }
        if !text.content.is_empty() {
            self.turn_to(out, Block::Text, &json!({"type": "text", "text": ""}));
            self.grow(out, &json!({"type": "text_delta", "text": text.content}));
        }
        for call in beginning {
            let id = self.head.call_id(call.index);
            let empty = json!({"type": "tool_use", "id": id, "name": call.name, "input": {}});
            self.turn_to(out, Block::Call(call.index), &empty);
            if !call.arguments.is_empty() {
                self.grow(out, &json!({"type": "input_json_delta", "partial_json": call.arguments}));
            }
        }
    }

    /// Begins the message, once its prompt's tokens are known to be cached or not.
    fn begin_message(&mut self, out: &mut Vec<u8>, choices: &[Running]) {
        if std::mem::replace(&mut self.has_begun, true) {
            return;
        }
        let mut usage = told(&usage_of(choices));
        usage["output_tokens"] = 0.into();
        let message = self.head.message(&[], None, &usage);
        write_named(out, "message_start", &json!({"type": "message_start", "message": message}));
        write_named(out, "ping", &json!({"type": "ping"}));
    }
}

impl Events for MessageEvents {
    fn say(&mut self, out: &mut Vec<u8>, choices: &mut [Running], _index: usize, text: Shown) {
        self.begin_message(out, choices);
        self.add(out, text);
    }

    fn end(&mut self, out: &mut Vec<u8>, choices: &mut [Running]) {
        self.begin_message(out, choices);
        if self.open.is_none() && self.ended == 0 {
            self.turn_to(out, Block::Text, &json!({"type": "text", "text": ""}));
        }
        self.close(out);
        let ending = choices.first().map(|choice| Ending::of(&choice.output, choice.has_calls));
        let delta = json!({
            "stop_reason": ending.map(|ending| ending.reason),
            "stop_sequence": ending.and_then(|ending| ending.sequence),
        });
        let usage = told(&usage_of(choices));
        write_named(out, "message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage}));
        write_named(out, "message_stop", &json!({"type": "message_stop"}));
    }

    fn fail(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        write_named(out, "error", &super::told(error));
    }
}
