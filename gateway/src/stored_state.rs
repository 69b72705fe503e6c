//! What workers keep for their clients (responses, conversations, files, batches, and whatever else has an
//! id) is asked for where it is. The ids that an answer hands out are remembered with their worker, as keyed
//! hashes; a request that names one goes there. One that names an id which is not known is for the worker
//! that has it: the workers are asked.
//!
//! Only paths that may store something are looked at; a completion that stores nothing costs nothing.

mod find;
mod list;
mod map;
mod news;
mod tap;

use std::{sync::Arc, time::Duration};

use http::{Method, request::Parts};
use keyway_core::index::WorkerId;
use keyway_wire::block_hash::{Chain, HashKey};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

pub use self::{
    map::{IdEntry, Ids, Owner},
    news::StoredNews,
    tap::Tap,
};
use crate::{
    clock::Clock,
    config::StoredStateConfig,
    fleet::Worker,
    limits::{STORED_ID_BYTES, STORED_SEARCHES_MAX},
    metrics::StoredStateMetrics,
    path::as_engines_read,
    prompt::{request::RequestInfo, stored_ids::StoredPath},
    telemetry::record::Record,
};

/// Paths below which things of tenants are stored: what is not known there is not a tenant's.
const OF_TENANTS: [&str; 13] = [
    "/v1/responses",
    "/v1/conversations",
    "/v1/files",
    "/v1/batches",
    "/v1/uploads",
    "/v1/vector_stores",
    "/v1/assistants",
    "/v1/threads",
    "/v1/chat/completions",
    "/v1/fine_tuning/jobs",
    "/v1/messages/batches",
    "/v1/videos",
    "/v1/containers",
];

/// Which worker stores what, for which tenant: ids as keyed hashes, as many as memory allows.
#[derive(Debug)]
pub struct StoredState {
    key: HashKey,
    clock: Clock,
    ids: Mutex<Ids>,
    metrics: StoredStateMetrics,
    /// Requests whose ids workers are being asked for.
    searches: Semaphore,
}

/// Whether a request may have to do with what is stored. Most have not, and are spared the look at their
/// paths.
pub fn concerns(parts: &Parts, info: &RequestInfo) -> bool {
    match parts.uri.path() {
        "/v1/chat/completions" => info.stores == Some(true) || parts.method != Method::POST,
        "/v1/completions" | "/v1/messages" | "/v1/embeddings" => false,
        _ => true,
    }
}

impl StoredState {
    /// Remembers nothing yet; `None`: it is not to.
    pub fn new(
        config: StoredStateConfig,
        key: HashKey,
        clock: Clock,
        metrics: StoredStateMetrics,
    ) -> Option<Arc<Self>> {
        let ids_max = config.memory_bytes / STORED_ID_BYTES;
        (ids_max > 0).then(|| {
            let ids = Mutex::new(Ids::new(ids_max, config.keep));
            let searches = Semaphore::new(STORED_SEARCHES_MAX);
            Arc::new(Self { key, clock, ids, metrics, searches })
        })
    }

    /// What looks at the answer to a request for the ids that it hands out; `None`: it hands out none.
    pub fn tap(
        self: &Arc<Self>,
        parts: &Parts,
        info: &RequestInfo,
        worker: &Worker,
        record: &Record,
    ) -> Option<Tap> {
        let path = as_engines_read(parts.uri.path());
        let place = StoredPath::of(&path)?;
        let lists = place.id.is_none() && parts.method.is_safe();
        if lists || parts.method == Method::DELETE || !place.stores(info.stores) {
            return None;
        }
        Some(Tap::new(Arc::clone(self), Owner { worker: worker.id, tenant: self.tenant_of(record) }))
    }

    /// What an id is remembered as.
    fn name(&self, id: &str) -> u64 {
        Chain::new(self.key, b"stored id").hash(id.as_bytes())
    }

    /// Whose request it is; 0 where there are no tenants.
    fn tenant_of(&self, record: &Record) -> u64 {
        let of = |name: &str| Chain::new(self.key, b"stored for").hash(name.as_bytes());
        record.visit().map_or(0, |visit| of(visit.tenant().name()))
    }

    fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Remembers an id that a worker has handed out.
    fn learn(&self, id: &str, owner: Owner) {
        let mut ids = self.ids.lock();
        ids.insert(self.now(), self.name(id), owner);
        self.metrics.ids.set(ids.len() as i64);
    }

    fn worker_of(&self, id: &str) -> Option<Owner> {
        self.ids.lock().get(self.now(), self.name(id))
    }
}

/// Whether two workers' identities are the same one's.
fn is(id: WorkerId) -> impl Fn(&&Arc<Worker>) -> bool {
    move |worker| worker.id == id
}
