//! Which block of a worker's stands before which: what a chain is, from its last block alone. Kept where
//! other gateways tell what they have placed, who then need not say of a prefix that is known here but
//! its last block's name. 4 bytes a residency, and none where nobody tells.

use keyway_wire::block_hash::BlockHash;

use super::slab::{NIL, Slab};
use super::{Owner, Placement, PrefixIndex, WorkerId};

/// Bytes for each slot.
const PARENT_BYTES: usize = size_of::<u32>();
/// The parent of a block of which only the name came, as from a snapshot.
const UNKNOWN: u32 = u32::MAX;
/// Blocks in the longest chain that another gateway may add to: 2 million tokens in blocks of 16.
pub const CHAIN_BLOCKS_MAX: usize = 1 << 17;

/// Each slot's parent: [`NIL`] before a chain's first block. Whose parent is known, its parent's is too.
#[derive(Default)]
pub(super) struct Ancestry(Option<Vec<u32>>);

impl Ancestry {
    /// Keeps parents from now on.
    pub(super) fn kept() -> Self {
        Self(Some(Vec::new()))
    }

    /// What of a budget is left for residencies, of which each takes so many bytes.
    pub(super) fn rest_of(&self, budget: usize, bytes_each: usize) -> usize {
        if self.0.is_none() {
            return budget;
        }
        (budget.saturating_sub(PARENT_BYTES) as u128 * bytes_each as u128
            / (bytes_each + PARENT_BYTES) as u128) as usize
    }

    /// What it takes, and may come to take, beside so many residencies.
    pub(super) fn bytes(&self, residencies: usize) -> usize {
        if self.0.is_none() || residencies == 0 { 0 } else { (residencies + 1) * PARENT_BYTES }
    }

    /// Whether it is known at all what stands before blocks.
    #[inline]
    pub(super) fn is_kept(&self) -> bool {
        self.0.is_some()
    }

    /// A slot was taken for a block behind this one.
    pub(super) fn set(&mut self, slot: u32, parent: u32, slots_max: usize) {
        let Some(parents) = &mut self.0 else { return };
        if parents.capacity() == 0 {
            parents.reserve_exact(slots_max + 1);
        }
        let at = slot as usize;
        if at >= parents.len() {
            parents.resize(at + 1, UNKNOWN);
        }
        parents[at] = parent;
    }

    /// A slot was taken for a block of which nobody knows what stands before it.
    pub(super) fn set_unknown(&mut self, slot: u32, slots_max: usize) {
        self.set(slot, UNKNOWN, slots_max);
    }

    /// A chain was seen: from `first` on to earlier use so many slots, up to `last`, are its blocks
    /// behind `parent`.
    pub(super) fn learn(&mut self, slab: &Slab, parent: u32, (first, last): (u32, u32), blocks: usize) {
        let Some(parents) = &mut self.0 else { return };
        if parents.get(last as usize).is_none_or(|parent| *parent != UNKNOWN) {
            return;
        }
        let (mut before, mut at) = (parent, first);
        for _ in 0..blocks {
            parents[at as usize] = before;
            (before, at) = (at, slab[at].older);
        }
    }

    /// The blocks up to this one; `None` where some are not known, or they are too many.
    fn chain(&self, slab: &Slab, last: u32) -> Option<Vec<BlockHash>> {
        let parents = self.0.as_ref()?;
        let (mut chain, mut at) = (Vec::new(), last);
        while at != NIL {
            if chain.len() == CHAIN_BLOCKS_MAX {
                return None;
            }
            chain.push(slab[at].hash);
            at = *parents.get(at as usize).filter(|parent| **parent != UNKNOWN)?;
        }
        chain.reverse();
        Some(chain)
    }
}

impl PrefixIndex {
    /// [`PrefixIndex::new`], which can also go on from a block's name alone
    /// ([`PrefixIndex::place_behind`]).
    pub fn with_ancestry(byte_budget: usize) -> Self {
        Self::sized(byte_budget, Ancestry::kept())
    }

    /// [`PrefixIndex::place_of`] the chain that goes on with these blocks behind one that `worker` holds.
    /// `None`, and nothing changed, if it is not known to hold that, or what stands before it is not
    /// known.
    pub fn place_behind(
        &mut self,
        owner: Owner,
        worker: WorkerId,
        behind: BlockHash,
        blocks: &[BlockHash],
    ) -> Option<Placement> {
        let place = self.workers.get(worker)?;
        let last = self.held.find(behind, place)?;
        let mut chain = self.ancestry.chain(&self.held.slab, last)?;
        chain.extend_from_slice(blocks);
        Some(self.place_of(owner, worker, &chain))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: WorkerId = WorkerId(1);

    fn blocks(from: u64, count: u64) -> Vec<BlockHash> {
        (from..from + count).map(BlockHash).collect()
    }

    fn by_recency(index: &PrefixIndex) -> Vec<(Owner, BlockHash)> {
        index.by_recency(A).collect()
    }

    #[test]
    fn going_on_from_a_name_is_as_placing_the_whole_chain() {
        let (mut whole, mut by_name) =
            (PrefixIndex::with_ancestry(1 << 16), PrefixIndex::with_ancestry(1 << 16));
        let shared = blocks(1, 10);
        // The first is told whole, then two that part within it, then one that goes on behind the second.
        let steps = [
            (None, blocks(1, 20)),
            (Some(10), blocks(100, 5)),
            (Some(4), blocks(200, 7)),
            (Some(104), blocks(300, 3)),
            (Some(20), Vec::new()),
        ];
        let chains = [
            blocks(1, 20),
            [shared.clone(), blocks(100, 5)].concat(),
            [blocks(1, 4), blocks(200, 7)].concat(),
            [shared, blocks(100, 5), blocks(300, 3)].concat(),
            blocks(1, 20),
        ];
        for ((behind, new), chain) in steps.into_iter().zip(chains) {
            drop(whole.place(A, &chain));
            drop(match behind {
                None => by_name.place(A, &new),
                Some(block) => by_name.place_behind(Owner::NOBODY, A, BlockHash(block), &new).unwrap(),
            });
            assert_eq!(by_recency(&by_name), by_recency(&whole));
        }
    }

    #[test]
    fn what_is_not_held_or_not_known_is_nothing_to_go_on_from() {
        let mut index = PrefixIndex::with_ancestry(1 << 16);
        let behind = |index: &mut PrefixIndex, block, new: &[BlockHash]| {
            index.place_behind(Owner::NOBODY, A, BlockHash(block), new).is_some()
        };
        assert!(!behind(&mut index, 3, &blocks(4, 2)), "no such worker");
        index.restore(A, blocks(1, 10).into_iter().map(|block| (Owner::NOBODY, block)));
        assert!(!behind(&mut index, 3, &blocks(20, 2)), "nobody said what stands before it");
        assert!(!behind(&mut index, 99, &[]), "it is not held");
        // Once its chain was seen it is.
        drop(index.place(A, &blocks(1, 6)));
        assert!(behind(&mut index, 6, &blocks(20, 2)) && behind(&mut index, 21, &[]));
        assert!(!behind(&mut index, 8, &[]), "that part was not seen");
        let mut without = PrefixIndex::new(1 << 16);
        drop(without.place(A, &blocks(1, 6)));
        assert!(!behind(&mut without, 6, &[]));
    }

    #[test]
    fn it_takes_of_the_same_bytes() {
        for budget in [0, 1 << 16, 1 << 22] {
            let (with, without) = (PrefixIndex::with_ancestry(budget), PrefixIndex::new(budget));
            assert!(with.bytes() <= budget && with.capacity() <= without.capacity());
            assert!(with.capacity() * 100 >= without.capacity() * 88, "{budget}");
        }
    }
}
