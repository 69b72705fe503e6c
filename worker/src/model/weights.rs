//! A model's weights, packed for the kernels. Tensor names are those of Hugging Face's Llama and Qwen
//! families.

use keyway_kernels::matmul::{PackedMatrix, WeightType};
use keyway_kernels::rope::Rope;
use xxhash_rust::xxh3::Xxh3;

use super::ModelError;
use super::config::{Config, FeedForward};
use super::tensor::{Tensor, TensorSource, TensorType};

/// All weights.
#[derive(Debug)]
pub(super) struct Weights {
    /// Token embeddings `[vocab, hidden]`.
    pub(super) embedding: PackedMatrix,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// The head `[vocab, hidden]`; `None`: the embeddings are used.
    pub(super) head: Option<PackedMatrix>,
    pub(super) rope: Rope,
}

/// One decoder layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) input_norm: Vec<f32>,
    /// Rows of queries, then keys, then values.
    pub(super) qkv: Linear,
    /// Norms of each query head and of each key head.
    pub(super) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(super) output: Linear,
    pub(super) post_norm: Vec<f32>,
    pub(super) feed_forward: FeedForwardWeights,
}

/// A product with an optional bias.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) weight: PackedMatrix,
    pub(super) bias: Option<Vec<f32>>,
}

/// The feed-forward part of a layer.
#[derive(Debug)]
pub(super) enum FeedForwardWeights {
    Dense(Mlp),
    Experts { router: PackedMatrix, experts: Vec<Mlp>, top: usize, renormalise: bool },
}

/// A gated feed-forward network.
#[derive(Debug)]
pub(super) struct Mlp {
    /// Rows of the gate, then of the up projection.
    pub(super) gate_up: PackedMatrix,
    pub(super) down: PackedMatrix,
}

impl Weights {
    /// Packs every tensor that `config` implies. The second value names configuration and weights by a hash:
    /// equal only if both are.
    pub(super) fn load(source: &dyn TensorSource, config: &Config) -> Result<(Self, String), ModelError> {
        let mut loader = Loader { source, hash: Xxh3::new() };
        let rope = Rope::new(config.head_dim, config.rope_theta, config.rope_scaling);
        loader.hash.update(format!("{config:?}").as_bytes());
        for frequency in rope.inv_freq() {
            loader.hash.update(&frequency.to_le_bytes());
        }
        let (vocab, hidden) = (config.vocab_size, config.hidden);
        let layers = (0..config.layers.len()).map(|i| loader.layer(i, config)).collect::<Result<_, _>>()?;
        let weights = Self {
            embedding: loader.matrix(&[("model.embed_tokens.weight", vocab)], hidden)?,
            layers,
            norm: loader.vector("model.norm.weight", hidden)?,
            head: if config.tied_embeddings {
                None
            } else {
                Some(loader.matrix(&[("lm_head.weight", vocab)], hidden)?)
            },
            rope,
        };
        Ok((weights, format!("{:032x}", loader.hash.digest128())))
    }

    /// Memory, in bytes.
    pub(super) fn bytes(&self) -> usize {
        let head = self.head.as_ref().map_or(0, PackedMatrix::bytes);
        self.embedding.bytes() + head + self.layers.iter().map(Layer::bytes).sum::<usize>()
    }
}

impl Layer {
    fn bytes(&self) -> usize {
        let mlp = |mlp: &Mlp| mlp.gate_up.bytes() + mlp.down.bytes();
        let feed_forward = match &self.feed_forward {
            FeedForwardWeights::Dense(dense) => mlp(dense),
            FeedForwardWeights::Experts { router, experts, .. } => {
                router.bytes() + experts.iter().map(mlp).sum::<usize>()
            }
        };
        self.qkv.weight.bytes() + self.output.weight.bytes() + feed_forward
    }
}

struct Loader<'a> {
    source: &'a dyn TensorSource,
    hash: Xxh3,
}

impl<'a> Loader<'a> {
    fn layer(&mut self, i: usize, config: &Config) -> Result<Layer, ModelError> {
        let Config { hidden, head_dim, .. } = *config;
        let name = |part: &str| format!("model.layers.{i}.{part}");
        let attention = |part: &str| name(&format!("self_attn.{part}"));
        let qk_norm = if config.qk_norm {
            let q_norm = self.vector(&attention("q_norm.weight"), head_dim)?;
            Some((q_norm, self.vector(&attention("k_norm.weight"), head_dim)?))
        } else {
            None
        };
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
        let (q, k, v) = (attention("q_proj"), attention("k_proj"), attention("v_proj"));
        let qkv = [(q.as_str(), queries), (k.as_str(), keys), (v.as_str(), keys)];
        Ok(Layer {
            input_norm: self.vector(&name("input_layernorm.weight"), hidden)?,
            qkv: self.linear(&qkv, hidden, config.qkv_bias)?,
            qk_norm,
            output: self.linear(&[(&attention("o_proj"), hidden)], queries, config.output_bias)?,
            post_norm: self.vector(&name("post_attention_layernorm.weight"), hidden)?,
            feed_forward: self.feed_forward(&name("mlp"), config.layers[i], hidden)?,
        })
    }

    fn feed_forward(
        &mut self,
        name: &str,
        kind: FeedForward,
        hidden: usize,
    ) -> Result<FeedForwardWeights, ModelError> {
        match kind {
            FeedForward::Dense { width } => Ok(FeedForwardWeights::Dense(self.mlp(name, width, hidden)?)),
            FeedForward::Experts { count, top, width, renormalise } => {
                let router = self.matrix(&[(&format!("{name}.gate.weight"), count)], hidden)?;
                let experts = (0..count)
                    .map(|e| self.mlp(&format!("{name}.experts.{e}"), width, hidden))
                    .collect::<Result<_, _>>()?;
                Ok(FeedForwardWeights::Experts { router, experts, top, renormalise })
            }
        }
    }

    fn mlp(&mut self, name: &str, width: usize, hidden: usize) -> Result<Mlp, ModelError> {
        let (gate, up) = (format!("{name}.gate_proj.weight"), format!("{name}.up_proj.weight"));
        Ok(Mlp {
            gate_up: self.matrix(&[(&gate, width), (&up, width)], hidden)?,
            down: self.matrix(&[(&format!("{name}.down_proj.weight"), hidden)], width)?,
        })
    }

    /// Products with a common input, stacked: `parts` are (name without `.weight`, outputs).
    fn linear(&mut self, parts: &[(&str, usize)], inputs: usize, bias: bool) -> Result<Linear, ModelError> {
        let names: Vec<String> = parts.iter().map(|(name, _)| format!("{name}.weight")).collect();
        let stacked: Vec<(&str, usize)> =
            names.iter().zip(parts).map(|(name, (_, outputs))| (name.as_str(), *outputs)).collect();
        let weight = self.matrix(&stacked, inputs)?;
        let bias = if bias {
            let biases = parts.iter().map(|(name, outputs)| self.vector(&format!("{name}.bias"), *outputs));
            Some(biases.collect::<Result<Vec<_>, _>>()?.concat())
        } else {
            None
        };
        Ok(Linear { weight, bias })
    }

    /// Matrices stacked by rows: `parts` are (name, rows). Kept as bf16 if all of them are.
    fn matrix(&mut self, parts: &[(&str, usize)], inputs: usize) -> Result<PackedMatrix, ModelError> {
        let mut tensors = Vec::new();
        for (name, rows) in parts {
            tensors.push((self.tensor(name, &[*rows, inputs])?, *rows));
        }
        let all_bf16 = tensors.iter().all(|(tensor, _)| tensor.kind == TensorType::Bf16);
        let kept_as = if all_bf16 { WeightType::Bf16 } else { WeightType::F32 };
        let outputs = parts.iter().map(|(_, rows)| rows).sum();
        Ok(PackedMatrix::pack(outputs, inputs, kept_as, |n, row| {
            let mut local = n;
            for (tensor, rows) in &tensors {
                if local < *rows {
                    return tensor.copy_row(local, row);
                }
                local -= rows;
            }
        }))
    }

    fn vector(&mut self, name: &str, width: usize) -> Result<Vec<f32>, ModelError> {
        let mut out = vec![0.0; width];
        self.tensor(name, &[width])?.copy_row(0, &mut out);
        Ok(out)
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor<'a>, ModelError> {
        let tensor = self.source.tensor(name, shape)?;
        self.hash.update(format!("{name} {:?} {shape:?}", tensor.kind).as_bytes());
        self.hash.update(&tensor.bytes);
        Ok(tensor)
    }
}
