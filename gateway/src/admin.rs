//! The second listener, for operators: liveness, readiness, metrics, the fleet, why a request would go where. Loopback
//! by default; never the clients' port.

use std::{convert::Infallible, sync::Arc};

use http::{HeaderValue, Method, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use serde::Serialize;
use tower::service_fn;

use crate::{
    body::{Request, Response, full},
    dispatch::read_request,
    error::Error,
    explain::explain,
    metrics::Metrics,
    request::KeyerConfig,
    routing::Router,
    stack::Stack,
    token_keyer::TokenKeyer,
};

const INDEX: &str = "Keyway admin\n\n/livez    200 while the process runs\n/readyz   200 once a worker is ready\n\
    /metrics  Prometheus text format\n/workers  the fleet as JSON\n\
    /explain  POST a request's body: where it would go, and why; ?path=/v1/completions if it is no chat\n";

/// What the admin listener shows.
#[derive(Debug, Clone)]
pub struct Admin {
    /// The fleet and the index.
    pub router: Arc<Router>,
    /// The series.
    pub metrics: Arc<Metrics>,
    /// How prompts are hashed.
    pub keyer: KeyerConfig,
    /// Models whose prompts are known by their tokens.
    pub tokens: Arc<TokenKeyer>,
    /// Largest body to explain.
    pub max_body_bytes: usize,
}

/// The admin listener's service.
pub fn admin(admin: Admin) -> impl Stack {
    let admin = Arc::new(admin);
    service_fn(move |request: Request| {
        let admin = Arc::clone(&admin);
        async move {
            let explains = request.uri().path() == "/explain" && request.method() == Method::POST;
            let response = if explains {
                explained(request, &admin).await
            } else {
                answer(&request, &admin.router, &admin.metrics)
            };
            Ok::<_, Infallible>(response)
        }
    })
}

async fn explained(request: Request, admin: &Admin) -> Response {
    let query = request.uri().query().unwrap_or_default();
    let path = query.split('&').find_map(|pair| pair.strip_prefix("path=")).unwrap_or("/v1/chat/completions");
    let path = path.replace("%2F", "/").replace("%2f", "/");
    let body = match Limited::new(request.into_body(), admin.max_body_bytes).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => return Error::BodyUnreadable(error.to_string()).to_response(),
    };
    let info = read_request(&path, &body, admin.keyer, &admin.tokens).await;
    match explain(&admin.router, &info) {
        Ok(found) => {
            text(StatusCode::OK, "application/json", serde_json::to_vec_pretty(&found).unwrap_or_default())
        }
        Err(error) => error.to_response(),
    }
}

fn answer(request: &Request, router: &Router, metrics: &Metrics) -> Response {
    let path = request.uri().path();
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return Error::NotFound(format!("{} {path}", request.method())).to_response();
    }
    match path {
        "/" => text(StatusCode::OK, "text/plain; charset=utf-8", INDEX),
        "/livez" => text(StatusCode::OK, "text/plain; charset=utf-8", "ok\n"),
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
        "/workers" => text(StatusCode::OK, "application/json", workers(router)),
        _ => Error::NotFound(path.to_owned()).to_response(),
    }
}

fn text(status: StatusCode, kind: &'static str, body: impl Into<bytes::Bytes>) -> Response {
    let mut response = Response::new(full(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

#[derive(Serialize)]
struct Row {
    worker: String,
    state: &'static str,
    models: Vec<String>,
    weight: f64,
    requests_in_flight: u64,
    waiting_prefill_tokens: u64,
    /// How its cache is known: `events`, `events not trusted`, or `model`.
    cache_known_by: &'static str,
    block_size: u32,
    /// Tokens that its cache is believed to hold, where that is known.
    cache_capacity_tokens: Option<u64>,
}

fn workers(router: &Router) -> Vec<u8> {
    let row = |worker: &Arc<crate::fleet::Worker>| Row {
        worker: worker.name.clone(),
        state: worker.condition(),
        models: worker.models().into_iter().map(|model| model.id).collect(),
        weight: worker.weight,
        requests_in_flight: worker.load.requests(),
        waiting_prefill_tokens: worker.load.waiting_prefill_tokens(),
        cache_known_by: match (worker.kv_source(), worker.residency.trusted()) {
            (None, _) => "model",
            (Some(_), true) => "events",
            (Some(_), false) => "events not trusted",
        },
        block_size: worker.residency.block_size(),
        cache_capacity_tokens: worker.residency.capacity.lock().tokens(),
    };
    let rows: Vec<Row> = router.fleet().all().iter().map(row).collect();
    serde_json::to_vec_pretty(&rows).unwrap_or_default()
}
