//! Matrices packed for the kernels, a few rows at a time by all cores: as they are, or as whole numbers with scales.

use std::num::NonZeroUsize;
use std::thread;

use half::bf16;
use keyway_kernels::cuda::DeviceError;
use keyway_kernels::cuda::matmul::{GROUP, Shape, TILE, Weights as Kept, pack_bf16, pack_integers};
use keyway_kernels::cuda::moe;
use keyway_kernels::matmul::PackedMatrix;

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

/// Packs a matrix; `write` gets its images in their order in memory. Its scales `[groups, outputs]`, none of bf16.
pub(super) fn pack(
    matrix: &PackedMatrix,
    shape: Shape,
    order: Order,
    mut write: impl FnMut(&[u8]) -> Result<(), DeviceError>,
) -> Result<Vec<f32>, DeviceError> {
    let groups = if shape.weights == Kept::Bf16 { 0 } else { shape.inputs / GROUP };
    let mut scales = vec![0.0; groups * shape.outputs];
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
    /// `[rows, groups]`.
    scales: Vec<f32>,
}

impl Band {
    fn pack(matrix: &PackedMatrix, shape: Shape, order: Order, first: usize) -> Self {
        let (rows, inputs) = (TILE.min(shape.outputs - first), shape.inputs);
        let mut values = vec![0.0; rows * inputs];
        for (n, row) in values.chunks_exact_mut(inputs).enumerate() {
            matrix.copy_row(order.row(first + n), row);
        }
        let own = Shape { outputs: rows, ..shape };
        if shape.weights == Kept::Bf16 {
            let rounded: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
            return Self { first, rows, image: pack_bf16(own, &rounded), scales: Vec::new() };
        }
        let mut codes = vec![0; values.len()];
        let groups = values.chunks_exact(GROUP).zip(codes.chunks_exact_mut(GROUP));
        let scales = groups.map(|(values, codes)| quantise(values, shape.weights, codes)).collect();
        Self { first, rows, image: pack_integers(own, &codes), scales }
    }

    /// Into those of the whole matrix, `[groups, outputs]`.
    fn put_scales(&self, all: &mut [f32], outputs: usize) {
        let groups = self.scales.len() / self.rows;
        for (i, scale) in self.scales.iter().enumerate() {
            all[i % groups * outputs + self.first + i / groups] = *scale;
        }
    }
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
