//! From a request to a worker: asks the index and the fleet, lets `keyway_core::route` choose and record the choice at
//! once, so that the next request of a burst already sees it. The ticket undoes what did not come true.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use dashmap::DashMap;
use keyway_core::{
    index::{Placement, PrefixIndex, WorkerId},
    pick::{Candidate, Pick, Policy, RequestView, Turn},
    route,
};
use parking_lot::Mutex;
use prometheus::IntGauge;

use crate::{
    clock::Clock,
    error::Error,
    fleet::{Fleet, Worker},
    limits::MAX_LEARNED_MODELS,
    metrics::Metrics,
    request::RequestInfo,
};

/// Bytes of canonical text per token before any answer has told better: English in a large vocabulary.
const INITIAL_BYTES_PER_TOKEN: f64 = 4.0;
/// Weight of the newest answer in the running estimate: about the last twenty count.
const ESTIMATE_GAIN: f64 = 0.1;

/// Routes requests.
#[derive(Debug)]
pub struct Router {
    fleet: Arc<Fleet>,
    metrics: Arc<Metrics>,
    clock: Clock,
    policy: Policy,
    index: Mutex<PrefixIndex>,
    turn: AtomicU64,
    bytes_per_token: DashMap<String, f64>,
}

/// Where a request goes, and what keeps that true.
#[derive(Debug)]
pub struct Choice {
    /// The worker.
    pub worker: Arc<Worker>,
    /// The decision and its numbers.
    pub pick: Pick,
    /// Lives as long as the answer's body.
    pub ticket: Ticket,
}

impl Router {
    /// A router with an empty index of at most `index_bytes`.
    pub fn new(
        fleet: Arc<Fleet>,
        metrics: Arc<Metrics>,
        clock: Clock,
        policy: Policy,
        index_bytes: usize,
    ) -> Self {
        let index = Mutex::new(PrefixIndex::new(index_bytes));
        Self {
            fleet,
            metrics,
            clock,
            policy,
            index,
            turn: AtomicU64::new(0),
            bytes_per_token: DashMap::new(),
        }
    }

    /// The workers routed to.
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// Chooses a worker that was not `tried` yet, and records the placement.
    pub fn choose(self: &Arc<Self>, request: &RequestInfo, tried: &[WorkerId]) -> Result<Choice, Error> {
        let mut workers = self.fleet.all();
        workers.retain(|worker| worker.may_serve(request.model.as_deref()));
        if let (true, Some(model)) = (workers.is_empty(), &request.model) {
            let known = self.fleet.model_ids().join(", ");
            return Err(Error::ModelNotFound { model: model.clone(), known });
        }
        workers.retain(|worker| worker.routable() && !tried.contains(&worker.id));

        let bytes_per_token = self.bytes_per_token(request.model.as_deref());
        let view = RequestView {
            chain: &request.chain.blocks,
            prompt_tokens: (request.chain.total_bytes as f64 / bytes_per_token).ceil() as u64,
            block_tokens: request.chain.block_bytes as f64 / bytes_per_token,
        };
        let turn = Turn { counter: self.turn.fetch_add(1, Ordering::Relaxed), random: fastrand::u64(..) };

        let mut index = self.index.lock();
        let mut candidates: Vec<Candidate> = workers
            .iter()
            .map(|worker| Candidate {
                worker: worker.id,
                load: worker.load.snapshot(),
                matched_blocks: 0,
                weight: worker.weight,
            })
            .collect();
        let (pick, placement) =
            route(self.policy, &view, &mut candidates, &turn, &mut index).ok_or(Error::NoWorker)?;
        let worker = Arc::clone(&workers[pick.index]);
        // The load counts before the lock opens, so that two requests of a burst never see the same queue.
        let ticket = Ticket::start(Arc::clone(self), Arc::clone(&worker), placement, pick.uncached_tokens);
        drop(index);
        self.metrics.picks.with_label_values(&[worker.name.as_str(), pick.reason.as_str()]).inc();
        Ok(Choice { worker, pick, ticket })
    }

    fn bytes_per_token(&self, model: Option<&str>) -> f64 {
        self.bytes_per_token.get(model.unwrap_or_default()).map_or(INITIAL_BYTES_PER_TOKEN, |known| *known)
    }

    /// Learns the size of a token from an answer: `prompt_tokens` as reported for a prompt of `prompt_bytes`.
    pub fn learn_token_size(&self, model: Option<&str>, prompt_bytes: u64, prompt_tokens: u64) {
        // Short prompts tell more about the chat template than about the tokenizer.
        if prompt_tokens < 32 || prompt_bytes == 0 {
            return;
        }
        let seen = prompt_bytes as f64 / prompt_tokens as f64;
        let model = model.unwrap_or_default();
        if let Some(mut known) = self.bytes_per_token.get_mut(model) {
            *known += ESTIMATE_GAIN * (seen - *known);
        } else if self.bytes_per_token.len() < MAX_LEARNED_MODELS {
            // Names come from clients where a worker does not list its models.
            self.bytes_per_token.insert(model.to_owned(), seen);
        }
    }

    /// A connection was refused or broke: the worker gets no more requests until a probe succeeds, and since its
    /// process is likely gone, so is its cache.
    pub fn worker_failed(&self, worker: &Worker) {
        worker.connect_failed(self.now());
        self.index.lock().remove_worker(worker.id);
    }

    /// A worker answered.
    pub fn worker_answered(&self, worker: &Worker) {
        worker.with_health(|health| health.on_success(self.now()));
    }

    /// Brings the gauges that nobody adds to up to date, before a scrape.
    pub fn show_state(&self) {
        for worker in self.fleet.all() {
            self.metrics.worker_ready.with_label_values(&[&worker.name]).set(i64::from(worker.routable()));
        }
        let index = self.index.lock();
        self.metrics.index_bytes.set(index.bytes() as i64);
        self.metrics.index_blocks.set(index.len() as i64);
    }

    /// Time as the routing core takes it.
    pub fn now(&self) -> Duration {
        self.clock.now()
    }
}

/// One request's weight on one worker. Counts until it is dropped; the placement is withdrawn unless the worker
/// began to answer.
#[derive(Debug)]
pub struct Ticket {
    router: Arc<Router>,
    worker: Arc<Worker>,
    placement: Option<Placement>,
    uncached_tokens: u64,
    waiting: bool,
    // Added to and subtracted from, never set: two tickets may end at the same moment.
    in_flight: IntGauge,
    waiting_tokens: IntGauge,
}

impl Ticket {
    fn start(router: Arc<Router>, worker: Arc<Worker>, placement: Placement, uncached_tokens: u64) -> Self {
        let label = [worker.name.as_str()];
        let in_flight = router.metrics.worker_in_flight.with_label_values(&label);
        let waiting_tokens = router.metrics.waiting_prefill_tokens.with_label_values(&label);
        worker.load.start(uncached_tokens);
        in_flight.inc();
        waiting_tokens.add(uncached_tokens as i64);
        Self {
            router,
            worker,
            placement: Some(placement),
            uncached_tokens,
            waiting: true,
            in_flight,
            waiting_tokens,
        }
    }

    /// The first byte of the answer is here: the prompt is computed, its KV is in the worker's cache.
    pub fn first_token(&mut self) {
        self.placement = None;
        self.stop_waiting();
    }

    /// The worker's answer goes on: it is alive, whatever its probes say.
    pub fn still_answering(&self) {
        self.router.worker_answered(&self.worker);
    }

    /// The router that issued it.
    pub fn router(&self) -> &Router {
        &self.router
    }

    fn stop_waiting(&mut self) {
        if std::mem::take(&mut self.waiting) {
            self.worker.load.first_token(self.uncached_tokens);
            self.waiting_tokens.sub(self.uncached_tokens as i64);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.stop_waiting();
        self.worker.load.end();
        self.in_flight.dec();
        if let Some(placement) = self.placement.take() {
            self.router.index.lock().withdraw(placement);
        }
    }
}
