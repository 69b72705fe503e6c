//! Random weights made for a device alone, a block of them again and again: a model of any size without its
//! copy in this machine's memory, for benchmarks.

use half::bf16;
use keyway_kernels::cuda::matmul::{Packed, Shape, TILE};
use keyway_kernels::cuda::{Device, DeviceError, Slice, moe};
use keyway_kernels::rope::Rope;

use super::experts::DeviceExperts;
use super::latent::DeviceLatent;
use super::sharing::HeldExperts;
use super::weights::{
    DeviceAttention, DeviceFeedForward, DeviceGrouped, DeviceLayer, DeviceMlp, DeviceWeights, Kept, Upload,
    head_kept, kept,
};
use super::{CudaModel, covered};
use crate::model::config::{
    Attention, Config, Experts, FeedForward, Grouped, Latent, LayerShape, Quantisation,
};
use crate::model::{ModelError, Quantize};

/// Elements of the block: no multiple of a row, so that rows differ.
const BLOCK: usize = (4 << 20) + 24;
/// Images of MXFP4 that make such a block.
const MXFP4_IMAGES: usize = 3079;

impl<D: Device> CudaModel<D> {
    /// The model that a `config.json` describes, with random weights.
    pub fn synthetic(config: &str, mut device: D, quantize: Quantize) -> Result<Self, ModelError> {
        let config = Config::from_json(config)?;
        let heads = covered(&config, quantize)?;
        let weights = Maker::new(&mut device).weights(&config, quantize).map_err(super::failed)?;
        let rope = Rope::new(config.attention.rope_dim(), config.rope.theta, config.rope.scaling);
        Ok(Self::new("synthetic".into(), device, (config, heads), weights, rope, (quantize, "synthetic")))
    }
}

struct Maker<'a> {
    upload: Upload<'a>,
    random: fastrand::Rng,
    /// How experts are stored, where that is another way than other products.
    experts: Option<Kept>,
}

impl<'a> Maker<'a> {
    fn new(device: &'a mut dyn Device) -> Self {
        Self { upload: Upload::new(device), random: fastrand::Rng::with_seed(8), experts: None }
    }

    fn weights(mut self, config: &Config, quantize: Quantize) -> Result<DeviceWeights, DeviceError> {
        let (asked, hidden) = (kept(quantize), config.hidden);
        let kept = if config.quantisation == Quantisation::Fp8Blocks { Kept::Fp8 } else { asked };
        self.experts = (config.quantisation == Quantisation::Mxfp4Experts).then_some(Kept::Mxfp4);
        let embedding = self.matrix(config.vocab_size, hidden, Kept::Bf16, false)?;
        let layers = config.layers.iter().map(|layer| self.layer(layer, hidden, &config.attention, kept));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let head = match head_kept(asked) {
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
        attention: &Attention,
        kept: Kept,
    ) -> Result<DeviceLayer, DeviceError> {
        Ok(DeviceLayer {
            input_norm: self.upload.vector(&vec![1.0; hidden])?,
            attention: match attention {
                Attention::Grouped(grouped) => {
                    DeviceAttention::Grouped(Box::new(self.grouped(grouped, hidden, kept)?))
                }
                Attention::Latent(latent) => {
                    DeviceAttention::Latent(Box::new(self.latent(latent, hidden, kept)?))
                }
            },
            post_norm: self.upload.vector(&vec![1.0; hidden])?,
            feed_forward: match layer.feed_forward {
                FeedForward::Dense { width } => {
                    DeviceFeedForward::Dense(Box::new(self.mlp(width, hidden, kept)?))
                }
                FeedForward::Experts(shape) => {
                    DeviceFeedForward::Experts(Box::new(self.experts(&shape, hidden, kept)?))
                }
            },
        })
    }

    fn grouped(
        &mut self,
        grouped: &Grouped,
        hidden: usize,
        kept: Kept,
    ) -> Result<DeviceGrouped, DeviceError> {
        let Grouped { heads, kv_heads, head_dim, .. } = *grouped;
        let qk_norm = if grouped.qk_norm {
            Some([self.upload.vector(&vec![1.0; head_dim])?, self.upload.vector(&vec![1.0; head_dim])?])
        } else {
            None
        };
        let qkv = (heads + 2 * kv_heads) * head_dim;
        Ok(DeviceGrouped {
            qkv: self.matrix(qkv, hidden, kept, grouped.qkv_bias)?,
            qk_norm,
            sinks: if grouped.sinks { Some(self.upload.device.upload(&vec![0.0; heads])?) } else { None },
            output: self.matrix(hidden, heads * head_dim, kept, grouped.output_bias)?,
        })
    }

    fn latent(&mut self, latent: &Latent, hidden: usize, kept: Kept) -> Result<DeviceLatent, DeviceError> {
        let Latent { heads, query_rank, rank, nope_dim, rope_dim, value_dim, bias, .. } = *latent;
        let (query_dim, key_dim) = (nope_dim + rope_dim, rank + rope_dim);
        let query_down = match query_rank {
            Some(rank) => {
                let down = self.matrix(rank, hidden, kept, bias)?;
                Some((down, self.upload.vector(&vec![1.0; rank])?))
            }
            None => None,
        };
        let per_head = |outputs, inputs| Shape { outputs, inputs, weights: Kept::Bf16 };
        Ok(DeviceLatent {
            query_down,
            query: self.matrix(heads * query_dim, query_rank.unwrap_or(hidden), kept, false)?,
            kv_down: self.matrix(key_dim, hidden, kept, bias)?,
            latent_norm: self.upload.vector(&vec![1.0; rank])?,
            absorb: self.bank(heads, per_head(key_dim, query_dim), false)?,
            expand: self.bank(heads, per_head(value_dim, rank), false)?,
            output: self.matrix(hidden, heads * value_dim, kept, bias)?,
        })
    }

    fn mlp(&mut self, width: usize, hidden: usize, kept: Kept) -> Result<DeviceMlp, DeviceError> {
        Ok(DeviceMlp {
            gate_up: self.matrix(2 * width, hidden, kept, false)?,
            down: self.matrix(hidden, width, kept, false)?,
        })
    }

    fn experts(&mut self, shape: &Experts, hidden: usize, kept: Kept) -> Result<DeviceExperts, DeviceError> {
        let Experts { count, width, biases, .. } = *shape;
        let weights = self.experts.unwrap_or(kept);
        let correction_bias =
            if shape.correction_bias { Some(self.upload.device.upload(&vec![0.0; count])?) } else { None };
        let shared = shape.shared_width.map(|width| self.mlp(width, hidden, kept)).transpose()?;
        Ok(DeviceExperts {
            routing: shape.routing,
            router: self.matrix(count, hidden, Kept::Bf16, biases)?,
            correction_bias,
            held: HeldExperts {
                gate_up: self.bank(count, Shape { outputs: 2 * width, inputs: hidden, weights }, biases)?,
                gate: shape.gate,
                down: self.bank(count, Shape { outputs: hidden, inputs: width, weights }, biases)?,
            },
            shared,
        })
    }

    fn matrix(
        &mut self,
        outputs: usize,
        inputs: usize,
        kept: Kept,
        bias: bool,
    ) -> Result<Packed, DeviceError> {
        let shape = Shape { outputs, inputs, weights: kept };
        let (images, scales) = self.fill(1, shape)?;
        let bias = if bias { Some(self.upload.vector(&vec![0.0; outputs])?) } else { None };
        Ok(Packed { shape, unit: self.upload.unit, images, scales, bias })
    }

    /// One product of all experts.
    fn bank(&mut self, count: usize, shape: Shape, bias: bool) -> Result<moe::ExpertWeights, DeviceError> {
        let (images, scales) = self.fill(count, shape)?;
        let bias = if bias { Some(self.upload.vector(&vec![0.0; count * shape.outputs])?) } else { None };
        Ok(moe::ExpertWeights { count, shape, unit: self.upload.unit, images, scales, bias })
    }

    /// `count` packed matrices and their scales: around 0 and of such a size that products keep that of their
    /// inputs; codes are random bits.
    fn fill(&mut self, count: usize, shape: Shape) -> Result<(Slice<u8>, Option<Slice<f32>>), DeviceError> {
        let images = self.upload.room(count * shape.packed_bytes())?;
        let deviation = (1.0 / shape.inputs as f32).sqrt();
        let block = self.block(shape, deviation, images.len);
        for at in (0..images.len).step_by(block.len()) {
            let part = &block[..block.len().min(images.len - at)];
            self.upload.device.write(images.buffer, at as u64, part)?;
        }
        // How far random codes deviate, in steps.
        let steps = match shape.weights {
            Kept::Int8 => 73.9,
            Kept::Int4 => 4.6,
            Kept::Fp8 => 111.0,
            Kept::Bf16 | Kept::Mxfp4 => 1.0,
        };
        let scales = self.upload.scales(&vec![deviation / steps; count * shape.scales()])?;
        Ok((images, scales))
    }

    /// What images are made of, again and again; of whole images where these are no codes alone.
    fn block(&mut self, shape: Shape, deviation: f32, len: usize) -> Vec<u8> {
        let random = &mut self.random;
        match shape.weights {
            Kept::Bf16 => {
                let largest = deviation * 3.0_f32.sqrt();
                let mut value = || bf16::from_f32((random.f32() * 2.0 - 1.0) * largest);
                (0..BLOCK.min(len / 2)).flat_map(|_| value().to_le_bytes()).collect()
            }
            Kept::Mxfp4 => {
                // Random codes deviate by 2.9.
                let power = (deviation / 2.9).log2().round() as i32 + 127;
                let image = shape.packed_bytes() / (shape.outputs.div_ceil(TILE) * (shape.inputs / TILE));
                let codes = TILE * TILE / 2;
                let mut image = || -> Vec<u8> {
                    (0..image).map(|i| if i < codes { random.u8(..) } else { power as u8 }).collect()
                };
                (0..MXFP4_IMAGES).flat_map(|_| image()).take(len).collect()
            }
            _ => (0..(2 * BLOCK).min(len)).map(|_| random.u8(..)).collect(),
        }
    }
}
