//! From a checkpoint's tensors to packed weights, and to the hash that names them. How attention and experts
//! are stored is in `loader/`.

mod attention;
mod feed_forward;

use keyway_kernels::matmul::{IntBits, PackedMatrix};
use keyway_kernels::rope::Rope;
use xxhash_rust::xxh3::Xxh3;

use super::config::{Config, FeedForward, Quantisation};
use super::stored::{FP8_BLOCK, Rows, Stored, pack};
use super::tensor::{Tensor, TensorSource, TensorType};
use super::weights::{Layer, Linear, Mlp, Weights};
use super::{ModelError, Quantize};

impl Weights {
    /// Packs every tensor that `config` implies. The second value names configuration and weights by a hash:
    /// equal only if both are.
    pub(super) fn load(
        source: &dyn TensorSource,
        config: &Config,
        quantize: Quantize,
        held: Held<'_>,
    ) -> Result<(Self, String), ModelError> {
        let (bits, hash) = (quantize.layers(), Some(Xxh3::new()));
        let mut loader = Loader { source, config, bits, hash, held };
        let rope = Rope::new(config.attention.rope_dim(), config.rope.theta, config.rope.scaling);
        loader.digest(format!("{config:?}").as_bytes());
        for frequency in rope.inv_freq() {
            loader.digest(&frequency.to_le_bytes());
        }
        let (vocab, hidden) = (config.vocab_size, config.hidden);
        let layers = (0..config.layers.len()).map(|i| loader.layer(i)).collect::<Result<_, _>>()?;
        let head = quantize.head();
        // A look-up reads one row: what is not the head as well would gain nothing.
        let embedding = head.filter(|_| config.tied_embeddings);
        let weights = Self {
            embedding: loader.matrix(&[("model.embed_tokens.weight", vocab)], hidden, embedding)?,
            layers,
            norm: loader.vector("model.norm.weight", hidden)?,
            head: if config.tied_embeddings {
                None
            } else {
                Some(loader.matrix(&[("lm_head.weight", vocab)], hidden, head)?)
            },
            rope,
        };
        let digest = loader.hash.map_or(0, |hash| hash.digest128());
        Ok((weights, format!("{digest:032x}")))
    }
}

/// The experts of one layer that `held` names; nothing for a layer without.
pub(super) fn experts(
    source: &dyn TensorSource,
    config: &Config,
    quantize: Quantize,
    layer: usize,
    held: &dyn Fn(usize) -> bool,
) -> Result<Vec<Option<Mlp>>, ModelError> {
    let FeedForward::Experts(shape) = config.layers[layer].feed_forward else { return Ok(Vec::new()) };
    let held: Held<'_> = &|_, expert| held(expert);
    let mut loader = Loader { source, config, bits: quantize.layers(), hash: None, held };
    let name = format!("model.layers.{layer}.{}.experts", config.names.feed_forward);
    loader.networks(&name, layer, shape)
}

/// Whether this process holds an expert of a layer.
pub(super) type Held<'a> = &'a dyn Fn(usize, usize) -> bool;

/// What `PackedMatrix::pack_fp8` takes; models' scales are far below 1.
const FP8_SCALE_MAX: f32 = f32::from_bits((127 + 120) << 23);

struct Loader<'a> {
    source: &'a dyn TensorSource,
    config: &'a Config,
    /// What the matrices of layers are quantised to.
    bits: Option<IntBits>,
    /// Of everything that is read; `None` where no caller wants it.
    hash: Option<Xxh3>,
    held: Held<'a>,
}

impl<'a> Loader<'a> {
    fn layer(&mut self, i: usize) -> Result<Layer, ModelError> {
        let name = |part: &str| format!("model.layers.{i}.{part}");
        Ok(Layer {
            input_norm: self.vector(&name("input_layernorm.weight"), self.config.hidden)?,
            attention: self.attention(&name("self_attn"))?,
            post_norm: self.vector(&name("post_attention_layernorm.weight"), self.config.hidden)?,
            feed_forward: self.feed_forward(&name(self.config.names.feed_forward), i)?,
        })
    }

    /// Products with a common input, stacked: `parts` are (name without `.weight`, outputs).
    fn linear(&mut self, parts: &[(&str, usize)], inputs: usize, bias: bool) -> Result<Linear, ModelError> {
        self.linear_of(parts, inputs, bias, self.bits)
    }

    /// [`Loader::linear`], quantised to these `bits` or not at all.
    fn linear_of(
        &mut self,
        parts: &[(&str, usize)],
        inputs: usize,
        bias: bool,
        bits: Option<IntBits>,
    ) -> Result<Linear, ModelError> {
        let names: Vec<String> = parts.iter().map(|(name, _)| format!("{name}.weight")).collect();
        let stacked: Vec<(&str, usize)> =
            names.iter().zip(parts).map(|(name, (_, outputs))| (name.as_str(), *outputs)).collect();
        let weight = self.matrix(&stacked, inputs, bits)?;
        let bias = if bias {
            let biases = parts.iter().map(|(name, outputs)| self.vector(&format!("{name}.bias"), *outputs));
            Some(biases.collect::<Result<Vec<_>, _>>()?.concat())
        } else {
            None
        };
        Ok(Linear { weight, bias })
    }

    /// Matrices stacked by rows: `parts` are (name, rows).
    fn matrix(
        &mut self,
        parts: &[(&str, usize)],
        inputs: usize,
        bits: Option<IntBits>,
    ) -> Result<PackedMatrix, ModelError> {
        let mut stored = Vec::new();
        for (name, rows) in parts {
            stored.push((self.stored(name, *rows, inputs)?, *rows));
        }
        let rows: Vec<Rows<'_, '_>> =
            stored.iter().map(|(from, count)| Rows { from, first: 0, step: 1, count: *count }).collect();
        Ok(pack(&rows, inputs, bits))
    }

    /// The matrix `name`; with its scales if it is in FP8.
    fn stored(&mut self, name: &str, rows: usize, inputs: usize) -> Result<Stored<'a>, ModelError> {
        let tensor = self.tensor(name, &[rows, inputs])?;
        if tensor.kind != TensorType::F8E4M3 {
            number(name, &tensor)?;
            return Ok(Stored::Plain(tensor));
        }
        if self.config.quantisation != Quantisation::Fp8Blocks {
            return wrong_type(name, tensor.kind);
        }
        let scales_name = format!("{name}_scale_inv");
        let scales = self.tensor(&scales_name, &[rows.div_ceil(FP8_BLOCK), inputs.div_ceil(FP8_BLOCK)])?;
        number(&scales_name, &scales)?;
        let mut values = vec![0.0; scales.width];
        for row in 0..rows.div_ceil(FP8_BLOCK) {
            scales.copy_row(row, &mut values);
            // Also refuses what is no number.
            if !values.iter().all(|scale| scale.abs() < FP8_SCALE_MAX) {
                let reason = format!("row {row} has a scale that is not below 2^120");
                return Err(ModelError::TensorValue { name: scales_name, reason });
            }
        }
        Ok(Stored::Fp8 { codes: tensor, scales })
    }

    /// A tensor of bytes.
    fn codes(&mut self, name: &str, shape: &[usize]) -> Result<Tensor<'a>, ModelError> {
        let tensor = self.tensor(name, shape)?;
        if tensor.kind == TensorType::U8 { Ok(tensor) } else { wrong_type(name, tensor.kind) }
    }

    fn vector(&mut self, name: &str, width: usize) -> Result<Vec<f32>, ModelError> {
        let mut out = vec![0.0; width];
        let tensor = self.tensor(name, &[width])?;
        number(name, &tensor)?;
        tensor.copy_row(0, &mut out);
        Ok(out)
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor<'a>, ModelError> {
        let tensor = self.source.tensor(name, shape)?;
        self.digest(format!("{name} {:?} {shape:?}", tensor.kind).as_bytes());
        self.digest(&tensor.bytes);
        Ok(tensor)
    }

    fn digest(&mut self, bytes: &[u8]) {
        if let Some(hash) = &mut self.hash {
            hash.update(bytes);
        }
    }
}

/// Refuses codes where numbers are wanted.
fn number(name: &str, tensor: &Tensor<'_>) -> Result<(), ModelError> {
    match tensor.kind {
        TensorType::F32 | TensorType::F16 | TensorType::Bf16 => Ok(()),
        kind => wrong_type(name, kind),
    }
}

fn wrong_type<T>(name: &str, kind: TensorType) -> Result<T, ModelError> {
    Err(ModelError::TensorType { name: name.into(), dtype: format!("{kind:?}") })
}
