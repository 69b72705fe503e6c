//! Data-parallel engines that are found behind an address of which no operator said how many it has: each
//! becomes a member of its own, with a cache and a queue of its own, and requests name the one they are for.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use keyway_core::health::State;
use parking_lot::Mutex;
use tokio::{sync::watch, task::JoinHandle};

use super::{DRAIN_LOOK, Listed, Members};
use crate::{clock, config::WorkerConfig, fleet::Worker};

/// How long the members that an address had stay beside those that it is to have, until these serve.
const MOVE_TIME: Duration = Duration::from_secs(60);

/// Addresses with several engines.
pub(super) type Splits = Mutex<HashMap<String, Split>>;

/// One of them.
#[derive(Debug)]
pub(super) struct Split {
    /// All of it, as its source lists it.
    whole: WorkerConfig,
    engines: u32,
    /// Whether the members that it had still serve.
    is_moving: bool,
}

impl Members {
    /// Makes a worker's engines members of their own, whenever their number is another.
    pub(super) fn follow_ranks(
        self: &Arc<Self>,
        worker: &Arc<Worker>,
        mut engines: watch::Receiver<u32>,
    ) -> JoinHandle<()> {
        let (members, worker) = (Arc::downgrade(self), Arc::clone(worker));
        tokio::spawn(async move {
            while engines.changed().await.is_ok() {
                let engines = *engines.borrow_and_update();
                let Some(members) = members.upgrade() else { return };
                members.has_engines(&worker, engines).await;
            }
        })
    }

    /// So many engines are behind a member's address.
    pub(super) async fn has_engines(self: &Arc<Self>, worker: &Arc<Worker>, engines: u32) {
        let whole = self.whole_of(worker.config());
        let address = whole.address();
        let wanted = match whole.split(engines) {
            Ok(wanted) => wanted,
            Err(error) => {
                tracing::warn!(worker = %address, engines, %error, "its data-parallel engines are taken for one");
                return;
            }
        };
        let member =
            self.all.lock().get(&worker.id).filter(|member| member.is(worker)).map(|member| member.source);
        let Some(source) = member.filter(|_| self.begin_split(&address, whole, engines)) else { return };
        tracing::info!(worker = %address, engines, "its data-parallel engines are workers of their own");
        let names: HashSet<String> = wanted.iter().map(WorkerConfig::name).collect();
        for config in &wanted {
            if self.workers().iter().all(|worker| worker.name != config.name()) {
                self.join(config, source);
            }
        }
        let until = self.router.now() + MOVE_TIME;
        let serves =
            |name: &String| self.workers().iter().any(|other| other.name == *name && other.routable());
        while self.router.now() < until && !names.iter().all(serves) {
            clock::sleep(DRAIN_LOOK).await;
        }
        self.end_split(&address);
        for other in self.of(source) {
            let is_old = other.config().address() == address && !names.contains(&other.name);
            if is_old && other.state() != State::Draining {
                self.leave(&other, false);
            }
        }
    }

    /// Returns whether that is news.
    fn begin_split(&self, address: &str, whole: WorkerConfig, engines: u32) -> bool {
        let mut splits = self.splits.lock();
        let known = splits.get(address).map_or(1, |split| split.engines);
        if known != engines {
            splits.insert(address.to_owned(), Split { whole, engines, is_moving: true });
        }
        known != engines
    }

    fn end_split(&self, address: &str) {
        let mut splits = self.splits.lock();
        if let Some(split) = splits.get_mut(address) {
            split.is_moving = false;
        }
        splits.retain(|_, split| split.engines > 1);
    }

    /// As the source lists it whose engine this is.
    fn whole_of(&self, config: &WorkerConfig) -> WorkerConfig {
        let known = self.splits.lock().get(&config.address()).map(|split| split.whole.clone());
        known.unwrap_or_else(|| config.clone())
    }

    /// Whether its engines are members in its place.
    pub(super) fn is_split(&self, config: &WorkerConfig) -> bool {
        config.rank.is_none()
            && self.splits.lock().get(&config.address()).is_some_and(|split| split.engines > 1)
    }

    /// A source's list, with the engines of addresses in their place.
    pub(super) fn by_engine<'a>(&self, list: &'a [Listed]) -> Cow<'a, [Listed]> {
        let mut splits = self.splits.lock();
        if splits.is_empty() {
            return Cow::Borrowed(list);
        }
        let mut all = Vec::with_capacity(list.len());
        for listed in list {
            let address = listed.config.address();
            if !listed.config.finds_ranks {
                // An operator says it now.
                splits.remove(&address);
            }
            let Some(split) = splits.get_mut(&address) else {
                all.push(listed.clone());
                continue;
            };
            split.whole = listed.config.clone();
            let ranks = split.whole.split(split.engines).unwrap_or_default();
            all.extend(ranks.into_iter().map(|config| Listed { config, ready: listed.ready }));
            if split.is_moving {
                all.push(listed.clone());
            }
        }
        Cow::Owned(all)
    }

    /// What comes to an address from which all engines have gone may be another worker.
    pub(super) fn forget_split(&self, worker: &Worker) {
        let address = worker.config().address();
        if self.workers().iter().all(|other| other.config().address() != address) {
            self.splits.lock().remove(&address);
        }
    }
}
