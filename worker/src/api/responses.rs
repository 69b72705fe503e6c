//! OpenAI's Responses: `/v1/responses`, and the answers that are kept for a while. A request becomes the same
//! generation as a chat's (`request.rs` of the folder above); here are its own fields, its answers, which
//! `keyway_apis` tells, and the store by which a conversation goes on.

pub(super) mod answer;
pub(super) mod background;
mod input_items;
pub(super) mod previous;
pub(super) mod request;
pub(super) mod store;
pub(super) mod stream;

use std::sync::Arc;

use bytes::Bytes;
use http::Method;
use serde_json::{Value, json};

use self::store::Cancelled;
use super::error::ApiError;
use super::{App, Response, full, json_answer, json_response};

/// What is asked of an answer that is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    /// To tell it, or to forget it.
    Itself,
    /// To make it no further.
    Cancel,
    /// To tell what was said before it.
    InputItems,
}

impl Wish {
    /// The answer's id and the wish in what follows the path of all answers.
    pub(super) fn at(path: &str) -> Option<(&str, Self)> {
        match path.split_once('/') {
            None => Some((path, Self::Itself)),
            Some((id, "cancel")) => Some((id, Self::Cancel)),
            Some((id, "input_items")) => Some((id, Self::InputItems)),
            Some(_) => None,
        }
    }

    /// How it is asked.
    pub(super) const fn methods(self) -> &'static [Method] {
        match self {
            Self::Itself => &[Method::GET, Method::HEAD, Method::DELETE],
            Self::Cancel => &[Method::POST],
            Self::InputItems => &[Method::GET, Method::HEAD],
        }
    }
}

/// Answers what is asked of the answer of this id.
pub(super) fn kept(
    app: &Arc<App>,
    method: &Method,
    id: &str,
    (wish, query): (Wish, Option<&str>),
) -> Result<Response, ApiError> {
    let unknown = || ApiError::response_not_found(id, "response_id");
    let found = || app.responses.find(id).ok_or_else(unknown);
    match wish {
        Wish::Itself if method == Method::DELETE => {
            if !app.responses.forget(id) {
                return Err(unknown());
            }
            Ok(json_response(&json!({"id": id, "object": "response", "deleted": true})))
        }
        Wish::Itself => {
            // A client that waits for events would take one whole answer for none.
            if query.is_some_and(|query| query.split('&').any(|part| part == "stream=true")) {
                let what = "'stream' must be false for an answer that was kept: it is told whole alone.";
                return Err(ApiError::unsupported("stream", what));
            }
            Ok(json_answer(full(found()?.response)))
        }
        Wish::InputItems => Ok(json_response(&input_items::page(id, &found()?, query)?)),
        Wish::Cancel => match app.responses.cancel(id, cancelled) {
            Cancelled::Now(response) => Ok(json_answer(full(response))),
            Cancelled::Foreground => Err(ApiError::not_in_background()),
            Cancelled::Unknown => Err(unknown()),
        },
    }
}

/// An answer that is made no further.
fn cancelled(response: &Bytes) -> Bytes {
    let mut told: Value = serde_json::from_slice(response).unwrap_or_default();
    told["status"] = "cancelled".into();
    told.to_string().into()
}

#[cfg(test)]
mod tests;
