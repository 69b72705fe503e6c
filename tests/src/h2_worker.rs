//! A scripted worker that speaks HTTP/2 with prior knowledge: each call in the test's hands, and what happens
//! to the connection that carries it. The fake worker's sibling (`fake_worker.rs`), which speaks HTTP/1.1.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use h2::server::{self, SendResponse};
use h2::{Reason, RecvStream, SendStream};
use http::{Method, Request, Response, StatusCode};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};

use crate::eventually::patient;
use crate::openai::{DONE, FAKE_MODEL, delta, model_list};

/// The worker. Dropping it closes its listener and every connection.
#[derive(Debug)]
pub struct H2Worker {
    addr: SocketAddr,
    calls: tokio::sync::Mutex<mpsc::UnboundedReceiver<H2Call>>,
    shared: Arc<Shared>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    most: u32,
    calls: mpsc::UnboundedSender<H2Call>,
    /// By the number of the connection: tells it to say GOAWAY.
    open: Mutex<HashMap<usize, mpsc::UnboundedSender<Farewell>>>,
    /// Connections so far.
    connections: Mutex<usize>,
}

#[derive(Debug)]
enum Farewell {
    Graceful,
    Abrupt,
    Silent,
}

/// A request that waits for its answer. Dropping it without an end resets its stream.
#[derive(Debug)]
pub struct H2Call {
    /// The head of the request.
    pub head: http::request::Parts,
    /// Its body.
    pub body: Vec<u8>,
    /// Which connection it came on, counted from 0.
    pub connection: usize,
    respond: SendResponse<Bytes>,
    stream: Option<SendStream<Bytes>>,
}

impl H2Worker {
    /// Starts on a free port and allows so many streams on a connection.
    pub async fn start(most: u32) -> Self {
        let (calls, receiver) = mpsc::unbounded_channel(); // bounded by what the test sends
        let shared = Arc::new(Shared { most, calls, open: Mutex::default(), connections: Mutex::default() });
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound");
        let accepting = Mutex::new(Some(tokio::spawn(accept(listener, Arc::clone(&shared)))));
        Self { addr, calls: tokio::sync::Mutex::new(receiver), shared, accepting }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How a gateway is told of it.
    pub fn url(&self) -> String {
        format!("http://{};http2=true", self.addr)
    }

    /// The next call.
    pub async fn call(&self) -> H2Call {
        let what = format!("a call at worker {}", self.addr);
        patient(&what, async { self.calls.lock().await.recv().await }).await.expect("the worker is running")
    }

    /// Connections so far, those of probes too.
    pub fn connections(&self) -> usize {
        *self.shared.connections.lock()
    }

    /// Says GOAWAY on every connection: streams that have begun go on, and it ends when the last has.
    pub fn leave(&self) {
        self.tell(|| Farewell::Graceful);
    }

    /// Says GOAWAY on every connection and ends it at once.
    pub fn leave_abruptly(&self) {
        self.tell(|| Farewell::Abrupt);
    }

    /// Ends every connection without a word.
    pub fn hang_up(&self) {
        self.tell(|| Farewell::Silent);
    }

    fn tell(&self, farewell: impl Fn() -> Farewell) {
        for connection in self.shared.open.lock().values() {
            let _ = connection.send(farewell()); // one that has just ended needs no farewell
        }
    }

    /// Dies: the port refuses connections and every open one breaks.
    pub async fn stop(&self) {
        let task = self.accepting.lock().take();
        if let Some(task) = task {
            task.abort();
            let _ = task.await; // cancelled: the listener is closed once the task is gone
        }
    }
}

impl Drop for H2Worker {
    fn drop(&mut self) {
        if let Some(task) = self.accepting.lock().take() {
            task.abort();
        }
    }
}

/// Accepts until aborted; its connections end with it.
async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let number = std::mem::replace(&mut *shared.connections.lock(), connections.len() + 1);
        connections.spawn(serve(stream, number, Arc::clone(&shared)));
    }
}

async fn serve(stream: TcpStream, number: usize, shared: Arc<Shared>) {
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let mut builder = server::Builder::new();
    builder.max_concurrent_streams(shared.most);
    let Ok(mut connection) = builder.handshake::<_, Bytes>(stream).await else { return };
    let (farewell, mut farewells) = mpsc::unbounded_channel();
    shared.open.lock().insert(number, farewell);
    loop {
        tokio::select! {
            call = connection.accept() => match call {
                Some(Ok((request, respond))) => {
                    tokio::spawn(take(request, respond, number, Arc::clone(&shared)));
                }
                _ => break,
            },
            farewell = farewells.recv() => match farewell {
                Some(Farewell::Graceful) => connection.graceful_shutdown(),
                Some(Farewell::Silent) => break,
                _ => connection.abrupt_shutdown(Reason::NO_ERROR),
            },
        }
    }
    shared.open.lock().remove(&number);
}

/// Answers probes, hands the rest to the test.
async fn take(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    connection: usize,
    shared: Arc<Shared>,
) {
    let (head, mut stream) = request.into_parts();
    let mut body = Vec::new();
    while let Some(Ok(bytes)) = stream.data().await {
        let _ = stream.flow_control().release_capacity(bytes.len()); // a stream that is gone has no window
        body.extend_from_slice(&bytes);
    }
    if head.method == Method::GET {
        let models = || model_list(&[FAKE_MODEL.to_owned()], &[]).to_string();
        let body = if head.uri.path() == "/v1/models" { models() } else { String::new() };
        if let Ok(mut stream) = respond.send_response(Response::new(()), false) {
            let _ = stream.send_data(body.into(), true); // the prober may have left
        }
        return;
    }
    let _ = shared.calls.send(H2Call { head, body, connection, respond, stream: None }); // the test may be over
}

impl H2Call {
    /// Sends interim answers; they may be refused meanwhile.
    pub fn interim(&mut self, status: u16, count: usize) {
        for _ in 0..count {
            let response = Response::builder().status(StatusCode::from_u16(status).expect("a status"));
            let _ = self.respond.send_informational(response.body(()).expect("a response"));
        }
    }

    /// Ends the body with trailers.
    pub fn trailers(mut self, trailers: http::HeaderMap) {
        self.stream
            .as_mut()
            .expect("the answer has begun")
            .send_trailers(trailers)
            .expect("the caller is there");
    }

    /// Begins an answer.
    pub fn head(&mut self, status: u16, headers: &[(&'static str, &str)]) {
        let mut response = Response::builder().status(StatusCode::from_u16(status).expect("a status"));
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        let response = response.body(()).expect("a response");
        self.stream = Some(self.respond.send_response(response, false).expect("the caller is there"));
    }

    /// Begins an event stream.
    pub fn begin_stream(&mut self) {
        self.head(200, &[("content-type", "text/event-stream")]);
    }

    /// Sends bytes; what the caller has no window for waits here.
    pub fn raw(&mut self, bytes: &[u8], end: bool) {
        let stream = self.stream.as_mut().expect("the answer has begun");
        stream.send_data(Bytes::copy_from_slice(bytes), end).expect("the caller is there");
    }

    /// Sends bytes, if the caller is still there.
    pub fn try_raw(&mut self, bytes: &[u8]) {
        let stream = self.stream.as_mut().expect("the answer has begun");
        let _ = stream.send_data(Bytes::copy_from_slice(bytes), true);
    }

    /// Sends a chunk of text in OpenAI's shape.
    pub fn say(&mut self, text: &str) {
        self.raw(format!("data: {}\n\n", delta(text)).as_bytes(), false);
    }

    /// Says all of it, and `[DONE]`.
    pub fn done(mut self) {
        self.raw(format!("data: {DONE}\n\n").as_bytes(), true);
    }

    /// Sends a JSON answer and ends the call.
    pub fn respond(mut self, body: &str) {
        self.head(200, &[("content-type", "application/json"), ("content-length", &body.len().to_string())]);
        self.raw(body.as_bytes(), true);
    }

    /// Resets the stream.
    pub fn reset(mut self, reason: Reason) {
        match &mut self.stream {
            Some(stream) => stream.send_reset(reason),
            None => self.respond.send_reset(reason),
        }
    }

    /// Waits until the caller resets the stream; with which reason.
    pub async fn must_be_reset(mut self) -> Reason {
        let reset = async {
            match &mut self.stream {
                Some(stream) => std::future::poll_fn(|cx| stream.poll_reset(cx)).await,
                None => std::future::poll_fn(|cx| self.respond.poll_reset(cx)).await,
            }
        };
        patient("the gateway to reset the stream", reset).await.expect("a reset, not a broken connection")
    }

    /// Bytes that the caller's window has room for; grows as it reads.
    pub async fn window(&mut self, wanted: usize) -> usize {
        let stream = self.stream.as_mut().expect("the answer has begun");
        stream.reserve_capacity(wanted);
        let room = std::future::poll_fn(|cx| stream.poll_capacity(cx));
        patient("room in the window", room).await.expect("the stream is open").expect("no error")
    }
}
