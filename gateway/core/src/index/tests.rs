//! The index against a naive model: one list of blocks per worker, most recent first, whoever's they are.

use std::collections::{BTreeMap, HashMap, HashSet};

use keyway_wire::block_hash::{Chain, HashKey, TextChain};
use keyway_wire::spans::Spans;
use proptest::prelude::*;

use super::cells::NIL;
use super::*;

/// Branches of a tree of prompts: equal beginnings are equal prefixes.
fn chain(path: &[u8]) -> Vec<BlockHash> {
    chain_of(Owner::NOBODY, path)
}

/// The same of one owner, who shares none of them with another.
fn chain_of(owner: Owner, path: &[u8]) -> Vec<BlockHash> {
    let mut chain = Chain::new(HashKey::new(5), &[owner.0]);
    path.iter().map(|&branch| chain.push(&[branch])).collect()
}

/// The same, each counting for one to six blocks.
fn spans_of(owner: Owner, path: &[u8]) -> Vec<BlockHash> {
    chain_of(owner, path).into_iter().map(|BlockHash(bits)| BlockHash(bits | (bits % 6) << 60)).collect()
}

fn widths<'a>(names: impl IntoIterator<Item = &'a BlockHash>) -> u64 {
    names.into_iter().map(|name| u64::from(name.blocks())).sum()
}

#[derive(Clone, Debug)]
enum Op {
    Place(Owner, u32, Vec<u8>),
    /// Withdraws one of the placements still open.
    Withdraw(prop::sample::Index),
    /// A worker accepts one of them.
    Accept(prop::sample::Index),
    Settle,
    Remove(u32),
    Capacity(u32, Option<usize>),
    Match(Owner, Vec<u8>),
}

fn path() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0_u8..3, 0..24)
}

fn owner() -> impl Strategy<Value = Owner> {
    (0_u8..3).prop_map(Owner)
}

fn op() -> impl Strategy<Value = Op> {
    let capacity = prop::option::of(0_usize..40);
    prop_oneof![
        8 => (owner(), 0_u32..3, path()).prop_map(|(owner, worker, path)| Op::Place(owner, worker, path)),
        2 => any::<prop::sample::Index>().prop_map(Op::Withdraw),
        4 => any::<prop::sample::Index>().prop_map(Op::Accept),
        2 => Just(Op::Settle),
        1 => (0_u32..3).prop_map(Op::Remove),
        1 => (0_u32..3, capacity).prop_map(|(worker, blocks)| Op::Capacity(worker, blocks)),
        3 => (owner(), path()).prop_map(|(owner, path)| Op::Match(owner, path)),
    ]
}

/// A resident block.
#[derive(Clone, Copy)]
struct Block {
    hash: BlockHash,
    owner: Owner,
    /// Number of the placement that touched it last.
    stamp: u32,
    /// Placements that vouch for it until one is accepted.
    claims: u32,
    /// Tells it from one of the same name that comes when it has gone.
    id: usize,
}

#[derive(Default)]
struct ModelWorker {
    blocks: Vec<Block>,
    capacity: Option<usize>,
}

/// What a placement added, and what it vouches for.
struct ModelPlacement {
    added: usize,
    claims: HashSet<usize>,
}

#[derive(Default)]
struct Model {
    workers: BTreeMap<u32, ModelWorker>,
    accepted: Vec<ModelPlacement>,
    stamp: u32,
    ids: usize,
}

impl Model {
    fn worker(&mut self, worker: u32) -> &mut ModelWorker {
        self.workers.entry(worker).or_default()
    }

    /// A full index has taken something from some owners at some workers, each time what was least recent.
    fn gave_way(&mut self, left: &BTreeMap<u32, Held>) -> usize {
        let mut gone = 0;
        for (id, worker) in &mut self.workers {
            for owner in (0..3).map(Owner) {
                let left =
                    left.get(id).map_or(0, |held| held.iter().filter(|block| block.0 == owner).count());
                let mut nth = 0;
                let before = worker.blocks.len();
                worker.blocks.retain(|block| {
                    nth += usize::from(block.owner == owner);
                    block.owner != owner || nth <= left
                });
                gone += before - worker.blocks.len();
            }
        }
        gone
    }

    fn place(&mut self, owner: Owner, worker: u32, chain: &[BlockHash]) -> ModelPlacement {
        self.stamp += 1;
        self.worker(worker);
        self.settle();
        let capacity = self.workers[&worker].capacity;
        let mut placement = ModelPlacement { added: 0, claims: HashSet::new() };
        let fits = |depth: &usize| capacity.is_none_or(|most| widths(&chain[..=*depth]) <= most as u64);
        for (depth, &hash) in chain.iter().enumerate().take_while(|(depth, _)| fits(depth)) {
            let at = self.workers[&worker].blocks.iter().position(|block| block.hash == hash);
            let mut block = if let Some(at) = at {
                self.worker(worker).blocks.remove(at)
            } else {
                placement.added += 1;
                self.ids += 1;
                placement.claims.insert(self.ids);
                Block { hash, owner, stamp: 0, claims: 1, id: self.ids }
            };
            if at.is_some() && (1..15).contains(&block.claims) {
                block.claims += 1;
                placement.claims.insert(block.id);
            }
            block.stamp = self.stamp;
            self.worker(worker).blocks.insert(depth, block);
        }
        placement
    }

    /// Takes note of what was accepted.
    fn settle(&mut self) {
        for placement in std::mem::take(&mut self.accepted) {
            for worker in self.workers.values_mut() {
                worker
                    .blocks
                    .iter_mut()
                    .filter(|block| placement.claims(block))
                    .for_each(|block| block.claims = 0);
                worker.trim();
            }
        }
    }

    fn withdraw(&mut self, placement: &ModelPlacement) {
        self.settle();
        for worker in self.workers.values_mut() {
            worker.blocks.iter_mut().filter(|block| placement.claims(block)).for_each(|block| {
                block.claims -= 1;
                block.stamp = if block.claims == 0 { 0 } else { block.stamp };
            });
            worker.blocks.retain(|block| block.stamp > 0);
        }
    }

    fn set_capacity(&mut self, worker: u32, capacity: Option<usize>) {
        self.worker(worker).capacity = capacity;
        self.settle();
        self.worker(worker).trim();
    }

    fn matched(&self, chain: &[BlockHash]) -> Vec<(WorkerId, u32)> {
        let leading = |worker: &ModelWorker| {
            let held: HashSet<BlockHash> = worker.blocks.iter().map(|block| block.hash).collect();
            chain.iter().take_while(|hash| held.contains(hash)).count() as u32
        };
        let lengths = self.workers.iter().map(|(&id, worker)| (WorkerId(id), leading(worker)));
        lengths.filter(|&(_, length)| length > 0).collect()
    }
}

impl ModelWorker {
    /// Evicts down to its own capacity, whoever's block is the last.
    fn trim(&mut self) {
        let counted = |block: &&Block| block.claims == 0;
        let blocks = |all: &[Block]| widths(all.iter().filter(counted).map(|block| &block.hash));
        while self.capacity.is_some_and(|most| blocks(&self.blocks) > most as u64) {
            self.blocks.pop();
        }
    }
}

impl ModelPlacement {
    fn claims(&self, block: &Block) -> bool {
        block.claims > 0 && self.claims.contains(&block.id)
    }
}

/// What a worker holds, most recent first.
type Held = Vec<(Owner, BlockHash)>;

/// Each worker's blocks by recency; checks lists, links and counters on the way.
fn listed(index: &PrefixIndex) -> BTreeMap<u32, Held> {
    let mut of_owners = HashMap::<Owner, (usize, u32)>::new();
    let mut all = BTreeMap::new();
    for (id, place) in index.workers.iter() {
        let mut len = 0;
        for (list, owner, recency) in index.workers.lists(place) {
            let (mut count, mut pieces, mut newer, mut at) = (0, 0, NIL, recency.newest);
            while at != NIL {
                let held = index.held.cells.get(at);
                assert_eq!((held.newer, held.list()), (newer, list));
                assert!((1..=index.held.cells.len(held.run)).contains(&held.len.into()));
                (count, pieces) = (count + u32::from(held.len), pieces + 1);
                (newer, at) = (at, held.older);
            }
            assert_eq!((recency.oldest, recency.len), (newer, count));
            len += count;
            let of_owner = of_owners.entry(owner).or_default();
            *of_owner = (of_owner.0 + count as usize, of_owner.1 + pieces);
        }
        assert_eq!(index.workers.held_at(place), len);
        let is_pending = |hash: &BlockHash| {
            let (held, spot) = index.held.find(*hash, place).unwrap();
            index.held.cells.get(held).claimed_names().contains(&spot.at)
        };
        let names: Vec<_> = index.by_recency(id).map(|(_, hash)| hash).collect();
        assert_eq!(index.workers[place].pending, widths(names.iter().filter(|hash| is_pending(hash))));
        assert_eq!(index.workers[place].blocks, widths(&names));
        all.insert(id.0, index.by_recency(id).collect::<Held>());
        assert_eq!(all[&id.0].len(), len as usize);
    }
    for owner in (0..=u8::MAX).map(Owner) {
        let (blocks, held) = of_owners.get(&owner).copied().unwrap_or_default();
        assert_eq!((index.held_of(owner), index.owners.held(owner)), (blocks, held));
    }
    all
}

fn check(index: &PrefixIndex, budget: usize, parents: &HashMap<BlockHash, Option<BlockHash>>) {
    assert!(index.bytes() <= budget);
    let lists = listed(index);
    assert_eq!(lists.values().map(Vec::len).sum::<usize>(), index.len());
    for (&worker, blocks) in &lists {
        let held: HashSet<BlockHash> = blocks.iter().map(|block| block.1).collect();
        assert_eq!(held.len(), blocks.len(), "a block twice");
        for hash in &held {
            assert!(parents[hash].is_none_or(|parent| held.contains(&parent)), "a block without its parent");
            let spot = index.held.spot(*hash).unwrap();
            let holders = index.held.list(spot);
            assert_eq!(index.held.count(spot), holders.len());
            let places = holders.iter().map(|&held| index.held.cells.worker_of(held));
            assert_eq!(places.collect::<HashSet<_>>().len(), holders.len(), "a worker twice");
            let found = index.held.find(*hash, index.workers.get(WorkerId(worker)).unwrap());
            assert!(
                found.is_some_and(|(held, _)| holders.contains(&held)),
                "a block the table does not lead to"
            );
        }
    }
}

/// Checks runs and their holders against the workers' lists: what one says the other does.
fn audit(index: &PrefixIndex) {
    let (cells, mut runs) = (&index.held.cells, BTreeMap::<u32, BTreeMap<u16, (u32, usize)>>::new());
    for (_, place) in index.workers.iter() {
        for (.., recency) in index.workers.lists(place) {
            let mut at = recency.newest;
            while at != NIL {
                let held = cells.get(at);
                assert_eq!(held.worker, place);
                let before = runs.entry(held.run).or_default().insert(place, (at, held.len.into()));
                assert!(before.is_none(), "a worker holds a run twice");
                at = held.older;
            }
        }
    }
    let mut taken = 0;
    let mut behind = BTreeMap::<u32, usize>::new();
    for (&run, held) in &runs {
        let (len, lens) = (cells.len(run), held.values().map(|(_, len)| *len));
        assert_eq!(cells.holders(run), held.len());
        assert_eq!(cells.short(run), lens.filter(|held| *held < len).count());
        let listed: HashSet<u32> = index.held.of_run(run).into_iter().collect();
        assert_eq!(listed, held.values().map(|(at, _)| *at).collect());
        assert!(held.iter().all(|(&place, (at, _))| index.held.at(run, place) == Some(*at)));
        for at in 0..len {
            let spot = runs::Spot { run, at };
            assert_eq!(index.held.spot(cells.name(spot)), Some(spot));
            let count = held.values().filter(|(_, len)| *len > at).count();
            assert_eq!(index.held.count(spot), count);
            let crowd = index.held.with_crowd(spot, |places| places.iter().collect::<Vec<u16>>());
            assert!(crowd.is_none_or(|crowd| crowd.into_iter().eq(held.keys().copied())));
        }
        taken += len + held.len() - 1;
        let parent = cells.parent(run);
        if parent != NIL && parent != runs::UNKNOWN {
            let before = &runs[&parent];
            let holds_all = |place: &u16| before[place].1 == cells.len(parent);
            assert!(held.keys().all(holds_all), "a run stands within another");
            *behind.entry(parent).or_default() += 1;
        }
    }
    assert!(behind.keys().all(|run| cells.has_behind(*run)));
    assert_eq!(index.held.taken(), taken);
    assert!(cells.has_room(cells.max_blocks() - cells.used_blocks(), 0));
    let in_cells = runs.values().map(BTreeMap::len).sum::<usize>().div_ceil(cells::CELLS);
    assert!(cells.used_blocks() >= runs.len() + in_cells);
}

/// The names of a text of so many blocks, whose first ones are `common`.
fn text(common: usize, own: usize, number: u8) -> Vec<BlockHash> {
    let mut chain = TextChain::new(HashKey::new(5), b"");
    let blocks = (0..common).map(|i| [0, i as u8, (i >> 8) as u8]);
    let own = (0..own).map(|i| [number, i as u8, (i >> 8) as u8]);
    blocks.chain(own).filter_map(|block| chain.push(&block)).collect()
}

proptest! {
    #[test]
    fn long_texts_match_up_to_the_last_name_that_both_have(
        common in 0_usize..3_000, a in 0_usize..400, b in 0_usize..400, capacity in 1_usize..4_000,
    ) {
        let mut index = PrefixIndex::new(1 << 20);
        let (placed, asked) = (text(common, a, 1), text(common, b, 2));
        drop(index.place(WorkerId(7), &placed));
        index.settle();
        let (spans, worker) = (Spans::OfText, WorkerId(7));
        let found = spans.blocks(spans.names(common).min(asked.len()));
        prop_assert_eq!(index.lengths(&asked).of(worker) as usize, found);
        prop_assert_eq!(index.matched(&asked).first().map_or(0, |one| one.1 as usize), found);
        // What is cached of it has no more names than a cache of this size can hold.
        let before = index.resident(worker);
        index.set_capacity(worker, Some(capacity));
        prop_assert!(index.resident(worker) <= capacity.min(before));
        let left = index.lengths(&asked).of(worker) as usize;
        prop_assert!(left <= found.min(capacity));
        prop_assert!(before > capacity || left == found, "nothing had to go");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn equals_the_model_and_stays_prefix_closed_and_within_its_bytes(
        // Room for at least 6 workers, with which come further lists for 3 owners at 3 workers, and for a
        // hundred residencies, or for more than there ever are.
        budget in prop_oneof![13_300_usize..20_000, Just(1 << 18)],
        ops in prop::collection::vec(op(), 1..160),
    ) {
        let mut index = PrefixIndex::new(budget);
        let mut model = Model::default();
        let mut open = Vec::new();
        let mut parents = HashMap::new();
        for op in ops {
            match op {
                Op::Place(owner, worker, path) => {
                    let chain = spans_of(owner, &path);
                    for (depth, &hash) in chain.iter().enumerate() {
                        parents.insert(hash, depth.checked_sub(1).map(|depth| chain[depth]));
                    }
                    let had_room = index.held.has_room(8 * chain.len());
                    let placement = index.place_of(owner, WorkerId(worker), &chain);
                    let expected = model.place(owner, worker, &chain);
                    let gone = model.gave_way(&listed(&index));
                    prop_assert!(!had_room || (placement.added(), gone) == (expected.added, 0));
                    prop_assert!(budget < 1 << 18 || had_room);
                    open.push((placement, expected));
                }
                Op::Withdraw(which) if !open.is_empty() => {
                    let (placement, expected) = open.swap_remove(which.index(open.len()));
                    index.withdraw(placement);
                    model.withdraw(&expected);
                }
                Op::Accept(which) if !open.is_empty() => {
                    let (placement, expected) = open.swap_remove(which.index(open.len()));
                    drop(placement);
                    model.accepted.push(expected);
                }
                Op::Withdraw(_) | Op::Accept(_) => {}
                Op::Settle => {
                    index.settle();
                    model.settle();
                }
                Op::Remove(worker) => {
                    index.remove_worker(WorkerId(worker));
                    model.workers.remove(&worker);
                }
                Op::Capacity(worker, blocks) => {
                    index.set_capacity(WorkerId(worker), blocks);
                    model.set_capacity(worker, blocks);
                }
                Op::Match(owner, path) => {
                    let chain = spans_of(owner, &path);
                    let mut matched = index.matched(&chain);
                    matched.sort_unstable();
                    prop_assert_eq!(matched, model.matched(&chain));
                }
            }
            let held = |worker: &ModelWorker| worker.blocks.iter().map(|block| (block.owner, block.hash)).collect();
            let expected: BTreeMap<u32, Held> =
                model.workers.iter().map(|(&id, worker)| (id, held(worker))).collect();
            prop_assert_eq!(listed(&index), expected);
            check(&index, budget, &parents);
            audit(&index);
        }
        // Nothing stays pending when all is over.
        open.clear();
        index.settle();
        let mut places = 0..index.workers.places() as u16;
        let is_settled = |place| {
            let worker = &index.workers[place];
            worker.pending == 0 && worker.blocks <= worker.capacity.into()
        };
        prop_assert!(places.all(is_settled));
        prop_assert!(index.voids.is_empty());
    }

    #[test]
    fn in_a_full_index_nobody_loses_of_an_equal_part(
        prompts in prop::collection::vec((0_u8..3, 0_u32..3, prop::collection::vec(0_u8..6, 1..60)), 1..60),
    ) {
        let mut index = PrefixIndex::new(13_300);
        for (owner, worker, path) in prompts {
            let (owner, owners) = (Owner(owner), (0..3).map(Owner));
            let others = owners.filter(|other| *other != owner);
            let before: Vec<_> = others.clone().map(|other| (index.owners.held(other), index.held_of(other))).collect();
            let present = before.iter().filter(|(held, _)| *held > 0).count() as u32 + 1;
            drop(index.place_of(owner, WorkerId(worker), &chain_of(owner, &path)));
            // There were never fewer on the way.
            let least = others.clone().map(|other| index.owners.held(other)).sum();
            for (other, (held, blocks)) in others.zip(before) {
                prop_assert!(held * present > least || index.held_of(other) == blocks);
            }
        }
    }

    #[test]
    fn what_no_worker_accepts_takes_nothing_of_its_capacity(
        capacity in 1_usize..60,
        known in prop::collection::vec((owner(), path()), 0..12),
        refused in prop::collection::vec((owner(), path(), any::<prop::sample::Index>()), 1..12),
    ) {
        let (mut index, worker) = (PrefixIndex::new(1 << 18), WorkerId(1));
        index.set_capacity(worker, Some(capacity));
        for (owner, path) in known {
            drop(index.place_of(owner, worker, &chain_of(owner, &path)));
        }
        index.settle();
        let held = |index: &PrefixIndex| index.by_recency(worker).collect::<HashSet<_>>();
        let before = held(&index);
        prop_assert!(before.len() <= capacity);
        let place = |(owner, path, _): &(Owner, Vec<u8>, _)| index.place_of(*owner, worker, &chain_of(*owner, path));
        let mut open: Vec<Placement> = refused.iter().map(place).collect();
        index.set_capacity(worker, Some(capacity));
        prop_assert!(held(&index).is_superset(&before));
        for (.., which) in &refused {
            index.withdraw(open.swap_remove(which.index(open.len())));
            index.set_capacity(worker, Some(capacity));
            prop_assert!(held(&index).is_superset(&before));
        }
        prop_assert_eq!(held(&index), before);
    }

    /// So many workers that most of a run's holders lie apart; each holds what it holds by itself.
    #[test]
    fn many_workers_hold_each_what_they_were_sent_and_have_room_for(
        ops in prop::collection::vec((0_u32..60, 0_usize..4, 0_usize..50, prop::option::weighted(0.3, 0_usize..60)), 1..120),
        everybody in prop::collection::vec(0_usize..50, 0..3),
        before in prop::collection::vec((0_u32..8, 0_usize..4, 0_usize..50), 0..30),
    ) {
        // Prompts that part at several places, and end anywhere.
        let prompts: Vec<Vec<BlockHash>> = [0, 3, 21, 24].map(|fork| {
            let path: Vec<u8> = (0..50).map(|at| if at < fork { 0 } else { 1 + fork as u8 % 5 }).collect();
            chain(&path)
        }).into();
        let (mut index, mut model) = (PrefixIndex::new(1 << 21), BTreeMap::<u32, Vec<BlockHash>>::new());
        // Some come from a snapshot, which does not say where prompts part.
        let mut old = PrefixIndex::new(1 << 21);
        for (worker, which, blocks) in before {
            drop(old.place(WorkerId(worker), &prompts[which][..blocks]));
        }
        for worker in 0..8 {
            let blocks: Vec<_> = old.by_recency(WorkerId(worker)).collect();
            prop_assert_eq!(index.restore(WorkerId(worker), blocks.iter().copied()), blocks.len());
            model.insert(worker, blocks.into_iter().map(|(_, block)| block).collect());
        }
        let to_all = everybody.into_iter().flat_map(|blocks| (0..60).map(move |worker| (worker, 0, blocks, None)));
        for (worker, which, blocks, capacity) in to_all.chain(ops) {
            let (held, id) = (model.entry(worker).or_default(), WorkerId(worker));
            let placed = &prompts[which][..blocks];
            drop(index.place(id, placed));
            held.retain(|block| !placed.contains(block));
            held.splice(0..0, placed.iter().copied());
            if let Some(capacity) = capacity {
                index.set_capacity(id, Some(capacity));
                held.truncate(capacity);
                index.set_capacity(id, None);
            }
            let recent: Vec<BlockHash> = index.by_recency(id).map(|(_, block)| block).collect();
            prop_assert_eq!(&recent, held);
            for prompt in &prompts {
                let mut matched = index.matched(prompt);
                matched.sort_unstable();
                let leading = |held: &Vec<BlockHash>| prompt.iter().take_while(|block| held.contains(block)).count();
                let lengths = model.iter().map(|(&worker, held)| (WorkerId(worker), leading(held) as u32));
                prop_assert_eq!(matched, lengths.filter(|(_, length)| *length > 0).collect::<Vec<_>>());
            }
        }
        audit(&index);
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
fn a_residency_takes_at_most_23_bytes_of_the_budget() {
    let index = PrefixIndex::new(64 << 20);
    assert!((64 << 20) / index.capacity() <= 23, "{} residencies", index.capacity());
    assert!(index.bytes() > (64 << 20) - 256, "{} bytes unused", (64 << 20) - index.bytes());
}

#[test]
fn a_withdrawn_placement_leaves_what_others_have_touched_since() {
    let mut index = PrefixIndex::new(1 << 16);
    let first = index.place(WorkerId(1), &chain(&[0, 1, 2, 3]));
    let second = index.place(WorkerId(1), &chain(&[0, 1, 9]));
    index.withdraw(first);
    assert_eq!(index.matched(&chain(&[0, 1, 2, 3])), [(WorkerId(1), 2)]);
    assert_eq!(index.matched(&chain(&[0, 1, 9])), [(WorkerId(1), 3)]);
    // Nobody has accepted the two blocks that it shared with the first one.
    index.withdraw(second);
    assert!(index.is_empty());
}

#[test]
fn a_withdrawn_placement_leaves_what_another_one_was_accepted_with() {
    for second_comes_first in [true, false] {
        let mut index = PrefixIndex::new(1 << 16);
        let first = index.place(WorkerId(1), &chain(&[0, 1, 2, 3]));
        let second = index.place(WorkerId(1), &chain(&[0, 1, 9]));
        if second_comes_first {
            drop(second);
            index.withdraw(first);
        } else {
            index.withdraw(first);
            drop(second);
        }
        let third = index.place(WorkerId(1), &chain(&[0, 1, 9]));
        index.withdraw(third);
        assert_eq!(index.matched(&chain(&[0, 1, 2, 3])), [(WorkerId(1), 2)]);
        assert_eq!(index.matched(&chain(&[0, 1, 9])), [(WorkerId(1), 3)]);
    }
}

#[test]
fn of_more_placements_than_are_counted_none_leaves_a_block_that_nobody_accepted() {
    let mut index = PrefixIndex::new(1 << 16);
    let mut open: Vec<_> = (0..40).map(|_| index.place(WorkerId(1), &chain(&[0, 1, 2]))).collect();
    assert_eq!(index.len(), 3);
    for i in [3, 20, 0] {
        index.withdraw(open.swap_remove(i));
        assert_eq!(index.len(), 3, "others need them");
    }
    for placement in open {
        index.withdraw(placement);
    }
    assert!(index.is_empty());
}

#[test]
fn a_run_that_outlives_what_stood_before_it_does_no_harm() {
    let mut index = PrefixIndex::new(1 << 22);
    // Enough of them for their places to have upper bits.
    (3..600).for_each(|worker| index.set_capacity(WorkerId(worker), None));
    drop(index.place(WorkerId(2), &chain(&[7, 7])));
    let open: Vec<_> = (0..40).map(|_| index.place(WorkerId(1), &chain(&[0, 1, 2]))).collect();
    // One too many to be counted: the others take its first blocks with them.
    let last = index.place(WorkerId(1), &chain(&[0, 1, 2, 3]));
    for placement in open {
        index.withdraw(placement);
    }
    assert_eq!(index.by_recency(WorkerId(1)).collect::<Vec<_>>().len(), 1);
    // Where that run was are residencies by now.
    (500..600).for_each(|worker| drop(index.place(WorkerId(worker), &chain(&[7, 7]))));
    drop(index.place_behind(Owner::NOBODY, WorkerId(1), chain(&[0, 1, 2, 3])[3], &[]));
    index.withdraw(last);
    index.remove_worker(WorkerId(1));
    assert_eq!(listed(&index).values().filter(|held| held.len() == 2).count(), 101);
    audit(&index);
}

#[test]
fn a_withdrawn_placement_is_harmless_when_its_blocks_are_another_s() {
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
    index.settle();
    assert_eq!(index.matched(&chain(&[0, 0, 0, 0, 0])), [(WorkerId(1), 2)]);
    assert_eq!(index.resident(WorkerId(1)), 3);
}

#[test]
fn a_dropped_placement_is_accepted_and_one_that_is_open_takes_no_room() {
    let (mut index, worker) = (PrefixIndex::new(1 << 16), WorkerId(1));
    index.set_capacity(worker, Some(4));
    drop(index.place(worker, &chain(&[0, 0, 0, 0])));
    let open = index.place(worker, &chain(&[1, 1, 1]));
    // The metrics say the same again.
    index.set_capacity(worker, Some(4));
    assert_eq!((index.matched(&chain(&[0, 0, 0, 0])), index.resident(worker)), (vec![(worker, 4)], 7));
    drop(open);
    index.settle();
    assert_eq!((index.matched(&chain(&[0, 0, 0, 0])), index.resident(worker)), (vec![(worker, 1)], 4));
    assert_eq!(index.matched(&chain(&[1, 1, 1])), [(worker, 3)]);
}

#[test]
fn a_placement_that_outlives_its_worker_takes_back_nothing_of_the_one_at_its_place() {
    let (mut index, worker) = (PrefixIndex::new(1 << 16), WorkerId(1));
    let old = index.place(worker, &chain(&[0, 1, 2]));
    index.remove_worker(worker);
    drop(index.place(worker, &chain(&[5, 6, 7])));
    index.withdraw(old);
    assert_eq!(index.matched(&chain(&[5, 6, 7])), [(worker, 3)]);
    // Nor of what it announces itself by then.
    let old = index.place(worker, &chain(&[8, 8]));
    index.remove_worker(worker);
    index.set_exact(worker, true);
    index.store_block(worker, None, BlockHash(1));
    index.store_block(worker, Some(BlockHash(1)), BlockHash(2));
    index.withdraw(old);
    assert_eq!(index.matched(&[BlockHash(1), BlockHash(2)]), [(worker, 2)]);
}

#[test]
fn owners_beyond_the_room_for_lists_share_that_of_whoever_holds_the_most() {
    let mut index = PrefixIndex::new(16 * workers::WORKER_BYTES);
    let (worker, [few, most, late]) = (WorkerId(1), [1, 2, 3].map(Owner));
    drop(index.place_of(few, worker, &chain_of(few, &[0])));
    drop(index.place_of(most, worker, &chain_of(most, &[0, 0, 0])));
    assert_eq!(index.place_of(late, worker, &chain_of(late, &[0, 0])).added(), 2);
    assert_eq!([few, most, late].map(|owner| index.held_of(owner)), [1, 5, 0]);
    assert_eq!(index.matched(&chain_of(late, &[0, 0])), [(worker, 2)]);
    // An empty list is had anew.
    index.remove_worker(worker);
    drop(index.place_of(late, worker, &chain_of(late, &[0, 0])));
    assert_eq!([few, most, late].map(|owner| index.held_of(owner)), [0, 0, 2]);
}

#[test]
fn two_owners_who_share_a_prefix_do_no_harm() {
    let (mut index, worker) = (PrefixIndex::new(1 << 16), WorkerId(1));
    drop(index.place_of(Owner(1), worker, &chain(&[0, 1])));
    drop(index.place_of(Owner(2), worker, &chain(&[0, 1, 2])));
    drop(index.place_of(Owner(2), worker, &chain(&[5])));
    assert_eq!(index.matched(&chain(&[0, 1, 2])), [(worker, 3)]);
    assert_eq!([1, 2].map(|owner| index.held_of(Owner(owner))), [3, 1]);
    for left in (0..4).rev() {
        index.set_capacity(worker, Some(left));
        assert_eq!(listed(&index)[&1].len(), left);
    }
}

#[test]
fn workers_beyond_the_room_for_them_are_not_recorded_and_removed_ones_make_room() {
    let mut index = PrefixIndex::new(8192);
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
