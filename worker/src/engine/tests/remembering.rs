//! A backend that remembers: its "KV" are the token ids themselves, and a row of logits is a hash of
//! everything the block tables say came before. A foreign, stale or unwritten block changes the tokens that
//! come out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::engine::backend::{Backend, BlockLayout, CacheGroup, Chunk, CopyError, StepError};

pub(super) const VOCAB: usize = 50;

pub(super) struct Remembering {
    block_size: usize,
    groups: Vec<CacheGroup>,
    /// Token id per position of each block; `None` where nothing was written.
    kv: Vec<Option<u32>>,
    /// Tokens computed so far.
    pub(super) computed: Arc<AtomicUsize>,
}

impl Remembering {
    pub(super) fn new(block_size: usize, num_blocks: usize, groups: &[CacheGroup]) -> Self {
        let kv = vec![None; num_blocks * block_size];
        Self { block_size, groups: groups.to_vec(), kv, computed: Arc::default() }
    }

    fn place(&self, table: &[u32], position: usize) -> usize {
        table[position / self.block_size] as usize * self.block_size + position % self.block_size
    }

    /// A hash of what all groups hold of the positions that the chunk's last token reads. Reads what its
    /// other tokens would read too.
    fn history(&self, chunk: &Chunk<'_>) -> u64 {
        let end = chunk.start + chunk.tokens.len();
        let mut hash = 0;
        for (group, table) in self.groups.iter().zip(chunk.tables) {
            let (first, of_last) = match *group {
                CacheGroup::SlidingWindow { window } => {
                    ((chunk.start + 1).saturating_sub(window), end.saturating_sub(window))
                }
                _ => (0, 0),
            };
            for position in first..end {
                let token = self.kv[self.place(table, position)];
                let token = token.expect("KV is read only where it was written");
                if position >= of_last {
                    hash = mix(hash ^ u64::from(token));
                }
            }
        }
        hash
    }
}

impl Backend for Remembering {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn block_size(&self) -> usize {
        self.block_size
    }

    fn num_blocks(&self) -> usize {
        self.kv.len() / self.block_size
    }

    fn cache_groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    fn block_layout(&self) -> Option<BlockLayout> {
        let block_bytes = vec![4 * self.block_size; self.groups.len()];
        Some(BlockLayout { words: "ids".to_owned(), block_bytes })
    }

    fn copy_block(&self, _: usize, block: u32, out: &mut Vec<u8>) -> Result<(), CopyError> {
        let start = block as usize * self.block_size;
        for token in &self.kv[start..start + self.block_size] {
            out.extend(token.expect("KV is copied only where it was written").to_le_bytes());
        }
        Ok(())
    }

    fn write_block(&mut self, _: usize, block: u32, bytes: &[u8]) -> Result<(), CopyError> {
        let (tokens, _) = bytes.as_chunks::<4>();
        if tokens.len() != self.block_size {
            return Err(CopyError);
        }
        for (i, token) in tokens.iter().enumerate() {
            self.kv[block as usize * self.block_size + i] = Some(u32::from_le_bytes(*token));
        }
        Ok(())
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) -> Result<(), StepError> {
        logits.clear();
        for chunk in chunks {
            self.computed.fetch_add(chunk.tokens.len(), Ordering::Relaxed);
            assert_eq!(chunk.tables.len(), self.groups.len());
            for (i, token) in chunk.tokens.iter().enumerate() {
                for table in chunk.tables {
                    let place = self.place(table, chunk.start + i);
                    self.kv[place] = Some(*token);
                }
            }
        }
        for chunk in chunks {
            let history = self.history(chunk);
            if chunk.wants_logits {
                logits.extend((0..VOCAB as u64).map(|id| (mix(history ^ id << 32) >> 40) as f32 / 1e6));
            }
        }
        Ok(())
    }
}

/// The finaliser of splitmix64, behind an odd step so that zero moves.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
