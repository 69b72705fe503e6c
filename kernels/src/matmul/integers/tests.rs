//! Whole-number weights against float64, on every instruction set, and what quantising loses.

use super::super::activations::Activations;
use super::super::{PackedMatrix, cpu, oracle};
use super::*;
use crate::check::{assert_close, everywhere, same_bits, values};
use crate::compute::Compute;

const BITS: [IntBits; 2] = [IntBits::Eight, IntBits::Four];

fn packed(w: &[f32], inputs: usize, bits: IntBits) -> PackedMatrix {
    PackedMatrix::pack_int(w.len() / inputs, inputs, bits, |n, row| {
        row.copy_from_slice(&w[n * inputs..][..inputs]);
    })
}

fn product(compute: &Compute, x: &[f32], w: &PackedMatrix) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len() / w.inputs() * w.outputs()];
    cpu(compute, x, w, &mut y);
    y
}

/// The weights that the codes stand for.
fn dequantised(w: &PackedMatrix) -> Vec<f32> {
    let mut out = vec![f32::NAN; w.outputs() * w.inputs()];
    for (n, row) in out.chunks_exact_mut(w.inputs()).enumerate() {
        w.copy_row(n, row);
    }
    out
}

fn magnitudes(v: &[f32]) -> Vec<f32> {
    v.iter().map(|v| v.abs()).collect()
}

#[test]
fn products_agree_with_the_oracle_of_the_quantised_operands_everywhere() {
    let shapes = [
        (0, 5, 3),
        (1, 1, 1),
        (1, 130, 32),
        (2, 31, 64),
        (3, 70, 100),
        (7, 64, 33),
        (9, 65, 100),
        (131, 8, 64),
    ];
    for (m, n, k) in shapes {
        for bits in BITS {
            let (x, w) = (values(m as u64 + 1, m * k), packed(&values(n as u64, n * k), k, bits));
            let y = everywhere(|compute| product(compute, &x, &w));
            let quantised = Activations::quantise(&Compute::single(), &x, k, 0);
            let x: Vec<f32> = (0..m).flat_map(|row| quantised.values(row)[..k].to_vec()).collect();
            let w = dequantised(&w);
            let scale = oracle(&magnitudes(&x), &magnitudes(&w), k);
            // Per group a product of scales, and an addition, are rounded.
            let tolerance = (k.div_ceil(GROUP) + 1) as f64 * 1.2e-7;
            assert_close(&y, &oracle(&x, &w, k), &scale, tolerance);
        }
    }
}

/// What quantising `x` adds to the error is at most half a step of every input's group.
#[test]
fn products_are_near_those_with_unquantised_inputs() {
    let (m, n, k) = (5, 40, 256);
    for bits in BITS {
        let (x, w) = (values(3, m * k), packed(&values(4, n * k), k, bits));
        let y = product(&Compute::single(), &x, &w);
        let w = dequantised(&w);
        let steps: Vec<f32> = x
            .chunks(GROUP)
            .flat_map(|group| {
                let largest = group.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
                vec![largest / 254.0; group.len()]
            })
            .collect();
        assert_close(&y, &oracle(&x, &w, k), &oracle(&steps, &magnitudes(&w), k), 1.001);
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_every_batch() {
    for bits in BITS {
        let w = packed(&values(3, 140 * 50), 50, bits);
        let x = values(4, 140 * 50);
        let all = product(&Compute::single(), &x, &w);
        for rows in [1, 2, 3, 4, 5, 7, 8, 127, 128, 129, 131] {
            let some = product(&Compute::single(), &x[..rows * 50], &w);
            assert!(same_bits(&all[..rows * 140], &some), "{rows}");
        }
    }
}

#[test]
fn a_weight_is_near_its_code() {
    let k = 64;
    let w = values(5, 37 * k);
    for (bits, steps) in [(IntBits::Eight, 254.0), (IntBits::Four, 14.0)] {
        let found = dequantised(&packed(&w, k, bits));
        for (values, found) in w.chunks(GROUP).zip(found.chunks(GROUP)) {
            let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            let squares = |v: Vec<f32>| v.iter().map(|v| v * v).sum::<f32>();
            let error = squares(values.iter().zip(found).map(|(a, b)| a - b).collect());
            // Half a step each, and a hundredth for the scale's own rounding.
            let worst = GROUP as f32 * (largest / steps * 1.01).powi(2);
            assert!(error <= worst, "{bits:?}: {error} against {worst}");
        }
    }
}

#[test]
fn whole_numbers_take_as_little_memory_as_they_say() {
    let (n, k) = (128, 256);
    let bytes = |bits| packed(&values(1, n * k), k, bits).bytes();
    // A scale of two bytes for 32 weights.
    assert_eq!((bytes(IntBits::Eight), bytes(IntBits::Four)), (n * k * 17 / 16, n * k * 9 / 16));
}

#[test]
fn what_is_not_finite_is_not_hidden() {
    for bits in BITS {
        let mut w = values(1, 16 * 64);
        w[64 + 3] = f32::INFINITY;
        let y = product(&Compute::single(), &[1.0; 64], &packed(&w, 64, bits));
        assert!(y[1].is_nan() && y[0].is_finite() && y[2].is_finite());
        let mut x = [1.0; 128];
        x[70] = f32::NAN;
        let y = product(&Compute::single(), &x, &packed(&values(1, 16 * 64), 64, bits));
        assert!(y[..16].iter().all(|y| y.is_finite()) && y[16..].iter().all(|y| y.is_nan()));
    }
}

#[test]
fn zeros_and_tiny_weights_become_zeros() {
    for bits in BITS {
        let w = packed(&[0.0, 1e-38, -1e-40, 0.0], 2, bits);
        assert!(same_bits(&dequantised(&w), &[0.0; 4]));
    }
}
