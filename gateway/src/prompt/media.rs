//! Pictures, sounds, films and files in a prompt's messages. Routing takes each for one item with a name and
//! a size, as engines do: the base64 of a picture has a hundred times as many bytes as it has tokens.
//!
//! Formats: OpenAI's API reference (`image_url`, `input_audio`, `file`, `input_image`, `input_file`),
//! Anthropic's (`source`), and what vLLM and SGLang take beside those (`video_url`, `audio_url`,
//! `image_embeds`).

mod size;

use crate::{
    json::Value,
    limits::{BYTES_PER_TOKEN, MEDIA_ITEMS_MAX},
};

/// What an item is; each kind has tokens in a measure of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediaKind {
    /// A picture; its tokens follow from its size in pixels.
    Image,
    /// A sound; its tokens follow from how long it is.
    Audio,
    /// A film; its tokens are taken from its bytes.
    Video,
    /// Anything else, mostly a document.
    File,
}

/// How many kinds there are.
pub const KINDS: usize = 4;

/// An item as a request has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found<'a> {
    /// Its value, as it is written: what tells it from others.
    pub raw: &'a str,
    /// What it is, by the field's name or the media type in its first bytes.
    pub kind: MediaKind,
}

/// An item in a prompt's chain, or several that follow each other where a prompt has very many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    /// The canonical byte at which it begins.
    pub at: u64,
    /// Canonical bytes that it takes.
    pub bytes: u64,
    /// What it is; of several, the first.
    pub kind: MediaKind,
    /// How many it is.
    pub count: u64,
    /// Tokens that it has by what is known of it without a model.
    pub tokens: u64,
    /// Bytes that it takes in the body.
    pub raw_bytes: u64,
}

/// The items of one prompt, in their order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MediaItems(Vec<Item>);

impl MediaItems {
    /// Adds one behind the others.
    pub fn add(&mut self, item: Item) {
        if self.0.len() < MEDIA_ITEMS_MAX {
            self.0.push(item);
        } else if let Some(last) = self.0.last_mut() {
            last.bytes = item.at + item.bytes - last.at;
            last.count += item.count;
            last.tokens += item.tokens;
            last.raw_bytes += item.raw_bytes;
        }
    }

    /// Those that there are.
    pub fn all(&self) -> &[Item] {
        &self.0
    }

    /// A sum over all of them.
    pub fn sum(&self, of_one: impl Fn(&Item) -> u64) -> u64 {
        self.0.iter().map(of_one).sum()
    }
}

impl Found<'_> {
    /// Tokens that it has by what is known of it without a model.
    pub fn tokens(&self) -> u32 {
        size::tokens(self.kind, payload(self.raw))
    }
}

/// Canonical bytes for so many tokens: as many as text of them has.
pub fn chain_bytes(tokens: u32) -> u32 {
    tokens * BYTES_PER_TOKEN as u32
}

/// Shortest value that is looked through: `{"image":"http:/"}`.
const VALUE_BYTES_MIN: usize = 18;
/// A message, its content, what a tool gave, and the content of that.
const DEPTH_MAX: u32 = 6;
/// Fields whose value may hold items. What a call is given (`input`, `arguments`) is text to a model,
/// whatever its fields are called.
const HOLDERS: [&str; 4] = ["content", "output", "file", "source"];
/// Bare base64 is longer than a name.
const BARE_BYTES_MIN: usize = 256;

/// The items in a message's field, in their order.
pub fn find<'a>(name: &str, value: Value<'a>) -> Vec<Found<'a>> {
    let mut found = Vec::new();
    look(name, value, DEPTH_MAX, &mut found);
    found
}

fn look<'a>(name: &str, value: Value<'a>, depth: u32, found: &mut Vec<Found<'a>>) {
    let raw = value.raw();
    if raw.len() < VALUE_BYTES_MIN {
        return;
    }
    if let Some(kind) = kind(name, value) {
        found.push(Found { raw, kind });
    } else if depth > 0 && HOLDERS.contains(&name) {
        for item in value.items().into_iter().flatten().map_while(Result::ok) {
            look_within(item, depth, found);
        }
        look_within(value, depth, found);
    }
}

fn look_within<'a>(object: Value<'a>, depth: u32, found: &mut Vec<Found<'a>>) {
    for (name, value) in object.fields().into_iter().flatten().map_while(Result::ok) {
        look(&name, value, depth - 1, found);
    }
}

/// What a field's value is, if it is an item.
fn kind(name: &str, value: Value<'_>) -> Option<MediaKind> {
    let by_name = match name {
        "image_url" | "image" | "input_image" | "image_embeds" => MediaKind::Image,
        "audio_url" | "audio" | "input_audio" | "audio_embeds" => MediaKind::Audio,
        "video_url" | "video" | "input_video" => MediaKind::Video,
        "file_data" | "file_url" => MediaKind::File,
        // It may be text.
        "source" if is_elsewhere_or_encoded(value) => MediaKind::Image,
        _ => return None,
    };
    is_reference(value.raw()).then(|| kind_written(value.raw()).unwrap_or(by_name))
}

/// Whether it is more than a word.
fn is_reference(raw: &str) -> bool {
    match raw.as_bytes() {
        [b'{', ..] => true,
        [b'"', inner @ ..] => {
            let schemes: [&[u8]; 4] = [b"data:", b"http:", b"https:", b"file:"];
            inner.len() >= BARE_BYTES_MIN || schemes.iter().any(|scheme| inner.starts_with(scheme))
        }
        _ => false,
    }
}

/// The kind by a media type in its first bytes.
fn kind_written(raw: &str) -> Option<MediaKind> {
    const HEAD_BYTES: usize = 128;
    let head = &raw.as_bytes()[..raw.len().min(HEAD_BYTES)];
    let types = [
        ("image/", MediaKind::Image),
        ("audio/", MediaKind::Audio),
        ("video/", MediaKind::Video),
        ("application/", MediaKind::File),
        ("text/", MediaKind::File),
    ];
    let has = |name: &str| memchr::memmem::find(head, name.as_bytes()).is_some();
    let encoded = has("data:") || has("media_type");
    types.into_iter().find(|(name, _)| encoded && has(name)).map(|(_, kind)| kind)
}

/// Whether a `source` is bytes, or an address.
fn is_elsewhere_or_encoded(source: Value<'_>) -> bool {
    let fields = source.fields().into_iter().flatten().map_while(Result::ok);
    let kind = fields.filter(|(name, _)| name == "type").last();
    kind.and_then(|(_, kind)| kind.text()).is_some_and(|kind| matches!(&*kind, "base64" | "url" | "file"))
}

/// The base64 of an item, where it is sent along.
fn payload(raw: &str) -> Option<&str> {
    let value = Value::found(raw);
    let longest = |object: Value<'_>| -> Option<usize> {
        let fields = object.fields()?.map_while(Result::ok).filter(|(_, value)| value.raw().starts_with('"'));
        let longest = fields.max_by_key(|(_, value)| value.raw().len())?.1;
        Some(longest.raw().as_ptr() as usize - raw.as_ptr() as usize)
    };
    let start = longest(value).unwrap_or_default();
    let text = raw.get(start..)?.strip_prefix('"')?;
    let text = &text[..memchr::memchr(b'"', text.as_bytes())?];
    match text.split_once(";base64,") {
        Some((_, base64)) => Some(base64),
        None if text.contains(':') => None,
        None => Some(text),
    }
}

#[cfg(test)]
mod tests;
