//! Operations that map elements to elements: the gated activations of the feed-forward part, and addition.

use crate::compute::Compute;
use crate::grid::Grid;
use crate::isa::Body;
use crate::scalar::{exp, silu};
use crate::simd::Simd;

/// What one element takes one thread, in nanoseconds: decides who computes, nothing else.
const NS_PER_GATE: f64 = 0.6;
const NS_PER_SUM: f64 = 0.1;

/// SwiGLU's gate (arXiv 2002.05202) in float64: row `r` of `gate_up` is `[gate | up]`, each `width` long;
/// `out[r] = gate / (1 + e^-gate) * up`.
pub fn silu_mul_oracle(gate_up: &[f32], width: usize) -> Vec<f64> {
    let mut out = Vec::with_capacity(gate_up.len() / 2);
    for row in gate_up.chunks(2 * width) {
        for (gate, up) in row[..width].iter().zip(&row[width..]) {
            let gate = f64::from(*gate);
            out.push(gate / (1.0 + (-gate).exp()) * f64::from(*up));
        }
    }
    out
}

/// The gate: `gate_up` `[rows, 2 * width]` to `out` `[rows, width]`.
///
/// # Panics
/// If `gate_up` is not twice as long as `out`, or `out` not whole rows.
pub fn silu_mul(compute: &Compute, gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert!(gate_up.len() == 2 * out.len() && out.len().is_multiple_of(width), "silu_mul: shapes disagree");
    let tile_rows = compute.tile_rows(out.len() / width, NS_PER_GATE * width as f64);
    compute.tiles(Grid::new(out, width, tile_rows, width), |mut tile| {
        let gate_up = &gate_up[tile.rows().start * 2 * width..tile.rows().end * 2 * width];
        compute.isa().run(SiluMul { gate_up, width, out: tile.whole_rows() });
    });
}

struct SiluMul<'a> {
    gate_up: &'a [f32],
    width: usize,
    out: &'a mut [f32],
}

impl Body for SiluMul<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (row, out) in self.gate_up.chunks_exact(2 * self.width).zip(self.out.chunks_exact_mut(self.width))
        {
            let (gate, up) = row.split_at(self.width);
            for ((gate, up), out) in gate.iter().zip(up).zip(out) {
                *out = silu(*gate) * up;
            }
        }
    }
}

/// The constants of gpt-oss's gate, `(up + 1) * gate * sigmoid(alpha * gate)` of clamped inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClampedGate {
    /// Steepness of the sigmoid: 1.702.
    pub alpha: f32,
    /// Largest gate, and largest magnitude of what it gates: 7.
    pub limit: f32,
}

/// [`clamped_gate_mul`] in float64, for tests to compare with; the result is a new vector.
pub fn clamped_gate_mul_oracle(gate_up: &[f32], width: usize, by: ClampedGate) -> Vec<f64> {
    let (alpha, limit) = (f64::from(by.alpha), f64::from(by.limit));
    let mut out = Vec::with_capacity(gate_up.len() / 2);
    for row in gate_up.chunks(2 * width) {
        for (gate, up) in row[..width].iter().zip(&row[width..]) {
            let gate = f64::from(*gate).min(limit);
            let up = f64::from(*up).clamp(-limit, limit);
            out.push((up + 1.0) * gate / (1.0 + (-alpha * gate).exp()));
        }
    }
    out
}

/// gpt-oss's gated activation (`GptOssExperts` in transformers 5.23): row `r` of `gate_up` is `[gate | up]`,
/// each `width` long; `out[r] = (up + 1) * gate / (1 + e^(-alpha gate))` with `gate` at most `limit` and `up`
/// within `-limit..=limit`.
///
/// # Panics
/// If `gate_up` is not twice as long as `out`, or `out` not whole rows.
pub fn clamped_gate_mul(compute: &Compute, gate_up: &[f32], width: usize, by: ClampedGate, out: &mut [f32]) {
    assert!(
        gate_up.len() == 2 * out.len() && out.len().is_multiple_of(width),
        "clamped_gate_mul: shapes disagree"
    );
    let tile_rows = compute.tile_rows(out.len() / width, NS_PER_GATE * width as f64);
    compute.tiles(Grid::new(out, width, tile_rows, width), |mut tile| {
        let gate_up = &gate_up[tile.rows().start * 2 * width..tile.rows().end * 2 * width];
        compute.isa().run(ClampedGateMul { gate_up, width, by, out: tile.whole_rows() });
    });
}

struct ClampedGateMul<'a> {
    gate_up: &'a [f32],
    width: usize,
    by: ClampedGate,
    out: &'a mut [f32],
}

impl Body for ClampedGateMul<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let ClampedGate { alpha, limit } = self.by;
        for (row, out) in self.gate_up.chunks_exact(2 * self.width).zip(self.out.chunks_exact_mut(self.width))
        {
            let (gate, up) = row.split_at(self.width);
            for ((gate, up), out) in gate.iter().zip(up).zip(out) {
                // Comparisons that a NaN passes through.
                let gate = if *gate > limit { limit } else { *gate };
                let up = if *up > limit { limit } else { *up };
                let up = if up < -limit { -limit } else { up };
                *out = (up + 1.0) * (gate / (1.0 + exp(-alpha * gate)));
            }
        }
    }
}

/// `x += y`, element by element: the residual connection.
///
/// # Panics
/// If the lengths differ.
pub fn add_assign(compute: &Compute, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "add_assign: lengths differ");
    let tile_rows = compute.tile_rows(x.len(), NS_PER_SUM);
    compute.tiles(Grid::new(x, 1, tile_rows, 1), |mut tile| {
        let y = &y[tile.rows()];
        compute.isa().run(Add { x: tile.whole_rows(), y });
    });
}

/// Adds `bias` `[width]` to every row of `x`.
///
/// # Panics
/// If `x` is not whole rows.
pub fn add_bias(compute: &Compute, x: &mut [f32], bias: &[f32]) {
    let width = bias.len();
    assert!(x.len().is_multiple_of(width), "add_bias: shapes disagree");
    let tile_rows = compute.tile_rows(x.len() / width, NS_PER_SUM * width as f64);
    compute.tiles(Grid::new(x, width, tile_rows, width), |mut tile| {
        for row in tile.whole_rows().chunks_exact_mut(width) {
            compute.isa().run(Add { x: row, y: bias });
        }
    });
}

struct Add<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
}

impl Body for Add<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x += y;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{assert_close, everywhere, values};

    #[test]
    fn silu_mul_agrees_with_the_oracle_everywhere() {
        for (rows, width) in [(0, 4), (1, 1), (3, 7), (2, 16), (5, 31), (2, 64)] {
            let gate_up = values(width as u64, rows * width * 2);
            let out = everywhere(|compute| {
                let mut out = vec![f32::NAN; rows * width];
                silu_mul(compute, &gate_up, width, &mut out);
                out
            });
            let exact = silu_mul_oracle(&gate_up, width);
            // exp is clamped at e^88, which shows only in results below 1e-36.
            let scale: Vec<f64> = exact.iter().map(|v| v.abs() + 1e-25).collect();
            assert_close(&out, &exact, &scale, 4e-7);
        }
    }

    #[test]
    fn the_clamped_gate_agrees_with_the_oracle_everywhere() {
        let by = ClampedGate { alpha: 1.702, limit: 7.0 };
        for (rows, width) in [(0, 4), (1, 1), (3, 7), (2, 16), (5, 31), (9, 64)] {
            // Outliers of order 100 pass the limit on either side.
            let gate_up = values(width as u64, rows * width * 2);
            let out = everywhere(|compute| {
                let mut out = vec![f32::NAN; rows * width];
                clamped_gate_mul(compute, &gate_up, width, by, &mut out);
                out
            });
            let exact = clamped_gate_mul_oracle(&gate_up, width, by);
            // Roundings of `up + 1` show where it is small; exp is clamped at e^88.
            let scale: Vec<f64> = exact.iter().map(|v| v.abs() + 7.0).collect();
            assert_close(&out, &exact, &scale, 2e-7);
        }
        let mut out = [0.0];
        clamped_gate_mul(&Compute::single(), &[f32::NAN, 1.0], 1, by, &mut out);
        assert!(out[0].is_nan());
    }

    #[test]
    fn a_bias_is_added_to_every_row() {
        let mut x = [1.0, 2.0, 3.0, 4.0];
        add_bias(&Compute::single(), &mut x, &[10.0, 20.0]);
        assert_eq!(x, [11.0, 22.0, 13.0, 24.0]);
    }
}
