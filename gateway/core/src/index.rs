//! Which worker holds which prefix, in one flat table of a fixed number of bytes. It learns from placements (and is
//! then a model of each worker's LRU cache) or, block by block, from what a worker says of itself; it neither chooses a
//! worker nor stores any text.
//!
//! A worker that is *exact* announces its blocks itself; placements there are only expected (`expected.rs`).
//!
//! A slot is one residency: this worker holds this block. Slots of one hash are linked (`holders.rs`), so are slots of one
//! worker in the order of their last use. A chained hash names a whole prefix, so no tree is needed.
//!
//! Invariant: residency is *prefix-closed* per worker: who holds a block holds every block before it. A
//! placement puts each block right behind its parent in recency, so children are evicted before parents.

mod expected;
mod forks;
mod heat;
mod holders;
mod matching;
mod slab;
mod snapshot;
mod table;
#[cfg(test)]
mod tests;
mod words;
mod workers;

use std::time::Duration;

use keyway_wire::block_hash::BlockHash;

use crate::candidate::{Candidate, RequestView};

pub(crate) use self::heat::{Hottest, MatchLengths};
pub use self::matching::Lengths;
pub use self::workers::WorkerId;

use self::expected::Expected;
use self::forks::Forks;
use self::heat::Heat;
use self::holders::Holders;
use self::slab::NIL;
use self::workers::Workers;

/// One part in this many of the budget is kept for the workers' own state.
const WORKERS_SHARE: usize = 16;
/// One part in this many of the budget is kept for blocks that are expected: of 256 MiB enough for 190,000 blocks that are
/// being computed at a time, which are three million tokens.
const EXPECTED_SHARE: usize = 32;
/// One part in this many of the budget is kept for what is known of hot prefixes, as far as that needs it.
const HEAT_SHARE: usize = 64;
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
    stamp: u32,
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
    held: Holders,
    expected: Expected,
    heat: Heat,
    workers: Workers,
    forks: Forks,
    /// Number of the last placement, never 0. One that comes again after four billion is taken for the old one, which at
    /// worst spares a block from eviction.
    stamp: u32,
    eviction_batch: usize,
    /// Whose least recent blocks were fetched last, and how many of them are still to go.
    fetched: (u16, usize),
}

impl PrefixIndex {
    /// An index that never allocates more than `byte_budget` bytes. A budget too small for one residency gives
    /// an index that stays empty.
    pub fn new(byte_budget: usize) -> Self {
        let workers = Workers::new(byte_budget / WORKERS_SHARE);
        let expected = Expected::new(byte_budget / EXPECTED_SHARE);
        let heat = Heat::new(byte_budget / HEAT_SHARE);
        let others = workers.bytes() + expected.bytes() + heat.bytes();
        let held = Holders::new(byte_budget.saturating_sub(others));
        let eviction_batch = (held.slab.capacity() / EVICTION_SHARE).clamp(1, MAX_EVICTION_BATCH);
        let forks = Forks::new();
        Self { held, expected, heat, workers, forks, stamp: 0, eviction_batch, fetched: (0, 0) }
    }

    /// Records that `worker` was sent this chain: all of it is resident from now on, and most recent. Where the
    /// index is full, the worker with the most residencies gives up its least recent ones; where the worker's
    /// own capacity is reached, that worker does. Of a chain too long for either, the head is kept.
    ///
    /// An exact worker ([`PrefixIndex::set_exact`]) announces what it holds: there the chain is only expected, until the
    /// placement is finished.
    pub fn place(&mut self, worker: WorkerId, chain: &[BlockHash]) -> Placement {
        let stamp = self.next_stamp();
        let mut placement = Placement { worker, stamp, added: Vec::new(), expected: Vec::new() };
        let Some(place) = self.workers.get_or_add(worker) else { return placement };
        if self.workers[place].exact {
            // Residency is prefix-closed, so what is held is a prefix of the chain.
            let held = chain.partition_point(|block| self.held.find(*block, place).is_some());
            let list = &mut self.workers[place].expected;
            placement.expected = self.expected.add(list, place, &chain[held..]);
            return placement;
        }
        // A chain placed before lies in the list in order, so the next block is mostly the next slot; and chains that
        // begin alike follow each other, so the first is often the newest. A search would pass every other holder.
        let (mut parent, mut likely) = (NIL, self.workers[place].recency.newest);
        // What is not held, or held here and there, is searched for block by block, so all of it is fetched at once.
        let (mut scattered, mut fetched) = (false, 0);
        let mut i = 0;
        while let Some(&hash) = chain.get(i) {
            let held = if likely != NIL && self.held.slab[likely].hash == hash {
                Some(likely)
            } else {
                if scattered && i >= fetched {
                    fetched = (i + FETCHED_TOGETHER).min(chain.len());
                    self.held.fetch(&chain[i..fetched]);
                }
                self.held.find(hash, place)
            };
            if let Some(first) = held {
                let (last, blocks) = self.held.slab.stamp_run(first, &chain[i..], stamp);
                scattered = blocks < FETCHED_TOGETHER;
                i += blocks.max(1);
                if blocks == 0 {
                    continue; // A chain never repeats a hash, unless two of them collide.
                }
                likely = self.held.slab[last].older;
                self.held.slab.move_run(&mut self.workers[place].recency, parent, (first, last));
                parent = last;
            } else {
                if !self.make_room(place) {
                    break;
                }
                scattered = true;
                parent = self.insert(place, parent, hash);
                placement.added.push(parent);
                i += 1;
            }
        }
        placement
    }

    /// Undoes what a placement added, except blocks that another placement has touched since.
    pub fn withdraw(&mut self, placement: Placement) {
        self.release(&placement);
        for &slot in placement.added.iter().rev() {
            if self.held.slab[slot].stamp == placement.stamp {
                self.evict(slot);
            }
        }
    }

    /// The request's answer has ended: an exact worker has announced by now what it keeps of it.
    pub fn finish(&mut self, placement: Placement) {
        self.release(&placement);
    }

    /// Whether `worker` says itself, block by block, what it holds. While it does not, placements are taken as a model
    /// of its cache.
    pub fn set_exact(&mut self, worker: WorkerId, exact: bool) {
        let Some(place) = self.workers.get_or_add(worker) else { return };
        self.workers[place].exact = exact;
        if !exact {
            self.expected.clear(&mut self.workers[place].expected);
        }
    }

    /// Blocks that exact workers are computing, as far as they have not announced them.
    pub fn expected(&self) -> usize {
        self.expected.len()
    }

    /// Records one block that `worker` says it holds, most recent after its parent. False, and nothing changed, if the
    /// index does not have the parent, or no room: then the block's children will be refused too.
    pub fn store_block(&mut self, worker: WorkerId, parent: Option<BlockHash>, hash: BlockHash) -> bool {
        let Some(place) = self.workers.get_or_add(worker) else { return false };
        if let Some(held) = self.held.find(hash, place) {
            self.workers[place].last = held;
            return true;
        }
        let Some(parent) = self.parent(place, parent) else { return false };
        // The parent must survive the search for room; what is more recent than it, its own parents too, then does.
        let stamp = self.next_stamp();
        if parent != NIL {
            self.held.slab[parent].stamp = stamp;
        }
        let room = self.make_room(place);
        if room {
            self.workers[place].last = self.insert(place, parent, hash);
        }
        room
    }

    /// Brings what leads to these blocks into the processor's cache, all at once: worth it before many of them are stored.
    pub fn fetch(&self, blocks: &[BlockHash]) {
        self.held.fetch(blocks);
    }

    /// Forgets one block of `worker`. The caller has forgotten its children: residency stays prefix-closed.
    pub fn drop_block(&mut self, worker: WorkerId, hash: BlockHash) {
        let Some(place) = self.workers.get(worker) else { return };
        if let Some(slot) = self.held.find(hash, place) {
            self.evict(slot);
        }
    }

    /// Whether the index believes `worker` to hold this block.
    pub fn holds(&self, worker: WorkerId, hash: BlockHash) -> bool {
        let place = self.workers.get(worker);
        place.is_some_and(|place| self.held.find(hash, place).is_some())
    }

    /// Forgets a worker and all it held.
    pub fn remove_worker(&mut self, worker: WorkerId) {
        self.forget(worker, usize::MAX);
    }

    /// Forgets at most so many blocks of a worker, later ones of a prefix before earlier ones; the worker
    /// itself when it has none left. Returns how many: fewer than `most` if it was all.
    pub fn forget(&mut self, worker: WorkerId, most: usize) -> usize {
        let Some(place) = self.workers.get(worker) else { return 0 };
        let forgotten = (0..most).take_while(|_| self.evict_oldest(place, None)).count();
        if forgotten == most {
            return forgotten;
        }
        if self.workers[place].exact {
            // It is one still, and what was sent to it is still expected.
            self.workers[place].capacity = u32::MAX;
        } else {
            self.workers.remove(worker);
        }
        forgotten
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
        self.held.slab.used()
    }

    /// Whether no worker holds anything.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Residencies that fit the budget.
    pub fn capacity(&self) -> usize {
        self.held.slab.capacity()
    }

    /// Bytes allocated: constant, and at most the budget.
    pub fn bytes(&self) -> usize {
        self.held.bytes() + self.expected.bytes() + self.heat.bytes() + self.workers.bytes()
    }

    /// A request was sent, of which so many tokens are computed: its prefixes are that much hotter. `candidates` are those it
    /// was chosen from, with their matches in blocks of `request`.
    pub fn used(
        &mut self,
        now: Duration,
        request: &RequestView<'_>,
        candidates: &[Candidate],
        uncached_tokens: u64,
    ) {
        self.heat.used(now, request, candidates, uncached_tokens);
    }

    /// The hottest prefix that the request shares with some of `all` candidates, of which `share` of the requests are this
    /// gateway's, and their matches so long.
    pub(crate) fn hottest(
        &self,
        now: Duration,
        request: &RequestView<'_>,
        lengths: &MatchLengths,
        (all, share): (usize, f64),
    ) -> Hottest {
        self.heat.hottest(now, request, lengths, (all, share))
    }

    /// Blocks the index believes this worker to hold.
    pub fn resident(&self, worker: WorkerId) -> usize {
        self.workers.get(worker).map_or(0, |place| self.workers[place].recency.len as usize)
    }

    fn next_stamp(&mut self) -> u32 {
        self.stamp = self.stamp.wrapping_add(1).max(1);
        self.stamp
    }

    fn release(&mut self, placement: &Placement) {
        if let (Some(place), false) = (self.workers.get(placement.worker), placement.expected.is_empty()) {
            self.expected.release(&mut self.workers[place].expected, place, &placement.expected);
        }
    }

    /// Where the worker's parent block is; [`NIL`] if there is none to be had, `None` if it is not held.
    fn parent(&self, place: u16, parent: Option<BlockHash>) -> Option<u32> {
        let Some(parent) = parent else { return Some(NIL) };
        let last = Some(self.workers[place].last).filter(|&last| last != NIL);
        let is_parent = |&last: &u32| {
            let slot = &self.held.slab[last];
            slot.hash == parent && slot.worker == place && slot.stamp != 0
        };
        last.filter(is_parent).or_else(|| self.held.find(parent, place))
    }

    /// Makes a block resident, most recent after its parent. There must be room.
    fn insert(&mut self, place: u16, parent: u32, hash: BlockHash) -> u32 {
        let slot = self.held.insert(hash, place, self.stamp);
        self.held.slab.link(&mut self.workers[place].recency, parent, slot);
        slot
    }

    /// Room for one more residency of this worker, at the cost of anything but the chain being placed.
    fn make_room(&mut self, place: u16) -> bool {
        while self.workers[place].recency.len >= self.workers[place].capacity {
            // One goes for each that comes, but searching for them one by one would wait for memory each time.
            match &mut self.fetched {
                (of, left) if *of == place && *left > 0 => *left -= 1,
                fetched => {
                    *fetched = (place, self.eviction_batch - 1);
                    self.fetch_oldest(place);
                }
            }
            if !self.evict_oldest(place, Some(self.stamp)) {
                return false;
            }
        }
        if self.held.slab.is_full()
            && let Some(largest) = self.workers.largest()
        {
            self.fetch_oldest(largest);
            for _ in 0..self.eviction_batch {
                if !self.evict_oldest(largest, Some(self.stamp)) {
                    break;
                }
            }
        }
        !self.held.slab.is_full()
    }

    /// Brings what leads to the worker's least recent blocks into the processor's cache.
    fn fetch_oldest(&self, place: u16) {
        let newer = |&slot: &u32| Some(self.held.slab[slot].newer).filter(|&newer| newer != NIL);
        let oldest = Some(self.workers[place].recency.oldest).filter(|&oldest| oldest != NIL);
        let batch = std::iter::successors(oldest, newer).take(self.eviction_batch);
        self.held.fetch(&batch.map(|slot| self.held.slab[slot].hash).collect::<Vec<_>>());
    }

    /// Evicts the worker's least recent block, unless there is none or placement `keep` touched it.
    fn evict_oldest(&mut self, place: u16, keep: Option<u32>) -> bool {
        let oldest = self.workers[place].recency.oldest;
        let evictable = oldest != NIL && Some(self.held.slab[oldest].stamp) != keep;
        if evictable {
            self.evict(oldest);
        }
        evictable
    }

    fn evict(&mut self, slot: u32) {
        let place = self.held.slab[slot].worker;
        self.held.slab.unlink(&mut self.workers[place].recency, slot);
        self.held.remove(slot);
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
