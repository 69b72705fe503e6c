//! `/tokenize` and `/detokenize`, in vLLM's shapes: a prompt or a conversation to the ids that a generation would begin
//! with, and ids to their text.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Value, json};

use super::error::ApiError;
use super::generate::read;
use super::params::Params;
use super::prompt::PromptSource;
use super::tools::Tools;
use super::{App, Response, json_response, off_the_runtime};

pub(super) async fn answer<B>(app: Arc<App>, path: &str, body: B) -> Result<Response, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: std::fmt::Display,
{
    let body = read(body).await?;
    let work = if path == "/tokenize" { tokenize } else { detokenize };
    let json = off_the_runtime(body, move |body| work(&app, body)).await?;
    Ok(json_response(&json))
}

fn tokenize(app: &App, body: &[u8]) -> Result<Value, ApiError> {
    let mut params = Params::parse(body)?;
    app.model.named_in(&mut params)?;
    let with_texts = params.take_bool("return_token_strs")?.unwrap_or(false);
    let source = if params.has("messages") {
        let tools = Tools::take(&mut params)?;
        // A rendered conversation has what a plain prompt is given.
        params.take_bool("add_special_tokens")?;
        PromptSource::chat(&mut params, tools.definitions)?
    } else {
        PromptSource::completion(&mut params, app.model.vocab_size)?
    };
    if !source.is_single() {
        return Err(ApiError::invalid_value("prompt", "'prompt' must be one prompt."));
    }
    params.finish()?;
    let ids = source.tokenize(&app.text)?.remove(0);
    let text = |id: &u32| String::from_utf8_lossy(app.text.tokenizer.token_bytes(*id)).into_owned();
    let texts = with_texts.then(|| ids.iter().map(text).collect::<Vec<String>>());
    Ok(json!({
        "count": ids.len(), "max_model_len": app.model.max_model_len, "tokens": ids, "token_strs": texts,
    }))
}

fn detokenize(app: &App, body: &[u8]) -> Result<Value, ApiError> {
    let mut params = Params::parse(body)?;
    app.model.named_in(&mut params)?;
    let ids = params.take_ids("tokens", "tokens", app.model.vocab_size)?;
    let ids = ids.ok_or_else(|| ApiError::missing("tokens"))?;
    params.finish()?;
    let prompt = app.text.tokenizer.decode_all(&ids).map_err(|error| ApiError::text(&error, "tokens"))?;
    Ok(json!({"prompt": prompt}))
}
