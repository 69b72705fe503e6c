//! A prompt's canonical text, in the order a chat template renders it: each field's text and what of it is no
//! text. Who takes it hashes it, or looks for a place in it.

use std::ops::Range;

use keyway_core::keyer::TextKeyer;
use keyway_wire::block_hash::Chain;

use super::{Fields, Talk, unseen};
use crate::{
    json::{Outline, Value},
    prompt::{
        ignored::Ignored,
        media::{self, Found, Item, MediaItems},
    },
};

/// Bytes of a first message below which two conversations may well begin alike.
const OPENING_BYTES_MIN: usize = 48;

/// Bytes at the beginning and at the end of a long first message that, with its length, stand for all of it.
pub(super) const OPENING_PART_BYTES: usize = 2 << 10;

/// Where a piece of canonical text comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptField<'a> {
    /// `model`, which comes first of all.
    Model,
    /// `system` or `instructions`, before tools and messages.
    System,
    /// `tools` as they are written, before all messages.
    Tools,
    /// `prompt`, or an `input` that is no list of messages.
    Prompt,
    /// A field of a message, or what ends the message.
    Message {
        /// Which message, from 0.
        index: usize,
        /// Its field; empty at the end.
        field: &'a str,
    },
}

/// Which field a piece of canonical text came from; part of the hash, so never renumber.
mod tag {
    pub(super) const MODEL: u8 = 1;
    pub(super) const SYSTEM: u8 = 2;
    pub(super) const TOOLS: u8 = 3;
    pub(super) const PROMPT: u8 = 4;
    pub(super) const MESSAGE_NAME: u8 = 5;
    pub(super) const MESSAGE_VALUE: u8 = 6;
    pub(super) const MESSAGE_END: u8 = 7;
}

/// Takes the canonical text, field by field.
pub(super) trait Sink {
    /// A message begins: its fields follow, and then its end.
    fn message(&mut self);

    /// A field of a message begins.
    fn name(&mut self, place: PromptField<'_>, name: &str);

    /// Text of a field's.
    fn text(&mut self, place: PromptField<'_>, text: &str);

    /// What of a field is no text.
    fn item(&mut self, place: PromptField<'_>, item: &Found<'_>);

    /// The field ends; `tag` says of which kind it was.
    fn end(&mut self, place: PromptField<'_>, tag: u8);

    /// A field that is one text.
    fn piece(&mut self, place: PromptField<'_>, text: &str, tag: u8) {
        self.text(place, text);
        self.end(place, tag);
    }
}

/// Hashes the canonical text, and notes its items and what tells its conversation from others.
pub(super) struct Keying {
    pub(super) keyer: TextKeyer,
    pub(super) media: MediaItems,
    pub(super) talk: Talk,
    /// Names what tells conversations apart; each tenant's are its own.
    pub(super) namer: Chain,
    /// Whether the message at hand is a user's.
    pub(super) by_user: bool,
}

impl Keying {
    pub(super) fn named(&self, text: &str) -> u64 {
        let mut namer = self.namer;
        namer.hash(text.as_bytes())
    }

    /// Whether what a field holds may be what tells its conversation from others.
    fn may_open(&self, field: &str) -> bool {
        self.by_user && field == "content" && self.talk.opening.is_none()
    }

    /// As [`Keying::named`], in a time that does not grow with the text.
    fn name_long(&self, text: &str) -> u64 {
        let bytes = text.as_bytes();
        let [Some(head), Some(tail)] = [bytes.first_chunk::<OPENING_PART_BYTES>(), bytes.last_chunk()] else {
            return self.named(text);
        };
        let tail: &[u8; OPENING_PART_BYTES] = tail;
        let mut namer = self.namer;
        namer.hash(head);
        namer.hash(tail);
        namer.hash(&bytes.len().to_le_bytes())
    }
}

impl Sink for Keying {
    fn message(&mut self) {
        self.talk.settled_bytes = self.keyer.total_bytes();
        self.by_user = false;
    }

    fn name(&mut self, _: PromptField<'_>, name: &str) {
        self.keyer.push_text(name);
        self.keyer.end_field(tag::MESSAGE_NAME);
    }

    fn text(&mut self, place: PromptField<'_>, text: &str) {
        if let PromptField::Message { field, index } = place {
            let role = if field == "role" { text } else { "" };
            self.talk.later_system |= index > 0 && role == "system";
            self.by_user |= role == "user";
            self.talk.goes_on |= role == "assistant";
            if self.may_open(field) && text.len() >= OPENING_BYTES_MIN {
                self.talk.opening = Some(self.name_long(text));
            }
        }
        self.keyer.push_text(text);
    }

    fn item(&mut self, place: PromptField<'_>, item: &Found<'_>) {
        let (name, tokens, at) = (self.named(item.raw), item.tokens(), self.keyer.total_bytes());
        if let PromptField::Message { field, .. } = place
            && self.may_open(field)
        {
            self.talk.opening = Some(name);
        }
        let bytes = self.keyer.push_item(name, media::chain_bytes(tokens)).into();
        let (tokens, raw_bytes) = (tokens.into(), item.raw.len() as u64);
        self.media.add(Item { at, bytes, kind: item.kind, count: 1, tokens, raw_bytes });
    }

    fn end(&mut self, _: PromptField<'_>, tag: u8) {
        self.keyer.end_field(tag);
    }
}

/// Canonical bytes that end a field: [`TextKeyer::end_field`]'s.
const FIELD_END_BYTES: u64 = 3;

/// The field that holds canonical byte `at` of a body without what is `ignored`, and the place of that byte
/// in it; `None` behind the end.
pub fn locate<T>(
    body: &[u8],
    ignored: &Ignored,
    at: u64,
    name: impl Fn(PromptField<'_>, Option<&str>) -> T,
) -> Option<(T, u64)> {
    struct Search<T, F> {
        at: u64,
        passed: u64,
        /// Where the field at hand begins.
        field_at: u64,
        name: F,
        role: Option<String>,
        found: Option<(T, u64)>,
    }
    impl<T, F: Fn(PromptField<'_>, Option<&str>) -> T> Search<T, F> {
        /// Canonical bytes of a field pass by, of which so many are not counted as its own.
        fn pass(&mut self, place: PromptField<'_>, bytes: u64, end: u64) {
            self.passed += bytes + end;
            if self.found.is_none() && self.at < self.passed {
                let last = self.passed - end - self.field_at;
                let name = (self.name)(place, self.role.as_deref());
                self.found = Some((name, (self.at - self.field_at).min(last)));
            }
        }
    }
    impl<T, F: Fn(PromptField<'_>, Option<&str>) -> T> Sink for Search<T, F> {
        fn message(&mut self) {
            self.role = None;
        }

        fn name(&mut self, place: PromptField<'_>, name: &str) {
            self.pass(place, name.len() as u64, 0);
            self.end(place, tag::MESSAGE_NAME);
        }

        fn text(&mut self, place: PromptField<'_>, text: &str) {
            if let PromptField::Message { field: "role", .. } = place {
                self.role = Some(text.to_owned());
            }
            self.pass(place, text.len() as u64, 0);
        }

        fn item(&mut self, place: PromptField<'_>, item: &Found<'_>) {
            self.pass(place, media::chain_bytes(item.tokens()).into(), 0);
        }

        fn end(&mut self, place: PromptField<'_>, tag: u8) {
            self.pass(place, 0, FIELD_END_BYTES);
            self.field_at = self.passed;
            if tag == tag::MESSAGE_END {
                self.role = None;
            }
        }
    }
    let outline = Outline::of(std::str::from_utf8(body).ok()?);
    let mut fields = Fields::default();
    fields.read(&outline)?;
    let mut search = Search { at, passed: 0, field_at: 0, name, role: None, found: None };
    walk(&fields, ignored, &mut search);
    search.found
}

/// Every piece of the canonical text in its order.
pub(super) fn walk(fields: &Fields<'_>, ignored: &Ignored, sink: &mut impl Sink) {
    if let Some(model) = fields.model.and_then(Value::text) {
        sink.piece(PromptField::Model, &model, tag::MODEL);
    }
    if let Some(system) = fields.system {
        walk_value(sink, ignored, system, PromptField::System, tag::SYSTEM);
    }
    if let Some(tools) = fields.tools {
        walk_value(sink, ignored, tools, PromptField::Tools, tag::TOOLS);
    }
    for value in [fields.messages, fields.input].into_iter().flatten() {
        walk_messages(sink, ignored, value);
    }
    for value in [fields.prompt, fields.ids].into_iter().flatten() {
        walk_value(sink, ignored, value, PromptField::Prompt, tag::PROMPT);
    }
}

fn walk_value(sink: &mut impl Sink, ignored: &Ignored, value: Value<'_>, place: PromptField<'_>, tag: u8) {
    sink.piece(place, &ignored.strip(place, unseen::seen(value)), tag);
}

/// Messages field by field; anything that is not a list of objects (the `input` of `/v1/responses` or
/// `/v1/embeddings` may be text) as one value.
fn walk_messages(sink: &mut impl Sink, ignored: &Ignored, value: Value<'_>) {
    // Gone through twice rather than kept: a message takes more memory than its text may.
    if !is_list_of_objects(value) {
        return walk_value(sink, ignored, value, PromptField::Prompt, tag::PROMPT);
    }
    let messages = value.items().into_iter().flatten().filter_map(|item| item.ok()?.fields());
    for (index, message) in messages.enumerate() {
        sink.message();
        for (name, value) in message.map_while(Result::ok).filter(|(name, _)| name != unseen::MARK) {
            let place = PromptField::Message { index, field: &name };
            sink.name(place, &name);
            let items = media::find(&name, value);
            if items.is_empty() {
                walk_value(sink, ignored, value, place, tag::MESSAGE_VALUE);
            } else {
                walk_with_items(sink, ignored, (value, &items), place);
            }
        }
        sink.piece(PromptField::Message { index, field: "" }, "", tag::MESSAGE_END);
    }
}

fn is_list_of_objects(value: Value<'_>) -> bool {
    let is_object = |item: Result<Value<'_>, _>| item.is_ok_and(|item| item.raw().starts_with('{'));
    value.items().is_some_and(|mut items| items.all(is_object))
}

/// A message's value with what in it is no text; what is between them as it is written.
fn walk_with_items(
    sink: &mut impl Sink,
    ignored: &Ignored,
    (value, items): (Value<'_>, &[Found<'_>]),
    place: PromptField<'_>,
) {
    let raw = value.raw();
    let text = |sink: &mut _, range: Range<usize>| {
        let text = raw.get(range).unwrap_or_default();
        Sink::text(sink, place, &ignored.strip(place, unseen::in_json(text)));
    };
    let mut from = 0;
    for item in items {
        let at = item.raw.as_ptr() as usize - raw.as_ptr() as usize;
        text(sink, from..at);
        sink.item(place, item);
        from = at + item.raw.len();
    }
    text(sink, from..raw.len());
    sink.end(place, tag::MESSAGE_VALUE);
}
