//! Who belongs to the fleet: workers join, each with the tasks that watch it, and leave by draining. Where they are learned
//! of is `discovery.rs`'s and `admin`'s business; whether one that belongs is up, `probe.rs`'s.
//!
//! Each source has its own members: a file that no longer names a worker takes out that worker, not one that the
//! configuration lists.

use std::{collections::HashMap, sync::Arc, time::Duration};

use keyway_core::{health::State, index::WorkerId};
use parking_lot::Mutex;
use tokio::task::AbortHandle;

use crate::{
    clock, config::WorkerConfig, fleet::Worker, kv_events, load_scrape, metrics::Metrics, probe,
    routing::Router, upstream::Upstream,
};

/// How often a draining worker is looked at.
const DRAIN_LOOK: Duration = Duration::from_millis(100);

/// Where a worker was learned of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The configuration at the start.
    Static,
    /// `discovery.file`.
    File,
    /// `discovery.dns`, by its place there.
    Dns(usize),
    /// The admin listener.
    Admin,
}

impl Source {
    /// Its name in metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::File => "file",
            Self::Dns(_) => "dns",
            Self::Admin => "admin",
        }
    }
}

/// The members.
#[derive(Debug)]
pub struct Members {
    router: Arc<Router>,
    upstream: Upstream,
    metrics: Arc<Metrics>,
    all: Mutex<HashMap<WorkerId, Member>>,
}

#[derive(Debug)]
struct Member {
    worker: Arc<Worker>,
    source: Source,
    tasks: Vec<AbortHandle>,
    /// An operator drained it: it does not come back because a list still names it.
    by_hand: bool,
}

impl Members {
    /// Nobody yet.
    pub fn new(router: Arc<Router>, upstream: Upstream, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { router, upstream, metrics, all: Mutex::default() })
    }

    /// Takes a worker that the fleet has already.
    pub fn adopt(&self, worker: Arc<Worker>, source: Source) {
        let mut tasks = Vec::new();
        if let Some(events) = worker.kv_source().cloned() {
            let (router, metrics) = (Arc::clone(&self.router), Arc::clone(&self.metrics));
            let following = kv_events::follow(Arc::clone(&worker), events, router, metrics);
            tasks.push(tokio::spawn(following).abort_handle());
        }
        let (router, metrics) = (Arc::clone(&self.router), Arc::clone(&self.metrics));
        let probing = probe::watch(Arc::clone(&worker), router, self.upstream.clone(), metrics);
        tasks.push(tokio::spawn(probing).abort_handle());
        if let Some(every) = self.router.load_scrape() {
            let (router, upstream) = (Arc::clone(&self.router), self.upstream.clone());
            let asking = load_scrape::watch(Arc::clone(&worker), router, upstream, every);
            tasks.push(tokio::spawn(asking).abort_handle());
        }
        self.all.lock().insert(worker.id, Member { worker, source, tasks, by_hand: false });
    }

    /// Makes the members of `source` those of the list: new ones join, others drain, one whose settings changed does both.
    pub fn set(self: &Arc<Self>, source: Source, list: &[WorkerConfig]) {
        let mut keep = Vec::new();
        for member in self.of(source) {
            let wanted = list.iter().any(|config| config == member.config());
            let draining = member.state() == State::Draining;
            match (wanted, draining) {
                (true, draining) if !draining || self.by_hand(&member) => keep.push(member.name.clone()),
                (false, false) => self.leave(&member, false),
                (false, true) => self.let_go(&member),
                _ => {}
            }
        }
        for config in list.iter().filter(|config| !keep.contains(&config.name())) {
            self.join(config, source);
        }
    }

    /// Adds a worker. `false` if its address belongs to another member already.
    pub fn join(self: &Arc<Self>, config: &WorkerConfig, source: Source) -> bool {
        let name = config.name();
        if self.workers().iter().any(|worker| worker.name == name && worker.state() != State::Draining) {
            return false;
        }
        tracing::info!(worker = %name, source = source.as_str(), "worker joins");
        let worker = self.router.fleet().add(config, self.router.now());
        self.adopt(worker, source);
        true
    }

    /// Lets a worker drain by an operator's wish. `false` if there is none of this name.
    pub fn drain(self: &Arc<Self>, name: &str) -> bool {
        let found = self.workers().into_iter().find(|w| w.name == name && w.state() != State::Draining);
        found.is_some_and(|worker| {
            self.leave(&worker, true);
            true
        })
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
            // Choices are made under the index's lock and count at the worker before it opens: whoever chose this
            // worker before it drained is counted once the lock could be taken.
            while members.router.with_index(|_| worker.load.requests()) > 0 {
                clock::sleep(DRAIN_LOOK).await;
            }
            members.drained(&worker);
        });
    }

    /// Its last answer has ended.
    fn drained(&self, worker: &Worker) {
        tracing::info!(worker = %worker.name, "worker has drained");
        if let Some(member) = self.all.lock().get_mut(&worker.id) {
            member.tasks.drain(..).for_each(|task| task.abort());
        }
        self.router.forget_cache(worker);
        // Drained by hand, it stays on the list, so that its source does not bring it back.
        if !self.by_hand(worker) {
            self.forget(worker);
        }
    }

    fn forget(&self, worker: &Worker) {
        self.all.lock().remove(&worker.id);
        self.router.fleet().remove(worker.id);
        if self.workers().iter().all(|other| other.name != worker.name) {
            self.metrics.forget_worker(&worker.name);
        }
    }

    /// It drains or has drained, and nobody wants it back.
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

    /// Takes back an operator's drain: the worker joins anew. `false` if it was not drained by hand.
    pub fn undrain(self: &Arc<Self>, name: &str) -> bool {
        let mut members = self.all.lock();
        let found = members.iter().find(|(_, m)| m.by_hand && m.worker.name == name).map(|(id, _)| *id);
        let Some(member) = found.and_then(|id| members.remove(&id)) else { return false };
        drop(members);
        self.router.fleet().remove(member.worker.id);
        self.join(member.worker.config(), member.source)
    }

    /// Takes out a worker that the admin listener added. `false` if there is none.
    pub fn remove(self: &Arc<Self>, name: &str) -> bool {
        let found = self.of(Source::Admin).into_iter().find(|worker| worker.name == name);
        let Some(worker) = found else { return false };
        if worker.state() == State::Draining {
            self.let_go(&worker);
        } else {
            self.leave(&worker, false);
        }
        true
    }

    /// Ends every watching task.
    pub fn stop(&self) {
        self.all.lock().values().flat_map(|member| &member.tasks).for_each(AbortHandle::abort);
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
