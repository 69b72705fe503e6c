//! The inner loops of attention: what `R` rows do with one chunk of positions. Which positions these are, and
//! where they lie, is the parent's business.

use super::TILES;
use crate::lanes::{LANES, Lanes};
use crate::scalar::exp;
use crate::simd::Simd;

/// For each row the first position it sees, and the one behind its last.
pub(super) type Within<const R: usize> = [(usize, usize); R];

/// Each query's product with sixteen keys; the sums stay in registers.
#[inline(always)]
pub(super) fn dots<S: Simd, const R: usize>(simd: S, keys: &[Lanes], query: [&[f32]; R]) -> [Lanes; R] {
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

/// Adds to each row `r` those of sixteen weighted values that it sees, `within[r]`, ascending. Rows ascend in
/// position, so what the last row's begin and the first row's end enclose is common to all; the few positions
/// around that are taken row by row, because a weight of zero would not be the same as no term (`0 * inf`,
/// `-0 + 0`).
#[inline(always)]
pub(super) fn add_value_tile<S: Simd, const R: usize>(
    simd: S,
    values: &[Lanes],
    within: Within<R>,
    weights: [&[f32; LANES]; R],
    out: &mut [[Lanes; R]],
) {
    let parts = out.len();
    let begin = within[R - 1].0;
    let end = within[0].1.max(begin);
    for (part, out) in out.iter_mut().enumerate() {
        let mut sums = [simd.zero(); R];
        for r in 0..R {
            sums[r] = simd.load(&out[r].0);
        }
        // Without a window nothing lies before `begin`: one branch instead of a loop per row.
        if begin > 0 {
            for r in 0..R {
                for position in within[r].0..within[r].1.min(begin) {
                    let value = simd.load(&values[position * parts + part].0);
                    sums[r] = simd.mul_add(value, simd.splat(weights[r][position]), sums[r]);
                }
            }
        }
        for position in begin..end {
            let value = simd.load(&values[position * parts + part].0);
            for r in 0..R {
                sums[r] = simd.mul_add(value, simd.splat(weights[r][position]), sums[r]);
            }
        }
        for r in 0..R {
            for position in end..within[r].1 {
                let value = simd.load(&values[position * parts + part].0);
                sums[r] = simd.mul_add(value, simd.splat(weights[r][position]), sums[r]);
            }
            simd.store(sums[r], &mut out[r].0);
        }
    }
}

/// [`add_value_tile`] for rows that all see all sixteen positions.
#[inline(always)]
pub(super) fn add_whole_value_tile<S: Simd, const R: usize>(
    simd: S,
    values: &[Lanes],
    weights: [&[f32; LANES]; R],
    out: &mut [[Lanes; R]],
) {
    let parts = out.len();
    for (part, out) in out.iter_mut().enumerate() {
        let mut sums = [simd.zero(); R];
        for r in 0..R {
            sums[r] = simd.load(&out[r].0);
        }
        for position in 0..LANES {
            let value = simd.load(&values[position * parts + part].0);
            for r in 0..R {
                sums[r] = simd.mul_add(value, simd.splat(weights[r][position]), sums[r]);
            }
        }
        for r in 0..R {
            simd.store(sums[r], &mut out[r].0);
        }
    }
}

/// Turns one row's scores of the positions `within` a chunk, at least one, into weights `e^(score - max)`;
/// updates the running maximum and the sixteen running sums. Returns what earlier sums were scaled by.
#[inline(always)]
pub(super) fn softmax_chunk(
    scores: &mut [Lanes; TILES],
    within: (usize, usize),
    max: &mut f32,
    sum: &mut Lanes,
) -> f32 {
    let (begin, end) = within;
    let (first, last) = (begin / LANES, (end - 1) / LANES);
    if !begin.is_multiple_of(LANES) {
        for lane in 0..LANES {
            let real = lane >= begin % LANES;
            scores[first].0[lane] = if real { scores[first].0[lane] } else { f32::NEG_INFINITY };
        }
    }
    if !end.is_multiple_of(LANES) {
        for lane in 0..LANES {
            let real = lane < end % LANES;
            scores[last].0[lane] = if real { scores[last].0[lane] } else { f32::NEG_INFINITY };
        }
    }
    let weights = &mut scores[first..=last];
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

/// [`add_value_tile`] for a latent cache, a whole chunk at once. `tiles` are the chunk's latents, sixteen
/// positions side by side, from tile `first` on; `out` `[value_dim]` keeps sixteen sums per element, one for
/// each lane, so that nothing is transposed.
#[inline(always)]
pub(super) fn add_latent_chunk<S: Simd, const R: usize>(
    simd: S,
    tiles: &[&[Lanes]],
    first: usize,
    within: Within<R>,
    weights: &[[Lanes; TILES]; R],
    out: &mut [[Lanes; R]],
) {
    // Tiles that all rows see whole; around them lane by lane, for `add_value_tile`'s reason.
    let begin = within[R - 1].0.div_ceil(LANES).clamp(first, first + tiles.len());
    let end = (within[0].1 / LANES).clamp(begin, first + tiles.len());
    for (tile, latents) in (first..begin).zip(tiles) {
        for (latent, out) in latents.iter().zip(&mut *out) {
            add_seen_lanes(latent, tile, within, weights, out);
        }
    }
    let mut tile = begin;
    while tile + TILES_TOGETHER <= end {
        add_whole_tiles::<S, R, TILES_TOGETHER>(simd, &tiles[tile - first..], tile, weights, out);
        tile += TILES_TOGETHER;
    }
    while tile < end {
        add_whole_tiles::<S, R, 1>(simd, &tiles[tile - first..], tile, weights, out);
        tile += 1;
    }
    for (tile, latents) in (end..).zip(&tiles[end - first..]) {
        for (latent, out) in latents.iter().zip(&mut *out) {
            add_seen_lanes(latent, tile, within, weights, out);
        }
    }
}

/// Tiles whose products are added between a load and a store of a sum: more save memory traffic, until tiles
/// of a power of two apart crowd one another out of the first-level cache.
const TILES_TOGETHER: usize = 4;

/// Adds the first `T` of `tiles`, the chunk's tiles from number `tile` on, which all rows see whole.
#[inline(always)]
fn add_whole_tiles<S: Simd, const R: usize, const T: usize>(
    simd: S,
    tiles: &[&[Lanes]],
    tile: usize,
    weights: &[[Lanes; TILES]; R],
    out: &mut [[Lanes; R]],
) {
    let tiles: [&[Lanes]; T] = std::array::from_fn(|t| &tiles[t][..out.len()]);
    let weights: [&[Lanes]; R] = std::array::from_fn(|r| &weights[r][tile..tile + T]);
    for (d, out) in out.iter_mut().enumerate() {
        let mut sums = [simd.zero(); R];
        for r in 0..R {
            sums[r] = simd.load(&out[r].0);
        }
        for t in 0..T {
            let latent = simd.load(&tiles[t][d].0);
            for r in 0..R {
                sums[r] = simd.mul_add(latent, simd.load(&weights[r][t].0), sums[r]);
            }
        }
        for r in 0..R {
            simd.store(sums[r], &mut out[r].0);
        }
    }
}

#[inline(always)]
fn add_seen_lanes<const R: usize>(
    latent: &Lanes,
    tile: usize,
    within: Within<R>,
    weights: &[[Lanes; TILES]; R],
    out: &mut [Lanes; R],
) {
    for r in 0..R {
        for lane in 0..LANES {
            let position = tile * LANES + lane;
            let added = latent.0[lane].mul_add(weights[r][tile].0[lane], out[r].0[lane]);
            let seen = within[r].0 <= position && position < within[r].1;
            out[r].0[lane] = if seen { added } else { out[r].0[lane] };
        }
    }
}
