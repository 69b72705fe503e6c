//! The body of Anthropic's `/v1/messages`, as vLLM turns it into a chat
//! (`vllm/entrypoints/anthropic/serving.py`).

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{BILLING, Conversation, ConversationError, TemplateTraits, message, take, take_text, tools};
use crate::{ChatTemplate, Field, Message};

/// As far as its prompt depends on it.
#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    messages: Vec<Message<'a>>,
    #[serde(borrow)]
    system: Option<Field<'a>>,
    tools: Option<Vec<Value>>,
    thinking: Option<Value>,
    output_config: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

const UNSUPPORTED: ConversationError = ConversationError::Unsupported("a content of no kind");

impl<'a> Conversation<'a> {
    /// Of a request to `/v1/messages`, as vLLM reads it. What the system says among the messages stays where
    /// it is, unless the template takes it in front alone.
    ///
    /// # Errors
    /// It is no such request.
    pub fn from_messages(body: &'a [u8], template: &ChatTemplate) -> Result<Self, ConversationError> {
        Self::of_messages(body, template.traits(), template.traits().system_comes_first)
    }

    /// The same with what the system says always where it is. Where the template does not show it there, the
    /// messages are those that `reminding` makes of them.
    ///
    /// # Errors
    /// It is no such request.
    pub fn from_messages_in_place(
        body: &'a [u8],
        template: &ChatTemplate,
        reminding: impl FnOnce(Vec<Message<'a>>) -> Vec<Message<'a>>,
    ) -> Result<Self, ConversationError> {
        let mut chat = Self::of_messages(body, template.traits(), false)?;
        if !template.traits().shows_late_systems {
            chat.messages = reminding(chat.messages);
        }
        Ok(chat)
    }

    fn of_messages(
        body: &'a [u8],
        traits: &TemplateTraits,
        moves_in_front: bool,
    ) -> Result<Self, ConversationError> {
        let mut body: Body<'_> = serde_json::from_slice(body)
            .map_err(|_| ConversationError::Unsupported("no messages request"))?;
        let tools = tools_in_effect(body.tools, &body.messages)?;
        let mut system = Vec::new();
        if let Some(field) = body.system.take() {
            // A text of its own goes on as it is; that of a chat's system is looked at again.
            let is_text = matches!(field, Field::Text(_));
            system_texts(field, &mut system)?;
            system.retain(|text| is_text || !text.starts_with(BILLING));
        }
        let mut messages = Vec::with_capacity(body.messages.len() + 1);
        for mut said in body.messages {
            let Some(Field::Text(role)) = said.take("role") else { return Err(UNSUPPORTED) };
            let content = said.take("content").ok_or(UNSUPPORTED)?;
            match &*role {
                "system" => {
                    let mut texts = Vec::new();
                    system_texts(content, &mut texts)?;
                    texts.retain(|text| !text.starts_with(BILLING));
                    if moves_in_front {
                        system.append(&mut texts);
                    } else if let Some(text) = joined(texts) {
                        messages.push(message([("role", Field::Text(role)), ("content", Field::Text(text))]));
                    }
                }
                "user" | "assistant" => said_by(role, content, &mut messages)?,
                _ => return Err(ConversationError::Unsupported("a role of no kind")),
            }
        }
        if let Some(text) = joined(system) {
            let role = Field::Text("system".into());
            messages.insert(0, message([("role", role), ("content", Field::Text(text))]));
        }
        let mut chat = Self::of(messages);
        chat.tools = tools;
        chat.variables = body.chat_template_kwargs.unwrap_or_default();
        let no_thinking = body.thinking.is_some_and(|thinking| thinking["type"] == "disabled");
        if no_thinking {
            chat.reason(Some(&traits.effort_without_thinking.into()));
        } else {
            chat.reason(body.output_config.as_ref().and_then(|config| config.get("effort")));
        }
        Ok(chat)
    }
}

/// Texts as one; `None` if there is none to speak of.
fn joined(mut texts: Vec<Cow<'_, str>>) -> Option<Cow<'_, str>> {
    let text = if texts.len() == 1 { texts.pop()? } else { Cow::Owned(texts.concat()) };
    Some(text).filter(|text| !text.is_empty())
}

/// The texts of what the system says.
fn system_texts<'a>(content: Field<'a>, texts: &mut Vec<Cow<'a, str>>) -> Result<(), ConversationError> {
    match content {
        Field::Text(text) => texts.push(text),
        parts @ Field::Other(_) => {
            for block in parts.into_items().ok_or(UNSUPPORTED)? {
                let Value::Object(mut block) = block else { return Err(UNSUPPORTED) };
                let is_text = block.get("type").is_some_and(|of| of == "text");
                let text = take_text(&mut block, "text")?.filter(|_| is_text).unwrap_or_default();
                if !text.is_empty() {
                    texts.push(Cow::Owned(text));
                }
            }
        }
    }
    Ok(())
}

/// What a message's blocks come to.
#[derive(Default)]
struct Blocks {
    parts: Vec<Value>,
    calls: Vec<Value>,
    reasoning: Option<String>,
}

/// Adds what a user or the assistant said. What tools answered comes in messages of its own, before the rest
/// of its message.
fn said_by<'a>(
    role: Cow<'a, str>,
    content: Field<'a>,
    messages: &mut Vec<Message<'a>>,
) -> Result<(), ConversationError> {
    let blocks = match content {
        Field::Text(_) => {
            messages.push(message([("role", Field::Text(role)), ("content", content)]));
            return Ok(());
        }
        blocks @ Field::Other(_) => blocks.into_items().ok_or(UNSUPPORTED)?,
    };
    let mut all = Blocks::default();
    for block in blocks {
        let Value::Object(block) = block else { return Err(UNSUPPORTED) };
        take_block(block, &role, &mut all, messages)?;
    }
    let Blocks { mut parts, calls, reasoning } = all;
    if role == "user" && parts.is_empty() {
        return Ok(());
    }
    let mut said = message([("role", Field::Text(role))]);
    match parts.len() {
        0 => {}
        1 if parts[0]["type"] == "text" => {
            let Some(Value::String(text)) = parts.pop().map(|mut part| part["text"].take()) else {
                return Err(UNSUPPORTED);
            };
            said.set("content", Field::Text(text.into()));
        }
        _ => said.set("content", Field::Other(Cow::Owned(parts.into()))),
    }
    if !calls.is_empty() {
        said.set("tool_calls", Field::Other(Cow::Owned(calls.into())));
    }
    if let Some(reasoning) = reasoning {
        said.set("reasoning", Field::Text(reasoning.into()));
    }
    messages.push(said);
    Ok(())
}

fn take_block(
    mut block: Map<String, Value>,
    role: &str,
    all: &mut Blocks,
    messages: &mut Vec<Message<'_>>,
) -> Result<(), ConversationError> {
    let of = block.remove("type").unwrap_or_default();
    match of.as_str().unwrap_or_default() {
        "text" => {
            let text = take_text(&mut block, "text")?.unwrap_or_default();
            if !text.is_empty() {
                all.parts.push(json!({ "type": "text", "text": text }));
            }
        }
        "image" => {
            if take(&mut block, "source").is_some() {
                all.parts.push(image());
            }
        }
        "thinking" => {
            if let Some(text) = take_text(&mut block, "thinking")? {
                all.reasoning.get_or_insert_default().push_str(&text);
            }
        }
        "tool_use" => all.calls.push(call(block)?),
        "tool_result" if role == "user" => tool_result(block, messages)?,
        "tool_result" => match take(&mut block, "content") {
            None => all.parts.push(json!({ "type": "text", "text": "Tool result: " })),
            Some(Value::String(text)) => {
                all.parts.push(json!({ "type": "text", "text": format!("Tool result: {text}") }));
            }
            Some(_) => return Err(ConversationError::Unsupported("an assistant's result in parts")),
        },
        "redacted_thinking" | "tool_reference" => {}
        _ => {
            return Err(ConversationError::Unsupported(
                "a block that is no text, image, thought, call or result",
            ));
        }
    }
    Ok(())
}

fn image() -> Value {
    json!({ "type": "image_url" })
}

fn call(mut block: Map<String, Value>) -> Result<Value, ConversationError> {
    // An engine makes up an id where there is none.
    let id = take_text(&mut block, "id")?.ok_or(ConversationError::Unsupported("a call without an id"))?;
    let name = take_text(&mut block, "name")?.unwrap_or_default();
    let arguments = take(&mut block, "input").unwrap_or_else(|| Value::Object(Map::new()));
    Ok(json!({ "id": id, "function": { "arguments": arguments, "name": name }, "type": "function" }))
}

/// What a tool answered: its text, its images in a message behind it, the tools that it names in another.
fn tool_result<'a>(
    mut block: Map<String, Value>,
    messages: &mut Vec<Message<'a>>,
) -> Result<(), ConversationError> {
    let id = take_text(&mut block, "tool_use_id")?.unwrap_or_default();
    let (mut text, mut images, mut references) = (String::new(), Vec::new(), Vec::new());
    match take(&mut block, "content") {
        None => {}
        Some(Value::String(content)) => text = content,
        Some(Value::Array(items)) => {
            let mut texts = Vec::new();
            for item in items {
                let Value::Object(mut item) = item else { return Err(UNSUPPORTED) };
                match item.remove("type").unwrap_or_default().as_str() {
                    Some("text") => texts.push(take_text(&mut item, "text")?.unwrap_or_default()),
                    Some("image") => images.push(image()),
                    Some("tool_reference") => {
                        let name = take_text(&mut item, "tool_name")?.filter(|name| !name.is_empty());
                        let name =
                            name.map_or_else(|| take_text(&mut item, "name"), |name| Ok(Some(name)))?;
                        let named = name.filter(|name| !name.is_empty());
                        references
                            .extend(named.map(|name| json!({ "type": "tool_reference", "name": name })));
                    }
                    _ => {}
                }
            }
            text = texts.join("\n");
        }
        Some(_) => return Err(UNSUPPORTED),
    }
    let by_tool = |content: Field<'a>| {
        let (role, id) = (Field::Text("tool".into()), Field::Text(id.clone().into()));
        message([("role", role), ("tool_call_id", id), ("content", content)])
    };
    messages.push(by_tool(Field::Text(text.into())));
    if !images.is_empty() {
        let role = Field::Text("user".into());
        messages.push(message([("role", role), ("content", Field::Other(Cow::Owned(images.into())))]));
    }
    if !references.is_empty() {
        messages.push(by_tool(Field::Other(Cow::Owned(references.into()))));
    }
    Ok(())
}

/// The tools at the end of the conversation: those that the request has, with what the system added and
/// removed among the messages.
fn tools_in_effect(
    declared: Option<Vec<Value>>,
    said: &[Message<'_>],
) -> Result<Option<Vec<Value>>, ConversationError> {
    let changes = said.iter().filter_map(|message| message.get("content")?.items()).flatten();
    let is_change = |block: &&Value| block["type"] == "tool_addition" || block["type"] == "tool_removal";
    let changes: Vec<&Value> = changes.filter(is_change).collect();
    if changes.is_empty() {
        let functions = |tools: Vec<Value>| tools.into_iter().map(tools::of_anthropic).collect();
        return declared.map(functions).transpose();
    }
    let unknown = || ConversationError::Unsupported("a change of a tool that is not there");
    let mut named: Map<String, Value> = Map::new();
    for tool in declared.unwrap_or_default() {
        let name = tool["name"].as_str().ok_or_else(unknown)?.to_owned();
        named.insert(name, tool);
    }
    let mut removed = std::collections::HashSet::new();
    for block in changes {
        let change = &block["tool"];
        let definition = change.get("definition").filter(|_| change["type"] == "tool_definition");
        let of = definition.unwrap_or(change);
        let name = of["name"].as_str().ok_or_else(unknown)?;
        if let Some(definition) = definition {
            named.insert(name.to_owned(), definition.clone());
        } else {
            let tool = named.get_mut(name).ok_or_else(unknown)?;
            if block["type"] == "tool_addition" {
                tool["defer_loading"] = Value::Null;
            }
        }
        if block["type"] == "tool_removal" {
            removed.insert(name);
        } else {
            removed.remove(name);
        }
    }
    let left = named.into_iter().filter(|(name, _)| !removed.contains(name.as_str()));
    left.map(|(_, tool)| tools::of_anthropic(tool)).collect::<Result<_, _>>().map(Some)
}
