//! A fleet in virtual time: arrivals routed by the gateway's own core, engines advanced to whatever happens next.
//! Deterministic: the same arrivals and the same seed give the same run, on any machine.

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

use keyway_core::{
    Load, LoadSnapshot, PrefixIndex, RoomRules, WaitingRoom, WorkerId,
    pace::Waiting,
    pick::Candidate,
    rate::{PrefillRate, relative_speeds, tokens_per_ms},
};

use super::{
    contender::Contender,
    outcome::Outcome,
    routing::{Arrival, Clerk},
    ticker::Ticker,
};
use crate::{
    engine_model::{Engine, Listener, Nanos, Profile, Submission, Token},
    schedule::Due,
    slo::{Metric, Slo},
    trace::Trace,
    workload::scale::Scale,
};

/// Choices after which the workers' fitted speeds are looked at again.
const SPEEDS_EVERY: u64 = 64;

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
    pub(super) policy: Contender,
    /// Bytes of the router's index.
    pub(super) index_bytes: usize,
    /// Prompt tokens in one block of the router's chain.
    pub(super) index_block_tokens: u32,
    /// Whether the index is told the size of each worker's cache.
    pub(super) index_knows_capacity: bool,
    /// Whether requests wait in the router until a worker can begin on them.
    pub(super) hold: bool,
    /// Decides all hashes.
    pub(super) hash_seed: u32,
}

/// Replays the workload.
pub(super) fn replay(workload: &Workload, setup: &FleetSetup) -> Outcome {
    let mut run = Run::new(workload, setup);
    let what = format!("{} on {} workers", setup.policy.as_str(), setup.workers);
    let mut ticker = Ticker::new(what, workload.copies * workload.schedule.len() as u64);
    let arrivals = (0..workload.copies).flat_map(|copy| workload.schedule.iter().map(move |due| (copy, due)));
    for (copy, due) in arrivals {
        let at = due.intended_ns + copy * workload.copy_ns;
        run.advance(at);
        run.arrive(at, copy, due.row);
        ticker.tick();
    }
    run.advance(Nanos::MAX);
    run.finish()
}

pub(super) struct Run<'a> {
    pub(super) workload: &'a Workload,
    pub(super) setup: &'a FleetSetup,
    pub(super) index: PrefixIndex,
    room: WaitingRoom<Arrival>,
    engines: Vec<Engine>,
    /// When to look at which worker: a min-heap; an entry whose engine has other plans by now is skipped.
    events: BinaryHeap<Reverse<(Nanos, u32)>>,
    planned: Vec<Option<Nanos>>,
    desks: Vec<Desk>,
    /// Each worker's prompt tokens per millisecond, as fitted lately.
    speeds: Vec<f64>,
    /// Choices made when they are looked at again.
    speeds_until: u64,
    /// Choices made.
    pub(super) counter: u64,
    pub(super) random: u64,
    outcome: Outcome,
}

/// What is known of one worker's requests.
#[derive(Debug, Default)]
struct Desk {
    load: Load,
    rate: PrefillRate,
    flights: Vec<Flight>,
    /// Prompt tokens of the requests under way.
    context_tokens: u64,
    /// Whether a first or last token came since the router last looked.
    changed: bool,
}

/// A request under way.
#[derive(Debug, Default)]
struct Flight {
    arrived: Nanos,
    sent: Nanos,
    first: Nanos,
    waiting: Option<Waiting>,
    prompt_tokens: u64,
    /// Prompt tokens that the router expected to be computed there before its first token, its own among them.
    tokens_before_first: u64,
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
            room: WaitingRoom::new(RoomRules::default()),
            engines: (0..setup.workers).map(|_| Engine::new(setup.profile.clone())).collect(),
            events: BinaryHeap::new(),
            planned: vec![None; setup.workers],
            desks: (0..setup.workers).map(|_| Desk::default()).collect(),
            speeds: Vec::new(),
            speeds_until: 0,
            counter: 0,
            random: workload.seed,
            outcome: Outcome::new(setup.workers),
        }
    }

    /// Does all that happens before `until`, or at it.
    fn advance(&mut self, until: Nanos) {
        loop {
            let event = self.events.peek().map(|&Reverse((at, worker))| (at, Some(worker)));
            let wake = self.room.wake().map(|at| (at.as_nanos() as Nanos, None));
            let Some((at, worker)) = event.into_iter().chain(wake).min_by_key(|(at, _)| *at) else { return };
            if at > until {
                return;
            }
            let Some(worker) = worker else {
                self.release(at);
                continue;
            };
            self.events.pop();
            let worker = worker as usize;
            if self.planned[worker] == Some(at) {
                self.advance_worker(worker, at);
                self.plan(worker);
                if std::mem::take(&mut self.desks[worker].changed) && !self.room.is_empty() {
                    self.release(at);
                }
            }
        }
    }

    /// Begins what can begin now.
    fn release(&mut self, at: Nanos) {
        // Out of the way, because the clerk works with all the rest.
        let mut room = std::mem::replace(&mut self.room, WaitingRoom::new(RoomRules::default()));
        room.release(Duration::from_nanos(at), &mut Clerk::new(self, at));
        self.room = room;
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

    fn arrive(&mut self, at: Nanos, copy: u64, row: usize) {
        let arrival = Arrival::new(self.workload, self.setup, at, copy, row);
        let own_ms = if self.room.is_empty() { None } else { Clerk::new(self, at).own_ms(&arrival) };
        self.room.enter(Duration::from_nanos(at), own_ms, arrival);
        self.release(at);
    }

    /// The workers, without what they hold.
    pub(super) fn candidates(&mut self, at: Nanos) -> Vec<Candidate> {
        if self.counter >= self.speeds_until {
            self.speeds_until = self.counter + SPEEDS_EVERY;
            let rates: Vec<_> = self.desks.iter().map(|desk| desk.rate.tokens_per_second()).collect();
            self.speeds = tokens_per_ms(&rates, &relative_speeds(&rates));
        }
        let now = Duration::from_nanos(at);
        let of = |((worker, desk), &tokens_per_ms): ((u32, &Desk), &f64)| Candidate {
            worker: WorkerId(worker),
            load: desk.load.snapshot(now, tokens_per_ms),
            ahead_ms: 0.0,
            matched_blocks: 0,
            tokens_per_ms,
            weight: 1.0,
        };
        (0u32..).zip(&self.desks).zip(&self.speeds).map(of).collect()
    }

    /// Prompt tokens under way at each worker.
    pub(super) fn contexts(&self) -> Vec<u64> {
        self.desks.iter().map(|desk| desk.context_tokens).collect()
    }

    /// What one worker is doing.
    pub(super) fn load(&self, worker: usize, at: Nanos) -> LoadSnapshot {
        self.desks[worker].load.snapshot(Duration::from_nanos(at), self.speeds[worker])
    }

    /// Sends a request to a worker, of which `uncached` tokens are expected to be computed.
    pub(super) fn send(&mut self, at: Nanos, worker: usize, arrival: Arrival, uncached: u64) {
        let submission = Submission {
            prompt_tokens: arrival.prompt_tokens as u32,
            output_tokens: arrival.output_tokens,
            chain: arrival.chain.into(),
        };
        // Its tokens in between were not waited for.
        self.advance_worker(worker, at);
        let Ok(id) = self.engines[worker].submit(at, submission) else {
            self.outcome.refused += 1;
            return;
        };
        let desk = &mut self.desks[worker];
        let tokens_before_first = desk.load.waiting_prefill_tokens() + uncached;
        let waiting = Some(desk.load.start(Duration::from_nanos(at), uncached, true));
        let slot = id.slot as usize;
        if desk.flights.len() <= slot {
            desk.flights.resize_with(slot + 1, Flight::default);
        }
        let Arrival { at: arrived, prompt_tokens, .. } = arrival;
        desk.flights[slot] =
            Flight { arrived, sent: at, first: 0, waiting, prompt_tokens, tokens_before_first };
        desk.context_tokens += prompt_tokens;
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
        let flight = &mut self.desk.flights[token.request.slot as usize];
        if token.number == 1 {
            flight.first = token.at;
            if let Some(waiting) = flight.waiting.take() {
                self.desk.load.first_token(Duration::from_nanos(token.at), &waiting);
            }
            let seconds = Duration::from_nanos(token.at - flight.sent).as_secs_f64();
            self.desk.rate.observe(flight.tokens_before_first, seconds);
            self.desk.changed = true;
            self.outcome.first_token(token.at - flight.arrived, token.cached_tokens);
        }
        if token.last {
            self.desk.load.end();
            self.desk.context_tokens -= flight.prompt_tokens;
            self.desk.changed = true;
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
