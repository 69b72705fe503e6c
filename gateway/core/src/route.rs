//! One routing step: what the index knows, and what waits in front, is put beside each candidate, and one is
//! picked. The gateway and the simulator both route by this; recording the choice in index and load is
//! theirs.

use std::time::Duration;

use crate::index::{MatchLengths, PrefixIndex, WorkerId};
use crate::peers::fill_peers;
use crate::pick::{Candidate, Pick, Policy, RequestView, Turn, pick_readied};
use crate::transfers::Transfer;
use crate::waiting_room::{Ahead, Quote};

/// A request as each of the candidates sees it. Workers may cut prompts into blocks of different sizes.
#[derive(Copy, Clone, Debug, Default)]
pub struct PromptViews<'a> {
    /// The request in each way; matches are counted in blocks of the first.
    pub views: &'a [RequestView<'a>],
    /// A candidate's view, by its place; the first where it says nothing.
    pub view_of: &'a [usize],
    /// Of a prompt that goes by its text, because tokens are known of its beginning alone: that beginning, in
    /// each way.
    pub leads: &'a [RequestView<'a>],
    /// Of each candidate which of these is its own, and its name in the index for blocks of tokens.
    pub lead_of: &'a [(usize, WorkerId)],
}

impl<'a> PromptViews<'a> {
    /// That of a request without such a beginning.
    pub fn of(views: &'a [RequestView<'a>], view_of: &'a [usize]) -> Self {
        Self { views, view_of, ..Self::default() }
    }
}

/// Picks one of `candidates`; `None` if there are none. Matches, counted in blocks of the first view, and
/// what waits `ahead` are filled in here.
pub fn consider(
    policy: Policy,
    seen: &PromptViews<'_>,
    candidates: &mut [Candidate],
    ahead: &Ahead,
    (now, turn): (Duration, &Turn),
    index: &PrefixIndex,
) -> Option<Pick> {
    let lengths = match_all(seen, candidates, index);
    pick_matched(policy, seen, candidates, ahead, (now, turn), (index, &lengths))
}

/// [`consider`], where workers can fetch from each other what they hold of a prompt
/// ([`crate::peers::fill_peers`]).
pub fn consider_peers(
    policy: Policy,
    seen: &PromptViews<'_>,
    candidates: &mut [Candidate],
    ahead: &Ahead,
    (now, turn): (Duration, &Turn),
    (index, transfer): (&PrefixIndex, impl Fn(&Candidate, &Candidate) -> Option<Transfer>),
) -> Option<Pick> {
    let lengths = match_all(seen, candidates, index);
    fill_peers(seen.views.first()?, candidates, transfer);
    pick_matched(policy, seen, candidates, ahead, (now, turn), (index, &lengths))
}

#[inline(always)]
fn pick_matched(
    policy: Policy,
    seen: &PromptViews<'_>,
    candidates: &mut [Candidate],
    ahead: &Ahead,
    (now, turn): (Duration, &Turn),
    (index, lengths): (&PrefixIndex, &MatchLengths),
) -> Option<Pick> {
    let (first, all) = (seen.views.first()?, candidates.len());
    let own_share = candidates.first()?.load.shares.own;
    let hottest = index.hottest(now, first, lengths, (all, own_share));
    pick_readied(policy, first, candidates, turn, |candidate| {
        candidate.reuse = hottest.reuse(first, candidate);
        // What is fetched need not be computed, and is no copy.
        candidate.reuse.tokens = (candidate.reuse.tokens - first.fetched_tokens(candidate) as f64).max(0.0);
        candidate.ahead_ms = ahead.of(candidate.worker);
    })
}

/// Whether a request may have to wait for a worker: only a choice by cost can be worth it, and only where
/// there is a prompt.
pub fn may_wait(policy: Policy, holds: bool, prompt_tokens: u64) -> bool {
    holds && policy == Policy::Prefix && prompt_tokens > 0
}

/// The waiting room's quote for this pick. A request that must not wait finds no backlog.
pub fn quote(
    policy: Policy,
    holds: bool,
    prompt_tokens: u64,
    candidates: &[Candidate],
    pick: &Pick,
) -> Quote {
    quote_one(policy, holds, prompt_tokens, (&candidates[pick.index], candidates.len()), pick)
}

/// [`quote`] of the chosen one alone, of so many that were weighed.
pub fn quote_one(
    policy: Policy,
    holds: bool,
    prompt_tokens: u64,
    (chosen, weighed): (&Candidate, usize),
    pick: &Pick,
) -> Quote {
    let backlog_ms =
        if may_wait(policy, holds, prompt_tokens) { chosen.load.pace.backlog_ms } else { f64::NEG_INFINITY };
    Quote { worker: chosen.worker, backlog_ms, own_ms: pick.cost.own_ms, weighed }
}

/// Says of each candidate how much of the request it holds, as [`consider`] does.
pub fn fill_matches(seen: &PromptViews<'_>, candidates: &mut [Candidate], index: &PrefixIndex) {
    match_all(seen, candidates, index);
}

/// [`fill_matches`]; gives the lengths of the matches too.
fn match_all(seen: &PromptViews<'_>, candidates: &mut [Candidate], index: &PrefixIndex) -> MatchLengths {
    let PromptViews { views, view_of, leads, .. } = *seen;
    let mut found = MatchLengths::default();
    let Some(first) = views.first() else { return found };
    for (n, view) in views.iter().enumerate() {
        let lengths = index.lengths(view.reusable());
        for (i, candidate) in candidates.iter_mut().enumerate() {
            if view_of.get(i).copied().unwrap_or(0) != n {
                continue;
            }
            let in_first = |blocks: u32| {
                if n == 0 {
                    return blocks;
                }
                // What ends inside one of the first view's blocks does not count; 1e-9 forgives the division.
                (f64::from(blocks) * view.block_tokens / first.block_tokens + 1e-9) as u32
            };
            candidate.matched_blocks = in_first(lengths.of(candidate.worker));
            let anywhere = candidate.source.map_or(0, |tiers| in_first(lengths.of(tiers.worker)));
            candidate.fetched_blocks = anywhere.saturating_sub(candidate.matched_blocks);
            found.add(candidate.matched_blocks);
        }
    }
    if !leads.is_empty() {
        match_leads(seen, candidates, index);
    }
    found
}

/// Where more is held of a prompt's first tokens than its text shows, that counts. A worker whose events tell
/// what it holds names text by its tokens, and a prompt with a picture goes by its text.
fn match_leads(seen: &PromptViews<'_>, candidates: &mut [Candidate], index: &PrefixIndex) {
    let Some(first) = seen.views.first() else { return };
    // Behind the first picture a block has other tokens than one of text.
    let all = first.spans().blocks(first.chain.len());
    let most = first.media.first().map_or(all, |media| media.at_blocks as usize);
    for (n, lead) in seen.leads.iter().enumerate() {
        let lengths = index.lengths(lead.chain);
        for (candidate, &(of, named)) in candidates.iter_mut().zip(seen.lead_of) {
            if of != n {
                continue;
            }
            let tokens = f64::from(lengths.of(named)) * lead.block_tokens;
            let blocks = ((tokens / first.block_tokens + 1e-9) as usize).min(most) as u32;
            let held = candidate.held_blocks();
            candidate.matched_blocks = candidate.matched_blocks.max(blocks);
            candidate.fetched_blocks = held.saturating_sub(candidate.matched_blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use keyway_wire::block_hash::BlockHash;

    use super::*;
    use crate::load::LoadSnapshot;
    use crate::pick::Source;

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
            RequestView { chain: &small, prompt_tokens: 1025, block_tokens: 16.0, media: &[], session: None },
            RequestView {
                chain: &large,
                prompt_tokens: 1025,
                block_tokens: 128.0,
                media: &[],
                session: None,
            },
        ];
        let mut candidates = [idle(1), idle(2), idle(3)];
        let turn = Turn { counter: 0, random: 0 };
        let ahead = Ahead::default();
        let seen = PromptViews::of(&views, &[0, 1, 0]);
        let pick = consider(Policy::Prefix, &seen, &mut candidates, &ahead, (NOW, &turn), &index).unwrap();
        assert_eq!(candidates.map(|candidate| candidate.matched_blocks), [32, 48, 0]);
        assert_eq!((pick.index, pick.matched_tokens), (1, 768));
    }

    /// Holders of 32 blocks in their own cache and in their host's memory, and a worker that holds nothing:
    /// who is chosen.
    #[test]
    fn a_prefix_in_the_host_s_memory_is_worth_more_than_none_and_less_than_one_in_the_gpu_s() {
        let mut index = PrefixIndex::new(1 << 20);
        let chain: Vec<_> = (1..=40).map(BlockHash).collect();
        let (own, cpu, cpu_tiers) = (WorkerId(1), WorkerId(2), WorkerId(102));
        index.place(own, &chain[..32]);
        index.place(cpu_tiers, &chain[..32]);
        let request = [RequestView {
            chain: &chain,
            prompt_tokens: 641,
            block_tokens: 16.0,
            media: &[],
            session: None,
        }];
        let route = |of: &[u32], fetch: Option<f64>| {
            let mut candidates: Vec<Candidate> = of.iter().map(|&worker| idle(worker)).collect();
            for candidate in candidates.iter_mut().filter(|candidate| candidate.worker == cpu) {
                candidate.source = fetch.map(|tokens_per_ms| Source::tiers(cpu_tiers, tokens_per_ms));
            }
            let turn = Turn { counter: 0, random: 9 };
            let (seen, ahead) = (PromptViews::of(&request, &[]), Ahead::default());
            let pick =
                consider(Policy::Prefix, &seen, &mut candidates, &ahead, (NOW, &turn), &index).unwrap();
            (of[pick.index], pick.matched_tokens, pick.cost.fetch_ms)
        };
        for cold in 3..40 {
            assert_eq!(route(&[cold, 2], Some(80.0)), (2, 512, 6.4));
            assert_eq!(route(&[cold, 2, 1], Some(80.0)), (1, 512, 0.0));
        }
        // It computes 8 tokens in a millisecond; slower than that to fetch, and those who come later wait
        // less for it.
        assert_eq!(route(&[2, 3], Some(2.0)).0, 3);
        // Switched off, it holds nothing: the order among equals decides.
        let firsts = (3..40).filter(|&cold| route(&[cold, 2], None).0 == 2).count();
        assert!((5..33).contains(&firsts), "{firsts}");
    }

    #[test]
    fn the_second_request_goes_where_the_first_was_placed() {
        let mut index = PrefixIndex::new(1 << 20);
        let chain: Vec<_> = (1..=40).map(BlockHash).collect();
        let request =
            RequestView { chain: &chain, prompt_tokens: 641, block_tokens: 16.0, media: &[], session: None };
        let mut candidates: Vec<_> = (0..5).map(|worker| idle(worker * 7)).collect();
        let turn = Turn { counter: 0, random: 9 };
        let (views, ahead) = ([request], Ahead::default());
        let mut route = |candidates: &mut [Candidate]| {
            let seen = PromptViews::of(&views, &[]);
            let pick = consider(Policy::Prefix, &seen, candidates, &ahead, (NOW, &turn), &index)?;
            Some((pick, index.place(candidates[pick.index].worker, &chain)))
        };
        let (first, placement) = route(&mut candidates).unwrap();
        assert_eq!((first.matched_tokens, placement.added()), (0, 40));
        let (second, _) = route(&mut candidates).unwrap();
        assert_eq!((second.index, second.matched_tokens), (first.index, 640));
        assert_eq!(candidates[second.index].matched_blocks, 40);
        assert!(route(&mut []).is_none());
    }

    /// A conversation of text, known by tokens, gets its first picture and goes by its text from then on.
    #[test]
    fn the_first_tokens_of_a_prompt_with_a_picture_are_found_where_its_text_is_not_known() {
        let mut index = PrefixIndex::new(1 << 20);
        let (text, lead): (Vec<_>, Vec<_>) =
            ((1..=60).map(BlockHash).collect(), (101..=110).map(BlockHash).collect());
        // 8 blocks of 32 tokens of it, 256 tokens, are where it went before, under its name for tokens.
        index.place(WorkerId(12), &lead[..8]);
        let media = [crate::media::Media { at_blocks: 22.0, blocks: 30.0, more_tokens: 400.0 - 30.0 * 16.0 }];
        let views = [RequestView {
            chain: &text,
            prompt_tokens: 880,
            block_tokens: 16.0,
            media: &media,
            session: None,
        }];
        let leads = [RequestView { chain: &lead, block_tokens: 32.0, media: &[], ..views[0] }];
        let lead_of = [11, 12, 13].map(|named| (0, WorkerId(named)));
        let (ahead, turn) = (Ahead::default(), Turn { counter: 0, random: 0 });
        let route = |index: &PrefixIndex, leads: &[RequestView<'_>]| {
            let mut candidates = [idle(1), idle(2), idle(3)];
            let seen = PromptViews { leads, lead_of: &lead_of, ..PromptViews::of(&views, &[]) };
            let pick = consider(Policy::Prefix, &seen, &mut candidates, &ahead, (NOW, &turn), index).unwrap();
            (pick.index, pick.matched_tokens, candidates.map(|candidate| candidate.matched_blocks))
        };
        assert_eq!(route(&index, &leads), (1, 256, [0, 16, 0]));
        assert_eq!(route(&index, &[]).2, [0; 3]);
        // As far as the text before the picture goes, and no less than what is known by text.
        index.place(WorkerId(13), &lead);
        let found = index.place(WorkerId(12), &lead[8..]);
        assert_eq!((found.added(), route(&index, &leads).2), (2, [0, 20, 20]));
        index.place(WorkerId(1), &text[..40]);
        assert_eq!(route(&index, &leads).2, [40, 20, 20]);
    }

    #[test]
    fn only_a_choice_by_cost_waits() {
        let chain: Vec<_> = (1..=4).map(BlockHash).collect();
        let view =
            [RequestView { chain: &chain, prompt_tokens: 65, block_tokens: 16.0, media: &[], session: None }];
        let mut busy = [idle(1)];
        busy[0].load.pace.backlog_ms = 900.0;
        let (ahead, turn, index) = (Ahead::default(), Turn { counter: 0, random: 9 }, PrefixIndex::new(0));
        let seen = PromptViews::of(&view, &[]);
        let pick = consider(Policy::Prefix, &seen, &mut busy, &ahead, (NOW, &turn), &index).unwrap();
        let backlog = |policy, holds, tokens| quote(policy, holds, tokens, &busy, &pick).backlog_ms;
        assert_eq!(backlog(Policy::Prefix, true, 65), 900.0);
        for (policy, holds, tokens) in
            [(Policy::Prefix, false, 65), (Policy::RoundRobin, true, 65), (Policy::Prefix, true, 0)]
        {
            assert_eq!(backlog(policy, holds, tokens), f64::NEG_INFINITY);
        }
    }
}
