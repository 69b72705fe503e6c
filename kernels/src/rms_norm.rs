//! RMSNorm (arXiv 1910.07467): `out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]`, per row.
//!
//! `x` is `[rows, width]` row-major, `weight` `[width]`. One row is never split, and its sum of squares
//! always runs in the same sixteen partial sums, so a row's result is independent of the rows beside it.

use crate::compute::Compute;
use crate::grid::Grid;
use crate::heads::Heads;
use crate::isa::Body;
use crate::lanes::{LANES, Lanes};
use crate::simd::Simd;

/// What one element takes one thread, in nanoseconds: decides who computes, nothing else.
const NS_PER_ELEMENT: f64 = 0.2;

/// The definition, in float64.
pub fn oracle(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks(weight.len()) {
        let squares: f64 = row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        let scale = 1.0 / (squares / row.len() as f64 + f64::from(eps)).sqrt();
        out.extend(row.iter().zip(weight).map(|(v, w)| f64::from(*v) * scale * f64::from(*w)));
    }
    out
}

/// Normalises the rows of `x` into `out` (same shape).
///
/// # Panics
/// If `x` is not whole rows of `weight`'s width, or `out` has another length than `x`.
pub fn cpu(compute: &Compute, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    assert!(x.len() == out.len() && x.len().is_multiple_of(width), "rms_norm: shapes disagree");
    let tile_rows = compute.tile_rows(x.len() / width, NS_PER_ELEMENT * width as f64);
    compute.tiles(Grid::new(out, width, tile_rows, width), |mut tile| {
        let at = tile.rows().start * width;
        let out = tile.whole_rows();
        out.copy_from_slice(&x[at..][..out.len()]);
        let heads = Heads { stride: width, first: 0, count: 1, pitch: width };
        compute.isa().run(RmsNorm { rows: out, heads, weight, eps });
    });
}

/// Normalises heads where they are: the first `weight.len()` elements of each of `heads` in the rows of `x`
/// `[rows, heads.stride]`.
///
/// # Panics
/// If `x` is not whole rows, or the heads do not fit them.
pub fn cpu_heads(compute: &Compute, x: &mut [f32], heads: Heads, weight: &[f32], eps: f32) {
    let stride = heads.stride;
    assert!(x.len().is_multiple_of(stride) && heads.fit(weight.len()), "rms_norm: shapes disagree");
    let touched = (heads.count * weight.len()) as f64;
    let tile_rows = compute.tile_rows(x.len() / stride, NS_PER_ELEMENT * touched);
    compute.tiles(Grid::new(x, stride, tile_rows, stride), |mut tile| {
        compute.isa().run(RmsNorm { rows: tile.whole_rows(), heads, weight, eps });
    });
}

struct RmsNorm<'a> {
    rows: &'a mut [f32],
    heads: Heads,
    weight: &'a [f32],
    eps: f32,
}

impl Body for RmsNorm<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for row in self.rows.chunks_exact_mut(self.heads.stride) {
            for head in self.heads.of(row, self.weight.len()) {
                let scale = 1.0 / (sum_of_squares(head) / head.len() as f32 + self.eps).sqrt();
                for (value, weight) in head.iter_mut().zip(self.weight) {
                    *value = *value * scale * weight;
                }
            }
        }
    }
}

#[inline(always)]
fn sum_of_squares(row: &[f32]) -> f32 {
    let mut sums = Lanes::ZERO;
    let whole = row.chunks_exact(LANES);
    let rest = Lanes::load_padded(whole.remainder());
    for part in whole {
        let part = Lanes::load(part);
        sums = part.mul_add(part, sums);
    }
    rest.mul_add(rest, sums).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{assert_close, everywhere, same_bits, values};

    #[test]
    fn agrees_with_the_oracle_everywhere() {
        for width in [1, 2, 15, 16, 17, 33, 64, 1000] {
            for rows in [0, 1, 3] {
                let (x, weight) = (values(width as u64, rows * width), values(7, width));
                let out = everywhere(|compute| {
                    let mut out = vec![f32::NAN; x.len()];
                    cpu(compute, &x, &weight, 1e-6, &mut out);
                    out
                });
                let exact = oracle(&x, &weight, 1e-6);
                let scale: Vec<f64> = exact.iter().map(|v| v.abs() + 1e-30).collect();
                assert_close(&out, &exact, &scale, 5e-7);
            }
        }
    }

    #[test]
    fn a_row_of_zeros_and_a_row_of_outliers_stay_finite() {
        for fill in [0.0, 1e15, -1e-25] {
            let mut x = vec![fill; 20];
            let heads = Heads { stride: 20, first: 0, count: 1, pitch: 20 };
            cpu_heads(&Compute::single(), &mut x, heads, &[2.0; 20], 1e-5);
            assert!(x.iter().all(|v| v.is_finite()), "{x:?}");
        }
    }

    #[test]
    fn a_row_is_independent_of_its_neighbours() {
        let (x, weight) = (values(3, 5 * 40), values(4, 40));
        let (mut all, mut one) = (vec![0.0; 200], vec![0.0; 40]);
        cpu(&Compute::single(), &x, &weight, 1e-6, &mut all);
        cpu(&Compute::single(), &x[80..120], &weight, 1e-6, &mut one);
        assert!(same_bits(&all[80..120], &one));
    }

    #[test]
    fn heads_are_normalised_and_nothing_else_is_touched() {
        let heads = Heads { stride: 50, first: 5, count: 2, pitch: 20 };
        let (x, weight) = (values(5, 3 * 50), values(6, 17));
        let out = everywhere(|compute| {
            let mut out = x.clone();
            cpu_heads(compute, &mut out, heads, &weight, 1e-6);
            out
        });
        let mut exact = x.clone();
        for head in [5, 25, 55, 75, 105, 125].map(|at| at..at + 17) {
            cpu(&Compute::single(), &x[head.clone()], &weight, 1e-6, &mut exact[head]);
        }
        assert!(same_bits(&out, &exact));
    }
}
