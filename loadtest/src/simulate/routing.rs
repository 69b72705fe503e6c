//! The router of a simulated fleet: the gateway's own core at the gateway's own places, with the simulation's
//! clock.

use std::time::Duration;

use keyway_core::{
    PromptViews, RoomRules, WorkerId, consider, may_wait,
    pick::{Candidate, RequestView, Turn},
    quote,
    waiting_room::{Ahead, CandidateSet, Quote, WorkerChooser},
};
use keyway_wire::block_hash::BlockHash;

use super::{
    fleet::{FleetSetup, Run, Workload},
    prompts,
};
use crate::{args::contender::Contender, engine_model::Nanos, random::splitmix};

/// A request before it is sent.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) at: Nanos,
    pub(super) prompt_tokens: u64,
    pub(super) output_tokens: u32,
    /// In the engine's blocks.
    pub(super) chain: Vec<BlockHash>,
    /// In the router's, where they differ.
    index_chain: Option<Vec<BlockHash>>,
}

/// Where a request goes, and how much of it is computed there.
pub(super) struct Plan {
    index: usize,
    uncached_tokens: u64,
    /// The workers as they were weighed, where the gateway's own policies choose.
    candidates: Vec<Candidate>,
}

/// The waiting room's desk.
pub(super) struct Clerk<'r, 'a> {
    run: &'r mut Run<'a>,
    gateway: usize,
    at: Nanos,
    /// The workers at this moment.
    candidate_set: CandidateSet,
}

impl Arrival {
    pub(super) fn new(workload: &Workload, setup: &FleetSetup, at: Nanos, copy: u64, index: usize) -> Self {
        let (row, scale) = (&workload.trace.rows[index], workload.scale);
        let own = setup.profile.block_tokens;
        // There are fewer copies than 2^32.
        let key = copy | u64::from(setup.hash_seed) << 32;
        let cut = |tokens| prompts::chain(scale, index, row, key, tokens);
        Self {
            at,
            prompt_tokens: scale.prompt_tokens(row),
            output_tokens: scale.output_tokens(row) as u32,
            chain: cut(own),
            index_chain: (setup.index_block_tokens != own).then(|| cut(setup.index_block_tokens)),
        }
    }

    fn view(&self, setup: &FleetSetup) -> RequestView<'_> {
        RequestView {
            chain: self.index_chain(),
            prompt_tokens: self.prompt_tokens,
            block_tokens: f64::from(setup.index_block_tokens),
            media: &[],
            session: None,
        }
    }

    fn index_chain(&self) -> &[BlockHash] {
        self.index_chain.as_deref().unwrap_or(&self.chain)
    }
}

impl<'r, 'a> Clerk<'r, 'a> {
    pub(super) fn new(run: &'r mut Run<'a>, gateway: usize, at: Nanos) -> Self {
        run.gateways[gateway].index.settle();
        let candidate_set =
            CandidateSet::new(run.gateways[gateway].candidates(at), RoomRules::default().horizon_ms);
        Self { run, gateway, at, candidate_set }
    }

    /// Its own prefill where it is least, in milliseconds.
    pub(super) fn own_ms(&mut self, arrival: &Arrival) -> Option<f64> {
        self.quote(arrival, &Ahead::default()).map(|(quote, _)| quote.own_ms)
    }
}

impl WorkerChooser<Arrival> for Clerk<'_, '_> {
    type Plan = Plan;

    fn least_excess_ms(&mut self, arrival: &Arrival, ahead: &Ahead) -> f64 {
        match *self.run.setup {
            FleetSetup { policy: Contender::Ours(policy), hold, .. }
                if may_wait(policy, hold, arrival.prompt_tokens) =>
            {
                self.candidate_set.least_excess_ms(ahead)
            }
            _ => f64::NEG_INFINITY,
        }
    }

    fn is_open(&mut self, _: &Arrival, worker: WorkerId, ahead: &Ahead) -> bool {
        self.candidate_set.is_open(worker, ahead)
    }

    fn quote(&mut self, arrival: &Arrival, ahead: &Ahead) -> Option<(Quote, Plan)> {
        let run = &mut *self.run;
        let mut candidates = self.candidate_set.candidates().to_vec();
        run.random = splitmix(run.random);
        let gateway = &mut run.gateways[self.gateway];
        let turn = Turn { counter: gateway.counter, random: run.random };
        gateway.counter += 1;
        let view = arrival.view(run.setup);
        let FleetSetup { policy: contender, hold, .. } = *run.setup;
        let Contender::Ours(policy) = contender else {
            let index =
                contender.choose(&view, &mut candidates, &gateway.contexts(), &turn, &gateway.index)?;
            let Candidate { worker, matched_blocks, .. } = candidates[index];
            let quote =
                Quote { worker, backlog_ms: f64::NEG_INFINITY, own_ms: 0.0, weighed: candidates.len() };
            let uncached_tokens = view.prompt_tokens - view.matched_tokens(matched_blocks);
            return Some((quote, Plan { index, uncached_tokens, candidates: Vec::new() }));
        };
        let pick = consider(
            policy,
            &PromptViews::of(&[view], &[]),
            &mut candidates,
            ahead,
            (Duration::from_nanos(self.at), &turn),
            &gateway.index,
        )?;
        let quote = quote(policy, hold, arrival.prompt_tokens, &candidates, &pick);
        Some((quote, Plan { index: pick.index, uncached_tokens: pick.uncached_tokens, candidates }))
    }

    fn begin(&mut self, arrival: Arrival, plan: Option<Plan>) {
        // There is at least one worker, so there is a plan.
        let Some(Plan { index, uncached_tokens, candidates }) = plan else { return };
        let view = arrival.view(self.run.setup);
        let known = &mut self.run.gateways[self.gateway].index;
        known.used(Duration::from_nanos(self.at), &view, &candidates, uncached_tokens);
        let placement = known.place(WorkerId(index as u32), view.chain);
        self.run.send(self.at, (self.gateway, index), arrival, placement, uncached_tokens);
        self.candidate_set.update(index, self.run.gateways[self.gateway].load(index, self.at));
    }
}
