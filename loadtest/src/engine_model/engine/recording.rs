//! What happened to an engine's cache, for those who tell it on.

use hashbrown::{HashTable, hash_table::Entry};
use keyway_wire::block_hash::BlockHash;

use super::super::block_pool::spread;
use super::{Change, RequestId};

/// A list of changes, and what they add up to.
#[derive(Debug, Default)]
pub(super) struct Recording {
    pub(super) changes: Vec<Change<RequestId>>,
    /// Cached blocks of each name.
    copies: HashTable<(BlockHash, u32)>,
}

// === impl Recording ===

impl Recording {
    pub(super) fn stored(&mut self, request: RequestId, first: u32, names: &[BlockHash]) {
        self.changes.push(Change::Stored { request, first, count: names.len() as u32 });
        for &name in names {
            match self.entry(name) {
                Entry::Occupied(mut held) => held.get_mut().1 += 1,
                Entry::Vacant(vacant) => _ = vacant.insert((name, 1)),
            }
        }
    }

    /// Blocks were evicted, of a chain the last one first.
    pub(super) fn removed(&mut self, names: &[BlockHash]) {
        for &name in names.iter().rev() {
            self.changes.push(Change::Removed(name));
            if let Entry::Occupied(mut held) = self.entry(name) {
                held.get_mut().1 -= 1;
                if held.get().1 == 0 {
                    held.remove();
                }
            }
        }
    }

    pub(super) fn holds(&self, name: BlockHash) -> bool {
        self.copies.find(spread(name), |held| held.0 == name).is_some()
    }

    fn entry(&mut self, name: BlockHash) -> Entry<'_, (BlockHash, u32)> {
        self.copies.entry(spread(name), |held| held.0 == name, |held| spread(held.0))
    }
}
