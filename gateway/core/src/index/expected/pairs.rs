//! Who is to announce which block: slots, and the way to them. The table has all of them by their block, and
//! knows no links: the first few workers of a block lie together under its name, where a search finds them in
//! one line or two. What more there are lie apart, under the name and a group of workers' places: so no part
//! of the table fills up with a block that all workers compute. One, the *first*, lies together with others
//! and is found by the block alone; it knows how many there are. The others are found by their place as well.

use keyway_wire::block_hash::BlockHash;
use smallvec::{SmallVec, smallvec};

use super::super::table::Table;
use super::slots::{NIL, SLOT_BYTES, Slab, Slot};

/// A block's holders beyond so many lie apart.
pub(super) const TOGETHER: u16 = 8;
/// Places of workers that make a group.
const GROUP: u16 = 16;
/// Groups whose holders are listed together: as many lines as a core has misses of its cache under way at
/// once.
const GATHERED_GROUPS: usize = 8;

/// Blocks and the workers that are to announce them, at most as many as there is room for.
pub(super) struct Pairs {
    table: Table,
    pub(super) slab: Slab,
    /// One more than the last place that ever held anything.
    places: u16,
    /// Residencies that were forgotten, modulo 2^32.
    removals: u32,
}

/// Slots, without an allocation where they are few.
pub(super) type Listed = SmallVec<[u32; 16]>;

/// A block that a worker does not hold, and where it would go.
pub(super) struct Vacancy {
    hash: BlockHash,
    place: u16,
    /// The first of those that hold it; [`NIL`] if there is none.
    first: u32,
    /// How many hold it.
    holders: u16,
    /// When that was so.
    removals: u32,
}

impl Pairs {
    /// As many as fit into so many bytes.
    pub(super) fn new(byte_budget: usize) -> Self {
        // Slot 0 comes on top of what each residency takes.
        let slots = Table::slots_in(byte_budget.saturating_sub(SLOT_BYTES), SLOT_BYTES);
        let slots = slots.min(u32::MAX as usize - 1);
        Self { table: Table::new(slots), slab: Slab::new(slots), places: 0, removals: 0 }
    }

    pub(super) fn bytes(&self) -> usize {
        self.table.bytes() + self.slab.bytes()
    }

    /// The slots that hold `hash`, in no particular order.
    pub(super) fn list(&self, hash: BlockHash) -> Listed {
        self.first(hash).map_or_else(Listed::new, |first| self.beside(first))
    }

    /// The slots that hold what this one does, which is the first that holds it; itself in front.
    pub(super) fn beside(&self, first: u32) -> Listed {
        let Slot { hash, .. } = self.slab[first];
        let count = self.slab[first].count();
        let mut listed: Listed = smallvec![first];
        // One by one: not much else lies in their line before the last of them.
        listed.extend(self.near(hash, first).take(count.saturating_sub(1)));
        let groups = 0..self.places.div_ceil(GROUP);
        for from in groups.clone().step_by(GATHERED_GROUPS) {
            if listed.len() >= count {
                break;
            }
            let some = groups.clone().skip(from.into()).take(GATHERED_GROUPS);
            self.table.fetch(some.clone().map(|group| of_group(hash, group)));
            let slots = some.flat_map(|group| {
                let tags = (0..GROUP).map(move |nth| of_place(hash, group * GROUP + nth));
                self.table.tagged_any(of_group(hash, group), tags).map(move |slot| (slot, group))
            });
            // All are asked of memory before the first is looked at.
            let mut touched = 0;
            let slots = slots.inspect(|(slot, _)| touched ^= self.slab[*slot].holders);
            let slots: SmallVec<[(u32, u16); 32]> = slots.collect();
            std::hint::black_box(touched);
            // What lies in the lines of two groups is one's alone.
            let is_there = |held: &Slot, group| held.is_apart() && held.worker / GROUP == group;
            listed.extend(slots.into_iter().filter_map(|(slot, group)| {
                let held = &self.slab[slot];
                (held.hash == hash && is_there(held, group)).then_some(slot)
            }));
        }
        listed
    }

    /// The slot that says the worker at `place` holds `hash`.
    pub(super) fn find(&self, hash: BlockHash, place: u16) -> Option<u32> {
        self.look(hash, place).ok()
    }

    /// [`Pairs::find`], or what [`Pairs::enter`] need not search for again.
    #[inline]
    pub(super) fn look(&self, hash: BlockHash, place: u16) -> Result<u32, Vacancy> {
        let Some(first) = self.first(hash) else {
            return Err(Vacancy { hash, place, first: NIL, holders: 0, removals: self.removals });
        };
        let Slot { worker, holders, .. } = self.slab[first];
        if worker == place {
            return Ok(first);
        }
        if holders > 1
            && let Some(slot) = self.together(hash, place).or_else(|| self.apart(hash, place))
        {
            return Ok(slot);
        }
        Err(Vacancy { hash, place, first, holders, removals: self.removals })
    }

    /// Enters a residency. There must be room, and the worker must not hold the block yet.
    #[cfg(test)]
    pub(super) fn insert(&mut self, hash: BlockHash, place: u16, stamp: u32) -> u32 {
        let Err(vacancy) = self.look(hash, place) else { unreachable!("it is held") };
        self.enter(vacancy, stamp)
    }

    /// Enters a residency where there was none. There must be room.
    #[inline]
    pub(super) fn enter(&mut self, vacancy: Vacancy, stamp: u32) -> u32 {
        let Vacancy { hash, place, mut first, mut holders, removals } = vacancy;
        if removals != self.removals
            && let Err(now) = self.look(hash, place)
        {
            (first, holders) = (now.first, now.holders);
        }
        self.places = self.places.max(place + 1);
        let slot = self.slab.take(hash, place, stamp);
        if first == NIL {
            self.slab[slot].holders = 1;
            self.table.insert(hash.0, hash.0, slot);
            return slot;
        }
        self.slab[first].holders += 1;
        if holders < TOGETHER {
            self.table.insert(hash.0, of_place(hash, place), slot);
        } else {
            self.slab[slot].holders = Slot::APART;
            self.table.insert(of_group(hash, place / GROUP), of_place(hash, place), slot);
        }
        slot
    }

    /// Forgets a residency that is on no recency list any more.
    pub(super) fn remove(&mut self, slot: u32) {
        let Slot { hash, .. } = self.slab[slot];
        match self.slab[slot].count() {
            0 => {
                self.unlist(slot);
                if let Some(first) = self.first(hash) {
                    self.slab[first].holders -= 1;
                }
            }
            1 => self.table.remove(hash.0, hash.0, slot),
            count => {
                let next = self.others(hash, slot).next();
                self.table.remove(hash.0, hash.0, slot);
                if let Some(next) = next {
                    self.unlist(next);
                    self.slab[next].holders = count as u16 - 1;
                    self.table.insert(hash.0, hash.0, next);
                }
            }
        }
        self.slab.give(slot);
        self.removals = self.removals.wrapping_add(1);
    }

    /// Takes a holder that is not the first out of the table.
    fn unlist(&mut self, slot: u32) {
        let Slot { hash, worker, .. } = self.slab[slot];
        let key = if self.slab[slot].is_apart() { of_group(hash, worker / GROUP) } else { hash.0 };
        self.table.remove(key, of_place(hash, worker), slot);
    }

    /// Brings what leads to these blocks into the processor's cache.
    pub(super) fn fetch(&self, hashes: &[BlockHash]) {
        self.table.fetch(hashes.iter().map(|hash| hash.0));
    }

    #[inline]
    fn first(&self, hash: BlockHash) -> Option<u32> {
        let is_first = |slot: &u32| {
            let held = &self.slab[*slot];
            held.hash == hash && held.count() > 0
        };
        self.table.tagged(hash.0, hash.0).find(is_first)
    }

    /// The holder at this place, if it is one that lies together with the first.
    fn together(&self, hash: BlockHash, place: u16) -> Option<u32> {
        self.table.tagged(hash.0, of_place(hash, place)).find(|slot| self.is_at(*slot, hash, place))
    }

    /// The same, if it lies apart.
    fn apart(&self, hash: BlockHash, place: u16) -> Option<u32> {
        let slots = self.table.tagged(of_group(hash, place / GROUP), of_place(hash, place));
        slots.into_iter().find(|slot| self.is_at(*slot, hash, place))
    }

    fn is_at(&self, slot: u32, hash: BlockHash, place: u16) -> bool {
        let held = &self.slab[slot];
        held.hash == hash && held.worker == place
    }

    /// The holders that lie together with the first.
    fn near(&self, hash: BlockHash, first: u32) -> impl Iterator<Item = u32> {
        self.table.all(hash.0).filter(move |slot| {
            let held = &self.slab[*slot];
            held.hash == hash && !held.is_apart() && *slot != first
        })
    }

    /// All holders but the first: those that lie together with it, then those that lie apart.
    fn others(&self, hash: BlockHash, first: u32) -> impl Iterator<Item = u32> {
        // From its place on: when workers leave one after the other, the next one is near.
        let start = self.slab[first].worker;
        let apart = (start..self.places).chain(0..start).filter_map(move |place| self.apart(hash, place));
        self.near(hash, first).chain(apart.filter(|slot| self.slab[*slot].is_apart()))
    }
}

/// The table's key of holders that lie apart: of one block, and one group of places.
fn of_group(hash: BlockHash, group: u16) -> u64 {
    // An odd factor: groups differ in the low bits, where a key belongs is said by all.
    hash.0.rotate_left(32) ^ (u64::from(group) + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

/// What the tag of a holder is made of that is not the first.
fn of_place(hash: BlockHash, place: u16) -> u64 {
    hash.0 ^ (u64::from(place) + 1).wrapping_mul(0xF135_7AEA_2E62_A9C5)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Few blocks on many workers in a small table, so that holders lie together, apart and in each
        /// other's lines.
        #[test]
        fn equals_a_set(ops in prop::collection::vec((0_u64..3, 0_u16..80, any::<bool>()), 0..600)) {
            let mut holders = Pairs::new(200 * 31);
            let mut model = BTreeSet::new();
            for (block, place, insert) in ops {
                let hash = BlockHash(block.wrapping_mul(0xF1DE_83E1_9937_733D));
                match holders.find(hash, place) {
                    Some(slot) if !insert => {
                        holders.remove(slot);
                        prop_assert!(model.remove(&(block, place)));
                    }
                    None if insert && !holders.slab.is_full() => {
                        holders.insert(hash, place, 1);
                        prop_assert!(model.insert((block, place)));
                    }
                    found => prop_assert_eq!(found.is_some(), model.contains(&(block, place))),
                }
                let places: BTreeSet<u16> = holders.list(hash).into_iter().map(|slot| holders.slab[slot].worker).collect();
                let expected = model.range((block, 0)..=(block, u16::MAX)).map(|(_, place)| *place).collect();
                prop_assert_eq!(&places, &expected);
                prop_assert_eq!(holders.list(hash).len(), expected.len());
            }
            for (block, place) in model {
                let hash = BlockHash(block.wrapping_mul(0xF1DE_83E1_9937_733D));
                let slot = holders.find(hash, place).unwrap();
                holders.remove(slot);
            }
            prop_assert_eq!(holders.slab.used(), 0);
        }
    }
}
