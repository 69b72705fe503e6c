//! What workers say of themselves, block by block: what they hold from now on, and what they hold no more.

use keyway_wire::block_hash::BlockHash;

use super::room::Kept;
use super::slab::{self, NIL};
use super::{FETCHED_TOGETHER, Owner, PrefixIndex, WorkerId};

impl PrefixIndex {
    /// Records one block that `worker` says it holds, most recent after its parent. False, and nothing
    /// changed, if the index does not have the parent, or no room: then the block's children will be refused
    /// too.
    pub fn store_block(&mut self, worker: WorkerId, parent: Option<BlockHash>, hash: BlockHash) -> bool {
        let Some(place) = self.workers.get_or_add(worker) else { return false };
        self.store_expected(place, parent, hash)
    }

    /// [`PrefixIndex::store_block`] for blocks that follow each other behind `parent`. Returns how many of
    /// them are held now, from the first on.
    pub fn store_run(
        &mut self,
        worker: WorkerId,
        mut parent: Option<BlockHash>,
        blocks: &[BlockHash],
    ) -> usize {
        let Some(place) = self.workers.get_or_add(worker) else { return 0 };
        let mut stored = 0;
        for blocks in blocks.chunks(FETCHED_TOGETHER) {
            self.fetch(blocks);
            for &block in blocks {
                if !self.store_expected(place, parent, block) {
                    return stored;
                }
                (parent, stored) = (Some(block), stored + 1);
            }
        }
        stored
    }

    /// Forgets one block of `worker`. The caller has forgotten its children: residency stays prefix-closed.
    pub fn drop_block(&mut self, worker: WorkerId, hash: BlockHash) {
        let Some(place) = self.workers.get(worker) else { return };
        self.drop_at(place, hash);
    }

    /// [`PrefixIndex::drop_block`] for several, children before their parents.
    pub fn drop_blocks(&mut self, worker: WorkerId, blocks: &[BlockHash]) {
        let Some(place) = self.workers.get(worker) else { return };
        for blocks in blocks.chunks(FETCHED_TOGETHER) {
            self.held.approach(blocks.iter().copied());
            for &block in blocks {
                self.drop_at(place, block);
            }
        }
    }

    /// Brings what leads to these blocks into the processor's cache, all at once: worth it before many of
    /// them are stored or dropped one by one.
    pub(crate) fn fetch(&self, blocks: &[BlockHash]) {
        self.held.fetch(blocks);
        if !self.expected.is_empty() {
            self.expected.fetch(blocks);
        }
    }

    fn store_expected(&mut self, place: u16, parent: Option<BlockHash>, hash: BlockHash) -> bool {
        let stored = self.store_at(place, parent, hash);
        if stored && !self.expected.is_empty() {
            self.expected.announced(hash, place);
        }
        stored
    }

    fn store_at(&mut self, place: u16, parent: Option<BlockHash>, hash: BlockHash) -> bool {
        let vacancy = match self.held.look(hash, place) {
            Ok(held) => {
                self.workers[place].last = held;
                self.accept(held, 0);
                return true;
            }
            Err(vacancy) => vacancy,
        };
        let Some(parent) = self.parent(place, parent) else { return false };
        let list = match parent {
            NIL => self.workers.find_or_add_list(place, Owner::NOBODY, &self.owners),
            parent => self.held.slab[parent].list(),
        };
        // What is more recent than the parent survives with it, its own parents too.
        let kept = Kept::Slot(parent);
        let room = self.trim(place, 1, kept) && self.make_room(list, kept);
        if room {
            let stamp = slab::stamp(self.workers.number(place), list.nth);
            self.workers[place].last = self.insert_behind(list, parent, vacancy, stamp);
        }
        room
    }

    /// Where the worker's parent block is; [`NIL`] if there is none to be had, `None` if it is not held.
    fn parent(&self, place: u16, parent: Option<BlockHash>) -> Option<u32> {
        let Some(parent) = parent else { return Some(NIL) };
        let last = Some(self.workers[place].last).filter(|&last| last != NIL);
        let is_parent = |&last: &u32| {
            let slot = &self.held.slab[last];
            slot.hash == parent && slot.worker == place
        };
        last.filter(is_parent).or_else(|| self.held.find(parent, place))
    }

    fn drop_at(&mut self, place: u16, hash: BlockHash) {
        if let Some(slot) = self.held.find(hash, place) {
            self.evict(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WORKERS: u32 = 12;
    /// Blocks that prompts of all kinds begin with.
    const SHARED: u64 = 10;

    fn prompt(kind: u64) -> Vec<BlockHash> {
        let name = |i: u64| (if i < SHARED { 0 } else { kind << 40 }) + (i + 1) * 0x9E37_79B9;
        (0..30).map(name).map(BlockHash).collect()
    }

    proptest! {
        /// More workers hold a block than lie together, and the index may come to be full.
        #[test]
        fn runs_are_as_one_block_after_the_other(
            ops in prop::collection::vec((0..WORKERS, 0_u64..3, 0_usize..30, prop::bool::weighted(0.7)), 1..80),
            budget in 27_000_usize..40_000,
        ) {
            let (mut runs, mut single) = (PrefixIndex::new(budget), PrefixIndex::new(budget));
            for (worker, kind, at, stores) in ops {
                let (worker, prompt) = (WorkerId(worker), prompt(kind));
                if stores {
                    let (before, rest) = prompt.split_at(at / 5);
                    let mut parent = before.last().copied();
                    let stored = runs.store_run(worker, parent, rest);
                    let one_by_one = rest
                        .iter()
                        .take_while(|block| single.store_block(worker, parent.replace(**block), **block));
                    prop_assert_eq!(stored, one_by_one.count());
                } else {
                    let held = prompt.iter().take_while(|block| single.holds(worker, **block)).count();
                    let kept = at.max(SHARED as usize);
                    let gone: Vec<_> = prompt[..held].iter().skip(kept).rev().copied().collect();
                    runs.drop_blocks(worker, &gone);
                    for block in gone {
                        single.drop_block(worker, block);
                    }
                }
                for worker in (0..WORKERS).map(WorkerId) {
                    let held = [&runs, &single].map(|index| index.by_recency(worker).collect::<Vec<_>>());
                    prop_assert_eq!(&held[0], &held[1]);
                }
            }
        }
    }
}
