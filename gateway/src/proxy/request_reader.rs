//! A request's head and body to all that routing knows of it: what its text says, its kind, its session, and
//! its prompt's tokens where the model's tokenizer is known.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Method, request::Parts};
use keyway_wire::block_hash::Chain;

use crate::{
    error::Error,
    prompt::{
        content::{self, Content, Form},
        request::{RequestInfo, Untold},
        session,
        text::PromptApi,
        token_keyer::{Known, TokenKeyer, Tokenised},
        work::Work,
    },
    proxy::{reading::BodyReader, whom},
    routing::Router,
};

/// How requests are read.
#[derive(Debug, Clone)]
pub struct RequestReader {
    /// Reads bodies into text and what routing knows of it, up to the largest size allowed.
    pub bodies: BodyReader,
    /// Models whose prompts are known by their tokens.
    pub tokens: Arc<TokenKeyer>,
    /// Whether a session that the client names counts.
    pub session_hints: bool,
    /// Whether a request must name its model where workers serve different ones.
    pub require_model: bool,
    /// Knows the fleet: adapters' base models, models by name, how long a prompt workers have room for.
    pub router: Arc<Router>,
}

impl RequestReader {
    /// All that routing knows of a request to `path`, which is this much `work`.
    pub async fn read(&self, work: Work, path: &str, headers: &HeaderMap, body: &Bytes) -> RequestInfo {
        let form = Form::of(content::kind(headers), body);
        let mut info = Arc::unwrap_or_clone(self.bodies.text(form, body).await);
        self.complete(&mut info, work, path, headers);
        self.look_for_tokens(&mut info, path, body).await;
        info
    }

    /// Adds what the body alone does not say.
    pub(super) fn complete(&self, info: &mut RequestInfo, work: Work, path: &str, headers: &HeaderMap) {
        // Where it names none, there is no need to look for one.
        let path_of_kind = if work.fills_cache() { path } else { without_id(path) };
        info.kind = self.kind_of(path_of_kind, info.model.as_deref());
        if !work.fills_cache() {
            info.follow_no_prefix(work);
        } else if self.session_hints {
            info.session = session::of(headers, info, self.bodies.keyer.key);
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
        // An adapter's prompts are made of its base model's tokens.
        let base = info.model.as_deref().filter(|model| !tokens.knows(model));
        let base = base.and_then(|adapter| self.router.fleet().parent_of(adapter));
        let context = || self.router.fleet().longest_context(info.model.as_deref()?);
        let model = base.as_deref().or(info.model.as_deref())?;
        if info.talk.later_system && PromptApi::of(path) == Some(PromptApi::Messages) {
            tokens.heard_later_system(model);
        }
        tokens.tokens(path, body, Some(model), context).await
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

    /// Refuses a request that names no model where it has to.
    ///
    /// # Errors
    /// What [`whom::model_is_known_or_one`] refuses.
    pub(super) fn refuse_unnamed(&self, info: &RequestInfo, parts: &Parts) -> Result<(), Error> {
        if self.require_model {
            whom::model_is_known_or_one(self.router.fleet(), parts, info)
        } else {
            Ok(())
        }
    }

    /// Names a kind of request: workers may refuse one, and serve others.
    fn kind_of(&self, path: &str, model: Option<&str>) -> u64 {
        Chain::new(self.bodies.keyer.key, path.as_bytes()).push(model.unwrap_or_default().as_bytes()).0
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
