//! Room for more: what leaves where a worker's own capacity or the index itself is full. An engine's cache is
//! one for all, so a worker's least recent block goes, whichever owner's it is; the index is shared, so the
//! owner that holds the most of it gives way.

use keyway_wire::block_hash::BlockHash;
use smallvec::SmallVec;

use super::PrefixIndex;
use super::cells::NIL;
use super::runs::{RUN_MAX, Spot};
use super::workers::ListId;

/// Residencies evicted at a time when the index is full, so that the search for the largest worker is rare.
pub(super) const MAX_EVICTION_BATCH: usize = 32;

/// What must survive the search for room: the chain that it is for.
#[derive(Clone, Copy)]
pub(super) enum Kept {
    Nothing,
    /// All that this placement has touched.
    Touched(u32),
    /// So many names of one residency, and what is more recent.
    First(u32, usize),
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

    /// Room in the index for one more block on this list, at the cost of anything but what is kept, where
    /// runs may be parted that so many hold.
    pub(super) fn make_room(&mut self, list: ListId, kept: Kept, parted: usize) -> bool {
        // What others hold too gives no room to new names when one worker loses it: it may take some turns.
        while !self.held.has_room(parted) {
            let (owner, most) = self.owners.gives_way(self.workers.owner(list), self.eviction_batch);
            let Some(largest) = self.workers.largest(owner) else { return false };
            // A placement's number says nothing at other workers.
            let kept = if largest == list { kept } else { Kept::Nothing };
            let mut left = most;
            while left > 0 {
                match self.evict_oldest(largest, left, kept) {
                    0 if left == most => return false,
                    0 => break,
                    evicted => left -= evicted,
                }
            }
        }
        true
    }

    /// Evicts some of the list's least recent residencies, at most so many: of one placement, where others
    /// may have older ones. Returns how many.
    pub(super) fn evict_oldest(&mut self, list: ListId, most: usize, kept: Kept) -> usize {
        self.evict_blocks(list, u64::MAX, most, kept)
    }

    /// The same until so many blocks have gone with them.
    fn evict_blocks(&mut self, list: ListId, blocks: u64, most: usize, kept: Kept) -> usize {
        let first = self.workers.list(list).oldest;
        if first == NIL {
            return 0;
        }
        let number = self.held.cells.get(first).number();
        let is_alone = self.workers.has_one_list(list.place);
        if blocks.min(most as u64) > 1 {
            self.fetch_oldest(first, blocks.min(most as u64) as usize);
        }
        let (mut evicted, mut left) = (0, blocks);
        while evicted < most && left > 0 {
            let oldest = self.workers.list(list).oldest;
            if oldest == NIL {
                break;
            }
            let held = self.held.cells.get(oldest);
            let stays = match kept {
                Kept::Touched(stamp) if held.bears(stamp) => held.len.into(),
                Kept::First(kept, names) if kept == oldest => names,
                _ => 0,
            };
            if !(is_alone || held.number() == number) {
                break;
            }
            let mut count = 0;
            let names = stays..held.len.into();
            for at in names.rev().take(most - evicted) {
                if left == 0 {
                    break;
                }
                let width = self.held.cells.name(Spot { run: held.run, at }).blocks();
                (count, left) = (count + 1, left.saturating_sub(width.into()));
            }
            if count == 0 {
                break;
            }
            self.shed(oldest, count);
            evicted += count;
            if stays > 0 {
                break;
            }
        }
        evicted
    }

    /// The worker's list whose least recent block was used before those of its others.
    fn least_recent(&self, place: u16) -> Option<ListId> {
        let age = |oldest: u32| self.workers.age(place, self.held.cells.get(oldest).number());
        let lists = self.workers.lists(place).filter(|(_, _, list)| list.oldest != NIL);
        lists.max_by_key(|(_, _, list)| age(list.oldest)).map(|(list, ..)| list)
    }

    /// Brings what leads to some of a list's blocks, from its least recent one on, into the processor's
    /// cache: searching for them one by one would wait for memory each time.
    fn fetch_oldest(&self, oldest: u32, most: usize) {
        let cells = &self.held.cells;
        let newer = |&at: &u32| Some(cells.newer(at)).filter(|&newer| newer != NIL);
        let batch = std::iter::successors(Some(oldest), newer).take(most.div_ceil(RUN_MAX).min(BATCH_RUNS));
        // The names that others hold too stay.
        let alone = batch.map(|at| cells.run_of(at)).filter(|run| cells.holders(*run) == 1);
        let names: SmallVec<[BlockHash; MAX_EVICTION_BATCH]> =
            alone.flat_map(|run| cells.names(run).into_iter().take(cells.len(run))).collect();
        self.held.fetch(&names);
    }
}

/// Runs at least that blocks which are evicted at a time are in.
const BATCH_RUNS: usize = MAX_EVICTION_BATCH / RUN_MAX;
