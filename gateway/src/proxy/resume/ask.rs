//! What of a request's body says whether its answer can be continued elsewhere. Read in one pass over the
//! body's fields, and only where it matters: not for what goes to an engine whose streams are never
//! continued.

use std::borrow::Cow;

use bytes::Bytes;
use http::{Method, request::Parts};
use keyway_wire::extension::{FIELD, RequestExtension};

use super::Obstacle;
use crate::{json::Value, proxy::named_body};

/// A request whose answer can be continued exactly, if its worker has the extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ask {
    /// Whether the client chose the seed.
    pub(super) has_seed: bool,
}

impl Ask {
    /// Reads a request for a stream.
    pub(super) fn of(parts: &Parts, body: &[u8]) -> Result<Self, Obstacle> {
        let path = parts.uri.path();
        if parts.method != Method::POST || !matches!(path, "/v1/chat/completions" | "/v1/completions") {
            return Err(Obstacle::Path);
        }
        let text = std::str::from_utf8(body).map_err(|_| Obstacle::Unreadable)?;
        let mut ask = Self { has_seed: false };
        for field in Value::document(text).ok_or(Obstacle::Unreadable)? {
            let (name, value) = field.map_err(|_| Obstacle::Unreadable)?;
            // A field that is null counts as absent, whatever it is.
            let given = value.raw() != "null";
            match name.as_ref() {
                FIELD => return Err(Obstacle::OwnExtension),
                "seed" => ask.has_seed = given,
                "n" | "best_of" if given && value.raw() != "1" => return Err(Obstacle::Choices),
                "prompt" if holds_several(value) => return Err(Obstacle::Choices),
                "echo" if value.raw() == "true" => return Err(Obstacle::Echo),
                "response_format" if given && !is_text(value) => return Err(Obstacle::Form),
                "structured_outputs" if given => return Err(Obstacle::Form),
                guided if given && guided.starts_with("guided_") => return Err(Obstacle::Form),
                // A call that must come has a grammar; one that may come has none.
                "tool_choice" if given && !matches!(value.text().as_deref(), Some("none" | "auto")) => {
                    return Err(Obstacle::Tools);
                }
                _ => {}
            }
        }
        Ok(ask)
    }
}

/// Whether the answer to a request can be continued by its text, at engines that know nothing of the
/// extension.
pub(super) fn continues_as_text(parts: &Parts, body: &[u8]) -> Result<(), Obstacle> {
    Ask::of(parts, body)?;
    let text = std::str::from_utf8(body).map_err(|_| Obstacle::Unreadable)?;
    for field in Value::document(text).ok_or(Obstacle::Unreadable)? {
        let (name, value) = field.map_err(|_| Obstacle::Unreadable)?;
        let given = !matches!(value.raw(), "null" | "false");
        match name.as_ref() {
            // Of a completion also 0.
            "logprobs" | "prompt_logprobs" | "return_token_ids" | "return_tokens_as_token_ids" if given => {
                return Err(Obstacle::Logprobs);
            }
            "use_beam_search" if given => return Err(Obstacle::Choices),
            "continue_final_message" if given => return Err(Obstacle::OwnExtension),
            "add_generation_prompt" if value.raw() == "false" => return Err(Obstacle::OwnExtension),
            "prompt_embeds" if given => return Err(Obstacle::PromptIds),
            "prompt" if !is_text_prompt(value) => return Err(Obstacle::PromptIds),
            _ => {}
        }
    }
    Ok(())
}

/// One text, alone or in a list.
fn is_text_prompt(prompt: Value<'_>) -> bool {
    let is_text = |value: Value<'_>| value.raw().starts_with('"');
    is_text(prompt) || prompt.items().and_then(|mut items| items.next()?.ok()).is_some_and(is_text)
}

/// Whether a prompt is a list of prompts, of which each has an answer; one of ids is a prompt.
pub(in crate::proxy) fn holds_several(prompt: Value<'_>) -> bool {
    let Some(mut items) = prompt.items() else { return false };
    let is_id = |item: &Value<'_>| item.raw().starts_with(|c: char| c.is_ascii_digit());
    let first_is_id = items.next().and_then(Result::ok).is_some_and(|first| is_id(&first));
    !first_is_id && items.next().is_some()
}

/// Whether a format asks for nothing.
fn is_text(format: Value<'_>) -> bool {
    let kind =
        |(name, value): (Cow<'_, str>, Value<'_>)| name == "type" && value.text().as_deref() == Some("text");
    format.fields().is_some_and(|fields| fields.filter_map(Result::ok).any(kind))
}

/// A body, which [`Ask::of`] has read, with the extension in front.
pub(super) fn extended(body: &Bytes, extension: &RequestExtension) -> Bytes {
    // Plain numbers always serialise.
    let extension = serde_json::to_string(extension).unwrap_or_default();
    named_body::with_field(body, FIELD, &extension)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn ask(path: &str, body: &str) -> Result<Ask, Obstacle> {
        let request = http::Request::post(path).body(()).unwrap();
        Ask::of(&request.into_parts().0, body.as_bytes())
    }

    #[test]
    fn plain_requests_can_be_resumed() {
        for (body, has_seed) in [
            (r#"{"messages":[]}"#, false),
            (r#"{"messages":[],"seed":3,"n":1,"tools":[],"response_format":{"type":"text"}}"#, true),
            (r#"{"seed":null,"n":null,"response_format":null,"guided_json":null,"logprobs":true}"#, false),
            (r#"{"tools":[{"type":"function"}],"tool_choice":"none"}"#, false),
            (r#"{"tools":[{"type":"function"}],"tool_choice":"auto"}"#, false),
            (r#"{"tools":[{"type":"function"}]}"#, false),
        ] {
            assert_eq!(ask("/v1/chat/completions", body), Ok(Ask { has_seed }), "{body}");
        }
        for prompt in ["\"one\"", "[1, 2]", "[\"one\"]", "[[1,2]]"] {
            assert!(ask("/v1/completions", &format!("{{\"prompt\":{prompt}}}")).is_ok(), "{prompt}");
        }
    }

    #[test]
    fn what_cannot_be_resumed_is_named() {
        for (body, obstacle) in [
            (r#"{"keyway":{}}"#, Obstacle::OwnExtension),
            (r#"{"key\u0077ay":null}"#, Obstacle::OwnExtension),
            (r#"{"n":2}"#, Obstacle::Choices),
            (r#"{"prompt":["a","b"]}"#, Obstacle::Choices),
            (r#"{"prompt":[[1],[2]]}"#, Obstacle::Choices),
            (r#"{"echo":true}"#, Obstacle::Echo),
            (r#"{"response_format":{"type":"json_object"}}"#, Obstacle::Form),
            (r#"{"guided_regex":"a*"}"#, Obstacle::Form),
            (r#"{"structured_outputs":{}}"#, Obstacle::Form),
            (r#"{"tool_choice":"required","tools":[1]}"#, Obstacle::Tools),
            (r#"{"tool_choice":{"type":"function"},"tools":[1]}"#, Obstacle::Tools),
            (r#"{"messages":"#, Obstacle::Unreadable),
            ("[]", Obstacle::Unreadable),
        ] {
            assert_eq!(ask("/v1/completions", body), Err(obstacle), "{body}");
        }
        assert_eq!(ask("/v1/responses", "{}"), Err(Obstacle::Path));
    }

    #[test]
    fn what_text_does_not_say_cannot_be_continued_by_it() {
        let of = |body: &str| {
            let request = http::Request::post("/v1/completions").body(()).unwrap();
            continues_as_text(&request.into_parts().0, body.as_bytes())
        };
        for body in [
            r#"{"prompt":"a","logprobs":null,"add_generation_prompt":true,"continue_final_message":false}"#,
            r#"{"prompt":["a"],"tools":[{}],"tool_choice":"auto","logprobs":false}"#,
        ] {
            assert_eq!(of(body), Ok(()), "{body}");
        }
        for (body, obstacle) in [
            (r#"{"n":2}"#, Obstacle::Choices),
            (r#"{"use_beam_search":true}"#, Obstacle::Choices),
            (r#"{"logprobs":0}"#, Obstacle::Logprobs),
            (r#"{"logprobs":true}"#, Obstacle::Logprobs),
            (r#"{"return_token_ids":true}"#, Obstacle::Logprobs),
            (r#"{"continue_final_message":true}"#, Obstacle::OwnExtension),
            (r#"{"add_generation_prompt":false}"#, Obstacle::OwnExtension),
            (r#"{"prompt":[1,2]}"#, Obstacle::PromptIds),
            (r#"{"prompt":[[1,2]]}"#, Obstacle::PromptIds),
        ] {
            assert_eq!(of(body), Err(obstacle), "{body}");
        }
    }

    #[test]
    fn the_extension_is_a_field_of_the_body() {
        let extension = RequestExtension { seed: Some(7), ..RequestExtension::default() };
        for body in [r#"{"a":[1]}"#, " { \"a\" : [ 1 ] } ", "{\n}", "{}"] {
            let out = extended(&Bytes::copy_from_slice(body.as_bytes()), &extension);
            let mut value: serde_json::Value = serde_json::from_slice(&out).unwrap();
            assert_eq!(value["keyway"].take(), json!({"seed": 7, "emitted_bytes": 0}), "{body}");
            value.as_object_mut().unwrap().remove("keyway");
            assert_eq!(value, serde_json::from_str::<serde_json::Value>(body).unwrap());
        }
    }
}
