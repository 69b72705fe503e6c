//! What this gateway tells others that ask (`/load` of the admin listener): what it has at each worker, as
//! lines that come when it changes, and all of it once a second. A request that is sent is told at once:
//! until then another gateway may send one to the same idle worker. A body that is polled, so that a client
//! that does not read holds up no other and nothing grows.

use std::{
    collections::{BTreeMap, HashMap},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use keyway_core::{OwnLoad, WorkerId};

use super::{
    GatewayId, Line, LoadEntry, OwnerEntry,
    placements::{PlacementNews, PlacementsTold},
};
use crate::{
    clock::{self, Instant, Sleep},
    fleet::Worker,
    leaving::Leaving,
    limits::{
        PEER_ALL_EVERY, PEER_ARRIVALS_EVERY, PEER_ARRIVALS_MIN_PER_S, PEER_AT_ONCE_PART, PEER_EVERY,
        PEER_EVERY_RANGE,
    },
    proxy::body::Lines,
    routing::{Router, SentLately, SentTo},
    stored_state::StoredNews,
};

/// Tokens that wait count as changed by this part of what was told: they fall all the time while a worker
/// computes.
const TOKENS_CHANGED: u64 = 16;

/// The lines of one that listens.
#[derive(Debug)]
pub struct Telling {
    router: Arc<Router>,
    leaving: Arc<Leaving>,
    /// Until it was said.
    id: Option<GatewayId>,
    every: Duration,
    next: Pin<Box<Sleep>>,
    /// Where requests are sent, and the earliest moment at which that is told again at once.
    sent: Arc<SentLately>,
    at_once: Pin<Box<Sleep>>,
    /// When all is told again.
    all_due: Instant,
    /// When it is told again how many requests come.
    arrivals_due: Instant,
    told: HashMap<String, OwnLoad>,
    /// What was told of owners.
    told_owners: HashMap<u32, OwnerEntry>,
    /// How many ids of what workers store were told.
    told_ids: u64,
    /// Of placements, if it asks for them.
    placements: Option<PlacementsTold>,
}

impl Telling {
    /// Lines for who asked with this query (`every_ms`; `placements=1`: of placements too).
    pub fn new(router: Arc<Router>, leaving: Arc<Leaving>, id: GatewayId, query: &str) -> Self {
        let every = query.split('&').find_map(|pair| pair.strip_prefix("every_ms=")?.parse().ok());
        let every = every.map_or(PEER_EVERY, Duration::from_millis);
        let now = Instant::now();
        let asks = query.split('&').any(|pair| pair == "placements=1");
        let placements = if asks { PlacementsTold::from_now(&router) } else { None };
        Self {
            sent: router.sent().listen(),
            at_once: Box::pin(clock::sleep_until(now)),
            router,
            leaving,
            id: Some(id),
            every: every.clamp(*PEER_EVERY_RANGE.start(), *PEER_EVERY_RANGE.end()),
            next: Box::pin(clock::sleep_until(now)),
            all_due: now,
            arrivals_due: now,
            told: HashMap::new(),
            told_owners: HashMap::new(),
            told_ids: 0,
            placements,
        }
    }

    fn new_ids(&mut self) -> Option<StoredNews> {
        let (news, told) = self.router.stored_state()?.news(self.told_ids);
        self.told_ids = told;
        news
    }

    /// What there is at workers, or what differs of it from what was told.
    fn news(&mut self, all: bool) -> Vec<LoadEntry> {
        let there = self.there();
        let changed = |(worker, load): &(&String, &OwnLoad)| {
            all || self.told.get(*worker).is_none_or(|before| differs(*before, **load))
        };
        let mut news: Vec<(String, OwnLoad)> =
            there.iter().filter(changed).map(|(worker, load)| (worker.clone(), *load)).collect();
        if all {
            self.told = there;
        } else {
            let gone = |worker: &String| !there.contains_key(worker);
            let ended: Vec<String> = self.told.keys().filter(|worker| gone(worker)).cloned().collect();
            for worker in &ended {
                self.told.remove(worker);
            }
            self.told.extend(news.iter().cloned());
            news.extend(ended.into_iter().map(|worker| (worker, OwnLoad::default())));
        }
        news.into_iter().map(|(worker, load)| LoadEntry::new(worker, load)).collect()
    }

    /// What owners have had, of those of which that has changed, and of those that wait.
    fn owners(&mut self) -> Vec<OwnerEntry> {
        let mut owners: Vec<_> = self.router.words_of_owners().into_iter().map(OwnerEntry::from).collect();
        let told = std::mem::take(&mut self.told_owners);
        self.told_owners = owners.iter().map(|entry| (entry.owner, *entry)).collect();
        owners.retain(|entry| entry.waits.is_some() || told.get(&entry.owner) != Some(entry));
        owners
    }

    /// Requests a second that were sent lately to each worker, to four places.
    fn arrivals(&self) -> BTreeMap<String, f64> {
        let now = self.router.now();
        let mut all = BTreeMap::<String, f64>::new();
        for worker in self.router.fleet().all().iter() {
            let per_s = worker.load.arrivals_per_ms(now) * 1e3;
            if per_s >= PEER_ARRIVALS_MIN_PER_S {
                let sum = all.entry(worker.name.clone()).or_default();
                *sum = ((*sum + per_s) * 1e4).round() / 1e4;
            }
        }
        all
    }

    /// What there is, by worker; one that left and one that came back at its address are one to others.
    fn there(&self) -> HashMap<String, OwnLoad> {
        let mut there = HashMap::<String, OwnLoad>::new();
        for worker in self.router.fleet().all().iter().filter(|worker| worker.load.requests() > 0) {
            let sum = there.entry(worker.name.clone()).or_default();
            *sum = sum.and(self.at(worker));
        }
        there
    }

    fn at(&self, worker: &Worker) -> OwnLoad {
        let rate = worker.rate.lock().tokens_per_second();
        worker.load.told(self.router.now(), rate)
    }

    /// What differs at these workers from what was told.
    fn news_of(&mut self, sent: &[WorkerId]) -> Vec<LoadEntry> {
        let fleet = self.router.fleet().all();
        let mut names: Vec<&String> =
            fleet.iter().filter(|worker| sent.contains(&worker.id)).map(|worker| &worker.name).collect();
        names.sort_unstable();
        names.dedup();
        let mut news = Vec::new();
        for name in names {
            let of_name = fleet.iter().filter(|worker| worker.name == *name);
            let load = of_name.fold(OwnLoad::default(), |sum, worker| sum.and(self.at(worker)));
            if self.told.get(name).is_none_or(|before| differs(*before, load)) {
                self.told.insert(name.clone(), load);
                news.push(LoadEntry::new(name.clone(), load));
            }
        }
        news
    }

    /// All that is new.
    fn look(&mut self, now: Instant) -> Line {
        // Whatever was sent until now is among it.
        let _ = self.sent.take();
        let all = now >= self.all_due;
        if all {
            self.all_due = now + PEER_ALL_EVERY;
        }
        let arrivals = (now >= self.arrivals_due).then(|| {
            self.arrivals_due = now + PEER_ARRIVALS_EVERY;
            self.arrivals()
        });
        let workers = self.news(all);
        let stored = self.new_ids();
        let owners = self.owners();
        let placed = self.new_placements();
        Line { gateway: None, all, workers, arrivals, stored, owners, placed }
    }

    /// What is new where requests were sent.
    fn look_where_sent(&mut self) -> Line {
        let workers = match self.sent.take() {
            SentTo::These(workers) => self.news_of(&workers),
            SentTo::Many => self.news(false),
        };
        Line { workers, placed: self.new_placements(), ..Line::default() }
    }

    fn new_placements(&mut self) -> Option<PlacementNews> {
        self.placements.as_mut().and_then(|told| told.news(&self.router))
    }

    /// A line as it goes out, if it says something.
    fn written(&mut self, line: Line) -> Option<Bytes> {
        line.says_something().then(|| {
            let line = Line { gateway: self.id.take(), ..line };
            let mut line = serde_json::to_vec(&line).unwrap_or_default();
            line.push(b'\n');
            line.into()
        })
    }
}

impl Lines for Telling {
    /// The last line comes before a successor takes over, whom who listens is to ask then: what is left
    /// here is seen by the workers' gauges alone.
    fn poll_line(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            let line = if self.next.as_mut().poll(cx).is_ready() {
                if self.leaving.succeeded() {
                    return Poll::Ready(None);
                }
                let now = Instant::now();
                self.next.as_mut().reset(now + self.every);
                self.look(now)
            } else {
                ready!(self.sent.poll_sent(cx));
                ready!(self.at_once.as_mut().poll(cx));
                self.at_once.as_mut().reset(Instant::now() + self.every / PEER_AT_ONCE_PART);
                self.look_where_sent()
            };
            if let Some(line) = self.written(line) {
                return Poll::Ready(Some(line));
            }
        }
    }
}

fn differs(before: OwnLoad, now: OwnLoad) -> bool {
    let (requests, waiting) = (before.requests != now.requests, before.waiting != now.waiting);
    let tokens = before.waiting_tokens.abs_diff(now.waiting_tokens) * TOKENS_CHANGED > before.waiting_tokens;
    requests || waiting || tokens
}
