//! What a cache could have answered: for each prompt, in the order they are sent, the tokens that an
//! unbounded cache and one pooled LRU cache would have held already. A bound and a reference; it models no
//! worker.
//!
//! Both see every prompt complete the moment it is due. A prompt's last token is always computed, so at most
//! `prompt - 1` tokens count.

use std::collections::HashMap;

use keyway_wire::block_hash::{BlockHash, Chain, HashKey};

use crate::workload::{self, scale::Block};

/// Tokens of one prompt that a cache would have held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reusable {
    /// With one unbounded cache, to the token: the most that any fleet can reuse.
    pub unbounded: u64,
    /// With one LRU cache of whole blocks, if its size is known.
    pub pooled: Option<u64>,
}

impl std::ops::AddAssign for Reusable {
    fn add_assign(&mut self, other: Self) {
        self.unbounded += other.unbounded;
        self.pooled = [self.pooled, other.pooled].into_iter().flatten().reduce(|a, b| a + b);
    }
}

/// The two reference caches, with what they hold so far.
#[derive(Debug)]
pub struct Oracle {
    /// Longest text seen of each block, in tokens.
    seen: HashMap<BlockHash, u32>,
    pooled: Option<Lru>,
    block_tokens: u32,
    /// The prompt being asked about: the hash of each block's prefix, and its tokens.
    chain: Vec<(BlockHash, u32)>,
    /// How many of its blocks come before the first that no other request has.
    shareable: usize,
}

// === impl Oracle ===

impl Oracle {
    /// Empty caches for blocks of `block_tokens`; the pooled one holds `pooled_blocks`.
    pub fn new(block_tokens: u32, pooled_blocks: Option<usize>) -> Self {
        Self {
            seen: HashMap::new(),
            pooled: pooled_blocks.map(Lru::new),
            block_tokens,
            chain: Vec::new(),
            shareable: 0,
        }
    }

    /// Answers for one prompt and then holds it.
    pub fn ask(&mut self, prompt: impl Iterator<Item = Block>) -> Reusable {
        // Chained, so that a trace whose ids are not prefix hashes is still judged by whole prefixes.
        let mut hashes = Chain::new(HashKey::new(0), b"");
        self.chain.clear();
        self.shareable = usize::MAX;
        for (i, block) in prompt.enumerate() {
            if workload::is_unshared(block.id) {
                self.shareable = self.shareable.min(i);
            }
            self.chain.push((hashes.push(&block.id.to_le_bytes()), block.tokens));
        }

        let prompt_tokens: u64 = self.chain.iter().map(|(_, tokens)| u64::from(*tokens)).sum();
        let reusable_max = prompt_tokens.saturating_sub(1);
        let unbounded = self.ask_unbounded().min(reusable_max);
        let last_is_whole = self.chain.last().is_some_and(|(_, tokens)| *tokens == self.block_tokens);
        let whole = if last_is_whole { self.chain.len() } else { self.chain.len().saturating_sub(1) };
        let pooled = self.pooled.as_mut().map(|lru| {
            let held = lru.ask(self.chain[..whole].iter().map(|(hash, _)| *hash));
            self.chain[..held].iter().map(|(_, tokens)| u64::from(*tokens)).sum::<u64>().min(reusable_max)
        });
        Reusable { unbounded, pooled }
    }

    /// Holds what a server has generated, behind the prompt that it was the answer to: a conversation's next
    /// turn carries it.
    pub fn hold(&mut self, said: impl Iterator<Item = Block>) {
        self.ask(said);
    }

    /// Blocks that no other request can have are not kept: memory grows with what is shared, not with the
    /// run.
    fn ask_unbounded(&mut self) -> u64 {
        let (mut reusable, mut prefix) = (0, true);
        for &(hash, tokens) in self.chain.iter().take(self.shareable) {
            let seen = self.seen.entry(hash).or_insert(0);
            if prefix {
                reusable += u64::from(tokens.min(*seen));
                prefix = *seen >= tokens;
            }
            *seen = tokens.max(*seen);
        }
        reusable
    }
}

/// No slot: the end of the list from newest to oldest.
const NONE: usize = usize::MAX;

/// A cache of whole prefixes' blocks, least recently used out first; a prompt's deepest block counts as its
/// oldest, so no block outlives the one before it.
#[derive(Debug)]
struct Lru {
    blocks_max: usize,
    slot_of: HashMap<BlockHash, usize>,
    slots: Vec<Slot>,
    newest: usize,
    oldest: usize,
    /// The hashes of the prompt's blocks, kept as a buffer.
    prompt: Vec<BlockHash>,
}

#[derive(Debug)]
struct Slot {
    hash: BlockHash,
    newer: usize,
    older: usize,
}

// === impl Lru ===

impl Lru {
    fn new(blocks_max: usize) -> Self {
        Self {
            blocks_max,
            slot_of: HashMap::new(),
            slots: Vec::new(),
            newest: NONE,
            oldest: NONE,
            prompt: Vec::new(),
        }
    }

    /// Counts the leading blocks held, then makes all of them the most recent.
    fn ask(&mut self, prompt: impl Iterator<Item = BlockHash>) -> usize {
        self.prompt.clear();
        self.prompt.extend(prompt);
        let held = self.prompt.iter().take_while(|hash| self.slot_of.contains_key(hash)).count();
        // What would push out its own beginning is never kept.
        for i in (0..self.prompt.len().min(self.blocks_max)).rev() {
            self.touch(self.prompt[i]);
        }
        held
    }

    fn touch(&mut self, hash: BlockHash) {
        let slot = if let Some(&slot) = self.slot_of.get(&hash) {
            self.unlink(slot);
            slot
        } else if self.slots.len() < self.blocks_max {
            self.slots.push(Slot { hash, newer: NONE, older: NONE });
            self.slots.len() - 1
        } else {
            let slot = self.oldest;
            self.unlink(slot);
            self.slot_of.remove(&self.slots[slot].hash);
            self.slots[slot].hash = hash;
            slot
        };
        self.slot_of.insert(hash, slot);
        self.link_newest(slot);
    }

    fn unlink(&mut self, slot: usize) {
        let Slot { newer, older, .. } = self.slots[slot];
        if newer == NONE {
            self.newest = older;
        } else {
            self.slots[newer].older = older;
        }
        if older == NONE { self.oldest = newer } else { self.slots[older].newer = newer }
    }

    fn link_newest(&mut self, slot: usize) {
        self.slots[slot].newer = NONE;
        self.slots[slot].older = self.newest;
        if self.newest == NONE {
            self.oldest = slot;
        } else {
            self.slots[self.newest].newer = slot;
        }
        self.newest = slot;
    }
}

#[cfg(test)]
mod tests;
