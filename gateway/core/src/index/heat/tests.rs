//! What is hot, what is not, and that it is forgotten and bounded.

use proptest::prelude::*;

use super::*;
use crate::index::WorkerId;
use crate::load::LoadSnapshot;
use crate::others::Shares;

const BYTES: usize = 1 << 16;

fn s(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

fn chain(seed: u64, blocks: u64) -> Vec<BlockHash> {
    (0..blocks).map(|i| BlockHash((seed * 1000 + i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))).collect()
}

fn view(chain: &[BlockHash]) -> RequestView<'_> {
    RequestView {
        chain,
        prompt_tokens: 16 * chain.len() as u64 + 1,
        block_tokens: 16.0,
        media: &[],
        session: None,
    }
}

/// Workers that compute a token in a millisecond and hold so many blocks.
fn workers(matched: &[u32]) -> Vec<Candidate> {
    let of = |(id, &matched_blocks): (u32, &u32)| Candidate {
        matched_blocks,
        ..Candidate::new(WorkerId(id), LoadSnapshot::default(), 1.0, 1.0)
    };
    (0..).zip(matched).map(of).collect()
}

/// As a choice asks, after the matches.
fn fill(heat: &Heat, now: Duration, request: &RequestView<'_>, all: &mut [Candidate]) {
    let lengths = MatchLengths::of(all);
    let hottest = heat.hottest(now, request, &lengths, (all.len(), all[0].load.shares.own));
    for one in all.iter_mut() {
        one.reuse = hottest.reuse(request, one);
    }
}

/// What a copy would be used for at the worker that holds nothing, after uses at these moments.
fn reuse(heat: &mut Heat, uses: impl IntoIterator<Item = f64>, now: f64, holders: usize) -> Reuse {
    let chain = chain(1, 40);
    let mut all = workers(&[vec![30; holders], vec![0]].concat());
    for at in uses {
        heat.used(s(at), &view(&chain), &MatchLengths::of(&all), 500);
    }
    fill(heat, s(now), &view(&chain), &mut all);
    assert_eq!(all[0].reuse, Reuse::default(), "whoever holds it makes no copy");
    all[holders].reuse
}

#[test]
fn uses_count_that_another_one_is_in_the_way_of() {
    let once_a_second = || (0..120).map(f64::from);
    let hot = reuse(&mut Heat::new(BYTES), once_a_second(), 120.0, 1);
    assert_eq!(hot.tokens, 480.0);
    // 76 of the last two minutes count, each with half a second of work in every second.
    assert!((33.0..38.0).contains(&hot.uses), "{hot:?}");
    let four = reuse(&mut Heat::new(BYTES), once_a_second(), 120.0, 4);
    assert!((four.uses * 4.0 / hot.uses - 1.0).abs() < 0.01, "{four:?}");
    // A conversation asks again when it was answered.
    let talk = reuse(&mut Heat::new(BYTES), (0..3).map(|turn| 40.0 * f64::from(turn)), 120.0, 1);
    assert!(talk.uses < 0.06, "{talk:?}");
}

#[test]
fn one_of_four_gateways_sees_a_quarter_and_counts_all() {
    let (mut heat, chain) = (Heat::new(BYTES), chain(1, 40));
    let mut all = workers(&[30, 0]);
    for worker in &mut all {
        worker.load = worker.load.among(Shares { own: 0.25, gateways: 0.25 });
    }
    for at in (0..120).step_by(4) {
        heat.used(s(f64::from(at)), &view(&chain), &MatchLengths::of(&all), 500);
    }
    fill(&heat, s(120.0), &view(&chain), &mut all);
    assert!((33.0..38.0).contains(&all[1].reuse.uses), "{:?}", all[1].reuse);
}

#[test]
fn a_burst_is_hot_at_once_and_what_is_not_used_cools() {
    let mut heat = Heat::new(BYTES);
    let burst = reuse(&mut heat, (0..20).map(|i| 10.0 + 0.1 * f64::from(i)), 12.0, 1);
    assert!(burst.uses > 20.0, "{burst:?}");
    let later = reuse(&mut heat, [], 12.0 + 5.0 * MEMORY_S, 1);
    assert!(later.uses < burst.uses / 1000.0, "{later:?}");
}

#[test]
fn what_everybody_holds_asks_for_no_copy() {
    let mut heat = Heat::new(BYTES);
    let chain = chain(1, 40);
    let mut all = workers(&[30, 30, 40]);
    for at in 0..100 {
        heat.used(s(f64::from(at)), &view(&chain), &MatchLengths::of(&all), 500);
    }
    all[2].matched_blocks = 30;
    fill(&heat, s(100.0), &view(&chain), &mut all);
    assert!(all.iter().all(|one| one.reuse == Reuse::default()), "{all:?}");
}

#[test]
fn the_hot_one_of_many_stays_in_a_full_table() {
    let mut heat = Heat::new(size_of::<[Entry; WAYS]>());
    let bytes = heat.bytes();
    for number in 0..100 {
        let _ = reuse(&mut heat, (0..5).map(|i| f64::from(number) + 0.1 * f64::from(i)), 0.0, 1);
        let other = chain(2 + u64::from(number as u32), 40);
        heat.used(s(f64::from(number) + 0.7), &view(&other), &MatchLengths::of(&workers(&[20, 0])), 500);
    }
    assert!(reuse(&mut heat, [], 100.0, 1).uses > 50.0);
    assert_eq!(heat.bytes(), bytes);
}

#[test]
fn without_room_nothing_is_hot() {
    let none = reuse(&mut Heat::new(0), (0..50).map(f64::from), 50.0, 1);
    assert_eq!(none, Reuse::default());
}

proptest! {
    #[test]
    fn lengths_are_the_longest_distinct_ones_with_their_holders(matched in prop::collection::vec(0_u32..12, 0..40)) {
        let mut naive: Vec<u32> = matched.iter().copied().filter(|blocks| *blocks > 0).collect();
        naive.sort_unstable_by(|a, b| b.cmp(a));
        naive.dedup();
        naive.truncate(MAX_LENGTHS);
        let holders = |blocks: u32| matched.iter().filter(|held| **held >= blocks).count() as u32;
        let expected: Vec<_> = naive.into_iter().map(|blocks| (blocks, holders(blocks))).collect();
        prop_assert_eq!(MatchLengths::of(&workers(&matched)).with_holders().collect::<Vec<_>>(), expected);
    }
}
