//! Sends spans to a collector by OTLP over HTTP (protobuf), in batches, from a queue that drops what does not
//! fit: a collector that is slow or gone costs spans, never requests.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header, uri::PathAndQuery};
use prometheus::IntCounterVec;
use prost::Message;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

use super::{
    Tracer,
    otlp::{ExportRequest, Resource, ResourceSpans, Scope, ScopeSpans, Span, attribute},
};
use crate::{
    clock,
    config::TracesConfig,
    limits::{
        MAX_QUEUED_TRACES, MAX_TRACE_BATCH, TRACE_BATCH_INTERVAL, TRACE_EXPORT_TIMEOUT, TRACE_EXPORT_TRIES,
        TRACE_RETRY_PAUSE,
    },
    upstream::{Origin, Outgoing, Upstream},
};

/// Path of traces below a collector's endpoint.
const PATH: &str = "/v1/traces";

/// The sending side: what is open of it.
#[derive(Debug)]
pub struct Traces {
    /// Where requests begin their traces.
    pub tracer: Arc<Tracer>,
    stop: oneshot::Sender<()>,
    sending: JoinHandle<()>,
}

impl Traces {
    /// Begins to send to the collector that is configured.
    pub fn start(config: TracesConfig, upstream: Upstream, spans: IntCounterVec) -> Self {
        let TracesConfig { endpoint, tls, rules, service_name, resource, headers } = config;
        let (queue, queued) = mpsc::channel(MAX_QUEUED_TRACES);
        let (stop, stopped) = oneshot::channel();
        let target = format!("{}{PATH}", endpoint.path().trim_end_matches('/'));
        let exporter = Exporter {
            queued,
            origin: Origin::of(&endpoint, tls, false),
            // A URL's own path and a fixed one make a path.
            target: target.parse().unwrap_or(PathAndQuery::from_static(PATH)),
            upstream,
            spans: spans.clone(),
            about: about_this_gateway(service_name, resource),
            headers,
        };
        let sending = tokio::spawn(exporter.run(stopped));
        Self { tracer: Arc::new(Tracer { rules, queue, spans }), stop, sending }
    }

    /// Sends what is left, within the time of one try.
    pub async fn finish(self) {
        drop(self.stop);
        if clock::timeout(TRACE_EXPORT_TIMEOUT, self.sending).await.is_err() {
            tracing::warn!("the last traces could not be sent in time");
        }
    }
}

struct Exporter {
    queued: mpsc::Receiver<Vec<Span>>,
    origin: Origin,
    target: PathAndQuery,
    upstream: Upstream,
    spans: IntCounterVec,
    about: Resource,
    headers: HeaderMap,
}

/// What spans say of the gateway; what the configuration says wins.
fn about_this_gateway(service_name: String, resource: BTreeMap<String, String>) -> Resource {
    let instance = format!("{:016x}", fastrand::u64(..));
    let own = [
        ("service.name", service_name),
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("service.instance.id", instance),
    ];
    let mut all: BTreeMap<_, _> = own.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    all.extend(resource);
    Resource { attributes: all.into_iter().map(|(name, value)| attribute(&name, value.as_str())).collect() }
}

impl Exporter {
    async fn run(mut self, mut stopped: oneshot::Receiver<()>) {
        let mut ready = true;
        loop {
            let mut batch = tokio::select! {
                Some(spans) = self.queued.recv() => spans,
                _ = &mut stopped => break,
                else => break,
            };
            let due = clock::Instant::now() + TRACE_BATCH_INTERVAL;
            while batch.len() < MAX_TRACE_BATCH {
                tokio::select! {
                    Some(spans) = self.queued.recv() => batch.extend(spans),
                    () = clock::sleep_until(due) => break,
                    _ = &mut stopped, if !stopped.is_terminated() => break,
                }
            }
            let sent = self.send(batch, TRACE_EXPORT_TRIES).await;
            if ready && !sent {
                tracing::warn!(
                    collector = self.origin.host(),
                    "traces are lost: the collector does not take them"
                );
            }
            ready = sent;
            if stopped.is_terminated() {
                break;
            }
        }
        let mut rest = Vec::new();
        while let Ok(spans) = self.queued.try_recv() {
            rest.extend(spans);
        }
        if !rest.is_empty() {
            self.send(rest, 1).await;
        }
    }

    /// Whether the collector took them, after some tries.
    async fn send(&self, spans: Vec<Span>, tries: u32) -> bool {
        let count = spans.len() as u64;
        let body = Bytes::from(self.request(spans).encode_to_vec());
        let mut pause = TRACE_RETRY_PAUSE;
        for left in (0..tries).rev() {
            match clock::timeout(TRACE_EXPORT_TIMEOUT, self.post(body.clone())).await.unwrap_or(None) {
                Some(status) if status.is_success() => {
                    self.spans.with_label_values(&["sent"]).inc_by(count);
                    return true;
                }
                // As the protocol says: these may be tried again, others never.
                None
                | Some(
                    StatusCode::TOO_MANY_REQUESTS
                    | StatusCode::BAD_GATEWAY
                    | StatusCode::SERVICE_UNAVAILABLE
                    | StatusCode::GATEWAY_TIMEOUT,
                ) if left > 0 => {
                    clock::sleep(pause).await;
                    pause *= 2;
                }
                status => {
                    tracing::debug!(?status, "the collector refused traces");
                    break;
                }
            }
        }
        self.spans.with_label_values(&["failed"]).inc_by(count);
        false
    }

    /// One try: the status of the answer, if there is one.
    async fn post(&self, body: Bytes) -> Option<StatusCode> {
        // A batch that is sent again if it fails may be sent again.
        let mut request = Outgoing::own(Method::POST, self.target.clone(), body).repeatable(true);
        for (name, value) in &self.headers {
            request.set(name.clone(), value.clone());
        }
        request.set(header::CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        self.origin.sweep();
        let answer = self.upstream.send(&self.origin, request).await.ok()?;
        Some(answer.status())
    }

    fn request(&self, spans: Vec<Span>) -> ExportRequest {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let scope = Scope { name: "keyway".to_owned(), version };
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans }];
        ExportRequest {
            resource_spans: vec![ResourceSpans { resource: Some(self.about.clone()), scope_spans }],
        }
    }
}
