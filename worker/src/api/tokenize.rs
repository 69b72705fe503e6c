//! `/tokenize` and `/detokenize`, in vLLM's shapes: a prompt or a conversation to the ids that a generation
//! would begin with, and ids to their text.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use keyway_clients::client::Client;
use serde::Serialize;

use super::error::ApiError;
use super::params::Params;
use super::prompt::PromptSource;
use super::tools::Tools;
use super::work::{read, work};
use super::{App, BoxError, Response, full};
use crate::limits::DETOKENIZE_BYTES_EACH;
use crate::request_memory::Turn;

/// The answer of `/tokenize`: a prompt's ids, and each one's text where the request asks for it.
#[derive(Debug, Serialize)]
struct Tokenized<'a> {
    count: usize,
    max_model_len: usize,
    tokens: &'a [u32],
    token_strs: Option<Vec<Cow<'a, str>>>,
}

/// The text of ids.
#[derive(Debug, Serialize)]
struct Detokenized {
    prompt: String,
}

pub(super) async fn answer<B>(
    app: Arc<App>,
    client: &Arc<Client>,
    path: &str,
    body: B,
) -> Result<Response, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let body = read(&app, client, body).await?;
    let answer = if path == "/tokenize" { tokenize } else { detokenize };
    let parser = Arc::clone(&app);
    let (json, mut room) = work(&app, body, move |body, turn| answer(&parser, body, turn)).await?;
    room.hold(json.len()).map_err(ApiError::no_memory)?;
    let mut response = super::json_answer(full(json));
    response.body_mut().keep(room);
    Ok(response)
}

fn tokenize(app: &App, body: &[u8], turn: &mut Turn) -> Result<Vec<u8>, ApiError> {
    let mut params = Params::parse(body)?;
    app.model.named_in(&mut params)?;
    let with_texts = params.take_bool("return_token_strs")?.unwrap_or(false);
    let source = if params.has("messages") {
        let tools = Tools::take(&mut params)?;
        // A rendered conversation has what a plain prompt is given.
        params.take_bool("add_special_tokens")?;
        PromptSource::chat(&mut params, &app.text.template, tools.definitions)?
    } else {
        PromptSource::completion(&mut params, app.model.vocab_size)?
    };
    if !source.is_single() {
        return Err(ApiError::invalid_value("prompt", "'prompt' must be one prompt."));
    }
    params.finish()?;
    let ids = source.tokenize(&app.text, None, turn)?.remove(0);
    let text = |id: &u32| String::from_utf8_lossy(app.text.tokenizer.token_bytes(*id));
    let token_strs = with_texts.then(|| ids.iter().map(text).collect());
    let max_model_len = app.model.max_model_len;
    let tokenized = Tokenized { count: ids.len(), max_model_len, tokens: &ids, token_strs };
    serde_json::to_vec(&tokenized).map_err(ApiError::internal)
}

fn detokenize(app: &App, body: &[u8], turn: &mut Turn) -> Result<Vec<u8>, ApiError> {
    let mut params = Params::parse(body)?;
    app.model.named_in(&mut params)?;
    let ids = params.take_ids("tokens", "tokens", app.model.vocab_size)?;
    let ids = ids.ok_or_else(|| ApiError::missing("tokens"))?;
    params.finish()?;
    turn.needs(ids.len() * DETOKENIZE_BYTES_EACH).map_err(ApiError::no_memory)?;
    let prompt = app.text.tokenizer.decode_all(&ids).map_err(|error| ApiError::text(&error, "tokens"))?;
    serde_json::to_vec(&Detokenized { prompt }).map_err(ApiError::internal)
}
