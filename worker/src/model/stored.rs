//! A matrix as a checkpoint stores it: plain, transposed, in FP8 with block scales or in MXFP4; read row by row
//! as the exact f32 values that it stands for.

use keyway_kernels::matmul::WeightType;

use super::tensor::{Tensor, TensorType};

/// Rows and columns that share one scale of an FP8 matrix.
const FP8_BLOCK: usize = 128;
/// Neighbours in a row that share one exponent of an MXFP4 matrix.
pub(super) const MXFP4_BLOCK: usize = 32;

/// A matrix, or several of equal shape one after another.
#[derive(Debug)]
pub(super) enum Stored<'a> {
    Plain(Tensor<'a>),
    /// Matrices `[inputs, outputs]`; row `n` of this view is output `n % outputs` of matrix `n / outputs`.
    InputMajor {
        tensor: Tensor<'a>,
        inputs: usize,
    },
    /// E4M3 codes, and an f32 per 128 by 128 `[rows / 128, width / 128]`, both rounded up.
    Fp8 {
        codes: Tensor<'a>,
        scales: Tensor<'a>,
    },
    /// Per row, blocks of 16 bytes with two E2M1 codes each, and an exponent for each block.
    Mxfp4 {
        blocks: Tensor<'a>,
        exponents: Tensor<'a>,
    },
}

/// Some rows of a stored matrix: `first`, `first + step`, and so on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'s, 'a> {
    pub(super) from: &'s Stored<'a>,
    pub(super) first: usize,
    pub(super) step: usize,
    pub(super) count: usize,
}

impl Stored<'_> {
    /// Writes row `n`.
    pub(super) fn copy_row(&self, n: usize, out: &mut [f32]) {
        match self {
            Self::Plain(tensor) => tensor.copy_row(n, out),
            Self::InputMajor { tensor, inputs } => {
                tensor.copy_column(n / tensor.width * inputs, n % tensor.width, out);
            }
            Self::Fp8 { codes, scales } => {
                let mut row_scales = vec![0.0; scales.width];
                scales.copy_row(n / FP8_BLOCK, &mut row_scales);
                let parts = out.chunks_mut(FP8_BLOCK).zip(codes.row(n).chunks(FP8_BLOCK));
                for ((out, codes), scale) in parts.zip(row_scales) {
                    for (out, code) in out.iter_mut().zip(codes) {
                        *out = e4m3(*code) * scale;
                    }
                }
            }
            Self::Mxfp4 { blocks, exponents } => {
                let per_row = exponents.width;
                for (i, (out, exponent)) in out.chunks_mut(MXFP4_BLOCK).zip(exponents.row(n)).enumerate() {
                    let scale = e8m0(*exponent);
                    let codes = blocks.row(n * per_row + i);
                    for (pair, codes) in out.chunks_mut(2).zip(codes) {
                        pair[0] = E2M1[usize::from(codes & 15)] * scale;
                        pair[1] = E2M1[usize::from(codes >> 4)] * scale;
                    }
                }
            }
        }
    }

    /// The narrowest type that keeps every value.
    pub(super) fn kept_as(&self) -> WeightType {
        match self {
            Self::Plain(tensor) | Self::InputMajor { tensor, .. } if tensor.kind == TensorType::Bf16 => {
                WeightType::Bf16
            }
            // Two bits of significand, and every exponent that bf16 has.
            Self::Mxfp4 { .. } => WeightType::Bf16,
            _ => WeightType::F32,
        }
    }
}

/// E2M1 by its code (OCP Microscaling Formats 1.0).
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// E8M0: a power of two, `2^(code - 127)`.
fn e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}

/// E4M3 without infinities (arXiv 2209.05433): bias 7, three bits of fraction.
fn e4m3(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction / 512.0,
        _ => (8.0 + fraction) * 2.0_f32.powi(exponent - 10),
    };
    if code >= 128 { -magnitude } else { magnitude }
}
