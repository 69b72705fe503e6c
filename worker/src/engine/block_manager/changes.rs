//! What changed in the prefix cache, for those who follow it from outside. A record only: nothing here
//! decides.

use std::sync::Arc;

use super::prefix_hash::PrefixHash;

/// One block became findable, or can no longer be found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheChange {
    /// A full block's KV is computed and registered. Its parent was stored before.
    Stored {
        /// The cache group, a place in `Backend::cache_groups`.
        group: usize,
        /// Names the salt and all tokens up to the block's end; random key per process.
        hash: PrefixHash,
        /// The hash of the block before it; `None`: the first of a prompt.
        parent: Option<PrefixHash>,
        /// The block's token ids, `block_size` of them.
        tokens: Arc<[u32]>,
        /// What separates this prefix from equal ones of others.
        salt: Arc<[u8]>,
    },
    /// A block was evicted.
    Removed {
        /// The number of the cache group that it was of; 0 is the anchors'.
        group: usize,
        /// As it was stored.
        hash: PrefixHash,
    },
}

/// Names one registered block within this process: its cache group and hash.
pub(crate) type BlockKey = (usize, PrefixHash);

impl CacheChange {
    /// The block it is about.
    pub(crate) fn block(&self) -> BlockKey {
        match self {
            Self::Stored { group, hash, .. } | Self::Removed { group, hash } => (*group, *hash),
        }
    }
}
