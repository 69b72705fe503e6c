//! OpenAI's Responses: `/v1/responses`, and the answers that are kept for a while. A request becomes the same
//! generation as a chat's (`request.rs` of the folder above); here are its own fields, its answers, whole and
//! streamed, and the store by which a conversation goes on.

pub(super) mod answer;
pub(super) mod items;
pub(super) mod names;
pub(super) mod previous;
pub(super) mod request;
pub(super) mod store;
pub(super) mod stream;

use std::sync::Arc;

use http::Method;
use serde_json::json;

use super::error::ApiError;
use super::{App, Response, full, json_answer, json_response};

/// Answers a request for one answer that was kept, or to forget it.
pub(super) fn kept(app: &Arc<App>, method: &Method, id: &str) -> Result<Response, ApiError> {
    let unknown = || ApiError::response_not_found(id, "response_id");
    if method == Method::DELETE {
        if !app.responses.forget(id) {
            return Err(unknown());
        }
        return Ok(json_response(&json!({"id": id, "object": "response", "deleted": true})));
    }
    Ok(json_answer(full(app.responses.find(id).ok_or_else(unknown)?.response)))
}

#[cfg(test)]
mod tests;
