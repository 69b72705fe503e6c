//! Anthropic's Messages: `/v1/messages` and `/v1/messages/count_tokens`. A request becomes the same
//! generation as a chat's (`request.rs` of the folder above); here are its own fields. How its answers and
//! its errors are told is `keyway_apis::messages`.

pub(super) mod count;
pub(super) mod request;
pub(super) mod stream;

use http::HeaderMap;
use keyway_apis::messages::MessageHead;
use keyway_wire::headers::ANTHROPIC_VERSION;
use serde_json::{Value, json};

use super::error::{ApiError, NO_THREADS};
use super::request::Call;
use super::running::Running;
use super::{Response, told};
use crate::answer::reader::Shown;

/// Whether a request is to this API, and so has its errors and headers: by its path, or, for models, as this
/// API's clients ask for them.
pub(super) fn has(path: &str, headers: &HeaderMap) -> bool {
    let below =
        |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    below("/v1/messages") || (below("/v1/models") && of_client(headers))
}

/// Whether a client speaks this API: each of its requests has this header.
pub(super) fn of_client(headers: &HeaderMap) -> bool {
    headers.contains_key(ANTHROPIC_VERSION)
}

/// The message of one choice.
pub(super) fn whole(call: &Call, choice: &Running, text: Shown) -> Value {
    let head = MessageHead::new(call.model.clone());
    head.whole(&told::said(text), &told::finish(&choice.output), told::counts(std::slice::from_ref(choice)))
}

/// An error as Anthropic's clients read it; its status is that of the other APIs.
pub(super) fn refusal(error: ApiError) -> Response {
    let json = error_of(&error).to_string();
    error.into_response_of(json)
}

fn error_of(error: &ApiError) -> Value {
    let detail = error.detail();
    let code = detail.code.as_deref();
    let mut told = keyway_apis::messages::error(error.status().as_u16(), code, &detail.message);
    if code == Some(NO_THREADS) {
        told["error"]["details"] = json!({"error_code": NO_THREADS});
    }
    told
}

#[cfg(test)]
mod tests;
