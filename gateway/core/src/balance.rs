//! The policies that do not look at what is cached. Each gives the index of a candidate; there is at least
//! one.

use keyway_wire::block_hash::BlockHash;

use crate::candidate::{Candidate, RequestView, Turn};
use crate::cost::usable_weight;
use crate::rendezvous;

/// Prompt tokens whose block names a prompt for `chwbl`: past a system prompt of usual size, yet within the
/// first turn of a conversation, so that its later turns have the same name.
const CHWBL_KEY_TOKENS: f64 = 1024.0;
/// Load above the mean at which `chwbl` moves on; the paper's 1 + epsilon.
const CHWBL_BOUND: f64 = 1.25;

/// Each in turn; with unequal weights each in proportion, evenly spaced.
pub(crate) fn round_robin(candidates: &[Candidate], turn: &Turn) -> usize {
    if candidates.iter().all(|candidate| candidate.weight == candidates[0].weight) {
        return (turn.counter % candidates.len() as u64) as usize;
    }
    // Multiples of the golden ratio modulo 1 (in 64-bit fixed point) visit an interval as evenly as can be.
    at_share(candidates, turn.counter.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// Any, in proportion to the weights.
pub(crate) fn random(candidates: &[Candidate], turn: &Turn) -> usize {
    at_share(candidates, turn.random)
}

/// The fewest requests for its weight; equals take turns.
pub(crate) fn least_loaded(candidates: &[Candidate], turn: &Turn) -> usize {
    let start = (turn.counter % candidates.len() as u64) as usize;
    let order = (start..candidates.len()).chain(0..start);
    order.min_by(|&a, &b| load(&candidates[a]).total_cmp(&load(&candidates[b]))).unwrap_or(start)
}

/// The less loaded of two different ones at random.
pub(crate) fn power_of_two(candidates: &[Candidate], turn: &Turn) -> usize {
    let (upper, lower) = (turn.random >> 32, turn.random & 0xFFFF_FFFF);
    let len = candidates.len() as u64;
    let first = (upper * len) >> 32;
    let second = (first + 1 + ((lower * len.saturating_sub(1)) >> 32)) % len;
    let (first, second) = (first as usize, second as usize);
    if load(&candidates[second]) < load(&candidates[first]) { second } else { first }
}

/// Rendezvous order of the prompt's beginning, skipping workers with more than their bounded share of the
/// load. The bound counts the request itself, so at least one worker is below it.
pub(crate) fn chwbl(request: &RequestView<'_>, candidates: &[Candidate], turn: &Turn) -> usize {
    let key = chwbl_key(request).map_or(turn.random, |hash| hash.0);
    let requests: u64 = candidates.iter().map(|candidate| candidate.load.requests).sum();
    let weights: f64 = candidates.iter().map(|candidate| usable_weight(candidate.weight)).sum();
    let bound = |candidate: &Candidate| {
        (CHWBL_BOUND * (requests + 1) as f64 * usable_weight(candidate.weight) / weights).ceil()
    };
    let order =
        (0..candidates.len()).filter(|&i| candidates[i].load.requests as f64 + 1.0 <= bound(&candidates[i]));
    first_by_rendezvous(candidates, order, key).unwrap_or_else(|| least_loaded(candidates, turn))
}

/// The candidate that is first in rendezvous order so far.
#[derive(Debug, Clone, Copy)]
struct First {
    drawn: f64,
    weight: f64,
    index: usize,
}

/// The candidate among `among` that comes first for `key`.
pub(crate) fn first_by_rendezvous(
    candidates: &[Candidate],
    among: impl Iterator<Item = usize>,
    key: u64,
) -> Option<usize> {
    let mut first: Option<First> = None;
    for i in among {
        let (drawn, weight) = (rendezvous::draw(key, candidates[i].drawn_as), candidates[i].weight);
        // Of equal weights the score's order is the draw's: a logarithm for each of a thousand idle workers
        // is dear.
        let is_before = |first: First| {
            if weight == first.weight {
                return drawn > first.drawn;
            }
            rendezvous::score(drawn, weight) > rendezvous::score(first.drawn, first.weight)
        };
        if first.is_none_or(is_before) {
            first = Some(First { drawn, weight, index: i });
        }
    }
    first.map(|first| first.index)
}

/// [`first_by_rendezvous`] where all weights are equal; each draws by its [`rendezvous::spread`].
pub(crate) fn first_of_equal_weights(
    among: impl Iterator<Item = usize>,
    key: u64,
    spread: impl Fn(usize) -> u64,
) -> Option<usize> {
    let mut first: Option<(f64, usize)> = None;
    for i in among {
        let drawn = rendezvous::draw_for(key, spread(i));
        if first.is_none_or(|(most, _)| drawn > most) {
            first = Some((drawn, i));
        }
    }
    first.map(|(_, index)| index)
}

fn chwbl_key(request: &RequestView<'_>) -> Option<BlockHash> {
    let blocks = (CHWBL_KEY_TOKENS / request.block_tokens.max(1.0)).ceil() as usize;
    let names = request.spans().names(blocks);
    request.chain.get(names.saturating_sub(1)).or(request.chain.last()).copied()
}

/// Requests per weight once one more has come.
fn load(candidate: &Candidate) -> f64 {
    (candidate.load.requests + 1) as f64 / usable_weight(candidate.weight)
}

/// The candidate at this point of all weights laid end to end; `point` is a fraction of 2^64.
fn at_share(candidates: &[Candidate], point: u64) -> usize {
    let total: f64 = candidates.iter().map(|candidate| usable_weight(candidate.weight)).sum();
    let mut rest = point as f64 / 2_f64.powi(64) * total;
    for (i, candidate) in candidates.iter().enumerate() {
        rest -= usable_weight(candidate.weight);
        if rest < 0.0 {
            return i;
        }
    }
    candidates.len() - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::WorkerId;
    use crate::load::LoadSnapshot;

    #[test]
    fn draws_compared_without_logarithms_give_the_order_of_the_scores() {
        for weights in [&[1.0][..], &[1.0, 1.0, 3.0], &[0.5, 2.0], &[1.0, f64::NAN, 0.0]] {
            let candidate = |i: u32| {
                let weight = weights[i as usize % weights.len()];
                Candidate::new(WorkerId(i * 31), LoadSnapshot::default(), 1.0, weight)
            };
            let candidates: Vec<_> = (0..50).map(candidate).collect();
            for key in 0..500 {
                let score =
                    |one: &Candidate| rendezvous::score(rendezvous::draw(key, one.worker), one.weight);
                let best = candidates.iter().max_by(|a, b| score(a).total_cmp(&score(b)));
                let first = first_by_rendezvous(&candidates, 0..candidates.len(), key);
                assert_eq!(first.map(|i| candidates[i].worker), best.map(|one| one.worker), "{weights:?}");
            }
        }
    }
}
