//! Operations that map elements to elements: the gated activation of the feed-forward part, and addition.

use crate::isa::{Body, Isa};
use crate::scalar::silu;
use crate::simd::Simd;

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
pub fn silu_mul(isa: Isa, gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert!(gate_up.len() == 2 * out.len() && out.len().is_multiple_of(width), "silu_mul: shapes disagree");
    isa.run(SiluMul { gate_up, width, out });
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

/// `x += y`, element by element: the residual connection.
///
/// # Panics
/// If the lengths differ.
pub fn add_assign(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "add_assign: lengths differ");
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Adds `bias` `[width]` to every row of `x`.
///
/// # Panics
/// If `x` is not whole rows.
pub fn add_bias(x: &mut [f32], bias: &[f32]) {
    assert!(x.len().is_multiple_of(bias.len()), "add_bias: shapes disagree");
    for row in x.chunks_exact_mut(bias.len()) {
        add_assign(row, bias);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{assert_close, on_every_isa, values};

    #[test]
    fn silu_mul_agrees_with_the_oracle_on_every_isa() {
        for (rows, width) in [(0, 4), (1, 1), (3, 7), (2, 16), (5, 31), (2, 64)] {
            let gate_up = values(width as u64, rows * width * 2);
            let out = on_every_isa(|isa| {
                let mut out = vec![f32::NAN; rows * width];
                silu_mul(isa, &gate_up, width, &mut out);
                out
            });
            let exact = silu_mul_oracle(&gate_up, width);
            // exp is clamped at e^88, which shows only in results below 1e-36.
            let scale: Vec<f64> = exact.iter().map(|v| v.abs() + 1e-25).collect();
            assert_close(&out, &exact, &scale, 4e-7);
        }
    }

    #[test]
    fn a_bias_is_added_to_every_row() {
        let mut x = [1.0, 2.0, 3.0, 4.0];
        add_bias(&mut x, &[10.0, 20.0]);
        assert_eq!(x, [11.0, 22.0, 13.0, 24.0]);
    }
}
