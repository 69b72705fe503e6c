//! A request's way of being computed, as it is chosen at the counter: the workers on both sides, at one look
//! at the index and at all loads.

use std::sync::Arc;

use keyway_core::{legs::LeftToCompute, pick::Turn, waiting_room::Ahead};

use super::{Counter, Held, Plan, Roster};
use crate::{
    fleet::Worker,
    routing::{legs::Side, setting::Few},
};

/// What a prompt asks of the worker that computes it for another one, or would be the one to.
pub(super) struct Asks {
    pub(super) of: Arc<Worker>,
    pub(super) left: LeftToCompute,
    /// How much it counted that answers stand still.
    pub(super) evenness: f64,
}

impl Counter<'_> {
    /// The plan of a request that other workers may compute the prompt of: by what both ways cost, and for
    /// the worker that is to answer then.
    pub(super) fn with_ways(&mut self, held: &Held, mut plan: Plan, ahead: &Ahead, turn: &Turn) -> Plan {
        let Some(setting) = &held.prefill else { return plan };
        let roster = self.roster(setting);
        let Roster { worker_of, candidate_set, .. } = &self.rosters[roster];
        let mut candidates = candidate_set.candidates().to_vec();
        let mut prefill = Side { setting, worker_of, candidates: &mut candidates };
        let answer_of: Few<usize> = self.rosters[plan.roster].worker_of.clone();
        let (setting, worker_of) = (&held.setting, &answer_of[..]);
        let answering = Side { setting, worker_of, candidates: &mut plan.candidates };
        let step = (ahead, (self.now, turn));
        let split = self.router.split(&plan.pick, (&answering, &mut prefill), step, &self.index);
        let Some(split) = split else { return plan };
        let splits = split.ways.is_split(self.rules.legs.splitting);
        let pick = if splits { split.answering } else { plan.pick };
        let of = Arc::clone(prefill.worker_at(split.prefill.index));
        let asks = Asks { of, left: split.ways.left, evenness: split.evenness };
        Plan { pick, splits, asks: Some(asks), ..plan }
    }
}
