//! Which worker holds which prefix, in one flat table of a fixed number of bytes. It learns from placements (and is
//! then a model of each worker's LRU cache) or, block by block, from what a worker says of itself; it neither chooses a
//! worker nor stores any text.
//!
//! A worker that is *exact* announces its blocks itself; placements there are only expected (`expected.rs`).
//!
//! A slot is one residency: this worker holds this block. Slots of one hash are linked, so are slots of one
//! worker in the order of their last use. A chained hash names a whole prefix, so no tree is needed.
//!
//! Invariant: residency is *prefix-closed* per worker: who holds a block holds every block before it. A
//! placement puts each block right behind its parent in recency, so children are evicted before parents.

mod expected;
mod holders;
mod slab;
mod table;
#[cfg(test)]
mod tests;
mod workers;

use keyway_wire::block_hash::BlockHash;

pub use self::workers::WorkerId;

use self::expected::Expected;
use self::slab::{NIL, SLOT_BYTES, Slab};
use self::table::{ENTRY_BYTES, Table};
use self::workers::{WORKER_BYTES, Workers};

/// One part in this many of the budget is kept for the workers' own state.
const WORKERS_SHARE: usize = 16;
/// Residencies evicted at a time when the index is full, so that the search for the largest worker is rare.
const MAX_EVICTION_BATCH: usize = 32;
/// ... but never more than one in this many of all.
const EVICTION_SHARE: usize = 1024;
/// Blocks whose table entries are fetched together: as many as a core has misses of its cache under way at once.
const FETCHED_TOGETHER: usize = 16;

/// What one [`PrefixIndex::place`] added. Give it to [`PrefixIndex::withdraw`] if the request never reached the
/// worker, to [`PrefixIndex::finish`] when its answer ends. It may be dropped for a worker that is modelled.
#[derive(Debug)]
pub struct Placement {
    worker: WorkerId,
    stamp: u64,
    added: Vec<u32>,
    expected: Vec<BlockHash>,
}

impl Placement {
    /// Blocks that were not resident before.
    pub fn added(&self) -> usize {
        self.added.len() + self.expected.len()
    }

    /// Whether it says what is expected of an exact worker, until [`PrefixIndex::finish`].
    pub fn is_expected(&self) -> bool {
        !self.expected.is_empty()
    }
}

/// The index. 44 bytes a residency, all allocated at the start and written as they come to be used.
pub struct PrefixIndex {
    table: Table,
    slab: Slab,
    workers: Workers,
    /// Number of the last placement. Numbers start at 1 and are never used again.
    stamp: u64,
    eviction_batch: usize,
    expected: Expected,
}

impl PrefixIndex {
    /// An index that never allocates more than `byte_budget` bytes. A budget too small for one residency gives
    /// an index that stays empty.
    pub fn new(byte_budget: usize) -> Self {
        let workers = Workers::new(byte_budget / WORKERS_SHARE / WORKER_BYTES);
        // Slot 0 and the table's spare entry come on top of what each residency takes.
        let rest = byte_budget.saturating_sub(workers.bytes() + SLOT_BYTES + ENTRY_BYTES);
        let slots = (2 * rest / (2 * SLOT_BYTES + 3 * ENTRY_BYTES)).min(u32::MAX as usize - 1);
        Self {
            table: Table::new(slots),
            slab: Slab::new(slots),
            workers,
            stamp: 0,
            eviction_batch: (slots / EVICTION_SHARE).clamp(1, MAX_EVICTION_BATCH),
            expected: Expected::default(),
        }
    }

    /// For every worker that holds the first block: how many leading blocks of `chain` it holds (at least 1).
    /// In no particular order. What an exact worker is computing counts as held.
    pub fn matched(&self, chain: &[BlockHash]) -> Vec<(WorkerId, u32)> {
        let mut matched = Vec::new();
        self.matched_into(chain, &mut matched);
        matched
    }

    /// [`PrefixIndex::matched`] into a buffer of the caller's, which is cleared first.
    ///
    /// As residency is prefix-closed, the sets of holders shrink along the chain, and equal numbers of holders
    /// mean equal sets. So each distinct length costs one galloping search, whatever the number of workers.
    pub fn matched_into(&self, chain: &[BlockHash], out: &mut Vec<(WorkerId, u32)>) {
        out.clear();
        let Some(&root) = chain.first() else { return };
        out.extend(self.holders(root).map(|id| (id, 1)));
        let (mut depth, mut count) = (1, out.len());
        while count > 0 {
            depth = self.deepest(chain, depth, count);
            if count == out.len() {
                // All of them: what everybody holds is known without a look at each.
                for entry in &mut *out {
                    entry.1 = depth as u32;
                }
            } else {
                // Both lists are in the same order, and these holders are some of those.
                let mut rest = out.iter_mut();
                for id in self.holders(chain[depth - 1]) {
                    if let Some(entry) = rest.find(|entry| entry.0 == id) {
                        entry.1 = depth as u32;
                    }
                }
            }
            if depth == chain.len() {
                break;
            }
            count = self.count(chain[depth]);
            depth += 1;
        }
        self.expected.extend(chain, out);
    }

    /// Records that `worker` was sent this chain: all of it is resident from now on, and most recent. Where the
    /// index is full, the worker with the most residencies gives up its least recent ones; where the worker's
    /// own capacity is reached, that worker does. Of a chain too long for either, the head is kept.
    ///
    /// An exact worker ([`PrefixIndex::set_exact`]) announces what it holds: there the chain is only expected, until the
    /// placement is finished.
    pub fn place(&mut self, worker: WorkerId, chain: &[BlockHash]) -> Placement {
        self.stamp += 1;
        let mut placement = Placement { worker, stamp: self.stamp, added: Vec::new(), expected: Vec::new() };
        if self.expected.is_exact(worker) {
            // Residency is prefix-closed, so what is held is a prefix of the chain.
            let held = chain.partition_point(|block| self.holds(worker, *block));
            placement.expected = self.expected.add(worker, &chain[held..]);
            return placement;
        }
        let Some(place) = self.workers.get_or_add(worker) else { return placement };
        // A chain placed before lies in the list in order, so the next block is mostly the next slot; and chains that
        // begin alike follow each other, so the first is often the newest. A search would pass every other holder.
        let (mut parent, mut likely, mut fetched) = (NIL, self.workers[place].recency.newest, 0);
        for (i, &hash) in chain.iter().enumerate() {
            let held = if likely != NIL && self.slab[likely].hash == hash {
                Some(likely)
            } else {
                if i >= fetched {
                    fetched = (i + FETCHED_TOGETHER).min(chain.len());
                    self.table.fetch(&chain[i..fetched]);
                }
                holders::find(&self.table, &self.slab, hash, place)
            };
            if let Some(slot) = held {
                if self.slab[slot].stamp == self.stamp {
                    continue; // A chain never repeats a hash, unless two of them collide.
                }
                likely = self.slab[slot].older;
                self.touch(place, parent, slot);
                parent = slot;
            } else {
                if !self.make_room(place) {
                    break;
                }
                parent = self.insert(place, parent, hash);
                placement.added.push(parent);
            }
        }
        placement
    }

    /// Undoes what a placement added, except blocks that another placement has touched since.
    pub fn withdraw(&mut self, placement: Placement) {
        self.expected.release(placement.worker, &placement.expected);
        for &slot in placement.added.iter().rev() {
            if self.slab[slot].stamp == placement.stamp {
                self.evict(slot);
            }
        }
    }

    /// The request's answer has ended: an exact worker has announced by now what it keeps of it.
    pub fn finish(&mut self, placement: Placement) {
        self.expected.release(placement.worker, &placement.expected);
    }

    /// Whether `worker` says itself, block by block, what it holds. While it does not, placements are taken as a model
    /// of its cache.
    pub fn set_exact(&mut self, worker: WorkerId, exact: bool) {
        self.expected.set_exact(worker, exact);
    }

    /// Blocks that exact workers are computing, as far as they have not announced them.
    pub fn expected(&self) -> usize {
        self.expected.len()
    }

    /// Records one block that `worker` says it holds, most recent after its parent. False, and nothing changed, if the
    /// index does not have the parent, or no room: then the block's children will be refused too.
    pub fn store_block(&mut self, worker: WorkerId, parent: Option<BlockHash>, hash: BlockHash) -> bool {
        let Some(place) = self.workers.get_or_add(worker) else { return false };
        if holders::find(&self.table, &self.slab, hash, place).is_some() {
            return true;
        }
        let parent = match parent {
            None => NIL,
            Some(parent) => match holders::find(&self.table, &self.slab, parent, place) {
                None => return false,
                Some(slot) => slot,
            },
        };
        // The parent must survive the search for room; what is more recent than it, its own parents too, then does.
        self.stamp += 1;
        if parent != NIL {
            self.slab[parent].stamp = self.stamp;
        }
        let room = self.make_room(place);
        if room {
            self.insert(place, parent, hash);
        }
        room
    }

    /// Forgets one block of `worker`. The caller has forgotten its children: residency stays prefix-closed.
    pub fn drop_block(&mut self, worker: WorkerId, hash: BlockHash) {
        let Some(place) = self.workers.get(worker) else { return };
        if let Some(slot) = holders::find(&self.table, &self.slab, hash, place) {
            self.evict(slot);
        }
    }

    /// Whether the index believes `worker` to hold this block.
    pub fn holds(&self, worker: WorkerId, hash: BlockHash) -> bool {
        let place = self.workers.get(worker);
        place.is_some_and(|place| holders::find(&self.table, &self.slab, hash, place).is_some())
    }

    /// Forgets a worker and all it held.
    pub fn remove_worker(&mut self, worker: WorkerId) {
        let Some(place) = self.workers.get(worker) else { return };
        while self.evict_oldest(place, None) {}
        self.workers.remove(worker);
    }

    /// Sets how many blocks the worker's cache holds; `None`: unknown, so only the index's own bytes bound it.
    pub fn set_capacity(&mut self, worker: WorkerId, blocks: Option<usize>) {
        let Some(place) = self.workers.get_or_add(worker) else { return };
        let capacity = blocks.map_or(u32::MAX, |blocks| u32::try_from(blocks).unwrap_or(u32::MAX));
        self.workers[place].capacity = capacity;
        while self.workers[place].recency.len > capacity && self.evict_oldest(place, None) {}
    }

    /// Residencies of all workers.
    pub fn len(&self) -> usize {
        self.slab.used()
    }

    /// Whether no worker holds anything.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Residencies that fit the budget.
    pub fn capacity(&self) -> usize {
        self.slab.capacity()
    }

    /// Bytes allocated: constant, and at most the budget.
    pub fn bytes(&self) -> usize {
        self.table.bytes() + self.slab.bytes() + self.workers.bytes()
    }

    /// Blocks the index believes this worker to hold.
    pub fn resident(&self, worker: WorkerId) -> usize {
        self.workers.get(worker).map_or(0, |place| self.workers[place].recency.len as usize)
    }

    /// The greatest depth at which `count` workers still hold the chain, given that they do at `depth`.
    fn deepest(&self, chain: &[BlockHash], depth: usize, count: usize) -> usize {
        let (mut held, mut lost) = (depth, chain.len() + 1);
        let mut step = 1;
        while held + step < lost {
            if self.count(chain[held + step - 1]) == count {
                held += step;
                step *= 2;
            } else {
                lost = held + step;
            }
        }
        while lost - held > 1 {
            let middle = usize::midpoint(held, lost);
            if self.count(chain[middle - 1]) == count { held = middle } else { lost = middle }
        }
        held
    }

    fn holders(&self, hash: BlockHash) -> impl Iterator<Item = WorkerId> {
        holders::iter(&self.table, &self.slab, hash).map(|slot| self.workers[self.slab[slot].worker].id)
    }

    fn count(&self, hash: BlockHash) -> usize {
        holders::count(&self.table, &self.slab, hash)
    }

    /// Makes a resident block most recent after its parent.
    fn touch(&mut self, place: u16, parent: u32, slot: u32) {
        self.slab[slot].stamp = self.stamp;
        let recency = &mut self.workers[place].recency;
        let in_place = if parent == NIL { recency.newest == slot } else { self.slab[slot].newer == parent };
        if !in_place {
            self.slab.unlink(recency, slot);
            self.slab.link(recency, parent, slot);
        }
    }

    /// Makes a block resident, most recent after its parent. There must be room.
    fn insert(&mut self, place: u16, parent: u32, hash: BlockHash) -> u32 {
        let slot = self.slab.take(hash, place, self.stamp);
        holders::attach(&mut self.table, &mut self.slab, slot);
        self.slab.link(&mut self.workers[place].recency, parent, slot);
        slot
    }

    /// Room for one more residency of this worker, at the cost of anything but the chain being placed.
    fn make_room(&mut self, place: u16) -> bool {
        while self.workers[place].recency.len >= self.workers[place].capacity {
            if !self.evict_oldest(place, Some(self.stamp)) {
                return false;
            }
        }
        if self.slab.is_full()
            && let Some(largest) = self.workers.largest()
        {
            for _ in 0..self.eviction_batch {
                if !self.evict_oldest(largest, Some(self.stamp)) {
                    break;
                }
            }
        }
        !self.slab.is_full()
    }

    /// Evicts the worker's least recent block, unless there is none or placement `keep` touched it.
    fn evict_oldest(&mut self, place: u16, keep: Option<u64>) -> bool {
        let oldest = self.workers[place].recency.oldest;
        let evictable = oldest != NIL && Some(self.slab[oldest].stamp) != keep;
        if evictable {
            self.evict(oldest);
        }
        evictable
    }

    fn evict(&mut self, slot: u32) {
        let place = self.slab[slot].worker;
        holders::detach(&mut self.table, &mut self.slab, slot);
        self.slab.unlink(&mut self.workers[place].recency, slot);
        self.slab.give(slot);
    }
}

impl std::fmt::Debug for PrefixIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let workers: Vec<_> =
            self.workers.iter().map(|(id, place)| (id, self.workers[place].recency.len)).collect();
        f.debug_struct("PrefixIndex")
            .field("bytes", &self.bytes())
            .field("resident", &workers)
            .finish_non_exhaustive()
    }
}
