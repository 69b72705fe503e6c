//! The choice of a worker: a pure function of the request, the candidates and the turn, with its reason. It
//! changes nothing; recording the choice in the index and the load is the caller's.

pub use crate::candidate::{Candidate, RequestView, Turn};
pub use crate::policy::{Policy, Reason};

use crate::balance;
use crate::cost::CostModel;
use crate::load::LoadSnapshot;

/// A choice.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Pick {
    /// Which of the candidates.
    pub index: usize,
    /// Why.
    pub reason: Reason,
    /// Prompt tokens expected to be cached there: less than the whole prompt, as the last one is always computed.
    pub matched_tokens: u64,
    /// Prompt tokens left to compute.
    pub uncached_tokens: u64,
}

/// Chooses one of the candidates with the default [`CostModel`]; `None` if there are none.
pub fn pick(
    policy: Policy,
    request: &RequestView<'_>,
    candidates: &[Candidate],
    turn: &Turn,
) -> Option<Pick> {
    pick_with(&CostModel::default(), policy, request, candidates, turn)
}

/// [`pick`] with a cost model of the caller's.
pub fn pick_with(
    model: &CostModel,
    policy: Policy,
    request: &RequestView<'_>,
    candidates: &[Candidate],
    turn: &Turn,
) -> Option<Pick> {
    let (index, reason) = match (candidates.len(), policy) {
        (0, _) => return None,
        (1, _) => (0, Reason::Only),
        (_, Policy::Prefix) => by_cost(model, request, candidates, turn),
        (_, Policy::LeastLoaded) => (balance::least_loaded(candidates, turn), Reason::LeastLoaded),
        (_, Policy::RoundRobin) => (balance::round_robin(candidates, turn), Reason::RoundRobin),
        (_, Policy::Random) => (balance::random(candidates, turn), Reason::Random),
        (_, Policy::PowerOfTwo) => (balance::power_of_two(candidates, turn), Reason::PowerOfTwo),
        (_, Policy::Chwbl) => (balance::chwbl(request, candidates, turn), Reason::Chwbl),
    };
    let matched_tokens = request.matched_tokens(candidates[index].matched_blocks);
    Some(Pick { index, reason, matched_tokens, uncached_tokens: request.prompt_tokens - matched_tokens })
}

fn cost_on(model: &CostModel, request: &RequestView<'_>, candidate: &Candidate) -> f64 {
    let uncached = request.prompt_tokens - request.matched_tokens(candidate.matched_blocks);
    model.cost(candidate.load, uncached, candidate.weight)
}

/// The cheapest; among those about as cheap, the first in the rendezvous order of the first block that nobody
/// holds. So requests that start with the same new prefix go together, even before the first is recorded, and
/// different ones do not all follow the same order. A prefix that everybody shares decides nothing: what it
/// saves is either the same everywhere or too little to count.
fn by_cost(
    model: &CostModel,
    request: &RequestView<'_>,
    candidates: &[Candidate],
    turn: &Turn,
) -> (usize, Reason) {
    let cheapest =
        candidates.iter().map(|candidate| cost_on(model, request, candidate)).fold(f64::INFINITY, f64::min);
    let limit = model.equal_to(cheapest, request.block_tokens);
    let longest = candidates.iter().map(|candidate| candidate.matched_blocks).max().unwrap_or(0);
    let key = request.chain.get(longest as usize).or(request.chain.last()).map_or(turn.random, |hash| hash.0);
    let equals = (0..candidates.len()).filter(|&i| cost_on(model, request, &candidates[i]) <= limit);
    let index = balance::first_by_rendezvous(candidates, equals, key).unwrap_or(0);

    // Would the saving of the longest prefix count, were all else equal?
    let counts = |saved: u64, rest: u64| {
        let idle = LoadSnapshot::default();
        let cost = |uncached| model.cost(idle, uncached, 1.0);
        cost(saved + rest) > model.equal_to(cost(rest), request.block_tokens)
    };
    let best = request.matched_tokens(longest);
    let own = request.matched_tokens(candidates[index].matched_blocks);
    let reason = if !counts(best, request.prompt_tokens - best) {
        Reason::New
    } else if counts(best - own, request.prompt_tokens - best) {
        Reason::Spread
    } else {
        Reason::Prefix
    };
    (index, reason)
}

#[cfg(test)]
mod tests;
