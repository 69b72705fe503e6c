//! OpenAI's HTTP interface: from a path and a body to an answer. Not sockets (`server.rs`), not tokens' arithmetic
//! (`engine.rs`).

mod answer;
mod error;
mod generate;
mod params;
mod prompt;
mod request;
mod running;
mod stream;
#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode, header};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use keyway_text::TextModel;
use keyway_wire::headers::{NUMERICS_ID, REQUEST_ID};
use serde_json::json;

use self::error::ApiError;
use self::stream::StreamFailed;
use crate::engine::EngineHandle;
use crate::generation_config::GenerationConfig;
use crate::metrics::Metrics;

/// An answer; its body fails only where a stream must end without its end.
pub(crate) type Response = http::Response<UnsyncBoxBody<Bytes, StreamFailed>>;

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// What all requests share.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) engine: EngineHandle,
    pub(crate) text: TextModel,
    pub(crate) defaults: GenerationConfig,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) model: ServedModel,
}

/// The model as clients see it.
#[derive(Debug)]
pub(crate) struct ServedModel {
    pub(crate) name: String,
    /// Prompt and answer together, in tokens.
    pub(crate) max_model_len: usize,
    pub(crate) vocab_size: usize,
    /// Ids that end a generation.
    pub(crate) eos_token_ids: Vec<u32>,
    pub(crate) numerics_id: String,
    /// Unix seconds.
    pub(crate) created: u64,
}

/// Answers one request.
pub(crate) async fn handle<B>(app: Arc<App>, request: http::Request<B>) -> Result<Response, Infallible>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: std::fmt::Display,
{
    let request_id = request.headers().get(REQUEST_ID).cloned().unwrap_or_else(new_request_id);
    let mut response = route(app, request).await.unwrap_or_else(ApiError::into_response);
    response.headers_mut().insert(REQUEST_ID, request_id);
    Ok(response)
}

async fn route<B>(app: Arc<App>, request: http::Request<B>) -> Result<Response, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: std::fmt::Display,
{
    let path = request.uri().path();
    let endpoint = match path {
        "/v1/chat/completions" => Some(request::Endpoint::Chat),
        "/v1/completions" => Some(request::Endpoint::Completion),
        _ => None,
    };
    if let Some(endpoint) = endpoint {
        allow(&request, &[Method::POST])?;
        let numerics_id = HeaderValue::from_str(&app.model.numerics_id).map_err(ApiError::internal)?;
        let mut answer = generate::generate(app, endpoint, request.into_body()).await?;
        answer.headers_mut().insert(NUMERICS_ID, numerics_id);
        return Ok(answer);
    }
    let answer = match path {
        "/v1/models" | "/health" | "/metrics" | "/version" => {
            allow(&request, &[Method::GET, Method::HEAD])?;
            get(&app, path)?
        }
        _ => match path.strip_prefix("/v1/models/") {
            Some(name) if name == app.model.name => {
                allow(&request, &[Method::GET, Method::HEAD])?;
                json_response(&model_card(&app.model))
            }
            Some(name) => return Err(ApiError::model_not_found(name, &app.model.name)),
            None => return Err(ApiError::unknown_path(request.method(), path)),
        },
    };
    Ok(answer)
}

fn allow<B>(request: &http::Request<B>, methods: &[Method]) -> Result<(), ApiError> {
    if methods.contains(request.method()) {
        return Ok(());
    }
    Err(ApiError::method_not_allowed(request.method(), request.uri().path(), methods[0].as_str()))
}

fn get(app: &App, path: &str) -> Result<Response, ApiError> {
    Ok(match path {
        "/v1/models" => json_response(&json!({"object": "list", "data": [model_card(&app.model)]})),
        "/version" => json_response(&json!({
            "version": env!("CARGO_PKG_VERSION"), "numerics_id": app.model.numerics_id,
        })),
        "/metrics" => {
            let mut response = Response::new(full(app.metrics.render()).boxed_unsync());
            let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
            response.headers_mut().insert(header::CONTENT_TYPE, text);
            response
        }
        _ if app.engine.is_alive() => json_response(&json!({"status": "ok"})),
        _ => return Err(ApiError::engine_stopped()),
    })
}

fn model_card(model: &ServedModel) -> serde_json::Value {
    json!({
        "id": model.name, "object": "model", "created": model.created, "owned_by": "keyway",
        "max_model_len": model.max_model_len, "numerics_id": model.numerics_id,
    })
}

fn json_response(body: &impl serde::Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(json) => {
            let mut response = Response::new(full(json).boxed_unsync());
            *response.status_mut() = StatusCode::OK;
            response.headers_mut().insert(header::CONTENT_TYPE, JSON);
            response
        }
        Err(error) => ApiError::internal(error).into_response(),
    }
}

fn full(body: impl Into<Bytes>) -> impl http_body::Body<Data = Bytes, Error = StreamFailed> + Send + 'static {
    Full::new(body.into()).map_err(|never: Infallible| match never {})
}

fn new_request_id() -> HeaderValue {
    HeaderValue::from_str(&format!("{:032x}", fastrand::u128(..))).unwrap_or(HeaderValue::from_static("-"))
}
