//! How much of a prompt that waits is cached by now. Hashes its blocks once and then only looks again at the
//! end of what it found, so asking for every sequence in every step is cheap. Takes no blocks: that is
//! `BlockManager::admit`'s.

use super::{BlockId, BlockManager, PrefixHash};
use crate::engine::backend::NO_BLOCK;

/// What was found of one prompt when it was last looked up.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lookup {
    /// Of the prompt's first blocks, as far as they were ever found, and of the one behind these.
    hashes: Vec<PrefixHash>,
    /// How many of them are cached.
    found: usize,
    /// Of these, tokens that can be gone on from.
    tokens: usize,
    /// State of the registry in which that was so; `None` before the first look.
    version: Option<u64>,
}

impl BlockManager {
    /// How many of `tokens` [`BlockManager::admit`] would find now, of which it may reuse `reuse`. Goes by
    /// the hashes alone.
    pub(crate) fn cached_tokens(
        &self,
        lookup: &mut Lookup,
        tokens: &[u32],
        salt: &[u8],
        reuse: usize,
    ) -> usize {
        if lookup.version.replace(self.version) != Some(self.version) {
            self.follow(lookup, tokens, salt);
            let blocks = lookup.found.min(reuse / self.block_size);
            let anchor = |i: usize| self.index.get(&lookup.hashes[i]).copied().unwrap_or(NO_BLOCK);
            lookup.tokens = self.usable_of(blocks, anchor) * self.block_size;
        }
        lookup.tokens
    }

    /// Moves the end of what is found. Residency is prefix-closed, so a lookup that finds a block finds those
    /// before it.
    fn follow(&self, lookup: &mut Lookup, tokens: &[u32], salt: &[u8]) {
        let usable = tokens.len().saturating_sub(1) / self.block_size;
        while lookup.found > 0 && !self.index.contains_key(&lookup.hashes[lookup.found - 1]) {
            lookup.found -= 1;
        }
        while lookup.found < usable {
            let next = lookup.found;
            if next == lookup.hashes.len() {
                let before = lookup.hashes.last().copied().unwrap_or_else(|| self.hasher.root(salt));
                let ids = &tokens[next * self.block_size..(next + 1) * self.block_size];
                lookup.hashes.push(self.hasher.extend(before, ids));
            }
            if !self.index.contains_key(&lookup.hashes[next]) {
                break;
            }
            lookup.found += 1;
        }
    }

    /// What [`BlockManager::admit`] would find, by the way that it goes.
    #[cfg(test)]
    pub(crate) fn found(&self, tokens: &[u32], salt: &std::sync::Arc<[u8]>, reuse: usize) -> usize {
        let mut anchors = self.matched(tokens, salt);
        anchors.truncate(reuse / self.block_size);
        self.usable_of(anchors.len(), |i| anchors[i]) * self.block_size
    }

    /// How many of so many anchors can be gone on from: the most for which every other group has the blocks
    /// that the next token reads.
    pub(super) fn usable_of(&self, mut blocks: usize, anchor: impl Fn(usize) -> BlockId) -> usize {
        let missing = |blocks: usize| {
            (1..self.rules.len()).find_map(|g| {
                let first = self.rules.first_block(g, blocks * self.block_size);
                (first..blocks).rev().find(|i| self.attached_to(anchor(*i), g).is_none())
            })
        };
        // Nothing that needs the missing block is usable; what ends before it may be.
        while let Some(i) = missing(blocks) {
            blocks = i;
        }
        blocks
    }
}
