//! Paged KV blocks: who holds which, which prefixes are cached, what is evicted first. Bookkeeping only: it never
//! touches KV itself, and does not decide who runs.
//!
//! **Prefix caching.** A full block whose KV is computed is *registered* under the keyed hash of all tokens up to its
//! end and of the request's salt. A later prompt takes registered blocks instead of computing them. A hash only
//! finds the candidate: it is taken if its token ids equal the prompt's, and if its parent is the very block that
//! matched before it (for the first block: if the salt is equal), so by induction the whole prefix is equal.
//!
//! **Residency is prefix-closed.** A registered block's parent is registered: a holder of a child holds its parent,
//! and a freed table enters the LRU list deepest block first, so children are evicted before parents.
//!
//! **No duplicates.** When two sequences computed the same block at the same time, the later one takes the registered
//! copy and gives its own back. KV is equal bit for bit, so nothing else changes.
//!
//! Next: `model.rs`, what is computed into the blocks.

mod changes;
mod check;
mod free_list;
mod prefix_hash;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

pub(crate) use self::changes::BlockKey;
pub use self::changes::CacheChange;
use self::free_list::FreeList;
use self::prefix_hash::{PrefixHash, PrefixHasher};

/// Number of a block in the backend's KV cache.
pub(crate) type BlockId = u32;

/// The blocks one sequence holds.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    /// `blocks[i]` holds positions `i * block_size ..`.
    blocks: Vec<BlockId>,
    /// The leading blocks that are registered.
    registered: usize,
    /// Registration stopped for good: another prefix owns this one's hash.
    collided: bool,
}

impl BlockTable {
    /// The block numbers in order of position.
    pub(crate) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }
}

/// What is known of one block.
#[derive(Debug, Clone, Default)]
struct Block {
    /// Sequences that hold it.
    refs: u32,
    /// Present while its content can be found by others.
    registration: Option<Registration>,
}

#[derive(Debug, Clone)]
struct Registration {
    hash: PrefixHash,
    /// `None`: the first block of a prompt.
    parent: Option<BlockId>,
    salt: Arc<[u8]>,
}

/// Owns the block numbers `0..num_blocks`.
#[derive(Debug)]
pub(crate) struct BlockManager {
    block_size: usize,
    blocks: Vec<Block>,
    /// Token ids of registered blocks, `block_size` for each block number.
    tokens: Vec<u32>,
    /// Blocks without holders, in the order in which they are given out; registered ones remain findable.
    free: FreeList,
    index: HashMap<PrefixHash, BlockId, BuildHasherDefault<HashIsKey>>,
    hasher: PrefixHasher,
    /// Since the last [`BlockManager::take_changes`]; `None` while nobody follows.
    changes: Option<Vec<CacheChange>>,
}

impl BlockManager {
    /// All blocks free, nothing cached. `hash_seed` keys the prefix hashes: random per process, so that no client
    /// can aim at a collision.
    pub(crate) fn new(num_blocks: usize, block_size: usize, hash_seed: u64) -> Self {
        Self {
            block_size,
            blocks: vec![Block::default(); num_blocks],
            tokens: vec![0; num_blocks * block_size],
            free: FreeList::full(num_blocks),
            index: HashMap::with_capacity_and_hasher(num_blocks, BuildHasherDefault::default()),
            hasher: PrefixHasher::new(hash_seed),
            changes: None,
        }
    }

    /// Records changes of the prefix cache from now on. Whoever asks for it must take them after every step.
    pub(crate) fn record_changes(&mut self) {
        self.changes.get_or_insert_default();
    }

    /// What changed since the last call, in order.
    pub(crate) fn take_changes(&mut self) -> Vec<CacheChange> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Every findable block as if it were stored now, parents first.
    pub(crate) fn resident(&self) -> Vec<CacheChange> {
        let mut todo: Vec<BlockId> = self.index.values().copied().collect();
        let mut depth = HashMap::new();
        for block in &todo {
            let mut chain = vec![*block];
            while let Some(parent) = self.parent_of(chain[chain.len() - 1]) {
                chain.push(parent);
            }
            depth.insert(*block, chain.len());
        }
        todo.sort_unstable_by_key(|block| (depth[block], *block));
        todo.into_iter().filter_map(|block| self.stored(block)).collect()
    }

    fn parent_of(&self, block: BlockId) -> Option<BlockId> {
        self.blocks[block as usize].registration.as_ref()?.parent
    }

    fn stored(&self, block: BlockId) -> Option<CacheChange> {
        let registration = self.blocks[block as usize].registration.as_ref()?;
        let parent = registration.parent.and_then(|p| self.blocks[p as usize].registration.as_ref());
        let start = block as usize * self.block_size;
        Some(CacheChange::Stored {
            group: 0,
            hash: registration.hash,
            parent: parent.map(|parent| parent.hash),
            tokens: self.tokens[start..start + self.block_size].into(),
            salt: Arc::clone(&registration.salt),
        })
    }

    /// Blocks held by sequences. Cached blocks that nobody holds are free.
    pub(crate) fn used_blocks(&self) -> usize {
        self.blocks.len() - self.free.len()
    }

    /// Gives an empty `table` every block that `tokens` need, cached ones first. Returns the number of tokens whose
    /// KV is there already: a multiple of the block size, and less than `tokens.len()`, because the last token must
    /// run to have logits. `None`, and nothing changed, while too few blocks are free.
    pub(crate) fn admit(
        &mut self,
        table: &mut BlockTable,
        tokens: &[u32],
        salt: &Arc<[u8]>,
    ) -> Option<usize> {
        debug_assert!(table.blocks.is_empty());
        let matched = self.matched(tokens, salt);
        let from_free = matched.iter().filter(|b| self.blocks[**b as usize].refs == 0).count();
        let missing = tokens.len().div_ceil(self.block_size) - matched.len();
        if from_free + missing > self.free.len() {
            return None;
        }
        for block in &matched {
            self.hold(*block);
        }
        *table = BlockTable { registered: matched.len(), blocks: matched, collided: false };
        let cached = table.registered * self.block_size;
        let covered = self.grow(table, tokens.len());
        debug_assert!(covered);
        Some(cached)
    }

    /// Makes `table` cover `len` positions. False, and nothing changed, while too few blocks are free.
    pub(crate) fn grow(&mut self, table: &mut BlockTable, len: usize) -> bool {
        let missing = len.div_ceil(self.block_size).saturating_sub(table.blocks.len());
        if missing > self.free.len() {
            return false;
        }
        for _ in 0..missing {
            let Some(block) = self.free.pop_front() else { return false };
            self.forget(block);
            self.blocks[block as usize].refs = 1;
            table.blocks.push(block);
        }
        true
    }

    /// Registers the blocks that are full now that the KV of all `computed` tokens is there.
    pub(crate) fn register(&mut self, table: &mut BlockTable, computed: &[u32], salt: &Arc<[u8]>) {
        let full = computed.len() / self.block_size;
        while table.registered < full && !table.collided {
            let i = table.registered;
            let ids = &computed[i * self.block_size..(i + 1) * self.block_size];
            let (parent, hash) = self.chain(&table.blocks[..i], ids, salt);
            let own = table.blocks[i];
            match self.index.get(&hash).copied() {
                None => {
                    self.index.insert(hash, own);
                    self.block_tokens(own).copy_from_slice(ids);
                    self.blocks[own as usize].registration =
                        Some(Registration { hash, parent, salt: Arc::clone(salt) });
                    if self.changes.is_some() {
                        let stored = self.stored(own);
                        self.changes.iter_mut().for_each(|changes| changes.extend(stored.clone()));
                    }
                }
                Some(other) if self.is(other, parent, ids, salt) => {
                    self.hold(other);
                    self.let_go(own);
                    table.blocks[i] = other;
                }
                Some(_) => {
                    table.collided = true;
                    return;
                }
            }
            table.registered += 1;
        }
    }

    /// Takes all blocks back. The deepest one is evicted first.
    pub(crate) fn release(&mut self, table: &mut BlockTable) {
        for block in std::mem::take(table).blocks.into_iter().rev() {
            self.let_go(block);
        }
    }

    /// The cached blocks that `tokens` begin with, never all of its tokens.
    fn matched(&self, tokens: &[u32], salt: &Arc<[u8]>) -> Vec<BlockId> {
        let usable = tokens.len().saturating_sub(1) / self.block_size;
        let mut matched = Vec::new();
        for ids in tokens.chunks_exact(self.block_size).take(usable) {
            let (parent, hash) = self.chain(&matched, ids, salt);
            match self.index.get(&hash) {
                Some(block) if self.is(*block, parent, ids, salt) => matched.push(*block),
                _ => break,
            }
        }
        matched
    }

    /// Parent and hash of the block `ids` that follows the registered blocks `before`.
    fn chain(&self, before: &[BlockId], ids: &[u32], salt: &[u8]) -> (Option<BlockId>, PrefixHash) {
        let parent = before.last().copied();
        let registration = parent.and_then(|p| self.blocks[p as usize].registration.as_ref());
        let hash_before = registration.map_or_else(|| self.hasher.root(salt), |r| r.hash);
        (parent, self.hasher.extend(hash_before, ids))
    }

    /// Whether registered `block` holds exactly `ids` after `parent` under `salt`.
    fn is(&self, block: BlockId, parent: Option<BlockId>, ids: &[u32], salt: &[u8]) -> bool {
        let start = block as usize * self.block_size;
        self.blocks[block as usize].registration.as_ref().is_some_and(|r| {
            r.parent == parent && *r.salt == *salt && self.tokens[start..start + self.block_size] == *ids
        })
    }

    fn block_tokens(&mut self, block: BlockId) -> &mut [u32] {
        let start = block as usize * self.block_size;
        &mut self.tokens[start..start + self.block_size]
    }

    fn hold(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block as usize];
        if entry.refs == 0 {
            self.free.remove(block);
        }
        entry.refs += 1;
    }

    fn let_go(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block as usize];
        entry.refs -= 1;
        if entry.refs > 0 {
            return;
        }
        if entry.registration.is_some() {
            self.free.push_back(block);
        } else {
            // Nobody can find it again, so it goes before anything cached.
            self.free.push_front(block);
        }
    }

    fn forget(&mut self, block: BlockId) {
        if let Some(registration) = self.blocks[block as usize].registration.take() {
            self.index.remove(&registration.hash);
            if let Some(changes) = &mut self.changes {
                changes.push(CacheChange::Removed { group: 0, hash: registration.hash });
            }
        }
    }
}

/// Hasher for keys that are hashes already: takes their low bits.
#[derive(Debug, Default)]
struct HashIsKey(u64);

impl Hasher for HashIsKey {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u128(&mut self, hash: u128) {
        self.0 = hash as u64;
    }
}
