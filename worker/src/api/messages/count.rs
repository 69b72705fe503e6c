//! `/v1/messages/count_tokens`: how many tokens a request's prompt has, without an answer.

use std::sync::Arc;

use bytes::Bytes;
use keyway_clients::client::Client;
use keyway_wire::headers::IGNORED;
use serde_json::json;

use super::request;
use crate::api::error::ApiError;
use crate::api::generate::ignored_header;
use crate::api::params::Params;
use crate::api::work::{read, work};
use crate::api::{App, BoxError, Response, json_response};
use crate::request_memory::Turn;

/// A count, and the fields that had no part in it.
#[derive(Debug)]
struct Counted {
    input_tokens: usize,
    ignored: Vec<String>,
}

pub(in crate::api) async fn answer<B>(
    app: Arc<App>,
    client: &Arc<Client>,
    body: B,
) -> Result<Response, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let body = read(&app, client, body).await?;
    let counter = Arc::clone(&app);
    let (counted, _room) = work(&app, body, move |body, turn| count(&counter, body, turn)).await?;
    let mut response = json_response(&json!({"input_tokens": counted.input_tokens}));
    if let Some(names) = ignored_header(&counted.ignored) {
        response.headers_mut().insert(IGNORED, names);
    }
    Ok(response)
}

fn count(app: &App, body: &[u8], turn: &mut Turn) -> Result<Counted, ApiError> {
    let mut params = Params::parse(body)?;
    app.model.named_in(&mut params)?;
    let source = request::take_prompt(app, &mut params, body, turn)?;
    // A generation's fields say nothing of its prompt.
    for name in ["max_tokens", "stream", "response_format"] {
        params.take(name);
    }
    let ignored = params.finish_agents()?;
    let ids = source.tokenize(&app.text, None, turn)?;
    Ok(Counted { input_tokens: ids.iter().map(Vec::len).sum(), ignored })
}
