//! One chunk of an engine's stream, looked at: its text, whether it ends the answer, what it counts, and what
//! no text says.

use std::borrow::Cow;

use serde::Deserialize;

use crate::{json::Value, metrics::Obstacle};

#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Counts {
    #[serde(default)]
    pub(super) prompt_tokens: u64,
    #[serde(default)]
    pub(super) completion_tokens: u64,
}

/// One chunk, looked at.
#[derive(Debug, Default)]
pub(super) struct Seen<'a> {
    pub(super) id: Option<&'a str>,
    pub(super) created: Option<&'a str>,
    pub(super) text: Option<Cow<'a, str>>,
    pub(super) ends: bool,
    pub(super) counts: Option<Counts>,
    pub(super) has_choice: bool,
    pub(super) error: bool,
    pub(super) obstacle: Option<Obstacle>,
}

impl<'a> Seen<'a> {
    /// `None` if it is no object.
    pub(super) fn of(data: &'a str) -> Option<Self> {
        let mut seen = Self::default();
        for field in Value::document(data)? {
            let (name, value) = field.ok()?;
            match &*name {
                "id" => seen.id = Some(value.raw()),
                "created" => seen.created = Some(value.raw()),
                "choices" => seen.choices(value),
                "usage" => seen.counts = serde_json::from_str(value.raw()).ok(),
                "error" => seen.error = value.raw() != "null",
                _ => {}
            }
        }
        Some(seen)
    }

    fn choices(&mut self, choices: Value<'a>) {
        let mut choices = choices.items().into_iter().flatten().map_while(Result::ok);
        let fields = choices.next().and_then(Value::fields);
        self.has_choice = fields.is_some();
        if choices.next().is_some() {
            self.obstacle = Some(Obstacle::Choices);
        }
        for (name, value) in fields.into_iter().flatten().map_while(Result::ok) {
            match &*name {
                "text" => self.text = value.text(),
                "finish_reason" => self.ends = value.raw() != "null",
                "delta" => self.delta(value),
                _ => {}
            }
        }
    }

    fn delta(&mut self, delta: Value<'a>) {
        for (name, value) in delta.fields().into_iter().flatten().map_while(Result::ok) {
            let given = !matches!(value.raw(), "null" | "\"\"" | "[]");
            match &*name {
                "content" => self.text = value.text(),
                // The template has its own place for a thought, and for a call, and neither can be left
                // half-way.
                "reasoning_content" | "reasoning" if given => self.obstacle = Some(Obstacle::Thoughts),
                "tool_calls" | "function_call" if given => self.obstacle = Some(Obstacle::Tools),
                _ => {}
            }
        }
    }
}
