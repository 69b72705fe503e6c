//! One block as a worker has announced it: a node in the tree of its prefixes.

use keyway_wire::block_hash::BlockHash;

/// Place of a node.
pub(super) type NodeId = u32;

/// Stands for no node: no place is as large as this, as a worker's nodes are fewer.
pub(super) const NONE: NodeId = NodeId::MAX;

/// Where a copy of a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tier {
    /// In the engine's own cache.
    Own,
    /// In the host's memory or on a disk.
    Other,
}

/// One of the worker's names in the index: what counts as held there.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reach {
    /// What the engine's own cache holds.
    Own,
    /// What any tier holds.
    Any,
}

/// As small as can be: a fleet's caches hold tens of millions of blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    pub(super) name: u64,
    /// Its name in the index.
    pub(super) key: BlockHash,
    /// Copies the engine's own cache has, and other tiers.
    pub(super) copies: u16,
    pub(super) elsewhere: u16,
    /// The prompt's first block, which stays while one behind it does: it knows the empty prefix that they
    /// descend from.
    pub(super) first: NodeId,
    pub(super) parent: NodeId,
    pub(super) first_child: NodeId,
    /// The one before and the one after it among those behind `parent`; of a first block, which has none, its
    /// empty prefix.
    pub(super) siblings: [NodeId; 2],
}

const _: () = assert!(size_of::<Node>() == 40, "a block costs more than docs/figures.md says");

impl Node {
    /// Of a first block.
    pub(super) fn empty_prefix(&self) -> BlockHash {
        let [low, high] = self.siblings;
        BlockHash(u64::from(high) << 32 | u64::from(low))
    }

    /// Not one that was discarded.
    pub(super) fn is_known(&self) -> bool {
        self.first != NONE
    }

    pub(super) fn is_held(&self, reach: Reach) -> bool {
        self.copies > 0 || (matches!(reach, Reach::Any) && self.elsewhere > 0)
    }

    pub(super) fn copies(&self, tier: Tier) -> u16 {
        match tier {
            Tier::Own => self.copies,
            Tier::Other => self.elsewhere,
        }
    }

    pub(super) fn copies_in(&mut self, tier: Tier) -> &mut u16 {
        match tier {
            Tier::Own => &mut self.copies,
            Tier::Other => &mut self.elsewhere,
        }
    }

    /// The one before it.
    pub(super) fn parent(&self) -> Option<NodeId> {
        Some(self.parent).filter(|parent| *parent != NONE)
    }

    /// One behind it; the others are that one's next siblings.
    pub(super) fn first_child(&self) -> Option<NodeId> {
        Some(self.first_child).filter(|child| *child != NONE)
    }

    /// The next of those behind the same parent; of a first block, none.
    pub(super) fn next_sibling(&self) -> Option<NodeId> {
        Some(self.siblings[1]).filter(|next| self.parent != NONE && *next != NONE)
    }
}
