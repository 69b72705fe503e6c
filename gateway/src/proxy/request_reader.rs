//! A request's head and body to all that routing knows of it: what its text says, its kind, its session, and
//! its prompt's tokens where the model's tokenizer is known.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Method, request::Parts};
use keyway_core::waiting_room::Share;
use keyway_wire::block_hash::Chain;

use crate::{
    client::Client,
    error::Error,
    prompt::{
        content::{self, Content, Form},
        request::{RenamedBy, RequestInfo, Untold},
        session,
        text::PromptApi,
        token_keyer::{Known, TokenKeyer, Tokenised},
        work::Work,
    },
    proxy::{
        asked::Asked,
        message_threads::Threaded,
        model_names,
        reading::{BodyReader, Sender},
        whom,
    },
    routing::Router,
    translation::{self, AsChats, CHATS, Wish},
};

/// How requests are read.
#[derive(Debug, Clone)]
pub struct RequestReader {
    /// Reads bodies into text and what routing knows of it, up to the largest size allowed.
    pub bodies: BodyReader,
    /// Models whose prompts are known by their tokens.
    pub tokens: Arc<TokenKeyer>,
    /// Models to which requests of other APIs go as chats.
    pub as_chats: AsChats,
    /// Models whose workers keep the conversations that a `thread` goes on from.
    pub threaded: Threaded,
    /// Whether a session that the client names counts.
    pub session_hints: bool,
    /// Whether a request must name its model where workers serve different ones.
    pub require_model: bool,
    /// Knows the fleet: adapters' base models, models by name, how long a prompt workers have room for.
    pub router: Arc<Router>,
}

impl RequestReader {
    /// What a request asks for, if it has to go on as a chat.
    pub(super) fn wish(&self, parts: &Parts, info: &RequestInfo, content: &Content) -> Option<Wish> {
        self.as_chats.wish(&parts.method, parts.uri.path(), info.model.as_deref(), &content.text)
    }

    /// All that routing knows of a request to `path`, which is this much `work`. Its body becomes what a
    /// worker gets, where it goes to another model than it names.
    pub async fn read(&self, work: Work, path: &str, headers: &HeaderMap, body: &mut Bytes) -> RequestInfo {
        let form = |body: &Bytes| Form::of(content::kind(headers), body);
        let mut info = Arc::unwrap_or_clone(self.bodies.text(form(body), body).await);
        if !self.bodies.names.is_empty()
            && let Ok(Some((text, renamed))) = self.bodies.renamed(headers, &info, body)
        {
            *body = text;
            info = Arc::unwrap_or_clone(self.bodies.text(form(body), body).await);
            info.renamed = Some(renamed);
        }
        let wish = self.as_chats.wish(&Method::POST, path, info.model.as_deref(), body);
        let chat = wish.and_then(|wish| {
            let place = self.system_place(info.model.as_deref());
            translation::to_chat(wish, body, place).ok()
        });
        self.complete(&mut info, work, path, headers);
        let Some((chat, _)) = chat else {
            self.look_for_tokens(&mut info, path, body).await;
            return info;
        };
        *body = chat.into();
        let mut chat = Arc::unwrap_or_clone(self.bodies.text(None, body).await);
        (chat.session, chat.renamed) = (info.session, info.renamed);
        info = chat;
        self.complete(&mut info, work, CHATS, headers);
        self.look_for_tokens(&mut info, CHATS, body).await;
        info
    }

    /// A request that was read before, for another model; `None` where its body does not say the model.
    ///
    /// # Errors
    /// [`Error::BodyTooLarge`] and [`Error::BodyMemory`].
    pub(super) async fn for_model(
        &self,
        asked: &Asked,
        (model, client): (&str, &Arc<Client>),
    ) -> Result<Option<(Parts, Content, RequestInfo)>, Error> {
        let Asked { parts, body, came, info: before, record, .. } = asked;
        let Some(text) = self.bodies.with_model(&parts.headers, body, model)? else { return Ok(None) };
        let (mut parts, visit) = (parts.clone(), record.visit());
        let mut content = Content { text: body.clone(), came: came.clone(), unread: None, form: None };
        content.replace(&mut parts.headers, text);
        self.bodies.hold(&mut content.text, Sender { client, visit: visit.as_ref() })?;
        let (work, path) = (Work::of(&parts.method, parts.uri.path()), parts.uri.path());
        let form = Form::of(content::kind(&parts.headers), &content.text);
        let mut info = Arc::unwrap_or_clone(self.bodies.text(form, &content.text).await);
        self.complete(&mut info, work, path, &parts.headers);
        if self.looks_for_tokens(&info) {
            self.add_tokens(&mut info, path, &content.text).await;
        }
        self.add_target(&mut info, &parts, &content);
        // What its tenant owed was taken into account with the first model.
        info.share = Share { owed: 0.0, ..before.share };
        (info.index_owner, info.metered) = (before.index_owner, before.metered);
        let name = before.renamed.as_ref().map(|renamed| renamed.asked.as_str()).or(before.model.as_deref());
        info.renamed = name.map(|name| model_names::renamed(name, RenamedBy::Fallback));
        Ok(Some((parts, content, info)))
    }

    /// Adds what the body alone does not say.
    pub(super) fn complete(&self, info: &mut RequestInfo, work: Work, path: &str, headers: &HeaderMap) {
        // Where it names none, there is no need to look for one.
        let path_of_kind = if work.fills_cache() { path } else { without_id(path) };
        info.kind = self.kind_of(path_of_kind, info.model.as_deref());
        if !work.fills_cache() {
            info.follow_no_prefix(work);
        } else if self.session_hints {
            info.session = info.session.or_else(|| session::of(headers, info, self.bodies.keyer.key));
        }
    }

    /// Whether a prompt came as tokens, or may become such.
    pub(super) fn looks_for_tokens(&self, info: &RequestInfo) -> bool {
        info.tokens.is_some() || !self.tokens.is_empty()
    }

    /// Adds the prompt's tokens, where it came as such or the model's tokenizer is known.
    pub(super) async fn add_tokens(&self, info: &mut RequestInfo, path: &str, body: &Bytes) {
        if info.work.fills_cache() {
            self.router.tokens_come();
        }
        self.look_for_tokens(info, path, body).await;
    }

    /// Adds the prompt's tokens, or its first, unless it came as such.
    async fn look_for_tokens(&self, info: &mut RequestInfo, path: &str, body: &Bytes) {
        if info.tokens.is_some() {
            return;
        }
        let Some(Tokenised { known, proof }) = self.tokens(path, info, body).await else { return };
        match known {
            Known::Whole(tokens) => (info.tokens, info.proof) = (Some(tokens), Some(proof)),
            Known::Beginning(ids) => info.first_tokens = ids,
        }
    }

    /// The prompt's tokens, as far as they are known, where the model's tokenizer is.
    async fn tokens(&self, path: &str, info: &RequestInfo, body: &Bytes) -> Option<Tokenised> {
        let tokens = &self.tokens;
        let finds_nothing = info.untold.is_some_and(Untold::finds_nothing);
        if tokens.is_empty() || !info.work.fills_cache() || finds_nothing {
            return None;
        }
        let base = self.base_of(info.model.as_deref());
        let context = || self.router.fleet().longest_context(info.model.as_deref()?);
        let model = base.as_deref().or(info.model.as_deref())?;
        let api = self.prompt_api(path, info);
        if info.talk.later_system && api == Some(PromptApi::Messages) {
            tokens.heard_later_system(model);
        }
        tokens.tokens((path, api), body, Some(model), context).await
    }

    /// How a request's prompt is read by the engines of its model. They differ in what the system says late
    /// alone, so few requests need a look at the fleet.
    fn prompt_api(&self, path: &str, info: &RequestInfo) -> Option<PromptApi> {
        let api = PromptApi::of(path)?;
        let model = info.model.as_deref().filter(|_| info.talk.later_system && api == PromptApi::Messages);
        let is_ours = model.is_some_and(|model| self.router.fleet().is_of_keyway_workers(model));
        Some(if is_ours { PromptApi::MessagesInPlace } else { api })
    }

    /// The base model of an adapter whose own tokenizer is not known: its prompts have the same tokens.
    pub(super) fn base_of(&self, model: Option<&str>) -> Option<String> {
        let adapter = model.filter(|model| !self.tokens.knows(model))?;
        self.router.fleet().parent_of(adapter)
    }

    /// Adds what the target and the method say, and whether the body could be read.
    pub(super) fn add_target(&self, info: &mut RequestInfo, parts: &Parts, content: &Content) {
        info.model = info.model.take().or_else(|| whom::model_in_target(self.router.fleet(), parts));
        info.unread = content.unread.or(info.unread.filter(|_| !content.text.is_empty()));
        if parts.method != Method::POST {
            // To look for what is stored is another kind than to compute.
            info.kind = !info.kind;
        }
    }

    /// Refuses a request that names no model where it has to, and a thread that no worker keeps.
    ///
    /// # Errors
    /// What [`whom::model_is_known_or_one`] and [`Threaded::check`] refuse.
    pub(super) fn refuse(&self, info: &RequestInfo, parts: &Parts) -> Result<(), Error> {
        self.threaded.check(&parts.uri, info)?;
        if self.require_model && info.owner.is_none() {
            whom::model_is_known_or_one(self.router.fleet(), parts, info)
        } else {
            Ok(())
        }
    }

    /// Names a kind of request: workers may refuse one, and serve others.
    fn kind_of(&self, path: &str, model: Option<&str>) -> u64 {
        Chain::new(self.bodies.keyer.key, path.as_bytes()).hash(model.unwrap_or_default().as_bytes())
    }
}

/// A path up to what names one thing among many: `/v1/files` of `/v1/files/abc/content`.
fn without_id(path: &str) -> &str {
    let mut slashes = memchr::memchr_iter(b'/', path.as_bytes()).skip(2);
    let (Some(second), third) = (slashes.next(), slashes.next()) else { return path };
    let has_parts = matches!(&path[..second], "/v1/chat" | "/v1/messages" | "/v1/audio" | "/v1/images");
    if has_parts { &path[..third.unwrap_or(path.len())] } else { &path[..second] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_has_no_ids() {
        for (path, kind) in [
            ("/v1/chat/completions", "/v1/chat/completions"),
            ("/v1/chat/completions/abc", "/v1/chat/completions"),
            ("/v1/completions", "/v1/completions"),
            ("/v1/messages/count_tokens", "/v1/messages/count_tokens"),
            ("/v1/responses/resp_1/input_items", "/v1/responses"),
            ("/v1/files/abc/content", "/v1/files"),
            ("/tokenize", "/tokenize"),
            ("/v2/rerank", "/v2/rerank"),
            ("/v1/", "/v1/"),
            ("//", "//"),
            ("///", "//"),
        ] {
            assert_eq!(without_id(path), kind);
        }
    }
}
