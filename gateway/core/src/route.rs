//! One routing step: what the index knows, and what waits in front, is put beside each candidate, and one is picked.
//! The gateway and the simulator both route by this; recording the choice in index and load is theirs.

use std::time::Duration;

use crate::index::PrefixIndex;
use crate::pick::{Candidate, Pick, Policy, RequestView, Turn, pick};
use crate::waiting_room::{Ahead, Quote};

/// Picks one of `candidates`; `None` if there are none. Workers may cut prompts into blocks of different sizes: `views` are
/// the request in each way, `view_of` a candidate's, by its place; the first where it says nothing. Matches, counted in
/// blocks of the first view, and what waits `ahead` are filled in here.
pub fn consider(
    policy: Policy,
    (views, view_of): (&[RequestView<'_>], &[usize]),
    candidates: &mut [Candidate],
    ahead: &Ahead,
    (now, turn): (Duration, &Turn),
    index: &PrefixIndex,
) -> Option<Pick> {
    fill_matches(views, view_of, candidates, index);
    index.fill_reuse(now, views.first()?, candidates);
    for candidate in &mut *candidates {
        candidate.ahead_ms = ahead.of(candidate.worker);
    }
    pick(policy, views.first()?, candidates, turn)
}

/// Whether a request may have to wait for a worker: only a choice by cost can be worth it, and only where there is a prompt.
pub fn may_wait(policy: Policy, holds: bool, prompt_tokens: u64) -> bool {
    holds && policy == Policy::Prefix && prompt_tokens > 0
}

/// The waiting room's quote for this pick. Whoever may not have to wait finds no backlog.
pub fn quote(
    policy: Policy,
    holds: bool,
    prompt_tokens: u64,
    candidates: &[Candidate],
    pick: &Pick,
) -> Quote {
    let chosen = &candidates[pick.index];
    let backlog_ms =
        if may_wait(policy, holds, prompt_tokens) { chosen.load.pace.backlog_ms } else { f64::NEG_INFINITY };
    Quote { worker: chosen.worker, backlog_ms, own_ms: pick.cost.own_ms, weighed: candidates.len() }
}

/// Says of each candidate how much of the request it holds, as [`consider`] does.
pub fn fill_matches(
    views: &[RequestView<'_>],
    view_of: &[usize],
    candidates: &mut [Candidate],
    index: &PrefixIndex,
) {
    let Some(first) = views.first() else { return };
    for (n, view) in views.iter().enumerate() {
        let lengths = index.lengths(view.chain);
        for (i, candidate) in candidates.iter_mut().enumerate() {
            if view_of.get(i).copied().unwrap_or(0) != n {
                continue;
            }
            let blocks = lengths.of(candidate.worker);
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

    const NOW: Duration = Duration::from_secs(7);

    fn idle(worker: u32) -> Candidate {
        Candidate::new(WorkerId(worker), LoadSnapshot::default(), 8.0, 1.0)
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
        let ahead = Ahead::default();
        let seen = (&views[..], &[0, 1, 0][..]);
        let pick = consider(Policy::Prefix, seen, &mut candidates, &ahead, (NOW, &turn), &index).unwrap();
        assert_eq!(candidates.map(|candidate| candidate.matched_blocks), [32, 48, 0]);
        assert_eq!((pick.index, pick.matched_tokens), (1, 768));
    }

    #[test]
    fn the_second_request_goes_where_the_first_was_placed() {
        let mut index = PrefixIndex::new(1 << 20);
        let chain: Vec<_> = (1..=40).map(BlockHash).collect();
        let request = RequestView { chain: &chain, prompt_tokens: 641, block_tokens: 16.0 };
        let mut candidates: Vec<_> = (0..5).map(|worker| idle(worker * 7)).collect();
        let turn = Turn { counter: 0, random: 9 };
        let (views, ahead) = ([request], Ahead::default());
        let mut route = |candidates: &mut [Candidate]| {
            let pick = consider(Policy::Prefix, (&views, &[]), candidates, &ahead, (NOW, &turn), &index)?;
            Some((pick, index.place(candidates[pick.index].worker, &chain)))
        };
        let (first, placement) = route(&mut candidates).unwrap();
        assert_eq!((first.matched_tokens, placement.added()), (0, 40));
        let (second, _) = route(&mut candidates).unwrap();
        assert_eq!((second.index, second.matched_tokens), (first.index, 640));
        assert_eq!(candidates[second.index].matched_blocks, 40);
        assert!(route(&mut []).is_none());
    }

    #[test]
    fn only_a_choice_by_cost_waits() {
        let chain: Vec<_> = (1..=4).map(BlockHash).collect();
        let view = [RequestView { chain: &chain, prompt_tokens: 65, block_tokens: 16.0 }];
        let mut busy = [idle(1)];
        busy[0].load.pace.backlog_ms = 900.0;
        let (ahead, turn, index) = (Ahead::default(), Turn { counter: 0, random: 9 }, PrefixIndex::new(0));
        let pick = consider(Policy::Prefix, (&view, &[]), &mut busy, &ahead, (NOW, &turn), &index).unwrap();
        let backlog = |policy, holds, tokens| quote(policy, holds, tokens, &busy, &pick).backlog_ms;
        assert_eq!(backlog(Policy::Prefix, true, 65), 900.0);
        for (policy, holds, tokens) in
            [(Policy::Prefix, false, 65), (Policy::RoundRobin, true, 65), (Policy::Prefix, true, 0)]
        {
            assert_eq!(backlog(policy, holds, tokens), f64::NEG_INFINITY);
        }
    }
}
