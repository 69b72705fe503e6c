//! One routing step: what the index knows is put beside each candidate, one is picked, and the choice is recorded at
//! once, so that the next request of a burst already sees it. The gateway and the simulator both route by this.

use crate::index::{Placement, PrefixIndex};
use crate::pick::{Candidate, Pick, Policy, RequestView, Turn, pick};

/// Picks one of `candidates`, whose matches are filled in here, and records the placement; `None` if there are none.
/// The load is the caller's to count.
pub fn route(
    policy: Policy,
    request: &RequestView<'_>,
    candidates: &mut [Candidate],
    turn: &Turn,
    index: &mut PrefixIndex,
) -> Option<(Pick, Placement)> {
    let pick = consider(policy, request, candidates, turn, index)?;
    let placement = index.place(candidates[pick.index].worker, request.chain);
    Some((pick, placement))
}

/// [`route`] without recording anything: what would happen to this request.
pub fn consider(
    policy: Policy,
    request: &RequestView<'_>,
    candidates: &mut [Candidate],
    turn: &Turn,
    index: &PrefixIndex,
) -> Option<Pick> {
    // Sorted and searched, because a prompt that everybody holds the beginning of is matched on every worker.
    let mut matches = index.matched(request.chain);
    matches.sort_unstable_by_key(|(worker, _)| *worker);
    for candidate in &mut *candidates {
        let found = matches.binary_search_by_key(&candidate.worker, |(worker, _)| *worker);
        candidate.matched_blocks = found.map_or(0, |at| matches[at].1);
    }
    pick(policy, request, candidates, turn)
}

#[cfg(test)]
mod tests {
    use keyway_wire::block_hash::BlockHash;

    use super::*;
    use crate::index::WorkerId;
    use crate::load::LoadSnapshot;

    #[test]
    fn the_second_request_goes_where_the_first_was_placed() {
        let mut index = PrefixIndex::new(1 << 20);
        let chain: Vec<_> = (1..=40).map(BlockHash).collect();
        let request = RequestView { chain: &chain, prompt_tokens: 641, block_tokens: 16.0 };
        let mut candidates: Vec<_> = (0..5)
            .map(|worker| Candidate {
                worker: WorkerId(worker * 7),
                load: LoadSnapshot::default(),
                ahead_ms: 0.0,
                matched_blocks: 0,
                weight: 1.0,
            })
            .collect();
        let turn = Turn { counter: 0, random: 9 };
        let (first, placement) = route(Policy::Prefix, &request, &mut candidates, &turn, &mut index).unwrap();
        assert_eq!((first.matched_tokens, placement.added()), (0, 40));
        let (second, _) = route(Policy::Prefix, &request, &mut candidates, &turn, &mut index).unwrap();
        assert_eq!((second.index, second.matched_tokens), (first.index, 640));
        assert_eq!(candidates[second.index].matched_blocks, 40);
        assert!(route(Policy::Prefix, &request, &mut [], &turn, &mut index).is_none());
    }
}
