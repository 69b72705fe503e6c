//! A scripted OpenAI-like worker in the test's own process. It records every request byte for byte and
//! answers from a default, hangs, or hands each call to the test, which then says events, stalls, cuts or
//! lies about lengths step by step. It understands nothing of prompts. Next: [`crate::fake_worker::Call`].

mod call;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};

use crate::eventually::patient;
use crate::http1::{Conn, End, Framing, Head};
use crate::openai::{FAKE_MODEL, model_list};

pub use call::Call;

/// What the worker does with a call to anything but its health, its model list and its metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Answers three words at once.
    Answer,
    /// Hands the call to the test.
    Manual,
    /// Says nothing until the caller goes away.
    Hang,
    /// Refuses every call with this status, and this `Retry-After`.
    Refuse(u16, Option<&'static str>),
    /// Refuses calls that bear [`REFUSE_ME`] with this status, and answers the others.
    RefuseMarked(u16),
}

/// The header of calls that a choosy worker refuses.
pub const REFUSE_ME: &str = "x-refuse-me";

/// One request as it arrived.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// Request line and headers, with their raw bytes.
    pub head: Head,
    /// The body, unframed.
    pub body: Vec<u8>,
}

impl Recorded {
    /// Method and target of the request line.
    pub fn target(&self) -> (&str, &str) {
        let mut parts = self.head.start_line.split(' ');
        (parts.next().unwrap_or_default(), parts.next().unwrap_or_default())
    }
}

/// The worker. Dropping it closes its listener and every connection.
#[derive(Debug)]
pub struct FakeWorker {
    addr: SocketAddr,
    /// Bound and never listens: while the worker is stopped, the system gives its port to no other test.
    _held: TcpSocket,
    shared: Arc<Shared>,
    calls: tokio::sync::Mutex<mpsc::UnboundedReceiver<Call>>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

/// What connections and the test both see.
#[derive(Debug)]
struct Shared {
    mode: Mutex<Mode>,
    health: Mutex<u16>,
    models: Mutex<Vec<String>>,
    /// Adapters and the models that they are of.
    adapters: Mutex<Vec<(String, String)>>,
    usage: Mutex<(u64, u64)>,
    metrics: Mutex<String>,
    loads: Mutex<Option<String>>,
    /// What a GET of a path is answered instead: status, headers, body.
    answers: Mutex<HashMap<String, Answer>>,
    /// Requests that were answered from there.
    answered: Mutex<Vec<Recorded>>,
    /// Tells the listener to go and the connections to stay.
    deaf: Notify,
    requests: Mutex<Vec<Recorded>>,
    active: AtomicUsize,
    most_active: AtomicUsize,
    aborted: AtomicUsize,
    calls: mpsc::UnboundedSender<Call>,
}

/// Status, headers, body.
type Answer = (u16, Vec<(String, String)>, String);

impl FakeWorker {
    /// Starts on a free port; healthy, serves [`FAKE_MODEL`], answers at once.
    pub async fn start() -> Self {
        Self::with_models(&[FAKE_MODEL]).await
    }

    /// Starts with these models.
    pub async fn with_models(models: &[&str]) -> Self {
        Self::at(SocketAddr::from(([127, 0, 0, 1], 0)), models).await
    }

    /// Starts at this address: pods of a Service have one port and an address each.
    #[expect(clippy::unused_async, reason = "tests wait for workers of every kind to start")]
    pub async fn at(addr: SocketAddr, models: &[&str]) -> Self {
        let (calls, receiver) = mpsc::unbounded_channel(); // bounded by what the test sends
        let shared = Arc::new(Shared {
            mode: Mutex::new(Mode::Answer),
            health: Mutex::new(200),
            models: Mutex::new(models.iter().map(|&m| m.to_owned()).collect()),
            adapters: Mutex::default(),
            usage: Mutex::new((12, 0)),
            metrics: Mutex::default(),
            loads: Mutex::default(),
            answers: Mutex::default(),
            answered: Mutex::default(),
            deaf: Notify::new(),
            requests: Mutex::default(),
            active: AtomicUsize::new(0),
            most_active: AtomicUsize::new(0),
            aborted: AtomicUsize::new(0),
            calls,
        });
        let held = bound(addr).expect("a free port");
        let addr = held.local_addr().expect("bound");
        let accepting = Mutex::new(Some(tokio::spawn(accept(listener(addr), shared.clone()))));
        Self { addr, _held: held, shared, calls: tokio::sync::Mutex::new(receiver), accepting }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// From now on the test answers: take each call with [`FakeWorker::call`].
    pub fn manual(&self) {
        *self.shared.mode.lock() = Mode::Manual;
    }

    /// From now on answers at once.
    pub fn answer(&self) {
        *self.shared.mode.lock() = Mode::Answer;
    }

    /// From now on says nothing; the caller must go away.
    pub fn hang(&self) {
        *self.shared.mode.lock() = Mode::Hang;
    }

    /// From now on refuses every call at once, with this status and `Retry-After`; its health is fine.
    pub fn refuse(&self, status: u16, retry_after: Option<&'static str>) {
        *self.shared.mode.lock() = Mode::Refuse(status, retry_after);
    }

    /// From now on refuses calls that bear [`REFUSE_ME`] with this status, and answers the others at once.
    pub fn refuse_marked(&self, status: u16) {
        *self.shared.mode.lock() = Mode::RefuseMarked(status);
    }

    /// Sets the status of `/health`.
    pub fn set_health(&self, status: u16) {
        *self.shared.health.lock() = status;
    }

    /// Answers each GET of this path so from now on.
    pub fn answer_at(&self, path: &str, status: u16, headers: &[(&str, &str)], body: &str) {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        self.shared.answers.lock().insert(path.to_owned(), (status, headers, body.to_owned()));
    }

    /// Answers this path as ever again.
    pub fn answer_as_ever(&self, path: &str) {
        self.shared.answers.lock().remove(path);
    }

    /// Every request that was answered as [`FakeWorker::answer_at`] says.
    pub fn answered(&self) -> Vec<Recorded> {
        self.shared.answered.lock().clone()
    }

    /// Closes its port and keeps its connections, as an engine does that is told to end.
    pub fn close_port(&self) {
        self.shared.deaf.notify_one();
    }

    /// Sets what `/metrics` says; nothing unless set.
    pub fn set_metrics(&self, page: &str) {
        page.clone_into(&mut self.shared.metrics.lock());
    }

    /// Sets what SGLang's `/v1/loads` says; 404 unless set.
    pub fn set_loads(&self, page: Option<&str>) {
        *self.shared.loads.lock() = page.map(str::to_owned);
    }

    /// Lists a LoRA adapter of a model, as vLLM does.
    pub fn add_adapter(&self, name: &str, parent: &str) {
        self.shared.adapters.lock().push((name.to_owned(), parent.to_owned()));
    }

    /// Sets the token counts that default answers report: prompt tokens, and those of them found cached.
    pub fn set_usage(&self, prompt_tokens: u64, cached_tokens: u64) {
        *self.shared.usage.lock() = (prompt_tokens, cached_tokens);
    }

    /// The next call, in manual mode.
    pub async fn call(&self) -> Call {
        let what = format!("a call at worker {}", self.addr);
        patient(&what, async { self.calls.lock().await.recv().await }).await.expect("the worker is running")
    }

    /// A call that has already arrived, in manual mode.
    pub fn try_call(&self) -> Option<Call> {
        self.calls.try_lock().ok()?.try_recv().ok()
    }

    /// Every request so far, without probes of health, models and metrics.
    pub fn requests(&self) -> Vec<Recorded> {
        self.shared.requests.lock().clone()
    }

    /// Number of requests so far, without probes.
    pub fn request_count(&self) -> usize {
        self.shared.requests.lock().len()
    }

    /// Forgets every request so far: a test that sends much keeps little.
    pub fn forget_requests(&self) {
        self.shared.requests.lock().clear();
    }

    /// Calls that arrived and are neither answered nor abandoned yet.
    pub fn active(&self) -> usize {
        self.shared.active.load(SeqCst)
    }

    /// The most calls that were active at once so far.
    pub fn most_active(&self) -> usize {
        self.shared.most_active.load(SeqCst)
    }

    /// Calls whose caller went away before the answer's end.
    pub fn aborted(&self) -> usize {
        self.shared.aborted.load(SeqCst)
    }

    /// Dies: the port refuses connections and every open one breaks.
    pub async fn stop(&self) {
        let task = self.accepting.lock().take();
        if let Some(task) = task {
            task.abort();
            let _ = task.await; // cancelled: the listener is closed once the task is gone
        }
    }

    /// Comes back on the same port.
    #[expect(clippy::unused_async, reason = "as it is stopped")]
    pub async fn restart(&self) {
        *self.accepting.lock() = Some(tokio::spawn(accept(listener(self.addr), self.shared.clone())));
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        if let Some(task) = self.accepting.lock().take() {
            task.abort();
        }
    }
}

/// A socket at this address, which only others of its kind may share.
fn bound(addr: SocketAddr) -> std::io::Result<TcpSocket> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseport(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

/// Listens at an address that the worker holds.
fn listener(addr: SocketAddr) -> TcpListener {
    bound(addr).and_then(|socket| socket.listen(1024)).expect("the worker holds its port")
}

/// Accepts until aborted; its connections end with it.
async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shared.deaf.notified() => break,
        };
        let Ok((stream, _)) = accepted else { return };
        connections.spawn(serve(stream, shared.clone()));
        while connections.try_join_next().is_some() {}
    }
    drop(listener);
    std::future::pending::<()>().await;
}

/// Serves one connection until either side is done with it.
async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    let mut conn = Conn::new(stream);
    while let Some(head) = conn.read_head().await {
        let mut framing = head.framing(Framing::Over);
        let (body, end) = conn.read_body(&mut framing).await;
        if end == End::Aborted {
            return;
        }
        match answer_one(conn, Recorded { head, body }, &shared).await {
            Some(same) => conn = same,
            None => return,
        }
    }
}

/// Answers one request; gives the connection back if another may follow.
async fn answer_one(conn: Conn, request: Recorded, shared: &Arc<Shared>) -> Option<Conn> {
    let (back, returned) = oneshot::channel();
    let (method, target) = request.target();
    let scripted = shared.answers.lock().get(target).filter(|_| method == "GET").cloned();
    if let Some((status, headers, body)) = scripted {
        shared.answered.lock().push(request.clone());
        let headers: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        Call::new(conn, request, back, None).try_respond(status, &headers, body.as_bytes()).await.ok()?;
        return returned.await.ok();
    }
    let probe = match request.target() {
        ("GET", "/health") => Some((*shared.health.lock(), "{}".to_owned())),
        ("GET", "/metrics") => Some((200, shared.metrics.lock().clone())),
        ("GET", loads) if loads.starts_with("/v1/loads") => {
            Some(shared.loads.lock().clone().map_or((404, "{}".to_owned()), |page| (200, page)))
        }
        // Where its events are: engines of old say nothing.
        ("GET", "/kv_event_sources" | "/server_info") => Some((404, "{}".to_owned())),
        ("GET", "/v1/models") => {
            Some((200, model_list(&shared.models.lock(), &shared.adapters.lock()).to_string()))
        }
        _ => None,
    };
    if let Some((status, body)) = probe {
        let call = Call::new(conn, request, back, None);
        call.try_respond(status, &[("content-type", "application/json")], body.as_bytes()).await.ok()?;
        return returned.await.ok();
    }
    shared.requests.lock().push(request.clone());
    let mut call = Call::new(conn, request, back, Some(Ticket::new(shared.clone())));
    let mode = *shared.mode.lock();
    let refusal = match mode {
        Mode::Refuse(status, retry_after) => Some((status, retry_after)),
        Mode::RefuseMarked(status) if call.request.head.header(REFUSE_ME).is_some() => Some((status, None)),
        _ => None,
    };
    if let Some((status, retry_after)) = refusal {
        call.refuse(status, retry_after).await.ok()?;
        return returned.await.ok();
    }
    match mode {
        Mode::Hang => {
            call.aborted().await;
            return None;
        }
        Mode::Answer | Mode::Refuse(..) | Mode::RefuseMarked(_) => {
            let (prompt_tokens, cached_tokens) = *shared.usage.lock();
            call.default_answer(prompt_tokens, cached_tokens).await.ok()?;
        }
        Mode::Manual => shared.calls.send(call).ok()?,
    }
    returned.await.ok()
}

/// Counts a call as active for as long as it lives.
#[derive(Debug)]
struct Ticket(Arc<Shared>);

impl Ticket {
    fn new(shared: Arc<Shared>) -> Self {
        let active = shared.active.fetch_add(1, SeqCst) + 1;
        shared.most_active.fetch_max(active, SeqCst);
        Self(shared)
    }

    fn count_abort(&self) {
        self.0.aborted.fetch_add(1, SeqCst);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, SeqCst);
    }
}
