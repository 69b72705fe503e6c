//! Weights on a device: packed for the kernels a few rows at a time, by all cores, and copied there.

use std::num::NonZeroUsize;
use std::thread;

use half::bf16;
use keyway_kernels::cuda::matmul::{
    GROUP, Packed, Shape, TILE, Unit, Weights as Kept, pack_bf16, pack_integers,
};
use keyway_kernels::cuda::{Device, DeviceError, Element, Slice};
use keyway_kernels::matmul::PackedMatrix;

use super::integers::quantise;
use crate::model::Quantize;
use crate::model::weights::{AttentionWeights, FeedForwardWeights, Layer, Linear, Weights};

/// Tiles' rows that a thread packs between two copies.
const BANDS: usize = 4;

/// All weights.
#[derive(Debug)]
pub(super) struct DeviceWeights {
    /// bf16, so that rows can be looked up.
    pub(super) embedding: Packed,
    pub(super) layers: Vec<DeviceLayer>,
    pub(super) norm: Slice<bf16>,
    pub(super) head: Packed,
    /// Memory that all take.
    pub(super) bytes: usize,
}

/// One decoder layer.
#[derive(Debug)]
pub(super) struct DeviceLayer {
    pub(super) input_norm: Slice<bf16>,
    /// Rows of queries, then keys, then values.
    pub(super) qkv: Packed,
    /// Norms of each query head and of each key head.
    pub(super) qk_norm: Option<[Slice<bf16>; 2]>,
    /// One logit per query head.
    pub(super) sinks: Option<Slice<f32>>,
    pub(super) output: Packed,
    pub(super) post_norm: Slice<bf16>,
    /// Rows of the gate, then of the up projection.
    pub(super) gate_up: Packed,
    pub(super) down: Packed,
}

impl DeviceWeights {
    /// Copies weights, quantised as asked for; others than bf16 are rounded to it.
    pub(super) fn copy(
        device: &mut dyn Device,
        weights: &Weights,
        quantize: Quantize,
    ) -> Result<Self, DeviceError> {
        let kept = kept(quantize);
        let mut upload = Upload::new(device);
        let embedding = upload.matrix(&weights.embedding, Kept::Bf16, None)?;
        let layers =
            weights.layers.iter().map(|layer| upload.layer(layer, kept)).collect::<Result<Vec<_>, _>>()?;
        let head = match (&weights.head, head_kept(kept)) {
            (None, Kept::Bf16) => embedding,
            (head, kept) => upload.matrix(head.as_ref().unwrap_or(&weights.embedding), kept, None)?,
        };
        let norm = upload.vector(&weights.norm)?;
        Ok(Self { embedding, layers, norm, head, bytes: upload.bytes })
    }

    /// Of every product.
    pub(super) fn shapes(&self) -> impl Iterator<Item = Shape> {
        let of_layer = |layer: &DeviceLayer| {
            [layer.qkv, layer.output, layer.gate_up, layer.down].map(|packed| packed.shape)
        };
        self.layers.iter().flat_map(of_layer).chain([self.head.shape])
    }
}

/// How the matrices of layers are kept.
pub(super) fn kept(quantize: Quantize) -> Kept {
    match quantize {
        Quantize::None => Kept::Bf16,
        Quantize::Int8 => Kept::Int8,
        Quantize::Int4 => Kept::Int4,
    }
}

/// How the head is: the choice between tokens loses most by coarse weights.
pub(super) fn head_kept(layers: Kept) -> Kept {
    if layers == Kept::Bf16 { Kept::Bf16 } else { Kept::Int8 }
}

/// Copies weights to a device and counts their bytes.
pub(super) struct Upload<'a> {
    pub(super) device: &'a mut dyn Device,
    /// What multiplies bf16 weights.
    pub(super) unit: Unit,
    pub(super) bytes: usize,
}

impl<'a> Upload<'a> {
    pub(super) fn new(device: &'a mut dyn Device) -> Self {
        let unit = if device.has_warpgroups() { Unit::Warpgroup } else { Unit::Warp };
        Self { device, unit, bytes: 0 }
    }

    /// Room for `len` elements.
    pub(super) fn room<T: Element>(&mut self, len: usize) -> Result<Slice<T>, DeviceError> {
        self.bytes += len * size_of::<T>();
        self.device.slice(len)
    }

    pub(super) fn vector(&mut self, values: &[f32]) -> Result<Slice<bf16>, DeviceError> {
        let slice = self.room(values.len())?;
        let values: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
        self.device.overwrite(slice, &values)?;
        Ok(slice)
    }

    fn layer(&mut self, layer: &Layer, kept: Kept) -> Result<DeviceLayer, DeviceError> {
        let (AttentionWeights::Grouped(attention), FeedForwardWeights::Dense(mlp)) =
            (&layer.attention, &layer.feed_forward)
        else {
            return Err(DeviceError("a layer that no kernel covers".into()));
        };
        let qk_norm = match &attention.qk_norm {
            Some((q_norm, k_norm)) => Some([self.vector(q_norm)?, self.vector(k_norm)?]),
            None => None,
        };
        let sinks = match &attention.sinks {
            Some(sinks) => Some(self.device.upload(sinks)?),
            None => None,
        };
        Ok(DeviceLayer {
            input_norm: self.vector(&layer.input_norm)?,
            qkv: self.linear(&attention.qkv, kept)?,
            qk_norm,
            sinks,
            output: self.linear(&attention.output, kept)?,
            post_norm: self.vector(&layer.post_norm)?,
            gate_up: self.linear(&mlp.gate_up, kept)?,
            down: self.linear(&mlp.down, kept)?,
        })
    }

    fn linear(&mut self, linear: &Linear, kept: Kept) -> Result<Packed, DeviceError> {
        self.matrix(&linear.weight, kept, linear.bias.as_deref())
    }

    fn matrix(
        &mut self,
        matrix: &PackedMatrix,
        kept: Kept,
        bias: Option<&[f32]>,
    ) -> Result<Packed, DeviceError> {
        let shape = Shape { outputs: matrix.outputs(), inputs: matrix.inputs(), weights: kept };
        let images: Slice<u8> = self.room(shape.packed_bytes())?;
        let mut scales = vec![0.0; if kept == Kept::Bf16 { 0 } else { shape.inputs / GROUP * shape.outputs }];
        let mut end = 0;
        let bands: Vec<usize> = (0..shape.outputs).step_by(TILE).collect();
        let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        for batch in bands.chunks(threads * BANDS) {
            for band in pack_bands(matrix, shape, batch) {
                self.device.write(images.buffer, end, &band.image)?;
                end += band.image.len() as u64;
                band.put_scales(&mut scales, shape.outputs);
            }
        }
        let scales = if scales.is_empty() { None } else { Some(self.device.upload(&scales)?) };
        self.bytes += scales.map_or(0, |scales| scales.len * size_of::<f32>());
        let bias = match bias {
            Some(bias) => Some(self.vector(bias)?),
            None => None,
        };
        Ok(Packed { shape, unit: self.unit, images, scales, bias })
    }
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
    fn pack(matrix: &PackedMatrix, shape: Shape, first: usize) -> Self {
        let (rows, inputs) = (TILE.min(shape.outputs - first), shape.inputs);
        let mut values = vec![0.0; rows * inputs];
        for (n, row) in values.chunks_exact_mut(inputs).enumerate() {
            matrix.copy_row(first + n, row);
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
fn pack_bands(matrix: &PackedMatrix, shape: Shape, firsts: &[usize]) -> Vec<Band> {
    let pack = |firsts: &[usize]| firsts.iter().map(|first| Band::pack(matrix, shape, *first)).collect();
    if firsts.len() <= BANDS {
        return pack(firsts);
    }
    let pack = &pack;
    thread::scope(|scope| {
        let parts = firsts.chunks(BANDS).map(|part| scope.spawn(move || -> Vec<Band> { pack(part) }));
        let parts: Vec<_> = parts.collect();
        let joined = parts.into_iter().map(thread::ScopedJoinHandle::join);
        joined.flat_map(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}
