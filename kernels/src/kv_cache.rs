//! The paged KV cache of one layer: where the key and value of (block, offset, head) lie, and the write.
//! Which block belongs to which sequence is the caller's business.
//!
//! Keys are kept sixteen positions side by side, `[block][kv_head][offset / 16][key_dim][16]`, so that
//! scores are computed in lanes across keys; values position by position,
//! `[block][kv_head][offset][value_dim]`, so that sums run in lanes across the head.
//!
//! A **latent** cache (multi-head latent attention in its absorbed form, arXiv 2405.04434) keeps one vector
//! per position, laid out as keys are; its first `value_dim` elements are the value as well.

use std::ops::Range;

use crate::lanes::{LANES, Lanes};
use crate::zeroed::Zeroed;

/// Sizes of a layer's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value, a multiple of [`KvShape::GRANULE`].
    pub value_dim: usize,
    /// Positions per block, a multiple of [`KvShape::GRANULE`].
    pub block_size: usize,
    /// How many blocks the cache has, each of `block_size` positions.
    pub num_blocks: usize,
}

impl KvShape {
    /// What `value_dim` and `block_size` must be multiples of.
    pub const GRANULE: usize = LANES;

    /// Bytes that one position takes in one layer: f32 key and value.
    pub fn bytes_per_token(&self) -> usize {
        size_of::<f32>() * self.kv_heads * (self.key_dim + self.value_dim)
    }

    /// [`KvShape::bytes_per_token`] in a latent cache: the key alone.
    pub fn latent_bytes_per_token(&self) -> usize {
        size_of::<f32>() * self.kv_heads * self.key_dim
    }

    /// Panics if a size cannot be.
    fn check(&self) {
        let Self { kv_heads, key_dim, value_dim, block_size, .. } = *self;
        assert!(
            value_dim.is_multiple_of(LANES) && block_size.is_multiple_of(LANES),
            "kv_cache: value_dim and block_size must be multiples of {LANES}"
        );
        assert!(key_dim > 0 && value_dim > 0 && block_size > 0 && kv_heads > 0, "kv_cache: a size is 0");
    }

    /// Vectors of sixteen that heads of `dim` elements take; `None` if that overflows.
    fn vectors(&self, dim: usize) -> Option<usize> {
        self.num_blocks
            .checked_mul(self.block_size)?
            .checked_mul(self.kv_heads)?
            .checked_mul(dim)
            .map(|floats| floats / LANES)
    }
}

/// One layer's keys and values.
#[derive(Debug)]
pub struct KvCache {
    shape: KvShape,
    latent: bool,
    keys: Zeroed,
    /// Empty in a latent cache.
    values: Zeroed,
}

impl KvCache {
    /// An empty cache, its memory reserved at once but not touched before it is written; `None` if there is
    /// not enough.
    ///
    /// # Panics
    /// If a size is 0, or `value_dim` or `block_size` is not a multiple of [`KvShape::GRANULE`].
    pub fn new(shape: KvShape) -> Option<Self> {
        shape.check();
        let keys = Zeroed::new(shape.vectors(shape.key_dim)?)?;
        let values = Zeroed::new(shape.vectors(shape.value_dim)?)?;
        Some(Self { shape, latent: false, keys, values })
    }

    /// An empty latent cache: `key_dim` is the whole of a position's vector (its compressed part and its
    /// rotated part), `value_dim` the compressed part at its beginning. `None` if there is not enough memory.
    ///
    /// # Panics
    /// As [`KvCache::new`], and if there is not one KV head, or the value is longer than the key.
    pub fn new_latent(shape: KvShape) -> Option<Self> {
        shape.check();
        assert!(shape.kv_heads == 1 && shape.value_dim <= shape.key_dim, "kv_cache: no such latent");
        Some(Self {
            shape,
            latent: true,
            keys: Zeroed::new(shape.vectors(shape.key_dim)?)?,
            values: Zeroed::new(0)?,
        })
    }

    /// Whether values are the beginnings of keys.
    pub fn is_latent(&self) -> bool {
        self.latent
    }

    /// Bytes that one position takes.
    pub fn bytes_per_token(&self) -> usize {
        if self.latent { self.shape.latent_bytes_per_token() } else { self.shape.bytes_per_token() }
    }

    /// The sizes with which the cache was made.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Stores one position's `key` `[kv_heads, key_dim]` and `value` `[kv_heads, value_dim]`.
    ///
    /// # Panics
    /// If `block` or `offset` is out of range, a slice has another length, or the cache is a latent one.
    pub fn write(&mut self, block: u32, offset: usize, key: &[f32], value: &[f32]) {
        let KvShape { kv_heads, key_dim, value_dim, .. } = self.shape;
        let whole = key.len() == kv_heads * key_dim && value.len() == kv_heads * value_dim;
        assert!(!self.latent && whole, "kv_cache: shapes disagree");
        self.write_keys(block, offset, 1, key.len(), key);
        self.write_values(block, offset, 1, value.len(), value);
    }

    /// [`KvCache::write`] for `count` positions from `offset` on, all in one block: position `i`'s key begins
    /// at `keys[i * stride]`, its value at `values[i * stride]`.
    ///
    /// # Panics
    /// As [`KvCache::write`].
    pub fn write_run(
        &mut self,
        block: u32,
        offset: usize,
        count: usize,
        stride: usize,
        (keys, values): (&[f32], &[f32]),
    ) {
        assert!(!self.latent, "kv_cache: shapes disagree");
        // Sixteen positions share the vectors of their keys, which stay in cache in between.
        let mut i = 0;
        while i < count {
            let here = (LANES - (offset + i) % LANES).min(count - i);
            self.write_keys(block, offset + i, here, stride, &keys[i * stride..]);
            self.write_values(block, offset + i, here, stride, &values[i * stride..]);
            i += here;
        }
    }

    /// Stores one position's `latent` `[key_dim]`.
    ///
    /// # Panics
    /// If `block` or `offset` is out of range, `latent` has another length, or the cache is not a latent one.
    pub fn write_latent(&mut self, block: u32, offset: usize, latent: &[f32]) {
        assert!(self.latent && latent.len() == self.shape.key_dim, "kv_cache: shapes disagree");
        self.write_keys(block, offset, 1, latent.len(), latent);
    }

    /// Bytes of one block, as [`KvCache::copy_block`] gives them.
    pub fn block_bytes(&self) -> usize {
        self.shape.block_size * self.bytes_per_token()
    }

    /// Appends a block to `out`: its keys, then its values, each as this cache keeps them, in little-endian
    /// f32; [`KvCache::block_bytes`] bytes.
    ///
    /// # Panics
    /// If `block` is out of range.
    pub fn copy_block(&self, block: u32, out: &mut Vec<u8>) {
        let (keys, values) = self.block_vectors(block);
        out.reserve(self.block_bytes());
        for vector in self.keys[keys].iter().chain(&self.values[values]) {
            out.extend(vector.0.iter().flat_map(|element| element.to_le_bytes()));
        }
    }

    /// Takes a block in as [`KvCache::copy_block`] of a cache of equal sizes gave it.
    ///
    /// # Panics
    /// If `block` is out of range, or there are not [`KvCache::block_bytes`] bytes.
    pub fn write_block(&mut self, block: u32, bytes: &[u8]) {
        assert!(bytes.len() == self.block_bytes(), "kv_cache: shapes disagree");
        let (keys, values) = self.block_vectors(block);
        let (elements, _) = bytes.as_chunks::<{ size_of::<f32>() }>();
        let mut elements = elements.iter().map(|bytes| f32::from_le_bytes(*bytes));
        for vector in self.keys[keys].iter_mut().chain(&mut self.values[values]) {
            for (lane, element) in vector.0.iter_mut().zip(&mut elements) {
                *lane = element;
            }
        }
    }

    /// Where a block's vectors are, among keys and among values.
    fn block_vectors(&self, block: u32) -> (Range<usize>, Range<usize>) {
        assert!((block as usize) < self.shape.num_blocks, "kv_cache: no such block");
        let keys = self.key_index(block, 0, 0)..self.key_index(block + 1, 0, 0);
        let values = self.value_index(block, 0, 0)..self.value_index(block + 1, 0, 0);
        (keys, if self.latent { 0..0 } else { values })
    }

    /// `count` positions of the sixteen around `offset`.
    fn write_keys(&mut self, block: u32, offset: usize, count: usize, stride: usize, keys: &[f32]) {
        let KvShape { kv_heads, key_dim, block_size, num_blocks, .. } = self.shape;
        let (width, lane) = (kv_heads * key_dim, offset % LANES);
        assert!((block as usize) < num_blocks && offset + count <= block_size, "kv_cache: no such position");
        assert!(stride >= width && keys.len() >= (count - 1) * stride + width, "kv_cache: shapes disagree");
        for head in 0..kv_heads {
            let at = self.key_index(block, head, offset);
            for (d, packed) in self.keys[at..][..key_dim].iter_mut().enumerate() {
                let elements = keys[head * key_dim + d..].iter().step_by(stride);
                for (packed, element) in packed.0[lane..].iter_mut().take(count).zip(elements) {
                    *packed = *element;
                }
            }
        }
    }

    /// `count` positions of a block.
    fn write_values(&mut self, block: u32, offset: usize, count: usize, stride: usize, values: &[f32]) {
        let KvShape { kv_heads, value_dim, .. } = self.shape;
        for i in 0..count {
            let value = &values[i * stride..][..kv_heads * value_dim];
            for (head, value) in value.chunks_exact(value_dim).enumerate() {
                let at = self.value_index(block, head, offset + i);
                for (packed, part) in self.values[at..].iter_mut().zip(value.chunks_exact(LANES)) {
                    packed.0.copy_from_slice(part);
                }
            }
        }
    }

    /// Keys of the sixteen positions around `offset`: `key_dim` vectors, lane = position.
    #[inline(always)]
    pub(crate) fn key_tile(&self, block: u32, head: usize, offset: usize) -> &[Lanes] {
        &self.keys[self.key_index(block, head, offset)..][..self.shape.key_dim]
    }

    /// Values of the positions `offset..offset + 16`, `value_dim / 16` vectors each.
    #[inline(always)]
    pub(crate) fn value_tile(&self, block: u32, head: usize, offset: usize) -> &[Lanes] {
        &self.values[self.value_index(block, head, offset)..][..self.shape.value_dim]
    }

    /// Element `i` of one key: for oracles.
    pub(crate) fn key_element(&self, block: u32, head: usize, offset: usize, i: usize) -> f32 {
        self.keys[self.key_index(block, head, offset) + i].0[offset % LANES]
    }

    /// Element `i` of one value: for oracles.
    pub(crate) fn value_element(&self, block: u32, head: usize, offset: usize, i: usize) -> f32 {
        if self.latent {
            return self.key_element(block, head, offset, i);
        }
        self.values[self.value_index(block, head, offset) + i / LANES].0[i % LANES]
    }

    #[inline(always)]
    fn key_index(&self, block: u32, head: usize, offset: usize) -> usize {
        let KvShape { kv_heads, key_dim, block_size, .. } = self.shape;
        ((block as usize * kv_heads + head) * (block_size / LANES) + offset / LANES) * key_dim
    }

    #[inline(always)]
    fn value_index(&self, block: u32, head: usize, offset: usize) -> usize {
        let KvShape { kv_heads, value_dim, block_size, .. } = self.shape;
        ((block as usize * kv_heads + head) * block_size + offset) * (value_dim / LANES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_position_keeps_its_own_key_and_value() {
        let shape = KvShape { kv_heads: 2, key_dim: 9, value_dim: 32, block_size: 32, num_blocks: 3 };
        let mut cache = KvCache::new(shape).unwrap();
        let row = |block: u32, offset: usize, width: usize| -> Vec<f32> {
            (0..2 * width)
                .map(|i| (width * 1_000_000 + block as usize * 10_000 + offset * 100 + i) as f32)
                .collect()
        };
        for block in 0..3 {
            for offset in 0..32 {
                cache.write(block, offset, &row(block, offset, 9), &row(block, offset, 32));
            }
        }
        for block in 0..3 {
            for offset in 0..32 {
                for head in 0..2 {
                    let key: Vec<f32> = (0..9).map(|i| cache.key_element(block, head, offset, i)).collect();
                    assert_eq!(key, row(block, offset, 9)[head * 9..][..9]);
                    let value: Vec<f32> =
                        (0..32).map(|i| cache.value_element(block, head, offset, i)).collect();
                    assert_eq!(value, row(block, offset, 32)[head * 32..][..32]);
                }
            }
        }
    }

    #[test]
    fn a_run_of_positions_is_written_as_each_alone() {
        let shape = KvShape { kv_heads: 2, key_dim: 9, value_dim: 32, block_size: 48, num_blocks: 2 };
        let (stride, width) = (100, 2 * 9);
        let rows = crate::check::values(1, 48 * stride);
        for (offset, count) in [(0, 48), (5, 1), (3, 30), (16, 16), (47, 1), (20, 0)] {
            let (mut run, mut each) = (KvCache::new(shape).unwrap(), KvCache::new(shape).unwrap());
            run.write_run(1, offset, count, stride, (&rows, &rows[width..]));
            for i in 0..count {
                let row = &rows[i * stride..];
                each.write(1, offset + i, &row[..width], &row[width..][..2 * 32]);
            }
            let bits = |cache: &KvCache| -> Vec<[u32; LANES]> {
                cache.keys.iter().chain(&*cache.values).map(|lanes| lanes.0.map(f32::to_bits)).collect()
            };
            assert_eq!(bits(&run), bits(&each), "{offset} {count}");
        }
    }

    #[test]
    fn a_position_takes_the_bytes_it_is_said_to_take() {
        let shape = KvShape { kv_heads: 2, key_dim: 192, value_dim: 128, block_size: 16, num_blocks: 3 };
        let latent = KvShape { kv_heads: 1, key_dim: 576, value_dim: 512, ..shape };
        for cache in [KvCache::new(shape).unwrap(), KvCache::new_latent(latent).unwrap()] {
            let bytes = size_of_val(&*cache.keys) + size_of_val(&*cache.values);
            assert_eq!(bytes, 3 * 16 * cache.bytes_per_token());
        }
        assert_eq!((latent.latent_bytes_per_token(), latent.bytes_per_token()), (576 * 4, 1088 * 4));
    }

    #[test]
    fn a_block_that_is_copied_is_the_same_block_and_no_other() {
        let shape = KvShape { kv_heads: 2, key_dim: 9, value_dim: 32, block_size: 32, num_blocks: 3 };
        let latent = KvShape { kv_heads: 1, key_dim: 41, ..shape };
        let caches = || [KvCache::new(shape).unwrap(), KvCache::new_latent(latent).unwrap()];
        for (mut from, mut to) in caches().into_iter().zip(caches()) {
            let rows = crate::check::values(2, 32 * 100);
            if from.is_latent() {
                (0..32).for_each(|i| from.write_latent(1, i, &rows[i * 100..][..41]));
            } else {
                from.write_run(1, 0, 32, 100, (&rows, &rows[18..]));
            }
            let mut bytes = vec![7];
            from.copy_block(1, &mut bytes);
            assert_eq!(bytes.len(), 1 + from.block_bytes());
            to.write_block(2, &bytes[1..]);
            let copy = |cache: &KvCache, block: u32| {
                let mut bytes = Vec::new();
                cache.copy_block(block, &mut bytes);
                bytes
            };
            assert_eq!(copy(&to, 2), bytes[1..]);
            let element = |cache: &KvCache, block: u32, offset: usize| {
                let head = cache.shape().kv_heads - 1;
                [cache.key_element(block, head, offset, 8), cache.value_element(block, head, offset, 31)]
            };
            assert!((0..32).all(|offset| element(&from, 1, offset) == element(&to, 2, offset)));
            assert!([0, 1].iter().all(|block| copy(&to, *block).iter().all(|byte| *byte == 0)));
        }
    }

    #[test]
    fn too_large_a_cache_is_refused() {
        let (key_dim, num_blocks) = (128, usize::MAX / 16);
        let shape = KvShape { kv_heads: 8, key_dim, value_dim: 128, block_size: 16, num_blocks };
        assert!(KvCache::new(shape).is_none());
    }
}
