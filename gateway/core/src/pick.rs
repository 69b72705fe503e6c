//! The choice of a worker: a pure function of the request, the candidates and the turn, with its reason. It
//! changes nothing; recording the choice in the index and the load is the caller's.

use keyway_wire::block_hash::BlockHash;

pub use crate::policy::{Policy, Reason};

use crate::balance;
use crate::cost::CostModel;
use crate::index::WorkerId;
use crate::load::LoadSnapshot;

/// A worker that may be chosen.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Its name.
    pub worker: WorkerId,
    /// What it is doing.
    pub load: LoadSnapshot,
    /// Leading blocks of the request's chain that it holds, from [`crate::PrefixIndex::matched`].
    pub matched_blocks: u32,
    /// Its speed, and its share of new work, against other workers; a positive number, usually 1.
    pub weight: f64,
}

/// What the choice needs to know of a request.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct RequestView<'a> {
    /// Hashes of the prompt's full blocks.
    pub chain: &'a [BlockHash],
    /// Tokens of the whole prompt (an estimate will do).
    pub prompt_tokens: u64,
    /// Tokens of one block of the chain (an estimate will do).
    pub block_tokens: f64,
}

/// What makes one choice differ from the next where nothing else does.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Counts choices.
    pub counter: u64,
    /// Fresh random bits.
    pub random: u64,
}

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

impl RequestView<'_> {
    /// Prompt tokens in this many leading blocks; always less than the whole prompt.
    pub fn matched_tokens(&self, blocks: u32) -> u64 {
        let tokens = (f64::from(blocks) * self.block_tokens).round() as u64;
        tokens.min(self.prompt_tokens.saturating_sub(1))
    }

    fn cost(&self, model: &CostModel, candidate: &Candidate) -> f64 {
        let uncached = self.prompt_tokens - self.matched_tokens(candidate.matched_blocks);
        model.cost(candidate.load, uncached, candidate.weight)
    }
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
        candidates.iter().map(|candidate| request.cost(model, candidate)).fold(f64::INFINITY, f64::min);
    let limit = model.equal_to(cheapest, request.block_tokens);
    let longest = candidates.iter().map(|candidate| candidate.matched_blocks).max().unwrap_or(0);
    let key = request.chain.get(longest as usize).or(request.chain.last()).map_or(turn.random, |hash| hash.0);
    let equals = (0..candidates.len()).filter(|&i| request.cost(model, &candidates[i]) <= limit);
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
