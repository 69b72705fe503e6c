//! What engines announce mostly: blocks that they have not named before, one behind the other, and blocks
//! that go with their last copy and have none behind them. Nothing else depends on these, so what is known of
//! the worker changes without the index, and the index is told of all of them at once. Whatever else an event
//! says goes block by block (`apply.rs`).

use keyway_wire::block_hash::BlockHash;
use keyway_wire::kv_event::EngineHash;

use super::node::{NodeId, Tier};
use super::{KvFeed, Moments};

impl KvFeed {
    /// Stores the first of these blocks, of which the engine calls each by one of `names` and the index by
    /// one of `keys`, behind `before`: as long as none was named before. Returns how many that are, and the
    /// last.
    pub(super) fn store_run(
        &mut self,
        index: &impl Moments,
        tier: Tier,
        (names, keys): (&[EngineHash], &[BlockHash]),
        (before, root): (Option<NodeId>, BlockHash),
    ) -> (usize, Option<NodeId>) {
        let (mut stored, mut last) = (0, before);
        while let Some(name) = names.get(stored)
            && let Some(node) = self.blocks.add_first(tier, name.short(), last, keys[stored], root)
        {
            (stored, last) = (stored + 1, Some(node));
        }
        if stored > 0 {
            let parent = before.map(|node| self.blocks.key(node));
            let own = Some(self.worker).filter(|_| tier == Tier::Own);
            index.moment(|index| {
                for worker in [own, self.any_tier()].into_iter().flatten() {
                    index.store_run(worker, parent, &keys[..stored]);
                }
            });
        }
        (stored, last)
    }

    /// Forgets the first of these blocks, as long as each goes with its only copy, which was in the engine's
    /// own cache, and has none behind it. Returns how many that are.
    pub(super) fn remove_run(&mut self, index: &impl Moments, names: &[EngineHash], lefts: &[u32]) -> usize {
        let keys: Vec<BlockHash> = names
            .iter()
            .enumerate()
            .map_while(|(i, name)| self.blocks.take_last(name.short(), lefts.get(i).copied()))
            .collect();
        if !keys.is_empty() {
            index.moment(|index| {
                for worker in [Some(self.worker), self.any_tier()].into_iter().flatten() {
                    index.drop_blocks(worker, &keys);
                }
            });
        }
        keys.len()
    }
}
