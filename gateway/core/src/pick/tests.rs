//! What each policy chooses, and the properties that hold for every choice.

use keyway_wire::block_hash::{BlockHash, Chain, HashKey};
use proptest::prelude::*;

use super::*;
use crate::index::WorkerId;
use crate::load::LoadSnapshot;
use crate::pace::PaceSnapshot;

const BLOCK_TOKENS: f64 = 64.0;
const TOKENS_PER_MS: f64 = 8.0;
const TURN: Turn = Turn { counter: 0, random: 0 };

fn chain(seed: u64, blocks: usize) -> Vec<BlockHash> {
    let mut chain = Chain::new(HashKey::new(seed), b"");
    (0..blocks).map(|i| chain.push(&i.to_le_bytes())).collect()
}

fn view(chain: &[BlockHash]) -> RequestView<'_> {
    RequestView {
        chain,
        prompt_tokens: chain.len() as u64 * 64 + 10,
        block_tokens: BLOCK_TOKENS,
        media: &[],
        session: None,
    }
}

fn worker(id: u32, requests: u64, waiting: u64, matched_blocks: u32) -> Candidate {
    let pace = PaceSnapshot { backlog_ms: waiting as f64 / TOKENS_PER_MS, ..PaceSnapshot::default() };
    let load = LoadSnapshot { requests, waiting_prefill_tokens: waiting, pace, ..LoadSnapshot::default() };
    Candidate { matched_blocks, ..Candidate::new(WorkerId(id), load, TOKENS_PER_MS, 1.0) }
}

fn picked(policy: Policy, request: &RequestView<'_>, candidates: &[Candidate], turn: &Turn) -> Pick {
    pick(policy, request, candidates, turn).unwrap()
}

fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
    let one =
        (0_u64..200, 0_u64..100_000, 0_u32..60, prop::sample::select(vec![0.0, 0.5, 1.0, 3.0, f64::NAN]));
    prop::collection::vec(one, 1..20).prop_map(|all| {
        let one = |(id, (requests, waiting, matched, weight))| Candidate {
            weight,
            ..worker(id, requests, waiting, matched)
        };
        (0_u32..).zip(all).map(one).collect()
    })
}

proptest! {
    #[test]
    fn every_policy_gives_a_candidate_and_tokens_that_add_up(
        candidates in candidates(),
        blocks in 0_usize..60,
        prompt_tokens in 0_u64..5000,
        counter in any::<u64>(),
        random in any::<u64>(),
    ) {
        let chain = chain(1, blocks);
        let request = RequestView { chain: &chain, prompt_tokens, block_tokens: BLOCK_TOKENS, media: &[], session: None };
        for policy in Policy::ALL {
            let pick = picked(policy, &request, &candidates, &Turn { counter, random });
            prop_assert!(pick.index < candidates.len());
            prop_assert_eq!(pick.matched_tokens + pick.uncached_tokens, prompt_tokens);
            prop_assert!(pick.matched_tokens < prompt_tokens.max(1));
            prop_assert_eq!(pick.reason == Reason::Only, candidates.len() == 1);
        }
    }

    #[test]
    fn prefix_takes_one_about_as_cheap_as_the_cheapest(candidates in candidates(), blocks in 1_usize..60) {
        let chain = chain(1, blocks);
        let request = view(&chain);
        let model = CostModel::default();
        let pick = picked(Policy::Prefix, &request, &candidates, &TURN);
        let cost = |candidate: &Candidate| cost_on(&model, &request, candidate).total_ms();
        let cheapest = candidates.iter().min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap();
        let block_ms = BLOCK_TOKENS * model.queue(cheapest).ms_per_token;
        prop_assert!(cost(&candidates[pick.index]) <= model.equal_to(cost(cheapest), block_ms));
    }

    #[test]
    fn prefix_does_not_depend_on_the_order_of_the_candidates(candidates in candidates(), cut in any::<prop::sample::Index>()) {
        let chain = chain(1, 60);
        let mut turned = candidates.clone();
        turned.rotate_left(cut.index(candidates.len()));
        let first = picked(Policy::Prefix, &view(&chain), &candidates, &TURN);
        let second = picked(Policy::Prefix, &view(&chain), &turned, &TURN);
        prop_assert_eq!(candidates[first.index].worker, turned[second.index].worker);
    }
}

#[test]
fn nobody_to_choose_from_is_no_choice() {
    for policy in Policy::ALL {
        assert_eq!(pick(policy, &view(&[]), &[], &TURN), None);
    }
}

#[test]
fn the_holder_of_the_prefix_is_chosen() {
    let chain = chain(1, 20);
    let all = [worker(0, 0, 0, 0), worker(1, 2, 0, 18), worker(2, 0, 0, 1)];
    let pick = picked(Policy::Prefix, &view(&chain), &all, &TURN);
    assert_eq!((pick.index, pick.reason), (1, Reason::Prefix));
    assert_eq!((pick.matched_tokens, pick.uncached_tokens), (18 * 64, 2 * 64 + 10));
}

#[test]
fn a_full_hit_still_computes_its_last_token() {
    let chain = chain(1, 20);
    let request = RequestView {
        chain: &chain,
        prompt_tokens: 20 * 64,
        block_tokens: BLOCK_TOKENS,
        media: &[],
        session: None,
    };
    let pick = picked(Policy::Prefix, &request, &[worker(0, 0, 0, 20), worker(1, 0, 0, 0)], &TURN);
    assert_eq!((pick.matched_tokens, pick.uncached_tokens), (20 * 64 - 1, 1));
}

#[test]
fn a_prefix_spreads_when_its_holder_has_too_long_a_queue() {
    let chain = chain(1, 20);
    let all = |waiting| [worker(0, 0, waiting, 18), worker(1, 0, 0, 0)];
    let saved = 18.0 * BLOCK_TOKENS * (1.0 + CostModel::default().displaced);
    let stays = picked(Policy::Prefix, &view(&chain), &all((saved * 0.8) as u64), &TURN);
    assert_eq!((stays.index, stays.reason), (0, Reason::Prefix));
    let leaves = picked(Policy::Prefix, &view(&chain), &all((saved * 1.5) as u64), &TURN);
    assert_eq!((leaves.index, leaves.reason), (1, Reason::Spread));
}

/// Others will use the copy, so this request pays a part of it.
#[test]
fn a_copy_that_will_be_used_is_made_sooner() {
    let chain = chain(1, 20);
    let reuse = Reuse { tokens: 18.0 * 64.0, uses: 9.0 };
    let all = |waiting| [worker(0, 0, waiting, 18), Candidate { reuse, ..worker(1, 0, 0, 0) }];
    let waiting = (0.3 * 18.0 * BLOCK_TOKENS * (1.0 + CostModel::default().displaced)) as u64;
    let leaves = picked(Policy::Prefix, &view(&chain), &all(waiting), &TURN);
    assert_eq!((leaves.index, leaves.reason), (1, Reason::Spread));
    assert!(leaves.cost.reuse_ms > 0.0 && leaves.cost.total_ms() > 0.0);
    let off = CostModel { reuse: 0.0, ..CostModel::default() };
    let stays = pick_with(&off, Policy::Prefix, &view(&chain), &all(waiting), &TURN).unwrap();
    assert_eq!((stays.index, stays.reason), (0, Reason::Prefix));
}

/// However hot: a copy costs, and equals are no reason to make one.
#[test]
fn no_copy_is_made_without_a_queue() {
    let shared = chain(1, 20);
    let reuse = Reuse { tokens: 20.0 * 64.0, uses: 1e9 };
    for suffix in 2..40 {
        let mut prompt = shared.clone();
        prompt.extend(chain(suffix, 1));
        let all = [worker(0, 0, 0, 20), Candidate { reuse, ..worker(1, 0, 0, 0) }];
        assert_eq!(picked(Policy::Prefix, &view(&prompt), &all, &TURN).index, 0);
    }
}

#[test]
fn a_hot_prefix_spreads_on_running_streams_alone() {
    let chain = chain(1, 20);
    let pick = picked(Policy::Prefix, &view(&chain), &[worker(0, 60, 0, 20), worker(1, 0, 0, 0)], &TURN);
    assert_eq!((pick.index, pick.reason), (1, Reason::Spread));
}

/// Every prompt of a fleet begins with the same system prompt, and one worker saw it first.
#[test]
fn one_shared_block_draws_nobody() {
    let mut counts = [0; 4];
    for prompt in 0..1000 {
        let mut chain = chain(prompt, 20);
        chain[0] = BlockHash(7);
        let all = [worker(0, 0, 0, 1), worker(1, 0, 0, 0), worker(2, 0, 0, 0), worker(3, 0, 0, 0)];
        let pick = picked(Policy::Prefix, &view(&chain), &all, &TURN);
        assert_eq!(pick.reason, Reason::New);
        counts[pick.index] += 1;
    }
    assert!(counts.iter().all(|count| (200..300).contains(count)), "{counts:?}");
}

#[test]
fn one_shared_block_draws_nobody_whatever_its_estimated_size() {
    let chain = chain(1, 3);
    for tenths in 300..700 {
        let request = RequestView {
            chain: &chain,
            prompt_tokens: 200,
            block_tokens: f64::from(tenths) / 10.0,
            media: &[],
            session: None,
        };
        for matched in 0..3 {
            let all = [worker(0, 0, 0, matched + 1), worker(1, 0, 0, matched)];
            let model = CostModel::default();
            let block_ms = request.block_tokens.ceil() / TOKENS_PER_MS;
            let limit = model.equal_to(cost_on(&model, &request, &all[0]).total_ms(), block_ms);
            assert!(cost_on(&model, &request, &all[1]).total_ms() <= limit);
        }
    }
}

#[test]
fn a_burst_of_one_new_prefix_goes_together_before_anything_is_recorded() {
    let all: Vec<Candidate> = (0..8).map(|id| worker(id, 0, 0, 0)).collect();
    let shared = chain(1, 20);
    let expected = picked(Policy::Prefix, &view(&shared), &all, &TURN);
    assert_eq!(expected.reason, Reason::New);
    for suffix in 2..50 {
        let mut burst = shared.clone();
        burst.extend(chain(suffix, 1));
        let turn = Turn { counter: suffix, random: suffix << 40 };
        assert_eq!(picked(Policy::Prefix, &view(&burst), &all, &turn).index, expected.index);
    }
}

#[test]
fn a_session_stays_together_where_its_prompts_do_not_show_it() {
    let all: Vec<Candidate> = (0..8).map(|id| worker(id, 0, 0, 0)).collect();
    // Each turn's text begins differently, as with a time that the template leaves out.
    let at = |session: Option<u64>, turn: u64| {
        let chain = chain(turn, 20);
        let request = RequestView { session, ..view(&chain) };
        let pick = picked(Policy::Prefix, &request, &all, &Turn { counter: turn, random: turn << 40 });
        assert_eq!(pick.reason, if session.is_some() { Reason::Session } else { Reason::New });
        pick.index
    };
    let places = |session: Option<u64>| {
        (0..20).map(|turn| at(session, turn)).collect::<std::collections::BTreeSet<_>>()
    };
    let homes: Vec<_> = (0..40).map(|session| places(Some(session))).collect();
    assert!(homes.iter().all(|places| places.len() == 1));
    assert_eq!(homes.iter().flatten().collect::<std::collections::BTreeSet<_>>().len(), 8, "sessions spread");
    assert!(places(None).len() > 4);
}

proptest! {
    /// A session's name says less than anything that is known: it never makes a worker eligible that was not.
    #[test]
    fn a_session_never_outweighs_a_cost(candidates in candidates(), blocks in 1_usize..60, session in any::<u64>()) {
        let chain = chain(1, blocks);
        let model = CostModel::default();
        let plain = view(&chain);
        let hinted = RequestView { session: Some(session), ..plain };
        let (without, with) =
            (picked(Policy::Prefix, &plain, &candidates, &TURN), picked(Policy::Prefix, &hinted, &candidates, &TURN));
        let cost = |i: usize| cost_on(&model, &plain, &candidates[i]).total_ms();
        let cheapest = (0..candidates.len()).min_by(|&a, &b| cost(a).total_cmp(&cost(b))).unwrap();
        let block_ms = BLOCK_TOKENS * model.queue(&candidates[cheapest]).ms_per_token;
        prop_assert!(cost(with.index) <= model.equal_to(cost(cheapest), block_ms));
        let eligible = (0..candidates.len()).filter(|&i| cost(i) <= model.equal_to(cost(cheapest), block_ms)).count();
        prop_assert!(eligible > 1 || with.index == without.index);
    }
}

#[test]
fn round_robin_takes_turns_and_keeps_proportions() {
    let mut all = vec![worker(0, 9, 0, 0), worker(1, 0, 0, 0), worker(2, 0, 0, 0)];
    let sequence = |all: &[Candidate], n: u64| -> Vec<usize> {
        let at = |counter| picked(Policy::RoundRobin, &view(&[]), all, &Turn { counter, random: 0 }).index;
        (0..n).map(at).collect()
    };
    assert_eq!(sequence(&all, 5), [0, 1, 2, 0, 1]);
    all[2].weight = 2.0;
    let weighted = sequence(&all, 4000);
    for (index, share) in [(0, 1000), (1, 1000), (2, 2000)] {
        let count = weighted.iter().filter(|&&i| i == index).count();
        assert!(count.abs_diff(share) <= 4, "{index}: {count}");
    }
}

#[test]
fn least_loaded_takes_the_fewest_requests_for_the_weight_and_equals_take_turns() {
    let mut all = vec![worker(0, 5, 0, 0), worker(1, 2, 90_000, 0), worker(2, 2, 0, 0)];
    let at = |all: &[Candidate], counter| {
        picked(Policy::LeastLoaded, &view(&[]), all, &Turn { counter, random: 0 }).index
    };
    assert_eq!((at(&all, 0), at(&all, 1), at(&all, 2)), (1, 1, 2));
    all[0].weight = 4.0;
    assert_eq!(at(&all, 1), 0);
}

#[test]
fn power_of_two_never_takes_the_most_loaded_of_all_and_reaches_the_others() {
    let all = [worker(0, 9, 0, 0), worker(1, 1, 0, 0), worker(2, 2, 0, 0)];
    let mut counts = [0; 3];
    for i in 0..1000_u64 {
        let random = i.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        counts[picked(Policy::PowerOfTwo, &view(&[]), &all, &Turn { counter: 0, random }).index] += 1;
    }
    assert_eq!(counts[0], 0);
    assert!(counts[1] > 600 && counts[2] > 250, "{counts:?}");
}

#[test]
fn random_follows_the_weights() {
    let mut all = [worker(0, 0, 0, 0), worker(1, 0, 0, 0)];
    all[1].weight = 3.0;
    let at = |random| picked(Policy::Random, &view(&[]), &all, &Turn { counter: 0, random }).index;
    assert_eq!((at(0), at(u64::MAX / 4 - 9999), at(u64::MAX / 4 + 9999), at(u64::MAX)), (0, 0, 1, 1));
}

#[test]
fn chwbl_keeps_a_conversation_together_until_its_worker_is_above_the_bound() {
    let long = chain(1, 60);
    let mut all: Vec<Candidate> = (0..4).map(|id| worker(id, 8, 0, 0)).collect();
    let home = picked(Policy::Chwbl, &view(&long[..20]), &all, &TURN).index;
    for turns in [30, 40, 60] {
        assert_eq!(picked(Policy::Chwbl, &view(&long[..turns]), &all, &TURN).index, home);
    }
    all[home].load.requests = 12;
    assert_ne!(picked(Policy::Chwbl, &view(&long), &all, &TURN).index, home);
}
