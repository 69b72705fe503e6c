//! What workers say of themselves, block by block: what they hold from now on, and what they hold no more.

use keyway_wire::block_hash::BlockHash;

use super::blocks::Way;
use super::cells::NIL;
use super::placing::FETCHED_TOGETHER;
use super::residency;
use super::room::Kept;
use super::runs::Spot;
use super::{Owner, PrefixIndex, WorkerId};

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
            let mut rest = blocks;
            while let Some((&block, behind)) = rest.split_first() {
                if !self.store_expected(place, parent, block) {
                    return stored;
                }
                let more = self.store_behind(place, block, behind);
                (parent, stored) = (Some(rest[more]), stored + 1 + more);
                rest = &behind[more..];
            }
        }
        self.end_run(self.workers[place].last);
        stored
    }

    /// Forgets one block of `worker`. The caller has forgotten its children: residency stays prefix-closed.
    pub fn drop_block(&mut self, worker: WorkerId, hash: BlockHash) {
        let Some(place) = self.workers.get(worker) else { return };
        self.drop_at(place, hash, &[]);
    }

    /// [`PrefixIndex::drop_block`] for several, children before their parents.
    pub fn drop_blocks(&mut self, worker: WorkerId, blocks: &[BlockHash]) {
        let Some(place) = self.workers.get(worker) else { return };
        for blocks in blocks.chunks(FETCHED_TOGETHER) {
            self.held.approach(blocks.iter().copied());
            let mut rest = blocks;
            while let Some((&block, behind)) = rest.split_first() {
                let more = self.drop_at(place, block, behind);
                rest = &behind[more..];
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
        let behind = self.behind(place, parent);
        let mut way = self.way_behind(behind, hash);
        if let Way::At(spot) = way
            && let Some(held) = self.held.at(spot.run, place)
            && usize::from(self.held.cells.get(held).len) > spot.at
        {
            self.workers[place].last = held;
            self.accept(held, 0);
            return true;
        }
        let Some((mut after, names)) = behind else { return false };
        let list = match after {
            NIL => self.workers.find_or_add_list(place, Owner::NOBODY, &self.owners),
            after => self.held.cells.get(after).list(),
        };
        // What is more recent than the parent survives with it, its own parents too.
        let kept = Kept::First(after, names);
        if !self.trim(place, 1, kept) {
            return false;
        }
        let parted = self.parted(after, way) + self.holders_if_within(after, names);
        if !self.held.has_room(parted) {
            if !self.make_room(list, kept, parted) {
                return false;
            }
            way = self.way_behind(behind, hash);
        }
        if after != NIL {
            self.accept(after, 0);
            if self.holders_if_within(after, names) > 0 {
                let first = self.split(self.held.cells.run_of(after), names);
                let Some(head) = self.held.at(first, place) else { return false };
                (after, way) = (head, self.way(head, hash));
            }
        }
        let stamp = residency::stamp(self.workers.number(place), list.nth);
        self.workers[place].last = self.put(list, after, hash, stamp, way);
        true
    }

    /// Where the worker's parent block is: its residency, and how many names end with it. None of [`NIL`] if
    /// there is no parent; `None` if it is not held.
    fn behind(&self, place: u16, parent: Option<BlockHash>) -> Option<(u32, usize)> {
        let Some(parent) = parent else { return Some((NIL, 0)) };
        self.found(place, parent).map(|(held, at)| (held, at + 1))
    }

    /// Where a name is in the residency that the worker has announced last: mostly it is there.
    fn in_last(&self, place: u16, name: BlockHash) -> Option<(u32, usize)> {
        let last = self.workers[place].last;
        if last == NIL {
            return None;
        }
        let held = self.held.cells.get(last);
        let is_it = |at: &usize| self.held.cells.name(Spot { run: held.run, at: *at }) == name;
        let at = (0..usize::from(held.len)).rev().find(is_it)?;
        Some((last, at))
    }

    fn way_behind(&self, behind: Option<(u32, usize)>, name: BlockHash) -> Way {
        let (after, names) = behind.unwrap_or((NIL, 0));
        // What stands behind the parent in its run already is another block.
        self.way(if self.holders_if_within(after, names) > 0 { NIL } else { after }, name)
    }

    /// How many hold the run of a residency, if that goes on behind so many names; else 0.
    fn holders_if_within(&self, at: u32, names: usize) -> usize {
        if at == NIL {
            return 0;
        }
        let held = self.held.cells.get(at);
        if usize::from(held.len) > names { self.held.cells.holders(held.run) } else { 0 }
    }

    /// Stores as many of these blocks as stand in one run with the one before them, which was just stored.
    fn store_behind(&mut self, place: u16, before: BlockHash, blocks: &[BlockHash]) -> usize {
        let worker = &self.workers[place];
        let at = worker.last;
        let held = self.held.cells.get(at);
        let is_last = at != NIL && self.held.cells.last_name(&held) == before;
        if !is_last || worker.capacity != u32::MAX {
            return 0;
        }
        let (count, _) = self.extend(held.list(), at, blocks, held.stamp);
        if !self.expected.is_empty() {
            blocks[..count].iter().for_each(|block| self.expected.announced(*block, place));
        }
        count
    }

    /// Forgets a block of the worker at `place`, and those of `before` that stand right before it in its run,
    /// the nearest first; returns how many these are.
    fn drop_at(&mut self, place: u16, block: BlockHash, before: &[BlockHash]) -> usize {
        let Some((held, at)) = self.found(place, block) else { return 0 };
        let residency = self.held.cells.get(held);
        let name = |at: usize| self.held.cells.name(Spot { run: residency.run, at });
        let more = (0..at).rev().zip(before).take_while(|(at, block)| name(*at) == **block).count();
        self.workers[place].last = held;
        // What stands behind it in its run has gone before it, or goes with it.
        self.shed(held, usize::from(residency.len) - (at - more));
        more
    }

    /// Where a worker holds a name.
    pub(super) fn found(&self, place: u16, name: BlockHash) -> Option<(u32, usize)> {
        self.in_last(place, name).or_else(|| self.held.find(name, place).map(|(held, spot)| (held, spot.at)))
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
