//! Weights on a device: what there is of them, and their way there. `packing.rs` packs them.

use half::bf16;
pub(super) use keyway_kernels::cuda::matmul::Weights as Kept;
use keyway_kernels::cuda::matmul::{Packed, Shape, Unit};
use keyway_kernels::cuda::{Device, DeviceError, Element, Slice, moe};
use keyway_kernels::matmul::PackedMatrix;

use super::experts::DeviceExperts;
use super::latent::DeviceLatent;
pub(super) use super::packing::Order;
use super::packing::{as_stored, pack};
use super::sharing::HeldExperts;
use crate::model::Quantize;
use crate::model::experts::Bank;
use crate::model::weights::{
    AttentionWeights, ExpertsWeights, FeedForwardWeights, GroupedWeights, Layer, Linear, Mlp, Weights,
};

/// A model's weights on the device: matrices packed, norms in bf16.
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

/// The weights of one decoder layer: attention, a feed-forward part, and the norm before each.
#[derive(Debug)]
pub(super) struct DeviceLayer {
    pub(super) input_norm: Slice<bf16>,
    pub(super) attention: DeviceAttention,
    pub(super) post_norm: Slice<bf16>,
    pub(super) feed_forward: DeviceFeedForward,
}

/// The attention of a layer.
#[derive(Debug)]
pub(super) enum DeviceAttention {
    Grouped(Box<DeviceGrouped>),
    Latent(Box<DeviceLatent>),
}

/// The weights of one layer's grouped-query attention, packed for the device.
#[derive(Debug)]
pub(super) struct DeviceGrouped {
    /// Rows of queries, then keys, then values.
    pub(super) qkv: Packed,
    /// Norms of each query head and of each key head.
    pub(super) qk_norm: Option<[Slice<bf16>; 2]>,
    /// One logit per query head.
    pub(super) sinks: Option<Slice<f32>>,
    pub(super) output: Packed,
}

/// The feed-forward part of a layer.
#[derive(Debug)]
pub(super) enum DeviceFeedForward {
    Dense(Box<DeviceMlp>),
    Experts(Box<DeviceExperts>),
}

/// A gated network that all rows go through.
#[derive(Debug)]
pub(super) struct DeviceMlp {
    /// Rows of the gate, then of the up projection.
    pub(super) gate_up: Packed,
    pub(super) down: Packed,
}

impl DeviceWeights {
    /// Copies weights: what is stored in FP8 or MXFP4 as it is, all else quantised as asked for, or rounded
    /// to bf16.
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
            (head, kept) => {
                let head = head.as_ref().unwrap_or(&weights.embedding);
                upload.matrix(head, as_stored([head].into_iter(), kept), None)?
            }
        };
        let norm = upload.vector(&weights.norm)?;
        Ok(Self { embedding, layers, norm, head, bytes: upload.bytes })
    }

    /// Of every product that all rows go through.
    pub(super) fn shapes(&self) -> impl Iterator<Item = Shape> {
        let of_layer = |layer: &DeviceLayer| {
            let (router, mlp) = match &layer.feed_forward {
                DeviceFeedForward::Dense(mlp) => (None, Some(&**mlp)),
                DeviceFeedForward::Experts(experts) => (Some(experts.router), experts.shared.as_ref()),
            };
            let mlp = mlp.map(|mlp| [mlp.gate_up, mlp.down]);
            let mut packed: Vec<Packed> = router.into_iter().chain(mlp.into_iter().flatten()).collect();
            match &layer.attention {
                DeviceAttention::Grouped(grouped) => packed.extend([grouped.qkv, grouped.output]),
                DeviceAttention::Latent(latent) => packed.extend(latent.packed()),
            }
            packed.into_iter().map(|packed| packed.shape)
        };
        self.layers.iter().flat_map(of_layer).chain([self.head.shape])
    }
}

/// How the matrices of layers are kept that are not stored in FP8 or MXFP4.
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
        Ok(DeviceLayer {
            input_norm: self.vector(&layer.input_norm)?,
            attention: match &layer.attention {
                AttentionWeights::Grouped(grouped) => {
                    DeviceAttention::Grouped(Box::new(self.grouped(grouped, kept)?))
                }
                AttentionWeights::Latent(latent) => {
                    DeviceAttention::Latent(Box::new(self.latent(latent, kept)?))
                }
            },
            post_norm: self.vector(&layer.post_norm)?,
            feed_forward: match &layer.feed_forward {
                FeedForwardWeights::Dense(mlp) => DeviceFeedForward::Dense(Box::new(self.mlp(mlp, kept)?)),
                FeedForwardWeights::Experts(experts) => {
                    DeviceFeedForward::Experts(Box::new(self.experts(experts, kept)?))
                }
            },
        })
    }

    fn grouped(&mut self, attention: &GroupedWeights, kept: Kept) -> Result<DeviceGrouped, DeviceError> {
        let qk_norm = match &attention.qk_norm {
            Some((q_norm, k_norm)) => Some([self.vector(q_norm)?, self.vector(k_norm)?]),
            None => None,
        };
        let sinks = match &attention.sinks {
            Some(sinks) => Some(self.device.upload(sinks)?),
            None => None,
        };
        Ok(DeviceGrouped {
            qkv: self.linear(&attention.qkv, kept)?,
            qk_norm,
            sinks,
            output: self.linear(&attention.output, kept)?,
        })
    }

    fn mlp(&mut self, mlp: &Mlp, kept: Kept) -> Result<DeviceMlp, DeviceError> {
        Ok(DeviceMlp { gate_up: self.linear(&mlp.gate_up, kept)?, down: self.linear(&mlp.down, kept)? })
    }

    fn experts(&mut self, experts: &ExpertsWeights, kept: Kept) -> Result<DeviceExperts, DeviceError> {
        let correction_bias = experts.correction_bias.as_ref().map(|bias| self.device.upload(bias));
        let shared = experts.shared.as_ref().map(|mlp| self.mlp(mlp, kept));
        Ok(DeviceExperts {
            routing: experts.shape.routing,
            router: self.matrix(&experts.router.weight, Kept::Bf16, experts.router.bias.as_deref())?,
            correction_bias: correction_bias.transpose()?,
            held: self.held(&experts.experts, kept)?,
            shared: shared.transpose()?,
        })
    }

    /// The experts of a layer that are held here.
    pub(super) fn held(&mut self, bank: &Bank, kept: Kept) -> Result<HeldExperts, DeviceError> {
        let networks: Vec<&Mlp> = bank.networks.iter().flatten().collect();
        let width = networks.first().map_or(0, |mlp| mlp.down.weight.inputs());
        // Both products take items of as many rows.
        let both = networks.iter().flat_map(|mlp| [&mlp.gate_up.weight, &mlp.down.weight]);
        let stored = as_stored(both, kept);
        let gate_up = networks.iter().map(|mlp| parts(&mlp.gate_up));
        Ok(HeldExperts {
            gate_up: self.bank(gate_up, stored, Order::Woven { width })?,
            gate: bank.gate,
            down: self.bank(networks.iter().map(|mlp| parts(&mlp.down)), stored, Order::AsStored)?,
        })
    }

    /// One product of all experts, one after another: matrices and biases.
    pub(super) fn bank<'l>(
        &mut self,
        linears: impl Iterator<Item = (&'l PackedMatrix, Option<&'l [f32]>)> + Clone,
        kept: Kept,
        order: Order,
    ) -> Result<moe::ExpertWeights, DeviceError> {
        let count = linears.clone().count();
        let Some((weight, _)) = linears.clone().next() else {
            return Err(DeviceError("a layer without experts".into()));
        };
        let shape = Shape { outputs: weight.outputs(), inputs: weight.inputs(), weights: kept };
        let images: Slice<u8> = self.room(count * shape.packed_bytes())?;
        let (mut scales, mut biases) = (Vec::new(), Vec::new());
        for (expert, (weight, bias)) in linears.enumerate() {
            let at = (expert * shape.packed_bytes()) as u64;
            scales.extend(self.pack(weight, shape, order, (images.buffer, at))?);
            let bias = bias.into_iter().flat_map(|bias| (0..shape.outputs).map(move |n| bias[order.row(n)]));
            biases.extend(bias);
        }
        let bias = if biases.is_empty() { None } else { Some(self.vector(&biases)?) };
        Ok(moe::ExpertWeights { count, shape, unit: self.unit, images, scales: self.scales(&scales)?, bias })
    }

    pub(super) fn linear(&mut self, linear: &Linear, kept: Kept) -> Result<Packed, DeviceError> {
        let kept = as_stored([&linear.weight].into_iter(), kept);
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
        let scales = self.pack(matrix, shape, Order::AsStored, (images.buffer, 0))?;
        let scales = self.scales(&scales)?;
        let bias = match bias {
            Some(bias) => Some(self.vector(bias)?),
            None => None,
        };
        Ok(Packed { shape, unit: self.unit, images, scales, bias })
    }

    /// Packs a matrix into a buffer from a byte on. Its scales.
    fn pack(
        &mut self,
        matrix: &PackedMatrix,
        shape: Shape,
        order: Order,
        (buffer, mut at): (u64, u64),
    ) -> Result<Vec<f32>, DeviceError> {
        pack(matrix, shape, order, |image| {
            self.device.write(buffer, at, image)?;
            at += image.len() as u64;
            Ok(())
        })
    }

    pub(super) fn scales(&mut self, scales: &[f32]) -> Result<Option<Slice<f32>>, DeviceError> {
        self.bytes += size_of_val(scales);
        if scales.is_empty() { Ok(None) } else { self.device.upload(scales).map(Some) }
    }
}

/// A product's matrix and bias.
fn parts(linear: &Linear) -> (&PackedMatrix, Option<&[f32]>) {
    (&linear.weight, linear.bias.as_deref())
}
