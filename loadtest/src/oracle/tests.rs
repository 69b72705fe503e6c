//! The oracle by hand, and its LRU cache against a list that is searched and shifted.

use proptest::prelude::*;

use super::*;

fn prompt(blocks: &[(u64, u32)]) -> impl Iterator<Item = Block> {
    blocks.iter().map(|&(id, tokens)| Block { id, tokens })
}

#[test]
fn a_repeated_prompt_reuses_all_but_its_last_token() {
    let mut oracle = Oracle::new(16, Some(100));
    let blocks = [(0, 16), (1, 16), (2, 16)];
    assert_eq!(oracle.ask(prompt(&blocks)), Reusable { unbounded: 0, pooled: Some(0) });
    assert_eq!(oracle.ask(prompt(&blocks)), Reusable { unbounded: 47, pooled: Some(47) });
}

#[test]
fn a_partial_block_counts_to_the_token_in_the_unbounded_cache_only() {
    let mut oracle = Oracle::new(16, Some(100));
    oracle.ask(prompt(&[(0, 16), (1, 5)]));
    let longer = [(0, 16), (1, 16), (2, 3)];
    assert_eq!(oracle.ask(prompt(&longer)), Reusable { unbounded: 21, pooled: Some(16) });
    assert_eq!(oracle.ask(prompt(&[(0, 16), (1, 9)])), Reusable { unbounded: 24, pooled: Some(16) });
}

#[test]
fn an_id_behind_another_prefix_is_another_block() {
    let mut oracle = Oracle::new(16, None);
    oracle.ask(prompt(&[(0, 16), (1, 16), (2, 16)]));
    assert_eq!(oracle.ask(prompt(&[(0, 16), (9, 16), (2, 16)])), Reusable { unbounded: 16, pooled: None });
}

#[test]
fn a_prefix_that_ends_inside_a_block_is_reused_and_one_request_s_own_blocks_are_not_kept() {
    let mut oracle = Oracle::new(16, Some(100));
    let own = |row| workload::unshared_id(row, 0);
    for row in 0..50 {
        let reused = if row == 0 { 0 } else { 21 };
        let got = oracle.ask(prompt(&[(0, 16), (1, 5), (own(row), 16), (own(row) + 1, 2)]));
        assert_eq!(got, Reusable { unbounded: reused, pooled: Some(reused) });
    }
    assert_eq!(oracle.seen.len(), 2);
}

#[test]
fn what_a_server_has_said_can_be_reused_by_the_next_turn() {
    let mut oracle = Oracle::new(16, Some(100));
    oracle.ask(prompt(&[(0, 16), (1, 16)]));
    oracle.hold(prompt(&[(0, 16), (1, 16), (2, 16)]));
    let next = [(0, 16), (1, 16), (2, 16), (3, 16)];
    assert_eq!(oracle.ask(prompt(&next)), Reusable { unbounded: 48, pooled: Some(48) });
}

/// The same cache with nothing clever: newest first.
struct NaiveLru {
    blocks: Vec<BlockHash>,
    blocks_max: usize,
}

impl NaiveLru {
    fn ask(&mut self, prompt: &[BlockHash]) -> usize {
        let held = prompt.iter().take_while(|hash| self.blocks.contains(hash)).count();
        let kept = &prompt[..prompt.len().min(self.blocks_max)];
        self.blocks.retain(|hash| !kept.contains(hash));
        self.blocks.splice(0..0, kept.iter().copied());
        self.blocks.truncate(self.blocks_max);
        held
    }
}

proptest! {
    #[test]
    fn the_lru_equals_the_naive_one(
        prompts in prop::collection::vec(prop::collection::vec(0u64..4, 0..8), 1..60),
        blocks_max in 1usize..12,
    ) {
        let (mut lru, mut naive) = (Lru::new(blocks_max), NaiveLru { blocks: Vec::new(), blocks_max });
        for ids in prompts {
            let mut chain = Chain::new(HashKey::new(1), b"");
            let hashes: Vec<_> = ids.iter().map(|id| chain.push(&id.to_le_bytes())).collect();
            prop_assert_eq!(lru.ask(hashes.iter().copied()), naive.ask(&hashes));
            let mut order = Vec::new();
            let mut slot = lru.newest;
            while slot != NONE {
                order.push(lru.slots[slot].hash);
                slot = lru.slots[slot].older;
            }
            prop_assert_eq!(&order, &naive.blocks);
            prop_assert_eq!(lru.slot_of.len(), order.len());
        }
    }

    #[test]
    fn a_pooled_cache_never_beats_the_unbounded_one(
        prompts in prop::collection::vec(prop::collection::vec(0u64..3, 1..6), 1..40),
        blocks_max in 1usize..20,
    ) {
        let mut oracle = Oracle::new(16, Some(blocks_max));
        for ids in prompts {
            let got = oracle.ask(ids.iter().map(|&id| Block { id, tokens: 16 }));
            prop_assert!(got.pooled.unwrap() <= got.unbounded);
            prop_assert!(got.unbounded < 16 * ids.len() as u64);
        }
    }
}
