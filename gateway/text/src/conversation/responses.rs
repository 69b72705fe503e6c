//! The body of OpenAI's `/v1/responses`, as vLLM turns it into a chat
//! (`vllm/entrypoints/openai/responses/utils.py`). Several items may come to one message: a reasoning, a text
//! and calls in turn are what the assistant said at once.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Conversation, ConversationError, Ending, message, take, take_text, tools};
use crate::{Field, Message};

/// As far as its prompt depends on it.
#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    input: Field<'a>,
    #[serde(borrow)]
    instructions: Option<Cow<'a, str>>,
    tools: Option<Vec<Value>>,
    reasoning: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    previous_response_id: Option<Value>,
    previous_input_messages: Option<Value>,
    prompt: Option<Value>,
}

const UNSUPPORTED: ConversationError = ConversationError::Unsupported("an item of no known type");

impl<'a> Conversation<'a> {
    /// Of a request to `/v1/responses`.
    ///
    /// # Errors
    /// It is no such request, or goes on from what its engine has stored.
    pub fn from_responses(body: &'a [u8]) -> Result<Self, ConversationError> {
        let body: Body<'_> = serde_json::from_slice(body)
            .map_err(|_| ConversationError::Unsupported("no responses request"))?;
        let elsewhere = [&body.previous_response_id, &body.previous_input_messages, &body.prompt];
        if elsewhere.into_iter().flatten().any(|value| !value.is_null()) {
            return Err(ConversationError::Unsupported("what its engine has stored"));
        }
        let mut messages = Vec::new();
        if let Some(text) = body.instructions.filter(|text| !text.is_empty()) {
            messages.push(said("system", Field::Text(text)));
        }
        let mut ending = Ending::OpensAnswer;
        match body.input {
            Field::Text(text) => messages.push(said("user", Field::Text(text))),
            items @ Field::Other(_) => {
                let items = items.into_items().ok_or(UNSUPPORTED)?;
                if items.last().is_some_and(is_unfinished) {
                    ending = Ending::ContinuesLast;
                }
                let mut input = Vec::with_capacity(items.len());
                for item in items {
                    let Value::Object(item) = item else { return Err(UNSUPPORTED) };
                    add_item(item, &mut input)?;
                }
                messages.append(&mut input);
            }
        }
        let mut chat = Self::of(messages);
        chat.ending = ending;
        let given = body.tools.filter(|tools| !tools.is_empty());
        chat.tools = given.map(tools::responses_tools).transpose()?;
        chat.variables = body.chat_template_kwargs.unwrap_or_default();
        chat.reason(body.reasoning.as_ref().and_then(|reasoning| reasoning.get("effort")));
        Ok(chat)
    }
}

fn said<'a>(role: &'static str, content: Field<'a>) -> Message<'a> {
    message([("role", Field::Text(role.into())), ("content", content)])
}

/// Whether an item is a message that the model is to go on with.
fn is_unfinished(item: &Value) -> bool {
    let of = item.get("type").map_or(Some("message"), Value::as_str);
    let status = item.get("status").and_then(Value::as_str);
    matches!(of, Some("message" | "reasoning")) && matches!(status, Some("in_progress" | "incomplete"))
}

/// Adds an item: a message of its own, or a part of the last, where that is the assistant's.
fn add_item(mut item: Map<String, Value>, messages: &mut Vec<Message<'_>>) -> Result<(), ConversationError> {
    let of = item.remove("type").unwrap_or_default();
    let role = take_text(&mut item, "role")?;
    match (of.as_str(), role.as_deref()) {
        (Some("function_call"), _) => {
            let name = take_text(&mut item, "name")?.ok_or(UNSUPPORTED)?;
            let name = match take_text(&mut item, "namespace")?.filter(|space| !space.is_empty()) {
                Some(space) => tools::in_namespace(&space, &name),
                None => name,
            };
            let arguments = take_text(&mut item, "arguments")?.ok_or(UNSUPPORTED)?;
            add_call(&mut item, &name, arguments.into(), messages)
        }
        (Some("custom_tool_call"), _) => {
            let name = take_text(&mut item, "name")?.ok_or(UNSUPPORTED)?;
            let text = take_text(&mut item, "input")?.unwrap_or_default();
            add_call(&mut item, &name, tools::free_text_arguments(text), messages)
        }
        (Some("reasoning"), _) => {
            add_to_last("reasoning", reasoning(item)?, messages);
            Ok(())
        }
        (Some("function_call_output" | "custom_tool_call_output"), _) => {
            let id = take_text(&mut item, "call_id")?.ok_or(UNSUPPORTED)?;
            let mut answer = said("tool", item.remove("output").unwrap_or_default().into());
            answer.set("tool_call_id", Field::Text(id.into()));
            messages.push(answer);
            Ok(())
        }
        (None | Some("message"), Some("assistant")) => {
            // Of several texts an engine takes the first.
            let text = match item.remove("content") {
                Some(Value::String(text)) => Some(text),
                Some(Value::Array(mut parts)) => {
                    parts.first_mut().and_then(|part| match part.get_mut("text").map(Value::take) {
                        Some(Value::String(text)) => Some(text),
                        _ => None,
                    })
                }
                _ => return Err(UNSUPPORTED),
            };
            add_to_last("content", text.ok_or(UNSUPPORTED)?, messages);
            Ok(())
        }
        (None | Some("message"), Some(role @ ("user" | "system" | "developer"))) => {
            let content: Field<'static> = item.remove("content").unwrap_or_default().into();
            let role = Field::Text(role.to_owned().into());
            messages.push(message([("role", role), ("content", content)]));
            Ok(())
        }
        _ => Err(UNSUPPORTED),
    }
}

/// Adds a text to what the assistant says, or begins what it says next.
fn add_to_last(field: &'static str, text: String, messages: &mut Vec<Message<'_>>) {
    match messages.last_mut().filter(|last| is_assistant(last)) {
        Some(last) if last.get(field).is_none() => last.set(field, Field::Text(text.into())),
        _ => messages
            .push(message([("role", Field::Text("assistant".into())), (field, Field::Text(text.into()))])),
    }
}

fn add_call(
    item: &mut Map<String, Value>,
    name: &str,
    arguments: Value,
    messages: &mut Vec<Message<'_>>,
) -> Result<(), ConversationError> {
    let id = take_text(item, "call_id")?.ok_or(UNSUPPORTED)?;
    let call = json!({ "id": id, "function": { "name": name, "arguments": arguments }, "type": "function" });
    let last = messages.last_mut().filter(|last| is_assistant(last));
    match last {
        Some(last) => match last.get_mut("tool_calls").and_then(Field::items_mut) {
            Some(calls) => calls.push(call),
            None => last.set("tool_calls", Field::Other(Cow::Owned(json!([call])))),
        },
        None => messages.push(message([
            ("role", Field::Text("assistant".into())),
            ("tool_calls", Field::Other(Cow::Owned(json!([call])))),
        ])),
    }
    Ok(())
}

fn is_assistant(message: &Message<'_>) -> bool {
    matches!(message.get("role"), Some(Field::Text(role)) if role == "assistant")
}

/// The text of a reasoning; that of its summary, if it has no other.
fn reasoning(mut item: Map<String, Value>) -> Result<String, ConversationError> {
    if take_text(&mut item, "encrypted_content")?.is_some_and(|text| !text.is_empty()) {
        return Err(ConversationError::Unsupported("a reasoning that is encrypted"));
    }
    let Some(Value::Array(summary)) = take(&mut item, "summary") else { return Err(UNSUPPORTED) };
    let content = match take(&mut item, "content") {
        Some(Value::Array(content)) if !content.is_empty() => content,
        None | Some(Value::Array(_)) => summary,
        Some(_) => return Err(UNSUPPORTED),
    };
    match content.into_iter().next() {
        None => Ok(String::new()),
        Some(mut first) => match first.get_mut("text").map(Value::take) {
            Some(Value::String(text)) => Ok(text),
            _ => Err(UNSUPPORTED),
        },
    }
}
