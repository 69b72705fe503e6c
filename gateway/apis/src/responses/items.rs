//! The items of an answer while they grow: a reasoning, a message, calls. What is streamed and what a whole
//! answer holds come from here alike.

use serde_json::{Value, json};

use super::names::{ToolNames, free_text};
use crate::{CallDelta, Said, event};

/// The items of one answer.
#[derive(Debug)]
pub(super) struct Items {
    /// In the ids of items and calls.
    random: String,
    names: ToolNames,
    /// The number of the next event, once there are events.
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
        call_id: String,
        name: String,
        is_custom: bool,
    },
}

impl Items {
    /// None yet, and no events of them.
    pub(super) fn new(names: ToolNames) -> Self {
        let random = format!("{:032x}", fastrand::u128(..));
        Self { random, names, sequence: None, open: None, done: Vec::new() }
    }

    /// From here on what becomes of them is told in events.
    pub(super) const fn stream(&mut self) {
        self.sequence = Some(0);
    }

    /// Whether it is.
    pub(super) const fn streams(&self) -> bool {
        self.sequence.is_some()
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
        event::write(out, name, &event);
    }

    pub(super) fn add(&mut self, out: &mut Vec<u8>, said: Said) {
        // A call that goes on does so before anything that follows it.
        let (going_on, beginning): (Vec<_>, Vec<_>) =
            said.calls.into_iter().partition(|call| self.is_at(call.index));
        for call in going_on {
            self.grow(out, &call.arguments);
        }
        if !said.reasoning.is_empty() {
            self.turn_to(out, Kind::Reasoning);
            self.grow(out, &said.reasoning);
        }
        if !said.content.is_empty() {
            self.turn_to(out, Kind::Message);
            self.grow(out, &said.content);
        }
        for call in beginning {
            if !self.is_at(call.index) {
                let kind = self.kind_of(&call);
                self.turn_to(out, kind);
            }
            self.grow(out, &call.arguments);
        }
    }

    /// Whether the item at hand is the call of this number.
    fn is_at(&self, call: usize) -> bool {
        let open = self.open.as_ref().map(|item| &item.kind);
        matches!(open, Some(Kind::Call { index, .. }) if *index == call)
    }

    fn kind_of(&self, call: &CallDelta) -> Kind {
        let name = call.name.clone().unwrap_or_default();
        let made = || format!("call_{}{:02x}", &self.random[..22], call.index);
        Kind::Call {
            index: call.index,
            call_id: call.id.clone().unwrap_or_else(made),
            is_custom: self.names.is_custom(&name),
            name,
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
            Kind::Call { call_id, name, is_custom, .. } => {
                let mut call: Value = self.names.told(name).into();
                call["call_id"] = call_id.as_str().into();
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
