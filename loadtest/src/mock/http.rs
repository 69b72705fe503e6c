//! The HTTP side of one worker: the paths of an OpenAI-compatible engine, and one for faults. One listener a
//! worker, as if each were a process of its own; when its fault says that it is dead, nothing listens and all
//! connections break.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use keyway_wire::openai::ErrorBody;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use super::{
    answer::{About, AnswerBody, Events, Underway},
    api::Api,
    embeddings,
    faults::{Fault, Kind},
    kv::KvParams,
    request::{self, Ask, Reading},
    worker::Worker,
};
use crate::{
    engine_model::Refusal,
    limits::{MOCK_BODY_BYTES_MAX, MOCK_READING_INLINE_BYTES},
};

type Answer = Response<AnswerBody>;

/// Seconds that a refused client is told to wait.
const RETRY_AFTER_S: u32 = 1;

/// Serves `worker` until the process ends.
pub(super) async fn serve(worker: Arc<Worker>, listener: TcpListener, addr: SocketAddr) {
    let mut alive = worker.alive();
    let mut listener = Some(listener);
    loop {
        let mut connections = JoinSet::new();
        tokio::select! {
            () = accept(&worker, listener.as_ref(), &mut connections) => {}
            changed = alive.changed() => if changed.is_err() { return },
        }
        connections.abort_all();
        if *alive.borrow_and_update() {
            listener = match listener.take() {
                Some(listener) => Some(listener),
                None => TcpListener::bind(addr).await.ok(),
            };
        } else {
            listener = None;
        }
    }
}

async fn accept(worker: &Arc<Worker>, listener: Option<&TcpListener>, connections: &mut JoinSet<()>) {
    let Some(listener) = listener else { return std::future::pending().await };
    let ids = Arc::new(AtomicU64::new(0));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Usually for want of file descriptors; others must end first.
            tokio::task::yield_now().await;
            continue;
        };
        while connections.try_join_next().is_some() {} // those that are over
        connections.spawn(connection(Arc::clone(worker), Arc::clone(&ids), stream));
    }
}

async fn connection(worker: Arc<Worker>, ids: Arc<AtomicU64>, stream: TcpStream) {
    // Without it tokens wait for acknowledgements; the connection works either way.
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let (worker, id) = (Arc::clone(&worker), ids.fetch_add(1, Ordering::Relaxed));
        async move { Ok::<_, Infallible>(route(worker, id, request).await) }
    });
    // A broken connection is the client's news, or the fault that was asked for.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

async fn route(worker: Arc<Worker>, id: u64, request: Request<Incoming>) -> Answer {
    let wants = |pair| request.uri().query().is_some_and(|query| query.split('&').any(|each| each == pair));
    if (request.method(), request.uri().path()) == (&Method::GET, "/v1/loads") {
        let prometheus = wants("format=prometheus");
        return match worker.loads(prometheus) {
            Some(page) if prometheus => text(StatusCode::OK, page),
            Some(page) => json(StatusCode::OK, page.into()),
            None => unknown(&request),
        };
    }
    match (request.method(), request.uri().path()) {
        (&Method::POST, "/v1/chat/completions") => generate(worker, id, Api::Chat, request).await,
        (&Method::POST, "/v1/completions") => generate(worker, id, Api::Completions, request).await,
        (&Method::POST, "/v1/responses") => generate(worker, id, Api::Responses, request).await,
        (&Method::POST, "/v1/messages") => generate(worker, id, Api::Messages, request).await,
        (&Method::POST, "/v1/embeddings") => embed(worker, request).await,
        (&Method::POST, "/v1/chat/completions/render") if worker.setup.render => {
            rendered(worker, id, Api::Chat, request).await
        }
        (&Method::POST, "/v1/completions/render") if worker.setup.render => {
            rendered(worker, id, Api::Completions, request).await
        }
        (&Method::GET, "/health") => text(StatusCode::OK, String::new()),
        (&Method::GET, "/metrics") => text(StatusCode::OK, worker.metrics()),
        (&Method::GET, "/v1/models") => models(&worker),
        (&Method::GET, "/mock/faults") => text(StatusCode::OK, worker.faults()),
        (&Method::POST, "/mock/faults") => add_faults(&worker, request).await,
        (&Method::DELETE, "/mock/faults") => {
            worker.clear_faults();
            text(StatusCode::OK, String::new())
        }
        _ => unknown(&request),
    }
}

fn unknown(request: &Request<Incoming>) -> Answer {
    let message = format!("there is no {} {}", request.method(), request.uri().path());
    error(StatusCode::NOT_FOUND, &ErrorBody::new("invalid_request_error", "not_found", message))
}

async fn body(request: Request<Incoming>) -> Result<Bytes, Answer> {
    match Limited::new(request.into_body(), MOCK_BODY_BYTES_MAX).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(cause) => Err(bad_request("unreadable_body", &format!("the body cannot be read: {cause}"))),
    }
}

async fn generate(worker: Arc<Worker>, id: u64, api: Api, request: Request<Incoming>) -> Answer {
    let body = match body(request).await {
        Ok(body) => body,
        Err(answer) => return answer,
    };
    if let Some(code) = worker.strike(|kind| if let Kind::Status(code) = kind { Some(code) } else { None }) {
        return refused(code);
    }
    let mut ask = match read(&worker, body, move |body, reading| request::read(body, api, reading)).await {
        Ok(ask) => ask,
        Err(cause) => return unread(&cause),
    };
    let mut keeps = false;
    if let Some(mover) = worker.setup.kv.as_ref().filter(|_| ask.kv.is_some()) {
        ask.fetched_tokens = mover.fetch(&worker, &ask).await;
        keeps = ask.kv.as_ref().is_some_and(KvParams::keeps) && !ask.stream;
    }
    let admission = match worker.submit(&mut ask) {
        Ok(admission) => admission,
        Err(refusal @ Refusal::TooLong { .. }) => {
            return bad_request("context_length_exceeded", &refusal.to_string());
        }
    };
    let about = about(&worker, id, &ask);
    let underway = Underway { worker, admission, done: false };
    if ask.stream { streamed(underway, about) } else { whole(underway, about, keeps).await }
}

/// What a body asks for. A large one is read where no other request waits for it, and where cores are few
/// after all else: what it costs a real engine is on another machine than the gateway.
async fn read<T: Send + 'static>(
    worker: &Arc<Worker>,
    body: Bytes,
    how: impl FnOnce(&[u8], &Reading<'_>) -> Result<T, ErrorBody> + Send + 'static,
) -> Result<T, ErrorBody> {
    if body.len() <= MOCK_READING_INLINE_BYTES {
        return how(&body, &reading(worker));
    }
    let worker = Arc::clone(worker);
    let read = tokio::task::spawn_blocking(move || {
        step_back();
        how(&body, &reading(&worker))
    });
    read.await.unwrap_or_else(|_| Err(ErrorBody::new("server_error", "unreadable", "reading it failed")))
}

/// Gives this thread the lowest priority. Linux alone has one for each thread; without it all else waits
/// longer.
fn step_back() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, 19);
}

fn reading(worker: &Worker) -> Reading<'_> {
    let setup = &worker.setup;
    Reading {
        model: &setup.model,
        block_tokens: setup.profile.block_tokens,
        output_tokens: setup.output_tokens,
        image_tokens: setup.image_tokens,
        vocabulary: &setup.vocabulary,
    }
}

/// An embedding of each text: the engine computes each prompt to its end, and generates nothing that is said.
async fn embed(worker: Arc<Worker>, request: Request<Incoming>) -> Answer {
    let body = match body(request).await {
        Ok(body) => body,
        Err(answer) => return answer,
    };
    if let Some(code) = worker.strike(|kind| if let Kind::Status(code) = kind { Some(code) } else { None }) {
        return refused(code);
    }
    let mut wanted = match read(&worker, body, embeddings::read).await {
        Ok(wanted) => wanted,
        Err(cause) => return unread(&cause),
    };
    let mut underway = Vec::new();
    for ask in &mut wanted.asks {
        match worker.submit(ask) {
            Ok(admission) => {
                underway.push(Underway { worker: Arc::clone(&worker), admission, done: false });
            }
            Err(refusal @ Refusal::TooLong { .. }) => {
                return bad_request("context_length_exceeded", &refusal.to_string());
            }
        }
    }
    for one in &mut underway {
        if one.finished(1).await.is_err() {
            return dead();
        }
    }
    json(StatusCode::OK, wanted.answer(worker.model_json()).into())
}

fn unread(cause: &ErrorBody) -> Answer {
    let unknown = cause.error.code.as_deref() == Some("model_not_found");
    error(if unknown { StatusCode::NOT_FOUND } else { StatusCode::BAD_REQUEST }, cause)
}

/// What the engine would be asked to generate (vLLM's `GenerateRequest`,
/// vllm/entrypoints/serve/disagg/protocol.py), of completions in a list.
async fn rendered(worker: Arc<Worker>, id: u64, api: Api, request: Request<Incoming>) -> Answer {
    let body = match body(request).await {
        Ok(body) => body,
        Err(answer) => return answer,
    };
    let ask = match read(&worker, body, move |body, reading| request::read(body, api, reading)).await {
        Ok(ask) => ask,
        Err(cause) => return unread(&cause),
    };
    let chat = api == Api::Chat;
    let ids = ask.tokens.ids(0..ask.prompt_tokens as usize);
    let one = serde_json::json!({
        "request_id": format!("{}-{id}", if chat { "chatcmpl" } else { "cmpl" }),
        "token_ids": ids,
        "model": worker.setup.model,
        "sampling_params": { "max_tokens": ask.output_tokens },
        "stream": ask.stream,
        "cache_salt": ask.salt,
    });
    let whole = if chat { one } else { serde_json::Value::Array(vec![one]) };
    json(StatusCode::OK, whole.to_string().into())
}

fn about(worker: &Worker, id: u64, ask: &Ask) -> About {
    let cut = |kind| if let Kind::Cut(tokens) = kind { Some(tokens) } else { None };
    About {
        api: ask.api,
        id: (worker.number as u64) << 48 | id,
        created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        prompt_tokens: ask.prompt_tokens,
        output_tokens: ask.output_tokens,
        first: ask.first,
        finish: ask.finish,
        include_usage: ask.include_usage,
        cut_after: ask.stream.then(|| worker.strike(cut)).flatten(),
    }
}

fn streamed(underway: Underway, about: About) -> Answer {
    let mut answer = Response::new(AnswerBody::Events(Box::new(Events::new(underway, about))));
    let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
    answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    answer
}

async fn whole(mut underway: Underway, about: About, keeps: bool) -> Answer {
    if underway.finished(about.output_tokens).await.is_err() {
        return dead();
    }
    let (worker, cached) = (&underway.worker, underway.admission.ticket.cached_tokens());
    let mut body = about.whole(worker.model_json(), worker.vocabulary(), cached);
    if let Some(mover) = worker.setup.kv.as_ref().filter(|_| keeps) {
        // Into the object.
        body.pop();
        let params = mover.keep(worker, about.prompt_tokens);
        body.extend_from_slice(format!(r#","kv_transfer_params":{params}}}"#).as_bytes());
    }
    json(StatusCode::OK, body.into())
}

fn models(worker: &Worker) -> Answer {
    let (model, kv_tokens) = (worker.model_json(), worker.setup.profile.kv_tokens());
    let port = worker.setup.kv.as_ref().and_then(|mover| mover.port_of(worker.number));
    let source = port.map(|port| format!(r#","kv_source_port":{port}"#)).unwrap_or_default();
    let list = format!(
        r#"{{"object":"list","data":[{{"id":{model},"object":"model","created":0,"owned_by":"keyway-loadtest mock","max_model_len":{kv_tokens}{source}}}]}}"#
    );
    json(StatusCode::OK, list.into())
}

/// One fault a line, as on the command line; times count from now.
async fn add_faults(worker: &Worker, request: Request<Incoming>) -> Answer {
    let body = match body(request).await {
        Ok(body) => body,
        Err(answer) => return answer,
    };
    let Ok(lines) = std::str::from_utf8(&body) else {
        return bad_request("invalid_fault", "faults are text");
    };
    for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let fault = line.parse::<Fault>().and_then(|fault| match fault.worker {
            Some(number) if number != worker.number => {
                Err(format!("`{line}`: this is worker {}; ask the other one", worker.number))
            }
            _ => worker.add_fault(fault).map_err(|error| error.to_string()),
        });
        if let Err(reason) = fault {
            return bad_request("invalid_fault", &reason);
        }
    }
    text(StatusCode::OK, worker.faults())
}

fn dead() -> Answer {
    error(
        StatusCode::INTERNAL_SERVER_ERROR,
        &ErrorBody::new("server_error", "engine_dead", "the mock's engine is gone"),
    )
}

fn refused(code: u16) -> Answer {
    let status = StatusCode::from_u16(code).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    let kind = if status.is_server_error() { "server_error" } else { "rate_limit_error" };
    let mut answer = error(status, &ErrorBody::new(kind, "mock_fault", "the mock was asked to refuse this"));
    answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_S));
    answer
}

fn bad_request(code: &str, message: &str) -> Answer {
    error(StatusCode::BAD_REQUEST, &ErrorBody::new("invalid_request_error", code, message))
}

fn error(status: StatusCode, body: &ErrorBody) -> Answer {
    json(status, body.to_json().into())
}

fn json(status: StatusCode, body: Bytes) -> Answer {
    sized(status, "application/json", body)
}

fn text(status: StatusCode, body: String) -> Answer {
    sized(status, "text/plain; charset=utf-8", body.into())
}

fn sized(status: StatusCode, kind: &'static str, body: Bytes) -> Answer {
    let mut answer = Response::new(AnswerBody::Whole(Some(body)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}
