//! A fleet in virtual time: arrivals routed by the gateway's own core, engines advanced to whatever happens
//! next. Deterministic: the same arrivals and the same seed give the same run, on any machine.

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

use keyway_core::{OwnLoad, RoomRules, WaitingRoom, index::Placement, pace::Waiting};
use keyway_wire::block_hash::BlockHash;

use super::{
    gateway::Gateway,
    outcome::Outcome,
    routing::{Arrival, Clerk},
    ticker::Ticker,
};
use crate::{
    args::contender::Contender,
    engine_model::{Change, Engine, Listener, Nanos, Profile, RequestId, Submission, Token},
    random::splitmix,
    schedule::Due,
    slo::{Metric, Slo},
    trace::Trace,
    workload::scale::Scale,
};

/// What is replayed, whatever the fleet.
#[derive(Debug)]
pub(super) struct Workload {
    pub(super) trace: Trace,
    pub(super) schedule: Vec<Due>,
    pub(super) scale: Scale,
    /// How often the schedule is replayed, one copy after the other, each with prompts of its own.
    pub(super) copies: u64,
    /// Time from one copy to the next.
    pub(super) copy_ns: u64,
    pub(super) seed: u64,
    /// What a good answer is.
    pub(super) slo: Slo,
}

/// What a fleet is made of: its workers, its gateways, and how those route.
#[derive(Debug, Clone)]
pub(super) struct FleetSetup {
    pub(super) workers: usize,
    pub(super) profile: Profile,
    pub(super) policy: Contender,
    /// Bytes of the router's index.
    pub(super) index_bytes: usize,
    /// Prompt tokens in one block of the router's chain.
    pub(super) index_block_tokens: u32,
    /// Whether the index is told the size of each worker's cache.
    pub(super) index_knows_capacity: bool,
    /// Whether requests wait in the router until a worker can begin on them.
    pub(super) hold: bool,
    /// Seed of all block hashes, which break ties; lengths and times do not come from it.
    pub(super) hash_seed: u32,
    /// Gateways in front of it; each request comes to any of them.
    pub(super) gateways: usize,
    /// Whether the workers say what their caches hold; otherwise each gateway models them by what it sends.
    pub(super) events: bool,
    /// Time from one look at the workers' gauges to the next; `None`: gateways know only what they send.
    pub(super) scrape_ns: Option<Nanos>,
    /// Whether these count prompt tokens that wait, too.
    pub(super) gauges_count_tokens: bool,
    /// Time from one word of the other gateways to the next; `None`: they do not tell each other.
    pub(super) peers_ns: Option<Nanos>,
}

/// Replays the workload in virtual time, until the last answer has ended.
pub(super) fn replay(workload: &Workload, setup: &FleetSetup) -> Outcome {
    let mut run = Run::new(workload, setup);
    let what = format!("{} on {} workers", setup.policy.as_str(), setup.workers);
    let mut ticker = Ticker::new(what, workload.copies * workload.schedule.len() as u64);
    let arrivals = (0..workload.copies).flat_map(|copy| workload.schedule.iter().map(move |due| (copy, due)));
    let mut last = 0;
    for (copy, due) in arrivals {
        last = due.intended_ns + copy * workload.copy_ns;
        run.advance(last);
        run.arrive(last, copy, due.row);
        ticker.tick();
    }
    run.scrapes_until = last;
    run.advance(Nanos::MAX);
    run.finish()
}

pub(super) struct Run<'a> {
    pub(super) workload: &'a Workload,
    pub(super) setup: &'a FleetSetup,
    pub(super) gateways: Vec<Gateway>,
    engines: Vec<Engine>,
    flights: Vec<Vec<Flight>>,
    /// When to look at which worker, or, counted on from the workers, which gateway looks at the gauges: a
    /// min-heap; an entry whose engine has other plans by now is skipped.
    events: BinaryHeap<Reverse<(Nanos, u32)>>,
    planned: Vec<Option<Nanos>>,
    /// When gateways no longer look at the gauges: else the run would never end.
    scrapes_until: Nanos,
    pub(super) random: u64,
    outcome: Outcome,
}

/// A request under way.
#[derive(Debug, Default)]
struct Flight {
    arrived: Nanos,
    sent: Nanos,
    first: Nanos,
    waiting: Option<Waiting>,
    prompt_tokens: u64,
    /// Prompt tokens that the router expected to be computed there before its first token, its own among
    /// them.
    tokens_before_first: u64,
    /// Number of the gateway that it came to.
    gateway: usize,
    placement: Option<Placement>,
    /// Names of its blocks, where the worker tells what it holds.
    chain: Vec<BlockHash>,
}

/// One worker's desks and the run's figures, while its engine is advanced.
struct Counting<'a> {
    worker: usize,
    gateways: &'a mut [Gateway],
    flights: &'a mut [Flight],
    outcome: &'a mut Outcome,
    slo: &'a Slo,
}

// === impl Run ===

impl<'a> Run<'a> {
    fn new(workload: &'a Workload, setup: &'a FleetSetup) -> Self {
        let engine = || {
            let engine = Engine::new(setup.profile.clone());
            if setup.events { engine.recording() } else { engine }
        };
        // Gateways look at the gauges one after the other, evenly spaced, and at each other likewise.
        let looks = |every: Option<Nanos>, before: usize| {
            let first_look = |gateway: usize, every: Nanos| every * gateway as u64 / setup.gateways as u64;
            let name = move |gateway: usize| (setup.workers + before + gateway) as u32;
            every.into_iter().flat_map(move |every| {
                (0..setup.gateways).map(move |gateway| Reverse((first_look(gateway, every), name(gateway))))
            })
        };
        let peers = setup.peers_ns.filter(|_| setup.gateways > 1);
        Self {
            workload,
            setup,
            gateways: (0..setup.gateways).map(|_| Gateway::new(setup)).collect(),
            engines: (0..setup.workers).map(|_| engine()).collect(),
            flights: (0..setup.workers).map(|_| Vec::new()).collect(),
            events: looks(setup.scrape_ns, 0).chain(looks(peers, setup.gateways)).collect(),
            planned: vec![None; setup.workers],
            scrapes_until: Nanos::MAX,
            random: workload.seed,
            outcome: Outcome::new(setup.workers),
        }
    }

    /// Does all that happens before `until`, or at it.
    fn advance(&mut self, until: Nanos) {
        loop {
            let event = self.events.peek().map(|&Reverse((at, who))| (at, Err(who as usize)));
            let wakes = self.gateways.iter().enumerate();
            let wakes =
                wakes.filter_map(|(g, gateway)| Some((gateway.room.wake()?.as_nanos() as Nanos, Ok(g))));
            let Some((at, who)) = event.into_iter().chain(wakes).min_by_key(|(at, _)| *at) else { return };
            if at > until {
                return;
            }
            let who = match who {
                Ok(gateway) => {
                    self.release(gateway, at);
                    continue;
                }
                Err(who) => who,
            };
            self.events.pop();
            if let Some(gateway) = who.checked_sub(self.setup.workers + self.gateways.len()) {
                self.hear(gateway, at);
            } else if let Some(gateway) = who.checked_sub(self.setup.workers) {
                self.look(gateway, at);
            } else if self.planned[who] == Some(at) {
                self.advance_worker(who, at);
                self.plan(who);
                for gateway in 0..self.gateways.len() {
                    if self.gateways[gateway].take_changed(who) && !self.gateways[gateway].room.is_empty() {
                        self.release(gateway, at);
                    }
                }
            }
        }
    }

    /// A gateway looks at the gauges of all workers.
    fn look(&mut self, gateway: usize, at: Nanos) {
        for worker in 0..self.engines.len() {
            self.advance_worker(worker, at);
            self.plan(worker);
            self.gateways[gateway].look(worker, at, &self.engines[worker], self.setup.gauges_count_tokens);
        }
        if let Some(every) = self.setup.scrape_ns.filter(|_| at < self.scrapes_until) {
            self.events.push(Reverse((at + every, (self.setup.workers + gateway) as u32)));
        }
        self.release(gateway, at);
    }

    /// A gateway hears what the others have at each worker.
    fn hear(&mut self, gateway: usize, at: Nanos) {
        for worker in 0..self.engines.len() {
            let others = self.gateways.iter().enumerate().filter(|(other, _)| *other != gateway);
            let told = others.fold(OwnLoad::default(), |sum, (_, other)| sum.and(other.told(worker, at)));
            self.gateways[gateway].hear(worker, at, told);
        }
        if let Some(every) = self.setup.peers_ns.filter(|_| at < self.scrapes_until) {
            let name = self.setup.workers + self.gateways.len() + gateway;
            self.events.push(Reverse((at + every, name as u32)));
        }
        self.release(gateway, at);
    }

    /// Begins what can begin now.
    fn release(&mut self, gateway: usize, at: Nanos) {
        // Out of the way, because the clerk works with all the rest.
        let empty = WaitingRoom::new(RoomRules::default());
        let mut room = std::mem::replace(&mut self.gateways[gateway].room, empty);
        room.release(Duration::from_nanos(at), &mut Clerk::new(self, gateway, at));
        self.gateways[gateway].room = room;
    }

    fn advance_worker(&mut self, worker: usize, until: Nanos) {
        let mut counting = Counting {
            worker,
            gateways: &mut self.gateways,
            flights: &mut self.flights[worker],
            outcome: &mut self.outcome,
            slo: &self.workload.slo,
        };
        self.engines[worker].advance(until, &mut counting);
        self.announce(worker);
    }

    /// Tells every gateway what has changed in a worker's cache.
    fn announce(&mut self, worker: usize) {
        if !self.setup.events || !self.engines[worker].has_changes() {
            return;
        }
        let changes = self.engines[worker].take_changes();
        let pool = self.engines[worker].pool();
        for change in changes {
            match change {
                Change::Stored { request, first, count } => {
                    let chain = &self.flights[worker][request.slot as usize].chain;
                    let blocks = first as usize..(first + count) as usize;
                    self.gateways
                        .iter_mut()
                        .for_each(|gateway| gateway.stored(worker, chain, blocks.clone()));
                }
                // Others of that name may remain.
                Change::Removed(block) if pool.cached(&[block]) == 0 => {
                    self.gateways.iter_mut().for_each(|gateway| gateway.removed(worker, block));
                }
                Change::Removed(_) => {}
            }
        }
    }

    fn plan(&mut self, worker: usize) {
        // Only first and last tokens change what the router sees.
        let next = self.engines[worker].quiet_until();
        if self.planned[worker] != next {
            self.planned[worker] = next;
            self.events.extend(next.map(|at| Reverse((at, worker as u32))));
        }
    }

    fn arrive(&mut self, at: Nanos, copy: u64, row: usize) {
        let gateway = match self.gateways.len() {
            1 => 0,
            several => (splitmix(self.workload.seed ^ splitmix(at ^ row as u64)) % several as u64) as usize,
        };
        let arrival = Arrival::new(self.workload, self.setup, at, copy, row);
        let alone = self.gateways[gateway].room.is_empty();
        let own_ms = if alone { None } else { Clerk::new(self, gateway, at).own_ms(&arrival) };
        self.gateways[gateway].room.enter(Duration::from_nanos(at), own_ms, arrival);
        self.release(gateway, at);
    }

    /// Sends a request to a worker, of which `uncached` tokens are expected to be computed.
    pub(super) fn send(
        &mut self,
        at: Nanos,
        (gateway, worker): (usize, usize),
        arrival: Arrival,
        placement: Placement,
        uncached: u64,
    ) {
        let submission = Submission {
            prompt_tokens: arrival.prompt_tokens as u32,
            output_tokens: arrival.output_tokens,
            chain: arrival.chain.clone().into(),
        };
        // Its tokens in between were not waited for.
        self.advance_worker(worker, at);
        let Ok(RequestId { slot, .. }) = self.engines[worker].submit(at, submission) else {
            self.outcome.refused += 1;
            self.gateways[gateway].index.withdraw(placement);
            return;
        };
        let Arrival { at: arrived, prompt_tokens, chain, .. } = arrival;
        let (waiting, tokens_before_first) = self.gateways[gateway].sent(worker, at, prompt_tokens, uncached);
        let flights = &mut self.flights[worker];
        let slot = slot as usize;
        if flights.len() <= slot {
            flights.resize_with(slot + 1, Flight::default);
        }
        flights[slot] = Flight {
            arrived,
            sent: at,
            first: 0,
            waiting: Some(waiting),
            prompt_tokens,
            tokens_before_first,
            gateway,
            placement: Some(placement),
            chain: if self.setup.events { chain } else { Vec::new() },
        };
        self.outcome.taken(worker, prompt_tokens);
        self.plan(worker);
    }

    fn finish(mut self) -> Outcome {
        self.outcome.preemptions = self.engines.iter().map(|engine| engine.totals().preemptions).sum();
        self.outcome.steps = self.engines.iter().map(|engine| engine.totals().steps).sum();
        self.outcome
    }
}

// === impl Counting ===

impl Listener for Counting<'_> {
    fn token(&mut self, token: Token) {
        if token.number > 1 && !token.last {
            return;
        }
        let flight = &mut self.flights[token.request.slot as usize];
        let gateway = &mut self.gateways[flight.gateway];
        if token.number == 1 {
            flight.first = token.at;
            if let Some(waiting) = flight.waiting.take() {
                let took = Duration::from_nanos(token.at - flight.sent);
                gateway.first_token(self.worker, token.at, &waiting, (flight.tokens_before_first, took));
            }
            // The prompt is computed, and the worker has made room for it.
            flight.placement = flight.placement.take().filter(Placement::is_expected);
            self.outcome.first_token(token.at - flight.arrived, token.cached_tokens);
        }
        if token.last {
            gateway.ended(self.worker, flight.prompt_tokens, flight.placement.take());
            let gaps = u64::from(token.number - 1);
            let tpot = (token.at - flight.first).checked_div(gaps);
            let (ttft, e2e) = (flight.first - flight.arrived, token.at - flight.arrived);
            let good = self.slo.met_by(|metric| match metric {
                Metric::Ttft => Some(Duration::from_nanos(ttft)),
                Metric::Tpot => tpot.map(Duration::from_nanos),
                Metric::Ttst => None,
                Metric::E2e => Some(Duration::from_nanos(e2e)),
            });
            self.outcome.done(token.at, e2e, tpot, token.number, good);
        }
    }
}
