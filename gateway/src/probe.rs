//! Asks each worker, at the times its health state machine names, whether it is up, which models it serves, and how large
//! its cache is.
//! What the answers mean is `keyway_core::health`'s business.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{header::AUTHORIZATION, uri::PathAndQuery};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::{
    clock,
    fleet::{Model, Worker},
    limits::{MAX_MODELS_BYTES, MAX_SCRAPE_BYTES, PROBE_TIMEOUT, SCRAPE_MAX_AGE},
    metrics::Metrics,
    routing::Router,
    scrape,
    upstream::{Outgoing, Upstream},
};

/// Probes one worker for ever.
pub async fn watch(worker: Arc<Worker>, router: Arc<Router>, upstream: Upstream, metrics: Arc<Metrics>) {
    let mut scraped_at = None;
    loop {
        // A worker that has just failed is due earlier than it was: look again when it does.
        let due = worker.with_health(|health| health.next_probe_at()).saturating_sub(router.now());
        if !due.is_zero() {
            let _ = clock::timeout(due, worker.failed()).await;
            continue;
        }
        worker.origin().sweep();
        if let Some(tls) = &worker.config().tls {
            metrics.lifecycle.certificates.client(&worker.name, tls.validity());
        }
        let (was_ready, first) =
            (worker.routable(), worker.with_health(|health| health.awaits_first_probe()));
        let up = clock::timeout(PROBE_TIMEOUT, probe(&worker, &upstream, &metrics)).await.unwrap_or(false);
        worker.with_health(|health| health.on_probe(up, router.now()));
        if up {
            scrape_cache(&worker, &router, &upstream, &mut scraped_at).await;
        }
        let ready = worker.routable();
        if ready != was_ready {
            let models = worker.models().into_iter().map(|m| m.id).collect::<Vec<_>>().join(", ");
            tracing::info!(worker = %worker.name, ready, models, "worker changed state");
        }
        if ready != was_ready || first {
            router.fleet_changed();
        }
    }
}

/// Asks for the size of its cache. Not part of its health: an engine without metrics serves as well.
async fn scrape_cache(
    worker: &Worker,
    router: &Router,
    upstream: &Upstream,
    scraped_at: &mut Option<Duration>,
) {
    let page = get(worker, upstream, "/metrics", MAX_SCRAPE_BYTES);
    let page = clock::timeout(PROBE_TIMEOUT, page).await.ok().flatten();
    let rank = worker.rank();
    let config = page.map(|page| scrape::cache_config(&String::from_utf8_lossy(&page), rank));
    if let Some(config) = config.filter(|config| config.tokens().is_some()) {
        *scraped_at = Some(router.now());
        router.cache_is(worker, config);
    } else if scraped_at.take_if(|at| router.now() > *at + SCRAPE_MAX_AGE).is_some() {
        router.cache_is(worker, scrape::CacheConfig::default());
    }
}

/// Whether the worker answers; its models are noted on the way.
async fn probe(worker: &Worker, upstream: &Upstream, metrics: &Metrics) -> bool {
    if get(worker, upstream, "/health", MAX_MODELS_BYTES).await.is_none() {
        return false;
    }
    let models = get(worker, upstream, "/v1/models", MAX_MODELS_BYTES).await;
    if let Some(models) = models.and_then(|body| read_models(&body)) {
        for model in &models {
            metrics.admit_model(&model.id);
        }
        worker.set_models(models);
    }
    true
}

/// The body of a successful answer.
pub(crate) async fn get(
    worker: &Worker,
    upstream: &Upstream,
    path: &'static str,
    max_bytes: usize,
) -> Option<Bytes> {
    let mut request = Outgoing::get(worker.target(&PathAndQuery::from_static(path)));
    if let Some(key) = worker.api_key() {
        request.set(AUTHORIZATION, key.clone());
    }
    let answer =
        upstream.send(worker.origin(), request).await.ok().filter(|answer| answer.status().is_success())?;
    Some(Limited::new(answer.into_body(), max_bytes).collect().await.ok()?.to_bytes())
}

fn read_models(body: &[u8]) -> Option<Vec<Model>> {
    #[derive(Deserialize)]
    struct List {
        data: Vec<Box<RawValue>>,
    }
    #[derive(Deserialize)]
    struct Entry {
        id: String,
        numerics_id: Option<serde_json::Value>,
        /// vLLM: the base model of a LoRA adapter.
        #[serde(default)]
        parent: Option<String>,
    }
    let list: List = serde_json::from_slice(body).ok()?;
    let model = |json: Box<RawValue>| {
        let Entry { id, numerics_id, parent } = serde_json::from_str(json.get()).ok()?;
        let numerics_id = numerics_id.and_then(|id| id.as_str().map(Arc::from));
        Some(Model { id, parent, json, numerics_id })
    };
    Some(list.data.into_iter().filter_map(model).collect())
}

/// Waits until a worker is ready, at most `patience`.
pub async fn first_ready(router: &Router, patience: Duration) -> bool {
    let deadline = router.now() + patience;
    while router.now() < deadline {
        if router.fleet().all().iter().any(|worker| worker.routable()) {
            return true;
        }
        clock::sleep(Duration::from_millis(20)).await;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_entries_keep_their_json_and_odd_ones_are_skipped() {
        let models =
            read_models(br#"{"object":"list","data":[{"id":"a","x":[1, 2]},{"no":"id"},7]}"#).unwrap();
        assert_eq!(models.len(), 1);
        assert_eq!(models[0].json.get(), r#"{"id":"a","x":[1, 2]}"#);
        assert_eq!(models[0].numerics_id, None);
        let worker =
            read_models(br#"{"data":[{"id":"a","numerics_id":"cpu-1"},{"id":"b","numerics_id":7}]}"#)
                .unwrap();
        assert_eq!((worker.len(), &worker[1].numerics_id), (2, &None));
        assert_eq!(worker[0].numerics_id.as_deref(), Some("cpu-1"));
        assert!(read_models(b"<html>").is_none());
        let adapter = read_models(br#"{"data":[{"id":"a","parent":null},{"id":"l","parent":"a"}]}"#).unwrap();
        assert_eq!((adapter[0].parent.as_deref(), adapter[1].parent.as_deref()), (None, Some("a")));
    }
}
