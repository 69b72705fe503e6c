//! The items of a request's input as a chat's messages, as vLLM 0.32 puts them together
//! (`vllm/entrypoints/openai/responses/utils.py`), so that a prompt is the same by either API: a reasoning, a
//! text and calls in turn are one message of the assistant. `keyway_text` reads requests by the same rules.

use serde_json::{Map, Value, json};

use super::fields::{Fields, wrong};
use super::names::{free_text_arguments, in_namespace};
use super::parts::content;
use crate::Refusal;
use crate::ignored::Ignored;

/// Fields of an answer's items that are not the model's matter when they are sent back.
const OF_ANSWERS: [&str; 2] = ["id", "status"];

/// What a request says, as a chat.
#[derive(Debug, Default)]
pub(super) struct Messages {
    pub(super) messages: Vec<Value>,
    /// Whether the model is to go on with the last one.
    pub(super) continues: bool,
}

impl Messages {
    /// Of a request's instructions and its input.
    pub(super) fn of(
        instructions: Option<&str>,
        input: Value,
        ignored: &mut Ignored,
    ) -> Result<Self, Refusal> {
        let mut chat = Self::default();
        if let Some(text) = instructions.filter(|text| !text.is_empty()) {
            chat.say("system", text.into());
        }
        match input {
            Value::String(text) => chat.say("user", text.into()),
            Value::Array(items) => {
                chat.continues = items.last().is_some_and(is_unfinished);
                for (nth, item) in items.into_iter().enumerate() {
                    chat.add(Fields::of(format!("input[{nth}]"), item)?, ignored)?;
                }
            }
            other => return Err(wrong("input", "a string or an array of items", &other)),
        }
        Ok(chat)
    }

    fn say(&mut self, role: &str, content: Value) {
        self.messages.push(json!({"role": role, "content": content}));
    }

    fn add(&mut self, mut item: Fields, ignored: &mut Ignored) -> Result<(), Refusal> {
        let of = item.take_text("type")?;
        match of.as_deref() {
            Some("function_call") => {
                let name = item.need_text("name")?;
                let name = match item.take_text("namespace")?.filter(|space| !space.is_empty()) {
                    Some(space) => in_namespace(&space, &name),
                    None => name,
                };
                let arguments = item.need_text("arguments")?;
                self.call(item.need_text("call_id")?, &name, &arguments);
            }
            Some("custom_tool_call") => {
                let name = item.need_text("name")?;
                let text = item.take_text("input")?.unwrap_or_default();
                self.call(item.need_text("call_id")?, &name, &free_text_arguments(&text));
            }
            Some("function_call_output" | "custom_tool_call_output") => {
                let id = item.need_text("call_id")?;
                let output = item.take("output").ok_or_else(|| item.missing("output"))?;
                let output = content(&item.place("output"), output, ignored)?;
                self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": output}));
            }
            Some("reasoning") => {
                let text = reasoning(&mut item, ignored)?;
                // By the name that most engines read; vLLM takes it for its `reasoning`.
                self.add_to_last("reasoning_content", text);
            }
            None | Some("message") => self.message(&mut item, ignored)?,
            Some("item_reference") => return Err(reference(&item)),
            Some(_) => {
                let what = "is no kind of item that chats have: send messages, reasonings, calls and their \
                            outputs.";
                return Err(item.refusal("type", what));
            }
        }
        for name in OF_ANSWERS {
            item.take(name);
        }
        ignored.note_all("input", item.names());
        Ok(())
    }

    fn message(&mut self, item: &mut Fields, ignored: &mut Ignored) -> Result<(), Refusal> {
        let role = match item.take_text("role")? {
            Some(role) => role,
            None if item.take("id").is_some() => return Err(reference(item)),
            None => return Err(item.missing("role")),
        };
        let place = item.place("content");
        let said = item.take("content").ok_or_else(|| item.missing("content"))?;
        match &*role {
            "user" | "system" | "developer" => {
                let said = content(&place, said, ignored)?;
                self.say(&role, said);
            }
            "assistant" => {
                let text = match said {
                    Value::String(text) => text,
                    Value::Array(parts) => first_text(&place, parts, ignored)?,
                    other => return Err(wrong(&place, "a string or an array of parts", &other)),
                };
                self.add_to_last("content", text);
            }
            _ => return Err(item.refusal("role", "must be user, system, developer or assistant.")),
        }
        Ok(())
    }

    /// The assistant's message, if it is the last.
    fn last(&mut self) -> Option<&mut Map<String, Value>> {
        let last = self.messages.last_mut()?.as_object_mut()?;
        last.get("role").is_some_and(|role| role == "assistant").then_some(last)
    }

    /// Adds a text to what the assistant says, or begins what it says next.
    fn add_to_last(&mut self, field: &str, text: String) {
        match self.last().filter(|last| !last.contains_key(field)) {
            Some(last) => drop(last.insert(field.to_owned(), text.into())),
            None => self.messages.push(json!({"role": "assistant", field: text})),
        }
    }

    fn call(&mut self, id: String, name: &str, arguments: &str) {
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        match self.last() {
            Some(last) => match last.get_mut("tool_calls").and_then(Value::as_array_mut) {
                Some(calls) => calls.push(call),
                None => drop(last.insert("tool_calls".to_owned(), json!([call]))),
            },
            None => self.messages.push(json!({"role": "assistant", "tool_calls": [call]})),
        }
    }
}

/// An item that names one that was kept.
fn reference(item: &Fields) -> Refusal {
    item.refusal("id", "refers to an item, and nothing is kept between requests here: send the whole input.")
}

/// Whether an item is a message that the model is to go on with.
fn is_unfinished(item: &Value) -> bool {
    let of = item.get("type").map_or(Some("message"), Value::as_str);
    let status = item.get("status").and_then(Value::as_str);
    matches!(of, Some("message" | "reasoning")) && matches!(status, Some("in_progress" | "incomplete"))
}

/// The first of an assistant's texts: engines read no other.
fn first_text(place: &str, parts: Vec<Value>, ignored: &mut Ignored) -> Result<String, Refusal> {
    if parts.len() > 1 {
        ignored.note("input.content");
    }
    let first = parts.into_iter().next().unwrap_or_default();
    let mut part = Fields::of(format!("{place}[0]"), first)?;
    match part.take_text("refusal")? {
        Some(refusal) => Ok(refusal),
        None => part.need_text("text"),
    }
}

/// The text of a reasoning; that of its summary, if it has no other.
fn reasoning(item: &mut Fields, ignored: &mut Ignored) -> Result<String, Refusal> {
    if item.take_text("encrypted_content")?.is_some_and(|text| !text.is_empty()) {
        let what = "is for who encrypted it, and cannot be read here: leave the item out.";
        return Err(item.refusal("encrypted_content", what));
    }
    let summary = item.take_list("summary")?.unwrap_or_default();
    let content = item.take_list("content")?.unwrap_or_default();
    let (place, texts) =
        if content.is_empty() { (item.place("summary"), summary) } else { (item.place("content"), content) };
    if texts.is_empty() { Ok(String::new()) } else { first_text(&place, texts, ignored) }
}
