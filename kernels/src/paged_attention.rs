//! Causal attention of new tokens over a paged KV cache (arXiv 2309.06180), with grouped query heads
//! (arXiv 2305.13245). One form serves a piece of a prompt and a single decoded token.
//!
//! `out[t][h] = sum over p <= start + t of softmax_p(scale * q[t][h] . key[p]) value[p]`, query head `h`
//! reading KV head `h / (heads / kv_heads)`. Keys are taken in chunks of 256 **absolute** positions with a
//! running maximum and sum (arXiv 1805.02867), position `p` in lane `p % 16`: the order of every sum depends
//! on the token's position alone, never on `start`, the block size, the block numbers or the rows computed
//! beside it.

use crate::isa::{Body, Isa};
use crate::kv_cache::{KvCache, KvShape};
use crate::lanes::{LANES, Lanes};
use crate::scalar::exp;
use crate::simd::Simd;

/// Positions between two updates of the running maximum. Larger ones pay its latency less often; the scores
/// of eight rows still fit the first-level cache.
const CHUNK: usize = 256;
const TILES: usize = CHUNK / LANES;

/// New tokens of one sequence; their keys and values are already in the cache.
#[derive(Debug, Clone, Copy)]
pub struct Queries<'a> {
    /// Row `t` starts at `t * stride` with token `t`'s query heads, `[heads, head_dim]`.
    pub rows: &'a [f32],
    /// Distance between rows, in elements.
    pub stride: usize,
    /// Query heads, a multiple of the cache's KV heads.
    pub heads: usize,
    /// Absolute position of row 0.
    pub start: usize,
    /// Block table: `blocks[p / block_size]` holds position `p`, for every `p` up to the last row's.
    pub blocks: &'a [u32],
}

/// The definition, in float64; `[tokens, heads, head_dim]`.
pub fn oracle(cache: &KvCache, queries: Queries<'_>, tokens: usize, scale: f32) -> Vec<f64> {
    let KvShape { kv_heads, head_dim, block_size, .. } = cache.shape();
    let Queries { rows, stride, heads, start, blocks } = queries;
    let mut out = Vec::with_capacity(tokens * heads * head_dim);
    for t in 0..tokens {
        for h in 0..heads {
            let q = &rows[t * stride + h * head_dim..][..head_dim];
            let kv_head = h / (heads / kv_heads);
            let at = |p: usize| (blocks[p / block_size], kv_head, p % block_size / LANES * LANES);
            let score = |p: usize| {
                let (block, head, offset) = at(p);
                let keys = cache.key_tile(block, head, offset);
                let dot: f64 = (0..head_dim).map(|d| f64::from(q[d]) * f64::from(keys[d].0[p % LANES])).sum();
                dot * f64::from(scale)
            };
            let scores: Vec<f64> = (0..=start + t).map(score).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..head_dim {
                let value = |p: usize| {
                    let (block, head, offset) = at(p);
                    let tile = cache.value_tile(block, head, offset);
                    f64::from(tile[p % LANES * (head_dim / LANES) + d / LANES].0[d % LANES])
                };
                let sum: f64 = weights.iter().enumerate().map(|(p, w)| w * value(p)).sum();
                out.push(sum / total);
            }
        }
    }
    out
}

/// Attends and writes `out` `[tokens, heads * head_dim]`; its length says how many tokens there are.
///
/// # Panics
/// If shapes disagree, or the block table is too short or names a block that does not exist.
pub fn cpu(isa: Isa, cache: &KvCache, queries: Queries<'_>, scale: f32, out: &mut [f32]) {
    let KvShape { kv_heads, head_dim, block_size, .. } = cache.shape();
    let width = queries.heads * head_dim;
    let tokens = out.len() / width;
    assert!(
        out.len() == tokens * width && queries.heads.is_multiple_of(kv_heads),
        "paged_attention: shapes disagree"
    );
    assert!(
        (queries.start + tokens).div_ceil(block_size) <= queries.blocks.len(),
        "paged_attention: the block table is too short"
    );
    let group = queries.heads / kv_heads;
    isa.run(Attention { cache, queries, scale, out, tokens, group });
}

struct Attention<'a> {
    cache: &'a KvCache,
    queries: Queries<'a>,
    scale: f32,
    out: &'a mut [f32],
    tokens: usize,
    /// Query heads per KV head. Row `r` of a KV head is query head `r % group` of token `r / group`.
    group: usize,
}

/// What `R` rows carry from chunk to chunk.
struct Running<const R: usize> {
    max: [f32; R],
    sum: [Lanes; R],
    /// Unnormalised output, `[head_dim / 16]`.
    out: Vec<[Lanes; R]>,
}

impl Body for Attention<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let rows = self.tokens * self.group;
        for kv_head in 0..self.cache.shape().kv_heads {
            let mut row = 0;
            if S::WIDE {
                row = self.tiles::<S, 8>(simd, kv_head, row, rows);
            }
            row = self.tiles::<S, 4>(simd, kv_head, row, rows);
            row = self.tiles::<S, 2>(simd, kv_head, row, rows);
            self.tiles::<S, 1>(simd, kv_head, row, rows);
        }
    }
}

impl Attention<'_> {
    /// Attends for the rows `row..end`, `R` at a time; returns the first row that was too few for a tile.
    #[inline(always)]
    fn tiles<S: Simd, const R: usize>(
        &mut self,
        simd: S,
        kv_head: usize,
        mut row: usize,
        end: usize,
    ) -> usize {
        while row + R <= end {
            self.tile::<S, R>(simd, kv_head, row);
            row += R;
        }
        row
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize>(&mut self, simd: S, kv_head: usize, first: usize) {
        let head_dim = self.cache.shape().head_dim;
        let seen: [usize; R] = std::array::from_fn(|r| self.queries.start + (first + r) / self.group + 1);
        let query = self.load_queries::<R>(kv_head, first);
        let query: [&[f32]; R] = std::array::from_fn(|r| &query[r * head_dim..][..head_dim]);
        let mut running = Running {
            max: [f32::NEG_INFINITY; R],
            sum: [Lanes::ZERO; R],
            out: vec![[Lanes::ZERO; R]; head_dim / LANES],
        };
        for chunk in (0..seen[R - 1]).step_by(CHUNK) {
            let counts: [usize; R] = std::array::from_fn(|r| seen[r].saturating_sub(chunk).min(CHUNK));
            let mut weights = self.scores(simd, kv_head, chunk, counts[R - 1], query);
            for r in 0..R {
                let rescale =
                    softmax_chunk(&mut weights[r], counts[r], &mut running.max[r], &mut running.sum[r]);
                for out in &mut running.out {
                    out[r] = out[r].scale_add(rescale, Lanes::ZERO);
                }
            }
            self.add_values(simd, kv_head, chunk, counts, &weights, &mut running.out);
        }
        for r in 0..R {
            let total = running.sum[r].sum();
            let at = self.out_index(kv_head, first + r);
            for (part, sums) in self.out[at..][..head_dim].chunks_exact_mut(LANES).zip(&running.out) {
                for (out, sum) in part.iter_mut().zip(sums[r].0) {
                    *out = sum / total;
                }
            }
        }
    }

    /// The rows' queries times `scale`: `[R, head_dim]`.
    #[inline(always)]
    fn load_queries<const R: usize>(&self, kv_head: usize, first: usize) -> Vec<f32> {
        let head_dim = self.cache.shape().head_dim;
        let mut query = Vec::with_capacity(R * head_dim);
        for row in first..first + R {
            let (token, head) = (row / self.group, kv_head * self.group + row % self.group);
            let row = &self.queries.rows[token * self.queries.stride + head * head_dim..][..head_dim];
            query.extend(row.iter().map(|element| element * self.scale));
        }
        query
    }

    /// Scores of the positions `chunk..chunk + keys`; lanes behind them hold garbage.
    #[inline(always)]
    fn scores<S: Simd, const R: usize>(
        &self,
        simd: S,
        kv_head: usize,
        chunk: usize,
        keys: usize,
        query: [&[f32]; R],
    ) -> [[Lanes; TILES]; R] {
        let mut scores = [[Lanes::ZERO; TILES]; R];
        for tile in 0..keys.div_ceil(LANES) {
            let (block, offset) = self.locate(chunk + tile * LANES);
            let sums = dots(simd, self.cache.key_tile(block, kv_head, offset), query);
            for (scores, sums) in scores.iter_mut().zip(sums) {
                scores[tile] = sums;
            }
        }
        scores
    }

    /// Adds the weighted values of the positions `chunk..chunk + counts[r]` to each row `r`.
    #[inline(always)]
    fn add_values<S: Simd, const R: usize>(
        &self,
        simd: S,
        kv_head: usize,
        chunk: usize,
        counts: [usize; R],
        weights: &[[Lanes; TILES]; R],
        out: &mut [[Lanes; R]],
    ) {
        for (tile, position) in (chunk..chunk + counts[R - 1]).step_by(LANES).enumerate() {
            let (block, offset) = self.locate(position);
            let values = self.cache.value_tile(block, kv_head, offset);
            let ends = counts.map(|count| count.saturating_sub(tile * LANES).min(LANES));
            let weights: [&[f32; LANES]; R] = std::array::from_fn(|r| &weights[r][tile].0);
            add_value_tile(simd, values, ends, weights, out);
        }
    }

    #[inline(always)]
    fn locate(&self, position: usize) -> (u32, usize) {
        let block_size = self.cache.shape().block_size;
        (self.queries.blocks[position / block_size], position % block_size)
    }

    #[inline(always)]
    fn out_index(&self, kv_head: usize, row: usize) -> usize {
        let head = kv_head * self.group + row % self.group;
        (row / self.group * self.queries.heads + head) * self.cache.shape().head_dim
    }
}

/// Each query's product with sixteen keys; the sums stay in registers.
#[inline(always)]
fn dots<S: Simd, const R: usize>(simd: S, keys: &[Lanes], query: [&[f32]; R]) -> [Lanes; R] {
    // Equal lengths by construction; said once more here, it spares the loop its bounds checks.
    let query: [&[f32]; R] = std::array::from_fn(|r| &query[r][..keys.len()]);
    let mut sums = [simd.zero(); R];
    for (d, keys) in keys.iter().enumerate() {
        let keys = simd.load(&keys.0);
        for r in 0..R {
            sums[r] = simd.mul_add(simd.splat(query[r][d]), keys, sums[r]);
        }
    }
    let mut out = [Lanes::ZERO; R];
    for r in 0..R {
        simd.store(sums[r], &mut out[r].0);
    }
    out
}

/// Adds to each row `r` the first `ends[r]` of sixteen weighted values. Rows ascend in position, so what row
/// 0 sees is common to all; the few positions behind that are taken row by row, because a weight of zero
/// would not be the same as no term (`0 * inf`, `-0 + 0`).
#[inline(always)]
fn add_value_tile<S: Simd, const R: usize>(
    simd: S,
    values: &[Lanes],
    ends: [usize; R],
    weights: [&[f32; LANES]; R],
    out: &mut [[Lanes; R]],
) {
    let parts = out.len();
    for (part, out) in out.iter_mut().enumerate() {
        let mut sums = [simd.zero(); R];
        for r in 0..R {
            sums[r] = simd.load(&out[r].0);
        }
        for position in 0..ends[0] {
            let value = simd.load(&values[position * parts + part].0);
            for r in 0..R {
                sums[r] = simd.mul_add(value, simd.splat(weights[r][position]), sums[r]);
            }
        }
        for r in 0..R {
            for position in ends[0]..ends[r] {
                let value = simd.load(&values[position * parts + part].0);
                sums[r] = simd.mul_add(value, simd.splat(weights[r][position]), sums[r]);
            }
            simd.store(sums[r], &mut out[r].0);
        }
    }
}

/// Turns the first `count` of one row's scores of a chunk into weights `e^(score - max)`; updates the running
/// maximum and the sixteen running sums. Returns what earlier sums were scaled by.
#[inline(always)]
fn softmax_chunk(scores: &mut [Lanes; TILES], count: usize, max: &mut f32, sum: &mut Lanes) -> f32 {
    let weights = &mut scores[..count.div_ceil(LANES)];
    if let Some(last) = weights.last_mut() {
        for lane in 0..LANES {
            let real = lane <= (count - 1) % LANES;
            last.0[lane] = if real { last.0[lane] } else { f32::NEG_INFINITY };
        }
    }
    let mut largest = Lanes([*max; LANES]);
    for scores in &*weights {
        largest = largest.max(*scores);
    }
    let largest = largest.largest();
    let rescale = exp(*max - largest);
    *max = largest;
    *sum = sum.scale_add(rescale, Lanes::ZERO);
    for scores in weights {
        for lane in 0..LANES {
            scores.0[lane] = exp(scores.0[lane] - largest);
        }
        *sum = sum.add(*scores);
    }
    rescale
}

#[cfg(test)]
mod tests;
