//! The paged KV cache of one layer: where the key and value of (block, offset, head) lie, and the write.
//! Which block belongs to which sequence is the caller's business.
//!
//! Keys are kept sixteen positions side by side, `[block][kv_head][offset / 16][head_dim][16]`, so that
//! scores are computed in lanes across keys; values position by position,
//! `[block][kv_head][offset][head_dim]`, so that sums run in lanes across the head.

use crate::lanes::{LANES, Lanes};

/// Sizes of a layer's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements per head, a multiple of [`KvShape::GRANULE`].
    pub head_dim: usize,
    /// Positions per block, a multiple of [`KvShape::GRANULE`].
    pub block_size: usize,
    /// Blocks.
    pub num_blocks: usize,
}

impl KvShape {
    /// What `head_dim` and `block_size` must be multiples of.
    pub const GRANULE: usize = LANES;

    /// Bytes that one position takes in one layer: f32 key and value.
    pub fn bytes_per_token(&self) -> usize {
        2 * size_of::<f32>() * self.kv_heads * self.head_dim
    }

    /// Vectors of sixteen in the keys (and as many in the values); `None` if that overflows.
    fn vectors(&self) -> Option<usize> {
        self.num_blocks
            .checked_mul(self.block_size)?
            .checked_mul(self.kv_heads)?
            .checked_mul(self.head_dim)
            .map(|floats| floats / LANES)
    }
}

/// One layer's keys and values.
#[derive(Debug)]
pub struct KvCache {
    shape: KvShape,
    keys: Vec<Lanes>,
    values: Vec<Lanes>,
}

impl KvCache {
    /// An empty cache, its memory taken at once; `None` if there is not enough.
    ///
    /// # Panics
    /// If a size is 0, or `head_dim` or `block_size` is not a multiple of [`KvShape::GRANULE`].
    pub fn new(shape: KvShape) -> Option<Self> {
        assert!(
            shape.head_dim.is_multiple_of(LANES) && shape.block_size.is_multiple_of(LANES),
            "kv_cache: head_dim and block_size must be multiples of {LANES}"
        );
        assert!(shape.head_dim > 0 && shape.block_size > 0 && shape.kv_heads > 0, "kv_cache: a size is 0");
        let zeroed = |n: usize| {
            let mut memory = Vec::new();
            memory.try_reserve_exact(n).ok()?;
            memory.resize(n, Lanes::ZERO);
            Some(memory)
        };
        let vectors = shape.vectors()?;
        Some(Self { shape, keys: zeroed(vectors)?, values: zeroed(vectors)? })
    }

    /// Its sizes.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Stores one position's `key` and `value`, each `[kv_heads, head_dim]`.
    ///
    /// # Panics
    /// If `block` or `offset` is out of range, or a slice has another length.
    pub fn write(&mut self, block: u32, offset: usize, key: &[f32], value: &[f32]) {
        let KvShape { kv_heads, head_dim, block_size, num_blocks } = self.shape;
        assert!((block as usize) < num_blocks && offset < block_size, "kv_cache: no such position");
        assert!(key.len() == kv_heads * head_dim && value.len() == key.len(), "kv_cache: shapes disagree");
        for head in 0..kv_heads {
            let at = self.value_index(block, head, offset);
            for (packed, part) in
                self.values[at..].iter_mut().zip(value[head * head_dim..][..head_dim].chunks(LANES))
            {
                packed.0.copy_from_slice(part);
            }
            let at = self.key_index(block, head, offset);
            for (packed, element) in self.keys[at..].iter_mut().zip(&key[head * head_dim..][..head_dim]) {
                packed.0[offset % LANES] = *element;
            }
        }
    }

    /// Keys of the sixteen positions around `offset`: `head_dim` vectors, lane = position.
    #[inline(always)]
    pub(crate) fn key_tile(&self, block: u32, head: usize, offset: usize) -> &[Lanes] {
        &self.keys[self.key_index(block, head, offset)..][..self.shape.head_dim]
    }

    /// Values of the positions `offset..offset + 16`, `head_dim / 16` vectors each.
    #[inline(always)]
    pub(crate) fn value_tile(&self, block: u32, head: usize, offset: usize) -> &[Lanes] {
        &self.values[self.value_index(block, head, offset)..][..self.shape.head_dim]
    }

    #[inline(always)]
    fn key_index(&self, block: u32, head: usize, offset: usize) -> usize {
        let KvShape { kv_heads, head_dim, block_size, .. } = self.shape;
        ((block as usize * kv_heads + head) * (block_size / LANES) + offset / LANES) * head_dim
    }

    #[inline(always)]
    fn value_index(&self, block: u32, head: usize, offset: usize) -> usize {
        let KvShape { kv_heads, head_dim, block_size, .. } = self.shape;
        ((block as usize * kv_heads + head) * block_size + offset) * (head_dim / LANES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_position_keeps_its_own_key_and_value() {
        let shape = KvShape { kv_heads: 2, head_dim: 32, block_size: 32, num_blocks: 3 };
        let mut cache = KvCache::new(shape).unwrap();
        let row = |block: u32, offset: usize, sign: f32| -> Vec<f32> {
            (0..64).map(|i| sign * (block as usize * 10_000 + offset * 100 + i) as f32).collect()
        };
        for block in 0..3 {
            for offset in 0..32 {
                cache.write(block, offset, &row(block, offset, 1.0), &row(block, offset, -1.0));
            }
        }
        for block in 0..3 {
            for offset in 0..32 {
                for head in 0..2 {
                    let key: Vec<f32> =
                        cache.key_tile(block, head, offset).iter().map(|k| k.0[offset % 16]).collect();
                    assert_eq!(key, row(block, offset, 1.0)[head * 32..][..32]);
                    let tile = cache.value_tile(block, head, offset / 16 * 16);
                    let value: Vec<f32> = tile[offset % 16 * 2..][..2].iter().flat_map(|v| v.0).collect();
                    assert_eq!(value, row(block, offset, -1.0)[head * 32..][..32]);
                }
            }
        }
    }

    #[test]
    fn too_large_a_cache_is_refused() {
        let shape = KvShape { kv_heads: 8, head_dim: 128, block_size: 16, num_blocks: usize::MAX / 16 };
        assert!(KvCache::new(shape).is_none());
    }
}
