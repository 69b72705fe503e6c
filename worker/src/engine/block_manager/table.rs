//! The blocks one sequence holds: one table per cache group. Data only; the block manager moves it.

use super::BlockId;
use crate::engine::backend::NO_BLOCK;

/// The blocks one sequence holds. Empty by default, as for a sequence that waits.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    /// One for each cache group, the anchor's first; none while nothing is held.
    pub(super) groups: Vec<GroupTable>,
    /// The leading anchor blocks that are registered.
    pub(super) registered: usize,
    /// Registration stopped for good: another prefix owns this one's hash.
    pub(super) collided: bool,
}

/// One group's part of a table.
#[derive(Debug, Clone, Default)]
pub(super) struct GroupTable {
    /// `blocks[i]` holds positions `i * block_size ..`, or is [`NO_BLOCK`].
    pub(super) blocks: Vec<BlockId>,
    /// The first one held; those before were given back.
    pub(super) first: usize,
}

impl BlockTable {
    /// Whether no block is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Each group's block numbers in order of position, as a backend takes them.
    pub(crate) fn tables(&self) -> impl Iterator<Item = &[BlockId]> {
        self.groups.iter().map(|group| &group.blocks[..])
    }

    pub(super) fn anchors(&self) -> &[BlockId] {
        self.groups.first().map_or(&[], |group| &group.blocks)
    }
}

impl GroupTable {
    /// The block at place `i`, if one is held there.
    pub(super) fn held(&self, i: usize) -> Option<BlockId> {
        self.blocks.get(i).copied().filter(|block| *block != NO_BLOCK)
    }
}
