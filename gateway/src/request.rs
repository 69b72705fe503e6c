//! What routing needs of a request body, read in one pass without copying it: the model, whether the answer
//! streams, and the hashed prefix of the prompt. The body itself goes to the worker as it came.
//!
//! The prompt's canonical text is, in the order a chat template renders it: model, system text and tools, then the
//! messages in turn. Strings are taken unescaped, so `\u00e9` and `é` are the same prompt; other values verbatim.
//! A body that is not a JSON object is not an error here: the worker answers it as it does without a gateway.

mod untold;

use std::{borrow::Cow, num::NonZeroUsize, ops::Range, sync::Arc};

use keyway_core::{
    index::{Owner, WorkerId},
    keyer::{PrefixChain, TextKeyer},
    waiting_room::Share,
};
use keyway_wire::block_hash::{Chain, HashKey};

use self::untold::Signs;
pub use self::untold::Untold;
use crate::{
    content::{Form, Unread},
    ignored::Ignored,
    json::{Outline, Value},
    limits::MAX_MODEL_BYTES,
    session::Session,
    stored_state::{Named, Reference},
    token_keyer::TokenPrompt,
    work::Work,
};

/// Bytes of a first message below which two conversations may well begin alike.
const OPENING_BYTES_MIN: usize = 48;

/// Bytes at the beginning and at the end of a long first message that, with its length, stand for all of it.
const OPENING_PART_BYTES: usize = 2 << 10;

/// How prompts are cut and hashed.
#[derive(Debug, Clone, Copy)]
pub struct KeyerConfig {
    /// Secret of the hash chain.
    pub key: HashKey,
    /// Bytes of canonical text in one block.
    pub block_bytes: NonZeroUsize,
}

/// What routing knows of one request.
#[derive(Debug, Clone)]
pub struct RequestInfo {
    /// The model named in the body.
    pub model: Option<String>,
    /// Why nothing is known of what the body says, if nothing is.
    pub unread: Option<Unread>,
    /// Whether the client wants the answer to be stored (`store`), where it says so.
    pub stores: Option<bool>,
    /// Ids of what is stored that it names.
    pub names: Vec<Reference>,
    /// The worker that it is for, as that stores what it names; `None`: any.
    pub owner: Option<WorkerId>,
    /// Whether the client asked for a stream.
    pub stream: bool,
    /// Whether it says that in a way which not every reader takes for the same: twice, or by what is no truth
    /// value.
    pub stream_is_odd: bool,
    /// Whether it is to be computed even if its client has left (`background`).
    pub background: bool,
    /// Whether its tenant has a limit of tokens that it is charged to.
    pub metered: bool,
    /// The most tokens that its answer may have, by any of the names for it; 0: it does not say.
    pub max_tokens: u32,
    /// Where it says what a stream is to hold.
    pub stream_options: StreamOptions,
    /// Separates its tenant's cache from others' (`cache_salt`); empty if there is none.
    pub salt: String,
    /// The prompt's hashed prefix, by its text; empty where there is no prompt.
    pub chain: PrefixChain,
    /// What tells its conversation from others.
    pub talk: Talk,
    /// The prompt's tokens, where the model's tokenizer is known.
    pub tokens: Option<TokenPrompt>,
    /// Whose it is, where it has to wait.
    pub share: Share,
    /// Whose the blocks of its prompt are in the index.
    pub index_owner: Owner,
    /// Its session, where the client names one and that counts.
    pub session: Option<Session>,
    /// Path and model, as workers' refusals are told apart; 0 until it is known.
    pub kind: u64,
    /// What it makes its worker compute.
    pub work: Work,
    /// Why the usage of its answer does not tell what was found of its prompt, if that is so.
    pub untold: Option<Untold>,
}

impl RequestInfo {
    /// It leaves nothing in a prefix cache, and follows no prefix and no session.
    pub fn follow_no_prefix(&mut self, work: Work) {
        self.chain.blocks = Arc::default();
        if !work.may_compute_prompt() {
            self.chain.total_bytes = 0;
        }
        (self.work, self.tokens, self.session) = (work, None, None);
    }
}

/// Reads a body, all but its tokens.
pub fn read(body: &[u8], config: KeyerConfig) -> RequestInfo {
    read_without(body, config, &Ignored::default())
}

/// [`read`], with what is `ignored` left out of the prompt.
pub fn read_without(body: &[u8], config: KeyerConfig, ignored: &Ignored) -> RequestInfo {
    let outline = simdutf8::basic::from_utf8(body).ok().map(Outline::of);
    let mut fields = Fields::default();
    let is_object = outline.as_ref().is_some_and(|body| fields.read(body).is_some());
    let unread = (!is_object).then_some(Unread::NoObject);
    if !is_object {
        fields = Fields::default();
    }
    let salt = fields.salt.and_then(Value::text).map(Cow::into_owned).unwrap_or_default();
    let keyer = TextKeyer::new(config.key, salt.as_bytes(), config.block_bytes).with_capacity(body.len());
    let namer = Chain::new(config.key, salt.as_bytes());
    let mut keying = Keying { keyer, talk: Talk::default(), namer, by_user: false };
    keying.talk.cache_key = fields.cache_key.and_then(Value::text).map_or(0, |key| keying.name(&key));
    keying.talk.user = fields.user().map_or(0, |user| keying.name(&user));
    walk(&fields, ignored, &mut keying);
    let model = fields.model.and_then(Value::text_or_marks).map(Cow::into_owned);
    // Engines take an empty name for none.
    let model = model.filter(|model| !model.is_empty()).map(shortened);
    let untold = fields.signs.untold(fields.prompt);
    let is_true = |value: Option<Value<'_>>| value.is_some_and(|value| value.raw() == "true");
    let (stream, background) = (is_true(fields.stream), is_true(fields.background));
    let (stream_options, stream_is_odd) = (fields.stream_options, fields.stream_is_odd);
    let max_tokens = fields.max_tokens;
    let Keying { keyer, talk, .. } = keying;
    let mut chain = keyer.finish();
    if untold.is_some_and(Untold::finds_nothing) {
        chain.blocks = Arc::default();
    }
    let stores = fields.store.and_then(|store| store.raw().parse().ok());
    let names = Reference::all(fields.names);
    RequestInfo {
        model,
        unread,
        stores,
        names,
        owner: None,
        stream,
        stream_is_odd,
        background,
        metered: false,
        max_tokens,
        stream_options,
        salt,
        chain,
        talk,
        tokens: None,
        share: Share::default(),
        index_owner: Owner::NOBODY,
        session: None,
        kind: 0,
        work: Work::Generates,
        untold,
    }
}

/// What is known of a form: no prompt's prefix.
pub fn read_form(form: Form, config: KeyerConfig) -> RequestInfo {
    let model = form.model.filter(|model| !model.is_empty()).map(shortened);
    RequestInfo { model, unread: None, stream: form.stream, ..read(b"", config) }
}

/// A model's name, or the beginning of what is none.
fn shortened(mut model: String) -> String {
    if model.len() > MAX_MODEL_BYTES {
        let end = (0..=MAX_MODEL_BYTES).rev().find(|end| model.is_char_boundary(*end));
        model.truncate(end.unwrap_or_default());
        model.push('…');
        model.shrink_to_fit();
    }
    model
}

/// Where a body says its `stream_options`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum StreamOptions {
    /// The body is no object.
    #[default]
    Unclear,
    /// Several times.
    Twice,
    /// Nowhere; its fields begin at this byte.
    Nowhere(usize),
    /// The value's bytes.
    At(Range<usize>),
}

/// What of a prompt tells one conversation from others, and what of it every later turn should repeat.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Talk {
    /// `prompt_cache_key`, hashed; 0 if there is none.
    pub cache_key: u64,
    /// `user` or what else names who asks, hashed; 0 if there is none.
    pub user: u64,
    /// Its first message by a user, hashed, if that is long enough to be nobody else's.
    pub opening: Option<u64>,
    /// Canonical bytes before its last message.
    pub settled_bytes: u64,
}

/// Where a piece of canonical text comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place<'a> {
    /// `model`
    Model,
    /// `system` or `instructions`
    System,
    /// `tools`
    Tools,
    /// `prompt`, or an `input` that is no list of messages
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

/// Takes the canonical text, piece by piece.
trait Sink {
    /// A message begins.
    fn message(&mut self);

    /// A piece of text, and the tag that ends it.
    fn piece(&mut self, place: Place<'_>, text: &str, tag: u8);
}

/// Hashes it.
struct Keying {
    keyer: TextKeyer,
    talk: Talk,
    /// Names what tells conversations apart; each tenant's are its own.
    namer: Chain,
    /// Whether the message at hand is a user's.
    by_user: bool,
}

impl Keying {
    fn name(&self, text: &str) -> u64 {
        let mut namer = self.namer;
        namer.push(text.as_bytes()).0
    }

    /// As [`Keying::name`], in a time that does not grow with the text.
    fn name_long(&self, text: &str) -> u64 {
        let bytes = text.as_bytes();
        let [Some(head), Some(tail)] = [bytes.first_chunk::<OPENING_PART_BYTES>(), bytes.last_chunk()] else {
            return self.name(text);
        };
        let tail: &[u8; OPENING_PART_BYTES] = tail;
        let mut namer = self.namer;
        namer.push(head);
        namer.push(tail);
        namer.push(&bytes.len().to_le_bytes()).0
    }
}

impl Sink for Keying {
    fn message(&mut self) {
        self.talk.settled_bytes = self.keyer.total_bytes();
        self.by_user = false;
    }

    fn piece(&mut self, place: Place<'_>, text: &str, tag: u8) {
        if let (Place::Message { field, .. }, tag::MESSAGE_VALUE) = (place, tag) {
            self.by_user |= field == "role" && text == "user";
            let long = field == "content" && text.len() >= OPENING_BYTES_MIN;
            if self.by_user && long && self.talk.opening.is_none() {
                self.talk.opening = Some(self.name_long(text));
            }
        }
        self.keyer.push_text(text);
        self.keyer.end_field(tag);
    }
}

/// Canonical bytes that end a piece: [`TextKeyer::end_field`]'s.
const PIECE_END_BYTES: u64 = 3;

/// The piece that holds canonical byte `at` of a body without what is `ignored`, and the place of that byte in it; `None`
/// behind the end.
pub fn locate<T>(
    body: &[u8],
    ignored: &Ignored,
    at: u64,
    name: impl Fn(Place<'_>, Option<&str>) -> T,
) -> Option<(T, u64)> {
    struct Search<T, F> {
        at: u64,
        passed: u64,
        name: F,
        role: Option<String>,
        found: Option<(T, u64)>,
    }
    impl<T, F: Fn(Place<'_>, Option<&str>) -> T> Sink for Search<T, F> {
        fn message(&mut self) {
            self.role = None;
        }

        fn piece(&mut self, place: Place<'_>, text: &str, tag: u8) {
            if let (Place::Message { field: "role", .. }, tag::MESSAGE_VALUE) = (place, tag) {
                self.role = Some(text.to_owned());
            }
            let bytes = text.len() as u64 + PIECE_END_BYTES;
            if self.found.is_none() && self.at < self.passed + bytes {
                let role = self.role.as_deref();
                self.found = Some(((self.name)(place, role), (self.at - self.passed).min(text.len() as u64)));
            }
            self.passed += bytes;
            if tag == tag::MESSAGE_END {
                self.role = None;
            }
        }
    }
    let outline = Outline::of(std::str::from_utf8(body).ok()?);
    let mut fields = Fields::default();
    fields.read(&outline)?;
    let mut search = Search { at, passed: 0, name, role: None, found: None };
    walk(&fields, ignored, &mut search);
    search.found
}

/// Every piece of the canonical text in its order.
fn walk(fields: &Fields<'_>, ignored: &Ignored, sink: &mut impl Sink) {
    if let Some(model) = fields.model.and_then(Value::text) {
        sink.piece(Place::Model, &model, tag::MODEL);
    }
    if let Some(system) = fields.system {
        walk_value(sink, ignored, system, Place::System, tag::SYSTEM);
    }
    if let Some(tools) = fields.tools {
        walk_value(sink, ignored, tools, Place::Tools, tag::TOOLS);
    }
    for value in [fields.messages, fields.input].into_iter().flatten() {
        walk_messages(sink, ignored, value);
    }
    if let Some(prompt) = fields.prompt {
        walk_value(sink, ignored, prompt, Place::Prompt, tag::PROMPT);
    }
}

fn walk_value(sink: &mut impl Sink, ignored: &Ignored, value: Value<'_>, place: Place<'_>, tag: u8) {
    let text = value.text().unwrap_or(Cow::Borrowed(value.raw()));
    sink.piece(place, &ignored.strip(place, text), tag);
}

/// Messages field by field; anything that is not a list of objects (the `input` of `/v1/responses` or
/// `/v1/embeddings` may be text) as one value.
fn walk_messages(sink: &mut impl Sink, ignored: &Ignored, value: Value<'_>) {
    // Gone through twice rather than kept: a message takes more memory than its text may.
    let messages = || value.items().into_iter().flatten().map(|item| item.ok()?.fields());
    if value.items().is_none() || messages().any(|message| message.is_none()) {
        return walk_value(sink, ignored, value, Place::Prompt, tag::PROMPT);
    }
    for (index, message) in messages().flatten().enumerate() {
        sink.message();
        for (name, value) in message.map_while(Result::ok) {
            let place = Place::Message { index, field: &name };
            sink.piece(place, &name, tag::MESSAGE_NAME);
            walk_value(sink, ignored, value, place, tag::MESSAGE_VALUE);
        }
        sink.piece(Place::Message { index, field: "" }, "", tag::MESSAGE_END);
    }
}

/// The fields that routing reads. A repeated key counts as its last value, as in the engines' own JSON readers.
#[derive(Default)]
struct Fields<'a> {
    model: Option<Value<'a>>,
    stream: Option<Value<'a>>,
    stream_is_odd: bool,
    stream_options: StreamOptions,
    background: Option<Value<'a>>,
    max_tokens: u32,
    salt: Option<Value<'a>>,
    system: Option<Value<'a>>,
    tools: Option<Value<'a>>,
    messages: Option<Value<'a>>,
    input: Option<Value<'a>>,
    prompt: Option<Value<'a>>,
    cache_key: Option<Value<'a>>,
    user: Option<Value<'a>>,
    metadata: Option<Value<'a>>,
    store: Option<Value<'a>>,
    names: Named<'a>,
    signs: Signs,
}

impl<'a> Fields<'a> {
    /// Reads them where they are to be: they are large. `None` where the body is not a JSON object, or breaks off.
    fn read(&mut self, body: &'a Outline<'_>) -> Option<()> {
        let (fields, text) = (self, body.text());
        fields.stream_options = StreamOptions::Nowhere(text.find('{')? + 1);
        for field in body.document()? {
            let (name, value) = field.ok()?;
            if name == "stream_options" {
                // A repeated one is for the engine to judge.
                let start = value.raw().as_ptr() as usize - text.as_ptr() as usize;
                fields.stream_options = match fields.stream_options {
                    StreamOptions::Nowhere(_) => StreamOptions::At(start..start + value.raw().len()),
                    _ => StreamOptions::Twice,
                };
                continue;
            }
            let field = match name.as_ref() {
                "model" => &mut fields.model,
                "stream" => {
                    let is_plain = matches!(value.raw(), "true" | "false" | "null");
                    fields.stream_is_odd |= fields.stream.is_some() || !is_plain;
                    &mut fields.stream
                }
                "max_tokens" | "max_completion_tokens" | "max_output_tokens" => {
                    fields.max_tokens = fields.max_tokens.max(value.raw().parse().unwrap_or_default());
                    continue;
                }
                "background" => &mut fields.background,
                "cache_salt" => &mut fields.salt,
                "system" | "instructions" => &mut fields.system,
                "tools" => &mut fields.tools,
                "messages" => &mut fields.messages,
                "input" => &mut fields.input,
                "prompt" => &mut fields.prompt,
                "prompt_cache_key" => &mut fields.cache_key,
                "user" | "safety_identifier" => &mut fields.user,
                "metadata" => &mut fields.metadata,
                "store" => &mut fields.store,
                name => {
                    if !fields.signs.take(name, value) {
                        fields.names.take(name, value);
                    }
                    continue;
                }
            };
            *field = Some(value);
        }
        Some(())
    }

    /// Who asks: OpenAI's fields, or Anthropic's `metadata.user_id`.
    fn user(&self) -> Option<Cow<'a, str>> {
        let in_metadata = || {
            let mut fields = self.metadata?.fields()?.map_while(Result::ok);
            fields.find(|(name, _)| name == "user_id").and_then(|(_, id)| id.text())
        };
        self.user.and_then(Value::text).or_else(in_metadata)
    }
}

#[cfg(test)]
mod tests;
