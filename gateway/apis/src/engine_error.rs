//! What an engine's error says, whatever its shape, and the same in the shape that an API's clients read.
//! Engines answer in OpenAI's shape below Anthropic's paths too (vLLM), with their web framework's `detail`
//! (FastAPI), or with an error's own fields at the top (older ones); what stands in front of one often sends
//! a page or nothing.

use serde_json::Value;

use crate::{messages, responses};

/// Bytes of an error's text that are told, at most: engines and proxies send whole pages.
const TEXT_BYTES_MAX: usize = 2_048;

/// Whose clients are to read an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorShape {
    /// OpenAI's: all of its APIs have one.
    OpenAi,
    /// Anthropic's.
    Anthropic,
}

impl ErrorShape {
    /// The body of an answer with this status and an engine's body, as clients read it; `None` if it has this
    /// shape already.
    pub fn told(self, status: u16, body: &[u8]) -> Option<Value> {
        let json = serde_json::from_slice::<Value>(body).ok();
        if json.as_ref().is_some_and(|json| self.is_of(json)) {
            return None;
        }
        Some(match self {
            Self::OpenAi => responses::error(status, json.as_ref(), body),
            Self::Anthropic => messages::error_of_body(status, body),
        })
    }

    /// Whether an error has this shape. To Anthropic's belongs a class in its kind of words: vLLM puts the
    /// names of its own classes there.
    fn is_of(self, json: &Value) -> bool {
        let error = &json["error"];
        let is_class =
            |class: &str| !class.is_empty() && class.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
        error["message"].is_string()
            && match self {
                Self::OpenAi => json["type"] != "error",
                Self::Anthropic => json["type"] == "error" && error["type"].as_str().is_some_and(is_class),
            }
    }
}

/// What an error in a stream says to its reader, if it is JSON and says anything; and its code, in words.
pub fn said_in_event(data: &[u8]) -> Option<(String, Option<String>)> {
    let json = serde_json::from_slice::<Value>(data).ok()?;
    let text = Some(message(&json)).filter(|text| !text.is_empty())?;
    let of = if json["error"].is_object() { &json["error"] } else { &json };
    Some((shortened(&text).to_owned(), of["code"].as_str().map(str::to_owned)))
}

/// What an error says, whatever its shape; empty if it has no text.
pub(crate) fn message(error: &Value) -> String {
    let text =
        ["message", "detail", "error"].iter().find_map(|name| error.get(name).filter(|v| !v.is_null()));
    match text.unwrap_or(error) {
        Value::String(text) => text.clone(),
        Value::Array(faults) => faults.iter().map(fault).collect::<Vec<_>>().join("; "),
        Value::Object(_) if text.is_some() => text.map(message).unwrap_or_default(),
        _ => String::new(),
    }
}

/// One of FastAPI's faults: what is wrong, and where.
fn fault(fault: &Value) -> String {
    let step = |step: &Value| step.as_str().map_or_else(|| step.to_string(), str::to_owned);
    let place: Vec<String> = fault["loc"].as_array().into_iter().flatten().map(step).collect();
    let what = fault["msg"].as_str().or_else(|| fault.as_str()).unwrap_or("wrong");
    if place.is_empty() { what.to_owned() } else { format!("{}: {what}", place.join(".")) }
}

/// What the body of an error says, which may be JSON; its status, where it says nothing.
pub(crate) fn message_of(status: u16, json: Option<&Value>, body: &[u8]) -> String {
    let message = json.map(message).filter(|message| !message.is_empty());
    let text = message.unwrap_or_else(|| String::from_utf8_lossy(body).trim().to_owned());
    match text.as_str() {
        "" => format!("The engine answered with status {status}."),
        text => shortened(text).to_owned(),
    }
}

/// As much of a text as is told.
pub(crate) fn shortened(text: &str) -> &str {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const VLLM: &str = r#"{"error":{"message":"m","type":"Bad Request","param":"max_tokens","code":400}}"#;

    #[test]
    fn what_has_its_shape_stays_as_it_is() {
        let anthropics =
            |class: &str| format!(r#"{{"type":"error","error":{{"type":"{class}","message":"m"}}}}"#);
        for (shape, body, stays) in [
            (ErrorShape::OpenAi, VLLM, true),
            (ErrorShape::Anthropic, VLLM, false),
            (ErrorShape::Anthropic, &anthropics("overloaded_error"), true),
            (ErrorShape::Anthropic, &anthropics("of_next_year"), true),
            (ErrorShape::Anthropic, &anthropics("BadRequestError"), false),
            (ErrorShape::Anthropic, r#"{"error":{"type":"api_error","message":"m"}}"#, false),
            (ErrorShape::OpenAi, &anthropics("api_error"), false),
            (ErrorShape::OpenAi, r#"{"error":{"message":null}}"#, false),
            (ErrorShape::OpenAi, r#"{"error":"m"}"#, false),
            (ErrorShape::OpenAi, r#"{"detail":"m"}"#, false),
            (ErrorShape::OpenAi, r#"{"object":"error","message":"m"}"#, false),
            (ErrorShape::OpenAi, "m", false),
            (ErrorShape::OpenAi, "", false),
        ] {
            assert_eq!(shape.told(400, body.as_bytes()).is_none(), stays, "{shape:?} {body}");
        }
    }

    #[test]
    fn an_errors_text_and_what_of_its_fields_clients_know_are_told() {
        let page = "<html><body>502 Bad Gateway</body></html>\r\n";
        let fields = r#"{"detail":[{"type":"missing","loc":["body","messages",0],"msg":"Field required"},{"msg":"odd"}]}"#;
        for (status, body, class, text) in [
            (400, VLLM, "invalid_request_error", "m"),
            (404, r#"{"detail":"Not Found"}"#, "not_found_error", "Not Found"),
            (422, fields, "invalid_request_error", "body.messages.0: Field required; odd"),
            (502, page, "api_error", page.trim()),
            (503, "", "api_error", "The engine answered with status 503."),
            (529, "busy", "overloaded_error", "busy"),
        ] {
            let want = json!({"type": "error", "error": {"type": class, "message": text}});
            assert_eq!(ErrorShape::Anthropic.told(status, body.as_bytes()), Some(want), "{body}");
        }
        for (status, body, class, text, code) in [
            (422, fields, "invalid_request_error", "body.messages.0: Field required; odd", None),
            (404, r#"{"detail":"Not Found"}"#, "not_found_error", "Not Found", None),
            (500, r#"{"object":"error","message":"m","type":"Odd","code":"c"}"#, "Odd", "m", Some("c")),
            (
                500,
                r#"{"error":{"code":"c","type":"Odd"}}"#,
                "Odd",
                r#"{"error":{"code":"c","type":"Odd"}}"#,
                Some("c"),
            ),
            (502, page, "server_error", page.trim(), None),
            (429, "", "rate_limit_error", "The engine answered with status 429.", None),
        ] {
            let want = json!({"error": {"message": text, "type": class, "param": null, "code": code}});
            assert_eq!(ErrorShape::OpenAi.told(status, body.as_bytes()), Some(want), "{body}");
        }
    }

    #[test]
    fn what_a_stream_says_failed_has_its_text_and_its_code() {
        for (data, want) in [
            (r#"{"error":{"message":"m","code":"c"}}"#, Some(("m", Some("c")))),
            (VLLM, Some(("m", None))),
            (r#"{"detail":"m"}"#, Some(("m", None))),
            (r#"{"type":"error","code":"c","message":"m","error":null}"#, Some(("m", Some("c")))),
            (r#"{"type":"response.cancelled","response":{}}"#, None),
            ("m", None),
        ] {
            let want =
                want.map(|(text, code): (&str, Option<&str>)| (text.to_owned(), code.map(str::to_owned)));
            assert_eq!(said_in_event(data.as_bytes()), want, "{data}");
        }
    }

    proptest! {
        /// Whatever an engine says, its clients read it, and it is bounded.
        #[test]
        fn any_body_comes_to_an_error(
            status in 400_u16..600,
            body in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..64),
                "[{}\\[\\]\":a-z0-9, é]{0,5000}".prop_map(String::into_bytes),
                "\\PC{0,3000}".prop_map(|text| json!({"detail": text}).to_string().into_bytes()),
            ],
        ) {
            for shape in [ErrorShape::OpenAi, ErrorShape::Anthropic] {
                let Some(told) = shape.told(status, &body) else { continue };
                prop_assert!(shape.is_of(&told), "{}", told);
                let text = told["error"]["message"].as_str().unwrap();
                prop_assert!(!text.is_empty() && text.len() <= TEXT_BYTES_MAX);
                prop_assert_eq!(shape.told(status, told.to_string().as_bytes()), None);
            }
        }
    }
}
