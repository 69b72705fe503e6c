//! What the engine does for a sequence, as little of it as the tests of a backend need: a block table per
//! cache group, grown before each chunk, whose blocks go back once a sliding window has passed them.

use std::collections::VecDeque;

use super::*;
use crate::engine::backend::NO_BLOCK;

/// Free blocks.
pub(super) struct Pool(VecDeque<u32>);

impl Pool {
    /// All of `backend`'s, in ascending order.
    pub(super) fn ascending(backend: &dyn Backend) -> Self {
        Self((0..backend.num_blocks() as u32).collect())
    }

    pub(super) fn new(order: Vec<u32>) -> Self {
        Self(order.into())
    }
}

/// One sequence's place in the cache.
#[derive(Clone)]
pub(super) struct Sequence {
    groups: Vec<CacheGroup>,
    block_size: usize,
    tables: Vec<Vec<u32>>,
    /// Tokens whose KV is written.
    len: usize,
}

impl Sequence {
    pub(super) fn new(backend: &dyn Backend) -> Self {
        let groups = backend.cache_groups().to_vec();
        let tables = vec![Vec::new(); groups.len()];
        Self { groups, block_size: backend.block_size(), tables, len: 0 }
    }

    /// One that gives nothing back, so that its blocks can be looked at afterwards.
    pub(super) fn keeping_all(backend: &dyn Backend) -> Self {
        let sequence = Self::new(backend);
        let groups = vec![CacheGroup::Full; sequence.groups.len()];
        Self { groups, ..sequence }
    }

    /// One whose first `blocks` blocks are there: those that its next token does not see are not.
    pub(super) fn with_blocks(backend: &dyn Backend, pool: &mut Pool, blocks: usize) -> Self {
        let mut sequence = Self::keeping_all(backend);
        sequence.grow(pool, blocks * backend.block_size());
        let whole = Self { groups: backend.cache_groups().to_vec(), ..sequence };
        whole.fork(blocks * backend.block_size())
    }

    /// Gives back every block that no further token sees, and takes blocks for `new` more tokens. Blocks
    /// given back are the next to be taken, so that whoever still reads one reads somebody else's.
    pub(super) fn grow(&mut self, pool: &mut Pool, new: usize) {
        for (table, group) in self.tables.iter_mut().zip(&self.groups) {
            if let CacheGroup::SlidingWindow { window } = group {
                let passed = (self.len + 1).saturating_sub(*window) / self.block_size;
                for block in table.iter_mut().take(passed).filter(|block| **block != NO_BLOCK) {
                    pool.0.push_front(std::mem::replace(block, NO_BLOCK));
                }
            }
            while table.len() * self.block_size < self.len + new {
                table.push(pool.0.pop_front().unwrap());
            }
        }
    }

    /// Another sequence that goes on from the first `len` tokens of this one, whole blocks, and keeps of them
    /// what it must: behind a sliding window nothing.
    pub(super) fn fork(&self, len: usize) -> Self {
        let mut fork = self.clone();
        fork.len = len;
        for (table, group) in fork.tables.iter_mut().zip(&self.groups) {
            table.truncate(len / self.block_size);
            if let CacheGroup::SlidingWindow { window } = group {
                let passed = (len + 1).saturating_sub(*window) / self.block_size;
                table.iter_mut().take(passed).for_each(|block| *block = NO_BLOCK);
            }
        }
        fork
    }

    pub(super) fn tables(&self) -> Vec<&[u32]> {
        self.tables.iter().map(Vec::as_slice).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn advance(&mut self, new: usize) {
        self.len += new;
    }

    /// Runs `tokens` in one chunk and returns the logits after the last.
    pub(super) fn run(&mut self, backend: &mut dyn Backend, pool: &mut Pool, tokens: &[u32]) -> Vec<f32> {
        self.grow(pool, tokens.len());
        let mut logits = Vec::new();
        let chunk = Chunk { tokens, start: self.len, tables: &self.tables(), wants_logits: true };
        backend.step(&[chunk], &mut logits).unwrap();
        self.len += tokens.len();
        logits
    }
}
