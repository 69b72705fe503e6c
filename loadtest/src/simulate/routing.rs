//! The router of a simulated fleet: the gateway's own core at the gateway's own places, with the simulation's clock.

use keyway_core::{
    RoomRules, WorkerId, consider, may_wait,
    pick::{Pick, RequestView, Turn},
    quote,
    waiting_room::{Ahead, Desk, Quote, Sheet},
};
use keyway_wire::block_hash::BlockHash;

use super::{
    fleet::{FleetSetup, Run, Workload},
    prompts,
};
use crate::{engine_model::Nanos, workload::prompt::splitmix};

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

/// The waiting room's desk.
pub(super) struct Clerk<'r, 'a> {
    run: &'r mut Run<'a>,
    at: Nanos,
    /// The workers at this moment.
    sheet: Sheet,
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

    fn index_chain(&self) -> &[BlockHash] {
        self.index_chain.as_deref().unwrap_or(&self.chain)
    }
}

impl<'r, 'a> Clerk<'r, 'a> {
    pub(super) fn new(run: &'r mut Run<'a>, at: Nanos) -> Self {
        let sheet = Sheet::new(run.candidates(at), RoomRules::default().horizon_ms);
        Self { run, at, sheet }
    }

    /// Its own prefill where it is least, in milliseconds.
    pub(super) fn own_ms(&mut self, arrival: &Arrival) -> f64 {
        self.quote(arrival, &Ahead::default()).map_or(0.0, |(quote, _)| quote.own_ms)
    }
}

impl Desk<Arrival> for Clerk<'_, '_> {
    type Plan = Pick;

    fn least_excess_ms(&mut self, arrival: &Arrival, ahead: &Ahead) -> f64 {
        let FleetSetup { policy, hold, .. } = *self.run.setup;
        if may_wait(policy, hold, arrival.prompt_tokens) {
            self.sheet.least_excess_ms(ahead)
        } else {
            f64::NEG_INFINITY
        }
    }

    fn is_open(&mut self, _: &Arrival, worker: WorkerId, ahead: &Ahead) -> bool {
        self.sheet.is_open(worker, ahead)
    }

    fn quote(&mut self, arrival: &Arrival, ahead: &Ahead) -> Option<(Quote, Pick)> {
        let run = &mut *self.run;
        let mut candidates = self.sheet.candidates().to_vec();
        run.random = splitmix(run.random);
        let turn = Turn { counter: run.counter, random: run.random };
        run.counter += 1;
        let view = RequestView {
            chain: arrival.index_chain(),
            prompt_tokens: arrival.prompt_tokens,
            block_tokens: f64::from(run.setup.index_block_tokens),
        };
        let FleetSetup { policy, hold, .. } = *run.setup;
        let pick = consider(policy, (&[view], &[]), &mut candidates, ahead, &turn, &run.index)?;
        Some((quote(policy, hold, arrival.prompt_tokens, &candidates, &pick), pick))
    }

    fn begin(&mut self, arrival: Arrival, plan: Option<Pick>) {
        // There is at least one worker, so there is a plan.
        let Some(pick) = plan else { return };
        drop(self.run.index.place(WorkerId(pick.index as u32), arrival.index_chain()));
        self.run.send(self.at, pick.index, arrival, pick.uncached_tokens);
        self.sheet.update(pick.index, self.run.load(pick.index, self.at));
    }
}
