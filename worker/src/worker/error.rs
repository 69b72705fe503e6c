//! Why a worker cannot start.

use std::error::Error;
use std::net::SocketAddr;

use keyway_kernels::fabric::RANKS_MAX;
use keyway_text::TextError;

use crate::engine::generation_config::GenerationConfigError;
use crate::engine::kv_events::KvEventsError;
use crate::kv_transfer::KvTransferError;
use crate::limits::{EXPERT_DEADLINE_MIN, REQUEST_MEMORY_LEAST};
use crate::model::ModelError;

/// Why a worker did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The address cannot be bound.
    #[error("cannot listen on {addr}: {source}")]
    Listen {
        /// The address asked for.
        addr: SocketAddr,
        /// Why the system refuses it, such as a port that is in use.
        source: std::io::Error,
    },
    /// The addresses for KV events cannot be bound.
    #[error(transparent)]
    KvEvents(#[from] KvEventsError),
    /// KV cannot go between this worker and others.
    #[error(transparent)]
    KvTransfer(#[from] KvTransferError),
    /// Options that cannot be, or not together.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The model cannot be loaded.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model's tokenizer or chat template cannot be loaded.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The model's generation defaults cannot be loaded.
    #[error(transparent)]
    GenerationConfig(#[from] GenerationConfigError),
    /// The engine's thread, its metrics or its group of ranks cannot be started.
    #[error("cannot start the engine: {0}")]
    Engine(#[source] Box<dyn Error + Send + Sync>),
}

impl StartError {
    pub(super) fn engine(error: impl Error + Send + Sync + 'static) -> Self {
        Self::Engine(Box::new(error))
    }
}

/// Options that cannot be, or not together. Each message names the option to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// A count or size of nothing.
    #[error("the {0} must be at least 1")]
    Zero(&'static str),
    /// A share of memory that is none.
    #[error("memory-utilization {0} must be above 0 and at most 1")]
    MemoryUtilization(f64),
    /// Less memory for requests, in bytes, than one of them may need.
    #[error("request-memory {0} must be at least {least}MiB", least = REQUEST_MEMORY_LEAST >> 20)]
    RequestMemory(usize),
    /// Fewer tokens a step than sequences that run in it.
    #[error(
        "max-batched-tokens ({tokens}) must not be below max-running ({running}): each running sequence needs a \
         token per step"
    )]
    TokensBelowRunning {
        /// `max-batched-tokens`.
        tokens: usize,
        /// `max-running`.
        running: usize,
    },
    /// More ranks than a group may have.
    #[error("expert-parallel-size {0} must be at most {RANKS_MAX}")]
    Ranks(usize),
    /// Ranks that share experts are processes of Linux.
    #[error("expert-parallel-size needs Linux")]
    NeedsLinux,
    /// A rank without an expert.
    #[error("{model} has {experts} experts: expert-parallel-size {ranks} must be at most {most}", most = (*experts).max(1))]
    RanksWithoutExpert {
        /// The model's name.
        model: String,
        /// Experts of the layer that has the fewest.
        experts: usize,
        /// The ranks asked for.
        ranks: usize,
    },
    /// How long ranks are waited for is too short.
    #[error("expert-parallel-deadline must be at least {EXPERT_DEADLINE_MIN:?}")]
    Deadline,
    /// Ranks shall run attention, and there is one.
    #[error("data-parallel-attention needs expert-parallel-size or expert-parallel-hosts")]
    AttentionOfOneRank,
    /// Each rank's engine has a KV cache of its own.
    #[error("with data-parallel-attention use kv-cache-memory, of each engine, not memory-utilization")]
    AttentionMemory,
    /// What a rank is told of a step does not go into a message.
    #[error(
        "with data-parallel-attention a step may take {mib} MiB of block tables, more than a message: lower \
         max-running or max-model-len"
    )]
    AttentionStep {
        /// MiB of the largest step's block tables.
        mib: usize,
    },
    /// A GPU shall compute that cannot.
    #[error("{0}")]
    Gpu(#[source] Box<dyn Error + Send + Sync>),
    /// The CPU computes, and keeps no KV in FP8.
    #[error("kv-cache-dtype fp8 is a GPU's, and the CPU computes: leave it out, or run with --device cuda")]
    Fp8OnCpu,
    /// A KV cache that holds no sequence.
    #[error("num-kv-blocks {blocks} is too few for {model}: even a short sequence needs {needed}")]
    FewBlocks {
        /// The KV blocks asked for.
        blocks: usize,
        /// The model's name.
        model: String,
        /// KV blocks of a sequence of one token.
        needed: usize,
    },
    /// A longer sequence than the model was made for.
    #[error("max-model-len {len} is more than the {most} tokens {model} was made for")]
    BeyondModel {
        /// `max-model-len`, in tokens.
        len: usize,
        /// The model's own, in tokens.
        most: usize,
        /// The model's name.
        model: String,
    },
    /// A longer sequence than the KV cache holds.
    #[error("{blocks} KV blocks hold {capacity} tokens: max-model-len {len} needs num-kv-blocks {needed}")]
    BeyondCache {
        /// KV blocks of the cache.
        blocks: usize,
        /// Tokens of the longest sequence that they hold.
        capacity: usize,
        /// `max-model-len`, in tokens.
        len: usize,
        /// KV blocks of a sequence of that length.
        needed: usize,
    },
    /// A share of free memory, on a system that does not tell it.
    #[error("this system does not say how much memory is free: use kv-cache-memory")]
    FreeMemory,
}
