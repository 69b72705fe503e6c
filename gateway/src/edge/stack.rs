//! The tower stack, top to bottom as a request meets it, with why each layer stands at its height.
//!
//! Next: [`mod@keyway_core::pick`], then [`crate::proxy::dispatch`].

use std::{cell::RefCell, convert::Infallible, panic::AssertUnwindSafe, sync::Arc};

use bytes::BytesMut;
use futures_util::FutureExt;
use http::{
    HeaderValue, Method, Version,
    header::{CONNECTION, ORIGIN},
};
use tower::{Service, ServiceBuilder, service_fn};

use crate::{
    api::Api,
    client::Client,
    clock::KeptTimer,
    config::Cors,
    edge::{
        around::around,
        live::{Live, Serving},
        models,
        server::Intake,
        well_formed::well_formed,
    },
    error::{Error, Failed},
    headers,
    ledger::Ledger,
    limits::{IDS_TOGETHER, MAX_REQUEST_ID_BYTES},
    metrics::Metrics,
    path,
    proxy::{
        body::{Request, Response, full},
        engine_paths::ENGINE_PATHS,
        websocket,
    },
    telemetry::{record::Record, trace::Tracer},
};

/// Builds the stack that the server calls for each request. Errors have become answers. Its layers are one
/// value; only what a worker is asked is in a box of its own, which is gone when the answer begins.
pub fn stack(live: Live, intake: Arc<Intake>, written: Written) -> impl Stack {
    let metrics = Arc::clone(&live.now().dispatch.metrics);
    ServiceBuilder::new()
        .map_request(move |arrived| Asking::boxed(arrived, live.now()))
        // Outermost, so that every request has an id, one log line and one count, refused ones too.
        .layer(around(move |asking, next| {
            recorded((Arc::clone(&metrics), written.clone()), Arc::clone(&intake), asking, next)
        }))
        // Below the record, so that a panic is recorded; above all that may panic.
        .layer(around(panic_safe))
        // Before any layer reads the body.
        .layer(around(framed))
        // Above all that costs: who may not come in takes nothing.
        .layer(around(known))
        // Innermost: the gateway's own answers, or a worker's.
        .service(service_fn(routes))
}

/// Where a request is written beside the log, where that is wanted.
#[derive(Debug, Clone, Default)]
pub struct Written {
    /// What makes its spans.
    pub tracer: Option<Arc<Tracer>>,
    /// Where it is kept what it has used.
    pub ledger: Option<Arc<Ledger>>,
}

/// A request on its way down, in a box, as each layer moves it some times; its record, once it has one; and
/// what it is served by. Among the request's extensions those would cost it a map of its own.
struct Asking {
    request: Request,
    client: Arc<Client>,
    timer: Arc<KeptTimer>,
    record: Option<Arc<Record>>,
    serving: Arc<Serving>,
}

impl Asking {
    fn boxed(arrived: Arrived, serving: Arc<Serving>) -> Box<Self> {
        let Arrived { request, client, timer } = arrived;
        let mut asking = Box::new(Self { request, client, timer, record: None, serving });
        path::undo_escapes(asking.request.uri_mut());
        asking
    }
}

/// A request as the server hands it over.
#[derive(Debug)]
pub struct Arrived {
    /// Its head, and its body as it comes.
    pub request: Request,
    /// The connection that it came on, whose share of the gateway it counts against.
    pub client: Arc<Client>,
    /// That connection's timer, for one request at a time.
    pub timer: Arc<KeptTimer>,
}

/// What the server can call, at any time: it is always ready.
pub trait Stack:
    Service<Arrived, Response = Response, Error = Infallible, Future: Send> + Clone + Send + Sync + 'static
{
}

impl<S> Stack for S where
    S: Service<Arrived, Response = Response, Error = Infallible, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static
{
}

async fn recorded<S>(
    (metrics, written): (Arc<Metrics>, Written),
    intake: Arc<Intake>,
    mut asking: Box<Asking>,
    mut next: S,
) -> Result<Response, Infallible>
where
    S: Service<Box<Asking>, Response = Response, Error = Infallible>,
{
    let request = &asking.request;
    let id = request_id(request);
    let asked = (request.method().clone(), request.uri().clone());
    let record = Record::open_billed(metrics, id, asked, written.ledger.as_ref());
    // Who only asks whether the gateway is alive is no part of anything.
    if let Some(tracer) = written.tracer.filter(|_| request.uri().path() != "/health") {
        record.traced(tracer.begin(request.method(), request.headers()));
    }
    asking.client.asks(record.started());
    let version = request.version();
    let of_anthropic = is_anthropics(request);
    asking.record = Some(Arc::clone(&record));
    let mut response = match asking.serving.cors.clone() {
        None => next.call(asking).await?,
        // In a box: few gateways have any.
        Some(cors) => Box::pin(shared(&cors, asking, next)).await?,
    };
    record.answers(response.status(), response.headers_mut());
    if let Some(Failed(error)) = response.extensions().get() {
        record.outcome(error.code());
        if of_anthropic {
            let body = error.to_body_of(Api::Messages);
            *response.body_mut() = full(body);
        }
    }
    if of_anthropic {
        response.headers_mut().insert(headers::ANTHROPIC_REQUEST_ID, record.id_header().clone());
    }
    response.headers_mut().insert(headers::REQUEST_ID, record.id_header().clone());
    if intake.is_leaving() && version < Version::HTTP_2 {
        // The client's next request is another process's.
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    // In place: an answer is large to be moved.
    response.body_mut().hold_record(record);
    Ok(response)
}

/// Whether a request is to Anthropic's API, whose clients look for errors and ids in its form.
fn is_anthropics(request: &Request) -> bool {
    let path = request.uri().path();
    let below =
        |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    below("/v1/messages") || (below("/v1/models") && headers::of_anthropics_client(request.headers()))
}

/// Says who may use the API from a browser, where that is configured: above all that may refuse, so that
/// pages can read why; a preflight has no key, and is answered here.
async fn shared<S>(cors: &Cors, asking: Box<Asking>, mut next: S) -> Result<Response, Infallible>
where
    S: Service<Box<Asking>, Response = Response, Error = Infallible>,
{
    let request = &asking.request;
    let origin = request.headers().get(ORIGIN).cloned();
    let preflight = cors.preflight(request.method(), request.headers());
    let is_preflight = preflight.is_some();
    let mut response = match (preflight, &asking.record) {
        (Some(answer), Some(record)) => own(answer, record),
        _ => next.call(asking).await?,
    };
    cors.tell(origin.as_ref(), response.headers_mut(), is_preflight);
    Ok(response)
}

/// The client's own id where it is printable and short, so that its logs and ours meet.
fn request_id(request: &Request) -> HeaderValue {
    // Engines that move KV read peers' addresses out of an id (MoRI-IO:
    // `___prefill_addr_HOST:PORT___decode_addr_…`).
    let steers = |id: &str| id.contains("_addr_");
    let printable = |id: &&HeaderValue| id.to_str().is_ok_and(|id| !id.is_empty() && !steers(id));
    // The name has no number of its own among headers: to look through a few is less than to hash it.
    let given = request.headers().iter().find(|(name, _)| **name == headers::REQUEST_ID);
    let given = given.map(|(_, id)| id).filter(printable);
    match given {
        Some(id) if id.len() <= MAX_REQUEST_ID_BYTES => id.clone(),
        _ => new_id(fastrand::u128(..)),
    }
}

thread_local! {
    /// Room for ids to come, which they lie in one behind the other: alone each would take two allocations,
    /// for its bytes and to be shared.
    static ID_ROOM: RefCell<BytesMut> = RefCell::default();
}

/// `req-`, and the number in 32 hexadecimal digits.
fn new_id(number: u128) -> HeaderValue {
    let mut id = *b"req-00000000000000000000000000000000";
    for (digits, byte) in id[4..].chunks_exact_mut(2).zip(number.to_be_bytes()) {
        let digit = |of: u8| b"0123456789abcdef"[usize::from(of & 15)];
        digits.copy_from_slice(&[digit(byte >> 4), digit(byte)]);
    }
    let id = ID_ROOM.with_borrow_mut(|room| {
        if room.capacity() < id.len() {
            *room = BytesMut::with_capacity(IDS_TOGETHER * id.len());
        }
        room.extend_from_slice(&id);
        room.split().freeze()
    });
    // Letters and digits are always a header's value.
    HeaderValue::from_maybe_shared(id).unwrap_or(HeaderValue::from_static("req"))
}

async fn panic_safe<S>(asking: Box<Asking>, mut next: S) -> Result<Response, Infallible>
where
    S: Service<Box<Asking>, Response = Response, Error = Infallible>,
{
    // The request's state is dropped with its future, so nothing half-changed is seen again.
    match AssertUnwindSafe(next.call(asking)).catch_unwind().await {
        Ok(response) => response,
        // Counted and logged already (`panics.rs`).
        Err(_) => Ok(Error::Internal.to_response()),
    }
}

/// Refuses heads that are too large or that HTTP forbids (`well_formed.rs`), and CONNECT, behind which bytes
/// of any protocol may have been sent already; these two with their connection.
async fn framed<S>(asking: Box<Asking>, mut next: S) -> Result<Response, Infallible>
where
    S: Service<Box<Asking>, Response = Response, Error = Infallible>,
{
    let request = &asking.request;
    let refused = if let Err(error) = well_formed(request) {
        error
    } else if request.method() == Method::CONNECT {
        Error::NotFound("a tunnel".to_owned())
    } else if let Err(error) = headers::bounded(request).and_then(|()| path::is_plain(request.uri().path())) {
        return Ok(error.to_response());
    } else {
        return next.call(asking).await;
    };
    let mut refused = refused.to_response();
    refused.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    Ok(refused)
}

async fn known<S>(mut asking: Box<Asking>, mut next: S) -> Result<Response, Infallible>
where
    S: Service<Box<Asking>, Response = Response, Error = Infallible>,
{
    let Asking { request, record, serving, .. } = &mut *asking;
    if let Some(tenants) = serving.tenants.as_ref().filter(|_| request.uri().path() != "/health") {
        let computes = record.as_ref().is_some_and(|record| record.computes());
        let admitted = match tenants.shared() {
            None => tenants.admit(request.headers_mut(), computes),
            // In a box: few gateways have a store.
            Some(shared) => Box::pin(tenants.admit_shared(shared, request.headers_mut(), computes)).await,
        };
        match (admitted, record) {
            (Ok(visit), Some(record)) => record.tenant(Arc::new(visit)),
            (Ok(_), None) => return Ok(Error::Internal.to_response()),
            (Err(refused), record) => {
                if let (Some(visit), Some(record)) = (refused.visit, record) {
                    record.tenant(Arc::new(visit));
                }
                return Ok(refused.error.to_response());
            }
        }
    }
    next.call(asking).await
}

async fn routes(mut asking: Box<Asking>) -> Result<Response, Infallible> {
    let record = asking.record.take();
    let Asking { request, serving, .. } = &*asking;
    let dispatch = Arc::clone(&serving.dispatch);
    let path = request.uri().path();
    let result = match (request.method(), path, record) {
        (&Method::GET, "/health", Some(record)) => Ok(own(Response::new(full("ok\n")), &record)),
        (_, _, Some(record)) if models::answers(request) => {
            let names = &dispatch.requests.bodies.names;
            models::answer(dispatch.router.fleet(), names, request).map(|response| own(response, &record))
        }
        (_, path, Some(record)) if is_passed(path) => match websocket::is_asked_for(request) {
            Ok(false) => dispatch.handle(asking.request, (&asking.client, &asking.timer), &record).await,
            Ok(true) => Err(Error::NoWebSocket),
            Err(error) => Err(error),
        },
        _ => Err(Error::NotFound(path.to_owned())),
    };
    Ok(result.unwrap_or_else(|error| error.to_response()))
}

/// An answer of the gateway itself: complete once it is made.
fn own(response: Response, record: &Record) -> Response {
    record.outcome("complete");
    response
}

/// Whether requests to a path go to workers: everything under `/v1/`, and engines' own besides that.
fn is_passed(path: &str) -> bool {
    (path.starts_with("/v1/") && !has_dot_segment(path)) || ENGINE_PATHS.contains(&path)
}

/// Whether a path could leave `/v1/` once a worker normalises it.
fn has_dot_segment(path: &str) -> bool {
    if memchr::memchr3(b'.', b'%', b'\\', path.as_bytes()).is_none() {
        return false;
    }
    let plain = path.to_ascii_lowercase().replace("%2e", ".").replace("%2f", "/").replace("%5c", "/");
    plain.split(['/', '\\']).any(|segment| matches!(segment, "." | ".."))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of what an async function of one argument gives.
    fn future_bytes<A, R>(_: fn(A) -> R) -> usize {
        size_of::<R>()
    }

    #[test]
    fn what_a_connection_keeps_of_its_request_is_small() {
        // hyper keeps room for it as long as the connection lives, streams that say nothing included.
        let bytes = future_bytes(routes);
        assert!(bytes <= 2_048, "{bytes} bytes");
    }

    #[test]
    fn an_id_of_our_own_is_a_number_in_hexadecimal() {
        for number in [0, 1, 0x1234_5678_9abc_def0 << 60, u128::MAX, fastrand::u128(..)] {
            assert_eq!(new_id(number), format!("req-{number:032x}").as_str());
        }
    }

    #[test]
    fn ids_that_lie_together_are_each_its_own() {
        let ids: Vec<_> = (0..3 * IDS_TOGETHER as u128).map(|number| (number, new_id(number))).collect();
        for (number, id) in ids {
            assert_eq!(id, format!("req-{number:032x}").as_str());
        }
    }

    #[test]
    fn paths_that_leave_the_api_are_seen() {
        for path in [
            "/v1/../metrics",
            "/v1/%2e%2E/metrics",
            "/v1/./x",
            "/v1/..%2fmetrics",
            "/v1/..\\metrics",
            "/v1/x/..%5Cmetrics",
        ] {
            assert!(has_dot_segment(path), "{path}");
        }
        for path in ["/v1/models/a.b", "/v1/...", "/v1/x..y", "/v1/files/%20", "/v1/models/meta%2Fllama"] {
            assert!(!has_dot_segment(path), "{path}");
        }
    }
}
