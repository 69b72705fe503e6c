//! What the integrity check finds: one kind for each invariant that can be broken, with the numbers that show
//! it.

use super::BlockId;

/// An invariant of blocks and tables that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Damage {
    #[error("block {0} can be found and is not computed")]
    NotComputed(BlockId),
    #[error("block {block} is private and has {holders} holders")]
    PrivateShared { block: BlockId, holders: u32 },
    #[error("{registered} registered blocks, {indexed} in the index")]
    IndexLength { registered: usize, indexed: usize },
    #[error("block {0} is in the free list twice")]
    FreeTwice(BlockId),
    #[error("the free list's length is off")]
    FreeLength,
    #[error("block {block} counts {counted} holders and has {holders}")]
    Holders { block: usize, counted: u32, holders: u32 },
    #[error("block {block} has {holders} holders; in the free list: {place:?}")]
    FreePlace { block: usize, holders: u32, place: Option<usize> },
    #[error("registered block {0} is not in the index")]
    NotIndexed(BlockId),
    #[error("block {attached} does not know that it is attached to {anchor}")]
    AttachedUnaware { attached: BlockId, anchor: BlockId },
    #[error("block {block} is registered and its parent {parent} is not")]
    ParentUnregistered { block: BlockId, parent: BlockId },
    #[error("parent {parent} would be evicted before its child {block}")]
    ParentFirst { block: BlockId, parent: BlockId },
    #[error("block {attached} is attached to {anchor}, which does not know it")]
    AnchorUnaware { attached: BlockId, anchor: BlockId },
    #[error("attached block {attached} has more holders than its anchor {anchor}")]
    AnchorReleased { attached: BlockId, anchor: BlockId },
    #[error("block {block} at place {place}: {registered} are registered")]
    Registered { block: BlockId, place: usize, registered: usize },
    #[error("block {block} at place {place} has another parent than {parent:?}")]
    OtherParent { block: BlockId, place: usize, parent: Option<BlockId> },
    #[error("group {group} keeps from block {first} with {computed} tokens computed")]
    FirstKept { group: usize, first: usize, computed: usize },
    #[error("group {group} holds {block} at place {place}, and from {first}")]
    HeldPlace { group: usize, block: BlockId, place: usize, first: usize },
    #[error("group {group}'s block {block} at place {place} is not attached there")]
    NotAttached { group: usize, block: BlockId, place: usize },
    /// Who waits has given all blocks back.
    #[error("a waiting sequence of {tokens} tokens holds blocks")]
    WaitingHolds { tokens: usize },
}
