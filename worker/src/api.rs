//! The HTTP interface, OpenAI's and Anthropic's: from a path and a body to an answer. Not sockets
//! (`server.rs`), not tokens' arithmetic (`engine.rs`).

mod answer;
mod answer_body;
mod chunks;
mod constraint;
mod data_parallel;
mod embeddings;
mod error;
mod generate;
mod kv_transfer;
mod logprobs;
mod messages;
mod model;
mod params;
mod prompt;
mod request;
mod responses;
mod running;
mod sampling;
mod shape;
mod stream;
#[cfg(test)]
mod tests;
mod tokenize;
mod told;
mod tools;
mod work;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use keyway_clients::client::Client;
use keyway_text::TextModel;
use keyway_wire::headers::{ANTHROPIC_REQUEST_ID, NUMERICS_ID, REQUEST_ID};
use serde_json::{Value, json};

use self::answer_body::AnswerBody;
use self::error::ApiError;
pub(crate) use self::generate::prepare;
pub(crate) use self::model::ServedModel;
pub(crate) use self::request::Endpoint;
pub(crate) use self::responses::store::ResponseStore;
use self::stream::StreamFailed;
use crate::answer::answer_format::Formats;
use crate::engine::engines::Engines;
use crate::engine::generation_config::GenerationConfig;
use crate::engine::grammar::GrammarCompiler;
use crate::engine::kv_events::BoundAddrs;
use crate::kv_transfer::KvTransfers;
use crate::limits::ClientBounds;
use crate::metrics::MetricsPage;
use crate::request_memory::RequestMemory;

/// An answer.
pub(crate) type Response = http::Response<AnswerBody>;

/// Any error of a body, boxed.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// What all requests share.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) engines: Engines,
    pub(crate) text: TextModel,
    /// How the model writes thoughts and calls.
    pub(crate) formats: Formats,
    pub(crate) grammars: GrammarCompiler,
    pub(crate) defaults: GenerationConfig,
    pub(crate) metrics: MetricsPage,
    pub(crate) model: ServedModel,
    pub(crate) memory: Arc<RequestMemory>,
    /// Where each engine's KV events are, by its rank.
    pub(crate) kv_events: Vec<BoundAddrs>,
    /// What moves KV between this worker and others.
    pub(crate) kv_transfers: Option<Arc<KvTransfers>>,
    pub(crate) clients: ClientBounds,
    pub(crate) responses: ResponseStore,
}

/// Answers one request of this client.
pub(crate) async fn handle<B>(
    app: Arc<App>,
    client: Arc<Client>,
    request: http::Request<B>,
) -> Result<Response, Infallible>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let request_id = request.headers().get(REQUEST_ID).cloned().unwrap_or_else(new_request_id);
    let memory = Arc::clone(&app.memory);
    let of_anthropic = messages::has(request.uri().path(), request.headers());
    let refuse = if of_anthropic { messages::refusal } else { ApiError::into_response };
    let mut response = route(app, &client, request).await.unwrap_or_else(refuse);
    if let Some(bytes) = response.body().without_room() {
        // Who asks for pages and reads none would have them kept here.
        match memory.room(&client).and_then(|mut room| room.hold(bytes).map(|()| room)) {
            Ok(room) => response.body_mut().keep(room),
            Err(why) => response = refuse(ApiError::no_memory(why)),
        }
    }
    if of_anthropic {
        response.headers_mut().insert(ANTHROPIC_REQUEST_ID, request_id.clone());
    }
    response.headers_mut().insert(REQUEST_ID, request_id);
    Ok(response)
}

async fn route<B>(
    app: Arc<App>,
    client: &Arc<Client>,
    request: http::Request<B>,
) -> Result<Response, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let path = request.uri().path();
    if let Some(endpoint) = Endpoint::at(path) {
        allow(&request, &[Method::POST])?;
        let numerics_id = HeaderValue::from_str(&app.model.numerics_id).map_err(ApiError::internal)?;
        let mut answer = generate::generate(app, client, endpoint, request).await?;
        answer.headers_mut().insert(NUMERICS_ID, numerics_id);
        return Ok(answer);
    }
    let path = path.to_owned();
    let answer = match path.as_str() {
        "/v1/embeddings" => {
            allow(&request, &[Method::POST])?;
            embeddings::embed(app, client, request).await?
        }
        "/v1/messages/count_tokens" => {
            allow(&request, &[Method::POST])?;
            messages::count::answer(app, client, request.into_body()).await?
        }
        "/tokenize" | "/detokenize" => {
            allow(&request, &[Method::POST])?;
            tokenize::answer(app, client, &path, request.into_body()).await?
        }
        "/v1/models" | "/health" | "/metrics" | "/version" | "/kv_event_sources" => {
            allow(&request, &[Method::GET, Method::HEAD])?;
            match path.as_str() {
                "/v1/models" => model::list(&app.model, request.headers(), request.uri().query())?,
                _ => get(&app, &path)?,
            }
        }
        _ => named(&app, &request, &path)?,
    };
    Ok(answer)
}

/// Answers on a path that ends with a name.
fn named<B>(app: &Arc<App>, request: &http::Request<B>, path: &str) -> Result<Response, ApiError> {
    if let Some(below) = path.strip_prefix("/v1/responses/") {
        let unknown = || ApiError::unknown_path(request.method(), path);
        let (id, wish) = responses::Wish::at(below).ok_or_else(unknown)?;
        // What is made of a response by POST stands in an id's place, and is not known here.
        if wish == responses::Wish::Itself && request.method() == Method::POST {
            return Err(unknown());
        }
        allow(request, wish.methods())?;
        return responses::kept(app, request.method(), id, (wish, request.uri().query()));
    }
    match path.strip_prefix("/v1/models/") {
        Some(name) if app.model.is_named(name) => {
            allow(request, &[Method::GET, Method::HEAD])?;
            Ok(json_response(&app.model.told(name, request.headers())))
        }
        Some(name) => Err(ApiError::model_not_found(name, app.model.name())),
        None => Err(ApiError::unknown_path(request.method(), path)),
    }
}

fn allow<B>(request: &http::Request<B>, methods: &[Method]) -> Result<(), ApiError> {
    if methods.contains(request.method()) {
        return Ok(());
    }
    Err(ApiError::method_not_allowed(request.method(), request.uri().path(), methods[0].as_str()))
}

fn get(app: &App, path: &str) -> Result<Response, ApiError> {
    Ok(match path {
        "/version" => json_response(&json!({
            "version": env!("CARGO_PKG_VERSION"), "numerics_id": app.model.numerics_id,
        })),
        "/kv_event_sources" => json_response(&kv_event_sources(&app.kv_events)),
        "/metrics" => {
            let mut response = Response::new(AnswerBody::new(full(app.metrics.render())));
            let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
            response.headers_mut().insert(header::CONTENT_TYPE, text);
            response
        }
        _ if app.engines.are_alive() && !app.metrics.ranks_are_up() => return Err(ApiError::ranks_missing()),
        _ if app.engines.are_alive() => match app.engines.failing() {
            None => json_response(&json!({"status": "ok"})),
            Some(reason) => return Err(ApiError::steps_fail(&reason)),
        },
        _ => return Err(ApiError::engine_stopped()),
    })
}

/// Where KV events are published and repeated, in vLLM's form: by rank, the fields of its `KVEventsConfig`
/// that say so.
fn kv_event_sources(bound: &[BoundAddrs]) -> BTreeMap<String, Value> {
    let source = |(rank, addrs): (usize, &BoundAddrs)| {
        let source = json!({
            "enable_kv_cache_events": true,
            "publisher": "zmq",
            "endpoint": format!("tcp://{}", addrs.publish),
            "replay_endpoint": addrs.replay.map(|replay| format!("tcp://{replay}")),
        });
        (rank.to_string(), source)
    };
    bound.iter().enumerate().map(source).collect()
}

fn json_response(body: &impl serde::Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(json) => json_answer(full(json)),
        Err(error) => ApiError::internal(error).into_response(),
    }
}

fn json_answer(json: impl http_body::Body<Data = Bytes, Error = StreamFailed> + Send + 'static) -> Response {
    let mut response = Response::new(AnswerBody::new(json));
    *response.status_mut() = StatusCode::OK;
    response.headers_mut().insert(header::CONTENT_TYPE, JSON);
    response
}

fn full(body: impl Into<Bytes>) -> impl http_body::Body<Data = Bytes, Error = StreamFailed> + Send + 'static {
    Full::new(body.into()).map_err(|never: Infallible| match never {})
}

fn new_request_id() -> HeaderValue {
    HeaderValue::from_str(&format!("{:032x}", fastrand::u128(..))).unwrap_or(HeaderValue::from_static("-"))
}
