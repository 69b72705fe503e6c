//! Causal attention of new tokens over a paged KV cache (arXiv 2309.06180), with grouped query heads
//! (arXiv 2305.13245). One form serves a piece of a prompt and a single decoded token.
//!
//! `out[t][h] = sum over p <= start + t of softmax_p(scale * q[t][h] . key[p]) value[p]`, query head `h`
//! reading KV head `h / (heads / kv_heads)`. A sliding window leaves out the oldest positions (arXiv
//! 2004.05150), a sink joins the softmax's denominator (arXiv 2309.17453). Keys are taken in chunks of 256
//! **absolute** positions with a running maximum and sum (arXiv 1805.02867), position `p` in lane `p % 16`:
//! the order of every sum depends on the token's position alone, never on `start`, the block size, the block
//! numbers or the rows computed beside it.

mod chunk;

use std::ops::Range;

use crate::compute::Compute;
use crate::grid::{Grid, Tile};
use crate::isa::Body;
use crate::kv_cache::{KvCache, KvShape};
use crate::lanes::{LANES, Lanes};
use crate::simd::Simd;
use chunk::{Within, add_latent_chunk, add_value_tile, add_whole_value_tile, dots, softmax_chunk};

/// Positions between two updates of the running maximum. Larger ones pay its latency less often; the scores
/// of eight rows still fit the first-level cache.
const CHUNK: usize = 256;
const TILES: usize = CHUNK / LANES;
/// What one element of one key or value takes for one query head on one thread, in nanoseconds
/// (`benches/roofline.rs`): decides who computes, nothing else.
const NS_PER_TERM: f64 = 0.02;
/// What a byte of keys and values takes one thread that finds it in memory, between two layers' weights: the
/// latency of many short reads.
const NS_PER_BYTE: f64 = 0.12;

/// New tokens of one sequence; their keys and values are already in the cache.
#[derive(Debug, Clone, Copy)]
pub struct Queries<'a> {
    /// Row `t` starts at `t * stride` with token `t`'s query heads, `[heads, key_dim]`.
    pub rows: &'a [f32],
    /// Distance between rows, in elements.
    pub stride: usize,
    /// Query heads, a multiple of the cache's KV heads.
    pub heads: usize,
    /// Absolute position of row 0.
    pub start: usize,
    /// Block table: `blocks[p / block_size]` holds position `p`, for every `p` up to the last row's. Entries
    /// of which no row sees a position are never used.
    pub blocks: &'a [u32],
    /// How many positions a token sees, its own among them; `None`: all up to its own.
    pub window: Option<usize>,
    /// One logit per query head that joins the softmax's denominator and nothing else (gpt-oss).
    pub sinks: Option<&'a [f32]>,
}

impl Queries<'_> {
    /// The positions that row `t` sees.
    #[inline(always)]
    fn seen(&self, t: usize) -> (usize, usize) {
        let end = self.start + t + 1;
        (self.window.map_or(0, |window| end.saturating_sub(window)), end)
    }
}

/// The definition, in float64; `[tokens, heads, value_dim]`.
pub fn oracle(cache: &KvCache, queries: Queries<'_>, tokens: usize, scale: f32) -> Vec<f64> {
    let KvShape { kv_heads, key_dim, value_dim, block_size, .. } = cache.shape();
    let Queries { rows, stride, heads, start, blocks, window, sinks } = queries;
    let mut out = Vec::with_capacity(tokens * heads * value_dim);
    for t in 0..tokens {
        for h in 0..heads {
            let q = &rows[t * stride + h * key_dim..][..key_dim];
            let kv_head = h / (heads / kv_heads);
            let at = |p: usize| (blocks[p / block_size], p % block_size);
            let score = |p: usize| {
                let (block, offset) = at(p);
                let key = |d| f64::from(cache.key_element(block, kv_head, offset, d));
                (0..key_dim).map(|d| f64::from(q[d]) * key(d)).sum::<f64>() * f64::from(scale)
            };
            let last = start + t;
            let first = window.map_or(0, |window| (last + 1).saturating_sub(window));
            let scores: Vec<f64> = (first..=last).map(score).collect();
            let sink = sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[h]));
            let max = scores.iter().copied().fold(sink, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let total = weights.iter().sum::<f64>() + (sink - max).exp();
            for d in 0..value_dim {
                let value = |p: usize| f64::from(cache.value_element(at(p).0, kv_head, at(p).1, d));
                let sum: f64 = weights.iter().enumerate().map(|(i, w)| w * value(first + i)).sum();
                out.push(sum / total);
            }
        }
    }
    out
}

/// Attends and writes `out` `[tokens, heads * value_dim]`; its length says how many tokens there are.
///
/// # Panics
/// If shapes disagree, a window is 0, or the block table is too short or names a block that does not exist.
pub fn cpu(compute: &Compute, cache: &KvCache, queries: Queries<'_>, scale: f32, out: &mut [f32]) {
    let tokens = out.len() / (queries.heads * cache.shape().value_dim);
    batch(compute, cache, &[(queries, tokens)], scale, out);
}

/// [`cpu`] for several sequences, each with its number of tokens: their rows of `out` follow each other.
/// Threads take tokens, and where these are few heads, of all sequences.
///
/// # Panics
/// As [`cpu`].
pub fn batch(
    compute: &Compute,
    cache: &KvCache,
    sequences: &[(Queries<'_>, usize)],
    scale: f32,
    out: &mut [f32],
) {
    let KvShape { kv_heads, value_dim, .. } = cache.shape();
    let costs: Vec<f64> = sequences.iter().map(|(queries, tokens)| cost(cache, queries, *tokens)).collect();
    let total = costs.iter().sum::<f64>();
    let parts = compute.parts(total);
    let mut rest = out;
    let mut grids = Vec::with_capacity(sequences.len());
    for ((queries, tokens), cost) in sequences.iter().zip(costs) {
        check(cache, queries, *tokens);
        let width = queries.heads * value_dim;
        assert!(rest.len() >= tokens * width, "paged_attention: shapes disagree");
        let (own, behind) = rest.split_at_mut(tokens * width);
        rest = behind;
        let own_parts = if parts == 1 { 1 } else { (parts as f64 * cost / total).ceil() as usize };
        let (tile_tokens, tile_heads) = cut(own_parts, *tokens, kv_heads, queries.heads / kv_heads);
        grids.push(Grid::new(own, width, tile_tokens.max(1), tile_heads * value_dim));
    }
    assert!(rest.is_empty(), "paged_attention: shapes disagree");
    compute.tiles_of(grids, parts > 1, |sequence, out| {
        let queries = sequences[sequence].0;
        let heads = out.columns().start / value_dim..out.columns().end / value_dim;
        let kv_head = heads.start / (queries.heads / kv_heads);
        compute.isa().run(Attention { cache, queries, scale, kv_head, heads, out });
    });
}

fn check(cache: &KvCache, queries: &Queries<'_>, tokens: usize) {
    let KvShape { kv_heads, block_size, .. } = cache.shape();
    assert!(
        queries.heads.is_multiple_of(kv_heads)
            && queries.window != Some(0)
            && queries.sinks.is_none_or(|sinks| sinks.len() == queries.heads),
        "paged_attention: shapes disagree"
    );
    assert!(
        (queries.start + tokens).div_ceil(block_size) <= queries.blocks.len(),
        "paged_attention: the block table is too short"
    );
}

/// Nanoseconds that a sequence takes one thread.
fn cost(cache: &KvCache, queries: &Queries<'_>, tokens: usize) -> f64 {
    let KvShape { key_dim, value_dim, .. } = cache.shape();
    let end = queries.start + tokens;
    let context = queries.window.map_or(end, |window| window.min(end));
    let computing = (tokens * queries.heads * context) as f64 * (key_dim + value_dim) as f64;
    // A window's first position is not a tile's; one token of a short sequence is all that this is about.
    let reading = context.next_multiple_of(LANES) * cache.bytes_per_token();
    (NS_PER_TERM * computing).max(NS_PER_BYTE * reading as f64)
}

/// Tokens and query heads per tile: `parts` tiles or more if there are as many rows. A tile's heads share a
/// KV head. Tokens are cut first: rows of one tile share the keys they load.
fn cut(parts: usize, tokens: usize, kv_heads: usize, group: usize) -> (usize, usize) {
    if parts <= 1 {
        return (tokens, group);
    }
    let tile_tokens = tokens.div_ceil(parts.div_ceil(kv_heads));
    let wanted = parts.div_ceil(kv_heads * tokens.div_ceil(tile_tokens));
    let cuts = (wanted.min(group)..=group).find(|cuts| group.is_multiple_of(*cuts)).unwrap_or(1);
    (tile_tokens, group / cuts)
}

struct Attention<'a> {
    cache: &'a KvCache,
    queries: Queries<'a>,
    scale: f32,
    kv_head: usize,
    /// Query heads to compute, all of `kv_head`. Row `r` is head `heads.start + r % heads.len()` of the
    /// tile's token `r / heads.len()`.
    heads: Range<usize>,
    /// These heads' columns of some tokens' rows.
    out: Tile<'a>,
}

/// What `R` rows carry from chunk to chunk.
struct Running<const R: usize> {
    max: [f32; R],
    sum: [Lanes; R],
    /// Unnormalised output, `[value_dim / 16]`; of a latent cache `[value_dim]`, sixteen sums per element.
    out: Vec<[Lanes; R]>,
}

impl Body for Attention<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let rows = self.out.rows().len() * self.heads.len();
        let mut row = 0;
        if S::WIDE {
            row = self.tiles::<S, 8>(simd, row, rows);
        }
        row = self.tiles::<S, 4>(simd, row, rows);
        row = self.tiles::<S, 2>(simd, row, rows);
        self.tiles::<S, 1>(simd, row, rows);
    }
}

impl Attention<'_> {
    /// Attends for the rows `row..end`, `R` at a time; returns the first row that was too few for a tile.
    #[inline(always)]
    fn tiles<S: Simd, const R: usize>(&mut self, simd: S, mut row: usize, end: usize) -> usize {
        while row + R <= end {
            self.tile::<S, R>(simd, row);
            row += R;
        }
        row
    }

    /// Token (in the grid of all rows) and query head of a row.
    #[inline(always)]
    fn row(&self, row: usize) -> (usize, usize) {
        let heads = self.heads.len();
        (self.out.rows().start + row / heads, self.heads.start + row % heads)
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize>(&mut self, simd: S, first: usize) {
        let key_dim = self.cache.shape().key_dim;
        // Ascending with the row; the positions that some row sees are one range.
        let seen: Within<R> = std::array::from_fn(|r| self.queries.seen(self.row(first + r).0));
        let query = self.load_queries::<R>(first);
        let query: [&[f32]; R] = std::array::from_fn(|r| &query[r * key_dim..][..key_dim]);
        let mut running = self.begin::<R>(first);
        for chunk in (seen[0].0 / CHUNK * CHUNK..seen[R - 1].1).step_by(CHUNK) {
            let within: Within<R> = std::array::from_fn(|r| {
                let clamped = |position: usize| position.clamp(chunk, chunk + CHUNK) - chunk;
                (clamped(seen[r].0), clamped(seen[r].1))
            });
            let mut weights = self.scores(simd, chunk, (within[0].0, within[R - 1].1), query);
            for r in 0..R {
                if within[r].0 == within[r].1 {
                    continue;
                }
                let rescale =
                    softmax_chunk(&mut weights[r], within[r], &mut running.max[r], &mut running.sum[r]);
                for out in &mut running.out {
                    out[r] = out[r].scale_add(rescale, Lanes::ZERO);
                }
            }
            if self.cache.is_latent() {
                self.add_latents(simd, chunk, within, &weights, &mut running.out);
            } else {
                self.add_values(simd, chunk, within, &weights, &mut running.out);
            }
        }
        self.finish(first, &running);
    }

    /// Before the first chunk. A sink is a first score whose value is zero.
    #[inline(always)]
    fn begin<const R: usize>(&self, first: usize) -> Running<R> {
        let value_dim = self.cache.shape().value_dim;
        let vectors = if self.cache.is_latent() { value_dim } else { value_dim / LANES };
        let mut running = Running {
            max: [f32::NEG_INFINITY; R],
            sum: [Lanes::ZERO; R],
            out: vec![[Lanes::ZERO; R]; vectors],
        };
        if let Some(sinks) = self.queries.sinks {
            for r in 0..R {
                let sink = sinks[self.row(first + r).1];
                if sink != f32::NEG_INFINITY {
                    running.max[r] = sink;
                    running.sum[r].0[0] = 1.0;
                }
            }
        }
        running
    }

    /// Behind the last chunk.
    #[inline(always)]
    fn finish<const R: usize>(&mut self, first: usize, running: &Running<R>) {
        let value_dim = self.cache.shape().value_dim;
        for r in 0..R {
            let total = running.sum[r].sum();
            let (token, head) = self.row(first + r);
            let out = &mut self.out.row(token)[(head - self.heads.start) * value_dim..][..value_dim];
            if self.cache.is_latent() {
                for (out, sums) in out.iter_mut().zip(&running.out) {
                    *out = sums[r].sum() / total;
                }
                continue;
            }
            for (part, sums) in out.chunks_exact_mut(LANES).zip(&running.out) {
                for (out, sum) in part.iter_mut().zip(sums[r].0) {
                    *out = sum / total;
                }
            }
        }
    }

    /// The rows' queries times `scale`: `[R, key_dim]`.
    #[inline(always)]
    fn load_queries<const R: usize>(&self, first: usize) -> Vec<f32> {
        let key_dim = self.cache.shape().key_dim;
        let mut query = Vec::with_capacity(R * key_dim);
        for row in first..first + R {
            let (token, head) = self.row(row);
            let row = &self.queries.rows[token * self.queries.stride + head * key_dim..][..key_dim];
            query.extend(row.iter().map(|element| element * self.scale));
        }
        query
    }

    /// Scores of the positions `span.0..span.1` behind `chunk`; elsewhere garbage.
    #[inline(always)]
    fn scores<S: Simd, const R: usize>(
        &self,
        simd: S,
        chunk: usize,
        span: (usize, usize),
        query: [&[f32]; R],
    ) -> [[Lanes; TILES]; R] {
        let mut scores = [[Lanes::ZERO; TILES]; R];
        for tile in span.0 / LANES..span.1.div_ceil(LANES) {
            let (block, offset) = self.locate(chunk + tile * LANES);
            let sums = dots(simd, self.cache.key_tile(block, self.kv_head, offset), query);
            for (scores, sums) in scores.iter_mut().zip(sums) {
                scores[tile] = sums;
            }
        }
        scores
    }

    /// Adds to each row `r` the weighted values of its positions `within[r]` behind `chunk`.
    #[inline(always)]
    fn add_values<S: Simd, const R: usize>(
        &self,
        simd: S,
        chunk: usize,
        within: Within<R>,
        weights: &[[Lanes; TILES]; R],
        out: &mut [[Lanes; R]],
    ) {
        // Tiles that all rows see whole.
        let common = within[R - 1].0.div_ceil(LANES)..within[0].1 / LANES;
        for tile in within[0].0 / LANES..within[R - 1].1.div_ceil(LANES) {
            let (block, offset) = self.locate(chunk + tile * LANES);
            let values = self.cache.value_tile(block, self.kv_head, offset);
            if common.contains(&tile) {
                let weights: [&[f32; LANES]; R] = std::array::from_fn(|r| &weights[r][tile].0);
                add_whole_value_tile(simd, values, weights, out);
                continue;
            }
            let clamped = |position: usize| position.saturating_sub(tile * LANES).min(LANES);
            let within = within.map(|(begin, end)| (clamped(begin), clamped(end)));
            let weights: [&[f32; LANES]; R] = std::array::from_fn(|r| &weights[r][tile].0);
            add_value_tile(simd, values, within, weights, out);
        }
    }

    /// [`Attention::add_values`] for a latent cache.
    #[inline(always)]
    fn add_latents<S: Simd, const R: usize>(
        &self,
        simd: S,
        chunk: usize,
        within: Within<R>,
        weights: &[[Lanes; TILES]; R],
        out: &mut [[Lanes; R]],
    ) {
        let (first, last) = (within[0].0 / LANES, within[R - 1].1.div_ceil(LANES));
        let mut tiles: [&[Lanes]; TILES] = [&[]; TILES];
        for (tile, latents) in (first..last).zip(&mut tiles[first..]) {
            let (block, offset) = self.locate(chunk + tile * LANES);
            *latents = self.cache.key_tile(block, self.kv_head, offset);
        }
        add_latent_chunk(simd, &tiles[first..last], first, within, weights, out);
    }

    #[inline(always)]
    fn locate(&self, position: usize) -> (u32, usize) {
        let block_size = self.cache.shape().block_size;
        (self.queries.blocks[position / block_size], position % block_size)
    }
}

#[cfg(test)]
mod tests;
