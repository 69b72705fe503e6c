//! Who holds which block: slots, and the way to them. A block's hash leads to its first holder, which knows
//! how many there are and from which the others can be listed; hash and worker together lead to any other
//! one. So each residency takes one entry of the table, and none is more than two searches away, however many
//! share a block. Recency is the index's business.

use keyway_wire::block_hash::BlockHash;

use super::slab::{NIL, SLOT_BYTES, Slab, Slot};
use super::table::{ENTRY_BYTES, Table};

/// Residencies, at most as many as there is room for.
pub(super) struct Holders {
    table: Table,
    pub(super) slab: Slab,
}

impl Holders {
    /// As many as fit into so many bytes.
    pub(super) fn new(byte_budget: usize) -> Self {
        // Slot 0 and the table's spare entry come on top of what each residency takes.
        let rest = byte_budget.saturating_sub(SLOT_BYTES + ENTRY_BYTES);
        let slots = (2 * rest / (2 * SLOT_BYTES + 3 * ENTRY_BYTES)).min(u32::MAX as usize - 1);
        Self { table: Table::new(slots), slab: Slab::new(slots) }
    }

    pub(super) fn bytes(&self) -> usize {
        self.table.bytes() + self.slab.bytes()
    }

    /// The slots that hold `hash`, in no particular order.
    pub(super) fn iter(&self, hash: BlockHash) -> impl Iterator<Item = u32> {
        let next = |&slot: &u32| Some(self.slab[slot].next_holder).filter(|&next| next != NIL);
        std::iter::successors(self.first(hash), next)
    }

    /// How many workers hold `hash`.
    pub(super) fn count(&self, hash: BlockHash) -> usize {
        self.first(hash).map_or(0, |first| usize::from(self.slab[first].holders))
    }

    /// The slot that says the worker at `place` holds `hash`.
    pub(super) fn find(&self, hash: BlockHash, place: u16) -> Option<u32> {
        let first = self.first(hash)?;
        if self.slab[first].worker == place {
            return Some(first);
        }
        if self.slab[first].holders == 1 {
            return None;
        }
        let is = |slot| {
            let Slot { hash: of, worker, .. } = self.slab[slot];
            of == hash && worker == place
        };
        self.table.get(key(hash, place), is)
    }

    /// Enters a residency. There must be room, and the worker must not hold the block yet.
    pub(super) fn insert(&mut self, hash: BlockHash, place: u16, stamp: u32) -> u32 {
        let first = self.first(hash);
        let slot = self.slab.take(hash, place, stamp);
        let Some(first) = first else {
            self.slab[slot].holders = 1;
            self.table.insert(hash.0, slot);
            return slot;
        };
        self.slab[first].holders += 1;
        let next = std::mem::replace(&mut self.slab[first].next_holder, slot);
        (self.slab[slot].previous_holder, self.slab[slot].next_holder) = (first, next);
        if next != NIL {
            self.slab[next].previous_holder = slot;
        }
        self.table.insert(key(hash, place), slot);
        slot
    }

    /// Forgets a residency that is on no recency list any more.
    pub(super) fn remove(&mut self, slot: u32) {
        let Slot { hash, worker, holders, next_holder: next, previous_holder: previous, .. } =
            self.slab[slot];
        let itself = |found| found == slot;
        if next != NIL {
            self.slab[next].previous_holder = previous;
        }
        if previous != NIL {
            self.slab[previous].next_holder = next;
            if let Some(first) = self.first(hash) {
                self.slab[first].holders -= 1;
            }
            self.table.remove(key(hash, worker), itself);
        } else if next == NIL {
            self.table.remove(hash.0, itself);
        } else {
            // The next one becomes the first.
            self.table.remove(key(hash, self.slab[next].worker), |found| found == next);
            self.table.replace(hash.0, next, itself);
            self.slab[next].holders = holders - 1;
        }
        self.slab.give(slot);
    }

    /// Brings what leads to these blocks into the processor's cache.
    pub(super) fn fetch(&self, hashes: &[BlockHash]) {
        self.table.fetch(hashes.iter().map(|hash| hash.0));
    }

    /// As [`Holders::fetch`], with the first holders themselves where their entries are at home.
    pub(super) fn approach(&self, hashes: impl Iterator<Item = BlockHash>) {
        let holders =
            |hash: BlockHash| self.slab.get(self.table.at_home(hash.0)).map_or(0, |slot| slot.holders);
        std::hint::black_box(hashes.fold(0, |all, hash| all ^ holders(hash)));
    }

    fn first(&self, hash: BlockHash) -> Option<u32> {
        let is_first = |slot| {
            let Slot { hash: of, holders, .. } = self.slab[slot];
            of == hash && holders > 0
        };
        self.table.get(hash.0, is_first)
    }
}

/// The table's key of a residency that is not its block's first.
fn key(hash: BlockHash, place: u16) -> u64 {
    // An odd factor: places differ in the low bits, tags are made of all.
    hash.0.rotate_left(32) ^ (u64::from(place) + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}
