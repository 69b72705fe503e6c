//! Rotary position embedding (arXiv 2104.09864): the two elements of each pair of a head turn by the angle
//! `position * inv_freq[pair]`. [`Pairing`] says which elements are pairs; [`Heads`], which part of a head
//! turns.
//!
//! As in those implementations the angle is rounded to f32 before its sine is taken (a checkpoint was trained
//! with that rounding); the sine itself is exact to f32.

mod scaling;

pub use scaling::RopeScaling;

use crate::compute::Compute;
use crate::grid::Grid;
use crate::heads::Heads;
use crate::isa::Body;
use crate::scalar::sin_cos;
use crate::simd::Simd;

/// What one pair takes one thread, in nanoseconds: decides who computes, nothing else.
const NS_PER_PAIR: f64 = 0.2;

/// Which elements of a head's rotated part turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// `i` with `i + half`: Hugging Face's Llama, Qwen, gpt-oss.
    Halves,
    /// `2i` with `2i + 1`: DeepSeek (`rope_interleave`).
    Interleaved,
}

/// The frequencies of one model.
#[derive(Debug, Clone)]
pub struct Rope {
    inv_freq: Vec<f32>,
    /// Factor of every cosine and sine.
    attention_factor: f32,
}

impl Rope {
    /// For heads (or parts of heads) of `dim` rotated elements: frequencies `theta^(-2i / dim)` for `i` in
    /// `0..dim / 2`, then scaled.
    pub fn new(dim: usize, theta: f64, scaling: RopeScaling) -> Self {
        let inv_freq = (0..dim / 2).map(|pair| scaling.frequency(pair, dim, theta) as f32).collect();
        Self { inv_freq, attention_factor: scaling.attention_factor() as f32 }
    }

    /// Radians per position, `[dim / 2]`.
    pub fn inv_freq(&self) -> &[f32] {
        &self.inv_freq
    }

    /// What [`Rope::angles`] multiplies cosines and sines by: YaRN's attention factor, else 1.
    pub fn attention_factor(&self) -> f32 {
        self.attention_factor
    }

    /// Writes the cosines and sines of one position's angles, each `[dim / 2]`.
    ///
    /// # Panics
    /// If a slice has another length.
    pub fn angles(&self, compute: &Compute, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        assert!(cos.len() == self.inv_freq.len() && sin.len() == cos.len(), "rope: shapes disagree");
        compute.isa().run(Angles { rope: self, position: position as f32, cos, sin });
    }
}

struct Angles<'a> {
    rope: &'a Rope,
    position: f32,
    cos: &'a mut [f32],
    sin: &'a mut [f32],
}

impl Body for Angles<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for ((inv_freq, cos), sin) in self.rope.inv_freq.iter().zip(self.cos).zip(self.sin) {
            let (s, c) = sin_cos(f64::from(self.position * inv_freq));
            *cos = c as f32 * self.rope.attention_factor;
            *sin = s as f32 * self.rope.attention_factor;
        }
    }
}

/// The definition, in float64: rotates heads of `2 * cos.len()` elements, `x` `[heads, 2 * cos.len()]`.
pub fn oracle(x: &[f32], pairing: Pairing, cos: &[f32], sin: &[f32]) -> Vec<f64> {
    let half = cos.len();
    let mut out: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
    for (head, out) in x.chunks(2 * half).zip(out.chunks_mut(2 * half)) {
        for i in 0..half {
            let (first, second) = match pairing {
                Pairing::Halves => (i, i + half),
                Pairing::Interleaved => (2 * i, 2 * i + 1),
            };
            let (a, b) = (f64::from(head[first]), f64::from(head[second]));
            let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
            out[first] = a * c - b * s;
            out[second] = b * c + a * s;
        }
    }
    out
}

/// Rotates heads where they are: the first `2 * half` elements of each of `heads` in the rows of `x`
/// `[rows, heads.stride]`. Row `r` turns by `cos` and `sin` `[rows, half]`, row `r`.
///
/// # Panics
/// If shapes disagree, or the heads do not fit their rows.
pub fn cpu(compute: &Compute, x: &mut [f32], heads: Heads, pairing: Pairing, cos: &[f32], sin: &[f32]) {
    let stride = heads.stride;
    let rows = x.len() / stride;
    let half = cos.len().checked_div(rows).unwrap_or(0);
    assert!(
        x.len() == rows * stride && cos.len() == rows * half && sin.len() == cos.len() && heads.fit(2 * half),
        "rope: shapes disagree"
    );
    if half == 0 {
        return;
    }
    let tile_rows = compute.tile_rows(rows, NS_PER_PAIR * (heads.count * half) as f64);
    compute.tiles(Grid::new(x, stride, tile_rows, stride), |mut tile| {
        let angles = tile.rows().start * half..tile.rows().end * half;
        let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
        compute.isa().run(Rotate { rows: tile.whole_rows(), heads, pairing, half, cos, sin });
    });
}

struct Rotate<'a> {
    rows: &'a mut [f32],
    heads: Heads,
    pairing: Pairing,
    half: usize,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Body for Rotate<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let angles = self.cos.chunks_exact(self.half).zip(self.sin.chunks_exact(self.half));
        for (row, (cos, sin)) in self.rows.chunks_exact_mut(self.heads.stride).zip(angles) {
            for head in self.heads.of(row, 2 * self.half) {
                match self.pairing {
                    Pairing::Halves => rotate_halves(head, cos, sin),
                    Pairing::Interleaved => rotate_interleaved(head, cos, sin),
                }
            }
        }
    }
}

#[inline(always)]
fn rotate_halves(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = turn(*a, *b, *c, *s);
    }
}

#[inline(always)]
fn rotate_interleaved(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    for ((pair, c), s) in head.chunks_exact_mut(2).zip(cos).zip(sin) {
        (pair[0], pair[1]) = turn(pair[0], pair[1], *c, *s);
    }
}

#[inline(always)]
fn turn(x: f32, y: f32, cos: f32, sin: f32) -> (f32, f32) {
    (x.mul_add(cos, -(y * sin)), y.mul_add(cos, x * sin))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{assert_close, everywhere, values};

    fn angles(compute: &Compute, dim: usize, positions: std::ops::Range<usize>) -> (Vec<f32>, Vec<f32>) {
        let rope = Rope::new(dim, 10_000.0, RopeScaling::None);
        let half = dim / 2;
        let (mut cos, mut sin) = (vec![0.0; positions.len() * half], vec![0.0; positions.len() * half]);
        for (row, position) in positions.enumerate() {
            let at = row * half..(row + 1) * half;
            rope.angles(compute, position, &mut cos[at.clone()], &mut sin[at]);
        }
        (cos, sin)
    }

    #[test]
    fn rotation_agrees_with_the_oracle_everywhere() {
        for pairing in [Pairing::Halves, Pairing::Interleaved] {
            for (rows, count, dim) in [(0, 2, 16), (3, 0, 4), (1, 1, 2), (3, 3, 6), (2, 4, 16), (600, 5, 80)]
            {
                // Heads with two elements before and one behind the rotated part, in rows with a rest.
                let heads = Heads { stride: count * (dim + 3) + 7, first: 2, count, pitch: dim + 3 };
                let x = values(dim as u64, rows * heads.stride);
                let (cos, sin) = angles(&Compute::single(), dim, 31_007..31_007 + rows);
                let out = everywhere(|compute| {
                    let mut out = x.clone();
                    cpu(compute, &mut out, heads, pairing, &cos, &sin);
                    out
                });
                let mut exact: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
                let mut scale = vec![0.0; x.len()];
                for row in 0..rows {
                    let turns = row * dim / 2..(row + 1) * dim / 2;
                    for head in 0..count {
                        let at = row * heads.stride + heads.first + head * heads.pitch;
                        let at = at..at + dim;
                        let turned =
                            oracle(&x[at.clone()], pairing, &cos[turns.clone()], &sin[turns.clone()]);
                        exact[at.clone()].copy_from_slice(&turned);
                        scale[at.clone()]
                            .fill(x[at].iter().fold(0.0, |max, v| f64::max(max, v.abs().into())));
                    }
                }
                assert_close(&out, &exact, &scale, 4e-7);
            }
        }
    }

    #[test]
    fn angles_are_those_of_the_definition_everywhere() {
        let yarn = RopeScaling::Yarn {
            factor: 32.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position: 4096.0,
            truncate: false,
            attention_factor: 1.25,
        };
        for (scaling, factor) in [(RopeScaling::None, 1.0), (yarn, 1.25)] {
            let rope = Rope::new(64, 500_000.0, scaling);
            for position in [0, 1, 77, 4095, 131_071] {
                let both = everywhere(|compute| {
                    let mut both = vec![0.0; 64];
                    let (cos, sin) = both.split_at_mut(32);
                    rope.angles(compute, position, cos, sin);
                    both
                });
                for i in 0..32 {
                    let angle = f64::from(position as f32 * rope.inv_freq()[i]);
                    assert!((f64::from(both[i]) - factor * angle.cos()).abs() < 2e-7);
                    assert!((f64::from(both[32 + i]) - factor * angle.sin()).abs() < 2e-7);
                }
            }
        }
    }
}
