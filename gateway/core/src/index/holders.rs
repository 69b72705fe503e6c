//! Who holds which block: slots, and the way to them. The table has all of them by their block, and knows no
//! links: the first few holders of a block lie together under its hash, where a search finds them in one line
//! or two. What more there are lie apart, under the hash and a group of workers' places: so no part of the
//! table fills up with a block that all workers hold, and listing all of them takes a search for each group.
//! One of those that lie together, the *first*, knows how many holders there are. Recency is the index's
//! business.

use keyway_wire::block_hash::BlockHash;

use super::slab::{NIL, SLOT_BYTES, Slab, Slot};
use super::table::Table;

/// Holders of one block that lie together.
const TOGETHER: u16 = 8;
/// Places of workers that make a group.
const GROUP: u16 = 16;

/// Residencies, at most as many as there is room for.
pub(super) struct Holders {
    table: Table,
    pub(super) slab: Slab,
    /// Groups of places that ever held anything.
    groups: u16,
    /// Residencies that were forgotten, modulo 2^32.
    removals: u32,
}

/// A block that a worker does not hold, and where it would go.
pub(super) struct Vacancy {
    hash: BlockHash,
    place: u16,
    /// The first of those that hold it; [`NIL`] if there is none.
    first: u32,
    /// How many lie together.
    together: u16,
    /// When that was so.
    removals: u32,
}

impl Holders {
    /// As many as fit into so many bytes.
    pub(super) fn new(byte_budget: usize) -> Self {
        // Slot 0 comes on top of what each residency takes.
        let slots = Table::slots_in(byte_budget.saturating_sub(SLOT_BYTES), SLOT_BYTES);
        let slots = slots.min(u32::MAX as usize - 1);
        Self { table: Table::new(slots), slab: Slab::new(slots), groups: 0, removals: 0 }
    }

    pub(super) fn bytes(&self) -> usize {
        self.table.bytes() + self.slab.bytes()
    }

    /// The slots that hold `hash`, in no particular order.
    pub(super) fn iter(&self, hash: BlockHash) -> impl Iterator<Item = u32> {
        let all = self.count(hash);
        self.together(hash).chain(self.apart_up_to(hash, self.groups)).take(all)
    }

    /// How many workers hold `hash`.
    pub(super) fn count(&self, hash: BlockHash) -> usize {
        self.first(hash).map_or(0, |first| self.slab[first].count())
    }

    /// The slot that says the worker at `place` holds `hash`.
    pub(super) fn find(&self, hash: BlockHash, place: u16) -> Option<u32> {
        self.look(hash, place).ok()
    }

    /// [`Holders::find`], or what [`Holders::enter`] need not search for again.
    #[inline]
    pub(super) fn look(&self, hash: BlockHash, place: u16) -> Result<u32, Vacancy> {
        let (mut first, mut all, mut together) = (NIL, 0, 0);
        for slot in self.table.all(hash.0) {
            let held = &self.slab[slot];
            if held.hash != hash || held.is_apart() {
                continue;
            }
            if held.worker == place {
                return Ok(slot);
            }
            if held.holders > 0 {
                (first, all) = (slot, held.holders);
            }
            together += 1;
            if together == all {
                break;
            }
        }
        if together < all
            && let Some(slot) = self.apart(hash, place / GROUP).find(|slot| self.slab[*slot].worker == place)
        {
            return Ok(slot);
        }
        Err(Vacancy { hash, place, first, together, removals: self.removals })
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
        let Vacancy { hash, place, mut first, mut together, removals } = vacancy;
        if removals != self.removals
            && let Err(now) = self.look(hash, place)
        {
            (first, together) = (now.first, now.together);
        }
        self.groups = self.groups.max(place / GROUP + 1);
        let slot = self.slab.take(hash, place, stamp);
        if first == NIL {
            self.slab[slot].holders = 1;
        } else {
            self.slab[first].holders += 1;
        }
        if together < TOGETHER {
            self.table.insert(hash.0, slot);
        } else {
            self.slab[slot].holders = Slot::APART;
            self.table.insert(apart(hash, place / GROUP), slot);
        }
        slot
    }

    /// Forgets a residency that is on no recency list any more.
    pub(super) fn remove(&mut self, slot: u32) {
        let Slot { hash, worker, .. } = self.slab[slot];
        let count = self.slab[slot].count();
        if self.slab[slot].is_apart() {
            self.table.remove(apart(hash, worker / GROUP), slot);
        } else {
            self.table.remove(hash.0, slot);
        }
        if count == 0 {
            if let Some(first) = self.first(hash) {
                self.slab[first].holders -= 1;
            }
        } else if count > 1 {
            self.promote(hash, count - 1);
        }
        self.slab.give(slot);
        self.removals = self.removals.wrapping_add(1);
    }

    /// Makes another one of so many holders the first.
    fn promote(&mut self, hash: BlockHash, count: usize) {
        let together = self.together(hash).next();
        let next = together.or_else(|| self.apart_up_to(hash, self.groups).next());
        let Some(next) = next else { return };
        if together.is_none() {
            let group = self.slab[next].worker / GROUP;
            self.table.remove(apart(hash, group), next);
            self.table.insert(hash.0, next);
        }
        self.slab[next].holders = count as u16;
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
        self.together(hash).find(|slot| self.slab[*slot].count() > 0)
    }

    /// The holders that lie together.
    #[inline]
    fn together(&self, hash: BlockHash) -> impl Iterator<Item = u32> {
        let is_one = move |slot: &u32| {
            let held = &self.slab[*slot];
            held.hash == hash && !held.is_apart()
        };
        self.table.all(hash.0).filter(is_one)
    }

    /// The holders of a group that lie apart, and maybe some of another one's.
    fn apart(&self, hash: BlockHash, group: u16) -> impl Iterator<Item = u32> {
        let is_one = move |slot: &u32| {
            let held = &self.slab[*slot];
            held.hash == hash && held.is_apart()
        };
        self.table.all(apart(hash, group)).filter(is_one)
    }

    /// The holders of the first so many groups that lie apart.
    fn apart_up_to(&self, hash: BlockHash, groups: u16) -> impl Iterator<Item = u32> {
        (0..groups).flat_map(move |group| {
            let of_group = move |slot: &u32| self.slab[*slot].worker / GROUP == group;
            self.apart(hash, group).filter(of_group)
        })
    }
}

/// The table's key of holders in one group of places that lie apart.
fn apart(hash: BlockHash, group: u16) -> u64 {
    // An odd factor: groups differ in the low bits, where a key belongs is said by all.
    hash.0.rotate_left(32) ^ (u64::from(group) + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93)
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
            let mut holders = Holders::new(200 * 31);
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
                let places: BTreeSet<u16> = holders.iter(hash).map(|slot| holders.slab[slot].worker).collect();
                let expected = model.range((block, 0)..=(block, u16::MAX)).map(|(_, place)| *place).collect();
                prop_assert_eq!(&places, &expected);
                prop_assert_eq!((holders.count(hash), holders.iter(hash).count()), (expected.len(), expected.len()));
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
