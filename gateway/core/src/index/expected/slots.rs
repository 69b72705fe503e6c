//! The slots of blocks that are expected: one slot says that one worker is to announce one block. Allocated
//! once, recycled through a free list, and threaded onto a list of its worker's. Which slots share a name is
//! [`super::pairs`]'.

use keyway_wire::block_hash::BlockHash;

use super::super::residency::Recency;

pub(super) use super::super::cells::NIL;

/// A worker is to announce a block. Slot 0 exists, is never handed out and belongs to no worker.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    /// The block, and with it the whole prefix that ends there.
    pub(super) hash: BlockHash,
    /// How many requests need it, and more ([`super::Expected`]). 0 in a free slot.
    pub(super) stamp: u32,
    /// Neighbour in its list that came later.
    pub(super) newer: u32,
    /// Neighbour in its list that came earlier; in a free slot, the next free one.
    pub(super) older: u32,
    /// Place of the worker in the workers' table.
    pub(super) worker: u16,
    /// In the first holder of a hash: how many there are. In the others: 0, or [`Slot::APART`] where they do
    /// not lie together with the first.
    pub(super) holders: u16,
}

/// Bytes that one slot takes.
pub(super) const SLOT_BYTES: usize = size_of::<Slot>();
impl Slot {
    /// More than there can be holders.
    pub(super) const APART: u16 = u16::MAX;

    /// Whether it lies apart from the first holder of its hash.
    pub(super) fn is_apart(&self) -> bool {
        self.holders == Self::APART
    }

    /// In the first holder of a hash: how many there are; 0 in the others.
    pub(super) fn count(&self) -> usize {
        if self.is_apart() { 0 } else { usize::from(self.holders) }
    }
}

/// No worker's place: there are fewer.
const NOBODY: u16 = u16::MAX;

/// A slot that is free: its block is at no worker.
const VACANT: Slot =
    Slot { hash: BlockHash(0), stamp: 0, newer: NIL, older: NIL, worker: NOBODY, holders: 0 };

pub(super) struct Slab {
    slots: Vec<Slot>,
    free: u32,
    used: usize,
    capacity: usize,
}

impl Slab {
    /// Room for `capacity` residencies, reserved now and written when used.
    pub(super) fn new(capacity: usize) -> Self {
        let mut slots = Vec::new();
        if capacity > 0 {
            slots.reserve_exact(capacity + 1);
            slots.push(VACANT);
        }
        Self { slots, free: NIL, used: 0, capacity }
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * SLOT_BYTES
    }

    pub(super) fn used(&self) -> usize {
        self.used
    }

    pub(super) fn is_full(&self) -> bool {
        self.used == self.capacity
    }

    /// A slot for one more residency. The caller has made room: see [`Slab::is_full`].
    pub(super) fn take(&mut self, hash: BlockHash, worker: u16, stamp: u32) -> u32 {
        debug_assert!(!self.is_full());
        let slot = Slot { hash, stamp, worker, ..VACANT };
        self.used += 1;
        if self.free == NIL {
            self.slots.push(slot);
            return (self.slots.len() - 1) as u32;
        }
        let at = self.free;
        self.free = self[at].older;
        self[at] = slot;
        at
    }

    /// Gives back a slot that is on no list any more.
    pub(super) fn give(&mut self, at: u32) {
        self[at] = Slot { older: self.free, ..VACANT };
        self.free = at;
        self.used -= 1;
    }

    /// Puts a slot behind `newer` in recency, or in front of all if that is [`NIL`].
    pub(super) fn link(&mut self, list: &mut Recency, newer: u32, at: u32) {
        let older = if newer == NIL { list.newest } else { self[newer].older };
        self.join(list, newer, at);
        self.join(list, at, older);
        list.len += 1;
    }

    /// Makes two slots neighbours; [`NIL`] stands for the list's end on that side.
    fn join(&mut self, list: &mut Recency, newer: u32, older: u32) {
        match newer {
            NIL => list.newest = older,
            newer => self[newer].older = older,
        }
        match older {
            NIL => list.oldest = newer,
            older => self[older].newer = newer,
        }
    }

    /// Takes a slot off its recency list.
    pub(super) fn unlink(&mut self, list: &mut Recency, at: u32) {
        let Slot { newer, older, .. } = self[at];
        self.join(list, newer, older);
        list.len -= 1;
    }
}

impl std::ops::Index<u32> for Slab {
    type Output = Slot;

    fn index(&self, at: u32) -> &Slot {
        &self.slots[at as usize]
    }
}

impl std::ops::IndexMut<u32> for Slab {
    fn index_mut(&mut self, at: u32) -> &mut Slot {
        &mut self.slots[at as usize]
    }
}
