//! What workers are computing: blocks that were sent to a worker whose own events say what it holds, and that
//! it has not announced yet. They count as held as long as a request that needs them is under way, so that a
//! burst of one prompt goes to one worker before its first event. Once a worker has announced a block, its
//! events say when it is gone, request or not. Recency and eviction are not its business: what does not fit
//! is not expected, which costs time at most.

mod pairs;
mod slots;

use keyway_wire::block_hash::BlockHash;

use self::pairs::Pairs;
use self::slots::NIL;
use super::residency::Recency;

/// Blocks expected of workers. A slot's stamp counts in its lower bits the requests under way that need the
/// block, above them those of these whose prompts end there; a worker's list is all of its.
pub(super) struct Expected(Pairs);

/// One more request whose prompt ends with a block.
const ONE_ENDS: u32 = 1 << 15;
/// Its worker has announced the block since a request last needed it anew. The slot stays for its counts.
const ANNOUNCED: u32 = 1 << 31;

const fn needed_by(stamp: u32) -> u32 {
    stamp % ONE_ENDS
}

const fn ending_there(stamp: u32) -> u32 {
    (stamp & !ANNOUNCED) / ONE_ENDS
}

impl Expected {
    pub(super) fn new(byte_budget: usize) -> Self {
        Self(Pairs::new(byte_budget))
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// One more request at the worker needs these; returns those that were taken.
    pub(super) fn add(&mut self, list: &mut Recency, place: u16, blocks: &[BlockHash]) -> Vec<BlockHash> {
        let taken = blocks.iter().take_while(|&&block| match self.0.look(block, place) {
            Ok(slot) if needed_by(self.0.slab[slot].stamp) == ONE_ENDS - 1 => false,
            // It is to be computed again if it was announced before.
            Ok(slot) => {
                self.0.slab[slot].stamp = (self.0.slab[slot].stamp & !ANNOUNCED) + 1;
                true
            }
            Err(_) if self.0.slab.is_full() => false,
            Err(vacancy) => {
                let slot = self.0.enter(vacancy, 1);
                self.0.slab.link(list, NIL, slot);
                true
            }
        });
        let taken: Vec<BlockHash> = taken.copied().collect();
        if let Some(slot) = taken.last().and_then(|last| self.0.find(*last, place)) {
            self.0.slab[slot].stamp += ONE_ENDS;
        }
        taken
    }

    /// That request is over.
    pub(super) fn release(&mut self, list: &mut Recency, place: u16, blocks: &[BlockHash]) {
        for (i, &block) in blocks.iter().enumerate() {
            let Some(slot) = self.0.find(block, place) else { continue };
            let stamp = self.0.slab[slot].stamp;
            // What was expected before the worker's list was cleared is not counted any more.
            let ended = if i + 1 == blocks.len() && ending_there(stamp) > 0 { ONE_ENDS } else { 0 };
            self.0.slab[slot].stamp = stamp - 1 - ended;
            if needed_by(self.0.slab[slot].stamp) == 0 {
                self.remove(list, slot);
            }
        }
    }

    /// The worker at `place` has announced this block: from now on its events alone say whether it is there.
    pub(super) fn announced(&mut self, block: BlockHash, place: u16) {
        if let Some(slot) = self.0.find(block, place) {
            self.0.slab[slot].stamp |= ANNOUNCED;
        }
    }

    /// Brings what leads to these blocks into the processor's cache.
    pub(super) fn fetch(&self, blocks: &[BlockHash]) {
        self.0.fetch(blocks);
    }

    /// Nothing is expected of the worker any more.
    pub(super) fn clear(&mut self, list: &mut Recency) {
        while list.newest != NIL {
            self.remove(list, list.newest);
        }
    }

    /// Whether the worker at `place` computes this block.
    pub(super) fn has(&self, block: BlockHash, place: u16) -> bool {
        self.0.find(block, place).is_some_and(|slot| self.is_due(slot))
    }

    /// Whether a prompt that the worker at `place` computes ends with this block.
    pub(super) fn ends(&self, block: BlockHash, place: u16) -> bool {
        let found = self.0.find(block, place).filter(|slot| self.is_due(*slot));
        found.is_some_and(|slot| ending_there(self.0.slab[slot].stamp) > 0)
    }

    /// Places of those that compute this block.
    pub(super) fn places(&self, block: BlockHash) -> impl Iterator<Item = u16> {
        let due = self.0.list(block).into_iter().filter(|slot| self.is_due(*slot));
        due.map(|slot| self.0.slab[slot].worker)
    }

    /// Whether its worker is still to announce it.
    fn is_due(&self, slot: u32) -> bool {
        self.0.slab[slot].stamp & ANNOUNCED == 0
    }

    /// Blocks of all requests under way at exact workers, announced or not.
    pub(super) fn len(&self) -> usize {
        self.0.slab.used()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn remove(&mut self, list: &mut Recency, slot: u32) {
        self.0.slab.unlink(list, slot);
        self.0.remove(slot);
    }
}

#[cfg(test)]
mod tests;
