//! One gateway of a simulated fleet: what it knows of the workers. It learns that from what it sends and what
//! comes back, from the workers' KV events where there are any, and of other gateways from the workers'
//! gauges. Routes nothing: that is `routing.rs`.

use std::{ops::Range, time::Duration};

use keyway_core::{
    EngineLoad, Load, LoadSnapshot, OwnLoad, PrefixIndex, RoomRules, Shortlist, Transfers, WaitingRoom,
    WorkerId,
    index::Placement,
    legs::LeftToCompute,
    others::Shares,
    pace::Waiting,
    pick::{Candidate, RequestView, Turn},
    rate::{PrefillRate, Rates},
    shortlist::Shortlisted,
    ttft::{Before, TtftFit},
    waiting_room::Ahead,
    working_sets::{EndedTurn, WorkingSets},
};
use keyway_wire::block_hash::BlockHash;

use super::{fleet::FleetSetup, hearing::Telling, pauses, routing::Arrival};
use crate::engine_model::{Engine, Nanos};

/// Choices after which the workers' fitted speeds are looked at again.
const SPEEDS_EVERY: u64 = 64;

pub(super) struct Gateway {
    pub(super) index: PrefixIndex,
    pub(super) room: WaitingRoom<Arrival>,
    /// What it tells others of its placements, and what it has heard of theirs; `None`: they do not tell.
    pub(super) telling: Option<Telling>,
    /// Which sessions are paused, where any may be.
    pub(super) sets: Option<WorkingSets>,
    /// What handovers between workers have taken.
    pub(super) transfers: Transfers,
    desks: Vec<Desk>,
    /// Its choice by cost without a price for each worker, where it knows only what it sends itself.
    shortlist: Option<Shortlist>,
    /// Workers of which that has not noted yet what has changed.
    unnoted: Vec<usize>,
    /// Each worker's prompt tokens per millisecond, as fitted lately.
    speeds: Vec<f64>,
    /// Choices made when they are looked at again.
    speeds_until: u64,
    /// Its share of all requests, and that of gateways that tell what they have.
    shares: Shares,
    /// Choices made so far, those that ended in waiting among them; equal workers take turns by it.
    pub(super) counter: u64,
}

/// What is known of one worker's requests.
#[derive(Debug, Default)]
struct Desk {
    load: Load,
    rate: PrefillRate,
    ttft: TtftFit,
    /// Prompt tokens of the requests under way.
    context_tokens: u64,
    /// Whether a first or last token came since the router last looked.
    changed: bool,
    /// Whether it is among those of which the shortlist has not noted what has changed.
    is_unnoted: bool,
}

impl Gateway {
    pub(super) fn new(setup: &FleetSetup) -> Self {
        let telling = setup.told.filter(|_| setup.gateways > 1).map(|_| Telling::new(setup.gateways));
        let mut index = PrefixIndex::new(setup.index_bytes);
        for worker in (0..setup.workers as u32).map(WorkerId) {
            if setup.events {
                index.set_exact(worker, true);
            } else if setup.index_knows_capacity {
                let blocks = setup.profile.kv_tokens() / u64::from(setup.index_block_tokens);
                index.set_capacity(worker, Some(blocks as usize));
            }
        }
        let worker_ids = (0..setup.workers as u32).map(WorkerId);
        Self {
            index,
            room: WaitingRoom::new(RoomRules::default()),
            telling,
            sets: pauses::working_sets(setup),
            transfers: Transfers::default(),
            desks: (0..setup.workers).map(|_| Desk::default()).collect(),
            shortlist: setup.knows_own_requests_alone().then(|| Shortlist::new(worker_ids)),
            unnoted: Vec::new(),
            speeds: Vec::new(),
            speeds_until: 0,
            shares: Shares::default(),
            counter: 0,
        }
    }

    /// Looks at the workers' fitted speeds again, once in a while.
    pub(super) fn look_at_speeds(&mut self) {
        if self.counter < self.speeds_until {
            return;
        }
        self.speeds_until = self.counter + SPEEDS_EVERY;
        let fits: Vec<_> = self.desks.iter().map(|desk| desk.rate.tokens_per_second()).collect();
        let rates = Rates::of(fits.iter().copied(), fits.iter().copied());
        let speed = |fit: &Option<f64>| rates.tokens_per_ms(rates.relative_speed(*fit));
        self.speeds = fits.iter().map(speed).collect();
        for worker in 0..self.desks.len() {
            self.unnote(worker);
        }
    }

    /// Prompt tokens that a worker computes in a millisecond, as fitted lately.
    pub(super) fn tokens_per_ms(&self, worker: usize) -> f64 {
        self.speeds[worker]
    }

    /// The workers, without what they hold.
    pub(super) fn candidates(&mut self, at: Nanos) -> Vec<Candidate> {
        let now = Duration::from_nanos(at);
        let of = |((worker, desk), &tokens_per_ms): ((u32, &Desk), &f64)| {
            let load = desk.load.snapshot(now, tokens_per_ms);
            Candidate::new(WorkerId(worker), load, tokens_per_ms, 1.0)
        };
        let mut candidates: Vec<Candidate> = (0u32..).zip(&self.desks).zip(&self.speeds).map(of).collect();
        self.shares = Shares::of(candidates.iter().map(|candidate| candidate.load.counted));
        for candidate in &mut candidates {
            candidate.load = candidate.load.among(self.shares);
        }
        candidates
    }

    /// Whether some worker's backlog, with what waits `ahead`, is surely no more than this.
    pub(super) fn is_open(&mut self, at: Nanos, backlog_ms: f64, ahead: &Ahead) -> bool {
        self.note_all();
        let shortlist = self.shortlist.as_mut();
        shortlist.is_some_and(|shortlist| shortlist.is_open(Duration::from_nanos(at), backlog_ms, ahead))
    }

    /// The choice by cost, where it needs no price for each worker.
    pub(super) fn shortlisted(
        &mut self,
        at: Nanos,
        view: &RequestView<'_>,
        ahead: &Ahead,
        turn: &Turn,
    ) -> Option<Shortlisted> {
        self.note_all();
        let now = Duration::from_nanos(at);
        let (desks, speeds) = (&self.desks, &self.speeds);
        let candidate = |worker: usize| {
            let load = desks[worker].load.snapshot(now, speeds[worker]);
            Candidate::new(WorkerId(worker as u32), load, speeds[worker], 1.0)
        };
        self.shortlist.as_mut()?.consider(view, ahead, (now, turn), &self.index, candidate)
    }

    /// Lets the shortlist know of a worker before it is asked again.
    fn unnote(&mut self, worker: usize) {
        if self.shortlist.is_some() && !std::mem::replace(&mut self.desks[worker].is_unnoted, true) {
            self.unnoted.push(worker);
        }
    }

    fn note_all(&mut self) {
        let Some(shortlist) = &mut self.shortlist else { return };
        for worker in self.unnoted.drain(..) {
            let desk = &mut self.desks[worker];
            desk.is_unnoted = false;
            shortlist.note(worker, &desk.load, self.speeds[worker]);
        }
    }

    /// What is known of a worker, to be changed.
    fn desk(&mut self, worker: usize) -> &mut Desk {
        self.unnote(worker);
        &mut self.desks[worker]
    }

    /// Prompt tokens under way at each worker.
    pub(super) fn contexts(&self) -> Vec<u64> {
        self.desks.iter().map(|desk| desk.context_tokens).collect()
    }

    /// What one worker is doing.
    pub(super) fn load(&self, worker: usize, at: Nanos) -> LoadSnapshot {
        self.desks[worker].load.snapshot(Duration::from_nanos(at), self.speeds[worker]).among(self.shares)
    }

    /// A request was sent; with what it waits for, and what it finds there.
    pub(super) fn sent(&mut self, worker: usize, at: Nanos, prompt: u64, uncached: u64) -> (Waiting, Before) {
        let (desk, now) = (self.desk(worker), Duration::from_nanos(at));
        desk.context_tokens += prompt;
        let before = desk.load.before(now, desk.rate.tokens_per_second(), uncached);
        (desk.load.start(now, uncached, true), before)
    }

    /// A request will be answered by a worker whose prompt another one computes.
    pub(super) fn sent_handed(&mut self, worker: usize, at: Nanos, prompt: u64) {
        let desk = self.desk(worker);
        desk.context_tokens += prompt;
        desk.load.start_elsewhere(Duration::from_nanos(at));
    }

    /// A request begins whose prompt this worker computes for another one, or would be the one to.
    pub(super) fn asked(&self, worker: usize, at: Nanos, left: LeftToCompute, evenness: f64) {
        self.desks[worker].load.asked(Duration::from_nanos(at), left, evenness);
    }

    /// A worker has refused a request that counted at it.
    pub(super) fn gave_up(&mut self, worker: usize, at: Nanos, waiting: Option<&Waiting>, prompt: u64) {
        if let Some(waiting) = waiting {
            self.desk(worker).load.cancelled(Duration::from_nanos(at), waiting);
        }
        self.ended(worker, prompt, None);
    }

    /// The KV of a request is there whose prompt another worker has computed, or will not come.
    pub(super) fn comes_from_elsewhere(&self, worker: usize) {
        self.desks[worker].load.comes_from_elsewhere();
    }

    /// Milliseconds of prefill that wait at a worker.
    pub(super) fn queue_ms(&self, worker: usize, at: Nanos) -> f64 {
        let Desk { load, rate, .. } = &self.desks[worker];
        let speed = rate.tokens_per_second();
        let left = load.tokens_left(Duration::from_nanos(at), speed) as f64;
        speed.map_or(0.0, |tokens_per_s| left / tokens_per_s * 1e3)
    }

    /// A worker has answered a request whose prompt another computed.
    pub(super) fn handed_over(
        &mut self,
        at: Nanos,
        (from, to): (usize, usize),
        tokens: u64,
        took: (f64, f64),
    ) {
        let pair = (WorkerId(from as u32), WorkerId(to as u32));
        self.comes_from_elsewhere(to);
        self.transfers.observe(Duration::from_nanos(at), pair, tokens, took);
    }

    /// A first token came; `speed`: what its request found and how long that took, where it says something of
    /// the worker's speed. How long it was to take, in milliseconds, where that was predicted.
    pub(super) fn first_token(
        &mut self,
        worker: usize,
        at: Nanos,
        waiting: &Waiting,
        speed: Option<(Before, Duration)>,
    ) -> Option<f64> {
        let desk = self.desk(worker);
        desk.load.first_token(Duration::from_nanos(at), waiting);
        desk.changed = true;
        let (before, took) = speed?;
        desk.rate.observe(before.tokens as u64, took.as_secs_f64());
        desk.ttft.observe(before, took.as_secs_f64() * 1e3)
    }

    /// An answer has ended.
    pub(super) fn ended(&mut self, worker: usize, prompt: u64, placement: Option<Placement>) {
        let desk = self.desk(worker);
        desk.load.end();
        desk.context_tokens -= prompt;
        desk.changed = true;
        if let Some(placement) = placement {
            self.index.finish(placement);
        }
    }

    /// A turn of a session has ended, whose conversation has so many tokens now.
    pub(super) fn turn_ended(
        &mut self,
        at: Nanos,
        session: Option<u64>,
        tokens: u64,
        first_token: Option<Nanos>,
    ) {
        if let (Some(sets), Some(session)) = (&mut self.sets, session) {
            let first_token = first_token.map(Duration::from_nanos);
            let turn = EndedTurn { session, conversation_tokens: tokens as f64, first_token };
            sets.ended(Duration::from_nanos(at), &turn);
        }
    }

    /// Whether a first or last token of its requests came from this worker since the last call.
    pub(super) fn take_changed(&mut self, worker: usize) -> bool {
        std::mem::take(&mut self.desks[worker].changed)
    }

    /// Looks at a worker's gauges: requests, as vLLM counts them, and with `tokens` the prompt tokens that
    /// wait, as SGLang does.
    pub(super) fn look(&mut self, worker: usize, at: Nanos, engine: &Engine, tokens: bool) {
        let (running, waiting) = (engine.running() as u64, engine.waiting() as u64);
        let waiting_tokens = tokens.then(|| engine.pending_prefill_tokens());
        let engine = EngineLoad { running, waiting, waiting_tokens };
        let load = &self.desks[worker].load;
        load.engine_says(Duration::from_nanos(at), engine, load.own());
    }

    /// What it tells other gateways of a worker.
    pub(super) fn told(&self, worker: usize, at: Nanos) -> OwnLoad {
        let Desk { load, rate, .. } = &self.desks[worker];
        load.told(Duration::from_nanos(at), rate.tokens_per_second())
    }

    /// The other gateways tell what they have at a worker.
    pub(super) fn hear(&mut self, worker: usize, at: Nanos, peers: OwnLoad) {
        self.hear_of(worker, at, peers);
        self.desks[worker].load.look(Duration::from_nanos(at));
    }

    /// The same between two words of theirs.
    pub(super) fn hear_of(&self, worker: usize, at: Nanos, peers: OwnLoad) {
        self.desks[worker].load.peers_say(Duration::from_nanos(at), peers);
    }

    /// A worker says that it holds these blocks of a chain.
    pub(super) fn stored(&mut self, worker: usize, chain: &[BlockHash], blocks: Range<usize>) {
        for at in blocks {
            let parent = at.checked_sub(1).map(|before| chain[before]);
            if !self.index.store_block(WorkerId(worker as u32), parent, chain[at]) {
                return;
            }
        }
    }

    /// A worker says that it no longer holds this block.
    pub(super) fn removed(&mut self, worker: usize, block: BlockHash) {
        self.index.drop_block(WorkerId(worker as u32), block);
    }
}
