//! The second listener, for operators: liveness, readiness, metrics, the fleet, why a request would go where.
//! Loopback by default; never the clients' port.

mod commands;

use std::{convert::Infallible, sync::Arc, time::Duration};

use http::{HeaderValue, Method, StatusCode, header};
use serde::Serialize;
use tokio::sync::{Semaphore, watch};
use tower::service_fn;

use crate::{
    client::Answered,
    clock,
    config::Role,
    edge::{
        live::Live,
        stack::{Arrived, Stack},
    },
    error::Error,
    fleet::{Present, Worker},
    leaving::Leaving,
    ledger::{Ledger, UsageQuestion},
    limits::{CORE_PATIENCE, MAX_EXPLAIN_BYTES},
    machine::{cores::Cores, threads},
    metrics::Metrics,
    ops::{explain::explain, history::History, reload::Reloader},
    prompt::work::Work,
    proxy::{
        arriving,
        body::{Request, Response, ResponseBody, full},
    },
    routing::{Router, snapshot},
    scale::autoscale::Autoscale,
    watch::{
        members::Members,
        peers::{GatewayId, Telling},
    },
};

const INDEX: &str = "Keyway admin\n\n/livez    200 while clients are served\n/readyz   200 once a worker is ready\n\
    /metrics  Prometheus text format\n/workers  the fleet as JSON\n/scale    workers each model needs, term by term\n\
    /history  the last hour as JSON, a sample each 10 s: of models, of tenants; which models' requests went where\n\
    /usage    who has used how much: ?by=hour|day|month&from=&to=&group=tenant,key,model&tenant=&key=&model=&format=json|csv\n\
    /mishaps  requests that did not end well as JSON, by what they have in common\n\
    /index    what the index knows, for a gateway that starts\n\
    /load     what this gateway has at each worker, as it changes: lines of JSON, for other gateways\n\
    /explain  POST a request's body (8 MiB at most): where it would go, and why; ?path=/v1/completions if it is no chat\n\
    /workers  POST a [[worker]] table as JSON to add it; DELETE /workers/NAME; POST /workers/NAME/drain, /undrain\n\
    /reload   POST reads the configuration again; /drain: POST ends the gateway as SIGTERM does\n\
    /help     this list\n";
/// The operators' page: one file, without anything from elsewhere.
const PAGE: &str = include_str!("admin/page.html");

/// What the admin listener shows.
#[derive(Debug, Clone)]
pub struct Admin {
    /// The fleet and the index.
    pub router: Arc<Router>,
    /// All series of the gateway, which `/metrics` renders.
    pub metrics: Arc<Metrics>,
    /// Who this is, among gateways.
    pub gateway_id: GatewayId,
    /// How requests are read, and who may be added as a worker.
    pub live: Live,
    /// Reads the configuration again.
    pub reloader: Arc<Reloader>,
    /// Whether the gateway is on its way out.
    pub leaving: Arc<Leaving>,
    /// Whether another gateway's index was taken, or none is to be had.
    pub caught_up: watch::Receiver<bool>,
    /// Who belongs to the fleet.
    pub members: Arc<Members>,
    /// How many workers each model needs.
    pub scale: Arc<Autoscale>,
    /// The last hour.
    pub history: Arc<History>,
    /// Who has used how much, where that is kept.
    pub ledger: Option<Arc<Ledger>>,
    /// Where clients are served, if not where operators are.
    pub cores: Option<Arc<Cores>>,
}

/// The admin listener's service.
pub fn admin(admin: Admin) -> impl Stack {
    // One request is explained at a time, one gateway given the index, and one question of usage answered.
    let parts = Arc::new((admin, [(); 3].map(|()| Semaphore::new(1))));
    service_fn(move |Arrived { request, client, .. }| {
        let parts = Arc::clone(&parts);
        async move {
            let (admin, [explaining, giving, asking]) = &*parts;
            let answered = Answered::to(&client);
            let (path, reads) =
                (request.uri().path(), matches!(*request.method(), Method::GET | Method::HEAD));
            let response = if path == "/explain" && request.method() == Method::POST {
                explained(request, admin, explaining).await.unwrap_or_else(|error| error.to_response())
            } else if !reads && (path.starts_with("/workers") || matches!(path, "/reload" | "/drain")) {
                commands::command(request, admin).await
            } else if path == "/index" && reads {
                index(admin, giving).await.unwrap_or_else(|error| error.to_response())
            } else if path == "/usage" && reads {
                usage(&request, admin, asking).await.unwrap_or_else(|error| error.to_response())
            } else if path == "/livez" && reads {
                alive(admin).await
            } else {
                answer(&request, admin, answered)
            };
            Ok::<_, Infallible>(response)
        }
    })
}

/// One at a time, of a body that a prompt may have, and on the threads for large bodies: an operator who asks
/// for more than that must not keep others from asking whether the gateway is alive.
async fn explained(request: Request, admin: &Admin, explaining: &Semaphore) -> Result<Response, Error> {
    let _one = explaining.try_acquire().map_err(|_| Error::TooBusy { retry_after: CORE_PATIENCE })?;
    let query = request.uri().query().unwrap_or_default();
    let path = query.split('&').find_map(|pair| pair.strip_prefix("path=")).unwrap_or("/v1/chat/completions");
    let path = path.replace("%2F", "/").replace("%2f", "/");
    let (headers, version) = (request.headers().clone(), request.version());
    let dispatch = Arc::clone(&admin.live.now().dispatch);
    let requests = &dispatch.requests;
    let bounds = arriving::Bounds::of(requests.bodies.max_bytes.min(MAX_EXPLAIN_BYTES), &dispatch.timeouts);
    let body = (request.into_body(), version);
    // As large as one prompt, and there is one at a time.
    let mut body = arriving::bounded(body, bounds, || None, || Ok(())).await?;
    let mut info = requests.read(Work::of(&Method::POST, &path), &path, &headers, &mut body).await;
    info.moves_kv = dispatch.moves_kv(&path, &body);
    let router = Arc::clone(&admin.router);
    let explaining = move || {
        let drift = dispatch.doctor.look(&headers, (&body, &dispatch.requests.bodies.ignored), &info);
        let found = explain(&router, &info, drift)?;
        Ok(serde_json::to_vec_pretty(&found).unwrap_or_default())
    };
    let explaining = threads::large_bodies().and_then(|threads| threads.run(move || Some(explaining())));
    let found = explaining.ok_or(Error::Internal)?.await.map_err(|_| Error::Internal)??;
    Ok(text(StatusCode::OK, "application/json", found))
}

/// What this gateway's index knows, for one that starts; not what it has yet to get itself.
async fn index(admin: &Admin, giving: &Semaphore) -> Result<Response, Error> {
    let busy = || Error::TooBusy { retry_after: CORE_PATIENCE };
    let _one = giving.try_acquire().map_err(|_| busy())?;
    if !*admin.caught_up.borrow() {
        return Err(busy());
    }
    let router = Arc::clone(&admin.router);
    let giving = threads::large_bodies().and_then(|threads| threads.run(move || Some(snapshot::of(&router))));
    let bytes = giving.ok_or(Error::Internal)?.await.map_err(|_| Error::Internal)?;
    Ok(text(StatusCode::OK, "application/octet-stream", bytes))
}

/// Who has used how much, as it is asked for.
async fn usage(request: &Request, admin: &Admin, asking: &Semaphore) -> Result<Response, Error> {
    let ledger = admin.ledger.clone().ok_or(Error::UsageNotKept)?;
    let query = request.uri().query().unwrap_or_default();
    let question = UsageQuestion::read(query, request.headers(), clock::unix_seconds() as u64)?;
    let kind = question.content_type();
    // The second waits: it may be one of several questions that belong together.
    let _one = asking.acquire().await.map_err(|_| Error::Internal)?;
    Ok(text(StatusCode::OK, kind, ledger.answer(question).await?))
}

fn answer(request: &Request, admin: &Admin, answered: Answered) -> Response {
    let (router, metrics) = (&admin.router, &admin.metrics);
    let path = request.uri().path();
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return Error::NotFound(format!("{} {path}", request.method())).to_response();
    }
    match path {
        "/" => page(),
        "/help" => text(StatusCode::OK, "text/plain; charset=utf-8", INDEX),
        "/scale" => json_answer(StatusCode::OK, &admin.scale.rows()),
        // Thousands of numbers: a line for each would be most of it.
        "/history" => {
            let hour = serde_json::to_vec(&admin.history.hour()).unwrap_or_default();
            text(StatusCode::OK, "application/json", hour)
        }
        "/mishaps" => json_answer(StatusCode::OK, &metrics.mishaps.newest_first()),
        // Where a successor has the socket, who asks asks for both: it is ready.
        "/readyz" if admin.leaving.began() && !admin.leaving.succeeded() => {
            text(StatusCode::SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", "the gateway is ending\n")
        }
        "/readyz" if !*admin.caught_up.borrow() => text(
            StatusCode::SERVICE_UNAVAILABLE,
            "text/plain; charset=utf-8",
            "the index is being taken from another gateway\n",
        ),
        "/readyz" if router.fleet().all().iter().any(|worker| worker.routable()) => {
            text(StatusCode::OK, "text/plain; charset=utf-8", "ready\n")
        }
        "/readyz" => {
            text(StatusCode::SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", "no worker is ready\n")
        }
        "/metrics" => text(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", {
            router.show_state();
            metrics.render()
        }),
        "/load" => told(request, admin, answered),
        "/workers" => text(StatusCode::OK, "application/json", workers(router)),
        _ => Error::NotFound(path.to_owned()).to_response(),
    }
}

/// Whether clients are served: by threads of their own, which something may hold up while operators are
/// answered.
async fn alive(admin: &Admin) -> Response {
    const PLAIN: &str = "text/plain; charset=utf-8";
    let stuck = match &admin.cores {
        Some(cores) => cores.stuck(CORE_PATIENCE).await,
        None => None,
    };
    match stuck {
        None => text(StatusCode::OK, PLAIN, "ok\n"),
        Some(core) => {
            let seconds = CORE_PATIENCE.as_secs();
            let why = format!(
                "the thread keyway-core-{core}, which serves clients, has done nothing for {seconds} s\n"
            );
            text(StatusCode::SERVICE_UNAVAILABLE, PLAIN, why)
        }
    }
}

/// What this gateway has at each worker, for as long as the client listens.
fn told(request: &Request, admin: &Admin, answered: Answered) -> Response {
    let query = request.uri().query().unwrap_or_default();
    let lines = Telling::new(Arc::clone(&admin.router), Arc::clone(&admin.leaving), admin.gateway_id, query);
    let mut response = Response::new(ResponseBody::lines(lines, answered));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    response
}

/// The page, which may load nothing from elsewhere and which no other page may frame.
fn page() -> Response {
    let mut response = text(StatusCode::OK, "text/html; charset=utf-8", PAGE);
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
             img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        ),
    );
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

fn json_answer(status: StatusCode, value: &impl Serialize) -> Response {
    text(status, "application/json", serde_json::to_vec_pretty(value).unwrap_or_default())
}

fn text(status: StatusCode, kind: &'static str, body: impl Into<bytes::Bytes>) -> Response {
    let mut response = Response::new(full(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// What is wrong with a worker.
#[derive(Serialize)]
struct LastError {
    cause: &'static str,
    /// What came of the last probe, and what to do.
    text: String,
    /// URL of the question at which the fault was found.
    url: String,
    /// Seconds since 1970 at which a probe said so first.
    since: f64,
    /// How many have said so since.
    times: u64,
}

fn last_error(worker: &Worker, now: Duration) -> Option<LastError> {
    let trouble = worker.trouble.lock();
    let Present { fault, since, times, .. } = trouble.present()?;
    Some(LastError {
        cause: fault.cause.as_str(),
        text: fault.to_string(),
        url: fault.url.clone(),
        since: clock::unix_seconds() - now.saturating_sub(*since).as_secs_f64(),
        times: *times,
    })
}

#[derive(Serialize)]
struct Row {
    worker: String,
    state: &'static str,
    /// What its probes find wrong, if anything.
    last_error: Option<LastError>,
    models: Vec<String>,
    /// Which part of requests it is for: `both`, `prefill` or `decode`.
    role: &'static str,
    /// How its KV is moved, where it is for a part of requests: `nixl`, `mooncake` or `sglang`.
    kv_transfer: Option<&'static str>,
    weight: f64,
    requests_in_flight: u64,
    waiting_prefill_tokens: u64,
    /// Requests of others, as far as other gateways and its own metrics tell.
    requests_of_others: u64,
    /// Prompt tokens computed in a second, fitted from answers; absent until they told.
    prefill_tokens_per_s: Option<f64>,
    /// Tokens that the index believes its cache to hold.
    cached_tokens: u64,
    /// How its cache is known: `events`, `events not trusted`, or `model`.
    cache_known_by: &'static str,
    block_size: u32,
    /// Tokens that its cache is believed to hold, where that is known.
    cache_capacity_tokens: Option<u64>,
}

fn workers(router: &Router) -> Vec<u8> {
    let row = |worker: &Arc<Worker>| {
        // Each lock is let go before the next is taken: the router has the index first and then what is a
        // worker's.
        let prefill_tokens_per_s = worker.rate.lock().tokens_per_second();
        let cache_capacity_tokens = worker.residency.capacity.lock().tokens();
        Row {
            worker: worker.name.clone(),
            state: worker.condition(),
            last_error: last_error(worker, router.now()),
            models: worker.models().into_iter().map(|model| model.id).collect(),
            role: worker.role().as_str(),
            kv_transfer: (worker.role() != Role::Both).then(|| worker.kv_transfer().as_str()),
            weight: worker.weight,
            requests_in_flight: worker.load.requests(),
            waiting_prefill_tokens: worker.load.waiting_prefill_tokens(),
            requests_of_others: worker.load.others(router.now()).round() as u64,
            prefill_tokens_per_s,
            cached_tokens: router.cached_tokens(worker),
            cache_known_by: match (worker.residency.has_events(), worker.residency.trusted()) {
                (false, _) => "model",
                (true, true) => "events",
                (true, false) => "events not trusted",
            },
            block_size: worker.residency.block_size(),
            cache_capacity_tokens,
        }
    };
    let rows: Vec<Row> = router.fleet().all().iter().map(row).collect();
    serde_json::to_vec_pretty(&rows).unwrap_or_default()
}
