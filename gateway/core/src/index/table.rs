//! The map from a block hash to the first slot that holds it: open addressing with linear probing in one
//! allocation of fixed size. It keeps no hashes: the slots do, and whoever calls says where.

use keyway_wire::block_hash::BlockHash;

/// Bytes of one entry.
pub(super) const ENTRY_BYTES: usize = size_of::<u64>();

/// Spreads hashes whose upper bits are alike (2^64 divided by the golden ratio, odd).
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// An entry is a 32-bit tag of the hash above the 32-bit slot; 0 is empty, as slot 0 is never used. The tag
/// spares nearly every look at a slot of another hash, which would miss the processor's cache; and it alone says where
/// an entry belongs, so that closing a gap looks at no slot at all.
pub(super) struct Table {
    entries: Vec<u64>,
}

impl Table {
    /// Room for `slots` distinct hashes at a load of at most 2/3; zeroed memory, which the system backs with
    /// pages only where it is written.
    pub(super) fn new(slots: usize) -> Self {
        Self { entries: vec![0; Self::entries_for(slots)] }
    }

    /// Entries of a table for `slots` hashes. One is always empty, so that a search ends.
    pub(super) const fn entries_for(slots: usize) -> usize {
        if slots == 0 { 0 } else { slots + slots / 2 + 1 }
    }

    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * ENTRY_BYTES
    }

    /// The first slot that holds `hash`.
    pub(super) fn get(&self, hash: BlockHash, hash_of: impl Fn(u32) -> BlockHash) -> Option<u32> {
        self.find(hash, hash_of).ok().map(|at| self.entries[at] as u32)
    }

    /// Maps `hash` to `slot`, in place of what it was mapped to.
    pub(super) fn set(&mut self, hash: BlockHash, slot: u32, hash_of: impl Fn(u32) -> BlockHash) {
        if let Ok(at) | Err(Some(at)) = self.find(hash, hash_of) {
            self.entries[at] = u64::from(tag(hash)) << 32 | u64::from(slot);
        }
    }

    /// Forgets `hash`, and closes the gap so that no tombstone is left.
    pub(super) fn remove(&mut self, hash: BlockHash, hash_of: impl Fn(u32) -> BlockHash) {
        let Ok(mut gap) = self.find(hash, hash_of) else { return };
        let mut at = gap;
        loop {
            at = self.after(at);
            let entry = self.entries[at];
            if entry == 0 {
                break;
            }
            // An entry may move back to the gap unless its home lies behind the gap.
            let home = self.home((entry >> 32) as u32);
            if self.distance(home, at) >= self.distance(gap, at) {
                self.entries[gap] = entry;
                gap = at;
            }
        }
        self.entries[gap] = 0;
    }

    /// Where `hash` is, or where it would go (`None` in a table without entries).
    fn find(&self, hash: BlockHash, hash_of: impl Fn(u32) -> BlockHash) -> Result<usize, Option<usize>> {
        if self.entries.is_empty() {
            return Err(None);
        }
        let tag = tag(hash);
        let mut at = self.home(tag);
        loop {
            let entry = self.entries[at];
            if entry == 0 {
                return Err(Some(at));
            }
            if (entry >> 32) as u32 == tag && hash_of(entry as u32) == hash {
                return Ok(at);
            }
            at = self.after(at);
        }
    }

    /// Brings the entries of several hashes into the processor's cache: it fetches them side by side, where searches one
    /// after the other would each wait for memory.
    pub(super) fn fetch(&self, hashes: &[BlockHash]) {
        if !self.entries.is_empty() {
            let entry = |hash: &BlockHash| self.entries[self.home(tag(*hash))];
            std::hint::black_box(hashes.iter().fold(0, |all, hash| all ^ entry(hash)));
        }
    }

    /// Where an entry with this tag belongs. Multiply and shift: any table size works, not only powers of two.
    fn home(&self, tag: u32) -> usize {
        ((u128::from(tag) * self.entries.len() as u128) >> 32) as usize
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.entries.len() { 0 } else { at + 1 }
    }

    /// Steps from `from` forward to `to`.
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.entries.len() - from }
    }
}

fn tag(hash: BlockHash) -> u32 {
    (hash.0.wrapping_mul(SPREAD) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Hashes from a few homes, the last one included, so that runs are long and wrap around.
        #[test]
        fn equals_a_map(ops in prop::collection::vec((0_u64..24, any::<bool>()), 0..200)) {
            let slots = 16_usize;
            let hash_of = |slot: u32| BlockHash(u64::from(slot).wrapping_mul(0xF1DE_83E1_9937_733D));
            let mut table = Table::new(slots);
            let mut model: HashMap<u32, u32> = HashMap::new();
            for (n, insert) in ops {
                let slot = n as u32 + 1;
                if insert && model.len() < slots {
                    table.set(hash_of(slot), slot, hash_of);
                    model.insert(slot, slot);
                } else if !insert {
                    table.remove(hash_of(slot), hash_of);
                    model.remove(&slot);
                }
                for slot in 1..=24 {
                    prop_assert_eq!(table.get(hash_of(slot), hash_of), model.get(&slot).copied());
                }
            }
        }
    }

    #[test]
    fn a_table_of_nothing_finds_nothing() {
        let mut table = Table::new(0);
        let none = |_| BlockHash(0);
        table.set(BlockHash(1), 1, none);
        table.remove(BlockHash(1), none);
        assert_eq!((table.get(BlockHash(1), none), table.bytes()), (None, 0));
    }
}
