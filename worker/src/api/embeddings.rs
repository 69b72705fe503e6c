//! `/v1/embeddings`: each input's final hidden state behind its last token, cut to `dimensions` and scaled to
//! length 1. That is vLLM's pooling for models that were made to generate; whether the result means anything
//! is the model's matter.

use std::future::poll_fn;
use std::sync::Arc;

use bytes::Bytes;
use keyway_clients::client::Client;
use serde_json::{Value, json};

use super::error::ApiError;
use super::model::ServedModel;
use super::params::Params;
use super::prompt::PromptSource;
use super::work::{read, work};
use super::{App, BoxError, Response, data_parallel, json_response};
use crate::engine::sequence::{Event, Generation, GenerationRequest, PromptOutcome};
use crate::limits::{LIVE_BYTES_PER_TOKEN, PROMPTS_PER_REQUEST_MAX};
use crate::metrics::{Outcome, RequestGuard};
use crate::request_memory::Turn;

/// A checked request for embeddings, its prompts tokenised.
struct Call {
    model: String,
    /// Cuts each vector; all of it if absent.
    dimensions: Option<usize>,
    as_base64: bool,
    prompts: Vec<Vec<u32>>,
    salt: String,
    priority: i64,
}

pub(super) async fn embed<B>(
    app: Arc<App>,
    client: &Arc<Client>,
    request: http::Request<B>,
) -> Result<Response, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let mut guard = app.metrics.guard();
    let result = try_embed(&app, client, request, &mut guard).await;
    guard.set(result.as_ref().map_or_else(|error| error.outcome, |_| Outcome::Stop));
    result
}

async fn try_embed<B>(
    app: &Arc<App>,
    client: &Arc<Client>,
    request: http::Request<B>,
    guard: &mut RequestGuard,
) -> Result<Response, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let rank = data_parallel::rank(request.headers(), app.engines.count())?;
    let body = read(app, client, request.into_body()).await?;
    let parser = Arc::clone(app);
    let (call, mut room) = work(app, body, move |body, turn| parse(&parser, body, turn)).await?;
    let tokens: usize = call.prompts.iter().map(Vec::len).sum();
    room.hold(tokens * LIVE_BYTES_PER_TOKEN).map_err(ApiError::no_memory)?;
    let salt: Arc<[u8]> = Arc::from(call.salt.as_bytes());
    let request = |prompt: &Vec<u32>| GenerationRequest {
        prompt: prompt.clone(),
        max_tokens: 0,
        hidden: true,
        salt: Arc::clone(&salt),
        priority: call.priority,
        ..GenerationRequest::default()
    };
    let taken = app.engines.submit(rank, call.prompts.iter().map(request).collect());
    let taken = taken.map_err(ApiError::not_taken)?;
    app.metrics.taken_by(taken.rank, guard);
    let mut data = Vec::with_capacity(taken.generations.len());
    for (index, generation) in taken.generations.into_iter().enumerate() {
        let outcome = outcome(generation).await?;
        if outcome.hidden.is_empty() {
            return Err(ApiError::unsupported("model", "This worker's backend gives no hidden states."));
        }
        let vector = unit(outcome.hidden, call.dimensions)?;
        let embedding = if call.as_base64 { Value::String(base64(&vector)) } else { json!(vector) };
        data.push(json!({"object": "embedding", "index": index, "embedding": embedding}));
    }
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    let mut response =
        json_response(&json!({"object": "list", "data": data, "model": call.model, "usage": usage}));
    response.body_mut().keep(room);
    Ok(response)
}

fn parse(app: &App, body: &[u8], turn: &mut Turn) -> Result<Call, ApiError> {
    let mut params = Params::parse(body)?;
    let model: &ServedModel = &app.model;
    let name = model.named_in(&mut params)?;
    let source = PromptSource::prompts(&mut params, "input", model.vocab_size)?;
    if source.len() > PROMPTS_PER_REQUEST_MAX {
        let what = format!("'input' holds {} inputs; the most is {PROMPTS_PER_REQUEST_MAX}.", source.len());
        return Err(ApiError::invalid_value("input", what));
    }
    let format = params.take_string("encoding_format")?;
    let as_base64 = match format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => {
            let what = "'encoding_format' must be float or base64.";
            return Err(ApiError::invalid_value("encoding_format", what));
        }
    };
    let dimensions = params.take_integer("dimensions", 1)?.map(|dimensions| dimensions as usize);
    let salt = params.take_string("cache_salt")?.unwrap_or_default();
    let priority = params.take_integer("priority", i64::MIN)?.unwrap_or(0);
    params.finish()?;
    let prompts = source.tokenize(&app.text, Some(model.max_model_len), turn)?;
    for prompt in &prompts {
        model.room_behind(prompt, None, "input")?;
    }
    Ok(Call { model: name, dimensions, as_base64, prompts, salt, priority })
}

async fn outcome(mut generation: Generation) -> Result<PromptOutcome, ApiError> {
    match poll_fn(|context| generation.poll_next(context)).await {
        Some(Event::Prompt(outcome)) => Ok(outcome),
        _ => Err(ApiError::engine_stopped()),
    }
}

/// The first `dimensions` of a vector, scaled to length 1.
fn unit(mut vector: Vec<f32>, dimensions: Option<usize>) -> Result<Vec<f32>, ApiError> {
    if let Some(dimensions) = dimensions {
        if dimensions > vector.len() {
            let what = format!("'dimensions' must be at most {}, this model's width.", vector.len());
            return Err(ApiError::invalid_value("dimensions", what));
        }
        vector.truncate(dimensions);
    }
    let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        for x in &mut vector {
            *x = (f64::from(*x) / length) as f32;
        }
    }
    Ok(vector)
}

/// Base64 (RFC 4648, section 4) of the numbers' little-endian bytes, as OpenAI sends them.
fn base64(vector: &[f32]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = (0..3).fold(0, |bits, i| bits << 8 | u32::from(group.get(i).copied().unwrap_or(0)));
        for i in 0..4 {
            let digit = ALPHABET[(bits >> (18 - 6 * i)) as usize & 63];
            text.push(if i <= group.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_cut_and_have_length_1() {
        assert_eq!(unit(vec![3.0, 4.0, 12.0], Some(2)).unwrap(), [0.6, 0.8]);
        assert_eq!(unit(vec![0.0, 0.0], None).unwrap(), [0.0, 0.0]);
        assert!(unit(vec![1.0], Some(2)).is_err());
    }

    #[test]
    fn base64_is_as_pythons() {
        // base64.b64encode(struct.pack("<f", 1.5)), of two and of three numbers.
        assert_eq!(base64(&[1.5]), "AADAPw==");
        assert_eq!(base64(&[1.5, -2.0]), "AADAPwAAAMA=");
        assert_eq!(base64(&[1.5, -2.0, 0.1]), "AADAPwAAAMDNzMw9");
    }
}
