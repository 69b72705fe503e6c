//! A chat as a request has it: its messages, and its body while it is written.

use std::borrow::Cow;

use serde::Serialize;

use crate::late_system::{Beside, Speaker, Turn, beside};

/// One message of a chat.
#[derive(Debug, Serialize)]
pub(super) struct ChatMessage<'a> {
    pub(super) role: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<Content<'a>>,
    /// By the name that most engines read; vLLM takes it for its `reasoning`.
    #[serde(rename = "reasoning_content", skip_serializing_if = "Option::is_none")]
    pub(super) reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<ChatCall<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_call_id: Option<Cow<'a, str>>,
}

/// What a message says: a text, or parts.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Content<'a> {
    Text(Cow<'a, str>),
    Parts(Vec<Part<'a>>),
}

/// A part of a content.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Part<'a> {
    Text {
        text: Cow<'a, str>,
    },
    ImageUrl {
        image_url: ImageUrl<'a>,
    },
    /// Of a tool that the model asked to be shown.
    ToolReference {
        name: Cow<'a, str>,
    },
}

/// Where an image is, or what it is.
#[derive(Debug, Serialize)]
pub(super) struct ImageUrl<'a> {
    url: Cow<'a, str>,
}

/// A call that the assistant made.
#[derive(Debug, Serialize)]
pub(super) struct ChatCall<'a> {
    id: Cow<'a, str>,
    #[serde(rename = "type")]
    of: &'static str,
    function: Called<'a>,
}

#[derive(Debug, Serialize)]
struct Called<'a> {
    name: Cow<'a, str>,
    /// JSON in a text.
    arguments: &'a str,
}

impl<'a> ChatMessage<'a> {
    pub(super) const fn new(role: &'static str, content: Option<Content<'a>>) -> Self {
        Self { role, content, reasoning: None, tool_calls: Vec::new(), tool_call_id: None }
    }
}

impl Turn for ChatMessage<'_> {
    fn speaker(&self) -> Speaker {
        match (self.role, &self.content) {
            ("system", _) => Speaker::System,
            ("user", Some(_)) | ("tool", Some(Content::Text(_))) => Speaker::Reminded,
            _ => Speaker::Other,
        }
    }

    fn of_user(text: String) -> Self {
        Self::new("user", Some(Content::Text(text.into())))
    }

    fn into_text(self) -> String {
        match self.content {
            Some(Content::Text(text)) => text.into_owned(),
            // What the system says is a text.
            _ => String::new(),
        }
    }

    fn join(&mut self, next: Self) {
        if let Some(Content::Text(text)) = &mut self.content {
            text.to_mut().push_str(&next.into_text());
        }
    }

    fn add(&mut self, added: &str, place: Beside) {
        match &mut self.content {
            Some(Content::Text(text)) => *text = beside(text, added, place).into(),
            Some(Content::Parts(parts)) => {
                let at = if place == Beside::Before { 0 } else { parts.len() };
                parts.insert(at, Part::Text { text: added.to_owned().into() });
            }
            None => {}
        }
    }
}

impl<'a> Part<'a> {
    pub(super) const fn image(url: Cow<'a, str>) -> Self {
        Self::ImageUrl { image_url: ImageUrl { url } }
    }
}

impl<'a> ChatCall<'a> {
    pub(super) const fn new(id: Cow<'a, str>, name: Cow<'a, str>, arguments: &'a str) -> Self {
        Self { id, of: "function", function: Called { name, arguments } }
    }
}

/// A chat request's body in the making.
#[derive(Debug, Default)]
pub(super) struct ChatBody {
    json: Vec<u8>,
    names: Vec<&'static str>,
}

impl ChatBody {
    pub(super) fn put(&mut self, name: &'static str, value: &(impl Serialize + ?Sized)) {
        self.json.push(if self.names.is_empty() { b'{' } else { b',' });
        self.names.push(name);
        self.json.push(b'"');
        self.json.extend_from_slice(name.as_bytes());
        self.json.extend_from_slice(b"\":");
        // Writing plain structs to memory cannot fail.
        let _ = serde_json::to_writer(&mut self.json, value);
    }

    pub(super) fn put_if(&mut self, name: &'static str, value: Option<&(impl Serialize + ?Sized)>) {
        if let Some(value) = value {
            self.put(name, value);
        }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.names.contains(&name)
    }

    /// The body, which has at least one field.
    pub(super) fn into_json(mut self) -> Vec<u8> {
        self.json.push(b'}');
        self.json
    }
}
