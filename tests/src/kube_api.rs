//! A Kubernetes API server for tests: objects of any kind by the paths, verbs and status objects of the real
//! one, lists in pages, watches that resume from a version, send bookmarks, expire, end and break in the
//! middle of a line. It checks no schema and runs no controller: what a cluster would do, the test does.
//!
//! Source of the protocol: <https://kubernetes.io/docs/reference/using-api/api-concepts/>.

mod catalog;
mod selector;
mod store;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream;
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use self::selector::Selector;
use self::store::{Store, Target};
use crate::tls::{Authority, TlsFront};

/// What a watch sends; an error breaks its connection.
type Line = Result<Frame<Bytes>, io::Error>;
type Body = BoxBody<Bytes, io::Error>;

/// A request as it came.
#[derive(Debug, Clone)]
pub struct Asked {
    /// `GET`, `PATCH`…
    pub method: String,
    /// Path and query.
    pub target: String,
    /// The body.
    pub body: String,
}

/// The server. Dropping it closes its listener and every connection.
#[derive(Debug)]
pub struct KubeApi {
    addr: SocketAddr,
    shared: Arc<Shared>,
    files: TempDir,
    kubeconfig: PathBuf,
    _accepting: JoinSet<()>,
}

#[derive(Debug, Default)]
struct Shared {
    store: Mutex<Store>,
    asked: Mutex<Vec<Asked>>,
    /// Statuses with which the next requests are refused.
    refusals: Mutex<VecDeque<u16>>,
    /// Whether everything is refused.
    away: Mutex<bool>,
    /// Objects of which kind nobody may see.
    forbidden: Mutex<Option<&'static str>>,
    token: Option<String>,
}

impl KubeApi {
    /// Starts on a free port, without TLS; whoever comes may do everything.
    pub async fn start() -> Self {
        Self::with_token(None).await
    }

    /// Starts behind TLS, for whoever shows this token.
    pub async fn start_tls(authority: &Authority, token: &str) -> Self {
        let mut api = Self::with_token(Some(token)).await;
        let front = TlsFront::start(api.addr, &authority.sign("api-server"), None).await.addr;
        let (ca, token) = (authority.ca_file.display(), json!(token));
        api.write_kubeconfig(
            &format!("server: https://{front}, certificate-authority: {ca}"),
            &format!("token: {token}"),
        );
        api
    }

    async fn with_token(token: Option<&str>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound");
        let shared = Arc::new(Shared { token: token.map(str::to_owned), ..Shared::default() });
        let mut accepting = JoinSet::new();
        accepting.spawn(accept(listener, Arc::clone(&shared)));
        let files = TempDir::new().expect("a folder");
        let kubeconfig = files.path().join("kubeconfig");
        let mut api = Self { addr, shared, files, kubeconfig, _accepting: accepting };
        api.write_kubeconfig(&format!("server: http://{addr}"), "");
        api
    }

    fn write_kubeconfig(&mut self, cluster: &str, user: &str) {
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\n\
             clusters: [{{ name: test, cluster: {{ {cluster} }} }}]\n\
             users: [{{ name: test, user: {{ {user} }} }}]\n\
             contexts: [{{ name: test, context: {{ cluster: test, user: test, namespace: models }} }}]\n"
        );
        self.kubeconfig = self.files.path().join("kubeconfig");
        std::fs::write(&self.kubeconfig, text).expect("write");
    }

    /// A kubeconfig that leads here; its namespace is `models`.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Creates or replaces an object, as `kubectl apply` would; its kind's path follows from it.
    pub fn apply(&self, object: Value) {
        self.shared.store.lock().put(&catalog::path_of(&object), object);
    }

    /// Deletes an object like this one.
    pub fn delete(&self, object: &Value) {
        let path = catalog::path_of(object);
        assert!(self.shared.store.lock().remove(&path).is_some(), "there is no {path}");
    }

    /// An object by its path.
    pub fn object(&self, path: &str) -> Option<Value> {
        self.shared.store.lock().get(path).cloned()
    }

    /// Every object there is.
    pub fn objects(&self) -> Vec<Value> {
        self.shared.store.lock().all()
    }

    /// Something else in the cluster changes, and all versions but the newest are forgotten: watches and
    /// pages that begin at an older one are answered with 410, as an event or (`by_status`) as the answer's
    /// status; real servers do either.
    pub fn expire(&self, by_status: bool) {
        self.something_else_changes();
        self.shared.store.lock().expire(by_status);
    }

    /// Something that nobody here watches is written, which is a version of its own.
    pub fn something_else_changes(&self) {
        self.apply(json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "other" } }));
    }

    /// Forgets all versions but the newest, which is the one that the last bookmark named.
    pub fn expire_before_bookmark(&self) {
        self.shared.store.lock().expire(false);
    }

    /// Tells every watch that asked for it the newest version.
    pub fn bookmark(&self) {
        self.shared.store.lock().bookmark();
    }

    /// Ends every watch as a server does whose time for it is up.
    pub fn end_watches(&self) {
        self.shared.store.lock().end_watches(false);
    }

    /// Breaks every watch in the middle of a line.
    pub fn cut_watches(&self) {
        self.shared.store.lock().end_watches(true);
    }

    /// Number of open watches.
    pub fn watches(&self) -> usize {
        self.shared.store.lock().watches()
    }

    /// Refuses the next request with a status.
    pub fn refuse(&self, status: u16) {
        self.shared.refusals.lock().push_back(status);
    }

    /// Forbids everything with objects of a kind, such as `pods`, from now on, or no longer.
    pub fn forbid(&self, kind: Option<&'static str>) {
        *self.shared.forbidden.lock() = kind;
    }

    /// Refuses everything with 503 from now on, or no longer; breaks the watches.
    pub fn set_away(&self, away: bool) {
        *self.shared.away.lock() = away;
        if away {
            self.cut_watches();
        }
    }

    /// Every request so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.shared.asked.lock().clone()
    }

    /// How many lists (not watches) were asked for.
    pub fn lists(&self) -> usize {
        let is_list = |asked: &Asked| {
            let path = asked.target.split('?').next().unwrap_or_default();
            asked.method == "GET"
                && !asked.target.contains("watch=true")
                && Target::of(path).is_some_and(|target| target.name.is_none())
        };
        self.shared.asked.lock().iter().filter(|asked| is_list(asked)).count()
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            let service = service_fn(move |request| answer(request, Arc::clone(&shared)));
            // A watch that is cut ends its connection with an error, which is what is wanted.
            drop(
                hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await,
            );
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn answer(request: Request<Incoming>, shared: Arc<Shared>) -> Result<Response<Body>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let target = head.uri.path_and_query().map_or("", |target| target.as_str()).to_owned();
    let text = String::from_utf8_lossy(&body).into_owned();
    shared.asked.lock().push(Asked { method: head.method.to_string(), target, body: text });
    if *shared.away.lock() {
        return Ok(refusal(503, "ServiceUnavailable", "the server is away"));
    }
    if let Some(kind) =
        shared.forbidden.lock().filter(|kind| head.uri.path().split('/').any(|part| part == *kind))
    {
        return Ok(refusal(403, "Forbidden", &format!("{kind} is forbidden: as the test wished")));
    }
    if let Some(status) = shared.refusals.lock().pop_front() {
        return Ok(refusal(
            status,
            "Refused",
            "endpointslices.discovery.k8s.io is forbidden: as the test wished",
        ));
    }
    let shown = head.headers.get("authorization").and_then(|value| value.to_str().ok());
    if shared.token.as_ref().is_some_and(|token| shown != Some(format!("Bearer {token}").as_str())) {
        return Ok(refusal(401, "Unauthorized", "Unauthorized"));
    }
    let (path, query) = (head.uri.path(), Query(head.uri.query().unwrap_or_default()));
    if let Some(document) = catalog::document(path) {
        return Ok(json_answer(StatusCode::OK, &document));
    }
    let Some(target) = Target::of(path) else {
        return Ok(refusal(404, "NotFound", "the server could not find the requested resource"));
    };
    let mut store = shared.store.lock();
    Ok(match (head.method, &target.name) {
        (Method::GET, None) if query.is("watch", "true") => watch(&mut store, &target, &query),
        (Method::GET, None) => list(&store, &target, &query),
        (Method::GET, Some(name)) => match store.get(path) {
            Some(object) => json_answer(StatusCode::OK, object),
            None => not_found(&target, name),
        },
        (Method::DELETE, Some(name)) => match store.remove(path) {
            Some(object) => json_answer(StatusCode::OK, &object),
            None => not_found(&target, name),
        },
        (method, _) => write(&mut store, &method, path, &target, &body),
    })
}

/// POST, PUT and PATCH.
fn write(store: &mut Store, method: &Method, path: &str, target: &Target, body: &[u8]) -> Response<Body> {
    let Ok(sent) = serde_json::from_slice::<Value>(body) else {
        return refusal(400, "BadRequest", "the body is no JSON");
    };
    let name = sent["metadata"]["name"].as_str().unwrap_or_default();
    let path = if target.name.is_some() { path.to_owned() } else { format!("{path}/{name}") };
    let known = store.get(&path).cloned();
    match (method, known) {
        (&Method::POST, Some(_)) => refusal(409, "AlreadyExists", &format!("{path} already exists")),
        (&Method::PUT, None) => not_found(target, name),
        (&Method::PUT, Some(known)) => {
            let version = &sent["metadata"]["resourceVersion"];
            if !version.is_null() && *version != known["metadata"]["resourceVersion"] {
                return refusal(409, "Conflict", "the object has been modified");
            }
            json_answer(StatusCode::OK, &store.put(&path, sent))
        }
        (&Method::PATCH, Some(known)) if is_another(&sent, &known) => {
            refusal(409, "Conflict", "Precondition failed: UID in precondition differs")
        }
        (&Method::PATCH, Some(mut known)) => {
            store::merge(&mut known, &sent);
            json_answer(StatusCode::OK, &store.put(&path, known))
        }
        // A PATCH of what is not there creates it where it is an apply; a merge has no kind.
        (&Method::PATCH, None) if sent["kind"].is_null() => {
            not_found(target, target.name.as_deref().unwrap_or_default())
        }
        (&Method::POST | &Method::PATCH, None) => json_answer(StatusCode::CREATED, &store.put(&path, sent)),
        _ => refusal(
            405,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        ),
    }
}

/// Whether a patch is meant for an object with another UID.
fn is_another(patch: &Value, known: &Value) -> bool {
    let uid = &patch["metadata"]["uid"];
    !uid.is_null() && *uid != known["metadata"]["uid"]
}

fn watch(store: &mut Store, target: &Target, query: &Query<'_>) -> Response<Body> {
    let from = query.get("resourceVersion").unwrap_or_default().parse().unwrap_or(0);
    let selector = Selector::parse(&query.get("labelSelector").unwrap_or_default());
    match store.watch(&target.collection, selector, from, query.is("allowWatchBookmarks", "true")) {
        Ok(mut lines) => {
            let lines = stream::poll_fn(move |cx| lines.poll_recv(cx));
            Response::new(BodyExt::boxed(StreamBody::new(lines)))
        }
        Err(()) => refusal(410, "Expired", "too old resource version"),
    }
}

fn list(store: &Store, target: &Target, query: &Query<'_>) -> Response<Body> {
    let selector = Selector::parse(&query.get("labelSelector").unwrap_or_default());
    let limit = query.get("limit").and_then(|limit| limit.parse().ok()).unwrap_or(usize::MAX);
    match store.list(&target.collection, &selector, limit, &query.get("continue").unwrap_or_default()) {
        Ok(page) => json_answer(StatusCode::OK, &page),
        Err(()) => refusal(410, "Expired", "The provided continue parameter is too old"),
    }
}

fn not_found(target: &Target, name: &str) -> Response<Body> {
    refusal(404, "NotFound", &format!("{} {name:?} not found", target.collection))
}

/// A `Status` object, as every refusal is.
fn refusal(code: u16, reason: &str, message: &str) -> Response<Body> {
    json_answer(StatusCode::from_u16(code).expect("a status"), &status(code, reason, message))
}

fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure",
        "code": code, "reason": reason, "message": message })
}

fn json_answer(status: StatusCode, value: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(value.to_string())).map_err(|never| match never {}).boxed();
    let answer = Response::builder().status(status).header("content-type", "application/json").body(body);
    answer.expect("an answer")
}

/// A query string.
struct Query<'a>(&'a str);

impl Query<'_> {
    fn get(&self, key: &str) -> Option<String> {
        let raw = self.0.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='))?;
        Some(unescaped(raw))
    }

    fn is(&self, key: &str, value: &str) -> bool {
        self.get(key).as_deref() == Some(value)
    }
}

/// `%2F` and `+` as what they stand for.
fn unescaped(text: &str) -> String {
    let mut parts = text.replace('+', " ");
    while let Some(at) = parts.find('%') {
        let byte = u8::from_str_radix(&parts[at + 1..at + 3], 16).expect("two hexadecimal digits");
        assert!(byte.is_ascii() && byte != b'%', "not needed by these tests: {text}");
        parts.replace_range(at..at + 3, &char::from(byte).to_string());
    }
    parts
}
