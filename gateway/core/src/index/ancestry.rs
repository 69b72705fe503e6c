//! What stands before a block: what a chain is, from its last block alone. So other gateways, who tell what
//! they have placed, need not say of a prefix that is known here but its last block's name.

use keyway_wire::block_hash::BlockHash;

use super::cells::NIL;
use super::runs::{Spot, UNKNOWN};
use super::{Owner, Placement, PrefixIndex, WorkerId};

/// Blocks in the longest chain that another gateway may add to: 2 million tokens in blocks of 16.
pub const CHAIN_BLOCKS_MAX: usize = 1 << 17;

impl PrefixIndex {
    /// The blocks up to this one; `None` where some are not known, or they are too many.
    fn chain(&self, last: Spot) -> Option<Vec<BlockHash>> {
        let cells = &self.held.cells;
        let (mut chain, mut run, mut names) = (Vec::new(), last.run, last.at + 1);
        while run != NIL {
            if chain.len() + names > CHAIN_BLOCKS_MAX || names == 0 {
                return None;
            }
            let parent = Some(cells.parent(run)).filter(|parent| *parent != UNKNOWN)?;
            chain.extend(cells.names(run)[..names].iter().rev());
            run = parent;
            names = if cells.is_run(run) { cells.len(run) } else { 0 };
        }
        chain.reverse();
        Some(chain)
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
        let (_, last) = self.held.find(behind, place)?;
        let mut chain = self.chain(last)?;
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
        let (mut whole, mut by_name) = (PrefixIndex::new(1 << 16), PrefixIndex::new(1 << 16));
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
        let mut index = PrefixIndex::new(1 << 16);
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
    }
}
