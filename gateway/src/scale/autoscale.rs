//! What each model's requests ask of its fleet: follows every request from its arrival to its end, and works
//! out once a tick how many workers the model needs ([`keyway_core::autoscale`]). It starts and stops
//! nothing.
//!
//! A model here is a fleet's: requests for an adapter count for the base model, whose workers serve both.
//! Where a model's workers have roles, there is a sum for each role.

mod first_worker;
mod shown;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use foldhash::fast::RandomState;
use parking_lot::RwLock;
use tokio::sync::{Notify, watch};

pub use self::shown::ScaleRow;
use crate::{
    clock,
    config::{Role, ScaleConfig},
    demand::{Demand, Pool},
    fleet::Worker,
    limits::MAX_SCALED_MODELS,
    metrics::Metrics,
    prompt::request::RequestInfo,
    routing::Router,
};

/// Longest time between two sums.
const MAX_TICK: Duration = Duration::from_secs(1);

/// The demand of each model that is scaled, and the sums of workers that follow from it.
#[derive(Debug)]
pub struct Autoscale {
    config: ScaleConfig,
    metrics: Arc<Metrics>,
    /// By names of the fleet's own, which no client chooses.
    pools: RwLock<HashMap<String, Arc<Pool>, RandomState>>,
    /// Requests that wait for a first worker, of all models.
    waiting: AtomicUsize,
    /// Told when a request begins to wait so: the next sum is due at once.
    wake: Notify,
    /// Told when a model wants another number of workers.
    changed: watch::Sender<()>,
}

impl Autoscale {
    /// Of a fleet that has had no requests.
    pub fn new(config: ScaleConfig, metrics: Arc<Metrics>) -> Arc<Self> {
        let scale = Self {
            config,
            metrics,
            pools: RwLock::default(),
            waiting: AtomicUsize::new(0),
            wake: Notify::new(),
            changed: watch::Sender::new(()),
        };
        for model in scale.config.models.keys() {
            scale.pool(model);
        }
        for (model, role) in scale.config.roles.keys() {
            scale.know_role(model, *role);
        }
        Arc::new(scale)
    }

    /// Works out every model's sum, for ever.
    pub async fn watch(self: Arc<Self>, router: Arc<Router>) {
        let shortest = self.config.all().map(|model| model.rules.window).min().unwrap_or(MAX_TICK);
        // Thirty looks a window, so that a window is as long as it says.
        let tick = (shortest / 30).clamp(Duration::from_millis(20), MAX_TICK);
        loop {
            self.tick(&router);
            // A request that waits for a first worker does not wait for the clock too; either way it is time
            // for a sum.
            let _ = clock::timeout(tick, self.wake.notified()).await;
        }
    }

    /// Works out every model's sum.
    pub fn tick(&self, router: &Router) {
        let workers = router.fleet().all();
        let mut of: HashMap<String, Vec<&Arc<Worker>>> = HashMap::new();
        for worker in workers.iter() {
            if let Some(model) = worker.primary_model() {
                of.entry(model).or_default().push(worker);
            }
        }
        for (model, workers) in &of {
            if workers.iter().all(|worker| worker.role() == Role::Both) {
                drop(self.pool(model));
            } else {
                for worker in workers {
                    self.know_role(model, worker.role());
                }
            }
        }
        let pools: Vec<Arc<Pool>> = self.pools.read().values().cloned().collect();
        let mut changed = false;
        for pool in pools {
            let own = of.get(&pool.model).map_or(&[][..], Vec::as_slice);
            for part in pool.parts() {
                let is_of = |worker: &&&Arc<Worker>| part.is_none_or(|role| worker.role() == role);
                let own: Vec<_> = own.iter().filter(is_of).copied().collect();
                let mut state = pool.of(part.unwrap_or_default());
                let before = state.last.map(|(_, sum)| sum.desired);
                let (seen, sum) = state.sum(router.now(), &own);
                drop(state);
                changed |= before != Some(sum.desired);
                self.show(&pool.model, part, &seen, &sum);
            }
        }
        if changed {
            self.changed.send_replace(());
        }
    }

    /// Changes whenever a model wants another number of workers than before.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// A request came: its part in what its model asks of the fleet.
    pub fn enter(&self, router: &Router, request: &RequestInfo, arrived: Duration) -> Demand {
        let prompt_tokens = router.prompt_tokens(request);
        // What has no prompt (GET /v1/models/…) asks nothing of a fleet.
        let pool = if prompt_tokens > 0 { self.pool_of(router, request.model.as_deref()) } else { None };
        Demand::begin(pool, prompt_tokens, request.stream, arrived)
    }

    /// The pool of a model, as long as there are not too many.
    fn pool(&self, model: &str) -> Option<Arc<Pool>> {
        if let Some(pool) = self.pools.read().get(model) {
            return Some(Arc::clone(pool));
        }
        let mut pools = self.pools.write();
        if pools.len() >= MAX_SCALED_MODELS {
            return None;
        }
        let scale = self.config.of(model, None);
        let pool = pools.entry(model.to_owned()).or_insert_with(|| {
            self.metrics.admit_model(model);
            Arc::new(Pool::new(model, scale))
        });
        Some(Arc::clone(pool))
    }

    /// A model has workers of this role, or is to have them.
    fn know_role(&self, model: &str, role: Role) {
        let Some(pool) = self.pool(model) else { return };
        if pool.has_role(&self.config, role) {
            self.hide(model);
        }
    }

    /// The pool whose workers serve `model`, the only one where a request names none. A name that no worker
    /// and no rule knows has none, so that clients cannot make pools.
    fn pool_of(&self, router: &Router, model: Option<&str>) -> Option<Arc<Pool>> {
        let workers = router.fleet().all();
        let mut serving = workers.iter().filter(|worker| worker.may_serve(model));
        let found = serving.find_map(|worker| worker.with_primary_model(|primary| self.pool(primary)));
        match (found, model) {
            (Some(pool), _) => pool,
            (None, Some(model)) => self.pools.read().get(model).cloned(),
            (None, None) => None,
        }
    }

    /// Every model's last sum, for the operators' page.
    pub fn rows(&self) -> Vec<ScaleRow> {
        let pools: Vec<Arc<Pool>> = self.pools.read().values().cloned().collect();
        let mut rows: Vec<ScaleRow> = pools.iter().flat_map(|pool| pool.rows()).collect();
        // By role in the order of its parts.
        rows.sort_by(|a, b| a.model.cmp(&b.model));
        rows
    }

    /// Requests of all models that wait for a first worker.
    pub fn first_waiting(&self) -> usize {
        self.waiting.load(Relaxed)
    }
}

#[cfg(test)]
mod tests;
