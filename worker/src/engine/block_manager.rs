//! Paged KV blocks: who holds which, which prefixes are cached, what is evicted first. Bookkeeping only: it
//! never touches KV itself, and does not decide who runs.
//!
//! **Prefix caching.** A full block is *registered* under the keyed hash of all tokens up to its end and of
//! the request's salt. A later prompt takes registered blocks instead of computing them. A hash only finds
//! the candidate: it is taken if its token ids equal the prompt's, and if its parent is the very block that
//! matched before it (for the first block: if the salt is equal), so by induction the whole prefix is equal.
//!
//! **Groups.** One pool of blocks serves all cache groups; a sequence has a table for each. Prefixes are
//! named by the blocks of the first group, the anchor. Another group's block of the same positions is
//! *attached* to the anchor's block and found through it alone. A group with a window gives back what lies
//! wholly before the window, and a hit needs only the window's blocks of it.
//!
//! **Residency is prefix-closed.** A registered block's parent is registered: a holder of a child holds its
//! parent, and a freed table enters the LRU list deepest block first, so children are evicted before parents.
//! A sequence that holds an attached block holds its anchor; when an anchor goes, its attachments are
//! forgotten first.
//!
//! **Promises.** Blocks are registered when a step is planned, before they are computed, so that a newcomer
//! of the same step shares them; it is computed behind them. Nothing that was promised is taken back:
//! promises are made once the step's running part is settled, and kept when the step is over
//! ([`BlockManager::commit`]).
//!
//! **No duplicates.** When two sequences computed the same block, the later one takes the registered copy and
//! gives its own back. KV is equal bit for bit, so nothing else changes. For the same reason a sequence that
//! must go over a prefix again, because a window's blocks are gone, writes into the shared anchor blocks.
//!
//! Next: `model.rs`, what is computed into the blocks.

mod changes;
mod check;
mod damage;
mod free_list;
mod groups;
mod held;
mod lookup;
mod prefix_hash;
mod registry;
mod table;
#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod witness;

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::Arc;

pub(crate) use self::changes::BlockKey;
pub use self::changes::CacheChange;
pub(crate) use self::damage::Damage;
use self::free_list::FreeList;
pub(crate) use self::groups::GroupRules;
pub(crate) use self::held::{Adoption, HeldPrefix};
pub(crate) use self::lookup::Lookup;
use self::prefix_hash::{HashIsKey, PrefixHash, PrefixHasher};
pub(crate) use self::table::BlockTable;
use self::table::GroupTable;
use crate::engine::backend::NO_BLOCK;

/// Number of a block in the backend's KV cache.
pub(crate) type BlockId = u32;

/// What is known of one block.
#[derive(Debug, Clone, Default)]
struct Block {
    /// Sequences that hold it.
    refs: u32,
    /// It is full and its KV is there. Between two steps, every registered block is.
    computed: bool,
    role: Role,
}

/// How a block is found by others.
#[derive(Debug, Clone, Default)]
enum Role {
    /// Not at all.
    #[default]
    Private,
    /// By the hash of its prefix.
    Anchor(Registration),
    /// Through `anchor`, which holds the same positions in the first group.
    Attached { anchor: BlockId, group: usize },
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
    rules: GroupRules,
    blocks: Vec<Block>,
    /// Token ids of anchors, `block_size` for each block number.
    tokens: Vec<u32>,
    /// For each block number the blocks attached to it, one entry for each group but the first.
    attached: Vec<BlockId>,
    /// Blocks without holders, in the order in which they are given out; registered ones remain findable.
    free: FreeList,
    index: HashMap<PrefixHash, BlockId, BuildHasherDefault<HashIsKey>>,
    hasher: PrefixHasher,
    /// Counts the changes of what can be found.
    version: u64,
    /// Since the last [`BlockManager::take_changes`]; `None` while nobody follows.
    changes: Option<Vec<CacheChange>>,
    /// Registers blocks only once they are computed: shows what promises are good for.
    #[cfg(test)]
    pub(crate) without_promises: bool,
}

impl BlockManager {
    /// All blocks free, nothing cached. `hash_seed` keys the prefix hashes: random per process, so that no
    /// client can aim at a collision.
    pub(crate) fn new(num_blocks: usize, block_size: usize, rules: GroupRules, hash_seed: u64) -> Self {
        Self {
            block_size,
            blocks: vec![Block::default(); num_blocks],
            tokens: vec![0; num_blocks * block_size],
            attached: vec![NO_BLOCK; num_blocks * (rules.len() - 1)],
            rules,
            free: FreeList::full(num_blocks),
            index: HashMap::with_capacity_and_hasher(num_blocks, BuildHasherDefault::default()),
            hasher: PrefixHasher::new(hash_seed),
            version: 0,
            changes: None,
            #[cfg(test)]
            without_promises: false,
        }
    }

    /// Number of cache groups.
    pub(crate) fn groups(&self) -> usize {
        self.rules.len()
    }

    /// How many blocks there are.
    pub(crate) fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks held by sequences. Cached blocks that nobody holds are free.
    pub(crate) fn used_blocks(&self) -> usize {
        self.blocks.len() - self.free.len()
    }

    /// Gives an empty `table` the blocks that `tokens` need to begin: cached ones first; of groups without a
    /// window enough for all tokens, of others enough for the first `chunk` tokens that are not cached.
    ///
    /// Returns the number of tokens whose KV is there (or will be within this step): a multiple of the block
    /// size, and less than `tokens.len()`, because the last token must run to have logits. `None`, and
    /// nothing changed, while too few blocks are free. Of what is cached, at most the first `reuse` tokens
    /// are taken: who wants the logits of a prompt must compute it.
    pub(crate) fn admit(
        &mut self,
        table: &mut BlockTable,
        tokens: &[u32],
        salt: &Arc<[u8]>,
        chunk: usize,
        reuse: usize,
    ) -> Option<usize> {
        debug_assert!(table.is_empty());
        let mut anchors = self.matched(tokens, salt);
        anchors.truncate(reuse / self.block_size);
        let cached = self.usable_of(anchors.len(), |i| anchors[i]) * self.block_size;
        let group = |g| {
            let first = self.rules.first_block(g, cached);
            GroupTable { blocks: vec![NO_BLOCK; first], first }
        };
        let mut new = BlockTable {
            registered: anchors.len(),
            groups: (0..self.rules.len()).map(group).collect(),
            collided: false,
        };
        let found = anchors.len();
        new.groups[0].blocks = anchors;
        let end = cached + chunk.min(tokens.len() - cached);
        if !self.extend(&mut new, end, tokens.len(), found) {
            return None;
        }
        *table = new;
        Some(cached)
    }

    /// Makes `table` fit for computing the positions before `end`. False, and nothing changed, while too few
    /// blocks are free.
    pub(crate) fn cover(&mut self, table: &mut BlockTable, end: usize) -> bool {
        let places = end.div_ceil(self.block_size);
        let covered = table.groups.iter().all(|group| group.blocks.len() >= places);
        covered || self.extend(table, end, end, 0)
    }

    /// Lengthens every group to `end` positions, those without a window to `end_full`. The first `found`
    /// anchors are in the table already, but not yet held.
    fn extend(&mut self, table: &mut BlockTable, end: usize, end_full: usize, found: usize) -> bool {
        let (places, places_full) = (end.div_ceil(self.block_size), end_full.div_ceil(self.block_size));
        let places: Vec<usize> = (0..table.groups.len())
            .map(|g| if self.rules.slides(g) { places } else { places_full })
            .collect();
        let mut cached = table.anchors()[..found].to_vec();
        let mut fresh = 0;
        for (g, places) in places.iter().enumerate() {
            for i in table.groups[g].blocks.len()..*places {
                match self.attached_at(table, g, i) {
                    Some(block) => cached.push(block),
                    None => fresh += 1,
                }
            }
        }
        let from_free = cached.iter().filter(|block| self.blocks[**block as usize].refs == 0).count();
        if from_free + fresh > self.free.len() {
            return false;
        }
        // Held before any block is given out, so that none of them is evicted for it.
        for block in cached {
            self.hold(block);
        }
        for (g, places) in places.iter().enumerate() {
            for i in table.groups[g].blocks.len()..*places {
                let block = self.attached_at(table, g, i).or_else(|| self.allocate());
                table.groups[g].blocks.push(block.unwrap_or(NO_BLOCK));
            }
        }
        true
    }

    /// Registers the blocks that will be full once all `tokens` are computed, which the planned step does
    /// from position `start` on.
    pub(crate) fn promise(&mut self, table: &mut BlockTable, tokens: &[u32], start: usize, salt: &Arc<[u8]>) {
        #[cfg(test)]
        if self.without_promises {
            return;
        }
        let full = tokens.len() / self.block_size;
        while table.registered < full && !table.collided {
            let i = table.registered;
            let ids = &tokens[i * self.block_size..(i + 1) * self.block_size];
            let (parent, hash) = self.chain(&table.anchors()[..i], ids, salt);
            if self.index.contains_key(&hash) {
                break; // equal or not, `commit` sees to it
            }
            self.insert(table.anchors()[i], ids, Registration { hash, parent, salt: Arc::clone(salt) });
            table.registered += 1;
        }
        for i in start / self.block_size..full.min(table.registered) {
            self.attach_place(table, i);
        }
    }

    /// Takes note that a step computed the KV of `tokens` from position `start` on: blocks that are full now
    /// can be found by others, and blocks before the windows are given back.
    pub(crate) fn commit(&mut self, table: &mut BlockTable, tokens: &[u32], start: usize, salt: &Arc<[u8]>) {
        let full = tokens.len() / self.block_size;
        for i in start / self.block_size..full {
            if i == table.registered && !table.collided {
                self.register_place(table, i, &tokens[i * self.block_size..(i + 1) * self.block_size], salt);
            }
            if i < table.registered {
                self.attach_place(table, i);
            }
            for g in 0..table.groups.len() {
                self.mark_computed(table.groups[g].held(i));
            }
        }
        for g in 1..table.groups.len() {
            let first = self.rules.first_block(g, tokens.len());
            self.give_back(&mut table.groups[g], first);
        }
    }

    /// Takes all blocks back. The deepest one is evicted first, and each anchor after what is attached to it.
    pub(crate) fn release(&mut self, table: &mut BlockTable) {
        let table = std::mem::take(table);
        let places = table.groups.iter().map(|group| group.blocks.len()).max().unwrap_or(0);
        for i in (0..places).rev() {
            for block in table.groups.iter().rev().filter_map(|group| group.held(i)) {
                self.let_go(block);
            }
        }
    }

    fn give_back(&mut self, group: &mut GroupTable, first: usize) {
        while group.first < first {
            if let Some(block) = group.held(group.first) {
                self.let_go(block);
                group.blocks[group.first] = NO_BLOCK;
            }
            group.first += 1;
        }
    }

    /// A free block to write into. The one that was given back first is evicted.
    fn allocate(&mut self) -> Option<BlockId> {
        let block = self.free.pop_front()?;
        self.forget(block);
        self.blocks[block as usize] = Block { refs: 1, ..Block::default() };
        Some(block)
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
        debug_assert!(entry.computed || matches!(entry.role, Role::Private), "a promise is broken");
        match entry.role {
            // Nobody can find it again, so it goes before anything cached.
            Role::Private => self.free.push_front(block),
            _ => self.free.push_back(block),
        }
    }
}
