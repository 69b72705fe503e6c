//! What one placement added to the index, until its request's worker has accepted it or it is taken back.
//! Until then its blocks count above their worker's capacity: an engine evicts for a prompt when it begins to
//! compute it, never for a request that it refuses. A placement that is dropped is accepted, without the
//! index's lock; the index takes note when it is next looked at.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use keyway_wire::block_hash::BlockHash;
use keyway_wire::spans::Spans;

use super::WorkerId;

/// What one [`super::PrefixIndex::place`] added. Give it to [`super::PrefixIndex::withdraw`] if the request
/// never reached the worker, or was refused there; to [`super::PrefixIndex::finish`] when its answer ends.
/// For a worker that is modelled it is to be dropped when the answer begins: that is when the worker has made
/// room for it.
pub struct Placement {
    pub(super) worker: WorkerId,
    /// The worker's place when it was placed.
    pub(super) place: u16,
    /// Its number among all placements, modulo 2^32.
    pub(super) sequence: u32,
    count: u32,
    /// Blocks of its chain that are resident now.
    kept: u32,
    blocks: Blocks,
    accepted: Option<Arc<Accepted>>,
}

/// What a placement brought about.
enum Blocks {
    /// Blocks of a worker that is modelled, which this placement added, or another one that no worker has
    /// accepted either; of each residency all that no worker has, in order.
    Claimed(Vec<BlockHash>),
    /// Blocks that an exact worker is to announce.
    Expected(Vec<BlockHash>),
}

/// Placements that workers have accepted, until the index takes note.
pub(super) struct Accepted {
    closed: Mutex<Vec<Closed>>,
    any: AtomicBool,
}

/// What is left of a placement that was accepted.
pub(super) struct Closed {
    pub(super) place: u16,
    pub(super) sequence: u32,
    /// Blocks that it vouched for.
    pub(super) claims: Vec<BlockHash>,
}

impl Placement {
    /// One that added no block, as where the chain is empty or the index takes no further worker.
    pub(super) fn nothing(worker: WorkerId) -> Self {
        Self::expects(worker, Vec::new())
    }

    /// Of blocks that an exact worker is to announce.
    pub(super) fn expects(worker: WorkerId, blocks: Vec<BlockHash>) -> Self {
        let (count, blocks) = (blocks.len() as u32, Blocks::Expected(blocks));
        Self { worker, place: 0, sequence: 0, count, kept: 0, blocks, accepted: None }
    }

    /// Of blocks, `count` of them new, which are the last of `kept`. The placement's worker's place, and its
    /// number among all.
    pub(super) fn claims(
        worker: WorkerId,
        (place, sequence): (u16, u32),
        (count, kept): (u32, usize),
        claims: Vec<BlockHash>,
        accepted: &Arc<Accepted>,
    ) -> Self {
        let accepted = (!claims.is_empty()).then(|| Arc::clone(accepted));
        let (kept, blocks) = (kept as u32, Blocks::Claimed(claims));
        Self { worker, place, sequence, count, kept, blocks, accepted }
    }

    /// Where it was placed.
    pub fn worker(&self) -> WorkerId {
        self.worker
    }

    /// Blocks that were not resident before.
    pub fn added(&self) -> usize {
        self.count as usize
    }

    /// Blocks of its chain that were resident before.
    pub fn found_blocks(&self, chain: &[BlockHash]) -> usize {
        Spans::of(chain).blocks(chain.len() - self.added())
    }

    /// How many of its chain's blocks are resident, from the first one on; 0 at an exact worker, which says
    /// itself what it holds.
    pub fn kept(&self) -> usize {
        self.kept as usize
    }

    /// Whether it says what is expected of an exact worker, until [`super::PrefixIndex::finish`].
    pub fn is_expected(&self) -> bool {
        !self.expected().is_empty()
    }

    pub(super) fn expected(&self) -> &[BlockHash] {
        match &self.blocks {
            Blocks::Claimed(_) => &[],
            Blocks::Expected(blocks) => blocks,
        }
    }

    /// Its claims, which are then no longer its own.
    pub(super) fn take_claims(&mut self) -> Vec<BlockHash> {
        match &mut self.blocks {
            Blocks::Claimed(claims) => mem::take(claims),
            Blocks::Expected(_) => Vec::new(),
        }
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        let claims = self.take_claims();
        if let (false, Some(accepted)) = (claims.is_empty(), &self.accepted) {
            accepted.add(Closed { place: self.place, sequence: self.sequence, claims });
        }
    }
}

impl std::fmt::Debug for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Placement")
            .field("worker", &self.worker)
            .field("added", &self.count)
            .field("is_expected", &self.is_expected())
            .finish_non_exhaustive()
    }
}

impl Accepted {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { closed: Mutex::new(Vec::new()), any: AtomicBool::new(false) })
    }

    fn add(&self, closed: Closed) {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner).push(closed);
        self.any.store(true, Ordering::Release);
    }

    /// Swaps what there is for what is in `taken`, which is empty. Costs next to nothing where there is
    /// nothing.
    pub(super) fn take(&self, taken: &mut Vec<Closed>) {
        if self.any.load(Ordering::Relaxed) && self.any.swap(false, Ordering::Acquire) {
            mem::swap(&mut *self.closed.lock().unwrap_or_else(PoisonError::into_inner), taken);
        }
    }
}
