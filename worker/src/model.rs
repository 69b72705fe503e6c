//! Models: from a Hugging Face checkpoint directory, built in, or random, to something that computes.
//!
//! `families.rs` reads what a model is into the shape of `config.rs`, `checkpoint.rs` and `random.rs` give
//! its tensors (`builtin.rs`: those of a checkpoint in the program), `loader.rs` packs them into
//! `weights.rs`, `decoder.rs` runs them, `cpu.rs` owns the memory; `cuda.rs` does both on a GPU. Tokenizer,
//! sampling and scheduling are elsewhere.

mod attention;
mod block_copy;
pub(crate) mod builtin;
mod cache_plan;
mod checkpoint;
mod config;
mod cpu;
mod cuda;
mod decoder;
mod error;
mod experts;
mod families;
mod feed_forward;
mod joint;
mod loader;
mod mla;
mod quantize;
mod random;
mod step_words;
mod stored;
mod synthetic;
mod tensor;
mod weights;

#[cfg(test)]
pub(crate) mod tests;

use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use keyway_kernels::moe::Placement;
use xxhash_rust::xxh3::xxh3_64;

use self::cache_plan::CachePlan;
use self::checkpoint::Checkpoint;
use self::config::Config;
pub use self::cpu::CpuBackend;
pub use self::cuda::{CudaBackend, CudaModel};
#[cfg(feature = "cuda")]
pub(crate) use self::cuda::{CudaRank, OpenMailboxes, RankSettings, WholeModel};
pub use self::error::ModelError;
#[cfg(feature = "cuda")]
pub(crate) use self::experts::Store;
pub(crate) use self::experts::{Attention, ExpertGroup, ExpertRank, GroupOptions, NoRanks, Supervisor};
pub use self::experts::{ExpertParallelOptions, RankError};
pub(crate) use self::joint::{Joint, JointError, RankOutput};
pub use self::quantize::Quantize;
use self::random::Random;
pub(crate) use self::step_words::StepWords;
use self::tensor::TensorSource;
use self::weights::Weights;
use crate::engine::backend::CacheGroup;

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// The model that knows Keyway's handbook.
    Builtin,
    /// The tiny model whose weights are drawn from a fixed seed.
    Random,
    /// A Hugging Face checkpoint directory: `config.json` and safetensors.
    Dir(PathBuf),
}

impl FromStr for ModelSource {
    type Err = Infallible;

    fn from_str(s: &str) -> Result<Self, Infallible> {
        Ok(match s {
            "builtin" => Self::Builtin,
            "random" => Self::Random,
            dir => Self::Dir(dir.into()),
        })
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Builtin => f.write_str("builtin"),
            Self::Random => f.write_str("random"),
            Self::Dir(path) => path.display().fmt(f),
        }
    }
}

/// What the rest of the worker needs to know of a model.
#[derive(Debug, Clone)]
pub struct ModelInfo {
    /// `keyway-builtin`, `keyway-random`, or the last component of the directory's path.
    pub name: String,
    /// Longest sequence, in tokens.
    pub max_model_len: usize,
    /// Width of a row of logits.
    pub vocab_size: usize,
    /// Tokens that end a generation, ascending.
    pub eos_token_ids: Vec<u32>,
    /// Equal ids mean equal logits, bit for bit. Names the backend, the number type of products (`f32`,
    /// `int8`, `int4`), the kernels' version, and (by a hash) the configuration and every weight.
    pub numerics_id: String,
    /// Memory taken by the weights, in bytes.
    pub weight_bytes: usize,
    /// What the backend's cache groups will be: each needs a block table, blocks come from one pool.
    pub cache_groups: Vec<CacheGroup>,
    /// Memory of one position of one block of the pool, in bytes: that of the layers of one group.
    pub kv_bytes_per_block_position: usize,
}

/// How the KV cache is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// Positions per block, a multiple of 16.
    pub block_size: usize,
    /// Number of blocks.
    pub num_blocks: usize,
}

/// A model with its weights in memory.
#[derive(Debug)]
pub struct LoadedModel {
    /// What it is.
    pub info: ModelInfo,
    config: Config,
    weights: Weights,
    /// Configuration and weights by a hash.
    weights_id: String,
}

impl LoadedModel {
    /// Reads and packs the weights: those in bf16, FP8 and MXFP4 stay so in memory, others become f32.
    pub fn load(source: &ModelSource) -> Result<Self, ModelError> {
        Self::load_quantized(source, Quantize::None)
    }

    /// [`LoadedModel::load`], with matrices quantised as [`Quantize`] says.
    pub fn load_quantized(source: &ModelSource, quantize: Quantize) -> Result<Self, ModelError> {
        Self::load_share(source, quantize, 1)
    }

    /// [`LoadedModel::load_quantized`] with rank 0's share of the experts among `ranks` ranks, and all else.
    /// It needs an `ExpertGroup` to compute.
    ///
    /// # Panics
    /// If there is no rank, or more than the fabric takes.
    pub fn load_share(source: &ModelSource, quantize: Quantize, ranks: usize) -> Result<Self, ModelError> {
        let (_, config, _) = open(source)?;
        let placements = experts::even(&config, ranks);
        Self::load_held(source, quantize, &placements, 0)
    }

    /// [`LoadedModel::load_share`] of another rank, as the weights are stored.
    #[cfg(feature = "cuda")]
    pub(crate) fn load_rank(source: &ModelSource, ranks: usize, rank: usize) -> Result<Self, ModelError> {
        let (_, config, _) = open(source)?;
        Self::load_held(source, Quantize::None, &experts::even(&config, ranks), rank)
    }

    /// What `rank` holds of the experts, and all else.
    fn load_held(
        source: &ModelSource,
        quantize: Quantize,
        placements: &[Option<Placement>],
        rank: usize,
    ) -> Result<Self, ModelError> {
        let (name, config, tensors) = open(source)?;
        let held = |layer: usize, expert: usize| {
            placements[layer].as_ref().is_none_or(|placement| placement.holds(rank, expert))
        };
        let (weights, id) = Weights::load(&*tensors, &config, quantize, &held)?;
        Ok(Self::new(name, config, weights, quantize, id))
    }

    /// Errs with the key in `config.json` that keeps a model from being computed on a GPU. Reads no weights.
    pub fn check_gpu(source: &ModelSource, quantize: Quantize) -> Result<(), ModelError> {
        cuda::check(&config_of(source)?, quantize)
    }

    /// Errs with what keeps a model's experts from being shared by so many GPUs' ranks. Reads no weights.
    #[cfg(feature = "cuda")]
    pub(crate) fn check_gpu_ranks(source: &ModelSource, ranks: usize) -> Result<(), ModelError> {
        cuda::check_ranks(&config_of(source)?, ranks)
    }

    /// By layer, how many experts it has; 0 without.
    pub fn experts(&self) -> Vec<usize> {
        experts::counts(&self.config)
    }

    /// What every rank needs to run attention too, over a KV cache of its own.
    pub(crate) fn attention(&self, kv: KvLayout) -> Attention {
        let hash = xxh3_64(self.info.numerics_id.as_bytes());
        Attention { kv, weights: [hash as u32, (hash >> 32) as u32] }
    }

    /// Words of a row of what a rank's part of a joint step comes to.
    pub(crate) fn output_words(&self) -> usize {
        self.config.vocab_size + self.config.hidden
    }

    /// Words of a message between ranks that takes `tokens` tokens of any layer at once.
    pub fn words_for(&self, tokens: usize) -> usize {
        experts::words_for(&self.config, tokens)
    }

    fn new(name: String, config: Config, weights: Weights, quantize: Quantize, weights_id: String) -> Self {
        let info = ModelInfo {
            numerics_id: format!("cpu-{quantize}-k{}-{weights_id}", keyway_kernels::NUMERICS_VERSION),
            weight_bytes: weights.bytes(),
            kv_bytes_per_block_position: kv_bytes_per_block_position(&config),
            ..describe(name, &config)
        };
        Self { info, config, weights, weights_id }
    }

    /// Makes it able to compute; takes the KV cache's memory at once.
    pub fn into_backend(self, kv: KvLayout) -> Result<CpuBackend, ModelError> {
        CpuBackend::new(self.config, self.weights, kv)
    }
}

/// A model's name, shape and tensors.
fn open(source: &ModelSource) -> Result<(String, Config, Box<dyn TensorSource + Send>), ModelError> {
    let config = config_of(source)?;
    Ok(match source {
        ModelSource::Builtin => ("keyway-builtin".into(), config, Box::new(builtin::checkpoint()?)),
        ModelSource::Random => ("keyway-random".into(), config, Box::new(Random)),
        ModelSource::Dir(dir) => (directory_name(dir), config, Box::new(Checkpoint::open(dir)?)),
    })
}

/// What a configuration says of a model; what its backend decides is left empty.
fn describe(name: String, config: &Config) -> ModelInfo {
    ModelInfo {
        name,
        max_model_len: config.max_positions,
        vocab_size: config.vocab_size,
        eos_token_ids: config.eos_token_ids.clone(),
        numerics_id: String::new(),
        weight_bytes: 0,
        cache_groups: CachePlan::new(config.kept()).groups,
        kv_bytes_per_block_position: 0,
    }
}

/// On the CPU, which keeps f32.
fn kv_bytes_per_block_position(config: &Config) -> usize {
    CachePlan::new(config.kept()).slots * config.attention.cache_bytes()
}

fn config_of(source: &ModelSource) -> Result<Config, ModelError> {
    match source {
        ModelSource::Builtin => builtin::config(),
        ModelSource::Random => Ok(random::config()),
        ModelSource::Dir(dir) => Config::read(dir),
    }
}

/// The last component of `dir`, also where `dir` is written as `.` or `..`.
fn directory_name(dir: &Path) -> String {
    let absolute = dir.canonicalize();
    let name = dir.file_name().or_else(|| absolute.as_ref().ok()?.file_name());
    name.map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned())
}
