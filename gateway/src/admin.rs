//! The second listener, for operators: liveness, readiness, metrics, the fleet. Loopback by default; never the
//! clients' port.

use std::{convert::Infallible, sync::Arc};

use http::{HeaderValue, Method, StatusCode, header};
use serde::Serialize;
use tower::{service_fn, util::BoxCloneSyncService};

use crate::{
    body::{Request, Response, full},
    error::Error,
    metrics::Metrics,
    routing::Router,
    stack::Stack,
};

const INDEX: &str = "Keyway admin\n\n/livez    200 while the process runs\n/readyz   200 once a worker is ready\n\
    /metrics  Prometheus text format\n/workers  the fleet as JSON\n";

/// The admin listener's service.
pub fn admin(router: Arc<Router>, metrics: Arc<Metrics>) -> Stack {
    BoxCloneSyncService::new(service_fn(move |request: Request| {
        let response = answer(&request, &router, &metrics);
        async move { Ok::<_, Infallible>(response) }
    }))
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
}

fn workers(router: &Router) -> Vec<u8> {
    let row = |worker: &Arc<crate::fleet::Worker>| {
        let load = worker.load.snapshot();
        Row {
            worker: worker.name.clone(),
            state: worker.state().as_str(),
            models: worker.models().into_iter().map(|model| model.id).collect(),
            weight: worker.weight,
            requests_in_flight: load.requests,
            waiting_prefill_tokens: load.waiting_prefill_tokens,
        }
    };
    let rows: Vec<Row> = router.fleet().all().iter().map(row).collect();
    serde_json::to_vec_pretty(&rows).unwrap_or_default()
}
