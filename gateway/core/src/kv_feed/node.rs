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

/// Copies of a block that the engine's own cache has, and other tiers. Of more than can be counted it is
/// known that there are so many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Copies {
    pub(super) own: u16,
    pub(super) elsewhere: u8,
}

/// A block, and what is before and behind it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    /// Its name in the index.
    pub(super) key: BlockHash,
    pub(super) copies: Copies,
    pub(super) parent: NodeId,
    pub(super) first_child: NodeId,
    pub(super) next_sibling: NodeId,
}

impl Copies {
    pub(super) fn is_held(self, reach: Reach) -> bool {
        self.own > 0 || (matches!(reach, Reach::Any) && self.elsewhere > 0)
    }

    pub(super) fn are_in(self, tier: Tier) -> bool {
        match tier {
            Tier::Own => self.own > 0,
            Tier::Other => self.elsewhere > 0,
        }
    }

    /// Counts one more in a tier.
    pub(super) fn add(&mut self, tier: Tier) {
        match tier {
            Tier::Own => self.own = self.own.saturating_add(1),
            Tier::Other => self.elsewhere = self.elsewhere.saturating_add(1),
        }
    }

    /// Counts one less in a tier, or as many as are `left`.
    pub(super) fn take(&mut self, tier: Tier, left: Option<u32>) {
        match (tier, left) {
            (Tier::Own, None) => self.own = self.own.saturating_sub(1),
            (Tier::Other, None) => self.elsewhere = self.elsewhere.saturating_sub(1),
            (Tier::Own, Some(left)) => self.own = left.try_into().unwrap_or(u16::MAX),
            (Tier::Other, Some(left)) => self.elsewhere = left.try_into().unwrap_or(u8::MAX),
        }
    }
}

impl Node {
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
        Some(self.next_sibling).filter(|next| *next != NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_counted_by_tier_as_far_as_they_can_be() {
        let mut copies = Copies::default();
        copies.add(Tier::Other);
        assert!(copies.is_held(Reach::Any) && !copies.is_held(Reach::Own) && copies.are_in(Tier::Other));
        (0..70_000).for_each(|_| copies.add(Tier::Own));
        copies.take(Tier::Other, Some(1_000));
        assert_eq!(copies, Copies { own: u16::MAX, elsewhere: u8::MAX });
        copies.take(Tier::Own, Some(1));
        copies.take(Tier::Own, None);
        copies.take(Tier::Own, None);
        copies.take(Tier::Other, Some(0));
        assert_eq!(copies, Copies::default());
    }
}
