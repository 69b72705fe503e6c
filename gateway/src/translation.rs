//! Models whose engines speak chat completions alone, or refuse some requests of other APIs: these go to them
//! as chats, and the chats' answers back. What becomes of a body is `keyway-apis`' matter; here is which
//! requests these are, what their heads become, and an answer's events on their way.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use http::{
    HeaderName, HeaderValue, Method, Uri,
    header::{AUTHORIZATION, CONTENT_TYPE},
    request::Parts,
};
use keyway_apis::{Api, Back, Refusal, SystemPlace, Translated, messages};

use crate::{
    config::{ModelRulesByName, Translate},
    error::Error,
    json::Value,
    sse,
};

/// Where chats are asked for.
pub const CHATS: &str = "/v1/chat/completions";
const COUNT: &str = "/v1/messages/count_tokens";
/// What Anthropic's clients send and an engine of chats does not know.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const ANTHROPIC: [HeaderName; 3] =
    [API_KEY, HeaderName::from_static("anthropic-version"), HeaderName::from_static("anthropic-beta")];

/// Models whose workers get requests of other APIs as chats, and which of them.
#[derive(Debug, Clone, Default)]
pub struct AsChats(Arc<HashMap<String, Translate>>);

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

impl AsChats {
    /// Those whose rules say so.
    pub fn of(rules: &ModelRulesByName) -> Self {
        let models = rules.iter().map(|(name, rules)| (name.clone(), rules.translate));
        Self(Arc::new(models.filter(|(_, which)| *which != Translate::Never).collect()))
    }

    /// What a request asks for, if that has to be translated.
    pub fn wish(&self, method: &Method, path: &str, model: Option<&str>, body: &[u8]) -> Option<Wish> {
        if self.0.is_empty() || method != Method::POST {
            return None;
        }
        let which = self.0.get(model?)?;
        let wish = match path.strip_suffix('/').unwrap_or(path) {
            "/v1/messages" => Wish::Answer(Api::Messages),
            "/v1/responses" => Wish::Answer(Api::Responses),
            COUNT => Wish::Count,
            _ => return None,
        };
        let is_due = match which {
            Translate::Never => false,
            Translate::CustomTools => wish == Wish::Answer(Api::Responses) && has_custom_tool(body),
            Translate::Always => true,
        };
        is_due.then_some(wish)
    }
}

/// Whether a request of OpenAI's Responses brings a tool whose argument is a text, as Codex's patches are.
fn has_custom_tool(body: &[u8]) -> bool {
    let Some(fields) = std::str::from_utf8(body).ok().and_then(Value::document) else { return false };
    let tools = fields.flatten().filter(|(name, _)| name == "tools").last();
    let Some(items) = tools.and_then(|(_, tools)| tools.items()) else { return false };
    items.flatten().any(|tool| {
        let mut fields = tool.fields().into_iter().flatten().flatten();
        fields.any(|(name, value)| name == "type" && value.text().is_some_and(|kind| kind == "custom"))
    })
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

    fn models(of: &[(&str, Translate)]) -> AsChats {
        let rules = |&(name, translate): &(&str, Translate)| {
            (name.to_owned(), ModelRules { translate, ..ModelRules::default() })
        };
        AsChats::of(&of.iter().map(rules).collect())
    }

    #[test]
    fn requests_of_other_apis_for_such_models_are_translated() {
        let models = models(&[("m", Translate::Always), ("other", Translate::Never)]);
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
            assert_eq!(models.wish(&method, path, model, b"{}"), wished, "{method} {path} {model:?}");
        }
        assert_eq!(AsChats::default().wish(&Method::POST, "/v1/messages", Some("m"), b"{}"), None);
    }

    #[test]
    fn responses_with_custom_tools_alone_are_translated_where_engines_have_these_apis() {
        let models = models(&[("m", Translate::CustomTools)]);
        let custom =
            r#"{"model":"m","tools":[{"type":"function","name":"f"},{"type":"custom","name":"patch"}]}"#;
        for (path, body, is_due) in [
            ("/v1/responses", custom, true),
            ("/v1/responses", r#"{"tools":[{"name":"p","type":"cust\u006fm"}],"input":"a"}"#, true),
            ("/v1/messages", custom, false),
            ("/v1/messages/count_tokens", custom, false),
            ("/v1/responses", r#"{"tools":[{"type":"function","name":"custom"}]}"#, false),
            ("/v1/responses", r#"{"tools":[{"type":"function","format":{"type":"custom"}}]}"#, false),
            // Functions alone are told from a namespace to an engine of chats.
            ("/v1/responses", r#"{"tools":[{"type":"namespace","tools":[{"type":"custom"}]}]}"#, false),
            ("/v1/responses", r#"{"input":[{"tools":[{"type":"custom"}]}]}"#, false),
            // As engines read it, the last one counts.
            ("/v1/responses", r#"{"tools":[{"type":"custom"}],"tools":[]}"#, false),
            ("/v1/responses", r#"{"tools":{"type":"custom"}}"#, false),
            ("/v1/responses", r#"{"tools":"#, false),
            ("/v1/responses", "", false),
        ] {
            let wish = models.wish(&Method::POST, path, Some("m"), body.as_bytes());
            assert_eq!(wish.is_some(), is_due, "{path} {body}");
        }
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
