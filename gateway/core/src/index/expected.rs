//! What workers are computing: blocks that were sent to a worker whose own events say what it holds, and that it has
//! not announced yet. They count as held as long as a request that needs them is under way, so that a burst of one
//! prompt goes to one worker before its first event; an engine pins the blocks of what it runs, so they are there.
//! Recency and eviction are not its business: what does not fit is not expected, which costs time at most.

use keyway_wire::block_hash::BlockHash;

use super::holders::Holders;
use super::slab::{NIL, Recency};

/// Blocks expected of workers. A slot's stamp counts the requests under way that need it; a worker's list is all of its.
pub(super) struct Expected(Holders);

impl Expected {
    pub(super) fn new(byte_budget: usize) -> Self {
        Self(Holders::new(byte_budget))
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// One more request at the worker needs these; returns those that were taken.
    pub(super) fn add(&mut self, list: &mut Recency, place: u16, blocks: &[BlockHash]) -> Vec<BlockHash> {
        let taken = blocks.iter().take_while(|&&block| match self.0.find(block, place) {
            Some(slot) => {
                self.0.slab[slot].stamp += 1;
                true
            }
            None if self.0.slab.is_full() => false,
            None => {
                let slot = self.0.insert(block, place, 1);
                self.0.slab.link(list, NIL, slot);
                true
            }
        });
        taken.copied().collect()
    }

    /// That request is over.
    pub(super) fn release(&mut self, list: &mut Recency, place: u16, blocks: &[BlockHash]) {
        for &block in blocks {
            let Some(slot) = self.0.find(block, place) else { continue };
            self.0.slab[slot].stamp -= 1;
            if self.0.slab[slot].stamp == 0 {
                self.remove(list, slot);
            }
        }
    }

    /// Nothing is expected of the worker any more.
    pub(super) fn clear(&mut self, list: &mut Recency) {
        while list.newest != NIL {
            self.remove(list, list.newest);
        }
    }

    /// Whether the worker at `place` computes this block.
    pub(super) fn has(&self, block: BlockHash, place: u16) -> bool {
        self.0.find(block, place).is_some()
    }

    /// Places of those that compute this block.
    pub(super) fn places(&self, block: BlockHash) -> impl Iterator<Item = u16> {
        self.0.iter(block).map(|slot| self.0.slab[slot].worker)
    }

    /// Blocks expected of all workers.
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
