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
    route_views(policy, std::slice::from_ref(request), &[], candidates, turn, index)
}

/// [`route`] where workers cut prompts into blocks of different sizes: `views` are the request in each way, `view_of` a
/// candidate's, by its place; the first where it says nothing. `matched_blocks` is in blocks of the first.
pub fn route_views(
    policy: Policy,
    views: &[RequestView<'_>],
    view_of: &[usize],
    candidates: &mut [Candidate],
    turn: &Turn,
    index: &mut PrefixIndex,
) -> Option<(Pick, Placement)> {
    fill_matches(views, view_of, candidates, index);
    let pick = pick(policy, views.first()?, candidates, turn)?;
    let view = &views[view_of.get(pick.index).copied().unwrap_or(0)];
    let placement = index.place(candidates[pick.index].worker, view.chain);
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
    fill_matches(std::slice::from_ref(request), &[], candidates, index);
    pick(policy, request, candidates, turn)
}

/// Says of each candidate how much of the request it holds, as [`route_views`] does.
pub fn fill_matches(
    views: &[RequestView<'_>],
    view_of: &[usize],
    candidates: &mut [Candidate],
    index: &PrefixIndex,
) {
    let Some(first) = views.first() else { return };
    for (n, view) in views.iter().enumerate() {
        // Sorted and searched, because a prompt that everybody holds the beginning of is matched on every worker.
        let mut matches = index.matched(view.chain);
        matches.sort_unstable_by_key(|(worker, _)| *worker);
        for (i, candidate) in candidates.iter_mut().enumerate() {
            if view_of.get(i).copied().unwrap_or(0) != n {
                continue;
            }
            let found = matches.binary_search_by_key(&candidate.worker, |(worker, _)| *worker);
            let blocks = found.map_or(0, |at| matches[at].1);
            candidate.matched_blocks = if n == 0 {
                blocks
            } else {
                // What ends inside one of the first view's blocks does not count; 1e-9 forgives the division.
                (f64::from(blocks) * view.block_tokens / first.block_tokens + 1e-9) as u32
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use keyway_wire::block_hash::BlockHash;

    use super::*;
    use crate::index::WorkerId;
    use crate::load::LoadSnapshot;

    fn idle(worker: u32) -> Candidate {
        let load = LoadSnapshot::default();
        Candidate {
            worker: WorkerId(worker),
            load,
            ahead_ms: 0.0,
            matched_blocks: 0,
            tokens_per_ms: 8.0,
            weight: 1.0,
        }
    }

    #[test]
    fn workers_with_blocks_of_different_sizes_are_compared_in_tokens() {
        let mut index = PrefixIndex::new(1 << 20);
        let (small, large): (Vec<_>, Vec<_>) =
            ((1..=64).map(BlockHash).collect(), (101..=108).map(BlockHash).collect());
        // 32 blocks of 16 tokens here, 6 of 128 there.
        index.place(WorkerId(1), &small[..32]);
        index.place(WorkerId(2), &large[..6]);
        let views = [
            RequestView { chain: &small, prompt_tokens: 1025, block_tokens: 16.0 },
            RequestView { chain: &large, prompt_tokens: 1025, block_tokens: 128.0 },
        ];
        let mut candidates = [idle(1), idle(2), idle(3)];
        let turn = Turn { counter: 0, random: 0 };
        let picked =
            route_views(Policy::Prefix, &views, &[0, 1, 0], &mut candidates, &turn, &mut index).unwrap();
        assert_eq!(candidates.map(|candidate| candidate.matched_blocks), [32, 48, 0]);
        assert_eq!((picked.0.index, picked.0.matched_tokens), (1, 768));
        // Recorded in the names that this worker uses.
        assert_eq!((index.resident(WorkerId(2)), index.matched(&large)), (8, vec![(WorkerId(2), 8)]));
    }

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
                tokens_per_ms: 8.0,
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
