//! The slots of residencies: one slot says that one worker holds one block. Allocated once, recycled through
//! a free list, and threaded onto a recency list of its worker's. Which slots share a hash is
//! [`super::holders`]'.

use keyway_wire::block_hash::BlockHash;

use super::workers::ListId;

/// No slot. Slot 0 exists, is never handed out and belongs to no worker.
pub(super) const NIL: u32 = 0;

/// One residency: a worker holds a block.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    /// The block, and with it the whole prefix that ends there.
    pub(super) hash: BlockHash,
    /// From the lower bits: which of its worker's lists it is on, how many placements vouch for it
    /// ([`super::claims`]), and the number of the last placement at that worker that touched it. Where blocks
    /// are expected: how many requests need it. 0 in a free slot.
    pub(super) stamp: u32,
    /// Neighbour in its recency list that was used later.
    pub(super) newer: u32,
    /// Neighbour in its recency list that was used earlier; in a free slot, the next free one.
    pub(super) older: u32,
    /// Place of the worker in the workers' table.
    pub(super) worker: u16,
    /// In the first holder of a hash: how many there are. In the others: 0, or [`Slot::APART`] where they do
    /// not lie together with the first.
    pub(super) holders: u16,
}

/// Bytes of one slot.
pub(super) const SLOT_BYTES: usize = size_of::<Slot>();
const _: () = assert!(SLOT_BYTES == 24, "a residency costs more than docs/figures.md says");

/// Placements at one worker that a stamp tells apart; the next one is taken for the first again. Where
/// exactly so many came in between, that spares a block from eviction, or takes one too early.
pub(super) const NUMBERS: u32 = 1 << (u32::BITS - NUMBER_SHIFT);
/// Placements that can vouch for a slot at a time.
pub(super) const CLAIMS_MAX: u32 = (1 << (NUMBER_SHIFT - CLAIMS_SHIFT)) - 1;
const CLAIMS_SHIFT: u32 = u8::BITS;
const NUMBER_SHIFT: u32 = 12;
const CLAIMS: u32 = CLAIMS_MAX << CLAIMS_SHIFT;

/// What a placement stamps slots of one list with.
pub(super) const fn stamp(number: u32, list: u8) -> u32 {
    number << NUMBER_SHIFT | list as u32
}

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

    /// The list it is on.
    pub(super) fn list(&self) -> ListId {
        ListId { place: self.worker, nth: self.stamp as u8 }
    }

    /// Number of the last placement that touched it.
    pub(super) fn number(&self) -> u32 {
        self.stamp >> NUMBER_SHIFT
    }

    /// Of an exact worker's block: how many blocks further up the last one is behind which a request can go
    /// on. It stands where the number does of one that is modelled.
    pub(super) fn back(&self) -> u32 {
        self.number()
    }

    pub(super) fn set_back(&mut self, blocks: u32) {
        let number = blocks.min(NUMBERS - 1) << NUMBER_SHIFT;
        self.stamp = self.stamp & ((1 << NUMBER_SHIFT) - 1) | number;
    }

    /// Whether it bears this stamp.
    pub(super) fn bears(&self, stamp: u32) -> bool {
        self.stamp & !CLAIMS == stamp
    }

    /// How many placements vouch for it, as long as no worker has accepted it.
    pub(super) fn claims(&self) -> u32 {
        (self.stamp & CLAIMS) >> CLAIMS_SHIFT
    }

    pub(super) fn set_claims(&mut self, claims: u32) {
        self.stamp = self.stamp & !CLAIMS | claims << CLAIMS_SHIFT;
    }
}

/// No worker's place: there are fewer.
const NOBODY: u16 = u16::MAX;

/// A slot that is free: its block is at no worker.
const VACANT: Slot =
    Slot { hash: BlockHash(0), stamp: 0, newer: NIL, older: NIL, worker: NOBODY, holders: 0 };

/// Residencies of one worker, from the most to the least recently used.
#[derive(Clone, Copy, Default)]
pub(super) struct Recency {
    pub(super) newest: u32,
    pub(super) oldest: u32,
    pub(super) len: u32,
}

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

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn used(&self) -> usize {
        self.used
    }

    pub(super) fn is_full(&self) -> bool {
        self.used == self.capacity
    }

    /// A slot that may not exist.
    pub(super) fn get(&self, at: u32) -> Option<&Slot> {
        self.slots.get(at as usize)
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

    /// Stamps the slots from `first` on, from later to earlier use, for as long as they hold `blocks` one
    /// after the other; none where `first` bears the stamp. Slots that bear it stand before all others of
    /// their list, so none that follows `first` does. Returns the last of them, how many they are, and
    /// whether some of them have claims.
    pub(super) fn stamp_run(&mut self, first: u32, blocks: &[BlockHash], stamp: u32) -> (u32, usize, bool) {
        let (mut at, mut last, mut run, mut claims) = (first, first, 0, 0);
        if self[first].bears(stamp) {
            return (first, 0, false);
        }
        while at != NIL && run < blocks.len() {
            let (furthest, more, claimed) = self.stamp_row(at, &blocks[run..], stamp);
            if more == 0 {
                break;
            }
            (last, at, run) = (furthest, self[furthest].older, run + more);
            claims |= claimed;
        }
        (last, run, claims != 0)
    }

    /// [`Slab::stamp_run`] for as long as each slot stands beside the one before, as slots do that were taken
    /// one after the other: where the next one is, is then known before this one has come from memory.
    fn stamp_row(&mut self, first: u32, blocks: &[BlockHash], stamp: u32) -> (u32, usize, u32) {
        let at = first as usize;
        let mut row = Row { place: first, next: first, stamps: 0 };
        let (fours, _) = blocks.as_chunks();
        if self.slots[at].older > first {
            let (groups, _) = self.slots[at..].as_chunks_mut();
            row.stamp_fours::<1, false>(groups.iter_mut().zip(fours), stamp);
            let run = (row.place - first) as usize;
            row.stamp::<1>(self.slots[at + run..].iter_mut().zip(&blocks[run..]), stamp);
            let run = row.place - first;
            (first + run.saturating_sub(1), run as usize, row.stamps & CLAIMS)
        } else {
            let (_, groups) = self.slots[..=at].as_rchunks_mut();
            row.stamp_fours::<{ u32::MAX }, true>(groups.iter_mut().rev().zip(fours), stamp);
            // Of the first slot of all the next place would be one before it.
            let run = first.wrapping_sub(row.place) as usize;
            row.stamp::<{ u32::MAX }>(self.slots[..at + 1 - run].iter_mut().rev().zip(&blocks[run..]), stamp);
            let run = first.wrapping_sub(row.place);
            (first - run.saturating_sub(1), run as usize, row.stamps & CLAIMS)
        }
    }

    /// Puts a run of a recency list, from its latest to its earliest used slot, behind `newer`, which is not
    /// in it, or in front of all if that is [`NIL`].
    pub(super) fn move_run(&mut self, list: &mut Recency, newer: u32, (first, last): (u32, u32)) {
        if self[first].newer == newer {
            return;
        }
        let (before, behind) = (self[first].newer, self[last].older);
        self.join(list, before, behind);
        let older = if newer == NIL { list.newest } else { self[newer].older };
        self.join(list, newer, first);
        self.join(list, last, older);
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

/// How far slots that stand beside each other have been stamped, as [`Slab::stamp_run`] says.
struct Row {
    /// Where the next slot stands, if it stands beside the last.
    place: u32,
    /// Where it does stand.
    next: u32,
    /// The bits of all their stamps.
    stamps: u32,
}

impl Row {
    /// Stamps slots that stand `STEP` (1 or -1) from each other, four at a time for as long as all four go
    /// on; `BACK`: a group's last slot comes first. This is the loop over each block of each prompt: one
    /// branch for four of them, and nothing is counted.
    fn stamp_fours<'a, const STEP: u32, const BACK: bool>(
        &mut self,
        groups: impl Iterator<Item = (&'a mut [Slot; 4], &'a [BlockHash; 4])>,
        stamp: u32,
    ) {
        let order = if BACK { [3, 2, 1, 0] } else { [0, 1, 2, 3] };
        for (slots, blocks) in groups {
            let (mut differ, mut next) = (0, self.next);
            for (i, slot) in order.into_iter().enumerate() {
                let place = self.place.wrapping_add(STEP.wrapping_mul(i as u32));
                differ |= slots[slot].hash.0 ^ blocks[i].0 | u64::from(next ^ place);
                next = slots[slot].older;
            }
            if differ != 0 {
                return;
            }
            for slot in slots {
                self.stamps |= slot.stamp;
                slot.stamp = slot.stamp & CLAIMS | stamp;
            }
            (self.place, self.next) = (self.place.wrapping_add(STEP.wrapping_mul(4)), next);
        }
    }

    /// Stamps slots one by one.
    fn stamp<'a, const STEP: u32>(
        &mut self,
        slots: impl Iterator<Item = (&'a mut Slot, &'a BlockHash)>,
        stamp: u32,
    ) {
        for (slot, hash) in slots {
            if self.next != self.place || slot.hash != *hash {
                return;
            }
            self.stamps |= slot.stamp;
            slot.stamp = slot.stamp & CLAIMS | stamp;
            (self.place, self.next) = (self.place.wrapping_add(STEP), slot.older);
        }
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
