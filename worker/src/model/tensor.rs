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
}

impl TensorType {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// A matrix `[rows, width]` or vector `[1, width]`, little-endian and row-major.
#[derive(Debug)]
pub(super) struct Tensor<'a> {
    pub(super) kind: TensorType,
    pub(super) width: usize,
    pub(super) bytes: Cow<'a, [u8]>,
}

impl Tensor<'_> {
    /// Writes row `n` into `out` `[width]`.
    pub(super) fn copy_row(&self, n: usize, out: &mut [f32]) {
        let size = self.width * self.kind.bytes();
        let row = &self.bytes[n * size..][..size];
        match self.kind {
            TensorType::F32 => decode(row, out, f32::from_le_bytes),
            TensorType::F16 => decode(row, out, |b| f16::from_le_bytes(b).to_f32()),
            TensorType::Bf16 => decode(row, out, |b| bf16::from_le_bytes(b).to_f32()),
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
    /// The tensor `name`, whose shape must be `shape`: `[rows, width]` or `[width]`.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError>;
}
