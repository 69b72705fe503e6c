//! One request's attempts: choose a worker, send, and if no byte of an answer came, try another. Cancellation needs
//! no code: when the client leaves, this future is dropped, and with it the request to the worker.
//!
//! Next: [`crate::relay`].

use std::sync::Arc;

use bytes::Bytes;
use http::{
    HeaderValue, Method,
    header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH},
    request::Parts,
    uri::PathAndQuery,
};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use keyway_core::{index::WorkerId, pick::Pick};
use keyway_wire::headers as names;

use crate::{
    autoscale::Autoscale,
    body::{Request, Response},
    error::Error,
    fleet::Worker,
    headers,
    limits::MAX_ATTEMPTS,
    metrics::Metrics,
    record::Record,
    relay,
    request::{self, KeyerConfig, RequestInfo},
    routing::{Choice, Router},
    token_keyer::TokenKeyer,
    upstream::{SendError, Upstream},
};

/// What dispatch needs besides the request.
#[derive(Debug, Clone)]
pub struct Dispatch {
    /// Chooses workers.
    pub router: Arc<Router>,
    /// Follows what requests ask of the fleet, and lets them wait for a first worker.
    pub scale: Arc<Autoscale>,
    /// Reaches workers.
    pub upstream: Upstream,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// How prompts are hashed.
    pub keyer: KeyerConfig,
    /// Models whose prompts are known by their tokens.
    pub tokens: Arc<TokenKeyer>,
    /// Largest request body.
    pub max_body_bytes: usize,
    /// Whether answers name the worker and the reason.
    pub expose_routing: bool,
}

impl Dispatch {
    /// Serves one request under `/v1/`.
    pub async fn handle(&self, request: Request, record: &Arc<Record>) -> Result<Response, Error> {
        let (parts, body) = request.into_parts();
        let body = self.read_body(&parts, body).await?;
        let routing = self.metrics.routing.start_timer();
        let mut info = read_request(parts.uri.path(), &body, self.keyer, &self.tokens).await;
        info.model = info.model.or_else(|| model_in_path(&parts));
        record.model(info.model.clone());
        routing.observe_duration();
        let demand = self.scale.enter(&self.router, &info);
        let mut choice = self.scale.choose(&self.router, &info).await?;
        choice.ticket.carry(demand);
        self.attempt(parts, body, info, choice, record).await
    }

    async fn read_body(&self, parts: &Parts, body: hyper::body::Incoming) -> Result<Bytes, Error> {
        let too_large = Error::BodyTooLarge { limit_bytes: self.max_body_bytes };
        let declared = parts.headers.get(CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|bytes| bytes > self.max_body_bytes as u64) {
            return Err(too_large);
        }
        match Limited::new(body, self.max_body_bytes).collect().await {
            Ok(whole) => Ok(whole.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => Err(too_large),
            Err(error) => Err(Error::BodyUnreadable(error.to_string())),
        }
    }

    async fn attempt(
        &self,
        parts: Parts,
        body: Bytes,
        info: RequestInfo,
        mut choice: Choice,
        record: &Arc<Record>,
    ) -> Result<Response, Error> {
        let mut tried: Vec<WorkerId> = Vec::new();
        loop {
            let Choice { worker, pick, mut ticket } = choice;
            record.picked(&worker.name, pick.reason.as_str(), pick.matched_tokens);
            let outgoing = outgoing(&parts, body.clone(), &worker, record);
            match self.upstream.send(outgoing).await {
                Ok(answer) => {
                    self.router.worker_answered(&worker);
                    let mut response =
                        relay::relay(answer, ticket, info, pick, Arc::clone(record), &self.metrics);
                    self.expose(&mut response, &worker, &pick);
                    return Ok(response);
                }
                Err(error) => {
                    tracing::warn!(worker = %worker.name, id = record.id(), error = error.as_str(), "worker gave no answer");
                    if error == SendError::Connect {
                        self.router.worker_failed(&worker);
                    } else if !may_repeat(&parts) {
                        return Err(Error::WorkerLost);
                    }
                    // Its weight and placement go before the next worker is chosen.
                    let demand = ticket.give_back();
                    drop(ticket);
                    tried.push(worker.id);
                    if tried.len() == MAX_ATTEMPTS {
                        return Err(Error::WorkerLost);
                    }
                    // With no worker left, what became of this attempt says more than "none is ready".
                    choice = self.router.choose(&info, &tried).await.map_err(|_| Error::WorkerLost)?;
                    if let Some(demand) = demand {
                        choice.ticket.carry(demand);
                    }
                    self.metrics.retries.with_label_values(&[error.as_str()]).inc();
                }
            }
        }
    }

    fn expose(&self, response: &mut Response, worker: &Worker, pick: &Pick) {
        if !self.expose_routing {
            return;
        }
        let headers = response.headers_mut();
        if let Ok(name) = HeaderValue::from_str(&worker.name) {
            headers.insert(names::WORKER, name);
        }
        headers.insert(names::REASON, HeaderValue::from_static(pick.reason.as_str()));
        headers.insert(names::MATCHED_TOKENS, HeaderValue::from(pick.matched_tokens));
    }
}

/// All that routing knows of a request to `path`.
pub async fn read_request(path: &str, body: &Bytes, keyer: KeyerConfig, tokens: &TokenKeyer) -> RequestInfo {
    let mut info = request::read(body, keyer);
    info.tokens = tokens.tokens(path, body, info.model.as_deref()).await;
    info
}

/// Whether a request that a worker may have begun to compute can be sent to another one. Generating is free of side
/// effects; of other POSTs (files, batches) that is not known.
fn may_repeat(parts: &Parts) -> bool {
    parts.method.is_safe() || (parts.method == Method::POST && is_generation(parts.uri.path()))
}

/// `GET /v1/models/{id}` names its model in the path; an id may hold slashes, written out or as `%2F`.
fn model_in_path(parts: &Parts) -> Option<String> {
    let id = parts.uri.path().strip_prefix("/v1/models/").filter(|_| parts.method == Method::GET)?;
    Some(id.replace("%2F", "/").replace("%2f", "/").replace("%3A", ":").replace("%3a", ":"))
}

fn is_generation(path: &str) -> bool {
    matches!(
        path,
        "/v1/chat/completions" | "/v1/completions" | "/v1/messages" | "/v1/embeddings" | "/v1/rerank"
    )
}

fn outgoing(parts: &Parts, body: Bytes, worker: &Worker, record: &Record) -> http::Request<Full<Bytes>> {
    let path = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let mut request = http::Request::new(Full::new(body));
    *request.method_mut() = parts.method.clone();
    *request.uri_mut() = worker.uri(&path);
    let mut outgoing = parts.headers.clone();
    headers::for_worker(&mut outgoing);
    if let Ok(id) = HeaderValue::from_str(record.id()) {
        outgoing.insert(names::REQUEST_ID, id);
    }
    if let Some(key) = worker.api_key() {
        outgoing.insert(AUTHORIZATION, key.clone());
    }
    if is_generation(parts.uri.path()) {
        // The relay must see where events end; engines do not compress streams unasked.
        outgoing.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    }
    *request.headers_mut() = outgoing;
    request
}
