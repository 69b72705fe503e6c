//! Errors of engines in OpenAI's shape.

use serde_json::{Value, json};

use crate::engine_error::message_of;

/// An error with this body, which may be JSON. Of its fields those are kept that are words.
pub(crate) fn error(status: u16, json: Option<&Value>, body: &[u8]) -> Value {
    let message = message_of(status, json, body);
    let of = json.map(|json| if json["error"].is_object() { &json["error"] } else { json });
    let field = |name: &str| of.map(|of| of[name].clone()).filter(Value::is_string);
    // Anthropic's envelope is of the type `error`.
    let class = field("type").filter(|class| class != "error").unwrap_or_else(|| of_status(status).into());
    json!({"error": {"message": message, "type": class, "param": field("param"), "code": field("code")}})
}

const fn of_status(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        429 => "rate_limit_error",
        400..=499 => "invalid_request_error",
        _ => "server_error",
    }
}
