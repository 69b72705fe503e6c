//! Workers that can go on with a prefix behind some of its blocks only: those of a hybrid model, which need
//! more there than the prefix's own blocks (`kv_feed/groups.rs`). Residency is prefix-closed all the same; a
//! match ends at the last checkpoint.

use keyway_wire::block_hash::BlockHash;

use super::{PrefixIndex, WorkerId};

impl PrefixIndex {
    /// Says of a block that `worker` holds how many blocks further up the last checkpoint is: 0 if a request
    /// can go on behind this one. From the first such word on a match of the worker's ends at a checkpoint,
    /// until it is not exact any more.
    pub fn set_checkpoint(&mut self, worker: WorkerId, hash: BlockHash, back: u32) {
        let Some(place) = self.workers.get(worker) else { return };
        (self.workers[place].by_checkpoints, self.any_checkpoints) = (true, true);
        // Mostly it was stored just now.
        if let Some((at, name)) = self.found(place, hash) {
            let mut held = self.held.cells.get(at);
            held.set_back(name, back);
            self.held.cells.set(at, held);
        }
    }

    /// How much of a chain a worker can go on with, of which it holds `held` blocks and computes those behind
    /// them.
    pub(super) fn up_to_checkpoint(&self, chain: &[BlockHash], place: u16, held: u32) -> u32 {
        let ends = |i: &usize| self.expected.ends(chain[*i], place);
        let computes = |i: &usize| self.expected.has(chain[*i], place);
        let expected = (held as usize..chain.len()).take_while(computes).filter(ends).last();
        if let Some(last) = expected {
            return last as u32 + 1;
        }
        let last = held.checked_sub(1).and_then(|last| self.held.find(chain[last as usize], place));
        last.map_or(0, |(last, spot)| held.saturating_sub(self.held.cells.get(last).back(spot.at)))
    }
}
