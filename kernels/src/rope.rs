//! Rotary position embedding (arXiv 2104.09864) in the half-rotation form of Hugging Face's Llama and Qwen:
//! element `i` of a head turns with element `i + head_dim / 2` by the angle `position * inv_freq[i]`.
//!
//! As in those implementations the angle is rounded to f32 before its sine is taken (a checkpoint was trained
//! with that rounding); the sine itself is exact to f32.

use std::f64::consts::TAU;

use crate::isa::{Body, Isa};
use crate::scalar::sin_cos;
use crate::simd::Simd;

/// How the base frequencies are stretched for contexts longer than the model was first trained on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3's: long wavelengths divided by `factor`, short ones kept, a linear blend between.
    Llama3 {
        /// Divisor of the long wavelengths.
        factor: f64,
        /// Wavelengths above `original_max_position / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Context length of the first training, in positions.
        original_max_position: f64,
    },
}

/// The frequencies of one model.
#[derive(Debug, Clone)]
pub struct Rope {
    inv_freq: Vec<f32>,
}

impl Rope {
    /// Frequencies `theta^(-2i / head_dim)` for `i` in `0..head_dim / 2`, then scaled.
    pub fn new(head_dim: usize, theta: f64, scaling: RopeScaling) -> Self {
        let frequency = |i: usize| theta.powf(-((2 * i) as f64) / head_dim as f64);
        Self { inv_freq: (0..head_dim / 2).map(|i| scaled(frequency(i), scaling) as f32).collect() }
    }

    /// Radians per position, `[head_dim / 2]`.
    pub fn inv_freq(&self) -> &[f32] {
        &self.inv_freq
    }

    /// Writes the cosines and sines of one position's angles, each `[head_dim / 2]`.
    ///
    /// # Panics
    /// If a slice has another length.
    pub fn angles(&self, isa: Isa, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        assert!(cos.len() == self.inv_freq.len() && sin.len() == cos.len(), "rope: shapes disagree");
        isa.run(Angles { inv_freq: &self.inv_freq, position: position as f32, cos, sin });
    }
}

fn scaled(frequency: f64, scaling: RopeScaling) -> f64 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
            let turns = original_max_position * frequency / TAU;
            let keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
            keep * frequency + (1.0 - keep) * frequency / factor
        }
    }
}

struct Angles<'a> {
    inv_freq: &'a [f32],
    position: f32,
    cos: &'a mut [f32],
    sin: &'a mut [f32],
}

impl Body for Angles<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for ((inv_freq, cos), sin) in self.inv_freq.iter().zip(self.cos).zip(self.sin) {
            let (s, c) = sin_cos(f64::from(self.position * inv_freq));
            *cos = c as f32;
            *sin = s as f32;
        }
    }
}

/// The definition, in float64: rotates every head of `x` `[heads, head_dim]`.
pub fn oracle(x: &[f32], cos: &[f32], sin: &[f32]) -> Vec<f64> {
    let half = cos.len();
    let mut out: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
    for (head, out) in x.chunks(2 * half).zip(out.chunks_mut(2 * half)) {
        for i in 0..half {
            let (a, b) = (f64::from(head[i]), f64::from(head[i + half]));
            let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
            out[i] = a * c - b * s;
            out[i + half] = b * c + a * s;
        }
    }
    out
}

/// Rotates every head of `x` `[heads, head_dim]` where it is: one token's queries and keys.
///
/// # Panics
/// If `x` is not whole heads of `2 * cos.len()`.
pub fn cpu(isa: Isa, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    assert!(cos.len() == sin.len() && x.len().is_multiple_of(2 * cos.len()), "rope: shapes disagree");
    isa.run(Rotate { x, cos, sin });
}

struct Rotate<'a> {
    x: &'a mut [f32],
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Body for Rotate<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for head in self.x.chunks_exact_mut(2 * self.cos.len()) {
            let (low, high) = head.split_at_mut(self.cos.len());
            for (((a, b), c), s) in low.iter_mut().zip(high).zip(self.cos).zip(self.sin) {
                let (x, y) = (*a, *b);
                *a = x.mul_add(*c, -(y * s));
                *b = y.mul_add(*c, x * s);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{assert_close, on_every_isa, values};

    #[test]
    fn rotation_agrees_with_the_oracle_on_every_isa() {
        for (heads, head_dim) in [(0, 16), (1, 2), (3, 6), (4, 16), (5, 80), (2, 128)] {
            let x = values(head_dim as u64, heads * head_dim);
            let angles = on_every_isa(|isa| {
                let mut angles = vec![0.0; head_dim];
                let (cos, sin) = angles.split_at_mut(head_dim / 2);
                Rope::new(head_dim, 10_000.0, RopeScaling::None).angles(isa, 31_007, cos, sin);
                angles
            });
            let (cos, sin) = angles.split_at(head_dim / 2);
            let out = on_every_isa(|isa| {
                let mut out = x.clone();
                cpu(isa, &mut out, cos, sin);
                out
            });
            let scale: Vec<f64> = (0..x.len())
                .map(|i| {
                    let pair = if i % head_dim < head_dim / 2 { i + head_dim / 2 } else { i - head_dim / 2 };
                    f64::from(x[i].abs() + x[pair].abs())
                })
                .collect();
            assert_close(&out, &oracle(&x, cos, sin), &scale, 2e-7);
        }
    }

    #[test]
    fn angles_are_those_of_the_definition() {
        let rope = Rope::new(64, 500_000.0, RopeScaling::None);
        let (mut cos, mut sin) = (vec![0.0; 32], vec![0.0; 32]);
        for position in [0, 1, 77, 4095, 131_071] {
            rope.angles(Isa::detect(), position, &mut cos, &mut sin);
            for i in 0..32 {
                let angle = f64::from(position as f32 * rope.inv_freq()[i]);
                assert!((f64::from(cos[i]) - angle.cos()).abs() < 6e-8);
                assert!((f64::from(sin[i]) - angle.sin()).abs() < 6e-8);
            }
        }
    }

    #[test]
    fn llama3_scaling_keeps_short_waves_and_stretches_long_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192.0,
        };
        assert_eq!(scaled(1.0, scaling), 1.0);
        assert_eq!(scaled(1e-5, scaling), 1e-5 / 8.0);
        let middle = scaled(TAU * 2.5 / 8192.0, scaling) / (TAU * 2.5 / 8192.0);
        assert!((middle - (0.5 + 0.5 / 8.0)).abs() < 1e-12, "{middle}");
        assert_eq!(scaled(1.0, RopeScaling::Linear { factor: 4.0 }), 0.25);
    }
}
