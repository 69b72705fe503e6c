//! What a user or the assistant said in blocks, as messages of a chat. What tools gave comes in messages of
//! its own, before the rest of the message that it stands in.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::chat_body::{ChatCall, ChatMessage, Content, Part};
use super::fields::{Fields, TextOrBlocks, kind, refused, wrong, wrong_type};
use crate::Refusal;
use crate::ignored::Ignored;

/// Where fields of blocks are named that are not acted on.
const WITHIN: &str = "messages.content";

/// Fields that are for Anthropic's own servers alone.
const NOT_TOLD: [&str; 2] = ["cache_control", "signature"];

/// What a message's blocks come to, but for what tools gave.
#[derive(Debug, Default)]
struct Blocks<'a> {
    parts: Vec<Part<'a>>,
    calls: Vec<ChatCall<'a>>,
    reasoning: Option<String>,
}

/// Adds what one message says.
pub(super) fn said_by<'a>(
    role: &'static str,
    content: &'a RawValue,
    path: &str,
    messages: &mut Vec<ChatMessage<'a>>,
    ignored: &mut Ignored,
) -> Result<(), Refusal> {
    let blocks = match TextOrBlocks::of(content, path)? {
        TextOrBlocks::Text(text) => {
            messages.push(ChatMessage::new(role, Some(Content::Text(text))));
            return Ok(());
        }
        TextOrBlocks::Blocks(blocks) => blocks,
    };
    let mut all = Blocks::default();
    for (i, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::of(block, format!("{path}.{i}"))?;
        all.take(&mut block, role, messages, ignored)?;
        note_left(block, ignored);
    }
    let Blocks { mut parts, calls, reasoning } = all;
    if role == "user" && parts.is_empty() {
        return Ok(());
    }
    let content = match parts.pop() {
        None => None,
        Some(Part::Text { text }) if parts.is_empty() => Some(Content::Text(text)),
        Some(last) => {
            parts.push(last);
            Some(Content::Parts(parts))
        }
    };
    messages.push(ChatMessage { reasoning, tool_calls: calls, ..ChatMessage::new(role, content) });
    Ok(())
}

fn note_left(mut block: Fields<'_>, ignored: &mut Ignored) {
    for name in NOT_TOLD {
        block.take(name);
    }
    ignored.note_all(WITHIN, block.names());
}

impl<'a> Blocks<'a> {
    fn take(
        &mut self,
        block: &mut Fields<'a>,
        role: &str,
        messages: &mut Vec<ChatMessage<'a>>,
        ignored: &mut Ignored,
    ) -> Result<(), Refusal> {
        let of = block.needed_text("type")?;
        match &*of {
            "text" => {
                let text = block.text("text")?.unwrap_or_default();
                if !text.is_empty() {
                    self.parts.push(Part::Text { text });
                }
            }
            "image" => self.parts.push(image(block)?),
            "thinking" => {
                if let Some(text) = block.text("thinking")? {
                    self.reasoning.get_or_insert_default().push_str(&text);
                }
            }
            "tool_use" => self.calls.push(call(block)?),
            "tool_result" if role == "user" => tool_result(block, messages, ignored)?,
            "tool_result" => {
                block.take("tool_use_id");
                let text = block.text("content")?.unwrap_or_default();
                self.parts.push(Part::Text { text: format!("Tool result: {text}").into() });
            }
            // What no other model can read, and what is shown where the tool's result names it.
            "redacted_thinking" | "tool_reference" => {
                for name in ["data", "name", "tool_name"] {
                    block.take(name);
                }
                ignored.note(format!("{WITHIN}.{of}"));
            }
            _ => {
                let what = "text, an image, a thought, a call or its result: engines of chats know no other";
                return Err(wrong_type(block, what));
            }
        }
        Ok(())
    }
}

/// An image by its address, or with its data.
fn image<'a>(block: &mut Fields<'a>) -> Result<Part<'a>, Refusal> {
    let mut source = block.object("source")?.ok_or_else(|| block.missing("source"))?;
    let of = source.text("type")?;
    match of.as_deref().unwrap_or("base64") {
        "url" => Ok(Part::image(source.needed_text("url")?)),
        "base64" => {
            let media_type = source.text("media_type")?.unwrap_or("image/jpeg".into());
            let data = source.needed_text("data")?;
            Ok(Part::image(format!("data:{media_type};base64,{data}").into()))
        }
        _ => {
            let path = source.path("type");
            let message = format!("'{path}' must be base64 or url: engines of chats have no other images.");
            Err(refused(&path, &message))
        }
    }
}

fn call<'a>(block: &mut Fields<'a>) -> Result<ChatCall<'a>, Refusal> {
    let (id, name) = (block.needed_text("id")?, block.needed_text("name")?);
    let arguments = match block.take("input") {
        None => "{}",
        Some(input) if kind(input) == "an object" => input.get(),
        Some(input) => return Err(wrong(&block.path("input"), "an object", input)),
    };
    Ok(ChatCall::new(id, name, arguments))
}

/// Adds what a tool gave: its text, its images in a message behind it, the tools that it names in another.
fn tool_result<'a>(
    block: &mut Fields<'a>,
    messages: &mut Vec<ChatMessage<'a>>,
    ignored: &mut Ignored,
) -> Result<(), Refusal> {
    let id = block.needed_text("tool_use_id")?;
    if block.flag("is_error")? == Some(true) {
        ignored.note(format!("{WITHIN}.is_error"));
    }
    let path = block.path("content");
    let content = block.take("content").map(|content| TextOrBlocks::of(content, &path)).transpose()?;
    let Given { text, images, references } = match content {
        None => Given::default(),
        Some(TextOrBlocks::Text(text)) => Given { text, ..Given::default() },
        Some(TextOrBlocks::Blocks(blocks)) => given_in(blocks, &path, ignored)?,
    };
    let by_tool =
        |content| ChatMessage { tool_call_id: Some(id.clone()), ..ChatMessage::new("tool", Some(content)) };
    messages.push(by_tool(Content::Text(text)));
    if !images.is_empty() {
        messages.push(ChatMessage::new("user", Some(Content::Parts(images))));
    }
    if !references.is_empty() {
        messages.push(by_tool(Content::Parts(references)));
    }
    Ok(())
}

/// What a tool gave.
#[derive(Debug, Default)]
struct Given<'a> {
    text: Cow<'a, str>,
    images: Vec<Part<'a>>,
    references: Vec<Part<'a>>,
}

fn given_in<'a>(blocks: Vec<&'a RawValue>, path: &str, ignored: &mut Ignored) -> Result<Given<'a>, Refusal> {
    let (mut texts, mut given) = (Vec::new(), Given::default());
    for (i, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::of(block, format!("{path}.{i}"))?;
        let of = block.needed_text("type")?;
        match &*of {
            "text" => texts.push(block.text("text")?.unwrap_or_default()),
            "image" => given.images.push(image(&mut block)?),
            "tool_reference" => {
                let full = |name: &Cow<'_, str>| !name.is_empty();
                let (name, other) = (block.text("tool_name")?, block.text("name")?);
                let name = name.filter(full).or(other.filter(full));
                given.references.extend(name.map(|name| Part::ToolReference { name }));
            }
            _ => {
                ignored.note(format!("{WITHIN}.content.{of}"));
                continue;
            }
        }
        note_left(block, ignored);
    }
    given.text = if let [text] = &mut texts[..] { std::mem::take(text) } else { texts.join("\n").into() };
    Ok(given)
}
