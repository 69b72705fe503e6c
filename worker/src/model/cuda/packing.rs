//! Matrices packed for the kernels, a few rows at a time by all cores: as they are, in bf16, or as whole
//! numbers with scales.

use std::num::NonZeroUsize;
use std::thread;

use half::bf16;
use keyway_kernels::cuda::DeviceError;
use keyway_kernels::cuda::matmul::{
    GROUP, Shape, TILE, Weights as Kept, pack_bf16, pack_fp8, pack_integers, pack_mxfp4,
};
use keyway_kernels::cuda::moe;
use keyway_kernels::matmul::{PackedMatrix, SmallFloats};
use keyway_kernels::quant::MXFP4_BLOCK;

use super::integers::quantise;

/// Tiles' rows that a thread packs between two copies.
const BANDS: usize = 4;

/// Which rows of a matrix become which outputs.
#[derive(Debug, Clone, Copy)]
pub(super) enum Order {
    AsStored,
    /// Of `width` gates and as many values, as experts' gated products want them.
    Woven {
        width: usize,
    },
}

impl Order {
    /// The row that is this output.
    pub(super) fn row(self, output: usize) -> usize {
        match self {
            Self::AsStored => output,
            Self::Woven { width } => moe::woven_row(output, width),
        }
    }
}

/// How matrices that are to be kept alike are kept: all in FP8 with the kernels' blocks, or all in MXFP4, as
/// they are, as on the CPU; else as asked.
pub(super) fn as_stored<'m>(matrices: impl Iterator<Item = &'m PackedMatrix>, asked: Kept) -> Kept {
    let stored = |matrix: &PackedMatrix| match matrix.small_floats() {
        Some(SmallFloats::Fp8 { block: GROUP }) if matrix.inputs().is_multiple_of(GROUP) => Kept::Fp8,
        Some(SmallFloats::Mxfp4) => Kept::Mxfp4,
        _ => asked,
    };
    let mut kinds = matrices.map(stored);
    let first = kinds.next().unwrap_or(asked);
    if kinds.all(|kind| kind == first) { first } else { asked }
}

/// Packs a matrix; `write` gets its images in their order in memory. Its scales `[groups, outputs]`, none of
/// bf16 and MXFP4.
pub(super) fn pack(
    matrix: &PackedMatrix,
    shape: Shape,
    order: Order,
    mut write: impl FnMut(&[u8]) -> Result<(), DeviceError>,
) -> Result<Vec<f32>, DeviceError> {
    let mut scales = vec![0.0; shape.scales()];
    let bands: Vec<usize> = (0..shape.outputs).step_by(TILE).collect();
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    for batch in bands.chunks(threads * BANDS) {
        for band in pack_bands(matrix, shape, order, batch) {
            write(&band.image)?;
            band.put_scales(&mut scales, shape.outputs);
        }
    }
    Ok(scales)
}

/// Up to 64 rows of a matrix, packed: they follow the rows before them in memory.
struct Band {
    first: usize,
    rows: usize,
    image: Vec<u8>,
    /// `[rows, groups]`, a group being 128 inputs; empty for weights without such scales.
    scales: Vec<f32>,
}

impl Band {
    fn pack(matrix: &PackedMatrix, shape: Shape, order: Order, first: usize) -> Self {
        let own = Shape { outputs: TILE.min(shape.outputs - first), ..shape };
        let rows = (0..own.outputs).map(|n| order.row(first + n));
        let (image, scales) = match shape.weights {
            Kept::Fp8 => fp8(matrix, own, rows),
            Kept::Mxfp4 => (mxfp4(matrix, own, rows), Vec::new()),
            Kept::Bf16 => {
                let rounded: Vec<bf16> = values(matrix, rows).into_iter().map(bf16::from_f32).collect();
                (pack_bf16(own, &rounded), Vec::new())
            }
            Kept::Int8 | Kept::Int4 => integers(&values(matrix, rows), own),
        };
        Self { first, rows: own.outputs, image, scales }
    }

    /// Into those of the whole matrix, `[groups, outputs]`.
    fn put_scales(&self, all: &mut [f32], outputs: usize) {
        let groups = self.scales.len() / self.rows;
        for (i, scale) in self.scales.iter().enumerate() {
            all[i % groups * outputs + self.first + i / groups] = *scale;
        }
    }
}

/// Some rows of a matrix, one after another.
fn values(matrix: &PackedMatrix, rows: impl ExactSizeIterator<Item = usize>) -> Vec<f32> {
    let mut values = vec![0.0; rows.len() * matrix.inputs()];
    for (row, n) in values.chunks_exact_mut(matrix.inputs()).zip(rows) {
        matrix.copy_row(n, row);
    }
    values
}

/// Images, and scales `[rows, groups]`.
fn integers(values: &[f32], own: Shape) -> (Vec<u8>, Vec<f32>) {
    let mut codes = vec![0; values.len()];
    let groups = values.chunks_exact(GROUP).zip(codes.chunks_exact_mut(GROUP));
    let scales = groups.map(|(values, codes)| quantise(values, own.weights, codes)).collect();
    (pack_integers(own, &codes), scales)
}

/// Images, and scales `[rows, groups]`: codes as they are.
fn fp8(matrix: &PackedMatrix, own: Shape, rows: impl Iterator<Item = usize>) -> (Vec<u8>, Vec<f32>) {
    let Shape { outputs, inputs, .. } = own;
    let (mut codes, mut scales) = (vec![0; outputs * inputs], vec![0.0; own.scales()]);
    let places = codes.chunks_exact_mut(inputs).zip(scales.chunks_exact_mut(inputs / GROUP));
    for ((codes, scales), n) in places.zip(rows) {
        matrix.copy_fp8_row(n, codes, scales);
    }
    (pack_fp8(own, &codes), scales)
}

/// Images with codes and exponents as they are.
fn mxfp4(matrix: &PackedMatrix, own: Shape, rows: impl Iterator<Item = usize>) -> Vec<u8> {
    let Shape { outputs, inputs, .. } = own;
    let (mut codes, mut exponents) = (vec![0; outputs * inputs / 2], vec![0; outputs * inputs / MXFP4_BLOCK]);
    let places = codes.chunks_exact_mut(inputs / 2).zip(exponents.chunks_exact_mut(inputs / MXFP4_BLOCK));
    for ((codes, exponents), n) in places.zip(rows) {
        matrix.copy_mxfp4_row(n, codes, exponents);
    }
    pack_mxfp4(own, &codes, &exponents)
}

/// Packs the bands that begin at these rows, by a thread for every few of them; in order.
fn pack_bands(matrix: &PackedMatrix, shape: Shape, order: Order, firsts: &[usize]) -> Vec<Band> {
    let pack = |firsts: &[usize]| -> Vec<Band> {
        firsts.iter().map(|first| Band::pack(matrix, shape, order, *first)).collect()
    };
    if firsts.len() <= BANDS {
        return pack(firsts);
    }
    let pack = &pack;
    thread::scope(|scope| {
        let parts: Vec<_> = firsts.chunks(BANDS).map(|part| scope.spawn(move || pack(part))).collect();
        let joined = parts.into_iter().map(thread::ScopedJoinHandle::join);
        joined.flat_map(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}
