//! Who belongs to the fleet: workers join, each with the tasks that watch it, and leave by draining. Where
//! they are learned of is `discovery.rs`'s and `admin`'s business; whether one that belongs is up,
//! `probe.rs`'s.
//!
//! Each source has its own members: a file that no longer names a worker takes out that worker, not one that
//! the configuration lists.

mod ranks;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    mem,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use keyway_core::{health::State, index::WorkerId};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
};

use self::ranks::Splits;
use crate::{
    clock,
    config::WorkerConfig,
    fleet::Worker,
    metrics::Metrics,
    routing::Router,
    upstream::Upstream,
    watch::{
        kv_events::{self, EventThread},
        load_scrape,
        probe::{Complaints, Watch},
    },
};

/// How often a draining worker is looked at.
const DRAIN_LOOK: Duration = Duration::from_millis(100);

/// Where a worker was learned of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The configuration's own list, as it was last read.
    Static,
    /// The file at `discovery.file`, which is read again and again.
    File,
    /// `discovery.dns`, by its place there.
    Dns(usize),
    /// `discovery.kubernetes`, by its place there.
    Kubernetes(usize),
    /// An operator's command to the admin listener.
    Admin,
}

impl Source {
    /// Its name in metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::File => "file",
            Self::Dns(_) => "dns",
            Self::Kubernetes(_) => "kubernetes",
            Self::Admin => "admin",
        }
    }
}

/// A worker as its source lists it.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed {
    /// What it is made from.
    pub config: WorkerConfig,
    /// Whether it may get new requests. One that may not joins only once it may, and keeps its place until it
    /// is no longer listed.
    pub ready: bool,
}

impl From<WorkerConfig> for Listed {
    fn from(config: WorkerConfig) -> Self {
        Self { config, ready: true }
    }
}

/// The fleet's workers, each with its source and the tasks that watch it.
#[derive(Debug)]
pub struct Members {
    router: Arc<Router>,
    upstream: Upstream,
    metrics: Arc<Metrics>,
    complaints: Arc<Complaints>,
    events: EventThread,
    /// Whether workers are asked where their KV events are, and how many engines they have.
    finds_events: bool,
    splits: Splits,
    all: Mutex<HashMap<WorkerId, Member>>,
}

#[derive(Debug)]
struct Member {
    worker: Arc<Worker>,
    source: Source,
    tasks: Vec<JoinHandle<()>>,
    /// An operator drained it: it does not come back because a list still names it.
    by_hand: bool,
}

impl Member {
    fn is(&self, worker: &Arc<Worker>) -> bool {
        Arc::ptr_eq(&self.worker, worker)
    }

    /// Ends what watches it.
    fn end(&mut self) -> Vec<JoinHandle<()>> {
        let tasks = mem::take(&mut self.tasks);
        tasks.iter().for_each(JoinHandle::abort);
        tasks
    }
}

impl Members {
    /// No worker yet. Without `finds_events`, KV events are followed only where a worker's settings name
    /// them, and an address is as many workers as they say.
    pub fn new(
        router: Arc<Router>,
        upstream: Upstream,
        metrics: Arc<Metrics>,
        finds_events: bool,
    ) -> Arc<Self> {
        let (complaints, events, splits, all) = Default::default();
        Arc::new(Self { router, upstream, metrics, complaints, events, finds_events, splits, all })
    }

    /// Takes a worker that the fleet has already.
    pub fn adopt(self: &Arc<Self>, worker: Arc<Worker>, source: Source) {
        if worker.config().had_v1 {
            tracing::info!(worker = %worker.name, "the /v1 of the worker's URL is left out: requests bring their own");
        }
        let known = self.router.index().recall(&worker);
        if known > 0 {
            tracing::info!(worker = %worker.name, blocks = known, "its cache is remembered from a snapshot");
        }
        worker.origin().count_races(self.metrics.races.with_label_values(&[&worker.name]));
        // Listed before anything watches it: what is found at once is found of a member.
        let member = Member { worker: Arc::clone(&worker), source, tasks: Vec::new(), by_hand: false };
        self.all.lock().insert(worker.id, member);
        let (mut tasks, engines) = (Vec::new(), watch::Sender::new(0));
        if self.finds_events && worker.config().finds_ranks {
            tasks.push(self.follow_ranks(&worker, engines.subscribe()));
        }
        if worker.kv_source().is_some() || self.finds_events {
            self.follow_events(&worker, engines.clone(), &mut tasks);
        }
        let watch = Watch {
            worker: Arc::clone(&worker),
            router: Arc::clone(&self.router),
            upstream: self.upstream.clone(),
            metrics: Arc::clone(&self.metrics),
            complaints: Arc::clone(&self.complaints),
            was_up: AtomicBool::new(false),
            engines,
        };
        tasks.push(tokio::spawn(watch.run()));
        if let Some(every) = self.router.options().load_scrape {
            let (router, upstream) = (Arc::clone(&self.router), self.upstream.clone());
            let asking = load_scrape::watch(Arc::clone(&worker), router, upstream, every);
            tasks.push(tokio::spawn(asking));
        }
        match self.all.lock().get_mut(&worker.id).filter(|member| member.is(&worker)) {
            Some(member) => member.tasks = tasks,
            // It has left meanwhile.
            None => tasks.iter().for_each(JoinHandle::abort),
        }
    }

    /// Has its KV events followed, where its settings say that they are or, once they match some prompts, it
    /// does itself.
    fn follow_events(
        &self,
        worker: &Arc<Worker>,
        engines: watch::Sender<u32>,
        tasks: &mut Vec<JoinHandle<()>>,
    ) {
        let (place, known) = watch::channel(worker.kv_source().cloned());
        let lost = Arc::new(Notify::new());
        let ours = (Arc::clone(&self.router), Arc::clone(&self.metrics));
        tasks.push(self.events.spawn(kv_events::follow(Arc::clone(worker), known, Arc::clone(&lost), ours)));
        let (worker, upstream) = (Arc::clone(worker), self.upstream.clone());
        let router = Arc::clone(&self.router);
        tasks.push(tokio::spawn(async move {
            if worker.kv_source().is_some() {
                place.closed().await;
            } else {
                router.until_tokens_come().await;
                kv_events::find::ask(worker, upstream, (place, engines), lost).await;
            }
        }));
    }

    /// Makes the members of `source` those of the list: new ones join, others drain, one whose settings
    /// changed does both.
    pub fn set(self: &Arc<Self>, source: Source, list: &[Listed]) {
        let list = self.by_engine(list);
        let named: HashMap<String, &Listed> =
            list.iter().map(|listed| (listed.config.name(), listed)).collect();
        let (mut keep, mut changed) = (HashSet::new(), false);
        for member in self.of(source) {
            let listed = named.get(&member.name).filter(|listed| listed.config == *member.config());
            let draining = member.state() == State::Draining;
            match (listed, draining) {
                (Some(listed), draining) if !draining || self.by_hand(&member) => {
                    changed |= self.pause(&member, !listed.ready);
                    keep.insert(member.name.clone());
                }
                (None, false) => self.leave(&member, false),
                (None, true) => self.let_go(&member),
                _ => {}
            }
        }
        for (name, listed) in named {
            if listed.ready && !keep.contains(&name) {
                self.join(&listed.config, source);
            }
        }
        if changed {
            self.router.fleet_changed();
        }
    }

    /// Nothing new goes there until its source says that it is ready again. Returns whether that is news.
    fn pause(&self, worker: &Worker, paused: bool) -> bool {
        let news = worker.pause(paused, self.router.now());
        if news {
            tracing::info!(worker = %worker.name, paused, "worker's readiness changed");
        }
        news
    }

    /// What the fleet would lose with each identity among a source's workers that takes requests: prompt
    /// tokens that its cache saved lately, and requests in flight. Several engines of one pod go together.
    pub fn worths(&self, source: Source) -> Vec<(String, f64)> {
        let mut worths: BTreeMap<String, f64> = BTreeMap::new();
        for worker in self.of(source) {
            if let Some(identity) = worker.config().identity.clone().filter(|_| worker.routable()) {
                let saved = worker.saved.lock().at(self.router.now());
                *worths.entry(identity).or_default() += saved + worker.load.requests() as f64;
            }
        }
        worths.into_iter().collect()
    }

    /// Adds a worker. `false` if its address belongs to another member already.
    pub fn join(self: &Arc<Self>, config: &WorkerConfig, source: Source) -> bool {
        let name = config.name();
        let is_there = |worker: &Arc<Worker>| worker.name == name && worker.state() != State::Draining;
        if self.is_split(config) || self.workers().iter().any(is_there) {
            return false;
        }
        tracing::info!(worker = %name, source = source.as_str(), "worker joins");
        let worker = self.router.fleet().add(config, self.router.now());
        self.adopt(worker, source);
        true
    }

    /// Lets a worker drain by an operator's wish, or all engines of an address. `false` if there is none of
    /// this name.
    pub fn drain(self: &Arc<Self>, name: &str) -> bool {
        let called = self.workers().into_iter().filter(|worker| is_called(worker, name));
        let found: Vec<_> = called.filter(|worker| worker.state() != State::Draining).collect();
        for worker in &found {
            self.leave(worker, true);
        }
        !found.is_empty()
    }

    /// Nothing new goes there from now on; when its last answer has ended it is forgotten.
    fn leave(self: &Arc<Self>, worker: &Arc<Worker>, by_hand: bool) {
        tracing::info!(worker = %worker.name, "worker drains");
        worker.with_health(|health| health.drain(self.router.now()));
        if let Some(member) = self.all.lock().get_mut(&worker.id) {
            member.by_hand = by_hand;
        }
        self.router.fleet_changed();
        let (members, worker) = (Arc::clone(self), Arc::clone(worker));
        tokio::spawn(async move {
            // Choices are made under the index's lock and count at the worker before it opens: a request that
            // chose this worker before it drained is counted once the lock could be taken.
            while members.router.index().with(|_| worker.load.requests()) > 0 {
                clock::sleep(DRAIN_LOOK).await;
            }
            members.drained(&worker).await;
        });
    }

    /// Its last answer has ended.
    async fn drained(&self, worker: &Arc<Worker>) {
        let tasks = self.all.lock().get_mut(&worker.id).filter(|member| member.is(worker)).map(Member::end);
        for task in tasks.into_iter().flatten() {
            // What follows its events may be in the middle of a slice, and says nothing more once it has
            // ended.
            let _ = task.await;
        }
        // One that was taken back meanwhile has joined anew, by the same id.
        if !self.all.lock().get(&worker.id).is_some_and(|member| member.is(worker)) {
            return;
        }
        tracing::info!(worker = %worker.name, "worker has drained");
        self.router.worker_left(worker);
        // Drained by hand, it stays on the list, so that its source does not bring it back.
        if !self.by_hand(worker) {
            self.forget(worker);
        }
    }

    fn forget(&self, worker: &Worker) {
        self.all.lock().remove(&worker.id);
        self.router.fleet().remove(worker.id);
        self.forget_split(worker);
        if self.workers().iter().all(|other| other.name != worker.name) {
            self.metrics.forget_worker(&worker.name);
        }
    }

    /// It drains or has drained, and its source does not want it back.
    fn let_go(&self, worker: &Worker) {
        let mut members = self.all.lock();
        let Some(member) = members.get_mut(&worker.id) else { return };
        member.by_hand = false;
        let drained = member.tasks.is_empty();
        drop(members);
        if drained {
            self.forget(worker);
        }
    }

    /// Takes back an operator's drain: the worker joins anew, or all engines of an address. `false` if it was
    /// not drained by hand.
    pub fn undrain(self: &Arc<Self>, name: &str) -> bool {
        let mut members = self.all.lock();
        let is_meant = |member: &Member| member.by_hand && is_called(&member.worker, name);
        let found: Vec<_> =
            members.extract_if(|_, member| is_meant(member)).map(|(_, member)| member).collect();
        drop(members);
        let mut came_back = false;
        for mut member in found {
            member.end();
            self.router.fleet().remove(member.worker.id);
            came_back |= self.join(member.worker.config(), member.source);
        }
        came_back
    }

    /// Takes out a worker that the admin listener added, or all engines of its address. `false` if there is
    /// none.
    pub fn remove(self: &Arc<Self>, name: &str) -> bool {
        let own = self.of(Source::Admin).into_iter();
        let found: Vec<_> = own.filter(|worker| is_called(worker, name)).collect();
        for worker in &found {
            if worker.state() == State::Draining {
                self.let_go(worker);
            } else {
                self.leave(worker, false);
            }
        }
        !found.is_empty()
    }

    /// Ends every watching task.
    pub fn stop(&self) {
        self.all.lock().values().flat_map(|member| &member.tasks).for_each(JoinHandle::abort);
    }

    fn workers(&self) -> Vec<Arc<Worker>> {
        self.all.lock().values().map(|member| Arc::clone(&member.worker)).collect()
    }

    fn of(&self, source: Source) -> Vec<Arc<Worker>> {
        let members = self.all.lock();
        let own = members.values().filter(|member| member.source == source);
        own.map(|member| Arc::clone(&member.worker)).collect()
    }

    /// Whether an operator drained it.
    fn by_hand(&self, worker: &Worker) -> bool {
        self.all.lock().get(&worker.id).is_some_and(|member| member.by_hand)
    }
}

/// Whether an operator means this worker: by its own name, or by the address of all of several engines.
fn is_called(worker: &Worker, name: &str) -> bool {
    worker.name == name || (worker.rank().is_some() && worker.config().address() == name)
}

#[cfg(test)]
mod tests;
