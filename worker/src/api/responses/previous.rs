//! A request that goes on from an answer that was kept: its input with all that was said before.

use std::sync::Arc;

use serde_json::{Value, json};

use super::store::ResponseStore;
use crate::api::App;
use crate::api::error::ApiError;
use crate::api::params::{Params, kind};
use crate::api::work::{Body, work};

const FIELD: &str = "previous_response_id";

/// A request's body, joined with what it goes on from.
pub(in crate::api) struct Joined {
    pub(in crate::api) body: Body,
    /// The answer that it goes on from.
    pub(in crate::api) previous: Option<String>,
}

/// Joins a request with the conversation that it goes on from, if it does.
pub(in crate::api) async fn joined(app: &Arc<App>, body: Body) -> Result<Joined, ApiError> {
    if !body.mentions(FIELD) {
        return Ok(Joined { body, previous: None });
    }
    let store = Arc::clone(app);
    let ((bytes, previous), room) = work(app, body, move |bytes, _| join(&store.responses, bytes)).await?;
    Ok(Joined { body: Body::of(bytes, room)?, previous })
}

fn join(store: &ResponseStore, body: &[u8]) -> Result<(Vec<u8>, Option<String>), ApiError> {
    let mut params = Params::parse(body)?;
    let Some(id) = params.take_string(FIELD)? else { return Ok((body.to_vec(), None)) };
    let kept = store.find(&id).ok_or_else(|| ApiError::response_not_found(&id, FIELD))?;
    if kept.state.is_making() {
        return Err(ApiError::response_unfinished(&id, FIELD));
    }
    let input = params.take("input").ok_or_else(|| ApiError::missing("input"))?;
    let new = items_of(&input)?;
    let mut joined = serde_json::to_vec(&params.into_fields()).map_err(ApiError::internal)?;
    joined.pop();
    if joined.len() > 1 {
        joined.push(b',');
    }
    joined.extend_from_slice(b"\"input\":[");
    joined.extend_from_slice(&kept.items);
    if !kept.items.is_empty() && !new.is_empty() {
        joined.push(b',');
    }
    joined.extend_from_slice(&new);
    joined.extend_from_slice(b"]}");
    Ok((joined, Some(id)))
}

/// The items of an input as JSON, set off by commas.
pub(super) fn items_of(input: &Value) -> Result<Vec<u8>, ApiError> {
    match input {
        Value::String(text) => {
            let item = json!({"type": "message", "role": "user", "content": text});
            serde_json::to_vec(&item).map_err(ApiError::internal)
        }
        Value::Array(_) => {
            let mut items = serde_json::to_vec(input).map_err(ApiError::internal)?;
            items.pop();
            items.remove(0);
            Ok(items)
        }
        other => {
            let what = format!("'input' must be a string or an array of items, not {}.", kind(other));
            Err(ApiError::invalid_value("input", what))
        }
    }
}
