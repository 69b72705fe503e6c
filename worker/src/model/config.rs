//! What a model is: the checked shape of a decoder, put together from a small set of parts. `families.rs`
//! makes it from `config.json`; what cannot be said here is not computed.

mod raw;
mod read;
mod rope;

use std::path::Path;

use keyway_kernels::elementwise::ClampedGate;
use keyway_kernels::kv_cache::{KvCache, KvShape};
use keyway_kernels::moe::Routing;
use keyway_kernels::rope::{Pairing, RopeScaling};

pub(super) use self::raw::{RawConfig, RawRope, RawWindow, TokenIds};
pub(super) use self::read::{refuse, size};
use super::{ModelError, families};
use crate::engine::backend::CacheGroup;

/// A decoder's shape. Its `Debug` form enters the numerics id: every field that changes a result belongs
/// here.
#[derive(Debug, Clone)]
pub(super) struct Config {
    pub(super) vocab_size: usize,
    /// Width of the residual stream.
    pub(super) hidden: usize,
    /// Positions the model was made for.
    pub(super) max_positions: usize,
    pub(super) norm_eps: f32,
    pub(super) attention: Attention,
    pub(super) rope: RopeShape,
    pub(super) layers: Vec<LayerShape>,
    /// The head is the embedding.
    pub(super) tied_embeddings: bool,
    pub(super) names: &'static Names,
    pub(super) quantisation: Quantisation,
    pub(super) eos_token_ids: Vec<u32>,
}

/// What layers differ in.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerShape {
    /// How many positions a token sees, its own among them; `None`: all before it.
    pub(super) window: Option<usize>,
    pub(super) feed_forward: FeedForward,
}

/// How tokens see each other; the same in all layers but for the window.
#[derive(Debug, Clone, Copy)]
pub(super) enum Attention {
    Grouped(Grouped),
    Latent(Latent),
}

/// Grouped-query attention (arXiv 2305.13245).
#[derive(Debug, Clone, Copy)]
pub(super) struct Grouped {
    /// Heads of queries, a multiple of `kv_heads`.
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) qkv_bias: bool,
    pub(super) output_bias: bool,
    /// Every query and key head is normalised before its rotation (Qwen3).
    pub(super) qk_norm: bool,
    /// Each query head has a logit that joins the softmax's denominator only (gpt-oss).
    pub(super) sinks: bool,
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
#[derive(Debug, Clone, Copy)]
pub(super) struct Latent {
    pub(super) heads: usize,
    /// Queries go through a bottleneck of this width.
    pub(super) query_rank: Option<usize>,
    /// Width of the latent that keys and values are made from.
    pub(super) rank: usize,
    /// Elements of a query or key head that are not rotated.
    pub(super) nope_dim: usize,
    /// Elements that are; the key's are shared by all heads.
    pub(super) rope_dim: usize,
    pub(super) value_dim: usize,
    /// Of the projections to the two bottlenecks, and of the output.
    pub(super) bias: bool,
    /// What scores are multiplied by.
    pub(super) scale: f32,
}

/// How a token's position turns queries and keys, and which of their elements are pairs.
#[derive(Debug, Clone, Copy)]
pub(super) struct RopeShape {
    pub(super) theta: f64,
    pub(super) scaling: RopeScaling,
    pub(super) pairing: Pairing,
}

/// The feed-forward part of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) enum FeedForward {
    /// One gated network of this inner width.
    Dense {
        width: usize,
    },
    Experts(Experts),
}

/// A mixture of experts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Experts {
    pub(super) count: usize,
    /// Inner width of one.
    pub(super) width: usize,
    pub(super) routing: Routing,
    /// A bias takes part in the choice but not in the weights (DeepSeek-V3).
    pub(super) correction_bias: bool,
    /// Router and experts have biases (gpt-oss).
    pub(super) biases: bool,
    pub(super) gate: Gate,
    /// Inner width of a network that serves every token beside the chosen ones (DeepSeek).
    pub(super) shared_width: Option<usize>,
}

/// The activation between a gated network's two products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Gate {
    /// Most families': `silu(gate) * up`, nothing clamped.
    Silu,
    /// gpt-oss': both clamped, `gate * sigmoid(alpha gate) * (up + 1)`.
    Clamped(ClampedGate),
}

/// How a family's checkpoints name what differs between families.
#[derive(Debug)]
pub(super) struct Names {
    /// A layer's feed-forward part.
    pub(super) feed_forward: &'static str,
    /// The router in it.
    pub(super) router: &'static str,
    pub(super) experts: ExpertNames,
}

/// How a layer's experts are stored.
#[derive(Debug)]
pub(super) enum ExpertNames {
    /// Three matrices each: gate, up and down.
    Apart([&'static str; 3]),
    /// All in two tensors, gate and up rows interleaved (gpt-oss).
    Fused,
}

/// What weights may be stored as beside F32, F16 and BF16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quantisation {
    None,
    /// E4M3 with an f32 scale per 128 by 128 (DeepSeek-V3, Qwen3), where a tensor's type says so.
    Fp8Blocks,
    /// The experts' matrices in MXFP4 (gpt-oss).
    Mxfp4Experts,
}

impl Config {
    /// Reads `config.json`, and `generation_config.json` if there is one.
    pub(super) fn read(dir: &Path) -> Result<Self, ModelError> {
        let config = families::config(&read::json(&dir.join("config.json"))?)?;
        Ok(config.with_ends(read::generation_eos(dir)?))
    }

    /// The same from the text of a `config.json` that names every end token.
    pub(super) fn from_json(text: &str) -> Result<Self, ModelError> {
        let config = families::config(&read::parsed(Path::new("config.json"), text.as_bytes())?)?;
        Ok(config.with_ends(Vec::new()))
    }

    /// With these end tokens too, all of them ascending.
    fn with_ends(mut self, more: Vec<u32>) -> Self {
        self.eos_token_ids.extend(more);
        self.eos_token_ids.sort_unstable();
        self.eos_token_ids.dedup();
        self
    }

    /// What each layer keeps in the KV cache.
    pub(super) fn kept(&self) -> impl Iterator<Item = CacheGroup> {
        self.layers.iter().map(|layer| match (self.attention, layer.window) {
            (Attention::Latent(_), _) => CacheGroup::MlaLatent,
            (Attention::Grouped(_), Some(window)) => CacheGroup::SlidingWindow { window },
            (Attention::Grouped(_), None) => CacheGroup::Full,
        })
    }
}

impl Attention {
    /// Elements of a head that are rotated.
    pub(super) fn rope_dim(&self) -> usize {
        match self {
            Self::Grouped(grouped) => grouped.head_dim,
            Self::Latent(latent) => latent.rope_dim,
        }
    }

    /// The KV cache of one layer; `None` if there is not enough memory.
    pub(super) fn new_cache(&self, block_size: usize, num_blocks: usize) -> Option<KvCache> {
        let shape = self.cache_shape(block_size, num_blocks);
        match self {
            Self::Grouped(_) => KvCache::new(shape),
            Self::Latent(_) => KvCache::new_latent(shape),
        }
    }

    /// Bytes that one position takes in the cache of one layer.
    pub(super) fn cache_bytes(&self) -> usize {
        let shape = self.cache_shape(1, 1);
        match self {
            Self::Grouped(_) => shape.bytes_per_token(),
            Self::Latent(_) => shape.latent_bytes_per_token(),
        }
    }

    fn cache_shape(&self, block_size: usize, num_blocks: usize) -> KvShape {
        let (kv_heads, key_dim, value_dim) = match self {
            Self::Grouped(grouped) => (grouped.kv_heads, grouped.head_dim, grouped.head_dim),
            Self::Latent(latent) => (1, latent.rank + latent.rope_dim, latent.rank),
        };
        KvShape { kv_heads, key_dim, value_dim, block_size, num_blocks }
    }
}
