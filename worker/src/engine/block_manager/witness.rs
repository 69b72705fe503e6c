//! What a backend's KV would hold, for tests: every read of a planned step is checked against what was
//! written. It knows the salt, which a backend does not, and trusts nothing but the tables.

use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::BlockTable;
use crate::engine::backend::CacheGroup;

#[derive(Debug)]
pub(crate) struct Witness {
    block_size: usize,
    groups: Vec<CacheGroup>,
    /// For each position of each block: the group, the salt and all tokens up to there, as a hash.
    kv: Vec<Option<u64>>,
}

/// One sequence's part of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) table: &'a BlockTable,
    /// Up to the end of the part.
    pub(crate) tokens: &'a [u32],
    pub(crate) start: usize,
    pub(crate) salt: &'a [u8],
}

impl Witness {
    pub(crate) fn new(num_blocks: usize, block_size: usize, groups: &[CacheGroup]) -> Self {
        Self { block_size, groups: groups.to_vec(), kv: vec![None; num_blocks * block_size] }
    }

    /// Carries out a step: all writes, then all reads. Panics at the first read of something else than was
    /// meant.
    pub(crate) fn step(&mut self, parts: &[Part<'_>]) {
        let prefixes: Vec<Vec<u64>> = parts.iter().map(prefixes).collect();
        for (part, prefixes) in parts.iter().zip(&prefixes) {
            for (g, table) in part.table.tables().enumerate() {
                for (p, prefix) in prefixes.iter().enumerate().skip(part.start) {
                    self.kv[place(table, p, self.block_size)] = Some(prefix ^ g as u64);
                }
            }
        }
        for (part, prefixes) in parts.iter().zip(&prefixes) {
            for (g, table) in part.table.tables().enumerate() {
                for p in self.read(g, part) {
                    let kv = self.kv[place(table, p, self.block_size)];
                    assert_eq!(
                        kv,
                        Some(prefixes[p] ^ g as u64),
                        "group {g} reads foreign KV at position {p}"
                    );
                }
            }
        }
    }

    /// The positions that a part's tokens read in group `g`.
    fn read(&self, g: usize, part: &Part<'_>) -> Range<usize> {
        let first = match self.groups[g] {
            CacheGroup::SlidingWindow { window } => (part.start + 1).saturating_sub(window),
            _ => 0,
        };
        first..part.tokens.len()
    }
}

fn place(table: &[u32], position: usize, block_size: usize) -> usize {
    table[position / block_size] as usize * block_size + position % block_size
}

/// Names the salt and the tokens up to each position.
fn prefixes(part: &Part<'_>) -> Vec<u64> {
    let mut hash = xxh3_64_with_seed(part.salt, 1) & !0xff;
    let next = |token: &u32| {
        hash = xxh3_64_with_seed(&token.to_le_bytes(), hash) & !0xff;
        hash
    };
    part.tokens.iter().map(next).collect()
}
