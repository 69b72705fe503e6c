//! KV on its way from one worker to another: of a prompt that the first has computed for the second, or of a
//! prefix that the second fetches. The request is submitted where its KV arrives. Transfers share what a
//! worker sends and receives, one after the other.

use std::{collections::BTreeMap, time::Duration};

use keyway_core::{Splitting, Transfer, index::Placement, told::Told};

use super::{
    counting::{Flight, Leg},
    fleet::Run,
    routing::Arrival,
};
use crate::engine_model::{Links, Nanos};

/// Which workers are for what, and what moving KV between them takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Legs {
    /// The first so many workers compute prompts alone; 0: each does all.
    pub(super) prefill: usize,
    pub(super) splitting: Splitting,
    /// Uncached tokens below which a prompt is computed where it is answered.
    pub(super) from_tokens: u64,
    /// Whether workers fetch from each other what they hold of a prompt.
    pub(super) pulls: bool,
    pub(super) transfer: Transfer,
}

/// The worker that answers a request whose prompt another computes: chosen first, told last.
#[derive(Debug)]
pub(super) struct Answering {
    pub(super) worker: usize,
    /// Prompt tokens that it was expected to fetch.
    pub(super) uncached: u64,
}

/// A prompt that was computed for another worker.
#[derive(Debug)]
pub(super) struct Computed {
    pub(super) at: Nanos,
    pub(super) gateway: usize,
    pub(super) from: usize,
    pub(super) arrival: Arrival,
    /// Tokens that were found cached there.
    pub(super) cached_tokens: u32,
}

/// A request whose KV is on its way.
#[derive(Debug)]
struct InTransit {
    to: usize,
    arrival: Arrival,
    flight: Flight,
    /// Leading tokens of the prompt that it has then.
    fetched_tokens: u32,
}

/// Transfers under way.
#[derive(Debug)]
pub(super) struct Transit {
    under_way: BTreeMap<(Nanos, u64), InTransit>,
    begun: u64,
    links: Links,
}

impl Transit {
    pub(super) fn new(workers: usize) -> Self {
        Self { under_way: BTreeMap::new(), begun: 0, links: Links::new(workers) }
    }

    /// When the next one is over.
    pub(super) fn next_at(&self) -> Option<Nanos> {
        self.under_way.keys().next().map(|(at, _)| *at)
    }

    /// Begins to move so many tokens.
    fn begin(&mut self, at: Nanos, from: usize, tokens: u64, transfer: Transfer, request: InTransit) {
        let arrives = self.links.take(at, (from, request.to), tokens, transfer);
        self.begun += 1;
        self.under_way.insert((arrives, self.begun), request);
    }
}

impl Run<'_> {
    /// A worker has computed a prompt for another, which fetches the KV that it lacks.
    fn hand_over(&mut self, computed: Computed) {
        let Computed { at, gateway, from, mut arrival, cached_tokens } = computed;
        let Some(Answering { worker: to, uncached }) = arrival.answering.take() else { return };
        let lacks = arrival.prompt_tokens.saturating_sub(self.held(to, &arrival));
        let queue_ms = self.gateways[gateway].queue_ms(to, at);
        let leg = Leg::Handed { from, cached_tokens, uncached, at, queue_ms };
        let (placement, told) = self.gateways[gateway].place(at, to, arrival.index_chain());
        let placement = Some(placement);
        let flight = Flight { gateway, sent: at, placement, told, leg, ..Flight::default() };
        let fetched_tokens = arrival.prompt_tokens as u32;
        self.outcome.split += 1;
        self.outcome.moved_tokens += lacks;
        let request = InTransit { to, arrival, flight, fetched_tokens };
        self.transit.begin(at, from, lacks, self.setup.legs.transfer, request);
    }

    /// A worker fetches from another what that holds of a prompt, and computes the rest.
    pub(super) fn pull(
        &mut self,
        at: Nanos,
        gateway: usize,
        (from, to): (usize, usize),
        arrival: Arrival,
        (placement, told): (Placement, Option<Told>),
        uncached: u64,
    ) {
        self.advance_worker(from, at);
        let (there, here) = (self.held(from, &arrival), self.held(to, &arrival));
        let (waiting, before) = self.gateways[gateway].sent(to, at, arrival.prompt_tokens, uncached);
        let (waiting, placement, leg) = (Some(waiting), Some(placement), Leg::Pulled);
        let flight = Flight { gateway, sent: at, waiting, before, placement, told, leg, ..Flight::default() };
        let request = InTransit { to, arrival, flight, fetched_tokens: there as u32 };
        let moved = there.saturating_sub(here);
        self.outcome.pulled += 1;
        self.outcome.moved_tokens += moved;
        self.transit.begin(at, from, moved, self.setup.legs.transfer, request);
    }

    /// Tokens of a prompt that a worker's cache holds now.
    fn held(&self, worker: usize, arrival: &Arrival) -> u64 {
        let blocks = self.engines[worker].pool().cached(&arrival.chain) as u64;
        blocks * u64::from(self.setup.profile.block_tokens)
    }

    /// A request's KV is there: it is submitted.
    pub(super) fn arrive_with_kv(&mut self) {
        if let Some(((at, _), request)) = self.transit.under_way.pop_first() {
            let InTransit { to, arrival, flight, fetched_tokens } = request;
            self.launch(at, to, arrival, (flight, fetched_tokens), None);
        }
    }

    /// Sends what was handed over while workers were advanced on its way.
    pub(super) fn hand_over_all(&mut self) {
        for computed in std::mem::take(&mut self.computed) {
            self.hand_over(computed);
        }
    }

    /// Lets the requests into the room whose worker that answers is chosen.
    pub(super) fn enter_first_legs(&mut self) {
        while let Some((at, gateway, arrival)) = self.first_legs.pop() {
            let empty = self.gateways[gateway].room.is_empty();
            self.gateways[gateway].room.enter(Duration::from_nanos(at), Some(0.0), arrival);
            self.release_room(gateway, at, !empty);
        }
    }
}
