//! Weights of every type for the cases of products: random codes, packed, and the numbers that they stand
//! for. Multiplies nothing.

use half::bf16;
use keyway_kernels::cuda::matmul::{GROUP, Shape, Weights, pack_bf16, pack_fp8, pack_integers, pack_mxfp4};
use keyway_kernels::quant::{MXFP4_BLOCK, decode_mxfp4, e4m3};

use super::{values, wide};

/// Every type but bf16.
pub(crate) const NARROW: [Weights; 4] = [Weights::Int8, Weights::Int4, Weights::Fp8, Weights::Mxfp4];

/// A weight as it goes to a device, and what it is worth.
pub(crate) struct Made {
    pub(crate) images: Vec<u8>,
    pub(crate) scales: Vec<f32>,
    /// `[outputs, inputs]`.
    pub(crate) values: Vec<f32>,
}

impl Made {
    /// `scale(i)` is the one at `i` of `[inputs / 128, outputs]`; MXFP4 takes the power of two below the one
    /// of its output and 128 inputs, and every other 32 inputs a fourth of it.
    pub(crate) fn new(shape: Shape, seed: u64, scale: impl Fn(usize) -> f32) -> Self {
        let raw = values(seed, shape.outputs * shape.inputs);
        if shape.weights == Weights::Bf16 {
            return Self { images: pack_bf16(shape, &raw), scales: Vec::new(), values: wide(&raw) };
        }
        let hashed = raw.iter().map(|v| (v.to_bits().wrapping_mul(37) >> 5) as u8);
        if shape.weights == Weights::Mxfp4 {
            return Self::mxfp4(shape, &hashed.step_by(2).collect::<Vec<u8>>(), scale);
        }
        let shift = if shape.weights == Weights::Int4 { 4 } else { 0 };
        let codes: Vec<u8> = hashed.map(|code| (code.cast_signed() >> shift).cast_unsigned()).collect();
        let scales: Vec<f32> = (0..shape.scales()).map(scale).collect();
        let signed: Vec<i8> = codes.iter().map(|code| code.cast_signed()).collect();
        // No NaN among them.
        let fp8: Vec<u8> =
            codes.iter().map(|code| if code & 127 == 127 { code ^ 4 } else { *code }).collect();
        let (images, code): (_, &dyn Fn(usize) -> f32) = match shape.weights {
            Weights::Fp8 => (pack_fp8(shape, &fp8), &|i| e4m3(fp8[i])),
            _ => (pack_integers(shape, &signed), &|i| f32::from(signed[i])),
        };
        let scale_of = |i: usize| scales[i % shape.inputs / GROUP * shape.outputs + i / shape.inputs];
        let values = (0..codes.len()).map(|i| code(i) * scale_of(i)).collect();
        Self { images, scales, values }
    }

    fn mxfp4(shape: Shape, codes: &[u8], scale: impl Fn(usize) -> f32) -> Self {
        let Shape { outputs, inputs, .. } = shape;
        let blocks = inputs / MXFP4_BLOCK;
        let exponent = |i: usize| {
            let (output, block) = (i / blocks, i % blocks);
            let power = scale(block * MXFP4_BLOCK / GROUP * outputs + output).abs().to_bits() >> 23;
            (power as u8).saturating_sub(block as u8 % 2 * 2)
        };
        let exponents: Vec<u8> = (0..outputs * blocks).map(exponent).collect();
        let mut values = vec![0.0; outputs * inputs];
        let rows = values.chunks_mut(inputs).zip(codes.chunks(inputs / 2)).zip(exponents.chunks(blocks));
        for ((row, codes), exponents) in rows {
            decode_mxfp4(codes, exponents, row);
        }
        Self { images: pack_mxfp4(shape, codes, &exponents), scales: Vec::new(), values }
    }

    /// The values as a weight in bf16.
    pub(crate) fn images_in_bf16(&self, shape: Shape) -> Vec<u8> {
        let rounded: Vec<bf16> = self.values.iter().copied().map(bf16::from_f32).collect();
        pack_bf16(Shape { weights: Weights::Bf16, ..shape }, &rounded)
    }
}
