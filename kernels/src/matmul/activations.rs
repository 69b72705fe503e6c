//! Rows of `x` as whole numbers, for weights that are whole numbers. Each group of 32 inputs of a row has a
//! scale of its own, which is a function of the group alone: a row's codes are the same alone and in any
//! batch.

use super::integers::GROUP;
use crate::compute::Compute;
use crate::grid::Grid;
use crate::isa::Body;
use crate::simd::Simd;

/// What quantising one element takes one thread, in nanoseconds: decides who computes, nothing else.
const NS_PER_ELEMENT: f64 = 0.3;
/// The largest magnitude of a code; there is no -128.
const CODE_MAX: f32 = 127.0;
/// A group whose largest magnitude is below this (2^-100) is taken for zeros: its codes' divisor could
/// overflow.
const MAGNITUDE_MIN: f32 = f32::from_bits((127 - 100) << 23);
/// Added to a number of magnitude up to 2^22 it leaves the number, rounded to even, in the low bits.
const ROUND: f32 = 12_582_912.0;

/// 32 inputs of a row: input `i` is `code i * scale`, code `i` being byte `i % 4` of `quads[i / 4]`, signed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Group {
    pub(super) quads: [i32; GROUP / 4],
    /// What a dot product with unsigned codes begins with: the codes' sum times what the weights' codes are
    /// off by.
    pub(super) bias: i32,
    /// NaN if an input is not finite.
    pub(super) scale: f32,
}

/// Rows of inputs quantised to 8 bits, 32 inputs to a scale, for integer weights.
#[derive(Debug)]
pub(super) struct Activations {
    /// `[rows, inputs / 32 rounded up]`; zeros behind the last input.
    groups: Vec<Group>,
    per_row: usize,
}

impl Activations {
    /// Quantises `x` `[rows, inputs]` for weights whose codes have `zero` added to them.
    pub(super) fn quantise(compute: &Compute, x: &[f32], inputs: usize, zero: i32) -> Self {
        let (rows, per_row) = (x.len() / inputs, inputs.div_ceil(GROUP));
        let empty = Group { quads: [0; GROUP / 4], bias: 0, scale: 0.0 };
        let mut groups = vec![empty; rows * per_row];
        let tile_rows = compute.tile_rows(rows, NS_PER_ELEMENT * inputs as f64);
        compute.tiles(Grid::new(&mut groups, per_row, tile_rows, per_row), |mut tile| {
            let x = &x[tile.rows().start * inputs..tile.rows().end * inputs];
            compute.isa().run(Quantise { x, inputs, zero, out: tile.whole_rows() });
        });
        Self { groups, per_row }
    }

    /// The groups of one row.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> &[Group] {
        &self.groups[row * self.per_row..][..self.per_row]
    }

    /// The values that a row's codes stand for, `[groups * 32]`.
    #[cfg(test)]
    pub(super) fn values(&self, row: usize) -> Vec<f32> {
        let value =
            |group: &Group, i: usize| f32::from(group.quads[i / 4].to_le_bytes()[i % 4] as i8) * group.scale;
        self.row(row).iter().flat_map(|group| (0..GROUP).map(move |i| value(group, i))).collect()
    }
}

struct Quantise<'a> {
    x: &'a [f32],
    inputs: usize,
    zero: i32,
    out: &'a mut [Group],
}

impl Body for Quantise<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let per_row = self.inputs.div_ceil(GROUP);
        for (x, out) in self.x.chunks_exact(self.inputs).zip(self.out.chunks_exact_mut(per_row)) {
            let (whole, rest) = x.as_chunks::<GROUP>();
            for (x, out) in whole.iter().zip(&mut *out) {
                *out = quantise(x, self.zero);
            }
            if !rest.is_empty() {
                let mut last = [0.0; GROUP];
                last[..rest.len()].copy_from_slice(rest);
                out[whole.len()] = quantise(&last, self.zero);
            }
        }
    }
}

/// Codes from -127 to 127 in proportion to the group's largest magnitude, rounded to even.
#[inline(always)]
fn quantise(x: &[f32; GROUP], zero: i32) -> Group {
    let (mut largest, mut poison) = ([0.0_f32; 16], [0.0_f32; 16]);
    for half in x.as_chunks::<16>().0 {
        for lane in 0..16 {
            let magnitude = half[lane].abs();
            largest[lane] = if magnitude > largest[lane] { magnitude } else { largest[lane] };
            // 0 for what is finite, NaN for the rest.
            poison[lane] += half[lane] * 0.0;
        }
    }
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            largest[lane] =
                if largest[lane + half] > largest[lane] { largest[lane + half] } else { largest[lane] };
            poison[lane] += poison[lane + half];
        }
    }
    let (largest, poison) = (largest[0], poison[0]);
    if poison != 0.0 || largest < MAGNITUDE_MIN {
        return Group { quads: [0; GROUP / 4], bias: 0, scale: poison };
    }
    let factor = CODE_MAX / largest;
    // A code's byte is the low one of the sum's bits: the number added has zeros there.
    let (mut codes, mut sum) = ([0; GROUP], 0);
    for (code, x) in codes.iter_mut().zip(x) {
        let bits = (x * factor + ROUND).to_bits();
        *code = bits as u8;
        sum += bits as i32 - ROUND.to_bits() as i32;
    }
    let mut quads = [0; GROUP / 4];
    for (quad, codes) in quads.iter_mut().zip(codes.as_chunks::<4>().0) {
        *quad = i32::from_le_bytes(*codes);
    }
    Group { quads, bias: -zero * sum, scale: largest / CODE_MAX }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::values;

    #[test]
    fn a_code_is_half_a_step_from_its_value() {
        let (rows, inputs) = (3, 75);
        let x = values(1, rows * inputs);
        let quantised = Activations::quantise(&Compute::single(), &x, inputs, 3);
        for row in 0..rows {
            let found = quantised.values(row);
            for (i, x) in x[row * inputs..][..inputs].iter().enumerate() {
                let scale = quantised.row(row)[i / GROUP].scale;
                assert!((found[i] - x).abs() <= 0.5001 * scale, "{x} became {}", found[i]);
            }
            assert!(found[inputs..].iter().all(|padding| *padding == 0.0));
            for group in quantised.row(row) {
                let codes = group.quads.iter().flat_map(|quad| quad.to_le_bytes());
                assert_eq!(group.bias, -3 * codes.map(|code| i32::from(code as i8)).sum::<i32>());
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_so_and_what_is_tiny_becomes_zero() {
        let group = |value: f32| {
            let mut x = [1.0; GROUP];
            x[17] = value;
            quantise(&x, 1)
        };
        assert!(group(f32::NAN).scale.is_nan() && group(f32::INFINITY).scale.is_nan());
        assert_eq!(quantise(&[1e-40; GROUP], 1), quantise(&[0.0; GROUP], 1));
        assert_eq!(quantise(&[f32::MAX; GROUP], -1).bias, 32 * 127);
    }
}
