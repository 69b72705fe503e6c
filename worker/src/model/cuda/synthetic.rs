//! Random weights made for a device alone, a block of them again and again: a model of any size without its copy in
//! this machine's memory, for benchmarks.

use half::bf16;
use keyway_kernels::cuda::matmul::{GROUP, Packed, Shape, Weights as Kept};
use keyway_kernels::cuda::{Device, DeviceError};
use keyway_kernels::rope::Rope;

use super::weights::{DeviceLayer, DeviceWeights, Upload, head_kept, kept};
use super::{CudaModel, covered};
use crate::model::config::{Config, FeedForward, Grouped, LayerShape};
use crate::model::{ModelError, Quantize};

/// Elements of the block: no multiple of a row, so that rows differ.
const BLOCK: usize = (4 << 20) + 24;

impl<D: Device> CudaModel<D> {
    /// The model that a `config.json` describes, with random weights.
    pub fn synthetic(config: &str, mut device: D, quantize: Quantize) -> Result<Self, ModelError> {
        let config = Config::from_json(config)?;
        let grouped = covered(&config, quantize)?;
        let weights = Maker::new(&mut device).weights(&config, &grouped, quantize).map_err(super::failed)?;
        let rope = Rope::new(grouped.head_dim, config.rope.theta, config.rope.scaling);
        Ok(Self::new("synthetic".into(), device, (config, grouped), weights, rope, (quantize, "synthetic")))
    }
}

struct Maker<'a> {
    upload: Upload<'a>,
    random: fastrand::Rng,
}

impl<'a> Maker<'a> {
    fn new(device: &'a mut dyn Device) -> Self {
        Self { upload: Upload::new(device), random: fastrand::Rng::with_seed(8) }
    }

    fn weights(
        mut self,
        config: &Config,
        grouped: &Grouped,
        quantize: Quantize,
    ) -> Result<DeviceWeights, DeviceError> {
        let (kept, hidden) = (kept(quantize), config.hidden);
        let embedding = self.matrix(config.vocab_size, hidden, Kept::Bf16, false)?;
        let layers = config.layers.iter().map(|layer| self.layer(layer, hidden, grouped, kept));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let head = match head_kept(kept) {
            Kept::Bf16 if config.tied_embeddings => embedding,
            head => self.matrix(config.vocab_size, hidden, head, false)?,
        };
        let norm = self.upload.vector(&vec![1.0; hidden])?;
        Ok(DeviceWeights { embedding, layers, norm, head, bytes: self.upload.bytes })
    }

    fn layer(
        &mut self,
        layer: &LayerShape,
        hidden: usize,
        grouped: &Grouped,
        kept: Kept,
    ) -> Result<DeviceLayer, DeviceError> {
        let Grouped { heads, kv_heads, head_dim, .. } = *grouped;
        let (FeedForward::Dense { width }
        | FeedForward::Experts(crate::model::config::Experts { width, .. })) = layer.feed_forward;
        let qk_norm = if grouped.qk_norm {
            Some([self.upload.vector(&vec![1.0; head_dim])?, self.upload.vector(&vec![1.0; head_dim])?])
        } else {
            None
        };
        let qkv = (heads + 2 * kv_heads) * head_dim;
        Ok(DeviceLayer {
            input_norm: self.upload.vector(&vec![1.0; hidden])?,
            qkv: self.matrix(qkv, hidden, kept, grouped.qkv_bias)?,
            qk_norm,
            sinks: None,
            output: self.matrix(hidden, heads * head_dim, kept, grouped.output_bias)?,
            post_norm: self.upload.vector(&vec![1.0; hidden])?,
            gate_up: self.matrix(2 * width, hidden, kept, false)?,
            down: self.matrix(hidden, width, kept, false)?,
        })
    }

    /// Uniform around 0, so that products keep the size of their inputs; integers are random bits.
    fn matrix(
        &mut self,
        outputs: usize,
        inputs: usize,
        kept: Kept,
        bias: bool,
    ) -> Result<Packed, DeviceError> {
        let shape = Shape { outputs, inputs, weights: kept };
        let images = self.upload.room(shape.packed_bytes())?;
        let largest = (3.0 / inputs as f32).sqrt();
        let elements = BLOCK.min(images.len / 2);
        let block: Vec<u8> = if kept == Kept::Bf16 {
            let value = |random: &mut fastrand::Rng| bf16::from_f32((random.f32() * 2.0 - 1.0) * largest);
            (0..elements).flat_map(|_| value(&mut self.random).to_le_bytes()).collect()
        } else {
            (0..2 * elements).map(|_| self.random.u8(..)).collect()
        };
        for at in (0..images.len).step_by(block.len()) {
            let part = &block[..block.len().min(images.len - at)];
            self.upload.device.write(images.buffer, at as u64, part)?;
        }
        let steps = if kept == Kept::Int8 { 127.0 } else { 7.0 };
        let scales = match kept {
            Kept::Bf16 => None,
            _ => Some(self.upload.device.upload(&vec![largest / steps; inputs / GROUP * outputs])?),
        };
        self.upload.bytes += scales.map_or(0, |scales| scales.len * size_of::<f32>());
        let bias = if bias { Some(self.upload.vector(&vec![0.0; outputs])?) } else { None };
        Ok(Packed { shape, unit: self.upload.unit, images, scales, bias })
    }
}
