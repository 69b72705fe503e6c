//! What other gateways have said that they have at each worker, and its sum, which goes to the worker's load.
//! Nothing of a gateway that is no longer heard stays.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use keyway_core::{OwnLoad, told::Malformed, waiting_room::OwnerWord};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{Line, OwnerEntry, placements::PlacementsHeard};
use crate::{
    limits::{PEER_EVERY, PEER_OWNERS_MAX},
    routing::Router,
};

/// One process that is a gateway; another one after each start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct GatewayId(u64);

/// All that was said.
#[derive(Debug)]
pub struct Hearsay {
    own: GatewayId,
    router: Arc<Router>,
    said: Mutex<HashMap<GatewayId, Said>>,
}

/// What one gateway has, by worker.
#[derive(Debug, Default)]
struct Said {
    load: HashMap<String, OwnLoad>,
    /// Requests a second that it sends there.
    arrivals: BTreeMap<String, f64>,
    /// What each owner has had there.
    owners: HashMap<u32, f64>,
}

/// One gateway that is heard; dropped, it is not any more.
#[derive(Debug)]
pub struct Voice {
    id: GatewayId,
    hearsay: Arc<Hearsay>,
    placements: Mutex<PlacementsHeard>,
    /// How often it speaks.
    every: Duration,
}

impl Hearsay {
    /// Nothing yet. `own`: who need not be heard.
    pub fn new(own: GatewayId, router: Arc<Router>) -> Arc<Self> {
        Arc::new(Self { own, router, said: Mutex::default() })
    }

    /// Another gateway begins to speak; `None`: it is this one, or is heard already.
    pub fn hear(self: &Arc<Self>, id: GatewayId) -> Option<Voice> {
        let mut said = self.said.lock();
        if id == self.own || said.contains_key(&id) {
            return None;
        }
        said.insert(id, Said::default());
        Some(Voice { id, hearsay: Arc::clone(self), placements: Mutex::default(), every: PEER_EVERY })
    }

    /// Gives workers the sums of what was said: those whom it concerns. Under the lock, so that no older sum
    /// comes last.
    fn pass_on(&self, said: &HashMap<GatewayId, Said>, concerns: impl Fn(&str) -> bool, counts: bool) {
        let now = self.router.now();
        for worker in self.router.fleet().all().iter().filter(|worker| concerns(&worker.name)) {
            let sum = said.values().fold(OwnLoad::default(), |sum, said| sum.and(said.of(&worker.name)));
            worker.load.peers_say(now, sum);
            if counts {
                worker.load.look(now);
            }
        }
    }
}

impl Said {
    /// What is said of an owner, and the tokens that are new in it. What it had when it was first heard of
    /// counts for nothing: others have been served meanwhile, and all are level.
    fn hears_of(&mut self, entry: &OwnerEntry) -> (OwnerWord, f64) {
        if self.owners.len() >= PEER_OWNERS_MAX && !self.owners.contains_key(&entry.owner) {
            self.owners.clear();
        }
        let before = self.owners.insert(entry.owner, entry.had);
        ((*entry).into(), entry.had - before.unwrap_or(entry.had))
    }

    fn of(&self, worker: &str) -> OwnLoad {
        let load = self.load.get(worker).copied().unwrap_or_default();
        // What is no number of requests is none.
        let per_s = self.arrivals.get(worker).filter(|per_s| per_s.is_finite() && **per_s > 0.0);
        OwnLoad { arrivals_per_ms: per_s.map_or(0.0, |per_s| per_s / 1e3), ..load }
    }
}

impl Voice {
    /// The same of a gateway that was asked to speak so often.
    #[must_use]
    pub fn speaking(mut self, every: Duration) -> Self {
        self.every = every;
        self
    }

    /// Takes what the gateway says: its load goes to the workers, what it has placed into the index, ids of
    /// what is stored to where they are kept. An error: it says no placements.
    pub fn says(&self, line: &Line) -> Result<(), Malformed> {
        let router = &self.hearsay.router;
        let placed = line.placed.as_ref().map_or(Ok(()), |news| self.placements.lock().take(news, router));
        let mut all_said = self.hearsay.said.lock();
        let said = all_said.entry(self.id).or_default();
        if line.all {
            said.load.clear();
        }
        if let Some(arrivals) = &line.arrivals {
            said.arrivals.clone_from(arrivals);
        }
        let named: HashSet<&str> = line.workers.iter().map(|entry| entry.worker.as_str()).collect();
        said.load.extend(line.workers.iter().map(|entry| (entry.worker.clone(), entry.load())));
        let owners: Vec<_> = line.owners.iter().map(|entry| said.hears_of(entry)).collect();
        // Once a second, whatever has changed: the means are of even times.
        let concerns_all = line.all || line.arrivals.is_some();
        self.hearsay.pass_on(&all_said, |worker| concerns_all || named.contains(worker), line.all);
        drop(all_said);
        router.hear_of_owners(&owners, self.every);
        if let (Some(news), Some(stored)) = (&line.stored, self.hearsay.router.stored_state()) {
            stored.hear(news);
        }
        self.hearsay.router.load_changed();
        placed
    }
}

impl Drop for Voice {
    fn drop(&mut self) {
        self.placements.lock().end(&self.hearsay.router);
        let mut said = self.hearsay.said.lock();
        said.remove(&self.id);
        self.hearsay.pass_on(&said, |_| true, false);
        drop(said);
        self.hearsay.router.load_changed();
    }
}

impl GatewayId {
    /// A random one, for a gateway that starts.
    pub fn draw() -> Self {
        Self(fastrand::u64(..))
    }
}

impl fmt::Display for GatewayId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl From<GatewayId> for String {
    fn from(id: GatewayId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for GatewayId {
    type Error = std::num::ParseIntError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        u64::from_str_radix(&text, 16).map(Self)
    }
}
