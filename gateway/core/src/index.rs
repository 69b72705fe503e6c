//! Which worker holds which prefix, in one flat table of a fixed number of bytes. It learns from placements
//! (and is then a model of each worker's LRU cache) or, block by block, from what a worker says of itself; it
//! neither chooses a worker nor stores any text.
//!
//! A worker that is *exact* announces its blocks itself; placements there are only expected (`expected.rs`).
//!
//! Names that follow each other stand in runs of up to eight (`runs.rs`), once for all workers. A residency
//! says that a worker holds a run, or its first names (`residency.rs`). Residencies of one run are found by
//! its number (`holders.rs`); those of one worker and owner are linked in the order of their last use. A
//! chained hash names a whole prefix, so the table leads to any name at once.
//!
//! Invariant: residency is *prefix-closed* per worker: who holds a block holds every block before it. A
//! placement puts each block right behind its parent in recency, so children are evicted before parents.
//!
//! What one owner (a tenant, say) sends takes nothing from others: a full index takes from the owner that
//! holds the most (`owners.rs`), and what no worker has accepted yet takes no room of the worker's own
//! (`claims.rs`).

mod ancestry;
mod announced;
mod blocks;
mod cells;
mod checkpoints;
mod claims;
mod crowds;
mod expected;
mod forks;
mod heat;
mod holders;
mod lines;
mod matching;
mod owners;
mod placement;
mod placing;
mod residency;
mod room;
mod runs;
mod snapshot;
mod table;
#[cfg(test)]
mod tests;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use keyway_wire::block_hash::BlockHash;

use crate::candidate::{Candidate, RequestView};

pub use self::ancestry::CHAIN_BLOCKS_MAX;
pub(crate) use self::heat::Hottest;
pub use self::heat::MatchLengths;
pub use self::matching::Lengths;
pub use self::owners::Owner;
pub use self::placement::Placement;
pub use self::workers::WorkerId;

use self::claims::Voids;
use self::expected::Expected;
use self::forks::Forks;
use self::heat::Heat;
use self::holders::Holders;
use self::owners::Owners;
use self::placement::{Accepted, Closed};
use self::room::{Kept, MAX_EVICTION_BATCH};
use self::workers::Workers;

/// One part in this many of the budget is kept for the workers' own state.
const WORKERS_SHARE: usize = 16;
/// One part in this many of the budget is kept for blocks that are expected: of 256 MiB enough for 190,000
/// blocks that are being computed at a time, which are three million tokens.
const EXPECTED_SHARE: usize = 32;
/// One part in this many of the budget is kept for what is known of hot prefixes, as far as that needs it.
const HEAT_SHARE: usize = 64;
/// Of a full index never more than one residency in this many is evicted at a time.
const EVICTION_SHARE: usize = 1024;
/// The index. 20 bytes a residency where runs are full and one worker holds each, 4 for each worker more; all
/// reserved at the start and written as they come to be used.
pub struct PrefixIndex {
    held: Holders,
    expected: Expected,
    heat: Heat,
    workers: Workers,
    forks: Forks,
    /// Whether some worker can go on behind some of its blocks only, or could.
    any_checkpoints: bool,
    owners: Owners,
    accepted: Arc<Accepted>,
    /// Empty, and as large as it once had to be.
    settling: Vec<Closed>,
    voids: Voids,
    /// Number of the last placement, modulo 2^32.
    sequence: u32,
    eviction_batch: usize,
}

impl PrefixIndex {
    /// An index that never allocates more than `byte_budget` bytes, and 128 KB for who holds what many hold
    /// (`index/crowds.rs`). A budget too small for one residency gives an index that stays empty.
    pub fn new(byte_budget: usize) -> Self {
        let workers = Workers::new(byte_budget / WORKERS_SHARE);
        let expected = Expected::new(byte_budget / EXPECTED_SHARE);
        let heat = Heat::new(byte_budget / HEAT_SHARE);
        let others = workers.bytes() + expected.bytes() + heat.bytes();
        let rest = byte_budget.saturating_sub(others);
        let held = Holders::new(rest);
        let eviction_batch = (held.capacity() / EVICTION_SHARE).clamp(1, MAX_EVICTION_BATCH);
        let (forks, owners, accepted) = (Forks::new(), Owners::new(), Accepted::new());
        let (settling, voids, sequence) = (Vec::new(), Voids::default(), 0);
        Self {
            held,
            expected,
            heat,
            workers,
            forks,
            any_checkpoints: false,
            owners,
            accepted,
            settling,
            voids,
            sequence,
            eviction_batch,
        }
    }

    /// [`PrefixIndex::place_of`] no owner in particular.
    pub fn place(&mut self, worker: WorkerId, chain: &[BlockHash]) -> Placement {
        self.place_of(Owner::NOBODY, worker, chain)
    }

    /// Records that `worker` was sent this chain by a request of `owner`: all of it is resident from now on,
    /// and most recent. Where the index is full, the owner with the most residencies gives up its least
    /// recent ones at the worker where it has the most. The worker's own capacity gives nothing up until the
    /// placement is accepted, which is by dropping it. Of a chain too long for either, the head is kept.
    ///
    /// No two owners' chains may have a block in common: they are told apart by their salts. What has is
    /// counted as whose it was first.
    ///
    /// An exact worker ([`PrefixIndex::set_exact`]) announces what it holds: there the chain is only
    /// expected, until the placement is finished.
    pub fn place_of(&mut self, owner: Owner, worker: WorkerId, chain: &[BlockHash]) -> Placement {
        let Some(place) = self.workers.get_or_add(worker) else { return Placement::nothing(worker) };
        let number = self.workers.next_number(place);
        if self.workers[place].exact {
            // Residency is prefix-closed, so what is held is a prefix of the chain.
            let held = chain.partition_point(|block| self.held.find(*block, place).is_some());
            let list = &mut self.workers[place].expected;
            return Placement::expects(worker, self.expected.add(list, place, &chain[held..]));
        }
        self.settle();
        let chain = placing::fitting(chain, self.workers[place].capacity);
        self.place_at((worker, place), owner, chain, number)
    }

    /// The request's answer has ended: an exact worker has announced by now what it keeps of it.
    pub fn finish(&mut self, placement: Placement) {
        self.release(&placement);
    }

    /// Whether `worker` says itself, block by block, what it holds. While it does not, placements are taken
    /// as a model of its cache.
    pub fn set_exact(&mut self, worker: WorkerId, exact: bool) {
        let Some(place) = self.workers.get_or_add(worker) else { return };
        self.workers[place].exact = exact;
        if !exact {
            self.workers[place].by_checkpoints = false;
            self.expected.clear(&mut self.workers[place].expected);
        }
    }

    /// Blocks of requests under way at exact workers, which these had not announced when they were sent.
    pub fn expected(&self) -> usize {
        self.expected.len()
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
        let mut forgotten = 0;
        while forgotten < most {
            let list = self.workers.lists(place).find(|(_, _, list)| list.len > 0).map(|(list, ..)| list);
            let Some(list) = list else { break };
            forgotten += self.evict_oldest(list, most - forgotten, Kept::Nothing);
        }
        if forgotten == most {
            return forgotten;
        }
        if self.workers[place].exact {
            // It is one still, and what was sent to it is still expected.
            self.workers[place].capacity = u32::MAX;
            self.workers[place].by_checkpoints = false;
        } else {
            self.workers.remove(worker);
        }
        forgotten
    }

    /// Sets how many blocks the worker's cache holds; `None`: unknown, so only the index's own bytes bound
    /// it.
    pub fn set_capacity(&mut self, worker: WorkerId, blocks: Option<usize>) {
        let Some(place) = self.workers.get_or_add(worker) else { return };
        let capacity = blocks.map_or(u32::MAX, |blocks| u32::try_from(blocks).unwrap_or(u32::MAX));
        self.workers[place].capacity = capacity;
        self.settle();
        self.trim(place, 0, Kept::Nothing);
    }

    /// Residencies of all workers.
    pub fn len(&self) -> usize {
        self.owners.total() as usize
    }

    /// Whether no worker holds anything.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Residencies that fit the budget if chains are long and one worker holds each. Of what several hold
    /// more fit, of what parts after a few blocks fewer.
    pub fn capacity(&self) -> usize {
        self.held.capacity()
    }

    /// Bytes allocated: constant, and at most the budget.
    pub fn bytes(&self) -> usize {
        self.held.bytes() + self.expected.bytes() + self.heat.bytes() + self.workers.bytes()
    }

    /// A request was sent, of which so many tokens are computed: its prefixes are that much hotter.
    /// `candidates` are those it was chosen from, with their matches in blocks of `request`.
    pub fn used(
        &mut self,
        now: Duration,
        request: &RequestView<'_>,
        candidates: &[Candidate],
        uncached_tokens: u64,
    ) {
        self.used_among(now, request, &MatchLengths::of(candidates), uncached_tokens);
    }

    /// [`PrefixIndex::used`], by the lengths of the candidates' matches.
    pub fn used_among(
        &mut self,
        now: Duration,
        request: &RequestView<'_>,
        lengths: &MatchLengths,
        uncached_tokens: u64,
    ) {
        self.heat.used(now, request, lengths, uncached_tokens);
    }

    /// The hottest prefix that the request shares with some of `all` candidates, of which `share` of the
    /// requests are this gateway's, and their matches so long.
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
        self.workers.get(worker).map_or(0, |place| self.workers[place].blocks as usize)
    }

    /// Residencies of this owner's prompts, at all workers together.
    pub fn held_of(&self, owner: Owner) -> usize {
        self.owners.of(owner) as usize
    }

    fn release(&mut self, placement: &Placement) {
        if let (Some(place), true) = (self.workers.get(placement.worker), placement.is_expected()) {
            self.expected.release(&mut self.workers[place].expected, place, placement.expected());
        }
    }
}

impl std::fmt::Debug for PrefixIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let workers: Vec<_> =
            self.workers.iter().map(|(id, place)| (id, self.workers[place].blocks)).collect();
        f.debug_struct("PrefixIndex")
            .field("bytes", &self.bytes())
            .field("resident", &workers)
            .finish_non_exhaustive()
    }
}
