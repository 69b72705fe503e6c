//! RMSNorm (arXiv 1910.07467): `out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]`, per row.
//!
//! `x` is `[rows, width]` row-major, `weight` `[width]`. One row is never split, and its sum of squares
//! always runs in the same sixteen partial sums, so a row's result is independent of the rows beside it.

use crate::isa::{Body, Isa};
use crate::lanes::{LANES, Lanes};
use crate::simd::Simd;

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
pub fn cpu(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == out.len() && x.len().is_multiple_of(weight.len()), "rms_norm: shapes disagree");
    out.copy_from_slice(x);
    isa.run(RmsNorm { x: out, weight, eps });
}

/// Normalises the rows of `x` where they are: a query's or key's heads, each a row.
///
/// # Panics
/// If `x` is not whole rows of `weight`'s width.
pub fn cpu_in_place(isa: Isa, x: &mut [f32], weight: &[f32], eps: f32) {
    assert!(x.len().is_multiple_of(weight.len()), "rms_norm: shapes disagree");
    isa.run(RmsNorm { x, weight, eps });
}

struct RmsNorm<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Body for RmsNorm<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for row in self.x.chunks_exact_mut(self.weight.len()) {
            let scale = 1.0 / (sum_of_squares(row) / row.len() as f32 + self.eps).sqrt();
            for (value, weight) in row.iter_mut().zip(self.weight) {
                *value = *value * scale * weight;
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
    use crate::check::{assert_close, on_every_isa, same_bits, values};

    #[test]
    fn agrees_with_the_oracle_on_every_isa() {
        for width in [1, 2, 15, 16, 17, 33, 64, 1000] {
            for rows in [0, 1, 3] {
                let (x, weight) = (values(width as u64, rows * width), values(7, width));
                let out = on_every_isa(|isa| {
                    let mut out = vec![f32::NAN; x.len()];
                    cpu(isa, &x, &weight, 1e-6, &mut out);
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
            cpu_in_place(Isa::detect(), &mut x, &[2.0; 20], 1e-5);
            assert!(x.iter().all(|v| v.is_finite()), "{x:?}");
        }
    }

    #[test]
    fn a_row_is_independent_of_its_neighbours() {
        let (x, weight) = (values(3, 5 * 40), values(4, 40));
        let (mut all, mut one) = (vec![0.0; 200], vec![0.0; 40]);
        cpu(Isa::detect(), &x, &weight, 1e-6, &mut all);
        cpu(Isa::detect(), &x[80..120], &weight, 1e-6, &mut one);
        assert!(same_bits(&all[80..120], &one));
    }
}
