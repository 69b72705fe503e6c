//! A fleet in virtual time: arrivals routed by the gateway's own core, engines advanced to whatever happens
//! next. Deterministic: the same arrivals and the same seed give the same run, on any machine.

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

use keyway_core::{OwnLoad, RoomRules, WaitingRoom, index::Placement, told::Told};

use super::{
    at_once::AtOnce,
    counting::{Counting, Flight, Leg},
    gateway::Gateway,
    hearing::Hearing,
    outcome::Outcome,
    routing::{Arrival, Clerk},
    sessions::{Judged, SessionCount},
    ticker::Ticker,
    transit::{Answering, Computed, Legs, Transit},
    turns::{Begins, Coming, TurnGraph, Turns},
};
use crate::{
    args::contender::Contender,
    engine_model::{Change, Engine, Nanos, Profile, RequestId, Submission},
    random::splitmix,
    schedule::Due,
    slo::Slo,
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
    /// Which turns follow which, where the trace tells.
    pub(super) graph: Option<TurnGraph>,
    /// Sessions that go on at once; `None`: each begins at its recorded time.
    pub(super) at_once: Option<usize>,
    /// Whether engines keep answers cached as far as a later turn goes on from them.
    pub(super) caches_answers: bool,
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
    /// Whether its names are those of a text's spans.
    pub(super) index_by_text: bool,
    /// Whether the index is told the size of each worker's cache.
    pub(super) index_knows_capacity: bool,
    /// Whether requests wait in the router until a worker can begin on them.
    pub(super) hold: bool,
    /// Whether whole sessions wait where caches cannot hold them all.
    pub(super) pauses: bool,
    /// Whether clients say their session's name.
    pub(super) names_sessions: bool,
    /// What its placements are compared with.
    pub(super) judged: Judged,
    /// Seconds of engine time in one second.
    pub(super) engine_speed: f64,
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
    /// Which workers are for what, and whether KV moves between them.
    pub(super) legs: Legs,
    /// Whether the time between any two tokens is counted.
    pub(super) itl: bool,
    /// How they hear of each other's placements; `None`: they do not.
    pub(super) told: Option<Hearing>,
}

// === impl FleetSetup ===

impl FleetSetup {
    /// Whether a gateway goes by what it sends itself alone, and each request is computed where it is sent.
    pub(super) fn knows_own_requests_alone(&self) -> bool {
        let moves = self.legs.prefill > 0 || self.legs.pulls;
        self.scrape_ns.is_none() && self.peers_ns.is_none() && !moves
    }
}

/// Replays the workload in virtual time, until the last answer has ended.
pub(super) fn replay(workload: &Workload, setup: &FleetSetup) -> Outcome {
    let mut run = Run::new(workload, setup);
    let what = format!("{} on {} workers", setup.policy.as_str(), setup.workers);
    let mut ticker = Ticker::new(what, workload.copies * workload.schedule.len() as u64);
    if run.turns.is_some() {
        return replay_turns(run, &mut ticker);
    }
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

/// Replays turns as they come of each other.
fn replay_turns(mut run: Run<'_>, ticker: &mut Ticker) -> Outcome {
    loop {
        let next = run.turns.as_ref().and_then(Turns::next_at);
        // What happens first may let a turn come that is before all that are known.
        if run.step(next.unwrap_or(Nanos::MAX)) {
            if run.turns.as_ref().is_none_or(Turns::is_over) {
                run.scrapes_until = 0;
            }
            continue;
        }
        let Some(Coming { at, copy, row, .. }) = run.turns.as_mut().and_then(Turns::pop) else {
            return run.finish();
        };
        run.arrive(at, copy, row as usize);
        ticker.tick();
    }
}

pub(super) struct Run<'a> {
    pub(super) workload: &'a Workload,
    pub(super) setup: &'a FleetSetup,
    pub(super) gateways: Vec<Gateway>,
    pub(super) engines: Vec<Engine>,
    flights: Vec<Vec<Flight>>,
    /// When to look at which worker, or, counted on from the workers, which gateway looks at the gauges: a
    /// min-heap; an entry whose engine has other plans by now is skipped.
    events: BinaryHeap<Reverse<(Nanos, u32)>>,
    pub(super) at_once: AtOnce,
    /// KV on its way between workers.
    pub(super) transit: Transit,
    /// Prompts that were computed for other workers, which are told next.
    pub(super) computed: Vec<Computed>,
    /// Requests whose worker that answers is chosen, and whose prompt another one is to compute: with the
    /// gateway whose room they enter next, and when.
    pub(super) first_legs: Vec<(Nanos, usize, Arrival)>,
    planned: Vec<Option<Nanos>>,
    /// When gateways no longer look at the gauges: else the run would never end.
    scrapes_until: Nanos,
    pub(super) random: u64,
    /// The turns to come, where each comes of others.
    turns: Option<Turns<'a>>,
    pub(super) outcome: Outcome,
}

// === impl Run ===

impl<'a> Run<'a> {
    fn new(workload: &'a Workload, setup: &'a FleetSetup) -> Self {
        let engine = || {
            let mut engine = Engine::new(setup.profile.clone());
            engine.slow_down(1.0 / setup.engine_speed);
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
        let Workload { copies, copy_ns, at_once, .. } = *workload;
        let begins = Begins { at_once, copies, copy_ns };
        let sessions = workload.graph.as_ref().map(|graph| {
            let all = graph.sessions() * copies as usize;
            SessionCount::new((all, at_once), setup.profile.block_tokens, setup.judged)
        });
        Self {
            workload,
            setup,
            gateways: (0..setup.gateways).map(|_| Gateway::new(setup)).collect(),
            engines: (0..setup.workers).map(|_| engine()).collect(),
            flights: (0..setup.workers).map(|_| Vec::new()).collect(),
            events: looks(setup.scrape_ns, 0).chain(looks(peers, setup.gateways)).collect(),
            at_once: AtOnce::new(setup.gateways, peers),
            transit: Transit::new(setup.workers),
            computed: Vec::new(),
            first_legs: Vec::new(),
            planned: vec![None; setup.workers],
            scrapes_until: Nanos::MAX,
            random: workload.seed,
            turns: workload.graph.as_ref().map(|graph| Turns::new(graph, begins)),
            outcome: Outcome::new(setup.workers, sessions),
        }
    }

    /// Does all that happens before `until`, or at it.
    fn advance(&mut self, until: Nanos) {
        while self.step(until) {}
    }

    /// Does what happens next, if that is not after `until`.
    fn step(&mut self, until: Nanos) -> bool {
        let event = self.events.peek().map(|&Reverse((at, who))| (at, Err(who as usize)));
        let wakes = self.gateways.iter().enumerate();
        let wakes = wakes.filter_map(|(g, gateway)| Some((gateway.room.wake()?.as_nanos() as Nanos, Ok(g))));
        let next = event.into_iter().chain(wakes).min_by_key(|(at, _)| *at);
        let kv = self.transit.next_at().filter(|at| *at <= until);
        if kv.is_some_and(|kv| next.is_none_or(|(at, _)| kv <= at)) {
            self.arrive_with_kv();
            return true;
        }
        let Some((at, who)) = next.filter(|(at, _)| *at <= until) else { return false };
        let who = match who {
            Ok(gateway) => {
                self.release(gateway, at, true);
                return true;
            }
            Err(who) => who,
        };
        self.events.pop();
        if let Some(gateway) = who.checked_sub(self.setup.workers + 2 * self.gateways.len()) {
            self.hear_at_once(gateway, at);
        } else if let Some(gateway) = who.checked_sub(self.setup.workers + self.gateways.len()) {
            self.hear(gateway, at);
        } else if let Some(gateway) = who.checked_sub(self.setup.workers) {
            self.look(gateway, at);
        } else if self.planned[who] == Some(at) {
            self.advance_worker(who, at);
            self.plan(who);
            for gateway in 0..self.gateways.len() {
                if self.gateways[gateway].take_changed(who) && !self.gateways[gateway].room.is_empty() {
                    self.release(gateway, at, true);
                }
            }
        }
        true
    }

    /// A gateway has sent a request to a worker.
    pub(super) fn tell_at_once(&mut self, gateway: usize, worker: usize, at: Nanos) {
        let name = self.setup.workers + 2 * self.gateways.len() + gateway;
        let heard = self.at_once.sent(gateway, worker, at);
        self.events.extend(heard.map(|at| Reverse((at, name as u32))));
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
        self.release(gateway, at, true);
    }

    /// A gateway hears what the others have at each worker.
    fn hear(&mut self, gateway: usize, at: Nanos) {
        for worker in 0..self.engines.len() {
            let others = self.gateways.iter().enumerate().filter(|(other, _)| *other != gateway);
            let told = others.fold(OwnLoad::default(), |sum, (_, other)| sum.and(other.told(worker, at)));
            self.gateways[gateway].hear(worker, at, told);
        }
        self.hear_placements(gateway, at);
        if let Some(every) = self.setup.peers_ns.filter(|_| at < self.scrapes_until) {
            let name = self.setup.workers + self.gateways.len() + gateway;
            self.events.push(Reverse((at + every, name as u32)));
        }
        self.release(gateway, at, true);
    }

    /// Begins what can begin now. `others_wait`: whether requests waited before.
    pub(super) fn release(&mut self, gateway: usize, at: Nanos, others_wait: bool) {
        self.release_room(gateway, at, others_wait);
        self.enter_first_legs();
    }

    pub(super) fn release_room(&mut self, gateway: usize, at: Nanos, others_wait: bool) {
        // Out of the way, because the clerk works with all the rest.
        let empty = WaitingRoom::new(RoomRules::default());
        let mut room = std::mem::replace(&mut self.gateways[gateway].room, empty);
        room.release(Duration::from_nanos(at), &mut Clerk::new(self, gateway, at, others_wait));
        self.gateways[gateway].room = room;
    }

    pub(super) fn advance_worker(&mut self, worker: usize, until: Nanos) {
        let mut counting = Counting {
            worker,
            gateways: &mut self.gateways,
            flights: &mut self.flights[worker],
            turns: self.turns.as_mut(),
            outcome: &mut self.outcome,
            computed: &mut self.computed,
            slo: &self.workload.slo,
            itl: self.setup.itl,
        };
        self.engines[worker].advance(until, &mut counting);
        self.announce(worker);
        self.hand_over_all();
    }

    /// Tells every gateway what has changed in a worker's cache.
    fn announce(&mut self, worker: usize) {
        if !self.setup.events || !self.engines[worker].has_changes() {
            return;
        }
        let changes = self.engines[worker].take_changes();
        let engine = &self.engines[worker];
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
                Change::Removed(block) if !engine.holds(block) => {
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
        let mut arrival = Arrival::new(self.workload, self.setup, at, copy, row);
        let alone = self.gateways[gateway].room.is_empty();
        let mut clerk = Clerk::new(self, gateway, at, !alone);
        clerk.note_new(&mut arrival);
        let own_ms = if alone { None } else { clerk.own_ms(&arrival) };
        self.gateways[gateway].room.enter(Duration::from_nanos(at), own_ms, arrival);
        self.release(gateway, at, !alone);
    }

    /// A turn begins; `paused`: for how long its session was paused, if it was.
    pub(super) fn paused(&mut self, paused: Option<Duration>) {
        if let (Some(sessions), Some(paused)) = (&mut self.outcome.sessions, paused) {
            sessions.paused(paused);
        }
    }

    /// The fleet's caches have no room for a request; those that wait for its answer come nevertheless.
    fn refuse(&mut self, at: Nanos, gateway: usize, arrival: &Arrival) {
        self.outcome.refused += 1;
        self.gateways[gateway].turn_ended(at, arrival.session(), arrival.prompt_tokens, None);
        let (copy, row) = arrival.source;
        let session = self.turns.as_mut().and_then(|turns| turns.ended(at, copy, row));
        if let Some(sessions) = &mut self.outcome.sessions {
            sessions.ended(at, session);
        }
    }

    /// Sends a request to a worker, of which `uncached` tokens are expected to be computed.
    pub(super) fn send(
        &mut self,
        at: Nanos,
        (gateway, worker): (usize, usize),
        arrival: Arrival,
        (placement, told): (Placement, Option<Told>),
        uncached: u64,
    ) {
        let flight = Flight { gateway, sent: at, placement: Some(placement), told, ..Flight::default() };
        self.launch(at, worker, arrival, (flight, 0), Some(uncached));
    }

    /// Submits a request to a worker. `fetched_tokens` of it have come from another worker; `uncached`: the
    /// tokens that are expected to be computed, where its gateway has not counted them there yet.
    pub(super) fn launch(
        &mut self,
        at: Nanos,
        worker: usize,
        arrival: Arrival,
        (mut flight, fetched_tokens): (Flight, u32),
        uncached: Option<u64>,
    ) {
        let is_first_leg = arrival.answering.is_some();
        let submission = Submission {
            prompt_tokens: arrival.prompt_tokens as u32,
            output_tokens: if is_first_leg { 1 } else { arrival.output_tokens },
            chain: arrival.cached_chain().into(),
            fetched_tokens,
        };
        // Its tokens in between were not waited for.
        self.advance_worker(worker, at);
        let Ok(RequestId { slot, .. }) = self.engines[worker].submit(at, submission) else {
            self.give_up(at, worker, arrival, (flight, uncached.is_none()));
            return;
        };
        let (prompt_tokens, source) = (arrival.prompt_tokens, arrival.source);
        if let Some(uncached) = uncached {
            let (waiting, before) = self.gateways[flight.gateway].sent(worker, at, prompt_tokens, uncached);
            (flight.waiting, flight.before) = (Some(waiting), before);
        }
        (flight.arrived, flight.prompt_tokens, flight.source) = (arrival.at, prompt_tokens, source);
        flight.session = arrival.session();
        if self.setup.events {
            flight.chain = arrival.cached_chain().to_vec();
        }
        if is_first_leg {
            flight.leg = Leg::First(Box::new(arrival));
        } else {
            let link = self.workload.trace.links.as_ref().map(|links| &links[source.1 as usize]);
            if let Some((sessions, link)) = self.outcome.sessions.as_mut().zip(link) {
                let asked = (arrival.cached_chain(), prompt_tokens);
                flight.cache_use = sessions.sent(asked, (source.0, link), worker);
            }
            self.outcome.taken(worker, prompt_tokens);
        }
        let (flights, slot) = (&mut self.flights[worker], slot as usize);
        if flights.len() <= slot {
            flights.resize_with(slot + 1, Flight::default);
        }
        flights[slot] = flight;
        self.plan(worker);
    }

    /// A worker has no room for a request, which `counted` at it.
    fn give_up(&mut self, at: Nanos, worker: usize, mut arrival: Arrival, (flight, counted): (Flight, bool)) {
        let gateway = &mut self.gateways[flight.gateway];
        if counted && matches!(flight.leg, Leg::Handed { .. }) {
            gateway.comes_from_elsewhere(worker);
        }
        if counted {
            gateway.gave_up(worker, at, flight.waiting.as_ref(), arrival.prompt_tokens);
        }
        if let Some(placement) = flight.placement {
            gateway.withdraw(at, placement, flight.told);
        }
        if let Some(Answering { worker, .. }) = arrival.answering.take() {
            gateway.comes_from_elsewhere(worker);
            gateway.gave_up(worker, at, None, arrival.prompt_tokens);
        }
        self.refuse(at, flight.gateway, &arrival);
    }

    fn finish(mut self) -> Outcome {
        self.outcome.preemptions = self.engines.iter().map(|engine| engine.totals().preemptions).sum();
        self.outcome.evicted_blocks = self.engines.iter().map(|engine| engine.totals().evicted_blocks).sum();
        self.outcome.caches = (self.setup.workers, self.setup.profile.kv_blocks as usize);
        self.outcome.steps = self.engines.iter().map(|engine| engine.totals().steps).sum();
        self.outcome
    }
}
