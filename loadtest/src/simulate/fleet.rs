//! A fleet in virtual time: arrivals routed by the gateway's own core, engines advanced to whatever happens next.
//! Deterministic: the same arrivals and the same seed give the same run, on any machine.

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

use keyway_core::{
    Load, PrefixIndex, WorkerId,
    pick::{Candidate, Policy, RequestView, Turn},
    route,
};
use keyway_wire::block_hash::BlockHash;

use super::{outcome::Outcome, prompts};
use crate::{
    engine_model::{Engine, Listener, Nanos, Profile, Submission, Token},
    schedule::Due,
    slo::{Metric, Slo},
    trace::Trace,
    workload::{prompt::splitmix, scale::Scale},
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

/// The fleet.
#[derive(Debug, Clone)]
pub(super) struct FleetSetup {
    pub(super) workers: usize,
    pub(super) profile: Profile,
    pub(super) policy: Policy,
    /// Bytes of the router's index.
    pub(super) index_bytes: usize,
    /// Prompt tokens in one block of the router's chain.
    pub(super) index_block_tokens: u32,
    /// Whether the index is told the size of each worker's cache.
    pub(super) index_knows_capacity: bool,
    /// Decides all hashes.
    pub(super) hash_seed: u32,
}

/// Replays the workload.
pub(super) fn replay(workload: &Workload, setup: &FleetSetup) -> Outcome {
    let mut run = Run::new(workload, setup);
    let arrivals = (0..workload.copies).flat_map(|copy| workload.schedule.iter().map(move |due| (copy, due)));
    for (copy, due) in arrivals {
        let at = due.intended_ns + copy * workload.copy_ns;
        run.advance(at);
        run.arrive(at, copy, due.row);
    }
    run.advance(Nanos::MAX);
    run.finish()
}

struct Run<'a> {
    workload: &'a Workload,
    setup: &'a FleetSetup,
    index: PrefixIndex,
    engines: Vec<Engine>,
    /// When to look at which worker: a min-heap; an entry whose engine has other plans by now is skipped.
    events: BinaryHeap<Reverse<(Nanos, u32)>>,
    planned: Vec<Option<Nanos>>,
    desks: Vec<Desk>,
    counter: u64,
    random: u64,
    outcome: Outcome,
}

/// What is known of one worker's requests.
#[derive(Debug, Default)]
struct Desk {
    load: Load,
    flights: Vec<Flight>,
}

/// A request under way.
#[derive(Debug, Clone, Copy, Default)]
struct Flight {
    arrived: Nanos,
    first: Nanos,
    /// Prompt tokens that the router expected to be computed.
    uncached: u64,
}

/// One worker's desk and the run's figures, while its engine is advanced.
struct Counting<'a> {
    desk: &'a mut Desk,
    outcome: &'a mut Outcome,
    slo: &'a Slo,
}

// === impl Run ===

impl<'a> Run<'a> {
    fn new(workload: &'a Workload, setup: &'a FleetSetup) -> Self {
        let mut index = PrefixIndex::new(setup.index_bytes);
        if setup.index_knows_capacity {
            let blocks = setup.profile.kv_tokens() / u64::from(setup.index_block_tokens);
            (0..setup.workers as u32).for_each(|w| index.set_capacity(WorkerId(w), Some(blocks as usize)));
        }
        Self {
            workload,
            setup,
            index,
            engines: (0..setup.workers).map(|_| Engine::new(setup.profile.clone())).collect(),
            events: BinaryHeap::new(),
            planned: vec![None; setup.workers],
            desks: (0..setup.workers).map(|_| Desk::default()).collect(),
            counter: 0,
            random: workload.seed,
            outcome: Outcome::new(setup.workers),
        }
    }

    /// Does all that happens before `until`, or at it.
    fn advance(&mut self, until: Nanos) {
        while let Some(&Reverse((at, worker))) = self.events.peek() {
            if at > until {
                return;
            }
            self.events.pop();
            let worker = worker as usize;
            if self.planned[worker] == Some(at) {
                self.advance_worker(worker, at);
                self.plan(worker);
            }
        }
    }

    fn advance_worker(&mut self, worker: usize, until: Nanos) {
        let mut counting =
            Counting { desk: &mut self.desks[worker], outcome: &mut self.outcome, slo: &self.workload.slo };
        self.engines[worker].advance(until, &mut counting);
    }

    fn plan(&mut self, worker: usize) {
        // Only first and last tokens change what the router sees.
        let next = self.engines[worker].quiet_until();
        if self.planned[worker] != next {
            self.planned[worker] = next;
            self.events.extend(next.map(|at| Reverse((at, worker as u32))));
        }
    }

    fn arrive(&mut self, at: Nanos, copy: u64, index: usize) {
        let (workload, setup) = (self.workload, self.setup);
        let (row, scale) = (&workload.trace.rows[index], workload.scale);
        let prompt_tokens = scale.prompt_tokens(row);
        let own = setup.profile.block_tokens;
        // There are fewer copies than 2^32.
        let key = copy | u64::from(setup.hash_seed) << 32;
        let chain = prompts::chain(scale, index, row, key, own);
        let other = (setup.index_block_tokens != own)
            .then(|| prompts::chain(scale, index, row, key, setup.index_block_tokens));
        let (worker, uncached) = self.route(other.as_deref().unwrap_or(&chain), prompt_tokens);
        let submission = Submission {
            prompt_tokens: prompt_tokens as u32,
            output_tokens: scale.output_tokens(row) as u32,
            chain: chain.into(),
        };
        // Its tokens in between were not waited for.
        self.advance_worker(worker, at);
        let Ok(id) = self.engines[worker].submit(at, submission) else {
            self.outcome.refused += 1;
            return;
        };
        let desk = &mut self.desks[worker];
        desk.load.start(uncached);
        let slot = id.slot as usize;
        if desk.flights.len() <= slot {
            desk.flights.resize_with(slot + 1, Flight::default);
        }
        desk.flights[slot] = Flight { arrived: at, first: 0, uncached };
        self.outcome.taken(worker, prompt_tokens);
        self.plan(worker);
    }

    fn route(&mut self, chain: &[BlockHash], prompt_tokens: u64) -> (usize, u64) {
        let mut candidates: Vec<Candidate> = (0u32..)
            .zip(&self.desks)
            .map(|(worker, desk)| Candidate {
                worker: WorkerId(worker),
                load: desk.load.snapshot(),
                matched_blocks: 0,
                weight: 1.0,
            })
            .collect();
        let view =
            RequestView { chain, prompt_tokens, block_tokens: f64::from(self.setup.index_block_tokens) };
        self.random = splitmix(self.random);
        let turn = Turn { counter: self.counter, random: self.random };
        self.counter += 1;
        // There is at least one worker.
        route(self.setup.policy, &view, &mut candidates, &turn, &mut self.index)
            .map_or((0, prompt_tokens), |(pick, _)| (pick.index, pick.uncached_tokens))
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
        let flight = &mut self.desk.flights[token.request.slot as usize];
        if token.number == 1 {
            flight.first = token.at;
            self.desk.load.first_token(flight.uncached);
            self.outcome.first_token(token.at - flight.arrived, token.cached_tokens);
        }
        if token.last {
            self.desk.load.end();
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
