//! A request's messages as those of a chat. The chat is the one that vLLM 0.32 makes of the same request
//! (`vllm/entrypoints/anthropic/serving.py`), so that both find the same prefixes in its cache. But where the
//! template takes system text in front alone, vLLM moves all of it there, and loses the cached conversation:
//! here it stays where it is, as the user's reminder.

use std::borrow::Cow;

use keyway_text::BILLING;
use serde_json::value::RawValue;

use super::blocks;
use super::chat_body::{ChatMessage, Content};
use super::fields::{Fields, TextOrBlocks, kind, refused, wrong_type};
use crate::ignored::Ignored;
use crate::late_system::in_front;
use crate::{Refusal, SystemPlace};

/// A conversation on its way into a chat.
#[derive(Debug, Default)]
pub(super) struct Conversation<'a> {
    pub(super) messages: Vec<ChatMessage<'a>>,
    /// Tools that came or went in the course of it.
    pub(super) changes: Vec<ToolChange<'a>>,
}

/// A block by which the system adds or removes a tool.
#[derive(Debug)]
pub(super) struct ToolChange<'a> {
    pub(super) adds: bool,
    /// The reference or the definition.
    pub(super) tool: Fields<'a>,
}

/// Takes the fields with what was said.
pub(super) fn take<'a>(
    body: &mut Fields<'a>,
    place: SystemPlace,
    ignored: &mut Ignored,
) -> Result<Conversation<'a>, Refusal> {
    let mut conversation = Conversation::default();
    if let Some(system) = body.take("system") {
        let is_text = kind(system) == "a string";
        let mut texts = system_texts(system, "system", None, ignored)?;
        // A text of its own goes on as it is: engines look at that of a chat's system again.
        texts.retain(|text| is_text || !text.starts_with(BILLING));
        conversation.system_says(&texts);
    }
    let said = body.list("messages")?.ok_or_else(|| body.missing("messages"))?;
    if said.is_empty() {
        return Err(refused("messages", "'messages' must hold at least one message."));
    }
    for (i, message) in said.into_iter().enumerate() {
        let mut message = Fields::of(message, format!("messages.{i}"))?;
        let role = message.needed_text("role")?;
        let content = message.take("content").ok_or_else(|| message.missing("content"))?;
        let path = message.path("content");
        match &*role {
            "system" => {
                let mut texts = system_texts(content, &path, Some(&mut conversation.changes), ignored)?;
                texts.retain(|text| !text.starts_with(BILLING));
                conversation.system_says(&texts);
            }
            "user" => blocks::said_by("user", content, &path, &mut conversation.messages, ignored)?,
            "assistant" => blocks::said_by("assistant", content, &path, &mut conversation.messages, ignored)?,
            _ => {
                let path = message.path("role");
                return Err(refused(&path, &format!("'{path}' must be user, assistant or system.")));
            }
        }
        ignored.note_all("messages", message.names());
    }
    if place == SystemPlace::InFront {
        conversation.messages = in_front(conversation.messages);
    }
    Ok(conversation)
}

impl<'a> Conversation<'a> {
    /// Adds what the system says, if that is anything.
    fn system_says(&mut self, texts: &[Cow<'a, str>]) {
        let text = match texts {
            [text] => text.clone(),
            texts => Cow::Owned(texts.concat()),
        };
        if !text.is_empty() {
            self.messages.push(ChatMessage::new("system", Some(Content::Text(text))));
        }
    }
}

/// The texts of what the system says. Among the messages it may change the tools, too.
fn system_texts<'a>(
    content: &'a RawValue,
    path: &str,
    mut changes: Option<&mut Vec<ToolChange<'a>>>,
    ignored: &mut Ignored,
) -> Result<Vec<Cow<'a, str>>, Refusal> {
    let blocks = match TextOrBlocks::of(content, path)? {
        TextOrBlocks::Text(text) => return Ok(vec![text]),
        TextOrBlocks::Blocks(blocks) => blocks,
    };
    let mut texts = Vec::new();
    for (i, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::of(block, format!("{path}.{i}"))?;
        let of = block.needed_text("type")?;
        match (&*of, changes.as_deref_mut()) {
            ("text", _) => {
                texts.push(block.text("text")?.unwrap_or_default());
                block.take("cache_control");
                ignored.note_all("system", block.names());
            }
            ("tool_addition" | "tool_removal", Some(changes)) => {
                let tool = block.object("tool")?.ok_or_else(|| block.missing("tool"))?;
                changes.push(ToolChange { adds: of == "tool_addition", tool });
            }
            _ => {
                let what = "a block of type text; tools change in messages of the role system alone";
                return Err(wrong_type(&block, what));
            }
        }
    }
    texts.retain(|text| !text.is_empty());
    Ok(texts)
}
