//! A request's way of being computed, as it is chosen at the counter: the workers on both sides, at one look
//! at the index and at all loads.

use keyway_core::{pick::Turn, waiting_room::Ahead};

use super::{Counter, Held, Plan, Roster};
use crate::routing::{legs::Side, setting::Few};

impl Counter<'_> {
    /// The plan of a request that other workers may compute the prompt of: with what both ways cost, and for
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
        Plan { pick, splits, ways: Some(split.ways), ..plan }
    }
}
