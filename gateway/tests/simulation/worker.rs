//! A scripted worker: an engine that answers over HTTP/1.1, token by token in virtual time, in the mood that
//! it is told. It continues a text that it is given (`continue_final_message`), and its tokens follow from
//! the prompt alone, so that every worker's answer is the same.

use std::{
    io,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{
    Method, Request, Response, StatusCode,
    header::{CONTENT_TYPE, RETRY_AFTER},
};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use turmoil::net::TcpListener;

use crate::{
    log::{Event, Id, Log},
    schedule::Mood,
};

/// Where workers listen.
pub(crate) const PORT: u16 = 8000;
/// How long a slow worker takes to say that it is well.
const SLOW_HEALTH: Duration = Duration::from_secs(30);
/// Longest time after which a fickle worker looks whether it likes to close an idle connection, or closes one
/// that has asked.
const FICKLE_MS: u64 = 120;
/// Between two looks at whether it still hangs.
const LOOK: Duration = Duration::from_millis(5);

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// What a worker is told, and what it says of itself. It outlives the worker's process.
#[derive(Debug, Clone)]
pub(crate) struct Worker {
    number: usize,
    log: Log,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    mood: Mood,
    slow_health: bool,
    open: usize,
    /// Connections that it closed because it liked to.
    dropped: usize,
}

/// What a fickle worker knows of a connection.
#[derive(Debug, Default)]
struct Habit {
    /// Requests so far.
    asked: AtomicUsize,
    /// Answers under way.
    open: AtomicUsize,
}

/// One answer under way. Dropped before its end it was aborted.
struct Call {
    worker: Worker,
    id: Id,
    finished: bool,
}

/// What is asked for.
struct Ask {
    id: Id,
    tokens: u32,
    pace: Duration,
    /// Tokens that the client has already.
    from: u32,
    stream: bool,
    usage: bool,
    usage_always: bool,
}

/// The text of an answer's token.
pub(crate) fn token(id: Id, at: u32) -> String {
    format!(" {id}.{at}")
}

impl Worker {
    /// A worker that is well.
    pub(crate) fn new(number: usize, log: Log) -> Self {
        Self { number, log, state: Arc::default() }
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Behaves so from now on.
    pub(crate) fn mood(&self, mood: Mood) {
        self.with(|state| state.mood = mood);
    }

    /// Takes its time to say that it is well, or not.
    pub(crate) fn slow_health(&self, slow: bool) {
        self.with(|state| state.slow_health = slow);
    }

    /// Answers that it is giving.
    pub(crate) fn open(&self) -> usize {
        self.with(|state| state.open)
    }

    /// Connections that it closed because it liked to.
    pub(crate) fn dropped(&self) -> usize {
        self.with(|state| state.dropped)
    }

    /// Its process.
    pub(crate) async fn run(self) -> turmoil::Result {
        let listen = || TcpListener::bind(SocketAddr::from(([0, 0, 0, 0], PORT)));
        let mut listener = Some(listen().await?);
        loop {
            if (self.with(|state| state.mood) == Mood::Leaving) == listener.is_some() {
                listener = if listener.is_none() { Some(listen().await?) } else { None };
            }
            let accepted = async {
                match &listener {
                    Some(listener) => listener.accept().await,
                    None => std::future::pending().await,
                }
            };
            let Ok(accepted) = timeout(LOOK, accepted).await else { continue };
            let (stream, _) = accepted?;
            let worker = self.clone();
            // In the host's own list of tasks, which a crash drops in order; the runtime's goes by ids, which
            // other runs move on.
            tokio::task::spawn_local(async move {
                let habit = Arc::new(Habit::default());
                let (tired, served) = (worker.clone().tires(Arc::clone(&habit)), worker);
                let service = service_fn(move |request| {
                    let (worker, habit) = (served.clone(), Arc::clone(&habit));
                    async move { worker.answer_or_close(request, &habit).await }
                });
                let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
                let (connection, tired) = (pin!(connection), pin!(tired));
                tokio::select! {
                    biased;
                    // A client that is gone is in the log already.
                    _ = connection => {}
                    () = tired => {}
                }
            });
        }
    }

    /// Whether it likes to close a connection now. Its chance is the run's.
    fn likes_to_close(&self, is_kept: bool) -> bool {
        let closes = is_kept && self.with(|state| state.mood) == Mood::Fickle && fastrand::u8(..3) == 0;
        self.with(|state| state.dropped += usize::from(closes));
        closes
    }

    /// Completes when it likes to close a connection that is idle.
    async fn tires(self, habit: Arc<Habit>) {
        loop {
            sleep(Duration::from_millis(1 + fastrand::u64(..FICKLE_MS))).await;
            let is_idle = habit.asked.load(Relaxed) > 0 && habit.open.load(Relaxed) == 0;
            if self.likes_to_close(is_idle) {
                return;
            }
        }
    }

    /// An answer; or the end of a connection that has answered before, at once or after a while.
    async fn answer_or_close(
        self,
        request: Request<Incoming>,
        habit: &Arc<Habit>,
    ) -> io::Result<Response<Body>> {
        let is_kept = habit.asked.fetch_add(1, Relaxed) > 0;
        if self.likes_to_close(is_kept) {
            if fastrand::bool() {
                let _ = request.into_body().collect().await;
                sleep(Duration::from_millis(fastrand::u64(..FICKLE_MS))).await;
            }
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let under_way = UnderWay::begin(habit);
        Ok(self.answer(request).await.map(|body| {
            body.map_frame(move |frame| {
                let _ = &under_way;
                frame
            })
            .boxed_unsync()
        }))
    }

    async fn answer(self, request: Request<Incoming>) -> Response<Body> {
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/health") => {
                if self.with(|state| state.slow_health) {
                    sleep(SLOW_HEALTH).await;
                }
                whole(StatusCode::OK, &json!({}))
            }
            (&Method::GET, "/v1/models") => {
                whole(StatusCode::OK, &json!({"object": "list", "data": [{"id": "m", "object": "model"}]}))
            }
            (&Method::POST, "/v1/chat/completions") => self.chat(request).await,
            _ => whole(StatusCode::NOT_FOUND, &json!({})),
        }
    }

    async fn chat(self, request: Request<Incoming>) -> Response<Body> {
        let Ok(body) = request.into_body().collect().await else {
            return whole(StatusCode::BAD_REQUEST, &json!({}));
        };
        let body: Value = serde_json::from_slice(&body.to_bytes()).unwrap_or_default();
        let Some(ask) = Ask::of(&body) else { return whole(StatusCode::BAD_REQUEST, &json!({})) };
        if let Mood::Refusing(status, after) = self.with(|state| state.mood) {
            self.log.note(Event::Refused { worker: self.number, id: ask.id });
            return refusal(status, after);
        }
        let mut call = Call::begin(self, &ask);
        call.unless_hung().await;
        if call.mood() == Mood::Failing {
            call.finish();
            let error = json!({"error": {"message": "out of order", "type": "server_error"}});
            return whole(StatusCode::INTERNAL_SERVER_ERROR, &error);
        }
        if ask.stream {
            return call.stream(ask);
        }
        for _ in ask.from..ask.tokens {
            sleep(ask.pace).await;
            call.unless_hung().await;
        }
        call.finish();
        let text: String = (ask.from..ask.tokens).map(|at| token(ask.id, at)).collect();
        let choice =
            json!({"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"});
        whole(
            StatusCode::OK,
            &json!({"id": "c", "model": "m", "choices": [choice], "usage": ask.usage_at(ask.tokens)}),
        )
    }
}

/// One answer of a connection; over when its body is gone.
struct UnderWay(Arc<Habit>);

impl UnderWay {
    fn begin(habit: &Arc<Habit>) -> Self {
        habit.open.fetch_add(1, Relaxed);
        Self(Arc::clone(habit))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Relaxed);
    }
}

impl Call {
    fn begin(worker: Worker, ask: &Ask) -> Self {
        worker.with(|state| state.open += 1);
        worker.log.note(Event::Begun { worker: worker.number, id: ask.id, from: ask.from });
        Self { worker, id: ask.id, finished: false }
    }

    fn mood(&self) -> Mood {
        self.worker.with(|state| state.mood)
    }

    async fn unless_hung(&self) {
        while matches!(self.mood(), Mood::Hung | Mood::Leaving) {
            sleep(LOOK).await;
        }
    }

    fn finish(&mut self) {
        self.finished = true;
    }

    fn stream(self, ask: Ask) -> Response<Body> {
        let events = stream::unfold((self, ask.from), move |(mut call, at)| {
            let event = ask.event(at);
            let (pace, from, last) = (ask.pace, ask.from, at == ask.tokens + 1);
            async move {
                let event = event?;
                if !last {
                    sleep(pace).await;
                }
                call.unless_hung().await;
                if matches!(call.mood(), Mood::Cutting(after) if at - from >= after) {
                    // The end of the connection is all that anybody hears of it.
                    return Some((Err(io::ErrorKind::BrokenPipe.into()), (call, u32::MAX)));
                }
                if let Mood::Ending(after, words) = call.mood()
                    && !last
                    && at - from >= after
                {
                    call.finish();
                    call.worker.log.note(Event::Ended { worker: call.worker.number, id: call.id });
                    // Nothing may follow.
                    return Some((Ok(Frame::data(Bytes::from_static(words.as_bytes()))), (call, u32::MAX)));
                }
                if last {
                    call.finish();
                }
                Some((Ok(Frame::data(Bytes::from(event))), (call, at + 1)))
            }
        });
        let mut response = Response::new(StreamBody::new(events.boxed()).boxed_unsync());
        let kind = http::HeaderValue::from_static("text/event-stream");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        response
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let (worker, id) = (self.worker.number, self.id);
        self.worker.with(|state| state.open -= 1);
        let event =
            if self.finished { Event::Finished { worker, id } } else { Event::Aborted { worker, id } };
        self.worker.log.note(event);
    }
}

impl Ask {
    fn of(body: &Value) -> Option<Self> {
        let messages = body["messages"].as_array()?;
        let mut numbers = messages.first()?["content"].as_str()?.split(' ').map(|n| n.parse::<u32>().ok());
        let (id, tokens, pace_ms) = (numbers.next()??, numbers.next()??, numbers.next()??);
        let from = if body["continue_final_message"] == true {
            messages.last()?["content"].as_str()?.matches('.').count() as u32
        } else {
            0
        };
        let options = &body["stream_options"];
        Some(Self {
            id,
            tokens,
            pace: Duration::from_millis(pace_ms.into()),
            from,
            stream: body["stream"] == true,
            usage: options["include_usage"] == true,
            usage_always: options["continuous_usage_stats"] == true,
        })
    }

    /// So many tokens were computed, the first ones maybe elsewhere: those are part of the prompt.
    fn usage_at(&self, at: u32) -> Value {
        json!({
            "prompt_tokens": 8 + self.from,
            "completion_tokens": at - self.from,
            "total_tokens": 8 + at,
            "prompt_tokens_details": {"cached_tokens": 4},
        })
    }

    /// The tokens, then the end with the usage.
    fn event(&self, at: u32) -> Option<String> {
        let chunk = |choices: Value, usage: Value| {
            let chunk = json!({
                "id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, "usage": usage,
            });
            format!("data: {chunk}\n\n")
        };
        let choice =
            |delta: Value, reason: Value| json!([{"index": 0, "delta": delta, "finish_reason": reason}]);
        if at < self.tokens {
            let usage = if self.usage_always { self.usage_at(at + 1) } else { Value::Null };
            return Some(chunk(choice(json!({"content": token(self.id, at)}), Value::Null), usage));
        }
        if at == self.tokens {
            return Some(chunk(choice(json!({}), json!("stop")), Value::Null));
        }
        let usage = if self.usage { chunk(json!([]), self.usage_at(self.tokens)) } else { String::new() };
        (at == self.tokens + 1).then(|| format!("{usage}data: [DONE]\n\n"))
    }
}

fn refusal(status: u16, after: Option<u64>) -> Response<Body> {
    let status = StatusCode::from_u16(status).unwrap_or_default();
    let mut response = whole(status, &json!({"error": {"message": "not this one", "type": "refused"}}));
    if let Some(seconds) = after {
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    response
}

fn whole(status: StatusCode, body: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(body.to_string())).map_err(|never| match never {});
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = status;
    let kind = http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
