//! Models whose engines speak chat completions alone: requests of other APIs go to them as chats, and the
//! chats' answers back. What becomes of a body is `keyway-apis`' matter; here is which requests these are,
//! what their heads become, and an answer's events on their way.

use std::{collections::HashSet, sync::Arc};

use bytes::Bytes;
use http::{
    HeaderName, HeaderValue, Method, Uri,
    header::{AUTHORIZATION, CONTENT_TYPE},
    request::Parts,
};
use keyway_apis::{Api, Back, Refusal, SystemPlace, Translated, messages};

use crate::{config::ModelRulesByName, error::Error, sse};

/// Where chats are asked for.
pub const CHATS: &str = "/v1/chat/completions";
const COUNT: &str = "/v1/messages/count_tokens";
/// What Anthropic's clients send and an engine of chats does not know.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const ANTHROPIC: [HeaderName; 3] =
    [API_KEY, HeaderName::from_static("anthropic-version"), HeaderName::from_static("anthropic-beta")];

/// Models whose engines speak chats alone.
#[derive(Debug, Clone, Default)]
pub struct ChatOnly(Arc<HashSet<String>>);

/// What a request in front of such an engine asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// An answer, told in this API.
    Answer(Api),
    /// How many tokens its prompt has.
    Count,
}

/// An answer's way back from a chat.
#[derive(Debug)]
pub struct WayBack {
    /// Turns the answer back.
    pub back: Box<dyn Back>,
    /// Names of fields that were left out, as the client is told.
    pub ignored: Option<HeaderValue>,
}

impl ChatOnly {
    /// Those whose rules say so.
    pub fn of(rules: &ModelRulesByName) -> Self {
        let models = rules.iter().filter(|(_, rules)| rules.translate);
        Self(Arc::new(models.map(|(name, _)| name.clone()).collect()))
    }

    /// What a request asks for, if that has to be translated.
    pub fn wish(&self, method: &Method, path: &str, model: Option<&str>) -> Option<Wish> {
        if self.0.is_empty() || method != Method::POST || !self.0.contains(model?) {
            return None;
        }
        match path.strip_suffix('/').unwrap_or(path) {
            "/v1/messages" => Some(Wish::Answer(Api::Messages)),
            "/v1/responses" => Some(Wish::Answer(Api::Responses)),
            COUNT => Some(Wish::Count),
            _ => None,
        }
    }
}

/// A request's body as a chat's, for a template with this place for system messages, and the way back of an
/// answer.
///
/// # Errors
/// It is no request of this API, or asks for what chats do not have.
pub fn to_chat(wish: Wish, body: &[u8], place: SystemPlace) -> Result<(Vec<u8>, Option<WayBack>), Error> {
    let refused = |Refusal { message, param }| Error::NoChat { message, param };
    match wish {
        Wish::Count => Ok((messages::to_counted_chat(body, place).map_err(refused)?, None)),
        Wish::Answer(api) => {
            let Translated { chat, ignored, back } =
                keyway_apis::to_chat(api, body, place).map_err(refused)?;
            let ignored = HeaderValue::from_str(&ignored.join(", ")).ok().filter(|names| !names.is_empty());
            Ok((chat, Some(WayBack { back, ignored })))
        }
    }
}

/// Makes a head that of a chat. A key in Anthropic's header goes on in OpenAI's.
pub fn head_to_chat(parts: &mut Parts) {
    parts.uri = Uri::from_static(CHATS);
    let headers = &mut parts.headers;
    if let Some(key) = headers.get(API_KEY).filter(|_| !headers.contains_key(AUTHORIZATION)) {
        let bearer = HeaderValue::from_bytes(&[b"Bearer ", key.as_bytes()].concat());
        headers.extend(bearer.ok().map(|bearer| (AUTHORIZATION, bearer)));
    }
    for name in &ANTHROPIC {
        headers.remove(name);
    }
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
}

/// Turns a stream's events back.
#[derive(Debug)]
pub struct EventsBack {
    back: Box<dyn Back>,
    ended: bool,
}

impl EventsBack {
    /// Of an answer that begins.
    pub fn new(back: Box<dyn Back>) -> Self {
        Self { back, ended: false }
    }

    /// What these whole events of the chat come to, often nothing. Comments keep the connection alive, and
    /// stay.
    pub fn push(&mut self, events: &[u8]) -> Bytes {
        let mut out = Vec::with_capacity(events.len());
        for event in sse::events(events) {
            match event.data {
                Some(data) => self.back.event(&data, &mut out),
                None => out.extend_from_slice(event.raw),
            }
        }
        out.into()
    }

    /// What is told at the end, once.
    pub fn end(&mut self) -> Bytes {
        let mut out = Vec::new();
        if !std::mem::replace(&mut self.ended, true) {
            self.back.end(&mut out);
        }
        out.into()
    }
}

#[cfg(test)]
mod tests {
    use keyway_apis::NoChat;

    use crate::config::ModelRules;

    use super::*;

    fn parts(method: Method, path: &str) -> Parts {
        http::Request::builder().method(method).uri(path).body(()).unwrap().into_parts().0
    }

    #[test]
    fn requests_of_other_apis_for_such_models_are_translated() {
        let rules = |translate| ModelRules { translate, ..ModelRules::default() };
        let all = [("m".to_owned(), rules(true)), ("other".to_owned(), rules(false))];
        let models = ChatOnly::of(&all.into());
        let messages = Some(Wish::Answer(Api::Messages));
        for (method, path, model, wished) in [
            (Method::POST, "/v1/messages", Some("m"), messages),
            (Method::POST, "/v1/messages/", Some("m"), messages),
            (Method::POST, "/v1/responses", Some("m"), Some(Wish::Answer(Api::Responses))),
            (Method::POST, "/v1/messages/count_tokens", Some("m"), Some(Wish::Count)),
            (Method::POST, "/v1/messages/batches", Some("m"), None),
            (Method::POST, "/v1/chat/completions", Some("m"), None),
            (Method::GET, "/v1/responses/resp_1", Some("m"), None),
            (Method::GET, "/v1/responses", Some("m"), None),
            (Method::POST, "/v1/messages", Some("other"), None),
            (Method::POST, "/v1/messages", None, None),
        ] {
            assert_eq!(models.wish(&method, path, model), wished, "{method} {path} {model:?}");
        }
        assert_eq!(ChatOnly::default().wish(&Method::POST, "/v1/messages", Some("m")), None);
    }

    #[test]
    fn a_key_goes_on_in_the_header_that_chats_have() {
        let mut head = parts(Method::POST, "/v1/messages?beta=true");
        head.headers.insert("x-api-key", HeaderValue::from_static("k"));
        head.headers.insert("anthropic-version", HeaderValue::from_static("2023-06-01"));
        head.headers.insert("x-session-id", HeaderValue::from_static("s"));
        head_to_chat(&mut head);
        let mut names: Vec<_> = head.headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            (head.uri.to_string(), names),
            (CHATS.to_owned(), vec!["authorization", "content-type", "x-session-id"])
        );
        assert_eq!(head.headers[AUTHORIZATION], "Bearer k");
        head.headers.insert("x-api-key", HeaderValue::from_static("other"));
        head_to_chat(&mut head);
        assert_eq!(head.headers[AUTHORIZATION], "Bearer k", "the client's own stays");
    }

    /// Tells data in brackets, and its end once.
    #[derive(Debug)]
    struct Brackets;

    impl Back for Brackets {
        fn whole(&mut self, _: &[u8]) -> Result<Vec<u8>, NoChat> {
            Err(NoChat)
        }

        fn event(&mut self, data: &[u8], out: &mut Vec<u8>) {
            out.extend([b"<", data, b">"].concat());
        }

        fn end(&mut self, out: &mut Vec<u8>) {
            out.push(b'.');
        }

        fn error(&self, _: u16, body: &[u8]) -> Vec<u8> {
            body.to_vec()
        }
    }

    #[test]
    fn events_are_turned_back_one_by_one_and_comments_stay() {
        let mut events = EventsBack::new(Box::new(Brackets));
        assert_eq!(
            events.push(b"data: a\n\n: alive\n\nevent: x\ndata: b\ndata: c\n\n"),
            "<a>: alive\n\n<b\nc>"
        );
        assert_eq!((events.push(b""), events.end(), events.end()), (Bytes::new(), ".".into(), Bytes::new()));
    }
}
