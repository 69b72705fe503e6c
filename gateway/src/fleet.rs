//! The workers: who they are, which models they serve, how busy and how healthy they are. How they are
//! talked to is `upstream.rs`; nothing is decided here (`keyway_core::pick`).

mod disaggregation;
pub mod ejection;
mod fault;
mod habits;
pub mod residency;
pub mod scrape;
pub mod standing;
mod trouble;

use std::{
    num::NonZeroU16,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use http::{HeaderValue, uri::PathAndQuery};
use keyway_core::{
    FadingSum,
    health::{Health, State},
    index::WorkerId,
    load::Load,
    rate::PrefillRate,
    ttft::TtftFit,
};
use keyway_wire::block_hash::{Chain, HashKey};
use parking_lot::{Mutex, RwLock};
use serde_json::value::RawValue;
use tokio::sync::Notify;

pub use self::{
    disaggregation::{ClaimedRooms, Disaggregation, PartsSaid, Rooms},
    fault::{Cause, Fault},
    habits::{Habit, Habits, Question, StreamKind},
    trouble::{Present, Trouble},
};
use crate::{
    api::Api,
    config::{KvSource, Role, WorkerConfig},
    fleet::{
        ejection::{Ejections, Gate},
        residency::Residency,
        standing::Standing,
    },
    limits::{NO_KV_PAUSE, SAVED_HALF_LIFE},
    metrics::{Metrics, WorkerSeries},
    upstream::Origin,
};

/// One entry of a worker's `/v1/models`.
#[derive(Debug, Clone)]
pub struct Model {
    /// Its id, by which requests name it.
    pub id: String,
    /// The model that it is an adapter of, where it is one.
    pub parent: Option<String>,
    /// The whole JSON object, shown by the gateway's own `/v1/models`.
    pub json: Box<RawValue>,
    /// Tokens of a prompt and its answer at most (`max_model_len`), where it says so.
    pub context: Option<u64>,
    /// What its logits are computed with; only `keyway-worker` says.
    pub numerics_id: Option<Arc<str>>,
    /// Port at which other workers fetch what this one has cached; only `keyway-worker` says.
    pub kv_source_port: Option<NonZeroU16>,
}

/// One worker of the fleet.
#[derive(Debug)]
pub struct Worker {
    /// Identity in the index; never reused.
    pub id: WorkerId,
    /// `host:port`, and its path and rank if it has them; in headers, metrics and logs.
    pub name: String,
    /// Share of new work relative to its peers.
    pub weight: f64,
    /// Work in flight there.
    pub load: Load,
    /// How fast it computes prompts, by its answers.
    pub rate: Mutex<PrefillRate>,
    /// How long it takes to a first token, by its answers.
    pub ttft: Mutex<TtftFit>,
    /// What it says of its cache.
    pub residency: Residency,
    /// Prompt tokens that its cache saved lately.
    pub saved: Mutex<FadingSum>,
    /// What its streams say of their usage unasked.
    pub habits: Habits,
    /// Which kinds of requests it refuses, and when it last served one.
    pub standing: Standing,
    /// Its part in requests.
    parts: Disaggregation,
    config: WorkerConfig,
    name_header: Option<HeaderValue>,
    origin: Origin,
    prefix: String,
    health: Mutex<Health>,
    /// When it last said something to a client's request, in milliseconds of the gateway's clock.
    heard_ms: AtomicU64,
    /// Until when it is not asked to compute a prompt for another, likewise; 0: it was never found to keep no
    /// KV.
    no_kv_until_ms: [AtomicU64; 3],
    models: RwLock<Option<Vec<Model>>>,
    failed: Notify,
    /// What its probes find wrong with it.
    pub trouble: Mutex<Trouble>,
    gate: Arc<Gate>,
    series: OnceLock<WorkerSeries>,
}

impl Worker {
    /// A worker that has yet to answer its first probe. `token_ids` are its identities in the index for
    /// blocks of tokens: in its own cache, and in any tier.
    pub fn new(
        id: WorkerId,
        token_ids: (WorkerId, WorkerId),
        config: &WorkerConfig,
        now: Duration,
        ejections: &Arc<Ejections>,
    ) -> Self {
        Self {
            residency: Residency::new(token_ids, config.kv_events.clone(), config.block_size),
            id,
            name_header: HeaderValue::from_str(&config.name()).ok(),
            name: config.name(),
            weight: config.weight,
            load: Load::default(),
            habits: Habits::default(),
            standing: Standing::default(),
            rate: Mutex::default(),
            ttft: Mutex::default(),
            saved: Mutex::new(FadingSum::new(SAVED_HALF_LIFE)),
            parts: Disaggregation::new(config),
            config: config.clone(),
            origin: Origin::of(&config.url, config.tls.clone(), config.http2),
            prefix: config.url.path().trim_end_matches('/').to_owned(),
            health: Mutex::new(Health::new(now)),
            heard_ms: AtomicU64::new(now.as_millis() as u64),
            no_kv_until_ms: Default::default(),
            models: RwLock::new(None),
            failed: Notify::new(),
            trouble: Mutex::default(),
            gate: ejections.gate(config.name()),
            series: OnceLock::new(),
        }
    }

    /// Where it listens, with the connections that are kept to it.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// What it is asked for, for a path and query: behind the path of its URL, if that has one.
    pub fn target(&self, path: &PathAndQuery) -> PathAndQuery {
        if self.prefix.is_empty() {
            return path.clone();
        }
        // A valid path after a valid prefix is a valid path.
        format!("{}{path}", self.prefix).parse().unwrap_or_else(|_| path.clone())
    }

    /// The whole URL of a path, for people.
    pub fn url_of(&self, path: &str) -> String {
        let url = &self.config.url;
        let (scheme, place) =
            (url.scheme_str().unwrap_or("http"), url.authority().map_or("", |at| at.as_str()));
        format!("{scheme}://{place}{}{path}", self.prefix)
    }

    /// The credential that replaces the client's, if one is configured.
    pub fn api_key(&self) -> Option<&HeaderValue> {
        self.config.api_key.as_ref()
    }

    /// Which of several data-parallel engines behind one address it is.
    pub fn rank(&self) -> Option<u32> {
        self.config.rank
    }

    /// Its name, as headers carry it; `None` where they cannot.
    pub fn name_header(&self) -> Option<&HeaderValue> {
        self.name_header.as_ref()
    }

    /// What it was made from.
    pub fn config(&self) -> &WorkerConfig {
        &self.config
    }

    /// The model that stands for the worker: the only one it serves, else the first that it lists (an
    /// engine's base model; its adapters follow).
    pub fn primary_model(&self) -> Option<String> {
        self.with_primary_model(str::to_owned)
    }

    /// What `of` makes of [`Worker::primary_model`], where there is one.
    pub fn with_primary_model<T>(&self, of: impl FnOnce(&str) -> T) -> Option<T> {
        match &self.config.model {
            Some(model) => Some(of(model)),
            None => self.models.read().as_ref()?.first().map(|model| of(&model.id)),
        }
    }

    /// Whether requests for `model` may go here. Before its models are known, a worker may serve any.
    pub fn may_serve(&self, model: Option<&str>) -> bool {
        let Some(model) = model else { return true };
        if let Some(configured) = &self.config.model {
            return configured == model;
        }
        self.models.read().as_ref().is_none_or(|known| known.iter().any(|m| m.id == model))
    }

    /// Whether it is known what it serves, by its list or because that is configured.
    pub fn models_known(&self) -> bool {
        self.config.model.is_some() || self.models.read().is_some()
    }

    /// The models it serves, as far as known.
    pub fn models(&self) -> Vec<Model> {
        let mut models = self.models.read().clone().unwrap_or_default();
        if let Some(configured) = &self.config.model {
            models.retain(|model| model.id == *configured);
        }
        models
    }

    /// How many models it serves, as far as known.
    pub fn model_count(&self) -> usize {
        match self.config.model {
            Some(_) => 1,
            None => self.models.read().as_ref().map_or(0, Vec::len),
        }
    }

    /// What its logits are computed with, where it says so: then it speaks the worker extension.
    pub fn numerics_id(&self) -> Option<Arc<str>> {
        self.models.read().as_ref()?.first()?.numerics_id.clone()
    }

    /// Whether it was found lately to keep no KV of an API's prompts for others.
    pub fn keeps_no_kv(&self, api: Api, now: Duration) -> bool {
        self.no_kv_until_ms(api).load(Relaxed) > now.as_millis() as u64
    }

    /// It kept no KV of a prompt that it computed for another. Returns whether that is news.
    pub fn kept_no_kv(&self, api: Api, now: Duration) -> bool {
        self.no_kv_until_ms(api).swap((now + NO_KV_PAUSE).as_millis() as u64, Relaxed) == 0
    }

    fn no_kv_until_ms(&self, api: Api) -> &AtomicU64 {
        let [chats, messages, responses] = &self.no_kv_until_ms;
        match api {
            Api::Messages => messages,
            Api::Responses => responses,
            Api::Chat | Api::Completions | Api::Other => chats,
        }
    }

    /// Whether this model is a LoRA adapter there: then no other model shares its KV.
    pub fn is_adapter(&self, model: &str) -> bool {
        let known = self.models.read();
        known.iter().flatten().any(|known| known.id == model && known.parent.is_some())
    }

    /// Tokens that it has room for, of a model or of the one that that is an adapter of.
    fn context_of(&self, model: &str) -> Option<u64> {
        let known = self.models.read();
        let entry = |id: &str| known.iter().flatten().find(|model| model.id == id);
        let own = entry(model)?;
        own.context.or_else(|| entry(own.parent.as_deref()?)?.context)
    }

    /// Notes what `/v1/models` said.
    pub fn set_models(&self, models: Vec<Model>) {
        let ids = models.iter().map(|model| model.id.clone());
        // One that is configured is the only one.
        let ids: Vec<String> = self.config.model.clone().map_or_else(|| ids.collect(), |only| vec![only]);
        self.gate.serves(ids);
        self.says_kv_source(models.iter().find_map(|model| model.kv_source_port));
        *self.models.write() = Some(models);
    }

    /// Whether it takes requests now: it is reachable, and answers well enough.
    pub fn routable(&self) -> bool {
        self.health.lock().routable() && self.gate.admits()
    }

    /// What lets requests through to it.
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// What is counted of it, among the gateway's series.
    pub fn series(&self, metrics: &Metrics) -> &WorkerSeries {
        self.series.get_or_init(|| metrics.worker(&self.name))
    }

    /// How often it was chosen, for whatever reason.
    pub fn times_chosen(&self) -> u64 {
        self.series.get().map_or(0, WorkerSeries::picks)
    }

    /// Its state, for people.
    pub fn state(&self) -> State {
        self.health.lock().state()
    }

    /// How it is doing, for people.
    pub fn condition(&self) -> &'static str {
        match self.state() {
            State::Ready if !self.gate.admits() => "ejected",
            State::Ready if self.standing.misconfigured() => "misconfigured",
            state => state.as_str(),
        }
    }

    /// Where it publishes KV events.
    pub fn kv_source(&self) -> Option<&KvSource> {
        self.residency.source()
    }

    /// Notes that no connection could be made.
    pub fn connect_failed(&self, now: Duration) {
        self.health.lock().on_connect_failure(now);
        self.habits.forget();
        self.failed.notify_one();
    }

    /// It answers something, or goes on with an answer.
    pub fn says_something(&self, now: Duration) {
        self.heard_ms.store(now.as_millis() as u64, Relaxed);
    }

    /// How long it has said nothing to any client's request; streams that go on are noted now and then.
    pub fn silent_for(&self, now: Duration) -> Duration {
        now.saturating_sub(Duration::from_millis(self.heard_ms.load(Relaxed)))
    }

    /// Since when nothing more is to be expected of it, streams that it has begun included: its port refuses
    /// connections, or it has let its probes fail for long. `None` while it seems alive.
    pub fn seems_dead_since(&self) -> Option<Duration> {
        self.health.lock().seems_dead_since()
    }

    /// Completes when a connection has failed.
    pub async fn failed(&self) {
        self.failed.notified().await;
    }

    /// Its source says that it is not ready, or is again. Returns whether that is news.
    pub fn pause(&self, paused: bool, now: Duration) -> bool {
        let news = self.health.lock().pause(paused, now);
        if news && !paused {
            // The task that probes it works out anew when the next probe is due.
            self.failed.notify_one();
        }
        news
    }

    /// Looks at or changes the health state machine.
    pub fn with_health<T>(&self, f: impl FnOnce(&mut Health) -> T) -> T {
        f(&mut self.health.lock())
    }
}

/// All workers that are known, those that are down or drain included.
#[derive(Debug)]
pub struct Fleet {
    ejections: Arc<Ejections>,
    /// In the order of their ids. Replaced as a whole: it is read for each request, and workers come and go
    /// rarely.
    workers: RwLock<Arc<[Arc<Worker>]>>,
}

impl Fleet {
    /// A fleet of the configured workers.
    pub fn new(configs: &[WorkerConfig], now: Duration, ejections: &Arc<Ejections>) -> Self {
        let fleet = Self { workers: RwLock::default(), ejections: Arc::clone(ejections) };
        for config in configs {
            fleet.add(config, now);
        }
        fleet
    }

    /// Adds a worker. One that has its address but still drains is another worker.
    pub fn add(&self, config: &WorkerConfig, now: Duration) -> Arc<Worker> {
        let id = self.id_for(&config.name());
        // Its blocks of text are kept apart from those of its own size, which its events may clear: neither
        // is counted in the other's.
        let of = |what: &str| self.id_for(&format!("{} {what}", config.name()));
        let tokens = of("tokens");
        let token_ids = (tokens, of("tiers"));
        let worker = Arc::new(Worker::new(id, token_ids, config, now, &self.ejections));
        let mut workers = self.workers.write();
        let at = workers.partition_point(|other| other.id < id);
        let (before, after) = workers.split_at(at);
        *workers = before.iter().chain([&worker]).chain(after).cloned().collect();
        worker
    }

    /// Forgets a worker that has drained.
    pub fn remove(&self, id: WorkerId) {
        let mut workers = self.workers.write();
        *workers = workers.iter().filter(|worker| worker.id != id).cloned().collect();
    }

    /// An id that follows from the name, so that every gateway gives it and their rendezvous orders agree.
    fn id_for(&self, name: &str) -> WorkerId {
        let hash = Chain::new(HashKey::new(0), name.as_bytes()).hash(b"worker") as u32;
        let mut ids = (hash..=u32::MAX).chain(0..hash).map(WorkerId);
        let taken = |id: &WorkerId| {
            let own = |worker: &Worker| [worker.id, worker.residency.token_id, worker.residency.any_tier_id];
            self.all().iter().any(|worker| own(worker).contains(id))
        };
        ids.find(|id| !taken(id)).unwrap_or(WorkerId(hash))
    }

    /// Every worker, in the order of their ids.
    pub fn all(&self) -> Arc<[Arc<Worker>]> {
        Arc::clone(&self.workers.read())
    }

    /// Whether there is a worker that computes prompts for others alone.
    pub fn has_prefill(&self) -> bool {
        self.workers.read().iter().any(|worker| worker.role() == Role::Prefill)
    }

    /// Whether there is a worker whose KV may go to others.
    pub fn moves_kv(&self) -> bool {
        self.workers.read().iter().any(|worker| worker.moves_kv())
    }

    /// Whether a worker has just joined and nothing is known of it yet.
    pub fn awaits_first_probe(&self) -> bool {
        self.all().iter().any(|worker| worker.with_health(|health| health.awaits_first_probe()))
    }

    /// The model that `adapter` is an adapter of, if a worker says so: it has its tokenizer.
    pub fn parent_of(&self, adapter: &str) -> Option<String> {
        let parent = |worker: &Worker| {
            let known = worker.models.read();
            known.iter().flatten().find(|model| model.id == adapter)?.parent.clone()
        };
        self.all().iter().find_map(|worker| parent(worker))
    }

    /// The most tokens that a worker has room for of those that may serve `model`; `None` where one does not
    /// say.
    pub fn longest_context(&self, model: &str) -> Option<u64> {
        let all = self.all();
        let serving = all.iter().filter(|worker| worker.may_serve(Some(model)));
        let most =
            serving.map(|worker| worker.context_of(model)).try_fold(0, |most, one| Some(one?.max(most)));
        most.filter(|tokens| *tokens > 0)
    }

    /// Whether all workers that have a model are `keyway-worker`s.
    pub fn is_of_keyway_workers(&self, model: &str) -> bool {
        let all = self.all();
        let mut serving = all.iter().filter(|worker| worker.may_serve(Some(model))).peekable();
        serving.peek().is_some() && serving.all(|worker| worker.numerics_id().is_some())
    }

    /// Whether no worker has this model, as far as can be known. One that is down has what it listed when it
    /// was up. What one that has never been up will list is not known: it is no reason to call a name right
    /// that no worker that is up has heard of, else a worker that starts for minutes makes every mistyped
    /// name look as if it would be there soon. While no worker is up it is one.
    pub fn lacks(&self, model: &str) -> bool {
        let all = self.all();
        let (known, unknown): (Vec<_>, Vec<_>) = all.iter().partition(|worker| worker.models_known());
        let is_up = |worker: &&Arc<Worker>| matches!(worker.state(), State::Ready | State::Paused);
        !known.is_empty()
            && !known.iter().any(|worker| worker.may_serve(Some(model)))
            && !unknown.iter().any(is_up)
            && (unknown.is_empty() || known.iter().any(is_up))
    }

    /// The ids of all models known, sorted.
    pub fn model_ids(&self) -> Vec<String> {
        let mut ids: Vec<_> = self.all().iter().flat_map(|w| w.models()).map(|model| model.id).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

#[cfg(test)]
mod tests;
