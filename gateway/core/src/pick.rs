//! The choice of a worker: a pure function of the request, the candidates and the turn, with its reason. It
//! changes nothing; recording the choice in the index and the load is the caller's.

pub use crate::candidate::{Candidate, RequestView, Reuse, Turn};
pub use crate::policy::{Policy, Reason};

use crate::balance;
use crate::cost::{Cost, CostModel, Queue};

/// A choice.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Pick {
    /// Which of the candidates.
    pub index: usize,
    /// Why.
    pub reason: Reason,
    /// Prompt tokens expected to be cached there, in whichever tier: less than the whole prompt, as the last one is always computed.
    pub matched_tokens: u64,
    /// Prompt tokens left to compute.
    pub uncached_tokens: u64,
    /// The price of that worker, whatever the policy.
    pub cost: Cost,
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
    let matched_tokens = request.matched_tokens(candidates[index].held_blocks());
    let cost = cost_on(model, request, &candidates[index]);
    Some(Pick {
        index,
        reason,
        matched_tokens,
        uncached_tokens: request.prompt_tokens - matched_tokens,
        cost,
    })
}

/// What this candidate would cost, term by term. Inlined: asked of each of a thousand workers, most of its time was its result's
/// way through memory.
#[inline(always)]
pub fn cost_on(model: &CostModel, request: &RequestView<'_>, candidate: &Candidate) -> Cost {
    let uncached = request.prompt_tokens - request.matched_tokens(candidate.held_blocks());
    let cost = model.cost_with(&model.queue(candidate), uncached, &candidate.reuse);
    let fetched = request.fetched_tokens(candidate);
    match candidate.tiers {
        Some((_, tokens_per_ms)) if fetched > 0 => Cost { fetch_ms: fetched as f64 / tokens_per_ms, ..cost },
        _ => cost,
    }
}

/// The cheapest; among those about as cheap, the first in the rendezvous order of the first block that nobody
/// holds. So requests that start with the same new prefix go together, even before the first is recorded, and
/// different ones do not all follow the same order. A prefix that everybody shares decides nothing: what it
/// saves is either the same everywhere or too little to count.
///
/// A request that names its session goes by the session's order instead: what of its past the prompt's blocks do not show
/// (a part below a block, text that the engine never sees, a response stored there) is where its last turn went. That says
/// less than any block that is known, so it chooses among the same workers, and never makes another one eligible.
fn by_cost(
    model: &CostModel,
    request: &RequestView<'_>,
    candidates: &[Candidate],
    turn: &Turn,
) -> (usize, Reason) {
    let mut longest = 0;
    let mut cheapest = (f64::INFINITY, 0);
    let costs = candidates.iter().enumerate().map(|(i, one)| {
        let cost = cost_on(model, request, one).total_ms();
        longest = longest.max(one.held_blocks());
        if cost < cheapest.0 {
            cheapest = (cost, i);
        }
        cost
    });
    let costs: Vec<f64> = costs.collect();
    let cheapest = cheapest.1;
    let queue = model.queue(&candidates[cheapest]);
    // Matched tokens are rounded, so two that are a block apart may differ by the next whole number.
    let block_ms = request.block_tokens.ceil() / queue.tokens_per_ms;
    let limit = model.equal_to(costs[cheapest], block_ms);
    let of_blocks = || request.chain.get(longest as usize).or(request.chain.last()).map(|hash| hash.0);
    let key = request.session.or_else(of_blocks).unwrap_or(turn.random);
    // A copy is made where it is cheapest, and not because it is about as cheap as none.
    let equal = |i: usize| costs[i] <= limit && (i == cheapest || candidates[i].reuse.tokens == 0);
    let equals = (0..candidates.len()).filter(|&i| equal(i));
    let index = balance::first_by_rendezvous(candidates, equals, key).unwrap_or(cheapest);

    // Would the saving of the longest prefix count, were all else equal?
    let counts = |saved: u64, rest: u64| {
        let idle = Queue { wait_ms: 0.0, ..queue };
        let cost = |uncached| model.cost(&idle, uncached).total_ms();
        cost(saved + rest) > model.equal_to(cost(rest), block_ms)
    };
    let best = request.matched_tokens(longest);
    let own = request.matched_tokens(candidates[index].held_blocks());
    let reason = if !counts(best, request.prompt_tokens - best) {
        if request.session.is_some() { Reason::Session } else { Reason::New }
    } else if counts(best - own, request.prompt_tokens - best) {
        Reason::Spread
    } else {
        Reason::Prefix
    };
    (index, reason)
}

#[cfg(test)]
mod tests;
