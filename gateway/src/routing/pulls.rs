//! Workers that fetch from each other what they have cached of a prompt, by
//! [`keyway_core::consider_peers`] with the gateway's workers: who fetches what of whom, what that takes,
//! and whether it comes.

use std::{sync::Arc, time::Duration};

use keyway_core::{
    Splitting, Transfer, consider, consider_peers,
    index::{PrefixIndex, WorkerId},
    pick::{Candidate, Pick, Policy, Turn},
    route::PromptViews,
    waiting_room::Ahead,
};

use super::{
    Router, Setting,
    setting::{Few, Leg},
};
use crate::{fleet::Worker, prompt::request::RequestInfo};

/// What a worker is to fetch for a request.
#[derive(Debug, Clone)]
pub struct Pull {
    /// The worker that has it.
    pub from: Arc<Worker>,
    /// Prompt tokens, behind those that the first one has itself.
    pub tokens: u64,
}

/// Prompt tokens that were cached, as predicted and as the answer says.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    /// At the worker itself.
    pub(super) own: u64,
    /// With what it was to fetch.
    pub(super) predicted: u64,
    /// As the answer says.
    pub(super) reported: u64,
}

/// What was fetched, by what the answer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Came {
    All,
    Part,
    Nothing,
}

impl Came {
    fn of(found: Found, slack: u64) -> Self {
        let Found { own, predicted, reported } = found;
        if reported + slack >= predicted {
            Self::All
        } else if reported > own + slack {
            Self::Part
        } else {
            Self::Nothing
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::All => "done",
            Self::Part => "part",
            Self::Nothing => "missed",
        }
    }
}

impl Router {
    /// [`consider`], with what workers can fetch from each other where they may.
    pub(super) fn consider(
        &self,
        policy: Policy,
        setting: &Setting,
        (seen, candidates): (&PromptViews<'_>, &mut [Candidate]),
        ahead: &Ahead,
        step: (Duration, &Turn),
        index: &PrefixIndex,
    ) -> Option<Pick> {
        if !setting.may_pull {
            return consider(policy, seen, candidates, ahead, step, index);
        }
        let pulling = self.rules.read().legs.pulling;
        let pulls = self.pulls.lock();
        let transfer = |from: &Candidate, to: &Candidate| {
            let pair = (from.drawn_as, to.drawn_as);
            if pulls.is_passed_over(step.0, pair) {
                return None;
            }
            Some(match pulling {
                Splitting::Always => Transfer { handover_ms: 0.0, ms_per_token: 0.0 },
                _ => pulls.between(step.0, pair.0, pair.1),
            })
        };
        consider_peers(policy, seen, candidates, ahead, step, (index, transfer))
    }

    /// Whether a worker may fetch what another one has of a request's prompt.
    pub(super) fn may_pull(&self, request: &RequestInfo, leg: Leg) -> bool {
        request.moves_kv.is_some()
            && request.owner.is_none()
            && leg != Leg::Prefill
            && self.rules.read().legs.pulling != Splitting::Never
    }

    /// What the chosen candidate is to fetch. `worker_of`: each candidate's place among the workers.
    pub(super) fn pull_of(
        setting: &Setting,
        candidates: &[Candidate],
        chosen: usize,
        worker_of: &Few<usize>,
    ) -> Option<Pull> {
        let peer = candidates[chosen].peer()?;
        let holder = candidates.iter().position(|one| one.worker == peer)?;
        let tokens = setting.request_view().fetched_tokens(&candidates[chosen]);
        Some(Pull { from: Arc::clone(&setting.workers[worker_of[holder]]), tokens })
    }

    /// `to` has said its first token so many milliseconds after it was asked, of which so many go without
    /// what it fetched from `from`.
    pub(super) fn pulled(
        &self,
        now: Duration,
        pair: (WorkerId, WorkerId),
        tokens: u64,
        (took_ms, without_ms): (f64, f64),
    ) {
        self.pulls.lock().observe(now, pair, tokens, (took_ms, without_ms));
    }

    /// An answer has said how many of its prompt's tokens were cached, where some were to come from another
    /// worker.
    pub(super) fn pull_ended(&self, now: Duration, (from, to): (&Worker, &Worker), found: Found, slack: u64) {
        let came = Came::of(found, slack);
        self.metrics.pulls.pulls.with_label_values(&[to.name.as_str(), came.as_str()]).inc();
        let pair = (from.id, to.id);
        if came != Came::Nothing {
            self.pulls.lock().came(pair);
        } else if self.pulls.lock().missed(now, pair) {
            tracing::warn!(
                worker = %to.name,
                from = %from.name,
                "it found nothing of what it was to fetch from the other worker, three times in a row: for a minute it is not \
                 asked to. Do both have the same model, and does each reach the other's port?"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_is_told_by_what_was_cached() {
        for (own, predicted, reported, came) in [
            (0, 640, 640, Came::All),
            (0, 640, 624, Came::All),
            (0, 640, 800, Came::All),
            (0, 640, 320, Came::Part),
            (0, 640, 16, Came::Nothing),
            (320, 640, 320, Came::Nothing),
            (320, 640, 0, Came::Nothing),
            (320, 640, 480, Came::Part),
        ] {
            assert_eq!(
                Came::of(Found { own, predicted, reported }, 16),
                came,
                "{own} {predicted} {reported}"
            );
        }
    }
}
