//! A matrix as a checkpoint stores it: plain, transposed, in FP8 with block scales or in MXFP4; read row by
//! row, and packed so that it stays as small.

use keyway_kernels::matmul::{IntBits, PackedMatrix, WeightType};
use keyway_kernels::quant::{decode_fp8, decode_mxfp4};

use super::tensor::{Tensor, TensorType};

/// Rows and columns that share one scale of an FP8 matrix.
pub(super) const FP8_BLOCK: usize = 128;

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
    /// E2M1 codes, two in a byte, and an E8M0 exponent per 32 of them.
    Mxfp4 {
        codes: Tensor<'a>,
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
    /// Writes row `n` as the exact values it stands for (of FP8, rounded to f32).
    pub(super) fn copy_row(&self, n: usize, out: &mut [f32]) {
        match self {
            Self::Plain(tensor) => tensor.copy_row(n, out),
            Self::InputMajor { tensor, inputs } => {
                tensor.copy_column(n / tensor.width * inputs, n % tensor.width, out);
            }
            Self::Fp8 { codes, scales } => {
                let mut row_scales = vec![0.0; scales.width];
                scales.copy_row(n / FP8_BLOCK, &mut row_scales);
                decode_fp8(codes.row(n), &row_scales, FP8_BLOCK, out);
            }
            Self::Mxfp4 { codes, exponents } => decode_mxfp4(codes.row(n), exponents.row(n), out),
        }
    }

    /// The narrowest plain type that keeps every value.
    pub(super) fn kept_as(&self) -> WeightType {
        match self {
            Self::Plain(tensor) | Self::InputMajor { tensor, .. } if tensor.kind == TensorType::Bf16 => {
                WeightType::Bf16
            }
            _ => WeightType::F32,
        }
    }
}

/// Packs rows of stored matrices, `inputs` wide, one below the other: as they are stored if all are stored
/// alike, in the narrowest type that keeps every value if not. What is stored as FP8 or MXFP4 stays so, all
/// else is quantised if `bits` are given.
pub(super) fn pack(parts: &[Rows<'_, '_>], inputs: usize, bits: Option<IntBits>) -> PackedMatrix {
    let outputs = parts.iter().map(|rows| rows.count).sum();
    let all = |kind: fn(&Stored<'_>) -> bool| parts.iter().all(|rows| kind(rows.from));
    if all(|stored| matches!(stored, Stored::Fp8 { .. })) {
        return PackedMatrix::pack_fp8(outputs, inputs, FP8_BLOCK, |n, codes, scales| {
            if let (Stored::Fp8 { codes: from, scales: from_scales }, n) = locate(parts, n) {
                codes.copy_from_slice(from.row(n));
                from_scales.copy_row(n / FP8_BLOCK, scales);
            }
        });
    }
    if all(|stored| matches!(stored, Stored::Mxfp4 { .. })) {
        return PackedMatrix::pack_mxfp4(outputs, inputs, |n, codes, exponents| {
            if let (Stored::Mxfp4 { codes: from, exponents: from_exponents }, n) = locate(parts, n) {
                codes.copy_from_slice(from.row(n));
                exponents.copy_from_slice(from_exponents.row(n));
            }
        });
    }
    let bf16 = all(|stored| stored.kept_as() == WeightType::Bf16);
    let kept_as = if bf16 { WeightType::Bf16 } else { WeightType::F32 };
    let fill = |n, row: &mut [f32]| {
        let (stored, n) = locate(parts, n);
        stored.copy_row(n, row);
    };
    match bits {
        Some(bits) => PackedMatrix::pack_int(outputs, inputs, bits, fill),
        None => PackedMatrix::pack(outputs, inputs, kept_as, fill),
    }
}

/// Where row `n` of the stacked parts is; `n` is below their sum.
fn locate<'s, 'a>(parts: &[Rows<'s, 'a>], mut n: usize) -> (&'s Stored<'a>, usize) {
    let mut at = parts[0];
    for rows in parts {
        at = *rows;
        if n < rows.count {
            break;
        }
        n -= rows.count;
    }
    (at.from, at.first + n * at.step)
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;

    fn tensor(kind: TensorType, width: usize, bytes: Vec<u8>) -> Tensor<'static> {
        Tensor { kind, width, bytes: Cow::Owned(bytes) }
    }

    /// Finite codes of both signs, no two rows alike.
    fn codes(n: usize) -> Vec<u8> {
        (0..n).map(|i| (i * 37 % 251) as u8 & 0b1011_1111).collect()
    }

    /// Every other row, then all of them.
    fn assert_packed(stored: &Stored<'_>, rows: usize, width: usize, bytes_max: usize) {
        let odd = Rows { from: stored, first: 1, step: 2, count: rows / 2 };
        let all = Rows { from: stored, first: 0, step: 1, count: rows };
        let matrix = pack(&[odd, all], width, None);
        assert_eq!((matrix.outputs(), matrix.inputs()), (rows / 2 + rows, width));
        let (mut found, mut expected) = (vec![0.0; width], vec![0.0; width]);
        for n in 0..matrix.outputs() {
            matrix.copy_row(n, &mut found);
            stored.copy_row(if n < rows / 2 { 1 + 2 * n } else { n - rows / 2 }, &mut expected);
            assert_eq!(found, expected, "row {n}");
        }
        assert!(matrix.bytes() <= bytes_max, "{} bytes", matrix.bytes());
    }

    #[test]
    fn fp8_stays_a_byte_an_element() {
        let (rows, width) = (160, 200);
        let scales: Vec<u8> = [0.5_f32, 0.25, 3.0, 7.5].iter().flat_map(|s| s.to_le_bytes()).collect();
        let codes = tensor(TensorType::F8E4M3, width, codes(rows * width));
        let stored = Stored::Fp8 { codes, scales: tensor(TensorType::F32, 2, scales) };
        assert_packed(&stored, rows, width, (rows / 2 + rows) * (width + 2 * 4));
    }

    #[test]
    fn mxfp4_stays_half_a_byte_an_element() {
        let (rows, width) = (32, 96);
        let exponents = (0..rows * 3).map(|i| 120 + (i % 11) as u8).collect();
        let codes = tensor(TensorType::U8, width / 2, codes(rows * width / 2));
        let stored = Stored::Mxfp4 { codes, exponents: tensor(TensorType::U8, 3, exponents) };
        // An exponent is widened to two bytes.
        assert_packed(&stored, rows, width, (rows / 2 + rows) * (width / 2 + 2 * 3));
    }

    #[test]
    fn input_major_matrices_are_turned() {
        // Two matrices [3, 2]: outputs are columns.
        let values: Vec<u8> = (0..12_u8).flat_map(|v| f32::from(v).to_le_bytes()).collect();
        let stored = Stored::InputMajor { tensor: tensor(TensorType::F32, 2, values), inputs: 3 };
        let mut row = [0.0; 3];
        for (n, expected) in
            [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0], [6.0, 8.0, 10.0], [7.0, 9.0, 11.0]].into_iter().enumerate()
        {
            stored.copy_row(n, &mut row);
            assert_eq!(row, expected);
        }
    }
}
