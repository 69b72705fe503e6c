//! The map from a 64-bit key to a slot: open addressing with linear probing in one allocation of fixed size.
//! It keeps no keys: the caller says which slot is meant.

use super::words::{WORD_BYTES, Words};

/// Bytes of one entry.
pub(super) const ENTRY_BYTES: usize = WORD_BYTES;

/// Spreads keys whose upper bits are alike (2^64 divided by the golden ratio, odd).
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// An entry is a 32-bit tag of the key above the 32-bit slot; 0 is empty, as slot 0 is never used. The tag
/// spares nearly every look at a slot of another key, which would miss the processor's cache; and it alone
/// says where an entry belongs, so that closing a gap looks at no slot at all.
pub(super) struct Table {
    entries: Words,
}

impl Table {
    /// Room for `slots` keys at a load of at most 2/3; the system backs it with pages only where it is used.
    pub(super) fn new(slots: usize) -> Self {
        Self { entries: Words::zeroed(Self::entries_for(slots)) }
    }

    /// Entries of a table for `slots` keys. One is always empty, so that a search ends.
    pub(super) const fn entries_for(slots: usize) -> usize {
        if slots == 0 { 0 } else { slots + slots / 2 + 1 }
    }

    pub(super) fn bytes(&self) -> usize {
        self.entries.len() * ENTRY_BYTES
    }

    /// The slot of `key`: of those whose keys are or seem equal, the one that `is` it.
    pub(super) fn get(&self, key: u64, is: impl Fn(u32) -> bool) -> Option<u32> {
        self.find(key, is).map(|at| self.entries.get(at) as u32)
    }

    /// Maps `key`, which has no slot, to `slot`.
    pub(super) fn insert(&mut self, key: u64, slot: u32) {
        if let Err(Some(at)) = self.probe(key, |_| false) {
            self.entries.set(at, entry(key, slot));
        }
    }

    /// Maps `key` to `slot` in place of the slot that `is` its own.
    pub(super) fn replace(&mut self, key: u64, slot: u32, is: impl Fn(u32) -> bool) {
        if let Some(at) = self.find(key, is) {
            self.entries.set(at, entry(key, slot));
        }
    }

    /// Forgets `key`, and closes the gap so that no tombstone is left.
    pub(super) fn remove(&mut self, key: u64, is: impl Fn(u32) -> bool) {
        let Some(mut gap) = self.find(key, is) else { return };
        let mut at = gap;
        loop {
            at = self.after(at);
            let entry = self.entries.get(at);
            if entry == 0 {
                break;
            }
            // An entry may move back to the gap unless its home lies behind the gap.
            let home = self.home((entry >> 32) as u32);
            if self.distance(home, at) >= self.distance(gap, at) {
                self.entries.set(gap, entry);
                gap = at;
            }
        }
        self.entries.set(gap, 0);
    }

    /// Brings the entries of several keys into the processor's cache: it fetches them side by side, where
    /// searches one after the other would each wait for memory.
    pub(super) fn fetch(&self, keys: impl Iterator<Item = u64>) {
        if !self.entries.is_empty() {
            let entry = |key: u64| self.entries.get(self.home(tag(key)));
            std::hint::black_box(keys.fold(0, |all, key| all ^ entry(key)));
        }
    }

    /// What stands where `key` belongs; mostly it is its own.
    pub(super) fn at_home(&self, key: u64) -> u32 {
        if self.entries.is_empty() { 0 } else { self.entries.get(self.home(tag(key))) as u32 }
    }

    fn find(&self, key: u64, is: impl Fn(u32) -> bool) -> Option<usize> {
        self.probe(key, is).ok()
    }

    /// Where `key` is, or where it would go (`None` in a table without entries).
    fn probe(&self, key: u64, is: impl Fn(u32) -> bool) -> Result<usize, Option<usize>> {
        if self.entries.is_empty() {
            return Err(None);
        }
        let tag = tag(key);
        let mut at = self.home(tag);
        loop {
            let entry = self.entries.get(at);
            if entry == 0 {
                return Err(Some(at));
            }
            if (entry >> 32) as u32 == tag && is(entry as u32) {
                return Ok(at);
            }
            at = self.after(at);
        }
    }

    /// Where an entry with this tag belongs. Multiply and shift: any table size works, not only powers of
    /// two.
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

fn entry(key: u64, slot: u32) -> u64 {
    u64::from(tag(key)) << 32 | u64::from(slot)
}

fn tag(key: u64) -> u32 {
    (key.wrapping_mul(SPREAD) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Keys from a few homes, the last one included, so that runs are long and wrap around; and two of
        /// equal tags.
        #[test]
        fn equals_a_map(ops in prop::collection::vec((0_u64..24, any::<bool>()), 0..200)) {
            let slots = 16_usize;
            let key_of = |slot: u32| u64::from(slot / 2).wrapping_mul(0xF1DE_83E1_9937_733D);
            let mut table = Table::new(slots);
            let mut model: HashMap<u32, u32> = HashMap::new();
            for (n, insert) in ops {
                let slot = n as u32 + 1;
                let is = |found| found == slot;
                if insert && model.len() < slots && !model.contains_key(&slot) {
                    table.insert(key_of(slot), slot);
                    model.insert(slot, slot);
                } else if !insert {
                    table.remove(key_of(slot), is);
                    model.remove(&slot);
                }
                for slot in 1..=24 {
                    prop_assert_eq!(table.get(key_of(slot), |found| found == slot), model.get(&slot).copied());
                }
            }
        }
    }

    #[test]
    fn another_slot_takes_a_key_over() {
        let mut table = Table::new(3);
        table.insert(5, 1);
        table.replace(5, 2, |slot| slot == 1);
        assert_eq!((table.get(5, |slot| slot == 1), table.get(5, |slot| slot == 2)), (None, Some(2)));
    }

    #[test]
    fn a_table_of_nothing_finds_nothing() {
        let mut table = Table::new(0);
        table.insert(1, 1);
        table.remove(1, |_| true);
        assert_eq!((table.get(1, |_| true), table.bytes()), (None, 0));
    }
}
