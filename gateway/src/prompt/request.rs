//! What routing needs of a request body, read in one pass without copying it: the model, whether the answer
//! streams, and the hashed prefix of the prompt. The body itself goes to the worker as it came.
//!
//! The prompt's canonical text is, in the order a chat template renders it: model, system text and tools,
//! then the messages in turn. Strings are taken unescaped, so `\u00e9` and `é` are the same prompt; other
//! values verbatim. A body that is not a JSON object is not an error here: the worker answers it as it does
//! without a gateway.

mod canonical;
mod ids;
mod unseen;
mod untold;

use std::{borrow::Cow, num::NonZeroUsize, ops::Range, sync::Arc};

use keyway_core::{
    index::{Owner, WorkerId},
    keyer::{PrefixChain, TextKeyer},
    waiting_room::Share,
    working_sets::KnownBy,
};
use keyway_wire::block_hash::{Chain, HashKey};

use self::{
    canonical::{Keying, walk},
    untold::Signs,
};
pub use self::{
    canonical::{PromptField, locate},
    untold::Untold,
};
use crate::{
    api::Api,
    json::{Outline, Value},
    limits::MAX_MODEL_BYTES,
    prompt::{
        content::{Form, Unread},
        ignored::Ignored,
        media::MediaItems,
        session::{SaidBy, Session},
        stored_ids::{Named, Reference},
        token_keyer::{Proof, TokenPrompt},
        work::Work,
    },
};

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
    /// The model named in the body, or the one that it goes to in place of that.
    pub model: Option<String>,
    /// What the client named, where that is another.
    pub renamed: Option<Box<Renamed>>,
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
    /// Whether it begins or goes on with a conversation that the server is to keep (`thread`).
    pub thread: bool,
    /// Whether its tokens are charged: to its tenant's limit, or in the ledger.
    pub metered: bool,
    /// The most tokens that its answer may have, by any of the names for it; 0: it does not say.
    pub max_tokens: u32,
    /// Where it says what a stream is to hold.
    pub stream_options: StreamOptions,
    /// Whether the model may call tools.
    pub has_tools: bool,
    /// Separates its tenant's cache from others' (`cache_salt`); empty if there is none.
    pub salt: String,
    /// The prompt's hashed prefix, by its text; empty where there is no prompt.
    pub chain: PrefixChain,
    /// What in the chain is no text.
    pub media: MediaItems,
    /// What tells its conversation from others.
    pub talk: Talk,
    /// The prompt's tokens, where it comes as ids or the model's tokenizer is known.
    pub tokens: Option<TokenPrompt>,
    /// What answers have said of such tokens, where they were computed here.
    pub proof: Option<Arc<Proof>>,
    /// Of a prompt whose tokens are known up to its first message with an image, those; else empty.
    pub first_tokens: Box<[u32]>,
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
    /// Its API, if KV of its prompt may come from another worker than the one that answers. Only asked where
    /// there are such workers.
    pub moves_kv: Option<Api>,
    /// Why the usage of its answer does not tell what was found of its prompt, if that is so.
    pub untold: Option<Untold>,
}

/// How a request came to a model that its client did not name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Renamed {
    /// The name that its client sent.
    pub asked: String,
    /// The last of what led from there to the model.
    pub by: RenamedBy,
}

/// Why a request goes to a model that its client did not name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenamedBy {
    /// The name is one more of the model's.
    Alias,
    /// A share of the requests for the named model goes there.
    Split,
    /// No worker of the model that it was for could take it.
    Fallback,
}

impl RenamedBy {
    /// Its name in the log.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Alias => "alias",
            Self::Split => "split",
            Self::Fallback => "fallback",
        }
    }
}

impl RequestInfo {
    /// The conversation that it belongs to, and what that is known by. Those of an agent's helpers, which
    /// share its session, begin otherwise. `None` where none is named and this is its first turn: most such
    /// requests are the only one.
    pub fn conversation(&self) -> Option<(u64, KnownBy)> {
        let opening = self.talk.opening;
        match self.session {
            None if !self.talk.goes_on => None,
            None => Some((opening?, KnownBy::Opening)),
            Some(Session { name, said_by: SaidBy::Header | SaidBy::SessionId }) => {
                Some((name ^ opening.unwrap_or_default(), KnownBy::Name))
            }
            Some(Session { name, .. }) => Some((name, KnownBy::Key)),
        }
    }

    /// It leaves nothing in a prefix cache, and follows no prefix and no session.
    pub fn follow_no_prefix(&mut self, work: Work) {
        self.chain.names = Arc::default();
        if !work.may_compute_prompt() {
            (self.chain.total_bytes, self.media) = (0, MediaItems::default());
        }
        (self.work, self.tokens, self.session) = (work, None, None);
        self.first_tokens = Box::default();
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
    let mut keying =
        Keying { keyer, media: MediaItems::default(), talk: Talk::default(), namer, by_user: false };
    keying.talk.cache_key = fields.cache_key.and_then(Value::text).map_or(0, |key| keying.named(&key));
    keying.talk.session = fields.session_id.and_then(Value::text).map_or(0, |id| keying.named(&id));
    keying.talk.user = fields.user().map_or(0, |user| keying.named(&user));
    let untold = fields.signs.untold(fields.ids.or(fields.prompt));
    let mut tokens = fields.only_ids().and_then(ids::read);
    // Its text is the digits of its ids.
    if tokens.is_none() {
        walk(&fields, ignored, &mut keying);
    }
    let model = fields.model.and_then(Value::text_or_marks).map(Cow::into_owned);
    // Engines take an empty name for none.
    let model = model.filter(|model| !model.is_empty()).map(shortened);
    let is_true = |value: Option<Value<'_>>| value.is_some_and(|value| value.raw() == "true");
    let (stream, background) = (is_true(fields.stream), is_true(fields.background));
    let (stream_options, stream_is_odd) = (fields.stream_options, fields.stream_is_odd);
    let max_tokens = fields.max_tokens;
    let has_tools = fields.tools.is_some_and(|tools| !matches!(tools.raw(), "null" | "[]"));
    let Keying { keyer, media, talk, .. } = keying;
    let mut chain = keyer.finish();
    if untold.is_some_and(Untold::finds_nothing) {
        chain.names = Arc::default();
        tokens = tokens.map(|tokens| TokenPrompt { ids: Vec::new(), ..tokens });
    }
    let stores = fields.store.and_then(|store| store.raw().parse().ok());
    let names = Reference::all(fields.names);
    RequestInfo {
        model,
        renamed: None,
        unread,
        stores,
        names,
        owner: None,
        stream,
        stream_is_odd,
        background,
        thread: fields.thread,
        metered: false,
        max_tokens,
        stream_options,
        has_tools,
        salt,
        chain,
        media,
        talk,
        tokens,
        proof: None,
        first_tokens: Box::default(),
        share: Share::default(),
        index_owner: Owner::NOBODY,
        session: None,
        kind: 0,
        work: Work::Generates,
        moves_kv: None,
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
    /// Several times, so that two readers could take different ones.
    Twice,
    /// Nowhere; its fields begin at this byte.
    Nowhere(usize),
    /// Once: the bytes of the body that hold its value.
    At(Range<usize>),
}

/// What of a prompt tells one conversation from others, and what of it every later turn should repeat.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Talk {
    /// `prompt_cache_key`, hashed; 0 if there is none.
    pub cache_key: u64,
    /// `user` or what else names who asks, hashed; 0 if there is none.
    pub user: u64,
    /// Its first message by a user, hashed, if that is long enough to be no other conversation's.
    pub opening: Option<u64>,
    /// `session_id`, hashed; 0 if there is none.
    pub session: u64,
    /// Whether the system says something among its messages.
    pub later_system: bool,
    /// Whether it holds an answer already: a later turn.
    pub goes_on: bool,
    /// Canonical bytes before its last message.
    pub settled_bytes: u64,
}

/// The fields that routing reads. A repeated key counts as its last value, as in the engines' own JSON
/// readers.
#[derive(Default)]
struct Fields<'a> {
    model: Option<Value<'a>>,
    stream: Option<Value<'a>>,
    stream_is_odd: bool,
    stream_options: StreamOptions,
    background: Option<Value<'a>>,
    thread: bool,
    max_tokens: u32,
    salt: Option<Value<'a>>,
    system: Option<Value<'a>>,
    tools: Option<Value<'a>>,
    messages: Option<Value<'a>>,
    input: Option<Value<'a>>,
    prompt: Option<Value<'a>>,
    ids: Option<Value<'a>>,
    /// Beside the ids there is what they say nothing of.
    has_media: bool,
    cache_key: Option<Value<'a>>,
    session_id: Option<Value<'a>>,
    user: Option<Value<'a>>,
    metadata: Option<Value<'a>>,
    store: Option<Value<'a>>,
    names: Named<'a>,
    signs: Signs,
}

impl<'a> Fields<'a> {
    /// Reads them where they are to be: they are large. `None` where the body is not a JSON object, or breaks
    /// off.
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
                "thread" => {
                    fields.thread = value.raw() != "null";
                    continue;
                }
                "cache_salt" => &mut fields.salt,
                "system" | "instructions" => &mut fields.system,
                "tools" => &mut fields.tools,
                "messages" => &mut fields.messages,
                "input" => &mut fields.input,
                "prompt" => &mut fields.prompt,
                // SGLang's own path; of a response it says how its text is to be written.
                "text" if value.raw().starts_with('"') => &mut fields.prompt,
                "input_ids" | "token_ids" => &mut fields.ids,
                "features" | "content_parts" | "image_data" | "audio_data" | "video_data" => {
                    fields.has_media |= value.raw() != "null";
                    continue;
                }
                "sampling_params" => {
                    fields.sampling(value);
                    continue;
                }
                "prompt_cache_key" => &mut fields.cache_key,
                "session_id" => &mut fields.session_id,
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

    /// What may be the ids of a prompt, where nothing else may be a part of it: which of several an engine
    /// takes is its path's matter, and a few ids beside a long text must not make it a short prompt.
    fn only_ids(&self) -> Option<Value<'a>> {
        let Self { ids, prompt, messages, input, system, tools, .. } = self;
        let others = [messages, input, system, tools].into_iter().any(Option::is_some);
        match (ids, prompt) {
            (Some(only), None) | (None, Some(only)) if !others && !self.has_media => Some(*only),
            _ => None,
        }
    }

    /// What SGLang's and vLLM's own paths have in an object of its own.
    fn sampling(&mut self, params: Value<'a>) {
        for (name, value) in params.fields().into_iter().flatten().map_while(Result::ok) {
            if matches!(&*name, "max_tokens" | "max_new_tokens") {
                self.max_tokens = self.max_tokens.max(value.raw().parse().unwrap_or_default());
            } else {
                self.signs.take(&name, value);
            }
        }
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
