//! One tensor as it comes from a checkpoint or from the built-in model: bytes, type and shape; rows as f32.

use std::borrow::Cow;

use half::{bf16, f16};

use super::ModelError;

/// Number types that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TensorType {
    F32,
    F16,
    Bf16,
    /// FP8 E4M3 without infinities; a value only together with its scale.
    F8E4M3,
    /// Bytes: packed codes and exponents.
    U8,
}

impl TensorType {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4M3 | Self::U8 => 1,
        }
    }
}

/// A tensor, little-endian and row-major; its rows run over all dimensions but the last.
#[derive(Debug)]
pub(super) struct Tensor<'a> {
    pub(super) kind: TensorType,
    /// Elements of a row: the last dimension.
    pub(super) width: usize,
    pub(super) bytes: Cow<'a, [u8]>,
}

impl Tensor<'_> {
    /// The bytes of row `n`.
    pub(super) fn row(&self, n: usize) -> &[u8] {
        let size = self.width * self.kind.bytes();
        &self.bytes[n * size..][..size]
    }

    /// Writes row `n` into `out` `[width]`. Not for FP8 or bytes, which are no numbers alone.
    pub(super) fn copy_row(&self, n: usize, out: &mut [f32]) {
        let row = self.row(n);
        match self.kind {
            TensorType::F32 => decode(row, out, f32::from_le_bytes),
            TensorType::F16 => decode(row, out, |b| f16::from_le_bytes(b).to_f32()),
            TensorType::Bf16 => decode(row, out, |b| bf16::from_le_bytes(b).to_f32()),
            TensorType::F8E4M3 | TensorType::U8 => decode(row, out, |[byte]| f32::from(byte)),
        }
    }

    /// Writes column `column` of rows `first..` into `out`, one element per row.
    pub(super) fn copy_column(&self, first: usize, column: usize, out: &mut [f32]) {
        let size = self.kind.bytes();
        for (i, out) in out.iter_mut().enumerate() {
            let bytes = &self.row(first + i)[column * size..][..size];
            *out = match (self.kind, bytes) {
                (TensorType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
                (TensorType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
                (_, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
                (_, bytes) => f32::from(bytes[0]),
            };
        }
    }
}

fn decode<const N: usize>(row: &[u8], out: &mut [f32], number: impl Fn([u8; N]) -> f32) {
    for (out, bytes) in out.iter_mut().zip(row.as_chunks::<N>().0) {
        *out = number(*bytes);
    }
}

/// Gives tensors by name.
pub(super) trait TensorSource {
    /// The tensor `name`, whose shape must be `shape`.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError>;
}
