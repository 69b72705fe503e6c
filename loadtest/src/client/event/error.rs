//! What an error says, in the many forms that servers give it.

use serde::Deserialize;
use serde_json::{Value, value::RawValue};

use crate::limits;

/// Whether a field that may hold an error holds one: many servers write `"error":null` into every answer.
pub(super) fn is_told(field: &RawValue) -> bool {
    !matches!(field.get(), "null" | "false" | "\"\"" | "{}" | "[]")
}

/// Whether it is an error as older vLLM writes one: `{"object":"error","message":…}`.
pub(super) fn is_object(data: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Object<'a> {
        #[serde(borrow)]
        object: Option<&'a RawValue>,
    }
    let object = serde_json::from_slice::<Object<'_>>(data).ok().and_then(|data| data.object);
    object.is_some_and(|object| object.get() == "\"error\"")
}

/// The message of an error's JSON, whatever its shape, else the bytes themselves.
pub fn error_message(body: &[u8]) -> String {
    let told = serde_json::from_slice::<Value>(body).ok().and_then(|value| message_in(&value));
    let text = told.unwrap_or_else(|| body.escape_ascii().to_string());
    text.chars().take(limits::ERROR_SAMPLE_CHARS_MAX).collect()
}

/// The message of an answer in one piece that is an error for all its good status.
pub fn error_of_body(body: &[u8]) -> Option<String> {
    let value: Value = serde_json::from_slice(body).ok()?;
    let told = |field: &str| value.get(field).is_some_and(|field| !is_nothing(field));
    let bad = told("error")
        || value["object"] == "error"
        || value["type"] == "error"
        || value["status"] == "failed"
        || (told("detail") && value.get("choices").is_none());
    bad.then(|| error_message(body))
}

/// `{"error":{"message":…}}`, `{"error":"…"}`, `{"message":…}`, `{"detail":…}`, and a response's own error.
fn message_in(value: &Value) -> Option<String> {
    let error = [&value["error"], &value["response"]["error"]].into_iter().find(|error| !is_nothing(error));
    let within = error.unwrap_or(value);
    let message = [&within["message"], &within["detail"], within].into_iter().find_map(Value::as_str);
    message.map(str::to_owned).or_else(|| (!is_nothing(within)).then(|| within.to_string()))
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_error_bodies() {
        for (body, want) in [
            (r#"{"error":{"message":"no worker","type":"server_error"}}"#, "no worker"),
            (r#"{"error":"plain"}"#, "plain"),
            (r#"{"detail":"Not Found"}"#, "Not Found"),
            (r#"{"object":"error","message":"dead"}"#, "dead"),
        ] {
            assert_eq!(error_message(body.as_bytes()), want);
        }
        assert_eq!(error_message(b"<h1>\xff</h1>"), "<h1>\\xff</h1>");
        assert_eq!(error_message(&[b'x'; 9999]).len(), limits::ERROR_SAMPLE_CHARS_MAX);
    }

    #[test]
    fn an_answer_in_one_piece_is_an_error_only_if_it_says_so() {
        for (body, want) in [
            (r#"{"error":{"message":"engine dead"}}"#, Some("engine dead")),
            (r#"{"error":"engine dead"}"#, Some("engine dead")),
            (r#"{"object":"error","message":"engine dead"}"#, Some("engine dead")),
            (r#"{"type":"error","error":{"type":"overloaded_error","message":"busy"}}"#, Some("busy")),
            (r#"{"status":"failed","error":{"message":"dead"}}"#, Some("dead")),
            (r#"{"detail":"engine dead"}"#, Some("engine dead")),
            (r#"{"choices":[],"error":null}"#, None),
            ("not JSON", None),
        ] {
            assert_eq!(error_of_body(body.as_bytes()).as_deref(), want, "{body}");
        }
    }
}
