//! From a request to a worker: asks the index and the fleet, lets `keyway_core` say which request begins
//! where (`routing/holding.rs`), and records the choice at once, so that the next request of a burst already
//! sees it. The ticket undoes what did not come true; what an answer says of the cache corrects what is
//! believed of it (`routing/truth.rs`), and of the prompt's tokens how those are estimated
//! (`routing/token_sizes.rs`).

mod accusation;
pub mod decision_log;
mod holding;
pub mod legs;
mod miss;
mod pulls;
pub mod refusal;
mod sent;
mod setting;
mod shared_index;
pub mod snapshot;
mod ticket;
mod token_sizes;
pub mod told;
mod truth;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use keyway_core::{
    Transfers, fill_matches,
    health::State,
    pick::{Candidate, Pick, Policy, Turn},
    route::PromptViews,
    waiting_room::{Ahead, RoomRules},
};
use keyway_wire::block_hash::HashKey;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{futures::Notified, watch};

pub use self::accusation::Accusation;
use self::holding::Holding;
pub use self::legs::LegRules;
pub use self::pulls::Pull;
pub use self::sent::{SentLately, SentSignal, SentTo};
pub use self::setting::{Setting, View};
pub use self::shared_index::SharedIndex;
pub use self::ticket::Ticket;
use self::token_sizes::TokenSizes;

use crate::{
    clock::{Clock, Instant},
    fleet::{Fleet, Worker},
    metrics::Metrics,
    prompt::request::KeyerConfig,
    routing::decision_log::DecisionLog,
    stored_state::StoredState,
};

/// Chooses a worker for each request, by what the index, the fleet and the waiting room say.
#[derive(Debug)]
pub struct Router {
    fleet: Arc<Fleet>,
    metrics: Arc<Metrics>,
    clock: Clock,
    rules: RwLock<Rules>,
    hash_key: HashKey,
    block_bytes: usize,
    options: RouterOptions,
    index: SharedIndex,
    holding: Holding,
    /// What handovers between workers take.
    transfers: Mutex<Transfers>,
    /// What fetching from each other's caches takes.
    pulls: Mutex<Transfers>,
    turn: AtomicU64,
    token_sizes: TokenSizes,
    decision_log: Option<DecisionLog>,
    stored: Option<Arc<StoredState>>,
    /// What other gateways are told of placements; `None`: nothing.
    telling: Option<told::Telling>,
    /// Who is told at once where requests are sent.
    sent: SentSignal,
    /// Whether some prompts' tokens are known, so that workers' KV events match them.
    tokens_come: watch::Sender<bool>,
}

/// What the configuration says of load and caches, until the gateway ends.
#[derive(Debug, Clone, Copy, Default)]
pub struct RouterOptions {
    /// How often workers are asked for their load while others send to them too; `None`: never.
    pub load_scrape: Option<Duration>,
    /// How long a worker that came up is taken to be slower than it is; `None`: not at all.
    pub slow_start: Option<Duration>,
    /// Prompt tokens that a worker fetches in a millisecond from its other tiers, its host's memory or a
    /// disk; `None`: what they hold does not count in choices.
    pub fetch_tokens_per_ms: Option<f64>,
}

/// How workers are chosen, which a reload may change.
#[derive(Debug, Clone, Copy)]
struct Rules {
    policy: Policy,
    /// Whether requests wait here for a worker that can begin.
    holds: bool,
    legs: LegRules,
}

/// Where a request goes, and what keeps that true.
#[derive(Debug)]
pub struct Choice {
    /// The worker that is to be asked; the request counts in its load already.
    pub worker: Arc<Worker>,
    /// The decision and its numbers.
    pub pick: Pick,
    /// Whether another worker is to compute the prompt.
    pub splits: bool,
    /// Of whose cache the worker is to fetch a part of the prompt, if of any.
    pub pull: Option<Pull>,
    /// Lives as long as the answer's body, and goes there from hand to hand.
    pub ticket: Box<Ticket>,
}

impl Router {
    /// A router with an empty index of at most `index_bytes`, whose blocks are cut and named as `keyer` says.
    pub fn new(
        fleet: Arc<Fleet>,
        metrics: Arc<Metrics>,
        clock: Clock,
        policy: Policy,
        keyer: KeyerConfig,
        index_bytes: usize,
    ) -> Self {
        Self {
            fleet,
            metrics,
            clock,
            rules: RwLock::new(Rules { policy, holds: true, legs: LegRules::default() }),
            transfers: Mutex::default(),
            pulls: Mutex::default(),
            hash_key: keyer.key,
            block_bytes: keyer.block_bytes.get(),
            options: RouterOptions::default(),
            index: SharedIndex::new(index_bytes),
            holding: Holding::default(),
            turn: AtomicU64::new(0),
            token_sizes: TokenSizes::default(),
            decision_log: None,
            stored: None,
            telling: None,
            sent: SentSignal::default(),
            tokens_come: watch::Sender::new(false),
        }
    }

    /// Tells other gateways of its placements, and records theirs, in an index of at most so many bytes that
    /// is empty yet.
    #[must_use]
    pub fn with_told_placements(self, index_bytes: usize) -> Self {
        Self { index: SharedIndex::new(index_bytes), telling: Some(told::Telling::new()), ..self }
    }

    /// Lets what workers store be remembered.
    #[must_use]
    pub fn with_stored_state(self, stored: Option<Arc<StoredState>>) -> Self {
        Self { stored, ..self }
    }

    /// Some prompts' tokens are known: a model's tokenizer is, or a prompt has come as ids.
    pub fn tokens_come(&self) {
        if !*self.tokens_come.borrow() {
            self.tokens_come.send_replace(true);
        }
    }

    /// Waits until some prompts' tokens are known ([`Router::tokens_come`]); for ever, if none ever are.
    pub async fn until_tokens_come(&self) {
        // The sender lives as long as this router.
        let _ = self.tokens_come.subscribe().wait_for(|come| *come).await;
    }

    /// Who stores what, if that is remembered.
    pub fn stored_state(&self) -> Option<&Arc<StoredState>> {
        self.stored.as_ref()
    }

    /// Lets requests wait by these rules; without, each is sent as it comes.
    #[must_use]
    pub fn with_room(self, rules: Option<RoomRules>) -> Self {
        let policy = self.policy();
        self.set_rules(policy, rules);
        self
    }

    /// Chooses by this policy from now on, and lets requests wait by these rules; who waits stays.
    pub fn set_rules(&self, policy: Policy, room: Option<RoomRules>) {
        self.holding.set_rules(room.unwrap_or_default());
        let mut rules = self.rules.write();
        *rules = Rules { policy, holds: room.is_some(), legs: rules.legs };
    }

    /// Goes by these instead of none of them.
    #[must_use]
    pub fn with_options(self, options: RouterOptions) -> Self {
        Self { options, ..self }
    }

    /// What the configuration says of load and caches.
    pub fn options(&self) -> RouterOptions {
        self.options
    }

    /// What the workers' caches are believed to hold.
    pub fn index(&self) -> &SharedIndex {
        &self.index
    }

    /// Who listens there is told at once where requests are sent.
    pub fn sent(&self) -> &SentSignal {
        &self.sent
    }

    /// A worker has said how much it has to do.
    pub fn load_changed(self: &Arc<Self>) {
        self.pump();
    }

    /// Logs choices from now on.
    #[must_use]
    pub fn with_log(self, decision_log: Option<DecisionLog>) -> Self {
        Self { decision_log, ..self }
    }

    /// Completes when the choices made so far are in their log, if there is one; after a second at most.
    pub async fn flush_log(&self) {
        if let Some(log) = &self.decision_log {
            log.flush().await;
        }
    }

    /// The workers routed to.
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// All series of the gateway, for parts that know it by its router.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// How workers are chosen.
    pub fn policy(&self) -> Policy {
        self.rules.read().policy
    }

    /// The secret of the index's names.
    pub fn hash_key(&self) -> HashKey {
        self.hash_key
    }

    /// What would be chosen; nothing is recorded.
    pub fn preview(&self, setting: &Setting) -> Option<(Vec<Candidate>, Pick)> {
        let turn = Turn { counter: self.turn.load(Ordering::Relaxed), random: fastrand::u64(..) };
        let now = self.now();
        let mut candidates = setting.candidates(now, self.holding.any_wait());
        let (index, nobody, step) = (self.index.settled(), Ahead::default(), (now, &turn));
        let by_all = setting.seen_by(0..candidates.len());
        let consider = |seen: &PromptViews<'_>, candidates: &mut [Candidate]| {
            self.consider(self.policy(), setting, (seen, candidates), &nobody, step, &index)
        };
        let Some(places) = setting.askable(now) else {
            let pick = consider(&by_all.seen(), &mut candidates)?;
            return Some((candidates, pick));
        };
        fill_matches(&by_all.seen(), &mut candidates, &index);
        let mut asked: Vec<_> = places.iter().map(|&place| candidates[place]).collect();
        let by_them = setting.seen_by(places.iter().copied());
        let pick = consider(&by_them.seen(), &mut asked)?;
        places.iter().zip(asked).for_each(|(&place, asked)| candidates[place] = asked);
        Some((candidates, Pick { index: places[pick.index], ..pick }))
    }

    /// A connection was refused or broke: the worker gets no more requests until a probe succeeds, and since
    /// its process is likely gone, so is its cache.
    pub fn worker_failed(&self, worker: &Worker) {
        worker.connect_failed(self.now());
        self.index.process_is_gone(worker);
        self.holding.cache_is_gone(worker.id);
    }

    /// A worker lost all that its cache held; it may hold more again.
    pub fn cache_is_lost(&self, worker: &Worker) {
        self.index.cache_is_lost(worker);
        self.holding.cache_is_gone(worker.id);
    }

    /// A worker is gone for good, and with it what it held.
    pub fn worker_left(&self, worker: &Worker) {
        self.index.forget_worker(worker, self.now());
        self.transfers.lock().forget(worker.id);
        self.pulls.lock().forget(worker.id);
        self.holding.cache_is_gone(worker.id);
    }

    /// A worker answered, or said more of its answer.
    pub fn worker_answered(&self, worker: &Worker, now: Duration) {
        worker.says_something(now);
        worker.with_health(|health| health.on_success(now));
    }

    /// Who may be chosen has changed: those who wait may go elsewhere now.
    pub fn fleet_changed(self: &Arc<Self>) {
        self.holding.fleet_changes.fetch_add(1, Ordering::AcqRel);
        self.pump();
        self.holding.changed.notify_waiters();
    }

    /// Completes when the fleet has changed.
    pub fn fleet_change(&self) -> Notified<'_> {
        self.holding.changed.notified()
    }

    /// Tokens that the index believes a worker's cache to hold: in blocks of its own size, and unless its
    /// events say all, in blocks of text.
    pub fn cached_tokens(&self, worker: &Worker) -> u64 {
        let residency = &worker.residency;
        let text_block_tokens = self.text_block_tokens(worker);
        let index = self.index.settled();
        let own = index.resident(residency.token_id) as u64 * u64::from(residency.block_size());
        if residency.trusted() {
            return own;
        }
        own + (index.resident(worker.id) as f64 * text_block_tokens) as u64
    }

    /// Sets, before a scrape, the gauges that are not kept up to date as things happen.
    pub fn show_state(&self) {
        self.index.finish_lingering(self.now());
        self.show_transfers();
        for state in [State::Joining, State::Ready, State::Paused, State::Down, State::Draining] {
            let workers = self.fleet.all().iter().filter(|worker| worker.state() == state).count();
            self.metrics.fleet.workers.with_label_values(&[state.as_str()]).set(workers as i64);
        }
        let index = self.index.settled();
        for worker in self.fleet.all().iter() {
            let label = [worker.name.as_str()];
            self.metrics.worker_ready.with_label_values(&label).set(i64::from(worker.routable()));
            self.metrics.fleet.roles.with_label_values(&[label[0], worker.role().as_str()]).set(1);
            let misconfigured = worker.standing.misconfigured();
            self.metrics.fleet.misconfigured.with_label_values(&label).set(i64::from(misconfigured));
            let residency = &worker.residency;
            let blocks = index.resident(worker.id) + index.resident(residency.token_id);
            self.metrics.caches.worker_blocks.with_label_values(&label).set(blocks as i64);
            let rate = worker.rate.lock().tokens_per_second();
            self.metrics.caches.worker_rate.with_label_values(&label).set(rate.unwrap_or(0.0));
            let capacity = residency.capacity.lock().tokens();
            self.metrics.caches.worker_capacity.with_label_values(&label).set(capacity.unwrap_or(0) as i64);
        }
        self.metrics.sessions.set(self.holding.sessions() as i64);
        self.metrics.index_bytes.set(index.bytes() as i64);
        self.metrics.index_blocks.set(index.len() as i64);
        self.metrics.caches.index_expected.set(index.expected() as i64);
    }

    /// Time as the routing core takes it.
    pub fn now(&self) -> Duration {
        self.clock.now()
    }

    /// [`Router::now`] as of then.
    pub fn at(&self, then: Instant) -> Duration {
        self.clock.at(then)
    }
}
