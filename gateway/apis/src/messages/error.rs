//! Errors as Anthropic's clients read them.

use serde_json::{Value, json};

use crate::engine_error::{message, message_of, shortened};

/// Classes that this API has, some of which engines of chats know, too.
const KINDS: [&str; 9] = [
    "invalid_request_error",
    "authentication_error",
    "billing_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
];

/// Codes of a status 503 by which this host is short of something, and would take the request later.
const OVERLOADED: [&str; 2] = ["overloaded", "gateway_overloaded"];

/// An error's body, and the data of its event. `code` is OpenAI's word for it, where there is one.
pub fn error(status: u16, code: Option<&str>, message: &str) -> Value {
    of_kind(kind_of(status, code), message)
}

pub(super) fn of_kind(kind: &str, message: &str) -> Value {
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

/// The class of an error, by which clients decide whether to come back.
pub(super) fn kind_of(status: u16, code: Option<&str>) -> &'static str {
    match status {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 if code.is_some_and(|code| OVERLOADED.contains(&code)) => "overloaded_error",
        504 => "timeout_error",
        529 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

/// An error's body, from that of whoever answers for chats: OpenAI's shape, FastAPI's, or a plain text.
pub(crate) fn error_of_body(status: u16, body: &[u8]) -> Value {
    let json = serde_json::from_slice::<Value>(body).ok();
    let code = json.as_ref().and_then(|json| inner(json)["code"].as_str());
    error(status, code, &message_of(status, json.as_ref(), body))
}

/// An error's event, from what a stream says in the place of a chunk.
pub fn error_of_event(data: &[u8]) -> Value {
    let json = serde_json::from_slice::<Value>(data).unwrap_or_default();
    let (of, text) = (inner(&json), message(&json));
    let code = &of["code"];
    let status = code.as_u64().and_then(|code| u16::try_from(code).ok()).filter(|code| *code >= 400);
    let known = of["type"].as_str().filter(|kind| KINDS.contains(kind));
    let kind = match code.as_str() {
        Some(code) if OVERLOADED.contains(&code) => "overloaded_error",
        _ => known.unwrap_or_else(|| kind_of(status.unwrap_or(500), None)),
    };
    let text = match text.as_str() {
        "" => "The engine's stream holds what is no chunk of a chat.",
        text => shortened(text),
    };
    of_kind(kind, text)
}

/// The fields of an error: its object's, or those at the top.
fn inner(json: &Value) -> &Value {
    if json["error"].is_null() { json } else { &json["error"] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_class_by_which_clients_come_back_or_do_not() {
        for (status, code, kind) in [
            (400, None, "invalid_request_error"),
            (401, None, "authentication_error"),
            (402, None, "billing_error"),
            (403, None, "permission_error"),
            (404, Some("model_not_found"), "not_found_error"),
            (413, None, "request_too_large"),
            (422, None, "invalid_request_error"),
            (429, Some("engine_overloaded"), "rate_limit_error"),
            (500, Some("overloaded"), "api_error"),
            (503, None, "api_error"),
            (503, Some("overloaded"), "overloaded_error"),
            (503, Some("gateway_overloaded"), "overloaded_error"),
            (504, None, "timeout_error"),
            (529, None, "overloaded_error"),
        ] {
            let want = json!({"type": "error", "error": {"type": kind, "message": "m"}});
            assert_eq!(error(status, code, "m"), want, "{status} {code:?}");
        }
    }

    #[test]
    fn any_error_of_an_engine_is_told() {
        let long = "é".repeat(2_048);
        for (status, body, kind, message) in [
            (
                400,
                r#"{"error":{"message":"Bad.","type":"BadRequestError","param":null,"code":400}}"#,
                "invalid_request_error",
                "Bad.",
            ),
            (
                503,
                r#"{"error":{"message":"Full.","type":"server_error","code":"overloaded"}}"#,
                "overloaded_error",
                "Full.",
            ),
            (
                404,
                r#"{"object":"error","message":"No such model.","type":"NotFoundError","code":404}"#,
                "not_found_error",
                "No such model.",
            ),
            (
                422,
                r#"{"detail":[{"loc":["body","messages",0],"msg":"Field required"}]}"#,
                "invalid_request_error",
                "body.messages.0: Field required",
            ),
            (401, r#"{"detail":"Who?"}"#, "authentication_error", "Who?"),
            (500, r#"{"error":"Broken."}"#, "api_error", "Broken."),
            (
                400,
                r#"{"type":"error","error":{"type":"x","message":"Own."}}"#,
                "invalid_request_error",
                "Own.",
            ),
            (502, "Bad Gateway\n", "api_error", "Bad Gateway"),
            (502, "", "api_error", "The engine answered with status 502."),
            (500, "{}", "api_error", "{}"),
            (500, &long, "api_error", &long[..2_048]),
        ] {
            let want = json!({"type": "error", "error": {"type": kind, "message": message}});
            assert_eq!(error_of_body(status, body.as_bytes()), want, "{body}");
        }
    }

    #[test]
    fn an_error_in_a_stream_has_its_class_from_its_own_words() {
        for (data, kind) in [
            (r#"{"error":{"message":"m","type":"BadRequestError","code":400}}"#, "invalid_request_error"),
            (r#"{"error":{"message":"m","type":"rate_limit_error","code":"x"}}"#, "rate_limit_error"),
            (r#"{"error":{"message":"m","type":"server_error","code":"overloaded"}}"#, "overloaded_error"),
            (r#"{"error":{"message":"m","type":"server_error","code":null}}"#, "api_error"),
            (r#"{"object":"error","message":"m","code":40000}"#, "api_error"),
        ] {
            assert_eq!(error_of_event(data.as_bytes()), of_kind(kind, "m"), "{data}");
        }
        assert!(error_of_event(b"x")["error"]["message"].as_str().unwrap().contains("no chunk"));
    }
}
