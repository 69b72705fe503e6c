//! The index against a naive model: one list of blocks per worker, most recent first.

use std::collections::{BTreeMap, HashMap, HashSet};

use keyway_wire::block_hash::{Chain, HashKey};
use proptest::prelude::*;

use super::*;

/// Branches of a tree of prompts: equal beginnings are equal prefixes.
fn chain(path: &[u8]) -> Vec<BlockHash> {
    let mut chain = Chain::new(HashKey::new(5), b"");
    path.iter().map(|&branch| chain.push(&[branch])).collect()
}

#[derive(Clone, Debug)]
enum Op {
    Place(u32, Vec<u8>),
    /// Withdraws one of the placements still open.
    Withdraw(prop::sample::Index),
    Remove(u32),
    Capacity(u32, Option<usize>),
    Match(Vec<u8>),
}

fn path() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0_u8..3, 0..10)
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0_u32..4, path()).prop_map(|(worker, path)| Op::Place(worker, path)),
        2 => any::<prop::sample::Index>().prop_map(Op::Withdraw),
        1 => (0_u32..4).prop_map(Op::Remove),
        1 => (0_u32..4, prop::option::of(0_usize..12)).prop_map(|(worker, blocks)| Op::Capacity(worker, blocks)),
        3 => path().prop_map(Op::Match),
    ]
}

/// A resident block and the number of the placement that touched it last.
type Block = (BlockHash, u32);

#[derive(Default)]
struct ModelWorker {
    blocks: Vec<Block>,
    capacity: Option<usize>,
}

struct Model {
    workers: BTreeMap<u32, ModelWorker>,
    slots: usize,
    batch: usize,
    stamp: u32,
}

impl Model {
    fn total(&self) -> usize {
        self.workers.values().map(|worker| worker.blocks.len()).sum()
    }

    fn pop(&mut self, worker: u32, keep: u32) -> bool {
        let blocks = &mut self.workers.entry(worker).or_default().blocks;
        let evictable = blocks.last().is_some_and(|block| block.1 != keep);
        if evictable {
            blocks.pop();
        }
        evictable
    }

    fn make_room(&mut self, worker: u32) -> bool {
        let capacity = self.workers[&worker].capacity.unwrap_or(usize::MAX);
        while self.workers[&worker].blocks.len() >= capacity {
            if !self.pop(worker, self.stamp) {
                return false;
            }
        }
        if self.total() == self.slots {
            let largest = self.workers.iter().rev().max_by_key(|(_, worker)| worker.blocks.len());
            let largest = *largest.unwrap().0;
            for _ in 0..self.batch {
                if !self.pop(largest, self.stamp) {
                    break;
                }
            }
        }
        self.total() < self.slots
    }

    /// Returns what was added, and under which stamp.
    fn place(&mut self, worker: u32, chain: &[BlockHash]) -> (u32, u32, Vec<BlockHash>) {
        self.stamp += 1;
        self.workers.entry(worker).or_default();
        let mut added = Vec::new();
        for (depth, &hash) in chain.iter().enumerate() {
            let at = self.workers[&worker].blocks.iter().position(|block| block.0 == hash);
            if let Some(at) = at {
                self.workers.get_mut(&worker).unwrap().blocks.remove(at);
            } else {
                if !self.make_room(worker) {
                    break;
                }
                added.push(hash);
            }
            self.workers.get_mut(&worker).unwrap().blocks.insert(depth, (hash, self.stamp));
        }
        (worker, self.stamp, added)
    }

    fn withdraw(&mut self, (worker, stamp, added): (u32, u32, Vec<BlockHash>)) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.blocks.retain(|block| block.1 != stamp || !added.contains(&block.0));
        }
    }

    fn set_capacity(&mut self, worker: u32, capacity: Option<usize>) {
        let worker = self.workers.entry(worker).or_default();
        worker.capacity = capacity;
        worker.blocks.truncate(capacity.unwrap_or(usize::MAX));
    }

    fn matched(&self, chain: &[BlockHash]) -> Vec<(WorkerId, u32)> {
        let leading = |worker: &ModelWorker| {
            let held: HashSet<BlockHash> = worker.blocks.iter().map(|block| block.0).collect();
            chain.iter().take_while(|hash| held.contains(hash)).count() as u32
        };
        let lengths = self.workers.iter().map(|(&id, worker)| (WorkerId(id), leading(worker)));
        lengths.filter(|&(_, length)| length > 0).collect()
    }
}

/// Each worker's blocks, most recent first, by walking its list; checks links and counters on the way.
fn listed(index: &PrefixIndex) -> BTreeMap<u32, Vec<Block>> {
    let mut lists = BTreeMap::new();
    for (id, place) in index.workers.iter() {
        let recency = index.workers[place].recency;
        let (mut blocks, mut newer, mut slot) = (Vec::new(), NIL, recency.newest);
        while slot != NIL {
            assert_eq!((index.held.slab[slot].newer, index.held.slab[slot].worker), (newer, place));
            blocks.push((index.held.slab[slot].hash, index.held.slab[slot].stamp));
            (newer, slot) = (slot, index.held.slab[slot].older);
        }
        assert_eq!((recency.oldest, recency.len as usize), (newer, blocks.len()));
        lists.insert(id.0, blocks);
    }
    lists
}

fn check(index: &PrefixIndex, budget: usize, parents: &HashMap<BlockHash, Option<BlockHash>>) {
    assert!(index.bytes() <= budget);
    let lists = listed(index);
    assert_eq!(lists.values().map(Vec::len).sum::<usize>(), index.len());
    for (&worker, blocks) in &lists {
        let held: HashSet<BlockHash> = blocks.iter().map(|block| block.0).collect();
        assert_eq!(held.len(), blocks.len(), "a block twice");
        for hash in &held {
            assert!(parents[hash].is_none_or(|parent| held.contains(&parent)), "a block without its parent");
            let holders: Vec<u32> = index.held.iter(*hash).collect();
            assert_eq!(index.held.count(*hash), holders.len());
            let places = holders.iter().map(|&slot| index.held.slab[slot].worker);
            assert_eq!(places.collect::<HashSet<_>>().len(), holders.len(), "a worker twice");
            let slot = index.held.find(*hash, index.workers.get(WorkerId(worker)).unwrap());
            assert!(slot.is_some_and(|slot| holders.contains(&slot)), "a block the table does not lead to");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn equals_the_model_and_stays_prefix_closed_and_within_its_bytes(
        // Room for 4 workers and some 90 to 105 residencies.
        budget in 4430_usize..5100,
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let mut index = PrefixIndex::new(budget);
        let mut model =
            Model { workers: BTreeMap::new(), slots: index.capacity(), batch: index.eviction_batch, stamp: 0 };
        let mut open = Vec::new();
        let mut parents = HashMap::new();
        for op in ops {
            match op {
                Op::Place(worker, path) => {
                    let chain = chain(&path);
                    for (depth, &hash) in chain.iter().enumerate() {
                        parents.insert(hash, depth.checked_sub(1).map(|depth| chain[depth]));
                    }
                    let placement = index.place(WorkerId(worker), &chain);
                    let expected = model.place(worker, &chain);
                    prop_assert_eq!(placement.added(), expected.2.len());
                    open.push((placement, expected));
                }
                Op::Withdraw(which) if !open.is_empty() => {
                    let (placement, expected) = open.swap_remove(which.index(open.len()));
                    index.withdraw(placement);
                    model.withdraw(expected);
                }
                Op::Withdraw(_) => {}
                Op::Remove(worker) => {
                    index.remove_worker(WorkerId(worker));
                    model.workers.remove(&worker);
                }
                Op::Capacity(worker, blocks) => {
                    index.set_capacity(WorkerId(worker), blocks);
                    model.set_capacity(worker, blocks);
                }
                Op::Match(path) => {
                    let chain = chain(&path);
                    let mut matched = index.matched(&chain);
                    matched.sort_unstable();
                    prop_assert_eq!(matched, model.matched(&chain));
                }
            }
            let expected: BTreeMap<u32, Vec<Block>> =
                model.workers.iter().map(|(&id, worker)| (id, worker.blocks.clone())).collect();
            prop_assert_eq!(listed(&index), expected);
            check(&index, budget, &parents);
        }
    }

    #[test]
    fn never_above_the_budget(budget in 0_usize..100_000) {
        let mut index = PrefixIndex::new(budget);
        prop_assert!(index.bytes() <= budget);
        let deep: Vec<BlockHash> = (1..3000).map(BlockHash).collect();
        let added = index.place(WorkerId(1), &deep).added();
        prop_assert!(index.bytes() <= budget);
        prop_assert_eq!(added, index.len());
        prop_assert_eq!(index.matched(&deep).first().map_or(0, |found| found.1 as usize), added);
    }

    /// Lengths of every shape along one long chain, which the search must find exactly.
    #[test]
    fn the_galloping_search_finds_every_length(lengths in prop::collection::vec(0_usize..200, 1..40)) {
        let mut index = PrefixIndex::new(1 << 20);
        let long: Vec<BlockHash> = chain(&[1; 200]);
        for (worker, &length) in lengths.iter().enumerate() {
            index.place(WorkerId(worker as u32), &long[..length]);
        }
        let mut matched = index.matched(&long);
        matched.sort_unstable();
        let expected: Vec<(WorkerId, u32)> = lengths
            .iter()
            .enumerate()
            .filter(|(_, length)| **length > 0)
            .map(|(worker, &length)| (WorkerId(worker as u32), length as u32))
            .collect();
        prop_assert_eq!(matched, expected);
    }
}

#[test]
fn a_residency_takes_at_most_48_bytes_of_the_budget() {
    let index = PrefixIndex::new(64 << 20);
    assert!((64 << 20) / index.capacity() <= 48, "{} residencies", index.capacity());
    assert!(index.bytes() > (64 << 20) - 64, "{} bytes unused", (64 << 20) - index.bytes());
}

#[test]
fn a_withdrawn_placement_leaves_what_others_have_touched_since() {
    let mut index = PrefixIndex::new(1 << 16);
    let first = index.place(WorkerId(1), &chain(&[0, 1, 2, 3]));
    let second = index.place(WorkerId(1), &chain(&[0, 1, 9]));
    index.withdraw(first);
    assert_eq!(index.matched(&chain(&[0, 1, 2, 3])), [(WorkerId(1), 2)]);
    assert_eq!(index.matched(&chain(&[0, 1, 9])), [(WorkerId(1), 3)]);
    index.withdraw(second);
    // Blocks 0 and 1 were there before the second placement, so it is not the one to take them away.
    assert_eq!(index.matched(&chain(&[0, 1, 9])), [(WorkerId(1), 2)]);
}

#[test]
fn a_withdrawn_placement_is_harmless_when_its_slots_have_new_owners() {
    let mut index = PrefixIndex::new(1 << 16);
    let placement = index.place(WorkerId(1), &chain(&[0, 1, 2]));
    index.remove_worker(WorkerId(1));
    index.place(WorkerId(2), &chain(&[5, 6, 7]));
    index.withdraw(placement);
    assert_eq!(index.matched(&chain(&[5, 6, 7])), [(WorkerId(2), 3)]);
}

#[test]
fn a_chain_longer_than_the_capacity_keeps_its_head() {
    let mut index = PrefixIndex::new(1 << 16);
    index.set_capacity(WorkerId(1), Some(3));
    assert_eq!(index.place(WorkerId(1), &chain(&[0, 0, 0, 0, 0])).added(), 3);
    assert_eq!(index.matched(&chain(&[0, 0, 0, 0, 0])), [(WorkerId(1), 3)]);
    // The next chain takes the place of the end of this one first.
    index.place(WorkerId(1), &chain(&[1]));
    assert_eq!(index.matched(&chain(&[0, 0, 0, 0, 0])), [(WorkerId(1), 2)]);
    assert_eq!(index.resident(WorkerId(1)), 3);
}

#[test]
fn workers_beyond_the_room_for_them_are_not_recorded_and_removed_ones_make_room() {
    let mut index = PrefixIndex::new(2048);
    let room =
        (0..1000).take_while(|&worker| index.place(WorkerId(worker), &chain(&[0])).added() == 1).count();
    assert!((1..1000).contains(&room));
    let id = |n: usize| WorkerId(n as u32);
    assert_eq!(index.resident(id(room)), 0);
    index.remove_worker(id(0));
    assert_eq!(index.place(id(room + 1), &chain(&[0])).added(), 1);
    assert_eq!(index.len(), room);
}

#[test]
fn two_blocks_of_one_chain_that_collide_do_no_harm() {
    let mut index = PrefixIndex::new(1 << 16);
    let colliding = [BlockHash(1), BlockHash(2), BlockHash(1), BlockHash(3)];
    assert_eq!(index.place(WorkerId(1), &colliding).added(), 3);
    assert_eq!(index.place(WorkerId(1), &colliding).added(), 0);
    assert_eq!(index.matched(&colliding), [(WorkerId(1), 4)]);
    // Side by side, the second is not put behind itself: all can still be reached.
    let side_by_side = [BlockHash(4), BlockHash(5), BlockHash(5), BlockHash(6)];
    assert_eq!(index.place(WorkerId(2), &side_by_side).added(), 3);
    assert_eq!(index.place(WorkerId(2), &side_by_side).added(), 0);
    index.set_capacity(WorkerId(2), Some(0));
    assert_eq!((index.matched(&side_by_side), index.resident(WorkerId(2))), (vec![], 0));
}

#[test]
fn what_an_exact_worker_computes_counts_as_held_until_it_is_finished() {
    let mut index = PrefixIndex::new(1 << 16);
    let (worker, prompt) = (WorkerId(1), chain(&[0, 1, 2, 3]));
    index.set_exact(worker, true);
    let first = index.place(worker, &prompt);
    let second = index.place(worker, &prompt);
    assert_eq!((index.matched(&prompt), index.len(), index.expected()), (vec![(worker, 4)], 0, 4));
    // It announces the beginning; the rest is expected still, and not more than that is known afterwards.
    index.store_block(worker, None, prompt[0]);
    index.store_block(worker, Some(prompt[0]), prompt[1]);
    assert_eq!(index.matched(&prompt), [(worker, 4)]);
    index.finish(first);
    assert_eq!(index.matched(&prompt), [(worker, 4)], "the second request needs them too");
    index.withdraw(second);
    assert_eq!((index.matched(&prompt), index.expected()), (vec![(worker, 2)], 0));
    // Another worker's places are a model, as before; and so are this one's when its events are not trusted.
    index.place(WorkerId(2), &prompt);
    index.set_exact(worker, false);
    let late = index.place(worker, &prompt);
    index.finish(late);
    assert_eq!(index.matched(&prompt), [(worker, 4), (WorkerId(2), 4)]);
}

#[test]
fn an_exact_worker_is_still_one_when_it_starts_anew() {
    let mut index = PrefixIndex::new(1 << 16);
    index.set_exact(WorkerId(1), true);
    let before = index.place(WorkerId(1), &chain(&[0, 1]));
    index.remove_worker(WorkerId(1));
    let after = index.place(WorkerId(1), &chain(&[0, 2]));
    index.finish(before);
    assert_eq!(index.matched(&chain(&[0, 2])), [(WorkerId(1), 2)], "the request under way holds it");
    index.finish(after);
    assert!(index.matched(&chain(&[0, 2])).is_empty() && index.is_empty());
}
