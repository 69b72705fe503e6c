//! Anthropic's Messages: `/v1/messages` and `/v1/messages/count_tokens`. A request becomes the same
//! generation as a chat's (`request.rs` of the folder above); here are its own fields, its answers, whole and
//! streamed, and its errors.

pub(super) mod answer;
pub(super) mod count;
pub(super) mod request;
pub(super) mod stream;

use http::StatusCode;
use serde_json::{Value, json};

use super::Response;
use super::error::ApiError;

/// Whether a path is of this API, and so has its errors.
pub(super) fn has(path: &str) -> bool {
    path.strip_prefix("/v1/messages").is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// An error as Anthropic's clients read it; its status is that of the other APIs.
pub(super) fn refusal(error: ApiError) -> Response {
    let json = told(&error).to_string();
    error.into_response_of(json)
}

fn told(error: &ApiError) -> Value {
    let kind = kind_of(error.status(), error.detail().code.as_deref());
    json!({"type": "error", "error": {"type": kind, "message": error.detail().message}})
}

/// The class of an error, by which clients decide whether to come back.
fn kind_of(status: StatusCode, code: Option<&str>) -> &'static str {
    match status {
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE if code == Some("overloaded") => "overloaded_error",
        _ if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    }
}

#[cfg(test)]
mod tests;
