//! Which session a request belongs to, as far as its client says: agents and their frameworks send a header,
//! others name a cache key or a user. Routing takes it as a hint that decides where nothing else does; the
//! name is hashed, and nothing of it is kept or shown.

use http::{HeaderMap, HeaderName, HeaderValue};
use keyway_wire::block_hash::{Chain, HashKey};

use crate::prompt::request::RequestInfo;

/// Headers by which agents and their frameworks name a session: Codex (`session-id`, `session_id`), Claude
/// Code, OpenCode (`x-session-affinity`, `x-opencode-session`), Dynamo, llm-d (`x-session-token`), SMG
/// (`x-smg-routing-key`), and clients that have none of their own.
static HEADERS: [HeaderName; 9] = [
    HeaderName::from_static("x-session-id"),
    HeaderName::from_static("session-id"),
    HeaderName::from_static("session_id"),
    HeaderName::from_static("x-claude-code-session-id"),
    HeaderName::from_static("x-session-affinity"),
    HeaderName::from_static("x-dynamo-session-id"),
    HeaderName::from_static("x-session-token"),
    HeaderName::from_static("x-opencode-session"),
    HeaderName::from_static("x-smg-routing-key"),
];

/// A session as routing knows it: a hash, and what of the request it is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Session {
    /// Keyed by the tenant's salt and the secret of the hashes.
    pub name: u64,
    /// What of the request names it.
    pub said_by: SaidBy,
}

/// What names a session, the surest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaidBy {
    /// A header that agents send; it names the session alone.
    Header,
    /// `session_id`, which names it alone too (vLLM, SGLang).
    SessionId,
    /// `prompt_cache_key`, with the conversation's first message: one key often stands for a whole
    /// application.
    CacheKey,
    /// `user`, `safety_identifier` or `metadata.user_id`, with the conversation's first message.
    User,
}

impl SaidBy {
    /// Its name in `/explain`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Header => "header",
            Self::SessionId => "session_id",
            Self::CacheKey => "prompt_cache_key",
            Self::User => "user",
        }
    }
}

/// What a header says of it.
pub fn in_headers(headers: &HeaderMap) -> Option<&HeaderValue> {
    // Mostly none is there, which the headers' own names say faster than nine searches.
    let may_be = |name: &&HeaderName| matches!(name.as_str().as_bytes(), [b's' | b'x', ..]);
    let rank = |name: &HeaderName| HEADERS.iter().position(|known| known == name);
    let first = headers.keys().filter(may_be).filter_map(rank).min()?;
    headers.get(&HEADERS[first]).filter(|id| !id.is_empty())
}

/// The session of a request; `None` if nothing says which.
pub fn of(headers: &HeaderMap, info: &RequestInfo, key: HashKey) -> Option<Session> {
    let mut chain = Chain::new(key, info.salt.as_bytes());
    let talk = &info.talk;
    if let Some(id) = in_headers(headers) {
        return Some(Session { name: chain.hash(id.as_bytes()), said_by: SaidBy::Header });
    }
    if talk.session != 0 {
        let name = chain.hash(&talk.session.to_le_bytes());
        return Some(Session { name, said_by: SaidBy::SessionId });
    }
    let (said, said_by) = match (talk.cache_key, talk.user) {
        (0, 0) => return None,
        (0, user) => (user, SaidBy::User),
        (cache_key, _) => (cache_key, SaidBy::CacheKey),
    };
    let parts = [said_by as u64, said, talk.opening.unwrap_or(0)];
    Some(Session { name: chain.hash(parts.map(u64::to_le_bytes).as_flattened()), said_by })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use serde_json::{Value, json};

    use super::*;
    use crate::prompt::request::{self, KeyerConfig};

    fn session(header: Option<(&str, &'static str)>, body: &Value) -> Option<Session> {
        let key = HashKey::new(1);
        let config = KeyerConfig { key, block_bytes: NonZeroUsize::new(64).unwrap() };
        let headers = header.map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)));
        of(&headers.into_iter().collect(), &request::read(body.to_string().as_bytes(), config), key)
    }

    fn chat(opening: &str, more: Value) -> Value {
        let mut body = json!({ "messages": [
            { "role": "system", "content": "You help." },
            { "role": "user", "content": opening.repeat(30) },
        ] });
        body.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
        body
    }

    #[test]
    fn a_header_says_most_then_the_cache_key_then_the_user() {
        let plain = chat("one ", json!({}));
        assert_eq!(session(None, &plain), None, "a request without hints has no session");
        assert_eq!(session(Some(("x-session-id", "")), &plain), None);
        let all = chat("one ", json!({ "prompt_cache_key": "k", "user": "u" }));
        let said_by = |header, body: &Value| session(header, body).unwrap().said_by;
        assert_eq!(said_by(Some(("x-claude-code-session-id", "s")), &all), SaidBy::Header);
        assert_eq!(said_by(None, &all), SaidBy::CacheKey);
        for user in [
            json!({ "user": "u" }),
            json!({ "safety_identifier": "u" }),
            json!({ "metadata": { "user_id": "u" } }),
        ] {
            assert_eq!(said_by(None, &chat("one ", user)), SaidBy::User);
        }
        for odd in [json!({ "user": 3 }), json!({ "metadata": "u" }), json!({ "metadata": { "trace": "u" } })]
        {
            assert_eq!(session(None, &chat("one ", odd)), None);
        }
    }

    #[test]
    fn a_header_is_one_session_whatever_is_asked_and_a_key_is_one_for_each_conversation() {
        let (one, two) = (json!({ "prompt_cache_key": "k" }), json!({ "user": "k" }));
        for name in &HEADERS {
            let header = Some((name.as_str(), "s"));
            assert_eq!(
                session(header, &chat("one ", one.clone())),
                session(header, &chat("two ", two.clone()))
            );
        }
        let named = |opening, hint: &Value| session(None, &chat(opening, hint.clone())).unwrap().name;
        let mut later = chat("one ", one.clone());
        let messages = later["messages"].as_array_mut().unwrap();
        messages.push(
            json!({ "role": "user", "content": "And what of the others, which nobody has seen since?" }),
        );
        assert_eq!(session(None, &later).unwrap().name, named("one ", &one));
        let mut names =
            vec![named("one ", &one), named("two ", &one), named("one ", &two), named("two ", &two)];
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 4, "a key and a user of one name are not each other");
        let salted = json!({ "prompt_cache_key": "k", "cache_salt": "another tenant" });
        assert_ne!(named("one ", &salted), named("one ", &one));
    }
}
