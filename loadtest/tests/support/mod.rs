//! A scripted OpenAI-like server for the tests: one token a byte, one unbounded prefix cache in blocks of 16,
//! four worker names in turn, and failures at the requests a test names. Not an engine.

use std::{
    collections::HashSet,
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::BoxBody};
use hyper::{
    body::{Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use keyway_wire::openai::ErrorBody;
use serde_json::{Value, json};
use tokio::{net::TcpListener, runtime::Runtime, sync::mpsc};

/// Tokens that the server's chat template adds, all in front of the prompt.
pub(crate) const TEMPLATE_TOKENS: usize = 6;
const BLOCK: usize = 16;

/// What becomes of one streamed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Script {
    /// A whole answer.
    Good,
    /// A status, with an error body.
    Status(u16),
    /// An error event after two tokens.
    ErrorEvent,
    /// The connection breaks after two tokens.
    Cut,
    /// The stream ends well by HTTP, but without `[DONE]`.
    NoDone,
    /// An answer that is no stream.
    Json,
    /// A head, one token, and then nothing.
    Hang,
    /// An event stream of these bytes, each piece a frame of its own, with a wait where a piece is [`PAUSE`].
    Said(&'static [&'static str]),
    /// This JSON, with the status of a good answer.
    Whole(&'static str),
}

/// A piece of [`Script::Said`] that is a wait of [`PAUSE_MS`].
pub(crate) const PAUSE: &str = "pause";
/// See [`PAUSE`].
pub(crate) const PAUSE_MS: u64 = 200;

/// Chooses the script of the n-th streamed request.
pub(crate) type Choose = fn(usize) -> Script;

/// The server; it ends with the test.
pub(crate) struct FakeServer {
    pub(crate) addr: SocketAddr,
    /// Bodies of the streamed requests, in order of arrival.
    pub(crate) bodies: Arc<Mutex<Vec<Value>>>,
    /// Their `x-session-id`.
    pub(crate) sessions: Arc<Mutex<Vec<Option<String>>>>,
    /// Their `x-parent-session-id`.
    pub(crate) parents: Arc<Mutex<Vec<Option<String>>>>,
    /// `Authorization` of all requests.
    pub(crate) keys: Arc<Mutex<HashSet<String>>>,
    /// One message for each streamed request.
    pub(crate) arrivals: std::sync::mpsc::Receiver<()>,
    _runtime: Runtime,
}

#[derive(Clone)]
struct State {
    choose: Choose,
    bodies: Arc<Mutex<Vec<Value>>>,
    sessions: Arc<Mutex<Vec<Option<String>>>>,
    parents: Arc<Mutex<Vec<Option<String>>>>,
    keys: Arc<Mutex<HashSet<String>>>,
    cache: Arc<Mutex<HashSet<Vec<u8>>>>,
    arrived: std::sync::mpsc::Sender<()>,
}

type Answer = Response<BoxBody<Bytes, io::Error>>;

impl FakeServer {
    pub(crate) fn start(choose: Choose) -> Self {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let addr = listener.local_addr().unwrap();
        let (bodies, keys) = (Arc::default(), Arc::default());
        let (sessions, parents) = (Arc::default(), Arc::default());
        let (arrived, arrivals) = std::sync::mpsc::channel();
        let state = State {
            choose,
            bodies: Arc::clone(&bodies),
            sessions: Arc::clone(&sessions),
            parents: Arc::clone(&parents),
            keys: Arc::clone(&keys),
            cache: Arc::default(),
            arrived,
        };
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                stream.set_nodelay(true).unwrap();
                let state = state.clone();
                let service = service_fn(move |request| answer(state.clone(), request));
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        Self { addr, bodies, sessions, parents, keys, arrivals, _runtime: runtime }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.addr)
    }
}

async fn answer(state: State, request: Request<Incoming>) -> Result<Answer, Infallible> {
    if let Some(key) = request.headers().get("authorization") {
        state.keys.lock().unwrap().insert(key.to_str().unwrap().to_owned());
    }
    if request.method() == Method::GET && request.uri().path() == "/v1/models" {
        return Ok(whole(
            StatusCode::OK,
            &json!({"object": "list", "data": [{"id": "fake", "object": "model"}]}),
        ));
    }
    let named = |name: &str| request.headers().get(name).map(|id| id.to_str().unwrap().to_owned());
    let (session, parent) = (named("x-session-id"), named("x-parent-session-id"));
    let path = request.uri().path().to_owned();
    let (chat, is_input) = (path != "/v1/completions", path == "/v1/responses");
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let body: Value = serde_json::from_slice(&body).unwrap();
    if path == "/v1/embeddings" {
        return Ok(embeddings(&state, body));
    }
    let messages = if is_input { &body["input"] } else { &body["messages"] };
    let text = if chat { &messages[0]["content"] } else { &body["prompt"] };
    let template = if chat { TEMPLATE_TOKENS } else { 0 };
    let prompt = [vec![b'<'; template], text.as_str().unwrap().as_bytes().to_vec()].concat();
    if body.get("stream").is_none() {
        let usage = json!({"prompt_tokens": prompt.len(), "completion_tokens": 1});
        return Ok(whole(StatusCode::OK, &json!({"choices": [], "usage": usage})));
    }
    let tokens = body["max_tokens"].as_u64().or(body["max_output_tokens"].as_u64()).unwrap();
    let turn = {
        let mut bodies = state.bodies.lock().unwrap();
        bodies.push(body);
        state.sessions.lock().unwrap().push(session);
        state.parents.lock().unwrap().push(parent);
        bodies.len() - 1
    };
    // A test that does not ask has dropped nothing; one that is over has.
    let _ = state.arrived.send(());
    let cached = state.cached_tokens(&prompt);
    let mut answer = match (state.choose)(turn) {
        Script::Status(status) => {
            let error = ErrorBody::new("server_error", "scripted", format!("scripted status {status}"));
            whole(StatusCode::from_u16(status).unwrap(), &serde_json::to_value(error).unwrap())
        }
        Script::Json => whole(StatusCode::OK, &json!({"choices": []})),
        Script::Whole(json) => whole(StatusCode::OK, &serde_json::from_str(json).unwrap()),
        Script::Said(pieces) => said(pieces),
        script => streamed(script, chat, tokens, prompt.len(), cached),
    };
    answer.headers_mut().insert("x-keyway-worker", format!("worker-{}:1", turn % 4).parse().unwrap());
    Ok(answer)
}

/// A vector for each text, one token a byte and one more for each text; or what the test's script says.
fn embeddings(state: &State, body: Value) -> Answer {
    let texts: Vec<usize> = match &body["input"] {
        Value::Array(texts) => texts.iter().map(|text| text.as_str().unwrap().len()).collect(),
        text => vec![text.as_str().unwrap().len()],
    };
    let turn = {
        let mut bodies = state.bodies.lock().unwrap();
        bodies.push(body);
        bodies.len() - 1
    };
    let tokens: usize = texts.iter().map(|bytes| bytes + 1).sum();
    let vector = |index: usize| json!({"object": "embedding", "index": index, "embedding": [0.5, -0.25]});
    let data: Vec<Value> = (0..texts.len()).map(vector).collect();
    let good =
        json!({"object": "list", "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}});
    match (state.choose)(turn) {
        Script::Status(status) => {
            whole(StatusCode::from_u16(status).unwrap(), &json!({"error": {"message": "no"}}))
        }
        Script::Whole(json) => whole(StatusCode::OK, &serde_json::from_str(json).unwrap()),
        Script::Said(pieces) => said(pieces),
        _ => whole(StatusCode::OK, &good),
    }
}

impl State {
    /// Tokens of `prompt` that were seen before, then keeps it.
    fn cached_tokens(&self, prompt: &[u8]) -> usize {
        let mut cache = self.cache.lock().unwrap();
        let ends = || (1..=prompt.len() / BLOCK).map(|blocks| blocks * BLOCK);
        let cached = ends().take_while(|&end| cache.contains(&prompt[..end])).count() * BLOCK;
        cache.extend(ends().map(|end| prompt[..end].to_vec()));
        cached.min((prompt.len() - 1) / BLOCK * BLOCK)
    }
}

fn whole(status: StatusCode, body: &Value) -> Answer {
    let body = Full::new(Bytes::from(body.to_string())).map_err(io::Error::other).boxed();
    Response::builder().status(status).header("content-type", "application/json").body(body).unwrap()
}

fn said(pieces: &'static [&'static str]) -> Answer {
    let (frames, received) = mpsc::unbounded_channel::<io::Result<Frame<Bytes>>>();
    tokio::spawn(async move {
        for piece in pieces {
            if *piece == PAUSE {
                tokio::time::sleep(std::time::Duration::from_millis(PAUSE_MS)).await;
            } else {
                // The load tester reads no further once it has seen an error.
                let _ = frames.send(Ok(Frame::data(Bytes::from_static(piece.as_bytes()))));
            }
        }
    });
    let body = StreamBody::new(Events(received)).boxed();
    Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
}

fn streamed(script: Script, chat: bool, tokens: u64, prompt: usize, cached: usize) -> Answer {
    let (events, received) = mpsc::unbounded_channel::<io::Result<Frame<Bytes>>>();
    let say = |text: &str| events.send(Ok(Frame::data(Bytes::from(format!("data: {text}\n\n"))))).unwrap();
    if chat {
        say(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#);
    }
    let token =
        if chat { r#"{"choices":[{"delta":{"content":"x"}}]}"# } else { r#"{"choices":[{"text":"x"}]}"# };
    let said = match script {
        Script::Good | Script::NoDone => tokens,
        Script::Hang => 1,
        _ => 2,
    };
    (0..said).for_each(|_| say(token));
    match script {
        Script::ErrorEvent => say(r#"{"error":{"message":"scripted error event"}}"#),
        Script::Cut => drop(events.send(Err(io::Error::other("scripted cut")))),
        // The sender is never dropped, so the stream never ends.
        Script::Hang => std::mem::forget(events.clone()),
        _ => {
            say(r#"{"choices":[{"delta":{},"text":"","finish_reason":"length"}]}"#);
            let details = json!({"cached_tokens": cached});
            let usage = json!({"prompt_tokens": prompt, "completion_tokens": tokens, "prompt_tokens_details": details});
            say(&json!({"choices": [], "usage": usage}).to_string());
            if script == Script::Good {
                say("[DONE]");
            }
        }
    }
    drop(events);
    let body = StreamBody::new(Events(received)).boxed();
    Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
}

/// A receiver as the body's stream of frames.
struct Events(mpsc::UnboundedReceiver<io::Result<Frame<Bytes>>>);

impl futures_util::Stream for Events {
    type Item = io::Result<Frame<Bytes>>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.0.poll_recv(context)
    }
}
