//! Room for more: what leaves where a worker's own capacity or the index itself is full. An engine's cache is
//! one for all, so a worker's least recent block goes, whichever owner's it is; the index is shared, so the
//! owner that holds the most of it gives way.

use keyway_wire::block_hash::BlockHash;
use smallvec::SmallVec;

use super::PrefixIndex;
use super::slab::NIL;
use super::workers::ListId;

/// Residencies evicted at a time when the index is full, so that the search for the largest worker is rare.
pub(super) const MAX_EVICTION_BATCH: usize = 32;

/// What must survive the search for room: the chain that it is for.
#[derive(Clone, Copy)]
pub(super) enum Kept {
    Nothing,
    /// All that this placement has touched.
    Touched(u32),
    /// One slot, and what is more recent.
    Slot(u32),
}

impl PrefixIndex {
    /// Lets so many `more` blocks fit into the worker's own capacity, at the cost of its least recent ones,
    /// whichever owner's they are. What is pending there takes no room. False if what is kept stands in the
    /// way.
    pub(super) fn trim(&mut self, place: u16, more: u32, kept: Kept) -> bool {
        loop {
            let worker = &self.workers[place];
            let surplus =
                (worker.blocks - worker.pending + u64::from(more)).saturating_sub(worker.capacity.into());
            if surplus == 0 {
                return true;
            }
            let Some(list) = self.least_recent(place) else { return false };
            if self.evict_blocks(list, surplus, self.eviction_batch, kept) == 0 {
                return false;
            }
        }
    }

    /// Room in the index for one more residency on this list, at the cost of anything but what is kept.
    pub(super) fn make_room(&mut self, list: ListId, kept: Kept) -> bool {
        if self.held.slab.is_full() {
            let (owner, most) = self.owners.gives_way(self.workers.owner(list), self.eviction_batch);
            if let Some(largest) = self.workers.largest(owner) {
                // A placement's number says nothing at other workers.
                let kept = if largest == list { kept } else { Kept::Nothing };
                let mut left = most;
                while left > 0 {
                    match self.evict_oldest(largest, left, kept) {
                        0 => break,
                        evicted => left -= evicted,
                    }
                }
            }
        }
        !self.held.slab.is_full()
    }

    /// Evicts some of the list's least recent residencies, at most so many: of one placement, where others
    /// may have older ones. Returns how many.
    pub(super) fn evict_oldest(&mut self, list: ListId, most: usize, kept: Kept) -> usize {
        self.evict_blocks(list, u64::MAX, most, kept)
    }

    /// The same until so many blocks have gone with them.
    fn evict_blocks(&mut self, list: ListId, blocks: u64, most: usize, kept: Kept) -> usize {
        let oldest = |index: &Self| Some(index.workers.list(list).oldest).filter(|&slot| slot != NIL);
        let Some(first) = oldest(self) else { return 0 };
        let width = u64::from(self.held.slab[first].hash.blocks());
        let likely = blocks.div_ceil(width).min(most as u64) as usize;
        if likely > 1 {
            self.fetch_oldest(first, likely);
        }
        let enough = self.workers[list.place].blocks.saturating_sub(blocks);
        let number = self.held.slab[first].number();
        let is_alone = self.workers.has_one_list(list.place);
        for evicted in 0..most {
            let Some(slot) = oldest(self) else { return evicted };
            let held = &self.held.slab[slot];
            let is_kept = match kept {
                Kept::Nothing => false,
                Kept::Touched(stamp) => held.bears(stamp),
                Kept::Slot(kept) => slot == kept,
            };
            let is_enough = self.workers[list.place].blocks <= enough;
            if is_kept || is_enough || !(is_alone || held.number() == number) {
                return evicted;
            }
            self.evict(slot);
        }
        most
    }

    pub(super) fn evict(&mut self, slot: u32) {
        self.accept(slot, 0);
        let (list, width) = (self.held.slab[slot].list(), self.held.slab[slot].hash.blocks());
        self.held.slab.unlink(self.workers.list_mut(list), slot);
        self.workers.shrank(list.place, width);
        self.owners.take(self.workers.owner(list));
        self.held.remove(slot);
    }

    /// The worker's list whose least recent block was used before those of its others.
    fn least_recent(&self, place: u16) -> Option<ListId> {
        let age = |oldest: u32| self.workers.age(place, self.held.slab[oldest].number());
        let lists = self.workers.lists(place).filter(|(_, _, list)| list.oldest != NIL);
        lists.max_by_key(|(_, _, list)| age(list.oldest)).map(|(list, ..)| list)
    }

    /// Brings what leads to some of a list's blocks, from its least recent one on, into the processor's
    /// cache: searching for them one by one would wait for memory each time.
    fn fetch_oldest(&self, oldest: u32, most: usize) {
        let newer = |&slot: &u32| Some(self.held.slab[slot].newer).filter(|&newer| newer != NIL);
        let batch = std::iter::successors(Some(oldest), newer).take(most.min(MAX_EVICTION_BATCH));
        let hashes: SmallVec<[BlockHash; MAX_EVICTION_BATCH]> =
            batch.map(|slot| self.held.slab[slot].hash).collect();
        self.held.fetch(&hashes);
    }
}
