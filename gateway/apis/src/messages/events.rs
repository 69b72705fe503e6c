//! A message in Anthropic's events: a block of content begins, grows and ends before the next one begins. So
//! a call that is not complete is told to its end first, and what an engine says meanwhile waits.

use serde_json::{Value, json};

use super::answer::{Calls, Ending, MessageHead, usage};
use super::arguments::Arguments;
use crate::event::write;
use crate::{CallDelta, Counts, Finish, Said};

/// Tells one message.
#[derive(Debug)]
pub struct MessageEvents {
    head: MessageHead,
    has_begun: bool,
    /// The block at hand.
    open: Option<Block>,
    /// Blocks that have ended.
    ended: usize,
    /// Of the latest call.
    arguments: Option<Arguments>,
    /// What waits for the end of the call at hand.
    waiting: Said,
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
    /// Of a message that is not begun.
    pub fn new(head: MessageHead) -> Self {
        let waiting = Said::default();
        Self { head, has_begun: false, open: None, ended: 0, arguments: None, waiting }
    }

    /// Begins the message, with what is known of its prompt's tokens; does nothing the second time.
    pub fn begin(&mut self, out: &mut Vec<u8>, counts: Counts) {
        if std::mem::replace(&mut self.has_begun, true) {
            return;
        }
        let message = self.head.message(&[], None, Counts { answer: 0, ..counts });
        write(out, "message_start", &json!({"type": "message_start", "message": message}));
        write(out, "ping", &json!({"type": "ping"}));
    }

    /// Tells more of a message that is begun.
    pub fn say(&mut self, out: &mut Vec<u8>, said: Said) {
        let mut said = if self.waiting.is_empty() {
            said
        } else {
            append(&mut self.waiting, said);
            std::mem::take(&mut self.waiting)
        };
        self.go_on(out, &mut said.calls);
        if self.is_within_call() {
            self.waiting = said;
            return;
        }
        if !said.reasoning.is_empty() {
            let empty = json!({"type": "thinking", "thinking": "", "signature": ""});
            self.turn_to(out, Block::Thinking, &empty);
            self.grow(out, &json!({"type": "thinking_delta", "thinking": said.reasoning}));
        }
        if !said.content.is_empty() {
            self.turn_to(out, Block::Text, &json!({"type": "text", "text": ""}));
            self.grow(out, &json!({"type": "text_delta", "text": said.content}));
        }
        for call in said.calls {
            if self.open == Some(Block::Call(call.index)) {
                self.add_arguments(out, &call.arguments);
            } else if self.is_within_call() {
                self.waiting.calls.push(call);
            } else {
                self.begin_call(out, call);
            }
        }
    }

    /// Ends the message.
    pub fn end(&mut self, out: &mut Vec<u8>, finish: &Finish, counts: Counts) {
        self.begin(out, counts);
        while !self.waiting.is_empty() {
            self.close(out);
            let waiting = std::mem::take(&mut self.waiting);
            self.say(out, waiting);
        }
        if self.open.is_none() && self.ended == 0 {
            self.turn_to(out, Block::Text, &json!({"type": "text", "text": ""}));
        }
        self.close(out);
        let calls = match self.arguments {
            None => Calls::None,
            Some(last) if last.are_complete() => Calls::Complete,
            Some(_) => Calls::CutOff,
        };
        let (delta, usage) = (Ending::of(finish, calls).delta(), usage(counts));
        write(out, "message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage}));
        write(out, "message_stop", &json!({"type": "message_stop"}));
    }

    /// Whether the block at hand is a call whose arguments are not complete.
    fn is_within_call(&self) -> bool {
        let is_call = matches!(self.open, Some(Block::Call(_)));
        is_call && self.arguments.is_some_and(|arguments| !arguments.are_complete())
    }

    /// Tells, of all calls, more of the one at hand.
    fn go_on(&mut self, out: &mut Vec<u8>, calls: &mut Vec<CallDelta>) {
        let Some(Block::Call(at_hand)) = self.open else { return };
        calls.retain(|call| {
            let goes_on = call.index == at_hand;
            if goes_on {
                self.add_arguments(out, &call.arguments);
            }
            !goes_on
        });
    }

    /// Begins a call. One without a name is the rest of a call that was complete: it can be blank at most.
    fn begin_call(&mut self, out: &mut Vec<u8>, call: CallDelta) {
        let Some(name) = call.name else { return };
        let id = self.head.call_id(call.id.as_deref(), call.index);
        let empty = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
        self.turn_to(out, Block::Call(call.index), &empty);
        self.arguments = Some(Arguments::default());
        self.add_arguments(out, &call.arguments);
    }

    fn add_arguments(&mut self, out: &mut Vec<u8>, json: &str) {
        if !json.is_empty() {
            self.arguments.get_or_insert_default().push(json);
            self.grow(out, &json!({"type": "input_json_delta", "partial_json": json}));
        }
    }

    /// Begins a block, unless it is the one at hand.
    fn turn_to(&mut self, out: &mut Vec<u8>, block: Block, content: &Value) {
        if self.open == Some(block) {
            return;
        }
        self.close(out);
        self.open = Some(block);
        let event = json!({"type": "content_block_start", "index": self.ended, "content_block": content});
        write(out, "content_block_start", &event);
    }

    fn grow(&self, out: &mut Vec<u8>, delta: &Value) {
        let event = json!({"type": "content_block_delta", "index": self.ended, "delta": delta});
        write(out, "content_block_delta", &event);
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        let Some(block) = self.open.take() else { return };
        if block == Block::Thinking {
            self.grow(out, &json!({"type": "signature_delta", "signature": self.head.signature()}));
        }
        write(out, "content_block_stop", &json!({"type": "content_block_stop", "index": self.ended}));
        self.ended += 1;
    }
}

/// Appends the event of an error, which is the last of its stream.
pub fn write_error(out: &mut Vec<u8>, error: &Value) {
    write(out, "error", error);
}

fn append(said: &mut Said, more: Said) {
    said.reasoning.push_str(&more.reasoning);
    said.content.push_str(&more.content);
    for more in more.calls {
        match said.calls.iter_mut().find(|call| call.index == more.index) {
            Some(call) => {
                call.arguments.push_str(&more.arguments);
                call.id = call.id.take().or(more.id);
                call.name = call.name.take().or(more.name);
            }
            None => said.calls.push(more),
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
