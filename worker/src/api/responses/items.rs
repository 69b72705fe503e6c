//! The items of an answer while they grow: a reasoning, a message, calls. What is streamed and what a whole
//! answer holds come from here alike.

use serde_json::{Value, json};

use super::names::{ToolNames, free_text};
use crate::answer::answer_format::CallDelta;
use crate::answer::reader::Shown;
use crate::api::stream::write_named;

/// The items of one answer.
#[derive(Debug)]
pub(super) struct Items {
    /// In the ids of items and calls.
    random: String,
    names: ToolNames,
    /// The number of the next event, where there are events.
    sequence: Option<u64>,
    open: Option<Item>,
    done: Vec<Value>,
}

/// An item that may still grow.
#[derive(Debug)]
struct Item {
    kind: Kind,
    id: String,
    text: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    /// The call of this number.
    Call {
        index: usize,
        name: String,
        is_custom: bool,
    },
}

impl Items {
    /// None yet. `streams`: whether their growth is told in events.
    pub(super) fn new(names: ToolNames, streams: bool) -> Self {
        let random = format!("{:032x}", fastrand::u128(..));
        Self { random, names, sequence: streams.then_some(0), open: None, done: Vec::new() }
    }

    pub(super) fn done(&self) -> &[Value] {
        &self.done
    }

    /// Appends an event of this name, with a number of its own.
    pub(super) fn tell(&mut self, out: &mut Vec<u8>, name: &str, fields: Value) {
        let Some(sequence) = &mut self.sequence else { return };
        let mut event = json!({"type": name, "sequence_number": *sequence});
        if let (Value::Object(event), Value::Object(fields)) = (&mut event, fields) {
            event.extend(fields);
        }
        *sequence += 1;
        write_named(out, name, &event);
    }

    pub(super) fn add(&mut self, out: &mut Vec<u8>, text: Shown) {
        // A call that goes on does so before anything that follows it.
        let goes_on = |call: &CallDelta| match self.open.as_ref().map(|item| &item.kind) {
            Some(Kind::Call { index, .. }) => *index == call.index,
            _ => false,
        };
        let (going_on, beginning): (Vec<_>, Vec<_>) = text.calls.into_iter().partition(goes_on);
        for call in going_on {
            self.grow(out, &call.arguments);
        }
        if !text.reasoning.is_empty() {
            self.turn_to(out, Kind::Reasoning);
            self.grow(out, &text.reasoning);
        }
        if !text.content.is_empty() {
            self.turn_to(out, Kind::Message);
            self.grow(out, &text.content);
        }
        for call in beginning {
            let name = call.name.unwrap_or_default();
            let is_custom = self.names.is_custom(&name);
            self.turn_to(out, Kind::Call { index: call.index, name, is_custom });
            self.grow(out, &call.arguments);
        }
    }

    /// Begins an item, unless it is the one at hand.
    fn turn_to(&mut self, out: &mut Vec<u8>, kind: Kind) {
        if self.open.as_ref().is_some_and(|item| item.kind == kind) {
            return;
        }
        self.close(out, "completed");
        let id = format!("{}_{}{:02x}", kind.prefix(), &self.random[..30], self.done.len());
        let item = Item { kind, id, text: String::new() };
        let begun = self.told(&item, "in_progress");
        self.tell(out, "response.output_item.added", json!({"output_index": self.done.len(), "item": begun}));
        if let Some(part) = item.part() {
            let fields = self.at(&item, "part", part);
            self.tell(out, "response.content_part.added", fields);
        }
        self.open = Some(item);
    }

    fn grow(&mut self, out: &mut Vec<u8>, text: &str) {
        let Some(mut item) = self.open.take() else { return };
        item.text.push_str(text);
        // Free text can be read once its call is complete.
        if !item.is_custom() && !text.is_empty() {
            let name = format!("response.{}.delta", item.kind.event());
            let fields = self.at(&item, "delta", text.into());
            self.tell(out, &name, fields);
        }
        self.open = Some(item);
    }

    /// Ends the item at hand.
    pub(super) fn close(&mut self, out: &mut Vec<u8>, status: &str) {
        let Some(item) = self.open.take() else { return };
        let name = format!("response.{}", item.kind.event());
        let (field, whole) = match &item.kind {
            Kind::Reasoning | Kind::Message => ("text", item.text.clone()),
            Kind::Call { is_custom: false, .. } => ("arguments", item.text.clone()),
            Kind::Call { is_custom: true, .. } => {
                let text = free_text(&item.text);
                let fields = self.at(&item, "delta", text.as_str().into());
                self.tell(out, &format!("{name}.delta"), fields);
                ("input", text)
            }
        };
        let mut fields = self.at(&item, field, whole.into());
        if let Kind::Call { name, is_custom: false, .. } = &item.kind {
            fields["name"] = self.names.told(name)["name"].clone();
        }
        self.tell(out, &format!("{name}.done"), fields);
        if let Some(part) = item.part() {
            let fields = self.at(&item, "part", part);
            self.tell(out, "response.content_part.done", fields);
        }
        let told = self.told(&item, status);
        self.tell(out, "response.output_item.done", json!({"output_index": self.done.len(), "item": told}));
        self.done.push(told);
    }

    /// The fields of an event that say where it belongs, and one more.
    fn at(&self, item: &Item, name: &str, value: Value) -> Value {
        let mut fields = json!({"item_id": item.id, "output_index": self.done.len()});
        if !matches!(item.kind, Kind::Call { .. }) {
            fields["content_index"] = 0.into();
        }
        if item.kind == Kind::Message && name != "part" {
            fields["logprobs"] = json!([]);
        }
        fields[name] = value;
        fields
    }

    /// An item as clients read it.
    fn told(&self, item: &Item, status: &str) -> Value {
        let content = || if status == "in_progress" { None } else { item.part() };
        let content = || content().map_or_else(|| json!([]), |part| json!([part]));
        let mut told = json!({"id": item.id, "type": item.kind.of_item(), "status": status});
        let more = match &item.kind {
            Kind::Reasoning => json!({"summary": [], "content": content()}),
            Kind::Message => json!({"role": "assistant", "content": content()}),
            Kind::Call { index, name, is_custom } => {
                let mut call: Value = self.names.told(name).into();
                call["call_id"] = format!("call_{}{index:02x}", &self.random[..22]).into();
                let (field, text) = match is_custom {
                    true if item.text.is_empty() => ("input", String::new()),
                    true => ("input", free_text(&item.text)),
                    false => ("arguments", item.text.clone()),
                };
                call[field] = text.into();
                call
            }
        };
        if let (Value::Object(told), Value::Object(more)) = (&mut told, more) {
            told.extend(more);
        }
        told
    }
}

impl Item {
    const fn is_custom(&self) -> bool {
        matches!(self.kind, Kind::Call { is_custom: true, .. })
    }

    /// The part of its content that it has, unless it is a call.
    fn part(&self) -> Option<Value> {
        match self.kind {
            Kind::Reasoning => Some(json!({"type": "reasoning_text", "text": self.text})),
            Kind::Message => {
                Some(json!({"type": "output_text", "annotations": [], "logprobs": [], "text": self.text}))
            }
            Kind::Call { .. } => None,
        }
    }
}

impl Kind {
    const fn prefix(&self) -> &'static str {
        match self {
            Self::Reasoning => "rs",
            Self::Message => "msg",
            Self::Call { is_custom: false, .. } => "fc",
            Self::Call { is_custom: true, .. } => "ctc",
        }
    }

    const fn of_item(&self) -> &'static str {
        match self {
            Self::Reasoning => "reasoning",
            Self::Message => "message",
            Self::Call { is_custom: false, .. } => "function_call",
            Self::Call { is_custom: true, .. } => "custom_tool_call",
        }
    }

    /// What the events of its growth are called.
    const fn event(&self) -> &'static str {
        match self {
            Self::Reasoning => "reasoning_text",
            Self::Message => "output_text",
            Self::Call { is_custom: false, .. } => "function_call_arguments",
            Self::Call { is_custom: true, .. } => "custom_tool_call_input",
        }
    }
}
